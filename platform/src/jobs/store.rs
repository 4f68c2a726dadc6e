//! What is done to the tables of the queue, on either database.
//!
//! The tables and what their columns mean are apalis's own, but for `lane` and `begun_at`. A job is `Pending`
//! until a worker takes it, and then `Queued`, or `Running` if it was born in its hands; `begun_at` is the mark
//! that it gets before it does what cannot be undone; one that is done is deleted. `attempts` counts how often
//! it was lost: marked, and then left by a worker that died.

use std::{sync::Arc, time::Duration};

use super::{
    JobId,
    lanes::{AT_MOST, Lane, PARKED, PRIORITIES, Parked},
};
use crate::db::{self, Conn, Db, Queryable, Tx, execute, fetch_all, fetch_one, fetch_optional};

/// How long a job rests that could not be read.
const REST: Duration = Duration::from_mins(1);

/// A job as it lies in the queue: its id and what is written in it.
pub(super) type Raw = (String, Vec<u8>);

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

/// The jobs of a queue that are due, in their order: first those of the first priority. Each priority is looked up
/// by itself, or all that are not due yet would be passed over one by one.
macro_rules! due_on_postgres {
    ($columns:literal) => {
        concat!(
            "SELECT d.* FROM UNNEST($1::integer[]) AS p (priority), LATERAL (SELECT ",
            $columns,
            " FROM apalis.jobs WHERE status = 'Pending' AND job_type = $2 AND priority = p.priority \
             AND run_at < now() ORDER BY run_at LIMIT $3 FOR UPDATE SKIP LOCKED) AS d LIMIT $3"
        )
    };
}

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
    pub(super) async fn recover(&self, dead_for: Duration) -> sqlx::Result<u64> {
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
        Ok(put_back)
    }

    /// Gives a worker up to `most` jobs that are due, in one statement. On PostgreSQL.
    pub(super) async fn fetch(&self, worker: &str, most: usize) -> sqlx::Result<Vec<Raw>> {
        let mut on = self.db.autocommit().await?;
        let Conn::Postgres(conn) = on.conn() else {
            return Err(only_postgres());
        };
        let fetching = sqlx::query_as(concat!(
            "UPDATE apalis.jobs j SET status = 'Queued', lock_by = $4, lock_at = now(), begun_at = NULL FROM (",
            due_on_postgres!("id"),
            ") AS due WHERE j.id = due.id RETURNING j.id, j.job"
        ))
        .bind(PRIORITIES)
        .bind(self.queue)
        .bind(count(most))
        .bind(worker)
        .fetch_all(conn);
        let fetched = db::answered(fetching).await;
        db::settle(&mut on, fetched)
    }

    /// Of `look` jobs that are due gives a worker up to `most`, and parks those for which `parks` names a lane.
    pub(super) async fn fetch_sorted(
        &self,
        worker: &str,
        look: usize,
        most: usize,
        parks: impl Fn(&[u8]) -> Option<Lane>,
    ) -> sqlx::Result<Vec<Raw>> {
        let mut tx = self.db.begin().await?;
        let (mut taken, mut parked) = (Vec::new(), Vec::new());
        for (id, job) in self.due(&mut tx, look).await? {
            match parks(&job) {
                Some(lane) => parked.push(Parked {
                    id: JobId(id),
                    worker: None,
                    lane,
                }),
                None if taken.len() < most => taken.push((id, job)),
                // Left for the next look.
                None => {}
            }
        }
        park_within(&mut tx, &parked).await?;
        let ids: Vec<&str> = taken.iter().map(|(id, _)| &**id).collect();
        take(&mut tx, worker, &ids).await?;
        tx.commit().await?;
        Ok(taken)
    }

    /// Whether any job is due, found without taking SQLite's only writer.
    pub(super) async fn is_any_due(&self) -> sqlx::Result<bool> {
        let mut on = self.db.read().await?;
        for priority in PRIORITIES {
            let found = fetch_one!(
                &mut on,
                (bool,),
                "SELECT EXISTS (SELECT 1 FROM Jobs WHERE job_type = $1 AND status = 'Pending' \
                 AND lock_by IS NULL AND priority = $2 AND run_at <= unixepoch())",
                self.queue,
                priority
            )?;
            if found.0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Jobs that are due, locked until the transaction ends.
    async fn due(&self, tx: &mut Tx, most: usize) -> sqlx::Result<Vec<Raw>> {
        let most = count(most);
        if let Conn::Postgres(conn) = tx.conn() {
            let looking = sqlx::query_as(due_on_postgres!("id, job"))
                .bind(PRIORITIES)
                .bind(self.queue)
                .bind(most)
                .fetch_all(conn);
            let found = db::answered(looking).await;
            return db::settle(tx, found);
        }
        let mut due: Vec<Raw> = Vec::new();
        for priority in PRIORITIES {
            due.extend(fetch_all!(
                tx,
                Raw,
                "SELECT id, job FROM Jobs WHERE job_type = $1 AND status = 'Pending' \
                 AND lock_by IS NULL AND priority = $2 AND run_at <= unixepoch() \
                 ORDER BY run_at, id LIMIT $3",
                self.queue,
                priority,
                most - count(due.len())
            )?);
        }
        Ok(due)
    }

    /// Gives a worker parked jobs, so many of each lane.
    pub(super) async fn fetch_parked(
        &self,
        worker: &str,
        openings: &[(Lane, usize)],
    ) -> sqlx::Result<Vec<(Lane, Raw)>> {
        let mut tx = self.db.begin().await?;
        let mut found: Vec<(Lane, String, Vec<u8>)> = Vec::new();
        if let Conn::Postgres(conn) = tx.conn() {
            let lanes: Vec<&str> = openings.iter().map(|(lane, _)| &**lane).collect();
            let places: Vec<i64> = openings.iter().map(|(_, places)| count(*places)).collect();
            let looking = sqlx::query_as(
                "SELECT l.lane, p.id, p.job FROM UNNEST($1::text[], $2::bigint[]) AS l (lane, places), \
                 LATERAL (SELECT id, job FROM apalis.jobs WHERE job_type = $3 AND status = 'Pending' \
                 AND priority < 0 AND lane = l.lane ORDER BY priority DESC, run_at LIMIT l.places \
                 FOR UPDATE SKIP LOCKED) AS p",
            )
            .bind(lanes)
            .bind(places)
            .bind(self.queue)
            .fetch_all(conn);
            let answer = db::answered(looking).await;
            found = db::settle(&mut tx, answer)?;
        } else {
            for (lane, places) in openings {
                found.extend(fetch_all!(
                    &mut tx,
                    (Lane, String, Vec<u8>),
                    "SELECT lane, id, job FROM Jobs WHERE job_type = $1 AND status = 'Pending' \
                     AND priority < 0 AND lane = $2 ORDER BY priority DESC, run_at LIMIT $3",
                    self.queue,
                    lane,
                    count(*places)
                )?);
            }
        }
        let ids: Vec<&str> = found.iter().map(|(_, id, _)| &**id).collect();
        take(&mut tx, worker, &ids).await?;
        tx.commit().await?;
        let found = found.into_iter().map(|(lane, id, job)| (lane, (id, job)));
        Ok(found.collect())
    }

    /// Lanes with parked jobs, up to `most`, in order, from the one after `last` on.
    pub(super) async fn lanes_after(&self, last: &str, most: usize) -> sqlx::Result<Vec<Lane>> {
        let mut on = self.db.read().await?;
        let text = on_each!(
            on,
            "WITH RECURSIVE found (lane) AS (SELECT * FROM (SELECT lane FROM ",
            jobs,
            " WHERE job_type = $1 AND status = 'Pending' AND priority < 0 AND lane > $2 \
             ORDER BY lane LIMIT 1) AS first UNION ALL SELECT (SELECT j.lane FROM ",
            jobs,
            " j WHERE j.job_type = $1 AND j.status = 'Pending' AND j.priority < 0 AND j.lane > found.lane \
             ORDER BY j.lane LIMIT 1) FROM found WHERE found.lane IS NOT NULL) \
             SELECT lane FROM found WHERE lane IS NOT NULL LIMIT $3"
        );
        let found = fetch_all!(&mut on, (Lane,), text, self.queue, last, count(most))?;
        Ok(found.into_iter().map(|(lane,)| lane).collect())
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
                " WHERE id IN (SELECT id FROM apalis.jobs WHERE lock_by = $1 AND begun_at IS NULL \
                 ORDER BY id FOR UPDATE)"
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
            return Err(only_postgres());
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

/// Parks jobs.
pub(super) async fn park(db: Db, mut jobs: Vec<Parked>) -> sqlx::Result<Vec<()>> {
    jobs.sort_unstable_by(|a, b| a.id.as_str().cmp(b.id.as_str()));
    let mut tx = db.begin().await?;
    park_within(&mut tx, &jobs).await?;
    tx.commit().await?;
    Ok(vec![(); jobs.len()])
}

/// Parks jobs that are their worker's, or that the transaction has locked.
async fn park_within(tx: &mut Tx, jobs: &[Parked]) -> sqlx::Result<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let at_most = i64::try_from(AT_MOST.as_secs()).unwrap_or(i64::MAX);
    if let Conn::Postgres(conn) = tx.conn() {
        let ids: Vec<&str> = jobs.iter().map(|job| job.id.as_str()).collect();
        let workers: Vec<Option<&str>> = jobs.iter().map(|job| job.worker.as_deref()).collect();
        let lanes: Vec<&str> = jobs.iter().map(|job| &*job.lane).collect();
        let parking = sqlx::query(concat!(
            "UPDATE apalis.jobs j SET ", free!(),
            ", lane = p.lane, priority = CASE WHEN j.priority < 0 THEN j.priority ELSE j.priority - $4 END, \
             run_at = GREATEST(j.run_at + $5 * interval '1 second', now() + $5 / 2 * interval '1 second') \
             FROM UNNEST($1::text[], $2::text[], $3::text[]) AS p (id, worker, lane) \
             WHERE j.id = p.id AND j.lock_by IS NOT DISTINCT FROM p.worker"
        ))
        .bind(ids)
        .bind(workers)
        .bind(lanes)
        .bind(PARKED)
        .bind(at_most)
        .execute(conn);
        let parked = db::answered(parking).await;
        return db::settle(tx, parked).map(drop);
    }
    for job in jobs {
        execute!(
            tx,
            concat!(
                "UPDATE Jobs SET ",
                free!(),
                ", lane = $3, priority = CASE WHEN priority < 0 THEN priority ELSE priority - $4 END, \
                 run_at = max(run_at + $5, unixepoch() + $5 / 2) \
                 WHERE id = $1 AND lock_by IS $2"
            ),
            job.id.as_str(),
            job.worker.as_deref(),
            &*job.lane,
            PARKED,
            at_most
        )?;
    }
    Ok(())
}

/// Puts jobs that the transaction has locked into a worker's hands; parked ones are so no longer.
async fn take(tx: &mut Tx, worker: &str, ids: &[&str]) -> sqlx::Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    if let Conn::Postgres(conn) = tx.conn() {
        let taking = sqlx::query(
            "UPDATE apalis.jobs SET status = 'Queued', lock_by = $2, lock_at = now(), begun_at = NULL, \
             priority = CASE WHEN priority < 0 THEN priority + $3 ELSE priority END, \
             run_at = LEAST(run_at, now()) WHERE id = ANY($1)",
        )
        .bind(ids)
        .bind(worker)
        .bind(PARKED)
        .execute(conn);
        let taken = db::answered(taking).await;
        return db::settle(tx, taken).map(drop);
    }
    for id in ids {
        execute!(
            tx,
            "UPDATE Jobs SET status = 'Queued', lock_by = $2, lock_at = unixepoch(), begun_at = NULL, \
             priority = CASE WHEN priority < 0 THEN priority + $3 ELSE priority END, \
             run_at = min(run_at, unixepoch()) WHERE id = $1",
            *id,
            worker,
            PARKED
        )?;
    }
    Ok(())
}

fn count(of: usize) -> i64 {
    i64::try_from(of).unwrap_or(i64::MAX)
}

pub(super) fn only_postgres() -> sqlx::Error {
    sqlx::Error::Protocol("a statement for PostgreSQL".to_owned())
}
