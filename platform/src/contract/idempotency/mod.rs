//! Safe retries: one execution per key, and its answer again for whoever asks again.
//!
//! The answer and the business write commit in one transaction. A mutation takes the key's lock (an
//! advisory lock in PostgreSQL, the single writer in SQLite, and in both a set of the keys in flight in
//! this process), looks for a record, and runs the handler on the open transaction ([`handler`]). A 2xx
//! commits together with its record. A decided 4xx rolls everything back and stores its record alone.
//! Anything else rolls back and stores nothing. The primary key `(project_id, key)` is the backstop:
//! whoever loses there replays. A handler whose answer does not depend on the store leaves its write
//! instead, and lock, look, write and record of many such requests are one statement. All of it runs in a
//! task of its own, so that a client that hangs up cannot stop it half-way.
//! With Redis, a key is captured there first (`lease`): those who come while it is held, or after it was
//! answered, are told so without the lock. Whether a request may run is decided by SQL alone.

mod handler;
mod key;
mod lease;
#[cfg(test)]
mod model;
pub(crate) mod record;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::FutureExt as _;
use poem::{Endpoint, Request, Response};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

pub use handler::{Deferred, Later, Work};
pub use key::{Key, fingerprint};
pub use record::Record;

use crate::{
    config,
    contract::{ApiError, Code, auth::ProjectId, request_id},
    db::{self, Db, Sealer, Shares, Timestamp, Tx},
    shared::Shared,
};
use handler::{Decided, Stage};
use lease::{Capture, Lease, Leases};
use record::Answer;

/// How many mutations this process is executing.
const IN_FLIGHT: &str = "botix_mutations_in_flight";

/// How long a handler may take, renewing its lease meanwhile.
const HANDLER_PATIENCE: Duration = Duration::from_secs(40);

/// What is asked, and under which key.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The project of the caller.
    pub project: ProjectId,
    /// The key.
    pub key: Key,
    /// The fingerprint of the request.
    pub fingerprint: [u8; 32],
    /// Where it was asked.
    pub path: String,
}

/// Whether mutations are executed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// As the contract says.
    Full,
    /// Keys are read and nothing is kept: what the bench measures the layer against.
    None,
}

/// Executes mutations once.
#[derive(Clone, Debug)]
pub struct Idempotency {
    protection: Protection,
    db: Db,
    leases: Option<Leases>,
    sealer: Sealer,
    ttl: Duration,
    in_flight: Arc<Mutex<HashSet<(ProjectId, Key)>>>,
    /// How many of the connections a project may have for its mutations.
    shares: Shares<ProjectId>,
    tasks: TaskTracker,
}

/// A key that this process is working on; free again when dropped.
struct InFlight<'i>(&'i Mutex<HashSet<(ProjectId, Key)>>, (ProjectId, Key));

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        metrics::gauge!(IN_FLIGHT).decrement(1.0);
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.1);
    }
}

impl Idempotency {
    /// Over this store, and Redis where there is one; executions are tracked by `tasks`. A project may have
    /// `share` of the store's connections at a time.
    pub fn new(
        protection: Protection,
        db: Db,
        shared: Option<Shared>,
        sealer: Sealer,
        settings: &config::Idempotency,
        share: usize,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            protection,
            db,
            leases: shared.map(|shared| Leases::new(shared, settings.lease)),
            sealer,
            ttl: settings.ttl,
            in_flight: Arc::default(),
            shares: Shares::new(share),
            tasks,
        }
    }

    /// Executes `request` on `inner`, or replays what it answered before.
    ///
    /// The caller may be dropped at any moment; the execution goes on to its commit or rollback.
    pub async fn execute<E: Endpoint + 'static>(
        &self,
        inner: Arc<E>,
        asked: Asked,
        request: Request,
        body: bytes::Bytes,
    ) -> Result<Response, ApiError> {
        let this = self.clone();
        // Large, and moved from hand to hand: on the heap at once.
        let work = Box::pin(async move {
            if this.protection == Protection::None {
                return this.run_unprotected(&*inner, &asked, request, body).await;
            }
            let _in_flight = this.claim(&asked)?;
            let lease = match this.capture(&asked).await? {
                Captured::Go(lease) => lease,
                Captured::Replay(response) => return Ok(response),
            };
            let Some(lease) = lease else {
                let ran = this.run(&*inner, &asked, request, body).await?;
                return Ok(ran.response);
            };
            let running = Box::pin(this.run(&*inner, &asked, request, body));
            match lease.during(running).await {
                Ok(Ran {
                    response,
                    record: Some(record),
                }) => {
                    // Nobody needs to wait: until the copy is there, the SQL record answers.
                    this.tasks.spawn(async move { lease.keep(&record).await });
                    Ok(response)
                }
                undecided => {
                    lease.release().await;
                    undecided.map(|ran| ran.response)
                }
            }
        });
        let work = request_id::within(request_id::current(), work.in_current_span());
        self.tasks.spawn(work).await.map_err(ApiError::internal)?
    }

    fn claim(&self, asked: &Asked) -> Result<InFlight<'_>, ApiError> {
        let entry = (asked.project, asked.key.clone());
        let mut in_flight = self
            .in_flight
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if in_flight.insert(entry.clone()) {
            metrics::gauge!(IN_FLIGHT).increment(1.0);
            Ok(InFlight(&self.in_flight, entry))
        } else {
            Err(in_progress())
        }
    }

    /// Captures the key in Redis, where there is one.
    async fn capture(&self, asked: &Asked) -> Result<Captured, ApiError> {
        let Some(leases) = &self.leases else {
            return Ok(Captured::Go(None));
        };
        match leases.capture(asked).await {
            Capture::Go(lease) => Ok(Captured::Go(Some(lease))),
            Capture::Answered(record) => {
                let response = record.replay(&self.sealer, asked)?;
                Ok(Captured::Replay(response))
            }
            Capture::Held => {
                // The holder may have committed and not yet left its copy, or died in between.
                let finding = async { record::find(&mut self.db.read().await?, asked).await };
                let found = db::within(db::PATIENCE, finding).await.flatten();
                let found = found.map_err(unavailable)?;
                match found.filter(|record| !record.is_expired(Timestamp::now())) {
                    None => Err(in_progress()),
                    Some(record) => record.replay(&self.sealer, asked).map(Captured::Replay),
                }
            }
        }
    }

    async fn run(
        &self,
        inner: &impl Endpoint,
        asked: &Asked,
        request: Request,
        body: bytes::Bytes,
    ) -> Result<Ran, ApiError> {
        let running = Box::pin(handler::run(inner, request, body, self.opening(asked)));
        let ran = db::within(HANDLER_PATIENCE, running).await;
        let (decided, stage) = ran.map_err(unavailable)??;
        match (stage, decided) {
            (Stage::Over(over), _) => over,
            (Stage::Left(write), Decided::Done(answer)) => {
                self.commit_left(asked, answer, &*write).await
            }
            (Stage::Open(tx), decided) => self.conclude(asked, decided, tx).await,
            // It ended without touching the store, which may know an answer all the same.
            (Stage::Unopened | Stage::Left(_), decided) => match self.start(asked).await? {
                Start::Replay(ran) => Ok(ran),
                Start::Run(tx) => self.conclude(asked, decided, tx).await,
            },
        }
    }

    /// What opens the transaction when the handler asks for it.
    fn opening(&self, asked: &Asked) -> Arc<handler::Opening> {
        let (this, of) = (self.clone(), asked.clone());
        Arc::new(move || {
            let (this, of) = (this.clone(), of.clone());
            async move { this.open_stage(&of).await }.boxed()
        })
    }

    /// The transaction of a handler that asks for it.
    async fn open_stage(&self, asked: &Asked) -> Stage {
        if self.protection == Protection::None {
            return match self.db.begin().await {
                Ok(tx) => Stage::Open(tx),
                Err(error) => Stage::Over(Err(unavailable(error))),
            };
        }
        match self.start(asked).await {
            Ok(Start::Run(tx)) => Stage::Open(tx),
            Ok(Start::Replay(ran)) => Stage::Over(Ok(ran)),
            Err(error) => Stage::Over(Err(error)),
        }
    }

    /// Makes what was decided true, in the transaction that has the key's lock.
    async fn conclude(&self, asked: &Asked, decided: Decided, tx: Tx) -> Result<Ran, ApiError> {
        let (answer, tx) = match decided {
            Decided::Done(answer) => (answer, tx),
            Decided::Refused(answer) => {
                // Waited for, so that the key's lock is free for what follows.
                let rollback = db::within(db::PATIENCE, tx.rollback()).await;
                rollback.flatten().map_err(unavailable)?;
                match self.start(asked).await? {
                    Start::Replay(ran) => return Ok(ran),
                    Start::Run(tx) => (answer, tx),
                }
            }
            Decided::Nothing(response) => {
                db::within(db::PATIENCE, tx.rollback()).await.ok();
                return Ok(Ran {
                    response,
                    record: None,
                });
            }
        };
        let record = self.record_of(asked, &answer);
        self.finish(asked, answer, record, tx).await
    }

    /// Commits what was written together with its record.
    async fn finish(
        &self,
        asked: &Asked,
        answer: Answer,
        record: Record,
        mut tx: Tx,
    ) -> Result<Ran, ApiError> {
        let finishing = async {
            record::insert(&mut tx, asked, &record).await?;
            tx.commit().await
        };
        match db::within(db::PATIENCE, finishing).await.flatten() {
            Ok(()) => Ok(Ran::of(answer, record)),
            // Lost to a commit: then there is a record.
            Err(error) if db::is_unique_violation(&error) => match self.start(asked).await? {
                Start::Replay(ran) => Ok(ran),
                Start::Run(_) => Err(in_progress()),
            },
            Err(error) => self.unsure(asked, error, true).await,
        }
    }

    /// Commits what a handler left together with its record: with others, or else alone.
    async fn commit_left(
        &self,
        asked: &Asked,
        answer: Answer,
        write: &dyn Deferred,
    ) -> Result<Ran, ApiError> {
        let record = self.record_of(asked, &answer);
        match write.together(asked, &record).await {
            Ok(true) => return Ok(Ran::of(answer, record)),
            Err(error) if db::is_unavailable(&error) => {
                // The statement may still wait for its turn, before it takes the key's lock.
                return self.unsure(asked, error, false).await;
            }
            // What is wrong with one of them is found out when each is alone.
            Ok(false) | Err(_) => {}
        }
        let mut tx = match self.start(asked).await? {
            Start::Replay(ran) => return Ok(ran),
            Start::Run(tx) => tx,
        };
        match write.alone(&mut tx).await {
            Ok(()) => self.finish(asked, answer, record, tx).await,
            Err(error) => {
                db::within(db::PATIENCE, tx.rollback()).await.ok();
                Err(error.as_idempotency_unavailable())
            }
        }
    }

    fn record_of(&self, asked: &Asked, answer: &Answer) -> Record {
        answer.record(&self.sealer, asked, Timestamp::now() + self.ttl)
    }

    /// Runs the handler on a transaction, with nothing around it.
    async fn run_unprotected(
        &self,
        inner: &impl Endpoint,
        asked: &Asked,
        request: Request,
        body: bytes::Bytes,
    ) -> Result<Response, ApiError> {
        let open = self.opening(asked);
        let (decided, stage) = handler::run(inner, request, body, open).await?;
        match (decided, stage) {
            (Decided::Done(answer), Stage::Open(tx)) => {
                tx.commit().await?;
                Ok(answer.into_response())
            }
            (Decided::Done(answer), Stage::Left(write)) => {
                let mut tx = self.db.begin().await?;
                write.alone(&mut tx).await?;
                tx.commit().await?;
                Ok(answer.into_response())
            }
            (Decided::Done(answer) | Decided::Refused(answer), _) => Ok(answer.into_response()),
            (Decided::Nothing(response), _) => Ok(response),
        }
    }

    /// A commit that failed may have happened all the same: looks, and answers what is true. `had_lock` says
    /// that whoever finds the key's lock free knows that the commit is over.
    async fn unsure(
        &self,
        asked: &Asked,
        error: sqlx::Error,
        had_lock: bool,
    ) -> Result<Ran, ApiError> {
        let looked = match self.start(asked).await {
            Ok(Start::Replay(ran)) => return Ok(ran),
            // The lock is free, so the commit is over; what was read with the lock may be older.
            Ok(Start::Run(mut tx)) => db::within(db::PATIENCE, record::find(&mut tx, asked))
                .await
                .flatten()
                .map_err(unavailable),
            Err(error) => Err(error),
        };
        match looked {
            Ok(Some(record)) => Ok(Ran {
                response: record.replay(&self.sealer, asked)?,
                record: Some(record),
            }),
            Ok(None) if had_lock => Err(unavailable(error)),
            Ok(None) | Err(_) => Err(unavailable(error).with_detail(
                "The store went away during the commit, so it is not known whether this was executed. \
                 Try again with the same key: it runs at most once.",
            )),
        }
    }

    /// Opens the transaction, takes the key's lock and looks for a record.
    async fn start(&self, asked: &Asked) -> Result<Start, ApiError> {
        db::within(self.db.patience(), self.open(asked))
            .await
            .map_err(unavailable)?
    }

    async fn open(&self, asked: &Asked) -> Result<Start, ApiError> {
        // Before a connection is: a project whose rows are locked may not have them all.
        let seat = self.shares.seat(asked.project).await;
        let mut tx = self.db.begin().await.map_err(unavailable)?;
        tx.keep(seat);
        let Some(record) = record::lock(&mut tx, asked).await.map_err(unavailable)? else {
            return Err(in_progress());
        };
        let Some(record) = record else {
            return Ok(Start::Run(tx));
        };
        let now = Timestamp::now();
        if record.is_expired(now) {
            record::forget(&mut tx, asked, now)
                .await
                .map_err(unavailable)?;
            return Ok(Start::Run(tx));
        }
        tx.rollback().await.ok();
        let response = record.replay(&self.sealer, asked)?;
        Ok(Start::Replay(Ran {
            response,
            record: Some(record),
        }))
    }

    /// Removes a batch of expired records; the number removed.
    pub async fn sweep(&self, batch: i64) -> sqlx::Result<u64> {
        let mut tx = self.db.begin().await?;
        let removed = record::sweep(&mut tx, Timestamp::now(), batch).await?;
        tx.commit().await?;
        Ok(removed)
    }
}

enum Captured {
    /// On to SQL, with the lease if there is a Redis.
    Go(Option<Lease>),
    Replay(Response),
}

/// What came of a request, and the record that stands for it, if one does.
struct Ran {
    response: Response,
    record: Option<Record>,
}

impl Ran {
    /// What was executed now.
    fn of(answer: Answer, record: Record) -> Self {
        Self {
            response: answer.into_response(),
            record: Some(record),
        }
    }
}

enum Start {
    Replay(Ran),
    Run(Tx),
}

fn in_progress() -> ApiError {
    let code = Code::IdempotencyKeyInProgress;
    ApiError::new(code, code.about())
}

fn unavailable(error: sqlx::Error) -> ApiError {
    ApiError::from(error).as_idempotency_unavailable()
}
