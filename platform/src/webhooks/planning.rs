//! Planning: deliveries and their jobs, and when the next attempt of one is made.
//!
//! A delivery's `state` is the truth; its job is only what makes the next step happen. The number of an attempt
//! is given out when it is planned.

use serde::{Deserialize, Serialize};

use super::{
    deliveries::{DeliveryId, State},
    endpoints::EndpointId,
    events::Event,
    repeats::Repeat,
    rooms,
};
use crate::{
    contract::{auth::ProjectId, request_id::RequestId},
    db::{self, Conn, Db, Queryable, Timestamp, execute, fetch_optional},
    jobs::{self, Ended, Job, Lane, Taken},
};

/// The job that makes one planned attempt.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeliverWebhook {
    /// Which delivery.
    pub delivery_id: DeliveryId,
    /// The number of the attempt.
    pub number: i64,
    /// Tells this job from another one for the same attempt, where one was put off or lost.
    pub copy: i64,
    /// Whose it is, and where it goes: enough to find out whether there is room, before any reading.
    pub project_id: ProjectId,
    /// See [`project_id`](Self::project_id).
    pub endpoint_id: EndpointId,
    /// The attempt is no step of the ladder, but this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeat: Option<Repeat>,
}

impl DeliverWebhook {
    /// The first attempt of a delivery.
    pub(super) fn first(delivery: DeliveryId, project: ProjectId, endpoint: EndpointId) -> Self {
        Self {
            delivery_id: delivery,
            number: 1,
            copy: 0,
            project_id: project,
            endpoint_id: endpoint,
            repeat: None,
        }
    }

    /// The request id that the attempt is sent with; `of_ladder` is the delivery's own.
    pub(super) fn request_id(&self, of_ladder: RequestId) -> RequestId {
        let own = self.repeat.as_ref().map(|repeat| repeat.request_id);
        own.unwrap_or(of_ladder)
    }
}

impl Job for DeliverWebhook {
    const QUEUE: &'static str = "deliver-webhook";

    fn priority(&self) -> i32 {
        // Before what failed or was put off, of which there may be any amount.
        if self.number == 1 && self.copy == 0 || self.repeat.is_some() {
            jobs::FRESH
        } else {
            0
        }
    }

    fn lane(&self) -> Option<Lane> {
        Some(rooms::lane(self.endpoint_id))
    }

    fn unique_key(&self) -> Option<String> {
        // A repeat that is put off has the same job again.
        if self.repeat.is_some() {
            return None;
        }
        // Spelt as the sweep that looks for lost jobs can spell it in SQL.
        let id = uuid::Uuid::from(self.delivery_id);
        Some(format!("{}:{}:{}", id.simple(), self.number, self.copy))
    }
}

/// The planned attempt of a delivery.
#[derive(sqlx::FromRow)]
pub(super) struct Planned {
    id: DeliveryId,
    ladder_number: i64,
    job_copy: i64,
    project_id: ProjectId,
    endpoint_id: EndpointId,
}

impl From<Planned> for DeliverWebhook {
    fn from(planned: Planned) -> Self {
        Self {
            delivery_id: planned.id,
            number: planned.ladder_number,
            copy: planned.job_copy,
            project_id: planned.project_id,
            endpoint_id: planned.endpoint_id,
            repeat: None,
        }
    }
}

/// Makes a delivery, and its job unless it waits.
pub(super) async fn create(
    on: &mut impl Queryable,
    event: &Event,
    endpoint: EndpointId,
    state: State,
    is_test: bool,
) -> sqlx::Result<(DeliveryId, RequestId)> {
    let id = DeliveryId::generate();
    let request_id = RequestId::generate();
    let due = (state == State::Pending).then_some(event.created_at);
    execute!(
        on,
        "INSERT INTO webhook_deliveries (id, project_id, event_id, event_type, endpoint_id, request_id, \
         state, attempts, next_number, ladder_number, step, job_copy, next_attempt_at, is_test, created_at, \
         updated_at) VALUES ($1, $2, $3, $4, $5, $6, $7, 0, 2, 1, 1, 0, $8, $9, $10, $10)",
        id,
        event.project_id,
        event.id,
        &event.event_type,
        endpoint,
        request_id,
        state.as_str(),
        due,
        is_test,
        event.created_at
    )?;
    if let Some(due) = due {
        let job = DeliverWebhook::first(id, event.project_id, endpoint);
        jobs::enqueue(on, &[job], due).await?;
    }
    Ok((id, request_id))
}

/// Makes a delivery for each endpoint in its state, and the jobs of those that do not wait.
pub(super) async fn create_all(
    on: &mut impl Queryable,
    event: &Event,
    endpoints: &[(EndpointId, State)],
) -> sqlx::Result<()> {
    if !on.is_postgres() {
        for (endpoint, state) in endpoints {
            create(on, event, *endpoint, *state, false).await?;
        }
        return Ok(());
    }
    if endpoints.is_empty() {
        return Ok(());
    }
    let made: Vec<_> = endpoints
        .iter()
        .map(|(endpoint, state)| (DeliveryId::generate(), *endpoint, *state))
        .collect();
    let ids: Vec<uuid::Uuid> = made.iter().map(|(id, ..)| (*id).into()).collect();
    let to: Vec<uuid::Uuid> = made.iter().map(|(_, to, _)| (*to).into()).collect();
    let requests: Vec<uuid::Uuid> = made.iter().map(|_| RequestId::generate().into()).collect();
    let states: Vec<&str> = made.iter().map(|(.., state)| state.as_str()).collect();
    if let Conn::Postgres(conn) = on.conn() {
        let inserting = sqlx::query(
            "INSERT INTO webhook_deliveries (id, project_id, event_id, event_type, endpoint_id, request_id, \
             state, attempts, next_number, ladder_number, step, job_copy, next_attempt_at, created_at, \
             updated_at) SELECT d.id, $1, $2, $3, d.endpoint_id, d.request_id, d.state, 0, 2, 1, 1, 0, \
             CASE d.state WHEN 'pending' THEN $4 END, $4, $4 \
             FROM UNNEST($5::uuid[], $6::uuid[], $7::uuid[], $8::text[]) \
             AS d (id, endpoint_id, request_id, state)",
        )
        .bind(event.project_id)
        .bind(event.id)
        .bind(&event.event_type)
        .bind(event.created_at)
        .bind(ids)
        .bind(to)
        .bind(requests)
        .bind(states)
        .execute(conn);
        let inserted = db::answered(inserting).await;
        db::settle(on, inserted)?;
    }
    let jobs: Vec<_> = made
        .into_iter()
        .filter(|(.., state)| *state == State::Pending)
        .map(|(id, endpoint, _)| DeliverWebhook::first(id, event.project_id, endpoint))
        .collect();
    jobs::enqueue(on, &jobs, event.created_at).await?;
    Ok(())
}

/// Gives the planned attempt of a delivery another job; false when there is none to make.
pub(super) async fn plan_again(
    on: &mut impl Queryable,
    delivery_id: DeliveryId,
    at: Timestamp,
) -> sqlx::Result<bool> {
    let planned = fetch_optional!(
        on,
        Planned,
        "UPDATE webhook_deliveries SET next_attempt_at = $2, job_copy = job_copy + 1 \
         WHERE id = $1 AND state IN ('pending', 'retrying') \
         RETURNING id, ladder_number, job_copy, project_id, endpoint_id",
        delivery_id,
        at
    )?;
    let Some(planned) = planned else {
        return Ok(false);
    };
    jobs::enqueue(on, &[DeliverWebhook::from(planned)], at).await?;
    Ok(true)
}

/// Puts the attempt of a job off; it does not count. What became of the job.
pub(super) async fn put_off(
    db: &Db,
    taken: &Taken<DeliverWebhook>,
    at: Timestamp,
) -> sqlx::Result<Ended> {
    let mut tx = db.begin().await?;
    let ended = put_off_within(&mut tx, taken, at).await?;
    tx.commit().await?;
    Ok(ended)
}

/// Has a job looked at again, and leaves its delivery alone: somebody else may have that in hand.
pub(super) async fn look_again(
    db: &Db,
    taken: &Taken<DeliverWebhook>,
    at: Timestamp,
) -> sqlx::Result<Ended> {
    let is_ours = jobs::put_off(&mut db.autocommit().await?, taken, at).await?;
    Ok(if is_ours {
        Ended::Removed
    } else {
        Ended::NotBegun
    })
}

/// As [`put_off`], within a transaction. Does nothing when the job is an old one, whose attempt was made
/// or has another job.
pub(super) async fn put_off_within(
    on: &mut impl Queryable,
    taken: &Taken<DeliverWebhook>,
    at: Timestamp,
) -> sqlx::Result<Ended> {
    if !jobs::put_off(on, taken, at).await? {
        return Ok(Ended::NotBegun);
    }
    let job = &taken.job;
    if job.repeat.is_none() {
        execute!(
            on,
            "UPDATE webhook_deliveries SET next_attempt_at = $4 WHERE id = $1 \
             AND ladder_number = $2 AND job_copy = $3 AND state IN ('pending', 'retrying')",
            job.delivery_id,
            job.number,
            job.copy,
            at
        )?;
    }
    Ok(Ended::Removed)
}
