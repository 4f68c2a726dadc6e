//! The room `console`.
