//! The tenant's webhook receiver: answers 200 to everything and remembers what came.
//!
//! Every webhook carries in its data the moment at which its event was due to be published, on this
//! process's clock, and in its path the number of its endpoint. The time of arrival is taken when the
//! head of the request is there, before its body is read.

use std::{
    collections::HashSet,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::{net::TcpListener, task::JoinHandle};

use crate::{Fault, figures::Latencies};

/// What came.
#[derive(Debug)]
pub struct Arrivals {
    start: Instant,
    seen: HashSet<(String, String)>,
    /// Webhooks that came once more.
    pub repeated: u64,
    /// Requests that are no webhook of this program.
    pub strange: u64,
    /// From the moment an event was due to the first webhook of it at each endpoint.
    pub latencies: Latencies,
    /// When the last new one came.
    pub last: Instant,
}

impl Arrivals {
    /// Events that came, once for each endpoint that got them.
    pub fn distinct(&self) -> u64 {
        self.seen.len() as u64
    }

    fn record(&mut self, endpoint: &str, event: Option<&str>, at: Instant, body: &[u8]) {
        #[derive(Deserialize)]
        struct Webhook {
            data: Data,
        }
        #[derive(Deserialize)]
        struct Data {
            due_micros: u64,
        }
        let (Some(event), Ok(webhook)) = (event, serde_json::from_slice::<Webhook>(body)) else {
            self.strange += 1;
            return;
        };
        if !self.seen.insert((endpoint.to_owned(), event.to_owned())) {
            self.repeated += 1;
            return;
        }
        let due = self.start + Duration::from_micros(webhook.data.due_micros);
        self.latencies.record(at.saturating_duration_since(due));
        self.last = at;
    }
}

/// A receiver on a free port of loopback, for as long as it lives.
pub struct Receiver {
    arrivals: Arc<Mutex<Arrivals>>,
    port: u16,
    start: Instant,
    accepting: JoinHandle<()>,
}

impl Receiver {
    /// Starts it.
    pub async fn start() -> Result<Self, Fault> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let start = Instant::now();
        let arrivals = Arc::new(Mutex::new(Arrivals {
            start,
            seen: HashSet::new(),
            repeated: 0,
            strange: 0,
            latencies: Latencies::default(),
            last: start,
        }));
        let accepting = tokio::spawn(accept(listener, arrivals.clone()));
        Ok(Self {
            arrivals,
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

    /// What came so far.
    pub fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `count` events came, or until none comes for half a minute, or until `limit`.
    pub async fn wait(&self, count: u64, limit: Duration) {
        let begun = Instant::now();
        let (mut before, mut since) = (0, begun);
        while begun.elapsed() < limit && since.elapsed() < Duration::from_secs(30) {
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

async fn accept(listener: TcpListener, arrivals: Arc<Mutex<Arrivals>>) {
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
        let arrivals = arrivals.clone();
        let service = service_fn(move |request| answer(request, arrivals.clone()));
        // How a connection ends is the server's affair: what got lost shows in the books.
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(
    request: Request<Incoming>,
    arrivals: Arc<Mutex<Arrivals>>,
) -> Result<Response<Empty<Bytes>>, Infallible> {
    let at = Instant::now();
    let (head, body) = request.into_parts();
    if let Ok(body) = body.collect().await {
        let event = head.headers.get("webhook-id");
        let event = event.and_then(|id| id.to_str().ok());
        arrivals
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .record(head.uri.path(), event, at, &body.to_bytes());
    }
    Ok(Response::new(Empty::new()))
}
