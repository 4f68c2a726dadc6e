//! The real program as a child process.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::sync::oneshot;
use ulid::Ulid;

use crate::Fault;

/// How long the server may take to start, migrations included.
const STARTING: Duration = Duration::from_mins(1);

/// How long the server may take to drain and stop.
const STOPPING: Duration = Duration::from_secs(45);

/// 32 bytes in base64, of databases that live as long as a run.
const MASTER_KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// The program, its folder and its environment.
pub struct Program {
    path: PathBuf,
    folder: PathBuf,
    env: Vec<(String, String)>,
}

impl Program {
    /// `path`, or the `botix` beside this program.
    pub fn new(
        path: Option<&Path>,
        folder: &Path,
        database_url: &str,
        overrides: &[(String, String)],
    ) -> Result<Self, Fault> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => std::env::current_exe()?.with_file_name("botix"),
        };
        let path = path.canonicalize().map_err(|error| {
            format!(
                "{}: {error}; build it with cargo build --release, or name one with --botix",
                path.display()
            )
        })?;
        let mut env: Vec<_> = [
            ("BOTIX_LISTEN", "127.0.0.1:0"),
            ("BOTIX_DATABASE_URL", database_url),
            ("BOTIX_MASTER_KEY", MASTER_KEY),
            ("BOTIX_WEBHOOKS__ALLOW_PRIVATE_TARGETS", "true"),
            ("BOTIX_RATE_LIMIT__REQUESTS", "1000000000"),
            ("NO_COLOR", "1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        env.extend_from_slice(overrides);
        Ok(Self {
            path,
            folder: folder.to_owned(),
            env,
        })
    }

    /// With a clean environment: what the developer has exported must not reach it.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.env_clear();
        for kept in ["PATH", "HOME", "TMPDIR", "RUST_BACKTRACE"] {
            if let Some(value) = std::env::var_os(kept) {
                command.env(kept, value);
            }
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.current_dir(&self.folder).stdin(Stdio::null());
        // Out of the reach of Ctrl-C: this program stops it.
        command.process_group(0);
        command
    }

    /// Makes a project; its id without the prefix, and a key of every scope.
    pub fn create_project(&self) -> Result<(Ulid, String), Fault> {
        let made = self
            .command()
            .args(["project", "create", "--name", "bench"])
            .output()?;
        if !made.status.success() {
            let stderr = String::from_utf8_lossy(&made.stderr);
            return Err(format!("botix project create: {stderr}").into());
        }
        let made: Value = serde_json::from_slice(&made.stdout)?;
        let member = |name: &str| made[name].as_str().ok_or(format!("no {name} in {made}"));
        let id = member("project_id")?;
        let id = id.strip_prefix("prj_").unwrap_or(id);
        Ok((Ulid::from_string(id)?, member("api_key")?.to_owned()))
    }
}

/// Whether the server has its idempotency layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// `botix serve`.
    Full,
    /// The same without the layer, to measure what it costs.
    None,
}

/// A running server; killed when it is dropped.
pub struct Server {
    child: Child,
    log: PathBuf,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Server {
    /// Starts the program and waits until it listens.
    pub async fn start(program: &Program, protection: Protection) -> Result<Self, Fault> {
        let log = program.folder.join("server.log");
        let mut child = program
            .command()
            .arg(match protection {
                Protection::Full => "serve",
                Protection::None => "serve-unprotected",
            })
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        let stdout = child.stdout.take().ok_or("no pipe to the server")?;
        let mut server = Self {
            child,
            log,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
        };
        let (first, line) = oneshot::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout).lines();
            let _ = first.send(lines.next());
            // Reads on, so that the server never blocks on a full pipe.
            lines.for_each(drop);
        });
        let line = tokio::time::timeout(STARTING, line)
            .await
            .map_err(|_| "the server does not say within 60 s where it listens")??;
        let Some(line) = line else {
            let log = fs::read_to_string(&server.log).unwrap_or_default();
            return Err(format!("the server does not start: {log}").into());
        };
        let line = line?;
        server.address = line
            .strip_prefix("listening on http://")
            .ok_or_else(|| format!("the server does not say where it listens but {line:?}"))?
            .trim()
            .parse()?;
        if !server.address.ip().is_loopback() {
            return Err("load goes to loopback only".into());
        }
        Ok(server)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to stop, and says what was wrong with it.
    pub async fn stop(mut self) -> Result<Vec<String>, Fault> {
        let mut wrong = Vec::new();
        if let Some(status) = self.child.try_wait()? {
            wrong.push(format!("the server ended by itself: {status}"));
        } else {
            let pid = i32::try_from(self.child.id())?;
            kill_process(
                Pid::from_raw(pid).ok_or("a process without an id")?,
                Signal::TERM,
            )?;
            let begun = Instant::now();
            loop {
                match self.child.try_wait()? {
                    Some(status) if status.success() => break,
                    Some(status) => {
                        wrong.push(format!("the server ended with {status}"));
                        break;
                    }
                    None if begun.elapsed() > STOPPING => {
                        wrong.push("the server did not stop within 45 s of SIGTERM".to_owned());
                        break;
                    }
                    None => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        }
        wrong.extend(self.complaints()?);
        Ok(wrong)
    }

    /// Warnings and errors in its log: how many, and the first few.
    fn complaints(&self) -> Result<Vec<String>, Fault> {
        let log = fs::read_to_string(&self.log)?;
        let complaints: Vec<&str> = log
            .lines()
            .filter(|line| {
                ["WARN", "ERROR", "panicked"]
                    .iter()
                    .any(|bad| line.contains(bad))
            })
            .collect();
        let mut said = Vec::new();
        if !complaints.is_empty() {
            said.push(format!(
                "the server's log has {} warnings and errors",
                complaints.len()
            ));
            let first = complaints.iter().take(5).map(ToString::to_string);
            said.extend(first);
        }
        Ok(said)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Nothing to do if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
