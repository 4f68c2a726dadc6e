//! The rate limit: per project, told on every answer, and one for all nodes where they share a Redis.

use crate::harness::api::Api;
use crate::harness::server::{Setup, TestServer};
use crate::harness::{Backend, eventually, on_every_store};

on_every_store!(
    a_project_over_its_limit_is_told_when_to_come_back,
    what_was_used_comes_back,
);

async fn a_project_over_its_limit_is_told_when_to_come_back(backend: Backend) {
    let overrides = [
        ("BOTIX_RATE_LIMIT__REQUESTS", "3"),
        ("BOTIX_RATE_LIMIT__WINDOW", "1h"),
    ];
    let server = TestServer::start(backend, &overrides).await;
    let project = server.project("busy").await;
    let (reader, _) = server.scoped(&project, "read").await;
    let busy = project.api;
    let quiet = server.project("quiet").await.api;
    for remaining in (0..3).rev() {
        let answer = busy.get("/contacts").send().await.expect(200);
        assert_eq!(
            answer.header("ratelimit-policy"),
            Some("\"default\";q=3;w=3600")
        );
        let standing = answer.header("ratelimit").expect("where it stands");
        assert!(
            standing.starts_with(&format!("\"default\";r={remaining};t=")),
            "{standing}"
        );
        // What lacks a scope is told so too, and takes nothing.
        let forbidden = reader.post("/contacts").send().await;
        let standing = forbidden.header("ratelimit").expect("where it stands");
        assert!(
            standing.starts_with(&format!("\"default\";r={remaining};t=")),
            "{standing}"
        );
        forbidden.problem("FORBIDDEN");
    }
    // The limit comes before the key: this has none.
    let refused = busy.post("/contacts").without_key().send().await;
    assert!(refused.header("ratelimit").is_some());
    let wait: u64 = refused
        .header("retry-after")
        .and_then(|seconds| seconds.parse().ok())
        .expect("seconds");
    assert!((1..=1200).contains(&wait), "{wait}");
    refused.problem("RATE_LIMITED");
    quiet.get("/contacts").send().await.expect(200);
}

async fn what_was_used_comes_back(backend: Backend) {
    let overrides = [
        ("BOTIX_RATE_LIMIT__REQUESTS", "2"),
        ("BOTIX_RATE_LIMIT__WINDOW", "2s"),
    ];
    let server = TestServer::start(backend, &overrides).await;
    let api = server.project("shop").await.api;
    let mut refusals = 0;
    eventually("a refused project is let in again", async || {
        let answer = api.get("/contacts").send().await;
        if answer.status == 429 {
            refusals += 1;
            assert_eq!(answer.header("retry-after"), Some("1"));
            return None;
        }
        (refusals > 0).then_some(answer.expect(200))
    })
    .await;
}

/// How many of ten requests, every second one to another node, a limit of five lets in.
async fn let_in(backend: Backend) -> usize {
    let setup = Setup::new(backend).await;
    let setup = setup
        .env("BOTIX_RATE_LIMIT__REQUESTS", "5")
        .env("BOTIX_RATE_LIMIT__WINDOW", "1h");
    let server = setup.start().await;
    let node = server.second_node().await;
    let here = server.project("shop").await.api;
    let there = node.api(&here);
    let mut answered = 0;
    for request in 0..10 {
        let api = if request % 2 == 0 { &here } else { &there };
        let answer = api.get("/contacts").send().await;
        if answer.status == 200 {
            answered += 1;
        } else {
            answer.problem("RATE_LIMITED");
        }
    }
    answered
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_a_redis_count_together() {
    assert_eq!(let_in(Backend::PostgresAndRedis).await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_a_redis_count_each_for_itself() {
    assert_eq!(let_in(Backend::Postgres).await, 10);
}

/// The nodes go on counting by themselves when Redis goes, and together when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_away_lets_every_request_be_counted_in_the_process() {
    let overrides = [
        ("BOTIX_RATE_LIMIT__REQUESTS", "3"),
        ("BOTIX_RATE_LIMIT__WINDOW", "1h"),
    ];
    let mut server = TestServer::start(Backend::PostgresAndRedis, &overrides).await;
    let api = server.project("shop").await.api;
    server.redis().kill9();
    for remaining in (0..3).rev() {
        let answer = api.get("/contacts").send().await.expect(200);
        let standing = answer.header("ratelimit").expect("where it stands");
        assert!(
            standing.starts_with(&format!("\"default\";r={remaining};t=")),
            "{standing}"
        );
    }
    api.get("/contacts").send().await.problem("RATE_LIMITED");
    server.redis().restart().await;
    eventually("Redis counts anew", async || {
        (api.get("/contacts").send().await.status == 200).then_some(())
    })
    .await;
}

/// What stands under the keys of one project is nobody else's business, and mends itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_key_in_redis_costs_nobody_else_anything() {
    let overrides = [
        ("BOTIX_RATE_LIMIT__REQUESTS", "3"),
        ("BOTIX_RATE_LIMIT__WINDOW", "1h"),
    ];
    let mut server = TestServer::start(Backend::PostgresAndRedis, &overrides).await;
    let damaged = server.project("damaged").await;
    let other = server.project("other").await.api;
    let key = format!("botix:rate:{}", damaged.id);
    let remaining = async |api: &Api, remaining: &str| {
        let answer = api.get("/contacts").send().await.expect(200);
        let standing = answer
            .header("ratelimit")
            .expect("where it stands")
            .to_owned();
        assert!(
            standing.starts_with(&format!("\"default\";r={remaining};")),
            "{standing}"
        );
    };
    remaining(&other, "2").await;
    server.redis().command(&format!("SET {key} garbage")).await;
    remaining(&damaged.api, "2").await;
    // As a clock that was set back leaves it: far ahead of the window.
    server
        .redis()
        .command(&format!("SET {key} 9000000000000000"))
        .await;
    let refused = damaged.api.get("/contacts").send().await;
    let wait = refused
        .header("retry-after")
        .and_then(|wait| wait.parse::<u64>().ok());
    assert!(wait.is_some_and(|wait| wait <= 3600), "{wait:?}");
    refused.problem("RATE_LIMITED");
    server.redis().command(&format!("DEL {key}")).await;
    server.redis().command(&format!("RPUSH {key} list")).await;
    damaged.api.get("/contacts").send().await.expect(200);
    // Counted in Redis all along: in the process it would begin anew.
    remaining(&other, "1").await;
    assert!(
        !server.stderr().contains("out of reach"),
        "{}",
        server.stderr()
    );
}
