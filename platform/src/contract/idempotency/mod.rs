//! Safe retries: one execution per key, and its answer again for whoever asks again.
//!
//! The answer and the business write commit in one transaction. A mutation takes the key's lock (an
//! advisory lock in PostgreSQL, the single writer in SQLite, and in both a set of the keys in flight in
//! this process), looks for a record, and runs the handler on the open transaction, which the handler
//! gets as [`Work`] and can neither commit nor roll back. A 2xx commits together with its record. A
//! decided 4xx rolls everything back and stores its record alone. Anything else rolls back and stores
//! nothing. The primary key `(project_id, key)` is the backstop: whoever loses there starts again and
//! replays. All of it runs in a task of its own, so that a client that hangs up cannot stop it half-way.
//! With Redis, a key is captured there first (`lease`): those who come while it is held, or after it was
//! answered, are told so without the lock. Whether a request may run is decided by SQL alone.

mod key;
mod lease;
#[cfg(test)]
mod model;
pub(crate) mod record;

use std::{
    collections::HashSet,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::FutureExt as _;
use poem::{Endpoint, FromRequest, Request, RequestBody, Response};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

pub use key::{Key, fingerprint};

use crate::{
    config,
    contract::{ApiError, Code, auth::ProjectId, error, request_id},
    db::{self, Conn, Db, Queryable, Sealer, Timestamp, Tx},
    shared::Shared,
};
use lease::{Capture, Lease, Leases};
use record::{Answer, Record};

/// How many mutations this process is executing.
const IN_FLIGHT: &str = "botix_mutations_in_flight";

/// How often a request that lost at the backstop starts again before it gives up.
const STARTS: usize = 3;

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
    tasks: TaskTracker,
}

/// The open transaction of a mutation, in the hands of its handler.
#[derive(Debug)]
pub struct Work(OwnedMutexGuard<Option<Tx>>);

#[derive(Clone)]
struct Slot(Arc<AsyncMutex<Option<Tx>>>);

impl<'a> FromRequest<'a> for Work {
    async fn from_request(request: &'a Request, _: &mut RequestBody) -> poem::Result<Self> {
        let missing = || ApiError::internal("a mutation was mounted outside of its layer");
        let slot = request
            .extensions()
            .get::<Slot>()
            .ok_or_else(missing)?
            .clone();
        let guard = slot.0.lock_owned().await;
        if guard.is_none() {
            return Err(missing().into());
        }
        Ok(Self(guard))
    }
}

impl Work {
    fn tx(&mut self) -> &mut Tx {
        self.0
            .as_mut()
            .expect("the slot was full when Work was made, and Work never empties it")
    }
}

impl Queryable for Work {
    fn conn(&mut self) -> Conn<'_> {
        self.tx().conn()
    }

    fn is_postgres(&self) -> bool {
        self.0.as_ref().is_some_and(Queryable::is_postgres)
    }

    fn settled(&mut self) {
        self.tx().settled();
    }

    fn announce(&mut self) {
        self.tx().announce();
    }
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
    /// Over this store, and Redis where there is one; executions are tracked by `tasks`.
    pub fn new(
        protection: Protection,
        db: Db,
        shared: Option<Shared>,
        sealer: Sealer,
        settings: &config::Idempotency,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            protection,
            db,
            leases: shared.map(|shared| Leases::new(shared, settings.lease)),
            sealer,
            ttl: settings.ttl,
            in_flight: Arc::default(),
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
        let work = async move {
            if this.protection == Protection::None {
                return this.run_unprotected(&*inner, request, body).await;
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
            let running = this.run(&*inner, &asked, request, body);
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
        };
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
        let mut request = Some(request);
        for _ in 0..STARTS {
            let mut tx = match self.start(asked).await? {
                Start::Replay(ran) => return Ok(ran),
                Start::Run(tx) => tx,
            };
            // A second start happens only when the first one lost to a commit: then there is a record.
            let Some(request) = request.take() else {
                return Err(in_progress());
            };
            let outcome;
            (outcome, tx) = db::within(
                HANDLER_PATIENCE,
                run_handler(inner, request, body.clone(), tx),
            )
            .await
            .map_err(unavailable)??;
            let decided = match outcome {
                Ok(answer) => answer,
                Err(undecided) => {
                    db::within(db::PATIENCE, tx.rollback()).await.ok();
                    return Ok(Ran {
                        response: undecided,
                        record: None,
                    });
                }
            };
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
            };
            let expires_at = Timestamp::now() + self.ttl;
            let record = answer.record(&self.sealer, asked, expires_at);
            let finished = db::within(db::PATIENCE, finish(tx, asked, &record)).await;
            match finished.flatten() {
                Ok(()) => {
                    return Ok(Ran {
                        response: answer.into_response(),
                        record: Some(record),
                    });
                }
                Err(error) if db::is_unique_violation(&error) => {}
                Err(error) => return self.unsure(asked, error).await,
            }
        }
        Err(in_progress())
    }

    /// Runs the handler on a transaction, with nothing around it.
    async fn run_unprotected(
        &self,
        inner: &impl Endpoint,
        request: Request,
        body: bytes::Bytes,
    ) -> Result<Response, ApiError> {
        let tx = self.db.begin().await?;
        match run_handler(inner, request, body, tx).await? {
            (Ok(Decided::Done(answer)), tx) => {
                tx.commit().await?;
                Ok(answer.into_response())
            }
            (Ok(Decided::Refused(answer)), _) => Ok(answer.into_response()),
            (Err(undecided), _) => Ok(undecided),
        }
    }

    /// A commit that failed may have happened all the same: looks, and answers what is true.
    async fn unsure(&self, asked: &Asked, error: sqlx::Error) -> Result<Ran, ApiError> {
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
            Ok(None) => Err(unavailable(error)),
            Err(_) => Err(unavailable(error).with_detail(
                "The store went away during the commit, so it is not known whether this was executed. \
                 Try again with the same key: it runs at most once.",
            )),
        }
    }

    /// Opens the transaction, takes the key's lock and looks for a record.
    async fn start(&self, asked: &Asked) -> Result<Start, ApiError> {
        db::within(db::PATIENCE, self.open(asked))
            .await
            .map_err(unavailable)?
    }

    async fn open(&self, asked: &Asked) -> Result<Start, ApiError> {
        let mut tx = self.db.begin().await.map_err(unavailable)?;
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

/// Commits the work together with its record.
async fn finish(mut tx: Tx, asked: &Asked, record: &Record) -> sqlx::Result<()> {
    record::insert(&mut tx, asked, record).await?;
    tx.commit().await
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

enum Start {
    Replay(Ran),
    Run(Tx),
}

enum Decided {
    /// 2xx: the business write stands.
    Done(Answer),
    /// A business 4xx: nothing was written, the answer stands.
    Refused(Answer),
}

/// Runs the handler on the transaction; gives the transaction back with what came of it.
async fn run_handler(
    inner: &impl Endpoint,
    mut request: Request,
    body: bytes::Bytes,
    tx: Tx,
) -> Result<(Result<Decided, Response>, Tx), ApiError> {
    let slot = Slot(Arc::new(AsyncMutex::new(Some(tx))));
    request.extensions_mut().insert(slot.clone());
    request.set_body(body);
    let called = AssertUnwindSafe(inner.get_response_or_error(request))
        .catch_unwind()
        .await;
    let tx = slot
        .0
        .lock()
        .await
        .take()
        .ok_or_else(|| ApiError::internal("a handler kept its transaction"))?;
    let (response, decided) = match called {
        Ok(called) => called,
        Err(panic) => {
            let panic = panic
                .downcast_ref::<&str>()
                .map(ToString::to_string)
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            (
                poem::IntoResponse::into_response(ApiError::internal(format!("panic: {panic}"))),
                false,
            )
        }
    };
    if !decided {
        return Ok((Err(response), tx));
    }
    let is_success = response.status().is_success();
    let answer = Answer::read(response).await.map_err(ApiError::internal)?;
    Ok((
        Ok(if is_success {
            Decided::Done(answer)
        } else {
            Decided::Refused(answer)
        }),
        tx,
    ))
}

trait Answering: Endpoint {
    /// The response, and whether it is decided: a 2xx, or an error of a decided code.
    async fn get_response_or_error(&self, request: Request) -> (Response, bool) {
        match self.call(request).await {
            Ok(response) => {
                let response = poem::IntoResponse::into_response(response);
                let success = response.status().is_success();
                (response, success)
            }
            Err(failure) => {
                let known = failure.downcast_ref::<ApiError>().map(ApiError::code);
                let error = error::from_poem(failure).as_idempotency_unavailable();
                (
                    poem::IntoResponse::into_response(error),
                    known.is_some_and(Code::is_decided),
                )
            }
        }
    }
}

impl<E: Endpoint> Answering for E {}

fn in_progress() -> ApiError {
    let code = Code::IdempotencyKeyInProgress;
    ApiError::new(code, code.about())
}

fn unavailable(error: sqlx::Error) -> ApiError {
    ApiError::from(error).as_idempotency_unavailable()
}
