//! The body of a webhook: the envelope around an event's data, and what replaces data too large.
//!
//! Receivers verify a signature over these bytes and tenants rely on numbers, key order and escapes
//! arriving as published, so the data is never parsed and written again: the envelope is written
//! around its text. The result depends on the event alone, hence it is the same for every attempt
//! and endpoint. A body beyond [`MAX_BODY`] is replaced by a short one that says where the whole
//! event can be read.

use serde::Serialize;

/// The largest body of a webhook, in bytes.
pub const MAX_BODY: usize = 65_536;

/// An event, as far as a webhook shows it.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// `evt_…`.
    pub id: &'a str,
    /// Dotted name, for example `contact.created`.
    pub event_type: &'a str,
    /// When it happened: RFC 3339 UTC with microseconds, as the API shows it.
    pub timestamp: &'a str,
    /// `prj_…`.
    pub project_id: &'a str,
    /// The data as published: one JSON value, checked when it was published and not again here.
    /// `None` where it alone is known to pass [`MAX_BODY`].
    pub data: Option<&'a str>,
}

/// A finished body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// JSON text of at most [`MAX_BODY`] bytes.
    pub body: String,
    /// Whether the data was replaced by a link to the event.
    pub truncated: bool,
}

#[derive(Serialize)]
struct Head<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    event_type: &'a str,
    timestamp: &'a str,
    project_id: &'a str,
}

#[derive(Serialize)]
struct Replacement<'a> {
    #[serde(flatten)]
    head: Head<'a>,
    truncated: bool,
    data: Link<'a>,
}

#[derive(Serialize)]
struct Link<'a> {
    id: &'a str,
    href: String,
}

/// Builds the body that tells of `event`. `public_url` is where the API is reached from outside.
pub fn build(event: &Event<'_>, public_url: &str) -> Payload {
    let head = Head {
        id: event.id,
        event_type: event.event_type,
        timestamp: event.timestamp,
        project_id: event.project_id,
    };
    let mut body = json(&head);
    body.pop();
    body.push_str(",\"data\":");
    if let Some(data) = event.data
        && body.len() + data.len() < MAX_BODY
    {
        body.push_str(data);
        body.push('}');
        return Payload {
            body,
            truncated: false,
        };
    }
    let href = format!(
        "{}/public/v1/events/{}",
        public_url.trim_end_matches('/'),
        event.id
    );
    let body = json(&Replacement {
        head,
        truncated: true,
        data: Link { id: event.id, href },
    });
    Payload {
        body,
        truncated: true,
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and booleans always serialise")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn event(data: &str) -> Event<'_> {
        Event {
            id: "evt_01JZ0000000000000000000000",
            event_type: "contact.created",
            timestamp: "2025-07-01T12:00:00.000001Z",
            project_id: "prj_01JZ0000000000000000000001",
            data: Some(data),
        }
    }

    fn build_with(data: &str) -> Payload {
        build(&event(data), "https://api.example.com")
    }

    /// JSON text that makes the whole body `len` bytes long.
    fn data_for_a_body_of(len: usize) -> String {
        let envelope = build_with("").body.len();
        format!("\"{}\"", "x".repeat(len - envelope - 2))
    }

    #[test]
    fn the_envelope_has_its_members_in_order() {
        assert_eq!(
            build_with(r#"{"a":1}"#).body,
            concat!(
                r#"{"id":"evt_01JZ0000000000000000000000","type":"contact.created","#,
                r#""timestamp":"2025-07-01T12:00:00.000001Z","#,
                r#""project_id":"prj_01JZ0000000000000000000001","data":{"a":1}}"#
            )
        );
    }

    #[test]
    fn published_bytes_arrive_unchanged() {
        for data in [
            "1.0",
            "1e400",
            r#""\u00e9""#,
            r#"{"z":1, "a":2,  "z":3}"#,
            "{\n\t\"nested\": [1.10, 2.00]\n}",
            "123456789012345678901234567890",
            "null",
        ] {
            let payload = build_with(data);
            assert!(!payload.truncated);
            assert!(
                payload.body.ends_with(&format!(",\"data\":{data}}}")),
                "{data}"
            );
        }
    }

    #[test]
    fn exactly_65536_bytes_pass_whole_and_one_more_is_truncated() {
        let whole = build_with(&data_for_a_body_of(MAX_BODY));
        assert_eq!((whole.body.len(), whole.truncated), (65_536, false));

        let replaced = build_with(&data_for_a_body_of(MAX_BODY + 1));
        assert_eq!(
            replaced.body,
            concat!(
                r#"{"id":"evt_01JZ0000000000000000000000","type":"contact.created","#,
                r#""timestamp":"2025-07-01T12:00:00.000001Z","#,
                r#""project_id":"prj_01JZ0000000000000000000001","truncated":true,"#,
                r#""data":{"id":"evt_01JZ0000000000000000000000","#,
                r#""href":"https://api.example.com/public/v1/events/evt_01JZ0000000000000000000000"}}"#
            )
        );
        assert!(replaced.truncated);
    }

    #[test]
    fn a_public_url_with_a_path_or_a_slash_at_its_end_gives_a_clean_link() {
        let large = data_for_a_body_of(MAX_BODY + 1);
        for public_url in ["https://example.com/api", "https://example.com/api/"] {
            let body = build(&event(&large), public_url).body;
            assert!(body.contains(r#""href":"https://example.com/api/public/v1/events/evt_"#));
        }
    }

    proptest! {
        #[test]
        fn every_body_is_json_within_the_limit_whose_strings_are_the_events(
            event_type in ".{0,64}",
            text in ".{0,200}",
            padding in 0usize..70_000,
        ) {
            let data = serde_json::to_string(&format!("{text}{}", "x".repeat(padding))).unwrap();
            let payload = build(&Event { event_type: &event_type, ..event(&data) }, "http://localhost");
            prop_assert!(payload.body.len() <= MAX_BODY);
            let read: Value = serde_json::from_str(&payload.body).unwrap();
            prop_assert_eq!(read["type"].as_str(), Some(event_type.as_str()));
            prop_assert_eq!(read.get("truncated").is_some(), payload.truncated);
            if !payload.truncated {
                let published: Value = serde_json::from_str(&data).unwrap();
                prop_assert_eq!(&read["data"], &published);
            }
        }
    }
}
