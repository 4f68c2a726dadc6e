//! What an attempt sends: the body, what the plugin makes of it, and the headers.
//!
//! An attempt of the ladder is made from the event and the plugin as they are now. A repeat takes what
//! was sent last: the same body, and the headers that the plugin's `transform` had added; `sign` runs
//! again, because receivers refuse signatures that have become old.

use std::{sync::Arc, time::SystemTime};

use poem::http::{HeaderMap, HeaderName, HeaderValue};
use url::Position;

use super::{Loaded, Outlet, Worker};
use crate::{
    contract::reserved_headers::is_reserved,
    db::{JsonText, Timestamp, fetch_optional},
    plugins,
    webhooks::{
        attempts::{HeaderView, PluginUse, shown_headers},
        custom_headers::MASK,
        deliveries::DeliveryId,
        headers, payload,
        planning::DeliverWebhook,
    },
};

/// A webhook as it would leave, or why it does not.
pub(super) enum Prepared {
    Send {
        body: String,
        headers: Vec<(String, String)>,
        plugin: Option<PluginUse>,
    },
    Drop {
        reason: String,
        plugin: PluginUse,
    },
    Fail {
        error: String,
        plugin: Option<PluginUse>,
    },
    Wait,
}

/// A webhook as it was sent before.
#[derive(sqlx::FromRow)]
struct Before {
    payload: String,
    request_headers: JsonText<HeaderView>,
}

impl Before {
    /// What the plugin had added: all that is neither the platform's nor, masked, the endpoint's own.
    fn of_plugin(&self) -> Vec<(String, String)> {
        let shown = self.request_headers.0.iter();
        shown
            .filter(|(name, value)| {
                let is_ours = *name == "accept" && *value == "*/*";
                *value != MASK && !is_ours && name.parse().is_ok_and(|name| !is_reserved(&name))
            })
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }
}

impl Worker {
    /// Builds the body and lets the plugin have its say.
    pub(super) async fn prepare(
        &self,
        job: &DeliverWebhook,
        loaded: &Loaded,
        outlet: &Outlet,
        now: Timestamp,
    ) -> sqlx::Result<Prepared> {
        let event_id = loaded.event_id.to_string();
        let timestamp = loaded.happened_at.to_string();
        let project_id = loaded.project_id.to_string();
        let event = payload::Event {
            id: &event_id,
            event_type: &loaded.event_type,
            timestamp: &timestamp,
            project_id: &project_id,
            data: loaded.data.as_ref().map(|data| data.0.get()),
        };
        let body = payload::build(&event, &self.public_url).body;
        let before = match job.repeat {
            Some(_) => self.before(job.delivery_id).await?,
            None => None,
        };
        let Some(plugin_id) = loaded.plugin_id else {
            let (body, headers) = match before {
                Some(before) => (before.payload.clone(), before.of_plugin()),
                None => (body, Vec::new()),
            };
            return Ok(Prepared::Send {
                body,
                headers,
                plugin: None,
            });
        };
        let version = loaded.plugin_version.zip(loaded.plugin_sha256.as_deref());
        let active = match self.plugins.active(plugin_id, version).await? {
            plugins::Active::Ready(active) => active,
            plugins::Active::Compiling => return Ok(Prepared::Wait),
            plugins::Active::Unusable(why) => {
                return Ok(Prepared::Fail {
                    error: format!("plugin: {why}"),
                    plugin: None,
                });
            }
        };
        let call = plugins::Call {
            event: plugins::Event {
                id: event_id.clone(),
                event_type: loaded.event_type.clone(),
                timestamp: timestamp.clone(),
                body,
            },
            delivery: plugins::Delivery {
                endpoint_id: loaded.endpoint_id.to_string(),
                url: loaded.url.clone().unwrap_or_default(),
                attempt: u32::try_from(job.number).unwrap_or(u32::MAX),
                request_id: job.request_id(loaded.request_id).to_string(),
            },
            config: loaded.plugin_config.as_deref().unwrap_or("{}").into(),
            keys: Arc::new(
                [("endpoint", outlet.secret.key().to_vec())]
                    .into_iter()
                    .collect(),
            ),
            now_ms: u64::try_from(now.micros() / 1_000).unwrap_or(0),
        };
        let report = match before {
            Some(before) => {
                let headers = before.of_plugin();
                self.plugins
                    .sign(&active, call, before.payload, headers)
                    .await
            }
            None => self.plugins.run(&active, call).await,
        };
        let plugin = PluginUse {
            id: plugin_id,
            version: active.version,
            log: report.log,
        };
        Ok(match report.outcome {
            plugins::Outcome::Deliver { body, headers } => Prepared::Send {
                body,
                headers,
                plugin: Some(plugin),
            },
            plugins::Outcome::Drop { reason } => Prepared::Drop { reason, plugin },
            plugins::Outcome::Failed { stage, error } => Prepared::Fail {
                error: format!("plugin: {}: {error}", stage.as_str()),
                plugin: Some(plugin),
            },
        })
    }

    /// What the last attempt of a delivery sent, if one did.
    async fn before(&self, delivery: DeliveryId) -> sqlx::Result<Option<Before>> {
        let mut reader = self.db.read().await?;
        fetch_optional!(
            &mut reader,
            Before,
            "SELECT payload, request_headers FROM webhook_attempts \
             WHERE delivery_id = $1 AND payload IS NOT NULL ORDER BY number DESC LIMIT 1",
            delivery
        )
    }

    /// The headers to send, and the same as they are recorded.
    pub(super) fn headers(
        job: &DeliverWebhook,
        loaded: &Loaded,
        outlet: &Outlet,
        body: &str,
        from_plugin: &[(String, String)],
    ) -> Result<(HeaderMap, HeaderView), String> {
        let attempt = headers::Attempt {
            event_id: &loaded.event_id.to_string(),
            event_type: &loaded.event_type,
            request_id: &job.request_id(loaded.request_id).to_string(),
            number: u32::try_from(job.number).unwrap_or(u32::MAX),
            sent_at: SystemTime::now(),
        };
        let mut all = headers::headers(&attempt, &outlet.secret, &outlet.previous, body.as_bytes())
            .map_err(|error| error.to_string())?;
        let mut masked = Vec::new();
        for (name, value) in outlet.headers.iter() {
            masked.push(name.clone());
            all.insert(name, value);
        }
        for (name, value) in from_plugin {
            let name: HeaderName = name
                .parse()
                .map_err(|_| format!("`{name}` is no header name"))?;
            let value: HeaderValue = value
                .parse()
                .map_err(|_| format!("the value of `{name}` is no header value"))?;
            if is_reserved(&name) {
                return Err(format!("the plugin may not set `{name}`"));
            }
            masked.retain(|own| *own != name);
            all.insert(name, value);
        }
        let given = all.iter().map(|(name, value)| {
            let value = if masked.contains(name) {
                MASK
            } else {
                value.to_str().unwrap_or_default()
            };
            (name.as_str(), value)
        });
        // The two that follow from URL and body are written when it is sent.
        let length = body.len().to_string();
        let host = outlet
            .url
            .as_ref()
            .map(|url| &url[Position::BeforeHost..Position::AfterPort]);
        let framing = [("host", host), ("content-length", Some(&*length))];
        let framing =
            (framing.iter()).filter_map(|(name, value)| value.map(|value| (*name, value)));
        let shown = shown_headers(given.chain(framing));
        Ok((all, shown))
    }
}
