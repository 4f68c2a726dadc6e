//! The room `resources`.
