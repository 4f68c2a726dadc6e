//! Plugins at work: from a plugin's id to a loaded version, and the compile job.
//!
//! Each node keeps the versions it used lately, loaded; which version is active is read with every
//! attempt, so a switch counts for the next one on every node. Compiled artefacts
//! live in the database, sealed under a key derived from the master key, and one that does not open
//! here (another engine version, another processor) is compiled again and replaced.

use std::{sync::Arc, time::Duration};

use moka::future::Cache;
use serde::{Deserialize, Serialize};

use super::{
    Artifact, Call, CompileError, Plugin, PluginEngine, PluginId, Report, registry::VersionStatus,
};
use crate::{
    config::MasterKey,
    db::{Db, JsonText, Timestamp, execute, fetch_optional},
    jobs::Job,
};

/// How many loaded versions a node keeps.
const LOADED: u64 = 256;

/// Runs plugins by id.
#[derive(Clone)]
pub struct PluginHost {
    db: Db,
    engine: PluginEngine,
    seal_key: [u8; 32],
    loaded: Cache<Vec<u8>, Plugin>,
}

/// A version that is ready to run.
pub struct ActiveVersion {
    /// Its number.
    pub version: i64,
    plugin: Plugin,
}

/// What there is to run of a plugin.
pub enum Active {
    /// This.
    Ready(ActiveVersion),
    /// Nothing yet; the first version is being compiled.
    Compiling,
    /// Nothing, and why.
    Unusable(String),
}

/// The job that compiles an uploaded version.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CompilePlugin {
    /// The plugin.
    pub plugin_id: PluginId,
    /// The version.
    pub version: i64,
}

impl Job for CompilePlugin {
    const QUEUE: &'static str = "compile-plugin";

    fn unique_key(&self) -> Option<String> {
        None
    }
}

impl PluginHost {
    /// A host on this engine.
    pub fn new(db: Db, engine: PluginEngine, master: &MasterKey) -> Self {
        let loaded = Cache::builder()
            .max_capacity(LOADED)
            .time_to_idle(Duration::from_hours(1))
            .build();
        Self {
            db,
            engine,
            seal_key: master.derive("botix plugin artefacts 1"),
            loaded,
        }
    }

    /// The active version of a plugin, loaded. `version` is its number and the hash of its content, as
    /// read a moment ago, if it has one.
    pub async fn active(
        &self,
        plugin: PluginId,
        version: Option<(i64, &[u8])>,
    ) -> sqlx::Result<Active> {
        let Some((version, sha256)) = version else {
            let mut reader = self.db.read().await?;
            let compiling = fetch_optional!(
                &mut reader,
                (i64,),
                "SELECT version FROM plugin_versions WHERE plugin_id = $1 AND status = $2 LIMIT 1",
                plugin,
                JsonText(VersionStatus::Compiling)
            )?;
            return Ok(match compiling {
                Some(_) => Active::Compiling,
                None => Active::Unusable("it has no version that could be compiled".to_owned()),
            });
        };
        match self.load(plugin, version, sha256.to_vec()).await? {
            Ok(plugin) => Ok(Active::Ready(ActiveVersion { version, plugin })),
            Err(why) => Ok(Active::Unusable(why)),
        }
    }

    /// Runs a version.
    pub async fn run(&self, active: &ActiveVersion, call: Call) -> Report {
        self.engine.run(&active.plugin, call).await
    }

    /// Runs a version's `sign` alone, over a body and headers that `transform` made before.
    pub async fn sign(
        &self,
        active: &ActiveVersion,
        call: Call,
        body: String,
        headers: Vec<(String, String)>,
    ) -> Report {
        let transformed = Some((body, headers));
        self.engine
            .run_from(&active.plugin, call, transformed)
            .await
    }

    async fn load(
        &self,
        plugin: PluginId,
        version: i64,
        sha256: Vec<u8>,
    ) -> sqlx::Result<Result<Plugin, String>> {
        if let Some(loaded) = self.loaded.get(&sha256).await {
            return Ok(Ok(loaded));
        }
        // At once by many attempts: the first one loads, the others wait for it.
        let loading = self.loaded.try_get_with(sha256.clone(), async {
            match self.artifact(plugin, version, &sha256).await? {
                Ok(artifact) => {
                    let engine = self.engine.clone();
                    tokio::task::spawn_blocking(move || engine.load(&artifact))
                        .await
                        .map_err(|error| Unloaded::Unusable(error.to_string()))?
                        .map_err(|error| Unloaded::Unusable(error.to_string()))
                }
                Err(why) => Err(Unloaded::Unusable(why)),
            }
        });
        match loading.await {
            Ok(loaded) => Ok(Ok(loaded)),
            Err(unloaded) => match &*unloaded {
                Unloaded::Unusable(why) => Ok(Err(why.clone())),
                Unloaded::Database(error) => {
                    tracing::warn!(%plugin, version, error, "a plugin could not be read");
                    Err(sqlx::Error::PoolTimedOut)
                }
            },
        }
    }

    /// The artefact of a version: kept, or made now.
    async fn artifact(
        &self,
        plugin: PluginId,
        version: i64,
        sha256: &[u8],
    ) -> Result<Result<Arc<Artifact>, String>, Unloaded> {
        let Ok(digest) = <[u8; 32]>::try_from(sha256) else {
            return Ok(Err("its content hash is damaged".to_owned()));
        };
        let engine = self.engine.fingerprint().to_string();
        let mut reader = self.db.read().await?;
        let kept = fetch_optional!(
            &mut reader,
            (Vec<u8>,),
            "SELECT artifact FROM plugin_artifacts WHERE sha256 = $1 AND engine = $2",
            sha256,
            &engine
        )?;
        if let Some((sealed,)) = kept {
            match Artifact::open(&self.seal_key, &sealed, &digest) {
                Ok(artifact) => return Ok(Ok(Arc::new(artifact))),
                Err(error) => {
                    tracing::warn!(%plugin, version, %error, "a kept artefact does not open; compiling again");
                }
            }
        }
        let component = fetch_optional!(
            &mut reader,
            (Vec<u8>,),
            "SELECT component FROM plugin_versions WHERE plugin_id = $1 AND version = $2",
            plugin,
            version
        )?;
        drop(reader);
        let Some((component,)) = component else {
            return Ok(Err("the version is gone".to_owned()));
        };
        match self.engine.compile_isolated(&component).await {
            Ok(artifact) => {
                self.keep(&artifact, sha256, &engine).await?;
                Ok(Ok(Arc::new(artifact)))
            }
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    async fn keep(&self, artifact: &Artifact, sha256: &[u8], engine: &str) -> sqlx::Result<()> {
        let mut tx = self.db.begin().await?;
        execute!(
            &mut tx,
            "INSERT INTO plugin_artifacts (sha256, engine, artifact, created_at) VALUES ($1, $2, $3, $4) \
             ON CONFLICT (sha256, engine) DO UPDATE SET artifact = excluded.artifact",
            sha256,
            engine,
            artifact.seal(&self.seal_key),
            Timestamp::now()
        )?;
        tx.commit().await
    }

    /// Compiles an uploaded version and says how it went; runs as a job.
    pub async fn compile(&self, job: CompilePlugin) {
        let mut pause = Duration::from_millis(200);
        loop {
            match self.try_compile(&job).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(plugin = %job.plugin_id, version = job.version, %error, ?pause, "a plugin could not be compiled; trying again");
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(10));
        }
    }

    async fn try_compile(&self, job: &CompilePlugin) -> Result<(), CompileFault> {
        let mut reader = self.db.read().await?;
        let row = fetch_optional!(
            &mut reader,
            (Vec<u8>, Vec<u8>),
            "SELECT component, sha256 FROM plugin_versions WHERE plugin_id = $1 AND version = $2",
            job.plugin_id,
            job.version
        )?;
        drop(reader);
        let Some((component, sha256)) = row else {
            return Ok(());
        };
        let (status, reason) = match self.engine.compile_isolated(&component).await {
            Ok(artifact) => {
                let engine = self.engine.clone();
                let artifact = Arc::new(artifact);
                let shared = artifact.clone();
                let loads =
                    tokio::task::spawn_blocking(move || engine.load(&shared).map(drop)).await;
                match loads {
                    Ok(Ok(())) => {
                        self.keep(&artifact, &sha256, &self.engine.fingerprint().to_string())
                            .await?;
                        (VersionStatus::Ready, None)
                    }
                    Ok(Err(error)) => (VersionStatus::Rejected, Some(error.to_string())),
                    Err(error) => (VersionStatus::Rejected, Some(error.to_string())),
                }
            }
            Err(error) if error.is_final() => (VersionStatus::Rejected, Some(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let mut tx = self.db.begin().await?;
        execute!(
            &mut tx,
            "UPDATE plugin_versions SET status = $3, reason = $4 WHERE plugin_id = $1 AND version = $2",
            job.plugin_id,
            job.version,
            JsonText(status),
            reason
        )?;
        if status == VersionStatus::Ready {
            // The first that is ready becomes active by itself.
            execute!(
                &mut tx,
                "UPDATE plugins SET active_version = $2, updated_at = $3 WHERE id = $1 AND active_version IS NULL",
                job.plugin_id,
                job.version,
                Timestamp::now()
            )?;
        }
        tx.commit().await?;
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
enum CompileFault {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Compile(#[from] CompileError),
}

#[derive(Debug)]
enum Unloaded {
    Unusable(String),
    Database(String),
}

impl From<sqlx::Error> for Unloaded {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error.to_string())
    }
}
