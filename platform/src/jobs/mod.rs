//! Durable jobs on apalis: enqueued inside the business's own transaction, run by workers.
//!
//! A job is `Ok` once its outcome is settled in our own tables; what is to be tried again later is a
//! new job with its own `run_at`, never apalis's own retry. Workers are named by a new ULID per start,
//! because a worker that comes back under its old name never recovers the jobs it held; heartbeats are
//! set so that the jobs of a killed process run again within 15 seconds. A worker that loses the
//! database ends, also where the wire only went silent ([`queue`]); [`run`] starts the next one.

mod pace;
mod queue;

use std::{sync::Arc, time::Duration};

use apalis::{layers::WorkerBuilderExt as _, prelude::*};
use apalis_core::{error::BoxDynError, task::builder::TaskBuilder};
use apalis_sqlite::SqliteStorage;
use futures::future::BoxFuture;
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use ulid::Ulid;

use pace::Pace;
use queue::Queue;

use crate::db::{self, Conn, Db, Queryable, Timestamp, announced, execute};

/// How often a worker says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(3);

/// How many names of workers that ended are handed back for.
const REMEMBERED: usize = 8;

/// How many missed heartbeats make a worker dead.
const MISSED_HEARTBEATS: usize = 4;

/// How long a stopping worker waits for the jobs that run.
const DRAIN: Duration = Duration::from_secs(35);

/// How long finished jobs stay on SQLite, and on PostgreSQL those that failed.
const KEEP_FINISHED: Duration = Duration::from_mins(10);

/// A kind of job.
pub trait Job: Serialize + DeserializeOwned + Send + Sync + Unpin + 'static {
    /// The queue it waits in.
    const QUEUE: &'static str;

    /// A name that no second job of the queue may have, if there is one.
    fn unique_key(&self) -> Option<String>;
}

/// Why a job could not be enqueued.
#[derive(Debug, thiserror::Error)]
pub enum EnqueueError {
    /// The queue of PostgreSQL refused.
    #[error(transparent)]
    Postgres(#[from] apalis_postgres::Error),
    /// The queue of SQLite refused.
    #[error(transparent)]
    Sqlite(#[from] apalis_sqlite::Error),
    /// The job cannot be written as JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

impl From<EnqueueError> for sqlx::Error {
    fn from(error: EnqueueError) -> Self {
        match error {
            EnqueueError::Postgres(apalis_postgres::Error::Database(error))
            | EnqueueError::Sqlite(apalis_sqlite::Error::Database(error)) => error,
            other => Self::Encode(Box::new(other)),
        }
    }
}

/// Puts jobs into their queue, to run at `run_at` or as soon after it as a worker is free.
///
/// `run_at` is kept in whole seconds, rounded up: a job is never early.
pub async fn enqueue<J: Job>(
    on: &mut impl Queryable,
    jobs: &[J],
    run_at: Timestamp,
) -> Result<(), EnqueueError> {
    if jobs.is_empty() {
        return Ok(());
    }
    let now = Timestamp::now();
    let seconds = if run_at <= now {
        now.seconds()
    } else {
        run_at.seconds_ceil()
    };
    let tasks = jobs
        .iter()
        .map(|job| {
            let mut task = TaskBuilder::new(serde_json::to_vec(job)?)
                .run_at_timestamp(u64::try_from(seconds).unwrap_or(0));
            if let Some(key) = job.unique_key() {
                task = task.idempotency_key(key);
            }
            Ok(task.build())
        })
        .collect::<Result<Vec<_>, serde_json::Error>>()?;
    on.announce();
    let pushed = match on.conn() {
        Conn::Postgres(conn) => {
            let pushing = apalis_postgres::queries::push_tasks(conn, J::QUEUE, tasks);
            let pushed = db::answered(pushing).await;
            let pushed = pushed.ok_or_else(|| apalis_postgres::Error::Database(db::silence()))?;
            pushed.map_err(EnqueueError::from)
        }
        Conn::Sqlite(conn) => apalis_sqlite::queries::push_tasks(conn, J::QUEUE, &tasks)
            .await
            .map_err(EnqueueError::from),
    };
    on.settled();
    pushed
}

/// What runs a job; it returns once the outcome is settled.
pub type Handler<J> = Arc<dyn Fn(J) -> BoxFuture<'static, ()> + Send + Sync>;

async fn handle<J: Job>(job: J, handler: Data<Handler<J>>) -> Result<(), BoxDynError> {
    handler(job).await;
    Ok(())
}

/// Runs the jobs of one queue, at most `concurrency` at a time, until `stop`.
///
/// After `stop` no further job starts; it returns when those that run have ended, or after [`DRAIN`],
/// and hands back those that were fetched and did not start.
pub async fn run<J: Job>(db: Db, concurrency: usize, handler: Handler<J>, stop: CancellationToken) {
    let running = TaskTracker::new();
    // Those that ended may hold jobs still: the database was away when they did.
    let mut names = Vec::new();
    let mut pause = Duration::from_millis(100);
    loop {
        let name = format!("{}-{}", J::QUEUE, Ulid::generate());
        names.push(name.clone());
        let started = tokio::time::Instant::now();
        // Stopped by dropping it: a worker that is told to stop waits for its jobs without looking
        // after its own query, which may hold the very connection that the jobs wait for.
        let ended = tokio::select! {
            biased;
            () = stop.cancelled() => None,
            ended = worker(&db, &name, concurrency, handler.clone(), running.clone()) => Some(ended),
            () = beat(&db, &name) => None,
        };
        let Some(ended) = ended else {
            return drain(&db, &running, &names).await;
        };
        if let Err(error) = ended {
            if started.elapsed() > Duration::from_secs(10) {
                pause = Duration::from_millis(100);
            }
            tracing::warn!(queue = J::QUEUE, %error, ?pause, "a worker ended; the next one starts");
        }
        tokio::select! {
            () = stop.cancelled() => return drain(&db, &running, &names).await,
            () = tokio::time::sleep(pause) => {}
        }
        // Those of the oldest are taken over by now: their heartbeats are long missed.
        let keep = names.len().saturating_sub(REMEMBERED);
        names.drain(..keep);
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

/// Says that a worker lives, for as long as it is polled.
///
/// The worker says so itself, but not while all its slots are taken: then another node would take over
/// what it is doing.
async fn beat(db: &Db, name: &str) {
    loop {
        tokio::time::sleep(HEARTBEAT).await;
        let beating = async {
            let mut tx = db.begin().await?;
            let text = if tx.is_postgres() {
                "UPDATE apalis.workers SET last_seen = now() WHERE id = $1"
            } else {
                "UPDATE Workers SET last_seen = strftime('%s', 'now') WHERE id = $1"
            };
            execute!(&mut tx, text, name)?;
            tx.commit().await
        };
        if let Err(error) = db::within(db::PATIENCE, beating).await.flatten() {
            tracing::warn!(%error, "a worker could not say that it lives");
        }
    }
}

/// One life of a worker.
async fn worker<J: Job>(
    db: &Db,
    name: &str,
    concurrency: usize,
    handler: Handler<J>,
    running: TaskTracker,
) -> Result<(), WorkerError> {
    macro_rules! configured {
        ($config:expr) => {
            $config
                .queue(J::QUEUE)
                .batch_size(concurrency.min(200))
                .heartbeat_interval(HEARTBEAT)
                .missed_heartbeats(MISSED_HEARTBEATS)
                .lock_tasks(false)
        };
    }
    macro_rules! run_on {
        ($queue:expr) => {{
            let backend = $queue.poll_with_strategy(Pace::new(announced().clone()));
            WorkerBuilder::new(name)
                .backend(backend)
                .concurrency(concurrency)
                .data(handler)
                .parallelize(move |job| running.spawn(job))
                .build(handle::<J>)
                .run()
                .await
        }};
    }
    match db {
        Db::Postgres(_) => {
            let config = configured!(apalis_postgres::Config::default());
            run_on!(Queue::<J>::new(db.clone(), config))
        }
        Db::Sqlite { writer, .. } => {
            let config = configured!(apalis_sqlite::Config::default());
            run_on!(SqliteStorage::<J>::new(writer).with_config(config))
        }
    }
}

/// Waits for the jobs that run, and gives back to the queue what the workers of these names hold.
///
/// Among these are jobs that ended and were not acknowledged any more; run again, they find that all
/// is settled.
async fn drain(db: &Db, running: &TaskTracker, names: &[String]) {
    running.close();
    if tokio::time::timeout(DRAIN, running.wait()).await.is_err() {
        tracing::warn!("some jobs did not end in time; they run again elsewhere");
    }
    for name in names {
        let handed_back = db::within(db::PATIENCE, hand_back(db, name))
            .await
            .flatten();
        if let Err(error) = handed_back {
            tracing::warn!(%error, "jobs could not be handed back; they run again when this worker counts as dead");
            return;
        }
    }
}

async fn hand_back(db: &Db, name: &str) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    let text = match tx.conn() {
        Conn::Postgres(_) => {
            "UPDATE apalis.jobs SET status = 'Pending', lock_by = NULL, lock_at = NULL \
             WHERE lock_by = $1 AND status IN ('Queued', 'Running')"
        }
        Conn::Sqlite(_) => {
            "UPDATE Jobs SET status = 'Pending', lock_by = NULL, lock_at = NULL \
             WHERE lock_by = $1 AND status IN ('Queued', 'Running')"
        }
    };
    execute!(&mut tx, text, name)?;
    tx.commit().await
}

/// Tries a job's work again until it is done: while the database is away, nothing can be settled.
pub async fn until_done<F: Future<Output = sqlx::Result<()>>>(what: &str, work: impl Fn() -> F) {
    let mut pause = Duration::from_millis(100);
    while let Err(error) = work().await {
        tracing::warn!(what, %error, ?pause, "a job's work failed; trying again");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

/// Removes a batch of finished jobs, and workers long gone; the number of jobs removed.
pub async fn purge(db: &Db, batch: i64) -> sqlx::Result<u64> {
    let before = Timestamp::now() - KEEP_FINISHED;
    let mut tx = db.begin().await?;
    let removed = match tx.conn() {
        Conn::Postgres(_) => {
            execute!(
                &mut tx,
                "DELETE FROM apalis.workers w WHERE last_seen < now() - interval '1 hour' \
                 AND NOT EXISTS (SELECT 1 FROM apalis.jobs j WHERE j.lock_by = w.id)"
            )?;
            execute!(
                &mut tx,
                "DELETE FROM apalis.jobs WHERE id IN (SELECT id FROM apalis.jobs \
                 WHERE status IN ('Done', 'Killed') AND done_at < $1 LIMIT $2)",
                before,
                batch
            )?
        }
        Conn::Sqlite(_) => {
            execute!(
                &mut tx,
                "DELETE FROM Workers WHERE last_seen < strftime('%s', 'now') - 3600 \
                 AND NOT EXISTS (SELECT 1 FROM Jobs WHERE Jobs.lock_by = Workers.id)"
            )?;
            execute!(
                &mut tx,
                "DELETE FROM Jobs WHERE rowid IN (SELECT rowid FROM Jobs \
                 WHERE status IN ('Done', 'Killed') AND done_at < $1 LIMIT $2)",
                before.seconds(),
                batch
            )?
        }
    };
    tx.commit().await?;
    Ok(removed)
}
