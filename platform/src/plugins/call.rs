//! A run of a plugin: one event on its way to one endpoint.
//!
//! `transform` and `sign` each get a fresh store and instance, so nothing that a tenant's code keeps
//! in memory outlives a function call. `sign` sees the final body; a plugin that only signs leaves
//! the event's body as it is, to the byte. Both draw on one budget and one log. Whatever goes wrong
//! is an [`Outcome::Failed`] of this run with the log up to that point; the engine is as good as new
//! for the next one.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::{Instant as Deadline, timeout_at};
use wasmtime::component::{ComponentExportIndex, ComponentNamedList, ComponentType, Lift, Lower};
use wasmtime::{Store, UpdateDeadline};

use super::answer;
use super::engine::{HOSTCALL_BYTES, Plugin, PluginEngine, TABLE_ELEMENTS, TICK};
use super::failure::PluginError;
use super::host::{Host, Keys, LogLine};
use super::limits::MemoryBudget;

/// What happened, as it would be sent without a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// `evt_…`.
    pub id: String,
    /// Dotted name.
    pub event_type: String,
    /// RFC 3339, UTC.
    pub timestamp: String,
    /// The whole webhook body, JSON text.
    pub body: String,
}

/// Where the attempt is going.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// `whe_…`.
    pub endpoint_id: String,
    /// The endpoint's URL.
    pub url: String,
    /// 1 for the first attempt.
    pub attempt: u32,
    /// `req_…`.
    pub request_id: String,
}

/// Everything that a run depends on. The same call gives the same answer.
#[derive(Debug, Clone)]
pub struct Call {
    /// What happened.
    pub event: Event,
    /// Where it goes.
    pub delivery: Delivery,
    /// The plugin's JSON configuration on this endpoint; `{}` where there is none.
    pub config: Arc<str>,
    /// The signing keys that the plugin may use by name.
    pub keys: Arc<Keys>,
    /// Unix time in milliseconds that `now` answers.
    pub now_ms: u64,
}

/// The function in which a run failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// `transform`, or before it.
    Transform,
    /// `sign`.
    Sign,
}

impl Stage {
    /// The function's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Transform => "transform",
            Self::Sign => "sign",
        }
    }
}

/// What a run comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Send this.
    Deliver {
        /// The final body.
        body: String,
        /// Headers to send with it, names in lower case and each once.
        headers: Vec<(String, String)>,
    },
    /// Send nothing.
    Drop {
        /// The plugin's words.
        reason: String,
    },
    /// The plugin failed.
    Failed {
        /// Where.
        stage: Stage,
        /// Why.
        error: PluginError,
    },
}

/// What a run came to, and what it took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// What to do.
    pub outcome: Outcome,
    /// What the plugin logged.
    pub log: Vec<LogLine>,
    /// Microseconds that it ran; waiting for a slot does not count.
    pub duration_us: u64,
    /// Fuel that it used.
    pub fuel: u64,
}

/// Longest reason of a drop that is kept.
const REASON_BYTES: usize = 1_024;

#[derive(Clone, Copy, ComponentType, Lower)]
#[component(record)]
struct WitEvent<'a> {
    id: &'a str,
    #[component(name = "event-type")]
    event_type: &'a str,
    timestamp: &'a str,
    body: &'a str,
}

#[derive(Clone, Copy, ComponentType, Lower)]
#[component(record)]
struct WitDelivery<'a> {
    #[component(name = "endpoint-id")]
    endpoint_id: &'a str,
    url: &'a str,
    attempt: u32,
    #[component(name = "request-id")]
    request_id: &'a str,
}

#[derive(ComponentType, Lift)]
#[component(record)]
struct WitHeader {
    name: String,
    value: String,
}

#[derive(ComponentType, Lift)]
#[component(record)]
struct WitRequest {
    body: String,
    headers: Vec<WitHeader>,
}

#[derive(ComponentType, Lift)]
#[component(variant)]
enum WitOutcome {
    #[component(name = "deliver")]
    Deliver(WitRequest),
    #[component(name = "drop")]
    Drop(String),
}

impl From<WitHeader> for (String, String) {
    fn from(header: WitHeader) -> Self {
        (header.name, header.value)
    }
}

impl PluginEngine {
    /// Runs a plugin. Waits for a slot first; the time limits start when there is one.
    pub async fn run(&self, plugin: &Plugin, call: Call) -> Report {
        self.run_from(plugin, call, None).await
    }

    /// Runs a plugin, without `transform` where it has made a body and headers before.
    pub async fn run_from(
        &self,
        plugin: &Plugin,
        call: Call,
        transformed: Option<(String, Vec<(String, String)>)>,
    ) -> Report {
        // The semaphores are never closed, so these waits end in a permit.
        let _of_plugin = plugin.inner.slots.acquire().await;
        let _of_engine = self.inner.slots.acquire().await;
        let started = Instant::now();
        let mut run = Run::new(self, &call);
        let outcome = run
            .outcome(plugin, &call, transformed)
            .await
            .unwrap_or_else(|(stage, error)| Outcome::Failed { stage, error });
        Report {
            outcome,
            duration_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
            fuel: self.inner.limits.fuel - run.fuel_left,
            log: run.host.map_or_else(Vec::new, Host::into_log),
        }
    }
}

/// The state that goes from `transform` to `sign`.
struct Run<'e> {
    engine: &'e PluginEngine,
    deadline: Deadline,
    fuel_left: u64,
    /// `None` while a stage has it.
    host: Option<Host>,
}

impl<'e> Run<'e> {
    fn new(engine: &'e PluginEngine, call: &Call) -> Self {
        let limits = engine.limits();
        let ticks = limits.cpu.as_millis().div_ceil(TICK.as_millis());
        Self {
            engine,
            deadline: Deadline::now() + limits.wall,
            fuel_left: limits.fuel,
            host: Some(Host::new(
                limits,
                MemoryBudget::new(limits.memory_bytes, TABLE_ELEMENTS),
                u64::try_from(ticks).unwrap_or(u64::MAX),
                Arc::clone(&call.config),
                call.now_ms,
                Arc::clone(&call.keys),
            )),
        }
    }

    async fn outcome(
        &mut self,
        plugin: &Plugin,
        call: &Call,
        transformed: Option<(String, Vec<(String, String)>)>,
    ) -> Result<Outcome, (Stage, PluginError)> {
        let plugin = &plugin.inner;
        let limits = self.engine.limits();
        let first = if plugin.transform.is_some() && transformed.is_none() {
            Stage::Transform
        } else {
            Stage::Sign
        };
        let before = transformed.as_ref().map_or(0, |(body, _)| body.len());
        let bytes = call.event.body.len().max(call.config.len()).max(before);
        if bytes > limits.input_bytes {
            let error = PluginError::InputTooLarge {
                bytes,
                limit: limits.input_bytes,
            };
            return Err((first, error));
        }
        let event = WitEvent {
            id: &call.event.id,
            event_type: &call.event.event_type,
            timestamp: &call.event.timestamp,
            body: &call.event.body,
        };
        let delivery = WitDelivery {
            endpoint_id: &call.delivery.endpoint_id,
            url: &call.delivery.url,
            attempt: call.delivery.attempt,
            request_id: &call.delivery.request_id,
        };

        let mut headers = Vec::new();
        let mut changed_body = None;
        if let Some((body, added)) = transformed {
            changed_body = Some(body);
            headers = added;
        } else if let Some(transform) = &plugin.transform {
            let at = |error| (Stage::Transform, error);
            let answer = self
                .stage(plugin, transform, (event, delivery))
                .await
                .map_err(at)?;
            match answer {
                WitOutcome::Drop(reason) => {
                    let reason = super::truncated(&reason, REASON_BYTES);
                    return Ok(Outcome::Drop { reason });
                }
                WitOutcome::Deliver(request) => {
                    answer::check_body(&request.body, limits).map_err(at)?;
                    let answered = request.headers.into_iter().map(Into::into);
                    answer::merge_headers(&mut headers, answered, limits).map_err(at)?;
                    changed_body = Some(request.body);
                }
            }
        }
        if let Some(sign) = &plugin.sign {
            let at = |error| (Stage::Sign, error);
            let body = changed_body.as_deref().unwrap_or(&call.event.body);
            let answered: Vec<WitHeader> = self
                .stage(plugin, sign, (event, delivery, body))
                .await
                .map_err(at)?;
            let answered = answered.into_iter().map(Into::into);
            answer::merge_headers(&mut headers, answered, limits).map_err(at)?;
        }
        Ok(Outcome::Deliver {
            body: changed_body.unwrap_or_else(|| call.event.body.clone()),
            headers,
        })
    }

    /// Calls one function in a fresh store and instance.
    async fn stage<Params, Answer>(
        &mut self,
        plugin: &super::engine::Loaded,
        function: &ComponentExportIndex,
        params: Params,
    ) -> Result<Answer, PluginError>
    where
        Params: ComponentNamedList + Lower + Send + Sync,
        Answer: Lift + Send + Sync + 'static,
    {
        let limits = self.engine.limits();
        let Some(mut host) = self.host.take() else {
            return Err(PluginError::Internal);
        };
        host.memory = MemoryBudget::new(limits.memory_bytes, TABLE_ELEMENTS);
        let mut store = Store::new(&self.engine.inner.engine, host);
        store.limiter(|host| &mut host.memory);
        store.set_hostcall_fuel(HOSTCALL_BYTES);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut store| {
            let host = store.data_mut();
            host.ticks = host.ticks.saturating_sub(1);
            Ok(if host.ticks == 0 {
                UpdateDeadline::Interrupt
            } else {
                UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now()))
            })
        });
        let answer = match store.set_fuel(self.fuel_left) {
            Ok(()) => {
                let call = call_function(&mut store, plugin, function, params);
                timeout_at(self.deadline, call).await
            }
            Err(error) => Ok(Err(error)),
        };
        self.fuel_left = store
            .get_fuel()
            .unwrap_or(self.fuel_left)
            .min(self.fuel_left);
        let host = self.host.insert(store.into_data());
        match answer {
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(message))) => Err(PluginError::guest(&message)),
            Ok(Err(error)) => Err(PluginError::from_wasmtime(
                &error,
                host.memory.refused(),
                limits,
            )),
            Err(_elapsed) => Err(PluginError::Timeout { limit: limits.wall }),
        }
    }
}

async fn call_function<Params, Answer>(
    store: &mut Store<Host>,
    plugin: &super::engine::Loaded,
    function: &ComponentExportIndex,
    params: Params,
) -> wasmtime::Result<Result<Answer, String>>
where
    Params: ComponentNamedList + Lower + Send + Sync,
    Answer: Lift + Send + Sync + 'static,
{
    let instance = plugin.pre.instantiate_async(&mut *store).await?;
    let function =
        instance.get_typed_func::<Params, (Result<Answer, String>,)>(&mut *store, function)?;
    let (answer,) = function.call_async(store, params).await?;
    Ok(answer)
}
