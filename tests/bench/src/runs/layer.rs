//! What the idempotency layer costs: POST /contacts with it and without it, in turn, so that whatever
//! else the machine does meets both.
//!
//! Two servers run, each with a database of its own, and only one of them has load at a time. The
//! layer's share of a POST is what the time with it is longer than the time without.

use std::{sync::Arc, time::Duration};

use super::contacts::{created, post};
use crate::{
    Fault,
    args::{Args, Database, Load},
    figures::{Latencies, float},
    load::{self, Job, Plan, Ticket},
    report::{Report, Row},
    rig::{Protection, Rig, Spent},
};

/// One side of the comparison.
struct Side {
    name: &'static str,
    rig: Rig,
    next: u64,
    done: u64,
    seconds: f64,
    latencies: Latencies,
    spent: Spent,
}

/// Measures both sides, turn by turn; what came of it, and the database that it was on.
pub async fn run(
    args: &Args,
    database: Database,
    load: Load,
    turns: u16,
) -> Result<(Report, String), Fault> {
    let how = load.describe(args.connections);
    eprintln!(
        "POST /contacts with and without the layer, {how}, on {}",
        database.name()
    );
    let mut sides = Vec::new();
    for (name, protection) in [("with", Protection::Full), ("without", Protection::None)] {
        sides.push(Side {
            name,
            rig: Rig::start_with(args, database, protection).await?,
            next: 0,
            done: 0,
            seconds: 0.0,
            latencies: Latencies::default(),
            spent: Spent::default(),
        });
    }
    for side in &mut sides {
        turn(side, args.connections, load, load.warmup_time(), false).await?;
    }
    for _ in 0..turns {
        for side in &mut sides {
            turn(side, args.connections, load, load.time(), true).await?;
        }
    }
    let mut void = Vec::new();
    let each: Vec<f64> = sides
        .iter()
        .map(|side| side.latencies.percentile(50.0))
        .collect();
    let cpu = |side: &Side| (side.spent.server + side.spent.database) / float(side.done.max(1));
    let share = |with: f64, without: f64| 100.0 * (with - without) / with.max(f64::MIN_POSITIVE);
    let remark = format!(
        "the layer is {:.0} % of the median, {:.0} % of the CPU of server and database, {:.0} % of the time at the rate reached",
        share(each[0], each[1]),
        share(cpu(&sides[0]), cpu(&sides[1])),
        share(
            sides[0].seconds / float(sides[0].done.max(1)),
            sides[1].seconds / float(sides[1].done.max(1))
        )
    );
    let mut rows = Vec::new();
    let version = sides[0].rig.store.describe().await?;
    for side in sides {
        let (contacts, records) = side.rig.store.contacts_and_records().await?;
        let kept = if side.name == "with" { contacts } else { 0 };
        if records != kept {
            void.push(format!(
                "{} the layer: {contacts} contacts, {records} records",
                side.name
            ));
        }
        for wrong in side.rig.stop().await? {
            eprintln!("  {wrong}");
        }
        rows.push(Row {
            run: format!("POST /contacts {} the layer, {how}", side.name),
            database,
            per_second: float(side.done) / side.seconds.max(f64::MIN_POSITIVE),
            spent: Some(side.spent),
            operations: side.done,
            remarks: if side.name == "with" {
                vec![remark.clone()]
            } else {
                Vec::new()
            },
            latencies: side.latencies,
        });
    }
    Ok((Report { rows, void }, version))
}

async fn turn(
    side: &mut Side,
    connections: u16,
    load: Load,
    time: Duration,
    counts: bool,
) -> Result<(), Fault> {
    let client = side.rig.client.clone();
    let job = Arc::new(Job {
        make: Box::new(move |ticket: Ticket| post(&client, ticket.number)),
        check: created,
    });
    let plan = Plan {
        rate: load.rate,
        time,
        limit: u64::MAX,
        connections,
        first: side.next,
    };
    let before = side.rig.begin().await?;
    let tally = load::run(&side.rig.client, plan, &job).await?;
    let spent = side.rig.end(&before, tally.done).await?;
    if !tally.errors.is_empty() {
        return Err(format!("{} the layer: {:?}", side.name, tally.errors).into());
    }
    side.next = tally.next;
    if counts {
        side.done += tally.done;
        side.seconds += tally.time.as_secs_f64();
        side.latencies.add(&tally.latencies);
        side.spent.add(&spent);
    }
    Ok(())
}
