//! A cursor belongs to its project, its list and its filters, and not a bit of it can be changed.

use super::{contacts, ids, next_cursor};
use crate::harness::api::Api;
use crate::harness::receiver::Receiver;
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, on_every_store};
use reqwest::Method;
use serde_json::json;

on_every_store!(
    a_changed_cursor_is_refused,
    a_cursor_of_another_project_is_refused,
    a_cursor_of_another_list_is_refused,
    a_cursor_of_other_filters_is_refused,
);

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

async fn cursor_of(api: &Api, list: &str) -> String {
    let join = if list.contains('?') { '&' } else { '?' };
    let page = api
        .get(&format!("{list}{join}cursor_limit=1"))
        .send()
        .await
        .expect(200);
    next_cursor(&page).unwrap_or_else(|| panic!("{list} has a second page"))
}

async fn a_changed_cursor_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    contacts(&api, 2).await;
    let cursor = cursor_of(&api, "/contacts").await;
    let mut bent = Vec::new();
    for place in 0..cursor.len() {
        // Every single bit of the six that a character stands for, the unused ones at the end too.
        let value = ALPHABET
            .iter()
            .position(|c| *c == cursor.as_bytes()[place])
            .expect("URL-safe base64");
        for bit in 0..6 {
            let mut other = cursor.clone().into_bytes();
            other[place] = ALPHABET[value ^ (1 << bit)];
            bent.push(String::from_utf8(other).expect("ASCII"));
        }
    }
    for cut in [1, 2, 3, 4, cursor.len() / 2, cursor.len() - 1] {
        bent.push(cursor[cut..].to_owned());
        bent.push(cursor[..cursor.len() - cut].to_owned());
    }
    for added in ["A", "=", "==", "%3D", ".", "%00", "%20", "%0A", "+"] {
        bent.push(format!("{cursor}{added}"));
        bent.push(format!("{added}{cursor}"));
    }
    bent.push(format!("{cursor}{cursor}"));
    bent.push(cursor.to_uppercase());
    for other in [
        "",
        "abc",
        "null",
        "e30",
        "eyJ2IjoxfQ",
        "%FF",
        "%F0%9F%99%82",
    ] {
        bent.push(other.to_owned());
    }
    bent.push("A".repeat(6_000));
    for other in bent {
        let page = api.get(&format!("/contacts?cursor={other}"));
        page.send().await.problem("INVALID_CURSOR");
    }
    api.get(&format!("/contacts?cursor={cursor}"))
        .send()
        .await
        .expect(200);
}

async fn a_cursor_of_another_project_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let ours = server.project("ours").await.api;
    let theirs = server.project("theirs").await.api;
    contacts(&ours, 2).await;
    contacts(&theirs, 2).await;
    let cursor = cursor_of(&ours, "/contacts").await;
    let page = theirs.get(&format!("/contacts?cursor={cursor}"));
    page.send().await.problem("INVALID_CURSOR");
}

async fn a_cursor_of_another_list_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for path in ["/a", "/b"] {
        receiver.always(path, crate::harness::receiver::Reply::status(403));
        let endpoint = json!({"url": receiver.url(path)});
        api.post("/webhook-endpoints")
            .json(&endpoint)
            .send()
            .await
            .expect(201);
    }
    contacts(&api, 2).await;
    let mut bins = Vec::new();
    for _ in 0..2 {
        bins.push(api.post("/inspector/bins").send().await.expect(201).json());
    }
    for bin in &bins {
        for _ in 0..2 {
            let url = bin["url"].as_str().expect("a URL");
            api.outside(Method::POST, url).send().await.expect_success();
        }
    }
    eventually("four dead letters", async || {
        (api.all("/webhook-dead-letters").await.len() == 4).then_some(())
    })
    .await;
    let requests = |bin: &serde_json::Value| {
        format!(
            "/inspector/bins/{}/requests",
            bin["id"].as_str().expect("an id")
        )
    };
    let lists = [
        "/contacts".to_owned(),
        "/events".to_owned(),
        "/webhook-endpoints".to_owned(),
        "/webhook-deliveries".to_owned(),
        "/webhook-attempts".to_owned(),
        "/webhook-dead-letters".to_owned(),
        "/inspector/bins".to_owned(),
        requests(&bins[0]),
        requests(&bins[1]),
    ];
    for from in &lists {
        let cursor = cursor_of(&api, from).await;
        for to in &lists {
            let answer = api.get(&format!("{to}?cursor={cursor}")).send().await;
            if from == to {
                answer.expect(200);
            } else {
                let shown = answer.describe();
                assert_eq!(
                    answer.code().as_deref(),
                    Some("INVALID_CURSOR"),
                    "{from} in {shown}"
                );
            }
        }
    }
}

async fn a_cursor_of_other_filters_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let endpoint = json!({"url": receiver.url("/hook")});
    let endpoint = api
        .post("/webhook-endpoints")
        .json(&endpoint)
        .send()
        .await
        .expect(201);
    let endpoint = endpoint.member("id");
    contacts(&api, 3).await;
    eventually("three deliveries", async || {
        let rows = api.all("/webhook-deliveries?state=delivered").await;
        (rows.len() == 3).then_some(())
    })
    .await;
    let deliveries = "/webhook-deliveries";
    let attempts = "/webhook-attempts";
    for (list, filters) in [
        (deliveries, "state=delivered"),
        (deliveries, "event_type=contact.created"),
        (deliveries, &format!("endpoint_id={endpoint}")),
        (attempts, "status=succeeded"),
        (attempts, "event_type=contact.created"),
        (attempts, &format!("endpoint_id={endpoint}")),
    ] {
        let filtered = format!("{list}?{filters}");
        let cursor = cursor_of(&api, &filtered).await;
        api.get(&format!("{filtered}&cursor={cursor}"))
            .send()
            .await
            .expect(200);
        let without = api.get(&format!("{list}?cursor={cursor}"));
        without.send().await.problem("INVALID_CURSOR");
        let all = cursor_of(&api, list).await;
        let with = api.get(&format!("{filtered}&cursor={all}"));
        with.send().await.problem("INVALID_CURSOR");
    }
    let delivered = cursor_of(&api, "/webhook-deliveries?state=delivered").await;
    let page = api.get(&format!(
        "/webhook-deliveries?state=dead&cursor={delivered}"
    ));
    page.send().await.problem("INVALID_CURSOR");
}

/// Key 1 gives way to key 2 on nodes that change one after the other, in three steps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_keys_on_many_nodes_breaks_no_walk() {
    let server = TestServer::start(Backend::Postgres, &[]).await;
    let api = server.project("shop").await.api;
    let mut expected = contacts(&api, 12).await;
    expected.reverse();
    let node = async |keys: &str| {
        let node = server
            .second_node_with(&[("BOTIX_CURSORS__KEYS", keys)])
            .await;
        (node.api(&api), node)
    };
    let steps = [
        node("1").await,
        node("1,2").await,
        node("2,1").await,
        node("2").await,
    ];
    let mut seen = Vec::new();
    let mut cursor = String::new();
    // In each step of the change a walk meets nodes of that step and of the one before.
    for (at, _) in [0, 1, 0, 1, 2, 1, 2, 3, 2, 3, 3, 3].map(|step: usize| &steps[step]) {
        let page = at.get(&format!("/contacts?cursor_limit=1{cursor}"));
        let answer = page.send().await.expect(200);
        seen.extend(ids(&answer.json()));
        if let Some(next) = next_cursor(&answer) {
            cursor = format!("&cursor={next}");
        }
    }
    assert_eq!(seen, expected);
    let (first, last) = (&steps[0].0, &steps[3].0);
    let old = first
        .get("/contacts?cursor_limit=1")
        .send()
        .await
        .expect(200);
    let old = next_cursor(&old).expect("a cursor");
    last.get(&format!("/contacts?cursor={old}"))
        .send()
        .await
        .expect(400)
        .problem("INVALID_CURSOR");
}
