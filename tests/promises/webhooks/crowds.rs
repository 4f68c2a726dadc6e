//! Endpoints with more due deliveries than there is room for: nobody else waits for them, their own wait for
//! nothing but room, and no process's end makes them wait longer.

use super::{SHORT_LADDER, attempts_of, delivery_in, endpoint_at, numbers, publish};
use crate::harness::api::Api;
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::{TcpProxy, Wire};
use crate::harness::{Backend, eventually, on_both_databases};
use serde_json::json;
use std::collections::HashSet;
use std::time::Duration;

on_both_databases!(
    deliveries_that_wait_for_room_go_out_as_it_comes,
    what_waits_for_room_survives_a_kill,
    what_was_not_begun_is_not_interrupted,
    retries_of_others_do_not_stand_behind_a_crowd,
    fresh_ones_go_before_those_that_were_tried,
    a_resumption_leaves_no_old_jobs_in_the_way,
);

const TWO_PLACES: (&str, &str) = ("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "2");

/// Few slots in all, so that fewer are fetched at a time than wait, and enough for two at a slow endpoint.
const SIXTEEN_SLOTS: (&str, &str) = ("BOTIX_WEBHOOKS__CONCURRENCY", "16");

async fn publish_many(api: &Api, count: usize) -> HashSet<String> {
    let publishing = (0..count).map(|_| publish(api, "order.paid", json!({})));
    futures::future::join_all(publishing)
        .await
        .into_iter()
        .collect()
}

/// Waits until all of a project's deliveries are delivered, after one attempt each.
async fn all_at_once(api: &Api, count: usize) {
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == count).then_some(())
    })
    .await;
    let attempts = api.all("/webhook-attempts").await;
    assert_eq!(attempts.len(), count, "waiting for room is no attempt");
}

async fn deliveries_that_wait_for_room_go_out_as_it_comes(backend: Backend) {
    let server = TestServer::start(backend, &[TWO_PLACES, SIXTEEN_SLOTS]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let other = server.project("other").await.api;
    receiver.always("/slow", Reply::Hang);
    endpoint_at(&api, &receiver.url("/slow")).await;
    endpoint_at(&other, &receiver.url("/quick")).await;
    let events = publish_many(&api, 100).await;
    receiver.wait_for("/slow", 2).await;
    publish_many(&other, 20).await;
    receiver.wait_for("/quick", 20).await;
    assert_eq!(receiver.requests_to("/slow").len(), 2);
    // It answers from now on; the two that hang go on hanging.
    receiver.always("/slow", Reply::status(200));
    let arrived = eventually("those that waited arrive", async || {
        let arrived: HashSet<_> = receiver
            .requests_to("/slow")
            .iter()
            .map(|request| request.header("webhook-id").to_owned())
            .collect();
        (arrived.len() == 100).then_some(arrived)
    })
    .await;
    assert_eq!(arrived, events);
    let twice = receiver.requests_to("/slow").len();
    assert!(
        twice <= 102,
        "each once, but for the two that hung: {twice}"
    );
    all_at_once(&other, 20).await;
}

async fn what_waits_for_room_survives_a_kill(backend: Backend) {
    let mut server = TestServer::start(backend, &[TWO_PLACES, SIXTEEN_SLOTS]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always(
        "/hook",
        Reply::status(200).after(Duration::from_millis(200)),
    );
    endpoint_at(&api, &receiver.url("/hook")).await;
    let events = publish_many(&api, 60).await;
    receiver.wait_for("/hook", 10).await;
    server.kill9();
    receiver.always("/hook", Reply::status(200));
    server.restart().await;
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == events.len()).then_some(())
    })
    .await;
    let interrupted = interrupted(&api).await;
    assert!(interrupted <= 2, "no more than were out: {interrupted}");
}

async fn what_was_not_begun_is_not_interrupted(backend: Backend) {
    let mut server = TestServer::start(backend, &[TWO_PLACES]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::Hang, Reply::Hang]);
    endpoint_at(&api, &receiver.url("/hook")).await;
    publish_many(&api, 30).await;
    receiver.wait_for("/hook", 2).await;
    server.kill9();
    server.restart().await;
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == 30).then_some(())
    })
    .await;
    assert_eq!(interrupted(&api).await, 2, "those that were out");
    assert_eq!(receiver.requests().len(), 32);
}

/// How many attempts are on record as interrupted.
async fn interrupted(api: &Api) -> usize {
    let attempts = api.all("/webhook-attempts").await;
    attempts
        .iter()
        .filter_map(|attempt| attempt["error"].as_str())
        .filter(|error| error.starts_with("interrupted: "))
        .count()
}

/// A retry comes by the queue, behind which the whole crowd is due for longer.
async fn retries_of_others_do_not_stand_behind_a_crowd(backend: Backend) {
    let server = TestServer::start(backend, &[TWO_PLACES, SIXTEEN_SLOTS, SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let other = server.project("other").await.api;
    receiver.always("/slow", Reply::Hang);
    endpoint_at(&api, &receiver.url("/slow")).await;
    let quick = endpoint_at(&other, &receiver.url("/quick")).await;
    publish_many(&api, 200).await;
    receiver.wait_for("/slow", 2).await;
    receiver.script("/quick", [Reply::status(500), Reply::status(500)]);
    let event = publish(&other, "order.paid", json!({})).await;
    let requests = receiver.wait_for("/quick", 3).await;
    assert_eq!(numbers(&requests), ["1", "2", "3"]);
    delivery_in(&other, &event, &quick.id, "delivered").await;
    assert_eq!(receiver.requests_to("/slow").len(), 2, "they hang still");
}

/// At one endpoint, whose room is full of them.
async fn fresh_ones_go_before_those_that_were_tried(backend: Backend) {
    let one_place = ("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "1");
    let server = TestServer::start(backend, &[one_place, SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let mut replies = vec![Reply::status(500); 20];
    // By the time that this one ends, all retries are due.
    replies.push(Reply::status(200).after(Duration::from_secs(4)));
    receiver.script("/hook", replies);
    endpoint_at(&api, &receiver.url("/hook")).await;
    let old = publish_many(&api, 20).await;
    let before = receiver.wait_for("/hook", 21).await.len();
    assert_eq!(before, 21);
    let fresh = publish(&api, "order.paid", json!({})).await;
    let requests = receiver.wait_for("/hook", 24).await;
    let place = requests
        .iter()
        .position(|request| request.header("webhook-id") == fresh);
    let place = place.expect("it is among the next");
    assert!((21..24).contains(&place), "{place}");
    assert!(!old.contains(&fresh));
}

/// Each resumption gives a delivery a new job.
async fn a_resumption_leaves_no_old_jobs_in_the_way(backend: Backend) {
    let server = TestServer::start(backend, &[TWO_PLACES, SIXTEEN_SLOTS]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::Hang, Reply::Hang]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    publish_many(&api, 60).await;
    receiver.wait_for("/hook", 2).await;
    let path = format!("/webhook-endpoints/{}", endpoint.id);
    let resume = format!("{path}/resume");
    let off = json!({"enabled": false});
    for _ in 0..3 {
        api.patch(&path).json(&off).send().await.expect(200);
        api.post(&resume).send().await.expect(200);
    }
    api.patch(&path).json(&off).send().await.expect(200);
    let table = if backend == Backend::Sqlite {
        "Jobs"
    } else {
        "apalis.jobs"
    };
    let waiting = format!(
        "SELECT count(*) FROM {table} WHERE job_type = 'deliver-webhook' AND status = 'Pending'"
    );
    eventually("no job waits for an endpoint that takes none", async || {
        let count = server.outside().await.number(&waiting).await;
        (count == 0).then_some(())
    })
    .await;
    api.post(&resume).send().await.expect(200);
    eventually("all but those that hang are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() >= 58).then_some(())
    })
    .await;
}

/// What one node parked is taken up by another, once the first is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_node_takes_up_what_one_had_no_room_for() {
    let patient = ("BOTIX_WEBHOOKS__READ_TIMEOUT", "5m");
    let settings = [TWO_PLACES, SIXTEEN_SLOTS, patient];
    let mut server = TestServer::start(Backend::Postgres, &settings).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::Hang);
    endpoint_at(&api, &receiver.url("/hook")).await;
    publish_many(&api, 50).await;
    receiver.wait_for("/hook", 2).await;
    // Those two hang on; whatever comes from now on is answered.
    receiver.always("/hook", Reply::status(200));
    let node = server.second_node().await;
    server.kill9();
    let api = node.api(&api);
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == 50).then_some(())
    })
    .await;
    assert_eq!(interrupted(&api).await, 2, "those that were out");
}

/// Both nodes lose the database for longer than makes a worker dead, while each has attempts out and more that
/// wait; a third starts when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_lost_the_database_together_do_not_take_each_other_for_dead() {
    let setup = Setup::new(Backend::Postgres).await.wired().await;
    let patient = ("BOTIX_WEBHOOKS__READ_TIMEOUT", "60s");
    let setup = [SHORT_LADDER, SIXTEEN_SLOTS, patient]
        .iter()
        .fold(setup, |setup, (name, value)| setup.env(name, value));
    let server = setup.start().await;
    let node = server.second_node().await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(200).after(Duration::from_secs(25)));
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let mut events = Vec::new();
    for _ in 0..5 {
        events.push(publish(&api, "order.paid", json!({})).await);
        events.push(publish(&node.api(&api), "order.paid", json!({})).await);
    }
    receiver.wait_for("/hook", 4).await;
    receiver.always("/hook", Reply::status(200));
    server.to_postgres().set(Wire::Cut);
    tokio::time::sleep(Duration::from_secs(14)).await;
    server.to_postgres().set(Wire::Whole);
    let _third = server.second_node().await;
    for event in &events {
        let delivery = delivery_in(&api, event, &endpoint.id, "delivered").await;
        assert_eq!(attempts_of(&api, &delivery).await.len(), 1, "{delivery}");
    }
    assert_eq!(receiver.requests().len(), 10, "each was sent once");
}

/// What one node has read of an attempt is old by the time it begins, and what another is at ends meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_resumed_while_its_webhooks_are_out_gets_none_twice() {
    let server = TestServer::start(Backend::Postgres, &[]).await;
    let mut url = url::Url::parse(server.setting("BOTIX_DATABASE_URL")).expect("a URL");
    let (host, port) = (url.host_str().expect("a host"), url.port().unwrap_or(5432));
    let wire = TcpProxy::start(format!("{host}:{port}")).await;
    url.set_port(Some(wire.port)).expect("a URL with a port");
    let over_the_wire = [("BOTIX_DATABASE_URL", url.as_str())];
    let node = server.second_node_with(&over_the_wire).await;
    // Between any two looks of this node there is time enough for the other one to end an attempt.
    wire.set(Wire::Delayed(Duration::from_millis(50)));
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let path = format!("/webhook-endpoints/{}", hook.id);
    let rounds = 3;
    for round in 1..=rounds {
        // All the moments at which one may end.
        let ends = (0..32).map(|at| Duration::from_millis(1_000 + 50 * at));
        receiver.script("/hook", ends.map(|end| Reply::status(200).after(end)));
        publish_many(&api, 32).await;
        let change = json!({"enabled": false});
        api.patch(&path).json(&change).send().await.expect(200);
        let resume = format!("{path}/resume");
        node.api(&api).post(&resume).send().await.expect(200);
        all_at_once(&api, round * 32).await;
    }
    let requests = receiver.requests_to("/hook");
    let distinct: HashSet<_> = (requests.iter())
        .map(|request| request.header("webhook-id"))
        .collect();
    assert_eq!((distinct.len(), requests.len()), (rounds * 32, rounds * 32));
}
