//! How a project's webhooks stand, at a glance: for people, each list and count with an end.

use std::time::Duration;

use serde_json::value::RawValue;

use super::{deliveries::State, endpoints::EndpointId, events::EventId, signals};
use crate::{
    contract::auth::ProjectId,
    db::{Db, JsonText, Queryable, Timestamp, fetch_all, fetch_one, fetch_optional},
};

/// The most that is counted.
pub const MOST: i64 = 10_000;

/// Signals that are shown.
const SIGNALS: i64 = 20;

/// Endpoints that are shown.
const ENDPOINTS: i64 = 200;

/// Days of dead letters that are shown, today's among them.
const DAYS: i64 = 14;

const DAY: Duration = Duration::from_hours(24);

/// How the webhooks of a project stand.
#[derive(Debug)]
pub struct Standing {
    /// Its endpoints, those that take nothing first.
    pub endpoints: Vec<EndpointStanding>,
    /// What was signalled lately, the newest first.
    pub signals: Vec<Signal>,
    /// How many deliveries are open, by state; at most [`MOST`] of each.
    pub open: Vec<(State, i64)>,
    /// Since when the oldest delivery waits whose first attempt was not made yet.
    pub oldest_pending: Option<Timestamp>,
    /// Dead letters of each day (UTC), today's first; at most [`MOST`].
    pub dead_letters: Vec<(Timestamp, i64)>,
}

/// How an endpoint stands.
#[derive(Debug, sqlx::FromRow)]
pub struct EndpointStanding {
    /// Which.
    pub id: EndpointId,
    /// Where it is.
    pub url: String,
    /// Whether webhooks go there.
    pub enabled: bool,
    /// Why the platform disabled it, if it did.
    pub disabled_reason: Option<String>,
    /// Since when it takes no webhooks.
    pub failing_since: Option<Timestamp>,
}

/// An `endpoint.failing` or `endpoint.disabled`.
#[derive(Debug, sqlx::FromRow)]
pub struct Signal {
    /// Its event.
    pub id: EventId,
    /// Its type.
    pub event_type: String,
    /// Its data, as it was sent.
    pub data: JsonText<Box<RawValue>>,
    /// When.
    pub created_at: Timestamp,
}

impl Standing {
    /// Of a project, at this moment.
    pub async fn of(db: &Db, project: ProjectId) -> sqlx::Result<Self> {
        let mut on = db.snapshot().await?;
        let mut endpoints = fetch_all!(
            &mut on,
            EndpointStanding,
            "SELECT id, url, enabled, disabled_reason, failing_since FROM webhook_endpoints \
             WHERE project_id = $1 ORDER BY created_at DESC, id DESC LIMIT $2",
            project,
            ENDPOINTS
        )?;
        endpoints.sort_by_key(|endpoint| endpoint.enabled && endpoint.failing_since.is_none());
        let mut open = Vec::new();
        for state in [State::Pending, State::Retrying, State::Paused] {
            let (count,) = fetch_one!(
                &mut on,
                (i64,),
                "SELECT count(*) FROM (SELECT 1 FROM webhook_deliveries \
                 WHERE project_id = $1 AND state = $2 LIMIT $3) AS open",
                project,
                state.as_str(),
                MOST
            )?;
            open.push((state, count));
        }
        let oldest = fetch_optional!(
            &mut on,
            (Timestamp,),
            "SELECT created_at FROM webhook_deliveries WHERE project_id = $1 AND state = $2 \
             ORDER BY created_at, id LIMIT 1",
            project,
            State::Pending.as_str()
        )?;
        Ok(Self {
            endpoints,
            signals: signals_of(&mut on, project).await?,
            open,
            oldest_pending: oldest.map(|(since,)| since),
            dead_letters: dead_letters(&mut on, project).await?,
        })
    }
}

async fn signals_of(on: &mut impl Queryable, project: ProjectId) -> sqlx::Result<Vec<Signal>> {
    let mut all = Vec::new();
    for event_type in signals::TYPES {
        all.extend(fetch_all!(
            on,
            Signal,
            "SELECT id, event_type, data, created_at FROM events WHERE project_id = $1 \
             AND event_type = $2 ORDER BY created_at DESC, id DESC LIMIT $3",
            project,
            event_type,
            SIGNALS
        )?);
    }
    all.sort_by_key(|signal| std::cmp::Reverse((signal.created_at, signal.id)));
    all.truncate(usize::try_from(SIGNALS).unwrap_or(usize::MAX));
    Ok(all)
}

async fn dead_letters(
    on: &mut impl Queryable,
    project: ProjectId,
) -> sqlx::Result<Vec<(Timestamp, i64)>> {
    let length = i64::try_from(DAY.as_micros()).unwrap_or(i64::MAX);
    let now = Timestamp::now().micros();
    let mut day = Timestamp::from_micros(now - now.rem_euclid(length));
    let mut days = Vec::new();
    for _ in 0..DAYS {
        let (count,) = fetch_one!(
            on,
            (i64,),
            "SELECT count(*) FROM (SELECT 1 FROM webhook_dead_letters \
             WHERE project_id = $1 AND created_at >= $2 AND created_at < $3 LIMIT $4) AS dead",
            project,
            day,
            day + DAY,
            MOST
        )?;
        days.push((day, count));
        day = day - DAY;
    }
    Ok(days)
}
