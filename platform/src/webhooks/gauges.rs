//! Gauges of the deliveries of all projects, for whoever runs the platform: what every process reads from the
//! database and shows in its `/metrics`. Each is an index look-up or a count
//! that ends at [`MOST`], however much there is.

use std::time::Duration;

use crate::db::{Db, Timestamp, fetch_one, fetch_optional};

/// The most that is counted.
const MOST: i64 = 100_000;

/// Reads the gauges.
pub async fn observe(db: &Db) -> sqlx::Result<()> {
    let now = Timestamp::now();
    let mut reader = db.read().await?;
    let (depth,) = fetch_one!(
        &mut reader,
        (i64,),
        "SELECT count(*) FROM (SELECT 1 FROM webhook_deliveries \
         WHERE state IN ('pending', 'retrying') AND next_attempt_at <= $1 LIMIT $2) AS due",
        now,
        MOST
    )?;
    let oldest = fetch_optional!(
        &mut reader,
        (Timestamp,),
        "SELECT next_attempt_at FROM webhook_deliveries WHERE state IN ('pending', 'retrying') \
         AND next_attempt_at <= $1 ORDER BY next_attempt_at LIMIT 1",
        now
    )?;
    let (dead,) = fetch_one!(
        &mut reader,
        (i64,),
        "SELECT count(*) FROM (SELECT 1 FROM webhook_dead_letters \
         WHERE created_at > $1 LIMIT $2) AS dead",
        now - Duration::from_hours(24),
        MOST
    )?;
    let waits = oldest.map_or(Duration::ZERO, |(due,)| now.since(due));
    metrics::gauge!("botix_webhook_queue_depth").set(counted(depth));
    metrics::gauge!("botix_webhook_oldest_due_seconds").set(waits.as_secs_f64());
    metrics::gauge!("botix_webhook_dead_letters_last_day").set(counted(dead));
    Ok(())
}

fn counted(count: i64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
