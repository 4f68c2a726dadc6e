//! The store out of reach: 503, nothing executed, and the same key executes once it is back.

use super::whole_contacts;
use crate::harness::api::{Answer, Request};
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::Wire;
use crate::harness::{Backend, eventually, fresh_phone};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[track_caller]
fn out_of_reach(answer: Answer) {
    assert!(!answer.is_replay());
    assert_eq!(answer.status, 503, "{}", answer.describe());
    let code = answer.code();
    assert!(
        matches!(
            code.as_deref(),
            Some("IDEMPOTENCY_UNAVAILABLE" | "UNAVAILABLE")
        ),
        "{}",
        answer.describe()
    );
}

async fn executes_after_recovery(request: Request) -> Answer {
    eventually("the same key executes", async || {
        let answer = request.clone().send().await;
        let busy = answer.code().as_deref() == Some("IDEMPOTENCY_KEY_IN_PROGRESS");
        (answer.status != 503 && !busy).then_some(answer)
    })
    .await
    .expect(201)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_wire_to_postgres_is_503_and_then_the_key_executes() {
    let (setup, wire) = Setup::new(Backend::Postgres).await.over_a_wire().await;
    let server = setup.start().await;
    let api = server.project("shop").await.api;
    api.post("/contacts")
        .json(&json!({"phone": fresh_phone()}))
        .send()
        .await
        .expect(201);
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    wire.set(Wire::Cut);
    for _ in 0..3 {
        out_of_reach(request.clone().send().await);
    }
    wire.set(Wire::Whole);
    let done = executes_after_recovery(request.clone()).await;
    assert!(!done.is_replay(), "nothing was executed before");
    assert!(request.send().await.expect(201).is_replay());
    assert_eq!(whole_contacts(&api).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_wire_to_postgres_is_503_and_then_the_key_executes() {
    let (setup, wire) = Setup::new(Backend::Postgres).await.over_a_wire().await;
    let server = setup.start().await;
    let api = server.project("shop").await.api;
    api.post("/contacts")
        .json(&json!({"phone": fresh_phone()}))
        .send()
        .await
        .expect(201);
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    wire.set(Wire::Frozen);
    out_of_reach(request.clone().send().await);
    wire.set(Wire::Whole);
    executes_after_recovery(request.clone()).await;
    assert!(request.send().await.expect(201).is_replay());
    assert_eq!(whole_contacts(&api).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_write_lock_on_sqlite_is_503_and_then_the_key_executes() {
    let server = TestServer::start(Backend::Sqlite, &[]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let lock = server.block_contact_writes().await;
    out_of_reach(request.clone().send().await);
    // Reading goes on meanwhile.
    assert_eq!(api.all("/contacts").await.len(), 0);
    lock.release().await;
    let done = executes_after_recovery(request.clone()).await;
    assert!(!done.is_replay());
    assert!(request.send().await.expect(201).is_replay());
    assert_eq!(whole_contacts(&api).await.len(), 1);
}

/// The wire is cut again and again under load: also between a COMMIT and its confirmation, where
/// only the record can tell whether the work was done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_keeps_breaking_leaves_every_key_executed_once() {
    let (setup, wire) = Setup::new(Backend::Postgres).await.over_a_wire().await;
    let server = setup.start().await;
    let api = server.project("shop").await.api;
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (api, over) = (api.clone(), over.clone());
            tokio::spawn(async move {
                let mut sent = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
                    let answer = request.clone().send().await;
                    if answer.status != 201 {
                        out_of_reach(answer);
                    }
                    sent.push(request);
                }
                sent
            })
        })
        .collect();
    for _ in 0..6 {
        let before = api.all("/contacts").await.len();
        eventually("the load is under way", async || {
            (api.all("/contacts").await.len() >= before + 5).then_some(())
        })
        .await;
        wire.set(Wire::Cut);
        eventually("the store is out of reach", async || {
            let answer = api.get("/contacts").send().await;
            (answer.status == 503).then_some(())
        })
        .await;
        wire.set(Wire::Whole);
        eventually("the store is back", async || {
            let answer = api.get("/contacts").send().await;
            (answer.status == 200).then_some(())
        })
        .await;
    }
    over.store(true, Ordering::Relaxed);
    let mut ids = Vec::new();
    for client in clients {
        for request in client.await.expect("a client") {
            ids.push(executes_after_recovery(request).await.member("id"));
        }
    }
    ids.sort();
    let mut rows = whole_contacts(&api).await;
    rows.sort();
    assert_eq!(rows, ids, "one row for each key");
}
