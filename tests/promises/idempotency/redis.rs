//! With Redis in front: it answers fast, decides nothing, and may lose its memory or its life at any
//! moment without a second execution, a stuck key or a flooded log.

use super::{begin, whole_contacts};
use crate::harness::api::{Answer, Api, Request};
use crate::harness::redis::Redis;
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::{TcpProxy, Wire};
use crate::harness::{Backend, DEADLINE, eventually, fresh_phone};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Short enough to wait for its end.
const LEASE: (&str, &str) = ("BOTIX_IDEMPOTENCY__LEASE", "2s");

async fn with_redis() -> (TestServer, TcpProxy) {
    let setup = Setup::new(Backend::Postgres).await;
    let (setup, wire) = setup.with_redis(Redis::start().await).await;
    (setup.env(LEASE.0, LEASE.1).start().await, wire)
}

/// How many copies of answers Redis holds.
const ANSWERS: &str = "EVAL \"local n = 0 for _, k in ipairs(redis.call('KEYS', 'botix:idempotency:*')) do \
     if string.sub(redis.call('GET', k), 1, 7) == 'answer:' then n = n + 1 end end return n\" 0";

fn creation(api: &Api) -> Request {
    api.post("/contacts").json(&json!({"phone": fresh_phone()}))
}

/// The answer to a request that is repeated until it is no longer in progress.
async fn decided(request: &Request) -> Answer {
    let start = Instant::now();
    loop {
        let answer = request.clone().send().await;
        if answer.code().as_deref() != Some("IDEMPOTENCY_KEY_IN_PROGRESS") {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "the key is stuck");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}

#[track_caller]
fn replays(answer: Answer, first: &Answer) {
    let answer = answer.expect(first.status.as_u16());
    assert!(answer.is_replay(), "{}", answer.describe());
    assert_eq!(answer.body, first.body);
    for described in ["content-type", "location"] {
        assert_eq!(answer.header(described), first.header(described));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finished_answer_is_replayed_without_its_record() {
    let (mut server, _wire) = with_redis().await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let first = request.clone().send().await.expect(201);
    eventually("Redis has the answer", async || {
        let held = server.redis().command(ANSWERS).await;
        (held == ":1").then_some(())
    })
    .await;
    replays(request.clone().send().await, &first);
    // Whoever needed the table would wait until the test is over.
    let mut outside = server.outside().await;
    outside.execute("BEGIN").await;
    outside
        .execute("LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE")
        .await;
    replays(request.clone().send().await, &first);
    let other = api.post("/contacts").json(&json!({"phone": fresh_phone()}));
    let key = crate::harness::fresh_key();
    let one = creation(&api).key(&key);
    outside.release().await;
    one.send().await.expect(201);
    other
        .key(&key)
        .send()
        .await
        .problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_lost_its_memory_costs_no_second_execution() {
    let (mut server, _wire) = with_redis().await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let first = request.clone().send().await.expect(201);
    server.redis().flush().await;
    replays(request.clone().send().await, &first);
    server.redis().kill9();
    replays(request.clone().send().await, &first);
    server.redis().restart().await;
    replays(request.clone().send().await, &first);
    assert_eq!(whole_contacts(&api).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_lost_while_a_request_runs_lets_no_second_one_run() {
    let (mut server, _wire) = with_redis().await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let node = server.second_node().await;
    let there = creation_at(&node.api(&api), &request);
    let lock = server.block_contact_writes().await;
    let running = begin(&server, &request).await;
    server.redis().flush().await;
    // The lease is gone; the lock in SQL is not.
    there
        .clone()
        .send()
        .await
        .problem("IDEMPOTENCY_KEY_IN_PROGRESS");
    lock.release().await;
    let first = running
        .await
        .expect("a client")
        .expect("an answer")
        .expect(201);
    assert!(!first.is_replay());
    replays(decided(&there).await, &first);
    assert_eq!(whole_contacts(&api).await.len(), 1);
}

/// The same request, to another node.
fn creation_at(api: &Api, request: &Request) -> Request {
    request.clone().at(api)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_starts_and_works_while_redis_is_away_and_uses_it_once_it_is_there() {
    let mut redis = Redis::start().await;
    redis.kill9();
    let setup = Setup::new(Backend::Postgres).await;
    let (setup, _wire) = setup.with_redis(redis).await;
    let mut server = setup.start().await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let first = request.clone().send().await.expect(201);
    replays(request.clone().send().await, &first);
    server.redis().restart().await;
    eventually("Redis is used", async || {
        replays(request.clone().send().await, &first);
        (server.redis().keys().await > 0).then_some(())
    })
    .await;
}

/// Redis is flushed, killed, paused, failed over, cut off and forgotten about under load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_keeps_failing_leaves_every_key_executed_once_and_a_quiet_log() {
    let (mut server, wire) = with_redis().await;
    let api = server.project("shop").await.api;
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (api, over) = (api.clone(), over.clone());
            tokio::spawn(async move {
                let mut ids = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let request = creation(&api);
                    // Redis is none of the clients' business: every first answer is the real one.
                    let first = request.clone().send().await.expect(201);
                    assert!(!first.is_replay());
                    replays(decided(&request).await, &first);
                    ids.push(first.member("id"));
                }
                ids
            })
        })
        .collect();
    let grown = async |api: &Api| {
        let count =
            async || api.get("/contacts/count").send().await.expect(200).json()["count"].as_u64();
        let before = count().await;
        eventually("the load goes on", async || {
            (count().await > before.map(|count| count + 20)).then_some(())
        })
        .await;
    };
    let is_used = async |server: &mut TestServer| {
        server.redis().flush().await;
        eventually("Redis is used again", async || {
            (server.redis().keys().await > 0).then_some(())
        })
        .await;
    };
    grown(&api).await;
    server.redis().flush().await;
    grown(&api).await;
    server.redis().kill9();
    grown(&api).await;
    server.redis().restart().await;
    is_used(&mut server).await;
    server.redis().pause();
    grown(&api).await;
    server.redis().resume();
    is_used(&mut server).await;
    // As after a failover that left the address with the old primary: it reads, and refuses to write.
    assert_eq!(server.redis().command("REPLICAOF 127.0.0.1 1").await, "+OK");
    grown(&api).await;
    assert_eq!(server.redis().command("REPLICAOF NO ONE").await, "+OK");
    is_used(&mut server).await;
    for fault in [Wire::Cut, Wire::Frozen, Wire::Blackhole, Wire::HalfOpen] {
        wire.set(fault);
        grown(&api).await;
        wire.set(Wire::Whole);
        is_used(&mut server).await;
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
    let log = server.stderr();
    let told = log.lines().filter(|line| line.contains("Redis")).count();
    let failures = 7;
    assert!(told > 0, "the log says that Redis was away");
    // Each failure opens the circuit; an answer on its way may open it once or twice more.
    assert!(told <= failures * 8, "{told} lines for {failures} failures");
    assert!(
        told * 4 < rows.len(),
        "{told} lines for {} requests",
        rows.len()
    );
}

/// A holder that is stopped outlives its lease and its session in SQL; the next one executes; the first
/// one, let on, finds that it may not commit, answers what is true, and takes nothing from the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_outlives_its_lease_does_not_commit_and_takes_no_claim_of_the_next() {
    let (mut server, _wire) = with_redis().await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let node = server.second_node().await;
    let there = creation_at(&node.api(&api), &request);
    let lock = server.block_contact_writes().await;
    let outlived = begin(&server, &request).await;
    server.pause();
    lock.release().await;
    eventually("the lease ends", async || {
        let held = server.redis().command("KEYS botix:idempotency:*").await;
        (held == "*0").then_some(())
    })
    .await;
    // Its transaction is still open, and so is its lock.
    there
        .clone()
        .send()
        .await
        .problem("IDEMPOTENCY_KEY_IN_PROGRESS");
    let mut outside = server.outside().await;
    outside
        .execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND state = 'idle in transaction'",
        )
        .await;
    let first = decided(&there).await.expect(201);
    assert!(!first.is_replay(), "the first holder had not committed");
    server.resume();
    let late = outlived.await.expect("a client").expect("an answer");
    match late.status.as_u16() {
        201 => replays(late, &first),
        _ => assert_eq!(late.status, 503, "{}", late.describe()),
    }
    replays(there.clone().send().await, &first);
    replays(decided(&request).await, &first);
    assert_eq!(whole_contacts(&api).await, [first.member("id")]);
}

/// A process that dies leaves its lease; until that ends nobody runs, and then somebody does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_a_killed_process_ends_by_itself() {
    let (mut server, _wire) = with_redis().await;
    let api = server.project("shop").await.api;
    let request = creation(&api);
    let lock = server.block_contact_writes().await;
    let dying = begin(&server, &request).await;
    server.kill9();
    assert!(dying.await.expect("a client").is_err());
    lock.release().await;
    server.restart().await;
    let first = decided(&request).await.expect(201);
    assert!(!first.is_replay());
    replays(request.send().await, &first);
    assert_eq!(whole_contacts(&api).await.len(), 1);
}
