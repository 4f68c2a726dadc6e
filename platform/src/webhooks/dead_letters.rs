//! Dead letters: deliveries that were given up, with the reason, for people to look at.

use std::str::FromStr;

use poem_openapi::{
    OpenApi,
    param::{Path, Query},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{attempts::time, deliveries::DeliveryId, endpoints::EndpointId, events::EventId};
use crate::{
    contract::{
        ApiError, Caller, Reply,
        auth::ProjectId,
        cursor::Position,
        page::{self, Filter, ListTexts, Listed, Page, PageRequest},
        spec::Tag,
    },
    db::{Db, Id, Kind, Queryable, Timestamp, execute, fetch_optional},
};

/// A dead letter; names the kind of its id.
pub struct DeadLetterKind;

impl Kind for DeadLetterKind {
    const PREFIX: &'static str = "dlq";
}

/// The id of a dead letter.
pub type DeadLetterId = Id<DeadLetterKind>;

/// What became of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "DeadLetterStatus")]
pub enum Resolution {
    /// Nothing yet: its delivery is `dead`.
    Open,
    /// Its delivery climbs the ladder again.
    Redelivered,
    /// A manual retry of its delivery succeeded.
    Retried,
}

impl Resolution {
    const ALL: [Self; 3] = [Self::Open, Self::Redelivered, Self::Retried];

    /// The written form, as in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Redelivered => "redelivered",
            Self::Retried => "retried",
        }
    }
}

impl FromStr for Resolution {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|status| status.as_str() == text)
            .ok_or_else(|| {
                format!("`{text}` is no status of a dead letter: open, redelivered or retried")
            })
    }
}

/// A dead letter.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DeadLetter {
    /// Its id.
    pub id: DeadLetterId,
    /// The delivery that was given up.
    pub delivery_id: DeliveryId,
    /// What the webhook would have told.
    pub event_id: EventId,
    /// The type of what it would have told.
    pub event_type: String,
    /// Where it would have gone.
    pub endpoint_id: EndpointId,
    /// Why it was given up: `exhausted`, `gone`, `rejected` or `target_not_allowed`, and what was seen.
    pub reason: String,
    /// How many attempts were made.
    pub attempts: i64,
    /// What became of it.
    pub status: Resolution,
    /// When something became of it.
    pub resolved_at: Option<Timestamp>,
    /// When it was given up.
    pub created_at: Timestamp,
}

#[derive(Debug, sqlx::FromRow)]
struct DeadLetterRow {
    id: DeadLetterId,
    delivery_id: DeliveryId,
    event_id: EventId,
    event_type: String,
    endpoint_id: EndpointId,
    reason: String,
    attempts: i64,
    status: String,
    resolved_at: Option<Timestamp>,
    created_at: Timestamp,
}

impl Listed for DeadLetterRow {
    const RESOURCE: &'static str = "webhook-dead-letters";
    const TABLE: &'static str = "webhook_dead_letters";
    const COLUMNS: &'static str = "id, delivery_id, event_id, event_type, endpoint_id, reason, \
                                   attempts, status, resolved_at, created_at";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

fn show(row: DeadLetterRow) -> Result<DeadLetter, ApiError> {
    Ok(DeadLetter {
        id: row.id,
        delivery_id: row.delivery_id,
        event_id: row.event_id,
        event_type: row.event_type,
        endpoint_id: row.endpoint_id,
        reason: row.reason,
        attempts: row.attempts,
        status: row
            .status
            .parse()
            .map_err(|error: String| ApiError::internal(error))?,
        resolved_at: row.resolved_at,
        created_at: row.created_at,
    })
}

/// Resolves the open dead letter of a delivery, if there is one.
pub(super) async fn resolve(
    on: &mut impl Queryable,
    delivery: DeliveryId,
    resolution: Resolution,
    now: Timestamp,
) -> sqlx::Result<u64> {
    execute!(
        on,
        "UPDATE webhook_dead_letters SET status = $2, resolved_at = $3 \
         WHERE delivery_id = $1 AND status = 'open'",
        delivery,
        resolution.as_str(),
        now
    )
}

/// The handlers of `/webhook-dead-letters`.
#[derive(Debug)]
pub struct DeadLettersApi {
    /// The database.
    pub db: Db,
}

#[OpenApi(tag = "Tag::Deliveries")]
impl DeadLettersApi {
    /// List dead letters
    #[oai(
        path = "/webhook-dead-letters",
        method = "get",
        operation_id = "list_webhook_dead_letters"
    )]
    async fn list(
        &self,
        caller: Caller,
        page: PageRequest,
        /// Only dead letters of this endpoint.
        endpoint_id: Query<Option<EndpointId>>,
        /// Only dead letters of events of this type.
        event_type: Query<Option<String>>,
        /// Only dead letters of which this became: `open`, `redelivered` or `retried`.
        status: Query<Option<String>>,
        /// Only dead letters made at this time or later, RFC 3339.
        since: Query<Option<String>>,
        /// Only dead letters made before this time, RFC 3339.
        until: Query<Option<String>>,
    ) -> Result<Page<DeadLetter>, ApiError> {
        let mut filters = Vec::new();
        filters.extend(endpoint_id.0.map(|id| Filter::id("endpoint_id", id)));
        filters.extend(
            event_type
                .0
                .map(|event_type| Filter::text("event_type", event_type)),
        );
        if let Some(text) = status.0 {
            let status: Resolution = text
                .parse()
                .map_err(|error: String| ApiError::invalid_parameter("status", error))?;
            filters.push(Filter::text("status", status.as_str()));
        }
        if let Some(text) = since.0 {
            filters.push(Filter::since(time("since", &text)?));
        }
        if let Some(text) = until.0 {
            filters.push(Filter::until(time("until", &text)?));
        }
        Page::fetch(&self.db, page, caller.project, &filters, show).await
    }

    /// Read a dead letter
    #[oai(
        path = "/webhook-dead-letters/:id",
        method = "get",
        operation_id = "get_webhook_dead_letter"
    )]
    async fn get(
        &self,
        caller: Caller,
        id: Path<DeadLetterId>,
    ) -> Result<Reply<DeadLetter>, ApiError> {
        let mut reader = self.db.read().await?;
        Ok(Reply(find(&mut reader, caller.project, id.0).await?))
    }
}

/// Finds a dead letter of a project.
pub(super) async fn find(
    on: &mut impl Queryable,
    project: ProjectId,
    id: DeadLetterId,
) -> Result<DeadLetter, ApiError> {
    let row = fetch_optional!(
        on,
        DeadLetterRow,
        "SELECT id, delivery_id, event_id, event_type, endpoint_id, reason, attempts, status, \
         resolved_at, created_at FROM webhook_dead_letters WHERE project_id = $1 AND id = $2",
        project,
        id
    )?;
    show(row.ok_or_else(|| ApiError::not_found("dead letter"))?)
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    let moment = Timestamp::from_micros(0);
    vec![
        page::texts::<DeadLetterRow>(&[]),
        page::texts::<DeadLetterRow>(&[Filter::id("endpoint_id", EndpointId::generate())]),
        page::texts::<DeadLetterRow>(&[Filter::text("event_type", "")]),
        page::texts::<DeadLetterRow>(&[Filter::text("status", "")]),
        page::texts::<DeadLetterRow>(&[Filter::since(moment), Filter::until(moment)]),
    ]
}
