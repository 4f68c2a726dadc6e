//! Contacts through the public door: the shape, the uniqueness of a phone, PATCH and the counter.

mod bodies;

use crate::harness::api::Answer;
use crate::harness::server::TestServer;
use crate::harness::{Backend, fresh_phone, is_id, is_timestamp, on_both_databases};
use serde_json::{Value, json};

on_both_databases!(
    a_contact_has_the_published_shape,
    a_contact_starts_empty_where_nothing_was_given,
    a_phone_is_unique_in_its_project,
    a_patch_changes_what_it_names_and_null_clears,
    a_deleted_contact_is_gone_and_frees_its_phone,
    the_count_follows_every_change,
    a_project_sees_only_its_own_contacts,
);

/// Asserts that it failed with this code and points at this place of the body, or inside it.
#[track_caller]
pub fn points_at(answer: Answer, code: &str, pointer: &str) {
    let shown = answer.describe();
    let problem = answer.problem(code);
    let errors = problem["errors"].as_array().expect(&shown);
    assert!(
        errors.iter().any(|error| {
            let shown = error["pointer"].as_str().unwrap_or_default();
            let below = shown.strip_prefix(pointer);
            below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        }),
        "a pointer {pointer}: {shown}"
    );
}

async fn a_contact_has_the_published_shape(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let given = json!({
        "phone": "+4915112345678", "name": "Zoë 🙂", "email": "zoe@example.com",
        "tags": ["vip", "berlin"], "attributes": {"plan": "pro", "seats": 3, "deep": {"a": [1, null]}},
    });
    let created = api.post("/contacts").json(&given).send().await.expect(201);
    let contact = created.json();
    let mut members: Vec<_> = contact.as_object().expect("an object").keys().collect();
    members.sort();
    assert_eq!(
        members,
        [
            "attributes",
            "created_at",
            "email",
            "id",
            "name",
            "phone",
            "tags",
            "updated_at"
        ]
    );
    for member in ["phone", "name", "email", "tags", "attributes"] {
        assert_eq!(contact[member], given[member]);
    }
    let id = contact["id"].as_str().expect("an id");
    assert!(is_id("con", id), "{id}");
    assert!(is_timestamp(
        contact["created_at"].as_str().expect("a time")
    ));
    assert_eq!(contact["created_at"], contact["updated_at"]);
    let location = created.header("location").expect("a Location");
    assert!(location.ends_with(&format!("/public/v1/contacts/{id}")));
    let content_type = created.header("content-type").expect("a type");
    assert!(
        content_type.starts_with("application/json"),
        "{content_type}"
    );

    let read = api.get(&format!("/contacts/{id}")).send().await.expect(200);
    assert_eq!(read.json(), contact);
    let listed = api.get("/contacts").send().await.expect(200).json();
    assert_eq!(
        listed,
        json!({"data": [contact], "next_cursor": null, "has_more": false})
    );
}

async fn a_contact_starts_empty_where_nothing_was_given(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let phone = json!({"phone": fresh_phone()});
    let contact = api
        .post("/contacts")
        .json(&phone)
        .send()
        .await
        .expect(201)
        .json();
    assert_eq!(contact["name"], Value::Null);
    assert_eq!(contact["email"], Value::Null);
    assert_eq!(contact["tags"], json!([]));
    assert_eq!(contact["attributes"], json!({}));
}

async fn a_phone_is_unique_in_its_project(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let phone = fresh_phone();
    let body = json!({"phone": phone});
    api.post("/contacts").json(&body).send().await.expect(201);
    api.post("/contacts")
        .json(&body)
        .send()
        .await
        .problem("CONTACT_EXISTS");

    let other = json!({"phone": fresh_phone()});
    let other = api
        .post("/contacts")
        .json(&other)
        .send()
        .await
        .expect(201)
        .member("id");
    api.patch(&format!("/contacts/{other}"))
        .json(&body)
        .send()
        .await
        .problem("CONTACT_EXISTS");

    let elsewhere = server.project("another shop").await.api;
    elsewhere
        .post("/contacts")
        .json(&body)
        .send()
        .await
        .expect(201);

    // Twenty at once with one new phone, each with a key of its own: one wins.
    let body = json!({"phone": fresh_phone()});
    let racing = (0..20).map(|_| api.post("/contacts").json(&body).send());
    let answers = futures::future::join_all(racing).await;
    let created = answers.iter().filter(|answer| answer.status == 201).count();
    assert_eq!(created, 1);
    for lost in answers.into_iter().filter(|answer| answer.status != 201) {
        lost.problem("CONTACT_EXISTS");
    }
}

async fn a_patch_changes_what_it_names_and_null_clears(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let created = api
        .post("/contacts")
        .json(&json!({
            "phone": fresh_phone(), "name": "Ada", "email": "ada@example.com",
            "tags": ["a"], "attributes": {"k": 1},
        }))
        .send()
        .await
        .expect(201)
        .json();
    let path = format!("/contacts/{}", created["id"].as_str().expect("an id"));
    let change = async |body: Value| api.patch(&path).json(&body).send().await.expect(200).json();

    let unchanged = change(json!({})).await;
    for member in [
        "id",
        "phone",
        "name",
        "email",
        "tags",
        "attributes",
        "created_at",
    ] {
        assert_eq!(unchanged[member], created[member], "{member}");
    }

    let cleared = change(json!({"name": null})).await;
    assert_eq!(cleared["name"], Value::Null);
    assert_eq!(cleared["email"], "ada@example.com");
    assert_eq!(cleared["tags"], json!(["a"]));
    assert_eq!(cleared["created_at"], created["created_at"]);
    assert!(cleared["updated_at"].as_str() > created["updated_at"].as_str());

    let changed = change(json!({"email": null, "tags": [], "attributes": {"other": true}})).await;
    assert_eq!(changed["email"], Value::Null);
    assert_eq!(changed["tags"], json!([]));
    assert_eq!(changed["attributes"], json!({"other": true}));

    let cleared = change(json!({"attributes": null, "tags": null})).await;
    assert_eq!(cleared["attributes"], json!({}));
    assert_eq!(cleared["tags"], json!([]));

    let moved = change(json!({"phone": "+49301234567"})).await;
    assert_eq!(moved["phone"], "+49301234567");
    let read = api.get(&path).send().await.expect(200).json();
    assert_eq!(read, moved);

    // A contact without a phone does not exist, so null cannot clear it.
    let answer = api.patch(&path).json(&json!({"phone": null})).send().await;
    points_at(answer, "INVALID_BODY", "/phone");
    for read_only in ["id", "created_at", "updated_at"] {
        let body = json!({ read_only: created[read_only] });
        let answer = api.patch(&path).json(&body).send().await;
        points_at(answer, "INVALID_BODY", &format!("/{read_only}"));
    }
}

async fn a_deleted_contact_is_gone_and_frees_its_phone(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = json!({"phone": fresh_phone()});
    let id = api
        .post("/contacts")
        .json(&body)
        .send()
        .await
        .expect(201)
        .member("id");
    let path = format!("/contacts/{id}");
    let deleted = api.delete(&path).send().await.expect(204);
    assert!(deleted.body.is_empty());
    api.get(&path).send().await.problem("NOT_FOUND");
    api.delete(&path).send().await.problem("NOT_FOUND");
    api.patch(&path)
        .json(&json!({}))
        .send()
        .await
        .problem("NOT_FOUND");
    let again = api.post("/contacts").json(&body).send().await.expect(201);
    assert_ne!(again.member("id"), id);
}

async fn the_count_follows_every_change(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let other = server.project("another shop").await.api;
    let count = async || api.get("/contacts/count").send().await.expect(200).json();
    assert_eq!(count().await, json!({"count": 0}));

    let phone = json!({"phone": fresh_phone()});
    let id = api
        .post("/contacts")
        .json(&phone)
        .send()
        .await
        .expect(201)
        .member("id");
    assert_eq!(count().await, json!({"count": 1}));
    api.post("/contacts")
        .json(&phone)
        .send()
        .await
        .problem("CONTACT_EXISTS");
    api.post("/contacts")
        .json(&json!({"phone": 1}))
        .send()
        .await
        .problem("INVALID_BODY");
    api.patch(&format!("/contacts/{id}"))
        .json(&json!({"name": "Ada"}))
        .send()
        .await
        .expect(200);
    other
        .post("/contacts")
        .json(&phone)
        .send()
        .await
        .expect(201);
    assert_eq!(count().await, json!({"count": 1}));

    let creating = (0..20).map(|_| {
        let body = json!({"phone": fresh_phone()});
        api.post("/contacts").json(&body).send()
    });
    for answer in futures::future::join_all(creating).await {
        answer.expect(201);
    }
    assert_eq!(count().await, json!({"count": 21}));

    let path = format!("/contacts/{id}");
    let deleting = (0..5).map(|_| api.delete(&path).send());
    let deleted = futures::future::join_all(deleting).await;
    assert_eq!(
        deleted.iter().filter(|answer| answer.status == 204).count(),
        1
    );
    assert_eq!(count().await, json!({"count": 20}));
    assert_eq!(api.all("/contacts").await.len(), 20);
}

async fn a_project_sees_only_its_own_contacts(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let ours = server.project("ours").await.api;
    let theirs = server.project("theirs").await.api;
    let body = json!({"phone": fresh_phone()});
    let id = ours
        .post("/contacts")
        .json(&body)
        .send()
        .await
        .expect(201)
        .member("id");
    let path = format!("/contacts/{id}");
    theirs.get(&path).send().await.problem("NOT_FOUND");
    theirs
        .patch(&path)
        .json(&json!({"name": "x"}))
        .send()
        .await
        .problem("NOT_FOUND");
    theirs.delete(&path).send().await.problem("NOT_FOUND");
    assert_eq!(theirs.all("/contacts").await.len(), 0);
    assert_eq!(ours.all("/contacts").await.len(), 1);
    ours.get(&path).send().await.expect(200);
}
