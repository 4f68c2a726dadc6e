//! apalis's queue in PostgreSQL, on this project's own connections.
//!
//! apalis's storage asks its pool and waits, however long. Over a wire that died without a word its worker
//! waits for ever: one state machine fetches, acknowledges and gives signs of life, one after the other,
//! and whatever hangs stops all of it. Here each step has an end, after less time than makes a worker dead
//! in the eyes of the others; then the step fails, the worker ends and [`run`](super::run) starts the
//! next. The statements are apalis's own but for some: the first sign of life, whose time apalis takes in a
//! type of its own that nobody else can name; the fetch, which apalis keeps in a function that PostgreSQL
//! plans anew at every call; jobs that are done, which are deleted; and those of dead workers, of which
//! it is told whether they had begun.

use std::{
    marker::PhantomData,
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
use apalis_postgres::{Config, Error, PgTask, queries};
use apalis_sqlite::JsonCodec;
use serde::Deserialize as _;
use serde_json::Value;
use tokio_util::task::TaskTracker;
use ulid::Ulid;

use super::{Ended, Hand};
use crate::db::{self, Conn, Db, Queryable as _, Tx, execute};

/// How long a step may take.
const STEP: Duration = Duration::from_secs(10);

/// The queue of one kind of job.
pub(super) struct Queue<J> {
    steps: Persisted<Steps>,
    codec: JsonCodec,
    job: PhantomData<J>,
}

impl<J> Queue<J> {
    /// The queue that the configuration names, in this store, which is PostgreSQL.
    ///
    /// Once its worker is registered, it opens the hand with the worker's running jobs.
    pub(super) fn new(db: Db, config: Config, hand: Option<(Hand, TaskTracker)>) -> Self {
        Self {
            steps: Persisted::new(Steps { db, config, hand }),
            codec: JsonCodec::default(),
            job: PhantomData,
        }
    }
}

impl<J> Backend for Queue<J> {
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

impl<J> BackendConfig for Queue<J> {
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

impl<J> WireFormatBackend for Queue<J> {
    type Codec = JsonCodec;
    type Compact = Vec<u8>;

    fn codec(&self) -> &JsonCodec {
        &self.codec
    }
}

/// What a worker does to the queue, a transaction for each: one statement is one by itself.
#[derive(Clone)]
struct Steps {
    db: Db,
    config: Config,
    hand: Option<(Hand, TaskTracker)>,
}

/// Runs one of apalis's statements.
macro_rules! on {
    ($tx:expr, |$conn:ident| $statement:expr) => {{
        let done = match $tx.conn() {
            Conn::Postgres($conn) => $statement.await.map_err(Error::from),
            Conn::Sqlite(_) => Err(wrong_database()),
        };
        $tx.settled();
        done
    }};
}

fn wrong_database() -> Error {
    Error::Database(sqlx::Error::Configuration("a queue of PostgreSQL".into()))
}

/// A job as apalis's worker wants it.
fn task((id, job): (String, Vec<u8>)) -> Result<PgTask, Error> {
    let id = Ulid::from_string(&id).map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
    Ok(TaskBuilder::new(job).task_id(TaskId::from_ulid(id)).build())
}

/// Whether the end of a job is still to be noted in the queue.
fn is_to_note(result: &Result<Value, String>) -> bool {
    let ended = result
        .as_ref()
        .ok()
        .and_then(|value| Ended::deserialize(value).ok());
    !matches!(ended, Some(Ended::Removed | Ended::NotBegun))
}

/// Does a step, or gives up.
async fn step<T>(work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let done = tokio::time::timeout(STEP, work).await;
    done.map_err(|_| Error::Database(db::silence()))?
}

impl Steps {
    /// Puts the jobs of dead workers back. Those that were begun count as lost once more.
    async fn recover(&self, tx: &mut Tx) -> Result<u64, Error> {
        let dead_for = i64::try_from(self.config.orphaned_duration().as_secs()).unwrap_or(i64::MAX);
        let put_back = execute!(
            tx,
            "UPDATE apalis.jobs SET status = 'Pending', lock_by = NULL, lock_at = NULL, \
             attempts = attempts + CASE stale.status WHEN 'Running' THEN 1 ELSE 0 END \
             FROM (SELECT j.id, j.status FROM apalis.jobs j JOIN apalis.workers w ON w.id = j.lock_by \
             WHERE j.status IN ('Queued', 'Running') AND w.worker_type = $1 \
             AND w.last_seen <= now() - $2 * interval '1 second' FOR UPDATE OF j SKIP LOCKED) AS stale \
             WHERE apalis.jobs.id = stale.id",
            self.config.queue.as_ref(),
            dead_for
        )?;
        if put_back > 0 {
            tracing::info!(put_back, queue = %self.config.queue.as_ref(), "jobs of dead workers run again");
        }
        Ok(put_back)
    }
}

impl Persistence for Steps {
    type Compact = Vec<u8>;
    type Response = Value;
    type Error = Error;

    async fn register(&mut self, worker: &WorkerContext) -> Result<(), Error> {
        step(async {
            let mut tx = self.db.begin().await?;
            self.recover(&mut tx).await?;
            execute!(
                &mut tx,
                "INSERT INTO apalis.workers (id, worker_type, storage_name, layers, last_seen) \
                 VALUES ($1, $2, $3, $4, now())",
                worker.name(),
                self.config.queue.as_ref(),
                "botix",
                worker.get_service()
            )?;
            tx.commit().await?;
            if let Some((hand, running)) = &self.hand {
                hand.open(worker.name(), running);
            }
            Ok(())
        })
        .await
    }

    async fn heartbeat(&mut self, worker: &WorkerContext) -> Result<(), Error> {
        step(async {
            let mut tx = self.db.begin().await?;
            let queue = self.config.queue.as_ref();
            on!(tx, |conn| queries::keep_alive(conn, queue, worker))?;
            self.recover(&mut tx).await?;
            Ok(tx.commit().await?)
        })
        .await
    }

    async fn fetch_next(&mut self, worker: &WorkerContext) -> Result<Vec<PgTask>, Error> {
        step(async {
            let mut on = self.db.read().await?;
            let queue = self.config.queue.as_ref();
            let most = i64::try_from(self.config.batch_size).unwrap_or(i64::MAX);
            let fetched: Vec<(String, Vec<u8>)> = on!(on, |conn| {
                sqlx::query_as(
                    "UPDATE apalis.jobs j SET status = 'Queued', lock_by = $1, lock_at = now() \
                     FROM (SELECT id FROM apalis.jobs WHERE (status = 'Pending' \
                     OR (status = 'Failed' AND attempts < max_attempts)) \
                     AND job_type = $2 AND run_at < now() ORDER BY priority DESC, run_at LIMIT $3 \
                     FOR UPDATE SKIP LOCKED) AS due \
                     WHERE j.id = due.id RETURNING j.id, j.job",
                )
                .bind(worker.name())
                .bind(queue)
                .bind(most)
                .fetch_all(conn)
            })?;
            fetched.into_iter().map(task).collect()
        })
        .await
    }

    async fn reenqueue_abandoned(
        &mut self,
        tasks: Vec<PgTask>,
        worker: &WorkerContext,
    ) -> Result<u64, Error> {
        step(async {
            let ids: Vec<_> = tasks
                .iter()
                .filter_map(|task| task.task_id().map(ToString::to_string))
                .collect();
            let mut tx = self.db.begin().await?;
            // They did not begin: nobody needs to wonder what came of them.
            let name = worker.name();
            let given_back = on!(tx, |conn| {
                sqlx::query(
                    "UPDATE apalis.jobs SET status = 'Pending', lock_by = NULL, lock_at = NULL \
                     WHERE id = ANY($1) AND lock_by = $2",
                )
                .bind(&ids)
                .bind(name)
                .execute(conn)
            })?;
            tx.commit().await?;
            Ok(given_back.rows_affected())
        })
        .await
    }

    async fn handle_events(
        &mut self,
        events: Vec<TaskEvent<Value>>,
        worker: &WorkerContext,
    ) -> Result<(), Error> {
        step(async {
            let results = events.iter().filter_map(|event| match event {
                TaskEvent::Complete(result) => Some(result),
                _ => None,
            });
            // Those that are gone, and those that stay, need nothing.
            let results = results.filter(|result| is_to_note(result.result()));
            let (done, failed): (Vec<_>, Vec<_>) =
                results.partition(|result| *result.status() == Status::Done);
            let name = worker.name();
            if !done.is_empty() {
                // Nobody asks for them any more. apalis would keep them, and find those to note among
                // all that its worker ever did.
                let ids: Vec<_> = done
                    .iter()
                    .map(|result| result.task_id().to_string())
                    .collect();
                let mut on = self.db.read().await?;
                let removed = on!(on, |conn| {
                    sqlx::query("DELETE FROM apalis.jobs WHERE id = ANY($1) AND lock_by = $2")
                        .bind(&ids)
                        .bind(name)
                        .execute(conn)
                });
                removed?;
            }
            if !failed.is_empty() {
                let mut on = self.db.read().await?;
                on!(on, |conn| queries::handle_results(conn, &failed, name))?;
            }
            Ok(())
        })
        .await
    }

    async fn push_tasks(&mut self, tasks: Vec<PgTask>) -> Result<(), Error> {
        step(async {
            let mut tx = self.db.begin().await?;
            let queue = self.config.queue.as_ref();
            on!(tx, |conn| queries::push_tasks(conn, queue, tasks))?;
            Ok(tx.commit().await?)
        })
        .await
    }
}
