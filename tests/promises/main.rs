//! The promises of the public contract, kept through the public door.
//!
//! Every test starts the real `botix` program on a free port with a store of its own and talks HTTP
//! to it; nothing is mocked and no code of the product is linked in. Faults are made from outside:
//! a lock held by another database connection, a cut wire, a `kill -9`, a receiver that hangs.
//! Where a promise concerns the store it runs on each, as `…::sqlite`, `…::postgres` and, where Redis
//! has a part in it, `…::postgres_and_redis`. `PostgreSQL` comes from `tests/run`, which says where it is
//! in `BOTIX_TEST_POSTGRES_URL`; a test that needs a Redis starts one.

mod harness;

#[path = "../fixtures/plugins.rs"]
mod fixtures;

mod contacts;
mod cursors;
mod deprecation;
mod developers;
mod errors;
mod idempotency;
mod inspector;
mod plugins;
mod program;
mod rate_limit;
mod spec;
mod webhooks;
