//! A private PostgreSQL with its default settings, durability included, on a free port of loopback.

use std::{
    ffi::OsStr,
    fs,
    io::Write as _,
    net::TcpListener,
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use sqlx::{Connection as _, Executor as _, PgConnection};

use super::statements::ROLE;
use crate::Fault;

/// How long it may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running server; stopped when it is dropped.
pub struct Postgres {
    child: Child,
    port: u16,
}

impl Postgres {
    /// Makes a cluster in `folder` and starts it.
    pub async fn start(folder: &Path) -> Result<Self, Fault> {
        let programs = programs()?;
        let user = user()?;
        let data = folder.join("postgres");
        fs::create_dir(&data)?;
        if let Some((uid, gid)) = user {
            chown(&data, Some(uid), Some(gid))?;
        }
        let command = |name: &str| {
            let mut command = Command::new(programs.join(name));
            command.current_dir(&data).stdin(Stdio::null());
            // Out of the reach of Ctrl-C: it ends when the server has.
            command.process_group(0);
            if let Some((uid, gid)) = user {
                command.uid(uid).gid(gid);
            }
            command
        };
        let made = command("initdb")
            .args(["-U", "postgres", "--auth=trust", "-E", "UTF8"])
            .args(["--locale=C.UTF-8", "--no-sync", "-D"])
            .arg(&data)
            .output()?;
        if !made.status.success() {
            return Err(format!("initdb: {}", String::from_utf8_lossy(&made.stderr)).into());
        }
        let mut settings = fs::OpenOptions::new()
            .append(true)
            .open(data.join("postgresql.conf"))?;
        writeln!(settings, "listen_addresses = '127.0.0.1'")?;
        writeln!(settings, "unix_socket_directories = ''")?;
        // Costs next to nothing where statements are prepared once: a counter for each that ends.
        writeln!(settings, "shared_preload_libraries = 'pg_stat_statements'")?;
        // The port is free now but may be taken before PostgreSQL has it; then the next one is tried.
        let log = folder.join("postgres.log");
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let child = command("postgres")
                .arg("-D")
                .arg(&data)
                .args(["-p", &port.to_string()])
                .stdout(Stdio::null())
                .stderr(fs::File::create(&log)?)
                .spawn()?;
            let mut postgres = Self { child, port };
            if postgres.ready().await? {
                return Ok(postgres);
            }
        }
        let log = fs::read_to_string(&log).unwrap_or_default();
        Err(format!("PostgreSQL does not start: {log}").into())
    }

    /// Waits until it answers; false when it ended instead.
    async fn ready(&mut self) -> Result<bool, Fault> {
        let begun = Instant::now();
        while self.child.try_wait()?.is_none() {
            if let Ok(mut connection) = PgConnection::connect(&self.url()).await {
                let role = format!("CREATE ROLE {ROLE} SUPERUSER LOGIN");
                connection.execute(sqlx::AssertSqlSafe(role)).await?;
                connection.close().await?;
                return Ok(true);
            }
            if begun.elapsed() > PATIENCE {
                return Err("PostgreSQL does not answer".into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(false)
    }

    /// Where it is, for the server.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Where it is, for this program.
    pub fn own_url(&self) -> String {
        format!("postgres://{ROLE}@127.0.0.1:{}/postgres", self.port)
    }

    /// The process that starts all others of it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Postgres {
    /// First the fast way, which rolls back what is open; then the immediate one.
    fn drop(&mut self) {
        for signal in [Signal::INT, Signal::QUIT] {
            let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
            if let Some(pid) = pid {
                // It may have ended by itself.
                let _ = kill_process(pid, signal);
            }
            let begun = Instant::now();
            while begun.elapsed() < PATIENCE {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        eprintln!("PostgreSQL (process {}) does not stop", self.child.id());
    }
}

/// The folder with the programs of the newest version.
fn programs() -> Result<PathBuf, Fault> {
    let newest = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("bin/postgres").is_file())
        .max_by_key(|path| version(path.file_name()));
    newest.map(|path| path.join("bin")).ok_or_else(|| {
        "no PostgreSQL in /usr/lib/postgresql; tests/run installs one, or use --database sqlite"
            .into()
    })
}

fn version(name: Option<&OsStr>) -> u32 {
    name.and_then(OsStr::to_str)
        .and_then(|name| name.parse().ok())
        .unwrap_or(0)
}

/// PostgreSQL refuses to run as root: then it runs as the user that its package made.
fn user() -> Result<Option<(u32, u32)>, Fault> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd")?;
    let fields: Option<Vec<&str>> = users
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|fields| fields[0] == "postgres");
    match fields.as_deref() {
        Some([_, _, uid, gid, ..]) => Ok(Some((uid.parse()?, gid.parse()?))),
        _ => Err("there is no user postgres for PostgreSQL to run as".into()),
    }
}
