//! Redelivery: dead letters that climb the ladder again, one or all that a filter names.
//!
//! A redelivered delivery starts the ladder afresh, at once and under a new request id; its body is
//! made anew, so a plugin that was mended rescues it. Its dead letter is resolved, and should it die
//! again it gets another one. While its endpoint is disabled it is `paused`; without an endpoint it
//! stays dead.
//!
//! In bulk, a job [walks](walk) the open dead letters that were there when it was asked for, oldest
//! first, 100 a second. How far it has come commits together with what it did, so a crash neither
//! repeats nor leaves out a letter. A job that is not of the present batch is an echo and ends.

mod walk;

use poem_openapi::{OpenApi, param::Path};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    chores::Chore,
    dead_letters::{self, DeadLetter, DeadLetterId, Resolution},
    endpoints::{self, EndpointId},
};
use crate::{
    contract::{
        Accepted, Action, ApiError, Caller, Code, Reply, Work,
        cursor::Position,
        page::{self, ListTexts, Listed, Page, PageRequest},
        payload::NoOptions,
        spec::Tag,
        text::Text,
    },
    db::{self, Db, Id, Kind, Timestamp, execute, fetch_optional},
    jobs,
};
use walk::climb_again;

pub(super) use walk::batch;
pub use walk::rescue;

/// A redelivery in bulk; names the kind of its id.
pub struct RedeliveryKind;

impl Kind for RedeliveryKind {
    const PREFIX: &'static str = "rdl";
}

/// The id of a redelivery in bulk.
pub type RedeliveryId = Id<RedeliveryKind>;

/// Which dead letters are redelivered: open ones that fit every member; without any, all.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRedelivery {
    /// Only dead letters of this endpoint.
    #[serde(default)]
    endpoint_id: Option<EndpointId>,
    /// Only dead letters of events of this type.
    #[serde(default)]
    event_type: Option<Text<100>>,
    /// Only dead letters made at this time or later.
    #[serde(default)]
    since: Option<Timestamp>,
    /// Only dead letters made before this time.
    #[serde(default)]
    until: Option<Timestamp>,
}

/// How far a redelivery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "RedeliveryStatus")]
pub enum Progress {
    /// On its way.
    Running,
    /// Every letter was looked at.
    Completed,
}

/// A redelivery in bulk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Redelivery {
    /// Its id.
    pub id: RedeliveryId,
    /// How far it is.
    pub status: Progress,
    /// Only dead letters of this endpoint.
    pub endpoint_id: Option<EndpointId>,
    /// Only dead letters of events of this type.
    pub event_type: Option<String>,
    /// Only dead letters made at this time or later.
    pub since: Option<Timestamp>,
    /// Only dead letters made before this time; not later than when it was asked for.
    pub until: Timestamp,
    /// How many deliveries climb the ladder again.
    pub redelivered: i64,
    /// How many stay dead, because their endpoint was deleted or somebody else came first.
    pub skipped: i64,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When it last went on.
    pub updated_at: Timestamp,
    /// When it came to its end.
    pub completed_at: Option<Timestamp>,
}

#[derive(Debug, sqlx::FromRow)]
struct RedeliveryRow {
    id: RedeliveryId,
    endpoint_id: Option<EndpointId>,
    event_type: Option<String>,
    since: Option<Timestamp>,
    until: Timestamp,
    redelivered: i64,
    skipped: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
    completed_at: Option<Timestamp>,
}

impl Listed for RedeliveryRow {
    const RESOURCE: &'static str = "webhook-redeliveries";
    const TABLE: &'static str = "webhook_redeliveries";
    const COLUMNS: &'static str = "id, endpoint_id, event_type, since, until, redelivered, skipped, \
                                   created_at, updated_at, completed_at";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

impl From<RedeliveryRow> for Redelivery {
    fn from(row: RedeliveryRow) -> Self {
        Self {
            id: row.id,
            status: match row.completed_at {
                None => Progress::Running,
                Some(_) => Progress::Completed,
            },
            endpoint_id: row.endpoint_id,
            event_type: row.event_type,
            since: row.since,
            until: row.until,
            redelivered: row.redelivered,
            skipped: row.skipped,
            created_at: row.created_at,
            updated_at: row.updated_at,
            completed_at: row.completed_at,
        }
    }
}

/// The handlers of redelivery.
#[derive(Debug)]
pub struct RedeliveriesApi {
    /// The database.
    pub db: Db,
}

#[OpenApi(tag = "Tag::Deliveries")]
impl RedeliveriesApi {
    /// Redeliver a dead letter
    ///
    /// Its delivery starts the ladder afresh, at once and under a new request id, or is `paused` while
    /// the endpoint is disabled. `CONFLICT` when the letter is resolved already and when its endpoint
    /// was deleted.
    #[oai(
        path = "/webhook-dead-letters/:id/redeliver",
        method = "post",
        operation_id = "redeliver_webhook_dead_letter"
    )]
    async fn redeliver(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<DeadLetterId>,
        _body: Action<NoOptions>,
    ) -> Result<Accepted<DeadLetter>, ApiError> {
        let letter = dead_letters::find(&mut work, caller.project, id.0).await?;
        let conflict = |why| Err(ApiError::new(Code::Conflict, why));
        let enabled = endpoints::is_enabled_for_now(&mut work, letter.endpoint_id).await?;
        let Some(enabled) = enabled else {
            return conflict("The endpoint of this dead letter was deleted.");
        };
        let resolved = "This dead letter is resolved already.";
        if letter.status != Resolution::Open {
            return conflict(resolved);
        }
        let now = Timestamp::now();
        let Some(job) = climb_again(&mut work, letter.delivery_id, enabled, now).await? else {
            return conflict(resolved);
        };
        jobs::enqueue(&mut work, &Vec::from_iter(job), now).await?;
        Ok(Accepted {
            location: format!("/public/v1/webhook-deliveries/{}", letter.delivery_id),
            body: dead_letters::find(&mut work, caller.project, id.0).await?,
        })
    }

    /// Redeliver dead letters in bulk
    ///
    /// All open ones that fit the filter and were there when this was asked for, oldest first, at most
    /// 100 a second. The answer's `Location` shows the progress. `CONFLICT` while another one runs.
    #[oai(
        path = "/webhook-dead-letters/redeliver",
        method = "post",
        operation_id = "redeliver_webhook_dead_letters"
    )]
    async fn redeliver_all(
        &self,
        caller: Caller,
        mut work: Work,
        body: Action<NewRedelivery>,
    ) -> Result<Accepted<Redelivery>, ApiError> {
        let new = body.0;
        let running = fetch_optional!(
            &mut work,
            (RedeliveryId,),
            "SELECT id FROM webhook_redeliveries WHERE project_id = $1 AND status = 'running'",
            caller.project
        )?;
        let conflict = || {
            ApiError::new(
                Code::Conflict,
                "Another redelivery of this project is running.",
            )
        };
        if let Some((id,)) = running {
            return Err(conflict().with_detail(format!("Redelivery {id} is running.")));
        }
        let now = Timestamp::now();
        let row = RedeliveryRow {
            id: RedeliveryId::generate(),
            endpoint_id: new.endpoint_id,
            event_type: new.event_type.map(|text| text.0),
            since: new.since,
            until: new.until.map_or(now, |until| until.min(now)),
            redelivered: 0,
            skipped: 0,
            created_at: now,
            updated_at: now,
            completed_at: None,
        };
        execute!(
            &mut work,
            "INSERT INTO webhook_redeliveries (id, project_id, endpoint_id, event_type, since, until, \
             status, redelivered, skipped, batch, reached_at, reached_id, created_at, updated_at) \
             VALUES ($1, $2, $3, $4, $5, $6, 'running', 0, 0, 1, $7, $8, $9, $9)",
            row.id,
            caller.project,
            row.endpoint_id,
            row.event_type.as_deref(),
            row.since,
            row.until,
            row.since.unwrap_or(Timestamp::from_micros(0)),
            Uuid::nil(),
            now
        )
        .map_err(|error| {
            if db::is_unique_violation(&error) {
                conflict()
            } else {
                error.into()
            }
        })?;
        let first = Chore::Redeliver {
            redelivery: row.id,
            batch: 1,
        };
        first.enqueue(&mut work, now).await?;
        Ok(Accepted {
            location: format!("/public/v1/webhook-redeliveries/{}", row.id),
            body: row.into(),
        })
    }

    /// List redeliveries in bulk
    #[oai(
        path = "/webhook-redeliveries",
        method = "get",
        operation_id = "list_webhook_redeliveries"
    )]
    async fn list(&self, caller: Caller, page: PageRequest) -> Result<Page<Redelivery>, ApiError> {
        let show = |row: RedeliveryRow| Ok(row.into());
        Page::fetch(&self.db, page, caller.project, &[], show).await
    }

    /// Read a redelivery in bulk
    #[oai(
        path = "/webhook-redeliveries/:id",
        method = "get",
        operation_id = "get_webhook_redelivery"
    )]
    async fn get(
        &self,
        caller: Caller,
        id: Path<RedeliveryId>,
    ) -> Result<Reply<Redelivery>, ApiError> {
        let mut reader = self.db.read().await?;
        let row = fetch_optional!(
            &mut reader,
            RedeliveryRow,
            "SELECT id, endpoint_id, event_type, since, until, redelivered, skipped, created_at, \
             updated_at, completed_at FROM webhook_redeliveries WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        let row = row.ok_or_else(|| ApiError::not_found("redelivery"))?;
        Ok(Reply(row.into()))
    }
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![page::texts::<RedeliveryRow>(&[])]
}
