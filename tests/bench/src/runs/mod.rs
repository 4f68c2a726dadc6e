//! The runs. Each has a fresh set-up, so none stands on what another left behind.

mod backlog;
mod books;
mod contacts;
mod course;
mod deliveries;
mod idle;
mod isolation;
mod layer;
mod lists;
mod publishing;

use crate::{
    Fault,
    args::{All, Args, Backlog, Database, Isolation, Load, Others, Run, Way},
    figures::float,
    report::{HEAD, Report, Row},
    rig::{BacklogKind, Rig, describe_machine},
};

/// One run to do.
enum Planned {
    Contacts(Load),
    Replays(Load, u64),
    Layer(Load, u16),
    Lists(crate::args::Lists),
    Deliveries(Load, Way),
    Backlog(Load, Way, Backlog),
    Isolation(Isolation, Others),
    Idle(u16),
}

/// Does what the command line says, on each database; whether every run counts.
pub async fn run(args: &Args) -> Result<bool, Fault> {
    let mut rows = Vec::new();
    let mut versions = Vec::new();
    let ended = measure(args, &mut rows, &mut versions).await;
    // What was measured before a run failed is told all the same.
    println!("{}; {}.\n", describe_machine(), versions.join(", "));
    println!("{HEAD}");
    for row in &rows {
        println!("{}", row.markdown());
    }
    ended
}

async fn measure(
    args: &Args,
    rows: &mut Vec<Row>,
    versions: &mut Vec<String>,
) -> Result<bool, Fault> {
    let mut good = true;
    for &database in &args.database {
        for planned in &plan(&args.run, database) {
            let (report, version) = match planned {
                Planned::Layer(load, turns) => layer::run(args, database, *load, *turns).await?,
                Planned::Backlog(load, way, backlog) => {
                    backlog::run(args, database, *load, way, *backlog).await?
                }
                _ => alone(args, database, planned).await?,
            };
            if !versions.contains(&version) {
                versions.push(version);
            }
            let report = report.judged();
            good &= told(&report);
            rows.extend(report.rows);
        }
    }
    Ok(good)
}

/// Does a run that has one set-up; what came of it, and the database that it was on.
async fn alone(
    args: &Args,
    database: Database,
    planned: &Planned,
) -> Result<(Report, String), Fault> {
    let rig = Rig::start(args, database).await?;
    let version = rig.store.describe().await?;
    let report = one(args, database, &rig, planned).await;
    // Told also, and most of all, when the run failed.
    for wrong in rig.stop().await? {
        eprintln!("  {wrong}");
    }
    Ok((report?, version))
}

/// Says what a run gave; whether it counts.
fn told(report: &Report) -> bool {
    for row in &report.rows {
        eprintln!("  {}", row.markdown());
    }
    if !report.void.is_empty() {
        eprintln!("  VOID: {}", report.void.join(", "));
    }
    report.void.is_empty()
}

async fn one(
    args: &Args,
    database: Database,
    rig: &Rig,
    planned: &Planned,
) -> Result<Report, Fault> {
    let connections = args.connections;
    match planned {
        Planned::Contacts(load) => contacts::contacts(rig, database, *load, connections).await,
        Planned::Replays(load, keys) => {
            contacts::replays(rig, database, *load, connections, *keys).await
        }
        Planned::Layer(..) | Planned::Backlog(..) => Err("this run has rigs of its own".into()),
        Planned::Lists(lists) => lists::run(rig, database, *lists).await,
        Planned::Deliveries(load, way) => {
            deliveries::run(rig, database, *load, way, connections).await
        }
        Planned::Isolation(isolation, others) => {
            isolation::run(rig, args, database, isolation, *others).await
        }
        Planned::Idle(seconds) => idle::run(rig, database, *seconds).await,
    }
}

fn plan(run: &Run, database: Database) -> Vec<Planned> {
    match run {
        Run::Contacts(load) => vec![Planned::Contacts(*load)],
        Run::Replays { load, keys } => vec![Planned::Replays(*load, *keys)],
        Run::Layer { load, turns } => vec![Planned::Layer(*load, *turns)],
        Run::Lists(lists) => vec![Planned::Lists(*lists)],
        Run::Deliveries { load, way, backlog } => {
            let backlogs = backlog.each();
            let with: Vec<_> = backlogs
                .map(|backlog| Planned::Backlog(*load, way.clone(), backlog))
                .collect();
            if with.is_empty() {
                vec![Planned::Deliveries(*load, way.clone())]
            } else {
                with
            }
        }
        Run::Isolation(isolation) => isolated(isolation).collect(),
        Run::Idle { seconds } => vec![Planned::Idle(*seconds)],
        Run::All(all) => plan_all(all, database),
    }
}

fn isolated(isolation: &Isolation) -> impl Iterator<Item = Planned> + use<'_> {
    let others = isolation.others.iter();
    others.map(|&others| Planned::Isolation(isolation.clone(), others))
}

/// Ceilings first, then the rates; deliveries without and with the plugin, to more endpoints, beside a
/// backlog and beside requests that hang.
fn plan_all(all: &All, database: Database) -> Vec<Planned> {
    let rates = || std::iter::once(None).chain(all.rates.iter().copied().map(Some));
    let load = |rate| Load {
        rate,
        seconds: all.seconds,
        warmup: all.warmup,
    };
    let way = |endpoints, plugin| Way {
        endpoints,
        plugin,
        drain: all.drain,
    };
    let plugin = || Some(all.plugin.clone());
    let mut planned = vec![Planned::Idle(10)];
    planned.extend(rates().map(|rate| Planned::Contacts(load(rate))));
    planned.push(Planned::Layer(load(None), 5));
    planned.push(Planned::Replays(load(None), all.keys));
    planned.push(Planned::Lists(all.lists));
    for &endpoints in &all.endpoints {
        // As many webhooks, whatever the number of endpoints.
        let each = |rate: f64| rate / float(endpoints.into());
        for plugin in [None, plugin()] {
            planned.extend(rates().map(|rate| {
                Planned::Deliveries(load(rate.map(each)), way(endpoints, plugin.clone()))
            }));
        }
    }
    // Its rows are written as PostgreSQL has them.
    if all.backlog > 0 && database != Database::Sqlite {
        for kind in [BacklogKind::Later, BacklogKind::Due] {
            let backlog = Backlog {
                kind,
                count: all.backlog,
                turns: 2,
            };
            planned.push(Planned::Backlog(load(None), way(1, plugin()), backlog));
        }
    }
    if all.hanging > 0 {
        planned.extend(isolated(&Isolation {
            rate: 200.0,
            seconds: all.seconds.min(60),
            warmup: all.warmup,
            turns: 2,
            hanging: all.hanging,
            others: Others::USUAL.to_vec(),
            drain: all.drain,
        }));
    }
    planned
}
