//! Events that come many at a time are written together, and each is as safe as if it came alone.

use super::{delivery_in, endpoint, endpoint_at, publish};
use crate::harness::api::{Answer, Api};
use crate::harness::receiver::Receiver;
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, fresh_key, fresh_phone, on_every_store};
use futures::future::join_all;
use serde_json::{Value, json};
use std::collections::HashSet;

on_every_store!(
    events_that_come_together_are_each_published_once,
    a_key_that_comes_many_times_publishes_once_on_all_nodes,
    a_used_key_spoils_nothing_for_those_it_comes_with,
    what_is_refused_among_others_leaves_nothing,
    an_endpoint_that_is_disabled_gets_its_share_later,
    every_project_gets_its_own,
);

fn event(number: u32) -> Value {
    json!({"type": "order.paid", "data": {"number": number}})
}

async fn post(api: &Api, key: &str, number: u32) -> Answer {
    api.post("/events")
        .key(key)
        .json(&event(number))
        .send()
        .await
}

async fn events_that_come_together_are_each_published_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for path in ["/a", "/b", "/c"] {
        endpoint_at(&api, &receiver.url(path)).await;
    }
    let keys: Vec<_> = (0..150).map(|_| fresh_key()).collect();
    let answers = join_all(
        (0..)
            .zip(&keys)
            .map(|(number, key)| post(&api, key, number)),
    )
    .await;
    let ids: HashSet<_> = answers
        .into_iter()
        .map(|answer| answer.expect(201).member("id"))
        .collect();
    assert_eq!(ids.len(), 150);
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == 450).then_some(())
    })
    .await;
    for path in ["/a", "/b", "/c"] {
        let arrived: Vec<_> = receiver.requests_to(path);
        let distinct: HashSet<_> = arrived
            .iter()
            .map(|request| request.header("webhook-id").to_owned())
            .collect();
        assert_eq!((arrived.len(), distinct), (150, ids.clone()), "{path}");
    }
    // The answers are kept like any other.
    let replayed = join_all(
        (0..)
            .zip(&keys)
            .map(|(number, key)| post(&api, key, number)),
    )
    .await;
    for answer in replayed {
        assert!(answer.is_replay());
        assert!(ids.contains(&answer.expect(201).member("id")));
    }
    assert_eq!(api.all("/events").await.len(), 150);
}

async fn a_key_that_comes_many_times_publishes_once_on_all_nodes(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    endpoint_at(&api, &receiver.url("/hook")).await;
    // SQLite is of one node alone.
    let other = match backend {
        Backend::Sqlite => None,
        _ => Some(server.second_node().await),
    };
    let apis = [Some(api.clone()), other.as_ref().map(|node| node.api(&api))];
    let apis: Vec<_> = apis.into_iter().flatten().collect();
    let keys: Vec<_> = (0..20).map(|_| fresh_key()).collect();
    let all = (0..).zip(&keys).flat_map(|(number, key)| {
        let times = (0..6).map(move |time| (time, number, key));
        times.collect::<Vec<_>>()
    });
    let answers = join_all(all.map(|(time, number, key)| {
        let api = &apis[time % apis.len()];
        async move { (number, post(api, key, number).await) }
    }))
    .await;
    let mut ids: Vec<HashSet<String>> = vec![HashSet::new(); keys.len()];
    for (number, answer) in answers {
        if answer.code().as_deref() != Some("IDEMPOTENCY_KEY_IN_PROGRESS") {
            ids[number as usize].insert(answer.expect(201).member("id"));
        }
    }
    assert!(ids.iter().all(|ids| ids.len() == 1), "{ids:?}");
    assert_eq!(api.all("/events").await.len(), keys.len());
    receiver.wait_for("/hook", keys.len()).await;
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == keys.len()).then_some(())
    })
    .await;
    assert_eq!(receiver.requests().len(), keys.len());
}

async fn a_used_key_spoils_nothing_for_those_it_comes_with(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let used = fresh_key();
    let contact = json!({"phone": fresh_phone()});
    let made = api.post("/contacts").key(&used).json(&contact).send();
    made.await.expect(201);
    let published = fresh_key();
    post(&api, &published, 0).await.expect(201);
    let others: Vec<_> = (0..30).map(|_| fresh_key()).collect();
    let (others, conflict, replay) = tokio::join!(
        join_all(others.iter().map(|key| post(&api, key, 1))),
        post(&api, &used, 1),
        post(&api, &published, 0),
    );
    let changed = post(&api, &published, 1).await;
    for answer in others {
        answer.expect(201);
    }
    conflict
        .expect(409)
        .problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
    changed
        .expect(409)
        .problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
    assert!(replay.is_replay());
    // Also where the body would be refused, the key was used for something else.
    let refused = api
        .post("/events")
        .key(&used)
        .json(&json!({"type": "x"}))
        .send();
    refused
        .await
        .expect(409)
        .problem("IDEMPOTENCY_KEY_REUSE_CONFLICT");
    assert_eq!(api.all("/events").await.len(), 31 + 1, "the contact's too");
}

async fn what_is_refused_among_others_leaves_nothing(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let api = server.project("shop").await.api;
    let refused = json!({"type": "payment.succeeded", "data": {"nothing": "that fits"}});
    let key = fresh_key();
    let (others, answer) = tokio::join!(
        join_all((0..30).map(|number| {
            let api = api.clone();
            async move { post(&api, &fresh_key(), number).await }
        })),
        api.post("/events").key(&key).json(&refused).send(),
    );
    for other in others {
        other.expect(201);
    }
    answer.expect(400).problem("INVALID_BODY");
    // Nothing is kept of it: the same key runs.
    post(&api, &key, 99).await.expect(201);
    assert_eq!(api.all("/events").await.len(), 31);
}

async fn an_endpoint_that_is_disabled_gets_its_share_later(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let on = endpoint_at(&api, &receiver.url("/on")).await;
    let off = json!({"url": receiver.url("/off"), "enabled": false});
    let off = endpoint(&api, off).await;
    let ids = join_all((0..40).map(|_| publish(&api, "order.paid", json!({})))).await;
    receiver.wait_for("/on", 40).await;
    for id in &ids {
        delivery_in(&api, id, &off.id, "paused").await;
    }
    assert_eq!(receiver.requests_to("/off").len(), 0);
    let resume = format!("/webhook-endpoints/{}/resume", off.id);
    api.post(&resume).send().await.expect_success();
    receiver.wait_for("/off", 40).await;
    for id in &ids {
        delivery_in(&api, id, &off.id, "delivered").await;
        delivery_in(&api, id, &on.id, "delivered").await;
    }
    assert_eq!(receiver.requests().len(), 80);
}

async fn every_project_gets_its_own(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let mut apis = Vec::new();
    for name in ["red", "blue", "none"] {
        let api = server.project(name).await.api;
        if name != "none" {
            endpoint_at(&api, &receiver.url(&format!("/{name}"))).await;
        }
        apis.push(api);
    }
    let publishing = (0..60).map(|number| {
        let api = apis[number % 3].clone();
        async move { publish(&api, "order.paid", json!({})).await }
    });
    let ids = join_all(publishing).await;
    for (of, path) in ["/red", "/blue"].into_iter().enumerate() {
        let arrived: HashSet<_> = receiver
            .wait_for(path, 20)
            .await
            .iter()
            .map(|request| request.header("webhook-id").to_owned())
            .collect();
        let own: HashSet<_> = ids.iter().skip(of).step_by(3).cloned().collect();
        assert_eq!(arrived, own, "{path}");
    }
    assert_eq!(apis[2].all("/events").await.len(), 20);
    assert_eq!(apis[2].all("/webhook-deliveries").await.len(), 0);
}
