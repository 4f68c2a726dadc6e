//! The worker: one attempt of one delivery, from the job to the settled outcome.
//!
//! It finds room at the endpoint, loads what the attempt needs, holds no connection while the plugin runs or the
//! request is out, and settles in one transaction ([`settle`](super::settle)). A job that comes twice
//! finds its attempt on record, or its delivery in a state that needs none, and ends. What cannot be
//! settled because the database is away is tried again until it can: an attempt that was sent is
//! never lost while the process lives, and if it dies, the job runs again.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use poem::http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::{
    attempts::{HeaderView, PluginUse, Status, shown_headers},
    custom_headers::CustomHeaders,
    deliveries::{DeliverWebhook, DeliveryId, State},
    endpoints::{EndpointId, open_headers},
    events::EventId,
    headers, ladder, payload,
    rooms::{Rooms, Running},
    sender::{OutgoingRequest, Sender},
    settle::{self, Settlement},
    signature::EndpointSecret,
};
use crate::{
    contract::{auth::ProjectId, request_id::RequestId, reserved_headers::is_reserved},
    db::{Db, JsonText, Sealer, Timestamp, fetch_optional},
    jobs,
    plugins::{self, PluginHost, PluginId},
};

/// How long an attempt is put off when its plugin is being compiled.
const COMPILING: Duration = Duration::from_secs(1);

/// How long a job that did not begin stays, so that its worker is gone before it could note its end.
const UNTIL_UNACKNOWLEDGED: Duration = Duration::from_millis(200);

/// What makes attempts.
#[derive(Clone)]
pub struct Worker {
    /// The database.
    pub db: Db,
    /// Opens secrets.
    pub sealer: Sealer,
    /// Runs plugins.
    pub plugins: PluginHost,
    /// Sends.
    pub sender: Sender,
    /// The delays of the ladder.
    pub ladder: Arc<[Duration]>,
    /// What links in truncated bodies start with.
    pub public_url: Arc<str>,
    /// Room per endpoint.
    pub rooms: Rooms,
    /// The attempts that this process is making.
    pub running: Running,
    /// When no further attempt begins.
    pub stop: CancellationToken,
}

/// All that an attempt needs.
#[derive(Debug, sqlx::FromRow)]
struct Loaded {
    project_id: ProjectId,
    event_id: EventId,
    event_type: String,
    endpoint_id: EndpointId,
    request_id: RequestId,
    state: String,
    step: i64,
    data: Option<JsonText<Box<RawValue>>>,
    happened_at: Timestamp,
    settled: bool,
    enabled: Option<bool>,
    url: Option<String>,
    plugin_id: Option<PluginId>,
    plugin_config: Option<String>,
    headers: Option<Vec<u8>>,
    secret: Option<Vec<u8>>,
    previous_secret: Option<Vec<u8>>,
    previous_secret_until: Option<Timestamp>,
}

/// What an endpoint's sealed and optional columns open to.
struct Outlet {
    url: String,
    secret: EndpointSecret,
    previous: Option<EndpointSecret>,
    headers: CustomHeaders,
}

/// A webhook as it would leave, or why it does not.
enum Prepared {
    Send {
        body: String,
        headers: Vec<(String, String)>,
        plugin: Option<PluginUse>,
    },
    Drop {
        reason: String,
        plugin: PluginUse,
    },
    Fail {
        error: String,
        plugin: Option<PluginUse>,
    },
    Wait,
}

impl Worker {
    /// Makes the attempt of a job; returns once the outcome is settled.
    pub async fn deliver(&self, job: DeliverWebhook) {
        // A worker that lost the database leaves its jobs running here while the queue gives them out
        // again: whoever is at an attempt already goes on alone.
        let Some(_running) = self.running.begin(job.delivery_id, job.number) else {
            return;
        };
        jobs::until_done("an attempt", || self.attempt(&job)).await;
    }

    async fn attempt(&self, job: &DeliverWebhook) -> sqlx::Result<()> {
        // Room first: what is read then is not stale for having waited.
        let entered = tokio::select! {
            biased;
            () = self.stop.cancelled() => {
                // The job is handed back by name; it must not be acknowledged before that.
                tokio::time::sleep(UNTIL_UNACKNOWLEDGED).await;
                return Ok(());
            }
            entered = self.rooms.enter(job.project_id, job.endpoint_id) => entered,
        };
        let room = match entered {
            Ok(room) => room,
            Err(at) => return settle::put_off(&self.db, job.delivery_id, at).await,
        };
        let Some(loaded) = self.load(job.delivery_id, job.number).await? else {
            return Ok(());
        };
        if loaded.settled || !matches!(loaded.state.parse(), Ok(State::Pending | State::Retrying)) {
            return Ok(());
        }
        if loaded.enabled != Some(true) {
            return settle::hold(&self.db, job.delivery_id, loaded.endpoint_id).await;
        }
        let outlet = match self.open(&loaded) {
            Ok(outlet) => outlet,
            Err(error) => {
                let now = Timestamp::now();
                let settlement =
                    Self::failed(job, &loaded, now, format!("internal: {error}"), None);
                self.settle(&settlement).await;
                return Ok(());
            }
        };
        let started_at = Timestamp::now();
        let settlement = match self.prepare(job, &loaded, &outlet, started_at).await? {
            Prepared::Wait => {
                let at = Timestamp::now() + COMPILING;
                return settle::put_off(&self.db, job.delivery_id, at).await;
            }
            Prepared::Drop { reason, plugin } => Settlement {
                status: Status::Succeeded,
                error: Some(format!("dropped_by_plugin: {reason}")),
                outcome: ladder::Outcome::PluginDropped,
                ..Self::failed(job, &loaded, started_at, String::new(), Some(plugin))
            },
            Prepared::Fail { error, plugin } => {
                Self::failed(job, &loaded, started_at, error, plugin)
            }
            Prepared::Send {
                body,
                headers,
                plugin,
            } => {
                self.send(job, &loaded, &outlet, started_at, body, headers, plugin)
                    .await
            }
        };
        room.took(settlement.duration);
        self.settle(&settlement).await;
        Ok(())
    }

    async fn load(&self, delivery: DeliveryId, number: i64) -> sqlx::Result<Option<Loaded>> {
        let mut reader = self.db.read().await?;
        fetch_optional!(
            &mut reader,
            Loaded,
            "SELECT d.project_id, d.event_id, d.event_type, d.endpoint_id, d.request_id, d.state, d.step, \
             CASE WHEN octet_length(e.data) <= 65536 THEN e.data END AS data, \
             e.created_at AS happened_at, \
             EXISTS (SELECT 1 FROM webhook_attempts a WHERE a.delivery_id = d.id AND a.number = $2) AS settled, \
             w.enabled, w.url, w.plugin_id, w.plugin_config, w.headers, w.secret, \
             w.previous_secret, w.previous_secret_until \
             FROM webhook_deliveries d JOIN events e ON e.id = d.event_id \
             LEFT JOIN webhook_endpoints w ON w.id = d.endpoint_id WHERE d.id = $1",
            delivery,
            number
        )
    }

    fn open(&self, loaded: &Loaded) -> Result<Outlet, String> {
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
        Ok(Outlet {
            url: loaded.url.clone().unwrap_or_default(),
            secret: open(&loaded.secret)?,
            previous,
            headers: open_headers(&self.sealer, loaded.endpoint_id, headers)
                .map_err(|error| error.to_string())?,
        })
    }

    /// Builds the body and lets the plugin have its say.
    async fn prepare(
        &self,
        job: &DeliverWebhook,
        loaded: &Loaded,
        outlet: &Outlet,
        now: Timestamp,
    ) -> sqlx::Result<Prepared> {
        let event_id = loaded.event_id.to_string();
        let timestamp = loaded.happened_at.to_string();
        let project_id = loaded.project_id.to_string();
        let event = payload::Event {
            id: &event_id,
            event_type: &loaded.event_type,
            timestamp: &timestamp,
            project_id: &project_id,
            data: loaded.data.as_ref().map(|data| data.0.get()),
        };
        let body = payload::build(&event, &self.public_url).body;
        let Some(plugin_id) = loaded.plugin_id else {
            return Ok(Prepared::Send {
                body,
                headers: Vec::new(),
                plugin: None,
            });
        };
        let active = match self.plugins.active(plugin_id).await? {
            plugins::Active::Ready(active) => active,
            plugins::Active::Compiling => return Ok(Prepared::Wait),
            plugins::Active::Unusable(why) => {
                return Ok(Prepared::Fail {
                    error: format!("plugin: {why}"),
                    plugin: None,
                });
            }
        };
        let call = plugins::Call {
            event: plugins::Event {
                id: event_id.clone(),
                event_type: loaded.event_type.clone(),
                timestamp: timestamp.clone(),
                body,
            },
            delivery: plugins::Delivery {
                endpoint_id: loaded.endpoint_id.to_string(),
                url: outlet.url.clone(),
                attempt: u32::try_from(job.number).unwrap_or(u32::MAX),
                request_id: loaded.request_id.to_string(),
            },
            config: loaded.plugin_config.as_deref().unwrap_or("{}").into(),
            keys: Arc::new(
                [("endpoint", outlet.secret.key().to_vec())]
                    .into_iter()
                    .collect(),
            ),
            now_ms: u64::try_from(now.micros() / 1_000).unwrap_or(0),
        };
        let report = self.plugins.run(&active, call).await;
        let plugin = PluginUse {
            id: plugin_id,
            version: active.version,
            log: report.log,
        };
        Ok(match report.outcome {
            plugins::Outcome::Deliver { body, headers } => Prepared::Send {
                body,
                headers,
                plugin: Some(plugin),
            },
            plugins::Outcome::Drop { reason } => Prepared::Drop { reason, plugin },
            plugins::Outcome::Failed { stage, error } => Prepared::Fail {
                error: format!("plugin: {}: {error}", stage.as_str()),
                plugin: Some(plugin),
            },
        })
    }

    async fn send(
        &self,
        job: &DeliverWebhook,
        loaded: &Loaded,
        outlet: &Outlet,
        started_at: Timestamp,
        body: String,
        from_plugin: Vec<(String, String)>,
        plugin: Option<PluginUse>,
    ) -> Settlement {
        let (headers, shown) = match Self::headers(job, loaded, outlet, &body, &from_plugin) {
            Ok(headers) => headers,
            Err(error) => {
                return Self::failed(job, loaded, started_at, format!("request: {error}"), plugin);
            }
        };
        let Ok(url) = Url::parse(&outlet.url) else {
            return Self::failed(
                job,
                loaded,
                started_at,
                "request: the URL is not one".to_owned(),
                plugin,
            );
        };
        let began = Instant::now();
        let sent = self
            .sender
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
            ..Self::failed(job, loaded, started_at, String::new(), plugin)
        }
    }

    /// The headers to send, and the same as they are recorded.
    fn headers(
        job: &DeliverWebhook,
        loaded: &Loaded,
        outlet: &Outlet,
        body: &str,
        from_plugin: &[(String, String)],
    ) -> Result<(HeaderMap, HeaderView), String> {
        let attempt = headers::Attempt {
            event_id: &loaded.event_id.to_string(),
            event_type: &loaded.event_type,
            request_id: &loaded.request_id.to_string(),
            number: u32::try_from(job.number).unwrap_or(u32::MAX),
            sent_at: SystemTime::now(),
        };
        let mut all = headers::headers(
            &attempt,
            &outlet.secret,
            outlet.previous.as_ref(),
            body.as_bytes(),
        )
        .map_err(|error| error.to_string())?;
        let mut masked = Vec::new();
        for (name, value) in outlet.headers.iter() {
            masked.push(name.clone());
            all.insert(name, value);
        }
        for (name, value) in from_plugin {
            let name: HeaderName = name
                .parse()
                .map_err(|_| format!("`{name}` is no header name"))?;
            let value: HeaderValue = value
                .parse()
                .map_err(|_| format!("the value of `{name}` is no header value"))?;
            if is_reserved(&name) {
                return Err(format!("the plugin may not set `{name}`"));
            }
            masked.retain(|own| *own != name);
            all.insert(name, value);
        }
        let shown = shown_headers(all.iter().map(|(name, value)| {
            let value = if masked.contains(name) {
                "********"
            } else {
                value.to_str().unwrap_or_default()
            };
            (name.as_str(), value)
        }));
        Ok((all, shown))
    }

    /// An attempt in which nothing was sent.
    fn failed(
        job: &DeliverWebhook,
        loaded: &Loaded,
        started_at: Timestamp,
        error: String,
        plugin: Option<PluginUse>,
    ) -> Settlement {
        Settlement {
            project: loaded.project_id,
            delivery: job.delivery_id,
            event: loaded.event_id,
            event_type: loaded.event_type.clone(),
            endpoint: loaded.endpoint_id,
            request_id: loaded.request_id,
            number: job.number,
            step: loaded.step,
            url: loaded.url.clone().unwrap_or_default(),
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
        }
    }

    /// Settles, however long the database is away.
    async fn settle(&self, settlement: &Settlement) {
        jobs::until_done("recording an attempt", || {
            settlement.commit(&self.db, &self.ladder)
        })
        .await;
    }
}
