//! A fresh set-up for one run: database, server, project; gone when it is dropped.

mod backlog;
mod machine;
mod postgres;
mod receiver;
mod redis;
mod server;
mod statements;
mod store;
mod usage;

use std::{fs, os::unix::fs::PermissionsExt as _};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;
use ulid::Ulid;

pub use backlog::{Kind as BacklogKind, Target as BacklogTarget};
pub use machine::describe as describe_machine;
pub use receiver::{Receiver, STALL};
pub use store::Store;
pub use usage::{Spent, Usage};

use crate::{
    Fault,
    args::{Args, Database},
    client::Client,
};
use postgres::Postgres;
use redis::Redis;
pub use server::Protection;
use server::{Program, Server};

/// A server with a database and a project of its own.
pub struct Rig {
    // Dropped in this order: the server before its database, the folder last.
    server: Option<Server>,
    postgres: Option<Postgres>,
    redis: Option<Redis>,
    program: Program,
    protection: Protection,
    /// The database, seen from beside the server.
    pub store: Store,
    /// Speaks for the project.
    pub client: Client,
    /// The project's id, without its prefix.
    pub project: Ulid,
    shows_statements: bool,
    _folder: TempDir,
}

impl Rig {
    /// Starts everything.
    pub async fn start(args: &Args, database: Database) -> Result<Self, Fault> {
        Self::start_with(args, database, Protection::Full).await
    }

    /// Starts everything, with or without the idempotency layer.
    pub async fn start_with(
        args: &Args,
        database: Database,
        protection: Protection,
    ) -> Result<Self, Fault> {
        allow_many_files()?;
        let folder = tempfile::Builder::new().prefix("botix-bench-").tempdir()?;
        // The user that PostgreSQL runs as has to get through.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let (postgres, url, own_url) = match database {
            Database::Postgres | Database::PostgresRedis => {
                let postgres = Postgres::start(folder.path()).await?;
                let (url, own_url) = (postgres.url(), postgres.own_url());
                (Some(postgres), url, own_url)
            }
            Database::Sqlite => {
                let file = folder.path().join("botix.db");
                let url = format!("sqlite:{}", file.display());
                (None, url.clone(), url)
            }
        };
        let redis = match database {
            Database::PostgresRedis => Some(Redis::start(folder.path()).await?),
            Database::Postgres | Database::Sqlite => None,
        };
        let mut env = args.env.clone();
        if let Some(redis) = &redis {
            env.push(("BOTIX_REDIS_URL".to_owned(), redis.url()));
        }
        let program = Program::new(args.botix.as_deref(), folder.path(), &url, &env)?;
        let server = Server::start(&program, protection).await?;
        let (project, key) = program.create_project()?;
        let store = Store::open(&own_url).await?;
        store.watch_statements().await?;
        Ok(Self {
            client: Client::new(server.address, &key)?,
            server: Some(server),
            postgres,
            redis,
            program,
            protection,
            store,
            project,
            shows_statements: args.statements,
            _folder: folder,
        })
    }

    /// Makes another project; its id, and who speaks for it.
    pub fn another_project(&self) -> Result<(Ulid, Client), Fault> {
        let (project, key) = self.program.create_project()?;
        Ok((project, Client::new(self.server()?.address, &key)?))
    }

    fn server(&self) -> Result<&Server, Fault> {
        self.server
            .as_ref()
            .ok_or_else(|| "the server is stopped".into())
    }

    /// What the processes have used so far.
    pub fn usage(&self) -> Result<Usage, Fault> {
        let postgres = self.postgres.as_ref().map(Postgres::pid);
        let redis = self.redis.as_ref().map(Redis::pid);
        Usage::read(self.server()?.pid(), &[postgres, redis])
    }

    /// Begins to measure.
    pub async fn begin(&self) -> Result<Usage, Fault> {
        self.store.forget_statements().await?;
        self.usage()
    }

    /// What was used since `before`; says which statements ran for `operations` if that was asked.
    pub async fn end(&self, before: &Usage, operations: u64) -> Result<Spent, Fault> {
        let mut spent = self.usage()?.since(before);
        spent.statements = self.store.count_statements().await?;
        if self.shows_statements {
            eprint!("{}", self.store.statements(operations).await?);
        }
        Ok(spent)
    }

    /// Stops the server by SIGTERM and keeps all else. What it did wrong, besides its answers:
    /// warnings and errors in its log, an end that is not clean.
    pub async fn pause(&mut self) -> Result<Vec<String>, Fault> {
        match self.server.take() {
            Some(server) => server.stop().await,
            None => Ok(Vec::new()),
        }
    }

    /// Starts the server again, at another address, unless it runs.
    pub async fn resume(&mut self) -> Result<(), Fault> {
        if self.server.is_none() {
            let server = Server::start(&self.program, self.protection).await?;
            self.client = self.client.moved(server.address)?;
            self.server = Some(server);
        }
        Ok(())
    }

    /// Stops everything; what the server did wrong.
    pub async fn stop(mut self) -> Result<Vec<String>, Fault> {
        self.pause().await
    }
}

/// Thousands of requests may hang at a time, each with a connection here and one at the server, which
/// has the limit from here.
fn allow_many_files() -> Result<(), Fault> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}
