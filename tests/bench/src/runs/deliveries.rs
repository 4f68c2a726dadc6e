//! POST /events, and what arrives at the receiver.
//!
//! Two rows: how events were accepted, and how webhooks arrived. The books: every accepted event has a
//! delivery per endpoint, each delivery is delivered, dead or pending, and what is delivered is what the
//! receiver saw.

use super::course::{Course, describe};
use crate::{
    Fault,
    args::{Database, Load, Way},
    report::Report,
    rig::{Rig, STALL},
};

/// Publishes and receives.
pub async fn run(
    rig: &Rig,
    database: Database,
    load: Load,
    way: &Way,
    connections: u16,
) -> Result<Report, Fault> {
    let run = describe(load, way, connections);
    eprintln!("events and deliveries, {run} on {}", database.name());
    let mut course = Course::start(rig, load, way, connections).await?;
    course.warm_up(rig, STALL).await?;
    let measured = course.measure(rig, STALL).await?;
    let (books, remarks) = course.books(rig).await?;
    let [accepted, mut arrived] = measured.rows(&run, database, load);
    arrived.remarks.extend(remarks);
    Ok(Report {
        rows: vec![accepted, arrived],
        void: books.faults(),
    })
}
