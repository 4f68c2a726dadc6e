//! An endpoint's own headers: sent along, hidden where they are shown, and never the platform's.

use super::{endpoint, publish, verify};
use crate::contacts::points_at;
use crate::harness::receiver::Receiver;
use crate::harness::server::TestServer;
use crate::harness::{Backend, on_both_databases};
use serde_json::json;

on_both_databases!(
    an_endpoint_sends_its_own_headers,
    a_header_that_is_given_as_it_is_shown_keeps_its_value,
    its_own_headers_never_replace_the_platforms,
);

async fn an_endpoint_sends_its_own_headers(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let headers = json!({"X-Tenant": "shop", "Authorization": "Basic abc"});
    let body = json!({"url": receiver.url("/hook?token=1"), "headers": headers});
    endpoint(&api, body).await;
    publish(&api, "order.paid", json!({})).await;
    let request = receiver.wait_for("/hook?token=1", 1).await.remove(0);
    assert_eq!(request.header("x-tenant"), "shop");
    assert_eq!(request.header("authorization"), "Basic abc");
    assert_eq!(
        request.header("host"),
        format!("127.0.0.1:{}", receiver.port())
    );
}

async fn a_header_that_is_given_as_it_is_shown_keeps_its_value(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let headers = json!({"X-Token": "secret", "X-Tenant": "shop"});
    let body = json!({"url": receiver.url("/hook"), "headers": headers});
    let hook = endpoint(&api, body).await;
    let path = format!("/webhook-endpoints/{}", hook.id);
    let mut shown = api.get(&path).send().await.expect(200).json()["headers"].clone();
    assert_eq!(shown["X-Token"], "********");
    shown["X-Tenant"] = json!("other shop");
    shown["X-New"] = json!("new");
    let change = json!({"headers": shown});
    api.patch(&path).json(&change).send().await.expect(200);
    publish(&api, "order.paid", json!({})).await;
    let request = receiver.wait_for("/hook", 1).await.remove(0);
    for (name, value) in [
        ("x-token", "secret"),
        ("x-tenant", "other shop"),
        ("x-new", "new"),
    ] {
        assert_eq!(request.header(name), value);
    }
    // Where there is nothing behind it, it is no value; and a name is a name in any case.
    let unknown = json!({"headers": {"X-Unknown": "********"}});
    points_at(
        api.patch(&path).json(&unknown).send().await,
        "INVALID_BODY",
        "/headers",
    );
    let new = json!({"url": receiver.url("/other"), "headers": {"X-Token": "********"}});
    let made = api.post("/webhook-endpoints").json(&new).send().await;
    points_at(made, "INVALID_BODY", "/headers");
    let twice = json!({"headers": {"X-Twice": "a", "x-twice": "b"}});
    points_at(
        api.patch(&path).json(&twice).send().await,
        "INVALID_BODY",
        "/headers",
    );
}

async fn its_own_headers_never_replace_the_platforms(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for name in [
        "X-Botix-Signature",
        "X-Botix-Event",
        "X-Botix-Request-Id",
        "X-Delivery-Attempt",
        "webhook-id",
        "Webhook-Signature",
        "webhook-timestamp",
        "Content-Length",
        "Transfer-Encoding",
        "Host",
        "Connection",
        "User-Agent",
        "Content-Type",
        "Content-Encoding",
        "Accept-Encoding",
    ] {
        let path = format!("/{}", name.to_lowercase());
        let body = json!({"url": receiver.url(&path), "headers": {name: "forged"}});
        let answer = api.post("/webhook-endpoints").json(&body).send().await;
        if answer.status != 201 {
            answer.problem("INVALID_BODY");
            continue;
        }
        // Taken, but without effect.
        publish(&api, "order.paid", json!({"for": name})).await;
        let request = receiver.wait_for(&path, 1).await.remove(0);
        verify(&request, &answer.member("secret"));
        assert_ne!(request.header(name), "forged");
        let path = format!("/webhook-endpoints/{}", answer.member("id"));
        api.delete(&path).send().await.expect(204);
    }
}
