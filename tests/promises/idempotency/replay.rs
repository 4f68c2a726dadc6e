//! What a retry gets: the stored answer again, and which answers are stored at all.

use super::text;
use crate::harness::api::{Answer, Api, Request};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, fresh_key, fresh_phone, on_every_store};
use reqwest::Method;
use serde_json::json;

on_every_store!(
    a_replay_is_the_first_answer_byte_for_byte,
    a_replay_keeps_no_date_and_no_cookie,
    every_mutation_replays,
    a_key_with_another_request_conflicts,
    a_key_with_another_path_conflicts,
    a_business_refusal_is_stored,
    a_failed_validation_is_not_stored,
    an_unauthorised_call_is_not_stored,
    a_key_belongs_to_its_project,
    a_replay_survives_a_restart,
    a_finished_answer_is_kept_for_its_time_to_live,
    expired_records_are_removed,
    an_answer_too_large_to_keep_is_remembered,
    an_answer_just_small_enough_is_kept_whole,
);

/// Sends the same request again and asserts that the stored answer comes back.
async fn replays(request: &Request, first: &Answer) -> Answer {
    assert!(!first.is_replay(), "{}", first.describe());
    assert_eq!(first.header("idempotent-replayed"), None);
    let again = request.clone().send().await;
    assert!(again.is_replay(), "{}", again.describe());
    assert_eq!(again.status, first.status, "{}", again.describe());
    assert_eq!(again.body, first.body, "{}", again.describe());
    for name in [
        "content-type",
        "content-language",
        "content-disposition",
        "location",
        "etag",
        "last-modified",
        "link",
    ] {
        assert_eq!(again.header(name), first.header(name), "{name}");
    }
    again
}

async fn a_replay_is_the_first_answer_byte_for_byte(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = r#"{ "phone":"+4915112345678",  "attributes":{"b":1,"a":"é","n":1.0} }"#;
    let request = api.post("/contacts").body("application/json", body);
    let first = request.clone().send().await.expect(201);
    assert!(first.header("location").is_some());
    for _ in 0..3 {
        replays(&request, &first).await;
    }
    // The row has changed since; the answer has not.
    let path = format!("/contacts/{}", first.member("id"));
    api.patch(&path)
        .json(&json!({"name": "changed"}))
        .send()
        .await
        .expect(200);
    replays(&request, &first).await;
    api.delete(&path).send().await.expect(204);
    replays(&request, &first).await;
    assert_eq!(api.all("/contacts").await.len(), 0);
}

async fn a_replay_keeps_no_date_and_no_cookie(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let first = request.clone().send().await.expect(201);
    let date = first.header("date").expect("a Date").to_owned();
    eventually("the next second", async || {
        let now = api.outside(Method::GET, "/healthz").send().await;
        (now.header("date") != Some(&date)).then_some(())
    })
    .await;
    let again = replays(&request, &first).await;
    assert_ne!(again.header("date"), Some(&*date));
    assert_eq!(again.header("set-cookie"), None);
}

async fn every_mutation_replays(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let once = async |request: Request, status: u16| {
        let first = request.clone().send().await.expect(status);
        replays(&request, &first).await
    };
    let contact = json!({"phone": fresh_phone()});
    let contact = once(api.post("/contacts").json(&contact), 201)
        .await
        .member("id");
    let path = format!("/contacts/{contact}");
    once(api.patch(&path).json(&json!({"name": "Ada"})), 200).await;
    once(api.delete(&path), 204).await;

    let endpoint = json!({"url": "http://127.0.0.1:9/none", "event_types": ["never.sent"]});
    let created = once(api.post("/webhook-endpoints").json(&endpoint), 201).await;
    // The secret is shown once, and a retry of that once shows it again.
    assert!(created.member("secret").starts_with("whsec_"));
    let path = format!("/webhook-endpoints/{}", created.member("id"));
    once(api.patch(&path).json(&json!({"description": "d"})), 200).await;
    once(api.delete(&path), 204).await;

    let bin = once(api.post("/inspector/bins"), 201).await.member("id");
    once(api.delete(&format!("/inspector/bins/{bin}")), 204).await;

    let event = api
        .post("/events")
        .json(&json!({"type": "order.paid", "data": {}}));
    let first = event.clone().send().await.expect_success();
    replays(&event, &first).await;
    let published = api.all("/events").await;
    assert_eq!(
        published
            .iter()
            .filter(|event| event["type"] == "order.paid")
            .count(),
        1
    );
}

async fn a_key_with_another_request_conflicts(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let key = fresh_key();
    let phone = fresh_phone();
    let body = format!("{{\"phone\":\"{phone}\"}}");
    let create = |path: &str, content_type: &str, body: &str| {
        api.post(path).key(&key).body(content_type, body)
    };
    let first = create("/contacts", "application/json", &body)
        .send()
        .await
        .expect(201);
    let path = format!("/contacts/{}", first.member("id"));
    for other in [
        create(
            "/contacts",
            "application/json",
            &format!("{{\"phone\":\"{}\"}}", fresh_phone()),
        ),
        create(
            "/contacts",
            "application/json",
            &format!("{{ \"phone\":\"{phone}\"}}"),
        ),
        create("/contacts", "application/json", &format!("{body}\n")),
        create("/contacts", "application/json; charset=utf-8", &body),
        create("/contacts?a=1", "application/json", &body),
        create("/events", "application/json", &body),
        create("/webhook-endpoints", "application/json", &body),
        api.patch(&path)
            .key(&key)
            .body("application/json", body.clone()),
        api.delete(&path).key(&key),
    ] {
        other.send().await.problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
    }
    // None of it disturbed the first.
    let again = create("/contacts", "application/json", &body)
        .send()
        .await
        .expect(201);
    assert!(again.is_replay());
    assert_eq!(again.body, first.body);
    assert_eq!(api.all("/contacts").await, [first.json()]);
}

async fn a_key_with_another_path_conflicts(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut paths = Vec::new();
    for _ in 0..2 {
        let body = json!({"phone": fresh_phone(), "name": "before"});
        let contact = api.post("/contacts").json(&body).send().await.expect(201);
        paths.push(format!("/contacts/{}", contact.member("id")));
    }
    let key = fresh_key();
    let patch = |path: &str| api.patch(path).key(&key).json(&json!({"name": "after"}));
    patch(&paths[0]).send().await.expect(200);
    patch(&paths[1])
        .send()
        .await
        .problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
    let untouched = api.get(&paths[1]).send().await.expect(200).json();
    assert_eq!(untouched["name"], "before");
}

async fn a_business_refusal_is_stored(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = json!({"phone": fresh_phone()});
    let holder = api.post("/contacts").json(&body).send().await.expect(201);
    let refused = api.post("/contacts").json(&body);
    let first = refused.clone().send().await.expect(409);
    first.clone().problem("CONTACT_EXISTS");
    replays(&refused, &first).await;
    // The reason is gone; the answer to that key stays, a new key succeeds.
    let path = format!("/contacts/{}", holder.member("id"));
    api.delete(&path).send().await.expect(204);
    replays(&refused, &first).await;
    api.post("/contacts").json(&body).send().await.expect(201);

    let missing = api.patch(&path).json(&json!({"name": "x"}));
    let first = missing.clone().send().await.expect(404);
    replays(&missing, &first).await;
}

async fn a_failed_validation_is_not_stored(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for broken in [
        "{\"phone\":\"nonsense\"}",
        "{\"phone\":",
        "",
        "{\"phone\":\"+4915112345678\",\"unknown\":1}",
    ] {
        let key = fresh_key();
        let request = api
            .post("/contacts")
            .key(&key)
            .body("application/json", broken);
        for _ in 0..2 {
            let answer = request.clone().send().await;
            assert!(!answer.is_replay(), "{}", answer.describe());
            answer.problem("INVALID_BODY");
        }
        let body = json!({"phone": fresh_phone()});
        let answer = api
            .post("/contacts")
            .key(&key)
            .json(&body)
            .send()
            .await
            .expect(201);
        assert!(!answer.is_replay());
    }
    let key = fresh_key();
    let event = |body: serde_json::Value| api.post("/events").key(&key).json(&body).send();
    event(json!({"type": "payment.succeeded", "data": []}))
        .await
        .problem("INVALID_BODY");
    event(json!({"type": "order.paid", "data": {}}))
        .await
        .expect_success();
}

async fn an_unauthorised_call_is_not_stored(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let project = server.project("shop").await;
    let (reader, _) = server.scoped(&project, "read").await;
    let key = fresh_key();
    let create = |api: &Api| {
        let body = json!({"phone": "+4915112345678"});
        api.post("/contacts").key(&key).json(&body).send()
    };
    create(&project.api.anonymous())
        .await
        .problem("UNAUTHENTICATED");
    create(&reader).await.problem("FORBIDDEN");
    let done = create(&project.api).await.expect(201);
    assert!(!done.is_replay());
    // Nor does a stored answer open itself to those who may not ask.
    create(&project.api.anonymous())
        .await
        .problem("UNAUTHENTICATED");
    create(&reader).await.problem("FORBIDDEN");
}

async fn a_key_belongs_to_its_project(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let ours = server.project("ours").await.api;
    let theirs = server.project("theirs").await.api;
    let key = fresh_key();
    let create = |api: &Api, phone: &str| {
        let body = json!({"phone": phone});
        api.post("/contacts").key(&key).json(&body).send()
    };
    let phone = fresh_phone();
    let first = create(&ours, &phone).await.expect(201);
    let second = create(&theirs, &phone).await.expect(201);
    assert!(!second.is_replay());
    assert_ne!(first.member("id"), second.member("id"));
    // Another body with the key conflicts in each project with its own record only.
    create(&ours, &fresh_phone())
        .await
        .problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
    let again = create(&theirs, &phone).await.expect(201);
    assert!(again.is_replay());
    assert_eq!(again.body, second.body);
    let rows = theirs.all("/contacts").await;
    assert_eq!(rows.len(), 1);
    assert_eq!(text(&rows[0], "id"), second.member("id"));
}

async fn a_replay_survives_a_restart(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let first = request.clone().send().await.expect(201);
    server.kill9();
    server.restart().await;
    replays(&request, &first).await;
    server.stop().await;
    server.restart().await;
    replays(&request, &first).await;
}

async fn a_finished_answer_is_kept_for_its_time_to_live(backend: Backend) {
    let ttl = [("BOTIX_IDEMPOTENCY__TTL", "2s")];
    let server = TestServer::start(backend, &ttl).await;
    let api = server.project("shop").await.api;
    let body = json!({"phone": fresh_phone()});
    let contact = api.post("/contacts").json(&body).send().await.expect(201);
    let path = format!("/contacts/{}", contact.member("id"));
    let request = api.patch(&path).json(&json!({"name": "Ada"}));
    let first = request.clone().send().await.expect(200);
    let second = eventually("the key executes anew", async || {
        let answer = request.clone().send().await.expect(200);
        if answer.is_replay() {
            assert_eq!(answer.body, first.body);
            return None;
        }
        Some(answer)
    })
    .await;
    assert_ne!(second.body, first.body, "updated_at moved on");
}

async fn expired_records_are_removed(backend: Backend) {
    let ttl = [("BOTIX_IDEMPOTENCY__TTL", "1s")];
    let server = TestServer::start(backend, &ttl).await;
    let api = server.project("shop").await.api;
    for _ in 0..3 {
        let body = json!({"phone": fresh_phone()});
        api.post("/contacts").json(&body).send().await.expect(201);
    }
    let mut store = server.outside().await;
    eventually("the sweep removes them", async || {
        let left = store
            .number("SELECT count(*) FROM idempotency_records")
            .await;
        (left == 0).then_some(())
    })
    .await;
}

/// The answer of a published event is the event, so as large as what was sent.
fn publication(api: &crate::harness::api::Api, size: usize) -> Request {
    let body = format!(
        r#"{{"type":"order.paid","data":{{"text":"{}"}}}}"#,
        "x".repeat(size)
    );
    api.post("/events").body("application/json", body)
}

async fn an_answer_too_large_to_keep_is_remembered(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let request = publication(&api, 300 << 10);
    let first = request.clone().send().await.expect(201);
    assert!(first.body.len() > 256 << 10);
    let again = request.send().await.expect(201);
    assert!(again.is_replay());
    assert_eq!(again.header("location"), first.header("location"));
    assert_eq!(
        again.header("content-type"),
        Some("application/problem+json")
    );
    let problem = again.clone().problem("IDEMPOTENCY_ANSWER_NOT_KEPT");
    assert_eq!(problem["status"], 201);
    assert_eq!(
        problem["request_id"].as_str(),
        again.header("x-request-id"),
        "it is an answer of its own"
    );
    let place = first.header("location").expect("a place");
    let detail = problem["detail"].as_str().expect("a detail");
    assert!(detail.contains(place), "{detail} says where to read it");
    let read = api.outside(reqwest::Method::GET, place).send().await;
    assert_eq!(read.expect(200).json()["id"], first.member("id"));
    assert_eq!(api.all("/events").await.len(), 1, "nothing ran twice");
}

async fn an_answer_just_small_enough_is_kept_whole(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let around = publication(&api, 0).send().await.expect(201).body.len();
    let request = publication(&api, (256 << 10) - around);
    let first = request.clone().send().await.expect(201);
    assert_eq!(first.body.len(), 256 << 10);
    replays(&request, &first).await;
}
