//! Tidying: what an endpoint's resumption, disabling or deletion means for its open deliveries.
//!
//! There may be millions of them, so they are seen to in batches: the first in the transaction that
//! changes the endpoint, so that whoever asks next sees it, the others by a job. Each batch looks at
//! the endpoint anew, so the last change counts.

use super::{
    chores::Chore,
    deliveries::{DeliverWebhook, Planned},
    endpoints::{self, EndpointId},
};
use crate::{
    db::{Db, Queryable, Timestamp, execute, fetch_all},
    jobs,
};

/// Deliveries that one transaction of a tidying touches at most.
const BATCH: i64 = 1_000;

/// Has the open deliveries of an endpoint seen to, once the caller's transaction commits.
pub(super) async fn later(on: &mut impl Queryable, endpoint: EndpointId) -> sqlx::Result<()> {
    Chore::Tidy { endpoint }.enqueue(on, Timestamp::now()).await
}

/// Sees to a first batch of the open deliveries of an endpoint within the caller's transaction, and
/// has the others seen to later: there may be millions of them. `enabled` is what the endpoint is
/// from now on, `None` where it is gone.
pub(super) async fn now_and_later(
    on: &mut impl Queryable,
    endpoint: EndpointId,
    enabled: Option<bool>,
) -> sqlx::Result<()> {
    if batch(on, endpoint, enabled).await? {
        later(on, endpoint).await?;
    }
    Ok(())
}

/// Sees to all open deliveries of an endpoint, in batches.
pub async fn all(db: &Db, endpoint: EndpointId) -> sqlx::Result<()> {
    loop {
        let mut tx = db.begin().await?;
        let enabled = endpoints::is_enabled_for_now(&mut tx, endpoint).await?;
        let more = batch(&mut tx, endpoint, enabled).await?;
        tx.commit().await?;
        if !more {
            return Ok(());
        }
    }
}

/// Sends what waited for an endpoint that is enabled, lets wait what is open of one that is disabled,
/// and cancels what is open of one that is gone; whether there may be more.
async fn batch(
    on: &mut impl Queryable,
    endpoint: EndpointId,
    enabled: Option<bool>,
) -> sqlx::Result<bool> {
    let done = match enabled {
        Some(true) => release(on, endpoint).await?,
        Some(false) => hold(on, endpoint).await?,
        None => cancel(on, endpoint).await?,
    };
    Ok(done >= BATCH.unsigned_abs())
}

async fn hold(on: &mut impl Queryable, endpoint: EndpointId) -> sqlx::Result<u64> {
    execute!(
        on,
        "UPDATE webhook_deliveries SET state = 'paused', next_attempt_at = NULL, updated_at = $2 \
         WHERE id IN (SELECT id FROM webhook_deliveries WHERE endpoint_id = $1 \
         AND state IN ('pending', 'retrying') LIMIT $3) AND state IN ('pending', 'retrying')",
        endpoint,
        Timestamp::now(),
        BATCH
    )
}

async fn release(on: &mut impl Queryable, endpoint: EndpointId) -> sqlx::Result<u64> {
    let now = Timestamp::now();
    let released = fetch_all!(
        on,
        Planned,
        "UPDATE webhook_deliveries SET state = CASE WHEN attempts = 0 THEN 'pending' ELSE 'retrying' END, \
         next_attempt_at = $2, updated_at = $2, job_copy = job_copy + 1 WHERE id IN \
         (SELECT id FROM webhook_deliveries WHERE endpoint_id = $1 AND state = 'paused' LIMIT $3) \
         AND state = 'paused' RETURNING id, ladder_number, job_copy, project_id, endpoint_id",
        endpoint,
        now,
        BATCH
    )?;
    let jobs: Vec<_> = released.into_iter().map(DeliverWebhook::from).collect();
    jobs::enqueue(on, &jobs, now).await?;
    Ok(jobs.len() as u64)
}

async fn cancel(on: &mut impl Queryable, endpoint: EndpointId) -> sqlx::Result<u64> {
    execute!(
        on,
        "UPDATE webhook_deliveries SET state = 'cancelled', next_attempt_at = NULL, updated_at = $2 \
         WHERE id IN (SELECT id FROM webhook_deliveries WHERE endpoint_id = $1 \
         AND state IN ('pending', 'retrying', 'paused') LIMIT $3) \
         AND state IN ('pending', 'retrying', 'paused')",
        endpoint,
        Timestamp::now(),
        BATCH
    )
}
