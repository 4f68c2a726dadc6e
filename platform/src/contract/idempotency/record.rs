//! The stored answers: the SQL table that is the authority on what ran.
//!
//! Bodies are sealed under the master key: an answer may show a secret that is shown once, and is
//! kept elsewhere only sealed. A body over 256 KiB is not kept: its record remembers that the request
//! ran, with status and `Location`, and a replay says where to read the result. Redis keeps copies in
//! the form of [`Record::to_bytes`].

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use poem::{
    Response,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use sqlx::{Postgres, postgres::PgArguments, query::QueryAs};

use super::{Asked, Key};
use crate::{
    contract::{ApiError, Code, auth::ProjectId, error},
    db::{Conn, JsonText, Queryable, Sealer, Timestamp, Tx, execute, fetch_one, fetch_optional},
};

/// The headers that describe an answer and are replayed with it.
const DESCRIBING: [&str; 7] = [
    "content-type",
    "content-language",
    "content-disposition",
    "location",
    "etag",
    "last-modified",
    "link",
];

/// The largest body that is kept, in bytes.
const LARGEST_KEPT: usize = 256 << 10;

/// A finished answer.
#[derive(Clone, Debug, sqlx::FromRow)]
pub struct Record {
    /// What was asked under the key.
    fingerprint: Vec<u8>,
    status: i64,
    headers: JsonText<Vec<(String, String)>>,
    /// Sealed.
    body: Vec<u8>,
    is_whole: bool,
    expires_at: Timestamp,
}

/// What stands before the body in a copy of a record.
#[derive(Serialize, Deserialize)]
struct Head {
    fingerprint: String,
    status: i64,
    headers: Vec<(String, String)>,
    is_whole: bool,
    expires_at: i64,
}

/// An answer as it goes into its record.
#[derive(Debug)]
pub struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Answer {
    /// Reads a handler's response whole.
    pub async fn read(mut response: Response) -> Result<Self, poem::error::ReadBodyError> {
        let body = response.take_body().into_vec().await?;
        let headers = std::mem::take(response.headers_mut());
        Ok(Self {
            status: response.status(),
            headers,
            body,
        })
    }

    /// The response for the first sender.
    pub fn into_response(self) -> Response {
        let mut response = Response::builder().status(self.status).body(self.body);
        *response.headers_mut() = self.headers;
        response
    }

    /// The record of this answer to what was asked.
    pub fn record(&self, sealer: &Sealer, asked: &Asked, expires_at: Timestamp) -> Record {
        let is_whole = self.body.len() <= LARGEST_KEPT;
        let headers = DESCRIBING
            .iter()
            .flat_map(|name| {
                let values = self.headers.get_all(*name).iter();
                values.map(move |value| (*name, value))
            })
            .filter_map(|(name, value)| Some((name.to_owned(), value.to_str().ok()?.to_owned())))
            .collect();
        let body: &[u8] = if is_whole { &self.body } else { &[] };
        Record {
            fingerprint: asked.fingerprint.to_vec(),
            status: i64::from(self.status.as_u16()),
            headers: JsonText(headers),
            body: sealer.seal(&owner(asked), body),
            is_whole,
            expires_at,
        }
    }
}

impl Record {
    /// Whether the record's time is over: the key is free again.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires_at <= now
    }

    /// How long the record is still kept.
    pub fn remaining(&self, now: Timestamp) -> std::time::Duration {
        self.expires_at.since(now)
    }

    /// The stored answer again, marked as a replay; a conflict, where something else was asked.
    pub fn replay(&self, sealer: &Sealer, asked: &Asked) -> Result<Response, ApiError> {
        if self.fingerprint != asked.fingerprint {
            let code = Code::IdempotencyKeyReuseConflict;
            return Err(ApiError::new(code, code.about()));
        }
        let status = u16::try_from(self.status)
            .ok()
            .and_then(|code| StatusCode::from_u16(code).ok())
            .unwrap_or(StatusCode::OK);
        let mut response = if self.is_whole {
            let body = sealer
                .open(&owner(asked), &self.body)
                .map_err(ApiError::internal)?;
            self.describe(Response::builder().status(status).body(body), |_| true)
        } else {
            self.not_kept(status, asked)
        };
        let replayed = HeaderValue::from_static("true");
        response
            .headers_mut()
            .insert("idempotent-replayed", replayed);
        Ok(response)
    }

    fn describe(&self, mut response: Response, which: impl Fn(&HeaderName) -> bool) -> Response {
        let headers = self.headers.0.iter().filter_map(|(name, value)| {
            let name = name.parse::<HeaderName>().ok().filter(&which)?;
            Some((name, value.parse::<HeaderValue>().ok()?))
        });
        for (name, value) in headers {
            response.headers_mut().append(name, value);
        }
        response
    }

    /// What is answered in place of a body that was too large to be kept.
    fn not_kept(&self, status: StatusCode, asked: &Asked) -> Response {
        let location = self.headers.0.iter().find(|(name, _)| name == "location");
        let place = location.map_or(&*asked.path, |(_, place)| place);
        let detail = format!(
            "This was executed and answered before; the answer had more than {LARGEST_KEPT} bytes and \
             was not kept. Read the result at {place}."
        );
        let code = Code::IdempotencyAnswerNotKept;
        let response = error::problem(code, status, &detail, Vec::new());
        self.describe(response, |name| *name == header::LOCATION)
    }

    /// A copy for Redis.
    pub fn to_bytes(&self) -> Vec<u8> {
        let head = Head {
            fingerprint: STANDARD_NO_PAD.encode(&self.fingerprint),
            status: self.status,
            headers: self.headers.0.clone(),
            is_whole: self.is_whole,
            expires_at: self.expires_at.micros(),
        };
        // JSON written on one line: the first line break ends it.
        let mut bytes = serde_json::to_vec(&head).unwrap_or_default();
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// Reads a copy; none, where it is not one of this version.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|byte| *byte == b'\n')?;
        let head: Head = serde_json::from_slice(&bytes[..end]).ok()?;
        Some(Self {
            fingerprint: STANDARD_NO_PAD.decode(head.fingerprint).ok()?,
            status: head.status,
            headers: JsonText(head.headers),
            body: bytes[end + 1..].to_vec(),
            is_whole: head.is_whole,
            expires_at: Timestamp::from_micros(head.expires_at),
        })
    }
}

/// What a sealed body belongs to.
fn owner(asked: &Asked) -> String {
    format!("{} {}", asked.project, asked.key.as_str())
}

/// The advisory lock of a key: 64 bits of a hash of project and key.
fn lock_of(project: ProjectId, key: &Key) -> i64 {
    let digest = Sha256::digest(format!("{project} {}", key.as_str()));
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(first)
}

/// Takes the key's lock until the transaction ends, and finds its record, expired or not; none, when
/// another transaction has the lock.
///
/// One statement, and so one round trip. What it reads may be older than the lock: a record committed
/// between the two is not seen. Whoever goes on to execute is then refused by the primary key; whoever
/// wants to know whether something was committed must look again, by [`find`].
pub async fn lock(tx: &mut Tx, asked: &Asked) -> sqlx::Result<Option<Option<Record>>> {
    /// The lock, and the record's columns where there is one.
    type Row = (
        bool,
        Option<Vec<u8>>,
        Option<i64>,
        Option<JsonText<Vec<(String, String)>>>,
        Option<Vec<u8>>,
        Option<bool>,
        Option<Timestamp>,
    );
    let text = match tx.conn() {
        Conn::Postgres(_) => {
            "SELECT pg_try_advisory_xact_lock($3), \
             r.fingerprint, r.status, r.headers, r.body, r.is_whole, r.expires_at \
             FROM (SELECT 1) AS one \
             LEFT JOIN idempotency_records r ON r.project_id = $1 AND r.key = $2"
        }
        // The one writer has every lock.
        Conn::Sqlite(_) => {
            "SELECT $3 IS NOT NULL, \
             r.fingerprint, r.status, r.headers, r.body, r.is_whole, r.expires_at \
             FROM (SELECT 1) AS one \
             LEFT JOIN idempotency_records r ON r.project_id = $1 AND r.key = $2"
        }
    };
    let (locked, fingerprint, status, headers, body, is_whole, expires_at) = fetch_one!(
        tx,
        Row,
        text,
        asked.project,
        asked.key.as_str(),
        lock_of(asked.project, &asked.key)
    )?;
    let record = match (fingerprint, status, headers, body, is_whole, expires_at) {
        (
            Some(fingerprint),
            Some(status),
            Some(headers),
            Some(body),
            Some(is_whole),
            Some(expires_at),
        ) => Some(Record {
            fingerprint,
            status,
            headers,
            body,
            is_whole,
            expires_at,
        }),
        _ => None,
    };
    Ok(locked.then_some(record))
}

/// Finds the record of a key, expired or not, without its lock.
pub async fn find(on: &mut impl Queryable, asked: &Asked) -> sqlx::Result<Option<Record>> {
    fetch_optional!(
        on,
        Record,
        "SELECT fingerprint, status, headers, body, is_whole, expires_at FROM idempotency_records \
         WHERE project_id = $1 AND key = $2",
        asked.project,
        asked.key.as_str()
    )
}

/// Removes a record that has expired, so that the key can run again.
///
/// Only that one: what stands there by now may be the next request's fresh record, which [`lock`] did
/// not see. Then nothing is removed, and the primary key refuses the second record.
pub async fn forget(tx: &mut Tx, asked: &Asked, now: Timestamp) -> sqlx::Result<u64> {
    execute!(
        tx,
        "DELETE FROM idempotency_records WHERE project_id = $1 AND key = $2 AND expires_at <= $3",
        asked.project,
        asked.key.as_str(),
        now
    )
}

/// Writes the record of an answer.
pub async fn insert(tx: &mut Tx, asked: &Asked, record: &Record) -> sqlx::Result<u64> {
    execute!(
        tx,
        "INSERT INTO idempotency_records \
         (project_id, key, fingerprint, status, headers, body, is_whole, created_at, expires_at) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        asked.project,
        asked.key.as_str(),
        &record.fingerprint,
        record.status,
        &record.headers,
        &record.body,
        record.is_whole,
        Timestamp::now(),
        record.expires_at
    )
}

/// Removes a batch of expired records; the number removed.
///
/// What another sweep or a request holds is left to it.
pub async fn sweep(tx: &mut Tx, now: Timestamp, batch: i64) -> sqlx::Result<u64> {
    let text = match tx.conn() {
        Conn::Postgres(_) => {
            "DELETE FROM idempotency_records WHERE (project_id, key) IN \
             (SELECT project_id, key FROM idempotency_records WHERE expires_at <= $1 \
              ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED)"
        }
        Conn::Sqlite(_) => {
            "DELETE FROM idempotency_records WHERE (project_id, key) IN \
             (SELECT project_id, key FROM idempotency_records WHERE expires_at <= $1 \
              ORDER BY expires_at LIMIT $2)"
        }
    };
    execute!(tx, text, now, batch)
}

/// The beginning of a statement of PostgreSQL that executes many requests at once, with [`Many`] bound
/// from `$1` to `$10`. What follows it writes for those in `ran (n, project_id)`: the requests, numbered
/// from 1, whose keys were free and have their records now.
///
/// As in [`lock`], the look may be older than the lock; then the primary key refuses the whole statement,
/// and each request has to be executed alone.
macro_rules! keep_many {
    () => {
        "WITH asked AS (SELECT * FROM UNNEST($1::uuid[], $2::text[], $3::bigint[], $4::bytea[], \
         $5::bigint[], $6::text[], $7::bytea[], $8::boolean[], $9::timestamptz[]) WITH ORDINALITY \
         AS asked (project_id, key, lock, fingerprint, status, headers, body, is_whole, expires_at, n)), \
         free AS MATERIALIZED (SELECT * FROM asked WHERE pg_try_advisory_xact_lock(lock) \
         AND NOT EXISTS (SELECT 1 FROM idempotency_records r \
         WHERE r.project_id = asked.project_id AND r.key = asked.key)), \
         kept AS (INSERT INTO idempotency_records \
         (project_id, key, fingerprint, status, headers, body, is_whole, created_at, expires_at) \
         SELECT project_id, key, fingerprint, status, headers, body, is_whole, $10, expires_at FROM free), \
         ran AS (SELECT n, project_id FROM free)"
    };
}

pub(crate) use keep_many;

/// Requests and their records, as the columns that [`keep_many!`] reads.
#[derive(Debug, Default)]
pub struct Many {
    projects: Vec<uuid::Uuid>,
    keys: Vec<String>,
    locks: Vec<i64>,
    fingerprints: Vec<Vec<u8>>,
    statuses: Vec<i64>,
    headers: Vec<String>,
    bodies: Vec<Vec<u8>>,
    are_whole: Vec<bool>,
    expire_at: Vec<Timestamp>,
}

impl Many {
    /// Of these.
    pub fn new<'r>(requests: impl Iterator<Item = (&'r Asked, &'r Record)>) -> Self {
        let mut many = Self::default();
        for (asked, record) in requests {
            many.projects.push(asked.project.into());
            many.keys.push(asked.key.as_str().to_owned());
            many.locks.push(lock_of(asked.project, &asked.key));
            many.fingerprints.push(record.fingerprint.clone());
            many.statuses.push(record.status);
            many.headers
                .push(serde_json::to_string(&record.headers.0).unwrap_or_default());
            many.bodies.push(record.body.clone());
            many.are_whole.push(record.is_whole);
            many.expire_at.push(record.expires_at);
        }
        many
    }

    /// Binds them.
    pub fn bind<R>(
        self,
        query: QueryAs<'_, Postgres, R, PgArguments>,
    ) -> QueryAs<'_, Postgres, R, PgArguments> {
        query
            .bind(self.projects)
            .bind(self.keys)
            .bind(self.locks)
            .bind(self.fingerprints)
            .bind(self.statuses)
            .bind(self.headers)
            .bind(self.bodies)
            .bind(self.are_whole)
            .bind(self.expire_at)
            .bind(Timestamp::now())
    }
}
