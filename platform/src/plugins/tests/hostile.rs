//! Plugins that misbehave, each with its exact outcome.

use super::*;

#[tokio::test]
async fn an_error_of_the_plugin_is_told_in_its_words() {
    let error = failure(&fixtures::guest_error()).await;
    assert_eq!(error, PluginError::Guest("no such customer".into()));
}

#[tokio::test]
async fn an_endless_loop_runs_out_of_fuel() {
    let limits = Limits {
        cpu: LONG,
        wall: LONG,
        ..Limits::default()
    };
    for wasm in [fixtures::loops(), fixtures::fills_memory()] {
        let (error, report) = failure_with(limits.clone(), &wasm).await;
        assert_eq!(error, PluginError::OutOfFuel { limit: 500_000_000 });
        assert_eq!(report.fuel, 500_000_000);
    }
}

#[tokio::test]
async fn processor_time_stops_what_fuel_does_not() {
    let limits = Limits {
        fuel: u64::MAX / 2,
        ..Limits::default()
    };
    let (error, _) = failure_with(limits, &fixtures::loops()).await;
    assert_eq!(
        error,
        PluginError::Timeout {
            limit: Duration::from_millis(500)
        }
    );
}

#[tokio::test]
async fn wall_time_stops_what_processor_time_does_not() {
    let limits = Limits {
        fuel: u64::MAX / 2,
        cpu: LONG,
        wall: Duration::from_millis(30),
        ..Limits::default()
    };
    let engine = engine_with(limits);
    let report = run(&engine, &fixtures::loops()).await;
    let Outcome::Failed {
        stage: Stage::Transform,
        error: PluginError::Timeout { .. },
    } = report.outcome
    else {
        panic!("{report:?}");
    };
    assert!(report.fuel > 0);
}

#[tokio::test]
async fn a_loop_on_one_thread_lets_others_run() {
    // The test runs on a single thread: the second plugin ends only because the first one yields.
    let limits = Limits {
        fuel: u64::MAX / 2,
        ..Limits::default()
    };
    let engine = engine_with(limits);
    let (endless, echo) = (
        load(&engine, &fixtures::loops()),
        load(&engine, &fixtures::echo()),
    );
    let endless = engine.run(&endless, call_with(BODY));
    let echo = async {
        tokio::task::yield_now().await;
        engine.run(&echo, call_with(BODY)).await
    };
    tokio::pin!(endless, echo);
    tokio::select! {
        biased;
        report = &mut endless => panic!("{report:?}"),
        report = &mut echo => assert_eq!(report.outcome, echoed()),
    }
}

#[tokio::test]
async fn a_slow_plugin_leaves_slots_to_others() {
    let limits = Limits {
        fuel: u64::MAX / 2,
        wall: LONG,
        ..Limits::default()
    };
    let engine = engine_with(limits);
    let (endless, echo) = (
        load(&engine, &fixtures::loops()),
        load(&engine, &fixtures::echo()),
    );
    let mut hogs = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (engine, endless) = (engine.clone(), endless.clone());
        hogs.spawn(async move { engine.run(&endless, call_with(BODY)).await });
    }
    tokio::task::yield_now().await;
    tokio::select! {
        biased;
        hog = hogs.join_next() => panic!("it waited until {hog:?} made room"),
        report = engine.run(&echo, call_with(BODY)) => assert_eq!(report.outcome, echoed()),
    }
}

#[tokio::test]
async fn what_the_host_does_for_a_plugin_is_paid_in_fuel() {
    // 64 KiB at a time, until processor time would run out long before the guest's own instructions.
    let error = failure(&fixtures::signs_without_end()).await;
    assert_eq!(error, PluginError::OutOfFuel { limit: 500_000_000 });
}

#[tokio::test]
async fn a_trap_names_the_plugins_function() {
    let PluginError::Trap(text) = failure(&fixtures::traps()).await else {
        panic!()
    };
    assert!(text.contains("unreachable"), "{text}");
    assert!(text.contains("boom"), "{text}");
    assert!(text.len() <= 2_100);
}

#[tokio::test]
async fn a_memory_bomb_runs_out_of_memory() {
    let error = failure(&fixtures::memory_bomb()).await;
    let PluginError::OutOfMemory {
        limit: 67_108_864,
        trap,
    } = error
    else {
        panic!("{error:?}")
    };
    assert!(trap.contains("unreachable"), "{trap}");
}

#[tokio::test]
async fn too_much_memory_to_begin_with_is_found_before_the_first_call() {
    let engine = engine();
    let artifact = engine.compile(&fixtures::memory_at_start()).unwrap();
    let error = engine.load(&artifact).unwrap_err();
    assert!(matches!(&error, LoadError::DoesNotFit(_)), "{error}");
    assert_eq!(run(&engine, &fixtures::echo()).await.outcome, echoed());
}

#[tokio::test]
async fn endless_recursion_exhausts_only_its_own_stack() {
    let PluginError::Trap(text) = failure(&fixtures::recursion()).await else {
        panic!()
    };
    assert!(text.contains("call stack exhausted"), "{text}");
    assert!(text.len() <= 2_100);
}

#[tokio::test]
async fn an_answer_of_65536_bytes_is_sent_and_one_more_is_not() {
    let report = run(&engine(), &fixtures::answer_of(65_536)).await;
    assert!(matches!(report.outcome, Outcome::Deliver { body, .. } if body.len() == 65_536));
    let error = failure(&fixtures::answer_of(65_537)).await;
    assert_eq!(
        error,
        PluginError::AnswerTooLarge {
            bytes: Some(65_537),
            limit: 65_536
        }
    );
    let error = failure(&fixtures::answer_of(1 << 20)).await;
    assert_eq!(
        error,
        PluginError::AnswerTooLarge {
            bytes: None,
            limit: 65_536
        }
    );
}

#[tokio::test]
async fn an_answer_that_is_not_json_is_not_sent() {
    let PluginError::InvalidBody(text) = failure(&fixtures::invalid_json()).await else {
        panic!()
    };
    assert!(text.contains("line 1 column 5"), "{text}");
}

#[tokio::test]
async fn a_header_of_the_platform_is_not_sent() {
    let error = failure(&fixtures::reserved_header()).await;
    let expected = "`Content-Length` is set by the platform".to_owned();
    assert_eq!(error, PluginError::InvalidHeader(expected));
}

#[tokio::test]
async fn a_flood_of_log_lines_is_cut_and_says_so_once() {
    let report = run(&engine(), &fixtures::log_flood()).await;
    assert!(
        matches!(report.outcome, Outcome::Deliver { .. }),
        "{report:?}"
    );
    let kept: usize = report.log.iter().map(|line| line.message.len()).sum();
    assert!(kept < 17_000 && report.log.len() <= 101, "{kept}");
    let notices = report
        .log
        .iter()
        .filter(|line| line.message.starts_with("log truncated"));
    assert_eq!(notices.count(), 1);
}

#[tokio::test]
async fn a_log_line_that_is_too_long_to_be_taken_over_traps() {
    let PluginError::Trap(text) = failure(&fixtures::long_log()).await else {
        panic!()
    };
    assert!(text.contains("too much data"), "{text}");
}

#[tokio::test]
async fn input_over_64_kib_is_not_given_to_a_plugin() {
    let engine = engine();
    let plugin = load(&engine, &fixtures::echo());
    let body = format!("\"{}\"", "a".repeat(65_535));
    let report = engine.run(&plugin, call_with(&body)).await;
    let error = PluginError::InputTooLarge {
        bytes: 65_537,
        limit: 65_536,
    };
    assert_eq!(
        report.outcome,
        Outcome::Failed {
            stage: Stage::Transform,
            error
        }
    );
    let body = format!("\"{}\"", "a".repeat(65_534));
    let report = engine.run(&plugin, call_with(&body)).await;
    assert!(matches!(report.outcome, Outcome::Deliver { .. }));
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(48))]
    #[test]
    fn whatever_passes_the_upload_check_ends_in_a_report(
        at in proptest::prelude::any::<proptest::sample::Index>(),
        byte in proptest::prelude::any::<u8>(),
    ) {
        let mut wasm = fixtures::both();
        let index = at.index(wasm.len());
        wasm[index] = byte;
        let engine = engine();
        let loaded = engine.compile(&wasm).ok().and_then(|artifact| engine.load(&artifact).ok());
        if let Some(plugin) = loaded {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let report = runtime.block_on(engine.run(&plugin, call_with(BODY)));
            let internal =
                matches!(report.outcome, Outcome::Failed { error: PluginError::Internal, .. });
            assert!(!internal, "{report:?}");
        }
    }
}
