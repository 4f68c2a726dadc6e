//! What an endpoint is checked for when it is made or changed.

use crate::{
    contract::{ApiError, RawJson, auth::ProjectId},
    db::{Conn, Queryable, fetch_optional},
    plugins::PluginId,
    webhooks::target::{TargetError, TargetPolicy, parse_target},
};

/// Checks the form of a URL. Whether its address is allowed is judged when a webhook connects: what
/// a name resolves to then is not known now.
pub(super) fn check_url(url: &str) -> Result<(), ApiError> {
    match parse_target(url, TargetPolicy::default()) {
        Ok(_) | Err(TargetError::Refused(_)) => Ok(()),
        Err(error) => Err(ApiError::invalid_body("/url", error.to_string())),
    }
}

/// Checks the size of a plugin's configuration.
pub(super) fn check_config(config: Option<&RawJson>) -> Result<(), ApiError> {
    if config.is_some_and(|config| config.as_str().len() > 65_536) {
        return Err(ApiError::invalid_body(
            "/plugin_config",
            "a configuration has at most 65,536 bytes",
        ));
    }
    Ok(())
}

/// Checks that a plugin is there, and keeps it there until the caller commits.
pub(super) async fn check_plugin(
    on: &mut impl Queryable,
    project: ProjectId,
    plugin: PluginId,
) -> Result<(), ApiError> {
    // Shared, so that the plugin cannot be deleted before this endpoint that names it commits.
    let text = match on.conn() {
        Conn::Postgres(_) => "SELECT id FROM plugins WHERE project_id = $1 AND id = $2 FOR SHARE",
        Conn::Sqlite(_) => "SELECT id FROM plugins WHERE project_id = $1 AND id = $2",
    };
    let row = fetch_optional!(on, (PluginId,), text, project, plugin)?;
    row.map(drop).ok_or_else(|| {
        ApiError::invalid_body("/plugin_id", "there is no such plugin in this project")
    })
}
