//! The built-in inspector: a bin takes anything and shows it to its project.

use crate::harness::server::TestServer;
use crate::harness::{Backend, is_id, on_both_databases};
use reqwest::Method;
use serde_json::json;

on_both_databases!(
    a_bin_records_any_request,
    a_bin_takes_bodies_of_any_kind,
    a_bin_belongs_to_its_project,
    a_bin_that_is_gone_takes_nothing,
    a_bin_can_be_an_endpoint,
);

async fn a_bin_records_any_request(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let bin = api.post("/inspector/bins").send().await.expect(201).json();
    let id = bin["id"].as_str().expect("an id");
    assert!(is_id("bin", id));
    let url = bin["url"].as_str().expect("a URL");
    assert_eq!(url, format!("{}/inspect/{id}", server.url()));
    let read = api
        .get(&format!("/inspector/bins/{id}"))
        .send()
        .await
        .expect(200)
        .json();
    assert_eq!(read["url"], url);
    assert_eq!(api.all("/inspector/bins").await.len(), 1);

    // Anyone may call, without any key.
    let anyone = api.anonymous();
    for method in [
        "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND",
    ] {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let request = anyone
            .outside(method.clone(), &format!("{url}?from={method}"))
            .header("x-colour", "green")
            .header("x-colour", "blue")
            .body("text/plain", format!("sent by {method} – ünïcode"));
        request.send().await.expect_success();
    }
    let requests = api.all(&format!("/inspector/bins/{id}/requests")).await;
    let methods: Vec<_> = requests
        .iter()
        .map(|request| request["method"].as_str())
        .collect();
    let newest_first = [
        "PROPFIND", "OPTIONS", "DELETE", "PATCH", "PUT", "POST", "GET",
    ];
    assert_eq!(methods, newest_first.map(Some));
    for request in &requests {
        let method = request["method"].as_str().expect("a method");
        let path = request["path"].as_str().expect("a path");
        assert!(path.starts_with(&format!("/inspect/{id}")), "{path}");
        assert_eq!(request["body"], format!("sent by {method} – ünïcode"));
        let headers = request["headers"].to_string().to_lowercase();
        for shown in ["x-colour", "green", "blue", "text/plain"] {
            assert!(headers.contains(shown), "{shown} in {headers}");
        }
        assert!(
            request.to_string().contains(&format!("from={method}")),
            "the query: {request}"
        );
    }
}

async fn a_bin_takes_bodies_of_any_kind(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let bin = api.post("/inspector/bins").send().await.expect(201).json();
    let url = bin["url"].as_str().expect("a URL");
    let large = "x".repeat(65_536);
    let larger = format!("{large}y").repeat(20);
    let bodies: [&[u8]; 6] = [
        b"",
        b"\0",
        b"\xff\xfe\0\x80",
        b"{\"a\":1.0}",
        large.as_bytes(),
        larger.as_bytes(),
    ];
    for body in bodies {
        let request = api.anonymous().outside(Method::POST, url);
        request
            .body("application/octet-stream", body)
            .send()
            .await
            .expect_success();
    }
    let id = bin["id"].as_str().expect("an id");
    let requests = api.all(&format!("/inspector/bins/{id}/requests")).await;
    assert_eq!(requests.len(), bodies.len());
    // Of a larger one the beginning.
    assert_eq!(requests[0]["body"], large);
    assert_eq!(requests[1]["body"], large);
    assert_eq!(requests[2]["body"], "{\"a\":1.0}");
}

async fn a_bin_belongs_to_its_project(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let ours = server.project("ours").await.api;
    let theirs = server.project("theirs").await.api;
    let id = ours
        .post("/inspector/bins")
        .send()
        .await
        .expect(201)
        .member("id");
    let path = format!("/inspector/bins/{id}");
    theirs.get(&path).send().await.problem("NOT_FOUND");
    theirs
        .get(&format!("{path}/requests"))
        .send()
        .await
        .problem("NOT_FOUND");
    theirs.delete(&path).send().await.problem("NOT_FOUND");
    assert_eq!(theirs.all("/inspector/bins").await.len(), 0);
    ours.get(&path).send().await.expect(200);
}

async fn a_bin_that_is_gone_takes_nothing(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let bin = api.post("/inspector/bins").send().await.expect(201).json();
    let url = bin["url"].as_str().expect("a URL");
    api.outside(Method::POST, url).send().await.expect_success();
    let path = format!("/inspector/bins/{}", bin["id"].as_str().expect("an id"));
    api.delete(&path).send().await.expect(204);
    api.outside(Method::POST, url).send().await.expect(404);
    api.get(&path).send().await.problem("NOT_FOUND");
    api.get(&format!("{path}/requests"))
        .send()
        .await
        .problem("NOT_FOUND");
    for unknown in ["/inspect/bin_00000000000000000000000000", "/inspect/x"] {
        api.outside(Method::POST, unknown).send().await.expect(404);
    }
}

async fn a_bin_can_be_an_endpoint(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let bin = api.post("/inspector/bins").send().await.expect(201).json();
    let endpoint = json!({"url": bin["url"]});
    api.post("/webhook-endpoints")
        .json(&endpoint)
        .send()
        .await
        .expect(201);
    let contact = json!({"phone": "+4915112345678"});
    api.post("/contacts")
        .json(&contact)
        .send()
        .await
        .expect(201);
    let path = format!(
        "/inspector/bins/{}/requests",
        bin["id"].as_str().expect("an id")
    );
    let request = crate::harness::eventually("the webhook is in the bin", async || {
        api.all(&path).await.into_iter().next()
    })
    .await;
    assert_eq!(request["method"], "POST");
    let headers = request["headers"].to_string().to_lowercase();
    assert!(headers.contains("x-botix-signature"), "{headers}");
    let body = request["body"].as_str().expect("a text");
    assert!(body.contains("\"type\":\"contact.created\""), "{body}");
}
