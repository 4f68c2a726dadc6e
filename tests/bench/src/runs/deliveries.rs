//! POST /events, and what arrives at the receiver.
//!
//! Two rows: how events were accepted, and how webhooks arrived. A webhook's latency counts from the
//! moment its event was due to be published to the head of the request at the receiver. The books:
//! every accepted event has a delivery per endpoint, each delivery is delivered, dead or pending, and
//! what is delivered is what the receiver saw.

use std::{
    ops::RangeInclusive,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    Fault,
    args::{Database, Load, Way},
    client::{Answer, key},
    figures::{Latencies, per_second, thousands},
    load::{self, Job, Plan},
    report::{Report, Row, remarks},
    rig::{Receiver, Rig},
};

/// The example plugin, as the server has it too.
const EXAMPLE: &[u8] = include_bytes!("../../../../plugins/prebuilt/stripe-style.wasm");

/// Bytes in the body of a POST /events.
const PAYLOAD: usize = 1_024;

/// How long the server may take to settle what has arrived.
const SETTLING: Duration = Duration::from_secs(30);

/// Publishes and receives.
pub async fn run(
    rig: &Rig,
    database: Database,
    load: Load,
    way: &Way,
    connections: u16,
) -> Result<Report, Fault> {
    let run = format!(
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
    );
    eprintln!("events and deliveries, {run} on {}", database.name());
    let receiver = Arc::new(Receiver::start().await?);
    make_endpoints(rig, &receiver, way).await?;
    let job = Arc::new(publishing(rig, receiver.clone()));
    let endpoints = u64::from(way.endpoints);
    let drain = Duration::from_secs(way.drain.into());

    let mut plan = Plan {
        rate: load.rate,
        time: load.warmup_time(),
        limit: u64::MAX,
        connections,
        first: 0,
    };
    let warm = load::run(&rig.client, plan, &job).await?;
    receiver.wait(warm.done * endpoints, drain).await;
    let arrived_before = {
        let mut arrivals = receiver.arrivals();
        arrivals.latencies = Latencies::default();
        arrivals.distinct()
    };
    plan = Plan {
        time: load.time(),
        first: warm.next,
        ..plan
    };
    let before = rig.begin().await?;
    let start = Instant::now();
    let tally = load::run(&rig.client, plan, &job).await?;
    let done = warm.done + tally.done;
    let behind = (done * endpoints).saturating_sub(receiver.arrivals().distinct());
    receiver.wait(done * endpoints, drain).await;
    let states = settled(rig).await?;
    let spent = rig.end(&before, tally.done * endpoints).await?;

    let (events, attempts, with_plugin) = rig.store.events_and_attempts(rig.project).await?;
    let arrivals = receiver.arrivals();
    let books = Books {
        accepted: done..=done + warm.unknown + tally.unknown,
        endpoints,
        events,
        states,
        attempts: if way.plugin.is_some() {
            with_plugin
        } else {
            attempts
        },
        arrived: arrivals.distinct(),
        strange: arrivals.strange,
    };
    let mut delivery_remarks = vec![format!(
        "{} not yet there when the last event was accepted",
        thousands(behind)
    )];
    if arrivals.repeated > 0 {
        delivery_remarks.push(format!("{} came again", thousands(arrivals.repeated)));
    }
    let left = books.count(|state| matches!(state, "pending" | "retrying" | "dead"));
    if left > 0 {
        delivery_remarks.push(format!("**not delivered**: {:?}", books.states));
    }
    let arrived = books.arrived - arrived_before;
    Ok(Report {
        void: books.faults(),
        rows: vec![
            Row {
                run: format!("POST /events, {run}"),
                database,
                per_second: tally.rate(),
                spent: None,
                operations: tally.done,
                remarks: remarks(&tally, load.rate),
                latencies: tally.latencies,
            },
            Row {
                run: format!("publish to receiver, {run}"),
                database,
                per_second: per_second(arrived, arrivals.last.saturating_duration_since(start)),
                latencies: arrivals.latencies.clone(),
                spent: Some(spent),
                operations: arrived,
                remarks: delivery_remarks,
            },
        ],
    })
}

async fn make_endpoints(rig: &Rig, receiver: &Receiver, way: &Way) -> Result<(), Fault> {
    let mut plugin_id = Value::Null;
    let mut keys = (u64::MAX / 2..).map(key);
    let mut next_key = || keys.next().expect("a range without end");
    if let Some(plugin) = &way.plugin {
        let component = if plugin == Path::new("example") {
            EXAMPLE.to_vec()
        } else {
            std::fs::read(plugin).map_err(|error| format!("{}: {error}", plugin.display()))?
        };
        let made = rig.client.post(
            "/plugins?name=bench",
            next_key(),
            "application/wasm",
            component.into(),
        );
        plugin_id = rig.client.call(made).await?["id"].clone();
        ready(rig, &plugin_id).await?;
    }
    for endpoint in 0..way.endpoints {
        let mut body = json!({"url": receiver.url(endpoint), "event_types": ["bench.*"]});
        if !plugin_id.is_null() {
            body["plugin_id"] = plugin_id.clone();
        }
        let made = rig.client.post(
            "/webhook-endpoints",
            next_key(),
            "application/json",
            body.to_string().into(),
        );
        rig.client.call(made).await?;
    }
    Ok(())
}

/// Waits until a plugin's version 1 runs.
async fn ready(rig: &Rig, plugin: &Value) -> Result<(), Fault> {
    let path = format!("/plugins/{}", plugin.as_str().ok_or("a plugin without id")?);
    for _ in 0..1_200 {
        let plugin = rig.client.call(rig.client.get(&path)).await?;
        if plugin["active_version"] == 1 {
            return Ok(());
        }
        if plugin["versions"][0]["status"] == "rejected" {
            return Err(format!("the plugin is rejected: {plugin}").into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Err("the plugin is not ready after a minute".into())
}

fn publishing(rig: &Rig, receiver: Arc<Receiver>) -> Job {
    let client = rig.client.clone();
    Job {
        make: Box::new(move |ticket| {
            let due = receiver.micros(ticket.due);
            let number = ticket.number;
            let start = format!(
                r#"{{"type":"bench.tick","data":{{"id":"tick_{number}","due_micros":{due},"fill":""#
            );
            let fill = PAYLOAD.saturating_sub(start.len() + 3);
            let body = format!(r#"{start}{:x<fill$}"}}}}"#, "");
            client.post("/events", key(number), "application/json", body.into())
        }),
        check: |answer: &Answer| {
            if answer.status == 201 && !answer.replayed {
                Ok(())
            } else {
                Err(answer.complaint())
            }
        },
    }
}

/// Deliveries by state, once none is on its way any more or half a minute has passed.
async fn settled(rig: &Rig) -> Result<Vec<(String, u64)>, Fault> {
    let begun = Instant::now();
    loop {
        let states = rig.store.deliveries(rig.project).await?;
        let open = states
            .iter()
            .any(|(state, count)| matches!(&**state, "pending" | "retrying") && *count > 0);
        if !open || begun.elapsed() > SETTLING {
            return Ok(states);
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// What has to balance.
struct Books {
    /// Events that were accepted, to those that may have been, where no answer came.
    accepted: RangeInclusive<u64>,
    endpoints: u64,
    /// Events in the database.
    events: u64,
    /// Deliveries in the database.
    states: Vec<(String, u64)>,
    /// Attempts that succeeded; with a plugin, those that it had a part in.
    attempts: u64,
    /// Events at the receiver, once for each endpoint.
    arrived: u64,
    /// Requests at the receiver that are no webhook of ours.
    strange: u64,
}

impl Books {
    fn count(&self, of: impl Fn(&str) -> bool) -> u64 {
        let of = self.states.iter().filter(|(state, _)| of(state));
        of.map(|(_, count)| count).sum()
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let delivered = self.count(|state| state == "delivered");
        let known = |state: &str| matches!(state, "delivered" | "dead" | "pending" | "retrying");
        let (accepted, possible) = (self.accepted.start(), self.accepted.end());
        if !self.accepted.contains(&self.events) {
            faults.push(format!(
                "{accepted} to {possible} events were accepted, {} are there",
                self.events
            ));
        }
        let published = self.events * self.endpoints;
        if self.count(known) != published {
            faults.push(format!(
                "{published} published are not delivered + dead + pending: {:?}",
                self.states
            ));
        }
        if self.count(|state| !known(state)) != 0 {
            faults.push(format!("states of no use here: {:?}", self.states));
        }
        if self.arrived != delivered {
            faults.push(format!(
                "{delivered} are delivered, {} came to the receiver",
                self.arrived
            ));
        }
        if self.attempts != delivered {
            faults.push(format!(
                "{delivered} are delivered, by {} attempts",
                self.attempts
            ));
        }
        if self.strange != 0 {
            faults.push(format!("{} strange requests came", self.strange));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::Books;

    fn balanced() -> Books {
        Books {
            accepted: 10..=11,
            endpoints: 2,
            events: 10,
            states: vec![("dead".into(), 1), ("delivered".into(), 19)],
            attempts: 19,
            arrived: 19,
            strange: 0,
        }
    }

    #[test]
    fn books_that_balance_have_no_faults() {
        assert_eq!(balanced().faults(), Vec::<String>::new());
    }

    #[test]
    fn a_run_is_void_when_anything_is_lost() {
        let spoils: [fn(&mut Books); 6] = [
            |books| books.events = 9,
            |books| books.events = 12,
            |books| books.states[0].1 = 0,
            |books| books.states[0].0 = "cancelled".into(),
            |books| books.arrived = 18,
            |books| books.attempts = 18,
        ];
        for (number, spoil) in spoils.into_iter().enumerate() {
            let mut books = balanced();
            spoil(&mut books);
            assert!(!books.faults().is_empty(), "{number}");
        }
    }
}
