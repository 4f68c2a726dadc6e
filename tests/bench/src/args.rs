//! The command line. Every number has an upper bound, so no run is endless.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use clap::{Parser, Subcommand, ValueEnum, value_parser};

use crate::rig::BacklogKind;

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
        #[command(flatten)]
        backlog: Backlogs,
    },
    /// POST /events at a steady rate with one healthy endpoint, alone and, in turn, while thousands of
    /// requests of other projects hang.
    Isolation(Isolation),
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

/// A backlog beside fresh events.
#[derive(Clone, Debug, clap::Args)]
pub struct Backlogs {
    /// Compares, in turn, with so many deliveries of another project that wait in the tables.
    #[arg(long, value_parser = value_parser!(u64).range(1..=10_000_000))]
    pub backlog: Option<u64>,
    /// What the backlog waits for: its time, in an hour, or somebody to make attempts that are due.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "later,due",
        value_name = "later,due",
        requires = "backlog"
    )]
    pub backlog_kind: Vec<BacklogKind>,
    /// How many turns with and without the backlog.
    #[arg(long, default_value_t = 2, value_parser = value_parser!(u16).range(1..=100), requires = "backlog")]
    pub turns: u16,
}

impl Backlogs {
    /// One for each kind; none without a number.
    pub fn each(&self) -> impl Iterator<Item = Backlog> + use<'_> {
        let kinds = self.backlog_kind.iter();
        self.backlog.into_iter().flat_map(move |count| {
            kinds.clone().map(move |&kind| Backlog {
                kind,
                count,
                turns: self.turns,
            })
        })
    }
}

/// One backlog.
#[derive(Clone, Copy, Debug)]
pub struct Backlog {
    /// What it waits for.
    pub kind: BacklogKind,
    /// How many deliveries.
    pub count: u64,
    /// How many turns.
    pub turns: u16,
}

/// A healthy endpoint beside others that hang.
#[derive(Clone, Debug, clap::Args)]
pub struct Isolation {
    /// Events per second to the healthy endpoint, on schedule.
    #[arg(long, default_value = "200", value_parser = rate)]
    pub rate: f64,
    /// How long each reading takes; much longer, and what hangs climbs the ladder to its long delays.
    #[arg(long, default_value_t = 15, value_parser = value_parser!(u16).range(1..=60))]
    pub seconds: u16,
    /// How long to send the same before, unmeasured.
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u16).range(0..=600))]
    pub warmup: u16,
    /// How many turns alone and beside the others.
    #[arg(long, default_value_t = 2, value_parser = value_parser!(u16).range(1..=100))]
    pub turns: u16,
    /// Deliveries of all other projects together that hang or wait, or a few more.
    #[arg(long, default_value_t = 2_000, value_parser = value_parser!(u64).range(1..=1_000_000))]
    pub hanging: u64,
    /// The other projects and the endpoints of each, one run for each pair.
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = Others::USUAL,
        value_name = "PROJECTSxENDPOINTS"
    )]
    pub others: Vec<Others>,
    /// Seconds that the others' deliveries may take once their receivers answer.
    #[arg(long, default_value_t = 180, value_parser = value_parser!(u16).range(1..=3_600))]
    pub drain: u16,
}

/// Other projects with as many endpoints each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Others {
    /// How many projects.
    pub projects: u16,
    /// How many endpoints each.
    pub endpoints: u16,
}

impl Others {
    /// One project with one slow endpoint, or with many, and many projects: no share of one of them
    /// keeps all of these away from the healthy one.
    pub const USUAL: [Self; 3] = [Self::new(1, 1), Self::new(1, 100), Self::new(10, 1)];

    const fn new(projects: u16, endpoints: u16) -> Self {
        Self {
            projects,
            endpoints,
        }
    }

    /// In words.
    pub fn describe(self) -> String {
        let of = |count: u16, one: &str| match count {
            1 => format!("1 {one}"),
            several => format!("{several} {one}s"),
        };
        let each = if self.projects > 1 { " each" } else { "" };
        let (projects, endpoints) = (of(self.projects, "project"), of(self.endpoints, "endpoint"));
        format!("{projects} with {endpoints}{each}")
    }
}

impl FromStr for Others {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            text.parse()
                .ok()
                .filter(|number| (1..=200).contains(number))
        };
        let pair = text.split_once('x');
        match pair.map(|(projects, endpoints)| (number(projects), number(endpoints))) {
            Some((Some(projects), Some(endpoints))) => Ok(Self::new(projects, endpoints)),
            _ => Err("write PROJECTSxENDPOINTS, each 1 to 200, like 10x1".to_owned()),
        }
    }
}

impl fmt::Display for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.projects, self.endpoints)
    }
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
    /// How many endpoints get every event, one after the other; a rate is of their webhooks together.
    #[arg(long, value_delimiter = ',', default_value = "1,10,100", value_parser = value_parser!(u16).range(1..=1_000))]
    pub endpoints: Vec<u16>,
    /// Deliveries of the backlog of the runs with one, on PostgreSQL; 0 leaves them out.
    #[arg(long, default_value_t = 100_000, value_parser = value_parser!(u64).range(0..=10_000_000))]
    pub backlog: u64,
    /// Deliveries that hang or wait in the runs with others; 0 leaves them out.
    #[arg(long, default_value_t = 2_000, value_parser = value_parser!(u64).range(0..=1_000_000))]
    pub hanging: u64,
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
    use clap::{CommandFactory as _, Parser as _};

    use super::{Args, Others, Run};

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn others_are_projects_with_endpoints() {
        let others: Others = "10x1".parse().unwrap();
        assert_eq!((others.projects, others.endpoints), (10, 1));
        assert_eq!(others.to_string(), "10x1");
        assert_eq!(others.describe(), "10 projects with 1 endpoint each");
        for wrong in ["", "10", "x", "0x1", "1x0", "1x201", "1x1x1", "-1x1"] {
            assert!(wrong.parse::<Others>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn both_kinds_of_a_backlog_are_compared_with_unless_one_is_named() {
        let count = |arguments: &[&str]| {
            let arguments = [&["botix-bench", "deliveries"], arguments].concat();
            match Args::parse_from(arguments).run {
                Run::Deliveries { backlog, .. } => backlog.each().count(),
                _ => unreachable!("deliveries were asked for"),
            }
        };
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&["--backlog", "9"]), 2);
        assert_eq!(count(&["--backlog", "9", "--backlog-kind", "due"]), 1);
    }
}
