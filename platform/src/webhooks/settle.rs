//! Settling: the one transaction that makes an attempt's outcome true.
//!
//! The attempt row, the delivery's new state, and either the next attempt's job or the dead letter
//! commit together. `UNIQUE (delivery_id, number)` makes it idempotent: a job that ran twice settles
//! once. The delivery's row is locked before its new state is decided, so a pause or a deletion at the
//! same moment is seen.

mod together;

use std::time::Duration;

pub use together::Together;
pub(super) use together::takes;

use super::{
    attempts::{AttemptId, HeaderView, PluginUse, Status, Trigger},
    dead_letters::DeadLetterId,
    deliveries::{DeliveryId, State},
    endpoints::{self, EndpointId},
    events::EventId,
    ladder::{self, DeadReason, Next, Outcome},
    planning::{self, DeliverWebhook},
    repeats::{self, Repeat},
    signals,
};
use crate::{
    contract::{auth::ProjectId, request_id::RequestId},
    db::{Conn, Db, JsonText, Queryable as _, Shares, Timestamp, Tx, execute, fetch_optional},
    jobs::{self, Ended, JobId, Taken},
};

/// An attempt that was made, and all that is recorded of it.
#[derive(Debug)]
pub(super) struct Settlement {
    pub(super) project: ProjectId,
    pub(super) delivery: DeliveryId,
    pub(super) event: EventId,
    pub(super) event_type: String,
    pub(super) endpoint: EndpointId,
    pub(super) request_id: RequestId,
    pub(super) number: i64,
    pub(super) step: i64,
    pub(super) trigger: Trigger,
    pub(super) url: String,
    pub(super) status: Status,
    pub(super) status_code: Option<i64>,
    pub(super) error: Option<String>,
    pub(super) duration: Duration,
    pub(super) request_headers: HeaderView,
    pub(super) payload: Option<String>,
    pub(super) response_headers: HeaderView,
    pub(super) response_body: Vec<u8>,
    pub(super) plugin: Option<PluginUse>,
    pub(super) started_at: Timestamp,
    pub(super) outcome: Outcome,
    /// Whether the endpoint counted as failing when the attempt began.
    pub(super) was_failing: bool,
    /// The job that made it.
    pub(super) job: JobId,
    /// Where it had to find room.
    pub(super) room: EndpointId,
    /// Which repeat it was, if it was one.
    pub(super) repeat: Option<Repeat>,
}

#[derive(sqlx::FromRow)]
struct Locked {
    state: String,
    attempts: i64,
    next_number: i64,
}

/// What a delivery becomes.
struct After {
    state: State,
    next_attempt_at: Option<Timestamp>,
    /// Until when the receiver asked to be left alone.
    not_before: Option<Timestamp>,
    next_number: i64,
    ladder_number: i64,
    step: i64,
}

impl Settlement {
    /// Commits the outcome and removes the job; does nothing more when it was committed before. Those that
    /// note something at their endpoint do so one after the other, by their `seats`, and a project has a part
    /// of the connections, by its `shares`: rows may be locked for long, and each that waits for one
    /// keeps a connection.
    pub(super) async fn commit(
        &self,
        db: &Db,
        ladder: &[Duration],
        seats: &Shares<EndpointId>,
        shares: &Shares<ProjectId>,
    ) -> sqlx::Result<Ended> {
        let _seat = if signals::are_raised(self, self.next(ladder)) {
            Some(seats.seat(self.endpoint).await)
        } else {
            None
        };
        let _share = shares.seat(self.project).await;
        let mut tx = db.begin().await?;
        jobs::remove(&mut tx, &self.job).await?;
        if self.insert_attempt(&mut tx).await? == 1 {
            self.follow(&mut tx, ladder).await?;
        }
        tx.commit().await?;
        Ok(Ended::Removed)
    }

    /// What the ladder says.
    fn next(&self, ladder: &[Duration]) -> Next {
        let step = u32::try_from(self.step).unwrap_or(u32::MAX);
        ladder::next(&self.outcome, step, ladder)
    }

    /// Writes what follows the attempt.
    async fn follow(&self, tx: &mut Tx, ladder: &[Duration]) -> sqlx::Result<()> {
        // What concerns the endpoint comes first: whoever locks both locks it before the delivery.
        if self.trigger != Trigger::Redirect {
            signals::recovered(self, tx).await?;
        }
        if matches!(self.trigger, Trigger::Manual | Trigger::Redirect) {
            return repeats::settle(self, tx).await;
        }
        let mut next = self.next(ladder);
        if self.trigger == Trigger::Ladder {
            signals::after(self, tx, next).await?;
        } else if !matches!(next, Next::Done | Next::Again) {
            // A test is one attempt, whatever comes of it.
            next = Next::Dead {
                reason: DeadReason::Exhausted,
                disable_endpoint: false,
            };
        }
        // Locked by reading: one update less, and each touches every index of the table.
        let text = match tx.conn() {
            Conn::Postgres(_) => {
                "SELECT state, attempts, next_number FROM webhook_deliveries WHERE id = $1 FOR UPDATE"
            }
            Conn::Sqlite(_) => {
                "SELECT state, attempts, next_number FROM webhook_deliveries WHERE id = $1"
            }
        };
        let locked = fetch_optional!(tx, Locked, text, self.delivery)?;
        match locked {
            Some(locked) => self.apply(tx, &locked, next).await,
            None => Ok(()),
        }
    }

    async fn insert_attempt(&self, tx: &mut Tx) -> sqlx::Result<u64> {
        execute!(
            tx,
            "INSERT INTO webhook_attempts (id, project_id, delivery_id, endpoint_id, event_type, number, \
             trigger, url, request_id, status, status_code, error, duration_ms, request_headers, payload, \
             response_headers, response_body, plugin, created_at) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19) \
             ON CONFLICT (delivery_id, number) DO NOTHING",
            AttemptId::generate(),
            self.project,
            self.delivery,
            self.endpoint,
            &self.event_type,
            self.number,
            JsonText(self.trigger),
            &self.url,
            self.request_id,
            self.status.as_str(),
            self.status_code,
            self.error.as_deref().map(storable),
            i64::try_from(self.duration.as_millis()).unwrap_or(i64::MAX),
            JsonText(&self.request_headers),
            self.payload.as_deref(),
            JsonText(&self.response_headers),
            &self.response_body[..],
            self.plugin.as_ref().map(JsonText),
            self.started_at
        )
    }

    async fn apply(&self, tx: &mut Tx, locked: &Locked, next: Next) -> sqlx::Result<()> {
        let now = Timestamp::now();
        let mut after = After {
            state: State::Dead,
            next_attempt_at: None,
            not_before: None,
            next_number: locked.next_number,
            ladder_number: self.number,
            step: self.step,
        };
        match next {
            Next::Done if self.outcome == Outcome::PluginDropped => after.state = State::Dropped,
            Next::Done => after.state = State::Delivered,
            Next::At { delay } => {
                after.state = State::Retrying;
                after.next_attempt_at = Some(now + delay);
                after.not_before = after
                    .next_attempt_at
                    .filter(|_| self.outcome.asks_to_wait());
                after.ladder_number = locked.next_number;
                after.next_number += 1;
                after.step += 1;
            }
            Next::Again => {
                after.state = State::Retrying;
                after.next_attempt_at = Some(now);
                after.ladder_number = locked.next_number;
                after.next_number += 1;
            }
            Next::Dead { .. } => {}
        }
        // What happened to the delivery while the request was out stands: a pause lets it wait unless
        // it was received, a cancellation is final.
        let waits = match locked.state.parse() {
            Ok(State::Pending | State::Retrying) => false,
            Ok(State::Paused) => true,
            _ => return self.count_attempt(tx, now).await,
        };
        if waits && after.state == State::Retrying {
            after.state = State::Paused;
            after.next_attempt_at = None;
        }
        let attempts = locked.attempts + 1;
        execute!(
            tx,
            "UPDATE webhook_deliveries SET state = $2, next_attempt_at = $3, next_number = $4, \
             ladder_number = $5, step = $6, job_copy = 0, attempts = $7, \
             last_status_code = COALESCE($8, last_status_code), updated_at = $9, not_before = $10 \
             WHERE id = $1",
            self.delivery,
            after.state.as_str(),
            after.next_attempt_at,
            after.next_number,
            after.ladder_number,
            after.step,
            attempts,
            self.status_code,
            now,
            after.not_before
        )?;
        if let Some(at) = after.next_attempt_at {
            let job = DeliverWebhook {
                delivery_id: self.delivery,
                number: after.ladder_number,
                copy: 0,
                project_id: self.project,
                endpoint_id: self.endpoint,
                repeat: None,
            };
            jobs::enqueue(tx, &[job], at).await?;
        }
        // Nobody misses a test.
        if let Next::Dead { reason, .. } = next
            && self.trigger != Trigger::Test
        {
            self.insert_dead_letter(tx, reason, attempts, now).await?;
        }
        Ok(())
    }

    /// Counts an attempt of a delivery that is over for other reasons.
    async fn count_attempt(&self, tx: &mut Tx, now: Timestamp) -> sqlx::Result<()> {
        execute!(
            tx,
            "UPDATE webhook_deliveries SET attempts = attempts + 1, \
             last_status_code = COALESCE($2, last_status_code), updated_at = $3 WHERE id = $1",
            self.delivery,
            self.status_code,
            now
        )
        .map(drop)
    }

    /// What was seen of a failure.
    pub(super) fn seen(&self) -> String {
        match (&self.error, self.status_code) {
            (Some(error), _) => storable(error),
            (None, Some(code)) => format!("status {code}"),
            (None, None) => String::new(),
        }
    }

    /// The status, or the kind of error alone: its text may name the host.
    pub(super) fn kind_seen(&self) -> String {
        let seen = self.seen();
        seen.split_once(':')
            .map_or(seen.clone(), |(kind, _)| kind.to_owned())
    }

    async fn insert_dead_letter(
        &self,
        tx: &mut Tx,
        reason: DeadReason,
        attempts: i64,
        now: Timestamp,
    ) -> sqlx::Result<u64> {
        // The kind of error may be the reason itself; it is said once.
        let seen = self.seen();
        let seen = seen
            .trim_start_matches(reason.as_str())
            .trim_start_matches(": ");
        execute!(
            tx,
            "INSERT INTO webhook_dead_letters \
             (id, project_id, delivery_id, event_id, event_type, endpoint_id, reason, attempts, status, \
             created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 'open', $9)",
            DeadLetterId::generate(),
            self.project,
            self.delivery,
            self.event,
            &self.event_type,
            self.endpoint,
            format!("{}: {seen}", reason.as_str()),
            attempts,
            now
        )
    }
}

/// Text that both databases can hold.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Settles a delivery whose endpoint is disabled or gone, without an attempt: it waits, or is
/// cancelled, unless the endpoint was enabled at this moment.
pub(super) async fn hold(
    db: &Db,
    taken: &Taken<DeliverWebhook>,
    endpoint: EndpointId,
) -> sqlx::Result<Ended> {
    let mut tx = db.begin().await?;
    let now = Timestamp::now();
    let state = match endpoints::is_enabled_for_now(&mut tx, endpoint).await? {
        Some(true) => {
            let ended = planning::put_off_within(&mut tx, taken, now).await?;
            tx.commit().await?;
            return Ok(ended);
        }
        Some(false) => State::Paused,
        None => State::Cancelled,
    };
    execute!(
        &mut tx,
        "UPDATE webhook_deliveries SET state = $3, next_attempt_at = NULL, updated_at = $2 \
         WHERE id = $1 AND state IN ('pending', 'retrying')",
        taken.job.delivery_id,
        now,
        state.as_str()
    )?;
    tx.commit().await?;
    Ok(Ended::Settled)
}
