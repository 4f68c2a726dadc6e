//! What nodes share through Redis, and how they do without it.
//!
//! Everything kept there is a shortcut: leases, finished answers and rate-limit clocks that SQL or the
//! process itself can stand in for. So no caller ever waits long or fails because of Redis: a command
//! has a short time-out, a failure opens a [`Circuit`], and while it is open every command is
//! [`OutOfReach`] at once. There is one connection manager; a time-out replaces it, because a
//! connection over a dead wire never reports an end by itself. The log hears when Redis goes and when
//! it comes back, and nothing in between.

mod circuit;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use redis::{
    Client, FromRedisValue, Pipeline, RedisError, RedisResult, ScriptInvocation,
    aio::{ConnectionManager, ConnectionManagerConfig},
};
use secrecy::{ExposeSecret as _, SecretString};

pub use circuit::Circuit;

/// How long a command may take, in milliseconds much more than it ever does.
const PATIENCE: Duration = Duration::from_millis(500);

/// 1 while Redis answers, else 0.
const IN_REACH: &str = "botix_redis_in_reach";

/// The connection to Redis.
#[derive(Clone)]
pub struct Shared(Arc<Inner>);

struct Inner {
    client: Client,
    connection: Mutex<ConnectionManager>,
    circuit: Circuit,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// Redis did not answer in time, or not as it should; what was asked may have happened or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Redis is out of reach")]
pub struct OutOfReach;

impl Shared {
    /// A connection to the Redis of this URL, made when first used.
    pub fn new(url: &SecretString) -> RedisResult<Self> {
        let client = Client::open(url.expose_secret())?;
        let connection = Mutex::new(connect(&client)?);
        Ok(Self(Arc::new(Inner {
            client,
            connection,
            circuit: Circuit::default(),
        })))
    }

    /// Runs a pipeline, in one round trip.
    pub async fn run<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, OutOfReach> {
        self.ask(async |mut connection| pipeline.query_async(&mut connection).await)
            .await
    }

    /// Runs a script.
    pub async fn invoke<T: FromRedisValue>(
        &self,
        script: &ScriptInvocation<'_>,
    ) -> Result<T, OutOfReach> {
        self.ask(async |mut connection| script.invoke_async(&mut connection).await)
            .await
    }

    /// Whether Redis answers now.
    pub async fn ping(&self) -> Result<(), OutOfReach> {
        let mut pipeline = redis::pipe();
        pipeline.cmd("PING").ignore();
        self.run(&pipeline)
            .await
            .inspect(|()| metrics::gauge!(IN_REACH).set(1.0))
    }

    async fn ask<T>(
        &self,
        command: impl AsyncFnOnce(ConnectionManager) -> RedisResult<T>,
    ) -> Result<T, OutOfReach> {
        let inner = &*self.0;
        if !inner.circuit.admits(Instant::now()) {
            return Err(OutOfReach);
        }
        let connection = inner.connection().clone();
        let answer = tokio::time::timeout(PATIENCE, command(connection)).await;
        match answer {
            Ok(Ok(answer)) => {
                if inner.circuit.answered() {
                    metrics::gauge!(IN_REACH).set(1.0);
                    tracing::info!("Redis is back");
                }
                Ok(answer)
            }
            // Redis lives, and does not like what is under this one key.
            Ok(Err(error)) if concerns_a_key(&error) => {
                tracing::debug!(%error, "a key in Redis holds something else than it should");
                Err(OutOfReach)
            }
            Ok(Err(error)) => inner.lost(Some(&error)),
            Err(_) => inner.lost(None),
        }
    }
}

impl Inner {
    fn connection(&self) -> std::sync::MutexGuard<'_, ConnectionManager> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lost<T>(&self, error: Option<&RedisError>) -> Result<T, OutOfReach> {
        if self.circuit.failed(Instant::now()) {
            metrics::gauge!(IN_REACH).set(0.0);
            let error = error.map_or("no answer in time".to_owned(), ToString::to_string);
            tracing::warn!(
                error,
                "Redis is out of reach; SQL and this process do its work until it is back"
            );
        }
        match connect(&self.client) {
            Ok(fresh) => *self.connection() = fresh,
            // The URL was good when the process started, and nothing else is looked at here.
            Err(error) => tracing::warn!(%error, "no new connection to Redis"),
        }
        Err(OutOfReach)
    }
}

/// Whether an error is about what a key holds, rather than about Redis.
fn concerns_a_key(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE")
        || error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::ResponseError)
}

/// A manager that connects when first used, and does not try again by itself: the circuit does.
fn connect(client: &Client) -> RedisResult<ConnectionManager> {
    let config = ConnectionManagerConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE))
        .set_number_of_retries(0)
        // As many as may wait at once; with fewer, callers queue for a place in the queue.
        .set_pipeline_buffer_size(1_000);
    ConnectionManager::new_lazy_with_config(client.clone(), config)
}
