//! The days of attempts and events on PostgreSQL: a partition a day, by the ULIDs in their ids.
//!
//! A day that is over goes by DROP, which costs the same whatever it held and leaves no dead rows to
//! vacuum. The few of its rows that must stay move to the DEFAULT partition in the same transaction. With
//! more than [`MOST_MOVED`] of them the day waits, since the parent is locked meanwhile; after
//! [`GRACE`] batches begin to empty it.
//!
//! A plan that is kept for later may have been made while the present day was empty, and would read it
//! whole until PostgreSQL itself gets round to analysing it. So a day that grows is analysed by the sweep,
//! which also ends such plans.
//!
//! The days ahead are made a week early, so nothing depends on one sweep. Whatever locks a table gives up
//! after [`LOCK_TIMEOUT`], because everybody else queues behind it, and the next sweep tries again. A
//! role that may not change tables is still right, only dearer: its rows lie in DEFAULT and go in
//! batches.

use std::time::Duration;

use sqlx::AssertSqlSafe;
use time::{
    Date, OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description,
};
use uuid::Uuid;

use super::{APART, FINISHED, first_id};
use crate::db::{self, Conn, Db, Queryable, Timestamp, Tx, fetch_all, fetch_one, fetch_optional};

/// Days that are made before they come.
const AHEAD: i64 = 7;

/// Rows that one transaction moves from a partition to another at most.
const MOST_MOVED: i64 = 10_000;

/// How long a day may wait until few rows of it must stay.
const GRACE: Duration = Duration::from_hours(48);

/// A partition that has grown so many times since it was analysed is analysed again.
const GROWN: i64 = 10;

/// Pages of a partition that are too few to matter.
const SMALL: i64 = 10;

/// How long the lock of a table is waited for.
const LOCK_TIMEOUT: &str = "200ms";

/// A day in the name of a partition.
const DAY: &[BorrowedFormatItem<'_>] = format_description!("[year][month][day]");

/// A table that is kept by the day.
#[derive(Clone, Copy, Debug)]
pub(super) enum Partitioned {
    Attempts,
    Events,
}

/// A partition and its days; that of what was there before the days were has no first, and DEFAULT
/// neither first nor end.
#[derive(Debug)]
struct Partition {
    name: String,
    first: Option<Date>,
    end: Option<Date>,
}

impl Partitioned {
    const fn table(self) -> &'static str {
        match self {
            Self::Attempts => "webhook_attempts",
            Self::Events => "events",
        }
    }

    const fn key(self) -> &'static str {
        match self {
            Self::Attempts => "delivery_id",
            Self::Events => "id",
        }
    }

    /// How long a partition stays after its last day.
    fn stays(self) -> Duration {
        match self {
            Self::Attempts => FINISHED,
            // By then the deliveries are gone whose ladder took its full time.
            Self::Events => FINISHED + GRACE,
        }
    }

    /// The storage parameters of a partition; a partitioned table has none to inherit.
    const fn storage(self) -> &'static str {
        match self {
            // An attempt of some kilobytes stays whole in its page, instead of being compressed out of line.
            Self::Attempts => "WITH (toast_tuple_target = 8160)",
            Self::Events => "",
        }
    }

    /// Selects the rows of a partition that must stay. What they are looked up by is given one by one
    /// (`OFFSET 0` sees to that), so that no estimate can make it a walk over the whole partition.
    fn kept(self, partition: &Partition, now: Timestamp) -> String {
        let name = &partition.name;
        match self {
            // Attempts that are young though their delivery is not.
            Self::Attempts => format!(
                "WITH RECURSIVE owner (id) AS ((SELECT project_id FROM {name} ORDER BY project_id LIMIT 1) \
                 UNION ALL SELECT (SELECT project_id FROM {name} WHERE project_id > owner.id \
                 ORDER BY project_id LIMIT 1) FROM owner WHERE owner.id IS NOT NULL) \
                 SELECT young.* FROM owner CROSS JOIN LATERAL (SELECT * FROM {name} \
                 WHERE project_id = owner.id AND created_at >= '{}' ORDER BY created_at, id OFFSET 0) young",
                now - FINISHED
            ),
            Self::Events => format!(
                "SELECT needed.* FROM (SELECT DISTINCT event_id {}) delivery CROSS JOIN LATERAL \
                 (SELECT * FROM {name} WHERE id = delivery.event_id OFFSET 0) needed",
                partition.deliveries()
            ),
        }
    }

    /// Selects what is no less than the rows that must stay, and cheap to count.
    fn counted(self, partition: &Partition, now: Timestamp) -> String {
        match self {
            Self::Attempts => self.kept(partition, now),
            Self::Events => format!("SELECT 1 {}", partition.deliveries()),
        }
    }
}

impl Partition {
    fn of(table: &str, name: String) -> Self {
        let day = |text: &str| Date::parse(text, DAY).ok();
        let rest = name.strip_prefix(table).unwrap_or_default();
        let (first, end) = if let Some(text) = rest.strip_prefix("_until_") {
            (None, day(text))
        } else {
            let first = rest.strip_prefix('_').and_then(day);
            (first, first.map(next))
        };
        Self { name, first, end }
    }

    fn covers(&self, day: Date) -> bool {
        self.end.is_some_and(|end| day < end) && self.first.is_none_or(|first| first <= day)
    }

    /// From the deliveries that its events may have.
    fn deliveries(&self) -> String {
        let from = (self.first).map_or(Uuid::nil(), |day| first_id(start(day) - APART));
        let until = (self.end).map_or(Uuid::max(), |day| first_id(start(day) + APART));
        format!("FROM webhook_deliveries WHERE id >= '{from}' AND id < '{until}'")
    }
}

/// Makes the days ahead and drops those that have had their time; the tables that are left for batches.
pub(super) async fn keep(db: &Db, of: Partitioned) -> Vec<String> {
    if matches!(db, Db::Sqlite { .. }) {
        return vec![of.table().to_owned()];
    }
    match keep_days(db, of).await {
        Ok(left) => left,
        Err(error) => {
            tracing::warn!(%error, table = of.table(), "the partitions could not be listed");
            Vec::new()
        }
    }
}

async fn keep_days(db: &Db, of: Partitioned) -> sqlx::Result<Vec<String>> {
    let partitions = partitions(&mut db.read().await?, of).await?;
    let today = OffsetDateTime::now_utc().date();
    for day in (0..=AHEAD).map(|n| today.saturating_add(time::Duration::days(n))) {
        if partitions.iter().any(|partition| partition.covers(day)) {
            continue;
        }
        if let Err(error) = make(db, of, day).await {
            tell(
                &error,
                of,
                "the partition of a coming day could not be made",
            );
            break;
        }
    }
    if let Err(error) = analyse(db, of, today).await {
        tell(&error, of, "the present day could not be analysed");
    }
    let mut left = Vec::new();
    for partition in partitions {
        let now = Timestamp::now();
        let over = partition.end.map(|day| start(day) + of.stays());
        let retired = over.is_some_and(|over| over <= now)
            && retire(db, of, &partition).await.unwrap_or_else(|error| {
                tell(
                    &error,
                    of,
                    "the partition of a past day could not be dropped",
                );
                false
            });
        let waited = over.is_some_and(|over| over + GRACE <= now);
        // What is no single day has rows that come of age while others of it do not.
        if !retired && (waited || partition.first.is_none()) {
            left.push(partition.name);
        }
    }
    Ok(left)
}

/// A lock that could not be had is nothing to tell an operator of: the next sweep tries again.
fn tell(error: &sqlx::Error, of: Partitioned, what: &str) {
    let code = (error.as_database_error()).and_then(sqlx::error::DatabaseError::code);
    if code.as_deref() == Some("55P03") {
        tracing::debug!(%error, table = of.table(), "{what} yet");
    } else {
        tracing::warn!(%error, table = of.table(), "{what}");
    }
}

async fn partitions(on: &mut impl Queryable, of: Partitioned) -> sqlx::Result<Vec<Partition>> {
    let names = fetch_all!(
        on,
        (String,),
        "SELECT CAST(c.relname AS TEXT) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
         WHERE i.inhparent = to_regclass($1) ORDER BY c.relname",
        of.table()
    )?;
    let each = names.into_iter();
    Ok(each
        .map(|(name,)| Partition::of(of.table(), name))
        .collect())
}

/// Analyses the partition of a day that has grown.
async fn analyse(db: &Db, of: Partitioned, day: Date) -> sqlx::Result<()> {
    let name = format!("{}_{}", of.table(), written(day));
    let Some(mut tx) = alone(db).await? else {
        return Ok(());
    };
    let pages = fetch_optional!(
        &mut tx,
        (i64, i64),
        "SELECT CAST(relpages AS BIGINT), pg_relation_size(oid) / 8192 FROM pg_class \
         WHERE oid = to_regclass($1)",
        &name
    )?;
    match pages {
        Some((known, pages)) if pages > GROWN * known.max(SMALL) => {
            run(&mut tx, format!("ANALYZE {name}")).await?;
            tx.commit().await
        }
        _ => tx.rollback().await,
    }
}

/// Makes the partition of a day, with what DEFAULT holds of that day.
async fn make(db: &Db, of: Partitioned, day: Date) -> sqlx::Result<()> {
    let (table, key) = (of.table(), of.key());
    let name = format!("{table}_{}", written(day));
    let Some(mut tx) = alone(db).await? else {
        return Ok(());
    };
    let (from, until) = (first_id(start(day)), first_id(start(next(day))));
    let stray = format!("FROM {table}_default WHERE {key} >= '{from}' AND {key} < '{until}'");
    let made = partitions(&mut tx, of).await?;
    // A day of which there is more stays in DEFAULT and goes in batches.
    if made.iter().any(|partition| partition.covers(day))
        || more_than_moved(&mut tx, &format!("SELECT 1 {stray}")).await?
    {
        return tx.rollback().await;
    }
    // CREATE TABLE … PARTITION OF would lock the parent against everybody; attaching does not.
    run(
        &mut tx,
        format!(
            "LOCK TABLE {table}_default IN ACCESS EXCLUSIVE MODE; \
             CREATE TABLE {name} (LIKE {table} INCLUDING DEFAULTS INCLUDING CONSTRAINTS) {}; \
             WITH stray AS (DELETE {stray} RETURNING *) INSERT INTO {name} SELECT * FROM stray; \
             ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{from}') TO ('{until}')",
            of.storage()
        ),
    )
    .await?;
    tx.commit().await
}

/// Drops a partition, but for the rows that must stay; whether it is gone.
async fn retire(db: &Db, of: Partitioned, partition: &Partition) -> sqlx::Result<bool> {
    let (table, name, now) = (of.table(), &partition.name, Timestamp::now());
    let Some(mut tx) = alone(db).await? else {
        return Ok(false);
    };
    let left = partitions(&mut tx, of).await?;
    if !left.iter().any(|left| left.name == *name) {
        tx.rollback().await?;
        return Ok(true);
    }
    if more_than_moved(&mut tx, &of.counted(partition, now)).await? {
        tx.rollback().await?;
        return Ok(false);
    }
    run(
        &mut tx,
        format!("ALTER TABLE {table} DETACH PARTITION {name}"),
    )
    .await?;
    let kept = format!("INSERT INTO {table} {}", of.kept(partition, now));
    let kept = run(&mut tx, kept).await?;
    run(&mut tx, format!("DROP TABLE {name}")).await?;
    tx.commit().await?;
    tracing::info!(partition = name, kept, "a day has had its time");
    Ok(true)
}

/// A transaction that changes partitions, if no other one does.
async fn alone(db: &Db) -> sqlx::Result<Option<Tx>> {
    let mut tx = db.begin().await?;
    // Two numbers: the locks of idempotency keys are of one.
    let (free, _) = fetch_one!(
        &mut tx,
        (bool, String),
        "SELECT pg_try_advisory_xact_lock(5, 14), set_config('lock_timeout', $1, TRUE)",
        LOCK_TIMEOUT
    )?;
    if !free {
        tx.rollback().await?;
        return Ok(None);
    }
    Ok(Some(tx))
}

/// Whether a query gives more rows than a transaction moves.
async fn more_than_moved(tx: &mut Tx, query: &str) -> sqlx::Result<bool> {
    let text = format!("SELECT 1 FROM ({query} OFFSET {MOST_MOVED} LIMIT 1) AS further");
    Ok(run(tx, text).await? > 0)
}

/// Runs statements whose text is not worth keeping prepared; how many rows they gave or changed.
async fn run(tx: &mut Tx, text: String) -> sqlx::Result<u64> {
    let Conn::Postgres(conn) = tx.conn() else {
        return Err(db::only_postgres());
    };
    // Safe: put together from names and ids of this file alone.
    let done = db::answered(sqlx::raw_sql(AssertSqlSafe(text)).execute(conn)).await;
    db::settle(tx, done).map(|done| done.rows_affected())
}

fn start(day: Date) -> Timestamp {
    Timestamp::from_micros(day.midnight().assume_utc().unix_timestamp() * 1_000_000)
}

fn next(day: Date) -> Date {
    day.saturating_add(time::Duration::DAY)
}

fn written(day: Date) -> String {
    day.format(DAY).unwrap_or_default()
}
