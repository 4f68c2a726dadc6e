//! A receiver of webhooks that behaves as badly as a test wants: it reads each request whole, keeps
//! it, and answers with raw bytes.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use url::Url;

/// Listens on loopback until dropped with its runtime.
pub(super) struct Receiver {
    pub address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    connections: Arc<AtomicUsize>,
}

impl Receiver {
    /// Hands every request's connection to `answer`, which gives it back to keep it alive.
    pub async fn start<F>(answer: impl Fn(TcpStream) -> F + Clone + Send + 'static) -> Self
    where
        F: Future<Output = Option<TcpStream>> + Send,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let receiver = Self {
            address: listener.local_addr().unwrap(),
            requests: Arc::default(),
            connections: Arc::default(),
        };
        let (requests, connections) = (receiver.requests.clone(), receiver.connections.clone());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                connections.fetch_add(1, Ordering::SeqCst);
                let (requests, answer) = (requests.clone(), answer.clone());
                tokio::spawn(async move {
                    while let Some(request) = read_request(&mut stream).await {
                        requests.lock().unwrap().push(request);
                        match answer(stream).await {
                            Some(kept) => stream = kept,
                            None => return,
                        }
                    }
                });
            }
        });
        receiver
    }

    /// Answers every request with `bytes` and closes.
    pub async fn answering(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes: Arc<[u8]> = bytes.into().into();
        Self::start(move |mut stream| {
            let bytes = bytes.clone();
            async move {
                let _ = stream.write_all(&bytes).await;
                None
            }
        })
        .await
    }

    pub fn url(&self) -> Url {
        Url::parse(&format!("http://{}/hook", self.address)).unwrap()
    }

    /// All requests so far, as they came.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

/// Head and body of the next request; `None` when the peer has closed.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut read = Vec::new();
    loop {
        if let Some(head) = read.windows(4).position(|window| window == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&read[..head]).to_lowercase();
            let body: usize = text
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "))
                .map_or(0, |len| len.parse().unwrap());
            if read.len() >= head + 4 + body {
                return Some(String::from_utf8(read).unwrap());
            }
        }
        if stream.read_buf(&mut read).await.ok()? == 0 {
            return None;
        }
    }
}
