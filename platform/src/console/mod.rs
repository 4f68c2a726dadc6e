//! Pages and machine-read addresses outside the public API; [`developers`] is the one that asks for a key.

pub mod changelog;
pub mod developers;
pub mod docs;
pub mod health;
pub mod pages;
