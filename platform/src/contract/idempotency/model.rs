//! The capture–lease–commit protocol as a state machine, for the stateright checker.
//!
//! Two nodes take requests with one key, one at a time each (as the set of keys in flight sees to); a
//! request that was turned away or cut off by a crash is sent again, within bounds. A step is one command
//! to Redis or one statement to the database: what others can see or disturb. Between any two steps a node may
//! crash or lose its connection, a lease may lapse under its holder, and Redis may forget everything;
//! a command to Redis may be lost, or outlast the patience of its sender and have its effect any time
//! later; the server may notice a dead connection late, and until then the connection holds its locks
//! and a `COMMIT` sent over it may yet happen. A record may expire, and the sweep may remove it.
//!
//! Left out: fingerprints (every request asks the same), time (what a lease or a record's age guards
//! against may happen at any moment; only a record whose writer is still being answered does not expire,
//! as a request takes a minute and a record lives a day), and what handlers do beyond writing or refusing.
//! Where nodes differ in nothing but their numbers one order stands for both, so a printed path may swap
//! them.
//!
//! [`steps`] has what a step does. [`Flaw`]s are ways to get the protocol wrong; [`checks`] has what must hold, and sees to it that each flaw
//! is found out. Two things that it taught about a look that takes the lock and reads the record in one
//! statement, and so may read it as it was before the lock: an expired record must be deleted only if what
//! is there *is* expired, or the fresh record of another goes and the key runs twice; and the look after a
//! failed commit must read in a statement after the lock's, or it may deny a commit that happened.
//!
//! | bounds of the everyday checks | states | steps |
//! | --- | --- | --- |
//! | Redis, four requests, one statement / two | 245,892 / 122,875 | 1.14 M / 0.54 M |
//! | Redis, a used key that expires, two requests | 341,060 | 1.66 M |
//! | PostgreSQL, four requests, expiry, one statement / two | 45,025 / 24,948 | 0.15 M / 0.07 M |
//! | SQLite, four requests, expiry | 14,471 | 0.04 M |
//!
//! Wider bounds are behind `#[ignore]`: Redis, a used key, three requests, is 1,975,928 states.

mod checks;
mod steps;

use stateright::{Model, Property};

const NODES: usize = 2;

/// What is checked: the store, how the first look is done, the bounds, and what is wrong.
#[derive(Clone, Copy, Debug)]
struct Protocol {
    store: Store,
    look: Look,
    /// How many requests reach each node, and how many both together.
    requests: (u8, u8),
    /// How many times the key can be used afresh: once, and again after each expiry of its record.
    lifetimes: u8,
    /// Whether the key was used before: there is a record, and perhaps it is cached, or about to be.
    used: bool,
    flaws: &'static [Flaw],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    /// Several processes, Redis in front.
    PostgresAndRedis,
    /// Several processes.
    Postgres,
    /// One process, of which the nodes are two tasks; it dies with its connections.
    Sqlite,
}

/// How the lock is taken and the record read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// One statement: the record is read as it was before the lock was tried.
    AtOnce,
    /// Two statements: the record is read as it is under the lock.
    UnderLock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// The record's table has no primary key.
    NoBackstop,
    /// The key has no lock in the database.
    NoLock,
    /// The look after a failed commit is one statement like the first.
    LastLookAtOnce,
    /// A record seen expired is deleted by its key alone, whatever it has become meanwhile.
    ForgetsBlindly,
    /// The handler's writes commit before the record.
    RecordApart,
    /// The answer is cached before it is committed.
    CachesEarly,
    /// The answer is cached over whatever is there.
    CachesBlindly,
    /// The lease is released whoever holds it.
    ReleasesBlindly,
    /// The lease is renewed whoever holds it.
    RenewsBlindly,
    /// A lease has no time to live.
    LeasesForEver,
    /// A cached answer is replayed however old it is.
    TrustsOldCache,
}

/// A request: the owner of a lease, and the name of the answer that its execution gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Token {
    node: u8,
    request: u8,
}

/// Stands for all requests that are over.
const NOBODY: Token = Token {
    node: 0,
    request: 0,
};

/// A finished answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Record {
    by: Token,
    /// Whether the handler wrote, rather than refused.
    wrote: bool,
    /// Which use of the key it answers; older ones have expired.
    lifetime: u8,
}

/// What Redis holds under the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Value {
    Lease(Token),
    Done(Record),
}

/// A command that changes what Redis holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Command {
    /// `SET NX`; a renewal that finds nothing does the same, and one that finds its lease changes nothing here.
    Capture,
    /// What a renewal must not be.
    Seize,
    Cache(Record),
    Release,
}

/// A connection in a transaction, as its server sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Session {
    locked: bool,
    /// It has deleted the expired record.
    forgot: bool,
    /// It has inserted this record, and the handler's writes if there are any.
    inserted: Option<Record>,
    /// Its `COMMIT` has been sent.
    committing: bool,
}

/// How far a request's one execution of the handler has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Ran {
    #[default]
    No,
    Wrote,
    /// A decided 4xx: rolled back, its record goes into a transaction of its own.
    Refused,
    /// Rolled back by the primary key.
    Beaten,
    /// Its commit may have happened.
    Unsure,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
    #[default]
    Idle,
    /// To send `SET NX`.
    Capture,
    /// Another has the key: to send `GET`.
    Get,
    /// Another has a lease: to look for a record without the lock.
    Peek,
    /// To open a transaction.
    Open,
    /// The record is read, as seen here; the lock is to be tried.
    Lock(Option<Record>),
    /// The lock is held; the record is to be read.
    Read,
    /// To delete the expired record.
    Forget,
    Handler,
    /// To insert the record and send `COMMIT`.
    Insert,
    /// The server has the `COMMIT`.
    Committing,
    /// It is executed: to hear of it and to cache the answer.
    Committed(Record),
    /// To cache the answer that a record gives.
    Cache(Record),
    /// To release the lease before the answer is given.
    Release(Reply),
    Reply(Reply),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Reply {
    Executed(Record),
    FromRedis(Record),
    FromRecord(Record),
    /// In progress, or not known.
    TryAgain,
    /// 5xx: nothing was executed.
    NotExecuted,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Node {
    /// The number of the request that it serves or served last.
    request: u8,
    /// The use of the key in which that request came.
    came_in: u8,
    phase: Phase,
    ran: Ran,
    session: Option<Session>,
}

/// What really happened in one use of the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Ledger {
    writes: u8,
    records: u8,
    answer: Option<Record>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct State {
    nodes: [Node; NODES],
    redis: Option<Value>,
    /// A command to Redis whose sender waits no more; it may have its effect yet.
    late: Option<(Token, Command)>,
    record: Option<Record>,
    /// Connections whose end the server has not noticed.
    orphans: Vec<Session>,
    lifetime: u8,
    ledgers: [Ledger; 2],
    /// Somebody changed a lease that was another's.
    trespass: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Arrive(usize),
    /// The node's next step; a command to Redis fares as said.
    Step(usize, Fate),
    /// The node renews its lease.
    Renew(usize, Fate),
    HandlerEnds(usize, Outcome),
    /// The server commits what the node sent.
    ServerCommits(usize),
    /// The node's connection to the database breaks.
    Disconnect(usize),
    Crash(usize),
    /// The server commits what a dead connection sent.
    OrphanCommits(usize),
    /// The server notices a dead connection.
    OrphanEnds(usize),
    LateCommandArrives,
    LateCommandIsLost,
    /// The lease lapses, or Redis loses its memory.
    RedisForgets,
    RecordExpires,
    Sweep,
}

/// What becomes of a command to Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Works,
    Fails,
    /// Its sender hears of a failure; it works later.
    IsLate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Wrote,
    Refused,
    Failed,
}

impl Phase {
    /// Whether the next step is a command to Redis.
    fn commands(self) -> bool {
        matches!(
            self,
            Self::Capture | Self::Get | Self::Committed(_) | Self::Cache(_) | Self::Release(_)
        )
    }
}

impl Node {
    /// Whether its execution is under way, and its lease renewed.
    fn executes(&self) -> bool {
        match self.phase {
            Phase::Idle | Phase::Cache(_) | Phase::Release(_) | Phase::Reply(_) => false,
            phase => phase == Phase::Handler || self.ran != Ran::No,
        }
    }
}

impl Session {
    /// Whether others wait for it before they touch the key's row.
    fn holds_row(self) -> bool {
        self.forgot || self.inserted.is_some()
    }
}

impl Protocol {
    fn has(&self, flaw: Flaw) -> bool {
        self.flaws.contains(&flaw)
    }

    fn has_redis(&self) -> bool {
        self.store == Store::PostgresAndRedis
    }

    fn looks_at_once(&self, ran: Ran) -> bool {
        self.look == Look::AtOnce
            && self.store != Store::Sqlite
            && (ran != Ran::Unsure || self.has(Flaw::LastLookAtOnce))
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let new = State::new();
        if !self.used {
            return vec![new];
        }
        let by = Token {
            node: 0,
            request: 1,
        };
        let record = Record {
            by,
            wrote: true,
            lifetime: 0,
        };
        let mut used = State {
            record: Some(record),
            ..new
        };
        used.nodes[0].request = 1;
        used.ledgers[0] = Ledger {
            writes: 1,
            records: 1,
            answer: Some(record),
        };
        let cached = State {
            redis: Some(Value::Done(record)),
            ..used.clone()
        };
        let late = State {
            late: Some((by, Command::Cache(record))),
            ..used.clone()
        };
        [used, cached, late].map(State::canonical).to_vec()
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        // Whoever has its answer meets nobody on the way out: no need to try this in every order.
        let replying = |node: &Node| matches!(node.phase, Phase::Reply(_));
        if let Some(n) = state.nodes.iter().position(replying) {
            actions.push(Action::Step(n, Fate::Works));
            return;
        }
        // The wire has room for one late command. One that is late may be lost, too: then it has failed.
        let fates = match state.late {
            None => [Fate::Works, Fate::IsLate],
            Some(_) => [Fate::Works, Fate::Fails],
        };
        let came: u8 = state.nodes.iter().map(|node| node.request).sum();
        for (n, node) in state.nodes.iter().enumerate() {
            match node.phase {
                Phase::Idle if node.request < self.requests.0 && came < self.requests.1 => {
                    actions.push(Action::Arrive(n));
                }
                Phase::Idle => {}
                Phase::Handler => actions.extend(
                    [Outcome::Wrote, Outcome::Refused, Outcome::Failed]
                        .map(|outcome| Action::HandlerEnds(n, outcome)),
                ),
                Phase::Committing => actions.push(Action::ServerCommits(n)),
                phase if phase.commands() && self.has_redis() => {
                    actions.extend(fates.map(|fate| Action::Step(n, fate)));
                }
                _ => actions.push(Action::Step(n, Fate::Works)),
            }
            if node.executes() && self.has_redis() {
                actions.extend(fates.map(|fate| Action::Renew(n, fate)));
            }
            if node.session.is_some()
                || matches!(
                    node.phase,
                    Phase::Open | Phase::Lock(_) | Phase::Committed(_)
                )
            {
                actions.push(Action::Disconnect(n));
            }
            if node.phase != Phase::Idle {
                actions.push(Action::Crash(n));
            }
        }
        for (orphan, session) in state.orphans.iter().enumerate() {
            actions.push(Action::OrphanEnds(orphan));
            if session.committing {
                actions.push(Action::OrphanCommits(orphan));
            }
        }
        if state.late.is_some() {
            actions.extend([Action::LateCommandArrives, Action::LateCommandIsLost]);
        }
        if state.redis.is_some() {
            actions.push(Action::RedisForgets);
        }
        if let Some(record) = state.record {
            if !state.is_live(record) {
                actions.push(Action::Sweep);
            } else if state.lifetime + 1 < self.lifetimes {
                actions.push(Action::RecordExpires);
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Arrive(n) => {
                state.nodes[n].request += 1;
                state.nodes[n].came_in = state.lifetime;
                state.enter(self, n, Phase::Capture);
            }
            Action::Step(n, fate) => state.step(self, n, fate)?,
            Action::Renew(n, fate) => {
                let renewal = if self.has(Flaw::RenewsBlindly) {
                    Command::Seize
                } else {
                    Command::Capture
                };
                state.send(self, state.token(n), renewal, fate);
            }
            Action::HandlerEnds(n, outcome) => state.handler_ends(self, n, outcome),
            Action::ServerCommits(n) => {
                let session = state.nodes[n].session.take()?;
                state.commit(self, session);
                state.enter(self, n, Phase::Committed(session.inserted?));
            }
            Action::Disconnect(n) => {
                state.disconnect(self, n);
                let node = &mut state.nodes[n];
                let phase = if matches!(
                    node.phase,
                    Phase::Insert | Phase::Committing | Phase::Committed(_)
                ) {
                    node.ran = Ran::Unsure;
                    Phase::Open
                } else if node.ran == Ran::Unsure {
                    Phase::Release(Reply::TryAgain)
                } else {
                    Phase::Release(Reply::NotExecuted)
                };
                state.enter(self, n, phase);
            }
            Action::Crash(n) => {
                let dying = if self.store == Store::Sqlite {
                    0..NODES
                } else {
                    n..n + 1
                };
                for n in dying {
                    state.disconnect(self, n);
                    state.enter(self, n, Phase::Idle);
                }
            }
            Action::OrphanCommits(orphan) => {
                let session = state.orphans.remove(orphan);
                state.commit(self, session);
            }
            Action::OrphanEnds(orphan) => {
                state.orphans.remove(orphan);
            }
            Action::LateCommandArrives => {
                let (by, command) = state.late.take()?;
                state.run(self, by, command);
            }
            Action::LateCommandIsLost => state.late = None,
            Action::RedisForgets => state.redis = None,
            Action::RecordExpires => {
                let by = state.record?.by;
                let writer = state.nodes[usize::from(by.node)];
                if writer.request == by.request && writer.phase != Phase::Idle {
                    return None;
                }
                state.lifetime += 1;
            }
            Action::Sweep => {
                if state.others(NODES).any(|session| session.forgot) {
                    return None;
                }
                state.record = None;
            }
        }
        let state = state.canonical();
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        checks::properties(self)
    }
}
