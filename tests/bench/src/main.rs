//! Load on a real server, run by hand: how fast are requests, replays, lists and deliveries,
//! also beside a backlog and beside another tenant's receivers that hang?
//!
//! One run is one fresh set-up, made and removed here: a `botix serve`, a private PostgreSQL with its
//! default durability (or an SQLite file), and a webhook receiver in this process, all on loopback.
//! Load is open-loop where a rate is given: sends are scheduled in advance and latency counts from
//! the *scheduled* moment, so a server that stalls is charged for the queue it causes. Without a
//! rate, `--connections` connections send as fast as they get answers: the ceiling of throughput, and
//! latencies at that ceiling. Every request carries an idempotency key of its own.
//!
//! Figures go to stdout as a Markdown table, the course of events to stderr. A run whose books do not
//! balance (an accepted request that left no row, a webhook that is neither delivered nor dead nor
//! pending, one that is said to be delivered and never came) is VOID and the program ends with 1.
//!
//! ```text
//! cargo build --release && target/release/botix-bench all --database postgres,sqlite
//! ```

#![allow(
    clippy::doc_markdown,
    reason = "PostgreSQL, SQLite and UUIDv4 are names, not code"
)]

mod args;
mod client;
mod figures;
mod load;
mod report;
mod rig;
mod runs;

use std::{error::Error, process::ExitCode};

use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};

use args::Args;

/// What went wrong, for a person to read.
type Fault = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let ended = tokio::select! {
        ended = runs::run(&args) => ended,
        stopped = stopped() => Err(stopped),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(fault) => {
            eprintln!("botix-bench: {fault}");
            ExitCode::FAILURE
        }
    }
}

/// Ctrl-C or SIGTERM. What runs then is dropped, and takes its processes and folders with it.
async fn stopped() -> Fault {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return "no signal can be waited for".into();
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    "stopped".into()
}
