//! Chores: what is done in batches and in the background, from one queue.

use serde::{Deserialize, Serialize};

use super::{
    endpoints::EndpointId,
    redeliveries::{self, RedeliveryId},
    tidy,
};
use crate::{
    db::{Db, Queryable, Timestamp},
    jobs::{self, Job},
};

/// A job that is no attempt.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chore {
    /// Does for all open deliveries of an endpoint what its resumption, disabling or deletion means.
    Tidy {
        /// Which endpoint.
        endpoint: EndpointId,
    },
    /// Goes on with a redelivery in bulk.
    Redeliver {
        /// Which one.
        redelivery: RedeliveryId,
        /// Which of its batches; any other one is not this job's.
        batch: i64,
    },
}

impl Job for Chore {
    const QUEUE: &'static str = "webhook-chores";

    fn unique_key(&self) -> Option<String> {
        None
    }
}

impl Chore {
    /// Has it done from `at` on, once the caller's transaction commits.
    pub(super) async fn enqueue(self, on: &mut impl Queryable, at: Timestamp) -> sqlx::Result<()> {
        jobs::enqueue(on, &[self], at).await
    }

    /// Does it, however long the database is away.
    pub async fn run(self, db: Db) {
        jobs::until_done("a chore", || async {
            match self {
                Self::Tidy { endpoint } => tidy::all(&db, endpoint).await,
                Self::Redeliver { redelivery, batch } => {
                    redeliveries::batch(&db, redelivery, batch).await
                }
            }
        })
        .await;
    }
}
