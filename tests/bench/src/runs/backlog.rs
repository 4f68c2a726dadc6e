//! What a backlog costs: fresh events with and without a great many deliveries of another project that
//! wait, in turn, so that whatever else the machine does meets both.
//!
//! Each side has a database of its own, and its server runs only while it has its turn: a backlog that
//! is due is worked off whenever a server runs. The receiver of the backlog answers at once. How fast
//! the backlog drains is measured twice, beside fresh events and alone. At the end the servers are
//! stopped, so the books are exact however much of the backlog is left.

use std::time::{Duration, Instant};

use super::{
    course::{Course, Measured, describe},
    publishing::make_endpoints,
};
use crate::{
    Fault,
    args::{Args, Backlog, Database, Load, Way},
    figures::{Latencies, float, per_second, thousands},
    report::{Report, Row},
    rig::{BacklogKind, BacklogTarget, Receiver, Rig, STALL},
};

/// One side of the comparison.
struct Side {
    name: String,
    rig: Rig,
    course: Course,
    backlog: Option<Waiting>,
    measured: Measured,
    /// Of the backlog, what was delivered beside the fresh events, in which time.
    drained: u64,
    time: Duration,
}

/// The backlog of one side.
struct Waiting {
    kind: BacklogKind,
    project: ulid::Ulid,
    count: u64,
    receiver: Receiver,
}

impl Waiting {
    fn arrived(&self) -> u64 {
        self.receiver.arrivals().distinct()
    }

    /// Whether there is nothing left of it.
    fn is_over(&self) -> bool {
        self.arrived() == self.count
    }

    /// Whether it is another backlog by now.
    fn is_half_over(&self) -> bool {
        self.arrived() > self.count / 2
    }
}

/// Measures both sides, turn by turn; what came of it, and the database that it was on.
pub async fn run(
    args: &Args,
    database: Database,
    load: Load,
    way: &Way,
    backlog: Backlog,
) -> Result<(Report, String), Fault> {
    if database == Database::Sqlite {
        return Err("a backlog is made on PostgreSQL only".into());
    }
    let run = describe(load, way, args.connections);
    let what = format!(
        "a backlog of {} deliveries of another project, {}",
        thousands(backlog.count),
        match backlog.kind {
            BacklogKind::Later => "to be retried in an hour",
            BacklogKind::Due => "due",
        }
    );
    eprintln!("{run} with and without {what}, on {}", database.name());
    let mut sides = Vec::new();
    for name in [format!("without {what}"), format!("with {what}")] {
        let mut rig = Rig::start(args, database).await?;
        let course = Course::start(&rig, load, way, args.connections).await?;
        let waiting = if sides.is_empty() {
            told(rig.pause().await?);
            rig.store.calm().await?;
            None
        } else {
            Some(fill(&mut rig, backlog).await?)
        };
        sides.push(Side {
            name,
            rig,
            course,
            backlog: waiting,
            measured: Measured::default(),
            drained: 0,
            time: Duration::ZERO,
        });
    }
    for _ in 0..backlog.turns {
        for side in &mut sides {
            turn(side, way, backlog.kind).await?;
        }
        // What did not arrive in time would spoil the next turn, and so would a backlog that is gone.
        let spoilt = |side: &Side| {
            side.measured.missing > 0 || side.backlog.as_ref().is_some_and(Waiting::is_half_over)
        };
        if sides.iter().any(spoilt) {
            break;
        }
    }
    let version = sides[0].rig.store.describe().await?;
    let mut report = Report::default();
    let cost = cost(&sides[0].measured, &sides[1].measured, load, backlog.kind);
    for mut side in sides {
        let (books, mut remarks) = side.course.books(&side.rig).await?;
        report.void.extend(books.faults());
        let mut drain = Vec::new();
        if let Some(waiting) = &side.backlog {
            remarks.insert(0, cost.clone());
            if waiting.kind == BacklogKind::Due {
                drain.push(drain_row(&run, database, &side, waiting));
                drain.extend(alone(&mut side, database, load).await?);
            }
        }
        if let Some(waiting) = &side.backlog {
            report.void.extend(lost(&side.rig, waiting).await?);
        }
        let run = format!("{run}, {}", side.name);
        let [accepted, mut arrived] = side.measured.rows(&run, database, load);
        arrived.remarks.extend(remarks);
        if side.drained > 0 {
            arrived.operations += side.drained;
            let remark = "CPU and statements are of each delivery, the backlog's included";
            arrived.remarks.push(remark.to_owned());
        }
        report.rows.extend([accepted, arrived]);
        report.rows.extend(drain);
    }
    Ok((report, version))
}

/// Makes the other project, stops the server, and writes its backlog.
async fn fill(rig: &mut Rig, backlog: Backlog) -> Result<Waiting, Fault> {
    let (project, client) = rig.another_project()?;
    let receiver = Receiver::start().await?;
    let endpoints = make_endpoints(&client, &receiver, 0..1, None).await?;
    told(rig.pause().await?);
    let begun = Instant::now();
    let to = BacklogTarget {
        project,
        endpoint: endpoints[0],
        url: receiver.url(0),
    };
    rig.store
        .load_backlog(backlog.kind, &to, backlog.count)
        .await?;
    eprintln!("  loaded in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(Waiting {
        kind: backlog.kind,
        project,
        count: backlog.count,
        receiver,
    })
}

async fn turn(side: &mut Side, way: &Way, kind: BacklogKind) -> Result<(), Fault> {
    let drain = Duration::from_secs(way.drain.into());
    // Fresh ones may have to wait for much of a backlog that is due, and it would be worked off before
    // anything is measured.
    let (warm, stall) = match kind {
        BacklogKind::Later => (STALL, STALL),
        BacklogKind::Due => (Duration::ZERO, drain),
    };
    side.rig.resume().await?;
    side.course.warm_up(&side.rig, warm).await?;
    let drained_before = side.backlog.as_ref().map_or(0, Waiting::arrived);
    let begun = Instant::now();
    let measured = side.course.measure(&side.rig, stall).await?;
    side.time += match &side.backlog {
        Some(waiting) if waiting.is_over() => {
            let last = waiting.receiver.arrivals().last;
            last.saturating_duration_since(begun)
        }
        _ => begun.elapsed(),
    };
    if let Some(waiting) = &side.backlog {
        side.drained += waiting.arrived() - drained_before;
    }
    side.measured.then(measured);
    told(side.rig.pause().await?);
    Ok(())
}

/// What the backlog changes, in a sentence.
fn cost(without: &Measured, with: &Measured, load: Load, kind: BacklogKind) -> String {
    let more = |with: f64, without: f64| 100.0 * (with / without.max(f64::MIN_POSITIVE) - 1.0);
    let mut changes = Vec::new();
    // On schedule the rate is the schedule's.
    if load.rate.is_none() {
        changes.push(format!(
            "{:+.0} % events accepted a second, {:+.0} % delivered a second",
            more(with.tally.rate(), without.tally.rate()),
            more(with.per_second(), without.per_second())
        ));
    }
    // Beside one that drains nobody can tell what was spent on which.
    if kind == BacklogKind::Later {
        let cpu = |measured: &Measured| {
            (measured.spent.server + measured.spent.database) / float(measured.arrived.max(1))
        };
        changes.push(format!(
            "{:+.0} % CPU a delivery",
            more(cpu(with), cpu(without))
        ));
    }
    for percent in [50.0, 99.0] {
        changes.push(format!(
            "p{percent:.0} {:.2} → {:.2} ms",
            without.latencies.percentile(percent),
            with.latencies.percentile(percent)
        ));
    }
    format!("for the backlog: {}", changes.join(", "))
}

fn drain_row(run: &str, database: Database, side: &Side, waiting: &Waiting) -> Row {
    Row {
        run: format!("the backlog drains beside fresh events, {run}"),
        database,
        per_second: per_second(side.drained, side.time),
        latencies: Latencies::default(),
        spent: None,
        operations: side.drained,
        remarks: vec![format!(
            "{} of {} delivered by then",
            thousands(waiting.arrived()),
            thousands(waiting.count)
        )],
    }
}

/// How fast the backlog drains when nothing else is to be done, if there is any left.
async fn alone(side: &mut Side, database: Database, load: Load) -> Result<Option<Row>, Fault> {
    let Some(waiting) = &side.backlog else {
        return Ok(None);
    };
    let left = waiting.count - waiting.arrived();
    if left == 0 {
        return Ok(None);
    }
    side.rig.resume().await?;
    waiting
        .receiver
        .wait(waiting.count, load.warmup_time(), load.warmup_time())
        .await;
    let before = waiting.arrived();
    let begun = Instant::now();
    let usage = side.rig.begin().await?;
    waiting
        .receiver
        .wait(waiting.count, load.time(), load.time())
        .await;
    let drained = waiting.arrived() - before;
    let rate = per_second(drained, begun.elapsed());
    let spent = side.rig.end(&usage, drained).await?;
    told(side.rig.pause().await?);
    Ok(Some(Row {
        run: format!("the backlog drains alone, {} left", thousands(left)),
        database,
        per_second: rate,
        latencies: Latencies::default(),
        spent: Some(spent),
        operations: drained,
        remarks: Vec::new(),
    }))
}

/// What of the backlog is neither delivered nor waiting as before.
async fn lost(rig: &Rig, waiting: &Waiting) -> Result<Vec<String>, Fault> {
    let states = rig.store.deliveries(waiting.project).await?;
    let faults = faults(waiting.kind, waiting.count, waiting.arrived(), &states);
    Ok(faults.into_iter().collect())
}

fn faults(kind: BacklogKind, count: u64, arrived: u64, states: &[(String, u64)]) -> Option<String> {
    let of = |wanted: &str| {
        let of = states.iter().filter(|(state, _)| state == wanted);
        of.map(|(_, count)| count).sum::<u64>()
    };
    let (waits, delivered) = match kind {
        BacklogKind::Later => (of("retrying"), 0),
        BacklogKind::Due => (of("pending"), of("delivered")),
    };
    (arrived != delivered || waits + delivered != count).then(|| {
        format!("of a backlog of {count}, {arrived} came to the receiver, and there are {states:?}")
    })
}

fn told(wrong: Vec<String>) {
    for wrong in wrong {
        eprintln!("  {wrong}");
    }
}

#[cfg(test)]
mod tests {
    use super::{BacklogKind, faults};

    #[test]
    fn a_run_is_void_when_anything_of_the_backlog_is_lost() {
        let states = |delivered, pending| {
            vec![
                ("delivered".to_owned(), delivered),
                ("pending".to_owned(), pending),
            ]
        };
        let due = BacklogKind::Due;
        assert_eq!(faults(due, 10, 4, &states(4, 6)), None);
        assert!(faults(due, 10, 4, &states(4, 5)).is_some());
        assert!(faults(due, 10, 3, &states(4, 6)).is_some());
        let later = BacklogKind::Later;
        assert_eq!(faults(later, 10, 0, &[("retrying".into(), 10)]), None);
        assert!(faults(later, 10, 0, &states(1, 9)).is_some());
    }
}
