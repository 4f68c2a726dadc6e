//! On `PostgreSQL` attempts and events lie in partitions of a day each, which go as wholes. What is looked
//! at past the server are the partitions alone; what they hold is read through the API.

use super::retention::{age, age_time};
use super::{attempts_of, delivery_in, endpoint, publish};
use crate::harness::receiver::Receiver;
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually};
use serde_json::{Value, json};

const TABLES: [(&str, &str); 2] = [("webhook_attempts", "delivery_id"), ("events", "id")];

/// The partition of a day, as an expression of SQL gives it.
fn partition(table: &str, day: &str) -> String {
    format!("to_regclass('{table}_' || to_char({day}, 'YYYYMMDD'))")
}

const TODAY: &str = "(now() AT TIME ZONE 'UTC')";

async fn number(server: &TestServer, query: &str) -> i64 {
    server.outside().await.number(query).await
}

async fn execute(server: &TestServer, statement: &str) {
    server.execute(statement, "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_day_that_is_over_goes_as_a_whole_and_what_must_stay_is_still_read() {
    let mut server = TestServer::start(Backend::Postgres, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint(&api, json!({"url": receiver.url("/hook")})).await;
    let mut deliveries = Vec::new();
    for n in 0..4 {
        let event = publish(&api, "order.paid", json!({"n": n})).await;
        deliveries.push(delivery_in(&api, &event, &hook.id, "delivered").await);
    }
    let off = api.patch(&format!("/webhook-endpoints/{}", hook.id));
    let off = off.json(&json!({"enabled": false}));
    off.send().await.expect(200);
    let event = publish(&api, "order.paid", json!({"kept": 1.0})).await;
    delivery_in(&api, &event, &hook.id, "paused").await;
    server.stop().await;

    // All of it was made on a day of 2024, and one attempt came late.
    for (table, _) in TABLES {
        let day = format!(
            "CREATE TABLE {table}_20240610 PARTITION OF {table} FOR VALUES \
             FROM ('018fff71-d000-0000-0000-000000000000') TO ('01900498-2c00-0000-0000-000000000000')"
        );
        execute(&server, &day).await;
    }
    age_time(&server, "webhook_attempts", "created_at", 15).await;
    let id = deliveries[2]["event_id"].as_str().expect("an id");
    let late =
        format!("UPDATE webhook_attempts SET created_at = now() WHERE payload LIKE '%{id}%'");
    execute(&server, &late).await;
    for (table, column) in [
        ("events", "id"),
        ("webhook_deliveries", "event_id"),
        ("webhook_deliveries", "id"),
        ("webhook_attempts", "delivery_id"),
    ] {
        age(&server, table, column).await;
    }
    age_time(&server, "webhook_deliveries", "updated_at", 15).await;
    for (table, rows) in [("webhook_attempts", 4), ("events", 5)] {
        let of_the_day = format!("SELECT COUNT(*) FROM {table}_20240610");
        assert_eq!(number(&server, &of_the_day).await, rows, "{table}");
    }
    server.restart().await;

    for (table, _) in TABLES {
        let there = format!("SELECT COUNT(to_regclass('{table}_20240610'))");
        eventually(&format!("the day of {table} is gone"), async || {
            (number(&server, &there).await == 0).then_some(())
        })
        .await;
    }
    let attempts = api.all("/webhook-attempts").await;
    assert_eq!(attempts.len(), 1, "{attempts:?}");
    let payload = attempts[0]["payload"].as_str().expect("a payload");
    assert!(payload.contains(id), "{payload}");
    let events = eventually("only what is waited for is left", async || {
        let events = api.all("/events").await;
        (events.len() == 1).then_some(events)
    })
    .await;
    let event = api.get(&format!("/events/{}", text(&events[0], "id")));
    assert_eq!(
        event.send().await.expect(200).json()["data"],
        json!({"kept": 1.0})
    );
    let resume = format!("/webhook-endpoints/{}/resume", hook.id);
    api.post(&resume).send().await.expect(200);
    let request = receiver.wait_for("/hook", 5).await.remove(4);
    assert!(
        request.text().ends_with(r#""data":{"kept":1.0}}"#),
        "{}",
        request.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_coming_days_have_partitions_before_they_begin() {
    let server = TestServer::start(Backend::Postgres, &[]).await;
    for (table, _) in TABLES {
        let day = format!("{TODAY} + interval '7 days'");
        let drop_it = format!(
            "DO $$ BEGIN EXECUTE 'DROP TABLE ' || {}; END $$",
            partition(table, &day)
        );
        execute(&server, &drop_it).await;
    }
    for (table, _) in TABLES {
        let days = format!(
            "SELECT COUNT({}) FROM generate_series(0, 7) AS n",
            partition(table, &format!("{TODAY} + n * interval '1 day'"))
        );
        eventually(&format!("the days of {table} are there"), async || {
            (number(&server, &days).await == 8).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_day_that_began_without_a_partition_gets_one_with_all_its_rows() {
    let server = TestServer::start(Backend::Postgres, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint(&api, json!({"url": receiver.url("/hook")})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &hook.id, "delivered").await;
    let attempts = attempts_of(&api, &delivery).await;
    for (table, key) in TABLES {
        // In one transaction, or the server would do it half-way.
        let into_default = format!(
            "DO $$ DECLARE day TEXT := {}; BEGIN \
             EXECUTE 'ALTER TABLE {table} DETACH PARTITION ' || day; \
             EXECUTE 'INSERT INTO {table} SELECT * FROM ' || day; \
             EXECUTE 'DROP TABLE ' || day; \
             ASSERT EXISTS (SELECT {key} FROM {table}_default), 'rows in DEFAULT'; END $$",
            partition(table, TODAY)
        );
        execute(&server, &into_default).await;
    }
    for (table, _) in TABLES {
        let outside = format!(
            "SELECT COUNT(*) FROM {table} WHERE tableoid IS DISTINCT FROM {}",
            partition(table, TODAY)
        );
        eventually(&format!("{table} are on their day"), async || {
            (number(&server, &outside).await == 0).then_some(())
        })
        .await;
    }
    assert_eq!(attempts_of(&api, &delivery).await, attempts);
    let event = format!("/events/{event}");
    api.get(&event).send().await.expect(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_older_installation_held_is_still_read_after_the_migration() {
    let mut server = TestServer::start(Backend::Postgres, &[]).await;
    let receiver = Receiver::start().await;
    let api = server.project("shop").await.api;
    let hook = endpoint(&api, json!({"url": receiver.url("/hook")})).await;
    let event = publish(&api, "order.paid", json!({})).await;
    let delivery = delivery_in(&api, &event, &hook.id, "delivered").await;
    let before = (attempts_of(&api, &delivery).await, api.all("/events").await);
    server.stop().await;

    // The tables as they were before there were days.
    let foundation = include_str!("../../../migrations/postgres/0001_foundation.sql");
    for (table, _) in TABLES {
        let own = |statement: &&str| {
            ["CREATE TABLE", "CREATE INDEX"]
                .iter()
                .any(|form| statement.contains(form))
                && (statement.contains(&format!("TABLE {table} ("))
                    || statement.contains(&format!("ON {table} (")))
        };
        let made: Vec<_> = foundation.split(';').filter(own).collect();
        assert!(made.len() > 2, "{made:?}");
        let undo = format!(
            "CREATE TABLE plain AS SELECT * FROM {table}; DROP TABLE {table}; {}; \
             INSERT INTO {table} SELECT * FROM plain; DROP TABLE plain",
            made.join(";")
        );
        for statement in undo.split(';') {
            execute(&server, statement).await;
        }
    }
    execute(&server, "DELETE FROM botix_migrations WHERE version = 5").await;
    server.restart().await;

    let after = (attempts_of(&api, &delivery).await, api.all("/events").await);
    assert_eq!(after, before);
    let event = publish(&api, "order.paid", json!({})).await;
    delivery_in(&api, &event, &hook.id, "delivered").await;
    assert_eq!(api.all("/webhook-attempts").await.len(), 2);
    let days = "SELECT COUNT(*) FROM pg_inherits WHERE inhparent = 'events'::regclass";
    assert_eq!(number(&server, days).await, 9);
}

fn text<'v>(of: &'v Value, member: &str) -> &'v str {
    of[member].as_str().expect("a text")
}
