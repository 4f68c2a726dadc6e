//! Every attempt on record, with what was sent and what came back.

use super::{SHORT_LADDER, attempts_of, delivery_in, endpoint_at, has_members, publish};
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, is_id, is_timestamp, on_both_databases};
use serde_json::{Value, json};

on_both_databases!(
    a_delivery_has_the_published_shape,
    an_attempt_has_the_published_shape,
    an_attempt_keeps_four_kib_of_the_response,
    any_response_is_recorded_once,
    deliveries_and_attempts_are_filtered,
    a_filter_that_makes_no_sense_is_refused,
);

async fn a_delivery_has_the_published_shape(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    has_members(
        &delivery,
        &[
            "attempts",
            "created_at",
            "endpoint_id",
            "event_id",
            "event_type",
            "id",
            "last_status_code",
            "next_attempt_at",
            "state",
            "updated_at",
        ],
    );
    let id = delivery["id"].as_str().expect("an id");
    assert!(is_id("dlv", id));
    assert_eq!(delivery["event_type"], "order.paid");
    assert_eq!(delivery["attempts"], 1);
    assert_eq!(delivery["next_attempt_at"], Value::Null);
    assert!(is_timestamp(
        delivery["updated_at"].as_str().expect("a time")
    ));
    let read = api
        .get(&format!("/webhook-deliveries/{id}"))
        .send()
        .await
        .expect(200);
    assert_eq!(read.json(), delivery);
    let unknown = api.get("/webhook-deliveries/dlv_00000000000000000000000000");
    unknown.send().await.problem("NOT_FOUND");
    let unknown = api.get("/webhook-deliveries/dlv_00000000000000000000000000/attempts");
    unknown.send().await.problem("NOT_FOUND");
}

async fn an_attempt_has_the_published_shape(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let reply = Reply::status(201)
        .header("x-answered", "yes")
        .body("thank you – ünïcode");
    receiver.script("/hook", [reply]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({"a": 1})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let attempt = attempts_of(&api, &delivery).await.remove(0);
    has_members(
        &attempt,
        &[
            "created_at",
            "delivery_id",
            "duration_ms",
            "error",
            "id",
            "number",
            "payload",
            "plugin",
            "request_headers",
            "request_id",
            "response_body",
            "response_headers",
            "status",
            "status_code",
            "trigger",
            "url",
        ],
    );
    let request = receiver.requests().remove(0);
    assert!(is_id("att", attempt["id"].as_str().expect("an id")));
    assert_eq!(attempt["delivery_id"], delivery["id"]);
    assert_eq!(attempt["number"], 1);
    assert_eq!(attempt["trigger"], "ladder");
    assert_eq!(attempt["url"], receiver.url("/hook"));
    assert_eq!(attempt["status"], "succeeded");
    assert_eq!(attempt["status_code"], 201);
    assert_eq!(attempt["error"], Value::Null);
    assert_eq!(attempt["plugin"], Value::Null);
    assert!(attempt["duration_ms"].is_number());
    assert!(is_timestamp(
        attempt["created_at"].as_str().expect("a time")
    ));
    assert_eq!(attempt["request_id"], request.header("x-botix-request-id"));
    assert_eq!(attempt["payload"], request.text());
    assert_eq!(attempt["response_body"], "thank you – ünïcode");
    let recorded = attempt["request_headers"].to_string().to_lowercase();
    for name in [
        "x-botix-event",
        "x-botix-signature",
        "x-botix-request-id",
        "x-delivery-attempt",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
        "content-type",
        "content-length",
        "host",
        "accept",
        "user-agent",
    ] {
        assert!(recorded.contains(name), "{name} in {recorded}");
        let value = request.header(name).to_lowercase();
        assert!(recorded.contains(&value), "{value} in {recorded}");
    }
    let answered = attempt["response_headers"].to_string().to_lowercase();
    assert!(
        answered.contains("x-answered") && answered.contains("yes"),
        "{answered}"
    );
    let listed = api.all("/webhook-attempts").await;
    assert_eq!(listed, [attempt]);
}

async fn an_attempt_keeps_four_kib_of_the_response(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for (path, length, kept) in [
        ("/a", 4_095, 4_095),
        ("/b", 4_096, 4_096),
        ("/c", 4_097, 4_096),
        ("/d", 1 << 20, 4_096),
    ] {
        receiver.script(path, [Reply::status(200).body("x".repeat(length))]);
        let endpoint = endpoint_at(&api, &receiver.url(path)).await;
        let event = publish(&api, "order.paid", json!({})).await;
        let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
        let attempt = attempts_of(&api, &delivery).await.remove(0);
        assert_eq!(
            attempt["response_body"].as_str().map(str::len),
            Some(kept),
            "of {length}"
        );
    }
}

/// Whatever the other side says, the attempt is there once and nothing else of the answer is read.
async fn any_response_is_recorded_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let nul = Reply::status(200).body(b"a\0b".to_vec());
    let no_text = Reply::status(200).body(b"\xff\xfe\x00\x80\xc3".to_vec());
    // The 4,096th byte is in the middle of a character.
    let split = Reply::status(200).body(format!("x{}", "é".repeat(4_000)));
    let odd_header =
        b"HTTP/1.1 200 OK\r\nx-odd: caf\xe9 \xff\r\ncontent-length: 2\r\n\r\nok".to_vec();
    let bomb = Reply::status(200)
        .header("content-encoding", "gzip")
        .body(b"\x1f\x8b\x08no gzip".to_vec());
    for (path, reply) in [
        ("/empty", Reply::status(200)),
        ("/nul", nul),
        ("/no-text", no_text),
        ("/split", split),
        ("/odd-header", Reply::Raw(odd_header)),
        ("/gzip", bomb),
        ("/endless", Reply::Endless),
        (
            "/until-close",
            Reply::Raw(b"HTTP/1.0 200 OK\r\n\r\nno length".to_vec()),
        ),
    ] {
        receiver.script(path, [reply]);
        let endpoint = endpoint_at(&api, &receiver.url(path)).await;
        let event = publish(&api, "order.paid", json!({})).await;
        let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
        let attempts = attempts_of(&api, &delivery).await;
        assert_eq!(attempts.len(), 1, "{path}");
        assert_eq!(attempts[0]["status"], "succeeded", "{path}");
        assert!(!attempts[0]["response_body"].is_number(), "{path}");
        let about = receiver.requests_to(path);
        assert_eq!(
            about
                .iter()
                .filter(|r| r.header("webhook-id") == event)
                .count(),
            1,
            "{path}"
        );
        api.delete(&format!("/webhook-endpoints/{}", endpoint.id))
            .send()
            .await
            .expect(204);
    }
}

async fn deliveries_and_attempts_are_filtered(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/bad", Reply::status(403));
    let good = endpoint_at(&api, &receiver.url("/good")).await;
    let bad = endpoint_at(&api, &receiver.url("/bad")).await;
    let before = now();
    publish(&api, "order.paid", json!({})).await;
    publish(&api, "order.sent", json!({})).await;
    publish(&api, "order.sent", json!({})).await;
    eventually("all are settled", async || {
        let attempts = api.all("/webhook-attempts").await;
        (attempts.len() == 6).then_some(())
    })
    .await;
    let after = now();
    let count = async |path: String| api.all(&path).await.len();
    for (filter, expected) in [
        ("state=delivered".to_owned(), 3),
        ("state=dead".to_owned(), 3),
        ("state=pending".to_owned(), 0),
        ("event_type=order.sent".to_owned(), 4),
        (format!("endpoint_id={}", bad.id), 3),
        (format!("state=dead&endpoint_id={}", good.id), 0),
        (
            format!("state=dead&event_type=order.paid&endpoint_id={}", bad.id),
            1,
        ),
    ] {
        assert_eq!(
            count(format!("/webhook-deliveries?{filter}")).await,
            expected,
            "{filter}"
        );
    }
    for (filter, expected) in [
        ("status=succeeded".to_owned(), 3),
        ("status=failed".to_owned(), 3),
        ("event_type=order.paid".to_owned(), 2),
        (format!("endpoint_id={}", good.id), 3),
        (
            format!("status=failed&endpoint_id={}&event_type=order.sent", bad.id),
            2,
        ),
        (format!("since={before}"), 6),
        (format!("until={before}"), 0),
        (format!("since={after}"), 0),
        (format!("since={before}&until={after}"), 6),
    ] {
        assert_eq!(
            count(format!("/webhook-attempts?{filter}")).await,
            expected,
            "{filter}"
        );
    }
}

/// The time as a query parameter takes it, to the microsecond.
fn now() -> String {
    let now = time::OffsetDateTime::now_utc();
    let micros = now.nanosecond() / 1_000;
    let seconds = now.replace_nanosecond(0).expect("whole seconds");
    let seconds = seconds
        .format(&time::format_description::well_known::Rfc3339)
        .expect("a time");
    seconds.replace('Z', &format!(".{micros:06}Z"))
}

async fn a_filter_that_makes_no_sense_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for path in [
        "/webhook-deliveries?state=lost",
        "/webhook-deliveries?state=",
        "/webhook-deliveries?endpoint_id=nonsense",
        "/webhook-attempts?status=maybe",
        "/webhook-attempts?since=yesterday",
        "/webhook-attempts?until=2026-13-01T00:00:00Z",
        "/webhook-attempts?since=9999-12-31T23:59:59-23:59",
        "/webhook-attempts?endpoint_id=con_00000000000000000000000000",
    ] {
        let answer = api.get(path).send().await;
        answer.problem("INVALID_PARAMETER");
    }
}
