//! Lists: `{"data","next_cursor","has_more"}`, newest first by `(created_at, id)`.
//!
//! A collection is declared once, by [`Listed`] on its row type, and walked by [`Page::fetch`], which
//! reads one row more than asked for to know whether there is more. What a client may ask is in
//! [`request`], the text of the query in [`query`], the deprecated offset mode in [`offset`].

pub mod offset;
mod query;
mod request;

use std::{borrow::Cow, time::Duration};

use poem::{IntoResponse, Response};
use poem_openapi::{
    ApiResponse,
    registry::{MetaMediaType, MetaResponses, MetaSchemaRef, Registry},
};
use schemars::JsonSchema;
use serde::Serialize;
use sqlx::{postgres::PgRow, sqlite::SqliteRow};

pub use query::{Filter, ListTexts, OffsetTexts, texts};
pub use request::{PageRequest, PublicUrl};

use crate::{
    contract::{
        ApiError,
        cursor::{Position, Walk},
        payload::{answers, to_json},
        spec,
    },
    db::{Db, Id, Kind, Queryable, Timestamp},
};
use query::Start;

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
    /// Whether the list, at `/RESOURCE`, had the offset mode, which is deprecated.
    const HAS_OFFSET: bool = false;
    /// How long rows are shown, where they may lie in the table for a while after that.
    const SHOWN_FOR: Option<Duration> = None;

    /// The row's place in the order.
    fn position(&self) -> Position;

    /// How many bytes the row takes, where that may be many.
    fn weight(&self) -> usize {
        0
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
        let start = match request.start(&walk)? {
            Start::First => 0,
            Start::After(verified) => verified.position().created_at.micros(),
            Start::Offset(offset) => offset,
        };
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        let end = start.saturating_add(request.rows()).min(rows.len());
        let has_more = end < rows.len();
        let next_cursor = has_more.then(|| request.cursor(&walk, place(end)));
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
                filter.column(),
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
        let start = request.start(&walk)?;
        // Not among what the cursor is signed over: it moves with the clock.
        let filters = shown::<R>(filters);
        let (mut rows, cut) =
            query::read::<R>(on, owner, &filters, start, request.limit() + 1).await?;
        let has_more = cut || rows.len() > request.rows();
        rows.truncate(request.rows());
        let next_cursor = rows
            .last()
            .filter(|_| has_more)
            .map(|row| request.cursor(&walk, row.position()));
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

/// The filters, and that the rows are young enough to be shown.
fn shown<R: Listed>(filters: &[Filter]) -> Cow<'_, [Filter]> {
    match R::SHOWN_FOR {
        Some(time) => Filter::all_since(filters, Timestamp::now() - time).into(),
        None => filters.into(),
    }
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
        spec::note_schema::<PageBody<T>>(registry, spec::Use::Written);
    }
}
