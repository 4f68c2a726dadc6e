//! The example guest that the project ships, as it is embedded and, where the test command rebuilt
//! it from its source, as rebuilt: the same promises over both.

use super::{plugged, ready};
use crate::harness::receiver::{Received, Receiver};
use crate::harness::server::TestServer;
use crate::harness::{Backend, eventually, on_both_databases};
use crate::webhooks::{attempts_of, delivery_in, hex, hmac_sha256, publish, published, verify};
use serde_json::json;

on_both_databases!(
    it_drops_personal_fields_and_adds_a_summary,
    it_signs_as_stripe_does,
    it_leaves_other_bytes_alone,
    its_configuration_says_what_to_drop,
    a_wrong_configuration_is_a_visible_failure,
);

const REBUILT: &str = "BOTIX_TEST_REBUILT_GUEST";

pub fn guests() -> Vec<(&'static str, Vec<u8>)> {
    let prebuilt = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../plugins/prebuilt/stripe-style.wasm"
    );
    let read = |path: &str| std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut guests = vec![("embedded", read(prebuilt))];
    if let Ok(rebuilt) = std::env::var(REBUILT) {
        guests.push(("rebuilt", read(&rebuilt)));
    }
    guests
}

/// Stripe's own check: the header's time and body, under the endpoint's secret.
#[track_caller]
pub fn verify_stripe_style(request: &Received, header: &str, secret: &str) {
    let value = request.header(header);
    let (time, signature) = value.split_once(',').expect("two parts");
    let time = time.strip_prefix("t=").expect("a time");
    let signature = signature.strip_prefix("v1=").expect("a signature");
    let message = [time.as_bytes(), b".", &request.body].concat();
    assert_eq!(signature, hex(&hmac_sha256(secret, &message)));
    let sent: u64 = time.parse().expect("Unix seconds");
    let now = std::time::SystemTime::now();
    let now = now
        .duration_since(std::time::UNIX_EPOCH)
        .expect("a clock")
        .as_secs();
    assert!(now.abs_diff(sent) < 300);
}

async fn it_drops_personal_fields_and_adds_a_summary(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    for (guest, component) in guests() {
        let api = server.project(guest).await.api;
        let plugin = ready(&api, guest, &component).await;
        let path = format!("/{guest}");
        plugged(&api, &receiver.url(&path), &plugin, json!({})).await;
        let contact = json!({"phone": "+4915112345678", "name": "Ada", "email": "ada@example.com", "tags": ["vip"]});
        let contact = api
            .post("/contacts")
            .json(&contact)
            .send()
            .await
            .expect(201)
            .json();
        let request = receiver.wait_for(&path, 1).await.remove(0);
        for personal in [
            "4915112345678",
            "Ada",
            "ada@example.com",
            "phone",
            "email",
            "name",
        ] {
            assert!(
                !request.text().contains(personal),
                "{guest}: {personal} in {}",
                request.text()
            );
        }
        let data = &request.json()["data"];
        assert_eq!(data["id"], contact["id"]);
        assert_eq!(data["tags"], json!(["vip"]));
        let summary = format!("contact.created {}", contact["id"].as_str().expect("an id"));
        assert_eq!(data["summary"], summary);
    }
}

async fn it_signs_as_stripe_does(backend: Backend) {
    let server = TestServer::start(backend, &[crate::webhooks::SHORT_LADDER]).await;
    let receiver = Receiver::start().await;
    for (guest, component) in guests() {
        let api = server.project(guest).await.api;
        let plugin = ready(&api, guest, &component).await;
        let path = format!("/{guest}");
        receiver.script(&path, [crate::harness::receiver::Reply::status(500)]);
        let endpoint = plugged(&api, &receiver.url(&path), &plugin, json!({})).await;
        publish(&api, "order.paid", json!({"name": "Ada", "amount": 1})).await;
        let requests = receiver.wait_for(&path, 2).await;
        for request in &requests {
            verify_stripe_style(request, "x-acme-signature", &endpoint.secret);
            verify(request, &endpoint.secret);
        }
        assert_eq!(requests[0].body, requests[1].body, "{guest}");
    }
}

async fn it_leaves_other_bytes_alone(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    for (guest, component) in guests() {
        let api = server.project(guest).await.api;
        let plugin = ready(&api, guest, &component).await;
        let path = format!("/{guest}");
        plugged(&api, &receiver.url(&path), &plugin, json!({})).await;
        let kept = r#""n":1.0,"big":1e400,"z":"\u00e9","a" : [1 ,2]"#;
        published(
            &api,
            &format!(r#"{{"type":"order.paid","data":{{{kept},"name":"Ada"}}}}"#),
        )
        .await;
        let request = receiver.wait_for(&path, 1).await.remove(0);
        assert!(request.text().contains(kept), "{guest}: {}", request.text());
        assert!(!request.text().contains("Ada"));
    }
}

async fn its_configuration_says_what_to_drop(backend: Backend) {
    let server = TestServer::start(backend, &[]).await;
    let receiver = Receiver::start().await;
    for (guest, component) in guests() {
        let api = server.project(guest).await.api;
        let plugin = ready(&api, guest, &component).await;
        let path = format!("/{guest}");
        let config = json!({
            "drop": ["iban"], "drop_event_types": ["order.secret"], "signature_header": "X-Shop-Signature",
        });
        let endpoint = plugged(&api, &receiver.url(&path), &plugin, config).await;
        let secret = publish(&api, "order.secret", json!({})).await;
        publish(
            &api,
            "order.paid",
            json!({"name": "Ada", "bank": {"iban": "DE00"}}),
        )
        .await;
        let request = receiver.wait_for(&path, 1).await.remove(0);
        assert_eq!(request.header("x-botix-event"), "order.paid");
        assert_eq!(request.json()["data"]["name"], "Ada");
        assert!(!request.text().contains("DE00"), "{guest}");
        verify_stripe_style(&request, "x-shop-signature", &endpoint.secret);
        delivery_in(&api, &secret, &endpoint.id, "dropped").await;
        assert_eq!(receiver.requests_to(&path).len(), 1);
    }
}

async fn a_wrong_configuration_is_a_visible_failure(backend: Backend) {
    let server = TestServer::start(backend, &[("BOTIX_WEBHOOKS__LADDER", "2s,2s,2s,2s")]).await;
    let receiver = Receiver::start().await;
    for (guest, component) in guests() {
        let api = server.project(guest).await.api;
        let plugin = ready(&api, guest, &component).await;
        let path = format!("/{guest}");
        let endpoint = plugged(
            &api,
            &receiver.url(&path),
            &plugin,
            json!({"dorp": ["name"]}),
        )
        .await;
        let event = publish(&api, "order.paid", json!({"name": "Ada"})).await;
        let delivery = delivery_in(&api, &event, &endpoint.id, "retrying").await;
        let attempt = attempts_of(&api, &delivery).await.remove(0);
        assert_eq!(attempt["status"], "failed");
        let error = attempt["error"].as_str().expect("an error");
        assert!(error.contains("dorp"), "{error}");
        assert_eq!(receiver.requests_to(&path).len(), 0, "nothing leaks");

        // Corrected in time, the ladder delivers it.
        let endpoint_path = format!("/webhook-endpoints/{}", endpoint.id);
        let fixed = json!({"plugin_config": {"drop": ["name"]}});
        api.patch(&endpoint_path)
            .json(&fixed)
            .send()
            .await
            .expect(200);
        let delivered = eventually("the corrected delivery", async || {
            let row = api.get(&format!("/webhook-deliveries/{}", delivery["id"].as_str()?));
            let row = row.send().await.expect(200).json();
            (row["state"] == "delivered").then_some(row)
        })
        .await;
        assert!(delivered["attempts"].as_u64() > Some(1));
        assert!(!receiver.requests_to(&path)[0].text().contains("Ada"));
    }
}
