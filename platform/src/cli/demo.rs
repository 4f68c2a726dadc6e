//! `botix demo`: the whole platform at work, through its own public door.
//!
//! It starts a server on an embedded store in a fresh folder, then does what a tenant would do with a
//! REST client: uploads the example plugin, points an endpoint at a bin of the inspector, creates a
//! contact, and shows the webhook that arrives, transformed and signed by the plugin.

use std::{path::Path, time::Duration};

use futures::FutureExt as _;
use serde_json::{Value, json};

use super::{CommandResult, serve::stop_signal, start_log};
use crate::{
    app::{App, Bound, Store, together},
    config::{Config, Overrides},
    contract::idempotency::Protection,
    resources::projects,
};

const EXAMPLE: &[u8] = include_bytes!("../../../plugins/prebuilt/stripe-style.wasm");

type Fault = Box<dyn std::error::Error + Send + Sync>;

pub(super) async fn run(once: bool) -> CommandResult {
    let folder = std::env::temp_dir().join(format!("botix-demo-{}", ulid::Ulid::generate()));
    let ended = within(&folder, once).await;
    let _ = std::fs::remove_dir_all(&folder);
    ended
}

async fn within(folder: &Path, once: bool) -> CommandResult {
    let overrides = Overrides {
        database_url: Some(format!("sqlite:{}", folder.join("botix.db").display())),
        ..Overrides::default()
    };
    let mut config = Config::load(None, &overrides)?;
    config.webhooks.allow_private_targets = true;
    start_log(if once { "error" } else { "warn" });
    let usual = Bound::public(&config).await;
    let bound = if let Ok(bound) = usual {
        bound
    } else {
        // The usual address is taken, perhaps by another demo: any other one will do.
        config.listen.set_port(0);
        Bound::public(&config).await?
    };
    let local_url = bound.local_url.clone();
    let store = Store::open(config).await?;
    let mut tx = store.db.begin().await?;
    let (project, key) = projects::create(&mut tx, "demo").await?;
    tx.commit().await?;
    let app = App::new(store, &local_url, Protection::Full);
    let stop = stop_signal()?;
    let tenant = Tenant {
        http: reqwest::Client::new(),
        api: format!("{local_url}/public/v1"),
        key: secrecy::ExposeSecret::expose_secret(&key).to_owned(),
    };
    let shown = async {
        let shown = tenant
            .show(&local_url, &project.to_string(), folder, once)
            .await;
        if once || shown.is_err() {
            stop.cancel();
        }
        shown
    };
    let serving = async { app.serve(bound, stop.clone()).await.map_err(Fault::from) };
    let working = async { app.work(true, stop.clone()).await.map_err(Fault::from) };
    let observing = app.observe(stop.clone()).map(Ok);
    together([
        serving.boxed_local(),
        working.boxed_local(),
        observing.boxed_local(),
        shown.boxed_local(),
    ])
    .await
}

/// A tenant with a REST client.
struct Tenant {
    http: reqwest::Client,
    api: String,
    key: String,
}

impl Tenant {
    async fn show(&self, url: &str, project: &str, folder: &Path, once: bool) -> CommandResult {
        println!("BOTIX demo, data in {} until it ends", folder.display());
        println!("1. a project            {project}");
        let plugin = self
            .post(
                "/plugins?name=stripe-style",
                "application/wasm",
                EXAMPLE.to_vec(),
            )
            .await?;
        println!(
            "2. an example plugin    {} drops personal fields, adds one, signs Stripe-style",
            text(&plugin, "/id")
        );
        let bin = self.post_json("/inspector/bins", &json!({})).await?;
        println!("3. an inspector bin     {}", text(&bin, "/url"));
        let endpoint = self
            .post_json(
                "/webhook-endpoints",
                &json!({"url": bin["url"], "event_types": ["contact.*"], "plugin_id": plugin["id"]}),
            )
            .await?;
        println!("4. an endpoint          {}", text(&endpoint, "/id"));
        let contact = self
            .post_json(
                "/contacts",
                &json!({"phone": "+4915112345678", "name": "Ada Lovelace", "email": "ada@example.com", "tags": ["vip"]}),
            )
            .await?;
        println!("5. a contact            {}", text(&contact, "/id"));
        let webhook = self.wait_for_webhook(&text(&bin, "/id")).await?;
        println!(
            "6. the webhook arrived  {} {}",
            text(&webhook, "/method"),
            text(&bin, "/url")
        );
        for name in [
            "x-botix-event",
            "x-botix-signature",
            "x-acme-signature",
            "webhook-id",
            "webhook-signature",
        ] {
            if let Some(value) = webhook["headers"][name].as_str() {
                println!("     {name}: {value}");
            }
        }
        println!("     {}", text(&webhook, "/body"));
        if once {
            return Ok(());
        }
        println!();
        println!(
            "API        {}   (Authorization: Bearer {})",
            self.api, self.key
        );
        println!("Swagger UI {url}/docs");
        println!("OpenAPI    {url}/openapi.json  {url}/openapi-3.0.json");
        println!("Errors     {url}/error-codes");
        println!("Health     {url}/healthz  {url}/readyz  {url}/metrics");
        println!(
            "Inspector  {}/inspector/bins/{}/requests",
            self.api,
            text(&bin, "/id")
        );
        println!("Ctrl-C ends it.");
        Ok(())
    }

    async fn wait_for_webhook(&self, bin: &str) -> Result<Value, Fault> {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
        while tokio::time::Instant::now() < deadline {
            let request = self
                .http
                .get(format!("{}/inspector/bins/{bin}/requests", self.api));
            let page = self.answer(request).await?;
            if let Some(webhook) = page["data"].get(0) {
                return Ok(webhook.clone());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err("the webhook did not arrive within 30 seconds".into())
    }

    async fn post_json(&self, path: &str, body: &Value) -> Result<Value, Fault> {
        self.post(path, "application/json", body.to_string().into_bytes())
            .await
    }

    async fn post(&self, path: &str, content_type: &str, body: Vec<u8>) -> Result<Value, Fault> {
        let request = self
            .http
            .post(format!("{}{path}", self.api))
            .header("content-type", content_type)
            .header("idempotency-key", ulid::Ulid::generate().to_string())
            .body(body);
        self.answer(request).await
    }

    async fn answer(&self, request: reqwest::RequestBuilder) -> Result<Value, Fault> {
        let response = request.bearer_auth(&self.key).send().await?;
        let status = response.status();
        let body = response.bytes().await?;
        if !status.is_success() {
            return Err(format!("{status}: {}", String::from_utf8_lossy(&body)).into());
        }
        Ok(serde_json::from_slice(&body)?)
    }
}

fn text(value: &Value, pointer: &str) -> String {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}
