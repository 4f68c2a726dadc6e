//! A server with nothing to do: what it burns all the same is part of every other row.

use std::time::Duration;

use crate::{
    Fault,
    args::Database,
    figures::Latencies,
    report::{Report, Row},
    rig::Rig,
};

/// Waits for a while.
pub async fn run(rig: &Rig, database: Database, seconds: u16) -> Result<Report, Fault> {
    eprintln!("idle on {}", database.name());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = rig.begin().await?;
    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
    let spent = rig.end(&before, seconds.into()).await?;
    Ok(Report {
        rows: vec![Row {
            run: format!("idle for {seconds} s (CPU per second)"),
            database,
            per_second: 0.0,
            latencies: Latencies::default(),
            spent: Some(spent),
            operations: seconds.into(),
            remarks: Vec::new(),
        }],
        void: Vec::new(),
    })
}
