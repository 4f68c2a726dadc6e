//! Webhooks.

pub mod headers;
pub mod ladder;
pub mod payload;
pub mod sender;
pub mod signature;
pub mod target;
