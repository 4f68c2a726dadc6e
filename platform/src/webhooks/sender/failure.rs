//! What went wrong on the way, told apart so that a tenant knows where to look.
//!
//! The HTTP client nests its errors several crates deep and tells kinds only in part, so the chain of
//! causes is walked: our own refusals and rustls' errors are found by type, the rest by where in the
//! exchange it happened. Details are texts for the tenant's log: bounded, without the URL, and never
//! the reason to decide anything.

use std::error::Error;
use std::{fmt, io};

use crate::webhooks::target::{ResolveError, TargetError};

const MAX_DETAIL: usize = 500;

/// The stage at which an attempt broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The host's name could not be resolved.
    Dns,
    /// No TCP connection.
    Connect,
    /// Name, TCP and TLS together took longer than the connect timeout.
    ConnectTimeout,
    /// The TLS handshake failed or the certificate was not accepted.
    Tls,
    /// The answer was not whole at the total timeout.
    ReadTimeout,
    /// The answer broke off or was not HTTP.
    BrokenResponse,
    /// The URL leads where webhooks may not go; nothing was sent.
    TargetNotAllowed,
    /// The request could not be made from the URL and headers.
    Request,
}

impl ErrorKind {
    /// The stable name: stored and shown in attempts.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Connect => "connect",
            Self::ConnectTimeout => "connect_timeout",
            Self::Tls => "tls",
            Self::ReadTimeout => "read_timeout",
            Self::BrokenResponse => "broken_response",
            Self::TargetNotAllowed => "target_not_allowed",
            Self::Request => "request",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An attempt that did not get a whole answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {detail}")]
pub struct SendError {
    /// The stage.
    pub kind: ErrorKind,
    /// What was seen, at most 500 bytes, for people.
    pub detail: String,
}

impl SendError {
    pub(super) fn target(error: TargetError) -> Self {
        Self::new(ErrorKind::TargetNotAllowed, error.to_string())
    }

    pub(super) fn read_timeout() -> Self {
        Self::new(ErrorKind::ReadTimeout, "no whole answer in time".to_owned())
    }

    fn new(kind: ErrorKind, mut detail: String) -> Self {
        detail.truncate(detail.floor_char_boundary(MAX_DETAIL));
        Self { kind, detail }
    }
}

impl From<reqwest::Error> for SendError {
    fn from(error: reqwest::Error) -> Self {
        let error = error.without_url();
        if let Some(refused) = causes(&error).find_map(refusal) {
            return Self::target(refused.clone());
        }
        Self::new(kind_of(&error), detail_of(&error))
    }
}

fn kind_of(error: &reqwest::Error) -> ErrorKind {
    if error.is_dns() {
        ErrorKind::Dns
    } else if causes(error).any(is_tls) {
        ErrorKind::Tls
    } else if error.is_connect() && error.is_timeout() {
        ErrorKind::ConnectTimeout
    } else if error.is_connect() {
        ErrorKind::Connect
    } else if error.is_timeout() {
        ErrorKind::ReadTimeout
    } else if error.is_builder() {
        ErrorKind::Request
    } else {
        ErrorKind::BrokenResponse
    }
}

fn refusal<'a>(cause: &'a (dyn Error + 'static)) -> Option<&'a TargetError> {
    match cause.downcast_ref() {
        Some(ResolveError::Refused(refused)) => Some(refused),
        _ => None,
    }
}

/// The TLS connector hands on what the handshake met, the peer's hanging up included, as an I/O error
/// within an I/O error; a failed TCP connection is a single one.
fn is_tls(cause: &(dyn Error + 'static)) -> bool {
    let within = cause
        .downcast_ref::<io::Error>()
        .and_then(io::Error::get_ref);
    cause.is::<rustls::Error>() || matches!(within, Some(inner) if inner.is::<io::Error>())
}

/// The error and all that caused it. An I/O error's own cause is skipped by `source`, which goes on
/// with the cause's cause; it is put back in here.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&cause| {
        match cause.downcast_ref::<io::Error>() {
            Some(io) => io.get_ref().map(|inner| inner as &(dyn Error + 'static)),
            None => cause.source(),
        }
    })
}

/// The text of the first cause; the wrappings around it say only which crate met it.
fn detail_of(error: &reqwest::Error) -> String {
    causes(error)
        .last()
        .map_or_else(String::new, ToString::to_string)
}
