//! The inspector: bins that receive any request and show it.
//!
//! A bin's address is public and unguessable; reading what it received needs the project's key.
//! A bin keeps its newest 500 requests, and of a body the first 64 KiB.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use poem::{Endpoint, Request, Response, http::StatusCode};
use poem_openapi::{OpenApi, param::Path};
use schemars::JsonSchema;
use serde::Serialize;

use super::attempts::{Encoding, HeaderView, shown_headers, written};
use crate::{
    contract::{
        Action, ApiError, Caller, Code, Created, NoContent, Reply, Work,
        auth::ProjectId,
        cursor::Position,
        page::{self, ListTexts, Listed, Page, PageRequest},
        payload::NoOptions,
        request_id::{self, RequestId},
        spec::Tag,
    },
    db::{self, Db, Id, JsonText, Kind, Queryable, Timestamp, execute, fetch_optional},
};

const KEPT: i64 = 500;
/// Bytes of a body that are kept.
const MAX_BODY: usize = 65_536;

/// Bytes of a body that are read at most.
const MOST_READ: usize = 32 << 20;

/// How long a sender may take for its body.
const PATIENCE: Duration = Duration::from_secs(30);

/// A bin; names the kind of its id.
pub struct BinKind;

impl Kind for BinKind {
    const PREFIX: &'static str = "bin";
}

/// The id of a bin.
pub type BinId = Id<BinKind>;

/// A bin.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Bin {
    /// Its id.
    pub id: BinId,
    /// Where it receives.
    pub url: String,
    /// When it was made.
    pub created_at: Timestamp,
}

/// A request that a bin received.
#[derive(Debug, Serialize, JsonSchema)]
pub struct InspectedRequest {
    /// Its id: the `X-Request-Id` that its sender got.
    pub id: RequestId,
    /// The method.
    pub method: String,
    /// The path, from the root of the server.
    pub path: String,
    /// The query string.
    pub query: Option<String>,
    /// The headers.
    pub headers: HeaderView,
    /// The body, at most 65,536 bytes of it.
    pub body: String,
    /// How `body` is written.
    pub body_encoding: Encoding,
    /// When it came.
    pub created_at: Timestamp,
}

#[derive(Debug, sqlx::FromRow)]
struct BinRow {
    id: BinId,
    created_at: Timestamp,
}

impl Listed for BinRow {
    const RESOURCE: &'static str = "inspector-bins";
    const TABLE: &'static str = "inspector_bins";
    const COLUMNS: &'static str = "id, created_at";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

#[derive(Debug, sqlx::FromRow)]
struct RequestRow {
    id: RequestId,
    method: String,
    path: String,
    query: Option<String>,
    headers: JsonText<HeaderView>,
    body: Vec<u8>,
    created_at: Timestamp,
}

impl Listed for RequestRow {
    const RESOURCE: &'static str = "inspector-requests";
    const TABLE: &'static str = "inspector_requests";
    const COLUMNS: &'static str = "id, method, path, query, headers, body, created_at";
    const OWNER: &'static str = "bin_id";

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

/// The handlers of `/inspector/bins`.
#[derive(Debug)]
pub struct InspectorApi {
    /// The database.
    pub db: Db,
    /// What the addresses of bins start with.
    pub public_url: String,
}

#[OpenApi(tag = "Tag::Inspector")]
impl InspectorApi {
    /// Create a bin
    #[oai(path = "/inspector/bins", method = "post", operation_id = "create_bin")]
    async fn create(
        &self,
        caller: Caller,
        mut work: Work,
        _body: Action<NoOptions>,
    ) -> Result<Created<Bin>, ApiError> {
        let row = insert_bin(&mut work, caller.project).await?;
        Ok(Created {
            location: format!("/public/v1/inspector/bins/{}", row.id),
            body: self.show(row),
        })
    }

    /// List bins
    #[oai(path = "/inspector/bins", method = "get", operation_id = "list_bins")]
    async fn list(&self, caller: Caller, page: PageRequest) -> Result<Page<Bin>, ApiError> {
        Page::fetch(
            &self.db,
            page,
            caller.project,
            &[],
            |row| Ok(self.show(row)),
        )
        .await
    }

    /// Read a bin
    #[oai(path = "/inspector/bins/:id", method = "get", operation_id = "get_bin")]
    async fn get(&self, caller: Caller, id: Path<BinId>) -> Result<Reply<Bin>, ApiError> {
        let mut reader = self.db.read().await?;
        Ok(Reply(
            self.show(find(&mut reader, caller.project, id.0).await?),
        ))
    }

    /// Delete a bin
    ///
    /// With all that it received.
    #[oai(
        path = "/inspector/bins/:id",
        method = "delete",
        operation_id = "delete_bin"
    )]
    async fn delete(
        &self,
        caller: Caller,
        mut work: Work,
        id: Path<BinId>,
    ) -> Result<NoContent, ApiError> {
        let deleted = execute!(
            &mut work,
            "DELETE FROM inspector_bins WHERE project_id = $1 AND id = $2",
            caller.project,
            id.0
        )?;
        if deleted == 0 {
            Err(ApiError::not_found("bin"))
        } else {
            Ok(NoContent)
        }
    }

    /// List what a bin received
    #[oai(
        path = "/inspector/bins/:id/requests",
        method = "get",
        operation_id = "list_bin_requests"
    )]
    async fn requests(
        &self,
        caller: Caller,
        page: PageRequest,
        id: Path<BinId>,
    ) -> Result<Page<InspectedRequest>, ApiError> {
        find(&mut self.db.read().await?, caller.project, id.0).await?;
        Page::fetch(&self.db, page, id.0, &[], |row: RequestRow| {
            let (body, body_encoding) = written(row.body);
            Ok(InspectedRequest {
                id: row.id,
                method: row.method,
                path: row.path,
                query: row.query,
                headers: row.headers.0,
                body,
                body_encoding,
                created_at: row.created_at,
            })
        })
        .await
    }

    fn show(&self, row: BinRow) -> Bin {
        Bin {
            id: row.id,
            url: url_of(&self.public_url, row.id),
            created_at: row.created_at,
        }
    }
}

async fn find(on: &mut impl Queryable, project: ProjectId, id: BinId) -> Result<BinRow, ApiError> {
    fetch_optional!(
        on,
        BinRow,
        "SELECT id, created_at FROM inspector_bins WHERE project_id = $1 AND id = $2",
        project,
        id
    )?
    .ok_or_else(|| ApiError::not_found("bin"))
}

/// Where a bin receives.
pub(super) fn url_of(public_url: &str, bin: BinId) -> String {
    format!("{public_url}/inspect/{bin}")
}

/// Makes a bin.
pub(super) async fn create_bin(on: &mut impl Queryable, project: ProjectId) -> sqlx::Result<BinId> {
    insert_bin(on, project).await.map(|row| row.id)
}

async fn insert_bin(on: &mut impl Queryable, project: ProjectId) -> sqlx::Result<BinRow> {
    let row = BinRow {
        id: BinId::generate(),
        created_at: Timestamp::now(),
    };
    execute!(
        on,
        "INSERT INTO inspector_bins (id, project_id, created_at) VALUES ($1, $2, $3)",
        row.id,
        project,
        row.created_at
    )?;
    Ok(row)
}

/// What receives at `/inspect/{bin}`: any method, anything; answers 200 once it is kept.
#[derive(Debug)]
pub struct Receive {
    /// The database.
    pub db: Db,
}

impl Endpoint for Receive {
    type Output = Response;

    async fn call(&self, mut request: Request) -> poem::Result<Response> {
        let path = request.uri().path().trim_start_matches('/').to_owned();
        let bin = path.split('/').next().unwrap_or_default();
        let Ok(bin) = bin.parse::<BinId>() else {
            return Err(ApiError::new(Code::NotFound, "There is no such bin.").into());
        };
        let headers = shown_headers(
            request
                .headers()
                .iter()
                .map(|(name, value)| (name.as_str(), value.to_str().unwrap_or("(not text)"))),
        );
        let reading = read_beginning(request.take_body().into_bytes_stream());
        let body = tokio::time::timeout(PATIENCE, reading)
            .await
            .map_err(|_| ApiError::invalid_body("", "the body did not arrive in time"))??;
        let keeping = keep(
            &self.db,
            bin,
            request.method().as_str(),
            request.original_uri().path(),
            request.uri().query(),
            &headers,
            &body,
        );
        db::within(db::PATIENCE, keeping)
            .await
            .map_err(ApiError::from)??;
        Ok(Response::builder()
            .status(StatusCode::OK)
            .content_type("application/json")
            .body("{\"received\":true}"))
    }
}

/// The first [`MAX_BODY`] bytes of a body; the rest is read, within bounds, or its sender would not come to
/// read the answer.
async fn read_beginning(
    mut chunks: impl Stream<Item = std::io::Result<Bytes>> + Unpin,
) -> Result<BytesMut, ApiError> {
    let mut beginning = BytesMut::new();
    let mut length = 0;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ApiError::invalid_body("", error.to_string()))?;
        length += chunk.len();
        if length > MOST_READ {
            return Err(ApiError::new(
                Code::PayloadTooLarge,
                "A bin reads bodies of at most 32 MiB.",
            ));
        }
        let room = MAX_BODY - beginning.len();
        beginning.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }
    Ok(beginning)
}

async fn keep(
    db: &Db,
    bin: BinId,
    method: &str,
    path: &str,
    query: Option<&str>,
    headers: &HeaderView,
    body: &[u8],
) -> Result<(), ApiError> {
    let mut tx = db.begin().await?;
    let kept = execute!(
        &mut tx,
        "INSERT INTO inspector_requests (id, bin_id, method, path, query, headers, body, created_at) \
         SELECT $1, id, $3, $4, $5, $6, $7, $8 FROM inspector_bins WHERE id = $2",
        request_id::current(),
        bin,
        method,
        path,
        query,
        JsonText(headers),
        body,
        Timestamp::now()
    )?;
    if kept == 0 {
        return Err(ApiError::new(Code::NotFound, "There is no such bin."));
    }
    execute!(
        &mut tx,
        "DELETE FROM inspector_requests WHERE bin_id = $1 AND (created_at, id) <= \
         (SELECT created_at, id FROM inspector_requests WHERE bin_id = $1 \
          ORDER BY created_at DESC, id DESC LIMIT 1 OFFSET $2)",
        bin,
        KEPT
    )?;
    tx.commit().await?;
    Ok(())
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    vec![page::texts::<BinRow>(&[]), page::texts::<RequestRow>(&[])]
}
