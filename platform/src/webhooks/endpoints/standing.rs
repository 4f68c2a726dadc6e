//! How an endpoint stands, for those who deliver to it.

use super::EndpointId;
use crate::db::{Conn, Queryable, Timestamp, execute, fetch_optional};

/// Whether an endpoint is enabled, if it is there at all; whoever would enable, disable or delete it
/// waits until this transaction ends.
pub(in crate::webhooks) async fn is_enabled_for_now(
    on: &mut impl Queryable,
    id: EndpointId,
) -> sqlx::Result<Option<bool>> {
    let text = match on.conn() {
        Conn::Postgres(_) => "SELECT enabled FROM webhook_endpoints WHERE id = $1 FOR SHARE",
        Conn::Sqlite(_) => "SELECT enabled FROM webhook_endpoints WHERE id = $1",
    };
    let row = fetch_optional!(on, (bool,), text, id)?;
    Ok(row.map(|(enabled,)| enabled))
}

/// Disables an endpoint that has failed so that the platform gives it up; its deliveries wait.
pub async fn disable(
    on: &mut impl Queryable,
    id: EndpointId,
    reason: &str,
    now: Timestamp,
) -> sqlx::Result<u64> {
    execute!(
        on,
        "UPDATE webhook_endpoints SET enabled = $2, disabled_reason = $3, updated_at = $4, \
         failing_since = COALESCE(failing_since, $4) WHERE id = $1 AND enabled",
        id,
        false,
        reason,
        now
    )
}
