//! The store out of reach: 503, nothing executed, and the same key executes once it is back.

use super::{begin, whole_contacts};
use crate::harness::api::{Answer, Api, Request};
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::Wire;
use crate::harness::{Backend, DEADLINE, eventually, fresh_key, fresh_phone, on_every_fault};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

on_every_fault!(
    a_lost_database_is_503_and_then_the_same_key_executes,
    a_database_lost_under_a_handler_leaves_its_key_executed_once,
);

/// The client's `Retry-After` is checked on every answer.
#[track_caller]
fn out_of_reach(answer: Answer) {
    assert!(!answer.is_replay());
    assert_eq!(answer.status, 503, "{}", answer.describe());
    answer.problem("IDEMPOTENCY_UNAVAILABLE");
}

fn creation(api: &Api) -> Request {
    api.post("/contacts").json(&json!({"phone": fresh_phone()}))
}

async fn executes_after_recovery(request: &Request) -> Answer {
    let start = Instant::now();
    loop {
        let answer = request.clone().send().await;
        if answer.status == 503 {
            out_of_reach(answer);
        } else if answer.code().as_deref() != Some("IDEMPOTENCY_KEY_IN_PROGRESS") {
            return answer.expect(201);
        }
        assert!(start.elapsed() < DEADLINE, "the same key does not execute");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}

async fn replays(request: &Request, first: &Answer) {
    let again = request.clone().send().await.expect(201);
    assert!(again.is_replay(), "{}", again.describe());
    assert_eq!(again.body, first.body);
}

async fn wired(backend: Backend) -> TestServer {
    Setup::new(backend).await.wired().await.start().await
}

/// With Redis too: it has the finished answer, but who asks is for the database to say.
async fn a_lost_database_is_503_and_then_the_same_key_executes(backend: Backend, fault: Wire) {
    let server = wired(backend).await;
    let api = server.project("shop").await.api;
    let (finished, fresh) = (creation(&api), creation(&api));
    let first = finished.clone().send().await.expect(201);
    server.to_postgres().set(fault);
    for request in [&fresh, &finished, &fresh] {
        out_of_reach(request.clone().send().await);
    }
    let other = creation(&api).key(&fresh_key());
    out_of_reach(other.clone().send().await);
    server.to_postgres().set(Wire::Whole);
    for request in [&fresh, &other] {
        let done = executes_after_recovery(request).await;
        assert!(!done.is_replay(), "nothing was executed before");
        replays(request, &done).await;
    }
    replays(&finished, &first).await;
    assert_eq!(whole_contacts(&api).await.len(), 3);
}

/// Whether the work was done is open until the store is back; then the key tells, and keeps to it.
async fn a_database_lost_under_a_handler_leaves_its_key_executed_once(
    backend: Backend,
    fault: Wire,
) {
    let server = wired(backend).await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let lock = server.block_contact_writes().await;
    let running = begin(&server, &request).await;
    server.to_postgres().set(fault);
    lock.release().await;
    out_of_reach(running.await.expect("a client").expect("an answer"));
    server.to_postgres().set(Wire::Whole);
    let done = executes_after_recovery(&request).await;
    replays(&request, &done).await;
    assert_eq!(whole_contacts(&api).await, [done.member("id")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_stores_out_of_reach_are_503_and_then_the_same_key_executes() {
    let mut server = TestServer::start(Backend::PostgresAndRedis, &[]).await;
    let api = server.project("shop").await.api;
    let (finished, fresh) = (creation(&api), creation(&api));
    let first = finished.clone().send().await.expect(201);
    for fault in [Wire::Cut, Wire::HalfOpen] {
        server.to_postgres().set(fault);
        server.to_redis().set(fault);
        for request in [&fresh, &finished] {
            out_of_reach(request.clone().send().await);
        }
        server.to_postgres().set(Wire::Whole);
        server.to_redis().set(Wire::Whole);
        eventually("the store is back", async || {
            let answer = api.get("/contacts").send().await;
            (answer.status == 200).then_some(())
        })
        .await;
    }
    assert_eq!(whole_contacts(&api).await.len(), 1, "nothing was executed");
    let done = executes_after_recovery(&fresh).await;
    assert!(!done.is_replay());
    replays(&fresh, &done).await;
    replays(&finished, &first).await;
    server.redis().flush().await;
    eventually("Redis is used again", async || {
        replays(&fresh, &done).await;
        (server.redis().keys().await > 0).then_some(())
    })
    .await;
    assert_eq!(whole_contacts(&api).await.len(), 2);
}

/// The wire dies under connections that lie in the pool: one request finds it out, and not one for each
/// of them, five seconds and a pause after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_died_under_fifty_idle_connections_is_found_out_once() {
    const CONNECTIONS: usize = 50;
    let setup = Setup::new(Backend::Postgres).await.wired().await;
    let setup = setup.env("BOTIX_DATABASE_CONNECTIONS", "60");
    let server = setup.start().await;
    // Several, since one may have a part of the connections only.
    let projects = futures::future::join_all((0..5).map(|_| server.project("shop"))).await;
    let api = &projects[0].api;
    let lock = server.block_contact_writes().await;
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|at| tokio::spawn(creation(&projects[at % projects.len()].api).send()))
        .collect();
    let mut outside = server.outside().await;
    eventually("each has a connection", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity \
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        (outside.number(waiting).await >= 50).then_some(())
    })
    .await;
    lock.release().await;
    for client in clients {
        client.await.expect("a client").expect(201);
    }
    server.to_postgres().set(Wire::HalfOpen);
    out_of_reach(creation(api).send().await);
    server.to_postgres().set(Wire::Whole);
    executes_after_recovery(&creation(api)).await;
    assert_eq!(whole_contacts(api).await.len(), CONNECTIONS / 5 + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_write_lock_on_sqlite_is_503_and_then_the_same_key_executes() {
    let server = TestServer::start(Backend::Sqlite, &[]).await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let lock = server.block_contact_writes().await;
    out_of_reach(request.clone().send().await);
    // Reading goes on meanwhile.
    assert_eq!(api.all("/contacts").await.len(), 0);
    lock.release().await;
    let done = executes_after_recovery(&request).await;
    assert!(!done.is_replay());
    replays(&request, &done).await;
    assert_eq!(whole_contacts(&api).await.len(), 1);
}

/// The wire is cut again and again under load: also between a COMMIT and its confirmation, where
/// only the record can tell whether the work was done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_keeps_breaking_leaves_every_key_executed_once() {
    let server = wired(Backend::Postgres).await;
    let api = server.project("shop").await.api;
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (api, over) = (api.clone(), over.clone());
            tokio::spawn(async move {
                let mut ids = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let request = creation(&api);
                    ids.push(executes_after_recovery(&request).await.member("id"));
                }
                ids
            })
        })
        .collect();
    let done = async || {
        let count = api.get("/contacts/count").send().await.expect(200).json();
        count["count"].as_u64().expect("a number")
    };
    for _ in 0..6 {
        let before = done().await;
        eventually("the load is under way", async || {
            (done().await >= before + 5).then_some(())
        })
        .await;
        server.to_postgres().set(Wire::Cut);
        eventually("the store is out of reach", async || {
            let answer = api.get("/contacts").send().await;
            (answer.status == 503).then_some(())
        })
        .await;
        server.to_postgres().set(Wire::Whole);
        eventually("the store is back", async || {
            let answer = api.get("/contacts").send().await;
            (answer.status == 200).then_some(())
        })
        .await;
    }
    over.store(true, Ordering::Relaxed);
    let mut ids = Vec::new();
    for client in clients {
        ids.extend(client.await.expect("a client"));
    }
    ids.sort();
    let mut rows = whole_contacts(&api).await;
    rows.sort();
    assert_eq!(rows, ids, "one row for each key");
}
