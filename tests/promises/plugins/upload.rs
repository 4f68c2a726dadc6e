//! What a plugin's upload answers, and what is refused at once.

use super::{plugged, ready, settled, upload};
use crate::contacts::points_at;
use crate::fixtures;
use crate::harness::server::TestServer;
use crate::harness::{Backend, is_id, is_timestamp, on_both_databases};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

on_both_databases!(
    an_upload_has_the_published_shape,
    what_a_plugin_exports_is_shown,
    a_refused_import_is_named,
    what_is_no_plugin_is_refused,
    an_upload_is_web_assembly_of_a_bounded_size,
    a_plugin_belongs_to_its_project,
    a_plugin_in_use_cannot_be_deleted,
    an_interrupted_compilation_goes_on_after_a_crash,
);

async fn an_upload_has_the_published_shape(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let component = fixtures::both();
    let made = upload(&api, "/plugins?name=scrub", &component)
        .send()
        .await
        .expect(201);
    let plugin = made.json();
    let mut members: Vec<_> = plugin.as_object().expect("an object").keys().collect();
    members.sort();
    for member in ["active_version", "id", "name", "versions"] {
        assert!(
            members.iter().any(|known| *known == member),
            "{member} in {members:?}"
        );
    }
    let id = plugin["id"].as_str().expect("an id");
    assert!(is_id("plg", id));
    assert_eq!(plugin["name"], "scrub");
    let version = &plugin["versions"][0];
    assert_eq!(version["version"], 1);
    assert!(
        matches!(version["status"].as_str(), Some("compiling" | "ready")),
        "{version}"
    );
    assert_eq!(version["reason"], Value::Null);
    assert_eq!(version["size"], component.len());
    assert_eq!(
        version["sha256"],
        crate::webhooks::hex(&Sha256::digest(&component))
    );
    assert!(is_timestamp(
        version["created_at"].as_str().expect("a time")
    ));

    let plugin = settled(&api, id, 1, "ready").await;
    assert_eq!(
        plugin["active_version"], 1,
        "the first that is ready becomes active by itself"
    );
    assert_eq!(plugin["versions"].as_array().map(Vec::len), Some(1));
    assert_eq!(api.all("/plugins").await.len(), 1);
    let renamed = api
        .patch(&format!("/plugins/{id}"))
        .json(&json!({"name": "mask"}));
    assert_eq!(renamed.send().await.expect(200).json()["name"], "mask");
    api.delete(&format!("/plugins/{id}"))
        .send()
        .await
        .expect(204);
    api.get(&format!("/plugins/{id}"))
        .send()
        .await
        .problem("NOT_FOUND");
}

async fn what_a_plugin_exports_is_shown(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    for (name, component, exports) in [
        ("transform", fixtures::echo(), json!(["transform"])),
        ("sign", fixtures::sign_only(), json!(["sign"])),
        ("both", fixtures::both(), json!(["transform", "sign"])),
        ("imports", fixtures::every_import(), json!(["transform"])),
    ] {
        let id = ready(&api, name, &component).await;
        let plugin = api
            .get(&format!("/plugins/{id}"))
            .send()
            .await
            .expect(200)
            .json();
        assert_eq!(plugin["versions"][0]["exports"], exports, "{name}");
    }
}

async fn a_refused_import_is_named(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let good = ready(&api, "good", &fixtures::echo()).await;
    for (component, named) in [
        (fixtures::imports_wasi(), "wasi:cli/environment@0.2.0"),
        (fixtures::imports_unknown_function(), "exec"),
        (fixtures::imports_mistyped(), "now"),
        (fixtures::built_against("2.0.0"), "@2.0.0"),
    ] {
        for path in [
            "/plugins?name=bad".to_owned(),
            format!("/plugins/{good}/versions"),
        ] {
            let problem = upload(&api, &path, &component)
                .send()
                .await
                .problem("PLUGIN_INVALID");
            let detail = problem["detail"].as_str().expect("a detail");
            assert!(detail.contains(named), "{named} in {detail}");
        }
    }
    // Nothing of it remains.
    assert_eq!(api.all("/plugins").await.len(), 1);
    assert_eq!(api.all(&format!("/plugins/{good}/versions")).await.len(), 1);
}

async fn what_is_no_plugin_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let whole = fixtures::echo();
    let mut bent = whole.clone();
    let middle = bent.len() / 2;
    bent[middle..middle + 40].fill(0xff);
    for (component, named) in [
        (fixtures::exports_nothing(), "transform"),
        (fixtures::exports_mistyped(), "transform"),
        (fixtures::core_module(), "component"),
        (Vec::new(), ""),
        (b"not WebAssembly".to_vec(), ""),
        (whole[..whole.len() / 2].to_vec(), ""),
        (whole[..8].to_vec(), ""),
        (bent, ""),
    ] {
        let answer = upload(&api, "/plugins?name=bad", &component).send().await;
        let problem = answer.problem("PLUGIN_INVALID");
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(detail.contains(named), "{named} in {detail}");
    }
    assert_eq!(api.all("/plugins").await.len(), 0);
}

async fn an_upload_is_web_assembly_of_a_bounded_size(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let component = fixtures::echo();
    for other in ["application/json", "text/plain", "application/octet-stream"] {
        let answer = api
            .post("/plugins?name=p")
            .body(other, component.clone())
            .send()
            .await;
        answer.problem("UNSUPPORTED_MEDIA_TYPE");
    }
    let unnamed = upload(&api, "/plugins", &component).send().await;
    unnamed.problem("INVALID_PARAMETER");
    let empty = upload(&api, "/plugins?name=", &component).send().await;
    empty.problem("INVALID_PARAMETER");
    let over = vec![0; (16 << 20) + 1];
    let answer = upload(&api, "/plugins?name=p", &over).send().await;
    answer.problem("PAYLOAD_TOO_LARGE");
    // As much as that is read and looked at.
    let largest = vec![0; 16 << 20];
    let answer = upload(&api, "/plugins?name=p", &largest).send().await;
    answer.problem("PLUGIN_INVALID");
}

async fn a_plugin_belongs_to_its_project(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let ours = server.project("ours").await.api;
    let theirs = server.project("theirs").await.api;
    let id = ready(&ours, "ours", &fixtures::echo()).await;
    let path = format!("/plugins/{id}");
    theirs.get(&path).send().await.problem("NOT_FOUND");
    theirs
        .get(&format!("{path}/versions"))
        .send()
        .await
        .problem("NOT_FOUND");
    theirs.delete(&path).send().await.problem("NOT_FOUND");
    let added = upload(&theirs, &format!("{path}/versions"), &fixtures::echo());
    added.send().await.problem("NOT_FOUND");
    let activate = theirs
        .post(&format!("{path}/activate"))
        .json(&json!({"version": 1}));
    activate.send().await.problem("NOT_FOUND");
    let body = json!({"url": "https://example.com/", "plugin_id": id});
    let answer = theirs.post("/webhook-endpoints").json(&body).send().await;
    points_at(answer, "INVALID_BODY", "/plugin_id");
    assert_eq!(theirs.all("/plugins").await.len(), 0);
}

async fn a_plugin_in_use_cannot_be_deleted(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let id = ready(&api, "p", &fixtures::echo()).await;
    let endpoint = plugged(&api, "https://example.com/", &id, json!({})).await;
    let path = format!("/plugins/{id}");
    api.delete(&path).send().await.problem("PLUGIN_IN_USE");
    let endpoint = format!("/webhook-endpoints/{}", endpoint.id);
    let unplugged = api
        .patch(&endpoint)
        .json(&json!({"plugin_id": null}))
        .send()
        .await
        .expect(200);
    assert_eq!(unplugged.json()["plugin_id"], Value::Null);
    api.delete(&path).send().await.expect(204);
}

async fn an_interrupted_compilation_goes_on_after_a_crash(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let mut ids = Vec::new();
    for (_, component) in super::example::guests() {
        let made = upload(&api, "/plugins?name=p", &component)
            .send()
            .await
            .expect(201);
        ids.push(made.member("id"));
    }
    server.kill9();
    server.restart().await;
    for id in ids {
        settled(&api, &id, 1, "ready").await;
    }
}
