//! Two databases behind one set of types.
//!
//! PostgreSQL and SQLite run the same query text: both take `$1`, `RETURNING`, `ON CONFLICT` and row
//! values. [`Db`] holds the pools, [`Tx`] is an open transaction, [`Conn`] is what a statement runs
//! on. The macros [`execute!`](crate::db::execute), [`fetch_one!`](crate::db::fetch_one),
//! [`fetch_optional!`](crate::db::fetch_optional) and [`fetch_all!`](crate::db::fetch_all) expand one
//! text and one set of binds into both arms. Types that must look different in each database carry
//! their encoding themselves: [`Timestamp`], [`Id`], [`JsonText`]. SQLite has one writer connection,
//! handed out first come, first served, and many readers.

mod borrowed;
mod gather;
mod id;
mod json_text;
mod migrate;
mod secret_box;
mod timestamp;

use std::{
    io,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};

use secrecy::ExposeSecret as _;
use sqlx::{
    PgConnection, Sqlite, SqliteConnection, SqlitePool, Transaction,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPoolOptions},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use tokio::sync::Notify;

use borrowed::Borrowed;
pub use borrowed::Connections;
pub use gather::Gather;
pub use id::{Id, IdError, Kind};
pub use json_text::JsonText;
pub use secret_box::{SealError, Sealer};
pub use timestamp::Timestamp;

use crate::config::Config;

/// How long a statement waits for a connection or a lock before the store counts as out of reach.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How long somebody waits for his turn at SQLite's only writer: a queue in this process is no outage.
const TURN: Duration = Duration::from_secs(20);

/// How long a statement may go without its answer before its connection counts as dead; the server
/// itself ends what takes longer than [`LONGEST_STATEMENT`].
const SILENCE: Duration = Duration::from_secs(20);

/// How often a starting process waits for its first connection before it gives up.
const FIRST_TRIES: u32 = 3;

/// How long PostgreSQL lets a statement run.
const LONGEST_STATEMENT: &str = "15s";

/// The database of this process.
#[derive(Clone, Debug)]
pub enum Db {
    /// PostgreSQL, shared by any number of nodes.
    Postgres(Connections),
    /// An SQLite file, of this node alone.
    Sqlite {
        /// The single connection that writes.
        writer: SqlitePool,
        /// Connections that only read.
        readers: SqlitePool,
    },
}

/// An open transaction; dropped, it rolls back.
#[derive(Debug)]
pub struct Tx {
    open: Open,
    announces: bool,
}

#[derive(Debug)]
enum Open {
    /// Read committed, or repeatable read where it only reads.
    Postgres(Borrowed),
    /// Begun `IMMEDIATE`, or `DEFERRED` where it only reads.
    Sqlite(Transaction<'static, Sqlite>),
}

/// A connection on which each statement is a transaction by itself.
#[derive(Debug)]
pub struct Autocommit(Alone);

#[derive(Debug)]
enum Alone {
    Postgres(Borrowed),
    Sqlite(PoolConnection<Sqlite>),
}

/// What a statement runs on.
#[derive(Debug)]
pub enum Conn<'c> {
    /// On PostgreSQL.
    Postgres(&'c mut PgConnection),
    /// On SQLite.
    Sqlite(&'c mut SqliteConnection),
}

/// Anything a statement can run on: [`Tx`] or [`Autocommit`].
pub trait Queryable: Send {
    /// The connection beneath, for a statement that begins now.
    fn conn(&mut self) -> Conn<'_>;

    /// Whether it is PostgreSQL, for whoever has a text for each database.
    fn is_postgres(&self) -> bool;

    /// The statement has ended, well or not. One that was dropped half-way never says so, and its
    /// connection is not used again.
    fn settled(&mut self);

    /// A statement failed: the connection is tested before anybody else uses it.
    fn doubt(&mut self) {}

    /// Lets the commit wake whoever waits on [`announced`]; without a transaction, nothing.
    fn announce(&mut self) {}
}

impl Queryable for Tx {
    fn conn(&mut self) -> Conn<'_> {
        match &mut self.open {
            Open::Postgres(borrowed) => Conn::Postgres(borrowed.under_way()),
            Open::Sqlite(tx) => Conn::Sqlite(tx),
        }
    }

    fn is_postgres(&self) -> bool {
        matches!(self.open, Open::Postgres(_))
    }

    fn settled(&mut self) {
        if let Open::Postgres(borrowed) = &mut self.open {
            borrowed.settled();
        }
    }

    fn doubt(&mut self) {
        if let Open::Postgres(borrowed) = &mut self.open {
            borrowed.doubt();
        }
    }

    fn announce(&mut self) {
        self.announces = true;
    }
}

impl Queryable for Autocommit {
    fn conn(&mut self) -> Conn<'_> {
        match &mut self.0 {
            Alone::Postgres(borrowed) => Conn::Postgres(borrowed.under_way()),
            Alone::Sqlite(connection) => Conn::Sqlite(connection),
        }
    }

    fn is_postgres(&self) -> bool {
        matches!(self.0, Alone::Postgres(_))
    }

    fn settled(&mut self) {
        if let Alone::Postgres(borrowed) = &mut self.0 {
            borrowed.settled();
        }
    }

    fn doubt(&mut self) {
        if let Alone::Postgres(borrowed) = &mut self.0 {
            borrowed.doubt();
        }
    }
}

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
            ("idle_in_transaction_session_timeout", "60s"),
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

    /// How long the opening of a transaction that may write is waited for.
    pub fn patience(&self) -> Duration {
        match self {
            Self::Postgres(_) => PATIENCE,
            Self::Sqlite { .. } => TURN,
        }
    }

    /// Opens a transaction that may write.
    pub async fn begin(&self) -> sqlx::Result<Tx> {
        let open = match self {
            Self::Postgres(connections) => begin_postgres(connections, None).await,
            Self::Sqlite { writer, .. } => {
                writer.begin_with("BEGIN IMMEDIATE").await.map(Open::Sqlite)
            }
        };
        Ok(Tx {
            open: open?,
            announces: false,
        })
    }

    /// A connection for reading; it sees everything committed before.
    pub async fn read(&self) -> sqlx::Result<Autocommit> {
        let reading = match self {
            Self::Postgres(connections) => Borrowed::new(connections).await.map(Alone::Postgres),
            Self::Sqlite { readers, .. } => readers.acquire().await.map(Alone::Sqlite),
        };
        reading.map(Autocommit)
    }

    /// A connection for single statements that write, each committed when it has answered.
    pub async fn autocommit(&self) -> sqlx::Result<Autocommit> {
        let alone = match self {
            Self::Postgres(connections) => Borrowed::new(connections).await.map(Alone::Postgres),
            Self::Sqlite { writer, .. } => writer.acquire().await.map(Alone::Sqlite),
        };
        alone.map(Autocommit)
    }

    /// A transaction for reading: all its statements see the store at one moment.
    ///
    /// For answers put together from several statements; one statement is whole by itself.
    pub async fn snapshot(&self) -> sqlx::Result<Tx> {
        let open = match self {
            Self::Postgres(connections) => {
                let statement = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
                begin_postgres(connections, Some(statement)).await
            }
            Self::Sqlite { readers, .. } => {
                readers.begin_with("BEGIN DEFERRED").await.map(Open::Sqlite)
            }
        };
        Ok(Tx {
            open: open?,
            announces: false,
        })
    }

    /// Whether the store answers.
    pub async fn ping(&self) -> sqlx::Result<()> {
        self.read().await?.ping().await
    }
}

/// Begins on a connection that works: one that broke while it lay in the pool shows it here, where
/// nothing has been done yet, and the next one is taken.
async fn begin_postgres(
    connections: &Connections,
    statement: Option<&'static str>,
) -> sqlx::Result<Open> {
    for _ in 0..connections.pool().options().get_max_connections() {
        let mut borrowed = Borrowed::new(connections).await?;
        match borrowed.begin(statement).await {
            Ok(()) => return Ok(Open::Postgres(borrowed)),
            Err(error) if is_broken(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Err(sqlx::Error::PoolTimedOut)
}

impl Autocommit {
    async fn ping(&mut self) -> sqlx::Result<()> {
        execute!(self, "SELECT 1").map(drop)
    }
}

impl Tx {
    /// Makes everything in the transaction true at once.
    pub async fn commit(self) -> sqlx::Result<()> {
        match self.open {
            Open::Postgres(mut borrowed) => borrowed.commit().await?,
            Open::Sqlite(tx) => tx.commit().await?,
        }
        if self.announces {
            announced().notify_waiters();
        }
        Ok(())
    }

    /// Makes everything in the transaction undone.
    pub async fn rollback(self) -> sqlx::Result<()> {
        match self.open {
            Open::Postgres(mut borrowed) => borrowed.rollback().await,
            Open::Sqlite(tx) => tx.rollback().await,
        }
    }
}

/// Waits for work on the store, at most so long; later it counts as out of reach.
///
/// A connection over a dead wire says nothing: without a bound its user would wait for ever.
pub async fn within<T>(patience: Duration, work: impl Future<Output = T>) -> sqlx::Result<T> {
    tokio::time::timeout(patience, work)
        .await
        .map_err(|_| sqlx::Error::PoolTimedOut)
}

/// Waits for the answer to a statement; none, when the connection is silent for too long.
///
/// Every statement on PostgreSQL runs in here: whoever has no patience of his own, as a job, would
/// otherwise wait for ever on a wire that died without a word.
pub async fn answered<T>(statement: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(SILENCE, statement).await.ok()
}

/// What became of a statement that was [`answered`] or not; its connection is not used again if not.
pub fn settle<T>(on: &mut impl Queryable, answer: Option<sqlx::Result<T>>) -> sqlx::Result<T> {
    let answer = answer.ok_or_else(silence)?;
    on.settled();
    if answer.is_err() {
        on.doubt();
    }
    answer
}

/// The error of a statement that was not answered.
pub fn silence() -> sqlx::Error {
    let text = "PostgreSQL did not answer; the connection is closed";
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, text))
}

/// The error of a statement that only PostgreSQL has, on SQLite; whoever asks it looked which one it is before.
pub fn only_postgres() -> sqlx::Error {
    sqlx::Error::Protocol("a statement for PostgreSQL".to_owned())
}

/// Wakes after each commit of this process that announced something.
pub fn announced() -> &'static Arc<Notify> {
    static ANNOUNCED: OnceLock<Arc<Notify>> = OnceLock::new();
    ANNOUNCED.get_or_init(Arc::default)
}

/// Whether an error means that the connection is gone.
pub fn is_broken(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        // The server ended it, or is about to.
        sqlx::Error::Database(error) => error
            .code()
            .is_some_and(|code| code.starts_with("57P") || code.starts_with("08")),
        _ => false,
    }
}

/// Whether an error means that the store is out of reach, rather than that a statement is wrong.
pub fn is_unavailable(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(error) => error.code().is_some_and(|code| match code.len() {
            // PostgreSQL: connection, resources, intervention and time-outs, read-only, conflicts.
            5 => {
                ["08", "53", "57"]
                    .iter()
                    .any(|class| code.starts_with(class))
                    || matches!(&*code, "25P03" | "25006" | "40001" | "40P01")
            }
            // SQLite, by the low byte: busy, locked, I/O, full, cannot open.
            _ => code
                .parse::<u32>()
                .is_ok_and(|code| matches!(code & 0xff, 5 | 6 | 10 | 13 | 14)),
        }),
        _ => false,
    }
}

/// Whether a statement gave way to another transaction: a deadlock, or no serial order.
pub fn is_conflict(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .and_then(sqlx::error::DatabaseError::code)
        .is_some_and(|code| matches!(&*code, "40001" | "40P01"))
}

/// Whether an error is a violated unique constraint or primary key.
pub fn is_unique_violation(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(sqlx::error::DatabaseError::is_unique_violation)
}

/// Runs a statement on either database; the number of rows it changed.
macro_rules! execute {
    ($on:expr, $sql:expr $(, $bind:expr)* $(,)?) => {{
        let on = &mut *$on;
        let done = match $crate::db::Queryable::conn(on) {
            $crate::db::Conn::Postgres(conn) => {
                let statement = sqlx::query($sql)$(.bind($bind))*.execute(conn);
                $crate::db::answered(statement)
                    .await
                    .map(|done| done.map(|done| done.rows_affected()))
            }
            $crate::db::Conn::Sqlite(conn) => {
                let done = sqlx::query($sql)$(.bind($bind))*.execute(conn).await;
                Some(done.map(|done| done.rows_affected()))
            }
        };
        $crate::db::settle(on, done)
    }};
}

macro_rules! fetch_with {
    ($method:ident, $on:expr, $row:ty, $sql:expr $(, $bind:expr)* $(,)?) => {{
        let on = &mut *$on;
        let found = match $crate::db::Queryable::conn(on) {
            $crate::db::Conn::Postgres(conn) => {
                let statement = sqlx::query_as::<_, $row>($sql)$(.bind($bind))*.$method(conn);
                $crate::db::answered(statement).await
            }
            $crate::db::Conn::Sqlite(conn) => {
                Some(sqlx::query_as::<_, $row>($sql)$(.bind($bind))*.$method(conn).await)
            }
        };
        $crate::db::settle(on, found)
    }};
}

/// The one row of a statement, as a type that derives `sqlx::FromRow`.
macro_rules! fetch_one {
    ($($args:tt)*) => { $crate::db::fetch_with!(fetch_one, $($args)*) };
}

/// The row of a statement, if there is one.
macro_rules! fetch_optional {
    ($($args:tt)*) => { $crate::db::fetch_with!(fetch_optional, $($args)*) };
}

/// All rows of a statement.
macro_rules! fetch_all {
    ($($args:tt)*) => { $crate::db::fetch_with!(fetch_all, $($args)*) };
}

pub(crate) use {execute, fetch_all, fetch_one, fetch_optional, fetch_with};
