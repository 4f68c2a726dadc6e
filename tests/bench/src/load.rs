//! Sends requests, on a schedule or as fast as the connections go, and keeps the books.
//!
//! Open loop: a thread of its own deals out tickets at their scheduled moments into a queue, and any
//! free connection takes the next one. Latency counts from the ticket's moment, so the time it spends
//! in the queue because every connection waits for the server is part of it. (The thread sleeps to
//! some 0.1 ms; the timers of an async run time only to a millisecond.) Closed loop: each connection
//! makes its next ticket when it has its answer.

use std::{
    collections::BTreeMap,
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use tokio::{
    sync::{Mutex, mpsc},
    task::JoinSet,
};

use crate::{
    Fault,
    client::{Answer, Client, Connection},
    figures::{Latencies, float, per_second},
};

/// How long after the last scheduled moment tickets are still sent; later ones count as errors.
const GRACE: Duration = Duration::from_secs(30);

/// Failures in a row after which a connection takes the server for gone.
const GONE: u32 = 50;

/// One request to be made.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    /// Its number, from [`Plan::first`] on, without gaps.
    pub number: u64,
    /// When it is to be sent.
    pub due: Instant,
}

/// How much to send, and how fast.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Requests per second; `None`: as fast as the connections go.
    pub rate: Option<f64>,
    /// How long.
    pub time: Duration,
    /// The most requests.
    pub limit: u64,
    /// How many connections.
    pub connections: u16,
    /// The number of the first ticket.
    pub first: u64,
}

/// What to send, and what to take for success.
pub struct Job {
    /// Makes the request of a ticket.
    pub make: Box<dyn Fn(Ticket) -> Request<Full<Bytes>> + Send + Sync>,
    /// Says what is wrong with an answer.
    pub check: fn(&Answer) -> Result<(), String>,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Tally {
    /// Requests that got the answer they should.
    pub done: u64,
    /// Requests without an answer: nobody knows whether the server did the work.
    pub unknown: u64,
    /// Everything else than success, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Of the requests that succeeded, from the moment they were due.
    pub latencies: Latencies,
    /// From that moment until they were sent.
    pub waits: Latencies,
    /// From the start to the last answer.
    pub time: Duration,
    /// The number after the last ticket's.
    pub next: u64,
}

impl Tally {
    /// Successes per second.
    pub fn rate(&self) -> f64 {
        per_second(self.done, self.time)
    }

    fn error(&mut self, kind: String) {
        *self.errors.entry(kind).or_default() += 1;
    }

    /// Adds what another connection of the same load came to.
    fn add(&mut self, other: Self) {
        self.done += other.done;
        self.unknown += other.unknown;
        for (kind, count) in other.errors {
            *self.errors.entry(kind).or_default() += count;
        }
        self.latencies.add(&other.latencies);
        self.waits.add(&other.waits);
        self.time = self.time.max(other.time);
        self.next = self.next.max(other.next);
    }

    /// Adds what a load after this one came to.
    pub fn then(&mut self, other: Self) {
        let time = self.time + other.time;
        self.add(other);
        self.time = time;
    }
}

enum Tickets {
    Queue(Mutex<mpsc::UnboundedReceiver<Ticket>>),
    Counter {
        next: AtomicU64,
        last: u64,
        end: Instant,
    },
}

impl Tickets {
    async fn next(&self) -> Option<Ticket> {
        match self {
            Self::Queue(queue) => queue.lock().await.recv().await,
            Self::Counter { next, last, end } => {
                let due = Instant::now();
                if due >= *end {
                    return None;
                }
                let number = next.fetch_add(1, Ordering::Relaxed);
                (number < *last).then_some(Ticket { number, due })
            }
        }
    }
}

/// Sends what the plan says. All connections are open before the first ticket is due.
pub async fn run(client: &Client, plan: Plan, job: &Arc<Job>) -> Result<Tally, Fault> {
    let mut connections = Vec::new();
    for _ in 0..plan.connections {
        connections.push(client.connect().await?);
    }
    let start = Instant::now();
    let end = start + plan.time;
    let tickets = Arc::new(match plan.rate {
        Some(rate) => Tickets::Queue(Mutex::new(deal(plan, rate, start))),
        None => Tickets::Counter {
            next: AtomicU64::new(plan.first),
            last: plan.first.saturating_add(plan.limit),
            end,
        },
    });
    let mut workers = JoinSet::new();
    for connection in connections {
        workers.spawn(work(
            connection,
            tickets.clone(),
            job.clone(),
            start,
            end + GRACE,
        ));
    }
    let mut tally = Tally {
        next: plan.first,
        ..Tally::default()
    };
    while let Some(worker) = workers.join_next().await {
        tally.add(worker?);
    }
    Ok(tally)
}

/// Puts each ticket into the queue when it is due; ends early when nobody takes them any more.
fn deal(plan: Plan, rate: f64, start: Instant) -> mpsc::UnboundedReceiver<Ticket> {
    let (sender, receiver) = mpsc::unbounded_channel();
    thread::spawn(move || {
        // The kernel may wake a thread 50 µs late, to wake several at once; without leave it does not
        // matter.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        for number in 0..plan.limit {
            let after = Duration::from_secs_f64(float(number) / rate);
            if after >= plan.time {
                break;
            }
            let due = start + after;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let number = plan.first + number;
            if sender.send(Ticket { number, due }).is_err() {
                break;
            }
        }
    });
    receiver
}

async fn work(
    mut connection: Connection,
    tickets: Arc<Tickets>,
    job: Arc<Job>,
    start: Instant,
    too_late: Instant,
) -> Tally {
    let mut tally = Tally::default();
    let mut failures = 0;
    while let Some(ticket) = tickets.next().await {
        tally.next = ticket.number + 1;
        let sent = Instant::now();
        if sent > too_late || failures >= GONE {
            tally.error("never sent".to_owned());
            if matches!(*tickets, Tickets::Counter { .. }) {
                break;
            }
            continue;
        }
        tally
            .waits
            .record(sent.saturating_duration_since(ticket.due));
        let answer = connection.send((job.make)(ticket)).await;
        let answered = Instant::now();
        tally.time = answered - start;
        match answer {
            Ok(answer) => {
                failures = 0;
                match (job.check)(&answer) {
                    Ok(()) => {
                        tally.done += 1;
                        tally
                            .latencies
                            .record(answered.saturating_duration_since(ticket.due));
                    }
                    Err(kind) => tally.error(kind),
                }
            }
            Err(fault) => {
                failures += 1;
                tally.unknown += 1;
                tally.error(format!("no answer: {fault}"));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    tally
}
