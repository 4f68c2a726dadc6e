//! Uploaded plugins and their versions, as tenants see them.
//!
//! Each upload is an immutable version. What can be refused at once is refused with the upload; the
//! rest is found by the compile job, which moves a version from `compiling` to `ready` or `rejected`.

use poem_openapi::{
    OpenApi,
    param::{Path, Query},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Exports, Upload, runtime::CompilePlugin};
use crate::{
    contract::{
        ApiError, Body, Caller, Code, Created, NoContent, Reply, Work,
        auth::ProjectId,
        cursor::Position,
        page::{self, ListTexts, Listed, Page, PageRequest},
        spec::Tag,
    },
    db::{Db, Id, JsonText, Kind, Queryable, Timestamp, execute, fetch_all, fetch_optional},
    jobs,
};

/// A plugin; names the kind of its id.
pub struct PluginKind;

impl Kind for PluginKind {
    const PREFIX: &'static str = "plg";
}

/// The id of a plugin.
pub type PluginId = Id<PluginKind>;

/// How far a version is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "PluginVersionStatus")]
pub enum VersionStatus {
    /// Being compiled.
    Compiling,
    /// Can be activated.
    Ready,
    /// Could not be compiled; `reason` says why.
    Rejected,
}

/// A plugin.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PluginView {
    /// Its id.
    pub id: PluginId,
    /// Its name.
    pub name: String,
    /// The version that runs; null until the first one is ready.
    pub active_version: Option<i64>,
    /// All versions, newest first.
    pub versions: Vec<VersionView>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// A version of a plugin.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VersionView {
    /// Its number, from 1.
    pub version: i64,
    /// How far it is.
    pub status: VersionStatus,
    /// Why it was rejected.
    pub reason: Option<String>,
    /// SHA-256 of the upload, lower-case hex.
    pub sha256: String,
    /// Bytes of the upload.
    pub size: i64,
    /// The functions it has: `transform`, `sign`.
    pub exports: Vec<String>,
    /// When it was uploaded.
    pub created_at: Timestamp,
}

/// What activates a version.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Activation {
    /// The version to run from now on.
    version: i64,
}

/// What changes a plugin.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PluginChange {
    /// Its new name.
    name: String,
}

#[derive(Debug, sqlx::FromRow)]
struct PluginRow {
    id: PluginId,
    name: String,
    active_version: Option<i64>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl Listed for PluginRow {
    const RESOURCE: &'static str = "plugins";
    const TABLE: &'static str = "plugins";
    const COLUMNS: &'static str = "id, name, active_version, created_at, updated_at";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

#[derive(Debug, sqlx::FromRow)]
struct VersionRow {
    id: uuid::Uuid,
    version: i64,
    status: JsonText<VersionStatus>,
    reason: Option<String>,
    sha256: Vec<u8>,
    size: i64,
    exports: JsonText<Vec<String>>,
    created_at: Timestamp,
}

impl Listed for VersionRow {
    const RESOURCE: &'static str = "plugin-versions";
    const TABLE: &'static str = "plugin_versions";
    const COLUMNS: &'static str = "id, version, status, reason, sha256, size, exports, created_at";
    const OWNER: &'static str = "plugin_id";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id,
        }
    }
}

impl From<VersionRow> for VersionView {
    fn from(row: VersionRow) -> Self {
        Self {
            version: row.version,
            status: row.status.0,
            reason: row.reason,
            sha256: hex(&row.sha256),
            size: row.size,
            exports: row.exports.0,
            created_at: row.created_at,
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The handlers of `/plugins`.
#[derive(Debug)]
pub struct PluginsApi {
    /// The database.
    pub db: Db,
}

#[OpenApi(tag = "Tag::Plugins")]
impl PluginsApi {
    /// Upload a plugin
    ///
    /// Makes a plugin with version 1, which becomes active when it is compiled.
    #[oai(path = "/plugins", method = "post", operation_id = "create_plugin")]
    async fn create(
        &self,
        caller: Caller,
        mut work: Work,
        /// The plugin's name: 1 to 100 characters.
        name: Query<String>,
        component: Upload,
    ) -> Result<Created<PluginView>, ApiError> {
        let name =
            check_name(name.0).map_err(|detail| ApiError::invalid_parameter("name", detail))?;
        let now = Timestamp::now();
        let row = PluginRow {
            id: PluginId::generate(),
            name,
            active_version: None,
            created_at: now,
            updated_at: now,
        };
        execute!(
            &mut work,
            "INSERT INTO plugins (id, project_id, name, created_at, updated_at) VALUES ($1, $2, $3, $4, $4)",
            row.id,
            caller.project,
            &row.name,
            now
        )?;
        add_version(&mut work, row.id, 1, &component).await?;
        let body = show(&mut work, row).await?;
        Ok(Created {
            location: format!("/public/v1/plugins/{}", body.id),
            body,
        })
    }

    /// List plugins
    #[oai(path = "/plugins", method = "get", operation_id = "list_plugins")]
    async fn list(&self, caller: Caller, page: PageRequest) -> Result<Page<PluginView>, ApiError> {
        let mut snapshot = self.db.snapshot().await?;
        let shown = |row: PluginRow| {
            Ok(PluginView {
                id: row.id,
                name: row.name,
                active_version: row.active_version,
                versions: Vec::new(),
                created_at: row.created_at,
                updated_at: row.updated_at,
            })
        };
        let mut page = Page::fetch_on(&mut snapshot, page, caller.project, &[], shown).await?;
        for plugin in page.rows_mut() {
            plugin.versions = versions(&mut snapshot, plugin.id).await?;
        }
        Ok(page)
    }

    /// Read a plugin
    #[oai(path = "/plugins/:id", method = "get", operation_id = "get_plugin")]
    async fn get(&self, caller: Caller, id: Path<PluginId>) -> Result<Reply<PluginView>, ApiError> {
        let mut snapshot = self.db.snapshot().await?;
        let row = find(&mut snapshot, caller.project, id.0).await?;
        Ok(Reply(show(&mut snapshot, row).await?))
    }

    /// Rename a plugin
    #[oai(
        path = "/plugins/:id",
        method = "patch",
        operation_id = "update_plugin"
    )]
    async fn update(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<PluginId>,
        body: Body<PluginChange>,
    ) -> Result<Reply<PluginView>, ApiError> {
        let name =
            check_name(body.0.name).map_err(|detail| ApiError::invalid_body("/name", detail))?;
        execute!(
            &mut work,
            "UPDATE plugins SET name = $3, updated_at = $4 WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0,
            name,
            Timestamp::now()
        )?;
        let row = find(&mut work, caller.project, id.0).await?;
        Ok(Reply(show(&mut work, row).await?))
    }

    /// Delete a plugin
    #[oai(
        path = "/plugins/:id",
        method = "delete",
        operation_id = "delete_plugin"
    )]
    async fn delete(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<PluginId>,
    ) -> Result<NoContent, ApiError> {
        lock(&mut work, caller.project, id.0).await?;
        let used = fetch_optional!(
            &mut work,
            (PluginId,),
            "SELECT plugin_id FROM webhook_endpoints WHERE plugin_id = $1 LIMIT 1",
            id.0
        )?;
        if used.is_some() {
            return Err(ApiError::new(Code::PluginInUse, Code::PluginInUse.about()));
        }
        execute!(&mut work, "DELETE FROM plugins WHERE id = $1", id.0)?;
        Ok(NoContent)
    }

    /// Upload a version
    ///
    /// It becomes active by itself only if no version is.
    #[oai(
        path = "/plugins/:id/versions",
        method = "post",
        operation_id = "create_plugin_version"
    )]
    async fn add(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<PluginId>,
        component: Upload,
    ) -> Result<Created<VersionView>, ApiError> {
        // Locked, so that two uploads at once get two numbers.
        lock(&mut work, caller.project, id.0).await?;
        let last = versions(&mut work, id.0)
            .await?
            .first()
            .map_or(0, |version| version.version);
        let version = add_version(&mut work, id.0, last + 1, &component).await?;
        Ok(Created {
            location: format!("/public/v1/plugins/{}/versions", id.0),
            body: version,
        })
    }

    /// List versions
    #[oai(
        path = "/plugins/:id/versions",
        method = "get",
        operation_id = "list_plugin_versions"
    )]
    async fn list_versions(
        &self,
        caller: Caller,
        page: PageRequest,
        id: Path<PluginId>,
    ) -> Result<Page<VersionView>, ApiError> {
        find(&mut self.db.read().await?, caller.project, id.0).await?;
        Page::fetch(&self.db, page, id.0, &[], |row: VersionRow| Ok(row.into())).await
    }

    /// Activate a version
    ///
    /// Also an older one, to go back.
    #[oai(
        path = "/plugins/:id/activate",
        method = "post",
        operation_id = "activate_plugin_version"
    )]
    async fn activate(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<PluginId>,
        body: Body<Activation>,
    ) -> Result<Reply<PluginView>, ApiError> {
        if body.0.version < 1 {
            return Err(ApiError::invalid_body(
                "/version",
                "versions are numbered from 1",
            ));
        }
        let mut row = lock(&mut work, caller.project, id.0).await?;
        let version = versions(&mut work, id.0)
            .await?
            .into_iter()
            .find(|version| version.version == body.0.version)
            .ok_or_else(|| ApiError::not_found("version of this plugin"))?;
        if version.status != VersionStatus::Ready {
            return Err(ApiError::new(
                Code::Conflict,
                "Only a version that is `ready` can be activated.",
            ));
        }
        execute!(
            &mut work,
            "UPDATE plugins SET active_version = $2 WHERE id = $1",
            id.0,
            version.version
        )?;
        row.active_version = Some(version.version);
        Ok(Reply(show(&mut work, row).await?))
    }
}

fn check_name(name: String) -> Result<String, &'static str> {
    let fits = (1..=100).contains(&name.chars().count()) && !name.chars().any(char::is_control);
    if fits {
        Ok(name)
    } else {
        Err("a name has 1 to 100 characters, none of them a control character")
    }
}

async fn find(
    on: &mut impl Queryable,
    project: ProjectId,
    id: PluginId,
) -> Result<PluginRow, ApiError> {
    fetch_optional!(
        on,
        PluginRow,
        "SELECT id, name, active_version, created_at, updated_at FROM plugins \
         WHERE project_id = $1 AND id = $2",
        project,
        id
    )?
    .ok_or_else(|| ApiError::not_found("plugin"))
}

/// Finds a plugin to change it, and keeps other writers from it until the transaction ends.
async fn lock(
    on: &mut impl Queryable,
    project: ProjectId,
    id: PluginId,
) -> Result<PluginRow, ApiError> {
    fetch_optional!(
        on,
        PluginRow,
        "UPDATE plugins SET updated_at = $3 WHERE project_id = $1 AND id = $2 \
         RETURNING id, name, active_version, created_at, updated_at",
        project,
        id,
        Timestamp::now()
    )?
    .ok_or_else(|| ApiError::not_found("plugin"))
}

async fn versions(on: &mut impl Queryable, id: PluginId) -> sqlx::Result<Vec<VersionView>> {
    let rows = fetch_all!(
        on,
        VersionRow,
        "SELECT id, version, status, reason, sha256, size, exports, created_at FROM plugin_versions \
         WHERE plugin_id = $1 ORDER BY version DESC",
        id
    )?;
    Ok(rows.into_iter().map(VersionView::from).collect())
}

async fn show(on: &mut impl Queryable, row: PluginRow) -> sqlx::Result<PluginView> {
    Ok(PluginView {
        versions: versions(on, row.id).await?,
        id: row.id,
        name: row.name,
        active_version: row.active_version,
        created_at: row.created_at,
        updated_at: row.updated_at,
    })
}

async fn add_version(
    on: &mut impl Queryable,
    plugin: PluginId,
    version: i64,
    upload: &Upload,
) -> Result<VersionView, ApiError> {
    let Exports { transform, sign } = upload.exports;
    let exports = [("transform", transform), ("sign", sign)]
        .into_iter()
        .filter(|(_, has)| *has)
        .map(|(name, _)| name.to_owned())
        .collect();
    let row = VersionRow {
        id: uuid::Uuid::from_bytes(ulid::Ulid::generate().to_bytes()),
        version,
        status: JsonText(VersionStatus::Compiling),
        reason: None,
        sha256: Sha256::digest(&upload.component).to_vec(),
        size: i64::try_from(upload.component.len()).unwrap_or(i64::MAX),
        exports: JsonText(exports),
        created_at: Timestamp::now(),
    };
    execute!(
        on,
        "INSERT INTO plugin_versions (id, plugin_id, version, status, sha256, size, exports, component, created_at) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        row.id,
        plugin,
        version,
        JsonText(VersionStatus::Compiling),
        &row.sha256[..],
        row.size,
        JsonText(&row.exports.0),
        &upload.component[..],
        row.created_at
    )?;
    jobs::enqueue(
        on,
        &[CompilePlugin {
            plugin_id: plugin,
            version,
        }],
        row.created_at,
    )
    .await?;
    Ok(row.into())
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![
        page::texts::<PluginRow>(&[]),
        page::texts::<VersionRow>(&[]),
    ]
}
