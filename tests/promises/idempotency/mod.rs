//! Safe retries: one key, one execution, one answer, whatever fails in between.

mod crash;
mod grammar;
mod interleavings;
mod nodes;
mod parallel;
mod redis;
mod replay;
mod store;

use crate::harness::api::{Answer, Api, Request};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually};
use serde_json::Value;
use tokio::task::JoinHandle;

/// Sends `request`, whose work the test holds up, and waits until the server is at work on it: on
/// `PostgreSQL` until the handler waits for the table, and so has the key's lock.
pub async fn begin(
    server: &TestServer,
    request: &Request,
) -> JoinHandle<Result<Answer, reqwest::Error>> {
    let client = tokio::spawn(request.clone().try_send());
    server.at_work().await;
    if server.backend != Backend::Sqlite {
        let mut outside = server.outside().await;
        let waiting = "SELECT count(*) FROM pg_stat_activity \
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("the handler waits for the table", async || {
            (outside.number(waiting).await > 0).then_some(())
        })
        .await;
    }
    client
}

/// Asserts that rows, counter and `contact.created` events agree, and gives the ids of the rows.
pub async fn whole_contacts(api: &Api) -> Vec<String> {
    let rows = api.all("/contacts").await;
    let ids: Vec<_> = rows.iter().map(|row| text(row, "id")).collect();
    let count = api.get("/contacts/count").send().await.expect(200).json();
    assert_eq!(count["count"], ids.len(), "the counter and the rows");
    let mut announced: Vec<_> = api
        .all("/events")
        .await
        .iter()
        .filter(|event| event["type"] == "contact.created")
        .map(|event| text(&event["data"], "id"))
        .collect();
    announced.sort();
    let mut sorted = ids.clone();
    sorted.sort();
    assert_eq!(announced, sorted, "the events and the rows");
    ids
}

pub fn text(value: &Value, member: &str) -> String {
    value[member]
        .as_str()
        .unwrap_or_else(|| panic!("{member} in {value}"))
        .to_owned()
}
