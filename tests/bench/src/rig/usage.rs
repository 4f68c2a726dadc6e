//! What processes use, as the kernel counts it.

use std::fs;

use crate::{Fault, figures::float};

/// The unit of times in `/proc`: a hundredth of a second, whatever the kernel's own tick is.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU seconds since the start of each process, and the server's memory.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    server: f64,
    database: f64,
    bench: f64,
    peak_mib: f64,
}

/// What was used in between.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// CPU seconds of the server and its children.
    pub server: f64,
    /// CPU seconds of PostgreSQL and Redis; zero with SQLite, which runs in the server.
    pub database: f64,
    /// CPU seconds of this program: load and receiver.
    pub bench: f64,
    /// The most memory the server ever had, in MiB.
    pub peak_mib: f64,
    /// Statements that PostgreSQL was sent, without those that begin and end transactions.
    pub statements: u64,
}

impl Spent {
    /// Adds what another part of the same run used.
    pub fn add(&mut self, other: &Self) {
        self.server += other.server;
        self.database += other.database;
        self.bench += other.bench;
        self.peak_mib = self.peak_mib.max(other.peak_mib);
        self.statements += other.statements;
    }
}

impl Usage {
    /// Reads it.
    pub fn read(server: u32, databases: &[Option<u32>]) -> Result<Self, Fault> {
        let mut database = 0.0;
        for pid in databases.iter().flatten() {
            database += cpu_seconds(*pid)?;
        }
        Ok(Self {
            server: cpu_seconds(server)?,
            database,
            bench: cpu_seconds(std::process::id())?,
            peak_mib: peak_mib(server)?,
        })
    }

    /// What was used since `before`.
    pub fn since(&self, before: &Self) -> Spent {
        Spent {
            server: self.server - before.server,
            database: self.database - before.database,
            bench: self.bench - before.bench,
            peak_mib: self.peak_mib,
            statements: 0,
        }
    }
}

/// User and system time of a process and of its children, ended or not.
fn cpu_seconds(pid: u32) -> Result<f64, Fault> {
    let own = Stat::of(pid).ok_or_else(|| format!("process {pid} is gone"))?;
    let mut ticks = own.own + own.ended_children;
    // The server's only child compiles plugins and ends; PostgreSQL's serve connections.
    if pid != std::process::id() {
        for entry in fs::read_dir("/proc")?.flatten() {
            let child = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            if let Some(child) = child.and_then(Stat::of)
                && child.parent == pid
            {
                ticks += child.own + child.ended_children;
            }
        }
    }
    Ok(float(ticks) / TICKS_PER_SECOND)
}

struct Stat {
    parent: u32,
    own: u64,
    ended_children: u64,
}

impl Stat {
    fn of(pid: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field is the program's name in parentheses, which may hold anything.
        let fields: Vec<&str> = text.get(text.rfind(')')? + 2..)?.split(' ').collect();
        let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
        Some(Self {
            parent: fields.get(1)?.parse().ok()?,
            own: ticks(11)? + ticks(12)?,
            ended_children: ticks(13)? + ticks(14)?,
        })
    }
}

fn peak_mib(pid: u32) -> Result<f64, Fault> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib: u64 = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .ok_or_else(|| format!("process {pid} is gone"))?
        .trim()
        .parse()?;
    Ok(float(kib) / 1_024.0)
}

#[cfg(test)]
mod tests {
    use super::Stat;

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "7 (a ) b) S 3 7 7 0 -1 0 0 0 0 0 11 22 33 44 20 0 1 0";
        let stat = Stat::parse(stat).unwrap();
        assert_eq!((stat.parent, stat.own, stat.ended_children), (3, 33, 77));
    }
}
