//! Dead letters climb the ladder again, one or all that a filter names, and each once.

use super::{
    SHORT_LADDER, attempts_of, dead_letter_of, delivery_in, endpoint_at, numbers, publish, verify,
};
use crate::contacts::points_at;
use crate::harness::api::{Answer, Api};
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, fresh_key, is_id, is_timestamp, on_both_databases};
use crate::plugins::example::guests;
use crate::plugins::{plugged, ready};
use serde_json::{Value, json};

on_both_databases!(
    a_redelivered_letter_climbs_the_whole_ladder_again,
    a_letter_is_redelivered_once,
    a_redelivery_waits_while_its_endpoint_is_disabled,
    a_redelivery_goes_through_the_plugin_as_it_is_now,
    a_redelivery_that_makes_no_sense_is_refused,
    a_bulk_redelivery_takes_what_its_filter_names,
    a_bulk_redelivery_touches_nothing_of_another_project,
    a_bulk_redelivery_survives_a_kill_and_takes_each_letter_once,
);

async fn redeliver(api: &Api, letter: &Value) -> Answer {
    let id = letter["id"].as_str().expect("an id");
    api.post(&format!("/webhook-dead-letters/{id}/redeliver"))
        .send()
        .await
}

/// Starts a redelivery in bulk and waits for its end.
async fn redelivered(api: &Api, filter: &Value) -> Value {
    let path = "/webhook-dead-letters/redeliver";
    let started = api.post(path).json(filter).send().await.expect(202);
    let location = started.header("location").expect("a Location").to_owned();
    let id = started.member("id");
    assert!(is_id("rdl", &id), "{id}");
    assert_eq!(location, format!("/public/v1/webhook-redeliveries/{id}"));
    completed(api, &id).await
}

async fn completed(api: &Api, id: &str) -> Value {
    let path = format!("/webhook-redeliveries/{id}");
    eventually("the redelivery is complete", async || {
        let run = api.get(&path).send().await.expect(200).json();
        (run["status"] == "completed").then_some(run)
    })
    .await
}

/// Dead letters of one refusal each.
async fn dead_letters(api: &Api, receiver: &Receiver, path: &str, types: &[&str]) -> String {
    receiver.script(path, vec![Reply::status(403); types.len()]);
    let endpoint = endpoint_at(api, &receiver.url(path)).await;
    for event_type in types {
        let event = publish(api, event_type, json!({})).await;
        delivery_in(api, &event, &endpoint.id, "dead").await;
    }
    // What is published for the next endpoint does not come here.
    let change = json!({"event_types": ["nothing.more"]});
    let path = format!("/webhook-endpoints/{}", endpoint.id);
    api.patch(&path).json(&change).send().await.expect(200);
    endpoint.id
}

async fn a_redelivered_letter_climbs_the_whole_ladder_again(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", vec![Reply::status(500); 10]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({"n": 1.0})).await;
    let dead = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let first = dead_letter_of(&api, &dead).await;
    assert_eq!(first["status"], "open");
    assert_eq!(first["event_type"], "order.paid");

    let answer = redeliver(&api, &first).await.expect(202);
    let delivery = dead["id"].as_str().expect("an id");
    let location = answer.header("location").expect("a Location").to_owned();
    assert_eq!(
        location,
        format!("/public/v1/webhook-deliveries/{delivery}")
    );
    let resolved = answer.json();
    assert_eq!(resolved["id"], first["id"]);
    assert_eq!(resolved["status"], "redelivered");
    assert!(is_timestamp(
        resolved["resolved_at"].as_str().expect("a time")
    ));

    let second = eventually("it is dead again", async || {
        let open = api.all("/webhook-dead-letters?status=open").await;
        open.into_iter().next()
    })
    .await;
    assert_ne!(second["id"], first["id"]);
    assert_eq!(second["delivery_id"], first["delivery_id"]);
    assert_eq!(second["attempts"], 10);
    let requests = receiver.requests_to("/hook");
    let expected: Vec<_> = (1..=10).map(|number| number.to_string()).collect();
    assert_eq!(numbers(&requests), expected);
    let ids: Vec<_> = (requests.iter())
        .map(|request| request.header("x-botix-request-id"))
        .collect();
    assert!(ids[..5].iter().all(|id| *id == ids[0]), "{ids:?}");
    assert!(ids[5..].iter().all(|id| *id == ids[5]), "{ids:?}");
    assert_ne!(ids[0], ids[5], "a new ladder, a new request id");
    for request in &requests {
        verify(request, &endpoint.secret);
        assert_eq!(request.body, requests[0].body);
    }

    redeliver(&api, &second).await.expect(202);
    let delivered = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(delivered["id"], dead["id"]);
    assert_eq!(delivered["attempts"], 11);
    let attempts = attempts_of(&api, &delivered).await;
    assert!(
        attempts
            .iter()
            .all(|attempt| attempt["trigger"] == "ladder")
    );
    let letters = api.all("/webhook-dead-letters").await;
    assert_eq!(letters.len(), 2);
    assert!(
        letters
            .iter()
            .all(|letter| letter["status"] == "redelivered")
    );
}

async fn a_letter_is_redelivered_once(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    dead_letters(&api, &receiver, "/hook", &["order.paid"]).await;
    let letter = api.all("/webhook-dead-letters").await.remove(0);
    let id = letter["id"].as_str().expect("an id");
    let path = format!("/webhook-dead-letters/{id}/redeliver");
    let key = fresh_key();
    let first = api.post(&path).key(&key).send().await.expect(202);
    let replay = api.post(&path).key(&key).send().await.expect(202);
    assert!(replay.is_replay());
    assert_eq!(replay.body, first.body);
    redeliver(&api, &letter).await.problem("CONFLICT");
    receiver.wait_for("/hook", 2).await;
    eventually("it is delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == 1).then_some(())
    })
    .await;
    redeliver(&api, &letter).await.problem("CONFLICT");
    let bulk = redelivered(&api, &json!({})).await;
    assert_eq!(bulk["redelivered"], 0);
    assert_eq!(receiver.requests_to("/hook").len(), 2);

    // Of many who ask at once, one redelivers.
    dead_letters(&api, &receiver, "/race", &["order.paid"]).await;
    let letter = api.all("/webhook-dead-letters?status=open").await.remove(0);
    let asking = (0..10).map(|_| redeliver(&api, &letter));
    let answers = futures::future::join_all(asking).await;
    let taken = answers.iter().filter(|answer| answer.status == 202).count();
    assert_eq!(taken, 1);
    for answer in answers.into_iter().filter(|answer| answer.status != 202) {
        answer.problem("CONFLICT");
    }
}

async fn a_redelivery_waits_while_its_endpoint_is_disabled(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(410)]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let dead = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let letter = dead_letter_of(&api, &dead).await;
    redeliver(&api, &letter).await.expect(202);
    let paused = delivery_in(&api, &event, &endpoint.id, "paused").await;
    assert_eq!(paused["next_attempt_at"], Value::Null);
    assert_eq!(receiver.requests_to("/hook").len(), 1);
    let path = format!("/webhook-endpoints/{}/resume", endpoint.id);
    api.post(&path).send().await.expect(200);
    delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(numbers(&receiver.requests_to("/hook")), ["1", "2"]);
}

async fn a_redelivery_goes_through_the_plugin_as_it_is_now(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(422)]);
    let (guest, component) = guests().remove(0);
    let plugin = ready(&api, guest, &component).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &plugin, json!({})).await;
    let event = publish(&api, "order.paid", json!({"name": "Ada"})).await;
    let dead = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let path = format!("/webhook-endpoints/{}", endpoint.id);
    let change = json!({"plugin_config": {"drop": []}});
    api.patch(&path).json(&change).send().await.expect(200);
    let letter = dead_letter_of(&api, &dead).await;
    redeliver(&api, &letter).await.expect(202);
    let requests = receiver.wait_for("/hook", 2).await;
    assert!(!requests[0].text().contains("Ada"));
    assert!(requests[1].text().contains("Ada"), "{}", requests[1].text());
    assert_eq!(requests[1].json()["id"], requests[0].json()["id"]);
    assert_eq!(
        requests[1].json()["timestamp"],
        requests[0].json()["timestamp"]
    );
}

async fn a_redelivery_that_makes_no_sense_is_refused(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let project = server.project("shop").await;
    let api = &project.api;
    let endpoint = dead_letters(api, &receiver, "/hook", &["order.paid"]).await;
    let letter = api.all("/webhook-dead-letters").await.remove(0);
    let id = letter["id"].as_str().expect("an id");
    let one = format!("/webhook-dead-letters/{id}/redeliver");
    let bulk = "/webhook-dead-letters/redeliver";
    for (path, body, pointer) in [
        (&*one, json!({"now": true}), "/now"),
        (bulk, json!({"state": "dead"}), "/state"),
        (bulk, json!({"endpoint_id": "nonsense"}), "/endpoint_id"),
        (bulk, json!({"event_type": 1}), "/event_type"),
        (bulk, json!({"event_type": "a\u{0}b"}), "/event_type"),
        (bulk, json!({"since": "yesterday"}), "/since"),
        (bulk, json!({"until": 0}), "/until"),
    ] {
        let answer = api.post(path).json(&body).send().await;
        points_at(answer, "INVALID_BODY", pointer);
    }
    let reader = server.scoped(&project, "read").await.0;
    for path in [&*one, bulk] {
        reader.post(path).send().await.problem("FORBIDDEN");
        let keyless = api.post(path).without_key().send().await;
        keyless.problem("IDEMPOTENCY_KEY_REQUIRED");
    }
    let other = server.project("other").await.api;
    redeliver(&other, &letter).await.problem("NOT_FOUND");
    let unknown = api.get("/webhook-redeliveries/rdl_00000000000000000000000000");
    unknown.send().await.problem("NOT_FOUND");

    // Without its endpoint a letter stays what it is, alone and in bulk.
    let path = format!("/webhook-endpoints/{endpoint}");
    api.delete(&path).send().await.expect(204);
    redeliver(api, &letter).await.problem("CONFLICT");
    let run = redelivered(api, &json!({})).await;
    assert_eq!(run["redelivered"], 0);
    assert_eq!(run["skipped"], 1);
    assert_eq!(api.all("/webhook-dead-letters").await, [letter]);
    assert_eq!(api.all("/webhook-deliveries?state=dead").await.len(), 1);
}

async fn a_bulk_redelivery_takes_what_its_filter_names(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let types = ["order.paid", "order.sent", "order.sent"];
    let first = dead_letters(&api, &receiver, "/first", &types).await;
    let second = dead_letters(&api, &receiver, "/second", &types).await;
    let letters = api.all("/webhook-dead-letters").await;
    assert_eq!(letters.len(), 6);
    let count = async |filter: &str| {
        let path = format!("/webhook-dead-letters?{filter}");
        api.all(&path).await.len()
    };
    assert_eq!(count("event_type=order.sent").await, 4);
    assert_eq!(
        count(&format!("event_type=order.sent&endpoint_id={first}")).await,
        2
    );
    let oldest = letters[5]["created_at"].as_str().expect("a time");
    assert_eq!(count(&format!("until={oldest}")).await, 0);
    assert_eq!(count(&format!("since={oldest}&status=open")).await, 6);
    let refused = api.get("/webhook-dead-letters?status=lost").send().await;
    refused.problem("INVALID_PARAMETER");

    let filter = json!({"endpoint_id": first, "event_type": "order.sent"});
    let run = redelivered(&api, &filter).await;
    assert_eq!(run["redelivered"], 2);
    assert_eq!(run["skipped"], 0);
    assert_eq!(run["endpoint_id"], first);
    assert_eq!(run["event_type"], "order.sent");
    assert_eq!(receiver.wait_for("/first", 5).await.len(), 5);
    assert_eq!(count("status=open").await, 4);

    let before = json!({"until": oldest});
    assert_eq!(redelivered(&api, &before).await["redelivered"], 0);
    let newest = letters[0]["created_at"].as_str().expect("a time");
    let last = json!({"since": newest});
    assert_eq!(redelivered(&api, &last).await["redelivered"], 1);
    receiver.wait_for("/second", 4).await;
    // Nothing given is everything that is open; an absent body gives nothing.
    let path = "/webhook-dead-letters/redeliver";
    let all = api.post(path).send().await.expect(202).member("id");
    assert_eq!(completed(&api, &all).await["redelivered"], 3);
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == 6).then_some(())
    })
    .await;
    assert_eq!(
        count(&format!("status=redelivered&endpoint_id={second}")).await,
        3
    );
    assert_eq!(receiver.requests().len(), 12);
    let runs = api.all("/webhook-redeliveries").await;
    assert_eq!(runs.len(), 4);
    assert_eq!(runs[0]["id"], all);
}

/// Case 30.
async fn a_bulk_redelivery_touches_nothing_of_another_project(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let a = server.project("a").await.api;
    let b = server.project("b").await.api;
    let types = ["order.paid", "order.sent"];
    let of_a = dead_letters(&a, &receiver, "/a", &types).await;
    dead_letters(&b, &receiver, "/b", &types).await;
    let all_of_a = async || {
        let mut rows = a.all("/webhook-dead-letters").await;
        rows.extend(a.all("/webhook-deliveries").await);
        rows.extend(a.all("/webhook-attempts").await);
        rows
    };
    let before = all_of_a().await;
    let theirs = redelivered(&b, &json!({"endpoint_id": of_a})).await;
    assert_eq!(theirs["redelivered"], 0);
    assert_eq!(theirs["skipped"], 0);
    let run = redelivered(&b, &json!({})).await;
    assert_eq!(run["redelivered"], 2);
    receiver.wait_for("/b", 4).await;
    assert_eq!(all_of_a().await, before);
    assert_eq!(receiver.requests_to("/a").len(), 2);
    let path = format!(
        "/webhook-redeliveries/{}",
        run["id"].as_str().expect("an id")
    );
    a.get(&path).send().await.problem("NOT_FOUND");
    assert_eq!(a.all("/webhook-redeliveries").await.len(), 0);
}

async fn a_bulk_redelivery_survives_a_kill_and_takes_each_letter_once(backend: Backend) {
    const LETTERS: usize = 250;
    let mut server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", vec![Reply::status(403); LETTERS]);
    endpoint_at(&api, &receiver.url("/hook")).await;
    for _ in 0..LETTERS / 25 {
        let publishing = (0..25).map(|_| publish(&api, "order.paid", json!({})));
        futures::future::join_all(publishing).await;
    }
    eventually("all are dead", async || {
        let dead = api.all("/webhook-dead-letters").await;
        (dead.len() == LETTERS).then_some(())
    })
    .await;
    let path = "/webhook-dead-letters/redeliver";
    let id = api.post(path).send().await.expect(202).member("id");
    let progress = format!("/webhook-redeliveries/{id}");
    let run = eventually("a part is done", async || {
        let run = api.get(&progress).send().await.expect(200).json();
        (run["redelivered"] != 0).then_some(run)
    })
    .await;
    assert_eq!(run["status"], "running", "it takes its time: {run}");
    let second = api.post(path).send().await;
    second.problem("CONFLICT");
    server.kill9();
    server.restart().await;
    let run = completed(&api, &id).await;
    assert_eq!(run["redelivered"], LETTERS);
    assert_eq!(run["skipped"], 0);
    assert!(is_timestamp(run["completed_at"].as_str().expect("a time")));
    let delivered = eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == LETTERS).then_some(delivered)
    })
    .await;
    for delivery in delivered {
        let mut attempts = attempts_of(&api, &delivery).await;
        // The kill may have come in the middle of one.
        attempts.retain(|attempt| !attempt["error"].to_string().contains("interrupted"));
        assert_eq!(attempts.len(), 2, "{delivery}");
    }
    assert_eq!(api.all("/webhook-dead-letters?status=open").await.len(), 0);
    let again = api.post(path).send().await.expect(202).member("id");
    let again = eventually("there is nothing left", async || {
        let run = api.get(&format!("/webhook-redeliveries/{again}"));
        let run = run.send().await.expect(200).json();
        (run["status"] == "completed").then_some(run)
    })
    .await;
    assert_eq!(again["redelivered"], 0);
}
