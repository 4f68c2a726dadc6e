//! The command line. Every number has an upper bound, so no run is endless.

use std::{path::PathBuf, time::Duration};

use clap::{Parser, Subcommand, ValueEnum, value_parser};

/// Measures a real server; prints one Markdown table.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    /// What to measure.
    #[command(subcommand)]
    pub run: Run,
    /// The program to measure; default: the `botix` beside this program.
    #[arg(long, global = true, value_name = "PATH")]
    pub botix: Option<PathBuf>,
    /// The databases to measure on, one after the other.
    #[arg(
        long,
        global = true,
        value_delimiter = ',',
        default_value = "postgres",
        value_name = "postgres,postgres-redis,sqlite"
    )]
    pub database: Vec<Database>,
    /// Connections that send, and so requests in flight.
    #[arg(long, global = true, default_value_t = 32, value_parser = value_parser!(u16).range(1..=1_024))]
    pub connections: u16,
    /// A setting of the server, in its environment.
    #[arg(long, global = true, value_name = "NAME=VALUE", value_parser = setting)]
    pub env: Vec<(String, String)>,
    /// Says on stderr which statements ran on PostgreSQL, how often and for how long (slower).
    #[arg(long, global = true)]
    pub statements: bool,
}

/// A database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Database {
    /// A private PostgreSQL.
    Postgres,
    /// A private PostgreSQL with a private Redis beside it.
    PostgresRedis,
    /// A file.
    Sqlite,
}

impl Database {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Postgres => "PostgreSQL",
            Self::PostgresRedis => "PostgreSQL, Redis",
            Self::Sqlite => "SQLite",
        }
    }
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum Run {
    /// POST /contacts.
    Contacts(Load),
    /// POST /contacts again with keys that are finished.
    Replays {
        #[command(flatten)]
        load: Load,
        /// Keys to finish first, and then to replay in turn.
        #[arg(long, default_value_t = 10_000, value_parser = value_parser!(u64).range(1..=1_000_000))]
        keys: u64,
    },
    /// POST /contacts with and without the idempotency layer, in turn: what the layer costs.
    Layer {
        #[command(flatten)]
        load: Load,
        /// How many turns.
        #[arg(long, default_value_t = 5, value_parser = value_parser!(u16).range(1..=100))]
        turns: u16,
    },
    /// GET /contacts: the first page and one deep down, in turn, and the deprecated offset mode.
    Lists(Lists),
    /// POST /events, and the webhooks that follow.
    Deliveries {
        #[command(flatten)]
        load: Load,
        #[command(flatten)]
        way: Way,
    },
    /// Nothing at all: what the server uses by itself.
    Idle {
        /// How long.
        #[arg(long, default_value_t = 10, value_parser = value_parser!(u16).range(1..=3_600))]
        seconds: u16,
    },
    /// All of it, as `docs/performance.md` shows it.
    All(All),
}

/// How much load.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Load {
    /// Requests per second, on schedule; without it, as fast as the connections go.
    #[arg(long, value_parser = rate)]
    pub rate: Option<f64>,
    /// How long to send.
    #[arg(long, default_value_t = 30, value_parser = value_parser!(u16).range(1..=3_600))]
    pub seconds: u16,
    /// How long to send the same before, unmeasured.
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u16).range(0..=600))]
    pub warmup: u16,
}

impl Load {
    /// How long to send.
    pub fn time(self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }

    /// How long to send before.
    pub fn warmup_time(self) -> Duration {
        Duration::from_secs(self.warmup.into())
    }

    /// The kind of load, in a few words.
    pub fn describe(self, connections: u16) -> String {
        match self.rate {
            Some(rate) => format!("at {rate}/s"),
            None => format!("{connections} connections"),
        }
    }
}

/// What to list.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Lists {
    /// Contacts to put into the database first.
    #[arg(long, default_value_t = 1_000_000, value_parser = value_parser!(u64).range(400..=20_000_000))]
    pub contacts: u64,
    /// The deep page, of 200 contacts each; at most the last one there is.
    #[arg(long, default_value_t = 5_000, value_parser = value_parser!(u64).range(2..=100_000))]
    pub page: u64,
    /// How often each page is read.
    #[arg(long, default_value_t = 1_000, value_parser = value_parser!(u64).range(1..=100_000))]
    pub samples: u64,
}

/// The way of the webhooks.
#[derive(Clone, Debug, clap::Args)]
pub struct Way {
    /// Endpoints; each gets every event.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u16).range(1..=1_000))]
    pub endpoints: u16,
    /// Attaches a plugin: this file, or without a value the example plugin.
    #[arg(long, num_args = 0..=1, default_missing_value = "example", value_name = "FILE.wasm")]
    pub plugin: Option<PathBuf>,
    /// Seconds that webhooks may still arrive after the last event.
    #[arg(long, default_value_t = 180, value_parser = value_parser!(u16).range(1..=3_600))]
    pub drain: u16,
}

/// What `all` runs.
#[derive(Clone, Debug, clap::Args)]
pub struct All {
    /// The rates of the open-loop runs.
    #[arg(long, value_delimiter = ',', default_value = "100,1000", value_parser = rate)]
    pub rates: Vec<f64>,
    /// How long each run sends.
    #[arg(long, default_value_t = 30, value_parser = value_parser!(u16).range(1..=3_600))]
    pub seconds: u16,
    /// How long each run sends before, unmeasured.
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u16).range(0..=600))]
    pub warmup: u16,
    /// Keys to replay.
    #[arg(long, default_value_t = 10_000, value_parser = value_parser!(u64).range(1..=1_000_000))]
    pub keys: u64,
    #[command(flatten)]
    pub lists: Lists,
    /// The plugin of the runs with one.
    #[arg(long, default_value = "example", value_name = "FILE.wasm")]
    pub plugin: PathBuf,
    /// Seconds that webhooks may still arrive after the last event.
    #[arg(long, default_value_t = 180, value_parser = value_parser!(u16).range(1..=3_600))]
    pub drain: u16,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.1..=100_000.0).contains(&rate) => Ok(rate),
        _ => Err("a rate is between 0.1 and 100000 a second".to_owned()),
    }
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
}
