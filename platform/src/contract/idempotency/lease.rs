//! Keys in Redis: a lease while a request runs, then a copy of its answer.
//!
//! A key is captured by `SET NX` with a token of its owner, for 60 seconds unless set otherwise, renewed
//! while the request runs. What is done to a lease afterwards is done by scripts that look at the token first, so nobody
//! touches the lease of another. Nothing here decides whether a request may run: that is the SQL lock
//! and the SQL record. A lease saves the database those who come while the first still runs, and a copy
//! those who come later; without Redis, or after it lost its memory, all go on to SQL.

use std::{sync::LazyLock, time::Duration};

use redis::Script;
use ulid::Ulid;

use super::{Asked, record::Record};
use crate::{db::Timestamp, shared::Shared};

const LEASE: &str = "lease:";
const ANSWER: &str = "answer:";

/// Lengthens the lease of an owner, or takes it again where it was lost.
static RENEW: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local held = redis.call('GET', KEYS[1]) \
         if held == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end \
         if not held then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) return 1 end \
         return 0",
    )
});

/// Puts an answer in the place of its owner's lease, or where nothing is.
static KEEP: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local held = redis.call('GET', KEYS[1]) \
         if held and held ~= ARGV[1] then return 0 end \
         redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) return 1",
    )
});

/// Removes the lease of an owner.
static RELEASE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
    )
});

/// What came of asking for a key.
#[derive(Debug)]
pub enum Capture {
    /// The caller may go on to SQL. It has the lease, unless Redis is out of reach or holds a copy that is
    /// over; then nothing that it does to the lease takes effect.
    Go(Lease),
    /// The request was answered before.
    Answered(Box<Record>),
    /// Another request has the lease.
    Held,
}

/// Where keys are captured.
#[derive(Clone, Debug)]
pub struct Leases {
    shared: Shared,
    lasts: Duration,
}

/// A key captured for one request.
#[derive(Debug)]
pub struct Lease {
    shared: Shared,
    lasts: Duration,
    name: String,
    token: String,
}

impl Leases {
    /// Leases in Redis that last so long without being renewed.
    pub fn new(shared: Shared, lasts: Duration) -> Self {
        Self { shared, lasts }
    }

    /// Captures the key of what is asked.
    pub async fn capture(&self, asked: &Asked) -> Capture {
        let lease = Lease {
            shared: self.shared.clone(),
            lasts: self.lasts,
            name: format!("botix:idempotency:{}:{}", asked.project, asked.key.as_str()),
            token: format!("{LEASE}{}", Ulid::generate()),
        };
        let mut pipeline = redis::pipe();
        pipeline
            .cmd("SET")
            .arg(&lease.name)
            .arg(&lease.token)
            .arg("NX")
            .arg("PX")
            .arg(millis(self.lasts))
            .ignore()
            .get(&lease.name);
        let held: Result<(Option<Vec<u8>>,), _> = self.shared.run(&pipeline).await;
        let Ok((Some(held),)) = held else {
            // Out of reach, or gone between the two commands: SQL decides.
            return Capture::Go(lease);
        };
        if held == lease.token.as_bytes() {
            return Capture::Go(lease);
        }
        match held.strip_prefix(ANSWER.as_bytes()) {
            None => Capture::Held,
            Some(copy) => match Record::from_bytes(copy) {
                Some(record) if !record.is_expired(Timestamp::now()) => {
                    Capture::Answered(Box::new(record))
                }
                // Over, or written by another version: SQL knows.
                _ => Capture::Go(lease),
            },
        }
    }
}

impl Lease {
    /// Runs `work`, renewing the lease meanwhile.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        let renewing = async {
            loop {
                tokio::time::sleep(self.lasts / 3).await;
                let mut script = RENEW.key(&self.name);
                script.arg(&self.token).arg(millis(self.lasts));
                // Lost to Redis or to another owner: the SQL lock still holds.
                let _: Result<i64, _> = self.shared.invoke(&script).await;
            }
        };
        tokio::select! {
            biased;
            done = work => done,
            () = renewing => unreachable!("renewing has no end"),
        }
    }

    /// Leaves a copy of the committed answer in place of the lease.
    pub async fn keep(self, record: &Record) {
        let left = record.remaining(Timestamp::now());
        if left < Duration::from_secs(1) {
            return self.release().await;
        }
        let copy = [ANSWER.as_bytes(), &record.to_bytes()].concat();
        let mut script = KEEP.key(&self.name);
        script.arg(&self.token).arg(copy).arg(millis(left));
        let _: Result<i64, _> = self.shared.invoke(&script).await;
    }

    /// Gives the key back: nothing was executed.
    pub async fn release(self) {
        let mut script = RELEASE.key(&self.name);
        script.arg(&self.token);
        let _: Result<i64, _> = self.shared.invoke(&script).await;
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
