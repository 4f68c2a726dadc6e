//! One HTTP/1.1 connection with one request on it at a time, as cheap as it gets: the load shares the
//! machine with what it measures.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Method, Request, StatusCode,
    client::conn::http1::{self, SendRequest},
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use uuid::Uuid;

use crate::Fault;

/// How long a request may take before it counts as failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes requests of one project to one server.
#[derive(Clone, Debug)]
pub struct Client {
    server: SocketAddr,
    host: HeaderValue,
    authorization: HeaderValue,
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Whether it was a stored answer.
    pub replayed: bool,
    /// Its body.
    pub body: Bytes,
}

impl Answer {
    /// Status and public code of an answer that was not wanted.
    pub fn complaint(&self) -> String {
        let problem: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let code = problem["code"].as_str().unwrap_or("without a code");
        format!("{} {code}", self.status.as_u16())
    }
}

impl Client {
    /// Speaks to `server` with an API key.
    pub fn new(server: SocketAddr, key: &str) -> Result<Self, Fault> {
        Ok(Self {
            server,
            host: HeaderValue::from_str(&server.to_string())?,
            authorization: HeaderValue::from_str(&format!("Bearer {key}"))?,
        })
    }

    /// Speaks to the same project at another address.
    pub fn moved(&self, server: SocketAddr) -> Result<Self, Fault> {
        Ok(Self {
            server,
            host: HeaderValue::from_str(&server.to_string())?,
            ..self.clone()
        })
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = format!("/public/v1{path}")
            .parse()
            .expect("paths are written by this program or the server");
        let headers = request.headers_mut();
        headers.insert(HOST, self.host.clone());
        headers.insert(AUTHORIZATION, self.authorization.clone());
        request
    }

    /// A GET below `/public/v1`.
    pub fn get(&self, path: &str) -> Request<Full<Bytes>> {
        self.request(Method::GET, path, Bytes::new())
    }

    /// A POST below `/public/v1`.
    pub fn post(
        &self,
        path: &str,
        key: Uuid,
        content_type: &'static str,
        body: Bytes,
    ) -> Request<Full<Bytes>> {
        let mut request = self.request(Method::POST, path, body);
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        let key = HeaderValue::from_str(&key.to_string()).expect("a UUID is a header value");
        headers.insert("idempotency-key", key);
        request
    }

    /// A connection that is open.
    pub async fn connect(&self) -> Result<Connection, Fault> {
        let mut connection = Connection {
            server: self.server,
            sender: None,
        };
        connection.open().await?;
        Ok(connection)
    }

    /// Sends a request that has to succeed; the JSON of the answer.
    pub async fn call(&self, request: Request<Full<Bytes>>) -> Result<Value, Fault> {
        let what = format!("{} {}", request.method(), request.uri());
        let answer = self.connect().await?.send(request).await?;
        if !answer.status.is_success() {
            let body = String::from_utf8_lossy(&answer.body).into_owned();
            return Err(format!("{what}: {} {body}", answer.status).into());
        }
        Ok(serde_json::from_slice(&answer.body)?)
    }
}

/// A connection that opens itself again when it broke.
#[derive(Debug)]
pub struct Connection {
    server: SocketAddr,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Connection {
    async fn open(&mut self) -> Result<&mut SendRequest<Full<Bytes>>, Fault> {
        if self.sender.as_ref().is_none_or(SendRequest::is_closed) {
            let stream = TcpStream::connect(self.server).await?;
            stream.set_nodelay(true)?;
            let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            self.sender = Some(sender);
        }
        self.sender.as_mut().ok_or_else(|| "not connected".into())
    }

    /// Sends a request and reads the whole answer. After a failure nobody knows whether the server
    /// did the work.
    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Answer, Fault> {
        let answer = match tokio::time::timeout(PATIENCE, self.exchange(request)).await {
            Ok(answer) => answer,
            Err(_) => Err("no answer in 30 s".into()),
        };
        if answer.is_err() {
            self.sender = None;
        }
        answer
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<Answer, Fault> {
        let sender = self.open().await?;
        sender.ready().await?;
        let response = sender.send_request(request).await?;
        Ok(Answer {
            status: response.status(),
            replayed: response
                .headers()
                .get("idempotent-replayed")
                .is_some_and(|value| value == "true"),
            body: response.into_body().collect().await?.to_bytes(),
        })
    }
}

/// The idempotency key of request `number`: a UUIDv4 that looks random, as clients send them, and can
/// be made again for a replay.
pub fn key(number: u64) -> Uuid {
    let bits = (u128::from(mix(number)) << 64) | u128::from(mix(number ^ (1 << 63)));
    uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid()
}

/// `SplitMix64`: every input has an output of its own.
fn mix(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    #[test]
    fn every_request_has_a_key_of_its_own_and_can_make_it_again() {
        let keys: HashSet<_> = (0..10_000).map(super::key).collect();
        assert_eq!(keys.len(), 10_000);
        assert!(keys.iter().all(|key| key.get_version_num() == 4));
        assert_eq!(super::key(7), super::key(7));
    }
}
