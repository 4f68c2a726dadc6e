//! A connection to PostgreSQL, borrowed from the pool.
//!
//! A wire may die without a word, and then whoever waits for an answer waits for ever; sqlx itself waits
//! so when a connection comes back to its pool, and the place in the pool is lost. So every wait here
//! has an end. A connection on which a statement was begun and not seen to its end is closed instead of
//! given back. Where a statement went unanswered for long, the wire has probably died under the
//! connections that lie ready too: they are closed with it, or each would cost a request of its own
//! to find that out.
//!
//! A connection that comes back to sqlx's pool is asked first whether it is alive, which is a round trip for
//! each statement. One whose statements were just answered, and well, needs no asking: it lies on a shelf
//! for the next borrower, unless somebody waits at the pool, and goes through the pool, with its test and
//! its limits of age, every [`RENEWED`].

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{Database, PgConnection, PgPool, Postgres, SqlStr, pool::PoolConnection};
use sqlx_core::transaction::TransactionManager as _;

use super::{PATIENCE, answered, silence};

type Manager = <Postgres as Database>::TransactionManager;

/// How long an abandoned statement was without an answer when that speaks against the wire, rather than
/// for a caller that went away.
const SUSPICIOUS: Duration = Duration::from_secs(2);

/// How long a connection stays away from the pool at most, whoever borrows it meanwhile.
const RENEWED: Duration = Duration::from_secs(10);

/// The connections of a process to PostgreSQL.
#[derive(Clone, Debug)]
pub struct Connections(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pool: PgPool,
    shelf: Mutex<Shelf>,
}

/// What lies ready, the most recently used last.
#[derive(Debug, Default)]
struct Shelf {
    ready: Vec<Lent>,
    /// How many borrowers found nothing here and wait at the pool.
    waiting: usize,
}

/// A connection of the pool.
#[derive(Debug)]
struct Lent {
    connection: PoolConnection<Postgres>,
    /// Since when it is away from the pool.
    since: Instant,
}

/// A borrowed connection; an open transaction on it rolls back when it is dropped.
#[derive(Debug)]
pub struct Borrowed {
    of: Connections,
    /// `None` when it is dropped.
    lent: Option<Lent>,
    under_way_since: Option<Instant>,
    is_doubtful: bool,
}

impl Connections {
    /// Those of this pool.
    pub fn new(pool: PgPool) -> Self {
        Self(Arc::new(Inner {
            pool,
            shelf: Mutex::default(),
        }))
    }

    /// The pool, for whoever needs no more than that.
    pub fn pool(&self) -> &PgPool {
        &self.0.pool
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.0.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn lend(&self) -> sqlx::Result<Lent> {
        let _waiting = {
            let mut shelf = self.shelf();
            while let Some(lent) = shelf.ready.pop() {
                if lent.since.elapsed() < RENEWED {
                    return Ok(lent);
                }
                lent.give_back();
            }
            shelf.waiting += 1;
            Waiting(self)
        };
        Ok(Lent {
            // Large, and rarely needed: whatever future borrows a connection would carry it along.
            connection: Box::pin(self.0.pool.acquire()).await?,
            since: Instant::now(),
        })
    }

    /// Takes back a connection that is well and has no transaction open.
    fn take_back(&self, lent: Lent) {
        let mut shelf = self.shelf();
        if shelf.waiting > 0 || lent.since.elapsed() >= RENEWED {
            drop(shelf);
            lent.give_back();
        } else {
            // Those at the bottom, which nobody has needed for long, would never come back otherwise.
            let old = |lent: &mut Lent| lent.since.elapsed() >= RENEWED;
            let old: Vec<_> = shelf.ready.extract_if(.., old).collect();
            shelf.ready.push(lent);
            drop(shelf);
            old.into_iter().for_each(Lent::give_back);
        }
    }

    /// Closes whatever lies ready.
    fn close_ready(&self) {
        let ready = std::mem::take(&mut self.shelf().ready);
        for mut lent in ready {
            lent.connection.close_on_drop();
        }
        while let Some(mut idle) = self.0.pool.try_acquire() {
            idle.close_on_drop();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let shelf = self.shelf.get_mut().unwrap_or_else(PoisonError::into_inner);
        for lent in shelf.ready.drain(..) {
            // Nothing may be left to run what a connection that is given back would spawn.
            drop(lent.connection.detach());
        }
    }
}

impl Lent {
    /// Gives the connection back to the pool, which tests it.
    fn give_back(mut self) {
        let returning = self.connection.return_to_pool();
        tokio::spawn(tokio::time::timeout(PATIENCE, returning));
    }
}

/// A borrower that waits at the pool, until dropped.
struct Waiting<'c>(&'c Connections);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.shelf().waiting -= 1;
    }
}

impl Borrowed {
    /// Borrows a connection.
    pub async fn new(of: &Connections) -> sqlx::Result<Self> {
        Ok(Self {
            lent: Some(of.lend().await?),
            of: of.clone(),
            under_way_since: None,
            is_doubtful: false,
        })
    }

    /// Begins a transaction; absent, the statement is `BEGIN`.
    pub async fn begin(&mut self, statement: Option<&'static str>) -> sqlx::Result<()> {
        let statement = statement.map(SqlStr::from_static);
        let begun = answered(Manager::begin(self.under_way(), statement)).await;
        begun.ok_or_else(silence)??;
        self.settled();
        Ok(())
    }

    /// Commits the transaction.
    pub async fn commit(&mut self) -> sqlx::Result<()> {
        let committed = answered(Manager::commit(self.under_way())).await;
        committed.ok_or_else(silence)??;
        self.settled();
        Ok(())
    }

    /// Rolls the transaction back.
    pub async fn rollback(&mut self) -> sqlx::Result<()> {
        let rolled_back = answered(Manager::rollback(self.under_way())).await;
        rolled_back.ok_or_else(silence)??;
        self.settled();
        Ok(())
    }

    /// The connection, for a statement that begins now.
    pub fn under_way(&mut self) -> &mut PgConnection {
        self.under_way_since = Some(Instant::now());
        match &mut self.lent {
            Some(lent) => &mut lent.connection,
            None => unreachable!("only dropping takes it out"),
        }
    }

    /// The statement has ended, well or not.
    pub fn settled(&mut self) {
        self.under_way_since = None;
    }

    /// A statement failed, and perhaps because of the connection.
    pub fn doubt(&mut self) {
        self.is_doubtful = true;
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let Some(mut lent) = self.lent.take() else {
            return;
        };
        match self.under_way_since {
            None if self.is_doubtful || Manager::get_transaction_depth(&lent.connection) > 0 => {
                Manager::start_rollback(&mut lent.connection);
                lent.give_back();
            }
            None => self.of.take_back(lent),
            Some(since) => {
                lent.connection.close_on_drop();
                drop(lent);
                if since.elapsed() >= SUSPICIOUS {
                    self.of.close_ready();
                }
            }
        }
    }
}
