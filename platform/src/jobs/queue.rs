//! The queue as apalis's worker wants it, on this project's own connections.
//!
//! apalis's storages ask their pool and wait, however long. Over a wire that died without a word such a worker
//! waits for ever: one state machine fetches, acknowledges and gives signs of life, one after the other,
//! and whatever hangs stops all of it. Here each step has an end, after less time than makes a worker dead
//! in the eyes of the others; then the step fails, the worker ends and [`run`](super::run) starts the
//! next. What the steps do to the tables is in [`store`](super::store).

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use apalis::prelude::WorkerContext;
use apalis_core::backend::{
    Backend, BackendConfig, WireFormatBackend,
    finalize::Durable,
    persistence::{Persisted, Persistence, TaskEvent, TaskPersistLayer},
};
use apalis_core::task::{builder::TaskBuilder, status::Status, task_id::TaskId};
use apalis_postgres::{Config, Error, PgTask};
use apalis_sqlite::JsonCodec;
use serde::Deserialize as _;
use serde_json::Value;
use tokio_util::task::TaskTracker;
use ulid::Ulid;

use super::{
    Ended, Hand, Job,
    lanes::Lanes,
    store::{Raw, Store},
};
use crate::db::{self, Db};

/// How long a step may take, beside the time for a connection.
const STEP: Duration = Duration::from_secs(5);

/// Jobs that are looked at at a time while lanes are crowded, so that those to be parked are soon out of the way.
const LOOK: usize = 1_000;

/// Crowded lanes that are looked for at a time.
const LANES: usize = 200;

/// The queue of one kind of job.
pub(super) struct Queue<J: Job> {
    steps: Persisted<Steps<J>>,
    codec: JsonCodec,
}

/// What a worker brings along.
#[derive(Clone)]
pub(super) struct Brought {
    /// Its running jobs.
    pub(super) running: TaskTracker,
    /// The hand that is opened once it is registered.
    pub(super) hand: Option<Hand>,
    /// What is known of the queue's lanes.
    pub(super) lanes: Option<Arc<dyn Lanes>>,
}

impl<J: Job> Queue<J> {
    /// The queue that the configuration names, in this store.
    pub(super) fn new(db: Db, config: Config, brought: Brought) -> Self {
        let store = Store {
            db,
            queue: J::QUEUE,
        };
        Self {
            steps: Persisted::new(Steps {
                store,
                config,
                brought,
                last_lane: Arc::default(),
                job: PhantomData,
            }),
            codec: JsonCodec::default(),
        }
    }
}

impl<J: Job> Backend for Queue<J> {
    type Task = PgTask;
    type Error = Error;

    fn poll_ready(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
    ) -> Poll<Result<(), Error>> {
        let heartbeat = self.steps.config.heartbeat_interval;
        self.steps.poll_ready(cx, worker, heartbeat)
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
    ) -> Poll<Option<Result<PgTask, Error>>> {
        self.steps.poll_next(cx, worker)
    }

    fn poll_close(
        &mut self,
        cx: &mut Context<'_>,
        worker: &WorkerContext,
    ) -> Poll<Result<(), Error>> {
        self.steps.poll_close(cx, worker)
    }
}

impl<J: Job> BackendConfig for Queue<J> {
    type Args = J;
    type Id = Ulid;
    type Kind = Durable;
    type Config = Config;
    type Layer = TaskPersistLayer<JsonCodec<Value>, Value>;

    fn config(&self) -> &Config {
        &self.steps.config
    }

    fn middleware(&mut self, _: &mut WorkerContext) -> Self::Layer {
        let batch = self.steps.config.batch_size;
        self.steps
            .layer(JsonCodec::<Value>::default(), batch)
            .persist_results(true)
            // A fetch locks what it gives out.
            .lock_tasks(false)
    }
}

impl<J: Job> WireFormatBackend for Queue<J> {
    type Codec = JsonCodec;
    type Compact = Vec<u8>;

    fn codec(&self) -> &JsonCodec {
        &self.codec
    }
}

/// What a worker does to the queue.
struct Steps<J> {
    store: Store,
    config: Config,
    brought: Brought,
    /// Where the look for crowded lanes has come to.
    last_lane: Arc<Mutex<String>>,
    job: PhantomData<fn(J)>,
}

impl<J> Clone for Steps<J> {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
            config: self.config.clone(),
            brought: self.brought.clone(),
            last_lane: self.last_lane.clone(),
            job: PhantomData,
        }
    }
}

/// A job as apalis's worker wants it.
fn task((id, job): Raw) -> Result<PgTask, Error> {
    let id = Ulid::from_string(&id).map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
    Ok(TaskBuilder::new(job).task_id(TaskId::from_ulid(id)).build())
}

/// Does a step, or gives up.
async fn step<T>(db: &Db, work: impl Future<Output = sqlx::Result<T>>) -> Result<T, Error> {
    let done = tokio::time::timeout(db.patience() + STEP, work).await;
    done.unwrap_or_else(|_| Err(db::silence()))
        .map_err(Error::from)
}

impl<J: Job> Steps<J> {
    /// Looks which lanes have parked jobs, some at a time and all in turn.
    async fn look_for_lanes(&self, lanes: &dyn Lanes) -> sqlx::Result<()> {
        let last = |is: Option<String>| {
            let mut last = self
                .last_lane
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(is) = is {
                *last = is;
            }
            last.clone()
        };
        let found = self.store.lanes_after(&last(None), LANES).await?;
        last(Some(match found.last() {
            Some(reached) if found.len() == LANES => reached.clone(),
            _ => String::new(),
        }));
        lanes.found(found);
        Ok(())
    }

    async fn fetch(&self, worker: &str) -> sqlx::Result<Vec<Raw>> {
        let most = self.config.batch_size;
        let lanes = self.brought.lanes.as_deref();
        let mut fetched = match lanes {
            Some(lanes) => self.fetch_parked(worker, lanes, most).await?,
            None => Vec::new(),
        };
        let crowded = lanes.filter(|lanes| lanes.is_any_crowded());
        let is_sqlite = matches!(self.store.db, Db::Sqlite { .. });
        let due = match crowded {
            None if !is_sqlite => self.store.fetch(worker, most).await?,
            _ if is_sqlite && !self.store.is_any_due().await? => Vec::new(),
            _ => {
                let parks = |job: &[u8]| {
                    let lane = serde_json::from_slice::<J>(job).ok()?.lane()?;
                    crowded?.is_crowded(&lane).then_some(lane)
                };
                let look = if crowded.is_some() {
                    LOOK.max(most)
                } else {
                    most
                };
                self.store.fetch_sorted(worker, look, most, parks).await?
            }
        };
        fetched.extend(due);
        Ok(fetched)
    }

    /// Parked jobs for which there are places now.
    async fn fetch_parked(
        &self,
        worker: &str,
        lanes: &dyn Lanes,
        most: usize,
    ) -> sqlx::Result<Vec<Raw>> {
        let openings = lanes.openings(most);
        if openings.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.store.fetch_parked(worker, &openings).await?;
        for (lane, places) in &openings {
            let came = found.iter().filter(|(of, _)| of == lane).count();
            if came < *places {
                lanes.emptied(lane);
            }
        }
        Ok(found.into_iter().map(|(_, job)| job).collect())
    }
}

impl<J: Job> Persistence for Steps<J> {
    type Compact = Vec<u8>;
    type Response = Value;
    type Error = Error;

    async fn register(&mut self, worker: &WorkerContext) -> Result<(), Error> {
        step(&self.store.db, async {
            self.store.register(worker.name()).await?;
            if let Some(hand) = &self.brought.hand {
                hand.open(worker.name(), &self.brought.running);
            }
            Ok(())
        })
        .await
    }

    /// Signs of life are given by [`run`](super::run), also while all slots are taken.
    async fn heartbeat(&mut self, _: &WorkerContext) -> Result<(), Error> {
        match self.brought.lanes.as_deref() {
            Some(lanes) => step(&self.store.db, self.look_for_lanes(lanes)).await,
            None => Ok(()),
        }
    }

    async fn fetch_next(&mut self, worker: &WorkerContext) -> Result<Vec<PgTask>, Error> {
        let fetched = step(&self.store.db, self.fetch(worker.name())).await?;
        fetched.into_iter().map(task).collect()
    }

    async fn reenqueue_abandoned(
        &mut self,
        tasks: Vec<PgTask>,
        worker: &WorkerContext,
    ) -> Result<u64, Error> {
        let ids: Vec<String> = tasks
            .iter()
            .filter_map(|task| task.task_id().map(ToString::to_string))
            .collect();
        let ids: Vec<&str> = ids.iter().map(|id| &**id).collect();
        // They did not begin: nobody needs to wonder what came of them.
        step(&self.store.db, self.store.give_back(worker.name(), &ids)).await?;
        Ok(ids.len() as u64)
    }

    async fn handle_events(
        &mut self,
        events: Vec<TaskEvent<Value>>,
        worker: &WorkerContext,
    ) -> Result<(), Error> {
        let (mut done, mut unread) = (Vec::new(), Vec::new());
        for event in &events {
            let TaskEvent::Complete(result) = event else {
                continue;
            };
            let id = result.task_id().to_string();
            if *result.status() != Status::Done {
                tracing::error!(id, result = ?result.result(), "a job failed; it runs again");
                unread.push(id);
                continue;
            }
            let ended = result.result().as_ref().ok();
            match ended.and_then(|value| Ended::deserialize(value).ok()) {
                // Those that are gone, and those that stay, need nothing.
                Some(Ended::Removed | Ended::NotBegun) => {}
                _ => done.push(id),
            }
        }
        step(&self.store.db, async {
            if !done.is_empty() {
                let ids: Vec<&str> = done.iter().map(|id| &**id).collect();
                self.store.remove(&ids).await?;
            }
            for id in &unread {
                self.store.rest(worker.name(), id).await?;
            }
            Ok(())
        })
        .await
    }

    /// Jobs are written by whoever has them done, in his own transaction.
    async fn push_tasks(&mut self, _: Vec<PgTask>) -> Result<(), Error> {
        Ok(())
    }
}
