//! Beginning: the mark a job gets before it does what cannot be undone.
//!
//! A worker that was held up, frozen or cut off, may wake while others believe it dead and have its jobs.
//! Whoever marks first goes on: a job that another has by now cannot be marked, and one that was marked
//! counts as lost when its worker dies, because it may have been done.

use std::sync::Arc;

use super::{JobId, Taken};
use crate::db::{self, Conn, Db, Gather, Queryable as _};

/// Marks in one statement.
const LARGEST: usize = 200;

/// Marks jobs as begun, together with others.
#[derive(Clone, Debug)]
pub struct Begin(Gather<(JobId, Arc<str>), bool>);

impl Begin {
    /// In the queues of this database.
    pub fn new(db: Db) -> Self {
        Self(Gather::new(LARGEST, move |jobs| {
            Box::pin(mark(db.clone(), jobs))
        }))
    }

    /// Marks a job; false when it is another's by now. On SQLite there is no other.
    pub async fn mark<J>(&self, taken: &Taken<J>) -> sqlx::Result<bool> {
        match &taken.worker {
            Some(worker) if !taken.is_marked => {
                self.0.get((taken.id.clone(), worker.clone())).await
            }
            _ => Ok(true),
        }
    }
}

async fn mark(db: Db, jobs: Vec<(JobId, Arc<str>)>) -> sqlx::Result<Vec<bool>> {
    let mut on = db.read().await?;
    let Conn::Postgres(conn) = on.conn() else {
        return Ok(vec![true; jobs.len()]);
    };
    let ids: Vec<&str> = jobs.iter().map(|(id, _)| id.as_str()).collect();
    let workers: Vec<&str> = jobs.iter().map(|(_, worker)| &**worker).collect();
    let marking = sqlx::query_as(
        "UPDATE apalis.jobs j SET status = 'Running' \
         FROM UNNEST($1::text[], $2::text[]) AS taken (id, worker) \
         WHERE j.id = taken.id AND j.lock_by = taken.worker RETURNING j.id",
    )
    .bind(ids)
    .bind(workers)
    .fetch_all(conn);
    let marked = db::answered(marking).await;
    let marked: Vec<(String,)> = db::settle(&mut on, marked)?;
    let is_marked = |id: &JobId| marked.iter().any(|(marked,)| marked == id.as_str());
    Ok(jobs.iter().map(|(id, _)| is_marked(id)).collect())
}
