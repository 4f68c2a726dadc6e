//! Repeats: a manual retry and a redirect send the same webhook again, beside the ladder.

use super::{
    SHORT_LADDER, attempts_of, dead_letter_of, delivery_in, endpoint, endpoint_at, numbers,
    publish, verify,
};
use crate::harness::api::{Answer, Api};
use crate::harness::receiver::{Received, Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, fresh_key, is_id, on_both_databases};
use crate::plugins::example::{guests, verify_stripe_style};
use crate::plugins::{plugged, ready};
use serde_json::{Value, json};
use std::collections::HashSet;

on_both_databases!(
    a_manual_retry_sends_the_same_body_under_a_new_request_id,
    a_manual_retry_sends_the_same_body_though_the_plugin_would_make_another,
    a_manual_retry_in_mid_ladder_leaves_the_ladder_alone,
    a_manual_retry_that_succeeds_ends_what_was_dead,
    a_manual_retry_that_fails_leaves_what_was_dead,
    a_retry_is_refused_where_nothing_could_be_sent,
    a_retry_that_was_accepted_survives_a_kill,
    a_retry_planned_before_its_endpoint_was_disabled_is_recorded_and_not_sent,
    a_redirect_shows_the_same_webhook_in_a_bin,
    a_redirect_reaches_the_inspector_where_private_targets_are_refused,
);

/// Another step than the others', long enough for a retry to be made and settled within.
const LONG_STEP: (&str, &str) = ("BOTIX_WEBHOOKS__LADDER", "8s,1s,1s,1s");

async fn retry(api: &Api, delivery: &Value) -> Answer {
    let id = delivery["id"].as_str().expect("an id");
    api.post(&format!("/webhook-deliveries/{id}/retry"))
        .send()
        .await
}

/// The attempt of this number, once it is on record.
async fn attempt(api: &Api, delivery: &Value, number: u64) -> Value {
    eventually(&format!("attempt {number} is on record"), async || {
        let attempts = attempts_of(api, delivery).await;
        attempts
            .into_iter()
            .find(|attempt| attempt["number"] == number)
    })
    .await
}

async fn read(api: &Api, delivery: &Value) -> Value {
    let id = delivery["id"].as_str().expect("an id");
    let path = format!("/webhook-deliveries/{id}");
    api.get(&path).send().await.expect(200).json()
}

fn request_ids(requests: &[Received]) -> Vec<&str> {
    requests
        .iter()
        .map(|request| request.header("x-botix-request-id"))
        .collect()
}

async fn a_manual_retry_sends_the_same_body_under_a_new_request_id(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let body = json!({"url": receiver.url("/hook"), "headers": {"X-Tenant": "shop"}});
    let endpoint = endpoint(&api, body).await;
    let event = publish(&api, "order.paid", json!({"n": 1.0})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;

    let path = format!(
        "/webhook-deliveries/{}/retry",
        delivery["id"].as_str().unwrap()
    );
    let key = fresh_key();
    let accepted = api.post(&path).key(&key).send().await.expect(202);
    assert_eq!(accepted.json()["id"], delivery["id"]);
    let planned = accepted.json()["planned_attempt"].clone();
    assert_eq!(planned["number"], 2);
    assert_eq!(planned["trigger"], "manual");
    let requests = receiver.wait_for("/hook", 2).await;
    verify(&requests[1], &endpoint.secret);
    assert_eq!(requests[1].body, requests[0].body);
    assert_eq!(requests[1].header("webhook-id"), event);
    assert_eq!(requests[1].header("x-tenant"), "shop");
    assert_eq!(numbers(&requests), ["1", "2"]);
    assert!(is_id("req", requests[1].header("x-botix-request-id")));
    assert_eq!(
        requests[1].header("x-botix-request-id"),
        planned["request_id"]
    );
    assert_ne!(request_ids(&requests)[0], request_ids(&requests)[1]);

    let recorded = attempt(&api, &delivery, 2).await;
    assert_eq!(recorded["trigger"], "manual");
    assert_eq!(recorded["status"], "succeeded");
    assert_eq!(recorded["request_id"], planned["request_id"]);
    assert_eq!(recorded["request_headers"]["x-tenant"], "********");
    let after = read(&api, &delivery).await;
    assert_eq!(after["state"], "delivered");
    assert_eq!(after["attempts"], 2);

    // The same key is the same retry; an absent, an empty and an object body are all the same.
    assert!(
        api.post(&path)
            .key(&key)
            .send()
            .await
            .expect(202)
            .is_replay()
    );
    let empty = api.post(&path).body("application/json", "").send().await;
    assert_eq!(empty.expect(202).json()["planned_attempt"]["number"], 3);
    let object = api.post(&path).json(&json!({})).send().await;
    assert_eq!(object.expect(202).json()["planned_attempt"]["number"], 4);
    let requests = receiver.wait_for("/hook", 4).await;
    assert_eq!(requests.len(), 4);
    let ids: HashSet<_> = request_ids(&requests).into_iter().collect();
    assert_eq!(ids.len(), 4, "each retry has an id of its own");
}

async fn a_manual_retry_sends_the_same_body_though_the_plugin_would_make_another(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let (guest, component) = guests().remove(0);
    let plugin = ready(&api, guest, &component).await;
    let endpoint = plugged(&api, &receiver.url("/hook"), &plugin, json!({})).await;
    let event = publish(&api, "order.paid", json!({"name": "Ada"})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let path = format!("/webhook-endpoints/{}", endpoint.id);
    let change = json!({"plugin_config": {"drop": []}});
    api.patch(&path).json(&change).send().await.expect(200);

    retry(&api, &delivery).await.expect(202);
    let requests = receiver.wait_for("/hook", 2).await;
    assert_eq!(requests[1].body, requests[0].body);
    assert!(!requests[1].text().contains("Ada"));
    verify(&requests[1], &endpoint.secret);
    verify_stripe_style(&requests[1], "x-acme-signature", &endpoint.secret);
    let recorded = attempt(&api, &delivery, 2).await;
    assert_eq!(recorded["plugin"]["id"], plugin, "{recorded}");
    // The plugin is in use as it is now for what was not sent yet.
    publish(&api, "order.paid", json!({"name": "Ada"})).await;
    assert!(
        receiver.wait_for("/hook", 3).await[2]
            .text()
            .contains("Ada")
    );
}

/// The ladder takes its five steps at their times, with one request id, and ends dead, although a
/// retry in the middle succeeded (or failed): numbers are unique and the retry has its own.
async fn a_manual_retry_in_mid_ladder_leaves_the_ladder_alone(backend: Backend) {
    let server = TestServer::start(backend, &[LONG_STEP]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for (path, status) in [("/succeeds", 200), ("/fails", 403), ("/gone", 410)] {
        receiver.always(path, Reply::status(500));
        receiver.script(path, [Reply::status(500), Reply::status(status)]);
        let endpoint = endpoint_at(&api, &receiver.url(path)).await;
        let event = publish(&api, "order.paid", json!({})).await;
        let before = delivery_in(&api, &event, &endpoint.id, "retrying").await;
        let planned = retry(&api, &before).await.expect(202).json();
        assert_eq!(planned["planned_attempt"]["number"], 3, "2 is the ladder's");
        let manual = attempt(&api, &before, 3).await;
        assert_eq!(manual["status_code"], status, "{path}");
        let after = read(&api, &before).await;
        assert_eq!(after["state"], "retrying", "{path}");
        assert_eq!(
            after["next_attempt_at"], before["next_attempt_at"],
            "{path}"
        );
        assert_eq!(after["attempts"], 2);
        assert_eq!(after["last_status_code"], status);

        let dead = delivery_in(&api, &event, &endpoint.id, "dead").await;
        assert_eq!(dead["attempts"], 6);
        let attempts = attempts_of(&api, &dead).await;
        let seen: Vec<_> = attempts
            .iter()
            .map(|attempt| (attempt["number"].as_u64(), attempt["trigger"].as_str()))
            .collect();
        let ladder = Some("ladder");
        let expected = [ladder, ladder, Some("manual"), ladder, ladder, ladder];
        assert_eq!(seen, (1..=6).map(Some).zip(expected).collect::<Vec<_>>());
        let requests: Vec<_> = (receiver.requests_to(path).into_iter())
            .filter(|request| request.header("webhook-id") == event)
            .collect();
        assert_eq!(numbers(&requests), ["1", "3", "2", "4", "5", "6"]);
        let mut ids = request_ids(&requests);
        let own = ids.remove(1);
        assert_ne!(own, ids[0]);
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
        assert_eq!(dead_letter_of(&api, &dead).await["status"], "open");
        let path = format!("/webhook-endpoints/{}", endpoint.id);
        assert_eq!(api.get(&path).send().await.json()["enabled"], true);
        api.delete(&path).send().await.expect(204);
    }
}

async fn a_manual_retry_that_succeeds_ends_what_was_dead(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(403)]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let dead = delivery_in(&api, &event, &endpoint.id, "dead").await;
    assert_eq!(
        dead_letter_of(&api, &dead).await["resolved_at"],
        Value::Null
    );
    retry(&api, &dead).await.expect(202);
    delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let letter = dead_letter_of(&api, &dead).await;
    assert_eq!(letter["status"], "retried");
    assert!(letter["resolved_at"].is_string());
    assert_eq!(api.all("/webhook-dead-letters?status=open").await.len(), 0);
    assert_eq!(
        api.all("/webhook-dead-letters?status=retried").await,
        [letter]
    );
    assert_eq!(attempts_of(&api, &dead).await.len(), 2);
}

async fn a_manual_retry_that_fails_leaves_what_was_dead(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [403, 500].map(Reply::status));
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let dead = delivery_in(&api, &event, &endpoint.id, "dead").await;
    retry(&api, &dead).await.expect(202);
    assert_eq!(attempt(&api, &dead, 2).await["status_code"], 500);
    let after = read(&api, &dead).await;
    assert_eq!(after["state"], "dead");
    assert_eq!(after["next_attempt_at"], Value::Null);
    assert_eq!(dead_letter_of(&api, &dead).await["status"], "open");
}

async fn a_retry_is_refused_where_nothing_could_be_sent(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let project = server.project("shop").await;
    let api = &project.api;
    let endpoint = endpoint_at(api, &receiver.url("/hook")).await;
    let event = publish(api, "order.paid", json!({})).await;
    let delivery = delivery_in(api, &event, &endpoint.id, "delivered").await;
    let id = delivery["id"].as_str().expect("an id");
    for action in ["retry", "redirect"] {
        let path = format!("/webhook-deliveries/{id}/{action}");
        let options = json!({"urgently": true});
        let answer = api.post(&path).json(&options).send().await;
        assert_eq!(
            answer.problem("INVALID_BODY")["errors"][0]["pointer"],
            "/urgently"
        );
        let text = api.post(&path).body("text/plain", "{}").send().await;
        text.problem("UNSUPPORTED_MEDIA_TYPE");
        let keyless = api.post(&path).without_key().send().await;
        keyless.problem("IDEMPOTENCY_KEY_REQUIRED");
        let reader = server.scoped(&project, "read").await.0;
        reader.post(&path).send().await.problem("FORBIDDEN");
        let other = server.project("other").await.api;
        other.post(&path).send().await.problem("NOT_FOUND");
        let unknown = format!("/webhook-deliveries/dlv_00000000000000000000000000/{action}");
        api.post(&unknown).send().await.problem("NOT_FOUND");
    }
    let path = format!("/webhook-endpoints/{}", endpoint.id);
    let change = json!({"enabled": false});
    api.patch(&path).json(&change).send().await.expect(200);
    retry(api, &delivery).await.problem("CONFLICT");
    api.delete(&path).send().await.expect(204);
    retry(api, &delivery).await.problem("CONFLICT");
    let redirect = api.post(&format!("/webhook-deliveries/{id}/redirect"));
    redirect.send().await.problem("CONFLICT");
    assert_eq!(receiver.requests().len(), 1);
    assert_eq!(attempts_of(api, &delivery).await.len(), 1);
    assert_eq!(
        api.all("/inspector/bins").await.len(),
        0,
        "no bin is left of it"
    );
}

async fn a_retry_that_was_accepted_survives_a_kill(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(200), Reply::Hang]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    retry(&api, &delivery).await.expect(202);
    receiver.wait_for("/hook", 2).await;
    server.kill9();
    server.restart().await;
    let requests = receiver.wait_for("/hook", 3).await;
    assert_eq!(requests[2].body, requests[1].body);
    assert_eq!(request_ids(&requests)[2], request_ids(&requests)[1]);
    // Nobody knows what came of the first: it is on record as that, and made again under its next number.
    let interrupted = attempt(&api, &delivery, 2).await;
    assert_eq!(interrupted["status"], "failed");
    assert!(interrupted["error"].to_string().contains("interrupted: "));
    assert_eq!(attempt(&api, &delivery, 3).await["status"], "succeeded");
    assert_eq!(attempts_of(&api, &delivery).await.len(), 3);
}

/// Case 25 for repeats: the retry waits for a worker while its endpoint is disabled.
async fn a_retry_planned_before_its_endpoint_was_disabled_is_recorded_and_not_sent(
    backend: Backend,
) {
    let mut server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    server.stop().await;
    server.restart_with(&["--roles", "api"]).await;
    retry(&api, &delivery).await.expect(202);
    let path = format!("/webhook-endpoints/{}", endpoint.id);
    let change = json!({"enabled": false});
    api.patch(&path).json(&change).send().await.expect(200);
    let _worker = server.second_process(&["--roles", "worker"]);
    let recorded = attempt(&api, &delivery, 2).await;
    assert_eq!(recorded["status"], "failed");
    assert_eq!(recorded["trigger"], "manual");
    assert_eq!(recorded["payload"], Value::Null);
    let error = recorded["error"].as_str().expect("an error");
    assert!(error.starts_with("endpoint_disabled"), "{error}");
    assert_eq!(receiver.requests().len(), 1);
    assert_eq!(read(&api, &delivery).await["state"], "delivered");
}

/// What the bin got, once it is there.
async fn in_bin(api: &Api, bin: &str) -> Value {
    let path = format!("/inspector/bins/{bin}/requests");
    eventually("the webhook is in the bin", async || {
        api.all(&path).await.into_iter().next()
    })
    .await
}

async fn redirect(api: &Api, delivery: &Value) -> Answer {
    let id = delivery["id"].as_str().expect("an id");
    let path = format!("/webhook-deliveries/{id}/redirect");
    api.post(&path).send().await.expect(202)
}

async fn a_redirect_shows_the_same_webhook_in_a_bin(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(503));
    let body = json!({"url": receiver.url("/hook"), "headers": {"Authorization": "Basic abc"}});
    let endpoint = endpoint(&api, body).await;
    let event = publish(&api, "order.paid", json!({"n": 1.0})).await;
    let before = delivery_in(&api, &event, &endpoint.id, "retrying").await;
    let sent = receiver.requests_to("/hook").remove(0);

    let answer = redirect(&api, &before).await.json();
    let members: Vec<_> = answer.as_object().expect("an object").keys().collect();
    assert_eq!(members, ["bin_id", "url"]);
    let bin = answer["bin_id"].as_str().expect("an id");
    assert!(is_id("bin", bin));
    assert_eq!(answer["url"], format!("{}/inspect/{bin}", server.url()));
    let shown = in_bin(&api, bin).await;
    assert_eq!(shown["method"], "POST");
    assert_eq!(shown["body"], sent.text());
    for same in ["webhook-id", "x-botix-event", "x-botix-signature"] {
        assert_eq!(shown["headers"][same], sent.header(same), "{same}");
    }
    assert_eq!(shown["headers"]["authorization"], "********");
    assert!(!shown.to_string().contains("Basic abc"), "{shown}");

    let recorded = attempt(&api, &before, 3).await;
    assert_eq!(recorded["trigger"], "redirect");
    assert_eq!(recorded["status"], "succeeded");
    assert_eq!(recorded["url"], answer["url"]);
    assert_eq!(shown["headers"]["x-delivery-attempt"], "3");
    assert_eq!(
        shown["headers"]["x-botix-request-id"],
        recorded["request_id"]
    );
    let after = read(&api, &before).await;
    assert_eq!(after["state"], "retrying");
    assert_eq!(after["next_attempt_at"], before["next_attempt_at"]);
    assert_eq!(after["last_status_code"], 503, "the endpoint's own");
    assert_eq!(receiver.requests_to("/hook").len(), 1);
    let other = server.project("other").await.api;
    let foreign = other.get(&format!("/inspector/bins/{bin}/requests"));
    foreign.send().await.problem("NOT_FOUND");
}

/// The endpoint's address is refused, and so is a bin's that a tenant gives as an endpoint: the same
/// address is reached by a redirect alone, whose URL no tenant writes.
async fn a_redirect_reaches_the_inspector_where_private_targets_are_refused(backend: Backend) {
    let strict = [("BOTIX_WEBHOOKS__ALLOW_PRIVATE_TARGETS", "false")];
    let server = TestServer::start(backend, &strict).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint_at(&api, &receiver.url("/hook")).await;
    let own = api.post("/inspector/bins").send().await.expect(201);
    let direct = endpoint_at(&api, &own.member("url")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let dead = delivery_in(&api, &event, &hook.id, "dead").await;
    delivery_in(&api, &event, &direct.id, "dead").await;
    let bin = redirect(&api, &dead).await.member("bin_id");
    assert_eq!(in_bin(&api, &bin).await["headers"]["webhook-id"], event);
    assert_eq!(read(&api, &dead).await["state"], "dead");
    assert_eq!(dead_letter_of(&api, &dead).await["status"], "open");
    let path = format!("/inspector/bins/{}/requests", own.member("id"));
    assert_eq!(api.all(&path).await.len(), 0);
    assert_eq!(receiver.requests().len(), 0);
}
