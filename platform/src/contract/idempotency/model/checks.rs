//! What must hold in every state, what must happen in some, and the runs that see to both.

use std::{collections::BTreeSet, time::Instant};

use stateright::{Checker as _, HasDiscoveries, Model as _, Property};

use super::{
    Fate, Flaw, Look, NODES, Outcome, Phase, Protocol, Ran, Record, Reply, State, Store, Value,
};

const ONCE: &str = "at most one execution commits";
const TOGETHER: &str = "writes and record commit together";
const TRUE_ANSWERS: &str = "an answer is the committed one, and not an expired one";
const TRUE_DENIALS: &str = "who says that nothing was executed is right";
const TRUE_CACHE: &str = "what Redis holds as finished was committed";
const OWN_LEASE: &str = "nobody changes another's lease";
const NOT_STUCK: &str = "a request that comes when nobody works on its key is answered";

pub(super) fn properties(protocol: &Protocol) -> Vec<Property<Protocol>> {
    let mut properties = vec![
        Property::always(ONCE, |_, state: &State| {
            let once = |ledger: &super::Ledger| ledger.writes <= 1 && ledger.records <= 1;
            state.ledgers.iter().all(once)
        }),
        Property::always(TOGETHER, |_, state: &State| {
            state.ledgers.iter().all(|ledger| {
                let wrote = ledger.answer.is_some_and(|record| record.wrote);
                (ledger.writes > 0) == wrote
            })
        }),
        Property::always(TRUE_ANSWERS, |_, state: &State| {
            state.nodes.iter().all(|node| match answer(node.phase) {
                Some(record) => is_committed(state, record) && record.lifetime >= node.came_in,
                None => true,
            })
        }),
        Property::always(TRUE_DENIALS, |_, state: &State| {
            (0..NODES).all(|n| {
                state.nodes[n].phase != Phase::Reply(Reply::NotExecuted)
                    || !(has_committed(state, n) || will_commit(state, n))
            })
        }),
        Property::always(TRUE_CACHE, |_, state: &State| match state.redis {
            Some(Value::Done(record)) => is_committed(state, record),
            _ => true,
        }),
        Property::always(OWN_LEASE, |_, state: &State| !state.trespass),
        Property::always(NOT_STUCK, |protocol: &Protocol, state: &State| {
            !state.is_quiet() || state.is_answered_when_asked(protocol)
        }),
        Property::sometimes("a record answers", |_, state: &State| {
            any_phase(
                state,
                |phase| matches!(phase, Phase::Reply(Reply::FromRecord(record)) if record.wrote),
            )
        }),
        Property::sometimes("a decided refusal is replayed", |_, state: &State| {
            any_phase(
                state,
                |phase| matches!(phase, Phase::Reply(Reply::FromRecord(record)) if !record.wrote),
            )
        }),
        Property::sometimes("a commit is executed and unheard of", |_, state: &State| {
            (0..NODES).any(|n| state.nodes[n].ran == Ran::Unsure && has_committed(state, n))
        }),
    ];
    if protocol.store != Store::Sqlite {
        properties.extend([
            Property::sometimes("a dead connection holds the lock", |_, state: &State| {
                state.is_quiet() && state.orphans.iter().any(|orphan| orphan.locked)
            }),
            Property::sometimes(
                "a commit happens after its node is dead",
                |_, state: &State| {
                    state.is_quiet() && state.orphans.iter().any(|orphan| orphan.committing)
                },
            ),
        ]);
        if protocol.look == Look::AtOnce {
            properties.push(Property::sometimes(
                "the primary key stops an execution",
                |_, state: &State| state.nodes.iter().any(|node| node.ran == Ran::Beaten),
            ));
        }
    }
    if protocol.store == Store::PostgresAndRedis {
        properties.extend([
            Property::sometimes("Redis answers", |_, state: &State| {
                any_phase(state, |phase| {
                    matches!(phase, Phase::Reply(Reply::FromRedis(_)))
                })
            }),
            Property::sometimes("a lease passes to another under its holder", |_, state: &State| {
                (0..NODES).any(|n| {
                    state.nodes[n].phase == Phase::Handler
                        && matches!(state.redis, Some(Value::Lease(owner)) if owner != state.token(n))
                })
            }),
            Property::sometimes("a late command meets another's lease", |_, state: &State| {
                matches!(
                    (state.late, state.redis),
                    (Some((by, _)), Some(Value::Lease(owner))) if owner != by
                )
            }),
        ]);
    }
    if protocol.lifetimes > 1 {
        properties.push(Property::sometimes(
            "an expired key is executed again",
            |_, state: &State| state.ledgers[1].records == 1,
        ));
    }
    properties
}

fn any_phase(state: &State, is: impl Fn(Phase) -> bool) -> bool {
    state.nodes.iter().any(|node| is(node.phase))
}

/// The answer that a phase gives.
fn answer(phase: Phase) -> Option<Record> {
    match phase {
        Phase::Reply(
            Reply::Executed(record) | Reply::FromRedis(record) | Reply::FromRecord(record),
        ) => Some(record),
        _ => None,
    }
}

fn is_committed(state: &State, record: Record) -> bool {
    state.ledgers[usize::from(record.lifetime)].answer == Some(record)
}

/// Whether the execution of the node's present request was committed.
fn has_committed(state: &State, n: usize) -> bool {
    let by = state.token(n);
    let mut answers = state.ledgers.iter().filter_map(|ledger| ledger.answer);
    answers.any(|record| record.by == by)
}

/// Whether a dead connection may yet commit the execution of the node's present request.
fn will_commit(state: &State, n: usize) -> bool {
    let by = state.token(n);
    let mut inserted = state.orphans.iter().filter_map(|orphan| orphan.inserted);
    inserted.any(|record| record.by == by)
}

impl State {
    /// Whether no node works on the key.
    fn is_quiet(&self) -> bool {
        self.nodes.iter().all(|node| node.phase == Phase::Idle)
    }

    /// Whether one more request, alone and undisturbed, gets an answer once what is still in the air has come
    /// down: late commands and dead connections, each way it may end, and then the lease.
    fn is_answered_when_asked(&self, protocol: &Protocol) -> bool {
        let Some(session) = self.orphans.last().copied() else {
            let mut state = self.clone();
            let arrived = state.late.take().is_none_or(|(by, command)| {
                let mut state = state.clone();
                state.run(protocol, by, command);
                state.answers_one_more(protocol)
            });
            return arrived && state.answers_one_more(protocol);
        };
        let mut ended = self.clone();
        ended.orphans.pop();
        let mut committed = ended.clone();
        committed.commit(protocol, session);
        (!session.committing || committed.is_answered_when_asked(protocol))
            && ended.is_answered_when_asked(protocol)
    }

    fn answers_one_more(mut self, protocol: &Protocol) -> bool {
        if matches!(self.redis, Some(Value::Lease(_))) && !protocol.has(Flaw::LeasesForEver) {
            self.redis = None;
        }
        self.nodes[0].request = protocol.requests.0 + 1;
        self.enter(protocol, 0, Phase::Capture);
        loop {
            match self.nodes[0].phase {
                Phase::Handler => self.handler_ends(protocol, 0, Outcome::Wrote),
                Phase::Committing => {
                    let session = self.nodes[0].session.take().unwrap_or_default();
                    self.commit(protocol, session);
                    let Some(record) = session.inserted else {
                        return false;
                    };
                    self.enter(protocol, 0, Phase::Committed(record));
                }
                Phase::Reply(_) => return answer(self.nodes[0].phase).is_some(),
                _ => {
                    if self.step(protocol, 0, Fate::Works).is_none() {
                        return false;
                    }
                }
            }
        }
    }
}

const REDIS: Protocol = Protocol {
    store: Store::PostgresAndRedis,
    look: Look::AtOnce,
    requests: (2, 4),
    lifetimes: 1,
    used: false,
    flaws: &[],
};

/// The key was used before, and its record may expire.
const REDIS_AND_EXPIRY: Protocol = Protocol {
    requests: (2, 3),
    lifetimes: 2,
    used: true,
    ..REDIS
};

const POSTGRES: Protocol = Protocol {
    store: Store::Postgres,
    lifetimes: 2,
    ..REDIS
};

const SQLITE: Protocol = Protocol {
    store: Store::Sqlite,
    ..POSTGRES
};

const fn under_lock(protocol: Protocol) -> Protocol {
    Protocol {
        look: Look::UnderLock,
        ..protocol
    }
}

/// Visits every state: what must hold does in all, and what must happen does in some.
fn holds(protocol: Protocol) {
    let begun = Instant::now();
    let checker = protocol.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    println!(
        "{protocol:?}: {} states, {} steps, depth {}, {:.1?}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        begun.elapsed()
    );
}

/// With these flaws the checker finds a way to break the promise.
fn breaks(promise: &'static str, protocol: Protocol, flaws: &'static [Flaw]) {
    let protocol = Protocol { flaws, ..protocol };
    let found = HasDiscoveries::AnyOf(BTreeSet::from([promise]));
    let checker = protocol
        .checker()
        .finish_when(found)
        .threads(2)
        .spawn_bfs()
        .join();
    let path = checker
        .discovery(promise)
        .unwrap_or_else(|| panic!("{flaws:?} breaks nothing: {promise}"));
    println!(
        "{flaws:?}, {} states: not {promise}: {:?}",
        checker.unique_state_count(),
        path.into_actions()
    );
}

#[test]
fn with_redis_a_key_runs_once_and_is_never_stuck() {
    holds(REDIS);
    holds(under_lock(REDIS));
}

#[test]
fn with_redis_an_expired_key_runs_once_more() {
    holds(REDIS_AND_EXPIRY);
}

#[test]
fn without_redis_a_key_runs_once_and_is_never_stuck() {
    holds(POSTGRES);
    holds(under_lock(POSTGRES));
}

#[test]
fn in_one_process_a_key_runs_once_and_is_never_stuck() {
    holds(SQLITE);
}

#[test]
#[ignore = "takes minutes; run after a change of the protocol"]
fn with_wider_bounds_it_holds_too() {
    holds(under_lock(REDIS_AND_EXPIRY));
    holds(Protocol {
        requests: (2, 3),
        lifetimes: 2,
        ..REDIS
    });
    holds(Protocol {
        requests: (3, 4),
        ..REDIS_AND_EXPIRY
    });
    holds(Protocol {
        requests: (3, 6),
        ..POSTGRES
    });
}

#[test]
fn the_lock_or_the_primary_key_must_be_there() {
    use Flaw::{NoBackstop, NoLock};
    breaks(ONCE, REDIS, &[NoLock, NoBackstop]);
    breaks(ONCE, POSTGRES, &[NoLock, NoBackstop]);
    breaks(ONCE, SQLITE, &[NoLock, NoBackstop]);
}

#[test]
fn a_look_in_one_statement_leans_on_the_primary_key() {
    breaks(ONCE, POSTGRES, &[Flaw::NoBackstop]);
    holds(Protocol {
        flaws: &[Flaw::NoBackstop],
        ..under_lock(POSTGRES)
    });
}

#[test]
fn a_look_in_one_statement_must_not_delete_what_it_has_not_seen() {
    breaks(ONCE, POSTGRES, &[Flaw::ForgetsBlindly]);
    holds(Protocol {
        flaws: &[Flaw::ForgetsBlindly],
        ..under_lock(POSTGRES)
    });
}

#[test]
fn the_look_after_a_failed_commit_must_read_under_the_lock() {
    breaks(TRUE_DENIALS, POSTGRES, &[Flaw::LastLookAtOnce]);
    breaks(TRUE_DENIALS, POSTGRES, &[Flaw::NoLock]);
}

#[test]
fn writes_and_record_must_share_a_transaction() {
    breaks(TOGETHER, SQLITE, &[Flaw::RecordApart]);
    breaks(ONCE, SQLITE, &[Flaw::RecordApart]);
}

#[test]
fn an_answer_must_be_committed_before_it_is_cached() {
    breaks(TRUE_CACHE, REDIS, &[Flaw::CachesEarly]);
    breaks(TRUE_ANSWERS, REDIS, &[Flaw::CachesEarly]);
}

#[test]
fn a_cached_answer_must_say_when_it_expires() {
    breaks(TRUE_ANSWERS, REDIS_AND_EXPIRY, &[Flaw::TrustsOldCache]);
}

#[test]
fn a_lease_must_be_compared_before_it_is_changed() {
    breaks(OWN_LEASE, REDIS, &[Flaw::ReleasesBlindly]);
    breaks(OWN_LEASE, REDIS, &[Flaw::RenewsBlindly]);
    breaks(OWN_LEASE, REDIS, &[Flaw::CachesBlindly]);
}

#[test]
fn a_lease_must_lapse() {
    breaks(NOT_STUCK, REDIS, &[Flaw::LeasesForEver]);
}
