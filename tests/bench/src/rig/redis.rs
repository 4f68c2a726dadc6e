//! A private Redis without persistence, on a free port of loopback.

use std::{
    net::{TcpListener, TcpStream},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::Fault;

/// How long it may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

/// A running Redis; killed when it is dropped.
pub struct Redis {
    child: Child,
    port: u16,
}

impl Redis {
    /// Starts it.
    pub async fn start(folder: &Path) -> Result<Self, Fault> {
        // The port is free now but may be taken before Redis has it; then the next one is tried.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let child = Command::new("redis-server")
                .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--save", "", "--appendonly", "no"])
                .current_dir(folder)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .process_group(0)
                .spawn()
                .map_err(|error| format!("redis-server: {error}"))?;
            let mut redis = Self { child, port };
            if redis.ready().await? {
                return Ok(redis);
            }
        }
        Err("redis-server does not start".into())
    }

    /// Waits until it takes connections; false when it ended instead.
    async fn ready(&mut self) -> Result<bool, Fault> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if self.child.try_wait()?.is_some() {
                return Ok(false);
            }
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return Ok(true);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err("redis-server takes no connection".into())
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // Nothing to do if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
