//! Rotation: the secrets that sign beside an endpoint's own until their overlaps end.
//!
//! The one before it has columns of its own. Those before that stand in a list, newest first: a secret
//! that was promised to sign until tomorrow does, however often others follow it.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use super::{EndpointId, EndpointRow};
use crate::{
    contract::{ApiError, Code, auth::ProjectId},
    db::{Db, JsonText, Queryable, Sealer, Timestamp, execute, fetch_all, fetch_optional},
    webhooks::signature::EndpointSecret,
};

/// How many secrets may sign beside the endpoint's own.
const MOST: usize = 4;

/// Endpoints that a sweep looks at at a time.
const BATCH: i64 = 1_000;

/// A secret from before the previous one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::webhooks) struct Earlier {
    sealed: String,
    until: Timestamp,
}

impl Earlier {
    fn new(sealed: &[u8], until: Timestamp) -> Self {
        Self {
            sealed: STANDARD.encode(sealed),
            until,
        }
    }

    /// As it is sealed, while it is valid.
    pub(in crate::webhooks) fn sealed_at(&self, now: Timestamp) -> Option<Vec<u8>> {
        (self.until > now)
            .then(|| STANDARD.decode(&self.sealed).ok())
            .flatten()
    }
}

#[derive(sqlx::FromRow)]
struct Before {
    secret: Vec<u8>,
    previous_secret: Option<Vec<u8>>,
    previous_secret_until: Option<Timestamp>,
    earlier_secrets: Option<JsonText<Vec<Earlier>>>,
}

/// Gives an endpoint a new secret; the one before signs until `until` too, or ends at once, and with it all
/// others, if that is no time to come.
pub(super) async fn rotate(
    on: &mut impl Queryable,
    sealer: &Sealer,
    (project, id): (ProjectId, EndpointId),
    secret: &EndpointSecret,
    until: Timestamp,
) -> Result<EndpointRow, ApiError> {
    let now = Timestamp::now();
    // The update comes first: it keeps other writers of this endpoint waiting until we commit.
    let before = fetch_optional!(
        on,
        Before,
        "UPDATE webhook_endpoints SET updated_at = $3 WHERE project_id = $1 AND id = $2 \
         RETURNING secret, previous_secret, previous_secret_until, earlier_secrets",
        project,
        id,
        now
    )?
    .ok_or_else(|| ApiError::not_found("endpoint"))?;
    let until = Some(until).filter(|until| *until > now);
    let earlier = if until.is_some() {
        still_valid(&before, now)
    } else {
        Vec::new()
    };
    if earlier.len() >= MOST {
        return Err(ApiError::new(
            Code::Conflict,
            "As many secrets as may sign beside a new one do: an overlap of `0s` ends them, or wait for the first to end.",
        ));
    }
    fetch_optional!(
        on,
        EndpointRow,
        "UPDATE webhook_endpoints SET secret = $2, previous_secret = $3, previous_secret_until = $4, \
         earlier_secrets = $5 WHERE id = $1 \
         RETURNING id, url, description, event_types, enabled, disabled_reason, plugin_id, \
         plugin_config, headers, previous_secret_until, failing_since, created_at, updated_at",
        id,
        sealer.seal(&id.to_string(), secret.key()),
        until.map(|_| &before.secret[..]),
        until,
        (!earlier.is_empty()).then_some(JsonText(&earlier))
    )?
    .ok_or_else(|| ApiError::not_found("endpoint"))
}

/// What signs beside the endpoint's own secret, which is about to become the previous one.
fn still_valid(before: &Before, now: Timestamp) -> Vec<Earlier> {
    let previous = before.previous_secret.as_deref();
    let previous = previous.zip(before.previous_secret_until);
    let previous = previous.map(|(sealed, until)| Earlier::new(sealed, until));
    let earlier = before.earlier_secrets.iter().flat_map(|list| &list.0);
    previous
        .into_iter()
        .chain(earlier.cloned())
        .filter(|secret| secret.until > now)
        .collect()
}

/// Forgets secrets whose overlaps have ended; how many endpoints had some.
pub async fn forget_secrets(db: &Db) -> sqlx::Result<u64> {
    let now = Timestamp::now();
    let mut forgotten = execute!(
        &mut db.autocommit().await?,
        "UPDATE webhook_endpoints SET previous_secret = NULL, previous_secret_until = NULL \
         WHERE previous_secret_until < $1",
        now
    )?;
    let mut after = EndpointId::from_ulid(ulid::Ulid::nil());
    loop {
        let rotated = fetch_all!(
            &mut db.read().await?,
            (EndpointId, String),
            "SELECT id, earlier_secrets FROM webhook_endpoints WHERE earlier_secrets IS NOT NULL \
             AND id > $1 ORDER BY id LIMIT $2",
            after,
            BATCH
        )?;
        let Some((last, _)) = rotated.last() else {
            return Ok(forgotten);
        };
        after = *last;
        for (id, text) in rotated {
            // What nobody can read signs nothing.
            let mut earlier: Vec<Earlier> = serde_json::from_str(&text).unwrap_or_default();
            let before = earlier.len();
            earlier.retain(|secret| secret.until > now);
            if earlier.len() < before || earlier.is_empty() {
                forgotten += execute!(
                    &mut db.autocommit().await?,
                    "UPDATE webhook_endpoints SET earlier_secrets = $3 WHERE id = $1 AND earlier_secrets = $2",
                    id,
                    &text,
                    (!earlier.is_empty()).then_some(JsonText(&earlier))
                )?;
            }
        }
    }
}
