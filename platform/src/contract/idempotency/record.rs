//! The stored answers: the SQL table that is the authority on what ran.
//!
//! Bodies are sealed under the master key: an answer may show a secret that is shown once, and is
//! kept elsewhere only sealed.

use poem::{
    Response,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode},
};
use sha2::{Digest as _, Sha256};

use super::{Asked, Key};
use crate::{
    contract::auth::ProjectId,
    db::{JsonText, SealError, Sealer, Timestamp, Tx, execute, fetch_optional},
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

/// A finished answer.
#[derive(Debug, sqlx::FromRow)]
pub struct Record {
    /// What was asked under the key.
    pub fingerprint: Vec<u8>,
    status: i64,
    headers: JsonText<Vec<(String, String)>>,
    body: Vec<u8>,
    expires_at: Timestamp,
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
}

impl Record {
    /// Whether the record's time is over: the key is free again.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires_at <= now
    }

    /// The stored answer again, marked as a replay.
    pub fn replay(self, sealer: &Sealer, asked: &Asked) -> Result<Response, SealError> {
        let body = sealer.open(&owner(asked), &self.body)?;
        let status = u16::try_from(self.status)
            .ok()
            .and_then(|code| StatusCode::from_u16(code).ok());
        let mut response = Response::builder()
            .status(status.unwrap_or(StatusCode::OK))
            .body(body);
        let headers = response.headers_mut();
        for (name, value) in self.headers.0 {
            if let (Ok(name), Ok(value)) =
                (name.parse::<HeaderName>(), value.parse::<HeaderValue>())
            {
                headers.append(name, value);
            }
        }
        headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
        Ok(response)
    }
}

/// What a sealed body belongs to.
fn owner(asked: &Asked) -> String {
    format!("{} {}", asked.project, asked.key.as_str())
}

/// The advisory lock of a key: 64 bits of a hash of project and key.
pub fn lock_of(project: ProjectId, key: &Key) -> i64 {
    let digest = Sha256::digest(format!("{project} {}", key.as_str()));
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(first)
}

/// Finds the record of a key, expired or not.
pub async fn find(tx: &mut Tx, asked: &Asked) -> sqlx::Result<Option<Record>> {
    fetch_optional!(
        tx,
        Record,
        "SELECT fingerprint, status, headers, body, expires_at FROM idempotency_records \
         WHERE project_id = $1 AND key = $2",
        asked.project,
        asked.key.as_str()
    )
}

/// Removes an expired record, so that the key can run again.
pub async fn forget(tx: &mut Tx, asked: &Asked) -> sqlx::Result<u64> {
    execute!(
        tx,
        "DELETE FROM idempotency_records WHERE project_id = $1 AND key = $2",
        asked.project,
        asked.key.as_str()
    )
}

/// Writes the record of an answer.
pub async fn insert(
    tx: &mut Tx,
    sealer: &Sealer,
    asked: &Asked,
    answer: &Answer,
    expires_at: Timestamp,
) -> sqlx::Result<u64> {
    let headers: Vec<(&str, &str)> = DESCRIBING
        .iter()
        .flat_map(|name| {
            answer
                .headers
                .get_all(*name)
                .iter()
                .map(move |value| (*name, value))
        })
        .filter_map(|(name, value)| value.to_str().ok().map(|value| (name, value)))
        .collect();
    execute!(
        tx,
        "INSERT INTO idempotency_records \
         (project_id, key, fingerprint, status, headers, body, created_at, expires_at) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        asked.project,
        asked.key.as_str(),
        &asked.fingerprint[..],
        i64::from(answer.status.as_u16()),
        JsonText(headers),
        sealer.seal(&owner(asked), &answer.body),
        Timestamp::now(),
        expires_at
    )
}
