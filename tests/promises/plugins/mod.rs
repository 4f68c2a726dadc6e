//! Tenants' WebAssembly: what is taken, what it does to a webhook, and that it harms nobody else.

pub mod example;
mod hostile;
mod upload;
mod versions;

use crate::harness::api::{Answer, Api, Request};
use crate::harness::eventually;
use serde_json::{Value, json};

pub fn upload(api: &Api, path: &str, component: &[u8]) -> Request {
    api.post(path).body("application/wasm", component)
}

/// Uploads a plugin and waits until its first version is ready, and so active.
pub async fn ready(api: &Api, name: &str, component: &[u8]) -> String {
    let made = upload(api, &format!("/plugins?name={name}"), component)
        .send()
        .await
        .expect(201);
    let id = made.member("id");
    settled(api, &id, 1, "ready").await;
    id
}

/// Adds a version and waits until it is ready.
pub async fn ready_version(api: &Api, id: &str, version: u64, component: &[u8]) -> Answer {
    let path = format!("/plugins/{id}/versions");
    let made = upload(api, &path, component).send().await.expect(201);
    settled(api, id, version, "ready").await;
    made
}

/// The plugin, once that version has that status.
pub async fn settled(api: &Api, id: &str, version: u64, status: &str) -> Value {
    let what = format!("version {version} of {id} is {status}");
    eventually(&what, async || {
        let plugin = api
            .get(&format!("/plugins/{id}"))
            .send()
            .await
            .expect(200)
            .json();
        let versions = plugin["versions"].as_array().expect("a list");
        let row = versions.iter().find(|row| row["version"] == version)?;
        let now = row["status"].as_str().expect("a status");
        // An answer shows one moment: a ready version never stands beside no active one.
        let ready = versions.iter().any(|row| row["status"] == "ready");
        assert_eq!(ready, !plugin["active_version"].is_null(), "{plugin}");
        assert!(now == status || now == "compiling", "{row}");
        (now == status).then(|| plugin.clone())
    })
    .await
}

/// An endpoint whose webhooks go through a plugin.
pub async fn plugged(
    api: &Api,
    url: &str,
    plugin: &str,
    config: Value,
) -> crate::webhooks::Endpoint {
    let body = json!({"url": url, "plugin_id": plugin, "plugin_config": config});
    crate::webhooks::endpoint(api, body).await
}
