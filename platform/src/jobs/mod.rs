//! Durable jobs on apalis: enqueued inside the business's own transaction, run by workers.
//!
//! A job is `Ok` once its outcome is settled in our own tables; what is to be tried again later is a
//! new job with its own `run_at`, never apalis's own retry. A process may begin itself what it has just
//! enqueued ([`Hand`]). Workers are named by a new ULID per start,
//! because a worker that comes back under its old name never recovers the jobs it held; heartbeats are
//! set so that the jobs of a killed process run again within 15 seconds. A worker that loses the
//! database ends, also where the wire only went silent ([`queue`]); [`run`] starts the next one.

mod begin;
mod hand;
mod pace;
mod queue;
mod rows;

use std::{sync::Arc, time::Duration};

use apalis::{layers::WorkerBuilderExt as _, prelude::*};
use apalis_core::{
    error::BoxDynError,
    task::{builder::TaskBuilder, task_id::TaskId},
};
use apalis_sqlite::SqliteStorage;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use ulid::Ulid;

pub use begin::Begin;
pub use hand::{Grip, Hand};
use pace::Pace;
use queue::Queue;
pub use rows::Rows;
pub(crate) use rows::insert_jobs;

use crate::db::{self, Conn, Db, Queryable, Timestamp, announced, execute};

/// How often a worker says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(3);

/// How long a job that did not begin stays.
const UNTIL_UNACKNOWLEDGED: Duration = Duration::from_millis(200);

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

    /// Of the jobs that are due, those with more come first.
    fn priority(&self) -> i32 {
        0
    }
}

/// The priority of jobs that nobody has waited for yet.
pub const FRESH: i32 = 1;

/// Puts jobs into their queue, to run at `run_at` or as soon after it as a worker is free.
///
/// SQLite keeps whole seconds, rounded up: a job is never early.
pub async fn enqueue<J: Job>(
    on: &mut impl Queryable,
    jobs: &[J],
    run_at: Timestamp,
) -> sqlx::Result<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    on.announce();
    if on.is_postgres() {
        enqueue_postgres(on, jobs, run_at.since(Timestamp::now())).await
    } else {
        enqueue_sqlite(on, jobs, run_at).await
    }
}

async fn enqueue_postgres<J: Job>(
    on: &mut impl Queryable,
    jobs: &[J],
    delay: Duration,
) -> sqlx::Result<()> {
    let mut rows = Rows::default();
    for job in jobs {
        rows.push(job, None).map_err(unwritable)?;
    }
    let priorities: Vec<i32> = jobs.iter().map(Job::priority).collect();
    if let Conn::Postgres(conn) = on.conn() {
        let inserting = rows.bind(sqlx::query_as::<_, ()>(insert_jobs!(
            "$5",
            "j.priority",
            "clock_timestamp() + $7 * interval '1 microsecond'",
            "UNNEST($1::text[], $2::bytea[], $3::text[], $4::text[], $6::integer[]) \
             AS j (id, job, key, lock_by, priority)"
        )));
        let inserting = inserting
            .bind(J::QUEUE)
            .bind(priorities)
            .bind(i64::try_from(delay.as_micros()).unwrap_or(i64::MAX))
            .fetch_all(conn);
        let inserted = db::answered(inserting).await;
        db::settle(on, inserted)?;
    }
    Ok(())
}

async fn enqueue_sqlite<J: Job>(
    on: &mut impl Queryable,
    jobs: &[J],
    run_at: Timestamp,
) -> sqlx::Result<()> {
    // What is due now is due whatever the clock is set to later.
    let seconds = if run_at <= Timestamp::now() {
        0
    } else {
        u64::try_from(run_at.seconds_ceil()).unwrap_or(0)
    };
    let tasks = jobs
        .iter()
        .map(|job| {
            let mut task = TaskBuilder::new(serde_json::to_vec(job)?)
                .run_at_timestamp(seconds)
                .priority(usize::try_from(job.priority()).unwrap_or(0));
            if let Some(key) = job.unique_key() {
                task = task.idempotency_key(key);
            }
            Ok(task.build())
        })
        .collect::<Result<Vec<_>, serde_json::Error>>()
        .map_err(unwritable)?;
    if let Conn::Sqlite(conn) = on.conn() {
        let pushed = apalis_sqlite::queries::push_tasks(conn, J::QUEUE, &tasks).await;
        pushed.map_err(|error| match error {
            apalis_sqlite::Error::Database(error) => error,
            other => sqlx::Error::Encode(Box::new(other)),
        })?;
    }
    on.settled();
    Ok(())
}

fn unwritable(error: serde_json::Error) -> sqlx::Error {
    sqlx::Error::Encode(Box::new(error))
}

/// The id of a job in its queue.
#[derive(Clone, Debug)]
pub struct JobId(String);

impl JobId {
    /// The written form, as in the database.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A job in the hands of a worker.
#[derive(Clone, Debug)]
pub struct Taken<J> {
    /// The job.
    pub job: J,
    /// Its id.
    pub id: JobId,
    /// The worker that has it, where others could take it over.
    pub worker: Option<Arc<str>>,
    /// Whether it is marked as begun.
    pub is_marked: bool,
}

/// What became of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// Its outcome is settled.
    Settled,
    /// Its outcome is settled, and with it the job was removed.
    Removed,
    /// Nothing was done, because this process stops or another has the job: it stays in the queue.
    NotBegun,
}

/// What runs a job; it returns once the outcome is settled.
pub type Handler<J> = Arc<dyn Fn(Taken<J>) -> BoxFuture<'static, Ended> + Send + Sync>;

/// The name of the worker, where others could take its jobs over.
#[derive(Clone)]
struct Name(Option<Arc<str>>);

async fn handle<J: Job>(
    job: J,
    id: TaskId,
    handler: Data<Handler<J>>,
    name: Data<Name>,
) -> Result<Ended, BoxDynError> {
    let taken = Taken {
        job,
        id: JobId(id.to_string()),
        worker: (*name).0.clone(),
        is_marked: false,
    };
    let ended = handler(taken).await;
    if ended == Ended::NotBegun {
        // Its worker is gone before it could note an end.
        tokio::time::sleep(UNTIL_UNACKNOWLEDGED).await;
    }
    Ok(ended)
}

/// Removes a job whose outcome the caller's transaction settles; false where the queue does that itself.
pub async fn remove(on: &mut impl Queryable, id: &JobId) -> sqlx::Result<bool> {
    if !on.is_postgres() {
        return Ok(false);
    }
    execute!(on, "DELETE FROM apalis.jobs WHERE id = $1", id.as_str())?;
    Ok(true)
}

/// Lets a job run later, as the same job: what it counts as lost for stays with it. False where it is
/// another worker's by now. On PostgreSQL alone.
pub async fn put_off<J>(
    on: &mut impl Queryable,
    taken: &Taken<J>,
    run_at: Timestamp,
) -> sqlx::Result<bool> {
    let delay = run_at.since(Timestamp::now());
    let put_off = execute!(
        on,
        "UPDATE apalis.jobs SET status = 'Pending', lock_by = NULL, lock_at = NULL, priority = 0, \
         run_at = clock_timestamp() + $3 * interval '1 microsecond' WHERE id = $1 AND lock_by = $2",
        taken.id.as_str(),
        taken.worker.as_deref(),
        i64::try_from(delay.as_micros()).unwrap_or(i64::MAX)
    )?;
    Ok(put_off > 0)
}

/// Enqueues a job in place of one that ends now, on SQLite: what that one counted as lost for goes over.
pub async fn replace<J: Job>(
    on: &mut impl Queryable,
    old: &JobId,
    job: &J,
    run_at: Timestamp,
) -> sqlx::Result<()> {
    enqueue(on, std::slice::from_ref(job), run_at).await?;
    execute!(
        on,
        "UPDATE Jobs SET attempts = (SELECT attempts FROM Jobs WHERE id = $1) \
         WHERE rowid = last_insert_rowid()",
        old.as_str()
    )
    .map(drop)
}

/// Runs the jobs of one queue, at most `concurrency` at a time, until `stop`.
///
/// After `stop` no further job starts; it returns when those that run have ended, or after [`DRAIN`],
/// and hands back those that were fetched and did not start. Jobs may be handed to it through `hand`.
pub async fn run<J: Job>(
    db: Db,
    concurrency: usize,
    handler: Handler<J>,
    hand: Option<Hand>,
    stop: CancellationToken,
) {
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
            ended = worker(&db, &name, concurrency, handler.clone(), hand.clone(), running.clone()) => Some(ended),
            () = beat(&db, &name) => None,
        };
        if let Some(hand) = &hand {
            hand.close();
        }
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
    hand: Option<Hand>,
    running: TaskTracker,
) -> Result<(), WorkerError> {
    let others = matches!(db, Db::Postgres(_));
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
                .data(Name(others.then(|| name.into())))
                .parallelize(move |job| running.spawn(job))
                .build(handle::<J>)
                .run()
                .await
        }};
    }
    match db {
        Db::Postgres(_) => {
            let config = configured!(apalis_postgres::Config::default());
            let hand = hand.map(|hand| (hand, running.clone()));
            run_on!(Queue::<J>::new(db.clone(), config, hand))
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
    let have_ended = tokio::time::timeout(DRAIN, running.wait()).await.is_ok();
    if !have_ended {
        tracing::warn!("some jobs did not end in time; they run again elsewhere");
    }
    for name in names {
        let handed_back = db::within(db::PATIENCE, hand_back(db, name, have_ended))
            .await
            .flatten();
        if let Err(error) = handed_back {
            tracing::warn!(%error, "jobs could not be handed back; they run again when this worker counts as dead");
            return;
        }
    }
}

/// Those that were begun and have not ended count as lost; on SQLite, where nobody marks them, all of them.
async fn hand_back(db: &Db, name: &str, have_ended: bool) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    let text = if tx.is_postgres() {
        "UPDATE apalis.jobs SET status = 'Pending', lock_by = NULL, lock_at = NULL, \
         attempts = attempts + CASE WHEN status = 'Running' AND NOT $2 THEN 1 ELSE 0 END \
         WHERE lock_by = $1 AND status IN ('Queued', 'Running')"
    } else {
        "UPDATE Jobs SET status = 'Pending', lock_by = NULL, lock_at = NULL, \
         attempts = attempts + CASE WHEN NOT $2 THEN 1 ELSE 0 END \
         WHERE lock_by = $1 AND status IN ('Queued', 'Running')"
    };
    execute!(&mut tx, text, name, have_ended)?;
    tx.commit().await
}

/// Tries a job's work again until it is done: while the database is away, nothing can be settled.
pub async fn until_done<T, F: Future<Output = sqlx::Result<T>>>(
    what: &str,
    work: impl Fn() -> F,
) -> T {
    let mut pause = Duration::from_millis(100);
    loop {
        match work().await {
            Ok(done) => return done,
            Err(error) => {
                tracing::warn!(what, %error, ?pause, "a job's work failed; trying again");
            }
        }
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
