//! Crashes, hanging receivers and several processes: nothing lost, nothing twice on record.

use super::{SHORT_LADDER, attempts_of, delivery_in, endpoint, endpoint_at, numbers, publish};
use crate::harness::api::Api;
use crate::harness::receiver::{Received, Receiver, Reply};
use crate::harness::server::{Setup, TestServer};
use crate::harness::tcp_proxy::Wire;
use crate::harness::{Backend, eventually, fresh_phone, on_both_databases, on_every_fault};
use serde_json::json;
use std::collections::HashSet;
use std::time::Duration;

on_both_databases!(
    a_kill_during_a_hanging_send_delivers_after_the_restart,
    an_interrupted_attempt_costs_no_step_of_the_ladder,
    an_interrupted_attempt_is_remembered_while_there_is_no_room,
    an_interruption_costs_no_step_after_a_redelivery_either,
    kills_under_load_lose_no_webhook,
    kills_while_events_pour_in_lose_none_and_repeat_no_number,
    a_hanging_endpoint_does_not_delay_another,
    a_stop_finishes_the_delivery_in_flight,
    a_delivery_whose_job_was_taken_away_gets_another,
);

on_every_fault!(deliveries_go_on_after_the_database_was_lost);

/// Each delivery has every number from one to its last exactly once.
async fn numbers_are_whole(api: &Api) {
    for delivery in api.all("/webhook-deliveries").await {
        let attempts = attempts_of(api, &delivery).await;
        let numbers: Vec<_> = attempts
            .iter()
            .map(|attempt| attempt["number"].as_u64())
            .collect();
        let whole: Vec<_> = (1..=attempts.len() as u64).map(Some).collect();
        assert_eq!(numbers, whole, "{delivery}");
        assert_eq!(delivery["attempts"], attempts.len(), "{delivery}");
    }
}

async fn a_kill_during_a_hanging_send_delivers_after_the_restart(backend: Backend) {
    let mut server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::Hang]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 1).await;
    server.kill9();
    server.restart().await;
    let requests = receiver.wait_for("/hook", 2).await;
    assert_eq!(requests[0].body, requests[1].body);
    assert_eq!(requests[1].header("webhook-id"), event);
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    numbers_are_whole(&api).await;
    // Nobody knows what came of the first: it is on record as that, and its number is not used again.
    assert_eq!(numbers(&requests), ["1", "2"]);
    let attempts = attempts_of(&api, &delivery).await;
    assert_eq!(attempts[0]["status"], "failed");
    let error = attempts[0]["error"].as_str().expect("an error");
    assert!(error.starts_with("interrupted: "), "{error}");
    assert_eq!(attempts[1]["status"], "succeeded");
}

/// The ladder waits 15 minutes after the second step: an interruption is no failed step.
async fn an_interrupted_attempt_costs_no_step_of_the_ladder(backend: Backend) {
    let ladder = ("BOTIX_WEBHOOKS__LADDER", "1s,15m,1h,24h");
    let mut server = TestServer::start(backend, &[ladder]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(500), Reply::Hang]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 2).await;
    server.kill9();
    server.restart().await;
    let requests = receiver.wait_for("/hook", 3).await;
    assert_eq!(numbers(&requests), ["1", "2", "3"]);
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(attempts_of(&api, &delivery).await.len(), 3);
    numbers_are_whole(&api).await;
}

/// Whoever comes after the interruption finds the endpoint's one place taken, and is put off.
async fn an_interrupted_attempt_is_remembered_while_there_is_no_room(backend: Backend) {
    let one_place = ("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "1");
    let mut server = TestServer::start(backend, &[one_place]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::Hang]);
    let slow = Reply::status(200).after(Duration::from_millis(300));
    receiver.always("/hook", slow);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let first = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 1).await;
    let others = (0..40).map(|_| publish(&api, "order.paid", json!({})));
    let others = futures::future::join_all(others).await;
    server.kill9();
    server.restart().await;
    for event in others.iter().chain([&first]) {
        delivery_in(&api, event, &endpoint.id, "delivered").await;
    }
    no_number_came_twice(&receiver.requests());
    numbers_are_whole(&api).await;
}

async fn an_interruption_costs_no_step_after_a_redelivery_either(backend: Backend) {
    let ladder = ("BOTIX_WEBHOOKS__LADDER", "1s,1s,1s,15m");
    let mut server = TestServer::start(backend, &[ladder]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(403), Reply::Hang]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let letter = super::dead_letter_of(&api, &delivery).await;
    let letter = letter["id"].as_str().expect("an id");
    let redeliver = format!("/webhook-dead-letters/{letter}/redeliver");
    api.post(&redeliver).send().await.expect_success();
    receiver.wait_for("/hook", 2).await;
    server.kill9();
    server.restart().await;
    let requests = receiver.wait_for("/hook", 3).await;
    assert_eq!(numbers(&requests), ["1", "2", "3"]);
    delivery_in(&api, &event, &endpoint.id, "delivered").await;
    numbers_are_whole(&api).await;
}

async fn kills_under_load_lose_no_webhook(backend: Backend) {
    const ROUNDS: usize = 4;
    let mut server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(200).after(Duration::from_millis(20)));
    receiver.script("/hook", vec![Reply::status(500); 10]);
    endpoint_at(&api, &receiver.url("/hook")).await;
    let mut accepted = HashSet::new();
    for _ in 0..ROUNDS {
        let before = receiver.requests().len();
        let publishing = (0..20).map(|_| {
            let body = json!({"phone": fresh_phone()});
            api.post("/contacts").json(&body).send()
        });
        for answer in futures::future::join_all(publishing).await {
            accepted.insert(answer.expect(201).member("id"));
        }
        let some = before + rand::random::<u32>() as usize % 10 + 1;
        receiver.wait_for("/hook", some).await;
        server.kill9();
        server.restart().await;
    }
    eventually("every delivery is settled", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == accepted.len()).then_some(())
    })
    .await;
    let requests = receiver.requests();
    let contact = |request: &crate::harness::receiver::Received| {
        request.json()["data"]["id"]
            .as_str()
            .expect("an id")
            .to_owned()
    };
    let arrived: HashSet<_> = requests.iter().map(contact).collect();
    assert_eq!(arrived, accepted);
    numbers_are_whole(&api).await;
    no_number_came_twice(&requests);
}

/// As above, for events that are accepted and begun many at a time.
async fn kills_while_events_pour_in_lose_none_and_repeat_no_number(backend: Backend) {
    const ROUNDS: usize = 4;
    let mut server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    endpoint_at(&api, &receiver.url("/hook")).await;
    let mut accepted = HashSet::new();
    for round in 0..ROUNDS {
        let publishing: Vec<_> = (0..200)
            .map(|number| {
                let data = json!({"number": round * 1_000 + number});
                let body = json!({"type": "order.paid", "data": data});
                let request = api.post("/events").json(&body);
                tokio::spawn(request.try_send())
            })
            .collect();
        let some = receiver.requests().len() + rand::random::<u32>() as usize % 50 + 1;
        receiver.wait_for("/hook", some).await;
        server.kill9();
        for answer in publishing {
            // Those without an answer may have been accepted or not.
            if let Ok(answer) = answer.await.expect("a request") {
                accepted.insert(answer.expect(201).member("id"));
            }
        }
        server.restart().await;
    }
    eventually("every delivery is settled", async || {
        let deliveries = api.all("/webhook-deliveries").await;
        deliveries
            .iter()
            .all(|delivery| delivery["state"] == "delivered")
            .then_some(())
    })
    .await;
    let requests = receiver.requests();
    let arrived: HashSet<_> = requests
        .iter()
        .map(|request| request.header("webhook-id").to_owned())
        .collect();
    assert!(arrived.is_superset(&accepted), "nothing is lost");
    let events = api.all("/events").await;
    let events: HashSet<_> = events
        .iter()
        .map(|event| event["id"].as_str().expect("an id").to_owned())
        .collect();
    assert_eq!(
        arrived, events,
        "an event for every webhook, a webhook for every event"
    );
    numbers_are_whole(&api).await;
    no_number_came_twice(&requests);
}

/// Nobody was told the same number of an event twice.
#[track_caller]
fn no_number_came_twice(requests: &[Received]) {
    let mut told = HashSet::new();
    for request in requests {
        let attempt = (
            request.header("webhook-id"),
            request.header("x-delivery-attempt"),
        );
        assert!(told.insert(attempt), "{attempt:?} came twice");
    }
}

async fn a_hanging_endpoint_does_not_delay_another(backend: Backend) {
    let limit = [("BOTIX_WEBHOOKS__ENDPOINT_CONCURRENCY", "2")];
    let server = TestServer::start(backend, &limit).await;
    let receiver = Receiver::start().await;
    let slow = server.project("slow").await.api;
    let quick = server.project("quick").await.api;
    receiver.always("/slow", Reply::Hang);
    let hanging = endpoint(&slow, json!({"url": receiver.url("/slow")})).await;
    endpoint_at(&quick, &receiver.url("/quick")).await;
    for _ in 0..50 {
        publish(&slow, "order.paid", json!({})).await;
    }
    receiver.wait_for("/slow", 2).await;
    for _ in 0..20 {
        publish(&quick, "order.paid", json!({})).await;
    }
    // All of it arrives while the other still hangs: no request of its fifty has been settled.
    receiver.wait_for("/quick", 20).await;
    assert_eq!(slow.all("/webhook-attempts").await.len(), 0);
    assert_eq!(
        receiver.requests_to("/slow").len(),
        2,
        "as many at a time as the setting says"
    );
    slow.delete(&format!("/webhook-endpoints/{}", hanging.id))
        .send()
        .await
        .expect(204);
}

async fn a_stop_finishes_the_delivery_in_flight(backend: Backend) {
    let mut server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(200).after(Duration::from_secs(2))]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 1).await;
    server.stop().await;
    server.restart().await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(attempts_of(&api, &delivery).await.len(), 1);
    assert_eq!(
        receiver.requests().len(),
        1,
        "sent once, settled before the end"
    );
}

/// A queue emptied by hand: the sweep finds what is due, and says how much it was.
async fn a_delivery_whose_job_was_taken_away_gets_another(backend: Backend) {
    let mut server = TestServer::start(backend, &[SHORT_LADDER]).await;
    server.expects_lost_jobs();
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    assert_eq!(lost_jobs(&server).await, 0);
    server.stop().await;
    server.restart_with(&["--roles", "api"]).await;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    server
        .execute("DELETE FROM apalis.jobs", "DELETE FROM Jobs")
        .await;
    server.stop().await;
    server.restart().await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(attempts_of(&api, &delivery).await.len(), 1);
    assert_eq!(lost_jobs(&server).await, 1);
}

/// The counter of deliveries that had no job.
async fn lost_jobs(server: &TestServer) -> u64 {
    let url = format!("{}/metrics", server.url());
    eventually("the counter is there", async || {
        let page = reqwest::get(&url).await.expect("metrics");
        let text = page.text().await.expect("text");
        text.lines()
            .find_map(|line| line.strip_prefix("botix_webhook_lost_jobs_total "))
            .map(|count| count.parse().expect("a count"))
    })
    .await
}

/// The statement that publishes stands still for longer than anybody waits for it, and may commit in the
/// end: then its job was written in the name of a worker that did not begin it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_commit_came_too_late_for_its_answer_is_delivered() {
    let few = [("BOTIX_DATABASE_CONNECTIONS", "3")];
    let server = TestServer::start(Backend::Postgres, &few).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    endpoint_at(&api, &receiver.url("/hook")).await;
    // So that the statement is prepared on every connection, and sent whole.
    for _ in 0..30 {
        publish(&api, "order.paid", json!({})).await;
    }
    receiver.wait_for("/hook", 30).await;
    let key = crate::harness::fresh_key();
    let body = json!({"type": "order.paid", "data": {}});
    let blocking = server.execute(
        "DO $$ BEGIN LOCK TABLE webhook_deliveries IN EXCLUSIVE MODE; PERFORM pg_sleep(8); END $$",
        "",
    );
    let publishing = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        api.post("/events").key(&key).json(&body).send().await
    };
    let ((), answer) = tokio::join!(blocking, publishing);
    assert_eq!(
        answer.code().as_deref(),
        Some("IDEMPOTENCY_UNAVAILABLE"),
        "{}",
        answer.describe()
    );
    eventually("the same key is answered", async || {
        let again = api.post("/events").key(&key).json(&body).send().await;
        (again.code().is_none()).then(|| again.expect(201))
    })
    .await;
    eventually("all are delivered", async || {
        let delivered = api.all("/webhook-deliveries?state=delivered").await;
        (delivered.len() == 31).then_some(())
    })
    .await;
    assert_eq!(receiver.requests().len(), 31);
    assert_eq!(api.all("/events").await.len(), 31);
}

/// A worker that loses the database leaves its attempts running; the queue gives their jobs out
/// again once their worker counts as dead, and then nobody may begin them a second time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_database_does_not_repeat_an_attempt_that_is_under_way() {
    let (setup, wire) = Setup::new(Backend::Postgres).await.over_a_wire().await;
    let server = setup.env(SHORT_LADDER.0, SHORT_LADDER.1).start().await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(200).after(Duration::from_secs(25))]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 1).await;
    wire.set(Wire::Cut);
    tokio::time::sleep(Duration::from_secs(1)).await;
    wire.set(Wire::Whole);
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(attempts_of(&api, &delivery).await.len(), 1);
    assert_eq!(receiver.requests().len(), 1, "sent once");
}

/// Also where the wire dies without a word: nobody waits for ever for an answer that was lost, neither
/// the worker that looks for jobs nor the attempt that is to be recorded.
async fn deliveries_go_on_after_the_database_was_lost(backend: Backend, fault: Wire) {
    let setup = Setup::new(backend).await.wired().await;
    let server = setup.env(SHORT_LADDER.0, SHORT_LADDER.1).start().await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(200).after(Duration::from_secs(1))]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let under_way = publish(&api, "order.paid", json!({})).await;
    receiver.wait_for("/hook", 1).await;
    server.to_postgres().set(fault);
    // By then the workers have asked for jobs, and the receiver has answered.
    for _ in 0..2 {
        eventually("the store is out of reach", async || {
            let answer = api.get("/contacts").send().await;
            (answer.status == 503).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    server.to_postgres().set(Wire::Whole);
    eventually("the store is back", async || {
        let answer = api.get("/contacts").send().await;
        (answer.status == 200).then_some(())
    })
    .await;
    let published = publish(&api, "order.paid", json!({})).await;
    for event in [published, under_way] {
        delivery_in(&api, &event, &endpoint.id, "delivered").await;
    }
    numbers_are_whole(&api).await;
}

/// As one holds them that is frozen in the midst of a transaction: an endpoint's row, at which a refusal is
/// noted, deliveries that are out, and a contact that many want to change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_stay_locked_cost_nobody_else_the_connections() {
    let server = TestServer::start(Backend::Postgres, &[]).await;
    let receiver = Receiver::start().await;
    let busy = server.project("busy").await.api;
    let other = server.project("other").await.api;
    let create = json!({"phone": fresh_phone()});
    let contact = busy
        .post("/contacts")
        .json(&create)
        .send()
        .await
        .expect(201);
    let path = format!("/contacts/{}", contact.member("id"));
    for (path, status) in [("/refuses", 403), ("/fails", 500)] {
        let reply = Reply::status(status).after(Duration::from_secs(3));
        receiver.always(path, reply);
        endpoint_at(&busy, &receiver.url(path)).await;
    }
    endpoint_at(&other, &receiver.url("/good")).await;
    let published = (0..30).map(|_| publish(&busy, "order.paid", json!({})));
    futures::future::join_all(published).await;
    let mut holder = server.outside().await;
    holder.execute("BEGIN").await;
    for rows in [
        "webhook_deliveries WHERE state = 'pending'",
        "webhook_endpoints WHERE url LIKE '%/refuses'",
        "contacts",
    ] {
        let holding = format!("SELECT 1 FROM {rows} FOR UPDATE");
        holder.execute(&holding).await;
    }
    let changes: Vec<_> = (0..40)
        .map(|at| {
            let change = json!({"name": format!("Ada {at}")});
            tokio::spawn(busy.patch(&path).json(&change).send())
        })
        .collect();
    let mut outside = server.outside().await;
    let waiting = "SELECT count(*) FROM pg_stat_activity \
                   WHERE datname = current_database() AND wait_event_type = 'Lock'";
    eventually("the project has its part of the connections", async || {
        (outside.number(waiting).await >= 16).then_some(())
    })
    .await;
    for at in 1..=10 {
        let create = json!({"phone": fresh_phone()});
        // Who finds no connection is told 503.
        other
            .post("/contacts")
            .json(&create)
            .send()
            .await
            .expect(201);
        receiver.wait_for("/good", at).await;
    }
    let waits = outside.number(waiting).await;
    assert!(waits <= 16, "a quarter for each of the two: {waits}");
    holder.release().await;
    eventually("all failures are settled", async || {
        let dead = busy.all("/webhook-dead-letters").await;
        let retrying = busy.all("/webhook-deliveries?state=retrying").await;
        (dead.len() >= 30 && retrying.len() >= 30).then_some(())
    })
    .await;
    for change in changes {
        let answer = change.await.expect("a client");
        assert!(
            matches!(answer.status.as_u16(), 200 | 503),
            "{}",
            answer.describe()
        );
    }
}
