//! A Redis of a test's own, which it may flush, pause, kill and start again.

use super::eventually;
use std::process::{Child, Command, Stdio};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub struct Redis {
    port: u16,
    server: Option<Child>,
}

impl Redis {
    pub async fn start() -> Self {
        // Another process may take a port between the choice and the start: then it is the next one.
        for _ in 0..20 {
            let port = 20_000 + rand::random::<u16>() % 12_000;
            let mut redis = Self { port, server: None };
            redis.spawn();
            if redis.is_up().await {
                return redis;
            }
        }
        panic!("redis-server did not start; tests/run installs it");
    }

    fn spawn(&mut self) {
        let port = self.port.to_string();
        let server = Command::new("redis-server")
            .args(["--port", &port, "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server starts; tests/run installs it");
        self.server = Some(server);
    }

    /// Waits until it answers; false when it ended instead.
    async fn is_up(&mut self) -> bool {
        eventually("Redis answers or ends", async || {
            let server = self.server.as_mut().expect("a server");
            if server.try_wait().expect("a child").is_some() {
                return Some(false);
            }
            let id = server.id().to_string();
            // Another server may have the port, and ours is about to end: then its answer counts for nothing.
            let info = self.exchange("INFO server", "process_id:").await?;
            let pid = info.split("process_id:").nth(1)?.split('\r').next()?;
            (pid == id).then_some(true)
        })
        .await
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The first line of the answer to a command.
    pub async fn command(&self, command: &str) -> String {
        let answer = self.try_command(command).await;
        answer.unwrap_or_else(|| panic!("Redis answers {command}"))
    }

    async fn try_command(&self, command: &str) -> Option<String> {
        let answer = self.exchange(command, "").await?;
        answer.split('\r').next().map(str::to_owned)
    }

    /// Sends a command and reads until `what` and the end of its line are there.
    async fn exchange(&self, command: &str, what: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.address()).await.ok()?;
        let line = format!("{command}\r\n");
        stream.write_all(line.as_bytes()).await.ok()?;
        let mut answer = String::new();
        loop {
            let mut buffer = [0; 4096];
            let length = stream.read(&mut buffer).await.ok()?;
            if length == 0 {
                return None;
            }
            answer += &String::from_utf8_lossy(&buffer[..length]);
            let whole = answer
                .split_once(what)
                .is_some_and(|(_, rest)| rest.contains('\n'));
            if whole {
                return Some(answer);
            }
        }
    }

    /// How many keys it holds.
    pub async fn keys(&self) -> usize {
        let size = self.command("DBSIZE").await;
        let size = size.strip_prefix(':').and_then(|size| size.parse().ok());
        size.expect("a number of keys")
    }

    /// Loses its memory.
    pub async fn flush(&self) {
        assert_eq!(self.command("FLUSHALL").await, "+OK");
    }

    pub fn kill9(&mut self) {
        let mut server = self.server.take().expect("a running Redis");
        server.kill().expect("kill -9");
        server.wait().expect("an end");
    }

    /// Starts again where it was, with nothing in its memory.
    pub async fn restart(&mut self) {
        assert!(self.server.is_none(), "it still runs");
        self.spawn();
        assert!(self.is_up().await, "Redis starts again");
    }

    /// Stops answering without closing anything.
    pub fn pause(&self) {
        self.signal("-STOP");
    }

    pub fn resume(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let server = self.server.as_ref().expect("a running Redis");
        let sent = Command::new("sh")
            .args(["-c", "kill \"$0\" \"$1\"", signal, &server.id().to_string()])
            .status()
            .expect("a shell");
        assert!(sent.success());
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
