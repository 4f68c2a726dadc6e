//! A wire with faults: in front of the server (an answer that never arrives) or between the server and
//! `PostgreSQL` or Redis (a store that is slow, gone, or silent).

use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Everything passes.
    Whole,
    /// Everything passes, later.
    Delayed(Duration),
    /// What is open is closed, what is new is closed at once.
    Cut,
    /// What is open stays open, but not a byte passes; what was held passes afterwards.
    Frozen,
    /// What is sent is lost, both ways, and nothing is closed: what was open never works again.
    Blackhole,
    /// The far side of what is open is closed, and the near side never hears of it.
    HalfOpen,
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
    let (mut from_client, mut to_client) = client.into_split();
    let is_half_open = {
        let Ok(server) = TcpStream::connect(&*target).await else {
            return;
        };
        let (mut from_server, mut to_server) = server.into_split();
        let (mut half_open, mut cut) = (wire.clone(), wire.clone());
        tokio::select! {
            () = pass(&mut from_client, &mut to_server, wire.clone(), false) => false,
            () = pass(&mut from_server, &mut to_client, wire.clone(), true) => false,
            _ = half_open.wait_for(|wire| *wire == Wire::HalfOpen) => true,
            _ = cut.wait_for(|wire| *wire == Wire::Cut) => false,
        }
        // The halves of the server go here, and with them its side is closed.
    };
    if is_half_open {
        let mut cut = wire;
        let _ = cut.wait_for(|wire| *wire == Wire::Cut).await;
    }
}

async fn pass(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    mut wire: watch::Receiver<Wire>,
    answers: bool,
) {
    let mut buffer = vec![0; 64 * 1024];
    let mut lost = false;
    loop {
        let Ok(length @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        let Ok(now) = wire
            .wait_for(|wire| *wire != Wire::Frozen)
            .await
            .map(|now| *now)
        else {
            return;
        };
        match now {
            Wire::AnswersLost if answers => return,
            Wire::Blackhole => lost = true,
            Wire::Delayed(delay) => tokio::time::sleep(delay).await,
            _ => {}
        }
        if !lost && to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
