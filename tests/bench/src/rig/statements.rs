//! Which statements PostgreSQL was sent, and how many: `pg_stat_statements` counts them.
//!
//! This program reads and loads the database under a role of its own, so that only what the server sent
//! is counted.

use std::fmt::Write as _;

use super::store::Store;
use crate::{Fault, figures::float};

/// The role that this program has at its private PostgreSQL.
pub const ROLE: &str = "bench";

/// Those of the server since the last reset.
const FROM: &str = "FROM pg_stat_statements WHERE userid = 'postgres'::regrole";

impl Store {
    /// Lets PostgreSQL count.
    pub async fn watch_statements(&self) -> Result<(), Fault> {
        if let Self::Postgres(pool) = self {
            sqlx::query("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
                .execute(pool)
                .await?;
        }
        Ok(())
    }

    /// Starts the count again.
    pub async fn forget_statements(&self) -> Result<(), Fault> {
        if let Self::Postgres(pool) = self {
            sqlx::query("SELECT pg_stat_statements_reset()")
                .execute(pool)
                .await?;
        }
        Ok(())
    }

    /// How many there were, without those that begin and end transactions; none with SQLite.
    pub async fn count_statements(&self) -> Result<u64, Fault> {
        let Self::Postgres(pool) = self else {
            return Ok(0);
        };
        let (calls,): (i64,) = sqlx::query_as(sqlx::AssertSqlSafe(format!(
            "SELECT COALESCE(SUM(calls), 0)::bigint {FROM} \
             AND query !~* '^(BEGIN|START|COMMIT|ROLLBACK)'"
        )))
        .fetch_one(pool)
        .await?;
        Ok(u64::try_from(calls)?)
    }

    /// The twenty that took most time, for `operations` of a run.
    pub async fn statements(&self, operations: u64) -> Result<String, Fault> {
        let Self::Postgres(pool) = self else {
            return Ok(String::new());
        };
        let rows: Vec<(i64, f64, String)> = sqlx::query_as(sqlx::AssertSqlSafe(format!(
            "SELECT calls, total_exec_time, left(regexp_replace(query, '\\s+', ' ', 'g'), 110) \
             {FROM} ORDER BY total_exec_time DESC LIMIT 20"
        )))
        .fetch_all(pool)
        .await?;
        let per = float(operations.max(1));
        let mut text = "calls per operation, ms per call, ms per operation, statement\n".to_owned();
        for (calls, millis, statement) in rows {
            let calls = float(u64::try_from(calls)?);
            writeln!(
                text,
                "{:8.2} {:8.3} {:8.3}  {statement}",
                calls / per,
                millis / calls.max(1.0),
                millis / per
            )?;
        }
        Ok(text)
    }
}
