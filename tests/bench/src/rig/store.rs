//! The database, seen from beside the server: rows to load, and rows to count.

use sqlx::{
    PgPool, SqlitePool,
    postgres::PgPoolOptions,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions},
};
use ulid::Ulid;
use uuid::Uuid;

use crate::Fault;

/// Rows in one statement of a load.
const BATCH: u64 = 100_000;

/// The same columns in both databases, from the same numbers: contact `i` of `$2` to `$3` was made
/// `$4 + 37,001 i` microseconds after 1970, and its id is a ULID of that millisecond.
const POSTGRES_CONTACTS: &str = "INSERT INTO contacts \
     (id, project_id, phone, name, email, tags, attributes, created_at, updated_at) \
     SELECT (lpad(to_hex(micros / 1000), 12, '0') || substr(md5(i::text), 1, 20))::uuid, $1, \
     '+49' || lpad(i::text, 11, '0'), 'Contact ' || i, 'contact-' || i || '@example.com', \
     '[\"vip\"]', '{\"plan\":\"pro\"}', at, at \
     FROM (SELECT i, $4 + 37001 * i AS micros, \
     'epoch'::timestamptz + ($4 + 37001 * i) * interval '1 microsecond' AS at \
     FROM generate_series($2, $3) AS i) AS made";
const SQLITE_CONTACTS: &str = "WITH RECURSIVE made (i, micros) AS ( \
     SELECT $2, $4 + 37001 * $2 UNION ALL SELECT i + 1, micros + 37001 FROM made WHERE i < $3) \
     INSERT INTO contacts \
     (id, project_id, phone, name, email, tags, attributes, created_at, updated_at) \
     SELECT unhex(printf('%012x', micros / 1000) || hex(randomblob(10))), $1, \
     printf('+49%011d', i), 'Contact ' || i, 'contact-' || i || '@example.com', \
     '[\"vip\"]', '{\"plan\":\"pro\"}', micros, micros FROM made";

/// A connection to either database.
pub enum Store {
    /// PostgreSQL.
    Postgres(PgPool),
    /// The file, beside the server's own connections.
    Sqlite(SqlitePool),
}

/// Runs the same query text with the same binds on either database.
macro_rules! on {
    ($store:expr, $run:ident, $row:ty, $text:expr $(, $bind:expr)*) => {
        match $store {
            Store::Postgres(pool) => sqlx::query_as::<_, $row>($text)$(.bind($bind))*.$run(pool).await,
            Store::Sqlite(pool) => sqlx::query_as::<_, $row>($text)$(.bind($bind))*.$run(pool).await,
        }
    };
}

impl Store {
    /// Connects.
    pub async fn open(url: &str) -> Result<Self, Fault> {
        if let Some(path) = url.strip_prefix("sqlite:") {
            let options = SqliteConnectOptions::new()
                .filename(path)
                .busy_timeout(std::time::Duration::from_secs(30));
            let pool = SqlitePoolOptions::new().max_connections(1);
            Ok(Self::Sqlite(pool.connect_with(options).await?))
        } else {
            let pool = PgPoolOptions::new().max_connections(1);
            Ok(Self::Postgres(pool.connect(url).await?))
        }
    }

    /// Name and version, and for PostgreSQL what its durability is.
    pub async fn describe(&self) -> Result<String, Fault> {
        Ok(match self {
            Self::Postgres(pool) => {
                let (version, fsync, commit, buffers): (String, String, String, String) =
                    sqlx::query_as(
                        "SELECT current_setting('server_version'), current_setting('fsync'), \
                     current_setting('synchronous_commit'), current_setting('shared_buffers')",
                    )
                    .fetch_one(pool)
                    .await?;
                format!(
                    "PostgreSQL {version} (fsync {fsync}, synchronous_commit {commit}, shared_buffers {buffers})"
                )
            }
            Self::Sqlite(pool) => {
                let (version,): (String,) = sqlx::query_as("SELECT sqlite_version()")
                    .fetch_one(pool)
                    .await?;
                format!("SQLite {version}")
            }
        })
    }

    /// Puts contacts 1 to `count` of a project into the table, as if made one every 37 ms until now.
    pub async fn load_contacts(&self, project: Ulid, count: u64) -> Result<(), Fault> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let count = i64::try_from(count)?;
        let first_micros = i64::try_from(now.as_micros())? - 37_001 * count;
        for first in (1..=count).step_by(usize::try_from(BATCH)?) {
            let last = count.min(first + i64::try_from(BATCH)? - 1);
            match self {
                Self::Postgres(pool) => {
                    sqlx::query(POSTGRES_CONTACTS)
                        .bind(uuid(project))
                        .bind(first)
                        .bind(last)
                        .bind(first_micros)
                        .execute(pool)
                        .await?;
                }
                Self::Sqlite(pool) => {
                    sqlx::query(SQLITE_CONTACTS)
                        .bind(uuid(project))
                        .bind(first)
                        .bind(last)
                        .bind(first_micros)
                        .execute(pool)
                        .await?;
                }
            }
        }
        on!(
            self,
            fetch_optional,
            (i64,),
            "INSERT INTO contact_counts (project_id, shard, count) VALUES ($1, 0, $2) \
             ON CONFLICT (project_id, shard) DO UPDATE SET count = contact_counts.count + excluded.count \
             RETURNING count",
            uuid(project),
            count
        )?;
        // As a table is that grew over time: statistics and hint bits are there.
        match self {
            Self::Postgres(pool) => {
                sqlx::query("VACUUM ANALYZE contacts").execute(pool).await?;
            }
            Self::Sqlite(pool) => {
                sqlx::query("ANALYZE").execute(pool).await?;
            }
        }
        Ok(())
    }

    /// Reads a project's contacts by offset, newest first; how many there were.
    pub async fn contacts_by_offset(
        &self,
        project: Ulid,
        limit: u64,
        offset: u64,
    ) -> Result<u64, Fault> {
        let rows = on!(
            self,
            fetch_all,
            (Uuid, String, Option<String>, Option<String>, String, String),
            "SELECT id, phone, name, email, tags, attributes FROM contacts WHERE project_id = $1 \
             ORDER BY created_at DESC, id DESC LIMIT $2 OFFSET $3",
            uuid(project),
            i64::try_from(limit)?,
            i64::try_from(offset)?
        )?;
        Ok(u64::try_from(rows.len())?)
    }

    /// Contacts, and what is kept of finished requests.
    pub async fn contacts_and_records(&self) -> Result<(u64, u64), Fault> {
        let (contacts, records) = on!(
            self,
            fetch_one,
            (i64, i64),
            "SELECT (SELECT COUNT(*) FROM contacts), (SELECT COUNT(*) FROM idempotency_records)"
        )?;
        Ok((u64::try_from(contacts)?, u64::try_from(records)?))
    }

    /// Deliveries of a project by state.
    pub async fn deliveries(&self, project: Ulid) -> Result<Vec<(String, u64)>, Fault> {
        let rows = on!(
            self,
            fetch_all,
            (String, i64),
            "SELECT state, COUNT(*) FROM webhook_deliveries WHERE project_id = $1 \
             GROUP BY state ORDER BY state",
            uuid(project)
        )?;
        rows.into_iter()
            .map(|(state, count)| Ok((state, u64::try_from(count)?)))
            .collect()
    }

    /// Of a project: events; attempts that succeeded; those among them that a plugin had a part in.
    pub async fn events_and_attempts(&self, project: Ulid) -> Result<(u64, u64, u64), Fault> {
        let (events, attempts, plugins) = on!(
            self,
            fetch_one,
            (i64, i64, i64),
            "SELECT (SELECT COUNT(*) FROM events WHERE project_id = $1), COUNT(*), COUNT(plugin) \
             FROM webhook_attempts WHERE project_id = $1 AND status = 'succeeded'",
            uuid(project)
        )?;
        Ok((
            u64::try_from(events)?,
            u64::try_from(attempts)?,
            u64::try_from(plugins)?,
        ))
    }
}

pub(super) fn uuid(id: Ulid) -> Uuid {
    Uuid::from_bytes(id.to_bytes())
}
