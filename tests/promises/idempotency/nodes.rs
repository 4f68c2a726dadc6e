//! Two nodes on one store are one platform to a key.

use super::{begin, whole_contacts};
use crate::harness::server::{Setup, TestServer};
use crate::harness::{Backend, eventually, fresh_phone};
use serde_json::json;

macro_rules! on_shared_stores {
    ($($promise:ident),+ $(,)?) => {$(
        mod $promise {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() {
                super::$promise(super::Backend::Postgres).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres_and_redis() {
                super::$promise(super::Backend::PostgresAndRedis).await;
            }
        }
    )+};
}

on_shared_stores!(
    a_key_running_on_one_node_is_in_progress_on_the_other,
    a_key_sent_to_both_nodes_at_once_executes_once,
    a_key_finished_on_one_node_replays_on_the_other,
);

async fn a_key_running_on_one_node_is_in_progress_on_the_other(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let node = server.second_node().await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let lock = server.block_contact_writes().await;
    let running = begin(&server, &request).await;
    let there = request.clone().at(&node.api(&api));
    there
        .clone()
        .send()
        .await
        .expect(409)
        .problem("IDEMPOTENCY_KEY_IN_PROGRESS");
    lock.release().await;
    let first = running.await.expect("a client").expect("an answer");
    let again = there.send().await.expect(201);
    assert!(again.is_replay());
    assert_eq!(again.body, first.expect(201).body);
}

async fn a_key_sent_to_both_nodes_at_once_executes_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let node = server.second_node().await;
    let api = server.project("shop").await.api;
    for round in 1..=5 {
        let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
        let clients: Vec<_> = (0..20)
            .map(|client| {
                let request = if client % 2 == 0 {
                    request.clone()
                } else {
                    request.clone().at(&node.api(&api))
                };
                tokio::spawn(request.send())
            })
            .collect();
        let mut executions = 0;
        for client in clients {
            let answer = client.await.expect("a client");
            match answer.status.as_u16() {
                201 => executions += usize::from(!answer.is_replay()),
                _ => drop(answer.problem("IDEMPOTENCY_KEY_IN_PROGRESS")),
            }
        }
        assert_eq!(executions, 1, "one of them executed");
        assert_eq!(whole_contacts(&api).await.len(), round);
    }
}

async fn a_key_finished_on_one_node_replays_on_the_other(backend: Backend) {
    let server = Setup::new(backend).await.start().await;
    let node = server.second_node().await;
    let api = server.project("shop").await.api;
    let request = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let first = request.clone().send().await.expect(201);
    let there = request.at(&node.api(&api));
    let again = eventually("the other node replays", async || {
        let answer = there.clone().send().await;
        answer.status.is_success().then_some(answer)
    })
    .await;
    assert!(again.is_replay());
    assert_eq!(again.body, first.body);
}
