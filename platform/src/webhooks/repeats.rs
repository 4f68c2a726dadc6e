//! Repeats: attempts that somebody asked for, beside the ladder.
//!
//! A manual retry sends a webhook again to its endpoint, a redirect sends it to a bin of the inspector.
//! Both send the body that was sent last, byte for byte; if none was sent yet, one made as for any
//! attempt. A repeat takes the delivery's next number when it is planned, has a request id of its own,
//! and lives in its job alone until it is on record: planned, it is always recorded, also when nothing
//! could be sent. The ladder goes on beside it, whatever comes of it. Only where the ladder is over
//! does the success of a manual retry count: the delivery is `delivered`, its dead letter resolved. No
//! repeat makes a dead letter or disables an endpoint.

use poem_openapi::{OpenApi, param::Path};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    attempts::Trigger,
    dead_letters::{self, Resolution},
    deliveries::{self, Delivery, DeliveryId, DeliveryRow},
    endpoints::{self, EndpointId},
    inspector::{self, BinId},
    ladder::Outcome,
    planning::DeliverWebhook,
    settle::Settlement,
};
use crate::{
    contract::{
        Accepted, Action, ApiError, Caller, Code, Work, auth::ProjectId, payload::NoOptions,
        request_id::RequestId, spec::Tag,
    },
    db::{Queryable, Timestamp, Tx, execute, fetch_one},
    jobs,
};

/// What a job needs to know of a repeat.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Repeat {
    /// What made it happen.
    pub trigger: Trigger,
    /// Its own request id.
    pub request_id: RequestId,
    /// The URL of the bin that it goes to in place of the endpoint. Written by [`redirect`] alone, for
    /// a bin it has just made: it is sent to wherever it points, as the inspector may be anywhere.
    ///
    /// [`redirect`]: RepeatsApi::redirect
    bin: Option<String>,
}

impl Repeat {
    /// The URL of the bin that it goes to.
    pub(super) fn bin(&self) -> Option<&str> {
        self.bin.as_deref()
    }

    /// Why nothing is sent, given whether the endpoint is enabled, if it is there at all.
    pub(super) fn refused(&self, enabled: Option<bool>) -> Option<&'static str> {
        match enabled {
            None => Some("endpoint_deleted: the endpoint is gone; nothing was sent"),
            Some(false) if self.bin.is_none() => {
                Some("endpoint_disabled: the endpoint is disabled; nothing was sent")
            }
            Some(_) => None,
        }
    }
}

/// An attempt that will be made.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PlannedAttempt {
    /// Its number in the delivery.
    pub number: i64,
    /// What makes it happen.
    pub trigger: Trigger,
    /// `X-Botix-Request-Id` as it will be sent.
    pub request_id: RequestId,
}

/// A delivery, and an attempt that will be made of it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PlannedDelivery {
    /// The delivery.
    #[serde(flatten)]
    pub delivery: Delivery,
    /// The attempt; it is in `/webhook-deliveries/{id}/attempts` once it was made.
    pub planned_attempt: PlannedAttempt,
}

/// Where a webhook was redirected to.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Redirection {
    /// The bin, made for it.
    pub bin_id: BinId,
    /// Where the bin receives.
    pub url: String,
}

/// The handlers that repeat a delivery.
#[derive(Debug)]
pub struct RepeatsApi {
    /// What the addresses of bins start with.
    pub public_url: String,
}

#[OpenApi(tag = "Tag::Deliveries")]
impl RepeatsApi {
    /// Retry a delivery now
    ///
    /// Sends the body that was sent last again, with a new request id, beside the ladder: whatever
    /// comes of it, attempts that are planned stay planned. Where the ladder is over and the retry
    /// succeeds, the delivery is `delivered` and its dead letter is resolved. `CONFLICT` while the
    /// endpoint is disabled and when it was deleted.
    #[oai(
        path = "/webhook-deliveries/:id/retry",
        method = "post",
        operation_id = "retry_webhook_delivery"
    )]
    async fn retry(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<DeliveryId>,
        _body: Action<NoOptions>,
    ) -> Result<Accepted<PlannedDelivery>, ApiError> {
        let repeat = Repeat {
            trigger: Trigger::Manual,
            request_id: RequestId::generate(),
            bin: None,
        };
        let (row, planned_attempt) = plan(&mut work, caller.project, id.0, repeat, None).await?;
        Ok(Accepted {
            location: format!("/public/v1/webhook-deliveries/{}", id.0),
            body: PlannedDelivery {
                delivery: deliveries::show(row)?,
                planned_attempt,
            },
        })
    }

    /// Redirect a delivery to the inspector
    ///
    /// Makes a bin and sends the same webhook there, body and signatures as the endpoint would get
    /// them; the values of the endpoint's own headers are masked. `CONFLICT` when the endpoint was
    /// deleted: then nothing could be signed.
    #[oai(
        path = "/webhook-deliveries/:id/redirect",
        method = "post",
        operation_id = "redirect_webhook_delivery"
    )]
    async fn redirect(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<DeliveryId>,
        _body: Action<NoOptions>,
    ) -> Result<Accepted<Redirection>, ApiError> {
        let bin = inspector::create_bin(&mut work, caller.project).await?;
        let url = inspector::url_of(&self.public_url, bin);
        let repeat = Repeat {
            trigger: Trigger::Redirect,
            request_id: RequestId::generate(),
            bin: Some(url.clone()),
        };
        plan(&mut work, caller.project, id.0, repeat, Some(bin)).await?;
        Ok(Accepted {
            location: format!("/public/v1/inspector/bins/{bin}/requests"),
            body: Redirection { bin_id: bin, url },
        })
    }
}

/// Gives a repeat its number and its job.
async fn plan(
    work: &mut Work,
    project: ProjectId,
    id: DeliveryId,
    repeat: Repeat,
    bin: Option<BinId>,
) -> Result<(DeliveryRow, PlannedAttempt), ApiError> {
    let row = deliveries::find(work, project, id).await?;
    // The endpoint first, as everybody does who locks both.
    let enabled = endpoints::is_enabled_for_now(work, row.endpoint_id).await?;
    if repeat.refused(enabled).is_some() {
        let why = match enabled {
            Some(_) => "The endpoint is disabled; resume it first.",
            None => "The endpoint of this delivery was deleted.",
        };
        return Err(ApiError::new(Code::Conflict, why));
    }
    let number = next_number(work, id, Timestamp::now()).await?;
    let planned = PlannedAttempt {
        number,
        trigger: repeat.trigger,
        request_id: repeat.request_id,
    };
    let job = DeliverWebhook {
        delivery_id: id,
        number,
        copy: 0,
        project_id: project,
        // Where there must be room: a bin has room of its own, as if it were an endpoint.
        endpoint_id: bin.map_or(row.endpoint_id, |bin| EndpointId::from_ulid(bin.ulid())),
        repeat: Some(repeat),
    };
    jobs::enqueue(work, &[job], Timestamp::now()).await?;
    Ok((row, planned))
}

/// Takes the next number of a delivery.
async fn next_number(
    on: &mut impl Queryable,
    delivery: DeliveryId,
    now: Timestamp,
) -> sqlx::Result<i64> {
    let (number,) = fetch_one!(
        on,
        (i64,),
        "UPDATE webhook_deliveries SET next_number = next_number + 1, updated_at = $2 WHERE id = $1 \
         RETURNING next_number - 1",
        delivery,
        now
    )?;
    Ok(number)
}

/// Notes at its delivery what came of a repeat.
pub(super) async fn settle(settlement: &Settlement, tx: &mut Tx) -> sqlx::Result<()> {
    let manual = settlement.trigger == Trigger::Manual;
    let received = manual && settlement.outcome == Outcome::Delivered;
    let now = Timestamp::now();
    execute!(
        tx,
        "UPDATE webhook_deliveries SET attempts = attempts + 1, \
         state = CASE WHEN $2 AND state IN ('dead', 'dropped') THEN 'delivered' ELSE state END, \
         last_status_code = COALESCE($3, last_status_code), updated_at = $4 WHERE id = $1",
        settlement.delivery,
        received,
        settlement.status_code.filter(|_| manual),
        now
    )?;
    if received {
        dead_letters::resolve(tx, settlement.delivery, Resolution::Retried, now).await?;
    }
    if let (Outcome::Interrupted, Some(repeat)) = (&settlement.outcome, &settlement.repeat) {
        let number = next_number(tx, settlement.delivery, now).await?;
        let job = DeliverWebhook {
            delivery_id: settlement.delivery,
            number,
            copy: 0,
            project_id: settlement.project,
            endpoint_id: settlement.room,
            repeat: Some(repeat.clone()),
        };
        jobs::enqueue(tx, &[job], now).await?;
    }
    Ok(())
}
