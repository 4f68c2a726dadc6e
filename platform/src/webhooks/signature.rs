//! Signatures over a webhook's body, so that a receiver can tell ours from anyone else's.
//!
//! Two forms of one HMAC-SHA256 key: hex of the body alone for `X-Botix-Signature`, and the Standard
//! Webhooks form over `id.timestamp.body` for `webhook-signature`, which its libraries verify as they
//! are and which a replay cannot reuse later. The key is the decoded bytes of the secret, not its
//! text. While a secret is being rotated both the new and the old one sign, so that a receiver can
//! change over at any moment of the overlap. Secrets are wiped when dropped and never shown by Debug.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use sha2::Sha256;

const PREFIX: &str = "whsec_";
const GENERATED_LEN: usize = 32;

/// The signing secret of an endpoint, written `whsec_<base64>`.
#[derive(Clone, Debug)]
pub struct EndpointSecret {
    key: SecretSlice<u8>,
}

/// Why a text is no endpoint secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// It does not start with `whsec_`.
    #[error("a webhook secret starts with whsec_")]
    Prefix,
    /// What follows is not padded standard base64.
    #[error("a webhook secret is base64 after whsec_")]
    Base64,
    /// The key is too short to be safe or longer than an HMAC-SHA256 block.
    #[error("a webhook secret holds 24 to 64 bytes")]
    Length,
}

impl EndpointSecret {
    /// A fresh secret of 32 random bytes.
    pub fn generate() -> Self {
        let mut key = vec![0; GENERATED_LEN];
        rand::fill(key.as_mut_slice());
        Self { key: key.into() }
    }

    /// Reads `whsec_<base64 of 24 to 64 bytes>`.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let encoded = text.strip_prefix(PREFIX).ok_or(SecretError::Prefix)?;
        let key = SecretSlice::from(STANDARD.decode(encoded).map_err(|_| SecretError::Base64)?);
        if !(24..=64).contains(&key.expose_secret().len()) {
            return Err(SecretError::Length);
        }
        Ok(Self { key })
    }

    /// The text form, to be shown to its owner once.
    pub fn expose(&self) -> SecretString {
        format!("{PREFIX}{}", STANDARD.encode(self.key.expose_secret())).into()
    }

    /// The secret with this key, as [`key`](Self::key) gave it.
    pub fn from_key(key: Vec<u8>) -> Self {
        Self { key: key.into() }
    }

    /// The key itself, for the plugin host's `hmac-sha256` with the key name `endpoint`.
    pub fn key(&self) -> &[u8] {
        self.key.expose_secret()
    }

    fn mac(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(self.key()).expect("HMAC takes any key length");
        for part in parts {
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }
}

/// The value of `X-Botix-Signature`: lower-case hex HMAC-SHA256 of exactly `body`.
pub fn botix_signature(secret: &EndpointSecret, body: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    secret
        .mac(&[body])
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 0xf])
        .map(|nibble| char::from(DIGITS[usize::from(nibble)]))
        .collect()
}

/// One Standard Webhooks signature, `v1,<base64>`, of `body` sent as message `msg_id` at
/// `timestamp_secs` of Unix time.
pub fn standard_signature(
    secret: &EndpointSecret,
    msg_id: &str,
    timestamp_secs: u64,
    body: &[u8],
) -> String {
    let timestamp = timestamp_secs.to_string();
    let mac = secret.mac(&[msg_id.as_bytes(), b".", timestamp.as_bytes(), b".", body]);
    format!("v1,{}", STANDARD.encode(mac))
}

/// The value of `webhook-signature`: the current secret's signature, and after a space each that of the
/// previous ones that are still valid.
pub fn standard_signatures(
    secret: &EndpointSecret,
    previous: &[EndpointSecret],
    msg_id: &str,
    timestamp_secs: u64,
    body: &[u8],
) -> String {
    let mut list = standard_signature(secret, msg_id, timestamp_secs, body);
    for previous in previous {
        list.push(' ');
        list.push_str(&standard_signature(previous, msg_id, timestamp_secs, body));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

    fn secret(text: &str) -> EndpointSecret {
        EndpointSecret::parse(text).unwrap()
    }

    #[test]
    fn standard_webhooks_vectors_hold() {
        assert_eq!(
            standard_signature(
                &secret(FIRST),
                "msg_p5jXN8AQM9LWM0D4loKWxJek",
                1_614_265_330,
                br#"{"test": 2432232314}"#
            ),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
        assert_eq!(
            standard_signature(
                &secret(SECOND),
                "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk",
                1_649_367_553,
                br#"{"email":"test@example.com","username":"test_user"}"#
            ),
            "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw="
        );
    }

    #[test]
    fn the_hex_form_is_plain_hmac_sha256_keyed_with_the_decoded_bytes() {
        // RFC 4231, test case 4.
        let key: Vec<u8> = (1..=25).collect();
        assert_eq!(
            botix_signature(
                &secret(&format!("whsec_{}", STANDARD.encode(key))),
                &[0xcd; 50]
            ),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"
        );
    }

    #[test]
    fn during_a_rotation_both_secrets_sign_the_new_one_first() {
        let (new, old) = (secret(FIRST), secret(SECOND));
        let one = |s| standard_signature(s, "evt_1", 7, b"{}");
        assert_eq!(standard_signatures(&new, &[], "evt_1", 7, b"{}"), one(&new));
        assert_eq!(
            standard_signatures(&new, std::slice::from_ref(&old), "evt_1", 7, b"{}"),
            format!("{} {}", one(&new), one(&old))
        );
    }

    #[test]
    fn generated_secrets_are_32_bytes_all_different_and_survive_their_text_form() {
        let (one, other) = (EndpointSecret::generate(), EndpointSecret::generate());
        assert_eq!(one.key().len(), 32);
        assert_ne!(one.key(), other.key());
        let text = one.expose();
        assert!(text.expose_secret().starts_with("whsec_"));
        assert_eq!(secret(text.expose_secret()).key(), one.key());
    }

    #[test]
    fn debug_shows_nothing_of_a_secret() {
        let shown = format!("{:?}", secret(FIRST));
        assert!(!shown.contains("MfKQ") && !shown.contains("242"), "{shown}");
    }

    #[test]
    fn what_is_no_secret_is_refused_with_its_reason() {
        let of = |len| format!("whsec_{}", STANDARD.encode(vec![1u8; len]));
        for (text, reason) in [
            (
                "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned(),
                SecretError::Prefix,
            ),
            (String::new(), SecretError::Prefix),
            ("whsec_not base64".to_owned(), SecretError::Base64),
            ("whsec_".to_owned(), SecretError::Length),
            (of(23), SecretError::Length),
            (of(65), SecretError::Length),
        ] {
            assert_eq!(EndpointSecret::parse(&text).err(), Some(reason), "{text}");
        }
        assert!(EndpointSecret::parse(&of(24)).is_ok() && EndpointSecret::parse(&of(64)).is_ok());
    }
}
