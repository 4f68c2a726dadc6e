//! The parts that every command may need: settings, the migrated database, the master key.

use std::{io, os::unix::fs::OpenOptionsExt as _, path::Path};

use super::StartError;
use crate::{
    config::{Config, MasterKey},
    db::Db,
    shared::Shared,
};

/// The parts that every command may need.
pub struct Store {
    /// The settings.
    pub config: Config,
    /// The database, migrated.
    pub db: Db,
    /// What nodes share through Redis, if there is one.
    pub shared: Option<Shared>,
    /// The master key.
    pub master: MasterKey,
}

impl Store {
    /// Opens and migrates the database. Redis may be away: nothing waits for it.
    pub async fn open(mut config: Config) -> Result<Self, StartError> {
        let shared = config.redis_url.as_ref().map(Shared::new).transpose();
        let shared = shared.map_err(|error| StartError::Redis(error.to_string()))?;
        let db = Db::open(&config).await?;
        db.migrate().await?;
        let master = match (config.master_key.take(), config.sqlite_path()) {
            (Some(key), _) => key,
            (None, Some(path)) => {
                kept_key(path.parent().unwrap_or(Path::new(""))).map_err(StartError::MasterKey)?
            }
            (None, None) => {
                return Err(StartError::MasterKey(
                    "is required with PostgreSQL".to_owned(),
                ));
            }
        };
        Ok(Self {
            config,
            db,
            shared,
            master,
        })
    }
}

/// The key beside an embedded database, made when there is none.
fn kept_key(folder: &Path) -> Result<MasterKey, String> {
    let path = folder.join("master.key");
    let about = |error: io::Error| format!("{}: {error}", path.display());
    let key = MasterKey::generate();
    // Written whole under another name first: whoever finds the file finds all of it.
    let fresh = folder.join(format!("master.key.{}", ulid::Ulid::generate()));
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&fresh)
        .and_then(|mut file| io::Write::write_all(&mut file, key.to_base64().as_bytes()));
    written.map_err(about)?;
    let linked = std::fs::hard_link(&fresh, &path);
    std::fs::remove_file(&fresh).map_err(about)?;
    match linked {
        Ok(()) => Ok(key),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            MasterKey::parse(&std::fs::read_to_string(&path).map_err(about)?)
                .map_err(|error| format!("{}: {error}", path.display()))
        }
        Err(error) => Err(about(error)),
    }
}
