//! Where a webhook may not go unless the operator allows it.

use super::{attempts_of, dead_letter_of, delivery_in, endpoint_at, publish};
use crate::harness::receiver::Receiver;
use crate::harness::server::{Project, TestServer};
use crate::harness::{Backend, on_both_databases};
use serde_json::{Value, json};

on_both_databases!(
    a_name_of_a_private_address_is_dead_at_once,
    every_spelling_of_a_private_address_is_refused,
);

async fn guarded(backend: Backend) -> (TestServer, Project) {
    let overrides = [
        ("BOTIX_WEBHOOKS__ALLOW_PRIVATE_TARGETS", "false"),
        super::SHORT_LADDER,
    ];
    let server = TestServer::start(backend, &overrides).await;
    let project = server.project("shop").await;
    (server, project)
}

async fn a_name_of_a_private_address_is_dead_at_once(backend: Backend) {
    let (_server, project) = guarded(backend).await;
    let api = project.api;
    let receiver = Receiver::start().await;
    let url = format!("http://localhost:{}/hook", receiver.port());
    let endpoint = endpoint_at(&api, &url).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let attempts = attempts_of(&api, &delivery).await;
    assert_eq!(attempts.len(), 1);
    assert_eq!(attempts[0]["status"], "failed");
    assert_eq!(attempts[0]["status_code"], Value::Null);
    assert!(
        attempts[0]["error"]
            .as_str()
            .is_some_and(|error| !error.is_empty())
    );
    let letter = dead_letter_of(&api, &delivery).await;
    assert!(
        letter["reason"]
            .as_str()
            .is_some_and(|reason| !reason.is_empty())
    );
    assert_eq!(receiver.requests().len(), 0);
}

async fn every_spelling_of_a_private_address_is_refused(backend: Backend) {
    let (_server, project) = guarded(backend).await;
    let api = project.api;
    let receiver = Receiver::start().await;
    for host in [
        "127.0.0.1",
        "127.1",
        "0x7f.1",
        "0x7f000001",
        "2130706433",
        "017700000001",
        "127.0.0.1.",
        "127.255.255.254",
        "0.0.0.0",
        "0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b:1::7f00:1]",
        "[2002:7f00:1::]",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "[fe80::1]",
        "[fc00::1]",
        "[fd00:ec2::254]",
        "[ff02::1]",
        "[2001:db8::1]",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "①②⑦.0.0.1",
    ] {
        let url = format!("http://{host}:{}/hook", receiver.port());
        let answer = api
            .post("/webhook-endpoints")
            .json(&json!({"url": url}))
            .send()
            .await;
        if answer.status != 201 {
            answer.problem("INVALID_BODY");
            continue;
        }
        let endpoint = answer.member("id");
        let event = publish(&api, "order.paid", json!({})).await;
        let delivery = delivery_in(&api, &event, &endpoint, "dead").await;
        assert_eq!(attempts_of(&api, &delivery).await.len(), 1, "{host}");
        api.delete(&format!("/webhook-endpoints/{endpoint}"))
            .send()
            .await
            .expect(204);
    }
    assert_eq!(receiver.requests().len(), 0);
}
