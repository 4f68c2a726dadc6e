//! Opening the database that the settings name, and bringing its tables up to date.

use std::{io, path::Path};

use secrecy::ExposeSecret as _;
use sqlx::{
    postgres::{PgConnectOptions, PgPoolOptions},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{Connections, Db, PATIENCE, TURN, migrate};
use crate::config::Config;

/// How often a starting process waits for its first connection before it gives up.
const FIRST_TRIES: u32 = 3;

/// How long PostgreSQL lets a statement run.
pub(super) const LONGEST_STATEMENT: &str = "15s";

/// Why a database could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL is not one of this database.
    #[error("database_url: {0}")]
    Url(String),
    /// The database did not answer or refused.
    #[error("database: {0}")]
    Connect(#[from] sqlx::Error),
    /// The folder of an SQLite file could not be made.
    #[error("database folder: {0}")]
    Folder(#[from] io::Error),
    /// A migration failed.
    #[error("migration: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
}

impl Db {
    /// Connects; makes an SQLite file where there is none.
    pub async fn open(config: &Config) -> Result<Self, OpenError> {
        match config.sqlite_path() {
            Some(path) => Self::open_sqlite(&path, config.database_connections).await,
            None => Self::open_postgres(config).await,
        }
    }

    async fn open_postgres(config: &Config) -> Result<Self, OpenError> {
        let options: PgConnectOptions = config
            .database_url
            .expose_secret()
            .parse()
            .map_err(|error: sqlx::Error| OpenError::Url(error.to_string()))?;
        let options = options.application_name("botix").options([
            ("statement_timeout", LONGEST_STATEMENT),
            // Every statement here finds its rows by an index. A plan is kept for long, and one that was
            // made while the tables were empty must not read them whole when they are full.
            ("enable_seqscan", "off"),
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
            // Planned once a connection, not anew for the first five executions: no plan depends on values.
            ("plan_cache_mode", "force_generic_plan"),
            // Compiling a plan takes longer than running it.
            ("jit", "off"),
            // A process that is frozen in the midst of a transaction keeps its locks, and others wait for them.
            ("idle_in_transaction_session_timeout", "10s"),
        ]);
        let pool = PgPoolOptions::new()
            .max_connections(config.database_connections)
            .acquire_timeout(PATIENCE)
            .test_before_acquire(false)
            .connect_lazy_with(options);
        // A database that is busy, or starts at the same time, gets a few chances.
        let mut tries = 1;
        loop {
            match Box::pin(pool.acquire()).await {
                Ok(_) => break,
                Err(sqlx::Error::PoolTimedOut) if tries < FIRST_TRIES => tries += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self::Postgres(Connections::new(pool)))
    }

    async fn open_sqlite(path: &Path, readers: u32) -> Result<Self, OpenError> {
        if let Some(folder) = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
        {
            tokio::fs::create_dir_all(folder).await?;
        }
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .foreign_keys(true)
            .busy_timeout(PATIENCE)
            .pragma("cache_size", "-65536")
            .pragma("temp_store", "memory");
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(TURN)
            .test_before_acquire(false)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options.clone())
            .await?;
        let readers = SqlitePoolOptions::new()
            .max_connections(readers.clamp(2, 8))
            .acquire_timeout(PATIENCE)
            .test_before_acquire(false)
            .connect_with(options.pragma("query_only", "on"))
            .await?;
        Ok(Self::Sqlite { writer, readers })
    }

    /// Applies every migration that is missing; safe beside running nodes.
    pub async fn migrate(&self) -> Result<(), OpenError> {
        migrate::run(self).await.map_err(OpenError::from)
    }
}
