//! The worker: one attempt of one delivery, from the job to the settled outcome.
//!
//! It finds room at the endpoint, [loads](load) what the attempt needs, [marks](begin) its job, [prepares](prepare)
//! what is sent, holds no connection while the plugin runs or the request is out, and settles in one
//! transaction ([`settle`](super::settle)). An old job, whose attempt was made or has another job, ends. What
//! cannot be settled because the database is away is tried again until it can: an attempt that was sent
//! is never lost while the process lives, and if it dies, whoever gets the job next records it as
//! interrupted.

mod begin;
mod load;
mod prepare;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::{
    attempts::{HeaderView, PluginUse, Status, Trigger, shown_headers},
    custom_headers::CustomHeaders,
    deliveries::State,
    endpoints::{EndpointId, open_headers},
    ladder,
    planning::{self, DeliverWebhook},
    repeats::Repeat,
    rooms::{Place, Rooms, Running, lane},
    sender::{OutgoingRequest, Sender},
    settle::{self, Settlement, Together},
    signature::EndpointSecret,
};
use crate::{
    contract::auth::ProjectId,
    db::{Db, Sealer, Shares, Timestamp},
    jobs::{self, Ended, Parking, Taken},
    plugins::PluginHost,
};
pub use begin::Begin;
use load::Loaded;
pub use load::{Fresh, Loads};
use prepare::Prepared;

/// How long an attempt is put off when its plugin is being compiled, or an older job of it is under way.
const A_MOMENT: Duration = Duration::from_secs(1);

/// How long an attempt is put off at least that finds no room where too many endpoints are full, and at most
/// twice as long.
const A_WHILE: Duration = Duration::from_secs(2);

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
    /// Parks those for which there is no room.
    pub parking: Parking,
    /// Marks attempts before they are sent.
    pub begin: Begin,
    /// Settles what was received.
    pub together: Together,
    /// Who settles what is noted at an endpoint: one at a time.
    pub seats: Shares<EndpointId>,
    /// How many of the connections a project may have for its attempts, each alone.
    pub shares: Shares<ProjectId>,
    /// When no further attempt begins.
    pub stop: CancellationToken,
}

/// What an attempt may have from the start: its place, and the event that was just accepted.
pub(super) struct HeadStart {
    pub(super) place: Place,
    pub(super) event: Arc<Fresh>,
}

/// What an endpoint's sealed and optional columns open to.
struct Outlet {
    /// None where its text is no URL.
    url: Option<Url>,
    secret: EndpointSecret,
    previous: Vec<EndpointSecret>,
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
        let place = if let Some(place) = place {
            place
        } else {
            let entered = tokio::select! {
                biased;
                () = self.stop.cancelled() => return Ok(Ended::NotBegun),
                entered = self.rooms.enter(job.project_id, job.endpoint_id) => entered,
            };
            match entered {
                Some(place) => place,
                None => return self.turn_away(taken).await,
            }
        };
        let Some(loaded) = self.loads.get(taken, event.as_deref()).await? else {
            return Ok(Ended::Settled);
        };
        let is_open = matches!(loaded.state.parse(), Ok(State::Pending | State::Retrying));
        // What may have been sent goes on record, whatever its delivery is by now.
        let is_current = is_open && loaded.job_copy == job.copy || loaded.lost > 0;
        let is_old = job.repeat.is_none() && !(is_current && loaded.ladder_number == job.number);
        if is_old {
            return Ok(Ended::Settled);
        }
        if job.repeat.is_none() && loaded.enabled != Some(true) && loaded.lost == 0 {
            let _seat = self.shares.seat(job.project_id).await;
            return settle::hold(&self.db, taken, loaded.endpoint_id).await;
        }
        if load::is_under_way(&self.db, job).await? {
            let at = Timestamp::now() + A_MOMENT;
            let _seat = self.shares.seat(job.project_id).await;
            return planning::put_off(&self.db, taken, at).await;
        }
        // From here on something is settled or sent, which only who has the job may do.
        if self.stop.is_cancelled() {
            return Ok(Ended::NotBegun);
        }
        let whatever_is_next = job.repeat.is_some() || loaded.lost > 0;
        if !self.begin.mark(taken, whatever_is_next).await? {
            // It is another's by now, or looked at again: its delivery has changed, or is about to.
            let at = Timestamp::now() + A_MOMENT;
            return planning::look_again(&self.db, taken, at).await;
        }
        if loaded.lost > 0 {
            let interrupted = self.interrupted(taken, &loaded).await?;
            return Ok(self.settle(Arc::new(interrupted)).await);
        }
        if let Some(why) = (job.repeat.as_ref()).and_then(|repeat| repeat.refused(loaded.enabled)) {
            let now = Timestamp::now();
            let settlement = Self::failed(taken, &loaded, now, why.to_owned(), None);
            return Ok(self.settle(Arc::new(settlement)).await);
        }
        let outlet = match self.open(job, &loaded) {
            Ok(outlet) => outlet,
            Err(error) => {
                let now = Timestamp::now();
                let error = format!("internal: {error}");
                let settlement = Self::failed(taken, &loaded, now, error, None);
                return Ok(self.settle(Arc::new(settlement)).await);
            }
        };
        let started_at = Timestamp::now();
        let settlement = match self.prepare(job, &loaded, &outlet, started_at).await? {
            Prepared::Wait => {
                let at = Timestamp::now() + A_MOMENT;
                return planning::put_off(&self.db, taken, at).await;
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
                let sent = self
                    .send(taken, &loaded, &outlet, started_at, body, headers, plugin)
                    .await;
                place.took(sent.duration);
                sent
            }
        };
        let settlement = Arc::new(settlement);
        if settle::takes(&self.db, &settlement) {
            // The endpoint has nothing to do with how long it takes to settle.
            drop(place);
            return Ok(self.settle(settlement).await);
        }
        // Settled alone, and perhaps waiting for others: no more of its attempts are made than it has places.
        let ended = self.settle(settlement).await;
        drop(place);
        Ok(ended)
    }

    /// Has a job wait until there is room for it.
    async fn turn_away(&self, taken: &Taken<DeliverWebhook>) -> sqlx::Result<Ended> {
        let job = &taken.job;
        if !self.rooms.is_to_park(job.project_id, job.endpoint_id) {
            let at = Timestamp::now() + A_WHILE.mul_f64(1.0 + rand::random::<f64>());
            return planning::put_off(&self.db, taken, at).await;
        }
        self.parking.park(taken, lane(job.endpoint_id)).await?;
        Ok(Ended::Removed)
    }

    /// What the endpoint's columns open to: opened once for all attempts that read them together.
    fn open(&self, job: &DeliverWebhook, loaded: &Loaded) -> Result<Arc<Outlet>, String> {
        let outlet = if let Some(outlet) = loaded.outlet.get() {
            outlet.clone()
        } else {
            let opened = Arc::new(self.unseal(loaded)?);
            loaded.outlet.get_or_init(|| opened).clone()
        };
        Ok(match job.repeat.as_ref().and_then(Repeat::bin) {
            // A bin shows what it gets, and values of an endpoint's own headers are never shown.
            Some(bin) => Arc::new(Outlet {
                url: Url::parse(bin).ok(),
                secret: outlet.secret.clone(),
                previous: outlet.previous.clone(),
                headers: outlet.headers.clone().masked(),
            }),
            None => outlet,
        })
    }

    fn unseal(&self, loaded: &Loaded) -> Result<Outlet, String> {
        let owner = loaded.endpoint_id.to_string();
        let open = |sealed: &[u8]| -> Result<EndpointSecret, String> {
            let key = self
                .sealer
                .open(&owner, sealed)
                .map_err(|error| error.to_string())?;
            Ok(EndpointSecret::from_key(key))
        };
        let now = Timestamp::now();
        let previous = (loaded.previous_secret_until)
            .filter(|until| *until > now)
            .and(loaded.previous_secret.clone());
        let earlier = loaded.earlier_secrets.iter().flat_map(|list| &list.0);
        let earlier = earlier.filter_map(|secret| secret.sealed_at(now));
        let previous = (previous.into_iter().chain(earlier))
            .map(|sealed| open(&sealed))
            .collect::<Result<_, _>>()?;
        let secret = (loaded.secret.as_deref()).ok_or("the endpoint has no secret")?;
        let headers = loaded.headers.as_deref().unwrap_or_default();
        let headers = open_headers(&self.sealer, loaded.endpoint_id, headers)
            .map_err(|error| error.to_string())?;
        Ok(Outlet {
            url: (loaded.url.as_deref()).and_then(|url| Url::parse(url).ok()),
            secret: open(secret)?,
            previous,
            headers,
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
        let Some(url) = outlet.url.clone() else {
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
    async fn interrupted(
        &self,
        taken: &Taken<DeliverWebhook>,
        loaded: &Loaded,
    ) -> sqlx::Result<Settlement> {
        let error = "interrupted: the process that made this attempt ended before its outcome was known; \
                     the webhook may have arrived";
        let before = load::interruptions(&self.db, taken.job.delivery_id).await?;
        Ok(Settlement {
            outcome: if before < INTERRUPTIONS {
                ladder::Outcome::Interrupted
            } else {
                ladder::Outcome::Failed
            },
            ..Self::failed(taken, loaded, Timestamp::now(), error.to_owned(), None)
        })
    }

    /// Settles, however long the database is away.
    async fn settle(&self, settlement: Arc<Settlement>) -> Ended {
        if settle::takes(&self.db, &settlement)
            && self.together.commit(settlement.clone()).await.is_ok()
        {
            return Ended::Removed;
        }
        jobs::until_done("recording an attempt", || {
            settlement.commit(&self.db, &self.ladder, &self.seats, &self.shares)
        })
        .await
    }
}
