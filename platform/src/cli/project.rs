//! `botix project` and `botix key`.

use clap::Subcommand;
use secrecy::ExposeSecret as _;
use serde_json::json;

use super::CommandResult;
use crate::{
    app::Store,
    config::Config,
    contract::auth::{self, ApiKey, ProjectId, Scope},
    db::Id,
    resources::projects,
};

#[derive(Subcommand)]
pub(super) enum ProjectCommand {
    /// Make a project; prints its id and first key.
    Create {
        /// Its name.
        #[arg(long)]
        name: String,
    },
    /// List projects.
    List,
}

#[derive(Subcommand)]
pub(super) enum KeyCommand {
    /// Make an API key; prints it, this once.
    Create {
        /// The project's id.
        #[arg(long)]
        project: ProjectId,
        /// What the key may do.
        #[arg(long, value_delimiter = ',', default_values = ["read", "write", "admin"])]
        scopes: Vec<Scope>,
    },
    /// Make an API key useless from now on.
    Revoke {
        /// The key's id.
        #[arg(required_unless_present = "named")]
        key: Option<Id<ApiKey>>,
        /// The key's id, by name.
        #[arg(long = "key", value_name = "KEY", conflicts_with = "key")]
        named: Option<Id<ApiKey>>,
    },
}

pub(super) async fn project(config: Config, command: ProjectCommand) -> CommandResult {
    let db = Store::open(config).await?.db;
    match command {
        ProjectCommand::Create { name } => {
            if name.trim().is_empty() || name.chars().any(char::is_control) {
                return Err("a project's name is not empty and has no control characters".into());
            }
            let mut tx = db.begin().await?;
            let (id, key) = projects::create(&mut tx, &name).await?;
            tx.commit().await?;
            println!(
                "{}",
                json!({"project_id": id, "api_key": key.expose_secret()})
            );
        }
        ProjectCommand::List => println!("{:#}", json!(projects::list(&db).await?)),
    }
    Ok(())
}

pub(super) async fn key(config: Config, command: KeyCommand) -> CommandResult {
    let db = Store::open(config).await?.db;
    let mut tx = db.begin().await?;
    match command {
        KeyCommand::Create { project, scopes } => {
            if !projects::exists(&mut tx, project).await? {
                return Err(format!("there is no project {project}").into());
            }
            let (id, key) = auth::create_key(&mut tx, project, &scopes).await?;
            tx.commit().await?;
            println!(
                "{}",
                json!({"key_id": id, "api_key": key.expose_secret(), "scopes": scopes})
            );
        }
        KeyCommand::Revoke { key, named } => {
            let key = key.or(named).ok_or("which key?")?;
            let revoked = projects::revoke_key(&mut tx, key).await?;
            tx.commit().await?;
            if !revoked {
                return Err(format!("there is no key {key} that could be revoked").into());
            }
            println!("{}", json!({"key_id": key, "revoked": true}));
        }
    }
    Ok(())
}
