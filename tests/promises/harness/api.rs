//! A client of the public API that checks on every answer what the contract promises of every
//! answer: a fresh request id, and problem details with a published code wherever a call failed.

use super::{fresh_key, is_id};
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Client, Method, StatusCode};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::sync::{LazyLock, Mutex};

pub const BASE: &str = "/public/v1";

/// The public error codes and their statuses, as the contract fixes them.
pub const ERROR_CODES: [(&str, u16); 25] = [
    ("UNAUTHENTICATED", 401),
    ("FORBIDDEN", 403),
    ("NOT_FOUND", 404),
    ("METHOD_NOT_ALLOWED", 405),
    ("INVALID_BODY", 400),
    ("INVALID_PARAMETER", 400),
    ("UNSUPPORTED_MEDIA_TYPE", 415),
    ("PAYLOAD_TOO_LARGE", 413),
    ("RATE_LIMITED", 429),
    ("CONTACT_EXISTS", 409),
    ("CONFLICT", 409),
    ("INTERNAL", 500),
    ("IDEMPOTENCY_KEY_REQUIRED", 400),
    ("IDEMPOTENCY_KEY_INVALID", 400),
    ("IDEMPOTENCY_KEY_REUSE_CONFLICT", 409),
    ("IDEMPOTENCY_KEY_IN_PROGRESS", 409),
    ("IDEMPOTENCY_UNAVAILABLE", 503),
    // Its status is that of the first answer.
    ("IDEMPOTENCY_ANSWER_NOT_KEPT", 200),
    ("INVALID_CURSOR", 400),
    ("INVALID_CURSOR_LIMIT", 400),
    ("OFFSET_TOO_LARGE", 400),
    ("OFFSET_PAGINATION_RETIRED", 410),
    ("PLUGIN_INVALID", 400),
    ("PLUGIN_IN_USE", 409),
    ("UNAVAILABLE", 503),
];

static STATUS_OF: LazyLock<HashMap<&str, u16>> = LazyLock::new(|| ERROR_CODES.into());
static REQUEST_IDS: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

#[derive(Clone)]
pub struct Api {
    base: String,
    key: Option<String>,
    http: Client,
}

impl Api {
    pub fn new(base: String, key: String) -> Self {
        Self {
            base,
            key: Some(key),
            http: client(|builder| builder),
        }
    }

    /// The same caller over HTTP/2 without TLS.
    pub fn over_http2(&self) -> Self {
        Self {
            http: client(reqwest::ClientBuilder::http2_prior_knowledge),
            ..self.clone()
        }
    }

    /// The same caller through another port: a proxy in front of the server, or another node.
    pub fn through(&self, port: u16) -> Self {
        Self {
            base: format!("http://127.0.0.1:{port}"),
            http: client(|builder| builder),
            ..self.clone()
        }
    }

    pub fn anonymous(&self) -> Self {
        Self {
            key: None,
            ..self.clone()
        }
    }

    pub fn api_key(&self) -> &str {
        self.key.as_deref().expect("a key")
    }

    pub fn get(&self, path: &str) -> Request {
        self.call(Method::GET, path)
    }

    /// POST with a fresh idempotency key, unless the test says otherwise.
    pub fn post(&self, path: &str) -> Request {
        self.call(Method::POST, path).key(&fresh_key())
    }

    pub fn patch(&self, path: &str) -> Request {
        self.call(Method::PATCH, path).key(&fresh_key())
    }

    pub fn delete(&self, path: &str) -> Request {
        self.call(Method::DELETE, path).key(&fresh_key())
    }

    /// Any method on a path below `/public/v1`.
    pub fn call(&self, method: Method, path: &str) -> Request {
        assert!(path.starts_with('/'), "{path}");
        self.outside(method, &format!("{BASE}{path}"))
    }

    /// Any method on a path from the root, or on an absolute URL.
    pub fn outside(&self, method: Method, path: &str) -> Request {
        let url = if path.starts_with("http") {
            path.to_owned()
        } else {
            format!("{}{path}", self.base)
        };
        let mut request = Request {
            http: self.http.clone(),
            method,
            url,
            headers: Vec::new(),
            body: None,
        };
        if let Some(key) = &self.key {
            request = request.header("authorization", &format!("Bearer {key}"));
        }
        request
    }

    /// Every row of a list, page by page.
    pub async fn all(&self, path: &str) -> Vec<Value> {
        let mut rows = Vec::new();
        let mut cursor: Option<String> = None;
        let join = if path.contains('?') { '&' } else { '?' };
        loop {
            let mut page = format!("{path}{join}cursor_limit=200");
            if let Some(cursor) = &cursor {
                page = format!("{page}&cursor={cursor}");
            }
            let page = self.get(&page).send().await.expect(200).json();
            rows.extend(page["data"].as_array().expect("a list").clone());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = Some(next.to_owned()),
                None => return rows,
            }
        }
    }
}

fn client(settings: impl FnOnce(reqwest::ClientBuilder) -> reqwest::ClientBuilder) -> Client {
    // The second installation of the same provider is refused and changes nothing.
    let _ = rustls::crypto::ring::default_provider().install_default();
    settings(Client::builder().redirect(reqwest::redirect::Policy::none()))
        .build()
        .expect("a client")
}

#[derive(Clone)]
pub struct Request {
    http: Client,
    method: Method,
    url: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Option<Vec<u8>>,
}

impl Request {
    /// Sets the idempotency key.
    pub fn key(self, key: &str) -> Self {
        self.set("idempotency-key", key.as_bytes())
    }

    pub fn raw_key(self, key: &[u8]) -> Self {
        self.set("idempotency-key", key)
    }

    pub fn without_key(mut self) -> Self {
        self.headers
            .retain(|(name, _)| name.as_str() != "idempotency-key");
        self
    }

    /// The same request, sent where this client sends its own.
    pub fn at(mut self, api: &Api) -> Self {
        let path = reqwest::Url::parse(&self.url).expect("a URL");
        let query = path
            .query()
            .map_or(String::new(), |query| format!("?{query}"));
        self.url = format!("{}{}{query}", api.base, path.path());
        self.http = api.http.clone();
        self
    }

    /// Adds a header beside any of the same name.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((
            name.parse().expect("a header name"),
            value.parse().expect("a header value"),
        ));
        self
    }

    /// Puts a header in place of any of the same name.
    fn set(mut self, name: &'static str, value: &[u8]) -> Self {
        self.headers.retain(|(known, _)| known.as_str() != name);
        self.headers.push((
            HeaderName::from_static(name),
            HeaderValue::from_bytes(value).expect("a header value"),
        ));
        self
    }

    pub fn json(self, body: &Value) -> Self {
        self.body("application/json", body.to_string())
    }

    pub fn body(mut self, content_type: &str, body: impl Into<Vec<u8>>) -> Self {
        self.body = Some(body.into());
        self.set("content-type", content_type.as_bytes())
    }

    /// Sends it; a broken connection fails the test.
    pub async fn send(self) -> Answer {
        let call = format!("{} {}", self.method, self.url);
        self.try_send()
            .await
            .unwrap_or_else(|error| panic!("{call}: {error:?}"))
    }

    pub async fn try_send(self) -> Result<Answer, reqwest::Error> {
        let below_base = reqwest::Url::parse(&self.url)
            .is_ok_and(|url| url.path().starts_with(&format!("{BASE}/")));
        let call = format!("{} {}", self.method, self.url);
        let mut request = self.http.request(self.method, &self.url);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        if let Some(body) = self.body {
            request = request.body(body);
        }
        let response = request.send().await?;
        let answer = Answer {
            status: response.status(),
            headers: response.headers().clone(),
            body: response.bytes().await?.to_vec(),
            call,
        };
        answer.keeps_what_every_answer_promises(below_base);
        Ok(answer)
    }
}

#[derive(Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: reqwest::header::HeaderMap,
    pub body: Vec<u8>,
    call: String,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap_or_else(|_| panic!("{}: UTF-8", self.call))
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {}", self.describe()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .get(name)
            .map(|value| value.to_str().expect("a header in ASCII"))
    }

    /// A text member of the body.
    pub fn member(&self, name: &str) -> String {
        let body = self.json();
        body[name]
            .as_str()
            .unwrap_or_else(|| panic!("{name} in {}", self.describe()))
            .to_owned()
    }

    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.describe());
        self
    }

    #[track_caller]
    pub fn expect_success(self) -> Self {
        assert!(self.status.is_success(), "{}", self.describe());
        self
    }

    /// Asserts that it failed with this public code (and so with the code's status).
    #[track_caller]
    pub fn problem(self, code: &str) -> Value {
        let body: Value = serde_json::from_slice(&self.body).unwrap_or_default();
        assert_eq!(body["code"], code, "{}", self.describe());
        body
    }

    pub fn is_replay(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    pub fn code(&self) -> Option<String> {
        let body: Value = serde_json::from_slice(&self.body).ok()?;
        body["code"].as_str().map(str::to_owned)
    }

    pub fn describe(&self) -> String {
        let body = String::from_utf8_lossy(&self.body);
        let shown: String = body.chars().take(2_000).collect();
        format!("{} → {} {shown}", self.call, self.status)
    }

    fn keeps_what_every_answer_promises(&self, below_base: bool) {
        let request_id = self
            .header("x-request-id")
            .unwrap_or_else(|| panic!("no X-Request-Id: {}", self.describe()));
        assert!(is_id("req", request_id), "X-Request-Id: {request_id}");
        let fresh = REQUEST_IDS
            .lock()
            .expect("the ids")
            .insert(request_id.to_owned());
        assert!(fresh, "X-Request-Id came twice: {request_id}");
        if !below_base {
            return;
        }
        if !self.status.is_success() && !self.call.starts_with("HEAD ") {
            self.is_a_problem(request_id);
        }
        // Only who asks has a limit: without that there is none to tell of.
        let asked_by_a_project =
            self.status != StatusCode::UNAUTHORIZED && !self.status.is_server_error();
        if asked_by_a_project {
            for name in ["ratelimit", "ratelimit-policy"] {
                assert!(
                    self.header(name).is_some(),
                    "no {name}: {}",
                    self.describe()
                );
            }
        }
    }

    fn is_a_problem(&self, request_id: &str) {
        let problem = self.json();
        let shown = self.describe();
        let content_type = self.header("content-type").unwrap_or_default();
        assert!(
            content_type.starts_with("application/problem+json"),
            "{content_type}: {shown}"
        );
        let code = problem["code"].as_str().expect("a code");
        assert_eq!(STATUS_OF.get(code), Some(&self.status.as_u16()), "{shown}");
        assert_eq!(problem["status"], self.status.as_u16(), "{shown}");
        let about = problem["type"].as_str().expect("a type");
        assert!(about.ends_with(&format!("/error-codes#{code}")), "{shown}");
        for member in ["title", "detail"] {
            assert!(
                problem[member]
                    .as_str()
                    .is_some_and(|text| !text.is_empty()),
                "{member}: {shown}"
            );
        }
        // A replayed problem is the stored one byte for byte, so it names the first request.
        if self.is_replay() {
            assert!(is_id("req", problem["request_id"].as_str().expect("an id")));
        } else {
            assert_eq!(problem["request_id"], request_id, "{shown}");
        }
        if let Some(errors) = problem.get("errors") {
            for error in errors.as_array().expect("a list of errors") {
                let pointer = error["pointer"].as_str().expect("a pointer");
                assert!(pointer.is_empty() || pointer.starts_with('/'), "{shown}");
                assert!(error["detail"].is_string(), "{shown}");
            }
        }
        let retry_after = self.header("retry-after");
        match code {
            "IDEMPOTENCY_KEY_IN_PROGRESS" => assert_eq!(retry_after, Some("5"), "{shown}"),
            "RATE_LIMITED" | "IDEMPOTENCY_UNAVAILABLE" | "UNAVAILABLE" => {
                let seconds = retry_after.and_then(|seconds| seconds.parse::<u32>().ok());
                assert!(seconds.is_some(), "Retry-After {retry_after:?}: {shown}");
            }
            _ => {}
        }
    }
}
