//! The walk over dead letters, and what happens to each.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use uuid::Uuid;

use super::RedeliveryId;
use crate::{
    contract::{auth::ProjectId, request_id::RequestId},
    db::{Conn, Db, Queryable, Timestamp, execute, fetch_all, fetch_optional},
    jobs,
    webhooks::{
        chores::Chore,
        dead_letters::{self, DeadLetterId, Resolution},
        deliveries::{DeliveryId, State},
        endpoints::{self, EndpointId},
        planning::{DeliverWebhook, Planned},
    },
};

/// Letters that one batch looks at.
const BATCH: i64 = 100;

/// The time from one batch to the next.
const PACE: Duration = Duration::from_secs(1);

/// Starts the ladder of a dead delivery afresh and resolves its letter: `None` when it is not dead,
/// else the job of its first step, unless it waits for its endpoint.
pub(super) async fn climb_again(
    on: &mut impl Queryable,
    delivery: DeliveryId,
    enabled: bool,
    now: Timestamp,
) -> sqlx::Result<Option<Option<DeliverWebhook>>> {
    let (state, due) = if enabled {
        (State::Retrying, Some(now))
    } else {
        (State::Paused, None)
    };
    let planned = fetch_optional!(
        on,
        Planned,
        "UPDATE webhook_deliveries SET state = $2, step = 1, ladder_number = next_number, \
         next_number = next_number + 1, job_copy = 0, request_id = $3, next_attempt_at = $4, \
         not_before = NULL, updated_at = $5 WHERE id = $1 AND state = 'dead' \
         RETURNING id, ladder_number, job_copy, project_id, endpoint_id",
        delivery,
        state.as_str(),
        RequestId::generate(),
        due,
        now
    )?;
    let Some(planned) = planned else {
        return Ok(None);
    };
    dead_letters::resolve(on, delivery, Resolution::Redelivered, now).await?;
    Ok(Some(due.map(|_| planned.into())))
}

#[derive(sqlx::FromRow)]
struct Walk {
    project_id: ProjectId,
    endpoint_id: Option<EndpointId>,
    event_type: Option<String>,
    until: Timestamp,
    reached_at: Timestamp,
    reached_id: Uuid,
}

#[derive(sqlx::FromRow)]
struct Letter {
    id: DeadLetterId,
    delivery_id: DeliveryId,
    endpoint_id: EndpointId,
    created_at: Timestamp,
}

/// Goes one batch further, and plans the next one unless this was the last.
pub(in crate::webhooks) async fn batch(db: &Db, id: RedeliveryId, batch: i64) -> sqlx::Result<()> {
    let mut tx = db.begin().await?;
    let text = match tx.conn() {
        Conn::Postgres(_) => {
            "SELECT project_id, endpoint_id, event_type, until, reached_at, reached_id \
             FROM webhook_redeliveries WHERE id = $1 AND status = 'running' AND batch = $2 FOR UPDATE"
        }
        Conn::Sqlite(_) => {
            "SELECT project_id, endpoint_id, event_type, until, reached_at, reached_id \
             FROM webhook_redeliveries WHERE id = $1 AND status = 'running' AND batch = $2"
        }
    };
    let Some(walk) = fetch_optional!(&mut tx, Walk, text, id, batch)? else {
        return tx.rollback().await;
    };
    let letters = fetch_all!(
        &mut tx,
        Letter,
        "SELECT id, delivery_id, endpoint_id, created_at FROM webhook_dead_letters \
         WHERE project_id = $1 AND status = 'open' AND (created_at, id) > ($2, $3) \
         AND created_at < $4 AND ($5 IS NULL OR endpoint_id = $5) \
         AND ($6 IS NULL OR event_type = $6) ORDER BY created_at, id LIMIT $7",
        walk.project_id,
        walk.reached_at,
        walk.reached_id,
        walk.until,
        walk.endpoint_id,
        walk.event_type.as_deref(),
        BATCH
    )?;
    let now = Timestamp::now();
    let (mut jobs, mut redelivered, mut skipped) = (Vec::new(), 0_i64, 0_i64);
    let mut known = HashMap::new();
    for letter in &letters {
        let enabled = match known.entry(letter.endpoint_id) {
            Entry::Occupied(enabled) => *enabled.get(),
            Entry::Vacant(vacant) => {
                let endpoint = letter.endpoint_id;
                *vacant.insert(endpoints::is_enabled_for_now(&mut tx, endpoint).await?)
            }
        };
        let climbs = match enabled {
            Some(enabled) => climb_again(&mut tx, letter.delivery_id, enabled, now).await?,
            None => None,
        };
        match climbs {
            Some(job) => {
                redelivered += 1;
                jobs.extend(job);
            }
            None => skipped += 1,
        }
    }
    jobs::enqueue(&mut tx, &jobs, now).await?;
    let (reached_at, reached_id) = letters
        .last()
        .map_or((walk.reached_at, walk.reached_id), |letter| {
            (letter.created_at, letter.id.into())
        });
    let more = letters.len() as u64 >= BATCH.unsigned_abs();
    execute!(
        &mut tx,
        "UPDATE webhook_redeliveries SET redelivered = redelivered + $2, skipped = skipped + $3, \
         reached_at = $4, reached_id = $5, batch = batch + 1, updated_at = $6, status = $7, \
         completed_at = $8 WHERE id = $1",
        id,
        redelivered,
        skipped,
        reached_at,
        reached_id,
        now,
        if more { "running" } else { "completed" },
        (!more).then_some(now)
    )?;
    if more {
        let next = Chore::Redeliver {
            redelivery: id,
            batch: batch + 1,
        };
        next.enqueue(&mut tx, now + PACE).await?;
    }
    tx.commit().await
}

/// Makes new jobs for redeliveries that run and have not gone on for so long; how many there were.
pub async fn rescue(db: &Db, overdue: Duration) -> sqlx::Result<usize> {
    let mut tx = db.begin().await?;
    let now = Timestamp::now();
    let lost = fetch_all!(
        &mut tx,
        (RedeliveryId, i64),
        "UPDATE webhook_redeliveries SET batch = batch + 1, updated_at = $2 \
         WHERE status = 'running' AND updated_at < $1 RETURNING id, batch",
        now - overdue,
        now
    )?;
    for (redelivery, batch) in &lost {
        let next = Chore::Redeliver {
            redelivery: *redelivery,
            batch: *batch,
        };
        next.enqueue(&mut tx, now).await?;
    }
    tx.commit().await?;
    Ok(lost.len())
}
