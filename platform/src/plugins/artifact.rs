//! Compiled plugins as bytes, and the one `unsafe` of the platform: loading them.
//!
//! A compiled artifact is machine code, so it must be code that this platform made. The type says
//! so: an [`Artifact`] exists only because the compiler of this process or its child just made it,
//! or because [`Artifact::open`] found our own seal intact. What lies in a database or on a disk is
//! a `Vec<u8>`, and nothing loads a `Vec<u8>`.
//!
//! The seal is HMAC-SHA256 over everything before it: a tag, the fingerprint of the engine that
//! compiled it, the SHA-256 of the component it was compiled from, which functions it exports, and
//! the code. An artifact of another engine (other version, settings or processor) opens, because
//! it is ours, but does not load: compile again.
#![allow(unsafe_code)]

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use wasmtime::component::Component;

use super::inspect::Exports;

/// Names the layout below; another layout gets another tag.
const TAG: &[u8; 8] = b"botixpl1";
const HEADER: usize = TAG.len() + 32 + 32 + 1;
const SEAL: usize = 32;

/// Identifies everything that compiled code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub(super) [u8; 32]);

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Machine code that this platform compiled from a component.
#[derive(Clone)]
pub struct Artifact {
    fingerprint: Fingerprint,
    wasm_sha256: [u8; 32],
    exports: Exports,
    code: Vec<u8>,
}

/// Why sealed bytes are not an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Not sealed with this key: damaged, forged, or from before the key changed.
    #[error("the artifact's seal does not match")]
    Seal,
    /// Sealed by us, but compiled from another component.
    #[error("the artifact belongs to another component")]
    OtherComponent,
}

impl Artifact {
    /// What the compiler just made. For the compiler only: this is where trust comes from.
    pub(super) fn compiled(
        fingerprint: Fingerprint,
        wasm: &[u8],
        exports: Exports,
        code: Vec<u8>,
    ) -> Self {
        Self {
            fingerprint,
            wasm_sha256: Sha256::digest(wasm).into(),
            exports,
            code,
        }
    }

    /// The engine that compiled it.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// SHA-256 of the component it was compiled from.
    pub fn wasm_sha256(&self) -> &[u8; 32] {
        &self.wasm_sha256
    }

    /// The functions that the component exports.
    pub fn exports(&self) -> Exports {
        self.exports
    }

    /// The artifact as bytes that [`Artifact::open`] accepts with the same key.
    pub fn seal(&self, key: &[u8; 32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.code.len() + SEAL);
        bytes.extend_from_slice(TAG);
        bytes.extend_from_slice(&self.fingerprint.0);
        bytes.extend_from_slice(&self.wasm_sha256);
        bytes.push(u8::from(self.exports.transform) | u8::from(self.exports.sign) << 1);
        bytes.extend_from_slice(&self.code);
        let seal = mac(key, &bytes).finalize().into_bytes();
        bytes.extend_from_slice(&seal);
        bytes
    }

    /// Checks the seal of bytes from outside this process, and that they were compiled from the
    /// component whose SHA-256 is given.
    pub fn open(key: &[u8; 32], sealed: &[u8], wasm_sha256: &[u8; 32]) -> Result<Self, OpenError> {
        let (signed, seal) = sealed.split_last_chunk::<SEAL>().ok_or(OpenError::Seal)?;
        mac(key, signed)
            .verify_slice(seal)
            .map_err(|_| OpenError::Seal)?;

        let rest = signed.strip_prefix(TAG).ok_or(OpenError::Seal)?;
        let (fingerprint, rest) = rest.split_first_chunk::<32>().ok_or(OpenError::Seal)?;
        let (sha256, rest) = rest.split_first_chunk::<32>().ok_or(OpenError::Seal)?;
        let (flags, code) = rest.split_first().ok_or(OpenError::Seal)?;
        if sha256 != wasm_sha256 {
            return Err(OpenError::OtherComponent);
        }
        Ok(Self {
            fingerprint: Fingerprint(*fingerprint),
            wasm_sha256: *sha256,
            exports: Exports {
                transform: flags & 1 != 0,
                sign: flags & 2 != 0,
            },
            code: code.to_vec(),
        })
    }

    /// Maps the code into this process. The caller has compared the fingerprints.
    pub(super) fn deserialize(&self, engine: &wasmtime::Engine) -> wasmtime::Result<Component> {
        // SAFETY: `deserialize` requires bytes that wasmtime's own serialization produced. `code`
        // is private and set in two places only: `compiled`, by our compiler from wasmtime's
        // output, and `open`, after a constant-time check of an HMAC under a key that only this
        // platform has, over bytes that `seal` wrote from an artifact that was itself compiled.
        // No tenant can put bytes here. wasmtime checks version and settings by itself.
        unsafe { Component::deserialize(engine, &self.code) }
    }
}

impl std::fmt::Debug for Artifact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Artifact")
            .field("fingerprint", &self.fingerprint.to_string())
            .field("exports", &self.exports)
            .field("code_bytes", &self.code.len())
            .finish_non_exhaustive()
    }
}

fn mac(key: &[u8; 32], bytes: &[u8]) -> Hmac<Sha256> {
    // HMAC pads a key that is shorter than its block with zeros; doing so here cannot fail.
    let mut block = [0; 64];
    block[..key.len()].copy_from_slice(key);
    Hmac::<Sha256>::new(&block.into()).chain_update(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: &[u8; 32] = &[7; 32];

    fn artifact() -> Artifact {
        let exports = Exports {
            transform: true,
            sign: false,
        };
        Artifact::compiled(Fingerprint([1; 32]), b"wasm", exports, b"code".to_vec())
    }

    #[test]
    fn a_sealed_artifact_opens_as_it_was() {
        let artifact = artifact();
        let opened = Artifact::open(KEY, &artifact.seal(KEY), artifact.wasm_sha256()).unwrap();
        assert_eq!(opened.fingerprint, artifact.fingerprint);
        assert_eq!(opened.exports, artifact.exports);
        assert_eq!(opened.code, artifact.code);
    }

    #[test]
    fn another_key_or_another_component_does_not_open() {
        let sealed = artifact().seal(KEY);
        let sha256 = *artifact().wasm_sha256();
        assert_eq!(
            Artifact::open(&[8; 32], &sealed, &sha256).unwrap_err(),
            OpenError::Seal
        );
        assert_eq!(
            Artifact::open(KEY, &sealed, &[0; 32]).unwrap_err(),
            OpenError::OtherComponent
        );
    }

    proptest! {
        #[test]
        fn no_changed_byte_and_no_cut_opens(at in any::<proptest::sample::Index>(), flip in 1..=255_u8) {
            let artifact = artifact();
            let mut sealed = artifact.seal(KEY);
            let index = at.index(sealed.len());
            prop_assert!(Artifact::open(KEY, &sealed[..index], artifact.wasm_sha256()).is_err());
            sealed[index] ^= flip;
            prop_assert!(Artifact::open(KEY, &sealed, artifact.wasm_sha256()).is_err());
        }
    }
}
