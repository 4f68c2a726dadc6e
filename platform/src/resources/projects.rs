//! Projects and their keys; made and revoked by operators on the command line.

use secrecy::SecretString;
use serde::Serialize;

use crate::{
    contract::auth::{self, ApiKey, ProjectId, Scope},
    db::{Db, Id, Timestamp, Tx, execute, fetch_all, fetch_optional},
};

/// A project as operators see it.
#[derive(Debug, Serialize, sqlx::FromRow)]
pub struct ProjectRow {
    /// Its id.
    #[serde(rename = "project_id")]
    pub id: ProjectId,
    /// Its name.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Makes a project with a first key of all scopes.
pub async fn create(tx: &mut Tx, name: &str) -> sqlx::Result<(ProjectId, SecretString)> {
    let id = ProjectId::generate();
    execute!(
        tx,
        "INSERT INTO projects (id, name, created_at) VALUES ($1, $2, $3)",
        id,
        name,
        Timestamp::now()
    )?;
    let (_, key) = auth::create_key(tx, id, &Scope::ALL).await?;
    Ok((id, key))
}

/// All projects, oldest first.
pub async fn list(db: &Db) -> sqlx::Result<Vec<ProjectRow>> {
    let mut reader = db.read().await?;
    fetch_all!(&mut reader, ProjectRow, "SELECT id, name, created_at FROM projects ORDER BY created_at, id")
}

/// Whether there is such a project.
pub async fn exists(tx: &mut Tx, id: ProjectId) -> sqlx::Result<bool> {
    let row = fetch_optional!(tx, ProjectRow, "SELECT id, name, created_at FROM projects WHERE id = $1", id)?;
    Ok(row.is_some())
}

/// Makes a key useless from now on; false when there is no such key, or it was revoked before.
pub async fn revoke_key(tx: &mut Tx, id: Id<ApiKey>) -> sqlx::Result<bool> {
    let changed = execute!(
        tx,
        "UPDATE api_keys SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL",
        id,
        Timestamp::now()
    )?;
    Ok(changed > 0)
}
