//! Safe retries: one key, one execution, one answer, whatever fails in between.

mod crash;
mod grammar;
mod parallel;
mod replay;
mod store;

use crate::harness::api::{Answer, Api, Request};
use crate::harness::eventually;
use serde_json::Value;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Sends `request` as a client does that asks again while its key is in progress, and waits until the
/// server is at work on it.
///
/// Whether the client's first request or one of ours got there first does not matter: the client gets
/// the one answer either way.
pub async fn begin(request: &Request) -> JoinHandle<Result<Answer, reqwest::Error>> {
    let client = tokio::spawn({
        let request = request.clone();
        async move {
            loop {
                let answer = request.clone().try_send().await?;
                if answer.code().as_deref() != Some("IDEMPOTENCY_KEY_IN_PROGRESS") {
                    return Ok(answer);
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    });
    until_in_progress(request).await;
    client
}

/// Waits until the server is at work on `request`, which somebody sent before.
pub async fn until_in_progress(request: &Request) {
    eventually("the key is in progress", async || {
        let probe = tokio::time::timeout(Duration::from_secs(1), request.clone().send()).await;
        let code = probe.ok().and_then(|answer| answer.code());
        (code.as_deref() == Some("IDEMPOTENCY_KEY_IN_PROGRESS")).then_some(())
    })
    .await;
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
