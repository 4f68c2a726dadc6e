//! The commands, a file each.

mod demo;
mod explain;
mod plugin;
mod project;
mod serve;

use std::{
    io::{IsTerminal as _, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Args, Parser, Subcommand};

use crate::{
    app::{self, Role, Store},
    config::{Config, ConfigError, OffsetPagination, Overrides},
    contract::{idempotency::Protection, spec::Version},
    plugins,
};

#[derive(Parser)]
#[command(
    name = "botix",
    version,
    about = "A messaging and CRM API with safe retries, stable lists and no lost webhook"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Where settings come from, besides `BOTIX_*` variables.
#[derive(Args)]
struct Settings {
    /// A TOML file with settings; variables and flags win over it.
    #[arg(long, global = true)]
    config: Option<PathBuf>,
    /// `sqlite:PATH` or `postgres://…`.
    #[arg(long, global = true)]
    database_url: Option<String>,
}

impl Settings {
    fn load(self, overrides: Overrides) -> Result<Config, ConfigError> {
        let overrides = Overrides {
            database_url: self.database_url,
            ..overrides
        };
        let config = Config::load(self.config.as_deref(), &overrides)?;
        start_log(&config.log);
        Ok(config)
    }
}

#[derive(Subcommand)]
enum Command {
    /// Show the whole platform at work, on an embedded store in a fresh folder.
    Demo {
        /// End with status 0 after the first delivery.
        #[arg(long)]
        once: bool,
    },
    /// Run the server; migrates on start.
    Serve {
        #[command(flatten)]
        settings: Settings,
        /// What this process does; each role scales alone.
        #[arg(long, value_delimiter = ',', value_enum, default_values = ["api", "worker"])]
        roles: Vec<Role>,
        /// The address to listen on.
        #[arg(long)]
        listen: Option<String>,
        /// What links start with.
        #[arg(long)]
        public_url: Option<String>,
    },
    /// Apply migrations and end.
    Migrate {
        #[command(flatten)]
        settings: Settings,
    },
    /// Make and list projects.
    Project {
        #[command(flatten)]
        settings: Settings,
        #[command(subcommand)]
        command: project::ProjectCommand,
    },
    /// Make and revoke API keys.
    Key {
        #[command(flatten)]
        settings: Settings,
        #[command(subcommand)]
        command: project::KeyCommand,
    },
    /// Print the OpenAPI document.
    Openapi {
        /// The version of OpenAPI.
        #[arg(long, value_enum, default_value = "3.1")]
        version: Version,
    },
    /// Check and run plugins locally, as the server would.
    #[command(subcommand)]
    Plugin(plugin::PluginCommand),
    /// Print the plan of every list query.
    #[command(hide = true)]
    ExplainLists {
        #[command(flatten)]
        settings: Settings,
    },
    /// Run the server without idempotency, for the bench alone: it asks what the layer costs.
    #[command(hide = true)]
    ServeUnprotected {
        #[command(flatten)]
        settings: Settings,
    },
    /// Compile a component from standard input, for the server.
    #[command(hide = true, name = plugins::COMPILE_COMMAND)]
    CompilePlugin,
}

/// Runs the program; errors are one line on standard error and status 1.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if matches!(arguments.command, Command::CompilePlugin) {
        return plugins::compile_child_main();
    }
    // The one TLS provider of the process; only this line installs it, so it cannot be there already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("botix: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("botix: {error}");
            ExitCode::FAILURE
        }
    }
}

type CommandResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

async fn run(arguments: Arguments) -> CommandResult {
    match arguments.command {
        Command::Demo { once } => demo::run(once).await,
        Command::Serve {
            settings,
            roles,
            listen,
            public_url,
        } => {
            let overrides = Overrides {
                listen,
                public_url,
                ..Overrides::default()
            };
            serve::run(settings.load(overrides)?, &roles, Protection::Full).await
        }
        Command::ServeUnprotected { settings } => {
            let config = settings.load(Overrides::default())?;
            serve::run(config, &[Role::Api, Role::Worker], Protection::None).await
        }
        Command::Migrate { settings } => Ok(Store::open(settings.load(Overrides::default())?)
            .await
            .map(drop)?),
        Command::Project { settings, command } => {
            project::project(settings.load(Overrides::default())?, command).await
        }
        Command::Key { settings, command } => {
            project::key(settings.load(Overrides::default())?, command).await
        }
        Command::Openapi { version } => {
            let deprecations = app::deprecations(&OffsetPagination::default());
            let document = app::openapi(version, &deprecations);
            match writeln!(std::io::stdout(), "{document:#}") {
                // Whoever reads has seen enough.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
                written => Ok(written?),
            }
        }
        Command::Plugin(command) => plugin::run(command).await,
        Command::ExplainLists { settings } => {
            explain::run(settings.load(Overrides::default())?).await
        }
        Command::CompilePlugin => Ok(()),
    }
}

/// Starts the log, on standard error.
fn start_log(filter: &str) {
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // Where nobody reads the log any more, nothing is to be said about that either.
        .log_internal_errors(false)
        .try_init();
}
