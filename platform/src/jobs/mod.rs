//! Durable jobs on apalis: enqueued inside the business's own transaction, run by workers.
//!
//! A job is `Ok` once its outcome is settled in our own tables; what is to be tried again later is a
//! new job with its own `run_at`, never apalis's own retry. A process may begin itself what it has just
//! enqueued ([`Hand`]). Workers are named by a new ULID per start,
//! because a worker that comes back under its old name never recovers the jobs it held; heartbeats are
//! set so that the jobs of a killed process run again within 15 seconds. A worker that loses the
//! database ends, also where the wire only went silent ([`queue`]); [`run`] starts the next one. [`store`] says
//! what all of them do to the tables, and jobs that find no room wait in [`lanes`].

mod begin;
mod hand;
mod lanes;
mod pace;
mod queue;
mod rows;
mod run;
mod store;

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use ulid::Ulid;

pub use begin::Begin;
pub use hand::{Grip, Hand};
pub use lanes::{Lane, Lanes, Parking};
pub use rows::Rows;
pub(crate) use rows::insert_jobs;
pub use run::{Run, until_done};
use store::{free, on_each};

use crate::db::{self, Conn, Db, Queryable, Timestamp, execute};

/// How long jobs that were given up stay.
const KEEP_FINISHED: Duration = Duration::from_mins(10);

/// A kind of job.
pub trait Job: Serialize + DeserializeOwned + Send + Sync + Unpin + 'static {
    /// The queue it waits in.
    const QUEUE: &'static str;

    /// A name that no second job of the queue may have, if there is one.
    fn unique_key(&self) -> Option<String>;

    /// Of the jobs that are due, those with more come first: 0 or [`FRESH`].
    fn priority(&self) -> i32 {
        0
    }

    /// Which jobs it shares a narrow place with, if any.
    fn lane(&self) -> Option<Lane> {
        None
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
    enqueue_each(on, jobs.iter().map(|job| (job, run_at))).await
}

/// Puts jobs into their queue, each to run at a time of its own.
pub async fn enqueue_each<'j, J: Job>(
    on: &mut impl Queryable,
    jobs: impl IntoIterator<Item = (&'j J, Timestamp)>,
) -> sqlx::Result<()> {
    let jobs: Vec<_> = jobs.into_iter().collect();
    if jobs.is_empty() {
        return Ok(());
    }
    on.announce();
    if on.is_postgres() {
        enqueue_postgres(on, &jobs).await
    } else {
        enqueue_sqlite(on, &jobs).await
    }
}

async fn enqueue_postgres<J: Job>(
    on: &mut impl Queryable,
    jobs: &[(&J, Timestamp)],
) -> sqlx::Result<()> {
    let now = Timestamp::now();
    let mut rows = Rows::default();
    let mut priorities = Vec::new();
    let mut delays = Vec::new();
    for (job, run_at) in jobs {
        rows.push(*job, None).map_err(unwritable)?;
        priorities.push(job.priority());
        let delay = run_at.since(now).as_micros();
        delays.push(i64::try_from(delay).unwrap_or(i64::MAX));
    }
    if let Conn::Postgres(conn) = on.conn() {
        let inserting = rows.bind(sqlx::query_as::<_, ()>(insert_jobs!(
            "$5",
            "j.priority",
            "clock_timestamp() + j.delay * interval '1 microsecond'",
            "UNNEST($1::text[], $2::bytea[], $3::text[], $4::text[], $6::integer[], $7::bigint[]) \
             AS j (id, job, key, lock_by, priority, delay)"
        )));
        let inserting = inserting
            .bind(J::QUEUE)
            .bind(priorities)
            .bind(delays)
            .fetch_all(conn);
        let inserted = db::answered(inserting).await;
        db::settle(on, inserted)?;
    }
    Ok(())
}

async fn enqueue_sqlite<J: Job>(
    on: &mut impl Queryable,
    jobs: &[(&J, Timestamp)],
) -> sqlx::Result<()> {
    for (job, run_at) in jobs {
        execute!(
            on,
            "INSERT INTO Jobs (id, job_type, job, status, attempts, max_attempts, run_at, priority, metadata, \
             idempotency_key) VALUES ($1, $2, $3, 'Pending', 0, 25, $4, $5, '{}', $6)",
            Ulid::generate().to_string(),
            J::QUEUE,
            serde_json::to_vec(*job).map_err(unwritable)?,
            seconds(*run_at),
            job.priority(),
            job.unique_key()
        )?;
    }
    Ok(())
}

/// When a job may run, as SQLite keeps it. What is due now is due whatever the clock is set to later.
fn seconds(run_at: Timestamp) -> i64 {
    if run_at <= Timestamp::now() {
        0
    } else {
        run_at.seconds_ceil()
    }
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
    /// The worker that has it.
    pub worker: Arc<str>,
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

/// Removes a job whose outcome the caller's transaction settles.
pub async fn remove(on: &mut impl Queryable, id: &JobId) -> sqlx::Result<()> {
    let text = on_each!(on, "DELETE FROM ", jobs, " WHERE id = $1");
    execute!(on, text, id.as_str()).map(drop)
}

/// Takes jobs out of their queue that wait there and were never begun; all others stay.
pub async fn withdraw<J: Job>(on: &mut impl Queryable, jobs: &[J]) -> sqlx::Result<()> {
    let keys: Vec<_> = jobs.iter().filter_map(Job::unique_key).collect();
    if let Conn::Postgres(conn) = on.conn() {
        let removing = sqlx::query(
            "DELETE FROM apalis.jobs WHERE id = ANY (ARRAY(SELECT id FROM apalis.jobs WHERE job_type = $1 \
             AND idempotency_key = ANY ($2) AND status = 'Pending' AND attempts = 0 \
             ORDER BY id FOR UPDATE SKIP LOCKED))",
        )
        .bind(J::QUEUE)
        .bind(keys)
        .execute(conn);
        let removed = db::answered(removing).await;
        return db::settle(on, removed).map(drop);
    }
    for key in keys {
        execute!(
            on,
            "DELETE FROM Jobs WHERE job_type = $1 AND idempotency_key = $2 AND status = 'Pending' \
             AND attempts = 0",
            J::QUEUE,
            key
        )?;
    }
    Ok(())
}

/// Puts back at once what the workers of a queue have; whoever does so knows that none of them lives.
pub async fn take_over<J: Job>(db: &Db) -> sqlx::Result<()> {
    let store = store::Store {
        db: db.clone(),
        queue: J::QUEUE,
    };
    store.recover(Duration::ZERO).await
}

/// Lets a job run later, as the same job: what it counts as lost for stays with it. False where it is
/// another worker's by now.
pub async fn put_off<J>(
    on: &mut impl Queryable,
    taken: &Taken<J>,
    run_at: Timestamp,
) -> sqlx::Result<bool> {
    let put_off = if on.is_postgres() {
        let delay = run_at.since(Timestamp::now());
        execute!(
            on,
            concat!(
                "UPDATE apalis.jobs SET ",
                free!(),
                ", priority = 0, run_at = clock_timestamp() + $3 * interval '1 microsecond' \
                 WHERE id = $1 AND lock_by = $2"
            ),
            taken.id.as_str(),
            &*taken.worker,
            i64::try_from(delay.as_micros()).unwrap_or(i64::MAX)
        )?
    } else {
        execute!(
            on,
            concat!(
                "UPDATE Jobs SET ",
                free!(),
                ", priority = 0, run_at = $3 WHERE id = $1 AND lock_by = $2"
            ),
            taken.id.as_str(),
            &*taken.worker,
            seconds(run_at)
        )?
    };
    Ok(put_off > 0)
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
