//! Beginning: the mark a job gets before it does what cannot be undone.
//!
//! A worker that was held up, frozen or cut off, may wake while others believe it dead and have its jobs.
//! Whoever marks first goes on: a job that another has by now cannot be marked, and one that was marked
//! counts as lost when its worker dies, because it may have been done.

use std::sync::Arc;

use super::{JobId, Taken, store::mark};
use crate::db::{Db, Gather};

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

    /// Marks a job; false when it is another's by now.
    pub async fn mark<J>(&self, taken: &Taken<J>) -> sqlx::Result<bool> {
        if taken.is_marked {
            return Ok(true);
        }
        self.0.get((taken.id.clone(), taken.worker.clone())).await
    }
}
