//! Pages and machine-read addresses outside the public API.

pub mod docs;
pub mod health;
pub mod pages;
