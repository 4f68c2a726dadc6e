//! Versions: immutable, switched by activation, also back; and what a good plugin may do.

use super::{plugged, ready, ready_version};
use crate::fixtures;
use crate::harness::receiver::Receiver;
use crate::harness::server::TestServer;
use crate::harness::{Backend, on_both_databases};
use crate::webhooks::{attempts_of, delivery_in, hex, hmac_sha256, publish, verify};
use serde_json::{Value, json};

on_both_databases!(
    a_later_version_waits_for_its_activation,
    activation_goes_back_too,
    a_version_that_does_not_exist_is_not_activated,
    a_signer_signs_the_final_body_with_the_endpoints_key,
    a_plugin_sees_its_configuration_the_time_and_no_foreign_key,
    a_dropped_event_is_not_sent,
    every_call_has_a_fresh_instance,
    an_attempt_names_its_plugin,
    the_largest_answer_is_delivered,
);

async fn a_later_version_waits_for_its_activation(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::sign_only()).await;
    plugged(&api, &receiver.url("/hook"), &id, json!({})).await;
    ready_version(&api, &id, 2, &fixtures::counter()).await;
    let plugin = api
        .get(&format!("/plugins/{id}"))
        .send()
        .await
        .expect(200)
        .json();
    assert_eq!(plugin["active_version"], 1);
    let versions = api.all(&format!("/plugins/{id}/versions")).await;
    let numbers: Vec<_> = versions.iter().map(|row| row["version"].as_u64()).collect();
    assert_eq!(numbers, [Some(2), Some(1)], "newest first");
    publish(&api, "order.paid", json!({})).await;
    let request = receiver.wait_for("/hook", 1).await.remove(0);
    assert_eq!(request.header("x-plugin"), "echo");
    assert_eq!(request.json()["type"], "order.paid");
}

async fn activation_goes_back_too(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::sign_only()).await;
    plugged(&api, &receiver.url("/hook"), &id, json!({})).await;
    ready_version(&api, &id, 2, &fixtures::counter()).await;
    for (n, version) in [2, 1, 2, 1].into_iter().enumerate() {
        let activate = api.post(&format!("/plugins/{id}/activate"));
        let plugin = activate
            .json(&json!({"version": version}))
            .send()
            .await
            .expect(200)
            .json();
        assert_eq!(plugin["active_version"], version);
        publish(&api, "order.paid", json!({})).await;
        let request = receiver.wait_for("/hook", n + 1).await.remove(n);
        let counted = request.text() == "1";
        assert_eq!(
            counted,
            version == 2,
            "version {version} sent {}",
            request.text()
        );
    }
}

async fn a_version_that_does_not_exist_is_not_activated(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::echo()).await;
    let path = format!("/plugins/{id}/activate");
    for body in [
        json!({"version": "1"}),
        json!({"version": -1}),
        json!({}),
        json!({"versions": 1}),
    ] {
        api.post(&path)
            .json(&body)
            .send()
            .await
            .problem("INVALID_BODY");
    }
    let answer = api.post(&path).json(&json!({"version": 2})).send().await;
    assert!(
        matches!(
            answer.code().as_deref(),
            Some("NOT_FOUND" | "CONFLICT" | "INVALID_BODY")
        ),
        "{}",
        answer.describe()
    );
    let plugin = api
        .get(&format!("/plugins/{id}"))
        .send()
        .await
        .expect(200)
        .json();
    assert_eq!(plugin["active_version"], 1);
}

async fn a_signer_signs_the_final_body_with_the_endpoints_key(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::both()).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &id, json!({})).await;
    publish(&api, "order.paid", json!({"amount": 1})).await;
    let request = receiver.wait_for("/hook", 1).await.remove(0);
    verify(&request, &endpoint.secret);
    assert_eq!(request.header("x-plugin"), "echo");
    let letters: String = hex(&hmac_sha256(&endpoint.secret, &request.body))
        .chars()
        .map(|digit| {
            char::from(b'a' + u8::try_from(digit.to_digit(16).expect("hex")).expect("< 16"))
        })
        .collect();
    assert_eq!(request.header("x-signed"), letters);
}

async fn a_plugin_sees_its_configuration_the_time_and_no_foreign_key(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::every_import()).await;
    // It asks for the key `missing`, traps unless that is refused, and answers its configuration.
    let config = json!({"any": ["JSON", 1.5, null]});
    plugged(&api, &receiver.url("/configured"), &id, config.clone()).await;
    let body = json!({"url": receiver.url("/bare"), "plugin_id": id});
    crate::webhooks::endpoint(&api, body).await;
    publish(&api, "order.paid", json!({})).await;
    let configured = receiver.wait_for("/configured", 1).await.remove(0);
    assert_eq!(configured.json(), config);
    let digit = configured.header("x-now");
    assert!(digit.len() == 1 && digit.as_bytes()[0].is_ascii_digit());
    let bare = receiver.wait_for("/bare", 1).await.remove(0);
    assert_eq!(bare.text(), "{}");
}

async fn a_dropped_event_is_not_sent(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::drops()).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &id, json!({})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dropped").await;
    assert_eq!(delivery["next_attempt_at"], Value::Null);
    assert_eq!(receiver.requests().len(), 0);
    assert_eq!(api.all("/webhook-dead-letters").await.len(), 0);
    let attempts = attempts_of(&api, &delivery).await;
    let recorded = Value::from(attempts).to_string();
    assert!(
        recorded.contains("not wanted"),
        "the reason is recorded: {recorded}"
    );
}

async fn every_call_has_a_fresh_instance(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::counter()).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &id, json!({})).await;
    for _ in 0..10 {
        publish(&api, "order.paid", json!({})).await;
    }
    for request in receiver.wait_for("/hook", 10).await {
        assert_eq!(request.text(), "1");
        verify(&request, &endpoint.secret);
    }
}

async fn an_attempt_names_its_plugin(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::every_import()).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &id, json!({"a": 1})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let attempt = attempts_of(&api, &delivery).await.remove(0);
    let plugin = &attempt["plugin"];
    assert_eq!(plugin["id"], id);
    assert_eq!(plugin["version"], 1);
    let lines =
        ["debug", "info", "warn", "error"].map(|level| json!({"level": level, "message": "hello"}));
    assert_eq!(plugin["log"], json!(lines));
    assert_eq!(
        attempt["payload"], "{\"a\":1}",
        "what was sent, not what was published"
    );
}

async fn the_largest_answer_is_delivered(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::answer_of(65_536)).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &id, json!({})).await;
    publish(&api, "order.paid", json!({})).await;
    let request = receiver.wait_for("/hook", 1).await.remove(0);
    assert_eq!(request.body.len(), 65_536);
    verify(&request, &endpoint.secret);
}
