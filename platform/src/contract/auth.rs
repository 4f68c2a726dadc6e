//! Who asks: bearer keys, of which only a SHA-256 hash is stored, and their scopes.
//!
//! A key has 240 random bits, so a plain hash is enough: there is nothing to guess. Every read needs
//! `read` (an `admin` key may look at what it administers), every mutation `write`, and mutations of
//! endpoints and plugins `admin`; the layer decides before any handler runs.

use std::fmt;

use poem::{
    FromRequest, Request, RequestBody,
    http::{HeaderMap, Method, header},
};
use rand::{RngExt as _, distr::Alphanumeric};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    contract::{ApiError, Code},
    db::{
        self, Autocommit, Conn, Db, Gather, Id, JsonText, Kind, Queryable, Timestamp, execute,
        fetch_optional,
    },
};

/// A project: one tenant.
pub struct Project;

impl Kind for Project {
    const PREFIX: &'static str = "prj";
}

/// An API key.
pub struct ApiKey;

impl Kind for ApiKey {
    const PREFIX: &'static str = "key";
}

/// The id of a project.
pub type ProjectId = Id<Project>;

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Every GET.
    Read,
    /// Every mutation of the business's own things.
    Write,
    /// Mutations of endpoints, plugins, secrets and keys.
    Admin,
}

impl Scope {
    /// All scopes: what the first key of a project has.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Admin];
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        })
    }
}

impl std::str::FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|scope| scope.to_string() == text)
            .ok_or_else(|| format!("`{text}` is no scope; scopes are read, write and admin"))
    }
}

/// The authenticated sender of a request.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The project that the key belongs to.
    pub project: ProjectId,
    scopes: Vec<Scope>,
}

impl Caller {
    /// Fails with `FORBIDDEN` unless the key may do this.
    pub fn require(&self, method: &Method, path: &str) -> Result<(), ApiError> {
        let allowed = needed(method, path);
        if allowed.iter().any(|scope| self.scopes.contains(scope)) {
            return Ok(());
        }
        Err(ApiError::new(
            Code::Forbidden,
            format!("This operation needs the scope `{}`.", allowed[0]),
        ))
    }
}

impl<'a> FromRequest<'a> for Caller {
    async fn from_request(request: &'a Request, _: &mut RequestBody) -> poem::Result<Self> {
        let caller = request.extensions().get::<Self>().cloned();
        Ok(
            caller
                .ok_or_else(|| ApiError::new(Code::Unauthenticated, "No API key was checked."))?,
        )
    }
}

/// The scopes of which one is needed for an operation below `/public/v1`.
fn needed(method: &Method, path: &str) -> &'static [Scope] {
    let administers = ["/webhook-endpoints", "/plugins", "/keys"]
        .iter()
        .any(|room| {
            path.strip_prefix(room)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        });
    match (*method == Method::GET, administers) {
        (true, true) => &[Scope::Read, Scope::Admin],
        (true, false) => &[Scope::Read],
        (false, true) => &[Scope::Admin],
        (false, false) => &[Scope::Write],
    }
}

#[derive(sqlx::FromRow)]
struct KeyRow {
    hash: Vec<u8>,
    project_id: ProjectId,
    scopes: JsonText<Vec<Scope>>,
}

/// Looks keys up; those of requests that come together in one question.
#[derive(Clone, Debug)]
pub struct Keys(Gather<Vec<u8>, Option<Caller>>);

/// Keys in one question.
const LARGEST: usize = 200;

impl Keys {
    /// The keys in this database.
    pub fn new(db: Db) -> Self {
        Self(Gather::new(LARGEST, move |hashes| {
            Box::pin(look_up(db.clone(), hashes))
        }))
    }

    /// Finds who has a key; none, when it is unknown or revoked.
    pub async fn find(&self, key: &str) -> sqlx::Result<Option<Caller>> {
        self.0.get(hash(key)).await
    }
}

/// Who has these keys.
///
/// A connection that broke while it lay in the pool shows it here, at the first question of a request:
/// the next one is asked.
async fn look_up(db: Db, hashes: Vec<Vec<u8>>) -> sqlx::Result<Vec<Option<Caller>>> {
    loop {
        match rows(&mut db.read().await?, &hashes).await {
            Err(error) if db::is_broken(&error) => {}
            Err(error) => return Err(error),
            Ok(rows) => {
                let who = |hash: &Vec<u8>| {
                    let row = rows.iter().find(|row| row.hash == *hash)?;
                    Some(Caller {
                        project: row.project_id,
                        scopes: row.scopes.0.clone(),
                    })
                };
                return Ok(hashes.iter().map(who).collect());
            }
        }
    }
}

async fn rows(reader: &mut Autocommit, hashes: &[Vec<u8>]) -> sqlx::Result<Vec<KeyRow>> {
    if let Conn::Postgres(conn) = reader.conn() {
        let asking = sqlx::query_as(
            "SELECT hash, project_id, scopes FROM api_keys WHERE hash = ANY($1) AND revoked_at IS NULL",
        )
        .bind(hashes)
        .fetch_all(conn);
        let rows = db::answered(asking).await;
        return db::settle(reader, rows);
    }
    let mut rows = Vec::new();
    for hash in hashes {
        rows.extend(fetch_optional!(
            reader,
            KeyRow,
            "SELECT hash, project_id, scopes FROM api_keys WHERE hash = $1 AND revoked_at IS NULL",
            hash
        )?);
    }
    Ok(rows)
}

/// The key that a request presents; `UNAUTHENTICATED` when it presents none.
pub fn presented(headers: &HeaderMap) -> Result<&str, ApiError> {
    headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, key)| key.trim())
        .filter(|key| key.starts_with(PREFIX))
        .ok_or_else(unauthenticated)
}

/// The answer to whoever presents no key that counts.
pub fn unauthenticated() -> ApiError {
    ApiError::new(Code::Unauthenticated, Code::Unauthenticated.about())
}

const PREFIX: &str = "btx_live_";

fn hash(key: &str) -> Vec<u8> {
    Sha256::digest(key.as_bytes()).to_vec()
}

/// Makes a key for a project; the secret is shown this once.
pub async fn create_key(
    on: &mut impl Queryable,
    project: ProjectId,
    scopes: &[Scope],
) -> sqlx::Result<(Id<ApiKey>, SecretString)> {
    let random: String = rand::rng()
        .sample_iter(Alphanumeric)
        .take(40)
        .map(char::from)
        .collect();
    let secret = SecretString::from(format!("{PREFIX}{random}"));
    let id = Id::<ApiKey>::generate();
    execute!(
        on,
        "INSERT INTO api_keys (id, project_id, hash, scopes, created_at) VALUES ($1, $2, $3, $4, $5)",
        id,
        project,
        hash(secret.expose_secret()),
        JsonText(scopes),
        Timestamp::now()
    )?;
    Ok((id, secret))
}

#[cfg(test)]
mod tests {
    use poem::http::Method;

    use super::{Scope, needed};

    #[test]
    fn administration_needs_its_own_scope() {
        assert_eq!(needed(&Method::POST, "/webhook-endpoints"), [Scope::Admin]);
        assert_eq!(
            needed(&Method::PATCH, "/plugins/plg_1/activate"),
            [Scope::Admin]
        );
        assert_eq!(needed(&Method::POST, "/contacts"), [Scope::Write]);
        assert_eq!(
            needed(&Method::POST, "/webhook-endpoints-of-mine"),
            [Scope::Write]
        );
        assert_eq!(needed(&Method::GET, "/contacts"), [Scope::Read]);
    }
}
