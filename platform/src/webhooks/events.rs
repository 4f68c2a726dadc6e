//! Events: what happened, kept whole, and fanned out to every endpoint that wants it.
//!
//! [`publish`] is the door for what happens here: within the caller's transaction it writes the event, a
//! delivery for each matching endpoint and the delivery's job. Tenants' own events come in many at once,
//! by [`publishing`](super::publishing). Endpoints that are disabled get theirs `paused`,
//! without a job. Data is kept byte for byte.

use poem_openapi::{
    OpenApi,
    param::{Path, Query},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    deliveries::State,
    endpoints::{self, EndpointId},
    event_types::EventType,
    patterns::Patterns,
    planning,
    publishing::Publisher,
};
use crate::{
    contract::{
        ApiError, Body, Caller, Created, Later, RawJson, Reply,
        auth::ProjectId,
        cursor::Position,
        page::{self, Filter, ListTexts, Listed, Page, PageRequest},
        spec::Tag,
    },
    db::{Db, Id, JsonText, Kind, Queryable, Timestamp, execute, fetch_all, fetch_optional},
};

/// The largest data of an event, in bytes.
const MAX_DATA: usize = 1 << 20;

/// An event; names the kind of its id.
pub struct EventKind;

impl Kind for EventKind {
    const PREFIX: &'static str = "evt";
}

/// The id of an event.
pub type EventId = Id<EventKind>;

/// An event.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Event {
    /// Its id; the same in every webhook that tells of it.
    pub id: EventId,
    /// Its type.
    #[serde(rename = "type")]
    pub event_type: String,
    /// When it happened.
    pub timestamp: Timestamp,
    /// The project it happened in.
    pub project_id: ProjectId,
    /// What happened, whole, as it was published.
    pub data: RawJson,
    /// When it was published: the same moment as `timestamp`.
    pub created_at: Timestamp,
}

/// What publishes an event.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEvent {
    /// A built-in type or one of the tenant's own, dotted: `order.shipped`.
    #[serde(rename = "type")]
    event_type: String,
    /// Any JSON value, with which the body has at most 1 MiB; of a built-in type, one that fits its schema.
    data: RawJson,
}

#[derive(Debug, sqlx::FromRow)]
struct EventRow {
    id: EventId,
    project_id: ProjectId,
    event_type: String,
    data: JsonText<Box<RawValue>>,
    created_at: Timestamp,
}

impl Listed for EventRow {
    const RESOURCE: &'static str = "events";
    const TABLE: &'static str = "events";
    const COLUMNS: &'static str = "id, project_id, event_type, data, created_at";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }

    fn weight(&self) -> usize {
        self.data.0.get().len()
    }
}

impl From<EventRow> for Event {
    fn from(row: EventRow) -> Self {
        Self {
            id: row.id,
            event_type: row.event_type,
            timestamp: row.created_at,
            project_id: row.project_id,
            data: RawJson(row.data.0),
            created_at: row.created_at,
        }
    }
}

/// Whether a text can name an event type: two to ten parts with dots between.
pub fn is_event_type(text: &str) -> bool {
    let mut parts = 0;
    text.len() <= 100
        && text.split('.').all(|part| {
            parts += 1;
            !part.is_empty()
                && part
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
        })
        && (2..=10).contains(&parts)
}

/// Publishes an event of the platform itself, within the caller's transaction.
pub async fn publish(
    on: &mut impl Queryable,
    project: ProjectId,
    event_type: &str,
    data: &(impl Serialize + Sync),
) -> Result<(), ApiError> {
    let data = serde_json::value::to_raw_value(data).map_err(ApiError::internal)?;
    let event = Event::new(project, event_type.to_owned(), RawJson(data));
    Ok(publish_event(on, &event).await?)
}

/// Writes an event with its deliveries, within the caller's transaction.
pub(super) async fn publish_event(on: &mut impl Queryable, event: &Event) -> sqlx::Result<()> {
    let project = event.project_id;
    let targets = if on.is_postgres() {
        // Both in one round trip.
        fetch_all!(
            on,
            Target,
            "WITH made AS (INSERT INTO events (id, project_id, event_type, data, created_at) \
             VALUES ($1, $2, $3, $4, $5)) \
             SELECT id, event_types, enabled FROM webhook_endpoints WHERE project_id = $2",
            event.id,
            project,
            &event.event_type,
            event.data.as_str(),
            event.created_at
        )?
    } else {
        event.insert(on).await?;
        targets(on, project).await?
    };
    deliver(on, event, targets, Audience::Listeners).await
}

#[derive(sqlx::FromRow)]
struct Target {
    id: EndpointId,
    event_types: JsonText<Patterns>,
    enabled: bool,
}

impl Event {
    fn new(project: ProjectId, event_type: String, data: RawJson) -> Self {
        let now = Timestamp::now();
        Self {
            id: EventId::generate(),
            event_type,
            timestamp: now,
            project_id: project,
            data,
            created_at: now,
        }
    }

    async fn insert(&self, on: &mut impl Queryable) -> sqlx::Result<u64> {
        execute!(
            on,
            "INSERT INTO events (id, project_id, event_type, data, created_at) VALUES ($1, $2, $3, $4, $5)",
            self.id,
            self.project_id,
            &self.event_type,
            self.data.as_str(),
            self.created_at
        )
    }
}

/// Writes an event, for nobody yet.
pub(super) async fn insert(
    on: &mut impl Queryable,
    project: ProjectId,
    event_type: String,
    data: RawJson,
) -> sqlx::Result<Event> {
    let event = Event::new(project, event_type, data);
    event.insert(on).await?;
    Ok(event)
}

/// Who gets an event.
#[derive(Clone, Copy, Debug)]
pub(super) enum Audience {
    /// Every endpoint that listens to it.
    Listeners,
    /// Those that name its type or family, but for one.
    Named {
        /// The one.
        except: EndpointId,
    },
}

impl Audience {
    fn has(self, endpoint: EndpointId, patterns: &Patterns, event_type: &str) -> bool {
        match self {
            Self::Listeners => patterns.matches(event_type),
            Self::Named { except } => endpoint != except && patterns.name(event_type),
        }
    }
}

/// Makes a delivery of an event for each endpoint of its audience.
pub(super) async fn fan_out(
    on: &mut impl Queryable,
    event: &Event,
    audience: Audience,
) -> sqlx::Result<()> {
    let targets = targets(on, event.project_id).await?;
    deliver(on, event, targets, audience).await
}

async fn targets(on: &mut impl Queryable, project: ProjectId) -> sqlx::Result<Vec<Target>> {
    fetch_all!(
        on,
        Target,
        "SELECT id, event_types, enabled FROM webhook_endpoints WHERE project_id = $1",
        project
    )
}

async fn deliver(
    on: &mut impl Queryable,
    event: &Event,
    targets: Vec<Target>,
    audience: Audience,
) -> sqlx::Result<()> {
    let mut listening = Vec::new();
    for target in targets {
        if !audience.has(target.id, &target.event_types.0, &event.event_type) {
            continue;
        }
        // One that seems disabled is looked at again, locked: a delivery that is about to wait must
        // not slip past a resumption, nor wait for an endpoint that is gone.
        let enabled = if target.enabled {
            Some(true)
        } else {
            endpoints::is_enabled_for_now(on, target.id).await?
        };
        match enabled {
            Some(true) => listening.push((target.id, State::Pending)),
            Some(false) => listening.push((target.id, State::Paused)),
            None => {}
        }
    }
    planning::create_all(on, event, &listening).await
}

/// The handlers of `/events`.
#[derive(Debug)]
pub struct EventsApi {
    /// The database.
    pub db: Db,
    /// What publishes.
    pub publisher: Publisher,
    /// All built-in types.
    pub types: Vec<EventType>,
}

#[OpenApi(tag = "Tag::Events")]
impl EventsApi {
    /// Publish an event
    ///
    /// Every endpoint that listens to the type gets a webhook.
    #[oai(path = "/events", method = "post", operation_id = "publish_event")]
    #[allow(clippy::unused_async, reason = "handlers are async")]
    async fn create(
        &self,
        caller: Caller,
        later: Later,
        body: Body<NewEvent>,
    ) -> Result<Created<Event>, ApiError> {
        let NewEvent { event_type, data } = body.0;
        if !is_event_type(&event_type) {
            return Err(ApiError::invalid_body(
                "/type",
                "an event type has two to ten parts of letters, digits, _ and -, with dots between",
            ));
        }
        if data.as_str().len() > MAX_DATA {
            return Err(ApiError::invalid_body("/data", "data has at most 1 MiB"));
        }
        if let Some(known) = self.types.iter().find(|known| known.name == event_type) {
            known.check(data.as_str())?;
        }
        let event = Event::new(caller.project, event_type, data);
        later.leave(self.publisher.publication(event.clone()));
        Ok(Created {
            location: format!("/public/v1/events/{}", event.id),
            body: event,
        })
    }

    /// List events
    #[oai(path = "/events", method = "get", operation_id = "list_events")]
    async fn list(
        &self,
        caller: Caller,
        page: PageRequest,
        /// Only events of this type.
        r#type: Query<Option<String>>,
    ) -> Result<Page<Event>, ApiError> {
        let filters: Vec<_> = r#type
            .0
            .map(|event_type| Filter::text("event_type", event_type))
            .into_iter()
            .collect();
        Page::fetch(&self.db, page, caller.project, &filters, |row: EventRow| {
            Ok(row.into())
        })
        .await
    }

    /// Read an event
    ///
    /// With its data whole, also where the webhook had a link in its place.
    #[oai(path = "/events/:id", method = "get", operation_id = "get_event")]
    async fn get(&self, caller: Caller, id: Path<EventId>) -> Result<Reply<Event>, ApiError> {
        let mut reader = self.db.read().await?;
        let row = fetch_optional!(
            &mut reader,
            EventRow,
            "SELECT id, project_id, event_type, data, created_at FROM events \
             WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        Ok(Reply(
            row.ok_or_else(|| ApiError::not_found("event"))?.into(),
        ))
    }
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![
        page::texts::<EventRow>(&[]),
        page::texts::<EventRow>(&[Filter::text("event_type", "")]),
    ]
}

#[cfg(test)]
mod tests {
    use super::is_event_type;

    #[test]
    fn an_event_type_is_dotted() {
        for good in ["order.shipped", "a.b.c", "Order-2.was_shipped"] {
            assert!(is_event_type(good), "{good}");
        }
        for bad in [
            "", "order", "order.", ".order", "order..x", "order.*", "order.ä", "a b.c", "a.b\n",
        ] {
            assert!(!is_event_type(bad), "{bad}");
        }
    }
}
