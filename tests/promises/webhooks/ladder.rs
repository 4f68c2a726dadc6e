//! The ladder: five attempts at fixed steps with the same webhook, then the dead letter.

use super::{
    SHORT_LADDER, attempts_of, dead_letter_of, delivery_in, endpoint_at, has_members, numbers,
    publish, verify,
};
use crate::harness::api::Api;
use crate::harness::receiver::{Received, Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, is_id, on_both_databases};
use serde_json::{Value, json};
use std::time::{Duration, SystemTime};

on_both_databases!(
    five_failures_end_in_a_dead_letter,
    every_attempt_carries_the_same_webhook,
    a_success_ends_the_ladder,
    the_ladder_survives_a_restart,
    the_next_attempt_is_announced,
);

/// Shows that time went on: an event of another endpoint has climbed this many steps since.
pub async fn steps_pass(api: &Api, receiver: &Receiver, steps: usize) {
    let path = format!("/steps-{}", crate::harness::fresh_ulid());
    receiver.script(&path, vec![Reply::status(500); steps]);
    endpoint_at(api, &receiver.url(&path)).await;
    publish(api, "time.passes", json!({})).await;
    receiver.wait_for(&path, steps + 1).await;
}

/// The requests to a path that carry this event.
fn about(receiver: &Receiver, path: &str, event: &str) -> Vec<Received> {
    let mut requests = receiver.requests_to(path);
    requests.retain(|request| request.header("webhook-id") == event);
    requests
}

async fn five_failures_end_in_a_dead_letter(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(500));
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let requests = about(&receiver, "/hook", &event);
    assert_eq!(numbers(&requests), ["1", "2", "3", "4", "5"]);
    for pair in requests.windows(2) {
        let gap = pair[1].at.duration_since(pair[0].at).expect("time goes on");
        assert!(
            gap >= Duration::from_millis(900),
            "a step of one second took {gap:?}"
        );
    }
    assert_eq!(delivery["attempts"], 5);
    assert_eq!(delivery["last_status_code"], 500);
    assert_eq!(delivery["next_attempt_at"], Value::Null);

    let letter = dead_letter_of(&api, &delivery).await;
    has_members(
        &letter,
        &[
            "attempts",
            "created_at",
            "delivery_id",
            "endpoint_id",
            "event_id",
            "id",
            "reason",
        ],
    );
    let id = letter["id"].as_str().expect("an id");
    assert!(is_id("dlq", id));
    assert_eq!(letter["event_id"], event);
    assert_eq!(letter["endpoint_id"], endpoint.id);
    assert_eq!(letter["attempts"], 5);
    assert!(
        letter["reason"]
            .as_str()
            .is_some_and(|reason| !reason.is_empty())
    );
    let read = api
        .get(&format!("/webhook-dead-letters/{id}"))
        .send()
        .await
        .expect(200);
    assert_eq!(read.json(), letter);
    let other = server.project("other").await.api;
    let foreign = other.get(&format!("/webhook-dead-letters/{id}"));
    foreign.send().await.problem("NOT_FOUND");

    steps_pass(&api, &receiver, 2).await;
    assert_eq!(
        about(&receiver, "/hook", &event).len(),
        5,
        "nothing more by itself"
    );
}

async fn every_attempt_carries_the_same_webhook(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", vec![Reply::status(503); 4]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({"n": 1.5})).await;
    let requests = receiver.wait_for("/hook", 5).await;
    for request in &requests {
        verify(request, &endpoint.secret);
        assert_eq!(request.body, requests[0].body);
        for stable in [
            "webhook-id",
            "x-botix-request-id",
            "x-botix-event",
            "x-botix-signature",
            "content-type",
        ] {
            assert_eq!(
                request.header(stable),
                requests[0].header(stable),
                "{stable}"
            );
        }
    }
    assert_eq!(numbers(&requests), ["1", "2", "3", "4", "5"]);
    assert_eq!(requests[0].header("webhook-id"), event);
    delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(api.all("/webhook-dead-letters").await.len(), 0);

    // Another delivery has a request id of its own.
    publish(&api, "order.paid", json!({})).await;
    let other = receiver.wait_for("/hook", 6).await.remove(5);
    assert_ne!(
        other.header("x-botix-request-id"),
        requests[0].header("x-botix-request-id")
    );
}

async fn a_success_ends_the_ladder(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(500)]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(delivery["attempts"], 2);
    assert_eq!(delivery["last_status_code"], 200);
    let attempts = attempts_of(&api, &delivery).await;
    let outcomes: Vec<_> = attempts
        .iter()
        .map(|attempt| attempt["status"].as_str())
        .collect();
    assert_eq!(outcomes, [Some("failed"), Some("succeeded")]);
    steps_pass(&api, &receiver, 2).await;
    assert_eq!(about(&receiver, "/hook", &event).len(), 2);
}

async fn the_ladder_survives_a_restart(backend: Backend) {
    let mut server = TestServer::start(backend, &[("BOTIX_WEBHOOKS__LADDER", "2s,2s,2s,2s")]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", vec![Reply::status(500); 4]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &event, &endpoint.id, "retrying").await;
    server.kill9();
    server.restart().await;
    receiver.wait_for("/hook", 2).await;
    server.stop().await;
    server.restart().await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let attempts = attempts_of(&api, &delivery).await;
    let numbers: Vec<_> = attempts
        .iter()
        .map(|attempt| attempt["number"].as_u64())
        .collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5].map(Some));
    let requests = receiver.requests_to("/hook");
    assert!(
        requests
            .iter()
            .all(|request| request.body == requests[0].body)
    );
}

/// The default ladder, without waiting for it: what the delivery says about its next attempt.
async fn the_next_attempt_is_announced(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(500));
    receiver.always("/later", Reply::status(429).header("retry-after", "7200"));
    receiver.always(
        "/too-late",
        Reply::status(429).header("retry-after", "864000"),
    );
    for (path, seconds) in [("/hook", 60), ("/later", 7_200), ("/too-late", 86_400)] {
        let endpoint = endpoint_at(&api, &receiver.url(path)).await;
        let event = publish(&api, "order.paid", json!({})).await;
        let delivery = delivery_in(&api, &event, &endpoint.id, "retrying").await;
        let attempt = receiver.requests_to(path).remove(0).at;
        let next = delivery["next_attempt_at"].as_str().expect("a time");
        let next =
            time::OffsetDateTime::parse(next, &time::format_description::well_known::Rfc3339);
        let next = SystemTime::from(next.expect("RFC 3339"));
        let ahead = next
            .duration_since(attempt)
            .expect("in the future")
            .as_secs_f64();
        let step = f64::from(seconds);
        assert!(
            (step - 1.0..step + 30.0).contains(&ahead),
            "{path}: {ahead} s ahead"
        );
        api.delete(&format!("/webhook-endpoints/{}", endpoint.id))
            .send()
            .await
            .expect(204);
    }
}
