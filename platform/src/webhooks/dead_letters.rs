//! Dead letters: deliveries that were given up, with the reason, for people to look at.

use poem_openapi::{OpenApi, param::{Path, Query}};
use schemars::JsonSchema;
use serde::Serialize;

use super::{deliveries::DeliveryId, endpoints::EndpointId, events::EventId};
use crate::{
    contract::{
        ApiError, Caller, Reply,
        cursor::Position,
        page::{self, Filter, ListTexts, Listed, Page, PageRequest},
        spec::Tag,
    },
    db::{Db, Id, Kind, Timestamp, fetch_optional},
};

/// A dead letter; names the kind of its id.
pub struct DeadLetterKind;

impl Kind for DeadLetterKind {
    const PREFIX: &'static str = "dlq";
}

/// The id of a dead letter.
pub type DeadLetterId = Id<DeadLetterKind>;

/// A dead letter.
#[derive(Debug, Serialize, JsonSchema, sqlx::FromRow)]
pub struct DeadLetter {
    /// Its id.
    pub id: DeadLetterId,
    /// The delivery that was given up.
    pub delivery_id: DeliveryId,
    /// What the webhook would have told.
    pub event_id: EventId,
    /// Where it would have gone.
    pub endpoint_id: EndpointId,
    /// Why it was given up: `exhausted`, `gone`, `rejected` or `target_not_allowed`, and what was seen.
    pub reason: String,
    /// How many attempts were made.
    pub attempts: i64,
    /// When it was given up.
    pub created_at: Timestamp,
}

impl Listed for DeadLetter {
    const RESOURCE: &'static str = "webhook-dead-letters";
    const TABLE: &'static str = "webhook_dead_letters";
    const COLUMNS: &'static str =
        "id, delivery_id, event_id, endpoint_id, reason, attempts, created_at";

    fn position(&self) -> Position {
        Position { created_at: self.created_at, id: self.id.into() }
    }
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
    #[oai(path = "/webhook-dead-letters", method = "get", operation_id = "list_webhook_dead_letters")]
    async fn list(
        &self,
        caller: Caller,
        page: PageRequest,
        /// Only dead letters of this endpoint.
        endpoint_id: Query<Option<EndpointId>>,
    ) -> Result<Page<DeadLetter>, ApiError> {
        let filters: Vec<_> =
            endpoint_id.0.map(|id| Filter::id("endpoint_id", id)).into_iter().collect();
        Page::fetch(&self.db, page, caller.project, &filters, Ok).await
    }

    /// Read a dead letter
    #[oai(path = "/webhook-dead-letters/:id", method = "get", operation_id = "get_webhook_dead_letter")]
    async fn get(&self, caller: Caller, id: Path<DeadLetterId>) -> Result<Reply<DeadLetter>, ApiError> {
        let mut reader = self.db.read().await?;
        let letter = fetch_optional!(
            &mut reader,
            DeadLetter,
            "SELECT id, delivery_id, event_id, endpoint_id, reason, attempts, created_at \
             FROM webhook_dead_letters WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        Ok(Reply(letter.ok_or_else(|| ApiError::not_found("dead letter"))?))
    }
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![
        page::texts::<DeadLetter>(&[]),
        page::texts::<DeadLetter>(&[Filter::id("endpoint_id", EndpointId::generate())]),
    ]
}
