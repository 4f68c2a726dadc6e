//! Headers from outside: the wait that a receiver asks for, what it answered, what tenants and their
//! plugins want to send, and how a client shows its key.
//!
//! Endpoints and plugins are held to a rule each; the properties are what both must keep.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use poem::http::{HeaderMap, HeaderName, HeaderValue};

use super::Input;
use crate::{
    contract::auth,
    plugins::{Limits, answer::merge_headers},
    webhooks::{
        attempts::shown_headers,
        custom_headers::CustomHeaders,
        headers::{Attempt, headers as platform_headers},
        ladder::{MAX_RETRY_AFTER, Next, Outcome, next, parse_retry_after},
        sender::{MAX_HEADERS, asked_wait, recorded},
        signature::EndpointSecret,
    },
};

const LADDER: [Duration; 2] = [Duration::from_mins(1), Duration::from_hours(48)];

/// Reads a moment and the lines of `Retry-After`, or `name: value` lines that somebody wants to send,
/// answered or asked with.
pub fn headers(data: &[u8]) {
    let mut input = Input(data);
    match input.byte() % 4 {
        0 => retry_after(&mut input),
        1 => of_an_endpoint(&mut input),
        2 => of_a_plugin(&mut input),
        _ => answered(&mut input),
    }
}

fn lines<'d>(input: &mut Input<'d>) -> Vec<(&'d [u8], &'d [u8])> {
    let mut pairs = Vec::new();
    while !input.0.is_empty() {
        let line = input.line();
        let colon = line.iter().position(|byte| *byte == b':');
        let (name, value) = line.split_at(colon.unwrap_or(line.len()));
        let value = value.strip_prefix(b":").unwrap_or(value);
        pairs.push((name, value.strip_prefix(b" ").unwrap_or(value)));
    }
    pairs
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The next attempt comes no earlier than any value asks, and at most a day ahead where one asks at all.
fn retry_after(input: &mut Input<'_>) {
    let seconds = u64::from_be_bytes(input.array()) % (1 << 38);
    let nanos = u32::from_be_bytes(input.array()) % 1_000_000_000;
    let now = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
    let mut headers = HeaderMap::new();
    let mut latest = None;
    while !input.0.is_empty() {
        let value = input.line();
        let wait = parse_retry_after(value, now);
        assert_eq!(wait, asked(value, now), "{}", value.escape_ascii());
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append("retry-after", value);
            latest = latest.max(wait);
        }
    }
    assert_eq!(asked_wait(&headers, now), latest);
    for number in 1..=3 {
        let decided = next(&Outcome::of_status(429, latest), number, &LADDER);
        match (decided, LADDER.get(number as usize - 1)) {
            (Next::At { delay }, Some(rung)) => {
                assert_eq!(
                    delay,
                    latest
                        .filter(|wait| !wait.is_zero())
                        .map_or(*rung, |wait| wait.min(MAX_RETRY_AFTER))
                );
            }
            (Next::Dead { .. }, None) => {}
            _ => panic!("attempt {number}: {decided:?}"),
        }
    }
}

/// What a value asks for, by the words of RFC 9110: digits, or a date, met never early and missed by
/// less than a second.
fn asked(value: &[u8], now: SystemTime) -> Option<Duration> {
    let text = std::str::from_utf8(value).ok()?.trim_matches([' ', '\t']);
    if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() {
        let digits = text.trim_start_matches('0');
        let fits = digits.len() < 20 || digits.len() == 20 && digits <= "18446744073709551615";
        let seconds = digits.bytes().fold(0_u64, |seconds, digit| {
            seconds
                .wrapping_mul(10)
                .wrapping_add(u64::from(digit - b'0'))
        });
        return Some(Duration::from_secs(if fits { seconds } else { u64::MAX }));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    let again = httpdate::parse_http_date(&httpdate::fmt_http_date(date)).ok();
    assert_eq!(again, Some(date));
    let mut wait = Duration::from_secs(date.duration_since(now).map_or(0, |wait| wait.as_secs()));
    while now + wait < date {
        wait += Duration::from_secs(1);
    }
    Some(wait)
}

/// The platform's own headers, and those of an endpoint or a plugin among them: each arrived, and none
/// of the platform's is another for it.
fn together(own: impl IntoIterator<Item = (HeaderName, HeaderValue)>) {
    let attempt = Attempt {
        event_id: "evt_01JZ0000000000000000000000",
        event_type: "contact.created",
        request_id: "req_01JZ0000000000000000000002",
        number: 3,
        sent_at: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
    };
    let secret = EndpointSecret::from_key(vec![1; 32]);
    let platform = platform_headers(&attempt, &secret, std::slice::from_ref(&secret), b"{}")
        .expect("the platform's own headers can be sent");
    let mut all = platform.clone();
    for (name, value) in own {
        let lower = name.as_str();
        assert!(!is_never_a_tenants(lower), "{lower} was let through");
        all.insert(name, value);
    }
    for (name, value) in &platform {
        assert!(name == "content-type" || all.get(name) == Some(value));
    }
}

/// Names that neither rule lets through.
fn is_never_a_tenants(name: &str) -> bool {
    name.starts_with("webhook-")
        || name.starts_with("x-botix-")
        || matches!(
            name,
            "connection"
                | "content-length"
                | "expect"
                | "host"
                | "keep-alive"
                | "proxy-authorization"
                | "proxy-connection"
                | "te"
                | "trailer"
                | "transfer-encoding"
                | "upgrade"
                | "user-agent"
                | "x-delivery-attempt"
        )
}

fn of_an_endpoint(input: &mut Input<'_>) {
    let wanted: BTreeMap<String, String> = lines(input)
        .into_iter()
        .map(|(name, value)| (text(name), text(value)))
        .collect();
    let json = serde_json::to_vec(&wanted).expect("text is written as JSON");
    let Ok(headers) = serde_json::from_slice::<CustomHeaders>(&json) else {
        return;
    };
    let sent: Vec<_> = headers.iter().collect();
    assert_eq!(sent.len(), wanted.len(), "what is let through can be sent");
    for ((name, value), (wanted_name, wanted_value)) in sent.iter().zip(&wanted) {
        assert!(name.as_str().eq_ignore_ascii_case(wanted_name));
        assert_eq!(value, wanted_value.as_str());
        assert_ne!(name, "content-type");
    }
    assert!(wanted.len() <= 20);
    together(sent);

    // They are kept as they are written, and must be let through again when they are read.
    let kept = serde_json::to_vec(&headers).expect("headers are written as JSON");
    let read: CustomHeaders = serde_json::from_slice(&kept).expect("what was kept is read");
    assert!(read.iter().eq(headers.iter()));
    let shown = serde_json::to_value(headers.masked()).expect("headers are written as JSON");
    let shown = shown.as_object().expect("it is an object");
    assert!(shown.keys().eq(wanted.keys()));
    assert!(shown.values().all(|value| value == "********"));
}

fn of_a_plugin(input: &mut Input<'_>) {
    let limits = Limits::default();
    let answered: Vec<_> = lines(input)
        .into_iter()
        .map(|(name, value)| (text(name), text(value)))
        .collect();
    let mut headers = Vec::new();
    if let Err(error) = merge_headers(&mut headers, answered.clone(), &limits) {
        assert!(error.to_string().len() < 512, "{error}");
        return;
    }
    let bytes: usize = headers.iter().map(|(n, v)| n.len() + v.len()).sum();
    assert!(headers.len() <= limits.headers && bytes <= limits.header_bytes);
    let latest: BTreeMap<String, String> = answered
        .into_iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect();
    assert_eq!(headers.len(), latest.len(), "a name stands once");
    together(headers.iter().map(|(name, value)| {
        assert_eq!(latest.get(name), Some(value));
        let parsed: HeaderName = name.parse().expect("it is a header name");
        assert_eq!(parsed.as_str(), name, "names are lower-case");
        let value: HeaderValue = value.parse().expect("it is a header value");
        assert!(value.to_str().is_ok());
        (parsed, value)
    }));
}

/// What came is kept from the front, within bounds, as text that a database can hold.
fn answered(input: &mut Input<'_>) {
    let mut came = HeaderMap::new();
    for (name, value) in lines(input) {
        let parsed = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value));
        if let (Ok(name), Ok(value)) = parsed {
            came.append(name, value);
        }
    }
    let kept = recorded(&came);
    let mut room = MAX_HEADERS;
    for ((name, value), (came_name, came_value)) in kept.iter().zip(&came) {
        assert_eq!(name, came_name.as_str());
        let bytes = came_value.as_bytes();
        let latin_1 = value
            .chars()
            .map(u32::from)
            .eq(bytes.iter().map(|byte| u32::from(*byte)));
        assert!(value.as_bytes() == bytes || latin_1, "{value:?}");
        assert!(!value.contains('\0'));
        room = room
            .checked_sub(name.len() + bytes.len())
            .expect("what is kept is bounded");
    }
    if let Some((name, value)) = came.iter().nth(kept.len()) {
        assert!(name.as_str().len() + value.len() > room, "there was room");
    }
    let shown = shown_headers(kept.iter().map(|(name, value)| (&**name, &**value)));
    assert!(
        kept.iter()
            .all(|(name, value)| shown[name].contains(&**value))
    );

    if let Ok(key) = auth::presented(&came) {
        assert!(key.starts_with("btx_live_") && key.trim() == key);
        let value = came
            .get("authorization")
            .and_then(|value| value.to_str().ok());
        assert!(value.is_some_and(|value| value.contains(key)));
    }
}
