//! Changing an endpoint: what may be asked, and what becomes of its row.

use poem_openapi::types::MaybeUndefined;
use schemars::JsonSchema;
use serde::Deserialize;

use super::{
    CustomHeaders, EndpointRow, Patterns, PluginId, RawJson, Text, check_config, check_plugin,
    check_url, given, open_headers, seal_headers,
};
use crate::{
    contract::{ApiError, auth::ProjectId},
    db::{JsonText, Queryable, Sealer},
};

/// What changes an endpoint: absent members stay, null clears.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EndpointChange {
    /// An https or http URL without credentials; cannot be cleared.
    #[serde(default)]
    #[schemars(with = "String")]
    url: MaybeUndefined<String>,
    /// A note of the tenant's.
    #[serde(default)]
    #[schemars(with = "Option<Text<500>>")]
    description: MaybeUndefined<Text<500>>,
    /// What to listen to; null, or `["*"]`: everything but `endpoint.*`, which has to be named.
    #[serde(default)]
    #[schemars(with = "Option<Patterns>")]
    event_types: MaybeUndefined<Patterns>,
    /// Whether webhooks go out; those that waited go when this becomes true. Cannot be cleared.
    #[serde(default)]
    #[schemars(with = "bool")]
    enabled: MaybeUndefined<bool>,
    /// The plugin.
    #[serde(default)]
    #[schemars(with = "Option<PluginId>")]
    plugin_id: MaybeUndefined<PluginId>,
    /// The plugin's configuration.
    #[serde(default)]
    #[schemars(with = "Option<RawJson>")]
    plugin_config: MaybeUndefined<RawJson>,
    /// Headers to send along, all of them; one given as it is shown, `********`, keeps its value.
    #[serde(default)]
    #[schemars(with = "Option<CustomHeaders>")]
    headers: MaybeUndefined<CustomHeaders>,
}

impl EndpointChange {
    /// Fails where it asks for what no endpoint can be.
    pub(super) async fn check(
        &self,
        on: &mut impl Queryable,
        project: ProjectId,
    ) -> Result<(), ApiError> {
        match &self.url {
            MaybeUndefined::Undefined => {}
            MaybeUndefined::Null => {
                return Err(ApiError::invalid_body(
                    "/url",
                    "an endpoint always has a URL",
                ));
            }
            MaybeUndefined::Value(url) => check_url(url)?,
        }
        if self.enabled.is_null() {
            return Err(ApiError::invalid_body(
                "/enabled",
                "an endpoint is enabled or not",
            ));
        }
        if let MaybeUndefined::Value(config) = &self.plugin_config {
            check_config(Some(config))?;
        }
        if let MaybeUndefined::Value(plugin) = &self.plugin_id {
            check_plugin(on, project, *plugin).await?;
        }
        Ok(())
    }

    /// The row as it is from now on.
    pub(super) fn apply(
        self,
        mut row: EndpointRow,
        sealer: &Sealer,
    ) -> Result<EndpointRow, ApiError> {
        if let MaybeUndefined::Value(url) = self.url {
            row.url = url;
        }
        if let MaybeUndefined::Value(enabled) = self.enabled {
            row.enabled = enabled;
            row.disabled_reason = None;
        }
        match self.description {
            MaybeUndefined::Undefined => {}
            MaybeUndefined::Null => row.description = None,
            MaybeUndefined::Value(text) => row.description = Some(text.0),
        }
        match self.event_types {
            MaybeUndefined::Undefined => {}
            MaybeUndefined::Null => row.event_types = JsonText(Patterns::all()),
            MaybeUndefined::Value(patterns) => row.event_types = JsonText(patterns),
        }
        match self.plugin_id {
            MaybeUndefined::Undefined => {}
            MaybeUndefined::Null => row.plugin_id = None,
            MaybeUndefined::Value(plugin) => row.plugin_id = Some(plugin),
        }
        match self.plugin_config {
            MaybeUndefined::Undefined => {}
            MaybeUndefined::Null => row.plugin_config = None,
            MaybeUndefined::Value(config) => row.plugin_config = Some(config.as_str().to_owned()),
        }
        match self.headers {
            MaybeUndefined::Undefined => {}
            MaybeUndefined::Null => {
                row.headers = seal_headers(sealer, row.id, &CustomHeaders::default());
            }
            MaybeUndefined::Value(headers) => {
                let known = open_headers(sealer, row.id, &row.headers)?;
                row.headers = seal_headers(sealer, row.id, &given(headers, &known)?);
            }
        }
        Ok(row)
    }
}
