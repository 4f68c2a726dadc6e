//! Retention: what has had its time goes, whole days at once or in batches, over indexes alone.
//!
//! Attempts, with the payloads they keep, go after 14 days; so do dead letters, counted from when they
//! were resolved. Open ones stay 90 days. Deliveries go when nothing happened to them for 14 days,
//! unless they still wait or have an open dead letter, and an event goes with the last of its
//! deliveries. Attempts, deliveries and events are found by ids, which begin with the time they were
//! made at, so that no index is kept for this alone.
//!
//! On PostgreSQL attempts and events lie in [`partitions`], a day each, that are dropped whole; batches
//! remove what lies outside them, and all that SQLite has. What may go is a window that moves with the
//! clock. A [`Walk`] remembers where it is and looks at each row once as it comes of age; those that had
//! to stay then are looked at again once a day.

mod partitions;

use std::{collections::HashMap, time::Duration};

use sqlx::AssertSqlSafe;
use ulid::Ulid;
use uuid::Uuid;

use crate::db::{Db, Timestamp, execute, fetch_all};
use partitions::Partitioned;

/// How long attempts and what is finished stay.
pub(super) const FINISHED: Duration = Duration::from_hours(14 * 24);

/// How long open dead letters stay.
const OPEN: Duration = Duration::from_hours(90 * 24);

/// How far a delivery's id may lie from its event's: longer than any handler may take.
const APART: Duration = Duration::from_mins(2);

/// How often what had to stay is looked at again.
const AGAIN: Duration = Duration::from_hours(24);

/// Batches of one walk in one sweep at most: a backlog is worked off over several.
const BATCHES: usize = 50;

/// Where the walk over one table is.
#[derive(Debug)]
struct Walk {
    /// How old a row must be.
    age: Duration,
    reached: Uuid,
    began: Timestamp,
}

/// Where this process is in removing things.
#[derive(Debug)]
pub struct Retention {
    deliveries: Walk,
    /// By table.
    events: HashMap<String, Walk>,
    /// The tables that batches remove attempts from.
    attempts_in: Vec<String>,
    events_in: Vec<String>,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            deliveries: Walk::new(FINISHED),
            events: HashMap::new(),
            attempts_in: Vec::new(),
            events_in: Vec::new(),
        }
    }
}

impl Walk {
    fn new(age: Duration) -> Self {
        Self {
            age,
            reached: Uuid::nil(),
            began: Timestamp::now(),
        }
    }

    /// Starts over when it is time.
    fn again(&mut self) {
        if Timestamp::now().since(self.began) > AGAIN {
            *self = Self::new(self.age);
        }
    }
}

impl Retention {
    /// Makes the partitions of the coming days and drops those that have had their time.
    pub async fn keep_days(&mut self, db: &Db) {
        self.attempts_in = partitions::keep(db, Partitioned::Attempts).await;
        self.events_in = partitions::keep(db, Partitioned::Events).await;
        self.events
            .retain(|table, _| self.events_in.contains(table));
    }

    /// The tables that batches remove attempts from.
    pub fn attempts_in(&self) -> &[String] {
        &self.attempts_in
    }

    /// Removes deliveries and events that have had their time; how many there were.
    pub async fn sweep(&mut self, db: &Db, batch: i64) -> sqlx::Result<u64> {
        let mut removed = 0;
        self.deliveries.again();
        for _ in 0..BATCHES {
            let Some((reached, some)) = deliveries(db, &self.deliveries, batch).await? else {
                break;
            };
            self.deliveries.reached = reached;
            removed += some;
        }
        for table in &self.events_in {
            let walk = (self.events.entry(table.clone())).or_insert(Walk::new(FINISHED + APART));
            walk.again();
            for _ in 0..BATCHES {
                let Some((reached, some)) = events(db, table, walk, batch).await? else {
                    break;
                };
                walk.reached = reached;
                removed += some;
            }
        }
        Ok(removed)
    }
}

/// Removes a batch of attempts from a table; how many there were.
pub async fn attempts(db: &Db, table: &str, batch: i64) -> sqlx::Result<u64> {
    let old = Timestamp::now() - FINISHED;
    let mut tx = db.begin().await?;
    // An attempt is younger than its delivery, whose id finds it.
    let removed = execute!(
        &mut tx,
        AssertSqlSafe(format!(
            "DELETE FROM {table} WHERE (delivery_id, number) IN \
             (SELECT delivery_id, number FROM {table} WHERE delivery_id < $1 AND created_at < $2 \
              ORDER BY delivery_id LIMIT $3)"
        )),
        first_id(old),
        old,
        batch
    )?;
    tx.commit().await?;
    Ok(removed)
}

/// Removes a batch of dead letters, resolved and open ones; how many there were.
pub async fn dead_letters(db: &Db, batch: i64) -> sqlx::Result<u64> {
    let now = Timestamp::now();
    let mut tx = db.begin().await?;
    let resolved = execute!(
        &mut tx,
        "DELETE FROM webhook_dead_letters WHERE id IN (SELECT id FROM webhook_dead_letters \
         WHERE resolved_at < $1 ORDER BY resolved_at LIMIT $2)",
        now - FINISHED,
        batch
    )?;
    let open = execute!(
        &mut tx,
        "DELETE FROM webhook_dead_letters WHERE id IN (SELECT id FROM webhook_dead_letters \
         WHERE created_at < $1 AND status = 'open' ORDER BY created_at LIMIT $2)",
        now - OPEN,
        batch
    )?;
    tx.commit().await?;
    Ok(resolved.max(open))
}

/// Looks at the next deliveries that are old enough: where that ends, and how many were removed.
async fn deliveries(db: &Db, walk: &Walk, batch: i64) -> sqlx::Result<Option<(Uuid, u64)>> {
    let old = Timestamp::now() - walk.age;
    let mut tx = db.begin().await?;
    let ids = fetch_all!(
        &mut tx,
        (Uuid,),
        "SELECT id FROM webhook_deliveries WHERE id > $1 AND id < $2 ORDER BY id LIMIT $3",
        walk.reached,
        first_id(old),
        batch
    )?;
    let Some((last,)) = ids.last() else {
        tx.rollback().await?;
        return Ok(None);
    };
    let removed = execute!(
        &mut tx,
        "DELETE FROM webhook_deliveries WHERE id > $1 AND id <= $2 AND updated_at < $3 \
         AND state IN ('delivered', 'dropped', 'cancelled', 'dead') AND NOT EXISTS \
         (SELECT 1 FROM webhook_dead_letters l \
         WHERE l.delivery_id = webhook_deliveries.id AND l.status = 'open')",
        walk.reached,
        last,
        old
    )?;
    tx.commit().await?;
    Ok(Some((*last, removed)))
}

/// Looks at the next events of a table that are old enough: where that ends, and how many were removed.
async fn events(
    db: &Db,
    table: &str,
    walk: &Walk,
    batch: i64,
) -> sqlx::Result<Option<(Uuid, u64)>> {
    let mut tx = db.begin().await?;
    let ids = fetch_all!(
        &mut tx,
        (Uuid,),
        AssertSqlSafe(format!(
            "SELECT id FROM {table} WHERE id > $1 AND id < $2 ORDER BY id LIMIT $3"
        )),
        walk.reached,
        first_id(Timestamp::now() - walk.age),
        batch
    )?;
    let (Some((first,)), Some((last,))) = (ids.first(), ids.last()) else {
        tx.rollback().await?;
        return Ok(None);
    };
    // An event and its deliveries are made in one request, so their ids lie close together.
    let removed = execute!(
        &mut tx,
        AssertSqlSafe(format!(
            "DELETE FROM {table} WHERE id > $1 AND id <= $2 AND id NOT IN \
             (SELECT event_id FROM webhook_deliveries WHERE id > $3 AND id < $4)"
        )),
        walk.reached,
        last,
        first_id(moment(*first) - APART),
        first_id(moment(*last) + APART)
    )?;
    tx.commit().await?;
    Ok(Some((*last, removed)))
}

/// The least id of a moment.
fn first_id(at: Timestamp) -> Uuid {
    let millis = u64::try_from(at.micros() / 1_000).unwrap_or(0);
    Uuid::from_bytes(Ulid::from_parts(millis, 0).to_bytes())
}

/// The moment of an id.
fn moment(id: Uuid) -> Timestamp {
    let millis = Ulid::from_bytes(id.into_bytes()).timestamp_ms();
    Timestamp::from_micros(i64::try_from(millis).unwrap_or(0).saturating_mul(1_000))
}
