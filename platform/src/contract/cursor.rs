//! Signed keyset cursors: a place in one walk of one list, and in no other.
//!
//! A cursor is URL-safe base64 of JSON with a version, the id of the signing key, the position and an
//! HMAC-SHA256 over these and all that the walk is bound to: project, resource, order and filters.
//! What binds is not in the cursor; whoever reads it states what the walk must be. A cursor reads back
//! only in the one spelling it was written in, so no changed byte can pass. A list goes on from a
//! [`Verified`] position, which nothing but a cursor of that very walk turns into.
//!
//! Keys are derived from the master key by number. One signs, and another may verify as well, so that
//! many nodes can change keys one after the other and break no walk: first all learn to verify with the
//! new key, then all sign with it, and when the old cursors are gone all forget the old one.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    config::{self, MasterKey},
    db::Timestamp,
};

const VERSION: u8 = 1;

/// The longest cursor that is looked at, in characters.
const LONGEST: usize = 512;

/// A row's place in the order `(created_at, id)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// When the row was made.
    pub created_at: Timestamp,
    /// The row's id, without its kind.
    pub id: uuid::Uuid,
}

/// A position that a cursor of its walk proved.
///
/// ```compile_fail,E0423
/// use botix::{contract::cursor::{Position, Verified}, db::Timestamp};
///
/// // What a client sent is no place in a list until its cursor was read.
/// let position = Position { created_at: Timestamp::now(), id: uuid::Uuid::nil() };
/// let verified = Verified(position);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified(Position);

impl Verified {
    /// The position.
    pub fn position(self) -> Position {
        self.0
    }
}

/// What a walk is bound to.
#[derive(Debug)]
pub struct Walk<'w> {
    /// The project, or whatever else owns the rows.
    pub owner: uuid::Uuid,
    /// The collection.
    pub resource: &'w str,
    /// The order, with its direction.
    pub order: &'w str,
    /// Each filter's name and value.
    pub filters: &'w [(&'w str, String)],
}

/// A text that is no cursor of this walk.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor of this walk")]
pub struct InvalidCursor;

/// The keys that sign cursors: the first signs, all verify.
#[derive(Clone)]
pub struct CursorKeys(Vec<CursorKey>);

#[derive(Clone)]
struct CursorKey {
    id: String,
    secret: [u8; 32],
}

impl std::fmt::Debug for CursorKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|key| &key.id))
            .finish()
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    v: u8,
    k: String,
    at: i64,
    id: uuid::Uuid,
    s: String,
}

impl CursorKeys {
    /// The keys of these numbers, derived from the master key; the first one signs.
    pub fn new(master: &MasterKey, settings: &config::Cursors) -> Self {
        let derived = settings.keys.iter().map(|number| {
            let secret = master.derive(&format!("botix cursors {number}"));
            // The id tells keys apart after a rotation and tells nothing about the secret.
            let digest = Sha256::digest([&b"botix cursor key id"[..], &secret].concat());
            let id = URL_SAFE_NO_PAD.encode(&digest[..6]);
            CursorKey { id, secret }
        });
        Self(derived.collect())
    }

    /// Writes the cursor that continues `walk` after `position`.
    pub fn write(&self, walk: &Walk<'_>, position: Position) -> String {
        let key = &self.0[0];
        let written = Written {
            v: VERSION,
            k: key.id.clone(),
            at: position.created_at.micros(),
            id: position.id,
            s: URL_SAFE_NO_PAD.encode(key.mac(walk, position).finalize().into_bytes()),
        };
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(&written).unwrap_or_default())
    }

    /// Reads a cursor of `walk`.
    pub fn read(&self, walk: &Walk<'_>, text: &str) -> Result<Verified, InvalidCursor> {
        if text.len() > LONGEST {
            return Err(InvalidCursor);
        }
        let json = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidCursor)?;
        let written: Written = serde_json::from_slice(&json).map_err(|_| InvalidCursor)?;
        if written.v != VERSION || serde_json::to_vec(&written).ok().as_deref() != Some(&json) {
            return Err(InvalidCursor);
        }
        let key = self
            .0
            .iter()
            .find(|key| key.id == written.k)
            .ok_or(InvalidCursor)?;
        let position = Position {
            created_at: Timestamp::from_micros(written.at),
            id: written.id,
        };
        let signature = URL_SAFE_NO_PAD
            .decode(&written.s)
            .map_err(|_| InvalidCursor)?;
        key.mac(walk, position)
            .verify_slice(&signature)
            .map_err(|_| InvalidCursor)?;
        Ok(Verified(position))
    }
}

impl CursorKey {
    fn mac(&self, walk: &Walk<'_>, position: Position) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.secret).expect("HMAC takes a key of any length");
        // Each part goes in with its length, so that no two walks can spell the same bytes.
        let mut part = |bytes: &[u8]| {
            mac.update(&(bytes.len() as u64).to_be_bytes());
            mac.update(bytes);
        };
        part(&[VERSION]);
        part(self.id.as_bytes());
        part(walk.owner.as_bytes());
        part(walk.resource.as_bytes());
        part(walk.order.as_bytes());
        for (name, value) in walk.filters {
            part(name.as_bytes());
            part(value.as_bytes());
        }
        part(&position.created_at.micros().to_be_bytes());
        part(position.id.as_bytes());
        mac
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{CursorKeys, InvalidCursor, Position, Verified, Walk};
    use crate::{
        config::{Cursors, MasterKey},
        db::Timestamp,
    };

    fn keys_of(master: &MasterKey, numbers: &[u32]) -> CursorKeys {
        let keys = numbers.to_vec();
        CursorKeys::new(master, &Cursors { keys })
    }

    fn walk<'w>(owner: u128, resource: &'w str, filters: &'w [(&'w str, String)]) -> Walk<'w> {
        Walk {
            owner: uuid::Uuid::from_u128(owner),
            resource,
            order: "-created_at,-id",
            filters,
        }
    }

    proptest! {
        #[test]
        fn a_cursor_reads_back_in_its_own_walk_alone(at in any::<i64>(), id in any::<u128>()) {
            let keys = keys_of(&MasterKey::generate(), &[1]);
            let position =
                Position { created_at: Timestamp::from_micros(at), id: uuid::Uuid::from_u128(id) };
            let filter = [("state", "dead".to_owned())];
            let text = keys.write(&walk(1, "contacts", &filter), position);
            prop_assert_eq!(keys.read(&walk(1, "contacts", &filter), &text), Ok(Verified(position)));
            for other in [walk(2, "contacts", &filter), walk(1, "events", &filter), walk(1, "contacts", &[])] {
                prop_assert_eq!(keys.read(&other, &text), Err(InvalidCursor));
            }
            let other_keys = keys_of(&MasterKey::generate(), &[1]);
            prop_assert_eq!(other_keys.read(&walk(1, "contacts", &filter), &text), Err(InvalidCursor));
        }

        #[test]
        fn no_changed_byte_passes(place in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let keys = keys_of(&MasterKey::generate(), &[1]);
            let position =
                Position { created_at: Timestamp::from_micros(5), id: uuid::Uuid::from_u128(7) };
            let text = keys.write(&walk(1, "contacts", &[]), position);
            let mut bytes = text.clone().into_bytes();
            let place = place.index(bytes.len());
            prop_assume!(bytes[place] != byte);
            bytes[place] = byte;
            let changed = String::from_utf8_lossy(&bytes).into_owned();
            prop_assert_eq!(keys.read(&walk(1, "contacts", &[]), &changed), Err(InvalidCursor));
        }
    }

    #[test]
    fn each_step_of_a_key_change_reads_what_the_step_before_wrote() {
        let master = MasterKey::generate();
        let position = Position {
            created_at: Timestamp::from_micros(5),
            id: uuid::Uuid::from_u128(7),
        };
        let steps = [&[1][..], &[1, 2], &[2, 1], &[2]].map(|numbers| keys_of(&master, numbers));
        let walk = walk(1, "contacts", &[]);
        for neighbours in steps.windows(2) {
            for (writes, reads) in [(0, 1), (1, 0)] {
                let text = neighbours[writes].write(&walk, position);
                assert_eq!(neighbours[reads].read(&walk, &text), Ok(Verified(position)));
            }
        }
        let old = steps[0].write(&walk, position);
        assert_eq!(steps[3].read(&walk, &old), Err(InvalidCursor));
    }

    #[test]
    fn a_cursor_needs_no_escaping_in_a_query_string() {
        let keys = keys_of(&MasterKey::generate(), &[1]);
        for id in 0..200 {
            let position = Position {
                created_at: Timestamp::from_micros(1_764_550_000_000_000),
                id: uuid::Uuid::from_u128(id * 0x0123_4567_89ab_cdef),
            };
            let text = keys.write(&walk(1, "contacts", &[]), position);
            assert!(
                text.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            );
        }
    }
}
