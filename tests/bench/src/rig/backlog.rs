//! A backlog: deliveries of another project that wait, in the tables as the server would have left them.
//!
//! They are written from beside the server, while it is stopped: through its own door they would take
//! long, and it would begin to work them off. Ids are ULIDs of this moment. Columns and jobs are those
//! of the server's own statements, so what it does with them is what it does with its own.

use serde::Serialize;
use sqlx::{Connection as _, PgConnection, PgPool};
use ulid::Ulid;
use uuid::Uuid;

use super::store::{Store, uuid};
use crate::{Fault, figures::float};

/// Deliveries in one round of statements.
const BATCH: u64 = 20_000;

/// Bytes in the data of an event, about as many as fresh ones have.
const FILL: i32 = 960;

/// How far ahead the time of those is whose time has not come, in seconds.
const LATER: i64 = 3_600;

/// What the deliveries wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Their time: each has failed once and is to be retried in an hour.
    Later,
    /// Somebody to make the first attempt, which is due.
    Due,
}

/// Where they go.
pub struct Target {
    /// Whose they are.
    pub project: Ulid,
    /// To which endpoint.
    pub endpoint: Ulid,
    /// The endpoint's URL, which attempts have on record.
    pub url: String,
}

/// The job of an attempt, as the server writes it.
#[derive(Serialize)]
struct Job {
    delivery_id: String,
    number: i64,
    copy: i64,
    project_id: String,
    endpoint_id: String,
}

impl Kind {
    /// The number of the attempt that is planned.
    const fn number(self) -> i64 {
        match self {
            Self::Later => 2,
            Self::Due => 1,
        }
    }

    /// The state of a delivery that waits so.
    const fn state(self) -> &'static str {
        match self {
            Self::Later => "retrying",
            Self::Due => "pending",
        }
    }

    const fn seconds_ahead(self) -> i64 {
        match self {
            Self::Later => LATER,
            Self::Due => 0,
        }
    }
}

const EVENTS: &str = "INSERT INTO events (id, project_id, event_type, data, created_at) \
     SELECT id, $2, 'bench.tick', \
     '{\"id\":\"tick_' || id || '\",\"fill\":\"' || repeat('x', $3) || '\"}', clock_timestamp() \
     FROM UNNEST($1::uuid[]) AS id";
const DELIVERIES: &str = "INSERT INTO webhook_deliveries (id, project_id, event_id, event_type, endpoint_id, \
     request_id, state, attempts, next_number, ladder_number, step, job_copy, next_attempt_at, \
     last_status_code, created_at, updated_at) \
     SELECT d.id, $4, d.event_id, 'bench.tick', $5, d.request_id, $6, $7 - 1, $7 + 1, $7, $7, 0, \
     now() + $8 * interval '1 second', CASE WHEN $7 > 1 THEN 503 END, now(), now() \
     FROM UNNEST($1::uuid[], $2::uuid[], $3::uuid[]) AS d (id, event_id, request_id)";
const JOBS: &str = "INSERT INTO apalis.jobs (id, job_type, job, status, attempts, max_attempts, run_at, \
     priority, metadata, idempotency_key) \
     SELECT j.id, 'deliver-webhook', j.job, 'Pending', 0, 25, \
     date_trunc('second', now()) + $4 * interval '1 second', 0, ''::hstore, j.key \
     FROM UNNEST($1::text[], $2::bytea[], $3::text[]) AS j (id, job, key)";
const ATTEMPTS: &str = "INSERT INTO webhook_attempts (id, project_id, delivery_id, endpoint_id, event_type, \
     number, trigger, url, request_id, status, status_code, error, duration_ms, request_headers, payload, \
     response_headers, response_body, plugin, created_at) \
     SELECT a.id, $4, a.delivery_id, $5, 'bench.tick', 1, '\"ladder\"', $6, a.request_id, 'failed', 503, \
     NULL, 3, '{\"content-type\":\"application/json\",\"user-agent\":\"botix\"}', \
     repeat('x', $7), '{\"content-length\":\"0\"}', '', NULL, now() \
     FROM UNNEST($1::uuid[], $2::uuid[], $3::uuid[]) AS a (id, delivery_id, request_id)";

impl Store {
    /// Writes `count` deliveries, an event and a job each, and leaves the tables as those that grew.
    pub async fn load_backlog(&self, kind: Kind, to: &Target, count: u64) -> Result<(), Fault> {
        let Self::Postgres(pool) = self else {
            return Err("a backlog is made in PostgreSQL only".into());
        };
        let mut conn = pool.acquire().await?;
        sqlx::query("SET synchronous_commit = off")
            .execute(&mut *conn)
            .await?;
        for first in (0..count).step_by(usize::try_from(BATCH)?) {
            load(&mut conn, kind, to, BATCH.min(count - first)).await?;
        }
        sqlx::query("RESET synchronous_commit")
            .execute(&mut *conn)
            .await?;
        drop(conn);
        tidy(pool).await
    }

    /// Does what a load of a backlog does at its end.
    pub async fn calm(&self) -> Result<(), Fault> {
        match self {
            Self::Postgres(pool) => tidy(pool).await,
            Self::Sqlite(_) => Ok(()),
        }
    }
}

/// Statistics, hint bits, dirty pages: nothing of the load is left to be done beside what is measured.
async fn tidy(pool: &PgPool) -> Result<(), Fault> {
    for text in ["VACUUM ANALYZE", "CHECKPOINT"] {
        sqlx::query(text).execute(pool).await?;
    }
    Ok(())
}

async fn load(conn: &mut PgConnection, kind: Kind, to: &Target, count: u64) -> Result<(), Fault> {
    let ids = || -> Vec<Uuid> { (0..count).map(|_| uuid(Ulid::generate())).collect() };
    let (events, requests, attempts) = (ids(), ids(), ids());
    let deliveries: Vec<Ulid> = (0..count).map(|_| Ulid::generate()).collect();
    let delivery_ids: Vec<Uuid> = deliveries.iter().map(|id| uuid(*id)).collect();
    let jobs: Vec<String> = (0..count).map(|_| Ulid::generate().to_string()).collect();
    let (contents, keys) = deliveries
        .iter()
        .map(|delivery| job(kind, to, *delivery))
        .collect::<Result<(Vec<_>, Vec<_>), _>>()?;
    let (project, endpoint) = (uuid(to.project), uuid(to.endpoint));

    let mut tx = conn.begin().await?;
    sqlx::query(EVENTS)
        .bind(&events)
        .bind(project)
        .bind(FILL)
        .execute(&mut *tx)
        .await?;
    sqlx::query(DELIVERIES)
        .bind(&delivery_ids)
        .bind(&events)
        .bind(&requests)
        .bind(project)
        .bind(endpoint)
        .bind(kind.state())
        .bind(kind.number())
        .bind(float(u64::try_from(kind.seconds_ahead())?))
        .execute(&mut *tx)
        .await?;
    if kind == Kind::Later {
        sqlx::query(ATTEMPTS)
            .bind(&attempts)
            .bind(&delivery_ids)
            .bind(&requests)
            .bind(project)
            .bind(endpoint)
            .bind(&to.url)
            .bind(FILL)
            .execute(&mut *tx)
            .await?;
    }
    sqlx::query(JOBS)
        .bind(&jobs)
        .bind(&contents)
        .bind(&keys)
        .bind(float(u64::try_from(kind.seconds_ahead())?))
        .execute(&mut *tx)
        .await?;
    Ok(tx.commit().await?)
}

/// A job and its unique key.
fn job(kind: Kind, to: &Target, delivery: Ulid) -> Result<(Vec<u8>, String), serde_json::Error> {
    let number = kind.number();
    let job = serde_json::to_vec(&Job {
        delivery_id: format!("dlv_{delivery}"),
        number,
        copy: 0,
        project_id: format!("prj_{}", to.project),
        endpoint_id: format!("whe_{}", to.endpoint),
    })?;
    Ok((job, format!("{}:{number}:0", uuid(delivery).simple())))
}

#[cfg(test)]
mod tests {
    use super::{Kind, Target, job};
    use ulid::Ulid;

    #[test]
    fn a_job_is_what_the_server_writes() {
        let id = |number| Ulid::from(0x0198_0000_0000_0000_0000_0000_0000_0000_u128 + number);
        let to = Target {
            project: id(1),
            endpoint: id(2),
            url: String::new(),
        };
        let (job, key) = job(Kind::Later, &to, id(31)).unwrap();
        assert_eq!(
            String::from_utf8(job).unwrap(),
            r#"{"delivery_id":"dlv_01K0000000000000000000000Z","number":2,"copy":0,"project_id":"prj_01K00000000000000000000001","endpoint_id":"whe_01K00000000000000000000002"}"#
        );
        assert_eq!(key, "0198000000000000000000000000001f:2:0");
    }
}
