//! Stored answers in Redis' form: read whole or not at all, and never with another body.

use std::sync::LazyLock;

use futures::executor::block_on;
use poem::{
    Response,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode},
};
use ulid::Ulid;

use super::Input;
use crate::{
    config::MasterKey,
    contract::{
        auth::ProjectId,
        idempotency::{
            Asked, Key,
            record::{Answer, Record},
        },
    },
    db::{Sealer, Timestamp},
};

static SEALER: LazyLock<Sealer> = LazyLock::new(|| Sealer::new(&MasterKey::generate()));

/// Reads a copy of a record, or an answer and a change to the copy of its record.
pub fn record(data: &[u8]) {
    let mut input = Input(data);
    let asked = Asked {
        project: ProjectId::from_ulid(Ulid::nil()),
        key: Key::parse("01KBCZ5X3V8Q2T4R6Y8W0N1M3P").expect("it is a ULID"),
        fingerprint: [0; 32],
        path: "/public/v1/contacts".to_owned(),
    };
    if input.byte() % 2 == 0 {
        if let Some(record) = Record::from_bytes(input.rest()) {
            same_again(&record);
            let _ = record.replay(&SEALER, &asked);
        }
        return;
    }

    let status = 100 + u16::from_be_bytes(input.array()) % 900;
    let status = StatusCode::from_u16(status).expect("a status has three digits");
    let expires_at = Timestamp::from_micros(i64::from_be_bytes(input.array()));
    let mut change = Input(input.line());
    let mut headers = HeaderMap::new();
    loop {
        let line = input.line();
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            break;
        };
        let name = HeaderName::from_bytes(&line[..colon]);
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(&line[colon + 1..])) {
            headers.append(name, value);
        }
    }
    let body = input.rest();
    let mut response = Response::builder().status(status).body(body.to_vec());
    *response.headers_mut() = headers.clone();
    let answer = block_on(Answer::read(response)).expect("a body in memory is read");
    let record = answer.record(&SEALER, &asked, expires_at);
    let bytes = record.to_bytes();
    let read = Record::from_bytes(&bytes).expect("what was written is read");
    assert_eq!(format!("{read:?}"), format!("{record:?}"));
    same_again(&read);
    replays(&read, &asked, status, &headers, body);

    if let Some(changed) = Record::from_bytes(&change.spliced(&bytes)) {
        same_again(&changed);
        if let Ok(replayed) = changed.replay(&SEALER, &asked) {
            let is_whole = format!("{changed:?}").contains("is_whole: true");
            let replayed = block_on(replayed.into_body().into_vec());
            assert!(!is_whole || replayed.is_ok_and(|replayed| replayed == body));
        }
    }
}

fn same_again(record: &Record) {
    let again = Record::from_bytes(&record.to_bytes()).expect("what was written is read");
    assert_eq!(format!("{again:?}"), format!("{record:?}"));
    let now = Timestamp::now();
    assert!(record.is_expired(now) == record.remaining(now).is_zero());
}

/// The replay has the status, the body and every header that describes it.
fn replays(record: &Record, asked: &Asked, status: StatusCode, headers: &HeaderMap, body: &[u8]) {
    let replay = record.replay(&SEALER, asked).expect("the same was asked");
    assert_eq!(replay.status(), status);
    for name in ["content-type", "location", "etag", "link"] {
        let readable = |headers: &HeaderMap| -> Vec<HeaderValue> {
            let values = headers.get_all(name).iter();
            values
                .filter(|value| value.to_str().is_ok())
                .cloned()
                .collect()
        };
        assert_eq!(readable(replay.headers()), readable(headers), "{name}");
    }
    assert_eq!(replay.headers()["idempotent-replayed"], "true");
    assert_eq!(replay.headers().get("set-cookie"), None);
    let replayed = block_on(replay.into_body().into_vec()).expect("a body in memory is read");
    assert_eq!(replayed, body);
}
