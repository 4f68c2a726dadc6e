//! One tenant's slow receivers, and another's webhooks: how long those of a healthy endpoint take alone,
//! and while thousands of other projects' requests hang or wait.
//!
//! In turn and on one server. The others' receiver takes their requests and does not answer; after each
//! turn it answers, and what waited for it has to arrive.

use std::{sync::Arc, time::Duration};

use ulid::Ulid;

use super::{
    course::{Course, Measured, describe},
    publishing::{make_endpoints, publishing},
};
use crate::{
    Fault,
    args::{Args, Database, Isolation, Load, Others, Way},
    client::Client,
    figures::{Latencies, thousands},
    load::{self, Plan},
    report::{self, Report},
    rig::{Receiver, Rig, STALL},
};

/// How long publishing what is to hang may take.
const PUBLISHING: Duration = Duration::from_mins(5);

/// How long it may take until as many hang as will.
const FILLING: Duration = Duration::from_secs(20);

/// How often somebody looks how many hang.
const LOOK: Duration = Duration::from_millis(100);

/// The other projects.
struct Slow {
    projects: Vec<(Ulid, Client)>,
    receiver: Arc<Receiver>,
    endpoints: u64,
    events: u64,
    published: u64,
    next: u64,
}

/// The others' deliveries.
#[derive(Clone, Copy, Debug, Default)]
struct States {
    delivered: u64,
    open: u64,
}

/// How many hung, looked at every now and then.
#[derive(Clone, Copy, Debug, Default)]
struct Hung {
    least: Option<u64>,
    most: u64,
}

impl Hung {
    fn look(&mut self, now: u64) {
        self.least = Some(self.least.map_or(now, |least| least.min(now)));
        self.most = self.most.max(now);
    }
}

/// Measures alone and beside the others, turn by turn.
pub async fn run(
    rig: &Rig,
    args: &Args,
    database: Database,
    isolation: &Isolation,
    others: Others,
) -> Result<Report, Fault> {
    let load = Load {
        rate: Some(isolation.rate),
        seconds: isolation.seconds,
        warmup: isolation.warmup,
    };
    let way = Way {
        endpoints: 1,
        plugin: None,
        drain: isolation.drain,
    };
    let run = describe(load, &way, args.connections);
    let mut slow = Slow::start(rig, others, isolation.hanging).await?;
    let what = format!(
        "while {} deliveries of {} hang or wait",
        thousands(slow.events * slow.endpoints),
        others.describe()
    );
    eprintln!("{run}, alone and {what}, on {}", database.name());

    let mut course = Course::start(rig, load, &way, args.connections).await?;
    course.warm_up(rig, STALL).await?;
    let (mut alone, mut beside) = (Measured::default(), Measured::default());
    let mut hung = Hung::default();
    let mut ratios = Vec::new();
    let mut drained = true;
    for _ in 0..isolation.turns {
        let first = course.measure(rig, STALL).await?;
        slow.hang(rig, args.connections).await?;
        let second = tokio::select! {
            second = course.measure(rig, STALL) => second?,
            () = slow.watch(&mut hung) => return Err("nobody watches for ever".into()),
        };
        ratios.push(ratio(&first.latencies, &second.latencies));
        alone.then(first);
        beside.then(second);
        drained = slow.release(rig, isolation.drain).await?;
        if !drained {
            break;
        }
    }
    let (books, mut remarks) = course.books(rig).await?;
    let mut void = books.faults();
    void.extend(slow.faults(rig).await?);
    if !drained {
        remarks.push("**not all of the others' arrived once they were answered**".to_owned());
    }

    let p95 = |latencies: &Latencies| format!("p95 {:.2} ms", latencies.percentile(95.0));
    let [_, mut first] = alone.rows(&format!("{run}, alone"), database, load);
    let [_, mut second] = beside.rows(&format!("{run}, {what}"), database, load);
    first.remarks.insert(0, p95(&alone.latencies));
    second.remarks.insert(
        0,
        format!(
            "{}, {:.2} × that alone (in turn {}); {} to {} requests hung",
            p95(&beside.latencies),
            ratio(&alone.latencies, &beside.latencies),
            ratios
                .iter()
                .map(|ratio| format!("{ratio:.2}"))
                .collect::<Vec<_>>()
                .join(", "),
            thousands(hung.least.unwrap_or(0)),
            thousands(hung.most)
        ),
    );
    second.remarks.extend(remarks);
    for (row, measured) in [(&mut first, &alone), (&mut second, &beside)] {
        row.remarks
            .extend(report::remarks(&measured.tally, load.rate));
    }
    Ok(Report {
        rows: vec![first, second],
        void,
    })
}

fn ratio(alone: &Latencies, beside: &Latencies) -> f64 {
    beside.percentile(95.0) / alone.percentile(95.0).max(0.001)
}

impl Slow {
    async fn start(rig: &Rig, others: Others, hanging: u64) -> Result<Self, Fault> {
        let receiver = Arc::new(Receiver::start().await?);
        let mut projects = Vec::new();
        for number in 0..others.projects {
            let (project, client) = rig.another_project()?;
            let first = number * others.endpoints;
            let numbers = first..first + others.endpoints;
            make_endpoints(&client, &receiver, numbers, None).await?;
            projects.push((project, client));
        }
        let endpoints = u64::from(others.endpoints);
        Ok(Self {
            // As many events in each project.
            events: hanging
                .div_ceil(endpoints)
                .next_multiple_of(others.projects.into()),
            endpoints,
            projects,
            receiver,
            published: 0,
            next: 0,
        })
    }

    /// Publishes what is to hang, and waits until no more of it hang than before.
    async fn hang(&mut self, rig: &Rig, connections: u16) -> Result<(), Fault> {
        self.receiver.answer(false);
        let plan = Plan {
            rate: None,
            time: PUBLISHING,
            limit: self.events,
            connections: connections.min(32),
            first: self.next,
        };
        let clients = self.projects.iter().map(|(_, client)| client.clone());
        let job = publishing(clients.collect(), self.receiver.clone());
        let tally = load::run(&rig.client, plan, &Arc::new(job)).await?;
        if tally.done != self.events {
            let errors = tally.errors;
            return Err(format!("the others' events were not all accepted: {errors:?}").into());
        }
        self.next += self.events;
        self.published += self.events * self.endpoints;
        let begun = std::time::Instant::now();
        let mut most = 0;
        let mut grown = begun;
        while begun.elapsed() < FILLING && grown.elapsed() < Duration::from_secs(2) {
            tokio::time::sleep(LOOK).await;
            if self.receiver.hanging() > most {
                most = self.receiver.hanging();
                grown = std::time::Instant::now();
            }
        }
        Ok(())
    }

    /// Looks how many hang, for as long as it is polled.
    async fn watch(&self, hung: &mut Hung) {
        loop {
            hung.look(self.receiver.hanging());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Answers everything; whether all arrived and is settled.
    async fn release(&self, rig: &Rig, drain: u16) -> Result<bool, Fault> {
        self.receiver.answer(true);
        let drain = Duration::from_secs(drain.into());
        self.receiver.wait(self.published, drain, drain).await;
        for _ in 0..120 {
            if self.states(rig).await?.delivered == self.published {
                return Ok(true);
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        Ok(false)
    }

    async fn states(&self, rig: &Rig) -> Result<States, Fault> {
        let mut all = States::default();
        for (project, _) in &self.projects {
            for (state, count) in rig.store.deliveries(*project).await? {
                match &*state {
                    "delivered" => all.delivered += count,
                    "pending" | "retrying" | "dead" => all.open += count,
                    _ => {}
                }
            }
        }
        Ok(all)
    }

    /// What is wrong with the others' books.
    async fn faults(&self, rig: &Rig) -> Result<Option<String>, Fault> {
        let States { delivered, open } = self.states(rig).await?;
        let (arrived, strange) = {
            let arrivals = self.receiver.arrivals();
            (arrivals.distinct(), arrivals.strange)
        };
        let balanced = delivered + open == self.published && arrived == delivered && strange == 0;
        Ok((!balanced).then(|| {
            format!(
                "of {} of the others, {delivered} are delivered, {open} are dead or open, and {arrived} \
                 came to the receiver, beside {strange} strange requests",
                self.published
            )
        }))
    }
}
