//! The outcome table: what is tried again and when, and what is given up at once.

use super::ladder::steps_pass;
use super::{
    SHORT_LADDER, attempts_of, dead_letter_of, delivery_in, endpoint_at, numbers, publish,
};
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, on_both_databases};
use serde_json::{Value, json};
use std::time::{Duration, SystemTime};

on_both_databases!(
    any_2xx_is_delivered,
    a_refusal_is_one_request_and_a_dead_letter,
    gone_disables_the_endpoint,
    a_redirect_is_not_followed_and_no_success,
    retry_after_in_seconds_is_never_undercut,
    retry_after_as_a_date_is_never_undercut,
    retry_after_counts_as_an_attempt,
    a_429_without_retry_after_takes_the_next_step,
    a_retry_after_that_is_no_time_takes_the_next_step,
    a_broken_exchange_takes_the_next_step,
    an_answer_cut_short_takes_the_next_step_whatever_its_status,
);

async fn any_2xx_is_delivered(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    for status in [200, 201, 202, 204, 299] {
        let path = format!("/{status}");
        receiver.always(&path, Reply::status(status));
        let endpoint = endpoint_at(&api, &receiver.url(&path)).await;
        let event = publish(&api, "order.paid", json!({})).await;
        let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
        assert_eq!(delivery["last_status_code"], status);
        api.delete(&format!("/webhook-endpoints/{}", endpoint.id))
            .send()
            .await
            .expect(204);
    }
}

async fn a_refusal_is_one_request_and_a_dead_letter(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let refusals = [400, 401, 403, 404, 408, 409, 418, 422, 451, 499];
    for status in refusals {
        receiver.always(&format!("/{status}"), Reply::status(status));
        endpoint_at(&api, &receiver.url(&format!("/{status}"))).await;
    }
    publish(&api, "order.paid", json!({})).await;
    let dead = eventually("all are dead", async || {
        let dead = api.all("/webhook-deliveries?state=dead").await;
        (dead.len() == refusals.len()).then_some(dead)
    })
    .await;
    for delivery in &dead {
        let status = delivery["last_status_code"].as_u64().expect("a status");
        let letter = dead_letter_of(&api, delivery).await;
        assert_eq!(letter["attempts"], 1);
        let reason = letter["reason"].as_str().expect("a reason");
        assert!(reason.contains(&status.to_string()), "{status}: {reason}");
        assert_eq!(attempts_of(&api, delivery).await.len(), 1);
    }
    steps_pass(&api, &receiver, 2).await;
    for status in refusals {
        let requests = receiver.requests_to(&format!("/{status}"));
        let paid = requests
            .iter()
            .filter(|r| r.header("x-botix-event") == "order.paid");
        assert_eq!(paid.count(), 1, "{status}");
    }
}

async fn gone_disables_the_endpoint(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(410));
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dead").await;
    assert_eq!(dead_letter_of(&api, &delivery).await["attempts"], 1);
    let read = api
        .get(&format!("/webhook-endpoints/{}", endpoint.id))
        .send()
        .await
        .expect(200);
    assert_eq!(read.json()["enabled"], false);
    let next = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &next, &endpoint.id, "paused").await;
    steps_pass(&api, &receiver, 2).await;
    assert_eq!(receiver.requests_to("/hook").len(), 1);
}

async fn a_redirect_is_not_followed_and_no_success(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let elsewhere = receiver.url("/elsewhere");
    let redirects =
        [301, 302, 303, 307, 308].map(|s| Reply::status(s).header("location", &elsewhere));
    receiver.script("/hook", redirects);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let attempts = attempts_of(&api, &delivery).await;
    let seen: Vec<_> = attempts
        .iter()
        .map(|attempt| attempt["status_code"].as_u64())
        .collect();
    assert_eq!(seen, [301, 302, 303, 307, 308].map(Some));
    assert!(attempts.iter().all(|attempt| attempt["status"] == "failed"));
    assert_eq!(receiver.requests_to("/hook").len(), 5);
    assert_eq!(receiver.requests_to("/elsewhere").len(), 0);
}

async fn retry_after_in_seconds_is_never_undercut(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/hook", [Reply::status(429).header("retry-after", "3")]);
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let requests = receiver.wait_for("/hook", 2).await;
    let gap = requests[1]
        .at
        .duration_since(requests[0].at)
        .expect("time goes on");
    assert!(gap >= Duration::from_secs(3), "{gap:?}");
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(delivery["attempts"], 2);
}

async fn retry_after_as_a_date_is_never_undercut(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(5));
    receiver.script("/hook", [Reply::status(429).header("retry-after", &date)]);
    endpoint_at(&api, &receiver.url("/hook")).await;
    publish(&api, "order.paid", json!({})).await;
    let requests = receiver.wait_for("/hook", 2).await;
    let date = httpdate::parse_http_date(&date).expect("a date");
    assert!(requests[1].at >= date);
    assert_eq!(numbers(&requests), ["1", "2"]);
}

async fn retry_after_counts_as_an_attempt(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(429).header("retry-after", "1"));
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dead").await;
    assert_eq!(receiver.requests_to("/hook").len(), 5);
    assert_eq!(dead_letter_of(&api, &delivery).await["attempts"], 5);
}

async fn a_429_without_retry_after_takes_the_next_step(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let senseless = ["soon", "-1", "1.5", "99999999999999999999"];
    let replies = senseless.map(|value| Reply::status(429).header("retry-after", value));
    receiver.script("/hook", [Reply::status(429)]);
    receiver.script("/hook", replies.into_iter().take(3));
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    assert_eq!(delivery["attempts"], 5);
    // On anything but a 429 it says nothing.
    receiver.script("/hook", [Reply::status(503).header("retry-after", "3600")]);
    let event = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &event, &endpoint.id, "delivered").await;
}

/// Or a receiver whose clock is slow would have the whole ladder used up within a moment.
async fn a_retry_after_that_is_no_time_takes_the_next_step(backend: Backend) {
    let ladder = [("BOTIX_WEBHOOKS__LADDER", "1h,1h,1h,1h")];
    let server = TestServer::start(backend, &ladder).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let date = httpdate::fmt_http_date(SystemTime::now() - Duration::from_mins(1));
    for (path, value) in [("/zero", "0"), ("/slow-clock", &*date)] {
        receiver.always(path, Reply::status(429).header("retry-after", value));
        let endpoint = endpoint_at(&api, &receiver.url(path)).await;
        let event = publish(&api, "order.paid", json!({})).await;
        let delivery = delivery_in(&api, &event, &endpoint.id, "retrying").await;
        assert_eq!(delivery["attempts"], 1, "{value}");
        assert!(is_within(&delivery["next_attempt_at"], 3_500, 3_601));
        let path = format!("/webhook-endpoints/{}", endpoint.id);
        api.delete(&path).send().await.expect(204);
    }
}

/// Whether a time is at least and at most so many seconds ahead.
fn is_within(time: &Value, least: u64, most: u64) -> bool {
    let time = time.as_str().expect("a time");
    let time = humantime::parse_rfc3339(time).expect("a time");
    let ahead = time.duration_since(SystemTime::now()).unwrap_or_default();
    (Duration::from_secs(least)..=Duration::from_secs(most)).contains(&ahead)
}

async fn an_answer_cut_short_takes_the_next_step_whatever_its_status(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let cut = |head: &str| {
        let text = format!("HTTP/1.1 {head}\r\ncontent-length: 100\r\n\r\nabc");
        Reply::Raw(text.into_bytes())
    };
    let heads = ["400 Bad Request", "410 Gone", "429 Later\r\nretry-after: 3"];
    receiver.script("/hook", heads.map(cut));
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let attempts = attempts_of(&api, &delivery).await;
    let statuses: Vec<_> = (attempts.iter())
        .map(|attempt| attempt["status_code"].as_u64())
        .collect();
    assert_eq!(statuses, [400, 410, 429, 200].map(Some));
    for attempt in &attempts[..3] {
        let error = attempt["error"].as_str().expect("an error");
        assert!(error.starts_with("broken_response: "), "{error}");
    }
    let requests = receiver.requests_to("/hook");
    let gap = requests[3].at.duration_since(requests[2].at);
    assert!(gap.expect("time goes on") >= Duration::from_secs(3));

    // What became of it is told, not how the answer began.
    receiver.always("/hook", cut("200 OK"));
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "dead").await;
    let letter = dead_letter_of(&api, &delivery).await;
    let reason = letter["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("exhausted: broken_response"), "{reason}");
}

async fn a_broken_exchange_takes_the_next_step(backend: Backend) {
    let overrides = [SHORT_LADDER, ("BOTIX_WEBHOOKS__READ_TIMEOUT", "1s")];
    let server = TestServer::start(backend, &overrides).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script(
        "/hook",
        [
            Reply::Close,
            Reply::Hang,
            Reply::Raw(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()),
            Reply::Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconte".to_vec()),
        ],
    );
    let endpoint = endpoint_at(&api, &receiver.url("/hook")).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &endpoint.id, "delivered").await;
    let attempts = attempts_of(&api, &delivery).await;
    assert_eq!(attempts.len(), 5);
    for attempt in &attempts[..4] {
        assert_eq!(attempt["status"], "failed");
        assert_eq!(attempt["status_code"], Value::Null, "{attempt}");
        assert!(
            attempt["error"]
                .as_str()
                .is_some_and(|error| !error.is_empty()),
            "{attempt}"
        );
    }
    assert!(
        attempts[1]["error"]
            .as_str()
            .expect("an error")
            .contains("timeout"),
        "{}",
        attempts[1]
    );
    assert_eq!(attempts[4]["error"], Value::Null);

    // Nobody listens there.
    let closed = endpoint_at(&api, "http://127.0.0.1:1/hook").await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &closed.id, "dead").await;
    assert_eq!(attempts_of(&api, &delivery).await.len(), 5);
}
