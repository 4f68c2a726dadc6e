//! Endpoints: what they are made of and which events they get.

use super::{delivery_in, endpoint, endpoint_at, publish, verify};
use crate::contacts::points_at;
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, fresh_phone, is_id, is_timestamp, on_both_databases};
use base64::Engine;
use serde_json::{Value, json};

on_both_databases!(
    an_endpoint_has_the_published_shape,
    a_secret_is_shown_once,
    an_endpoint_is_changed_and_deleted,
    an_endpoint_that_cannot_work_is_refused,
    an_endpoint_belongs_to_its_project,
    an_endpoint_gets_the_events_it_asked_for,
    a_disabled_endpoint_keeps_its_deliveries_paused,
    an_endpoint_that_is_enabled_again_gets_what_waited,
    a_deleted_endpoint_cancels_its_deliveries,
    every_endpoint_signs_with_its_own_secret,
);

async fn an_endpoint_has_the_published_shape(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let given = json!({
        "url": "https://example.com/hook?a=1", "description": "orders",
        "event_types": ["contact.*", "order.paid"], "headers": {"X-Tenant": "shop"},
    });
    let created = api
        .post("/webhook-endpoints")
        .json(&given)
        .send()
        .await
        .expect(201);
    let location = created.header("location").expect("a Location").to_owned();
    let created = created.json();
    for member in ["url", "description", "event_types"] {
        assert_eq!(created[member], given[member], "{member}");
    }
    // The names of its headers; what they say is often a credential.
    assert!(created["headers"].get("X-Tenant").is_some(), "{created}");
    let id = created["id"].as_str().expect("an id");
    assert!(is_id("whe", id));
    assert!(location.ends_with(&format!("/public/v1/webhook-endpoints/{id}")));
    assert_eq!(created["enabled"], true);
    assert_eq!(created["plugin_id"], Value::Null);
    assert!(is_timestamp(
        created["created_at"].as_str().expect("a time")
    ));

    let bare = json!({"url": "https://example.com/hook"});
    let bare = api
        .post("/webhook-endpoints")
        .json(&bare)
        .send()
        .await
        .expect(201)
        .json();
    assert_eq!(bare["event_types"], json!(["*"]));
    assert_eq!(bare["headers"], json!({}));
    assert_eq!(bare["description"], Value::Null);
    assert_eq!(api.all("/webhook-endpoints").await.len(), 2);
}

async fn a_secret_is_shown_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = json!({"url": "https://example.com/hook"});
    let created = api
        .post("/webhook-endpoints")
        .json(&body)
        .send()
        .await
        .expect(201);
    let secret = created.member("secret");
    let key = secret.strip_prefix("whsec_").expect("the prefix");
    let key = base64::engine::general_purpose::STANDARD
        .decode(key)
        .expect("base64");
    assert_eq!(key.len(), 32);
    let path = format!("/webhook-endpoints/{}", created.member("id"));
    let read = api.get(&path).send().await.expect(200);
    let listed = api.get("/webhook-endpoints").send().await.expect(200);
    let patched = api
        .patch(&path)
        .json(&json!({"description": "d"}))
        .send()
        .await
        .expect(200);
    for answer in [read, listed, patched] {
        assert!(!answer.text().contains("whsec_"), "{}", answer.describe());
        assert!(
            !answer.text().contains(&secret[6..]),
            "{}",
            answer.describe()
        );
    }
}

async fn an_endpoint_is_changed_and_deleted(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let body = json!({"url": "https://example.com/a", "description": "d", "event_types": ["a.b"]});
    let created = api
        .post("/webhook-endpoints")
        .json(&body)
        .send()
        .await
        .expect(201)
        .json();
    let path = format!(
        "/webhook-endpoints/{}",
        created["id"].as_str().expect("an id")
    );
    let change = async |body: Value| api.patch(&path).json(&body).send().await.expect(200).json();

    let unchanged = change(json!({})).await;
    for member in [
        "url",
        "description",
        "event_types",
        "enabled",
        "headers",
        "created_at",
    ] {
        assert_eq!(unchanged[member], created[member], "{member}");
    }
    let changed = change(json!({"url": "https://example.com/b", "description": null})).await;
    assert_eq!(changed["url"], "https://example.com/b");
    assert_eq!(changed["description"], Value::Null);
    assert_eq!(changed["event_types"], json!(["a.b"]));
    let changed =
        change(json!({"event_types": null, "headers": {"X-A": "b"}, "enabled": false})).await;
    assert_eq!(changed["event_types"], json!(["*"]));
    assert!(changed["headers"].get("X-A").is_some(), "{changed}");
    assert_eq!(changed["enabled"], false);
    assert_eq!(api.get(&path).send().await.expect(200).json(), changed);

    api.delete(&path).send().await.expect(204);
    api.get(&path).send().await.problem("NOT_FOUND");
    api.patch(&path)
        .json(&json!({}))
        .send()
        .await
        .problem("NOT_FOUND");
    api.delete(&path).send().await.problem("NOT_FOUND");
    assert_eq!(api.all("/webhook-endpoints").await.len(), 0);
}

async fn an_endpoint_that_cannot_work_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let url = "https://example.com/hook";
    let long = format!("https://example.com/{}", "a".repeat(10_000));
    for (body, pointer) in [
        (json!({"url": "ftp://example.com/"}), "/url"),
        (json!({"url": "file:///etc/passwd"}), "/url"),
        (json!({"url": "javascript:alert(1)"}), "/url"),
        (json!({"url": "/relative"}), "/url"),
        (json!({"url": "nonsense"}), "/url"),
        (json!({"url": ""}), "/url"),
        (json!({"url": "https://"}), "/url"),
        (json!({"url": "https://user:password@example.com/"}), "/url"),
        (json!({"url": "https://user@example.com/"}), "/url"),
        (json!({"url": long}), "/url"),
        (json!({"url": null}), "/url"),
        (
            json!({"url": url, "event_types": "contact.*"}),
            "/event_types",
        ),
        (json!({"url": url, "event_types": [""]}), "/event_types"),
        (
            json!({"url": url, "event_types": ["a.b", "contact.*.x"]}),
            "/event_types",
        ),
        (json!({"url": url, "event_types": ["con*"]}), "/event_types"),
        (json!({"url": url, "event_types": [".*"]}), "/event_types"),
        (json!({"url": url, "enabled": "yes"}), "/enabled"),
        (json!({"url": url, "colour": "green"}), "/colour"),
        (json!({"url": url, "secret": "whsec_AAAA"}), "/secret"),
        (json!({"url": url, "plugin_id": "nonsense"}), "/plugin_id"),
        (
            json!({"url": url, "plugin_id": "plg_00000000000000000000000000"}),
            "/plugin_id",
        ),
    ] {
        let answer = api.post("/webhook-endpoints").json(&body).send().await;
        points_at(answer, "INVALID_BODY", pointer);
    }
    for headers in [
        json!({"bad name": "x"}),
        json!({"": "x"}),
        json!({"X-A": "line\r\nbreak"}),
        json!({"X-A": "a\u{0}b"}),
        json!({"X-A": 1}),
        json!(["X-A"]),
    ] {
        let body = json!({"url": url, "headers": headers});
        let answer = api.post("/webhook-endpoints").json(&body).send().await;
        answer.problem("INVALID_BODY");
    }
    assert_eq!(api.all("/webhook-endpoints").await.len(), 0);
}

async fn an_endpoint_belongs_to_its_project(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let ours = server.project("ours").await.api;
    let theirs = server.project("theirs").await.api;
    let our_endpoint = endpoint_at(&ours, &receiver.url("/ours")).await;
    let path = format!("/webhook-endpoints/{}", our_endpoint.id);
    theirs.get(&path).send().await.problem("NOT_FOUND");
    theirs
        .patch(&path)
        .json(&json!({"enabled": false}))
        .send()
        .await
        .problem("NOT_FOUND");
    theirs.delete(&path).send().await.problem("NOT_FOUND");
    assert_eq!(theirs.all("/webhook-endpoints").await.len(), 0);

    endpoint_at(&theirs, &receiver.url("/theirs")).await;
    let event = publish(&theirs, "order.paid", json!({"secret": "theirs"})).await;
    receiver.wait_for("/theirs", 1).await;
    assert_eq!(receiver.requests_to("/ours").len(), 0);
    ours.get(&format!("/events/{event}"))
        .send()
        .await
        .problem("NOT_FOUND");
    let deliveries = theirs.all("/webhook-deliveries").await;
    let delivery = deliveries[0]["id"].as_str().expect("an id");
    ours.get(&format!("/webhook-deliveries/{delivery}"))
        .send()
        .await
        .problem("NOT_FOUND");
    ours.get(&format!("/webhook-deliveries/{delivery}/attempts"))
        .send()
        .await
        .problem("NOT_FOUND");
    assert_eq!(ours.all("/webhook-deliveries").await.len(), 0);
    assert_eq!(ours.all("/webhook-attempts").await.len(), 0);
    assert_eq!(ours.all("/events").await.len(), 0);
}

async fn an_endpoint_gets_the_events_it_asked_for(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for (path, event_types) in [
        ("/all", json!(["*"])),
        ("/one", json!(["order.paid"])),
        ("/family", json!(["order.*"])),
        ("/deep", json!(["order.line.*"])),
        ("/two", json!(["order.paid", "contact.created"])),
        ("/overlap", json!(["order.*", "order.paid", "*"])),
        ("/none", json!(["order.pai", "rder.paid", "order.paid.x"])),
    ] {
        let body = json!({"url": receiver.url(path), "event_types": event_types});
        endpoint(&api, body).await;
    }
    endpoint(&api, json!({"url": receiver.url("/absent")})).await;
    for event_type in [
        "order.paid",
        "order.line.added",
        "orders.paid",
        "order_x.paid",
    ] {
        publish(&api, event_type, json!({})).await;
    }
    let contact = json!({"phone": fresh_phone()});
    api.post("/contacts")
        .json(&contact)
        .send()
        .await
        .expect(201);

    // Deliveries are made with the event, so the listing is complete once all have arrived.
    let deliveries = api.all("/webhook-deliveries").await;
    let everything = [
        "contact.created",
        "order.line.added",
        "order.paid",
        "order_x.paid",
        "orders.paid",
    ];
    for (path, expected) in [
        ("/all", &everything[..]),
        ("/absent", &everything[..]),
        ("/overlap", &everything[..]),
        ("/one", &["order.paid"][..]),
        ("/family", &["order.line.added", "order.paid"][..]),
        ("/deep", &["order.line.added"][..]),
        ("/two", &["contact.created", "order.paid"][..]),
        ("/none", &[][..]),
    ] {
        let requests = receiver.wait_for(path, expected.len()).await;
        let mut types: Vec<_> = requests
            .iter()
            .map(|request| request.header("x-botix-event"))
            .collect();
        types.sort_unstable();
        assert_eq!(types, expected, "{path}");
    }
    assert_eq!(deliveries.len(), receiver.requests().len());
}

async fn a_disabled_endpoint_keeps_its_deliveries_paused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let disabled = endpoint(&api, json!({"url": receiver.url("/off"), "enabled": false})).await;
    endpoint_at(&api, &receiver.url("/on")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/on", 1).await;
    delivery_in(&api, &event, &disabled.id, "paused").await;
    assert_eq!(receiver.requests_to("/off").len(), 0);
}

async fn an_endpoint_that_is_enabled_again_gets_what_waited(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint(
        &api,
        json!({"url": receiver.url("/hook"), "enabled": false}),
    )
    .await;
    let mut waiting = Vec::new();
    for number in 0..5 {
        let event = publish(&api, "order.paid", json!({"number": number})).await;
        delivery_in(&api, &event, &hook.id, "paused").await;
        waiting.push(event);
    }
    let path = format!("/webhook-endpoints/{}", hook.id);
    for refused in [json!({"enabled": null}), json!({"url": null})] {
        let answer = api.patch(&path).json(&refused).send().await;
        answer.problem("INVALID_BODY");
    }
    let answer = api
        .patch(&path)
        .json(&json!({"enabled": true}))
        .send()
        .await;
    assert_eq!(answer.expect(200).json()["enabled"], true);
    for event in waiting {
        let delivery = delivery_in(&api, &event, &hook.id, "delivered").await;
        assert_eq!(delivery["attempts"], 1);
    }
    assert_eq!(receiver.requests_to("/hook").len(), 5);
}

async fn a_deleted_endpoint_cancels_its_deliveries(backend: Backend) {
    let server = TestServer::start(backend, &[("BOTIX_WEBHOOKS__LADDER", "2s,2s,2s,2s")]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/gone", Reply::status(500));
    let gone = endpoint_at(&api, &receiver.url("/gone")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &event, &gone.id, "retrying").await;
    let sent = receiver.requests_to("/gone").len();
    api.delete(&format!("/webhook-endpoints/{}", gone.id))
        .send()
        .await
        .expect(204);
    let delivery = delivery_in(&api, &event, &gone.id, "cancelled").await;
    assert_eq!(delivery["next_attempt_at"], Value::Null);
    let attempts = super::attempts_of(&api, &delivery).await;
    assert!(attempts.len() <= sent + 1);

    // Later events do not reach it; another endpoint shows that time went on past the next step.
    receiver.script("/kept", [Reply::status(500), Reply::status(500)]);
    endpoint_at(&api, &receiver.url("/kept")).await;
    publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/kept", 3).await;
    assert_eq!(receiver.requests_to("/gone").len(), attempts.len());
}

async fn every_endpoint_signs_with_its_own_secret(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let one = endpoint_at(&api, &receiver.url("/one")).await;
    let two = endpoint_at(&api, &receiver.url("/two")).await;
    assert_ne!(one.secret, two.secret);
    publish(&api, "order.paid", json!({"amount": 1})).await;
    let to_one = receiver.wait_for("/one", 1).await.remove(0);
    let to_two = receiver.wait_for("/two", 1).await.remove(0);
    verify(&to_one, &one.secret);
    verify(&to_two, &two.secret);
    assert_eq!(to_one.body, to_two.body);
    eventually("both are delivered", async || {
        let rows = api.all("/webhook-deliveries?state=delivered").await;
        (rows.len() == 2).then_some(())
    })
    .await;
}
