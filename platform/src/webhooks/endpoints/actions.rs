//! What can be done with an endpoint: resume it, rotate its secret, send it a test.
//!
//! A test is an event for this endpoint alone, whatever
//! it listens to, and one attempt: it climbs no ladder and leaves no dead letter.

use std::time::Duration;

use poem_openapi::{OpenApi, param::Path};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Deserializer, de};

use super::{Endpoint, EndpointId, EndpointRow, rotation, show};
use crate::{
    contract::{
        Accepted, Action, ApiError, Caller, Code, RawJson, Reply, Work, payload::NoOptions,
        spec::Tag,
    },
    db::{Sealer, Timestamp, fetch_optional},
    webhooks::{
        attempts::Trigger,
        deliveries::{self, State},
        event_types::TestMessage,
        events, planning,
        repeats::{PlannedAttempt, PlannedDelivery},
        signature::EndpointSecret,
        tidy,
    },
};

/// The longest time that two secrets may be valid.
const LONGEST_OVERLAP: Duration = Duration::from_hours(30 * 24);

/// How a secret is rotated.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SecretRotation {
    /// How long the old secret signs too; absent: 24 hours.
    #[serde(default)]
    overlap: Overlap,
}

/// A time written `30s`, `15m`, `24h`, at most 30 days.
#[derive(Debug)]
struct Overlap(Duration);

impl Default for Overlap {
    fn default() -> Self {
        Self(Duration::from_hours(24))
    }
}

impl<'de> Deserialize<'de> for Overlap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text)
            .ok()
            .filter(|overlap| *overlap <= LONGEST_OVERLAP)
            .map(Self)
            .ok_or_else(|| {
                de::Error::custom("a duration is written 30s, 15m or 24h, here at most 720h")
            })
    }
}

impl JsonSchema for Overlap {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Overlap".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "examples": ["24h"]})
    }
}

/// The handlers of the actions below `/webhook-endpoints/{id}`.
#[derive(Debug)]
pub struct EndpointActionsApi {
    /// What seals secrets and headers.
    pub sealer: Sealer,
}

#[OpenApi(tag = "Tag::Endpoints")]
impl EndpointActionsApi {
    /// Resume an endpoint
    ///
    /// Enables it and sends what waited for it.
    #[oai(
        path = "/webhook-endpoints/:id/resume",
        method = "post",
        operation_id = "resume_webhook_endpoint"
    )]
    async fn resume(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<EndpointId>,
        _body: Action<NoOptions>,
    ) -> Result<Reply<Endpoint>, ApiError> {
        let row = fetch_optional!(
            &mut work,
            EndpointRow,
            "UPDATE webhook_endpoints SET enabled = $3, disabled_reason = NULL, updated_at = $4 \
             WHERE project_id = $1 AND id = $2 \
             RETURNING id, url, description, event_types, enabled, disabled_reason, plugin_id, \
             plugin_config, headers, previous_secret_until, failing_since, created_at, updated_at",
            caller.project,
            id.0,
            true,
            Timestamp::now()
        )?
        .ok_or_else(|| ApiError::not_found("endpoint"))?;
        tidy::now_and_later(&mut work, id.0, Some(true)).await?;
        Ok(Reply(show(&self.sealer, row)?))
    }

    /// Rotate the signing secret
    ///
    /// The answer shows the new secret, this once. Until the overlap ends the old one signs too:
    /// `webhook-signature` lists both, and `X-Botix-Signature-Previous` is sent. Rotated again
    /// meanwhile, each signs as long as it was to, in `webhook-signature`, the newest first, up to four
    /// beside the new one; further rotations are a `CONFLICT`. An overlap of `0s` ends all old ones at once.
    #[oai(
        path = "/webhook-endpoints/:id/rotate-secret",
        method = "post",
        operation_id = "rotate_webhook_endpoint_secret"
    )]
    async fn rotate_secret(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<EndpointId>,
        body: Action<SecretRotation>,
    ) -> Result<Reply<Endpoint>, ApiError> {
        let secret = EndpointSecret::generate();
        let until = Timestamp::now() + body.0.overlap.0;
        let whose = (caller.project, id.0);
        let row = rotation::rotate(&mut work, &self.sealer, whose, &secret, until).await?;
        Ok(Reply(Endpoint {
            secret: Some(secret.expose().expose_secret().to_owned()),
            ..show(&self.sealer, row)?
        }))
    }

    /// Send a test
    ///
    /// A `webhook.test` event for this endpoint alone, whether or not it listens to the type, in one
    /// attempt: a test that fails is not tried again and leaves no dead letter. `CONFLICT` while the
    /// endpoint is disabled.
    #[oai(
        path = "/webhook-endpoints/:id/test",
        method = "post",
        operation_id = "test_webhook_endpoint"
    )]
    async fn test(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<EndpointId>,
        _body: Action<NoOptions>,
    ) -> Result<Accepted<PlannedDelivery>, ApiError> {
        let owned = fetch_optional!(
            &mut work,
            (EndpointId,),
            "SELECT id FROM webhook_endpoints WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        let enabled = match owned {
            Some(_) => super::is_enabled_for_now(&mut work, id.0).await?,
            None => None,
        };
        if !enabled.ok_or_else(|| ApiError::not_found("endpoint"))? {
            return Err(ApiError::new(
                Code::Conflict,
                "The endpoint is disabled; resume it first.",
            ));
        }
        let message = TestMessage {
            message: "Hello from BOTIX".to_owned(),
        };
        let data = serde_json::value::to_raw_value(&message).map_err(ApiError::internal)?;
        let name = "webhook.test".to_owned();
        let event = events::insert(&mut work, caller.project, name, RawJson(data)).await?;
        let (delivery, request_id) =
            planning::create(&mut work, &event, id.0, State::Pending, true).await?;
        let row = deliveries::find(&mut work, caller.project, delivery).await?;
        Ok(Accepted {
            location: format!("/public/v1/webhook-deliveries/{delivery}"),
            body: PlannedDelivery {
                delivery: deliveries::show(row)?,
                planned_attempt: PlannedAttempt {
                    number: 1,
                    trigger: Trigger::Test,
                    request_id,
                },
            },
        })
    }
}
