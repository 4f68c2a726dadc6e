//! What an attempt needs: its delivery, event, endpoint and plugin version, of many attempts in one question.
//!
//! Whoever has just written the event and its deliveries reads neither again, and knows that nobody had
//! the job before: only the endpoint is asked for, once for all attempts that begin together. An attempt is
//! settled and its job removed at once, so that no job comes whose attempt is on record.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use serde_json::value::RawValue;

use super::Outlet;
use crate::{
    contract::{auth::ProjectId, request_id::RequestId},
    db::{self, Conn, Db, Gather, JsonText, Queryable as _, Timestamp, fetch_one, fetch_optional},
    jobs::{Job as _, JobId, Taken},
    plugins::PluginId,
    webhooks::{
        deliveries::{DeliveryId, State},
        endpoints::{Earlier, EndpointId},
        events::{Event, EventId},
        payload,
        planning::DeliverWebhook,
    },
};

/// Attempts in one question.
const LARGEST: usize = 100;

/// All that an attempt needs.
#[derive(sqlx::FromRow)]
pub struct Loaded {
    pub(super) id: DeliveryId,
    pub(super) number: i64,
    pub(super) project_id: ProjectId,
    pub(super) event_id: EventId,
    pub(super) event_type: String,
    pub(super) endpoint_id: EndpointId,
    pub(super) request_id: RequestId,
    pub(super) state: String,
    pub(super) ladder_number: i64,
    pub(super) job_copy: i64,
    pub(super) step: i64,
    pub(super) is_test: bool,
    pub(super) data: Option<JsonText<Box<RawValue>>>,
    pub(super) happened_at: Timestamp,
    /// How many workers had begun its job before and died: they may have sent it.
    pub(super) lost: i64,
    pub(super) enabled: Option<bool>,
    pub(super) failing_since: Option<Timestamp>,
    pub(super) url: Option<String>,
    pub(super) plugin_id: Option<PluginId>,
    pub(super) plugin_version: Option<i64>,
    pub(super) plugin_sha256: Option<Vec<u8>>,
    pub(super) plugin_config: Option<String>,
    pub(super) headers: Option<Vec<u8>>,
    pub(super) secret: Option<Vec<u8>>,
    pub(super) previous_secret: Option<Vec<u8>>,
    pub(super) previous_secret_until: Option<Timestamp>,
    pub(super) earlier_secrets: Option<JsonText<Vec<Earlier>>>,
    /// What the endpoint's columns open to, once they were opened.
    #[sqlx(skip)]
    pub(super) outlet: Arc<OnceLock<Arc<Outlet>>>,
}

/// An endpoint as an attempt finds it, with the active version of its plugin.
#[derive(sqlx::FromRow)]
struct Standing {
    id: EndpointId,
    enabled: bool,
    failing_since: Option<Timestamp>,
    url: String,
    plugin_id: Option<PluginId>,
    plugin_version: Option<i64>,
    plugin_sha256: Option<Vec<u8>>,
    plugin_config: Option<String>,
    headers: Vec<u8>,
    secret: Vec<u8>,
    previous_secret: Option<Vec<u8>>,
    previous_secret_until: Option<Timestamp>,
    earlier_secrets: Option<JsonText<Vec<Earlier>>>,
    #[sqlx(skip)]
    outlet: Arc<OnceLock<Arc<Outlet>>>,
}

/// A delivery whose event this process has just written, and that nobody else knows of.
pub struct Fresh {
    pub(in crate::webhooks) event: Arc<Event>,
    pub(in crate::webhooks) request_id: RequestId,
}

impl Fresh {
    /// What its first attempt needs; the endpoint may be gone.
    fn loaded(&self, job: &DeliverWebhook, endpoint: Option<&Standing>) -> Loaded {
        let event = &self.event;
        let data = (event.data.as_str().len() <= payload::MAX_BODY).then(|| event.data.0.clone());
        Loaded {
            id: job.delivery_id,
            number: job.number,
            project_id: event.project_id,
            event_id: event.id,
            event_type: event.event_type.clone(),
            endpoint_id: job.endpoint_id,
            request_id: self.request_id,
            state: State::Pending.as_str().to_owned(),
            ladder_number: job.number,
            job_copy: job.copy,
            step: 1,
            is_test: false,
            data: data.map(JsonText),
            happened_at: event.created_at,
            lost: 0,
            enabled: endpoint.map(|endpoint| endpoint.enabled),
            failing_since: endpoint.and_then(|endpoint| endpoint.failing_since),
            url: endpoint.map(|endpoint| endpoint.url.clone()),
            plugin_id: endpoint.and_then(|endpoint| endpoint.plugin_id),
            plugin_version: endpoint.and_then(|endpoint| endpoint.plugin_version),
            plugin_sha256: endpoint.and_then(|endpoint| endpoint.plugin_sha256.clone()),
            plugin_config: endpoint.and_then(|endpoint| endpoint.plugin_config.clone()),
            headers: endpoint.map(|endpoint| endpoint.headers.clone()),
            secret: endpoint.map(|endpoint| endpoint.secret.clone()),
            previous_secret: endpoint.and_then(|endpoint| endpoint.previous_secret.clone()),
            previous_secret_until: endpoint.and_then(|endpoint| endpoint.previous_secret_until),
            earlier_secrets: endpoint.and_then(|endpoint| endpoint.earlier_secrets.clone()),
            outlet: endpoint.map_or_else(Arc::default, |endpoint| endpoint.outlet.clone()),
        }
    }
}

/// Which attempt, and the job that makes it.
type Key = (DeliveryId, i64, JobId);

/// Loads what attempts need; that of those which begin together in one question.
#[derive(Clone)]
pub struct Loads {
    whole: Gather<Key, Option<Loaded>>,
    standings: Gather<EndpointId, Option<Arc<Standing>>>,
}

impl Loads {
    /// From this database.
    pub fn new(db: Db) -> Self {
        let of_standings = db.clone();
        Self {
            whole: Gather::new(LARGEST, move |attempts| {
                Box::pin(load(db.clone(), attempts))
            }),
            standings: Gather::new(LARGEST, move |endpoints| {
                Box::pin(standings(of_standings.clone(), endpoints))
            }),
        }
    }

    /// What the attempt of a job needs, if it is there; `fresh` says what is known already, where this process
    /// has just written it.
    pub(super) async fn get(
        &self,
        taken: &Taken<DeliverWebhook>,
        fresh: Option<&Fresh>,
    ) -> sqlx::Result<Option<Loaded>> {
        let job = &taken.job;
        let Some(fresh) = fresh else {
            let key = (job.delivery_id, job.number, taken.id.clone());
            return self.whole.get(key).await;
        };
        let endpoint = self.standings.get(job.endpoint_id).await?;
        Ok(Some(fresh.loaded(job, endpoint.as_deref())))
    }
}

macro_rules! loading {
    ($event:literal, $lost:literal, $from:literal) => {
        concat!(
            "SELECT d.id, d.project_id, d.event_id, d.event_type, d.endpoint_id, d.request_id, d.state, \
             d.ladder_number, d.job_copy, d.step, d.is_test, ",
            $event,
            ", ",
            $lost,
            " AS lost, w.enabled, w.failing_since, w.url, w.plugin_id, v.version AS plugin_version, \
             v.sha256 AS plugin_sha256, w.plugin_config, w.headers, w.secret, w.previous_secret, \
             w.previous_secret_until, w.earlier_secrets, asked.number FROM ",
            $from,
            " LEFT JOIN webhook_endpoints w ON w.id = d.endpoint_id \
             LEFT JOIN plugins p ON p.id = w.plugin_id \
             LEFT JOIN plugin_versions v ON v.plugin_id = p.id AND v.version = p.active_version"
        )
    };
}

const WHOLE: &str = loading!(
    "CASE WHEN octet_length(e.data) <= 65536 THEN e.data END AS data, e.created_at AS happened_at",
    "COALESCE((SELECT CAST(j.attempts AS BIGINT) FROM apalis.jobs j WHERE j.id = asked.job), 0)",
    "UNNEST($1::uuid[], $2::bigint[], $3::text[]) AS asked (id, number, job) \
     JOIN webhook_deliveries d ON d.id = asked.id JOIN events e ON e.id = d.event_id"
);

const STANDING: &str = "SELECT w.id, w.enabled, w.failing_since, w.url, w.plugin_id, \
     v.version AS plugin_version, v.sha256 AS plugin_sha256, w.plugin_config, w.headers, w.secret, \
     w.previous_secret, w.previous_secret_until, w.earlier_secrets FROM webhook_endpoints w \
     LEFT JOIN plugins p ON p.id = w.plugin_id \
     LEFT JOIN plugin_versions v ON v.plugin_id = p.id AND v.version = p.active_version \
     WHERE w.id = ANY($1)";

const ON_SQLITE: &str = loading!(
    "CASE WHEN octet_length(e.data) <= 65536 THEN e.data END AS data, e.created_at AS happened_at",
    "COALESCE((SELECT j.attempts FROM Jobs j WHERE j.id = asked.job), 0)",
    "(SELECT $1 AS id, $2 AS number, $3 AS job) AS asked \
     JOIN webhook_deliveries d ON d.id = asked.id JOIN events e ON e.id = d.event_id"
);

/// Whether an older job of an attempt is under way on another node: its endpoint was disabled and resumed
/// meanwhile, which gave the attempt a new job.
pub(super) async fn is_under_way(db: &Db, job: &DeliverWebhook) -> sqlx::Result<bool> {
    if job.copy == 0 || matches!(db, Db::Sqlite { .. }) {
        return Ok(false);
    }
    let keys: Vec<_> = (0..job.copy)
        .filter_map(|copy| {
            DeliverWebhook {
                copy,
                ..job.clone()
            }
            .unique_key()
        })
        .collect();
    let mut reader = db.read().await?;
    let Conn::Postgres(conn) = reader.conn() else {
        return Ok(false);
    };
    let asking = sqlx::query_as::<_, (bool,)>(
        "SELECT EXISTS (SELECT 1 FROM apalis.jobs WHERE job_type = $1 AND idempotency_key = ANY($2) \
         AND (begun_at IS NOT NULL OR status = 'Running'))",
    )
    .bind(DeliverWebhook::QUEUE)
    .bind(keys)
    .fetch_one(conn);
    let found = db::answered(asking).await;
    Ok(db::settle(&mut reader, found)?.0)
}

/// How many attempts of a delivery were interrupted.
pub(super) async fn interruptions(db: &Db, delivery: DeliveryId) -> sqlx::Result<i64> {
    let (count,) = fetch_one!(
        &mut db.read().await?,
        (i64,),
        "SELECT count(*) FROM webhook_attempts WHERE delivery_id = $1 AND error LIKE 'interrupted:%'",
        delivery
    )?;
    Ok(count)
}

async fn standings(db: Db, endpoints: Vec<EndpointId>) -> sqlx::Result<Vec<Option<Arc<Standing>>>> {
    let mut distinct: Vec<uuid::Uuid> = endpoints.iter().map(|id| (*id).into()).collect();
    distinct.sort_unstable();
    distinct.dedup();
    let mut reader = db.read().await?;
    let Conn::Postgres(conn) = reader.conn() else {
        return Err(db::only_postgres());
    };
    let asking = sqlx::query_as(STANDING).bind(distinct).fetch_all(conn);
    let found = db::answered(asking).await;
    let found: Vec<Standing> = db::settle(&mut reader, found)?;
    let found: HashMap<_, _> = found
        .into_iter()
        .map(|endpoint| (endpoint.id, Arc::new(endpoint)))
        .collect();
    Ok(endpoints.iter().map(|id| found.get(id).cloned()).collect())
}

async fn load(db: Db, attempts: Vec<Key>) -> sqlx::Result<Vec<Option<Loaded>>> {
    let mut reader = db.read().await?;
    let mut rows: Vec<Loaded> = Vec::new();
    if let Conn::Postgres(conn) = reader.conn() {
        let ids: Vec<uuid::Uuid> = attempts.iter().map(|(id, ..)| (*id).into()).collect();
        let numbers: Vec<i64> = attempts.iter().map(|(_, number, _)| *number).collect();
        let jobs: Vec<&str> = attempts.iter().map(|(.., job)| job.as_str()).collect();
        let asking = sqlx::query_as(WHOLE)
            .bind(ids)
            .bind(numbers)
            .bind(jobs)
            .fetch_all(conn);
        let found = db::answered(asking).await;
        rows = db::settle(&mut reader, found)?;
    } else {
        for (id, number, job) in &attempts {
            rows.extend(fetch_optional!(
                &mut reader,
                Loaded,
                ON_SQLITE,
                *id,
                *number,
                job.as_str()
            )?);
        }
    }
    let mut rows: HashMap<_, _> = rows
        .into_iter()
        .map(|row| ((row.id, row.number), row))
        .collect();
    Ok(attempts
        .iter()
        .map(|(id, number, _)| rows.remove(&(*id, *number)))
        .collect())
}
