//! A tenant's webhook receiver: answers 200 to everything and remembers what came, or lets it hang.
//!
//! A webhook of a load carries in its data the moment at which its event was due to be published, on
//! this process's clock, and every webhook in its path the number of its endpoint. The time of arrival
//! is taken when the head of the request is there, before its body is read. While the gate is shut,
//! requests are taken and not answered; what hangs counts as come when it has its answer.

use std::{
    collections::HashSet,
    convert::Infallible,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    HeaderMap, Request, Response, Uri, body::Incoming, server::conn::http1, service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use ulid::Ulid;

use crate::{Fault, figures::Latencies};

/// How long nothing new may come before nobody waits any longer.
pub const STALL: Duration = Duration::from_secs(30);

/// What came.
#[derive(Debug)]
pub struct Arrivals {
    start: Instant,
    since: Instant,
    seen: HashSet<(u16, Ulid)>,
    /// Webhooks that came once more.
    pub repeated: u64,
    /// Requests that are no webhook of this program.
    pub strange: u64,
    /// From the moment an event was due to the first webhook of it at each endpoint; of events that
    /// were due since the last beginning.
    pub latencies: Latencies,
    /// When the last new one came.
    pub last: Instant,
}

impl Arrivals {
    fn new(start: Instant) -> Self {
        Self {
            start,
            since: start,
            seen: HashSet::new(),
            repeated: 0,
            strange: 0,
            latencies: Latencies::default(),
            last: start,
        }
    }

    /// Events that came, once for each endpoint that got them.
    pub fn distinct(&self) -> u64 {
        self.seen.len() as u64
    }

    fn record(&mut self, uri: &Uri, headers: &HeaderMap, at: Instant, body: &[u8]) {
        #[derive(Deserialize)]
        struct Webhook {
            data: Data,
        }
        #[derive(Deserialize)]
        struct Data {
            due_micros: Option<u64>,
        }
        let endpoint = uri.path().trim_start_matches('/').parse().ok();
        let event = headers
            .get("webhook-id")
            .and_then(|id| id.to_str().ok()?.strip_prefix("evt_"))
            .and_then(|id| Ulid::from_string(id).ok());
        let (Some(endpoint), Some(event), Ok(webhook)) =
            (endpoint, event, serde_json::from_slice::<Webhook>(body))
        else {
            self.strange += 1;
            return;
        };
        if !self.seen.insert((endpoint, event)) {
            self.repeated += 1;
            return;
        }
        if let Some(due) = webhook.data.due_micros {
            let due = self.start + Duration::from_micros(due);
            if due >= self.since {
                self.latencies.record(at.saturating_duration_since(due));
            }
        }
        self.last = at;
    }
}

/// What all connections of a receiver have in common.
#[derive(Debug)]
struct Shared {
    arrivals: Mutex<Arrivals>,
    hanging: AtomicU64,
}

impl Shared {
    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A receiver on a free port of loopback, for as long as it lives.
pub struct Receiver {
    shared: Arc<Shared>,
    open: watch::Sender<bool>,
    port: u16,
    start: Instant,
    accepting: JoinHandle<()>,
}

impl Receiver {
    /// Starts one that answers.
    pub async fn start() -> Result<Self, Fault> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let start = Instant::now();
        let shared = Arc::new(Shared {
            arrivals: Mutex::new(Arrivals::new(start)),
            hanging: AtomicU64::new(0),
        });
        let (open, gate) = watch::channel(true);
        let accepting = tokio::spawn(accept(listener, shared.clone(), gate));
        Ok(Self {
            shared,
            open,
            port,
            start,
            accepting,
        })
    }

    /// The URL of an endpoint.
    pub fn url(&self, endpoint: u16) -> String {
        format!("http://127.0.0.1:{}/{endpoint}", self.port)
    }

    /// A moment on the clock that webhooks carry.
    pub fn micros(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.start);
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }

    /// Answers what hangs and what comes, or lets it hang from now on.
    pub fn answer(&self, answers: bool) {
        self.open.send_replace(answers);
    }

    /// Requests that hang now.
    pub fn hanging(&self) -> u64 {
        self.shared.hanging.load(Ordering::Relaxed)
    }

    /// What came so far.
    pub fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.shared.arrivals()
    }

    /// Begins to measure: what was due before has no latency any more.
    pub fn begin(&self) {
        let mut arrivals = self.arrivals();
        arrivals.latencies = Latencies::default();
        // As exact as what webhooks carry.
        arrivals.since = self.start + Duration::from_micros(self.micros(Instant::now()));
    }

    /// Waits until `count` events came, or until none comes for `stall`, or until `limit`.
    pub async fn wait(&self, count: u64, limit: Duration, stall: Duration) {
        let begun = Instant::now();
        let (mut before, mut since) = (0, begun);
        while begun.elapsed() < limit && since.elapsed() < stall {
            let distinct = self.arrivals().distinct();
            if distinct >= count {
                return;
            }
            if distinct > before {
                (before, since) = (distinct, Instant::now());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, gate: watch::Receiver<bool>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                eprintln!("the receiver cannot accept: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // Without it answers are only slower.
        let _ = stream.set_nodelay(true);
        let (shared, gate) = (shared.clone(), gate.clone());
        let service = service_fn(move |request| answer(request, shared.clone(), gate.clone()));
        // How a connection ends is the server's affair: what got lost shows in the books.
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(
    request: Request<Incoming>,
    shared: Arc<Shared>,
    mut gate: watch::Receiver<bool>,
) -> Result<Response<Empty<Bytes>>, Infallible> {
    let at = Instant::now();
    let (head, body) = request.into_parts();
    if let Ok(body) = body.collect().await {
        if !*gate.borrow() {
            // Ends also when the server hangs up: then this is dropped.
            let _hangs = Hanging::begin(&shared.hanging);
            // The gate is gone only when its receiver is.
            let _ = gate.wait_for(|open| *open).await;
        }
        shared
            .arrivals()
            .record(&head.uri, &head.headers, at, &body.to_bytes());
    }
    Ok(Response::new(Empty::new()))
}

/// A request that hangs, until dropped.
struct Hanging<'a>(&'a AtomicU64);

impl<'a> Hanging<'a> {
    fn begin(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use hyper::{HeaderMap, Uri};

    use super::Arrivals;

    #[test]
    fn each_event_counts_once_at_each_endpoint() {
        let start = Instant::now();
        let mut arrivals = Arrivals::new(start);
        let mut headers = HeaderMap::new();
        headers.insert(
            "webhook-id",
            "evt_01K00000000000000000000000".parse().unwrap(),
        );
        let at = start + Duration::from_millis(7);
        let body = br#"{"data":{"due_micros":2000}}"#;
        let mut record = |path: &'static str, headers: &HeaderMap, body: &[u8]| {
            arrivals.record(&Uri::from_static(path), headers, at, body);
        };
        record("/0", &headers, body);
        record("/0", &headers, body);
        record("/1", &headers, br#"{"data":{}}"#);
        record("/x", &headers, body);
        record("/0", &HeaderMap::new(), body);
        assert_eq!(
            (arrivals.distinct(), arrivals.repeated, arrivals.strange),
            (2, 1, 2)
        );
        assert_eq!(arrivals.latencies.count(), 1);
        assert!((arrivals.latencies.max() - 5.0).abs() < 0.1);

        arrivals.since = start + Duration::from_millis(3);
        arrivals.record(&Uri::from_static("/2"), &headers, at, body);
        assert_eq!((arrivals.distinct(), arrivals.latencies.count()), (3, 1));
    }
}
