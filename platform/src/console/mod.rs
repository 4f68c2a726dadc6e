//! Pages and machine-read addresses outside the public API.

pub mod changelog;
pub mod developers;
pub mod docs;
pub mod health;
pub mod pages;
