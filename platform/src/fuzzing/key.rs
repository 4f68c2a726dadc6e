//! `Idempotency-Key`: one spelling per key, and the grammar of UUIDs and ULIDs as their crates have it.

use poem::http::{HeaderMap, HeaderValue};

use super::Input;
use crate::contract::{Code, idempotency::Key};

/// Reads the lines as the values of the header, each by itself and all together.
pub fn idempotency_key(data: &[u8]) {
    let mut input = Input(data);
    let mut headers = HeaderMap::new();
    while !input.0.is_empty() && headers.len() < 4 {
        let line = input.line();
        text(&String::from_utf8_lossy(line));
        if let Ok(value) = HeaderValue::from_bytes(line) {
            headers.append("idempotency-key", value);
        }
    }
    let read = Key::from_headers(&headers).map_err(|error| error.code());
    let mut values = headers.values();
    let expected = match (values.next(), values.next()) {
        (None, _) => Err(Code::IdempotencyKeyRequired),
        (Some(only), None) => only
            .to_str()
            .ok()
            .and_then(Key::parse)
            .ok_or(Code::IdempotencyKeyInvalid),
        (Some(_), Some(_)) => Err(Code::IdempotencyKeyInvalid),
    };
    assert_eq!(read, expected);
}

fn text(text: &str) {
    let bare = text
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'))
        .unwrap_or(text);
    let Some(key) = Key::parse(text) else {
        assert_eq!(known(bare), None, "{text:?} was refused");
        return;
    };
    assert_eq!(known(bare).as_deref(), Some(key.as_str()));
    for same in [
        key.as_str().to_owned(),
        format!("\"{bare}\""),
        bare.to_ascii_lowercase(),
        bare.to_ascii_uppercase(),
    ] {
        assert_eq!(Key::parse(&same).as_ref(), Some(&key), "{same:?}");
    }
    assert_eq!(Key::parse(&format!("\"{text}")), None);
    assert_eq!(Key::parse(&format!("{{{bare}}}")), None);
}

/// The canonical spelling by the crates for UUIDs and ULIDs, which read more than they write.
fn known(bare: &str) -> Option<String> {
    let uuid = uuid::Uuid::try_parse(bare)
        .ok()
        .filter(|uuid| {
            uuid.get_version() == Some(uuid::Version::Random)
                && uuid.get_variant() == uuid::Variant::RFC4122
        })
        .map(|uuid| uuid.to_string());
    let ulid = || {
        ulid::Ulid::from_string(bare)
            .ok()
            .map(|ulid| ulid.to_string())
    };
    uuid.or_else(ulid)
        .filter(|canonical| canonical.eq_ignore_ascii_case(bare))
}
