//! What a plugin can rely on, and what the server can.

use super::*;

#[tokio::test]
async fn a_transformer_changes_body_and_headers() {
    let report = run(&engine(), &fixtures::echo()).await;
    assert_eq!(report.outcome, echoed());
    assert!(
        report.fuel > 0 && report.fuel < 1_000_000,
        "{}",
        report.fuel
    );
    assert!(report.log.is_empty());
}

#[tokio::test]
async fn a_plugin_that_only_signs_leaves_the_body_to_the_byte() {
    let engine = engine();
    let plugin = load(&engine, &fixtures::sign_only());
    // Not even JSON: nobody but the plugin's own transform is held to that.
    let report = engine.run(&plugin, call_with("as it is \u{1F600}")).await;
    let headers = vec![("x-plugin".into(), "echo".into())];
    assert_eq!(
        report.outcome,
        Outcome::Deliver {
            body: "as it is \u{1F600}".into(),
            headers
        }
    );
}

#[tokio::test]
async fn sign_sees_the_final_body_and_signs_with_a_key_it_never_sees() {
    use hmac::{Hmac, KeyInit, Mac};
    let report = run(&engine(), &fixtures::both()).await;
    let mac = Hmac::<sha2::Sha256>::new_from_slice(b"secret").unwrap();
    let digest = mac.chain_update(BODY).finalize().into_bytes();
    let letters: String = digest
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|nibble| char::from(b'a' + nibble))
        .collect();
    let headers = vec![
        ("x-plugin".into(), "echo".into()),
        ("x-signed".into(), letters),
    ];
    assert_eq!(
        report.outcome,
        Outcome::Deliver {
            body: BODY.into(),
            headers
        }
    );
}

#[tokio::test]
async fn the_host_answers_config_time_log_and_a_missing_key() {
    let report = run(&engine(), &fixtures::every_import()).await;
    let headers = vec![("x-now".into(), "7".into())];
    assert_eq!(
        report.outcome,
        Outcome::Deliver {
            body: r#"{"a":1}"#.into(),
            headers
        }
    );
    let levels: Vec<Level> = report.log.iter().map(|line| line.level).collect();
    assert_eq!(
        levels,
        [Level::Debug, Level::Info, Level::Warn, Level::Error]
    );
    assert!(report.log.iter().all(|line| line.message == "hello"));
}

#[tokio::test]
async fn the_same_call_gives_the_same_answer_for_the_same_fuel() {
    let engine = engine();
    let plugin = load(&engine, &fixtures::every_import());
    let first = engine.run(&plugin, call_with(BODY)).await;
    let second = engine.run(&plugin, call_with(BODY)).await;
    assert_eq!(first.outcome, second.outcome);
    assert_eq!(first.fuel, second.fuel);
}

#[tokio::test]
async fn every_call_gets_a_fresh_instance() {
    let engine = engine();
    let plugin = load(&engine, &fixtures::counter());
    for _ in 0..3 {
        let report = engine.run(&plugin, call_with(BODY)).await;
        assert_eq!(
            report.outcome,
            Outcome::Deliver {
                body: "1".into(),
                headers: vec![]
            }
        );
    }
}

#[tokio::test]
async fn a_plugin_may_drop_an_event() {
    let report = run(&engine(), &fixtures::drops()).await;
    assert_eq!(
        report.outcome,
        Outcome::Drop {
            reason: "not wanted".into()
        }
    );
}

#[tokio::test]
async fn a_plugin_built_against_a_later_1_x_runs() {
    let report = run(&engine(), &fixtures::built_against("1.4.2")).await;
    assert_eq!(
        report.outcome,
        Outcome::Deliver {
            body: BODY.into(),
            headers: vec![]
        }
    );
}

#[tokio::test]
async fn many_runs_at_once_wait_for_slots_and_all_succeed() {
    let engine = engine();
    let plugin = load(&engine, &fixtures::both());
    let runs = (0..200).map(|_| engine.run(&plugin, call_with(BODY)));
    for report in futures::future::join_all(runs).await {
        assert!(
            matches!(report.outcome, Outcome::Deliver { .. }),
            "{report:?}"
        );
    }
}

#[test]
fn what_the_upload_check_refuses_is_not_compiled() {
    let engine = engine();
    for wasm in [
        fixtures::imports_wasi(),
        fixtures::imports_unknown_function(),
        fixtures::imports_mistyped(),
        fixtures::exports_mistyped(),
        fixtures::exports_nothing(),
        fixtures::core_module(),
    ] {
        assert!(matches!(
            engine.compile(&wasm),
            Err(CompileError::Refused(_))
        ));
    }
}

#[tokio::test]
async fn a_sealed_artifact_runs_in_another_engine_of_the_same_kind() {
    let key = [3; 32];
    let artifact = engine().compile(&fixtures::echo()).unwrap();
    let sealed = artifact.seal(&key);
    let other = PluginEngine::new(Limits::default(), 5).unwrap();
    let opened = Artifact::open(&key, &sealed, artifact.wasm_sha256()).unwrap();
    let plugin = other.load(&opened).unwrap();
    assert_eq!(other.run(&plugin, call_with(BODY)).await.outcome, echoed());
}

#[test]
fn a_compiler_without_a_pool_is_the_same_kind_of_engine() {
    let bare = wasmtime::Engine::new(&crate::plugins::engine::settings(None)).unwrap();
    assert_eq!(
        crate::plugins::engine::fingerprint(&bare),
        engine().fingerprint()
    );
}

#[test]
fn an_engine_with_other_settings_is_told_apart() {
    let mut config = crate::plugins::engine::settings(None);
    config.consume_fuel(false);
    let other = wasmtime::Engine::new(&config).unwrap();
    assert_ne!(
        crate::plugins::engine::fingerprint(&other),
        engine().fingerprint()
    );
}

#[test]
fn limits_that_the_pool_cannot_keep_are_refused() {
    let limits = Limits {
        memory_bytes: 65 << 20,
        ..Limits::default()
    };
    assert!(matches!(
        PluginEngine::new(limits, 1),
        Err(EngineError::Memory(_))
    ));
    let engine = PluginEngine::new(Limits::default(), 0);
    assert!(matches!(engine, Err(EngineError::Concurrency(0))));
}

#[test]
fn an_artifact_of_another_engine_does_not_load() {
    let engine = engine();
    let exports = engine.compile(&fixtures::echo()).unwrap().exports();
    let other = Artifact::compiled(Fingerprint([0; 32]), b"", exports, Vec::new());
    assert!(matches!(engine.load(&other), Err(LoadError::OtherEngine)));
}
