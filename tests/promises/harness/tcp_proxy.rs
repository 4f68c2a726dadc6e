//! A wire that a test can cut: in front of the server (an answer that never arrives) or between the
//! server and `PostgreSQL` (a store out of reach).

use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Everything passes.
    Whole,
    /// What is open is closed, what is new is closed at once.
    Cut,
    /// What is open stays open, but not a byte passes.
    Frozen,
    /// Requests pass; with the first byte of the answer the client's side is closed.
    AnswersLost,
}

pub struct TcpProxy {
    pub port: u16,
    wire: watch::Sender<Wire>,
    listening: JoinHandle<()>,
}

impl TcpProxy {
    pub async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let (wire, state) = watch::channel(Wire::Whole);
        let target: Arc<str> = target.into();
        let listening = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *state.borrow() != Wire::Cut {
                    tokio::spawn(carry(client, target.clone(), state.clone()));
                }
            }
        });
        Self {
            port,
            wire,
            listening,
        }
    }

    pub fn set(&self, wire: Wire) {
        self.wire.send_replace(wire);
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.set(Wire::Cut);
        self.listening.abort();
    }
}

async fn carry(client: TcpStream, target: Arc<str>, wire: watch::Receiver<Wire>) {
    let Ok(server) = TcpStream::connect(&*target).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let mut cut = wire.clone();
    tokio::select! {
        // Dropping all four halves closes both sides.
        () = pass(from_client, to_server, wire.clone(), false) => {}
        () = pass(from_server, to_client, wire, true) => {}
        _ = cut.wait_for(|wire| *wire == Wire::Cut) => {}
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut wire: watch::Receiver<Wire>,
    answers: bool,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(length @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        if wire.wait_for(|wire| *wire != Wire::Frozen).await.is_err() {
            return;
        }
        if answers && *wire.borrow() == Wire::AnswersLost {
            return;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
