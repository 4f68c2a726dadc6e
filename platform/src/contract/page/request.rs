//! What a client asks of a list: where in it, how many rows, and in which mode.
//!
//! Cursors are the mode of every list. The deprecated offset mode is there on the lists that are
//! declared to have it, and its parameters do not mix with the cursor's: whoever sends both means
//! something that neither would do.

use poem::{FromRequest, Request, RequestBody, http::Uri};

use super::{offset, query::Start};
use crate::contract::{
    ApiError, Code,
    cursor::{CursorKeys, Position, Walk},
    deprecation::Deprecations,
};

pub(super) const DEFAULT_LIMIT: i64 = 20;
pub(super) const LARGEST_LIMIT: i64 = 200;

/// Where a client wants to be in a list, not yet verified.
#[derive(Debug)]
pub struct PageRequest {
    place: Place,
    limit: i64,
    uri: Uri,
    keys: CursorKeys,
    public_url: PublicUrl,
}

/// What links start with.
#[derive(Clone, Debug)]
pub struct PublicUrl(pub String);

#[derive(Debug)]
enum Place {
    First,
    /// After the position of a cursor, as the client wrote it.
    Cursor(String),
    Offset(i64),
}

/// The parameters of both modes, as written; of one that is repeated, the last.
#[derive(Default)]
struct Written {
    cursor: Option<String>,
    cursor_limit: Option<String>,
    pagination: Option<String>,
    offset: Option<String>,
    limit: Option<String>,
}

impl Written {
    fn of(query: &str) -> Self {
        let mut written = Self::default();
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            let parameter = match &*name {
                "cursor" => &mut written.cursor,
                "cursor_limit" => &mut written.cursor_limit,
                "pagination" => &mut written.pagination,
                "offset" => &mut written.offset,
                "limit" => &mut written.limit,
                _ => continue,
            };
            *parameter = Some(value.into_owned());
        }
        written
    }

    fn read(self, has_offset: bool) -> Result<(Place, i64), ApiError> {
        let refused = |present: &Option<String>, name: &str, why: &str| match present {
            Some(_) => Err(ApiError::invalid_parameter(name, why)),
            None => Ok(()),
        };
        match self.pagination.as_deref() {
            None | Some("cursor") => {
                let why =
                    "goes with pagination=offset; a page is asked for by cursor and cursor_limit";
                refused(&self.offset, "offset", why)?;
                refused(&self.limit, "limit", why)?;
                let limit = self.cursor_limit.map_or(Ok(DEFAULT_LIMIT), |text| {
                    read_limit(&text).ok_or_else(|| {
                        ApiError::new(Code::InvalidCursorLimit, Code::InvalidCursorLimit.about())
                    })
                })?;
                Ok((self.cursor.map_or(Place::First, Place::Cursor), limit))
            }
            Some("offset") if has_offset => {
                let why =
                    "does not go with pagination=offset; leave pagination out to walk by cursors";
                refused(&self.cursor, "cursor", why)?;
                refused(&self.cursor_limit, "cursor_limit", why)?;
                let offset = offset::read_offset(self.offset.as_deref())?;
                let limit = offset::read_limit(self.limit.as_deref())?;
                Ok((Place::Offset(offset), limit))
            }
            Some("offset") => Err(ApiError::invalid_parameter(
                "pagination",
                "this list has no offset mode; walk it by cursors",
            )),
            Some(_) => Err(ApiError::invalid_parameter(
                "pagination",
                "is cursor, which may be left out, or on some lists offset",
            )),
        }
    }
}

/// Reads a number of rows.
pub(super) fn read_limit(text: &str) -> Option<i64> {
    text.parse()
        .ok()
        .filter(|limit| (1..=LARGEST_LIMIT).contains(limit) && !text.starts_with('+'))
}

impl<'a> FromRequest<'a> for PageRequest {
    async fn from_request(request: &'a Request, _: &mut RequestBody) -> poem::Result<Self> {
        let missing = || ApiError::internal("a list was mounted without its keys");
        let deprecations = request.data::<Deprecations>().ok_or_else(missing)?;
        let has_offset = deprecations.is_on(offset::ID, request.method(), request.uri().path());
        let query = request.uri().query().unwrap_or_default();
        let (place, limit) = Written::of(query).read(has_offset)?;
        Ok(Self {
            place,
            limit,
            uri: request.original_uri().clone(),
            keys: request.data::<CursorKeys>().ok_or_else(missing)?.clone(),
            public_url: request.data::<PublicUrl>().ok_or_else(missing)?.clone(),
        })
    }
}

impl PageRequest {
    /// Where the page starts; a cursor is checked against the walk it must belong to.
    pub(super) fn start(&self, walk: &Walk<'_>) -> Result<Start, ApiError> {
        match &self.place {
            Place::First => Ok(Start::First),
            Place::Offset(offset) => Ok(Start::Offset(*offset)),
            Place::Cursor(text) => self
                .keys
                .read(walk, text)
                .map(Start::After)
                .map_err(|_| ApiError::new(Code::InvalidCursor, Code::InvalidCursor.about())),
        }
    }

    /// The most rows on the page.
    pub(crate) fn limit(&self) -> i64 {
        self.limit
    }

    /// The same, to count rows in memory.
    pub(super) fn rows(&self) -> usize {
        usize::try_from(self.limit).unwrap_or(usize::MAX)
    }

    /// The cursor that continues the walk after `position`.
    pub(super) fn cursor(&self, walk: &Walk<'_>, position: Position) -> String {
        self.keys.write(walk, position)
    }

    /// The `Link` to the next page: this one's address with another cursor, in cursor mode.
    pub(crate) fn link(&self, cursor: &str) -> String {
        let by_offset = matches!(self.place, Place::Offset(_));
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        let old = self.uri.query().unwrap_or_default();
        for (name, value) in url::form_urlencoded::parse(old.as_bytes()) {
            let replaced = match &*name {
                "cursor" => true,
                "pagination" | "offset" | "limit" => by_offset,
                _ => false,
            };
            if !replaced {
                query.append_pair(&name, &value);
            }
        }
        if by_offset {
            query.append_pair("cursor_limit", &self.limit.to_string());
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
