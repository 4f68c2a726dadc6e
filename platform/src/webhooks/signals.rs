//! Signals: what a project is told about its own endpoints, as events like any other.
//!
//! `endpoint.failing` once an episode: when a delivery has failed three times or is given up, unless
//! the endpoint was failing already; a success ends the episode. `endpoint.disabled` when an answer of
//! 410 disabled it. They go to the endpoints that name them, `endpoint.*` or the type, but not to the one
//! they tell of; `*` is what happens in the business, and where everything fails, everybody telling
//! everybody would only make more dead letters. They name no URL, which often is a secret between two
//! parties. A webhook that tells of an endpoint and fails itself raises nothing further, or two
//! endpoints could keep telling of each other for ever.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    attempts::Trigger,
    deliveries::DeliveryId,
    endpoints::{self, EndpointId},
    event_types::EventType,
    events::{self, Audience},
    ladder::{Next, Outcome},
    settle::Settlement,
    tidy,
};
use crate::{
    contract::RawJson,
    db::{Timestamp, Tx, execute},
};

const FAILING: &str = "endpoint.failing";
const DISABLED: &str = "endpoint.disabled";

/// The types of all signals.
pub(super) const TYPES: [&str; 2] = [FAILING, DISABLED];

/// The failed attempt of a ladder after which the endpoint counts as failing.
const PATIENCE: i64 = 3;

/// Data of `endpoint.failing`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct EndpointFailing {
    /// The endpoint.
    pub endpoint_id: EndpointId,
    /// The delivery that failed three times or was given up.
    pub delivery_id: DeliveryId,
    /// What was seen last: `status 500`, or the kind of error and its detail.
    pub reason: String,
    /// When it began to count as failing.
    pub since: Timestamp,
}

/// Data of `endpoint.disabled`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct EndpointDisabled {
    /// The endpoint.
    pub endpoint_id: EndpointId,
    /// The delivery that was answered so.
    pub delivery_id: DeliveryId,
    /// Why: `gone`, an answer of 410.
    pub reason: String,
    /// When it was disabled.
    pub disabled_at: Timestamp,
}

/// The types of these events.
pub fn event_types() -> Vec<EventType> {
    vec![
        EventType::of::<EndpointFailing>(
            FAILING,
            "Webhooks to an endpoint of this project fail. Sent to others that name the type or `endpoint.*`.",
        ),
        EventType::of::<EndpointDisabled>(
            DISABLED,
            "An endpoint answered 410 and was disabled. Sent to others that name the type or `endpoint.*`.",
        ),
    ]
}

/// Whether what follows an attempt is noted at its endpoint, whose row it locks for that.
pub(super) fn are_raised(settlement: &Settlement, next: Next) -> bool {
    let begins_to_fail = !settlement.was_failing;
    let noted_by_ladder = match next {
        Next::Dead {
            disable_endpoint: true,
            ..
        } => true,
        Next::Dead { .. } => begins_to_fail,
        Next::At { .. } => begins_to_fail && settlement.step == PATIENCE,
        Next::Again | Next::Done => false,
    };
    settlement.trigger == Trigger::Ladder && noted_by_ladder
        || settlement.trigger != Trigger::Redirect && ends_failing(settlement)
}

fn ends_failing(settlement: &Settlement) -> bool {
    settlement.was_failing && settlement.outcome == Outcome::Delivered
}

/// Notes at the endpoint what came of an attempt of the ladder, and tells of it.
pub(super) async fn after(settlement: &Settlement, tx: &mut Tx, next: Next) -> sqlx::Result<()> {
    let now = Timestamp::now();
    match next {
        Next::Dead {
            disable_endpoint: true,
            ..
        } => disabled(settlement, tx, now).await,
        Next::Dead { .. } => failing(settlement, tx, now).await,
        Next::At { .. } if settlement.step == PATIENCE => failing(settlement, tx, now).await,
        Next::At { .. } | Next::Again | Next::Done => Ok(()),
    }
}

/// Ends the episode, if there is one, when the endpoint took a webhook.
pub(super) async fn recovered(settlement: &Settlement, tx: &mut Tx) -> sqlx::Result<()> {
    if ends_failing(settlement) {
        execute!(
            tx,
            "UPDATE webhook_endpoints SET failing_since = NULL WHERE id = $1 \
             AND failing_since IS NOT NULL",
            settlement.endpoint
        )?;
    }
    Ok(())
}

async fn failing(settlement: &Settlement, tx: &mut Tx, now: Timestamp) -> sqlx::Result<()> {
    let tells_of_one = TYPES.contains(&&*settlement.event_type);
    if settlement.was_failing || tells_of_one {
        return Ok(());
    }
    let begun = execute!(
        tx,
        "UPDATE webhook_endpoints SET failing_since = $2 WHERE id = $1 AND failing_since IS NULL",
        settlement.endpoint,
        now
    )?;
    if begun == 0 {
        return Ok(());
    }
    let data = EndpointFailing {
        endpoint_id: settlement.endpoint,
        delivery_id: settlement.delivery,
        reason: settlement.kind_seen(),
        since: now,
    };
    tell(settlement, tx, FAILING, &data).await
}

async fn disabled(settlement: &Settlement, tx: &mut Tx, now: Timestamp) -> sqlx::Result<()> {
    const REASON: &str = "gone";
    let disabled = endpoints::disable(tx, settlement.endpoint, REASON, now).await?;
    tidy::later(tx, settlement.endpoint).await?;
    if disabled == 0 {
        return Ok(());
    }
    let data = EndpointDisabled {
        endpoint_id: settlement.endpoint,
        delivery_id: settlement.delivery,
        reason: REASON.to_owned(),
        disabled_at: now,
    };
    tell(settlement, tx, DISABLED, &data).await
}

async fn tell(
    settlement: &Settlement,
    tx: &mut Tx,
    event_type: &str,
    data: &impl Serialize,
) -> sqlx::Result<()> {
    let data = serde_json::value::to_raw_value(data)
        .map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
    let event_type = event_type.to_owned();
    let event = events::insert(tx, settlement.project, event_type, RawJson(data)).await?;
    let audience = Audience::Named {
        except: settlement.endpoint,
    };
    events::fan_out(tx, &event, audience).await
}
