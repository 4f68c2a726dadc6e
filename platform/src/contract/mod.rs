//! The room `contract`.
