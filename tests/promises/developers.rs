//! The page on which people see how the webhooks of their project stand.

use crate::harness::api::{Answer, Api};
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, on_both_databases};
use crate::webhooks::{SHORT_LADDER, endpoint_at, publish};
use reqwest::Method;
use serde_json::json;

on_both_databases!(
    people_see_which_endpoints_fail_and_what_died,
    a_key_that_may_not_read_sees_nothing,
);

async fn look(api: &Api, key: &str) -> Answer {
    api.outside(Method::POST, "/developers")
        .body(
            "application/x-www-form-urlencoded",
            format!("api_key={key}"),
        )
        .send()
        .await
}

/// What stands in a section of the page.
#[track_caller]
fn section<'p>(page: &'p str, id: &str) -> &'p str {
    let (_, from) = page
        .split_once(&format!("<section id=\"{id}\">"))
        .unwrap_or_else(|| panic!("{id} in {page}"));
    from.split_once("</section>").expect("an end").0
}

async fn people_see_which_endpoints_fail_and_what_died(backend: Backend) {
    let server = TestServer::start(backend, &[SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let other = server.project("other").await.api;
    let asked = api.outside(Method::GET, "/developers").send().await;
    let asked = asked.expect(200);
    assert!(
        asked.text().contains("type=\"password\""),
        "{}",
        asked.text()
    );

    receiver.always("/bad", Reply::status(403));
    receiver.always("/gone", Reply::status(410));
    let good = endpoint_at(&api, &receiver.url("/good?a=%3Cb%3E&c")).await;
    let bad = endpoint_at(&api, &receiver.url("/bad")).await;
    let gone = endpoint_at(&api, &receiver.url("/gone")).await;
    endpoint_at(&other, &receiver.url("/other")).await;
    publish(&api, "order.paid", json!({})).await;
    eventually("two are dead", async || {
        let letters = api.all("/webhook-dead-letters").await;
        (letters.len() == 2).then_some(())
    })
    .await;
    let answer = look(&api, api.api_key()).await.expect(200);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    let policy = answer.header("content-security-policy").expect("a policy");
    assert!(policy.contains("default-src 'none'"), "{policy}");
    let page = answer.text();
    let endpoints = section(&page, "endpoints");
    let row = |id: &str| {
        let row = endpoints.split("<tr>").find(|row| row.contains(id));
        row.unwrap_or_else(|| panic!("{id} in {endpoints}"))
    };
    assert!(row(&bad.id).contains("<strong>failing</strong> since"));
    assert!(row(&gone.id).contains("<strong>disabled</strong>: gone"));
    assert!(row(&good.id).contains("enabled") && row(&good.id).contains("&amp;c"));
    assert!(!page.contains("/other"), "of this project alone");
    assert!(!page.contains(api.api_key()), "the key is not shown");
    let signals = section(&page, "signals");
    for (what, whom) in [("endpoint.failing", &bad), ("endpoint.disabled", &gone)] {
        assert!(signals.contains(what) && signals.contains(&whom.id));
    }
    let today = section(&page, "dead-letters");
    assert!(today.contains("<td>2</td>"), "{today}");
    assert!(section(&page, "waiting").contains("paused"));

    let page = look(&other, other.api_key()).await.expect(200).text();
    assert!(page.contains("/other") && !page.contains(&bad.id));
}

async fn a_key_that_may_not_read_sees_nothing(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let project = server.project("shop").await;
    let api = &project.api;
    let (writes, _) = server.scoped(&project, "write").await;
    for key in [writes.api_key(), "nonsense", ""] {
        let answer = look(api, key).await.expect(401);
        assert!(answer.text().contains("role=\"alert\""));
        assert!(!answer.text().contains("Endpoints"));
    }
    let answer = api
        .outside(Method::POST, "/developers")
        .body("application/x-www-form-urlencoded", "x=".repeat(4_000))
        .send()
        .await;
    answer.expect(400);
    look(api, api.api_key()).await.expect(200);
}
