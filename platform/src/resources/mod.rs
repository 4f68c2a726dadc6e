//! The business: a file per resource with its types, handlers and SQL.
//!
//! Resources tell the webhooks what happened through [`events::publish`](crate::webhooks::events::publish)
//! and know nothing else of them.

pub mod contacts;
pub mod projects;
pub mod values;
