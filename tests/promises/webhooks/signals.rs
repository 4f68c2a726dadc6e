//! What tenants and operators are told: endpoints that fail or were disabled, and how the queue is.

use super::ladder::steps_pass;
use super::{
    Endpoint, SHORT_LADDER, dead_letter_of, delivery_in, endpoint, endpoint_at, publish, verify,
};
use crate::harness::api::Api;
use crate::harness::receiver::{Received, Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, is_timestamp, on_both_databases};
use serde_json::{Value, json};

on_both_databases!(
    a_failing_endpoint_is_told_to_the_others_once_an_episode,
    an_endpoint_disabled_by_a_410_is_told_to_the_others,
    a_signal_that_fails_raises_no_further_one,
    neither_a_retry_nor_a_test_that_fails_raises_a_signal,
    the_metrics_tell_of_the_queue_and_of_dead_letters,
);

async fn watcher(api: &Api, receiver: &Receiver) -> Endpoint {
    let body = json!({"url": receiver.url("/watch"), "event_types": ["endpoint.*"]});
    endpoint(api, body).await
}

/// An endpoint of the business that would be told of others.
async fn listens_to_both(api: &Api, receiver: &Receiver, path: &str) -> Endpoint {
    let event_types = ["order.*", "endpoint.failing", "endpoint.disabled"];
    let body = json!({"url": receiver.url(path), "event_types": event_types});
    endpoint(api, body).await
}

async fn failing_since(api: &Api, endpoint: &Endpoint) -> Value {
    let path = format!("/webhook-endpoints/{}", endpoint.id);
    api.get(&path).send().await.expect(200).json()["failing_since"].clone()
}

fn of_type(requests: Vec<Received>, event_type: &str) -> Vec<Received> {
    (requests.into_iter())
        .filter(|request| request.header("x-botix-event") == event_type)
        .collect()
}

async fn a_failing_endpoint_is_told_to_the_others_once_an_episode(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let watch = watcher(&api, &receiver).await;
    receiver.script("/hook", vec![Reply::status(500); 5]);
    let hook = listens_to_both(&api, &receiver, "/hook").await;
    let business = endpoint_at(&api, &receiver.url("/business")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let told = receiver.wait_for("/watch", 1).await.remove(0);
    verify(&told, &watch.secret);
    assert_eq!(told.header("x-botix-event"), "endpoint.failing");
    let dead = delivery_in(&api, &event, &hook.id, "dead").await;
    let data = told.json()["data"].clone();
    assert_eq!(data["endpoint_id"], hook.id);
    assert_eq!(data["delivery_id"], dead["id"]);
    assert_eq!(data["reason"], "status 500");
    assert!(is_timestamp(data["since"].as_str().expect("a time")));
    assert!(
        !told.text().contains("127.0.0.1"),
        "no URL: {}",
        told.text()
    );
    assert_eq!(failing_since(&api, &hook).await, data["since"]);
    assert_eq!(failing_since(&api, &watch).await, Value::Null);

    // A success ends the episode, another failure begins the next one.
    let event = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &event, &hook.id, "delivered").await;
    assert_eq!(failing_since(&api, &hook).await, Value::Null);
    receiver.script("/hook", [Reply::status(403), Reply::status(404)]);
    for _ in 0..2 {
        let event = publish(&api, "order.paid", json!({})).await;
        delivery_in(&api, &event, &hook.id, "dead").await;
    }
    let told = receiver.wait_for("/watch", 2).await;
    assert_eq!(told[1].json()["data"]["reason"], "status 403");
    // A manual retry that succeeds ends one as well.
    let path = format!(
        "/webhook-deliveries/{}/retry",
        dead["id"].as_str().expect("an id")
    );
    api.post(&path).send().await.expect(202);
    eventually("the episode has ended", async || {
        failing_since(&api, &hook).await.is_null().then_some(())
    })
    .await;
    // One an episode, never to the endpoint that it tells of, and to none that asked for `*` alone.
    assert_eq!(api.all("/events?type=endpoint.failing").await.len(), 2);
    for untold in [&hook, &business] {
        let path = format!("/webhook-deliveries?endpoint_id={}", untold.id);
        let deliveries = api.all(&path).await;
        assert_eq!(deliveries.len(), 4);
        let mut types = deliveries.iter().map(|delivery| &delivery["event_type"]);
        assert!(types.all(|event_type| event_type == "order.paid"));
    }
    assert_eq!(receiver.requests_to("/watch").len(), 2);
}

async fn an_endpoint_disabled_by_a_410_is_told_to_the_others(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    watcher(&api, &receiver).await;
    receiver.script("/hook", [Reply::status(410)]);
    let hook = listens_to_both(&api, &receiver, "/hook").await;
    let event = publish(&api, "order.paid", json!({})).await;
    let told = receiver.wait_for("/watch", 1).await.remove(0);
    assert_eq!(told.header("x-botix-event"), "endpoint.disabled");
    let dead = delivery_in(&api, &event, &hook.id, "dead").await;
    let data = told.json()["data"].clone();
    assert_eq!(data["endpoint_id"], hook.id);
    assert_eq!(data["delivery_id"], dead["id"]);
    assert_eq!(data["reason"], "gone");
    assert!(is_timestamp(data["disabled_at"].as_str().expect("a time")));
    assert_eq!(failing_since(&api, &hook).await, data["disabled_at"]);
    // Who disables an endpoint knows of it.
    let path = format!("/webhook-endpoints/{}", hook.id);
    let resume = format!("{path}/resume");
    api.post(&resume).send().await.expect(200);
    let change = json!({"enabled": false});
    api.patch(&path).json(&change).send().await.expect(200);
    let events = api.all("/events").await;
    assert_eq!(events.len(), 2, "{events:?}");
}

/// Both refuse what they are told of the other: without an end to it, they would tell for ever.
async fn a_signal_that_fails_raises_no_further_one(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for path in ["/one", "/two"] {
        receiver.always(path, Reply::status(403));
        listens_to_both(&api, &receiver, path).await;
    }
    publish(&api, "order.paid", json!({})).await;
    // Each fails for the order, is told of to the other, and that fails as well.
    eventually("all is dead", async || {
        let dead = api.all("/webhook-deliveries?state=dead").await;
        (dead.len() == 4).then_some(())
    })
    .await;
    steps_pass(&api, &receiver, 2).await;
    let told = api.all("/events?type=endpoint.failing").await;
    assert_eq!(told.len(), 2, "{told:?}");
    for path in ["/one", "/two"] {
        let requests = of_type(receiver.requests_to(path), "endpoint.failing");
        assert_eq!(requests.len(), 1, "{path}");
    }
}

async fn neither_a_retry_nor_a_test_that_fails_raises_a_signal(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &hook.id, "delivered").await;
    receiver.always("/hook", Reply::status(410));
    let path = format!("/webhook-endpoints/{}/test", hook.id);
    let test = api.post(&path).send().await.expect(202);
    delivery_in(&api, &test.member("event_id"), &hook.id, "dead").await;
    let path = format!(
        "/webhook-deliveries/{}/retry",
        delivery["id"].as_str().expect("an id")
    );
    api.post(&path).send().await.expect(202);
    eventually("the retry is on record", async || {
        let failed = api.all("/webhook-attempts?status=failed").await;
        (failed.len() == 2).then_some(())
    })
    .await;
    assert_eq!(failing_since(&api, &hook).await, Value::Null);
    let types: Vec<_> = api.all("/events").await;
    assert!(
        types
            .iter()
            .all(|event| event["type"] != "endpoint.failing")
    );
    assert!(
        types
            .iter()
            .all(|event| event["type"] != "endpoint.disabled")
    );
}

/// The value of a gauge, once the process has seen it so.
pub(super) async fn gauge(server: &TestServer, name: &str, fits: impl Fn(f64) -> bool) {
    gauge_at(&server.url(), name, fits).await;
}

pub(super) async fn gauge_at(base: &str, name: &str, fits: impl Fn(f64) -> bool) {
    let http = reqwest::Client::new();
    let url = format!("{base}/metrics");
    eventually(&format!("{name} is as it should be"), async || {
        // The process may not listen yet.
        let page = http.get(&url).send().await.ok()?;
        let text = page.text().await.expect("text");
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.is_some_and(&fits).then_some(())
    })
    .await;
}

async fn the_metrics_tell_of_the_queue_and_of_dead_letters(backend: Backend) {
    let limit = [("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "1")];
    let server = TestServer::start(backend, &limit).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/refuses", Reply::status(403));
    let refuses = endpoint_at(&api, &receiver.url("/refuses")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let dead = delivery_in(&api, &event, &refuses.id, "dead").await;
    dead_letter_of(&api, &dead).await;
    let path = format!("/webhook-endpoints/{}", refuses.id);
    api.delete(&path).send().await.expect(204);
    gauge(&server, "botix_webhook_dead_letters_last_day", |value| {
        (value - 1.0).abs() < f64::EPSILON
    })
    .await;
    gauge(&server, "botix_webhook_queue_depth", |value| value == 0.0).await;
    gauge(&server, "botix_webhook_oldest_due_seconds", |value| {
        value == 0.0
    })
    .await;

    receiver.always("/hangs", Reply::Hang);
    endpoint_at(&api, &receiver.url("/hangs")).await;
    for _ in 0..3 {
        publish(&api, "order.paid", json!({})).await;
    }
    receiver.wait_for("/hangs", 1).await;
    gauge(&server, "botix_webhook_queue_depth", |value| value >= 1.0).await;
    gauge(&server, "botix_webhook_oldest_due_seconds", |value| {
        value > 0.0
    })
    .await;
}
