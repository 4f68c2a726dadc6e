//! Times a plugin as the server runs it: `cargo run --release --example plugin_speed -- FILE.wasm
//! [BYTES…]`, with a JSON event of each size (1,024, 16,384 and 65,000 by default).
//!
//! Prints microseconds per run, lowest and median, with fuel. One run is what a delivery does: a
//! fresh store and instance for each function that the plugin exports, and every check of its answer.

use std::sync::Arc;
use std::time::Instant;

use botix::plugins::{Call, Delivery, Event, Keys, Limits, Outcome, PluginEngine, Report};

const RUNS: usize = 500;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("which .wasm file?")?;
    let mut sizes = arguments
        .map(|size| size.parse())
        .collect::<Result<Vec<usize>, _>>()?;
    if sizes.is_empty() {
        sizes = vec![1_024, 16_384, 65_000];
    }

    let engine = PluginEngine::new(Limits::default(), 4)?;
    let wasm = std::fs::read(&file)?;
    let started = Instant::now();
    let artifact = engine.compile(&wasm)?;
    println!("compile {:?}", started.elapsed());
    let started = Instant::now();
    let plugin = engine.load(&artifact)?;
    println!("load    {:?}, {:?}", started.elapsed(), plugin.exports());

    for size in sizes {
        let body = event(size);
        let mut report = engine.run(&plugin, call(&body)).await;
        let mut times = Vec::with_capacity(RUNS);
        for _ in 0..RUNS {
            let call = call(&body);
            let started = Instant::now();
            report = engine.run(&plugin, call).await;
            times.push(started.elapsed().as_micros());
        }
        times.sort_unstable();
        let (low, median) = (times[0], times[RUNS / 2]);
        println!(
            "{:>6} bytes  min {low:>6} µs  median {median:>6} µs  {}",
            body.len(),
            told(&report)
        );
    }
    Ok(())
}

fn told(report: &Report) -> String {
    match &report.outcome {
        Outcome::Deliver { body, headers } => {
            format!(
                "fuel {}, answers {} bytes, {} headers",
                report.fuel,
                body.len(),
                headers.len()
            )
        }
        Outcome::Drop { reason } => format!("fuel {}, drops: {reason}", report.fuel),
        Outcome::Failed { error, .. } => format!("fuel {}, FAILS: {error}", report.fuel),
    }
}

fn call(body: &str) -> Call {
    Call {
        event: Event {
            id: "evt_01JZ0000000000000000000000".into(),
            event_type: "payment.succeeded".into(),
            timestamp: "2026-01-01T00:00:00.000000Z".into(),
            body: body.into(),
        },
        delivery: Delivery {
            endpoint_id: "whe_01JZ0000000000000000000000".into(),
            url: "https://example.com/hooks".into(),
            attempt: 1,
            request_id: "req_01JZ0000000000000000000000".into(),
        },
        config: "{}".into(),
        keys: Arc::new(Keys::from_iter([("endpoint", vec![7; 32])])),
        now_ms: 1_767_225_600_000,
    }
}

/// A webhook body of about that many bytes, with a list of small objects.
fn event(bytes: usize) -> String {
    let mut items: Vec<String> = Vec::new();
    let mut left = bytes.saturating_sub(260);
    while left > 50 {
        let number = items.len();
        let item = format!(r#"{{"sku":"item-{number}","price":{number}.5,"tags":["a","b"]}}"#);
        left = left.saturating_sub(item.len() + 1);
        items.push(item);
    }
    let items = items.join(",");
    format!(
        r#"{{"id":"evt_01JZ0000000000000000000000","type":"payment.succeeded","timestamp":"2026-01-01T00:00:00.000000Z","project_id":"prj_01JZ0000000000000000000000","data":{{"amount":1999,"currency":"eur","items":[{items}]}}}}"#
    )
}
