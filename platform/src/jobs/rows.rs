//! Jobs as rows, for statements of PostgreSQL that write them beside other things.

use sqlx::{Postgres, postgres::PgArguments, query::QueryAs};
use ulid::Ulid;

use super::{Job, JobId};

/// The part of a statement that writes the jobs in `$source`: rows `j` of `id`, `job`, `key` and `lock_by`.
/// `$queue` is bound to the name of their queue, `$priority` and `$due` say which come first and from when
/// they may run. That is told by the database's clock alone, by which the queue is read too: the clocks of
/// nodes may be wrong, or set while jobs wait.
macro_rules! insert_jobs {
    ($queue:literal, $priority:literal, $due:literal, $source:literal) => {
        concat!(
            "INSERT INTO apalis.jobs (id, job_type, job, status, attempts, max_attempts, run_at, priority, \
             metadata, idempotency_key, lock_by, lock_at, begun_at) SELECT j.id, ",
            $queue,
            ", j.job, CASE WHEN j.lock_by IS NULL THEN 'Pending' ELSE 'Running' END, 0, 25, ",
            $due,
            ", ",
            $priority,
            ", '', j.key, j.lock_by, CASE WHEN j.lock_by IS NOT NULL THEN now() END, \
             CASE WHEN j.lock_by IS NOT NULL THEN now() END FROM ",
            $source
        )
    };
}

pub(crate) use insert_jobs;

/// Jobs as the columns of their rows.
#[derive(Debug, Default)]
pub struct Rows {
    ids: Vec<String>,
    jobs: Vec<Vec<u8>>,
    keys: Vec<Option<String>>,
    lock_by: Vec<Option<String>>,
}

impl Rows {
    /// Adds a job, taken by a worker or not.
    pub fn push(&mut self, job: &impl Job, taken_by: Option<&str>) -> serde_json::Result<JobId> {
        let id = JobId(Ulid::generate().to_string());
        self.jobs.push(serde_json::to_vec(job)?);
        self.keys.push(job.unique_key());
        self.lock_by.push(taken_by.map(str::to_owned));
        self.ids.push(id.0.clone());
        Ok(id)
    }

    /// Binds the columns `id`, `job`, `key` and `lock_by` as arrays, in this order.
    pub fn bind<R>(
        self,
        query: QueryAs<'_, Postgres, R, PgArguments>,
    ) -> QueryAs<'_, Postgres, R, PgArguments> {
        query
            .bind(self.ids)
            .bind(self.jobs)
            .bind(self.keys)
            .bind(self.lock_by)
    }
}
