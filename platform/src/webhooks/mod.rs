//! Webhooks: from what happened to a receiver's answer.
//!
//! `events::publish` writes an event in the caller's transaction and [`planning`] its deliveries and their jobs,
//! [`publishing`] those of many requests in one; [`dispatch`] begins at once what this process can make itself. The [`worker`]
//! makes each attempt: [`payload`] → the tenant's plugin → [`headers`] and [`signature`] → [`target`]
//! and [`sender`] → [`ladder`] → one transaction with the attempt and what follows. Beside the ladder
//! people send again by [`repeats`] and [`redeliveries`]; [`signals`] tell tenants of endpoints that
//! fail, [`gauges`] tell operators of the queue, and [`retention`] removes what has had its time.

pub mod attempts;
pub mod chores;
pub mod custom_headers;
pub mod dead_letters;
pub mod deliveries;
pub mod dispatch;
pub mod endpoints;
pub mod event_types;
pub mod events;
pub mod gauges;
pub mod headers;
pub mod inspector;
pub mod ladder;
pub mod patterns;
pub mod payload;
pub mod planning;
pub mod publishing;
pub mod redeliveries;
pub mod repeats;
pub mod rescue;
pub mod retention;
mod rooms;
pub mod sender;
mod settle;
pub mod signals;
pub mod signature;
pub mod standing;
pub mod target;
mod tidy;
pub mod worker;

pub use rooms::{Rooms, Running};
pub use settle::Together;
