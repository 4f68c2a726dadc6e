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
    events::EventId,
};
use crate::{
    contract::{
        ApiError, Caller, Reply,
        auth::ProjectId,
        cursor::Position,
        page::{self, Filter, ListTexts, Listed, Page, PageRequest},
        spec::Tag,
    },
    db::{Db, Id, Kind, Queryable, Timestamp, fetch_optional},
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
