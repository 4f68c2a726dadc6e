//! A connection to PostgreSQL, borrowed from the pool.
//!
//! The pool takes back what it lent by asking the server whether it is well, without a time-out: over a
//! wire that has gone silent that never ends, and the place in the pool is lost. So a connection on
//! which a statement was begun and not seen to its end is closed instead of given back.

use sqlx::{Database, PgConnection, PgPool, Postgres, SqlStr, pool::PoolConnection};
use sqlx_core::transaction::TransactionManager as _;

type Manager = <Postgres as Database>::TransactionManager;

/// A borrowed connection; an open transaction on it rolls back when it is dropped.
#[derive(Debug)]
pub struct Borrowed {
    connection: PoolConnection<Postgres>,
    is_under_way: bool,
}

impl Borrowed {
    /// Borrows a connection.
    pub async fn new(pool: &PgPool) -> sqlx::Result<Self> {
        Ok(Self {
            connection: pool.acquire().await?,
            is_under_way: false,
        })
    }

    /// Begins a transaction; absent, the statement is `BEGIN`.
    pub async fn begin(&mut self, statement: Option<&'static str>) -> sqlx::Result<()> {
        let statement = statement.map(SqlStr::from_static);
        Manager::begin(self.under_way(), statement).await?;
        self.settled();
        Ok(())
    }

    /// Commits the transaction.
    pub async fn commit(&mut self) -> sqlx::Result<()> {
        Manager::commit(self.under_way()).await?;
        self.settled();
        Ok(())
    }

    /// Rolls the transaction back.
    pub async fn rollback(&mut self) -> sqlx::Result<()> {
        Manager::rollback(self.under_way()).await?;
        self.settled();
        Ok(())
    }

    /// The connection, for a statement that begins now.
    pub fn under_way(&mut self) -> &mut PgConnection {
        self.is_under_way = true;
        &mut self.connection
    }

    /// The statement has ended, well or not.
    pub fn settled(&mut self) {
        self.is_under_way = false;
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if self.is_under_way {
            self.connection.close_on_drop();
        } else {
            Manager::start_rollback(&mut self.connection);
        }
    }
}
