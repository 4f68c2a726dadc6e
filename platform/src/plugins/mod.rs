//! Plugins.

pub mod engine;
pub mod inspect;
