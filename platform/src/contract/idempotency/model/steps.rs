//! What a step does to the state: commands, statements, commits and lost connections.

use super::{
    Command, Fate, Flaw, Ledger, NOBODY, NODES, Node, Outcome, Phase, Protocol, Ran, Record, Reply,
    Session, State, Store, Token, Value,
};

impl State {
    pub(super) fn new() -> Self {
        Self {
            nodes: [Node::default(); NODES],
            redis: None,
            late: None,
            record: None,
            orphans: Vec::new(),
            lifetime: 0,
            ledgers: [Ledger::default(); 2],
            trespass: false,
        }
    }

    pub(super) fn token(&self, node: usize) -> Token {
        Token {
            node: u8::try_from(node).expect("there are two nodes"),
            request: self.nodes[node].request,
        }
    }

    pub(super) fn is_live(&self, record: Record) -> bool {
        record.lifetime == self.lifetime
    }

    /// All transactions but the node's own.
    pub(super) fn others(&self, node: usize) -> impl Iterator<Item = &Session> {
        let nodes = self.nodes.iter().enumerate();
        nodes
            .filter(move |(other, _)| *other != node)
            .filter_map(|(_, node)| node.session.as_ref())
            .chain(&self.orphans)
    }

    /// Runs a command in Redis: each is one script or one command there.
    pub(super) fn run(&mut self, protocol: &Protocol, by: Token, command: Command) {
        let before = self.redis;
        let is_mine = before == Some(Value::Lease(by));
        match command {
            Command::Capture if before.is_none() => self.redis = Some(Value::Lease(by)),
            Command::Seize => self.redis = Some(Value::Lease(by)),
            Command::Cache(record)
                if before.is_none() || is_mine || protocol.has(Flaw::CachesBlindly) =>
            {
                self.redis = Some(Value::Done(record));
            }
            Command::Release if is_mine || protocol.has(Flaw::ReleasesBlindly) => self.redis = None,
            _ => {}
        }
        let was_anothers = matches!(before, Some(Value::Lease(owner)) if owner != by);
        self.trespass |= was_anothers && self.redis != before;
    }

    /// A command to Redis, with what becomes of it.
    pub(super) fn send(&mut self, protocol: &Protocol, by: Token, command: Command, fate: Fate) {
        match fate {
            _ if !protocol.has_redis() => {}
            Fate::Works => self.run(protocol, by, command),
            Fate::Fails => {}
            Fate::IsLate => self.late = Some((by, command)),
        }
    }

    /// The server ends a transaction well.
    pub(super) fn commit(&mut self, protocol: &Protocol, session: Session) {
        if session.forgot {
            self.record = None;
        }
        if let Some(record) = session.inserted {
            self.record = Some(record);
            let ledger = &mut self.ledgers[usize::from(record.lifetime)];
            ledger.records += 1;
            ledger.answer = Some(record);
            if !protocol.has(Flaw::RecordApart) {
                ledger.writes += u8::from(record.wrote);
            }
        }
    }

    /// The node's connection is no more; its server may not know yet.
    pub(super) fn disconnect(&mut self, protocol: &Protocol, node: usize) {
        let Some(session) = self.nodes[node].session.take() else {
            return;
        };
        // One that holds nothing is missed by nobody; a process takes its files with it.
        if session != Session::default() && protocol.store != Store::Sqlite {
            self.orphans.push(session);
            self.orphans.sort_unstable();
        }
    }

    /// Takes the node's next step. `None` where it must wait.
    pub(super) fn step(&mut self, protocol: &Protocol, n: usize, fate: Fate) -> Option<()> {
        let me = self.token(n);
        let node = self.nodes[n];
        let phase = match node.phase {
            Phase::Idle | Phase::Handler | Phase::Committing => return None,
            Phase::Capture => {
                let taken = self.redis.is_some();
                self.send(protocol, me, Command::Capture, fate);
                if taken && fate == Fate::Works {
                    Phase::Get
                } else {
                    Phase::Open
                }
            }
            Phase::Get => match self.redis {
                _ if fate != Fate::Works => Phase::Open,
                Some(Value::Done(record))
                    if self.is_live(record) || protocol.has(Flaw::TrustsOldCache) =>
                {
                    Phase::Reply(Reply::FromRedis(record))
                }
                Some(Value::Lease(_)) => Phase::Peek,
                Some(Value::Done(_)) | None => Phase::Open,
            },
            Phase::Peek => match self.record {
                Some(record) if self.is_live(record) => Phase::Reply(Reply::FromRecord(record)),
                _ => Phase::Reply(Reply::TryAgain),
            },
            Phase::Open if protocol.looks_at_once(node.ran) => Phase::Lock(self.record),
            Phase::Open | Phase::Lock(_) => {
                let free = protocol.has(Flaw::NoLock) || !self.others(n).any(|other| other.locked);
                if free {
                    self.nodes[n].session = Some(Session {
                        locked: !protocol.has(Flaw::NoLock),
                        ..Session::default()
                    });
                    match node.phase {
                        Phase::Lock(seen) => self.decide(n, seen),
                        _ => Phase::Read,
                    }
                } else if protocol.store == Store::Sqlite {
                    return None;
                } else {
                    Phase::Release(Reply::TryAgain)
                }
            }
            Phase::Read => self.decide(n, self.record),
            Phase::Forget => {
                if self.others(n).any(|other| other.forgot) {
                    return None;
                }
                let deletes = self.record.is_some_and(|record| {
                    !self.is_live(record) || protocol.has(Flaw::ForgetsBlindly)
                });
                self.session(n).forgot = deletes;
                Phase::Handler
            }
            Phase::Insert => {
                if self.others(n).any(|other| other.holds_row()) {
                    return None;
                }
                let is_there = self.record.is_some() && !self.session(n).forgot;
                if is_there && !protocol.has(Flaw::NoBackstop) {
                    self.nodes[n].session = None;
                    self.nodes[n].ran = Ran::Beaten;
                    Phase::Open
                } else {
                    let record = Record {
                        by: me,
                        wrote: node.ran == Ran::Wrote,
                        lifetime: self.lifetime,
                    };
                    let session = self.session(n);
                    session.inserted = Some(record);
                    session.committing = true;
                    if protocol.has(Flaw::CachesEarly) {
                        self.run(protocol, me, Command::Cache(record));
                    }
                    Phase::Committing
                }
            }
            Phase::Committed(record) => {
                self.send(protocol, me, Command::Cache(record), fate);
                Phase::Reply(Reply::Executed(record))
            }
            Phase::Cache(record) => {
                self.send(protocol, me, Command::Cache(record), fate);
                Phase::Reply(Reply::FromRecord(record))
            }
            Phase::Release(reply) => {
                self.send(protocol, me, Command::Release, fate);
                Phase::Reply(reply)
            }
            Phase::Reply(_) => Phase::Idle,
        };
        self.enter(protocol, n, phase);
        Some(())
    }

    /// What a node does that has the lock and has seen this record.
    fn decide(&mut self, n: usize, seen: Option<Record>) -> Phase {
        let phase = match seen {
            Some(record) if self.is_live(record) => Phase::Cache(record),
            _ => match self.nodes[n].ran {
                Ran::No if seen.is_some() => Phase::Forget,
                Ran::No => Phase::Handler,
                Ran::Refused => Phase::Insert,
                Ran::Wrote | Ran::Beaten | Ran::Unsure => Phase::Release(Reply::NotExecuted),
            },
        };
        if !matches!(phase, Phase::Forget | Phase::Handler | Phase::Insert) {
            self.nodes[n].session = None;
        }
        phase
    }

    fn session(&mut self, n: usize) -> &mut Session {
        self.nodes[n].session.get_or_insert_default()
    }

    pub(super) fn enter(&mut self, protocol: &Protocol, n: usize, phase: Phase) {
        let node = &mut self.nodes[n];
        node.phase = match phase {
            // Without Redis there is nothing to keep there.
            Phase::Capture if !protocol.has_redis() => Phase::Open,
            Phase::Cache(record) if !protocol.has_redis() => {
                Phase::Reply(Reply::FromRecord(record))
            }
            Phase::Release(reply) if !protocol.has_redis() => Phase::Reply(reply),
            phase => phase,
        };
        if node.phase == Phase::Idle {
            *node = Node {
                request: node.request,
                ..Node::default()
            };
        }
    }

    pub(super) fn handler_ends(&mut self, protocol: &Protocol, n: usize, outcome: Outcome) {
        let phase = match outcome {
            Outcome::Wrote => {
                self.nodes[n].ran = Ran::Wrote;
                if protocol.has(Flaw::RecordApart) {
                    self.ledgers[usize::from(self.lifetime)].writes += 1;
                }
                Phase::Insert
            }
            Outcome::Refused => {
                self.nodes[n].ran = Ran::Refused;
                self.nodes[n].session = None;
                Phase::Open
            }
            Outcome::Failed => {
                self.nodes[n].session = None;
                Phase::Release(Reply::NotExecuted)
            }
        };
        self.enter(protocol, n, phase);
    }

    /// One state for all that differ in nothing that counts.
    pub(super) fn canonical(mut self) -> Self {
        self.bury();
        if self.nodes[0] > self.nodes[1] {
            self.swap();
        }
        self
    }

    /// Makes owners of leases that are no more one: whose of these a lease was makes no difference.
    fn bury(&mut self) {
        let nodes = self.nodes;
        let bury = |by: &mut Token| {
            let node = nodes[usize::from(by.node)];
            if node.request != by.request || node.phase == Phase::Idle {
                *by = NOBODY;
            }
        };
        if let Some(Value::Lease(by)) = &mut self.redis {
            bury(by);
        }
        if let Some((by, _)) = &mut self.late {
            bury(by);
        }
        // It could free no more than what lapses by itself.
        if self.late == Some((NOBODY, Command::Release)) {
            self.late = None;
        }
    }

    fn swap(&mut self) {
        self.nodes.swap(0, 1);
        let token = |token: &mut Token| {
            if *token != NOBODY {
                token.node = 1 - token.node;
            }
        };
        let record = |record: &mut Option<Record>| {
            if let Some(record) = record {
                token(&mut record.by);
            }
        };
        let reply = |reply: &mut Reply| match reply {
            Reply::Executed(record) | Reply::FromRedis(record) | Reply::FromRecord(record) => {
                token(&mut record.by);
            }
            Reply::TryAgain | Reply::NotExecuted => {}
        };
        for node in &mut self.nodes {
            match &mut node.phase {
                Phase::Lock(seen) => record(seen),
                Phase::Committed(record) | Phase::Cache(record) => token(&mut record.by),
                Phase::Release(r) | Phase::Reply(r) => reply(r),
                _ => {}
            }
            if let Some(session) = &mut node.session {
                record(&mut session.inserted);
            }
        }
        match &mut self.redis {
            Some(Value::Lease(by)) => token(by),
            Some(Value::Done(record)) => token(&mut record.by),
            None => {}
        }
        if let Some((by, command)) = &mut self.late {
            token(by);
            if let Command::Cache(record) = command {
                token(&mut record.by);
            }
        }
        record(&mut self.record);
        for session in &mut self.orphans {
            record(&mut session.inserted);
        }
        self.orphans.sort_unstable();
        for ledger in &mut self.ledgers {
            record(&mut ledger.answer);
        }
    }
}
