//! Plugins that misbehave: a visible failed attempt for their own tenant, and nothing for others.

use super::{plugged, ready, ready_version, upload};
use crate::fixtures;
use crate::harness::api::Api;
use crate::harness::receiver::Receiver;
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, on_both_databases};
use crate::webhooks::{
    SHORT_LADDER, attempts_of, dead_letter_of, delivery_in, endpoint_at, publish, verify,
};
use serde_json::{Value, json};

on_both_databases!(
    a_misbehaving_plugin_fails_visibly_and_climbs_the_ladder,
    a_misbehaving_plugin_does_not_disturb_another_tenant,
    a_fixed_plugin_rescues_the_delivery,
    a_talkative_plugin_delivers_with_a_bounded_log,
    a_plugin_cannot_forge_what_the_platform_says,
    a_plugin_too_large_to_run_is_refused_or_fails,
);

fn misbehaving() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("loop", fixtures::loops()),
        ("fill", fixtures::fills_memory()),
        ("trap", fixtures::traps()),
        ("memory-bomb", fixtures::memory_bomb()),
        ("recursion", fixtures::recursion()),
        ("answer-65537", fixtures::answer_of(65_537)),
        ("answer-1mib", fixtures::answer_of(1 << 20)),
        ("invalid-json", fixtures::invalid_json()),
        ("guest-error", fixtures::guest_error()),
    ]
}

async fn hostile_endpoints(api: &Api, receiver: &Receiver) -> Vec<(&'static str, String)> {
    let mut endpoints = Vec::new();
    for (name, component) in misbehaving() {
        let plugin = ready(api, name, &component).await;
        let endpoint = plugged(api, &receiver.url(&format!("/{name}")), &plugin, json!({})).await;
        endpoints.push((name, endpoint.id));
    }
    endpoints
}

async fn a_misbehaving_plugin_fails_visibly_and_climbs_the_ladder(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let endpoints = hostile_endpoints(&api, &receiver).await;
    let event = publish(&api, "order.paid", json!({})).await;
    for (name, endpoint) in endpoints {
        let delivery = delivery_in(&api, &event, &endpoint, "dead").await;
        let attempts = attempts_of(&api, &delivery).await;
        let numbers: Vec<_> = attempts
            .iter()
            .map(|attempt| attempt["number"].as_u64())
            .collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5].map(Some), "{name}");
        for attempt in &attempts {
            assert_eq!(attempt["status"], "failed", "{name}");
            assert_eq!(attempt["status_code"], Value::Null, "{name}");
            assert!(
                attempt["error"]
                    .as_str()
                    .is_some_and(|error| !error.is_empty()),
                "{name}: {attempt}"
            );
            assert_eq!(attempt["plugin"]["version"], 1, "{name}");
        }
        if name == "guest-error" {
            let error = attempts[0]["error"].as_str().expect("an error");
            assert!(error.contains("no such customer"), "{error}");
        }
        assert_eq!(
            dead_letter_of(&api, &delivery).await["attempts"],
            5,
            "{name}"
        );
    }
    assert_eq!(receiver.requests().len(), 0, "nothing of it was sent");
}

async fn a_misbehaving_plugin_does_not_disturb_another_tenant(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let hostile = server.project("hostile").await.api;
    let other = server.project("other").await.api;
    let endpoints = hostile_endpoints(&hostile, &receiver).await;
    let good = endpoint_at(&other, &receiver.url("/good")).await;
    let plugin = ready(&other, "echo", &fixtures::echo()).await;
    let through_plugin = plugged(&other, &receiver.url("/plugged"), &plugin, json!({})).await;
    for _ in 0..3 {
        publish(&hostile, "order.paid", json!({})).await;
    }
    for _ in 0..20 {
        publish(&other, "order.paid", json!({})).await;
    }
    for (path, secret) in [
        ("/good", &good.secret),
        ("/plugged", &through_plugin.secret),
    ] {
        for request in receiver.wait_for(path, 20).await {
            verify(&request, secret);
        }
    }
    eventually("the hostile ones are dead letters", async || {
        let letters = hostile.all("/webhook-dead-letters").await;
        (letters.len() == 3 * endpoints.len()).then_some(())
    })
    .await;
    assert_eq!(other.all("/webhook-dead-letters").await.len(), 0);
    // The server is as well as before.
    publish(&other, "order.paid", json!({})).await;
    receiver.wait_for("/plugged", 21).await;
    receiver.wait_for("/good", 21).await;
}

async fn a_fixed_plugin_rescues_the_delivery(backend: Backend) {
    let server = TestServer::start(backend, &[("BOTIX_WEBHOOKS__LADDER", "2s,2s,2s,2s")]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let plugin = ready(&api, "p", &fixtures::traps()).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &plugin, json!({})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &event, &endpoint.id, "retrying").await;
    ready_version(&api, &plugin, 2, &fixtures::echo()).await;
    let activate = api.post(&format!("/plugins/{plugin}/activate"));
    activate
        .json(&json!({"version": 2}))
        .send()
        .await
        .expect(200);
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let attempts = attempts_of(&api, &delivery).await;
    assert_eq!(attempts[0]["plugin"]["version"], 1);
    assert_eq!(attempts[attempts.len() - 1]["plugin"]["version"], 2);
    assert_eq!(receiver.requests().len(), 1);
}

async fn a_talkative_plugin_delivers_with_a_bounded_log(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for (name, component) in [
        ("log-flood", fixtures::log_flood()),
        ("long-log", fixtures::long_log()),
    ] {
        let plugin = ready(&api, name, &component).await;
        let endpoint = plugged(&api, &receiver.url(&format!("/{name}")), &plugin, json!({})).await;
        let event = publish(&api, "order.paid", json!({})).await;
        let path = format!("/webhook-deliveries?endpoint_id={}", endpoint.id);
        let delivery = eventually("it is settled", async || {
            let rows = api.all(&path).await;
            let settled = |row: &Value| row["state"] == "delivered" || row["state"] == "dead";
            rows.into_iter()
                .find(|row| row["event_id"] == event && settled(row))
        })
        .await;
        for attempt in attempts_of(&api, &delivery).await {
            let log = attempt["plugin"]["log"].to_string();
            assert!(
                log.len() < 256 * 1024,
                "{name}: a log of {} bytes",
                log.len()
            );
        }
        api.delete(&format!("/webhook-endpoints/{}", endpoint.id))
            .send()
            .await
            .expect(204);
    }
}

async fn a_plugin_cannot_forge_what_the_platform_says(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let plugin = ready(&api, "p", &fixtures::reserved_header()).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &plugin, json!({})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let path = format!("/webhook-deliveries?endpoint_id={}", endpoint.id);
    eventually("it is settled", async || {
        let rows = api.all(&path).await;
        let settled = |row: &Value| row["state"] == "delivered" || row["state"] == "dead";
        rows.into_iter()
            .find(|row| row["event_id"] == event && settled(row))
    })
    .await;
    for request in receiver.requests() {
        assert_eq!(
            request.header("content-length"),
            request.body.len().to_string()
        );
        verify(&request, &endpoint.secret);
    }
}

async fn a_plugin_too_large_to_run_is_refused_or_fails(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let answer = upload(&api, "/plugins?name=big", &fixtures::memory_at_start())
        .send()
        .await;
    if answer.status != 201 {
        answer.problem("PLUGIN_INVALID");
        return;
    }
    let id = answer.member("id");
    let status = eventually("it is compiled", async || {
        let plugin = api
            .get(&format!("/plugins/{id}"))
            .send()
            .await
            .expect(200)
            .json();
        let version = plugin["versions"][0].clone();
        (version["status"] != "compiling").then_some(version)
    })
    .await;
    if status["status"] == "rejected" {
        assert!(
            status["reason"]
                .as_str()
                .is_some_and(|reason| !reason.is_empty())
        );
        return;
    }
    let endpoint = plugged(&api, &receiver.url("/hook"), &id, json!({})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &event, &endpoint.id, "dead").await;
    assert_eq!(receiver.requests().len(), 0);
}
