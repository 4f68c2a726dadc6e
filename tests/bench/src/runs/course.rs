//! A project publishes and its receiver receives, for one stretch after the other.
//!
//! A webhook's latency counts from the moment its event was due to be published to the head of the
//! request at the receiver.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    books::Books,
    publishing::{make_endpoints, publishing},
};
use crate::{
    Fault,
    args::{Database, Load, Way},
    figures::{Latencies, per_second, thousands},
    load::{self, Plan, Tally},
    report::{Row, remarks},
    rig::{Receiver, Rig, Spent},
};

/// How long the server may take to settle what has arrived.
const SETTLING: Duration = Duration::from_secs(30);

/// A project with its receiver, and how far it is.
pub struct Course {
    receiver: Arc<Receiver>,
    load: Load,
    connections: u16,
    way: Way,
    next: u64,
    done: u64,
    unknown: u64,
}

/// What the stretches that count came to.
#[derive(Debug, Default)]
pub struct Measured {
    /// Of the requests.
    pub tally: Tally,
    /// Webhooks that arrived.
    pub arrived: u64,
    /// Those that were to arrive, and did not as long as anybody waited.
    pub missing: u64,
    /// Those that were not there yet when the last event was accepted.
    pub behind: u64,
    /// From the first request to the last arrival.
    pub time: Duration,
    /// Of the webhooks.
    pub latencies: Latencies,
    /// What all of it used.
    pub spent: Spent,
}

impl Measured {
    /// Webhooks that arrived a second.
    pub fn per_second(&self) -> f64 {
        per_second(self.arrived, self.time)
    }

    /// Adds the next stretch.
    pub fn then(&mut self, other: Self) {
        self.tally.then(other.tally);
        self.arrived += other.arrived;
        self.missing += other.missing;
        self.behind = self.behind.max(other.behind);
        self.time += other.time;
        self.latencies.add(&other.latencies);
        self.spent.add(&other.spent);
    }

    /// Two rows: how events were accepted, and how webhooks arrived.
    pub fn rows(&self, run: &str, database: Database, load: Load) -> [Row; 2] {
        let mut late = vec![format!(
            "{} not yet there when the last event was accepted",
            thousands(self.behind)
        )];
        if self.missing > 0 {
            late.push(format!(
                "**{} did not arrive while anybody waited, and are in no latency**",
                thousands(self.missing)
            ));
        }
        [
            Row {
                run: format!("POST /events, {run}"),
                database,
                per_second: self.tally.rate(),
                spent: None,
                operations: self.tally.done,
                remarks: remarks(&self.tally, load.rate),
                latencies: self.tally.latencies.clone(),
            },
            Row {
                run: format!("publish to receiver, {run}"),
                database,
                per_second: self.per_second(),
                latencies: self.latencies.clone(),
                spent: Some(self.spent),
                operations: self.arrived,
                remarks: late,
            },
        ]
    }
}

impl Course {
    /// Makes the endpoints.
    pub async fn start(rig: &Rig, load: Load, way: &Way, connections: u16) -> Result<Self, Fault> {
        let receiver = Arc::new(Receiver::start().await?);
        let plugin = way.plugin.as_deref();
        make_endpoints(&rig.client, &receiver, 0..way.endpoints, plugin).await?;
        Ok(Self {
            receiver,
            load,
            connections,
            way: way.clone(),
            next: 0,
            done: 0,
            unknown: 0,
        })
    }

    /// Webhooks that are to arrive.
    fn expected(&self) -> u64 {
        self.done * u64::from(self.way.endpoints)
    }

    async fn publish(&mut self, rig: &Rig, time: Duration) -> Result<Tally, Fault> {
        let plan = Plan {
            rate: self.load.rate,
            time,
            limit: u64::MAX,
            connections: self.connections,
            first: self.next,
        };
        let job = publishing(vec![rig.client.clone()], self.receiver.clone());
        let tally = load::run(&rig.client, plan, &Arc::new(job)).await?;
        self.next = tally.next;
        self.done += tally.done;
        self.unknown += tally.unknown;
        Ok(tally)
    }

    async fn arrive(&self, stall: Duration) -> u64 {
        let drain = Duration::from_secs(self.way.drain.into());
        self.receiver.wait(self.expected(), drain, stall).await;
        self.receiver.arrivals().distinct()
    }

    /// The same load, unmeasured. When nothing arrives for `stall`, the rest is waited for no longer.
    pub async fn warm_up(&mut self, rig: &Rig, stall: Duration) -> Result<(), Fault> {
        self.publish(rig, self.load.warmup_time()).await?;
        self.arrive(stall).await;
        Ok(())
    }

    /// A stretch that counts.
    pub async fn measure(&mut self, rig: &Rig, stall: Duration) -> Result<Measured, Fault> {
        let before = rig.begin().await?;
        self.receiver.begin();
        let start = Instant::now();
        let tally = self.publish(rig, self.load.time()).await?;
        let behind = self
            .expected()
            .saturating_sub(self.receiver.arrivals().distinct());
        let missing = self.expected().saturating_sub(self.arrive(stall).await);
        if missing == 0 {
            self.settled(rig).await?;
        }
        let arrived = self.receiver.arrivals().latencies.count();
        let spent = rig.end(&before, arrived).await?;
        let arrivals = self.receiver.arrivals();
        Ok(Measured {
            tally,
            arrived,
            missing,
            behind,
            time: arrivals.last.saturating_duration_since(start),
            latencies: arrivals.latencies.clone(),
            spent,
        })
    }

    /// Waits until no delivery is on its way any more, or half a minute has passed.
    async fn settled(&self, rig: &Rig) -> Result<(), Fault> {
        let begun = Instant::now();
        while begun.elapsed() < SETTLING {
            let states = rig.store.deliveries(rig.project).await?;
            let open = |(state, count): &(String, u64)| {
                matches!(&**state, "pending" | "retrying") && *count > 0
            };
            if !states.iter().any(open) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        Ok(())
    }

    /// The books so far, and what to remark of them.
    pub async fn books(&self, rig: &Rig) -> Result<(Books, Vec<String>), Fault> {
        let (events, attempts, with_plugin) = rig.store.events_and_attempts(rig.project).await?;
        let states = rig.store.deliveries(rig.project).await?;
        let arrivals = self.receiver.arrivals();
        let books = Books {
            accepted: self.done..=self.done + self.unknown,
            endpoints: self.way.endpoints.into(),
            events,
            states,
            attempts: if self.way.plugin.is_some() {
                with_plugin
            } else {
                attempts
            },
            arrived: arrivals.distinct(),
            strange: arrivals.strange,
        };
        let mut remarks = Vec::new();
        if arrivals.repeated > 0 {
            remarks.push(format!("{} came again", thousands(arrivals.repeated)));
        }
        let left = books.count(|state| matches!(state, "pending" | "retrying" | "dead"));
        if left > 0 {
            remarks.push(format!("**not delivered**: {:?}", books.states));
        }
        Ok((books, remarks))
    }
}

/// How a run of deliveries is called.
pub fn describe(load: Load, way: &Way, connections: u16) -> String {
    format!(
        "{}{}, {}",
        match way.endpoints {
            1 => "1 endpoint".to_owned(),
            several => format!("{several} endpoints"),
        },
        match &way.plugin {
            None => String::new(),
            Some(plugin) => format!(
                " with the plugin {}",
                plugin.file_stem().unwrap_or_default().display()
            ),
        },
        load.describe(connections)
    )
}
