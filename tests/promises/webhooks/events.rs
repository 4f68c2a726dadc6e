//! Events: what tenants publish, what the platform knows, and what can be read again.

use super::{endpoint_at, publish, published};
use crate::contacts::points_at;
use crate::harness::receiver::Receiver;
use crate::harness::server::TestServer;
use crate::harness::{Backend, fresh_key, fresh_phone, is_id, is_timestamp, on_both_databases};
use serde_json::{Value, json};

on_both_databases!(
    an_event_is_published_and_read_again,
    a_tenant_may_publish_types_of_its_own,
    a_type_that_is_no_dotted_name_is_refused,
    built_in_types_have_published_schemas,
    data_that_does_not_fit_a_built_in_type_is_refused,
    an_event_takes_up_to_one_mebibyte,
    a_published_event_is_delivered_once_per_key,
);

const BUILT_IN: [&str; 14] = [
    "contact.created",
    "contact.updated",
    "contact.deleted",
    "message.sent",
    "message.delivered",
    "message.failed",
    "catalog.import.completed",
    "scenario.run.completed",
    "scenario.run.failed",
    "payment.succeeded",
    "payment.failed",
    "subscription.created",
    "subscription.cancelled",
    "webhook.test",
];

async fn an_event_is_published_and_read_again(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let made = published(&api, r#"{"type":"order.paid","data":{"amount":1.0}}"#).await;
    let id = made.member("id");
    assert!(is_id("evt", &id));
    let read = api.get(&format!("/events/{id}")).send().await.expect(200);
    let event = read.json();
    assert_eq!(event["id"], id);
    assert_eq!(event["type"], "order.paid");
    assert_eq!(event["data"], json!({"amount": 1.0}));
    assert!(is_timestamp(event["timestamp"].as_str().expect("a time")));
    let contact = json!({"phone": fresh_phone()});
    api.post("/contacts")
        .json(&contact)
        .send()
        .await
        .expect(201);
    let types: Vec<_> = api
        .all("/events")
        .await
        .iter()
        .map(|event| event["type"].clone())
        .collect();
    assert_eq!(types, ["contact.created", "order.paid"], "newest first");
    let unknown = api.get("/events/evt_00000000000000000000000000");
    unknown.send().await.problem("NOT_FOUND");
}

async fn a_tenant_may_publish_types_of_its_own(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    endpoint_at(&api, &receiver.url("/hook")).await;
    for (n, event_type) in [
        "order.paid",
        "a.b.c.d",
        "order_line.added_2",
        "crm.deal.won",
    ]
    .into_iter()
    .enumerate()
    {
        publish(&api, event_type, json!({"any": ["thing", null, 1]})).await;
        let request = receiver.wait_for("/hook", n + 1).await.remove(n);
        assert_eq!(request.header("x-botix-event"), event_type);
    }
}

async fn a_type_that_is_no_dotted_name_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let long = format!("a.{}", "b".repeat(1_000));
    for event_type in [
        "",
        ".",
        "order.",
        ".paid",
        "order..paid",
        "order paid",
        "order.paid ",
        "order.*",
        "*",
        "order.paid\n",
        "order.pa\u{0}id",
        "bestellung.übergeben",
        &long,
    ] {
        let answer = api
            .post("/events")
            .json(&json!({"type": event_type, "data": {}}))
            .send()
            .await;
        points_at(answer, "INVALID_BODY", "/type");
    }
    for (body, pointer) in [
        (json!({"type": 1, "data": {}}), "/type"),
        (
            json!({"type": "order.paid", "data": {}, "id": "evt_1"}),
            "/id",
        ),
        (
            json!({"type": "order.paid", "data": {}, "timestamp": "now"}),
            "/timestamp",
        ),
    ] {
        let answer = api.post("/events").json(&body).send().await;
        points_at(answer, "INVALID_BODY", pointer);
    }
    for body in [
        json!({"data": {}}),
        json!({"type": "order.paid"}),
        json!({}),
        json!([]),
    ] {
        let answer = api.post("/events").json(&body).send().await;
        answer.problem("INVALID_BODY");
    }
    assert_eq!(api.all("/events").await.len(), 0);
}

async fn built_in_types_have_published_schemas(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let listed = api.get("/event-types").send().await.expect(200).json();
    let rows = listed["data"].as_array().expect("a list");
    let types: Vec<_> = rows
        .iter()
        .map(|row| row["type"].as_str().expect("a type"))
        .collect();
    for built_in in BUILT_IN {
        assert!(types.contains(&built_in), "{built_in} in {types:?}");
    }
    for row in rows {
        let schema = row["schema"].as_object().expect("a JSON Schema");
        assert!(
            schema.contains_key("properties") || schema.contains_key("$ref"),
            "{row}"
        );
    }
}

async fn data_that_does_not_fit_a_built_in_type_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for event_type in BUILT_IN.into_iter().filter(|name| *name != "webhook.test") {
        for data in [json!("text"), json!([]), json!(5), Value::Null] {
            let body = json!({"type": event_type, "data": data});
            let answer = api.post("/events").json(&body).send().await;
            assert_eq!(
                answer.code().as_deref(),
                Some("INVALID_BODY"),
                "{event_type} {data}"
            );
        }
    }
    let schema_of = |listed: &Value, event_type: &str| {
        let rows = listed["data"].as_array().expect("a list").iter();
        rows.clone()
            .find(|row| row["type"] == event_type)
            .expect("a type")["schema"]
            .clone()
    };
    let listed = api.get("/event-types").send().await.expect(200).json();
    let schema = schema_of(&listed, "payment.succeeded");
    assert!(
        schema["required"]
            .as_array()
            .is_some_and(|names| !names.is_empty()),
        "{schema}"
    );
    let empty = json!({"type": "payment.succeeded", "data": {}});
    let answer = api.post("/events").json(&empty).send().await;
    let problem = answer.problem("INVALID_BODY");
    let pointer = problem["errors"][0]["pointer"].as_str().expect("a pointer");
    assert!(pointer.starts_with("/data"), "{problem}");
    assert_eq!(api.all("/events").await.len(), 0);
}

async fn an_event_takes_up_to_one_mebibyte(backend: Backend) {
    const MEBIBYTE: usize = 1 << 20;
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let sized = |size: usize| {
        let empty = r#"{"type":"order.paid","data":""}"#;
        let filler = "x".repeat(size - empty.len());
        format!(r#"{{"type":"order.paid","data":"{filler}"}}"#)
    };
    let largest = published(&api, &sized(MEBIBYTE)).await;
    let read = api
        .get(&format!("/events/{}", largest.member("id")))
        .send()
        .await
        .expect(200);
    assert!(read.body.len() > MEBIBYTE);
    // A little room for the envelope around the data is the platform's to give.
    let over = api
        .post("/events")
        .body("application/json", sized(MEBIBYTE + 4_096));
    over.send().await.problem("PAYLOAD_TOO_LARGE");
    assert_eq!(api.all("/events").await.len(), 1);
}

async fn a_published_event_is_delivered_once_per_key(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    endpoint_at(&api, &receiver.url("/hook")).await;
    let publish = api
        .post("/events")
        .json(&json!({"type": "order.paid", "data": {}}));
    for _ in 0..3 {
        publish.clone().send().await.expect_success();
    }
    publish.key(&fresh_key()).send().await.expect_success();
    receiver.wait_for("/hook", 2).await;
    assert_eq!(api.all("/webhook-deliveries").await.len(), 2);
    assert_eq!(receiver.requests().len(), 2);
}
