//! The query of a list: its text, put together from the declaration's own fragments and the names of
//! the filters in use, and its values, always bound.
//!
//! The first page, the next pages and the pages of the offset mode have separate texts, because
//! `($1 IS NULL OR …)` would lose the index. All of them walk the index `(owner, created_at, id)`
//! without sorting; a position goes into it, an offset steps over its entries and is bounded for that.
//!
//! PostgreSQL guesses that an unknown limit and an unknown offset are a tenth of the rows each, and for
//! both together it may rather sort them all. Its offset text is the first page's, cut off at the end
//! of the page asked for, with the skipping around it. SQLite would sort that one and takes the plain.

use futures::{Stream, TryStreamExt as _};
use sqlx::AssertSqlSafe;

use super::{Listed, shown};
use crate::{
    contract::cursor::Verified,
    db::{self, Conn, Id, Kind, Queryable, Timestamp},
};

/// A page ends after the row with which it reaches this many bytes, whatever its limit.
const HEAVIEST: usize = 8 << 20;

const IN_ORDER: &str = "ORDER BY created_at DESC, id DESC";

/// Where a page starts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Start {
    /// With the newest row.
    First,
    /// After this row.
    After(Verified),
    /// After so many rows.
    Offset(i64),
}

/// What of a start the text depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    First,
    Next,
    Offset,
}

impl Start {
    fn shape(self) -> Shape {
        match self {
            Self::First => Shape::First,
            Self::After(_) => Shape::Next,
            Self::Offset(_) => Shape::Offset,
        }
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
    /// The column whose values are compared.
    pub(super) fn column(&self) -> &'static str {
        self.column
    }

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

    /// These filters, of rows made at this moment or later. There is one lower bound on the time:
    /// of two, SQLite would look up any in the index and read on to the other.
    pub(super) fn all_since(filters: &[Self], bound: Timestamp) -> Vec<Self> {
        let mut filters = filters.to_vec();
        let lower = filters.iter_mut().find_map(|filter| match filter {
            Self {
                column: "created_at",
                comparison: ">=",
                value: Value::Time(time),
            } => Some(time),
            _ => None,
        });
        match lower {
            Some(time) => *time = bound.max(*time),
            None => filters.push(Self::since(bound)),
        }
        filters
    }

    /// Whether a position in the walk says more than the filter does: an upper bound on the time. Left
    /// in, it would be what SQLite looks up in the index, and the position would not.
    fn is_implied(&self) -> bool {
        self.column == "created_at" && self.comparison == "<"
    }

    pub(super) fn has_nul(&self) -> bool {
        matches!(&self.value, Value::Text(text) if text.contains('\0'))
    }

    pub(super) fn written(&self) -> (&'static str, String) {
        let value = match &self.value {
            Value::Text(text) => text.clone(),
            Value::Id(id) => id.to_string(),
            Value::Time(time) => format!("{}{time}", self.comparison),
        };
        (self.column, value)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialect {
    Postgres,
    Sqlite,
}

/// The query texts of a list under one set of filters, for those who look at their plans.
#[derive(Clone, Debug)]
pub struct ListTexts {
    /// The collection.
    pub resource: &'static str,
    /// The collection, with the filters' columns.
    pub list: String,
    /// The text for the first page.
    pub first: String,
    /// The text for every other page.
    pub next: String,
    /// The texts for the pages of the deprecated offset mode, where the list has it.
    pub offset: Option<OffsetTexts>,
}

/// The query text of an offset page on each database.
#[derive(Clone, Debug)]
pub struct OffsetTexts {
    /// On PostgreSQL.
    pub postgres: String,
    /// On SQLite.
    pub sqlite: String,
}

/// The texts of a list under these filters, whose values do not matter.
pub fn texts<R: Listed>(filters: &[Filter]) -> ListTexts {
    let columns: String = filters
        .iter()
        .map(|filter| format!("?{}", filter.column))
        .collect();
    let filters = &shown::<R>(filters);
    ListTexts {
        resource: R::RESOURCE,
        list: format!("{}{columns}", R::RESOURCE),
        first: keyset_text::<R>(filters, Shape::First).0,
        next: keyset_text::<R>(filters, Shape::Next).0,
        offset: R::HAS_OFFSET.then(|| OffsetTexts {
            postgres: query_text::<R>(filters, Shape::Offset, Dialect::Postgres),
            sqlite: query_text::<R>(filters, Shape::Offset, Dialect::Sqlite),
        }),
    }
}

/// The filters that the text names: a position says more than an upper bound on the time.
fn in_use(filters: &[Filter], shape: Shape) -> impl Iterator<Item = &Filter> {
    filters
        .iter()
        .filter(move |filter| !(shape == Shape::Next && filter.is_implied()))
}

/// The text of a list's query; `$1` is the owner, then the filters' values, the position, the limit,
/// the offset.
fn query_text<R: Listed>(filters: &[Filter], shape: Shape, dialect: Dialect) -> String {
    let (walk, limit) = keyset_text::<R>(filters, shape);
    let offset = limit + 1;
    match (shape, dialect) {
        (Shape::First | Shape::Next, _) => walk,
        (Shape::Offset, Dialect::Sqlite) => format!("{walk} OFFSET ${offset}"),
        (Shape::Offset, Dialect::Postgres) => format!(
            "SELECT * FROM ({walk} + CAST(${offset} AS BIGINT)) AS walked \
             {IN_ORDER} LIMIT ${limit} OFFSET ${offset}"
        ),
    }
}

/// The text that ends with the limit, and the number of that parameter.
fn keyset_text<R: Listed>(filters: &[Filter], shape: Shape) -> (String, usize) {
    let mut text = format!(
        "SELECT {} FROM {} WHERE {} = $1",
        R::COLUMNS,
        R::TABLE,
        R::OWNER
    );
    let mut parameter = 1;
    for filter in in_use(filters, shape) {
        parameter += 1;
        text += &format!(" AND {} {} ${parameter}", filter.column, filter.comparison);
    }
    if shape == Shape::Next {
        text += &format!(
            " AND (created_at, id) < (${}, ${})",
            parameter + 1,
            parameter + 2
        );
        parameter += 2;
    }
    parameter += 1;
    text += &format!(" {IN_ORDER} LIMIT ${parameter}");
    (text, parameter)
}

/// Reads up to `limit` rows from `start` on, and whether the page was cut before.
pub(super) async fn read<R: Listed>(
    on: &mut impl Queryable,
    owner: uuid::Uuid,
    filters: &[Filter],
    start: Start,
    limit: i64,
) -> sqlx::Result<(Vec<R>, bool)> {
    macro_rules! run {
        ($conn:expr, $dialect:expr) => {{
            // Safe: the text is made of this crate's own fragments alone, every value is bound.
            let text = AssertSqlSafe(query_text::<R>(filters, start.shape(), $dialect));
            let mut query = sqlx::query_as::<_, R>(text).bind(owner);
            for filter in in_use(filters, start.shape()) {
                query = match &filter.value {
                    Value::Text(value) => query.bind(value.clone()),
                    Value::Id(value) => query.bind(*value),
                    Value::Time(value) => query.bind(*value),
                };
            }
            if let Start::After(verified) = start {
                let position = verified.position();
                query = query.bind(position.created_at).bind(position.id);
            }
            query = query.bind(limit);
            if let Start::Offset(offset) = start {
                query = query.bind(offset);
            }
            gather(query.fetch($conn))
        }};
    }
    let rows = match on.conn() {
        Conn::Postgres(conn) => db::answered(run!(conn, Dialect::Postgres)).await,
        Conn::Sqlite(conn) => Some(run!(conn, Dialect::Sqlite).await),
    };
    db::settle(on, rows)
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
