//! The runs. Each has a fresh set-up, so none stands on what another left behind.

mod books;
mod contacts;
mod course;
mod deliveries;
mod idle;
mod layer;
mod lists;
mod publishing;

use crate::{
    Fault,
    args::{All, Args, Database, Load, Run, Way},
    report::{HEAD, Report, Row},
    rig::{Rig, describe_machine},
};

/// One run to do.
enum Planned {
    Contacts(Load),
    Replays(Load, u64),
    Layer(Load, u16),
    Lists(crate::args::Lists),
    Deliveries(Load, Way),
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
    let planned = plan(&args.run);
    let mut good = true;
    for &database in &args.database {
        for planned in &planned {
            if let Planned::Layer(load, turns) = planned {
                let report = layer::run(args, database, *load, *turns).await?.judged();
                good &= told(&report);
                rows.extend(report.rows);
                continue;
            }
            let rig = Rig::start(args, database).await?;
            let version = rig.store.describe().await?;
            if !versions.contains(&version) {
                versions.push(version);
            }
            let report = one(args, database, &rig, planned).await;
            // Told also, and most of all, when the run failed.
            for wrong in rig.stop().await? {
                eprintln!("  {wrong}");
            }
            let report = report?.judged();
            good &= told(&report);
            rows.extend(report.rows);
        }
    }
    Ok(good)
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
        Planned::Layer(..) => Err("the layer has rigs of its own".into()),
        Planned::Lists(lists) => lists::run(rig, database, *lists).await,
        Planned::Deliveries(load, way) => {
            deliveries::run(rig, database, *load, way, connections).await
        }
        Planned::Idle(seconds) => idle::run(rig, database, *seconds).await,
    }
}

fn plan(run: &Run) -> Vec<Planned> {
    match run {
        Run::Contacts(load) => vec![Planned::Contacts(*load)],
        Run::Replays { load, keys } => vec![Planned::Replays(*load, *keys)],
        Run::Layer { load, turns } => vec![Planned::Layer(*load, *turns)],
        Run::Lists(lists) => vec![Planned::Lists(*lists)],
        Run::Deliveries { load, way } => vec![Planned::Deliveries(*load, way.clone())],
        Run::Idle { seconds } => vec![Planned::Idle(*seconds)],
        Run::All(all) => plan_all(all),
    }
}

/// Ceilings first, then the rates; deliveries without and with the plugin.
fn plan_all(all: &All) -> Vec<Planned> {
    let rates = || std::iter::once(None).chain(all.rates.iter().copied().map(Some));
    let load = |rate| Load {
        rate,
        seconds: all.seconds,
        warmup: all.warmup,
    };
    let way = |plugin| Way {
        endpoints: 1,
        plugin,
        drain: all.drain,
    };
    let mut planned = vec![Planned::Idle(10)];
    planned.extend(rates().map(|rate| Planned::Contacts(load(rate))));
    planned.push(Planned::Layer(load(None), 5));
    planned.push(Planned::Replays(load(None), all.keys));
    planned.push(Planned::Lists(all.lists));
    for plugin in [None, Some(all.plugin.clone())] {
        planned.extend(rates().map(|rate| Planned::Deliveries(load(rate), way(plugin.clone()))));
    }
    planned
}
