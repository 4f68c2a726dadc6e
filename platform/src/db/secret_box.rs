//! Secrets at rest: ChaCha20-Poly1305 under a key derived from the master key.
//!
//! What a secret belongs to is bound in as associated data, so that a sealed secret copied to another
//! row does not open there. Layout: 12 bytes nonce, then ciphertext with its tag.

use std::fmt;

use chacha20poly1305::{
    ChaCha20Poly1305, KeyInit as _, Nonce,
    aead::{Aead as _, Payload},
};

use crate::config::MasterKey;

/// Seals and opens stored secrets.
#[derive(Clone)]
pub struct Sealer(ChaCha20Poly1305);

/// A sealed secret that does not open: another master key, another owner, or a changed byte.
#[derive(Debug, thiserror::Error)]
#[error("a stored secret does not open under this master key")]
pub struct SealError;

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer")
    }
}

impl Sealer {
    /// A sealer under the key for stored secrets.
    pub fn new(master: &MasterKey) -> Self {
        Self(ChaCha20Poly1305::new(&master.derive("botix stored secrets 1").into()))
    }

    /// Seals `secret` for `owner` (an id, in its written form).
    pub fn seal(&self, owner: &str, secret: &[u8]) -> Vec<u8> {
        let nonce: [u8; 12] = rand::random();
        let payload = Payload { msg: secret, aad: owner.as_bytes() };
        let sealed = self
            .0
            .encrypt(&Nonce::from(nonce), payload)
            .expect("a secret is far below the cipher's length limit");
        [&nonce[..], &sealed].concat()
    }

    /// Opens what [`seal`](Self::seal) made for the same `owner`.
    pub fn open(&self, owner: &str, sealed: &[u8]) -> Result<Vec<u8>, SealError> {
        let (nonce, rest) = sealed.split_first_chunk::<12>().ok_or(SealError)?;
        self.0
            .decrypt(&Nonce::from(*nonce), Payload { msg: rest, aad: owner.as_bytes() })
            .map_err(|_| SealError)
    }
}

#[cfg(test)]
mod tests {
    use super::{MasterKey, Sealer};

    #[test]
    fn a_secret_opens_for_its_owner_alone() {
        let sealer = Sealer::new(&MasterKey::generate());
        let sealed = sealer.seal("whe_1", b"secret");
        assert_eq!(sealer.open("whe_1", &sealed).ok().as_deref(), Some(&b"secret"[..]));
        assert!(sealer.open("whe_2", &sealed).is_err());
        assert!(Sealer::new(&MasterKey::generate()).open("whe_1", &sealed).is_err());
    }
}
