//! The engine's promises, each held against a plugin that tries to break it.
//!
//! After every misdeed the same engine runs a well-behaved plugin, because that is the promise that
//! counts: what a plugin does fails only its own run.

use std::sync::Arc;
use std::time::Duration;

use super::*;

mod hostile;
mod promises;

/// A limit that a test does not mean to meet.
const LONG: Duration = Duration::from_mins(1);
const BODY: &str = r#"{"id":"evt_1","n":1.0}"#;

fn engine() -> PluginEngine {
    engine_with(Limits::default())
}

fn engine_with(limits: Limits) -> PluginEngine {
    PluginEngine::new(limits, 2).unwrap()
}

fn load(engine: &PluginEngine, wasm: &[u8]) -> Plugin {
    engine.load(&engine.compile(wasm).unwrap()).unwrap()
}

fn call_with(body: &str) -> Call {
    Call {
        event: Event {
            id: "evt_1".into(),
            event_type: "contact.created".into(),
            timestamp: "2026-01-01T00:00:00Z".into(),
            body: body.into(),
        },
        delivery: Delivery {
            endpoint_id: "whe_1".into(),
            url: "https://example.com/hook".into(),
            attempt: 1,
            request_id: "req_1".into(),
        },
        config: r#"{"a":1}"#.into(),
        keys: Arc::new(Keys::from_iter([("endpoint", b"secret".to_vec())])),
        now_ms: 1_700_000_000_007,
    }
}

async fn run(engine: &PluginEngine, wasm: &[u8]) -> Report {
    engine.run(&load(engine, wasm), call_with(BODY)).await
}

fn echoed() -> Outcome {
    Outcome::Deliver {
        body: BODY.into(),
        headers: vec![("x-plugin".into(), "echo".into())],
    }
}

/// Runs a plugin that fails, then one that works on the same engine.
async fn failure_with(limits: Limits, wasm: &[u8]) -> (PluginError, Report) {
    let engine = engine_with(limits);
    let report = run(&engine, wasm).await;
    assert_eq!(run(&engine, &fixtures::echo()).await.outcome, echoed());
    match &report.outcome {
        Outcome::Failed { error, .. } => (error.clone(), report),
        other => panic!("it did not fail: {other:?}"),
    }
}

async fn failure(wasm: &[u8]) -> PluginError {
    failure_with(Limits::default(), wasm).await.0
}
