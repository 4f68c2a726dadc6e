//! Errors: who may call, what a wrong call gets, and the published list of codes.

use crate::contacts::points_at;
use crate::harness::api::{Api, ERROR_CODES};
use crate::harness::server::TestServer;
use crate::harness::{Backend, fresh_phone, is_id, on_both_databases};
use reqwest::Method;
use serde_json::{Value, json};

on_both_databases!(
    a_call_without_a_valid_key_is_unauthenticated,
    a_key_does_what_its_scopes_allow,
    a_revoked_key_is_unauthenticated,
    an_unknown_path_is_a_problem_too,
    a_wrong_method_names_the_right_ones,
    a_head_is_what_a_get_begins_with,
    a_body_of_another_media_type_is_refused,
    a_body_too_large_is_refused,
    an_action_takes_an_absent_an_empty_and_an_object_body,
    every_code_is_published,
    no_answer_shows_the_inside,
);

const LISTS: [&str; 8] = [
    "/contacts",
    "/events",
    "/webhook-endpoints",
    "/webhook-deliveries",
    "/webhook-attempts",
    "/webhook-dead-letters",
    "/plugins",
    "/inspector/bins",
];

async fn a_call_without_a_valid_key_is_unauthenticated(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let key = api.api_key().to_owned();
    assert!(key.starts_with("btx_live_"), "{key}");
    let anonymous = api.anonymous();
    for list in LISTS {
        let answer = anonymous.get(list).send().await;
        let challenge = answer
            .header("www-authenticate")
            .expect("a challenge")
            .to_owned();
        assert!(challenge.starts_with("Bearer"), "{challenge}");
        answer.problem("UNAUTHENTICATED");
    }
    let mut longer = key.clone();
    longer.push('x');
    for wrong in [
        "Bearer".to_owned(),
        "Bearer ".to_owned(),
        "Bearer btx_live_".to_owned(),
        format!("Bearer {}", &key[..key.len() - 1]),
        format!("Bearer {longer}"),
        format!("Bearer {}", key.to_uppercase()),
        format!("Bearer {}", key.trim_start_matches("btx_live_")),
        format!("Basic {key}"),
        key.clone(),
        format!("Bearer {key} {key}"),
        format!("Bearer {}", "x".repeat(5_000)),
    ] {
        let answer = anonymous
            .get("/contacts")
            .header("authorization", &wrong)
            .send()
            .await;
        answer.problem("UNAUTHENTICATED");
    }
    for scheme in ["Bearer", "bearer", "BEARER"] {
        let right = format!("{scheme} {key}");
        let call = anonymous.get("/contacts").header("authorization", &right);
        call.send().await.expect(200);
    }
    let query = anonymous.get(&format!("/contacts?api_key={key}"));
    query.send().await.problem("UNAUTHENTICATED");
}

async fn a_key_does_what_its_scopes_allow(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let project = server.project("shop").await;
    let (reader, _) = server.scoped(&project, "read").await;
    let (writer, _) = server.scoped(&project, "read,write").await;
    let (admin, _) = server.scoped(&project, "read,write,admin").await;
    let contact = json!({"phone": fresh_phone()});
    let event = json!({"type": "order.paid", "data": {}});
    let endpoint = json!({"url": "https://example.com/", "event_types": ["none.such"]});

    reader.get("/contacts").send().await.expect(200);
    reader.get("/contacts/count").send().await.expect(200);
    reader.get("/webhook-deliveries").send().await.expect(200);
    reader
        .post("/contacts")
        .json(&contact)
        .send()
        .await
        .problem("FORBIDDEN");
    reader
        .post("/events")
        .json(&event)
        .send()
        .await
        .problem("FORBIDDEN");
    reader
        .post("/webhook-endpoints")
        .json(&endpoint)
        .send()
        .await
        .problem("FORBIDDEN");
    let missing = "/contacts/con_00000000000000000000000000";
    reader
        .patch(missing)
        .json(&json!({}))
        .send()
        .await
        .problem("FORBIDDEN");
    reader.delete(missing).send().await.problem("FORBIDDEN");

    writer
        .post("/contacts")
        .json(&contact)
        .send()
        .await
        .expect(201);
    writer
        .post("/events")
        .json(&event)
        .send()
        .await
        .expect_success();
    writer
        .post("/webhook-endpoints")
        .json(&endpoint)
        .send()
        .await
        .problem("FORBIDDEN");
    let missing = "/webhook-endpoints/whe_00000000000000000000000000";
    writer
        .patch(missing)
        .json(&json!({}))
        .send()
        .await
        .problem("FORBIDDEN");
    writer.delete(missing).send().await.problem("FORBIDDEN");
    let plugin = writer.post("/plugins?name=p").body("application/wasm", "x");
    plugin.send().await.problem("FORBIDDEN");

    admin
        .post("/webhook-endpoints")
        .json(&endpoint)
        .send()
        .await
        .expect(201);
}

async fn a_revoked_key_is_unauthenticated(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let project = server.project("shop").await;
    let (api, key_id) = server.scoped(&project, "read").await;
    assert!(is_id("key", &key_id));
    api.get("/contacts").send().await.expect(200);
    let output = server.run(&["key", "revoke", "--key", &key_id]).await;
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    crate::harness::eventually("the running server knows", async || {
        let answer = api.get("/contacts").send().await;
        (answer.code().as_deref() == Some("UNAUTHENTICATED")).then_some(())
    })
    .await;
    project.api.get("/contacts").send().await.expect(200);
    let again = server
        .run(&["key", "revoke", "--key", "key_00000000000000000000000000"])
        .await;
    assert!(!again.status.success(), "a key that does not exist");
}

async fn an_unknown_path_is_a_problem_too(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for path in [
        "/nothing",
        "/contacts/",
        "/contacts/x/y",
        "/Contacts",
        "/contacts//",
        "/%2e%2e/healthz",
    ] {
        api.get(path).send().await.problem("NOT_FOUND");
        api.post(path)
            .json(&json!({}))
            .send()
            .await
            .problem("NOT_FOUND");
    }
    for outside in ["/nothing", "/public", "/public/v2/contacts"] {
        let answer = api.outside(Method::GET, outside).send().await.expect(404);
        assert_eq!(answer.code().as_deref(), Some("NOT_FOUND"), "{outside}");
    }
}

async fn a_wrong_method_names_the_right_ones(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let key = crate::harness::fresh_key();
    for (method, path, allowed) in [
        (Method::PUT, "/contacts", &["GET", "POST"][..]),
        (Method::DELETE, "/contacts", &["GET", "POST"][..]),
        (
            Method::POST,
            "/contacts/con_00000000000000000000000000",
            &["GET", "PATCH", "DELETE"][..],
        ),
        (Method::POST, "/contacts/count", &["GET"][..]),
        (Method::POST, "/webhook-deliveries", &["GET"][..]),
        (Method::DELETE, "/events", &["GET", "POST"][..]),
    ] {
        let answer = api
            .call(method.clone(), path)
            .key(&key)
            .json(&json!({}))
            .send()
            .await;
        let allow = answer.header("allow").unwrap_or_default().to_owned();
        answer.problem("METHOD_NOT_ALLOWED");
        for name in allowed {
            assert!(allow.contains(name), "{method} {path}: Allow: {allow}");
        }
        assert!(
            !allow.contains(method.as_str()),
            "{method} {path}: Allow: {allow}"
        );
    }
}

/// The same head as of `GET`, and no body: the next answer on the connection is the next answer.
async fn a_head_is_what_a_get_begins_with(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    api.post("/contacts")
        .json(&json!({"phone": fresh_phone()}))
        .send()
        .await
        .expect(201);
    for (path, status) in [
        ("/contacts", 200),
        ("/contacts?cursor_limit=0", 400),
        ("/nothing", 404),
        ("/contacts/con_00000000000000000000000000", 404),
    ] {
        let head = api.call(Method::HEAD, path).send().await;
        let get = api.get(path).send().await;
        assert_eq!(head.status, status, "{path}");
        assert_eq!(get.status, status, "{path}");
        assert!(head.body.is_empty(), "{path}");
        for name in ["content-type", "ratelimit-policy"] {
            assert_eq!(head.header(name), get.header(name), "{path}: {name}");
        }
        let length = head.header("content-length").map(str::parse);
        assert_eq!(length, Some(Ok(get.body.len())), "{path}");
    }
}

async fn a_body_of_another_media_type_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = format!("{{\"phone\":\"{}\"}}", fresh_phone());
    for other in [
        "text/plain",
        "application/xml",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "nonsense",
    ] {
        let answer = api.post("/contacts").body(other, body.clone()).send().await;
        answer.problem("UNSUPPORTED_MEDIA_TYPE");
    }
    for json in [
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/json;charset=UTF-8",
    ] {
        let body = format!("{{\"phone\":\"{}\"}}", fresh_phone());
        api.post("/contacts")
            .body(json, body)
            .send()
            .await
            .expect(201);
    }
}

async fn a_body_too_large_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = format!("{{\"name\":\"{}\"}}", "x".repeat(2 << 20));
    for path in [
        "/contacts",
        "/events",
        "/webhook-endpoints",
        "/inspector/bins",
    ] {
        let answer = api
            .post(path)
            .body("application/json", body.clone())
            .send()
            .await;
        answer.problem("PAYLOAD_TOO_LARGE");
    }
}

async fn an_action_takes_an_absent_an_empty_and_an_object_body(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    api.post("/inspector/bins").send().await.expect(201);
    api.post("/inspector/bins")
        .body("application/json", "")
        .send()
        .await
        .expect(201);
    api.post("/inspector/bins")
        .json(&json!({}))
        .send()
        .await
        .expect(201);
    let answer = api
        .post("/inspector/bins")
        .json(&json!({"colour": "green"}))
        .send()
        .await;
    points_at(answer, "INVALID_BODY", "/colour");
}

async fn every_code_is_published(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api.anonymous();
    let as_json = api
        .outside(Method::GET, "/error-codes")
        .header("accept", "application/json");
    let as_json = as_json.send().await.expect(200);
    assert!(
        as_json
            .header("content-type")
            .expect("a type")
            .starts_with("application/json")
    );
    let listed = as_json.json();
    let rows = match &listed {
        Value::Array(rows) => rows,
        other => other["data"].as_array().expect("a list of codes"),
    };
    for (code, status) in ERROR_CODES {
        let row = rows
            .iter()
            .find(|row| row["code"] == code)
            .unwrap_or_else(|| panic!("{code}"));
        assert_eq!(row["status"], status, "{code}");
        assert!(
            row["title"].as_str().is_some_and(|title| !title.is_empty()),
            "{code}"
        );
    }
    for rather_json in [
        "text/html;q=0.5, application/json;q=0.9",
        "application/json;q=1, text/html;q=0.5",
        "APPLICATION/JSON",
        "application/json, text/plain, */*",
    ] {
        let request = api.outside(Method::GET, "/error-codes");
        let answer = request
            .header("accept", rather_json)
            .send()
            .await
            .expect(200);
        assert_eq!(answer.json(), listed, "{rather_json}");
    }
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let page = api
        .outside(Method::GET, "/error-codes")
        .header("accept", browser);
    let page = page.send().await.expect(200);
    assert!(
        page.header("content-type")
            .expect("a type")
            .starts_with("text/html")
    );
    for row in rows {
        // What `type` of a problem points to.
        let anchor = format!("id=\"{}\"", row["code"].as_str().expect("a code"));
        assert!(page.text().contains(&anchor), "{anchor}");
    }
}

async fn no_answer_shows_the_inside(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let quote = "/contacts?cursor=%27%3B%20DROP%20TABLE%20contacts%3B--";
    let answers = [
        api.get(quote).send().await,
        api.get("/contacts/'%20OR%201=1").send().await,
        api.get("/webhook-deliveries?state='").send().await,
        api.post("/contacts")
            .body("application/json", "{\"phone\":")
            .send()
            .await,
        api.post("/contacts")
            .json(&json!({"phone": {"$ne": 1}}))
            .send()
            .await,
        api.post("/events")
            .json(&json!({"type": "'; DROP TABLE events", "data": {}}))
            .send()
            .await,
    ];
    for answer in answers {
        assert!(answer.status.is_client_error(), "{}", answer.describe());
        let shown = answer.text().to_lowercase();
        for inside in [
            "sqlx",
            "sqlite",
            "postgres",
            "syntax error",
            "serde",
            "panicked",
            ".rs:",
            "stack backtrace",
        ] {
            assert!(!shown.contains(inside), "{inside} in {shown}");
        }
    }
    check_untouched(&api).await;
}

async fn check_untouched(api: &Api) {
    assert_eq!(api.all("/contacts").await.len(), 0);
    assert_eq!(api.all("/events").await.len(), 0);
}
