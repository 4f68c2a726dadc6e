//! `kill -9` at any moment leaves the answer and the work, or neither.

use super::{begin, whole_contacts};
use crate::harness::api::{Answer, Request};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, eventually_within, fresh_phone, on_every_store};
use serde_json::json;
use std::sync::{Arc, Mutex};
use std::time::Duration;

on_every_store!(
    a_kill_in_the_middle_of_a_handler_leaves_nothing,
    kills_under_load_leave_every_key_executed_once,
);

/// A key may be held for as long as a lease, never longer.
const LEASE: Duration = Duration::from_secs(2);
const SHORT_LEASE: (&str, &str) = ("BOTIX_IDEMPOTENCY__LEASE", "2s");

/// Retries as a client would: while the key is in progress it asks again.
async fn retried(request: &Request) -> Answer {
    eventually_within(
        LEASE + Duration::from_secs(58),
        "the key is free",
        async || {
            let answer = request.clone().send().await;
            (answer.code().as_deref() != Some("IDEMPOTENCY_KEY_IN_PROGRESS")).then_some(answer)
        },
    )
    .await
}

async fn a_kill_in_the_middle_of_a_handler_leaves_nothing(backend: Backend) {
    let mut server = TestServer::start(backend, &[SHORT_LEASE]).await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let lock = server.block_contact_writes().await;
    let dying = begin(&server, &request).await;
    server.kill9();
    assert!(dying.await.expect("an end").is_err(), "no answer came");
    lock.release().await;
    server.restart().await;
    assert_eq!(whole_contacts(&api).await.len(), 0, "neither row nor event");
    let first = retried(&request).await.expect(201);
    assert!(!first.is_replay(), "it had not been executed");
    let again = request.send().await.expect(201);
    assert!(again.is_replay());
    assert_eq!(again.body, first.body);
    assert_eq!(whole_contacts(&api).await, [first.member("id")]);
}

struct Sent {
    request: Request,
    answer: Option<Answer>,
}

async fn kills_under_load_leave_every_key_executed_once(backend: Backend) {
    const ROUNDS: u32 = 6;
    const CLIENTS: u32 = 8;
    let mut server = TestServer::start(backend, &[SHORT_LEASE]).await;
    let api = server.project("shop").await.api;
    let mut ids = Vec::new();
    for _ in 0..ROUNDS {
        let sent: Arc<Mutex<Vec<Sent>>> = Arc::default();
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let (api, sent) = (api.clone(), sent.clone());
                tokio::spawn(async move {
                    loop {
                        let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
                        let answer = request.clone().try_send().await.ok();
                        let over = answer.is_none();
                        sent.lock()
                            .expect("the list")
                            .push(Sent { request, answer });
                        if over {
                            return;
                        }
                    }
                })
            })
            .collect();
        let enough = rand::random::<u32>() as usize % 40 + 5;
        eventually("the load is under way", async || {
            (sent.lock().expect("the list").len() >= enough).then_some(())
        })
        .await;
        server.kill9();
        for client in clients {
            client.await.expect("a client");
        }
        server.restart().await;
        let sent = std::mem::take(&mut *sent.lock().expect("the list"));
        for Sent { request, answer } in sent {
            let retry = retried(&request).await.expect(201);
            if let Some(answer) = answer {
                assert!(retry.is_replay(), "what was answered is kept");
                assert_eq!(retry.body, answer.expect(201).body);
            }
            ids.push(retry.member("id"));
        }
    }
    let mut rows = whole_contacts(&api).await;
    rows.sort();
    ids.sort();
    assert_eq!(rows, ids, "one row for each key");
}
