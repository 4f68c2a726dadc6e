//! What arrives: the body byte for byte, the headers, both signatures, and the 64 KiB rule.

use super::{attempts_of, delivery_in, endpoint_at, publish, published, verify};
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, fresh_phone, is_id, is_timestamp, on_both_databases};
use serde_json::{Value, json};

on_both_databases!(
    a_webhook_has_the_published_body_and_headers,
    a_contact_announces_each_change,
    a_refused_request_announces_nothing,
    published_bytes_arrive_unchanged,
    a_body_of_exactly_64_kib_arrives_whole,
    a_larger_body_is_truncated_and_readable_in_whole,
    a_truncated_webhook_is_the_same_on_every_attempt,
);

const LIMIT: usize = 65_536;

async fn a_webhook_has_the_published_body_and_headers(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let project = server.project("shop").await;
    let api = &project.api;
    let endpoint = endpoint_at(api, &receiver.url("/hook")).await;
    let event = publish(api, "order.paid", json!({"amount": 12})).await;
    let request = receiver.wait_for("/hook", 1).await.remove(0);
    assert_eq!(request.method, "POST");
    verify(&request, &endpoint.secret);
    assert!(
        request
            .header("content-type")
            .starts_with("application/json")
    );
    assert_eq!(
        request.header("content-length"),
        request.body.len().to_string()
    );
    assert_eq!(request.header("x-botix-event"), "order.paid");
    assert_eq!(request.header("x-delivery-attempt"), "1");
    assert_eq!(request.header("webhook-id"), event);
    assert!(is_id("req", request.header("x-botix-request-id")));

    let body = request.json();
    let members: Vec<_> = body.as_object().expect("an object").keys().collect();
    assert_eq!(members.len(), 5, "{body}");
    assert_eq!(body["id"], event);
    assert!(is_id("evt", &event));
    assert_eq!(body["type"], "order.paid");
    assert_eq!(body["project_id"], project.id);
    assert_eq!(body["data"], json!({"amount": 12}));
    assert!(is_timestamp(body["timestamp"].as_str().expect("a time")));
    let prefix = format!("{{\"id\":\"{event}\",\"type\":\"order.paid\",\"timestamp\":\"");
    assert!(request.text().starts_with(&prefix), "{}", request.text());
    assert!(
        request.text().ends_with(",\"data\":{\"amount\":12}}"),
        "{}",
        request.text()
    );
}

async fn a_contact_announces_each_change(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    endpoint_at(&api, &receiver.url("/hook")).await;
    let body = json!({"phone": fresh_phone(), "name": "Ada", "attributes": {"k": "é"}});
    let created = api
        .post("/contacts")
        .json(&body)
        .send()
        .await
        .expect(201)
        .json();
    let path = format!("/contacts/{}", created["id"].as_str().expect("an id"));
    let change = json!({"name": "Grace"});
    let updated = api
        .patch(&path)
        .json(&change)
        .send()
        .await
        .expect(200)
        .json();
    api.delete(&path).send().await.expect(204);
    let requests = receiver.wait_for("/hook", 3).await;
    let data_of = |event_type: &str| {
        let mut of_type = requests
            .iter()
            .filter(|r| r.header("x-botix-event") == event_type);
        of_type.next().expect(event_type).json()["data"].clone()
    };
    assert_eq!(data_of("contact.created"), created);
    assert_eq!(data_of("contact.updated"), updated);
    assert_eq!(data_of("contact.deleted")["id"], created["id"]);
    assert_eq!(requests.len(), 3);
}

async fn a_refused_request_announces_nothing(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    endpoint_at(&api, &receiver.url("/hook")).await;
    let create = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    create.clone().send().await.expect(201);
    create.clone().send().await.expect(201);
    let again = create.key(&crate::harness::fresh_key());
    again.send().await.problem("CONTACT_EXISTS");
    let missing = "/contacts/con_00000000000000000000000000";
    api.patch(missing)
        .json(&json!({"name": "x"}))
        .send()
        .await
        .problem("NOT_FOUND");
    api.delete(missing).send().await.problem("NOT_FOUND");
    api.post("/contacts")
        .json(&json!({"phone": "x"}))
        .send()
        .await
        .problem("INVALID_BODY");
    assert_eq!(api.all("/events").await.len(), 1);
    assert_eq!(api.all("/webhook-deliveries").await.len(), 1);
    receiver.wait_for("/hook", 1).await;
}

async fn published_bytes_arrive_unchanged(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    for data in [
        r#"{"b":1.0,"a":1.00,"c":-0.0,"d":1E+2}"#,
        r#"{"n":1e400,"m":123456789012345678901234567890.123456789}"#,
        r#"{"z":"\u00e9","a":"é","s":"\/","u":"\u2028","p":"\ud83d\ude42","q":"\"\\"}"#,
        r#"{"z":1,"y":2,"x":{"b":1,"a":2}}"#,
        r#"{"spaces" :  [ 1 ,2,	3 ] }"#,
        r#"{"a":1,"a":2}"#,
        r#"{"nul":"\u0000"}"#,
        r#"{"html":"<script>&amp;</script>"}"#,
        r"[]",
        r"null",
        r"1.0",
        r#""text""#,
    ] {
        let before = receiver.requests().len();
        let body = format!(r#"{{"data":{data},"type":"order.paid"}}"#);
        // From the header: not every number in the answer fits the types of this test.
        let answer = published(&api, &body).await;
        let location = answer.header("location").expect("a location");
        let event = location.rsplit('/').next().unwrap_or_default();
        let request = receiver.wait_for("/hook", before + 1).await.remove(before);
        assert!(
            request.text().ends_with(&format!(",\"data\":{data}}}")),
            "{data} arrived as {}",
            request.text()
        );
        verify(&request, &endpoint.secret);
        let read = api
            .get(&format!("/events/{event}"))
            .send()
            .await
            .expect(200);
        assert!(
            read.text().contains(data),
            "{data} is read as {}",
            read.text()
        );
        let delivery = delivery_in(&api, event, &endpoint.id, "delivered").await;
        let attempts = api.get(&format!(
            "/webhook-deliveries/{}/attempts",
            delivery["id"].as_str().expect("an id")
        ));
        // The payload is recorded as a text, so its bytes survive.
        let attempts = attempts.send().await.expect(200).json();
        assert_eq!(attempts["data"][0]["payload"], request.text());
    }
}

/// Publishes data whose webhook has exactly that many bytes.
async fn publish_sized(
    api: &crate::harness::api::Api,
    overhead: usize,
    size: usize,
) -> (String, String) {
    let filler = "x".repeat(size - overhead - "{\"f\":\"\"}".len());
    let data = format!("{{\"f\":\"{filler}\"}}");
    let body = format!("{{\"type\":\"order.paid\",\"data\":{data}}}");
    (published(api, &body).await.member("id"), data)
}

/// How many bytes the platform puts around the data of an `order.paid`.
async fn overhead(api: &crate::harness::api::Api, receiver: &Receiver) -> usize {
    published(api, "{\"type\":\"order.paid\",\"data\":1}").await;
    receiver.wait_for("/hook", 1).await[0].body.len() - 1
}

async fn a_body_of_exactly_64_kib_arrives_whole(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let overhead = overhead(&api, &receiver).await;
    let (_, data) = publish_sized(&api, overhead, LIMIT).await;
    let request = receiver.wait_for("/hook", 2).await.remove(1);
    assert_eq!(request.body.len(), LIMIT);
    assert!(request.text().contains(&data));
    assert!(!request.text().contains("truncated"));
    verify(&request, &endpoint.secret);
}

async fn a_larger_body_is_truncated_and_readable_in_whole(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let project = server.project("shop").await;
    let api = &project.api;
    let endpoint = endpoint_at(api, &receiver.url("/hook")).await;
    let overhead = overhead(api, &receiver).await;
    for (n, size) in [LIMIT + 1, 1_000_000].into_iter().enumerate() {
        let (event, data) = publish_sized(api, overhead, size).await;
        let request = receiver.wait_for("/hook", n + 2).await.remove(n + 1);
        verify(&request, &endpoint.secret);
        let body = request.json();
        let mut members: Vec<_> = body.as_object().expect("an object").keys().collect();
        members.sort();
        assert_eq!(
            members,
            ["data", "id", "project_id", "timestamp", "truncated", "type"]
        );
        assert_eq!(body["truncated"], true);
        assert_eq!(body["id"], event);
        assert_eq!(body["type"], "order.paid");
        assert_eq!(body["project_id"], project.id);
        assert_eq!(body["data"].as_object().expect("an object").len(), 2);
        assert_eq!(body["data"]["id"], event);
        let href = body["data"]["href"].as_str().expect("a link");
        assert!(
            href.ends_with(&format!("/public/v1/events/{event}")),
            "{href}"
        );
        let whole = api
            .outside(reqwest::Method::GET, href)
            .send()
            .await
            .expect(200);
        assert!(whole.text().contains(&data), "the whole of {size} bytes");
    }
    // Two bytes a character: the limit is in bytes, not in characters.
    let data = "é".repeat(40_000);
    let before = receiver.requests().len();
    publish(api, "order.paid", Value::String(data)).await;
    let request = receiver.wait_for("/hook", before + 1).await.remove(before);
    assert_eq!(request.json()["truncated"], true);
}

async fn a_truncated_webhook_is_the_same_on_every_attempt(backend: Backend) {
    let server = TestServer::start(backend, &[super::SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    receiver.script("/hook", [Reply::status(500)]);
    let event = publish(&api, "order.paid", Value::String("x".repeat(LIMIT))).await;
    let requests = receiver.wait_for("/hook", 2).await;
    assert_eq!(requests[0].body, requests[1].body);
    assert_eq!(requests[0].json()["truncated"], true);
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    for attempt in attempts_of(&api, &delivery).await {
        assert_eq!(attempt["payload"], requests[0].text());
    }
}
