//! Tidying: what an endpoint's resumption, disabling or deletion means for its open deliveries.
//!
//! There may be millions of them, so they are seen to in batches: the first in the transaction that
//! changes the endpoint, so that whoever asks next sees it, the others by a job. Each batch looks at
//! the endpoint anew, so the last change counts.

use super::{
    chores::Chore,
    endpoints::{self, EndpointId},
    planning::{DeliverWebhook, Planned},
};
use crate::{
    db::{Db, Queryable, Timestamp, fetch_all, fetch_one},
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

/// Whether an endpoint has a delivery in one of these states.
macro_rules! is_any_left {
    ($on:expr, $endpoint:expr, $states:literal) => {
        fetch_one!(
            $on,
            (bool,),
            concat!(
                "SELECT EXISTS (SELECT 1 FROM webhook_deliveries WHERE endpoint_id = $1 AND state IN ",
                $states,
                ")"
            ),
            $endpoint
        )?
        .0
    };
}

/// Sends what waited for an endpoint that is enabled, lets wait what is open of one that is disabled,
/// and cancels what is open of one that is gone; whether there may be more.
async fn batch(
    on: &mut impl Queryable,
    endpoint: EndpointId,
    enabled: Option<bool>,
) -> sqlx::Result<bool> {
    // Asked, not counted: of those that were picked some may have been settled meanwhile, so a batch that is not
    // full need not be the last.
    let left = match enabled {
        Some(true) => {
            release(on, endpoint).await?;
            is_any_left!(on, endpoint, "('paused')")
        }
        Some(false) => {
            hold(on, endpoint).await?;
            is_any_left!(on, endpoint, "('pending', 'retrying')")
        }
        None => {
            cancel(on, endpoint).await?;
            is_any_left!(on, endpoint, "('pending', 'retrying', 'paused')")
        }
    };
    Ok(left)
}

/// The next deliveries of endpoint `$1` in these states. PostgreSQL locks them in the order of their ids, as whoever
/// settles many does, so that neither waits for the other.
macro_rules! next_in {
    (postgres, $states:literal) => {
        concat!(
            // As arrays, each is made once, whatever the planner believes of the states.
            "= ANY (ARRAY(SELECT id FROM webhook_deliveries WHERE id = ANY (ARRAY(\
             SELECT id FROM webhook_deliveries WHERE endpoint_id = $1 AND state IN ",
            $states,
            " LIMIT $3)) ORDER BY id FOR UPDATE)) AND state IN ",
            $states
        )
    };
    (sqlite, $states:literal) => {
        concat!(
            "IN (SELECT id FROM webhook_deliveries WHERE endpoint_id = $1 AND state IN ",
            $states,
            " LIMIT $3)"
        )
    };
}

/// A statement over [`next_in`] for each database.
macro_rules! over_next {
    ($on:expr, $before:literal, $states:literal) => {
        if $on.is_postgres() {
            concat!(
                $before,
                " WHERE id ",
                next_in!(postgres, $states),
                planned!()
            )
        } else {
            concat!($before, " WHERE id ", next_in!(sqlite, $states), planned!())
        }
    };
}

/// The columns of [`Planned`] and [`Released`].
macro_rules! planned {
    () => {
        " RETURNING id, ladder_number, job_copy, project_id, endpoint_id, next_attempt_at"
    };
}

async fn hold(on: &mut impl Queryable, endpoint: EndpointId) -> sqlx::Result<()> {
    let text = over_next!(
        on,
        "UPDATE webhook_deliveries SET state = 'paused', next_attempt_at = NULL, updated_at = $2",
        "('pending', 'retrying')"
    );
    let held = fetch_all!(on, Planned, text, endpoint, Timestamp::now(), BATCH)?;
    withdraw(on, held).await
}

/// A delivery that no longer waits for its endpoint.
#[derive(sqlx::FromRow)]
struct Released {
    #[sqlx(flatten)]
    planned: Planned,
    next_attempt_at: Timestamp,
}

/// At once, but for those whose receiver asked for a later time.
async fn release(on: &mut impl Queryable, endpoint: EndpointId) -> sqlx::Result<()> {
    let text = over_next!(
        on,
        "UPDATE webhook_deliveries SET state = CASE WHEN attempts = 0 THEN 'pending' ELSE 'retrying' END, \
         next_attempt_at = CASE WHEN not_before > $2 THEN not_before ELSE $2 END, updated_at = $2, \
         job_copy = job_copy + 1",
        "('paused')"
    );
    let released = fetch_all!(on, Released, text, endpoint, Timestamp::now(), BATCH)?;
    let jobs: Vec<_> = (released.into_iter())
        .map(|one| (DeliverWebhook::from(one.planned), one.next_attempt_at))
        .collect();
    jobs::enqueue_each(on, jobs.iter().map(|(job, at)| (job, *at))).await
}

async fn cancel(on: &mut impl Queryable, endpoint: EndpointId) -> sqlx::Result<()> {
    let text = over_next!(
        on,
        "UPDATE webhook_deliveries SET state = 'cancelled', next_attempt_at = NULL, updated_at = $2",
        "('pending', 'retrying', 'paused')"
    );
    let cancelled = fetch_all!(on, Planned, text, endpoint, Timestamp::now(), BATCH)?;
    withdraw(on, cancelled).await
}

/// Takes the jobs of these deliveries out of the queue, or each would take a place at the endpoint once it is
/// resumed, to find that it is an old one.
async fn withdraw(on: &mut impl Queryable, planned: Vec<Planned>) -> sqlx::Result<()> {
    let jobs: Vec<_> = planned.into_iter().map(DeliverWebhook::from).collect();
    jobs::withdraw(on, &jobs).await
}
