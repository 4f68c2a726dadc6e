//! No lost webhook: endpoints, events, signatures, the ladder, the dead letter and every attempt on
//! record.

mod actions;
mod attempts;
mod bodies;
mod crowds;
mod days;
mod endpoints;
mod events;
mod faults;
mod headers;
mod ladder;
mod outcomes;
mod processes;
mod publishing;
mod redelivery;
mod repeats;
mod retention;
mod signals;
mod targets;

use crate::harness::api::{Answer, Api};
use crate::harness::eventually;
use crate::harness::receiver::Received;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::Sha256;
use std::fmt::Write as _;

/// Short steps, for tests that climb the whole ladder.
pub const SHORT_LADDER: (&str, &str) = ("BOTIX_WEBHOOKS__LADDER", "1s,1s,1s,1s");

pub struct Endpoint {
    pub id: String,
    pub secret: String,
}

pub async fn endpoint(api: &Api, body: Value) -> Endpoint {
    let created = api
        .post("/webhook-endpoints")
        .json(&body)
        .send()
        .await
        .expect(201);
    Endpoint {
        id: created.member("id"),
        secret: created.member("secret"),
    }
}

/// An endpoint for every event.
pub async fn endpoint_at(api: &Api, url: &str) -> Endpoint {
    endpoint(api, json!({"url": url})).await
}

/// Publishes an event through `POST /events` and gives its id.
pub async fn publish(api: &Api, event_type: &str, data: Value) -> String {
    published(api, &json!({"type": event_type, "data": data}).to_string())
        .await
        .member("id")
}

/// Publishes a body as it stands.
pub async fn published(api: &Api, body: &str) -> Answer {
    api.post("/events")
        .body("application/json", body)
        .send()
        .await
        .expect_success()
}

pub fn hmac_sha256(secret: &str, message: &[u8]) -> Vec<u8> {
    let key = secret.strip_prefix("whsec_").expect("a prefix");
    let key = STANDARD.decode(key).expect("base64");
    assert_eq!(key.len(), 32, "a key of 32 bytes");
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("any length");
    mac.update(message);
    mac.finalize().into_bytes().to_vec()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Verifies both signatures as a receiver would, from what arrived and the secret alone.
#[track_caller]
pub fn verify(request: &Received, secret: &str) {
    let expected = hex(&hmac_sha256(secret, &request.body));
    assert_eq!(request.header("x-botix-signature"), expected);
    let signed = [
        request.header("webhook-id").as_bytes(),
        b".",
        request.header("webhook-timestamp").as_bytes(),
        b".",
        &request.body,
    ]
    .concat();
    let expected = format!("v1,{}", STANDARD.encode(hmac_sha256(secret, &signed)));
    assert_eq!(request.header("webhook-signature"), expected);
    let sent: u64 = request
        .header("webhook-timestamp")
        .parse()
        .expect("Unix seconds");
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("a clock");
    assert!(
        now.as_secs().abs_diff(sent) < 300,
        "inside the tolerance of receivers"
    );
}

/// The delivery of an event to an endpoint, once it is in that state.
pub async fn delivery_in(api: &Api, event_id: &str, endpoint_id: &str, state: &str) -> Value {
    let path = format!("/webhook-deliveries?endpoint_id={endpoint_id}");
    eventually(
        &format!("a delivery of {event_id} is {state}"),
        async || {
            let rows = api.all(&path).await;
            rows.into_iter()
                .find(|row| row["event_id"] == event_id && row["state"] == state)
        },
    )
    .await
}

/// The attempts of a delivery, first to last.
pub async fn attempts_of(api: &Api, delivery: &Value) -> Vec<Value> {
    let id = delivery["id"].as_str().expect("an id");
    let mut attempts = api.all(&format!("/webhook-deliveries/{id}/attempts")).await;
    attempts.sort_by_key(|attempt| attempt["number"].as_u64());
    attempts
}

/// The one dead letter of a delivery.
pub async fn dead_letter_of(api: &Api, delivery: &Value) -> Value {
    let mut letters = api.all("/webhook-dead-letters").await;
    letters.retain(|letter| letter["delivery_id"] == delivery["id"]);
    assert_eq!(letters.len(), 1, "{letters:?}");
    letters.remove(0)
}

/// The attempt numbers that a receiver was told.
pub fn numbers(requests: &[Received]) -> Vec<&str> {
    requests
        .iter()
        .map(|request| request.header("x-delivery-attempt"))
        .collect()
}

/// Asserts that an object has at least the published members.
#[track_caller]
pub fn has_members(value: &Value, members: &[&str]) {
    let object = value.as_object().expect("an object");
    for member in members {
        assert!(object.contains_key(*member), "{member} in {value}");
    }
}
