//! Compiling in a child process. This test has no harness, because it is its own child: run with
//! the hidden command it compiles, as the server does; run without, it checks what comes of that.

use std::process::ExitCode;
use std::sync::Arc;

use botix::plugins::{
    Call, CompileError, Delivery, Event, Keys, Limits, Outcome, PluginEngine, compile_child_main,
};

#[path = "../../tests/fixtures/plugins.rs"]
mod fixtures;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some(botix::plugins::COMPILE_COMMAND) => return compile_child_main(),
        // What `cargo test` and its cousins ask of a harness.
        Some("--list") => return ExitCode::SUCCESS,
        _ => {}
    }
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async {
            what_the_child_compiled_runs_in_the_parent().await;
            a_refused_component_never_reaches_the_child().await;
            a_component_that_takes_too_much_memory_ends_only_the_child().await;
        });
    println!("plugin_compile: ok");
    ExitCode::SUCCESS
}

fn engine() -> PluginEngine {
    PluginEngine::new(Limits::default(), 1).expect("an engine")
}

async fn what_the_child_compiled_runs_in_the_parent() {
    let engine = engine();
    let artifact = engine
        .compile_isolated(&fixtures::echo())
        .await
        .expect("it compiles");
    let plugin = engine.load(&artifact).expect("it loads");
    let call = Call {
        event: Event {
            id: "evt_1".into(),
            event_type: "contact.created".into(),
            timestamp: "2026-01-01T00:00:00Z".into(),
            body: "{}".into(),
        },
        delivery: Delivery {
            endpoint_id: "whe_1".into(),
            url: "https://example.com".into(),
            attempt: 1,
            request_id: "req_1".into(),
        },
        config: "{}".into(),
        keys: Arc::new(Keys::default()),
        now_ms: 0,
    };
    let report = engine.run(&plugin, call).await;
    assert!(
        matches!(report.outcome, Outcome::Deliver { .. }),
        "{report:?}"
    );
}

async fn a_refused_component_never_reaches_the_child() {
    let result = engine().compile_isolated(&fixtures::imports_wasi()).await;
    assert!(
        matches!(result, Err(CompileError::Refused(_))),
        "{result:?}"
    );
}

/// Not 300 KB, for which the compiler wants gigabytes.
async fn a_component_that_takes_too_much_memory_ends_only_the_child() {
    let engine = engine();
    let result = engine.compile_isolated(&fixtures::compile_bomb()).await;
    assert!(
        matches!(result, Err(CompileError::TooExpensive)),
        "{result:?}"
    );
    engine
        .compile_isolated(&fixtures::echo())
        .await
        .expect("the next one compiles");
}
