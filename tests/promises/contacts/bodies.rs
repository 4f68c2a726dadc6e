//! What the body of a contact must look like, and what a wrong one is told.

use super::points_at;
use crate::harness::server::TestServer;
use crate::harness::{Backend, fresh_phone, on_both_databases};
use serde_json::json;

on_both_databases!(
    a_phone_is_e164,
    an_error_in_a_body_points_at_its_place,
    a_body_that_is_no_json_is_refused,
    hostile_text_is_never_an_internal_error,
    the_largest_contact_is_far_below_the_body_limit,
);

async fn a_phone_is_e164(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for valid in ["+4915112345678", "+14155552671", "+123456789012345"] {
        let body = json!({"phone": valid});
        let contact = api
            .post("/contacts")
            .json(&body)
            .send()
            .await
            .expect(201)
            .json();
        assert_eq!(contact["phone"], valid);
    }
    for invalid in [
        "",
        "+",
        "4915112345678",
        "+0123456789",
        "+49 151 12345678",
        "+49-151",
        "+1234567890123456",
        "+49151123456a",
        "++4915112345",
        "+49151123456\n",
        "+٤٩١٥١١٢٣٤٥",
        "0049151123456",
        "tel:+4915112345",
    ] {
        let answer = api
            .post("/contacts")
            .json(&json!({"phone": invalid}))
            .send()
            .await;
        points_at(answer, "INVALID_BODY", "/phone");
    }
}

async fn an_error_in_a_body_points_at_its_place(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let phone = fresh_phone();
    for (body, pointer) in [
        (json!({"phone": 5}), "/phone"),
        (json!({"phone": phone, "name": ["a"]}), "/name"),
        (json!({"phone": phone, "tags": "vip"}), "/tags"),
        (json!({"phone": phone, "tags": ["a", 5]}), "/tags/1"),
        (json!({"phone": phone, "attributes": [1]}), "/attributes"),
        (json!({"phone": phone, "nickname": "x"}), "/nickname"),
        (json!({"phone": phone, "a/b~c": "x"}), "/a~1b~0c"),
        (json!({"phone": phone, "id": "con_1"}), "/id"),
    ] {
        let answer = api.post("/contacts").json(&body).send().await;
        points_at(answer, "INVALID_BODY", pointer);
    }
    let missing = api
        .post("/contacts")
        .json(&json!({"name": "x"}))
        .send()
        .await;
    missing.problem("INVALID_BODY");
    assert_eq!(api.all("/contacts").await.len(), 0);
}

async fn a_body_that_is_no_json_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for broken in [
        "",
        " ",
        "{",
        "{\"phone\":",
        "{\"phone\":\"+4915112345678\"",
        "{\"phone\":\"+4915112345678\"} x",
        "[]",
        "null",
        "\"+4915112345678\"",
        "{'phone':'+4915112345678'}",
        "{\"phone\":\"+4915112345678\",}",
    ] {
        let answer = api
            .post("/contacts")
            .body("application/json", broken)
            .send()
            .await;
        let shown = answer.describe();
        let problem = answer.problem("INVALID_BODY");
        assert!(problem["errors"].is_array(), "where it broke: {shown}");
    }
    let invalid_utf8 = b"{\"phone\":\"+4915112345678\",\"name\":\"\xff\"}".to_vec();
    api.post("/contacts")
        .body("application/json", invalid_utf8)
        .send()
        .await
        .problem("INVALID_BODY");
    assert_eq!(api.all("/contacts").await.len(), 0);
}

async fn hostile_text_is_never_an_internal_error(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000));
    for member in [
        "\"name\":\"a\\u0000b\"".to_owned(),
        "\"name\":\"\\ud800\"".to_owned(),
        "\"tags\":[\"\\u0000\"]".to_owned(),
        "\"attributes\":{\"k\\u0000\":\"v\\u0000\"}".to_owned(),
        "\"attributes\":{\"n\":1e400}".to_owned(),
        "\"attributes\":{\"n\":123456789012345678901234567890}".to_owned(),
        format!("\"attributes\":{{\"deep\":{deep}}}"),
        "\"email\":\"a@example.com\\r\\nBcc: b@example.com\"".to_owned(),
    ] {
        let shown: String = member.chars().take(80).collect();
        let body = format!("{{\"phone\":\"{}\",{member}}}", fresh_phone());
        let answer = api
            .post("/contacts")
            .body("application/json", body)
            .send()
            .await;
        if answer.status != 201 {
            answer.problem("INVALID_BODY");
            continue;
        }
        // What was accepted can be read again, alone and in a list.
        // Compared as bytes: not every number in them fits the types of this test.
        let location = answer.header("location").expect("a location");
        let id = location.rsplit('/').next().unwrap_or_default();
        let read = api.get(&format!("/contacts/{id}")).send().await.expect(200);
        assert_eq!(read.text(), answer.text(), "{shown}");
        api.get("/contacts").send().await.expect(200);
    }
    for id in [
        "%00",
        "con_",
        "con_%00",
        "con_zzz",
        "%F0%9F%99%82",
        "con_81234567890123456789012345",
    ] {
        let answer = api.get(&format!("/contacts/{id}")).send().await;
        assert!(
            matches!(
                answer.code().as_deref(),
                Some("NOT_FOUND" | "INVALID_PARAMETER")
            ),
            "{}",
            answer.describe()
        );
    }
}

async fn the_largest_contact_is_far_below_the_body_limit(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let note = "n".repeat(10_000);
    let body = json!({"phone": fresh_phone(), "attributes": {"note": note}});
    let contact = api
        .post("/contacts")
        .json(&body)
        .send()
        .await
        .expect(201)
        .json();
    assert_eq!(contact["attributes"]["note"], note);
}
