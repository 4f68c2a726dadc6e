//! What a plugin may make of a request: JSON of a bounded size, and headers that are its own.
//!
//! The platform answers for the connection, for the webhook's identity and for its own signature, so
//! a plugin sets none of those headers; everything else that HTTP allows, it may. `content-type` is
//! its to set, because JSON has many names. Names are lower-cased; a later header replaces an
//! earlier one of the same name, `sign` being later than `transform`.

use http::HeaderName;
use serde::de::IgnoredAny;

use super::failure::PluginError;
use super::limits::Limits;
use crate::contract::reserved_headers::is_reserved;

/// Checks the body that `transform` answered.
pub(super) fn check_body(body: &str, limits: &Limits) -> Result<(), PluginError> {
    if body.len() > limits.output_bytes {
        return Err(PluginError::AnswerTooLarge {
            bytes: Some(body.len()),
            limit: limits.output_bytes,
        });
    }
    serde_json::from_str::<IgnoredAny>(body)
        .map(|_| ())
        .map_err(|error| PluginError::InvalidBody(error.to_string()))
}

/// Adds what a stage answered to the headers that there are.
pub(crate) fn merge_headers(
    headers: &mut Vec<(String, String)>,
    answered: impl IntoIterator<Item = (String, String)>,
    limits: &Limits,
) -> Result<(), PluginError> {
    for (name, value) in answered {
        let name = check_header(&name, &value)?;
        match headers.iter_mut().find(|(existing, _)| *existing == name) {
            Some((_, existing)) => *existing = value,
            None => headers.push((name, value)),
        }
        let bytes = headers
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        if headers.len() > limits.headers || bytes > limits.header_bytes {
            return Err(PluginError::HeadersTooLarge {
                count: headers.len(),
                bytes,
                limit: (limits.headers, limits.header_bytes),
            });
        }
    }
    Ok(())
}

/// The header's name in lower case.
fn check_header(name: &str, value: &str) -> Result<String, PluginError> {
    let refused = |reason: &str| {
        let name = super::truncated(&name.escape_debug().to_string(), 100);
        PluginError::InvalidHeader(format!("`{name}` {reason}"))
    };
    let parsed =
        HeaderName::from_bytes(name.as_bytes()).map_err(|_| refused("is not a header name"))?;
    let lower = parsed.as_str();
    if is_reserved(&parsed) {
        return Err(refused("is set by the platform"));
    }
    if !value
        .bytes()
        .all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte))
    {
        return Err(refused(
            "has a value with characters other than visible ASCII",
        ));
    }
    Ok(lower.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merge(answered: &[(&str, &str)]) -> Result<Vec<(String, String)>, PluginError> {
        let mut headers = vec![("x-first".to_owned(), "1".to_owned())];
        let answered = answered
            .iter()
            .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
        merge_headers(&mut headers, answered, &Limits::default())?;
        Ok(headers)
    }

    #[test]
    fn names_are_lowered_and_a_later_header_replaces_an_earlier_one() {
        let headers = merge(&[("X-Second", "2"), ("X-FIRST", "3")]).unwrap();
        assert_eq!(
            headers,
            [
                ("x-first".into(), "3".into()),
                ("x-second".into(), "2".into())
            ]
        );
    }

    #[test]
    fn content_type_and_authorization_are_the_plugins_to_set() {
        let answered = [
            ("content-type", "application/cloudevents+json"),
            ("authorization", "x"),
        ];
        assert!(merge(&answered).is_ok());
    }

    #[test]
    fn the_platforms_own_headers_are_refused() {
        for name in [
            "Host",
            "content-length",
            "Transfer-Encoding",
            "connection",
            "User-Agent",
            "X-Botix-Signature",
            "webhook-id",
            "x-delivery-attempt",
        ] {
            let error = merge(&[(name, "x")]).unwrap_err();
            let expected = format!("`{name}` is set by the platform");
            assert_eq!(error, PluginError::InvalidHeader(expected));
        }
    }

    #[test]
    fn what_could_split_a_header_is_refused() {
        for (name, value) in [
            ("a b", "x"),
            ("", "x"),
            ("a\r\nb", "x"),
            ("a", "x\r\nb: c"),
            ("a", "é"),
        ] {
            assert!(
                matches!(merge(&[(name, value)]), Err(PluginError::InvalidHeader(_))),
                "{name:?}"
            );
        }
    }

    #[test]
    fn too_many_or_too_long_headers_are_refused() {
        let many: Vec<String> = (0..40).map(|n| format!("x-{n}")).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "1")).collect();
        assert!(matches!(
            merge(&many),
            Err(PluginError::HeadersTooLarge { count: 33, .. })
        ));
        let long = "v".repeat(9_000);
        assert!(matches!(
            merge(&[("x-long", &long)]),
            Err(PluginError::HeadersTooLarge { .. })
        ));
    }

    #[test]
    fn a_body_is_json_of_a_bounded_size() {
        let limits = Limits::default();
        for good in ["{}", " [1.0, \"\\u00e9\"] ", "null"] {
            assert_eq!(check_body(good, &limits), Ok(()));
        }
        for bad in ["", "{", "{} {}", "nul", "{'a':1}", "\u{feff}{}"] {
            assert!(
                matches!(check_body(bad, &limits), Err(PluginError::InvalidBody(_))),
                "{bad}"
            );
        }
        let full = format!("\"{}\"", "a".repeat(65_534));
        assert_eq!(check_body(&full, &limits), Ok(()));
        assert_eq!(
            check_body(&format!("{full} "), &limits),
            Err(PluginError::AnswerTooLarge {
                bytes: Some(65_537),
                limit: 65_536
            })
        );
    }
}
