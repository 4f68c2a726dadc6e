//! The reference: what the contract allows a server to answer, and nothing of how it does it.
//!
//! A key is free, answered, or unknown: sent while the process or the database died, so that the work
//! was done or not. The next definite answer settles it, and from then on there is one truth again. A
//! phone number is used once; a contact under it makes every other creation a decided refusal.

use crate::harness::api::{Answer, Api, Request};
use crate::harness::{fresh_key, fresh_phone};
use serde_json::{Value, json};
use std::collections::HashMap;

pub const KEYS: usize = 3;

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// A new contact.
    One,
    /// The same phone number in another body.
    OneNamed,
    /// Another contact.
    Two,
    /// A phone number that was in use before: a decided refusal.
    Taken,
    /// No contact at all: refused, and not remembered.
    Invalid,
}

impl Body {
    /// Which of the phone numbers it has.
    fn phone(self) -> usize {
        match self {
            Self::One | Self::OneNamed | Self::Invalid => 0,
            Self::Two => 1,
            Self::Taken => 2,
        }
    }
}

/// What may have come between a request and its answer.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances {
    /// Others with the same key were sent at the same time.
    pub in_parallel: bool,
    pub database: Database,
    /// The server lost Redis meanwhile, of itself or because the test took it away.
    pub redis_failed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Database {
    InReach,
    OutOfReach,
    /// In reach at first.
    LostMeanwhile,
}

#[derive(Default)]
struct Key {
    name: String,
    answered: Option<(Body, Answer)>,
    /// What may have been executed without an answer.
    maybe: Vec<Body>,
    /// One of these certainly was.
    ran: bool,
    /// A process that died, or a command that Redis got late, may still hold it.
    held: bool,
}

impl Key {
    fn may_be_free(&self) -> bool {
        self.answered.is_none() && !self.ran
    }
}

pub struct Model {
    keys: Vec<Key>,
    phones: [String; 3],
    /// Ids by phone number.
    contacts: HashMap<String, String>,
}

/// Why an answer is not allowed, or nothing.
pub type Verdict = Result<(), String>;

impl Model {
    /// A project that has one contact.
    pub async fn new(api: &Api) -> Self {
        let phones = [fresh_phone(), fresh_phone(), fresh_phone()];
        let taken = json!({"phone": phones[2]});
        let made = api.post("/contacts").json(&taken).send().await.expect(201);
        let key = |_| Key {
            name: fresh_key(),
            ..Key::default()
        };
        Self {
            keys: (0..KEYS).map(key).collect(),
            contacts: HashMap::from([(phones[2].clone(), made.member("id"))]),
            phones,
        }
    }

    pub fn request(&self, api: &Api, key: usize, body: Body) -> Request {
        let body: Value = match body {
            Body::One | Body::Two | Body::Taken => json!({"phone": self.phone(body)}),
            Body::OneNamed => json!({"phone": self.phone(body), "name": "Ada"}),
            Body::Invalid => json!({"phone": "none"}),
        };
        api.post("/contacts").key(&self.keys[key].name).json(&body)
    }

    fn phone(&self, body: Body) -> &String {
        &self.phones[body.phone()]
    }

    /// The ids of all contacts.
    pub fn ids(&self) -> Vec<String> {
        let mut ids: Vec<_> = self.contacts.values().cloned().collect();
        ids.sort();
        ids
    }

    /// What to ask until a key is no longer unknown.
    pub fn unsettled(&self) -> Option<(usize, Body)> {
        let find = |(at, key): (usize, &Key)| Some((at, *key.maybe.first()?));
        self.keys.iter().enumerate().find_map(find)
    }

    /// What was answered, to be asked again.
    pub fn answered(&self) -> Vec<(usize, Body)> {
        let keys = self.keys.iter().enumerate();
        keys.filter_map(|(at, key)| Some((at, key.answered.as_ref()?.0)))
            .collect()
    }

    /// A request had no answer; `executed` is whether its work may have been done.
    pub fn unanswered(&mut self, key: usize, body: Body, executed: bool) {
        let key = &mut self.keys[key];
        if executed && body != Body::Invalid && key.may_be_free() && !key.maybe.contains(&body) {
            key.maybe.push(body);
        }
    }

    /// The key may be held by nobody for as long as a lease.
    pub fn may_be_held(&mut self, key: usize) {
        self.keys[key].held = true;
    }

    /// Whoever held a key holds it no longer.
    pub fn leases_ended(&mut self) {
        for key in &mut self.keys {
            key.held = false;
        }
    }

    /// Nothing is remembered of any answer; contacts stay.
    pub fn records_expired(&mut self) {
        for key in &mut self.keys {
            assert!(key.maybe.is_empty(), "settled before");
            key.answered = None;
            key.held = false;
        }
    }

    /// Whether this answer is one that the contract allows now; learns from it.
    pub fn judge(
        &mut self,
        key: usize,
        body: Body,
        answer: &Answer,
        when: Circumstances,
    ) -> Verdict {
        let shown = answer.describe();
        let code = answer.code();
        match (answer.status.as_u16(), code.as_deref()) {
            (503, _) => match when.database {
                Database::InReach => Err(format!("503 while the database is in reach: {shown}")),
                Database::OutOfReach => Ok(()),
                Database::LostMeanwhile => {
                    self.unanswered(key, body, true);
                    Ok(())
                }
            },
            _ if when.database == Database::OutOfReach => {
                Err(format!("an answer without a database: {shown}"))
            }
            (409, Some("IDEMPOTENCY_KEY_IN_PROGRESS")) => {
                let may_be = when.in_parallel || when.redis_failed || self.keys[key].held;
                check(may_be, || {
                    format!("in progress, and nobody has the key: {shown}")
                })
            }
            (409, Some("IDEMPOTENCY_KEY_REUSE_CONFLICT")) => self.is_conflict(key, body, &shown),
            _ if answer.is_replay() => self.is_replay(key, body, answer),
            (400, Some("INVALID_BODY")) => {
                check(body == Body::Invalid, || format!("a sound body: {shown}"))?;
                self.is_first(key, &shown)?;
                self.keys[key].maybe.clear();
                Ok(())
            }
            (201 | 409, _) => {
                self.is_first(key, &shown)?;
                self.is_right(body, answer)?;
                self.remember(key, body, answer);
                Ok(())
            }
            _ => Err(format!("no answer of this business: {shown}")),
        }
    }

    fn is_first(&self, key: usize, shown: &str) -> Verdict {
        check(self.keys[key].may_be_free(), || {
            format!("executed although the key was used: {shown}")
        })
    }

    fn is_conflict(&mut self, key: usize, body: Body, shown: &str) -> Verdict {
        let key = &mut self.keys[key];
        if let Some((first, _)) = &key.answered {
            return check(*first != body, || {
                format!("it is the same request: {shown}")
            });
        }
        key.maybe.retain(|other| *other != body);
        key.ran = !key.maybe.is_empty();
        check(key.ran, || format!("the key was never used: {shown}"))
    }

    fn is_replay(&mut self, key: usize, body: Body, answer: &Answer) -> Verdict {
        let shown = answer.describe();
        if let Some((first_body, first)) = &self.keys[key].answered {
            let same = answer.status == first.status
                && answer.body == first.body
                && ["content-type", "location"]
                    .iter()
                    .all(|name| answer.header(name) == first.header(name));
            check(*first_body == body, || {
                format!("the replay of another request: {shown}")
            })?;
            return check(same, || {
                format!("a replay that differs: {shown} from {}", first.describe())
            });
        }
        check(self.keys[key].maybe.contains(&body), || {
            format!("a replay of what was never executed: {shown}")
        })?;
        self.is_right(body, answer)?;
        self.remember(key, body, answer);
        Ok(())
    }

    /// Whether the business may decide so.
    fn is_right(&self, body: Body, answer: &Answer) -> Verdict {
        let shown = answer.describe();
        let phone = self.phone(body);
        let is_used = self.contacts.contains_key(phone);
        if answer.status == 201 {
            check(answer.member("phone") == *phone, || {
                format!("another phone: {shown}")
            })?;
            return check(!is_used && body != Body::Invalid, || {
                format!("a second contact with one phone number: {shown}")
            });
        }
        let may_be_used = is_used
            || self.keys.iter().any(|key| {
                let mut maybe = key.maybe.iter();
                maybe.any(|other| self.phone(*other) == phone)
            });
        check(
            answer.code().as_deref() == Some("CONTACT_EXISTS") && may_be_used,
            || format!("refused for no reason: {shown}"),
        )
    }

    fn remember(&mut self, key: usize, body: Body, answer: &Answer) {
        let phone = self.phone(body).clone();
        let known = &mut self.keys[key];
        known.answered = Some((body, answer.clone()));
        known.ran = false;
        known.maybe.clear();
        if answer.status != 201 {
            return;
        }
        let was_executed_now = !answer.is_replay();
        self.contacts.insert(phone.clone(), answer.member("id"));
        if was_executed_now {
            // Whatever else might have made this contact did not.
            let phones = &self.phones;
            for key in self.keys.iter_mut().filter(|key| !key.ran) {
                key.maybe.retain(|body| phones[body.phone()] != phone);
            }
        }
    }
}

fn check(holds: bool, otherwise: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(otherwise()) }
}
