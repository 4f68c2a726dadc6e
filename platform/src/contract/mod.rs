//! What every route shares, and no business.
//!
//! A request passes [`layer`]: authentication, scope, then for a mutation [`idempotency`], then the
//! typed handler. Handlers take [`Body`] and [`Work`] or [`Later`], give [`Reply`], [`Created`], [`Accepted`] or
//! [`NoContent`], and fail with [`ApiError`], whose codes come from the one table in [`error`]. A list is
//! declared with [`page::Listed`] and walks by the signed cursors of [`cursor`]. What ends is declared as
//! a [`deprecation`] and announced in the [`changelog`].

pub mod auth;
pub mod changelog;
pub mod cursor;
pub mod deprecation;
pub mod error;
pub mod idempotency;
pub mod layer;
pub mod page;
pub mod payload;
pub mod rate_limit;
pub mod request_id;
pub mod reserved_headers;
pub mod routes;
pub mod spec;
pub mod text;

pub use auth::Caller;
pub use error::{ApiError, Code};
pub use idempotency::{Later, Work};
pub use payload::{Accepted, Action, Body, Created, NoContent, RawJson, Reply};
