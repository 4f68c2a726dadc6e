//! What is done with an endpoint while webhooks are on their way: disabled, resumed, deleted, its
//! secret rotated, a test sent.

use super::ladder::steps_pass;
use super::{
    Endpoint, SHORT_LADDER, attempts_of, delivery_in, endpoint, endpoint_at, hex, hmac_sha256,
    numbers, publish, verify,
};
use crate::contacts::points_at;
use crate::harness::api::{Answer, Api};
use crate::harness::receiver::{Received, Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, fresh_key, is_timestamp, on_both_databases};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::time::Duration;

on_both_databases!(
    an_endpoint_disabled_during_dispatch_gets_no_later_request,
    a_resumed_endpoint_gets_what_waited,
    an_endpoint_deleted_during_dispatch_gets_no_later_request,
    a_rotated_secret_signs_beside_the_one_before_until_the_overlap_ends,
    secrets_whose_overlaps_have_ended_are_forgotten,
    a_rotation_without_overlap_ends_the_old_secret_at_once,
    a_new_secret_is_shown_once,
    a_senseless_overlap_is_refused,
    a_test_reaches_one_endpoint_whatever_it_listens_to,
    a_test_that_fails_is_one_attempt_and_no_dead_letter,
    a_resumption_keeps_the_wait_that_the_receiver_asked_for,
    an_action_is_refused_where_it_makes_no_sense,
);

fn path(endpoint: &Endpoint) -> String {
    format!("/webhook-endpoints/{}", endpoint.id)
}

async fn act(api: &Api, endpoint: &Endpoint, action: &str) -> Answer {
    let path = format!("{}/{action}", path(endpoint));
    api.post(&path).send().await
}

async fn disable(api: &Api, endpoint: &Endpoint) {
    let change = json!({"enabled": false});
    api.patch(&path(endpoint))
        .json(&change)
        .send()
        .await
        .expect(200);
}

/// Case 25. One request is out and hangs, four wait for room at the endpoint, one waits for its
/// second step: none of them is sent once the endpoint is disabled, and a resumption sends them all.
async fn an_endpoint_disabled_during_dispatch_gets_no_later_request(backend: Backend) {
    let settings = [SHORT_LADDER, ("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "1")];
    let server = TestServer::start(backend, &settings).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(500).after(Duration::from_secs(2))]);
    let body = json!({"url": receiver.url("/hook"), "event_types": ["order.*"]});
    let hook = endpoint(&api, body).await;
    let mut events = Vec::new();
    for number in 0..5 {
        events.push(publish(&api, "order.paid", json!({"number": number})).await);
    }
    receiver.wait_for("/hook", 1).await;
    disable(&api, &hook).await;
    for number in 5..8 {
        events.push(publish(&api, "order.paid", json!({"number": number})).await);
    }
    for event in &events {
        let paused = delivery_in(&api, event, &hook.id, "paused").await;
        assert_eq!(paused["next_attempt_at"], Value::Null);
    }
    eventually("the request that was out is on record", async || {
        let attempts = api.all("/webhook-attempts").await;
        (attempts.len() == 1).then_some(())
    })
    .await;
    steps_pass(&api, &receiver, 2).await;
    assert_eq!(receiver.requests_to("/hook").len(), 1);
    let waiting = api.all("/webhook-deliveries?state=paused").await;
    assert_eq!(waiting.len(), events.len());

    let resumed = act(&api, &hook, "resume").await.expect(200).json();
    assert_eq!(resumed["enabled"], true);
    for event in &events {
        let delivery = delivery_in(&api, event, &hook.id, "delivered").await;
        let attempts = attempts_of(&api, &delivery).await;
        assert_eq!(delivery["attempts"], attempts.len());
    }
    assert_eq!(receiver.requests_to("/hook").len(), events.len() + 1);
}

async fn a_resumed_endpoint_gets_what_waited(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(410)]);
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let gone = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &gone, &hook.id, "dead").await;
    let read = api.get(&path(&hook)).send().await.expect(200).json();
    assert_eq!(read["disabled_reason"], "gone");
    let mut waiting = Vec::new();
    for number in 0..3 {
        let event = publish(&api, "order.paid", json!({"number": number})).await;
        delivery_in(&api, &event, &hook.id, "paused").await;
        waiting.push(event);
    }
    let resumed = act(&api, &hook, "resume").await.expect(200).json();
    assert_eq!(resumed["id"], hook.id);
    assert_eq!(resumed["enabled"], true);
    assert_eq!(resumed["disabled_reason"], Value::Null);
    assert_eq!(api.get(&path(&hook)).send().await.json(), resumed);
    for event in &waiting {
        delivery_in(&api, event, &hook.id, "delivered").await;
    }
    // One that is enabled already has nothing waiting, and stays as it is.
    act(&api, &hook, "resume").await.expect(200);
    assert_eq!(receiver.requests_to("/hook").len(), 1 + waiting.len());
}

async fn an_endpoint_deleted_during_dispatch_gets_no_later_request(backend: Backend) {
    let settings = [SHORT_LADDER, ("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "1")];
    let server = TestServer::start(backend, &settings).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(500).after(Duration::from_secs(2))]);
    let body = json!({"url": receiver.url("/hook"), "event_types": ["order.*"]});
    let hook = endpoint(&api, body).await;
    let mut events = Vec::new();
    for number in 0..3 {
        events.push(publish(&api, "order.paid", json!({"number": number})).await);
    }
    receiver.wait_for("/hook", 1).await;
    api.delete(&path(&hook)).send().await.expect(204);
    for event in &events {
        delivery_in(&api, event, &hook.id, "cancelled").await;
    }
    eventually("the request that was out is on record", async || {
        let attempts = api.all("/webhook-attempts").await;
        (attempts.len() == 1).then_some(())
    })
    .await;
    steps_pass(&api, &receiver, 2).await;
    assert_eq!(receiver.requests_to("/hook").len(), 1);
    let cancelled = api.all("/webhook-deliveries?state=cancelled").await;
    assert_eq!(cancelled.len(), events.len());
    assert_eq!(api.all("/webhook-dead-letters").await.len(), 0);
}

/// That it is signed by these secrets and no other, the endpoint's own first.
#[track_caller]
fn verify_all(request: &Received, secrets: &[&str]) {
    let of = |secret: &&str| {
        let signed = [
            request.header("webhook-id").as_bytes(),
            b".",
            request.header("webhook-timestamp").as_bytes(),
            b".",
            &request.body,
        ]
        .concat();
        format!("v1,{}", STANDARD.encode(hmac_sha256(secret, &signed)))
    };
    let mut plain = secrets
        .iter()
        .map(|secret| hex(&hmac_sha256(secret, &request.body)));
    let own = plain.next().expect("a secret");
    assert_eq!(request.header("x-botix-signature"), own);
    // Of those before it the newest.
    assert_eq!(
        request.header_values("x-botix-signature-previous"),
        plain.next().iter().collect::<Vec<_>>()
    );
    let listed: Vec<_> = request.header("webhook-signature").split(' ').collect();
    assert_eq!(listed, secrets.iter().map(of).collect::<Vec<_>>());
}

async fn a_rotated_secret_signs_beside_the_one_before_until_the_overlap_ends(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let rotate = async |overlap: Value| {
        let path = format!("{}/rotate-secret", path(&hook));
        api.post(&path).json(&overlap).send().await
    };
    let mut published = 0;
    let mut next = async || {
        publish(&api, "order.paid", json!({})).await;
        published += 1;
        receiver.wait_for("/hook", published).await.pop()
    };
    let first = &*hook.secret;
    let second = rotate(json!({})).await.expect(200);
    let until = second.member("previous_secret_until");
    assert!(is_timestamp(&until), "{until}");
    let second = &*second.member("secret");
    assert_ne!(second, first);
    verify_all(&next().await.expect("a webhook"), &[second, first]);

    // Rotated again meanwhile, the first signs as long as it was to, and the second as long as it is to.
    let third = rotate(json!({"overlap": "5s"})).await.expect(200);
    let third = &*third.member("secret");
    verify_all(&next().await.expect("a webhook"), &[third, second, first]);
    eventually("the overlap has ended", async || {
        let read = api.get(&path(&hook)).send().await.expect(200).json();
        read["previous_secret_until"].is_null().then_some(())
    })
    .await;
    verify_all(&next().await.expect("a webhook"), &[third, first]);

    // There is an end to it, and no overlap ends them all.
    for _ in 0..3 {
        rotate(json!({})).await.expect(200);
    }
    rotate(json!({})).await.problem("CONFLICT");
    let request = next().await.expect("a webhook");
    assert_eq!(request.header("webhook-signature").split(' ').count(), 5);
    let last = rotate(json!({"overlap": "0s"})).await.expect(200);
    verify_all(&next().await.expect("a webhook"), &[&last.member("secret")]);
}

async fn secrets_whose_overlaps_have_ended_are_forgotten(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, "https://example.com/hook").await;
    let rotate = format!("{}/rotate-secret", path(&hook));
    for overlap in ["5s", "5s", "1s"] {
        let overlap = json!({"overlap": overlap});
        api.post(&rotate).json(&overlap).send().await.expect(200);
    }
    let mut outside = server.outside().await;
    let kept = "SELECT COUNT(*) FROM webhook_endpoints WHERE earlier_secrets IS NOT NULL";
    assert_eq!(outside.number(kept).await, 1);
    eventually("nothing is kept", async || {
        let kept = "SELECT COUNT(*) FROM webhook_endpoints WHERE previous_secret IS NOT NULL \
                    OR earlier_secrets IS NOT NULL";
        (outside.number(kept).await == 0).then_some(())
    })
    .await;
}

async fn a_rotation_without_overlap_ends_the_old_secret_at_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let rotate = format!("{}/rotate-secret", path(&hook));
    let overlap = json!({"overlap": "0s"});
    let rotated = api.post(&rotate).json(&overlap).send().await.expect(200);
    assert_eq!(rotated.json()["previous_secret_until"], Value::Null);
    publish(&api, "order.paid", json!({})).await;
    let request = receiver.wait_for("/hook", 1).await.remove(0);
    verify(&request, &rotated.member("secret"));
    assert!(
        request
            .header_values("x-botix-signature-previous")
            .is_empty()
    );
}

async fn a_new_secret_is_shown_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, "https://example.com/hook").await;
    let rotate = format!("{}/rotate-secret", path(&hook));
    let key = fresh_key();
    let rotated = api.post(&rotate).key(&key).json(&json!({})).send().await;
    let secret = rotated.expect(200).member("secret");
    let again = api.post(&rotate).key(&key).json(&json!({})).send().await;
    assert!(again.is_replay());
    assert_eq!(again.member("secret"), secret, "a retry rotates once");
    let read = api.get(&path(&hook)).send().await.expect(200).text();
    assert!(!read.contains("whsec_"), "{read}");
    let bare = STANDARD.decode(&secret["whsec_".len()..]).expect("base64");
    let stored = server.stored_bytes().await;
    for form in [secret.as_bytes(), &bare] {
        assert!(!stored.windows(form.len()).any(|window| window == form));
    }
}

async fn a_senseless_overlap_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, "https://example.com/hook").await;
    let rotate = format!("{}/rotate-secret", path(&hook));
    for (body, pointer) in [
        (json!({"overlap": "soon"}), "/overlap"),
        (json!({"overlap": ""}), "/overlap"),
        (json!({"overlap": "-1s"}), "/overlap"),
        (json!({"overlap": 60}), "/overlap"),
        (json!({"overlap": null}), "/overlap"),
        (json!({"overlap": "721h"}), "/overlap"),
        (json!({"until": "24h"}), "/until"),
    ] {
        let answer = api.post(&rotate).json(&body).send().await;
        points_at(answer, "INVALID_BODY", pointer);
    }
    let read = api.get(&path(&hook)).send().await.expect(200).json();
    assert_eq!(read["previous_secret_until"], Value::Null);
}

async fn a_test_reaches_one_endpoint_whatever_it_listens_to(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let body = json!({"url": receiver.url("/hook"), "event_types": ["contact.created"]});
    let hook = endpoint(&api, body).await;
    let all = endpoint_at(&api, &receiver.url("/all")).await;
    let planned = act(&api, &hook, "test").await.expect(202).json();
    assert_eq!(planned["endpoint_id"], hook.id);
    assert_eq!(planned["event_type"], "webhook.test");
    assert_eq!(planned["planned_attempt"]["trigger"], "test");
    let request = receiver.wait_for("/hook", 1).await.remove(0);
    verify(&request, &hook.secret);
    assert_eq!(request.header("x-botix-event"), "webhook.test");
    assert_eq!(request.header("x-delivery-attempt"), "1");
    assert_eq!(request.json()["type"], "webhook.test");
    assert!(request.json()["data"]["message"].is_string());
    let event = planned["event_id"].as_str().expect("an id");
    assert_eq!(request.header("webhook-id"), event);
    api.get(&format!("/events/{event}"))
        .send()
        .await
        .expect(200);
    let delivery = delivery_in(&api, event, &hook.id, "delivered").await;
    assert_eq!(delivery["id"], planned["id"]);
    let attempts = attempts_of(&api, &delivery).await;
    assert_eq!(attempts.len(), 1);
    assert_eq!(attempts[0]["trigger"], "test");
    assert_eq!(
        attempts[0]["request_id"],
        planned["planned_attempt"]["request_id"]
    );
    assert_eq!(api.all("/webhook-deliveries").await.len(), 1);

    // A tenant's own event of that type is an event like any other.
    let own = publish(&api, "webhook.test", json!({"message": "Hi"})).await;
    let delivery = delivery_in(&api, &own, &all.id, "delivered").await;
    assert_eq!(attempts_of(&api, &delivery).await[0]["trigger"], "ladder");
    assert_eq!(numbers(&receiver.requests_to("/all")), ["1"]);
}

/// However the endpoint is enabled again, and also when it was disabled while the request was out.
async fn a_resumption_keeps_the_wait_that_the_receiver_asked_for(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let later = || Reply::status(429).header("retry-after", "6");
    receiver.script("/hook", [later(), later().after(Duration::from_secs(1))]);
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let enable = async |enabled: bool| {
        let body = json!({"enabled": enabled});
        api.patch(&path(&hook)).json(&body).send().await.expect(200);
    };
    let event = publish(&api, "order.paid", json!({})).await;
    let waits = delivery_in(&api, &event, &hook.id, "retrying").await;
    enable(false).await;
    let paused = delivery_in(&api, &event, &hook.id, "paused").await;
    assert_eq!(paused["next_attempt_at"], Value::Null);
    act(&api, &hook, "resume").await.expect(200);
    let again = delivery_in(&api, &event, &hook.id, "retrying").await;
    assert_eq!(again["next_attempt_at"], waits["next_attempt_at"]);

    receiver.wait_for("/hook", 2).await;
    enable(false).await;
    eventually("the second attempt is settled", async || {
        let paused = delivery_in(&api, &event, &hook.id, "paused").await;
        (paused["attempts"] == 2).then_some(())
    })
    .await;
    enable(true).await;
    delivery_in(&api, &event, &hook.id, "delivered").await;
    let requests = receiver.requests_to("/hook");
    assert_eq!(numbers(&requests), ["1", "2", "3"]);
    for pair in requests.windows(2) {
        let gap = pair[1].at.duration_since(pair[0].at);
        assert!(gap.expect("time goes on") >= Duration::from_secs(6));
    }
}

async fn a_test_that_fails_is_one_attempt_and_no_dead_letter(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let failures = [
        Reply::status(500),
        Reply::status(410),
        Reply::status(429).header("retry-after", "1"),
    ];
    for (at, reply) in failures.into_iter().enumerate() {
        let url = format!("/failure-{at}");
        receiver.always(&url, reply);
        let body = json!({"url": receiver.url(&url), "event_types": ["order.*"]});
        let hook = endpoint(&api, body).await;
        let planned = act(&api, &hook, "test").await.expect(202).json();
        let event = planned["event_id"].as_str().expect("an id");
        let dead = delivery_in(&api, event, &hook.id, "dead").await;
        assert_eq!(attempts_of(&api, &dead).await.len(), 1);
        let read = api.get(&path(&hook)).send().await.expect(200).json();
        assert_eq!(read["enabled"], true, "a test changes nothing");
    }
    assert_eq!(api.all("/webhook-dead-letters").await.len(), 0);
    steps_pass(&api, &receiver, 2).await;
    for at in 0..3 {
        assert_eq!(receiver.requests_to(&format!("/failure-{at}")).len(), 1);
    }
}

async fn an_action_is_refused_where_it_makes_no_sense(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let project = server.project("shop").await;
    let api = &project.api;
    let other = server.project("other").await.api;
    let writer = server.scoped(&project, "read,write").await.0;
    let body = json!({"url": receiver.url("/hook"), "enabled": false});
    let hook = endpoint(api, body).await;
    for action in ["resume", "rotate-secret", "test"] {
        let path = format!("{}/{action}", path(&hook));
        other.post(&path).send().await.problem("NOT_FOUND");
        writer.post(&path).send().await.problem("FORBIDDEN");
        let keyless = api.post(&path).without_key().send().await;
        keyless.problem("IDEMPOTENCY_KEY_REQUIRED");
        let options = json!({"colour": "green"});
        let answer = api.post(&path).json(&options).send().await;
        points_at(answer, "INVALID_BODY", "/colour");
    }
    act(api, &hook, "test").await.problem("CONFLICT");
    assert_eq!(api.all("/events").await.len(), 0);
    assert_eq!(api.all("/webhook-deliveries").await.len(), 0);
    assert_eq!(receiver.requests().len(), 0);
}
