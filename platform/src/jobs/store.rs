//! What is done to the tables of the queue, on either database.
//!
//! The tables and what their columns mean are apalis's own, but for `lane` and `begun_at`. A job is `Pending`
//! until a worker takes it, and then `Queued`, or `Running` if it was born in its hands; `begun_at` is the mark
//! that it gets before it does what cannot be undone; one that is done is deleted. `attempts` counts how often
//! it was lost: marked, and then left by a worker that died.

mod taking;

use std::{sync::Arc, time::Duration};

use super::JobId;
use crate::db::{self, Conn, Db, Queryable as _, execute, fetch_optional};

/// How long a job rests that could not be read.
const REST: Duration = Duration::from_mins(1);

/// A text for each database: `jobs` and `workers` are the tables, `now` is the clock that says what is due.
macro_rules! on_each {
    ($on:expr, $($part:tt),+ $(,)?) => {
        if $on.is_postgres() {
            concat!($($crate::jobs::store::on_each!(@postgres $part)),+)
        } else {
            concat!($($crate::jobs::store::on_each!(@sqlite $part)),+)
        }
    };
    (@postgres jobs) => { "apalis.jobs" };
    (@postgres workers) => { "apalis.workers" };
    (@postgres now) => { "now()" };
    (@postgres seconds) => { "interval '1 second'" };
    (@sqlite jobs) => { "Jobs" };
    (@sqlite workers) => { "Workers" };
    (@sqlite now) => { "unixepoch()" };
    (@sqlite seconds) => { "1" };
    (@$database:ident ($text:expr)) => { $text };
    (@$database:ident $text:literal) => { $text };
}

/// Nobody has the job, and it may be taken.
macro_rules! free {
    () => {
        "status = 'Pending', lock_by = NULL, lock_at = NULL, begun_at = NULL"
    };
}

pub(super) use taking::{Raw, park};
pub(super) use {free, on_each};

/// The jobs of one queue.
#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) db: Db,
    pub(super) queue: &'static str,
}

impl Store {
    /// Enters a worker, which lives from now on.
    ///
    /// Under a type of its own: nodes of before, which do not know the mark, leave its jobs alone.
    pub(super) async fn register(&self, worker: &str) -> sqlx::Result<()> {
        let mut on = self.db.autocommit().await?;
        let text = on_each!(
            on,
            "INSERT INTO ",
            workers,
            " (id, worker_type, storage_name, layers, last_seen) \
             VALUES ($1, $2 || '/2', 'botix', '', ",
            now,
            ")"
        );
        execute!(&mut on, text, worker, self.queue).map(drop)
    }

    /// Puts back the jobs of workers that gave no sign of life for so long. Those that were marked count as
    /// lost once more.
    pub(super) async fn recover(&self, dead_for: Duration) -> sqlx::Result<()> {
        let dead_for = i64::try_from(dead_for.as_secs()).unwrap_or(i64::MAX);
        let mut tx = self.db.begin().await?;
        let put_back = if tx.is_postgres() {
            execute!(
                &mut tx,
                concat!(
                    "UPDATE apalis.jobs SET ",
                    free!(),
                    ", attempts = attempts + stale.lost \
                     FROM (SELECT j.id, CASE WHEN j.begun_at IS NULL AND j.status <> 'Running' THEN 0 ELSE 1 END \
                     AS lost FROM apalis.jobs j JOIN apalis.workers w ON w.id = j.lock_by \
                     WHERE j.status IN ('Queued', 'Running') AND w.worker_type IN ($1, $1 || '/2') \
                     AND w.last_seen <= now() - $2 * interval '1 second' FOR UPDATE OF j SKIP LOCKED) AS stale \
                     WHERE apalis.jobs.id = stale.id"
                ),
                self.queue,
                dead_for
            )?
        } else {
            execute!(
                &mut tx,
                concat!(
                    "UPDATE Jobs SET ",
                    free!(),
                    ", attempts = attempts + (begun_at IS NOT NULL) \
                     WHERE status IN ('Queued', 'Running') AND lock_by IN (SELECT id FROM Workers \
                     WHERE worker_type IN ($1, $1 || '/2') AND last_seen <= unixepoch() - $2)"
                ),
                self.queue,
                dead_for
            )?
        };
        tx.commit().await?;
        if put_back > 0 {
            tracing::info!(
                put_back,
                queue = self.queue,
                "jobs of dead workers run again"
            );
        }
        Ok(())
    }

    /// Gives jobs that a worker has back to the queue; nothing was done.
    pub(super) async fn give_back(&self, worker: &str, ids: &[&str]) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        for id in ids {
            let text = on_each!(
                tx,
                "UPDATE ",
                jobs,
                " SET ",
                (free!()),
                " WHERE id = $1 AND lock_by = $2"
            );
            execute!(&mut tx, text, *id, worker)?;
        }
        tx.commit().await
    }

    /// Gives a job that nobody could make sense of, or whose work panicked, back to the queue, to run again
    /// after a rest. It counts as lost; one that was lost too often is given up.
    pub(super) async fn rest(&self, worker: &str, id: &str) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        let text = on_each!(
            tx,
            "UPDATE ",
            jobs,
            " SET status = CASE WHEN attempts + 1 < max_attempts THEN 'Pending' ELSE 'Killed' END, \
             lock_by = NULL, lock_at = NULL, begun_at = NULL, attempts = attempts + 1, done_at = ",
            now,
            ", run_at = ",
            now,
            " + $3 * ",
            seconds,
            " WHERE id = $1 AND lock_by = $2"
        );
        let rest = i64::try_from(REST.as_secs()).unwrap_or(i64::MAX);
        execute!(&mut tx, text, id, worker, rest)?;
        tx.commit().await
    }

    /// Removes jobs that are done.
    pub(super) async fn remove(&self, ids: &[&str]) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        if let Conn::Postgres(conn) = tx.conn() {
            let removing = sqlx::query("DELETE FROM apalis.jobs WHERE id = ANY($1)")
                .bind(ids)
                .execute(conn);
            let removed = db::answered(removing).await;
            db::settle(&mut tx, removed)?;
        } else {
            for id in ids {
                execute!(&mut tx, "DELETE FROM Jobs WHERE id = $1", *id)?;
            }
        }
        tx.commit().await
    }

    /// Gives all that a worker holds back to the queue. What was marked counts as lost, unless all has ended.
    pub(super) async fn hand_back(&self, worker: &str, have_ended: bool) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        let text = on_each!(
            tx,
            "UPDATE ",
            jobs,
            " SET ",
            (free!()),
            ", attempts = attempts + CASE WHEN begun_at IS NOT NULL AND NOT $2 THEN 1 ELSE 0 END \
             WHERE lock_by = $1 AND status IN ('Queued', 'Running')"
        );
        execute!(&mut tx, text, worker, have_ended)?;
        tx.commit().await
    }

    /// Gives what a worker holds and did not begin back to the queue.
    pub(super) async fn hand_back_unbegun(&self, worker: &str) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        let text = if tx.is_postgres() {
            concat!(
                "UPDATE apalis.jobs SET ",
                free!(),
                " WHERE id = ANY (ARRAY(SELECT id FROM apalis.jobs WHERE lock_by = $1 \
                 AND begun_at IS NULL ORDER BY id FOR UPDATE))"
            )
        } else {
            concat!(
                "UPDATE Jobs SET ",
                free!(),
                " WHERE lock_by = $1 AND begun_at IS NULL"
            )
        };
        execute!(&mut tx, text, worker)?;
        tx.commit().await
    }
}

/// Marks jobs as begun; for each, whether it was its worker's still.
pub(super) async fn mark(db: Db, jobs: Vec<(JobId, Arc<str>)>) -> sqlx::Result<Vec<bool>> {
    // Locked in this order, as by all who lock many.
    let mut sorted: Vec<_> = jobs.iter().collect();
    sorted.sort_unstable_by_key(|(id, _)| id.as_str());
    let mut marked: Vec<(String,)> = Vec::new();
    if let Db::Postgres(_) = db {
        let mut on = db.autocommit().await?;
        let Conn::Postgres(conn) = on.conn() else {
            return Err(db::only_postgres());
        };
        let ids: Vec<&str> = sorted.iter().map(|(id, _)| id.as_str()).collect();
        let workers: Vec<&str> = sorted.iter().map(|(_, worker)| &**worker).collect();
        let marking = sqlx::query_as(
            "UPDATE apalis.jobs j SET begun_at = now() \
             FROM UNNEST($1::text[], $2::text[]) AS taken (id, worker) \
             WHERE j.id = taken.id AND j.lock_by = taken.worker RETURNING j.id",
        )
        .bind(ids)
        .bind(workers)
        .fetch_all(conn);
        let answer = db::answered(marking).await;
        marked = db::settle(&mut on, answer)?;
    } else {
        let mut tx = db.begin().await?;
        for (id, worker) in sorted {
            marked.extend(fetch_optional!(
                &mut tx,
                (String,),
                "UPDATE Jobs SET begun_at = unixepoch() WHERE id = $1 AND lock_by = $2 RETURNING id",
                id.as_str(),
                &**worker
            )?);
        }
        tx.commit().await?;
    }
    let is_marked = |id: &JobId| marked.iter().any(|(marked,)| marked == id.as_str());
    Ok(jobs.iter().map(|(id, _)| is_marked(id)).collect())
}

/// Says that workers live.
pub(super) async fn beat(db: &Db, names: &[Arc<str>]) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    for name in names {
        let text = on_each!(
            tx,
            "UPDATE ",
            workers,
            " SET last_seen = ",
            now,
            " WHERE id = $1"
        );
        execute!(&mut tx, text, &**name)?;
    }
    tx.commit().await
}
