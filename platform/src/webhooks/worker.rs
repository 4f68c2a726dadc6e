//! The worker: one attempt of one delivery, from the job to the settled outcome.
//!
//! It finds room at the endpoint, loads what the attempt needs, [prepares](prepare) what is sent, holds
//! no connection while the plugin runs or the request is out, and settles in one transaction
//! ([`settle`](super::settle)). A job that comes twice
//! finds its attempt on record, or its delivery in a state that needs none, and ends. What cannot be
//! settled because the database is away is tried again until it can: an attempt that was sent is
//! never lost while the process lives, and if it dies, the job runs again.

mod prepare;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::{
    attempts::{HeaderView, PluginUse, Status, Trigger, shown_headers},
    custom_headers::CustomHeaders,
    deliveries::{self, DeliverWebhook, DeliveryId, State},
    endpoints::{EndpointId, open_headers},
    events::{Event, EventId},
    ladder, payload,
    repeats::Repeat,
    rooms::{Place, Rooms, Running},
    sender::{OutgoingRequest, Sender},
    settle::{self, Settlement, Together},
    signature::EndpointSecret,
};
use crate::{
    contract::{auth::ProjectId, request_id::RequestId},
    db::{self, Conn, Db, Gather, JsonText, Queryable as _, Sealer, Timestamp, fetch_optional},
    jobs::{self, Begin, Ended, Taken},
    plugins::{PluginHost, PluginId},
};
use prepare::Prepared;

/// How long an attempt is put off when its plugin is being compiled.
const COMPILING: Duration = Duration::from_secs(1);

/// How often somebody asks whether an attempt that is under way has ended.
const UNDER_WAY: Duration = Duration::from_millis(200);

/// How many interruptions of one delivery count for nothing: beyond them, each is a failed step of the
/// ladder, so that what kills its process every time ends in the dead letters.
const INTERRUPTIONS: i64 = 5;

/// What makes attempts.
#[derive(Clone)]
pub struct Worker {
    /// The database.
    pub db: Db,
    /// Opens secrets.
    pub sealer: Sealer,
    /// Runs plugins.
    pub plugins: PluginHost,
    /// Sends to endpoints.
    pub sender: Sender,
    /// Sends to the inspector of this platform, wherever it is.
    pub to_inspector: Sender,
    /// The delays of the ladder.
    pub ladder: Arc<[Duration]>,
    /// What links in truncated bodies start with.
    pub public_url: Arc<str>,
    /// Room per endpoint.
    pub rooms: Rooms,
    /// The attempts that this process is making.
    pub running: Running,
    /// Loads what attempts need.
    pub loads: Loads,
    /// Marks attempts before they are sent.
    pub begin: Begin,
    /// Settles what was received.
    pub together: Together,
    /// When no further attempt begins.
    pub stop: CancellationToken,
}

/// All that an attempt needs.
#[derive(Debug, sqlx::FromRow)]
pub struct Loaded {
    id: DeliveryId,
    number: i64,
    project_id: ProjectId,
    event_id: EventId,
    event_type: String,
    endpoint_id: EndpointId,
    request_id: RequestId,
    state: String,
    ladder_number: i64,
    step: i64,
    is_test: bool,
    data: Option<JsonText<Box<RawValue>>>,
    happened_at: Timestamp,
    settled: bool,
    enabled: Option<bool>,
    failing_since: Option<Timestamp>,
    url: Option<String>,
    plugin_id: Option<PluginId>,
    plugin_version: Option<i64>,
    plugin_sha256: Option<Vec<u8>>,
    plugin_config: Option<String>,
    headers: Option<Vec<u8>>,
    secret: Option<Vec<u8>>,
    previous_secret: Option<Vec<u8>>,
    previous_secret_until: Option<Timestamp>,
}

/// Which attempt.
type Key = (DeliveryId, i64);

/// Loads what attempts need; that of those which begin together in one question.
#[derive(Clone)]
pub struct Loads {
    whole: Gather<Key, Option<Loaded>>,
    /// But for the event.
    rest: Gather<Key, Option<Loaded>>,
}

/// Attempts in one question.
const LARGEST_LOAD: usize = 100;

impl Loads {
    /// From this database.
    pub fn new(db: Db) -> Self {
        let of_rest = db.clone();
        Self {
            whole: Gather::new(LARGEST_LOAD, move |attempts| {
                Box::pin(load(db.clone(), attempts, true))
            }),
            rest: Gather::new(LARGEST_LOAD, move |attempts| {
                Box::pin(load(of_rest.clone(), attempts, false))
            }),
        }
    }

    /// What an attempt needs, if it is there. The event is not read again by who just wrote it.
    async fn get(&self, attempt: Key, event: Option<&Event>) -> sqlx::Result<Option<Loaded>> {
        let Some(event) = event else {
            return self.whole.get(attempt).await;
        };
        let mut loaded = self.rest.get(attempt).await?;
        if let Some(loaded) = &mut loaded
            && event.data.as_str().len() <= payload::MAX_BODY
        {
            loaded.data = Some(JsonText(event.data.0.clone()));
        }
        Ok(loaded)
    }
}

/// What an attempt may have from the start: its place, and the event that was just accepted.
pub(super) struct HeadStart {
    pub(super) place: Place,
    pub(super) event: Arc<Event>,
}

/// PostgreSQL settles and removes the job at once, so that no job comes whose attempt is on record; on
/// SQLite a process may stop in between.
macro_rules! loading {
    (whole, $settled:literal, $from:literal) => {
        loading!(
            "CASE WHEN octet_length(e.data) <= 65536 THEN e.data END AS data, e.created_at AS happened_at, ",
            " JOIN events e ON e.id = d.event_id",
            $settled,
            $from
        )
    };
    // A delivery is made at the moment that its event tells.
    (rest, $settled:literal, $from:literal) => {
        loading!(
            "NULL AS data, d.created_at AS happened_at, ",
            "",
            $settled,
            $from
        )
    };
    ($event:literal, $join:literal, $settled:literal, $from:literal) => {
        concat!(
            "SELECT d.id, d.project_id, d.event_id, d.event_type, d.endpoint_id, d.request_id, d.state, \
             d.ladder_number, d.step, d.is_test, ",
            $event,
            $settled,
            " AS settled, w.enabled, w.failing_since, w.url, w.plugin_id, v.version AS plugin_version, \
             v.sha256 AS plugin_sha256, w.plugin_config, w.headers, w.secret, w.previous_secret, \
             w.previous_secret_until, asked.number FROM ",
            $from,
            " JOIN webhook_deliveries d ON d.id = asked.id",
            $join,
            " LEFT JOIN webhook_endpoints w ON w.id = d.endpoint_id \
             LEFT JOIN plugins p ON p.id = w.plugin_id \
             LEFT JOIN plugin_versions v ON v.plugin_id = p.id AND v.version = p.active_version"
        )
    };
}

async fn load(db: Db, attempts: Vec<Key>, whole: bool) -> sqlx::Result<Vec<Option<Loaded>>> {
    let mut reader = db.read().await?;
    let mut rows: Vec<Loaded> = Vec::new();
    if let Conn::Postgres(conn) = reader.conn() {
        let (ids, numbers): (Vec<uuid::Uuid>, Vec<i64>) = attempts
            .iter()
            .map(|(id, number)| (uuid::Uuid::from(*id), *number))
            .unzip();
        let text = if whole {
            loading!(
                whole,
                "FALSE",
                "UNNEST($1::uuid[], $2::bigint[]) AS asked (id, number)"
            )
        } else {
            loading!(
                rest,
                "FALSE",
                "UNNEST($1::uuid[], $2::bigint[]) AS asked (id, number)"
            )
        };
        let asking = sqlx::query_as(text).bind(ids).bind(numbers).fetch_all(conn);
        let found = db::answered(asking).await;
        rows = db::settle(&mut reader, found)?;
    } else {
        for (id, number) in &attempts {
            rows.extend(fetch_optional!(
                &mut reader,
                Loaded,
                loading!(
                    whole,
                    "EXISTS (SELECT 1 FROM webhook_attempts a \
                     WHERE a.delivery_id = d.id AND a.number = asked.number)",
                    "(SELECT $1 AS id, $2 AS number) AS asked"
                ),
                *id,
                *number
            )?);
        }
    }
    let mut rows: HashMap<_, _> = rows
        .into_iter()
        .map(|row| ((row.id, row.number), row))
        .collect();
    Ok(attempts
        .iter()
        .map(|attempt| rows.remove(attempt))
        .collect())
}

/// What an endpoint's sealed and optional columns open to.
struct Outlet {
    url: String,
    secret: EndpointSecret,
    previous: Option<EndpointSecret>,
    headers: CustomHeaders,
}

impl Worker {
    /// Makes the attempt of a job; returns once the outcome is settled.
    pub async fn deliver(&self, job: Taken<DeliverWebhook>) -> Ended {
        self.deliver_from(job, None).await
    }

    /// Makes the attempt of a job, with what it may have already.
    pub(super) async fn deliver_from(
        &self,
        job: Taken<DeliverWebhook>,
        start: Option<HeadStart>,
    ) -> Ended {
        // A worker that lost the database leaves its jobs running here while the queue gives them out
        // again: whoever is at an attempt already goes on alone. The second waits for it, because a job
        // that returns is done with, and if this process died there would be nothing left of it.
        let _running = loop {
            match self.running.begin(job.job.delivery_id, job.job.number) {
                Some(running) => break running,
                None => tokio::time::sleep(UNDER_WAY).await,
            }
        };
        let start = Mutex::new(start);
        let take = || start.lock().ok().and_then(|mut start| start.take());
        jobs::until_done("an attempt", || Box::pin(self.attempt(&job, take()))).await
    }

    async fn attempt(
        &self,
        taken: &Taken<DeliverWebhook>,
        start: Option<HeadStart>,
    ) -> sqlx::Result<Ended> {
        let job = &taken.job;
        let (place, event) = start.map(|start| (start.place, start.event)).unzip();
        if self.stop.is_cancelled() {
            return Ok(Ended::NotBegun);
        }
        // Room first: what is read then is not stale for having waited.
        let place = match place {
            Some(place) => place,
            None => {
                let entered = tokio::select! {
                    biased;
                    () = self.stop.cancelled() => return Ok(Ended::NotBegun),
                    entered = self.rooms.enter(job.project_id, job.endpoint_id) => entered,
                };
                match entered {
                    Ok(place) => place,
                    Err(at) => return self.put_off(taken, at).await,
                }
            }
        };
        let attempt = (job.delivery_id, job.number);
        let Some(loaded) = self.loads.get(attempt, event.as_deref()).await? else {
            return Ok(Ended::Settled);
        };
        if loaded.settled {
            return Ok(Ended::Settled);
        }
        if taken.lost > 0 {
            return Ok(self.settle(Self::interrupted(taken, &loaded)).await);
        }
        if let Some(repeat) = &job.repeat {
            if let Some(why) = repeat.refused(loaded.enabled) {
                let now = Timestamp::now();
                let settlement = Self::failed(taken, &loaded, now, why.to_owned(), None);
                return Ok(self.settle(settlement).await);
            }
        } else {
            let is_open = matches!(loaded.state.parse(), Ok(State::Pending | State::Retrying));
            if !is_open || loaded.ladder_number != job.number {
                return Ok(Ended::Settled);
            }
            if loaded.enabled != Some(true) {
                settle::hold(&self.db, job, loaded.endpoint_id).await?;
                return Ok(Ended::Settled);
            }
        }
        let outlet = match self.open(job, &loaded) {
            Ok(outlet) => outlet,
            Err(error) => {
                let now = Timestamp::now();
                let error = format!("internal: {error}");
                let settlement = Self::failed(taken, &loaded, now, error, None);
                return Ok(self.settle(settlement).await);
            }
        };
        let started_at = Timestamp::now();
        let settlement = match self.prepare(job, &loaded, &outlet, started_at).await? {
            Prepared::Wait => {
                let at = Timestamp::now() + COMPILING;
                return self.put_off(taken, at).await;
            }
            Prepared::Drop { reason, plugin } => Settlement {
                status: Status::Succeeded,
                error: Some(format!("dropped_by_plugin: {reason}")),
                outcome: ladder::Outcome::PluginDropped,
                ..Self::failed(taken, &loaded, started_at, String::new(), Some(plugin))
            },
            Prepared::Fail { error, plugin } => {
                Self::failed(taken, &loaded, started_at, error, plugin)
            }
            Prepared::Send {
                body,
                headers,
                plugin,
            } => {
                if !self.begin.mark(taken).await? {
                    return Ok(Ended::NotBegun);
                }
                self.send(taken, &loaded, &outlet, started_at, body, headers, plugin)
                    .await
            }
        };
        place.took(settlement.duration);
        // The endpoint has nothing to do with how long it takes to settle.
        drop(place);
        Ok(self.settle(settlement).await)
    }

    /// Puts an attempt off; it does not count.
    async fn put_off(&self, taken: &Taken<DeliverWebhook>, at: Timestamp) -> sqlx::Result<Ended> {
        let mut tx = self.db.begin().await?;
        let removed = jobs::remove(&mut tx, &taken.id).await?;
        if taken.job.repeat.is_some() {
            jobs::enqueue(&mut tx, std::slice::from_ref(&taken.job), at).await?;
        } else {
            deliveries::put_off(&mut tx, &taken.job, at).await?;
        }
        tx.commit().await?;
        Ok(if removed {
            Ended::Removed
        } else {
            Ended::Settled
        })
    }

    fn open(&self, job: &DeliverWebhook, loaded: &Loaded) -> Result<Outlet, String> {
        let owner = loaded.endpoint_id.to_string();
        let open = |sealed: &Option<Vec<u8>>| -> Result<EndpointSecret, String> {
            let sealed = sealed.as_deref().ok_or("the endpoint has no secret")?;
            let key = self
                .sealer
                .open(&owner, sealed)
                .map_err(|error| error.to_string())?;
            Ok(EndpointSecret::from_key(key))
        };
        let previous = loaded
            .previous_secret_until
            .filter(|until| *until > Timestamp::now())
            .map(|_| open(&loaded.previous_secret))
            .transpose()?;
        let headers = loaded.headers.as_deref().unwrap_or_default();
        let headers = open_headers(&self.sealer, loaded.endpoint_id, headers)
            .map_err(|error| error.to_string())?;
        let secret = open(&loaded.secret)?;
        Ok(match job.repeat.as_ref().and_then(Repeat::bin) {
            // A bin shows what it gets, and values of an endpoint's own headers are never shown.
            Some(bin) => Outlet {
                url: bin.to_owned(),
                secret,
                previous,
                headers: headers.masked(),
            },
            None => Outlet {
                url: loaded.url.clone().unwrap_or_default(),
                secret,
                previous,
                headers,
            },
        })
    }

    async fn send(
        &self,
        taken: &Taken<DeliverWebhook>,
        loaded: &Loaded,
        outlet: &Outlet,
        started_at: Timestamp,
        body: String,
        from_plugin: Vec<(String, String)>,
        plugin: Option<PluginUse>,
    ) -> Settlement {
        let (headers, shown) = match Self::headers(&taken.job, loaded, outlet, &body, &from_plugin)
        {
            Ok(headers) => headers,
            Err(error) => {
                return Self::failed(
                    taken,
                    loaded,
                    started_at,
                    format!("request: {error}"),
                    plugin,
                );
            }
        };
        let Ok(url) = Url::parse(&outlet.url) else {
            return Self::failed(
                taken,
                loaded,
                started_at,
                "request: the URL is not one".to_owned(),
                plugin,
            );
        };
        let began = Instant::now();
        let sender = match taken.job.repeat.as_ref().and_then(Repeat::bin) {
            Some(_) => &self.to_inspector,
            None => &self.sender,
        };
        let sent = sender
            .send(OutgoingRequest {
                url,
                headers,
                body: Bytes::from(body.clone()),
            })
            .await;
        let succeeded = sent.outcome == ladder::Outcome::Delivered;
        metrics::counter!("botix_webhook_attempts_total", "status" => if succeeded { "succeeded" } else { "failed" })
            .increment(1);
        metrics::histogram!("botix_webhook_attempt_seconds").record(began.elapsed().as_secs_f64());
        Settlement {
            status: if succeeded {
                Status::Succeeded
            } else {
                Status::Failed
            },
            status_code: sent.status.map(i64::from),
            error: sent
                .error
                .map(|error| format!("{}: {}", error.kind.as_str(), error.detail)),
            duration: sent.duration,
            request_headers: shown,
            payload: Some(body),
            response_headers: shown_headers(
                sent.response_headers
                    .iter()
                    .map(|(name, value)| (&**name, &**value)),
            ),
            response_body: sent.response_body,
            outcome: sent.outcome,
            ..Self::failed(taken, loaded, started_at, String::new(), plugin)
        }
    }

    /// An attempt in which nothing was sent.
    fn failed(
        taken: &Taken<DeliverWebhook>,
        loaded: &Loaded,
        started_at: Timestamp,
        error: String,
        plugin: Option<PluginUse>,
    ) -> Settlement {
        let job = &taken.job;
        Settlement {
            project: loaded.project_id,
            delivery: job.delivery_id,
            event: loaded.event_id,
            event_type: loaded.event_type.clone(),
            endpoint: loaded.endpoint_id,
            request_id: job.request_id(loaded.request_id),
            number: job.number,
            step: loaded.step,
            trigger: match &job.repeat {
                Some(repeat) => repeat.trigger,
                None if loaded.is_test => Trigger::Test,
                None => Trigger::Ladder,
            },
            url: match job.repeat.as_ref().and_then(Repeat::bin) {
                Some(bin) => bin.to_owned(),
                None => loaded.url.clone().unwrap_or_default(),
            },
            status: Status::Failed,
            status_code: None,
            error: Some(error),
            duration: Timestamp::now().since(started_at),
            request_headers: HeaderView::new(),
            payload: None,
            response_headers: HeaderView::new(),
            response_body: Vec::new(),
            plugin,
            started_at,
            outcome: ladder::Outcome::PluginFailed,
            was_failing: loaded.failing_since.is_some(),
            job: taken.id.clone(),
            room: job.endpoint_id,
            repeat: job.repeat.clone(),
        }
    }

    /// An attempt whose maker died: what came of it is not known, and its number is used up.
    fn interrupted(taken: &Taken<DeliverWebhook>, loaded: &Loaded) -> Settlement {
        let error = "interrupted: the process that made this attempt ended before its outcome was known; \
                     the webhook may have arrived";
        let now = Timestamp::now();
        let outcome = if taken.job.number - loaded.step < INTERRUPTIONS {
            ladder::Outcome::Interrupted
        } else {
            ladder::Outcome::Failed
        };
        Settlement {
            outcome,
            ..Self::failed(taken, loaded, now, error.to_owned(), None)
        }
    }

    /// Settles, however long the database is away.
    async fn settle(&self, settlement: Settlement) -> Ended {
        let settlement = Arc::new(settlement);
        if settle::takes(&self.db, &settlement)
            && self.together.commit(settlement.clone()).await.is_ok()
        {
            return Ended::Removed;
        }
        jobs::until_done("recording an attempt", || {
            settlement.commit(&self.db, &self.ladder)
        })
        .await
    }
}
