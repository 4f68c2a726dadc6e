//! The real program as a child process, on a free port, with a store of its own.

use super::api::Api;
use super::command::{MASTER_KEY, program};
use super::postgres::Database;
use super::redis::Redis;
use super::tcp_proxy::{TcpProxy, Wire};
use super::{Backend, eventually};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A store with settings, before a server runs on it.
pub struct Setup {
    backend: Backend,
    folder: TempDir,
    database: Option<Database>,
    redis: Option<Redis>,
    to_postgres: Option<TcpProxy>,
    to_redis: Option<TcpProxy>,
    env: Vec<(String, String)>,
}

/// What the wires of [`Backend::PostgresAndRedis`] add to each way, unless a test says otherwise.
const DELAY: Wire = Wire::Delayed(Duration::from_millis(1));

impl Setup {
    pub async fn new(backend: Backend) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("promise-")
            .tempdir()
            .expect("a temporary folder");
        let database = match backend {
            Backend::Sqlite => None,
            Backend::Postgres | Backend::PostgresAndRedis => Some(Database::create().await),
        };
        let url = match &database {
            None => format!("sqlite:{}", folder.path().join("botix.db").display()),
            Some(database) => database.url(None),
        };
        let setup = Self {
            backend,
            folder,
            database,
            redis: None,
            to_postgres: None,
            to_redis: None,
            env: Vec::new(),
        }
        .env("BOTIX_DATABASE_URL", &url)
        .env("BOTIX_MASTER_KEY", MASTER_KEY)
        .env("BOTIX_WEBHOOKS__ALLOW_PRIVATE_TARGETS", "true")
        // Often enough that what is lost is found while a test runs.
        .env("BOTIX_SWEEP_EVERY", "2s");
        if backend != Backend::PostgresAndRedis {
            return setup;
        }
        let setup = setup.wired().await;
        let (mut setup, to_redis) = setup.with_redis(Redis::start().await).await;
        to_redis.set(DELAY);
        setup.to_redis = Some(to_redis);
        setup.to_postgres.as_ref().expect("a wire").set(DELAY);
        setup
    }

    /// Leads the server to its `PostgreSQL`, where it has one, over a wire that it keeps.
    pub async fn wired(self) -> Self {
        if self.database.is_none() || self.to_postgres.is_some() {
            return self;
        }
        let (mut setup, wire) = self.over_a_wire().await;
        setup.to_postgres = Some(wire);
        setup
    }

    /// Gives the server a Redis, over a wire that can be cut.
    pub async fn with_redis(mut self, redis: Redis) -> (Self, TcpProxy) {
        let proxy = TcpProxy::start(redis.address()).await;
        self.redis = Some(redis);
        let url = format!("redis://127.0.0.1:{}", proxy.port);
        (self.env("BOTIX_REDIS_URL", &url), proxy)
    }

    /// Sets a variable of the server's environment, in place of an earlier value.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Leads the server to `PostgreSQL` over a wire that can be cut.
    pub async fn over_a_wire(self) -> (Self, TcpProxy) {
        let database = self.database.as_ref().expect("a wire is for PostgreSQL");
        let proxy = TcpProxy::start(database.address()).await;
        let url = database.url(Some(proxy.port));
        (self.env("BOTIX_DATABASE_URL", &url), proxy)
    }

    pub async fn start(self) -> TestServer {
        let mut server = TestServer {
            backend: self.backend,
            folder: self.folder,
            database: self.database,
            redis: self.redis,
            to_postgres: self.to_postgres,
            to_redis: self.to_redis,
            env: self.env,
            child: None,
            port: 0,
            faults: FAULTS,
        };
        server.serve(&[]).await;
        server
    }
}

pub struct TestServer {
    pub backend: Backend,
    pub port: u16,
    folder: TempDir,
    pub(super) database: Option<Database>,
    redis: Option<Redis>,
    to_postgres: Option<TcpProxy>,
    to_redis: Option<TcpProxy>,
    env: Vec<(String, String)>,
    child: Option<Child>,
    /// What no log may say in the end.
    faults: &'static [&'static str],
}

/// What the sweep logs when it counts `botix_webhook_lost_jobs_total`, and what a panic says.
const FAULTS: &[&str] = &["deliveries were due and had no job", "panicked"];

/// A project, and a client that speaks for it with every scope.
pub struct Project {
    pub id: String,
    pub api: Api,
}

impl TestServer {
    pub async fn start(backend: Backend, overrides: &[(&str, &str)]) -> Self {
        let mut setup = Setup::new(backend).await;
        for (name, value) in overrides {
            setup = setup.env(name, value);
        }
        setup.start().await
    }

    /// Waits until the server executes a mutation, as its metrics tell.
    pub async fn at_work(&self) {
        let http = reqwest::Client::new();
        let url = format!("{}/metrics", self.url());
        eventually("a mutation is in flight", async || {
            let page = http.get(&url).send().await.expect("metrics");
            let text = page.text().await.expect("text");
            text.lines()
                .any(|line| line == "botix_mutations_in_flight 1")
                .then_some(())
        })
        .await;
    }

    /// Somebody is about to take jobs away: they will be missed.
    pub fn expects_lost_jobs(&mut self) {
        self.faults = &[];
    }

    /// The Redis of this server.
    pub fn redis(&mut self) -> &mut Redis {
        self.redis.as_mut().expect("a server with Redis")
    }

    /// The wire to `PostgreSQL` of a setup that keeps it.
    pub fn to_postgres(&self) -> &TcpProxy {
        self.to_postgres.as_ref().expect("a wire to PostgreSQL")
    }

    /// The wire to Redis of [`Backend::PostgresAndRedis`].
    pub fn to_redis(&self) -> &TcpProxy {
        self.to_redis.as_ref().expect("a wire to Redis")
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    async fn serve(&mut self, arguments: &[&str]) {
        let mut child = self.spawn(self.port, arguments);
        self.port = listening_port(&mut child).await;
        self.child = Some(child);
    }

    fn spawn(&self, port: u16, arguments: &[&str]) -> Child {
        self.spawn_with(port, arguments, &[])
    }

    fn spawn_with(&self, port: u16, arguments: &[&str], overrides: &[(&str, &str)]) -> Child {
        let stderr = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.stderr_path())
            .expect("a file for stderr");
        self.command()
            .arg("serve")
            .args(arguments)
            .env("BOTIX_LISTEN", format!("127.0.0.1:{port}"))
            .envs(overrides.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .expect("the program starts")
    }

    /// Starts it again on the same store and the same port.
    pub async fn restart(&mut self) {
        self.restart_with(&[]).await;
    }

    pub async fn restart_with(&mut self, arguments: &[&str]) {
        assert!(self.child.is_none(), "it still runs");
        self.serve(arguments).await;
    }

    /// A second process on the same store, on a port of its own; killed when the guard goes.
    pub fn second_process(&self, arguments: &[&str]) -> SecondProcess {
        SecondProcess(self.spawn(0, arguments))
    }

    /// The same, with some settings of its own.
    pub fn second_process_with(
        &self,
        arguments: &[&str],
        overrides: &[(&str, &str)],
    ) -> SecondProcess {
        SecondProcess(self.spawn_with(0, arguments, overrides))
    }

    /// Another node on the same stores; killed when it is dropped.
    pub async fn second_node(&self) -> Node {
        self.second_node_with(&[]).await
    }

    /// Another node, with some settings of its own.
    pub async fn second_node_with(&self, overrides: &[(&str, &str)]) -> Node {
        let mut child = self.spawn_with(0, &[], overrides);
        let port = listening_port(&mut child).await;
        Node {
            port,
            _process: SecondProcess(child),
        }
    }

    /// Stops the process where it is, until it is let on.
    pub fn pause(&self) {
        self.signal("-STOP");
    }

    pub fn resume(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let child = self.child.as_ref().expect("a running server");
        let sent = Command::new("sh")
            .args(["-c", "kill \"$0\" \"$1\"", signal, &child.id().to_string()])
            .status()
            .expect("a shell");
        assert!(sent.success());
    }

    pub fn kill9(&mut self) {
        let mut child = self.child.take().expect("a running server");
        child.kill().expect("kill -9");
        child.wait().expect("an end");
    }

    /// Asks it to stop with SIGTERM, without waiting for the end.
    pub fn terminate(&self) {
        self.signal("-TERM");
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("a running server");
        eventually("the server ends", || {
            let status = child.try_wait().expect("a child");
            async move { status }
        })
        .await
    }

    /// SIGTERM, and waits for a clean end.
    pub async fn stop(&mut self) {
        self.terminate();
        let status = self.ended().await;
        assert!(status.success(), "SIGTERM ends with {status}");
    }

    fn command(&self) -> Command {
        let mut command = program();
        command.current_dir(self.folder.path());
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Another command of the program on the same store.
    pub async fn run(&self, arguments: &[&str]) -> Output {
        let mut command = self.command();
        command.args(arguments).stdin(Stdio::null());
        tokio::task::spawn_blocking(move || command.output().expect("the program starts"))
            .await
            .expect("it runs")
    }

    /// The JSON that a command prints; it must succeed.
    pub async fn run_json(&self, arguments: &[&str]) -> Value {
        let output = self.run(arguments).await;
        assert!(
            output.status.success(),
            "botix {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            panic!(
                "botix {} prints JSON ({error}): {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stdout)
            )
        })
    }

    pub async fn project(&self, name: &str) -> Project {
        let made = self.run_json(&["project", "create", "--name", name]).await;
        Project {
            id: text(&made, "project_id"),
            api: Api::new(self.url(), text(&made, "api_key")),
        }
    }

    /// A client for the same project with some scopes only; also the id of its key.
    pub async fn scoped(&self, project: &Project, scopes: &str) -> (Api, String) {
        let made = self
            .run_json(&[
                "key",
                "create",
                "--project",
                &project.id,
                "--scopes",
                scopes,
            ])
            .await;
        (
            Api::new(self.url(), text(&made, "api_key")),
            text(&made, "key_id"),
        )
    }

    fn stderr_path(&self) -> PathBuf {
        self.folder.path().join("stderr.log")
    }

    pub fn stderr(&self) -> String {
        fs::read_to_string(self.stderr_path()).unwrap_or_default()
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What the server was given in its environment.
    pub fn setting(&self, name: &str) -> &str {
        let (_, value) = self
            .env
            .iter()
            .find(|(known, _)| known == name)
            .unwrap_or_else(|| panic!("{name} is set"));
        value
    }

    /// A file in the server's folder.
    pub fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.folder.path().join(name);
        fs::write(&path, content).expect("a file");
        path.display().to_string()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let log = self.stderr();
        if std::thread::panicking() {
            eprintln!("--- stderr of the server\n{log}---");
            return;
        }
        // Of every process that ran on this store.
        for fault in self.faults {
            assert!(!log.contains(fault), "{fault}\n{log}");
        }
    }
}

/// See [`TestServer::second_node`].
pub struct Node {
    port: u16,
    _process: SecondProcess,
}

impl Node {
    /// The same client, asking this node.
    pub fn api(&self, api: &Api) -> Api {
        api.through(self.port)
    }
}

/// Waits for the first line of a server, which says where it listens; goes on reading, so that the
/// program never blocks on a full pipe.
async fn listening_port(child: &mut Child) -> u16 {
    let stdout = child.stdout.take().expect("a pipe");
    let (first, mut line) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(stdout).lines();
        let _ = first.send(lines.next().and_then(Result::ok));
        lines.for_each(drop);
    });
    let line = eventually("the server prints where it listens", || {
        let line = line.try_recv();
        async move {
            match line {
                Ok(line) => Some(line.expect("the server ended before it listened")),
                Err(tokio::sync::oneshot::error::TryRecvError::Empty) => None,
                Err(closed) => panic!("{closed}"),
            }
        }
    })
    .await;
    line.strip_prefix("listening on http://127.0.0.1:")
        .and_then(|port| port.trim().parse().ok())
        .unwrap_or_else(|| panic!("the first line says where the server listens, not {line:?}"))
}

pub struct SecondProcess(Child);

impl Drop for SecondProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(value: &Value, member: &str) -> String {
    value[member]
        .as_str()
        .unwrap_or_else(|| panic!("{member} in {value}"))
        .to_owned()
}
