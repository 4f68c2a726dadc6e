//! Settling many at once: attempts that were simply received.
//!
//! Nearly every attempt is the ladder's own and is received, and what becomes of its delivery then
//! depends on nothing else. Those that end while others are being settled go together: one statement
//! writes their rows, turns their deliveries and removes their jobs. Whatever is out of the ordinary (another outcome, a
//! repeat, SQLite, a batch that failed, as one does in which an attempt is on record already) is settled alone.

use std::sync::Arc;

use super::{Settlement, storable};
use crate::{
    db::{self, Conn, Db, Gather, Queryable as _, Timestamp},
    webhooks::{
        attempts::{AttemptId, Trigger},
        ladder::Outcome,
    },
};

/// Settlements in one statement.
const LARGEST: usize = 100;

/// Settles what was received, together.
#[derive(Clone, Debug)]
pub struct Together(Gather<Arc<Settlement>, ()>);

impl Together {
    /// In this database.
    pub fn new(db: Db) -> Self {
        Self(Gather::new(LARGEST, move |settlements| {
            Box::pin(commit(db.clone(), settlements))
        }))
    }

    /// Commits an outcome with others; it must be one that [`takes`] says yes to.
    pub(in crate::webhooks) async fn commit(
        &self,
        settlement: Arc<Settlement>,
    ) -> sqlx::Result<()> {
        self.0.get(settlement).await
    }
}

/// Whether an outcome can be settled together with others.
pub(in crate::webhooks) fn takes(db: &Db, settlement: &Settlement) -> bool {
    matches!(db, Db::Postgres(_))
        && settlement.outcome == Outcome::Delivered
        && settlement.trigger == Trigger::Ladder
        // The success that ends an episode of failures is told of.
        && !settlement.was_failing
}

async fn commit(db: Db, mut settlements: Vec<Arc<Settlement>>) -> sqlx::Result<Vec<()>> {
    // Locked in this order, as by all who lock many.
    settlements.sort_unstable_by_key(|settlement| settlement.delivery);
    let mut on = db.autocommit().await?;
    let Conn::Postgres(conn) = on.conn() else {
        return Err(db::only_postgres());
    };
    macro_rules! each {
        ($of:expr) => {
            settlements.iter().map($of).collect::<Vec<_>>()
        };
    }
    let settling = sqlx::query(
        "WITH gone AS (DELETE FROM apalis.jobs WHERE id = ANY($21)), \
         made AS (INSERT INTO webhook_attempts \
         (id, project_id, delivery_id, endpoint_id, event_type, number, trigger, url, request_id, status, \
          status_code, error, duration_ms, request_headers, payload, response_headers, response_body, \
          plugin, created_at) \
         SELECT * FROM UNNEST($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::bigint[], \
          $7::text[], $8::text[], $9::uuid[], $10::text[], $11::bigint[], $12::text[], $13::bigint[], \
          $14::text[], $15::text[], $16::text[], $17::bytea[], $18::text[], $19::timestamptz[]) \
         RETURNING delivery_id, number, status_code) \
         UPDATE webhook_deliveries d SET attempts = d.attempts + 1, updated_at = $20, \
         last_status_code = COALESCE(made.status_code, d.last_status_code), \
         state = CASE WHEN d.state IN ('pending', 'retrying', 'paused') THEN 'delivered' ELSE d.state END, \
         next_attempt_at = CASE WHEN d.state IN ('pending', 'retrying', 'paused') THEN NULL \
          ELSE d.next_attempt_at END, \
         ladder_number = CASE WHEN d.state IN ('pending', 'retrying', 'paused') THEN made.number \
          ELSE d.ladder_number END, \
         job_copy = CASE WHEN d.state IN ('pending', 'retrying', 'paused') THEN 0 ELSE d.job_copy END \
         FROM made WHERE d.id = made.delivery_id",
    )
    .bind(each!(|_| uuid::Uuid::from(AttemptId::generate())))
    .bind(each!(|s| uuid::Uuid::from(s.project)))
    .bind(each!(|s| uuid::Uuid::from(s.delivery)))
    .bind(each!(|s| uuid::Uuid::from(s.endpoint)))
    .bind(each!(|s| s.event_type.clone()))
    .bind(each!(|s| s.number))
    .bind(each!(|s| json(&s.trigger)))
    .bind(each!(|s| s.url.clone()))
    .bind(each!(|s| uuid::Uuid::from(s.request_id)))
    .bind(each!(|s| s.status.as_str()))
    .bind(each!(|s| s.status_code))
    .bind(each!(|s| s.error.as_deref().map(storable)))
    .bind(each!(|s| i64::try_from(s.duration.as_millis()).unwrap_or(i64::MAX)))
    .bind(each!(|s| json(&s.request_headers)))
    .bind(each!(|s| s.payload.clone()))
    .bind(each!(|s| json(&s.response_headers)))
    .bind(each!(|s| s.response_body.clone()))
    .bind(each!(|s| s.plugin.as_ref().map(json)))
    .bind(each!(|s| s.started_at))
    .bind(Timestamp::now())
    .bind(each!(|s| s.job.as_str()))
    .execute(conn);
    let settled = db::answered(settling).await;
    db::settle(&mut on, settled)?;
    Ok(vec![(); settlements.len()])
}

/// As `JsonText` writes it.
fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
