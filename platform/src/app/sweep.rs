//! Sweeps: what removes things that have had their time, and looks for jobs that were lost.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    contract::idempotency::Idempotency,
    db::{Db, Timestamp},
    jobs,
    webhooks::{
        endpoints, redeliveries,
        rescue::Rescue,
        retention::{self, Retention},
    },
};

/// For how many sweeps a delivery may be due before somebody asks where its job is.
const OVERDUE: u32 = 2;

/// How long a redelivery in bulk may stand still.
const STALLED: Duration = Duration::from_mins(1);

/// Rows that one transaction of a sweep touches at most.
const BATCH: i64 = 1_000;

/// Batches of one kind in one sweep at most: a backlog is worked off over several.
const BATCHES: usize = 200;

/// Removes what has had its time, and looks for what was lost, again and again.
pub(super) async fn run(
    db: &Db,
    idempotency: &Idempotency,
    every: Duration,
    stop: CancellationToken,
) {
    let lost_jobs = metrics::counter!("botix_webhook_lost_jobs_total");
    // There from the start, to be watched.
    lost_jobs.absolute(0);
    let mut retention = Retention::default();
    let mut jobs_lost = Rescue::default();
    // Before there are rows: those of a day without a partition would have to be moved.
    retention.keep_days(db).await;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(every) => {}
        }
        let began = Timestamp::now();
        match jobs_lost.sweep(db, every * OVERDUE).await {
            Ok(0) => {}
            Ok(lost) => {
                lost_jobs.increment(lost as u64);
                tracing::error!(
                    lost,
                    "deliveries were due and had no job; they have one again"
                );
            }
            Err(error) => tracing::warn!(%error, "the sweep for lost jobs failed"),
        }
        match redeliveries::rescue(db, STALLED).await {
            Ok(0) => {}
            Ok(lost) => tracing::error!(lost, "redeliveries had stopped; they go on"),
            Err(error) => tracing::warn!(%error, "the sweep for stopped redeliveries failed"),
        }
        let expired = until_small(&stop, BATCH, || idempotency.sweep(BATCH)).await;
        let finished = until_small(&stop, BATCH, || jobs::purge(db, BATCH)).await;
        retention.keep_days(db).await;
        let mut attempts = 0;
        for table in retention.attempts_in() {
            attempts += until_small(&stop, BATCH, || retention::attempts(db, table, BATCH)).await;
        }
        let letters = until_small(&stop, BATCH, || retention::dead_letters(db, BATCH)).await;
        let others = retention.sweep(db, BATCH).await;
        let secrets = endpoints::forget_secrets(db).await;
        let failed = [others.as_ref().err(), secrets.as_ref().err()];
        for error in failed.into_iter().flatten() {
            tracing::warn!(%error, "a sweep failed");
        }
        tracing::debug!(
            expired, finished, attempts, letters, ?others, ?secrets,
            took = ?Timestamp::now().since(began), "swept"
        );
    }
}

/// Repeats a batch until one comes back small, within bounds; how much there was.
async fn until_small<F: Future<Output = sqlx::Result<u64>>>(
    stop: &CancellationToken,
    batch: i64,
    step: impl Fn() -> F,
) -> u64 {
    let mut all = 0;
    for _ in 0..BATCHES {
        if stop.is_cancelled() {
            break;
        }
        match step().await {
            Ok(some) => {
                all += some;
                if some < batch.unsigned_abs() {
                    break;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a sweep failed");
                break;
            }
        }
    }
    all
}
