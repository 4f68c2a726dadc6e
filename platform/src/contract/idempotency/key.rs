//! The grammar of `Idempotency-Key`, and the fingerprint of what was asked under it.

use poem::http::{HeaderMap, Method, Uri};
use sha2::{Digest as _, Sha256};

use crate::contract::{ApiError, Code};

const HEADER: &str = "idempotency-key";

/// A key in its one stored spelling: a UUIDv4 in lower case, a ULID in upper case.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key(String);

impl Key {
    /// Reads the key of a mutation.
    pub fn from_headers(headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut values = headers.get_all(HEADER).iter();
        let value = values.next().ok_or_else(|| {
            ApiError::new(Code::IdempotencyKeyRequired, Code::IdempotencyKeyRequired.about())
        })?;
        values
            .next()
            .is_none()
            .then(|| value.to_str().ok().and_then(Self::parse))
            .flatten()
            .ok_or_else(|| {
                ApiError::new(Code::IdempotencyKeyInvalid, Code::IdempotencyKeyInvalid.about())
            })
    }

    /// One UUIDv4 or one ULID, bare or as an RFC 8941 string, any case.
    pub fn parse(value: &str) -> Option<Self> {
        let bare = match value.strip_prefix('"') {
            Some(rest) => rest.strip_suffix('"')?,
            None => value,
        };
        if is_uuid_v4(bare) {
            Some(Self(bare.to_ascii_lowercase()))
        } else if is_ulid(bare) {
            Some(Self(bare.to_ascii_uppercase()))
        } else {
            None
        }
    }

    /// The stored spelling.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_uuid_v4(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() == 36
        && bytes.iter().enumerate().all(|(place, byte)| match place {
            8 | 13 | 18 | 23 => *byte == b'-',
            14 => *byte == b'4',
            19 => matches!(byte, b'8' | b'9' | b'a' | b'b' | b'A' | b'B'),
            _ => byte.is_ascii_hexdigit(),
        })
}

fn is_ulid(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() == 26
        && bytes[0] <= b'7'
        && bytes.iter().all(|byte| {
            byte.is_ascii_digit()
                || (byte.is_ascii_alphabetic()
                    && !matches!(byte.to_ascii_uppercase(), b'I' | b'L' | b'O' | b'U'))
        })
}

/// SHA-256 over method, path, query, content type and raw body, each with its length.
pub fn fingerprint(method: &Method, uri: &Uri, content_type: Option<&[u8]>, body: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    // An absent query or content type is not the same as an empty one.
    let parts: [Option<&[u8]>; 5] = [
        Some(method.as_str().as_bytes()),
        Some(uri.path().as_bytes()),
        uri.query().map(str::as_bytes),
        content_type,
        Some(body),
    ];
    for part in parts {
        match part {
            None => hash.update([0]),
            Some(bytes) => {
                hash.update([1]);
                hash.update((bytes.len() as u64).to_be_bytes());
                hash.update(bytes);
            }
        }
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Key, fingerprint};
    use poem::http::{Method, Uri};

    #[test]
    fn one_uuid_v4_or_one_ulid_is_a_key_and_nothing_else_is() {
        for good in [
            "9b2f6c1e-3c53-4b8e-9d0a-1f2e3d4c5b6a",
            "9B2F6C1E-3C53-4B8E-9D0A-1F2E3D4C5B6A",
            "\"9b2f6c1e-3c53-4b8e-9d0a-1f2e3d4c5b6a\"",
            "01KBCZ5X3V8Q2T4R6Y8W0N1M3P",
            "01kbcz5x3v8q2t4r6y8w0n1m3p",
            "7ZZZZZZZZZZZZZZZZZZZZZZZZZ",
        ] {
            assert!(Key::parse(good).is_some(), "{good}");
        }
        for bad in [
            "",
            "\"",
            "\"\"",
            "abc",
            "{9b2f6c1e-3c53-4b8e-9d0a-1f2e3d4c5b6a}",
            "urn:uuid:9b2f6c1e-3c53-4b8e-9d0a-1f2e3d4c5b6a",
            "9b2f6c1e3c534b8e9d0a1f2e3d4c5b6a",
            "9b2f6c1e-3c53-1b8e-9d0a-1f2e3d4c5b6a",
            "9b2f6c1e-3c53-7b8e-9d0a-1f2e3d4c5b6a",
            "9b2f6c1e-3c53-4b8e-cd0a-1f2e3d4c5b6a",
            "00000000-0000-0000-0000-000000000000",
            "8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
            "01KBCZ5X3V8Q2T4R6Y8W0N1M3",
            "01KBCZ5X3V8Q2T4R6Y8W0N1M3I",
            "01KBCZ5X3V8Q2T4R6Y8W0N1M3U",
            "\"01KBCZ5X3V8Q2T4R6Y8W0N1M3P",
            "01KBCZ5X3V8Q2T4R6Y8W0N1M3P, 01KBCZ5X3V8Q2T4R6Y8W0N1M3P",
            "\"01KBCZ5X3V8Q2T4R6Y8W0N1M3P\";a=1",
        ] {
            assert!(Key::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn case_and_quotes_do_not_make_another_key() {
        let keys = ["01kbcz5x3v8q2t4r6y8w0n1m3p", "\"01KBCZ5X3V8Q2T4R6Y8W0N1M3P\""].map(Key::parse);
        assert_eq!(keys[0], keys[1]);
    }

    proptest! {
        #[test]
        fn any_header_text_is_read_without_a_panic(text in ".*") {
            let _ = Key::parse(&text);
        }

        #[test]
        fn moving_a_byte_between_parts_changes_the_fingerprint(a in "[a-z]{1,8}", b in "[a-z]{1,8}") {
            let uri = |path: &str| format!("/{path}").parse::<Uri>().unwrap();
            let one = fingerprint(&Method::POST, &uri(&a), Some(b.as_bytes()), b"");
            let two = fingerprint(&Method::POST, &uri(&a), None, b.as_bytes());
            prop_assert_ne!(one, two);
            let query = fingerprint(&Method::POST, &uri(&format!("{a}?")), None, b.as_bytes());
            prop_assert_ne!(two, query);
        }
    }
}
