//! The store of a server, from beside it: what tests change, hold or search past the public door.

use super::Backend;
use super::server::TestServer;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, SqliteConnection};
use std::fs;

impl TestServer {
    /// Runs a statement on the store, past the server.
    pub async fn execute(&self, postgres: &str, sqlite: &str) {
        let mut outside = self.outside().await;
        outside
            .execute(match self.backend {
                Backend::Postgres | Backend::PostgresAndRedis => postgres,
                Backend::Sqlite => sqlite,
            })
            .await;
    }

    /// Holds what every write of a contact needs, until it is released: `PostgreSQL` lets the handler
    /// run up to the table, `SQLite` up to the transaction.
    pub async fn block_contact_writes(&self) -> Outside {
        let mut outside = self.outside().await;
        match self.backend {
            Backend::Postgres | Backend::PostgresAndRedis => {
                outside.execute("BEGIN").await;
                outside
                    .execute("LOCK TABLE contacts IN ACCESS EXCLUSIVE MODE")
                    .await;
            }
            Backend::Sqlite => outside.execute("BEGIN IMMEDIATE").await,
        }
        outside
    }

    /// A connection to the store beside the server's own.
    pub async fn outside(&self) -> Outside {
        if let Some(database) = &self.database {
            let connection = PgConnection::connect(&database.url(None)).await;
            return Outside::Postgres(connection.expect("a connection"));
        }
        let url = format!("sqlite:{}", self.folder().join("botix.db").display());
        let mut connection = SqliteConnection::connect(&url).await.expect("a connection");
        connection
            .execute("PRAGMA busy_timeout = 30000")
            .await
            .expect("a pragma");
        Outside::Sqlite(connection)
    }

    /// All that the store holds, as bytes to search in.
    pub async fn stored_bytes(&self) -> Vec<u8> {
        match self.outside().await {
            Outside::Sqlite(mut connection) => {
                connection
                    .execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    .await
                    .expect("a checkpoint");
                fs::read(self.folder().join("botix.db")).expect("the database")
            }
            Outside::Postgres(mut connection) => postgres_bytes(&mut connection).await,
        }
    }
}

/// See [`TestServer::outside`].
pub enum Outside {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

impl Outside {
    pub async fn execute(&mut self, statement: &str) {
        let text = AssertSqlSafe(statement.to_owned());
        let done = match self {
            Self::Postgres(connection) => connection.execute(text).await.map(drop),
            Self::Sqlite(connection) => connection.execute(text).await.map(drop),
        };
        done.unwrap_or_else(|error| panic!("{statement}: {error}"));
    }

    /// The one number that a query gives.
    pub async fn number(&mut self, query: &str) -> i64 {
        let text = AssertSqlSafe(query.to_owned());
        let number = match self {
            Self::Postgres(connection) => sqlx::query_scalar(text).fetch_one(connection).await,
            Self::Sqlite(connection) => sqlx::query_scalar(text).fetch_one(connection).await,
        };
        number.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// Lets go of what it holds, changing nothing.
    pub async fn release(mut self) {
        self.execute("ROLLBACK").await;
    }
}

/// Every table as JSON and, for what is binary, as the text behind its hexadecimal form.
async fn postgres_bytes(connection: &mut PgConnection) -> Vec<u8> {
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables \
         WHERE schemaname NOT IN ('pg_catalog', 'information_schema')",
    )
    .fetch_all(&mut *connection)
    .await
    .expect("the tables");
    let mut bytes = Vec::new();
    for table in tables {
        let rows =
            format!("SELECT coalesce(string_agg(row_to_json(t)::text, E'\\n'), '') FROM {table} t");
        let rows: String = sqlx::query_scalar(AssertSqlSafe(rows))
            .fetch_one(&mut *connection)
            .await
            .expect("the rows");
        for (at, _) in rows.match_indices("\\x") {
            let digits: Vec<u32> = rows[at + 2..]
                .chars()
                .map_while(|c| c.to_digit(16))
                .collect();
            let pairs = digits.chunks_exact(2).map(|pair| pair[0] * 16 + pair[1]);
            bytes.extend(pairs.map(|byte| u8::try_from(byte).expect("a byte")));
        }
        bytes.extend(rows.into_bytes());
    }
    bytes
}
