//! A connection to PostgreSQL, borrowed from the pool.
//!
//! A wire may die without a word, and then whoever waits for an answer waits for ever; sqlx itself waits
//! so when a connection comes back to its pool, and the place in the pool is lost. So every wait here
//! has an end. A connection on which a statement was begun and not seen to its end is closed instead of
//! given back. Where a statement went unanswered for long, the wire has probably died under the
//! connections that lie in the pool too: they are closed with it, or each would cost a request of its own
//! to find that out.

use std::time::{Duration, Instant};

use sqlx::{Database, PgConnection, PgPool, Postgres, SqlStr, pool::PoolConnection};
use sqlx_core::transaction::TransactionManager as _;

use super::{PATIENCE, answered, silence};

type Manager = <Postgres as Database>::TransactionManager;

/// How long an abandoned statement was without an answer when that speaks against the wire, rather than
/// for a caller that went away.
const SUSPICIOUS: Duration = Duration::from_secs(2);

/// A borrowed connection; an open transaction on it rolls back when it is dropped.
#[derive(Debug)]
pub struct Borrowed {
    pool: PgPool,
    connection: PoolConnection<Postgres>,
    under_way_since: Option<Instant>,
}

impl Borrowed {
    /// Borrows a connection.
    pub async fn new(pool: &PgPool) -> sqlx::Result<Self> {
        Ok(Self {
            pool: pool.clone(),
            connection: pool.acquire().await?,
            under_way_since: None,
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
        &mut self.connection
    }

    /// The statement has ended, well or not.
    pub fn settled(&mut self) {
        self.under_way_since = None;
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let Some(since) = self.under_way_since else {
            Manager::start_rollback(&mut self.connection);
            let returning = self.connection.return_to_pool();
            tokio::spawn(tokio::time::timeout(PATIENCE, returning));
            return;
        };
        self.connection.close_on_drop();
        if since.elapsed() >= SUSPICIOUS {
            while let Some(mut idle) = self.pool.try_acquire() {
                idle.close_on_drop();
            }
        }
    }
}
