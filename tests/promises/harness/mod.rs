//! What every promise needs: a server, a database, a client, a receiver and a wire that can be cut.

pub mod api;
pub mod command;
pub mod postgres;
pub mod receiver;
pub mod redis;
pub mod server;
pub mod store;
pub mod tcp_proxy;

use std::time::{Duration, Instant};

/// The stores the product runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Sqlite,
    Postgres,
    /// Both behind wires that a test can cut; left alone, they delay what passes a little.
    PostgresAndRedis,
}

/// Turns each named `async fn(Backend)` into two tests, `name::sqlite` and `name::postgres`.
macro_rules! on_both_databases {
    ($($promise:ident),+ $(,)?) => {$(
        mod $promise {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                super::$promise($crate::harness::Backend::Sqlite).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                super::$promise($crate::harness::Backend::Postgres).await;
            }
        }
    )+};
}
pub(crate) use on_both_databases;

/// As `on_both_databases!`, with a third test `name::postgres_and_redis`.
macro_rules! on_every_store {
    ($($promise:ident),+ $(,)?) => {$(
        mod $promise {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                super::$promise($crate::harness::Backend::Sqlite).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                super::$promise($crate::harness::Backend::Postgres).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres_and_redis() {
                super::$promise($crate::harness::Backend::PostgresAndRedis).await;
            }
        }
    )+};
}
pub(crate) use on_every_store;

/// Turns each named `async fn(Backend, Wire)` into a test for each way in which the wire to `PostgreSQL`
/// fails, without Redis and with it: `name::cut` … `name::half_open_with_redis`.
macro_rules! on_every_fault {
    ($($promise:ident),+ $(,)?) => {$(
        mod $promise {
            use crate::harness::Backend::{Postgres, PostgresAndRedis};
            use crate::harness::tcp_proxy::Wire;

            crate::harness::on_every_fault!(@ $promise
                cut Postgres Cut,
                frozen Postgres Frozen,
                blackhole Postgres Blackhole,
                half_open Postgres HalfOpen,
                cut_with_redis PostgresAndRedis Cut,
                frozen_with_redis PostgresAndRedis Frozen,
                blackhole_with_redis PostgresAndRedis Blackhole,
                half_open_with_redis PostgresAndRedis HalfOpen,
            );
        }
    )+};
    (@ $promise:ident $($name:ident $backend:ident $fault:ident),+ $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            super::$promise($backend, Wire::$fault).await;
        }
    )+};
}
pub(crate) use on_every_fault;

/// How long a test waits for something that should happen before it calls it missing. Generous: it
/// is no assertion about speed, only the point where waiting on makes no sense.
pub const DEADLINE: Duration = Duration::from_mins(1);

const POLL: Duration = Duration::from_millis(25);

/// Asks `look` again and again until it finds something.
pub async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Option<T>) -> T {
    eventually_within(DEADLINE, what, look).await
}

pub async fn eventually_within<T>(
    deadline: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Option<T>,
) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(
            start.elapsed() < deadline,
            "waited {deadline:?} in vain: {what}"
        );
        tokio::time::sleep(POLL).await;
    }
}

/// A fresh idempotency key: a version 4 UUID in lower case.
pub fn fresh_key() -> String {
    uuid::Builder::from_random_bytes(rand::random())
        .into_uuid()
        .to_string()
}

/// A fresh ULID in upper case, without a prefix.
pub fn fresh_ulid() -> String {
    const CROCKFORD: &[u8] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    let mut ulid = String::from("0");
    for byte in rand::random::<[u8; 25]>() {
        ulid.push(char::from(CROCKFORD[usize::from(byte % 32)]));
    }
    ulid
}

/// A fresh phone number in E.164.
pub fn fresh_phone() -> String {
    format!("+1{:010}", rand::random::<u64>() % 10_000_000_000)
}

/// Whether `text` is `prefix_` and a ULID in upper-case Crockford characters.
pub fn is_id(prefix: &str, text: &str) -> bool {
    let Some(ulid) = text
        .strip_prefix(prefix)
        .and_then(|rest| rest.strip_prefix('_'))
    else {
        return false;
    };
    ulid.len() == 26
        && matches!(ulid.as_bytes()[0], b'0'..=b'7')
        && ulid
            .bytes()
            .all(|b| matches!(b, b'0'..=b'9' | b'A'..=b'H' | b'J' | b'K' | b'M' | b'N' | b'P'..=b'T' | b'V'..=b'Z'))
}

/// Whether `text` is RFC 3339 in UTC with exactly six digits of microseconds.
pub fn is_timestamp(text: &str) -> bool {
    let shape: String = text
        .chars()
        .map(|c| if c.is_ascii_digit() { '9' } else { c })
        .collect();
    shape == "9999-99-99T99:99:99.999999Z"
}
