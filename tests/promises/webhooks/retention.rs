//! What has had its time goes, and what is still needed stays. The rows are made old past the server:
//! what tells their age are the times that their ids begin with.

use super::{attempts_of, delivery_in, endpoint, publish};
use crate::harness::receiver::{Receiver, Reply};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, on_both_databases};
use serde_json::{Value, json};

on_both_databases!(
    what_is_finished_goes_after_14_days_and_what_waits_or_is_dead_stays,
    an_open_dead_letter_goes_after_90_days_and_a_resolved_one_after_14,
    an_attempt_is_shown_for_14_days_to_the_moment,
);

/// 14 days in seconds.
const FINISHED: u32 = 14 * 86_400;

/// Gives the id in a column a time in 2024.
pub async fn age(server: &TestServer, table: &str, column: &str) {
    let postgres = format!(
        "UPDATE {table} SET {column} = \
         ('019000000000' || substr(replace({column}::text, '-', ''), 13))::uuid"
    );
    let sqlite =
        format!("UPDATE {table} SET {column} = unhex('019000000000' || substr(hex({column}), 13))");
    server.execute(&postgres, &sqlite).await;
}

/// Sets a time of every row to so many days ago.
pub async fn age_time(server: &TestServer, table: &str, column: &str, days: u32) {
    let postgres = format!(
        "UPDATE {table} SET {column} = now() - interval '{days} days' WHERE {column} IS NOT NULL"
    );
    let sqlite = format!(
        "UPDATE {table} SET {column} = (unixepoch() - {days} * 86400) * 1000000 \
         WHERE {column} IS NOT NULL"
    );
    server.execute(&postgres, &sqlite).await;
}

async fn what_is_finished_goes_after_14_days_and_what_waits_or_is_dead_stays(backend: Backend) {
    let mut server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.script("/dead", [Reply::status(403)]);
    let listen = async |path: &str, enabled: bool| {
        let event_types = [format!("a{}", path.replace('/', "."))];
        let url = receiver.url(path);
        let body = json!({"url": url, "event_types": event_types, "enabled": enabled});
        endpoint(&api, body).await
    };
    let done = listen("/done", true).await;
    let dead = listen("/dead", true).await;
    let waits = listen("/waits", false).await;
    let of_done = publish(&api, "a.done", json!({})).await;
    delivery_in(&api, &of_done, &done.id, "delivered").await;
    let of_dead = publish(&api, "a.dead", json!({})).await;
    delivery_in(&api, &of_dead, &dead.id, "dead").await;
    let of_waits = publish(&api, "a.waits", json!({"kept": 1.0})).await;
    delivery_in(&api, &of_waits, &waits.id, "paused").await;
    publish(&api, "a.nobody", json!({})).await;
    server.stop().await;
    for (table, column) in [
        ("events", "id"),
        ("webhook_deliveries", "event_id"),
        ("webhook_deliveries", "id"),
        ("webhook_attempts", "id"),
        ("webhook_attempts", "delivery_id"),
        ("webhook_dead_letters", "delivery_id"),
        ("webhook_dead_letters", "event_id"),
    ] {
        age(&server, table, column).await;
    }
    age_time(&server, "webhook_attempts", "created_at", 15).await;
    age_time(&server, "webhook_deliveries", "updated_at", 15).await;
    server.restart().await;
    // Made now, so it stays.
    let fresh = publish(&api, "a.done", json!({})).await;
    let fresh = delivery_in(&api, &fresh, &done.id, "delivered").await;
    eventually("what is finished is gone", async || {
        let attempts = api.all("/webhook-attempts").await;
        let deliveries = api.all("/webhook-deliveries").await;
        let events = api.all("/events").await;
        ((attempts.len(), deliveries.len(), events.len()) == (1, 3, 3)).then_some(())
    })
    .await;
    let mut types: Vec<_> = (api.all("/webhook-deliveries").await.iter())
        .map(|delivery| delivery["event_type"].as_str().expect("a type").to_owned())
        .collect();
    types.sort_unstable();
    assert_eq!(types, ["a.dead", "a.done", "a.waits"]);
    assert_eq!(attempts_of(&api, &fresh).await.len(), 1);

    // What stayed is whole: the one is sent, the other is redelivered.
    let resume = format!("/webhook-endpoints/{}/resume", waits.id);
    api.post(&resume).send().await.expect(200);
    let request = receiver.wait_for("/waits", 1).await.remove(0);
    assert!(
        request.text().ends_with(r#""data":{"kept":1.0}}"#),
        "{}",
        request.text()
    );
    let bulk = api.post("/webhook-dead-letters/redeliver");
    bulk.send().await.expect(202);
    receiver.wait_for("/dead", 2).await;
}

async fn an_open_dead_letter_goes_after_90_days_and_a_resolved_one_after_14(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    receiver.always("/hook", Reply::status(403));
    let hook = endpoint(&api, json!({"url": receiver.url("/hook")})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &hook.id, "dead").await;
    let letter = api.all("/webhook-dead-letters").await.remove(0);
    let id = letter["id"].as_str().expect("an id");
    let redeliver = format!("/webhook-dead-letters/{id}/redeliver");
    api.post(&redeliver).send().await.expect(202);
    let both = eventually("it is dead again", async || {
        let letters = api.all("/webhook-dead-letters").await;
        (letters.len() == 2).then_some(letters)
    })
    .await;
    age_time(&server, "webhook_dead_letters", "created_at", 89).await;
    age_time(&server, "webhook_dead_letters", "resolved_at", 15).await;
    let left = eventually("the resolved one is gone", async || {
        let letters = api.all("/webhook-dead-letters").await;
        (letters.len() == 1).then_some(letters)
    })
    .await;
    assert_eq!(left[0]["id"], both[0]["id"]);
    assert_eq!(left[0]["status"], "open");
    age_time(&server, "webhook_dead_letters", "created_at", 91).await;
    eventually("the open one is gone", async || {
        let letters = api.all("/webhook-dead-letters").await;
        letters.is_empty().then_some(())
    })
    .await;
    let path = format!(
        "/webhook-deliveries/{}",
        delivery["id"].as_str().expect("an id")
    );
    api.get(&path).send().await.expect(200);
}

async fn an_attempt_is_shown_for_14_days_to_the_moment(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint(&api, json!({"url": receiver.url("/hook")})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &hook.id, "delivered").await;
    let retry = format!("/webhook-deliveries/{}/retry", text(&delivery, "id"));
    for count in 2..=3 {
        api.post(&retry).send().await.expect(202);
        eventually("it is on record", async || {
            (attempts_of(&api, &delivery).await.len() == count).then_some(())
        })
        .await;
    }
    let of_delivery = format!("/webhook-deliveries/{}/attempts", text(&delivery, "id"));
    for list in ["/webhook-attempts", &of_delivery] {
        age_attempt(&server, 1, FINISHED - 60).await;
        let page = api.get(&format!("{list}?cursor_limit=1")).send().await;
        let page = page.expect(200).json();
        assert_eq!(page["data"][0]["number"], 3);
        assert_eq!(api.all(list).await.len(), 3);
        // Its delivery is young, so no sweep looks at it; and a walk that began before goes on.
        age_attempt(&server, 1, FINISHED + 1).await;
        assert_eq!(api.all(list).await.len(), 2);
        let next = format!(
            "{list}?cursor_limit=1&cursor={}",
            text(&page, "next_cursor")
        );
        let next = api.get(&next).send().await.expect(200).json();
        assert_eq!(next["data"][0]["number"], 2);
        assert_eq!(next["has_more"], false);
    }
}

/// Gives the attempts of a number an age.
async fn age_attempt(server: &TestServer, number: u32, seconds: u32) {
    let postgres = format!(
        "UPDATE webhook_attempts SET created_at = now() - interval '{seconds} seconds' \
         WHERE number = {number}"
    );
    let sqlite = format!(
        "UPDATE webhook_attempts SET created_at = (unixepoch() - {seconds}) * 1000000 \
         WHERE number = {number}"
    );
    server.execute(&postgres, &sqlite).await;
}

fn text<'v>(of: &'v Value, member: &str) -> &'v str {
    of[member].as_str().expect("a text")
}
