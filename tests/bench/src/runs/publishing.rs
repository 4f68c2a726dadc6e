//! Events as tenants publish them, and the endpoints that they go to.

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};
use ulid::Ulid;

use crate::{
    Fault,
    client::{Answer, Client, key},
    load::{Job, Ticket},
    rig::Receiver,
};

/// The example plugin, as the server has it too.
const EXAMPLE: &[u8] = include_bytes!("../../../../plugins/prebuilt/stripe-style.wasm");

/// Bytes in the body of a POST /events.
const PAYLOAD: usize = 1_024;

/// The key of the first request that is no part of a load.
const BESIDE: u64 = u64::MAX / 2;

/// Makes the endpoints of a project, once; their ids. All have the plugin, if there is one.
pub async fn make_endpoints(
    client: &Client,
    receiver: &Receiver,
    numbers: Range<u16>,
    plugin: Option<&Path>,
) -> Result<Vec<Ulid>, Fault> {
    let mut plugin_id = Value::Null;
    let mut keys = (BESIDE..).map(key);
    let mut next_key = || keys.next().expect("a range without end");
    if let Some(plugin) = plugin {
        let component = if plugin == Path::new("example") {
            EXAMPLE.to_vec()
        } else {
            std::fs::read(plugin).map_err(|error| format!("{}: {error}", plugin.display()))?
        };
        let made = client.post(
            "/plugins?name=bench",
            next_key(),
            "application/wasm",
            component.into(),
        );
        plugin_id = client.call(made).await?["id"].clone();
        ready(client, &plugin_id).await?;
    }
    let mut ids = Vec::new();
    for number in numbers {
        let mut body = json!({"url": receiver.url(number), "event_types": ["bench.*"]});
        if !plugin_id.is_null() {
            body["plugin_id"] = plugin_id.clone();
        }
        let made = client.post(
            "/webhook-endpoints",
            next_key(),
            "application/json",
            body.to_string().into(),
        );
        let made = client.call(made).await?;
        let id = made["id"].as_str().and_then(|id| id.strip_prefix("whe_"));
        ids.push(Ulid::from_string(id.ok_or("an endpoint without id")?)?);
    }
    Ok(ids)
}

/// Waits until a plugin's version 1 runs.
async fn ready(client: &Client, plugin: &Value) -> Result<(), Fault> {
    let path = format!("/plugins/{}", plugin.as_str().ok_or("a plugin without id")?);
    for _ in 0..1_200 {
        let plugin = client.call(client.get(&path)).await?;
        if plugin["active_version"] == 1 {
            return Ok(());
        }
        if plugin["versions"][0]["status"] == "rejected" {
            return Err(format!("the plugin is rejected: {plugin}").into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Err("the plugin is not ready after a minute".into())
}

/// Publishes an event for each ticket, in turn as each of these clients.
pub fn publishing(clients: Vec<Client>, receiver: Arc<Receiver>) -> Job {
    Job {
        make: Box::new(move |ticket| {
            let turn = usize::try_from(ticket.number).unwrap_or(0) % clients.len();
            event(&clients[turn], &receiver, ticket)
        }),
        check: |answer: &Answer| {
            if answer.status == 201 && !answer.replayed {
                Ok(())
            } else {
                Err(answer.complaint())
            }
        },
    }
}

fn event(client: &Client, receiver: &Receiver, ticket: Ticket) -> Request<Full<Bytes>> {
    let due = receiver.micros(ticket.due);
    let number = ticket.number;
    let start = format!(
        r#"{{"type":"bench.tick","data":{{"id":"tick_{number}","due_micros":{due},"fill":""#
    );
    let fill = PAYLOAD.saturating_sub(start.len() + 3);
    let body = format!(r#"{start}{:x<fill$}"}}}}"#, "");
    client.post("/events", key(number), "application/json", body.into())
}
