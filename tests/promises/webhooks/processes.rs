//! Several processes on one store: of one role or both, one beside another or after it.

use super::signals::{gauge, gauge_at};
use super::{attempts_of, delivery_in, endpoint_at, numbers, publish};
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, on_both_databases};
use serde_json::json;
use std::time::Duration;

on_both_databases!(a_worker_of_its_own_delivers_what_an_api_node_accepted);

async fn a_worker_of_its_own_delivers_what_an_api_node_accepted(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    server.stop().await;
    server.restart_with(&["--roles", "api"]).await;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let rows = api.all("/webhook-deliveries").await;
    assert_eq!(rows[0]["state"], "pending");
    assert_eq!(receiver.requests().len(), 0);
    let _worker = server.second_process(&["--roles", "worker"]);
    receiver.wait_for("/hook", 1).await;
    delivery_in(&api, &event, &endpoint.id, "delivered").await;
}

/// Whatever roles a process has, whoever watches it learns how the queue stands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_with_one_role_tell_of_the_queue() {
    let mut server = TestServer::start(Backend::Postgres, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    server.stop().await;
    server.restart_with(&["--roles", "api"]).await;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    gauge(&server, "botix_webhook_queue_depth", |value| value >= 1.0).await;

    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = free.local_addr().expect("its address").to_string();
    drop(free);
    let monitor = [("BOTIX_MONITOR_LISTEN", &*address)];
    let _worker = server.second_process_with(&["--roles", "worker"], &monitor);
    let base = format!("http://{address}");
    delivery_in(&api, &event, &endpoint.id, "delivered").await;
    gauge_at(&base, "botix_webhook_queue_depth", |value| value == 0.0).await;
    let succeeded = "botix_webhook_attempts_total{status=\"succeeded\"}";
    gauge_at(&base, succeeded, |value| value >= 1.0).await;
    for (path, status) in [("healthz", 200), ("readyz", 200), ("public/v1/events", 404)] {
        let answer = reqwest::get(format!("{base}/{path}")).await;
        assert_eq!(answer.expect("an answer").status(), status, "{path}");
    }
}

/// Nobody else works on the file, as the system knows: nothing has to show by its silence that it is dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_process_left_on_sqlite_goes_out_as_the_next_one_starts() {
    let mut server = TestServer::start(Backend::Sqlite, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::Hang]);
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 1).await;
    server.kill9();
    server.restart().await;
    // By silence alone it would take nine seconds at least.
    let again = receiver.wait_for("/hook", 2);
    let again = tokio::time::timeout(Duration::from_secs(8), again).await;
    assert_eq!(numbers(&again.expect("at once")), ["1", "2"]);
    delivery_in(&api, &event, &hook.id, "delivered").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_beside_another_on_sqlite_leaves_it_what_it_is_at() {
    let server = TestServer::start(Backend::Sqlite, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let reply = Reply::status(200).after(Duration::from_secs(5));
    receiver.script("/hook", [reply]);
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 1).await;
    let _beside = server.second_node().await;
    let delivery = delivery_in(&api, &event, &hook.id, "delivered").await;
    assert_eq!(attempts_of(&api, &delivery).await.len(), 1);
    assert_eq!(receiver.requests_to("/hook").len(), 1);
}
