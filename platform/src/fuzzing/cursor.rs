//! Cursors and the query of a list: what was written is read, and nothing else is.

use std::sync::LazyLock;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use futures::executor::block_on;
use poem::{
    Body, FromRequest as _, Request, RequestBody,
    http::{HeaderValue, Uri, uri::Scheme},
    web::{LocalAddr, RemoteAddr},
};
use uuid::Uuid;

use super::Input;
use crate::{
    config::{Cursors, MasterKey},
    contract::{
        ApiError, Code,
        cursor::{CursorKeys, InvalidCursor, Position, Verified, Walk},
        deprecation::Deprecations,
        page::{PageRequest, PublicUrl, offset},
    },
    db::Timestamp,
};

const PUBLIC_URL: &str = "https://api.example";

// Always the same ones, so that a case means the same in every run.
static KEYS: LazyLock<CursorKeys> = LazyLock::new(|| {
    let master = MasterKey::parse(&format!("{}=", "A".repeat(43)));
    let settings = Cursors { keys: vec![1] };
    CursorKeys::new(
        &master.expect("43 letters and a sign are base64 of 32 bytes"),
        &settings,
    )
});

static DEPRECATIONS: LazyLock<Deprecations> =
    LazyLock::new(|| Deprecations::new(vec![offset::deprecation(["contacts"], None)], PUBLIC_URL));

/// Reads a position, a filter's value, and then a text that claims to be a cursor: any text, or a
/// changed cursor, or a cursor of changed JSON. The same text is asked of a list as its query.
pub fn cursor(data: &[u8]) {
    let mut input = Input(data);
    let position = Position {
        created_at: Timestamp::from_micros(i64::from_be_bytes(input.array())),
        id: Uuid::from_bytes(input.array()),
    };
    let filters = [("state", input.text().into_owned())];
    let walk = Walk {
        owner: Uuid::from_u128(7),
        resource: "contacts",
        order: "-created_at,-id",
        filters: &filters,
    };
    let written = KEYS.write(&walk, position);
    assert!(
        written
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'),
        "{written:?} needs escaping"
    );
    let read = KEYS.read(&walk, &written).map(Verified::position);
    assert_eq!(read, Ok(position));
    let twice = [filters[0].clone(), filters[0].clone()];
    for other in [
        Walk {
            owner: Uuid::from_u128(8),
            ..walk
        },
        Walk {
            resource: "messages",
            ..walk
        },
        Walk {
            order: "created_at,id",
            ..walk
        },
        Walk {
            filters: &[],
            ..walk
        },
        Walk {
            filters: &twice,
            ..walk
        },
    ] {
        assert_eq!(KEYS.read(&other, &written), Err(InvalidCursor), "{other:?}");
    }

    let given = match input.byte() % 3 {
        0 => String::from_utf8_lossy(input.rest()).into_owned(),
        1 => String::from_utf8_lossy(&input.spliced(written.as_bytes())).into_owned(),
        _ => {
            let json = URL_SAFE_NO_PAD
                .decode(&written)
                .expect("a cursor is base64");
            URL_SAFE_NO_PAD.encode(input.spliced(&json))
        }
    };
    match KEYS.read(&walk, &given).map(Verified::position) {
        Ok(read) => assert_eq!(KEYS.write(&walk, read), given, "a second spelling"),
        Err(InvalidCursor) => assert_ne!(given, written),
    }
    query(&given);
}

/// A query is refused by its codes, or it asks for a page, and the link from there for the next one.
fn query(query: &str) {
    for path in ["/contacts", "/events"] {
        let Ok(uri) = format!("{path}?{query}").parse::<Uri>() else {
            return;
        };
        let page = match ask(&uri) {
            Ok(page) => page,
            Err(error) => {
                let code = error.code();
                assert!(
                    matches!(
                        code,
                        Code::InvalidParameter | Code::InvalidCursorLimit | Code::OffsetTooLarge
                    ),
                    "{error}"
                );
                continue;
            }
        };
        assert!((1..=200).contains(&page.limit()));
        let link = page.link("next-one");
        assert!(HeaderValue::from_str(&link).is_ok(), "{link:?}");
        let next: Uri = link
            .strip_prefix('<')
            .and_then(|link| link.strip_prefix(PUBLIC_URL))
            .and_then(|link| link.strip_suffix(">; rel=\"next\""))
            .and_then(|link| link.parse().ok())
            .unwrap_or_else(|| panic!("{link:?} is no link"));
        let asked = ask(&next).unwrap_or_else(|error| panic!("{next}: {error}"));
        assert_eq!(asked.limit(), page.limit());
        assert_eq!(filters(&next), filters(&uri));
    }
}

fn ask(uri: &Uri) -> Result<PageRequest, ApiError> {
    let (mut head, ()) = poem::http::Request::new(()).into_parts();
    head.uri = uri.clone();
    let head = (
        head,
        LocalAddr::default(),
        RemoteAddr::default(),
        Scheme::HTTP,
    );
    let mut request = Request::from_parts(head.into(), Body::empty());
    request.set_data(KEYS.clone());
    request.set_data(DEPRECATIONS.clone());
    request.set_data(PublicUrl(PUBLIC_URL.to_owned()));
    let page = block_on(PageRequest::from_request(
        &request,
        &mut RequestBody::default(),
    ));
    page.map_err(|error| error.downcast().expect("a list fails with a public code"))
}

/// The parameters that do not say which page.
fn filters(uri: &Uri) -> Vec<(String, String)> {
    url::form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes())
        .into_owned()
        .filter(|(name, _)| {
            !["cursor", "cursor_limit", "pagination", "offset", "limit"].contains(&&**name)
        })
        .collect()
}
