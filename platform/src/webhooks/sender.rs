//! One webhook, once, over HTTP: sends it, keeps a bounded part of the answer, says how it ended.
//!
//! Everything on the other side is hostile or broken until shown otherwise. The target is guarded
//! (see `target`), redirects are not followed, no proxy comes between, nothing is decompressed, and
//! one deadline covers name, connection, answer and body. Of the body [`MAX_BODY`] bytes are read and
//! the rest is left unread, so memory stays flat whatever is sent. A receiver may close an idle
//! connection just as it is reused, which no client can tell from a crash after accepting; idle
//! connections are therefore dropped before common servers drop theirs, and never is a request
//! repeated here: that is the ladder's to decide. A 2xx counts only with its body intact, since a
//! broken answer may come from something between; a refusal stands as soon as its head is read.

mod failure;
#[cfg(test)]
mod receiver;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, StatusCode};
use rustls::{ClientConfig, RootCertStore};
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::ladder::{Outcome, parse_retry_after};
use super::target::{self, GuardedResolver, TargetPolicy};
use crate::contract::reserved_headers::frames_the_message;

pub use failure::{ErrorKind, SendError};

/// How much of a response body is read and kept, in bytes.
pub const MAX_BODY: usize = 4_096;
/// How much of the response headers is kept, names and values together, in bytes.
pub const MAX_HEADERS: usize = 16_384;

/// Below the five seconds after which widespread servers close an idle connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
const MAX_IDLE_PER_HOST: usize = 64;
/// HTTP/2 receivers may push this much before it is read; the smallest that HTTP/2 starts with.
const HTTP2_WINDOW: u32 = 65_535;
const HTTP2_MAX_HEADERS: u32 = 16_384;

/// Sends webhooks. One per process: it owns the connection pool and the DNS cache.
#[derive(Clone)]
pub struct Sender {
    client: reqwest::Client,
    policy: TargetPolicy,
    total_timeout: Duration,
}

/// Why a sender could not be built.
#[derive(Debug, thiserror::Error)]
pub enum SenderError {
    /// TLS could not be configured.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The resolver could not be configured.
    #[error("name resolution: {0}")]
    Resolver(#[from] hickory_resolver::net::NetError),
    /// The client could not be configured.
    #[error("HTTP client: {0}")]
    Client(#[from] reqwest::Error),
}

/// A webhook ready to leave.
#[derive(Clone, Debug)]
pub struct OutgoingRequest {
    /// Where to.
    pub url: Url,
    /// All headers but those that frame the message, which are the sender's and are ignored here.
    pub headers: HeaderMap,
    /// The body exactly as signed.
    pub body: Bytes,
}

/// What came of one attempt.
#[derive(Clone, Debug)]
pub struct Sent {
    /// The status code of the answer, also where its body then broke.
    pub status: Option<u16>,
    /// What went wrong between here and a whole answer.
    pub error: Option<SendError>,
    /// Names and values, up to [`MAX_HEADERS`] together. A value that is not UTF-8 is read
    /// as ISO 8859-1, as HTTP once defined it.
    pub response_headers: Vec<(String, String)>,
    /// The first [`MAX_BODY`] bytes as they came, compressed or not.
    pub response_body: Vec<u8>,
    /// From the start until the answer was whole or given up on.
    pub duration: Duration,
    /// What the ladder decides by.
    pub outcome: Outcome,
}

/// The head of an answer, and how far reading its body came.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
    error: Option<SendError>,
}

impl Sender {
    /// A sender that trusts the system's certificate authorities and resolves by the hosts file and
    /// the system's name servers, or the given ones.
    ///
    /// `connect_timeout` covers name, TCP and TLS; half of it is the name's. `total_timeout` covers
    /// everything.
    pub fn new(
        policy: TargetPolicy,
        connect_timeout: Duration,
        total_timeout: Duration,
        name_servers: Option<&[SocketAddr]>,
    ) -> Result<Self, SenderError> {
        let roots = system_roots();
        Self::trusting(roots, policy, connect_timeout, total_timeout, name_servers)
    }

    fn trusting(
        roots: RootCertStore,
        policy: TargetPolicy,
        connect_timeout: Duration,
        total_timeout: Duration,
        name_servers: Option<&[SocketAddr]>,
    ) -> Result<Self, SenderError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let resolver = GuardedResolver::new(policy, connect_timeout / 2, name_servers)?;
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .dns_resolver(resolver)
            .connect_timeout(connect_timeout)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .referer(false)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(MAX_IDLE_PER_HOST)
            .http2_initial_stream_window_size(HTTP2_WINDOW)
            .http2_initial_connection_window_size(HTTP2_WINDOW)
            .http2_max_header_list_size(HTTP2_MAX_HEADERS)
            .build()?;
        Ok(Self {
            client,
            policy,
            total_timeout,
        })
    }

    /// Sends `request` and waits for the outcome, at most the total timeout.
    ///
    /// Never fails: whatever happens is an outcome. Dropping the future abandons the request.
    pub async fn send(&self, request: OutgoingRequest) -> Sent {
        let started = Instant::now();
        match self.exchange(request, started + self.total_timeout).await {
            Ok(answer) => Sent {
                status: Some(answer.status.as_u16()),
                outcome: judge(&answer),
                response_headers: recorded(&answer.headers),
                response_body: answer.body,
                error: answer.error,
                duration: started.elapsed(),
            },
            Err(error) => Sent {
                status: None,
                outcome: match error.kind {
                    ErrorKind::TargetNotAllowed => Outcome::TargetRefused,
                    _ => Outcome::Failed,
                },
                response_headers: Vec::new(),
                response_body: Vec::new(),
                error: Some(error),
                duration: started.elapsed(),
            },
        }
    }

    async fn exchange(
        &self,
        request: OutgoingRequest,
        deadline: Instant,
    ) -> Result<Answer, SendError> {
        target::check(&request.url, self.policy).map_err(SendError::target)?;
        let posting = self
            .client
            .post(request.url)
            .headers(without_framing(request.headers))
            .body(request.body)
            .send();
        let mut response = timeout_at(deadline, posting)
            .await
            .map_err(|_| SendError::read_timeout())?
            .map_err(SendError::from)?;
        let mut answer = Answer {
            status: response.status(),
            headers: std::mem::take(response.headers_mut()),
            body: Vec::new(),
            error: None,
        };
        while answer.body.len() < MAX_BODY {
            match timeout_at(deadline, response.chunk()).await {
                Ok(Ok(Some(chunk))) => {
                    let room = MAX_BODY - answer.body.len();
                    answer
                        .body
                        .extend_from_slice(&chunk[..chunk.len().min(room)]);
                }
                Ok(Ok(None)) => break,
                Ok(Err(error)) => {
                    answer.error = Some(error.into());
                    break;
                }
                Err(_) => {
                    answer.error = Some(SendError::read_timeout());
                    break;
                }
            }
        }
        Ok(answer)
    }
}

/// The certificate authorities of this machine. Without any, https targets fail one by one and say
/// why, and everything else works.
fn system_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        tracing::warn!(errors = ?found.errors, "no certificate authorities: https targets will fail");
    }
    roots
}

fn without_framing(mut headers: HeaderMap) -> HeaderMap {
    let framing: Vec<HeaderName> = headers
        .keys()
        .filter(|name| frames_the_message(name))
        .cloned()
        .collect();
    for name in framing {
        headers.remove(name);
    }
    headers
}

fn judge(answer: &Answer) -> Outcome {
    let retry_after = asked_wait(&answer.headers, SystemTime::now());
    let status = answer.status.as_u16();
    if answer.error.is_some() {
        Outcome::of_broken(status, retry_after)
    } else {
        Outcome::of_status(status, retry_after)
    }
}

/// The wait that an answer asks for. Several values are as good as their latest: coming earlier than
/// any of them would be too early.
pub(crate) fn asked_wait(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    headers
        .get_all(RETRY_AFTER)
        .iter()
        .filter_map(|value| parse_retry_after(value.as_bytes(), now))
        .max()
}

/// What is kept of an answer's headers.
pub(crate) fn recorded(headers: &HeaderMap) -> Vec<(String, String)> {
    let mut room = MAX_HEADERS;
    headers
        .iter()
        .map_while(|(name, value)| {
            room = room.checked_sub(name.as_str().len() + value.len())?;
            let value = value.as_bytes();
            let text = std::str::from_utf8(value).map_or_else(
                |_| value.iter().copied().map(char::from).collect(),
                str::to_owned,
            );
            Some((name.as_str().to_owned(), text))
        })
        .collect()
}
