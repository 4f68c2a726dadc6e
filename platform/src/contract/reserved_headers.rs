//! The headers of a webhook that are the platform's alone: the one list for all who may add some.
//!
//! Endpoints and plugins put headers of their own on webhooks. None may pass for the platform, say
//! where a message ends, how its connection is used or how its body is coded: whoever could write
//! `webhook-signature` could forge one, and whoever could write `content-length` could smuggle a
//! request. The content type is not here: a plugin makes the body, and JSON has many names.

use http::HeaderName;

/// Where a message begins and ends, and how its connection is used.
const FRAMING: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The client, the coding of the body, and what the platform says of an attempt.
const OTHERS: &[&str] = &[
    "accept-encoding",
    "content-encoding",
    "proxy-authenticate",
    "user-agent",
    "x-delivery-attempt",
];

/// Whole families of the platform.
const PREFIXES: &[&str] = &["webhook-", "x-botix-"];

/// Whether `name` is the platform's alone: neither an endpoint nor a plugin may set it.
pub fn is_reserved(name: &HeaderName) -> bool {
    let text = name.as_str();
    frames_the_message(name)
        || OTHERS.contains(&text)
        || PREFIXES.iter().any(|prefix| text.starts_with(prefix))
}

/// Whether `name` says where a message begins and ends or how its connection is used. The sender
/// alone writes these.
pub fn frames_the_message(name: &HeaderName) -> bool {
    FRAMING.contains(&name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_sets_signatures_framing_or_coding_but_may_set_the_rest() {
        let reserved = |name: &str| is_reserved(&HeaderName::try_from(name).unwrap());
        for name in [
            "Webhook-Signature",
            "webhook-id",
            "X-Botix-Signature",
            "x-botix-anything",
            "X-Delivery-Attempt",
            "Content-Length",
            "Content-Encoding",
            "Transfer-Encoding",
            "User-Agent",
            "Host",
            "Connection",
        ] {
            assert!(reserved(name), "{name}");
        }
        for name in [
            "authorization",
            "content-type",
            "x-api-key",
            "x-signature",
            "webhooks",
        ] {
            assert!(!reserved(name), "{name}");
        }
    }
}
