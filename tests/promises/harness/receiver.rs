//! A tenant's webhook receiver in the test's own process: it records every request byte for byte and
//! answers what the test scripted, down to a broken response or none at all.

use super::{DEADLINE, eventually};
use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

#[derive(Clone, Debug)]
pub struct Received {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub at: SystemTime,
}

impl Received {
    /// The value of a header that must come exactly once.
    #[track_caller]
    pub fn header(&self, name: &str) -> &str {
        let values = self.header_values(name);
        assert_eq!(values.len(), 1, "{name}: {:?}", self.headers);
        values[0]
    }

    pub fn header_values(&self, name: &str) -> Vec<&str> {
        self.headers
            .iter()
            .filter(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
            .collect()
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body in UTF-8")
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a body in JSON")
    }
}

#[derive(Clone, Debug)]
pub enum Reply {
    Respond {
        status: u16,
        headers: Vec<(String, String)>,
        body: Vec<u8>,
        delay: Duration,
    },
    /// These bytes, then the connection closes.
    Raw(Vec<u8>),
    /// 200 and a body that never ends.
    Endless,
    /// Nothing at all, for as long as the sender waits.
    Hang,
    /// The connection closes without an answer.
    Close,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self::Respond {
            status,
            headers: Vec::new(),
            body: Vec::new(),
            delay: Duration::ZERO,
        }
    }

    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        if let Self::Respond { headers, .. } = &mut self {
            headers.push((name.to_owned(), value.to_owned()));
        }
        self
    }

    #[must_use]
    pub fn body(mut self, content: impl Into<Vec<u8>>) -> Self {
        if let Self::Respond { body, .. } = &mut self {
            *body = content.into();
        }
        self
    }

    #[must_use]
    pub fn after(mut self, wait: Duration) -> Self {
        if let Self::Respond { delay, .. } = &mut self {
            *delay = wait;
        }
        self
    }
}

#[derive(Default)]
struct State {
    received: Vec<Received>,
    scripts: HashMap<String, VecDeque<Reply>>,
    always: HashMap<String, Reply>,
}

pub struct Receiver {
    port: u16,
    state: Arc<Mutex<State>>,
    listening: JoinHandle<()>,
}

impl Receiver {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::<Mutex<State>>::default();
        let shared = state.clone();
        let listening = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(converse(stream, shared.clone()));
            }
        });
        Self {
            port,
            state,
            listening,
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// What the next requests to a path get, one each; afterwards 200, or what `always` said.
    pub fn script(&self, path: &str, replies: impl IntoIterator<Item = Reply>) {
        self.with(|state| {
            state
                .scripts
                .entry(path.to_owned())
                .or_default()
                .extend(replies);
        });
    }

    pub fn always(&self, path: &str, reply: Reply) {
        self.with(|state| state.always.insert(path.to_owned(), reply));
    }

    pub fn requests(&self) -> Vec<Received> {
        self.with(|state| state.received.clone())
    }

    pub fn requests_to(&self, path: &str) -> Vec<Received> {
        let mut requests = self.requests();
        requests.retain(|request| request.path == path);
        requests
    }

    /// The first `n` requests to a path, once they are there.
    pub async fn wait_for(&self, path: &str, n: usize) -> Vec<Received> {
        let what = format!("{n} requests to {path}");
        eventually(&what, || {
            let requests = self.requests_to(path);
            async move { (requests.len() >= n).then_some(requests) }
        })
        .await
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().expect("the receiver's state"))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.listening.abort();
        if std::thread::panicking() {
            eprintln!("--- requests that the receiver got");
            for request in self.requests() {
                let attempt = request.header_values("x-delivery-attempt");
                eprintln!("{} {} attempt {attempt:?}", request.method, request.path);
            }
            eprintln!("---");
        }
    }
}

async fn converse(stream: TcpStream, state: Arc<Mutex<State>>) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read_request(&mut stream).await {
        let reply = {
            let mut state = state.lock().expect("the receiver's state");
            let scripted = state
                .scripts
                .get_mut(&request.path)
                .and_then(VecDeque::pop_front);
            let reply = scripted.or_else(|| state.always.get(&request.path).cloned());
            state.received.push(request);
            reply.unwrap_or_else(|| Reply::status(200))
        };
        if !answer(&mut stream, reply).await {
            return;
        }
    }
}

/// One HTTP/1.1 request; none when the other side closes or sends something else.
async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<Received> {
    let first = read_line(stream).await?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    loop {
        let line = read_line(stream).await?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let of = |wanted: &str| {
        headers
            .iter()
            .find(|(name, _)| name == wanted)
            .map(|(_, value)| value.clone())
    };
    let mut body = Vec::new();
    if of("transfer-encoding").is_some() {
        loop {
            let size = usize::from_str_radix(&read_line(stream).await?, 16).ok()?;
            let mut chunk = vec![0; size];
            stream.read_exact(&mut chunk).await.ok()?;
            body.extend(chunk);
            read_line(stream).await?;
            if size == 0 {
                break;
            }
        }
    } else if let Some(length) = of("content-length") {
        body = vec![0; length.parse().ok()?];
        stream.read_exact(&mut body).await.ok()?;
    }
    Some(Received {
        method,
        path,
        headers,
        body,
        at: SystemTime::now(),
    })
}

async fn read_line(stream: &mut BufReader<TcpStream>) -> Option<String> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok().filter(|n| *n > 0)?;
    Some(line.trim_end().to_owned())
}

/// Whether the connection can carry another request.
async fn answer(stream: &mut BufReader<TcpStream>, reply: Reply) -> bool {
    match reply {
        Reply::Respond {
            status,
            headers,
            body,
            delay,
        } => {
            tokio::time::sleep(delay).await;
            let mut head = format!("HTTP/1.1 {status} Scripted\r\n");
            for (name, value) in headers {
                let _ = write!(head, "{name}: {value}\r\n");
            }
            if status != 204 && status != 304 {
                let _ = write!(head, "content-length: {}\r\n", body.len());
            }
            head.push_str("\r\n");
            let mut bytes = head.into_bytes();
            bytes.extend(body);
            stream.write_all(&bytes).await.is_ok()
        }
        Reply::Raw(bytes) => {
            let _ = stream.write_all(&bytes).await;
            let _ = stream.flush().await;
            false
        }
        Reply::Endless => {
            let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n";
            let mut open = stream.write_all(head).await.is_ok();
            while open {
                open = stream.write_all(&[b'x'; 16 * 1024]).await.is_ok();
            }
            false
        }
        Reply::Hang => {
            // Ends when the sender hangs up.
            let _ = tokio::time::timeout(DEADLINE * 10, stream.read(&mut [0; 1])).await;
            false
        }
        Reply::Close => false,
    }
}
