//! Deliveries: one event on its way to one endpoint, with the state that people look at.
//!
//! `state` is the truth; the job in the queue is only what makes the next step happen. The numbers of
//! attempts are given out when an attempt is planned, so that no two attempts of any trigger can have
//! the same one.

use std::{fmt, str::FromStr};

use poem_openapi::{
    OpenApi,
    param::{Path, Query},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    attempts::{Attempt, AttemptRow},
    endpoints::EndpointId,
    events::{Event, EventId},
    repeats::Repeat,
    rooms,
};
use crate::{
    contract::{
        ApiError, Caller, Reply,
        auth::ProjectId,
        cursor::Position,
        page::{self, Filter, ListTexts, Listed, Page, PageRequest},
        request_id::RequestId,
        spec::Tag,
    },
    db::{self, Conn, Db, Id, Kind, Queryable, Timestamp, execute, fetch_optional},
    jobs::{self, Ended, Job, Lane, Taken},
};

/// A delivery; names the kind of its id.
pub struct DeliveryKind;

impl Kind for DeliveryKind {
    const PREFIX: &'static str = "dlv";
}

/// The id of a delivery.
pub type DeliveryId = Id<DeliveryKind>;

/// How far a delivery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "DeliveryState")]
pub enum State {
    /// The first attempt is due.
    Pending,
    /// An attempt failed; the next one has its time.
    Retrying,
    /// The receiver took it.
    Delivered,
    /// Given up; a dead letter says why, unless it was a test.
    Dead,
    /// Waits for its endpoint to be enabled.
    Paused,
    /// Its endpoint was deleted.
    Cancelled,
    /// The endpoint's plugin chose not to send it.
    Dropped,
}

impl State {
    const ALL: [Self; 7] = [
        Self::Pending,
        Self::Retrying,
        Self::Delivered,
        Self::Dead,
        Self::Paused,
        Self::Cancelled,
        Self::Dropped,
    ];

    /// The written form, as in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Retrying => "retrying",
            Self::Delivered => "delivered",
            Self::Dead => "dead",
            Self::Paused => "paused",
            Self::Cancelled => "cancelled",
            Self::Dropped => "dropped",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for State {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| format!("`{text}` is no state of a delivery"))
    }
}

/// A delivery.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Delivery {
    /// Its id.
    pub id: DeliveryId,
    /// What happened.
    pub event_id: EventId,
    /// The type of what happened.
    pub event_type: String,
    /// Where it goes.
    pub endpoint_id: EndpointId,
    /// How far it is.
    pub state: State,
    /// How many attempts were made.
    pub attempts: i64,
    /// When the next attempt is due.
    pub next_attempt_at: Option<Timestamp>,
    /// The status code of the last attempt that got one.
    pub last_status_code: Option<i64>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

#[derive(Debug, sqlx::FromRow)]
pub(super) struct DeliveryRow {
    id: DeliveryId,
    event_id: EventId,
    event_type: String,
    pub(super) endpoint_id: EndpointId,
    state: String,
    attempts: i64,
    next_attempt_at: Option<Timestamp>,
    last_status_code: Option<i64>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl Listed for DeliveryRow {
    const RESOURCE: &'static str = "webhook-deliveries";
    const TABLE: &'static str = "webhook_deliveries";
    const COLUMNS: &'static str = "id, event_id, event_type, endpoint_id, state, attempts, \
                                   next_attempt_at, last_status_code, created_at, updated_at";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

/// A delivery as clients see it.
pub(super) fn show(row: DeliveryRow) -> Result<Delivery, ApiError> {
    Ok(Delivery {
        id: row.id,
        event_id: row.event_id,
        event_type: row.event_type,
        endpoint_id: row.endpoint_id,
        state: row
            .state
            .parse()
            .map_err(|error: String| ApiError::internal(error))?,
        attempts: row.attempts,
        next_attempt_at: row.next_attempt_at,
        last_status_code: row.last_status_code,
        created_at: row.created_at,
        updated_at: row.updated_at,
    })
}

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

/// The handlers of `/webhook-deliveries`.
#[derive(Debug)]
pub struct DeliveriesApi {
    /// The database.
    pub db: Db,
}

#[OpenApi(tag = "Tag::Deliveries")]
impl DeliveriesApi {
    /// List deliveries
    #[oai(
        path = "/webhook-deliveries",
        method = "get",
        operation_id = "list_webhook_deliveries"
    )]
    async fn list(
        &self,
        caller: Caller,
        page: PageRequest,
        /// Only deliveries in this state.
        state: Query<Option<String>>,
        /// Only deliveries to this endpoint.
        endpoint_id: Query<Option<EndpointId>>,
        /// Only deliveries of events of this type.
        event_type: Query<Option<String>>,
    ) -> Result<Page<Delivery>, ApiError> {
        let mut filters = Vec::new();
        if let Some(state) = state.0 {
            let state: State = state
                .parse()
                .map_err(|error| ApiError::invalid_parameter("state", error))?;
            filters.push(Filter::text("state", state.as_str()));
        }
        filters.extend(endpoint_id.0.map(|id| Filter::id("endpoint_id", id)));
        filters.extend(
            event_type
                .0
                .map(|event_type| Filter::text("event_type", event_type)),
        );
        Page::fetch(&self.db, page, caller.project, &filters, show).await
    }

    /// Read a delivery
    #[oai(
        path = "/webhook-deliveries/:id",
        method = "get",
        operation_id = "get_webhook_delivery"
    )]
    async fn get(&self, caller: Caller, id: Path<DeliveryId>) -> Result<Reply<Delivery>, ApiError> {
        let mut reader = self.db.read().await?;
        Ok(Reply(show(find(&mut reader, caller.project, id.0).await?)?))
    }

    /// List the attempts of a delivery
    #[oai(
        path = "/webhook-deliveries/:id/attempts",
        method = "get",
        operation_id = "list_attempts_of_delivery"
    )]
    async fn attempts(
        &self,
        caller: Caller,
        page: PageRequest,
        id: Path<DeliveryId>,
    ) -> Result<Page<Attempt>, ApiError> {
        find(&mut self.db.read().await?, caller.project, id.0).await?;
        let filters = [Filter::id("delivery_id", id.0)];
        Page::fetch(
            &self.db,
            page,
            caller.project,
            &filters,
            |row: AttemptRow| row.show(),
        )
        .await
    }
}

/// Finds a delivery of a project.
pub(super) async fn find(
    on: &mut impl Queryable,
    project: ProjectId,
    id: DeliveryId,
) -> Result<DeliveryRow, ApiError> {
    fetch_optional!(
        on,
        DeliveryRow,
        "SELECT id, event_id, event_type, endpoint_id, state, attempts, next_attempt_at, \
         last_status_code, created_at, updated_at \
         FROM webhook_deliveries WHERE project_id = $1 AND id = $2",
        project,
        id
    )?
    .ok_or_else(|| ApiError::not_found("delivery"))
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![
        page::texts::<DeliveryRow>(&[]),
        page::texts::<DeliveryRow>(&[Filter::text("state", "")]),
        page::texts::<DeliveryRow>(&[Filter::id("endpoint_id", EndpointId::generate())]),
        page::texts::<DeliveryRow>(&[Filter::text("event_type", "")]),
    ]
}
