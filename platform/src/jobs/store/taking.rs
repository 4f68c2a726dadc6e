//! Taking jobs out of the queue, and parking those for which there is no room.

use super::{
    super::{
        JobId,
        lanes::{AT_MOST, Lane, PARKED, PRIORITIES, Parked},
    },
    Store, free, on_each,
};
use crate::db::{self, Conn, Db, Queryable, Tx, execute, fetch_all, fetch_one};

/// A job as it lies in the queue: its id and what is written in it.
pub(in crate::jobs) type Raw = (String, Vec<u8>);

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

impl Store {
    /// Gives a worker up to `most` jobs that are due, in one statement. On PostgreSQL.
    pub(in crate::jobs) async fn fetch(&self, worker: &str, most: usize) -> sqlx::Result<Vec<Raw>> {
        let mut on = self.db.autocommit().await?;
        let Conn::Postgres(conn) = on.conn() else {
            return Err(db::only_postgres());
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
    pub(in crate::jobs) async fn fetch_sorted(
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
    pub(in crate::jobs) async fn is_any_due(&self) -> sqlx::Result<bool> {
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
    pub(in crate::jobs) async fn fetch_parked(
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
    pub(in crate::jobs) async fn lanes_after(
        &self,
        last: &str,
        most: usize,
    ) -> sqlx::Result<Vec<Lane>> {
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
}

/// Parks jobs.
pub(in crate::jobs) async fn park(db: Db, mut jobs: Vec<Parked>) -> sqlx::Result<Vec<()>> {
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
