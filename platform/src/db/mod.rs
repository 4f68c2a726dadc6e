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
mod faults;
mod gather;
mod id;
mod json_text;
mod migrate;
mod open;
mod secret_box;
mod shares;
mod timestamp;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use sqlx::{PgConnection, Sqlite, SqliteConnection, SqlitePool, Transaction, pool::PoolConnection};
use tokio::sync::Notify;

use borrowed::Borrowed;
pub use borrowed::Connections;
pub use faults::{
    is_broken, is_conflict, is_unavailable, is_unique_violation, only_postgres, silence,
};
pub use gather::Gather;
pub use id::{Id, IdError, Kind};
pub use json_text::JsonText;
pub use open::OpenError;
pub use secret_box::{SealError, Sealer};
pub use shares::{Seat, Shares};
pub use timestamp::Timestamp;

/// How long a statement waits for a connection or a lock before the store counts as out of reach.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How long somebody waits for his turn at SQLite's only writer: a queue in this process is no outage.
const TURN: Duration = Duration::from_secs(20);

/// How long a statement may go without its answer before its connection counts as dead; PostgreSQL
/// itself ends what takes longer than [`LONGEST_STATEMENT`](open::LONGEST_STATEMENT).
const SILENCE: Duration = Duration::from_secs(20);

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
    seat: Option<Seat>,
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

impl Db {
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
            seat: None,
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
            seat: None,
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
    /// Keeps a seat as long as the transaction is open.
    pub fn keep(&mut self, seat: Seat) {
        self.seat = Some(seat);
    }

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

/// Wakes after each commit of this process that announced something.
pub fn announced() -> &'static Arc<Notify> {
    static ANNOUNCED: OnceLock<Arc<Notify>> = OnceLock::new();
    ANNOUNCED.get_or_init(Arc::default)
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
