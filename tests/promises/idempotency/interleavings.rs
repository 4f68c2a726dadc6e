//! Random interleavings of sends, retries, crashes, ended leases and lost stores against a reference
//! model of what the contract allows.
//!
//! A sequence of steps runs against the real server and its stores; after each step the answer must be
//! one that the [`model`] allows, and at the end every key that is unknown is settled, every answer is
//! replayed byte for byte, and contacts, counter and events are those of the model. A sequence that fails
//! shrinks to a short one, which is printed. One server serves all cases of a test, each in a project of
//! its own. `BOTIX_TEST_CASES` runs more of them, `BOTIX_TEST_SEED` others: a number, or `random`.

mod model;
mod world;

use crate::harness::Backend;
use model::{Body, KEYS};
use proptest::prelude::*;
use proptest::strategy::Union;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use std::cell::{Cell, RefCell};
use std::time::Duration;
use world::World;

const CASES: u32 = 12;
const STEPS: usize = 12;

/// One step.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    Send(usize, Body),
    /// The same request several times at once.
    SendParallel(usize, Body, usize),
    /// The last request again.
    Retry,
    /// `kill -9` and a restart.
    Crash,
    CrashDuring(usize, Body, Moment),
    CutDatabase,
    CutDatabaseDuring(usize, Body, Moment),
    RestoreDatabase,
    /// Redis forgets everything.
    FlushRedis,
    KillRedis,
    PauseRedis,
    /// Whatever was wrong with Redis is over.
    RestoreRedis,
    LeasesEnd,
    RecordsExpire,
}

/// When a fault strikes.
#[derive(Clone, Copy, Debug)]
pub enum Moment {
    /// While the handler runs and cannot commit.
    AtWork,
    /// Some time after the request was sent.
    After(Duration),
}

fn sequences(backend: Backend) -> impl Strategy<Value = Vec<Step>> {
    let key = 0..KEYS;
    let body = prop_oneof![
        4 => Just(Body::One),
        2 => Just(Body::OneNamed),
        2 => Just(Body::Two),
        1 => Just(Body::Taken),
        1 => Just(Body::Invalid),
    ];
    let moment = prop_oneof![
        1 => Just(Moment::AtWork),
        2 => (0_u64..40).prop_map(|millis| Moment::After(Duration::from_millis(millis))),
    ];
    let sent = (key, body);
    let during = (sent.clone(), moment);
    let mut steps = vec![
        (
            8,
            sent.clone()
                .prop_map(|(key, body)| Step::Send(key, body))
                .boxed(),
        ),
        (
            3,
            (sent, 2_usize..9)
                .prop_map(|((key, body), n)| Step::SendParallel(key, body, n))
                .boxed(),
        ),
        (4, Just(Step::Retry).boxed()),
        (1, Just(Step::Crash).boxed()),
        (
            3,
            during
                .clone()
                .prop_map(|((key, body), moment)| Step::CrashDuring(key, body, moment))
                .boxed(),
        ),
        (1, Just(Step::RecordsExpire).boxed()),
    ];
    if backend != Backend::Sqlite {
        steps.push((1, Just(Step::CutDatabase).boxed()));
        steps.push((
            3,
            during
                .prop_map(|((key, body), moment)| Step::CutDatabaseDuring(key, body, moment))
                .boxed(),
        ));
        steps.push((3, Just(Step::RestoreDatabase).boxed()));
    }
    if backend == Backend::PostgresAndRedis {
        for step in [Step::FlushRedis, Step::KillRedis, Step::PauseRedis] {
            steps.push((2, Just(step).boxed()));
        }
        steps.push((3, Just(Step::RestoreRedis).boxed()));
        steps.push((1, Just(Step::LeasesEnd).boxed()));
    }
    prop::collection::vec(Union::new_weighted(steps), 1..=STEPS)
}

fn seed() -> u64 {
    match std::env::var("BOTIX_TEST_SEED").as_deref() {
        Err(_) => 20_261_201,
        Ok("random") => rand::random(),
        Ok(seed) => seed
            .parse()
            .expect("BOTIX_TEST_SEED is a number or `random`"),
    }
}

fn cases() -> u32 {
    std::env::var("BOTIX_TEST_CASES").map_or(CASES, |cases| {
        cases.parse().expect("BOTIX_TEST_CASES is a number")
    })
}

fn every_interleaving_executes_each_key_once(backend: Backend) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let world = RefCell::new(runtime.block_on(World::new(backend)));
    let seed = seed();
    let config = Config {
        cases: cases(),
        failure_persistence: None,
        max_shrink_iters: 200,
        max_shrink_time: 60_000,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    // What failed once may depend on the moment: while it shrinks, a sequence has several chances.
    let is_shrinking = Cell::new(false);
    let outcome = TestRunner::new_with_rng(config, rng).run(&sequences(backend), |steps| {
        let mut world = world.borrow_mut();
        let plays = if is_shrinking.get() { 3 } else { 1 };
        for _ in 0..plays {
            // A panic of the harness in here is a failure as well.
            let before = is_shrinking.replace(true);
            let played = runtime.block_on(world.play(&steps));
            played.map_err(TestCaseError::fail)?;
            is_shrinking.set(before);
        }
        Ok(())
    });
    // Its stores are left by way of the runtime.
    let _context = runtime.enter();
    drop(world);
    match outcome {
        Ok(()) => {}
        Err(TestError::Fail(reason, steps)) => {
            panic!("{reason}\nafter, with BOTIX_TEST_SEED={seed}:\n{steps:#?}")
        }
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}

mod every_interleaving_executes_each_key_once {
    use crate::harness::Backend;

    #[test]
    fn sqlite() {
        super::every_interleaving_executes_each_key_once(Backend::Sqlite);
    }

    #[test]
    fn postgres() {
        super::every_interleaving_executes_each_key_once(Backend::Postgres);
    }

    #[test]
    fn postgres_and_redis() {
        super::every_interleaving_executes_each_key_once(Backend::PostgresAndRedis);
    }
}
