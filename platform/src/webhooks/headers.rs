//! The headers of a webhook that the platform answers for.
//!
//! Everything a receiver verifies, deduplicates or reports with comes from here: the two signatures,
//! the event, the attempt. Tenants and plugins may add headers, and a plugin may replace the content
//! type, but never one of the [reserved](crate::contract::reserved_headers) names.

use std::time::{SystemTime, UNIX_EPOCH};

use http::header::{
    ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue, USER_AGENT,
};

use super::signature::{EndpointSecret, botix_signature, standard_signatures};

/// `X-Botix-Event`: the event's type.
pub const EVENT: HeaderName = HeaderName::from_static("x-botix-event");
/// `X-Botix-Signature`: hex HMAC-SHA256 of the body.
pub const SIGNATURE: HeaderName = HeaderName::from_static("x-botix-signature");
/// `X-Botix-Signature-Previous`: the same with the secret before, while it is being rotated out.
pub const SIGNATURE_PREVIOUS: HeaderName = HeaderName::from_static("x-botix-signature-previous");
/// `X-Botix-Request-Id`: stable across the ladder, new for a manual retry.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-botix-request-id");
/// `X-Delivery-Attempt`: 1 for the first.
pub const DELIVERY_ATTEMPT: HeaderName = HeaderName::from_static("x-delivery-attempt");
/// `webhook-id` of Standard Webhooks: the event's id.
pub const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
/// `webhook-timestamp` of Standard Webhooks: Unix seconds of this attempt.
pub const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
/// `webhook-signature` of Standard Webhooks: one `v1,…` per valid secret.
pub const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

const AGENT: HeaderValue = HeaderValue::from_static(concat!("BOTIX/", env!("CARGO_PKG_VERSION")));
const ANYTHING: HeaderValue = HeaderValue::from_static("*/*");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// One attempt, as far as its headers tell of it.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// `evt_…`.
    pub event_id: &'a str,
    /// Dotted name of the event's type.
    pub event_type: &'a str,
    /// `req_…`.
    pub request_id: &'a str,
    /// 1 for the first attempt.
    pub number: u32,
    /// When this attempt is sent. Receivers refuse old timestamps, so it is never the event's.
    pub sent_at: SystemTime,
}

/// The platform's headers for `attempt`, signed over exactly `body` with `secret` and with
/// those `previous` ones that are still valid, the newest first. Fails where an id or type cannot stand in a header.
pub fn headers(
    attempt: &Attempt<'_>,
    secret: &EndpointSecret,
    previous: &[EndpointSecret],
    body: &[u8],
) -> Result<HeaderMap, InvalidHeaderValue> {
    let timestamp = attempt
        .sent_at
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let standard = standard_signatures(secret, previous, attempt.event_id, timestamp, body);

    let mut headers = HeaderMap::with_capacity(11);
    headers.insert(CONTENT_TYPE, JSON);
    headers.insert(USER_AGENT, AGENT);
    headers.insert(ACCEPT, ANYTHING);
    headers.insert(EVENT, attempt.event_type.try_into()?);
    headers.insert(REQUEST_ID, attempt.request_id.try_into()?);
    headers.insert(DELIVERY_ATTEMPT, attempt.number.into());
    headers.insert(SIGNATURE, botix_signature(secret, body).try_into()?);
    // One value, as receivers expect it; those before that sign in the list of Standard Webhooks.
    if let Some(previous) = previous.first() {
        headers.insert(
            SIGNATURE_PREVIOUS,
            botix_signature(previous, body).try_into()?,
        );
    }
    headers.insert(WEBHOOK_ID, attempt.event_id.try_into()?);
    headers.insert(WEBHOOK_TIMESTAMP, timestamp.into());
    headers.insert(WEBHOOK_SIGNATURE, standard.try_into()?);
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn secret(byte: u8) -> EndpointSecret {
        use base64::Engine;
        let text = base64::engine::general_purpose::STANDARD.encode([byte; 32]);
        EndpointSecret::parse(&format!("whsec_{text}")).unwrap()
    }

    fn attempt(event_type: &str) -> Attempt<'_> {
        Attempt {
            event_id: "evt_01JZ0000000000000000000000",
            event_type,
            request_id: "req_01JZ0000000000000000000002",
            number: 3,
            sent_at: UNIX_EPOCH + Duration::from_millis(1_700_000_000_999),
        }
    }

    #[test]
    fn a_webhook_carries_every_promised_header_and_a_signature_of_its_body() {
        let secret = secret(1);
        let headers = headers(&attempt("contact.created"), &secret, &[], b"{}").unwrap();
        let mut seen: Vec<(&str, &str)> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
            .collect();
        seen.sort_unstable();
        let hex = botix_signature(&secret, b"{}");
        let standard = standard_signatures(
            &secret,
            &[],
            "evt_01JZ0000000000000000000000",
            1_700_000_000,
            b"{}",
        );
        assert_eq!(
            seen,
            [
                ("accept", "*/*"),
                ("content-type", "application/json"),
                ("user-agent", concat!("BOTIX/", env!("CARGO_PKG_VERSION"))),
                ("webhook-id", "evt_01JZ0000000000000000000000"),
                ("webhook-signature", standard.as_str()),
                ("webhook-timestamp", "1700000000"),
                ("x-botix-event", "contact.created"),
                ("x-botix-request-id", "req_01JZ0000000000000000000002"),
                ("x-botix-signature", hex.as_str()),
                ("x-delivery-attempt", "3"),
            ]
        );
    }

    #[test]
    fn during_rotations_the_previous_secrets_sign_too() {
        let (new, old) = (secret(1), [secret(3), secret(2)]);
        let headers = headers(&attempt("contact.created"), &new, &old, b"{}").unwrap();
        assert_eq!(headers[SIGNATURE], botix_signature(&new, b"{}").as_str());
        let previous: Vec<_> = headers.get_all(SIGNATURE_PREVIOUS).iter().collect();
        assert_eq!(previous, [botix_signature(&old[0], b"{}").as_str()]);
        assert_eq!(
            headers[WEBHOOK_SIGNATURE]
                .to_str()
                .unwrap()
                .split(' ')
                .count(),
            3
        );
    }

    #[test]
    fn a_type_that_would_break_out_of_its_header_is_an_error() {
        assert!(headers(&attempt("a\r\nx: y"), &secret(1), &[], b"{}").is_err());
    }
}
