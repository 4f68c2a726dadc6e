//! Lists: `{"data","next_cursor","has_more"}`, newest first by `(created_at, id)`.
//!
//! A collection is declared once, by [`Listed`] on its row type, and walked by [`Page::fetch`]. The
//! query text is put together from the declaration's own fragments and the names of the filters in
//! use, values are always bound; the first page and the next pages have separate texts, because
//! `($1 IS NULL OR …)` would lose the index. One row more than asked for is read, to know whether
//! there is more.

use futures::{Stream, TryStreamExt as _};
use poem::{FromRequest, IntoResponse, Request, RequestBody, Response, http::Uri};
use poem_openapi::{
    ApiResponse,
    registry::{MetaMediaType, MetaResponses, MetaSchemaRef, Registry},
};
use schemars::JsonSchema;
use serde::Serialize;
use sqlx::{AssertSqlSafe, postgres::PgRow, sqlite::SqliteRow};

use crate::{
    contract::{
        ApiError, Code,
        cursor::{CursorKeys, Position, Walk},
        payload::{answers, to_json},
        spec,
    },
    db::{Conn, Db, Id, Kind, Queryable, Timestamp},
};

/// A page ends after the row with which it reaches this many bytes, whatever its limit.
const HEAVIEST: usize = 8 << 20;

const DEFAULT_LIMIT: i64 = 20;
const LARGEST_LIMIT: i64 = 200;
const ORDER: &str = "-created_at,-id";
const DECLARED_ORDER: &str = "declared";

/// The declaration of a collection, on its row type.
pub trait Listed:
    for<'r> sqlx::FromRow<'r, PgRow> + for<'r> sqlx::FromRow<'r, SqliteRow> + Send + Unpin
{
    /// The collection's name; cursors are bound to it.
    const RESOURCE: &'static str;
    /// The table.
    const TABLE: &'static str;
    /// The columns of the row type.
    const COLUMNS: &'static str;
    /// The column that names the owner: the project, unless something else owns the rows.
    const OWNER: &'static str = "project_id";

    /// The row's place in the order.
    fn position(&self) -> Position;

    /// How many bytes the row takes, where that may be many.
    fn weight(&self) -> usize {
        0
    }
}

/// One condition on a list.
#[derive(Clone, Debug)]
pub struct Filter {
    column: &'static str,
    comparison: &'static str,
    value: Value,
}

#[derive(Clone, Debug)]
enum Value {
    Text(String),
    Id(uuid::Uuid),
    Time(Timestamp),
}

impl Filter {
    /// The column has exactly this text.
    pub fn text(column: &'static str, value: impl Into<String>) -> Self {
        Self {
            column,
            comparison: "=",
            value: Value::Text(value.into()),
        }
    }

    /// The column names exactly this thing.
    pub fn id<K: Kind>(column: &'static str, value: Id<K>) -> Self {
        let value = Value::Id(value.into());
        Self {
            column,
            comparison: "=",
            value,
        }
    }

    /// The row was made at this moment or later.
    pub fn since(value: Timestamp) -> Self {
        Self {
            column: "created_at",
            comparison: ">=",
            value: Value::Time(value),
        }
    }

    /// The row was made before this moment.
    pub fn until(value: Timestamp) -> Self {
        Self {
            column: "created_at",
            comparison: "<",
            value: Value::Time(value),
        }
    }

    /// Whether a position in the walk says more than the filter does: an upper bound on the time. Left
    /// in, it would be what SQLite looks up in the index, and the position would not.
    fn is_implied(&self) -> bool {
        self.column == "created_at" && self.comparison == "<"
    }

    fn has_nul(&self) -> bool {
        matches!(&self.value, Value::Text(text) if text.contains('\0'))
    }

    fn written(&self) -> (&'static str, String) {
        let value = match &self.value {
            Value::Text(text) => text.clone(),
            Value::Id(id) => id.to_string(),
            Value::Time(time) => format!("{}{time}", self.comparison),
        };
        (self.column, value)
    }
}

/// Where a client wants to be in a list, not yet verified.
#[derive(Debug)]
pub struct PageRequest {
    cursor: Option<String>,
    limit: i64,
    uri: Uri,
    keys: CursorKeys,
    public_url: PublicUrl,
}

/// What links start with.
#[derive(Clone, Debug)]
pub struct PublicUrl(pub String);

impl<'a> FromRequest<'a> for PageRequest {
    async fn from_request(request: &'a Request, _: &mut RequestBody) -> poem::Result<Self> {
        let mut cursor = None;
        let mut limit = DEFAULT_LIMIT;
        for (name, value) in
            url::form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes())
        {
            match &*name {
                "cursor" => cursor = Some(value.into_owned()),
                "cursor_limit" => {
                    limit = value
                        .parse()
                        .ok()
                        .filter(|limit| {
                            (1..=LARGEST_LIMIT).contains(limit) && !value.starts_with('+')
                        })
                        .ok_or_else(|| {
                            ApiError::new(
                                Code::InvalidCursorLimit,
                                Code::InvalidCursorLimit.about(),
                            )
                        })?;
                }
                _ => {}
            }
        }
        let missing = || ApiError::internal("a list was mounted without its keys");
        Ok(Self {
            cursor,
            limit,
            uri: request.original_uri().clone(),
            keys: request.data::<CursorKeys>().ok_or_else(missing)?.clone(),
            public_url: request.data::<PublicUrl>().ok_or_else(missing)?.clone(),
        })
    }
}

/// A page of a list.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "PageOf{T}")]
pub struct PageBody<T> {
    /// The rows, newest first.
    pub data: Vec<T>,
    /// Continues the walk; null exactly when `has_more` is false.
    pub next_cursor: Option<String>,
    /// Whether there are more rows.
    pub has_more: bool,
}

/// A page on its way out, with the `Link` to the next.
#[derive(Debug)]
pub struct Page<T> {
    body: PageBody<T>,
    link: Option<String>,
}

impl<T> Page<T> {
    /// A page of a list that the program itself holds, in its own order.
    pub fn of_declared<O: Kind>(
        request: &PageRequest,
        owner: Id<O>,
        resource: &str,
        rows: Vec<T>,
    ) -> Result<Self, ApiError> {
        let walk = Walk {
            owner: owner.into(),
            resource,
            order: DECLARED_ORDER,
            filters: &[],
        };
        // A row's position is its place in the list.
        let place = |place: usize| Position {
            created_at: Timestamp::from_micros(i64::try_from(place).unwrap_or(i64::MAX)),
            id: uuid::Uuid::nil(),
        };
        let after = request.verified(&walk)?;
        let start = after.map_or(0, |position| {
            usize::try_from(position.created_at.micros()).unwrap_or(usize::MAX)
        });
        let end = start.saturating_add(request.rows()).min(rows.len());
        let has_more = end < rows.len();
        let next_cursor = has_more.then(|| request.keys.write(&walk, place(end)));
        let link = next_cursor.as_ref().map(|cursor| request.link(cursor));
        let data = rows
            .into_iter()
            .skip(start)
            .take(end.saturating_sub(start))
            .collect();
        Ok(Self {
            body: PageBody {
                data,
                next_cursor,
                has_more,
            },
            link,
        })
    }

    /// The rows, to complete them.
    pub fn rows_mut(&mut self) -> &mut [T] {
        &mut self.body.data
    }

    /// Reads one page of `R`, of this owner, and turns each row into what clients see.
    pub async fn fetch<R: Listed, O: Kind>(
        db: &Db,
        request: PageRequest,
        owner: Id<O>,
        filters: &[Filter],
        show: impl Fn(R) -> Result<T, ApiError>,
    ) -> Result<Self, ApiError> {
        Self::fetch_on(&mut db.read().await?, request, owner, filters, show).await
    }

    /// As [`Page::fetch`], where the rows are completed by further statements of one snapshot.
    pub async fn fetch_on<R: Listed, O: Kind>(
        on: &mut impl Queryable,
        request: PageRequest,
        owner: Id<O>,
        filters: &[Filter],
        show: impl Fn(R) -> Result<T, ApiError>,
    ) -> Result<Self, ApiError> {
        let owner = uuid::Uuid::from(owner);
        if let Some(filter) = filters.iter().find(|filter| filter.has_nul()) {
            return Err(ApiError::invalid_parameter(
                filter.column,
                "text has no NUL character",
            ));
        }
        let written: Vec<_> = filters.iter().map(Filter::written).collect();
        let walk = Walk {
            owner,
            resource: R::RESOURCE,
            order: ORDER,
            filters: &written,
        };
        let after =
            match &request.cursor {
                None => None,
                Some(text) => Some(request.keys.read(&walk, text).map_err(|_| {
                    ApiError::new(Code::InvalidCursor, Code::InvalidCursor.about())
                })?),
            };
        let (mut rows, cut) = read::<R>(on, owner, filters, after, request.limit + 1).await?;
        let has_more = cut || rows.len() > request.rows();
        rows.truncate(request.rows());
        let next_cursor = rows
            .last()
            .filter(|_| has_more)
            .map(|row| request.keys.write(&walk, row.position()));
        let link = next_cursor.as_ref().map(|cursor| request.link(cursor));
        let data = rows.into_iter().map(show).collect::<Result<_, _>>()?;
        Ok(Self {
            body: PageBody {
                data,
                next_cursor,
                has_more,
            },
            link,
        })
    }
}

impl PageRequest {
    /// The position to go on from, if there is one, checked against the walk it must belong to.
    fn verified(&self, walk: &Walk<'_>) -> Result<Option<Position>, ApiError> {
        let invalid = |_| ApiError::new(Code::InvalidCursor, Code::InvalidCursor.about());
        self.cursor
            .as_ref()
            .map(|text| self.keys.read(walk, text).map_err(invalid))
            .transpose()
    }

    fn rows(&self) -> usize {
        usize::try_from(self.limit).unwrap_or(usize::MAX)
    }

    /// The address of the next page: this one's, with another cursor.
    fn link(&self, cursor: &str) -> String {
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        let old = self.uri.query().unwrap_or_default();
        for (name, value) in url::form_urlencoded::parse(old.as_bytes()) {
            if name != "cursor" {
                query.append_pair(&name, &value);
            }
        }
        query.append_pair("cursor", cursor);
        format!(
            "<{}{}?{}>; rel=\"next\"",
            self.public_url.0,
            self.uri.path(),
            query.finish()
        )
    }
}

/// The query texts of a list under one set of filters, for those who look at their plans.
#[derive(Clone, Debug)]
pub struct ListTexts {
    /// The collection, with the filters' columns.
    pub list: String,
    /// The text for the first page.
    pub first: String,
    /// The text for every other page.
    pub next: String,
}

/// The texts of a list under these filters, whose values do not matter.
pub fn texts<R: Listed>(filters: &[Filter]) -> ListTexts {
    let columns: String = filters
        .iter()
        .map(|filter| format!("?{}", filter.column))
        .collect();
    ListTexts {
        list: format!("{}{columns}", R::RESOURCE),
        first: query_text::<R>(filters, false),
        next: query_text::<R>(filters, true),
    }
}

/// The text of a list's query; `$1` is the owner, then the filters' values, the position, the limit.
fn query_text<R: Listed>(filters: &[Filter], next: bool) -> String {
    let mut text = format!(
        "SELECT {} FROM {} WHERE {} = $1",
        R::COLUMNS,
        R::TABLE,
        R::OWNER
    );
    let mut parameter = 1;
    for filter in filters
        .iter()
        .filter(|filter| !(next && filter.is_implied()))
    {
        parameter += 1;
        text += &format!(" AND {} {} ${parameter}", filter.column, filter.comparison);
    }
    if next {
        text += &format!(
            " AND (created_at, id) < (${}, ${})",
            parameter + 1,
            parameter + 2
        );
        parameter += 2;
    }
    text + &format!(
        " ORDER BY created_at DESC, id DESC LIMIT ${}",
        parameter + 1
    )
}

async fn read<R: Listed>(
    on: &mut impl Queryable,
    owner: uuid::Uuid,
    filters: &[Filter],
    after: Option<Position>,
    limit: i64,
) -> sqlx::Result<(Vec<R>, bool)> {
    // Safe: the text is made of this crate's own fragments alone, every value is bound.
    let text = AssertSqlSafe(query_text::<R>(filters, after.is_some()));
    macro_rules! run {
        ($conn:expr) => {{
            let mut query = sqlx::query_as::<_, R>(text).bind(owner);
            for filter in filters
                .iter()
                .filter(|filter| !(after.is_some() && filter.is_implied()))
            {
                query = match &filter.value {
                    Value::Text(value) => query.bind(value.clone()),
                    Value::Id(value) => query.bind(*value),
                    Value::Time(value) => query.bind(*value),
                };
            }
            if let Some(position) = after {
                query = query.bind(position.created_at).bind(position.id);
            }
            gather(query.bind(limit).fetch($conn)).await
        }};
    }
    let rows = match on.conn() {
        Conn::Postgres(conn) => run!(conn),
        Conn::Sqlite(conn) => run!(conn),
    };
    on.settled();
    rows
}

/// Collects rows, one more than a page of them at the most, and fewer where they are heavy.
async fn gather<R: Listed>(
    mut rows: impl Stream<Item = sqlx::Result<R>> + Unpin,
) -> sqlx::Result<(Vec<R>, bool)> {
    let (mut gathered, mut weight) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await? {
        if weight >= HEAVIEST {
            return Ok((gathered, true));
        }
        weight += row.weight();
        gathered.push(row);
    }
    Ok((gathered, false))
}

impl<T: Serialize + Send> IntoResponse for Page<T> {
    fn into_response(self) -> Response {
        let mut response = Response::builder()
            .content_type("application/json")
            .body(to_json(&self.body));
        if let Some(link) = self.link.and_then(|link| link.parse().ok()) {
            response.headers_mut().append("link", link);
        }
        response
    }
}

impl<T: Serialize + JsonSchema + Send> ApiResponse for Page<T> {
    fn meta() -> MetaResponses {
        let name = PageBody::<T>::schema_name().into_owned();
        let content = MetaMediaType {
            content_type: "application/json",
            schema: MetaSchemaRef::Reference(name),
        };
        answers(
            200,
            "A page of the list, newest first.",
            vec![content],
            Vec::new(),
        )
    }

    fn register(registry: &mut Registry) {
        spec::note_schema::<PageBody<T>>(registry, crate::contract::spec::Use::Written);
    }
}
