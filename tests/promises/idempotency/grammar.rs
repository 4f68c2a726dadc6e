//! What a key looks like, and what is checked before it is looked at.

use crate::harness::api::Api;
use crate::harness::server::TestServer;
use crate::harness::{Backend, fresh_key, fresh_phone, fresh_ulid, on_every_store};
use reqwest::Method;
use serde_json::json;

on_every_store!(
    every_mutation_requires_a_key,
    a_read_ignores_a_key,
    a_key_is_one_uuid_v4_or_one_ulid,
    anything_else_is_no_key,
    a_key_is_the_same_in_every_spelling,
    checks_come_in_the_documented_order,
);

async fn every_mutation_requires_a_key(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = json!({"phone": fresh_phone()});
    for (method, path) in [
        (Method::POST, "/contacts"),
        (Method::PATCH, "/contacts/con_00000000000000000000000000"),
        (Method::DELETE, "/contacts/con_00000000000000000000000000"),
        (Method::POST, "/events"),
        (Method::POST, "/webhook-endpoints"),
        (
            Method::PATCH,
            "/webhook-endpoints/whe_00000000000000000000000000",
        ),
        (
            Method::DELETE,
            "/webhook-endpoints/whe_00000000000000000000000000",
        ),
        (Method::POST, "/plugins?name=p"),
        (Method::DELETE, "/plugins/plg_00000000000000000000000000"),
        (
            Method::POST,
            "/plugins/plg_00000000000000000000000000/versions",
        ),
        (
            Method::POST,
            "/plugins/plg_00000000000000000000000000/activate",
        ),
        (Method::POST, "/inspector/bins"),
        (
            Method::DELETE,
            "/inspector/bins/bin_00000000000000000000000000",
        ),
    ] {
        let answer = api.call(method, path).json(&body).send().await;
        answer.problem("IDEMPOTENCY_KEY_REQUIRED");
    }
    assert_eq!(api.all("/contacts").await.len(), 0);
}

async fn a_read_ignores_a_key(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let key = fresh_key();
    for _ in 0..2 {
        let answer = api.get("/contacts").key(&key).send().await.expect(200);
        assert!(!answer.is_replay());
    }
    api.get("/contacts")
        .raw_key(b"no key at all")
        .send()
        .await
        .expect(200);
}

async fn a_key_is_one_uuid_v4_or_one_ulid(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let ulid = fresh_ulid();
    for key in [
        fresh_key(),
        fresh_key().to_uppercase(),
        format!("\"{}\"", fresh_key()),
        format!("\"{}\"", fresh_key().to_uppercase()),
        ulid.clone(),
        fresh_ulid().to_lowercase(),
        format!("\"{}\"", fresh_ulid()),
        format!("{}{}", &fresh_ulid()[..13].to_lowercase(), &ulid[13..]),
        "7ZZZZZZZZZZZZZZZZZZZZZZZZZ".to_owned(),
        "00000000000000000000000000".to_owned(),
    ] {
        let body = json!({"phone": fresh_phone()});
        let first = api.post("/contacts").key(&key).json(&body).send().await;
        assert!(!first.is_replay(), "{key}");
        let first = first.expect(201);
        let again = api
            .post("/contacts")
            .key(&key)
            .json(&body)
            .send()
            .await
            .expect(201);
        assert!(again.is_replay(), "{key}");
        assert_eq!(again.body, first.body);
    }
}

async fn anything_else_is_no_key(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let key = fresh_key();
    let ulid = fresh_ulid();
    let no_keys: Vec<Vec<u8>> = [
        String::new(),
        "abc".to_owned(),
        "1".to_owned(),
        "\"\"".to_owned(),
        format!("{{{key}}}"),
        format!("urn:uuid:{key}"),
        key.replace('-', ""),
        format!("{}{}", &key[..8], &key[9..]),
        format!("{key}0"),
        format!("x{key}"),
        key[1..].to_owned(),
        // Other versions, the nil and the max UUID, other variants.
        "0190b8f0-7b9c-7000-8000-000000000001".to_owned(),
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8".to_owned(),
        "6ba7b810-9dad-51d1-80b4-00c04fd430c8".to_owned(),
        "00000000-0000-0000-0000-000000000000".to_owned(),
        "ffffffff-ffff-ffff-ffff-ffffffffffff".to_owned(),
        "0190b8f0-7b9c-4000-7000-000000000001".to_owned(),
        "0190b8f0-7b9c-4000-c000-000000000001".to_owned(),
        // Beyond 128 bits, too short, too long, letters outside Crockford's alphabet.
        "80000000000000000000000000".to_owned(),
        "8ZZZZZZZZZZZZZZZZZZZZZZZZZ".to_owned(),
        ulid[1..].to_owned(),
        format!("{ulid}0"),
        format!("0I{}", &ulid[2..]),
        format!("0L{}", &ulid[2..]),
        format!("0O{}", &ulid[2..]),
        format!("0U{}", &ulid[2..]),
        format!("0-{}", &ulid[2..]),
        // Not quite an RFC 8941 string.
        format!("\"{key}"),
        format!("{key}\""),
        format!("'{key}'"),
        format!("\"\"{key}\"\""),
        format!("\"{key}\";a=1"),
        format!("\" {key}\""),
        format!(":{key}:"),
        // More than one.
        format!("{key}, {}", fresh_key()),
        format!("\"{key}\", \"{}\"", fresh_key()),
        format!("{key} {key}"),
        "k".repeat(8_000),
    ]
    .into_iter()
    .map(String::into_bytes)
    .chain([b"\xc3\xa9".to_vec(), b"\xff".to_vec()])
    .collect();
    let body = json!({"phone": fresh_phone()});
    for no_key in no_keys {
        let answer = api
            .post("/contacts")
            .raw_key(&no_key)
            .json(&body)
            .send()
            .await;
        let shown = String::from_utf8_lossy(&no_key).into_owned();
        assert_eq!(
            answer.code().as_deref(),
            Some("IDEMPOTENCY_KEY_INVALID"),
            "{shown}"
        );
    }
    for second in [key.clone(), fresh_key()] {
        let repeated = api
            .post("/contacts")
            .key(&key)
            .header("idempotency-key", &second)
            .json(&body);
        repeated.send().await.problem("IDEMPOTENCY_KEY_INVALID");
    }
    assert_eq!(api.all("/contacts").await.len(), 0);
}

async fn a_key_is_the_same_in_every_spelling(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for key in [fresh_key(), fresh_ulid()] {
        let body = json!({"phone": fresh_phone()});
        let first = api
            .post("/contacts")
            .key(&key)
            .json(&body)
            .send()
            .await
            .expect(201);
        for spelling in [
            key.to_uppercase(),
            key.to_lowercase(),
            format!("\"{key}\""),
            format!("\"{}\"", key.to_uppercase()),
        ] {
            let again = api
                .post("/contacts")
                .key(&spelling)
                .json(&body)
                .send()
                .await;
            assert!(again.is_replay(), "{spelling}: {}", again.describe());
            assert_eq!(again.body, first.body);
        }
    }
    assert_eq!(api.all("/contacts").await.len(), 2);
}

/// Authentication, scope, key format, body size, then capture.
async fn checks_come_in_the_documented_order(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let project = server.project("shop").await;
    let (reader, _) = server.scoped(&project, "read").await;
    let api = project.api;
    let too_large = format!("{{\"name\":\"{}\"}}", "x".repeat(2 << 20));
    let call = |api: &Api| api.post("/contacts").without_key();

    let anonymous = call(&api.anonymous()).body("application/json", "{");
    anonymous.clone().send().await.problem("UNAUTHENTICATED");
    anonymous
        .raw_key(b"abc")
        .send()
        .await
        .problem("UNAUTHENTICATED");

    let no_scope = call(&reader).body("application/json", "{");
    no_scope.clone().send().await.problem("FORBIDDEN");
    no_scope.raw_key(b"abc").send().await.problem("FORBIDDEN");

    let large = call(&api).body("application/json", too_large);
    large
        .clone()
        .send()
        .await
        .problem("IDEMPOTENCY_KEY_REQUIRED");
    large
        .clone()
        .raw_key(b"abc")
        .send()
        .await
        .problem("IDEMPOTENCY_KEY_INVALID");

    // Size and media type come before capture: the key is still free afterwards.
    let key = fresh_key();
    large.key(&key).send().await.problem("PAYLOAD_TOO_LARGE");
    let answer = api
        .post("/contacts")
        .key(&key)
        .body("text/plain", "{}")
        .send()
        .await;
    answer.problem("UNSUPPORTED_MEDIA_TYPE");
    let body = json!({"phone": fresh_phone()});
    let done = api
        .post("/contacts")
        .key(&key)
        .json(&body)
        .send()
        .await
        .expect(201);
    assert!(!done.is_replay());

    // And a captured key answers before the body is looked at.
    let answer = api
        .post("/contacts")
        .key(&key)
        .body("application/json", "{")
        .send()
        .await;
    answer.problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
}
