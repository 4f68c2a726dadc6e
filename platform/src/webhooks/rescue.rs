//! Rescue: deliveries that are due and have no job get one again.
//!
//! Belt and braces: a job is lost only if somebody empties the queue by hand. Every delivery that is long
//! due is looked at in turn, a bounded number at a time, because a backlog may hold millions that are due
//! and have their jobs.

use std::time::Duration;

use ulid::Ulid;

use super::{deliveries::DeliveryId, planning};
use crate::db::{Db, Queryable as _, Timestamp, fetch_all, fetch_optional};

/// Deliveries that are looked at in one statement.
const BATCH: i64 = 1_000;

/// Batches in one sweep at most.
const BATCHES: usize = 5;

/// Looks for lost jobs; remembers where it is.
#[derive(Debug, Default)]
pub struct Rescue {
    reached: Option<(Timestamp, DeliveryId)>,
}

macro_rules! without_job {
    () => {
        "NOT EXISTS (SELECT 1 FROM apalis.jobs j WHERE j.job_type = 'deliver-webhook' \
         AND j.idempotency_key = replace(d.id::text, '-', '') || ':' || d.ladder_number || ':' || d.job_copy \
         AND j.status IN ('Pending', 'Queued', 'Running'))"
    };
    (sqlite) => {
        "NOT EXISTS (SELECT 1 FROM Jobs j WHERE j.job_type = 'deliver-webhook' \
         AND j.idempotency_key = lower(hex(d.id)) || ':' || d.ladder_number || ':' || d.job_copy \
         AND j.status IN ('Pending', 'Queued', 'Running'))"
    };
}

macro_rules! due {
    ($($without_job:tt)+) => {
        concat!(
            "SELECT d.id, d.next_attempt_at, ",
            $($without_job)+,
            " FROM webhook_deliveries d WHERE d.state IN ('pending', 'retrying') AND d.next_attempt_at < $1 \
             AND d.next_attempt_at >= $2 AND (d.next_attempt_at, d.id) > ($2, $3) \
             ORDER BY d.next_attempt_at, d.id LIMIT $4"
        )
    };
}

impl Rescue {
    /// Makes new jobs for the next deliveries that are due for longer than `overdue` and have none; how
    /// many there were.
    pub async fn sweep(&mut self, db: &Db, overdue: Duration) -> sqlx::Result<usize> {
        let before = Timestamp::now() - overdue;
        let mut rescued = 0;
        for _ in 0..BATCHES {
            let (since, after) = self.reached.unwrap_or((
                Timestamp::from_micros(0),
                DeliveryId::from_ulid(Ulid::nil()),
            ));
            let mut reader = db.read().await?;
            let text = if reader.is_postgres() {
                due!(without_job!())
            } else {
                due!(without_job!(sqlite))
            };
            let due = fetch_all!(
                &mut reader,
                (DeliveryId, Timestamp, bool),
                text,
                before,
                since,
                after,
                BATCH
            )?;
            drop(reader);
            for (delivery, ..) in due.iter().filter(|(.., lost)| *lost) {
                rescued += usize::from(plan_again(db, *delivery, before).await?);
            }
            let is_last = i64::try_from(due.len()).unwrap_or(0) < BATCH;
            self.reached = due.last().map(|(id, at, _)| (*at, *id));
            if is_last {
                self.reached = None;
                break;
            }
        }
        Ok(rescued)
    }
}

/// Gives a delivery another job, if it still has none.
async fn plan_again(db: &Db, delivery: DeliveryId, before: Timestamp) -> sqlx::Result<bool> {
    let mut tx = db.begin().await?;
    let text = if tx.is_postgres() {
        concat!(
            "SELECT d.id FROM webhook_deliveries d WHERE d.id = $1 AND d.state IN ('pending', 'retrying') \
             AND d.next_attempt_at < $2 AND ",
            without_job!(),
            " FOR UPDATE OF d SKIP LOCKED"
        )
    } else {
        concat!(
            "SELECT d.id FROM webhook_deliveries d WHERE d.id = $1 AND d.state IN ('pending', 'retrying') \
             AND d.next_attempt_at < $2 AND ",
            without_job!(sqlite)
        )
    };
    let lost = fetch_optional!(&mut tx, (DeliveryId,), text, delivery, before)?.is_some();
    if lost {
        planning::plan_again(&mut tx, delivery, Timestamp::now()).await?;
    }
    tx.commit().await?;
    Ok(lost)
}
