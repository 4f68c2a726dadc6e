//! Webhook endpoints: where a project's events go, and how.
//!
//! The signing secret is shown once, when the endpoint is made, and kept sealed under the master key;
//! so are the endpoint's own headers, which often carry credentials, and whose values are never shown
//! again. An endpoint that is enabled again releases the deliveries that waited for it.

pub mod actions;
mod change;
mod checks;
mod rotation;
mod standing;

use poem_openapi::{OpenApi, param::Path};
use schemars::JsonSchema;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};

use super::{custom_headers::CustomHeaders, patterns::Patterns, signature::EndpointSecret, tidy};
use crate::{
    contract::{
        ApiError, Body, Caller, Created, NoContent, RawJson, Reply, Work,
        cursor::Position,
        page::{self, ListTexts, Listed, Page, PageRequest},
        spec::Tag,
        text::Text,
    },
    db::{Db, Id, JsonText, Kind, Sealer, Timestamp, execute, fetch_optional},
    plugins::PluginId,
};

pub use change::EndpointChange;
use checks::{check_config, check_plugin, check_url};

pub(super) use rotation::Earlier;
pub use rotation::forget_secrets;
pub use standing::disable;
pub(super) use standing::is_enabled_for_now;

/// An endpoint; names the kind of its id.
pub struct EndpointKind;

impl Kind for EndpointKind {
    const PREFIX: &'static str = "whe";
}

/// The id of an endpoint.
pub type EndpointId = Id<EndpointKind>;

/// A webhook endpoint.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Endpoint {
    /// Its id.
    pub id: EndpointId,
    /// Where webhooks go.
    pub url: String,
    /// A note of the tenant's.
    pub description: Option<String>,
    /// What it listens to.
    pub event_types: Patterns,
    /// Whether webhooks go out; while false, they wait.
    pub enabled: bool,
    /// Why the platform disabled it.
    pub disabled_reason: Option<String>,
    /// The plugin that transforms and signs its webhooks.
    pub plugin_id: Option<PluginId>,
    /// The plugin's configuration here.
    pub plugin_config: Option<RawJson>,
    /// Its own headers; values are not shown.
    pub headers: CustomHeaders,
    /// The signing secret, shown when it is made and never again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// Until when the secret before this one signs too, after a rotation. Those before that sign as long as
    /// they were to.
    pub previous_secret_until: Option<Timestamp>,
    /// Since when it fails: a delivery failed three times or was given up, and none succeeded since.
    pub failing_since: Option<Timestamp>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
}

/// What makes an endpoint.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEndpoint {
    /// An https or http URL without credentials.
    url: String,
    /// A note of the tenant's.
    description: Option<Text<500>>,
    /// What to listen to; absent, or `["*"]`: everything but `endpoint.*`, which has to be named.
    #[serde(default)]
    event_types: Option<Patterns>,
    /// Whether webhooks go out at once; absent: they do.
    #[serde(default)]
    enabled: Option<bool>,
    /// A plugin that transforms and signs the webhooks.
    #[serde(default)]
    plugin_id: Option<PluginId>,
    /// Any JSON that the plugin understands, at most 64 KiB.
    #[serde(default)]
    plugin_config: Option<RawJson>,
    /// Headers to send along, by name.
    #[serde(default)]
    headers: Option<CustomHeaders>,
}

#[derive(Debug, sqlx::FromRow)]
struct EndpointRow {
    id: EndpointId,
    url: String,
    description: Option<String>,
    event_types: JsonText<Patterns>,
    enabled: bool,
    disabled_reason: Option<String>,
    plugin_id: Option<PluginId>,
    plugin_config: Option<String>,
    headers: Vec<u8>,
    previous_secret_until: Option<Timestamp>,
    failing_since: Option<Timestamp>,
    created_at: Timestamp,
    updated_at: Timestamp,
}

const COLUMNS: &str = "id, url, description, event_types, enabled, disabled_reason, plugin_id, \
                       plugin_config, headers, previous_secret_until, failing_since, created_at, \
                       updated_at";

impl Listed for EndpointRow {
    const RESOURCE: &'static str = "webhook-endpoints";
    const TABLE: &'static str = "webhook_endpoints";
    const COLUMNS: &'static str = COLUMNS;

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

/// Opens an endpoint's own headers.
pub fn open_headers(
    sealer: &Sealer,
    id: EndpointId,
    sealed: &[u8],
) -> Result<CustomHeaders, ApiError> {
    let json = sealer
        .open(&id.to_string(), sealed)
        .map_err(ApiError::internal)?;
    serde_json::from_slice(&json).map_err(ApiError::internal)
}

/// The handlers of `/webhook-endpoints`.
#[derive(Debug)]
pub struct EndpointsApi {
    /// The database.
    pub db: Db,
    /// What seals secrets and headers.
    pub sealer: Sealer,
}

#[OpenApi(tag = "Tag::Endpoints")]
impl EndpointsApi {
    /// Create an endpoint
    ///
    /// The answer shows the signing secret, this once.
    #[oai(
        path = "/webhook-endpoints",
        method = "post",
        operation_id = "create_webhook_endpoint"
    )]
    async fn create(
        &self,
        caller: Caller,
        mut work: Work,
        body: Body<NewEndpoint>,
    ) -> Result<Created<Endpoint>, ApiError> {
        let new = body.0;
        check_url(&new.url)?;
        check_config(new.plugin_config.as_ref())?;
        if let Some(plugin) = new.plugin_id {
            check_plugin(&mut work, caller.project, plugin).await?;
        }
        let secret = EndpointSecret::generate();
        let now = Timestamp::now();
        let headers = new.headers.unwrap_or_default();
        let headers = given(headers, &CustomHeaders::default())?;
        let endpoint = Endpoint {
            id: EndpointId::generate(),
            url: new.url,
            description: new.description.map(|text| text.0),
            event_types: new.event_types.unwrap_or_else(Patterns::all),
            enabled: new.enabled.unwrap_or(true),
            disabled_reason: None,
            plugin_id: new.plugin_id,
            plugin_config: new.plugin_config,
            headers: headers.clone().masked(),
            secret: Some(secret.expose().expose_secret().to_owned()),
            previous_secret_until: None,
            failing_since: None,
            created_at: now,
            updated_at: now,
        };
        execute!(
            &mut work,
            "INSERT INTO webhook_endpoints (id, project_id, url, description, event_types, enabled, \
             plugin_id, plugin_config, headers, secret, created_at, updated_at) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $11)",
            endpoint.id,
            caller.project,
            &endpoint.url,
            endpoint.description.as_deref(),
            JsonText(&endpoint.event_types),
            endpoint.enabled,
            endpoint.plugin_id,
            endpoint.plugin_config.as_ref().map(RawJson::as_str),
            seal_headers(&self.sealer, endpoint.id, &headers),
            self.sealer.seal(&endpoint.id.to_string(), secret.key()),
            now
        )?;
        Ok(Created {
            location: format!("/public/v1/webhook-endpoints/{}", endpoint.id),
            body: endpoint,
        })
    }

    /// List endpoints
    #[oai(
        path = "/webhook-endpoints",
        method = "get",
        operation_id = "list_webhook_endpoints"
    )]
    async fn list(&self, caller: Caller, page: PageRequest) -> Result<Page<Endpoint>, ApiError> {
        Page::fetch(&self.db, page, caller.project, &[], |row| {
            show(&self.sealer, row)
        })
        .await
    }

    /// Read an endpoint
    #[oai(
        path = "/webhook-endpoints/:id",
        method = "get",
        operation_id = "get_webhook_endpoint"
    )]
    async fn get(&self, caller: Caller, id: Path<EndpointId>) -> Result<Reply<Endpoint>, ApiError> {
        let mut reader = self.db.read().await?;
        let row = fetch_optional!(
            &mut reader,
            EndpointRow,
            "SELECT id, url, description, event_types, enabled, disabled_reason, plugin_id, \
             plugin_config, headers, previous_secret_until, failing_since, created_at, updated_at \
             FROM webhook_endpoints WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        Ok(Reply(show(
            &self.sealer,
            row.ok_or_else(|| ApiError::not_found("endpoint"))?,
        )?))
    }

    /// Change an endpoint
    #[oai(
        path = "/webhook-endpoints/:id",
        method = "patch",
        operation_id = "update_webhook_endpoint"
    )]
    async fn update(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<EndpointId>,
        body: Body<EndpointChange>,
    ) -> Result<Reply<Endpoint>, ApiError> {
        let change = body.0;
        change.check(&mut work, caller.project).await?;
        // The update comes first: it keeps other writers of this endpoint waiting until we commit.
        let row = fetch_optional!(
            &mut work,
            EndpointRow,
            "UPDATE webhook_endpoints SET updated_at = $3 WHERE project_id = $1 AND id = $2 \
             RETURNING id, url, description, event_types, enabled, disabled_reason, plugin_id, \
             plugin_config, headers, previous_secret_until, failing_since, created_at, updated_at",
            caller.project,
            id.0,
            Timestamp::now()
        )?
        .ok_or_else(|| ApiError::not_found("endpoint"))?;
        let was_enabled = row.enabled;
        let row = change.apply(row, &self.sealer)?;
        execute!(
            &mut work,
            "UPDATE webhook_endpoints SET url = $2, description = $3, event_types = $4, enabled = $5, \
             disabled_reason = $6, plugin_id = $7, plugin_config = $8, headers = $9 WHERE id = $1",
            row.id,
            &row.url,
            row.description.as_deref(),
            JsonText(&row.event_types.0),
            row.enabled,
            row.disabled_reason.as_deref(),
            row.plugin_id,
            row.plugin_config.as_deref(),
            &row.headers[..]
        )?;
        if row.enabled != was_enabled {
            tidy::now_and_later(&mut work, row.id, Some(row.enabled)).await?;
        }
        Ok(Reply(show(&self.sealer, row)?))
    }

    /// Delete an endpoint
    ///
    /// Its deliveries that are not finished are cancelled.
    #[oai(
        path = "/webhook-endpoints/:id",
        method = "delete",
        operation_id = "delete_webhook_endpoint"
    )]
    async fn delete(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<EndpointId>,
    ) -> Result<NoContent, ApiError> {
        let deleted = execute!(
            &mut work,
            "DELETE FROM webhook_endpoints WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        if deleted == 0 {
            return Err(ApiError::not_found("endpoint"));
        }
        tidy::now_and_later(&mut work, id.0, None).await?;
        Ok(NoContent)
    }
}

/// Seals an endpoint's own headers.
fn seal_headers(sealer: &Sealer, id: EndpointId, headers: &CustomHeaders) -> Vec<u8> {
    let json = crate::contract::payload::to_json(headers);
    sealer.seal(&id.to_string(), &json)
}

/// A value that is given as it is shown stays as it was.
fn given(headers: CustomHeaders, known: &CustomHeaders) -> Result<CustomHeaders, ApiError> {
    (headers.given(known)).map_err(|wrong| ApiError::invalid_body("/headers", wrong))
}

fn show(sealer: &Sealer, row: EndpointRow) -> Result<Endpoint, ApiError> {
    let headers = open_headers(sealer, row.id, &row.headers)?.masked();
    let plugin_config = row
        .plugin_config
        .map(|config| serde_json::value::RawValue::from_string(config).map(RawJson))
        .transpose()
        .map_err(ApiError::internal)?;
    let now = Timestamp::now();
    Ok(Endpoint {
        id: row.id,
        url: row.url,
        description: row.description,
        event_types: row.event_types.0,
        enabled: row.enabled,
        disabled_reason: row.disabled_reason,
        plugin_id: row.plugin_id,
        plugin_config,
        headers,
        secret: None,
        previous_secret_until: row.previous_secret_until.filter(|until| *until > now),
        failing_since: row.failing_since,
        created_at: row.created_at,
        updated_at: row.updated_at,
    })
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![page::texts::<EndpointRow>(&[])]
}
