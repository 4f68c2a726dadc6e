//! An example plugin: it takes personal fields out of a webhook, adds a one-line summary, and signs
//! the result the way Stripe signs its own.
//!
//! `transform` edits the published JSON in place ([`body`]), so what it does not touch reaches the
//! receiver byte for byte. `sign` never sees a key: the host computes the HMAC under a key's name.
//! The configuration is JSON, every member optional; see [`config`].

mod body;
mod config;

use std::fmt::Write as _;

use config::Config;

wit_bindgen::generate!({ path: "../../wit/webhook.wit", world: "plugin" });

use botix::webhook::host::{self, Level};
use botix::webhook::types::{Delivery, Event, Header, Outcome, Request};
use exports::botix::webhook::{signer, transformer};

struct Plugin;
export!(Plugin);

impl transformer::Guest for Plugin {
    fn transform(event: Event, _: Delivery) -> Result<Outcome, String> {
        log_panics();
        let config = Config::parse(&host::config())?;
        if config.drops(&event.event_type) {
            host::log(
                Level::Info,
                &format!("{} {}: dropped", event.event_type, event.id),
            );
            let reason = format!("the plugin's configuration drops {}", event.event_type);
            return Ok(Outcome::Drop(reason));
        }
        let edited = body::edit(&event.body, &event.event_type, &config.drop)
            .map_err(|error| error.to_string())?;
        host::log(
            Level::Info,
            &format!(
                "{} {}: {} fields removed",
                event.event_type, event.id, edited.removed
            ),
        );
        Ok(Outcome::Deliver(Request {
            body: edited.text,
            headers: Vec::new(),
        }))
    }
}

impl signer::Guest for Plugin {
    fn sign(_: Event, _: Delivery, body: String) -> Result<Vec<Header>, String> {
        log_panics();
        let config = Config::parse(&host::config())?;
        let seconds = host::now() / 1000;
        let message = format!("{seconds}.{body}");
        let mac = host::hmac_sha256(&config.key, message.as_bytes())
            .map_err(|error| format!("signing key {}: {error}", config.key))?;
        let value = format!("t={seconds},v1={}", hex(&mac));
        Ok(vec![Header {
            name: config.signature_header,
            value,
        }])
    }
}

/// A panic ends the call as a bare trap; this puts its message, file and line into the log first.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        host::log(Level::Error, &panic.to_string());
    }));
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    #[test]
    fn hex_is_lower_case_and_two_digits_each() {
        assert_eq!(super::hex(&[0x00, 0x0a, 0xff]), "000aff");
    }
}
