//! The one table of public error codes, and the answer that carries them (RFC 9457).
//!
//! A code fixes its status, its title and whether an answer that carries it is *decided*: the
//! business's last word on a request, stored and replayed, rather than a fault of the request's form
//! or of the platform, after which the same key may try again. Causes are logged with the request id
//! and never shown.

use std::{borrow::Cow, fmt, sync::OnceLock};

use poem::{IntoResponse, Response, error::ResponseError, http::StatusCode};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    contract::{payload, request_id},
    db,
};

macro_rules! codes {
    ($($variant:ident $code:literal $status:literal $decided:literal $title:literal $about:literal;)*) => {
        /// A public error code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code {
            $(#[doc = $about] $variant,)*
        }

        impl Code {
            /// Every code, in the order of the published list.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name that clients match on.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $code),* }
            }

            /// The HTTP status it always comes with.
            pub const fn status(self) -> u16 {
                match self { $(Self::$variant => $status),* }
            }

            /// Its short, constant title.
            pub const fn title(self) -> &'static str {
                match self { $(Self::$variant => $title),* }
            }

            /// What it means and what to do.
            pub const fn about(self) -> &'static str {
                match self { $(Self::$variant => $about),* }
            }

            /// Whether the answer is the business's decision, stored under the idempotency key.
            pub const fn is_decided(self) -> bool {
                match self { $(Self::$variant => $decided),* }
            }
        }
    };
}

codes! {
    Unauthenticated "UNAUTHENTICATED" 401 false "Not authenticated"
        "The request carries no API key, or one that is unknown or revoked. Send `Authorization: Bearer btx_live_…`.";
    Forbidden "FORBIDDEN" 403 false "Scope missing"
        "The API key is valid and lacks the scope that this operation needs.";
    NotFound "NOT_FOUND" 404 true "Not found"
        "There is no such thing in this project.";
    MethodNotAllowed "METHOD_NOT_ALLOWED" 405 false "Method not allowed"
        "The path exists and does not take this method; `Allow` lists those it takes.";
    InvalidBody "INVALID_BODY" 400 false "Invalid body"
        "The body is not JSON, has a member that is unknown, missing or of the wrong type, or a value that is not allowed; `errors` points at the first that was found.";
    InvalidParameter "INVALID_PARAMETER" 400 false "Invalid parameter"
        "A path or query parameter has a value that is not allowed.";
    UnsupportedMediaType "UNSUPPORTED_MEDIA_TYPE" 415 false "Unsupported media type"
        "The body's Content-Type is absent or not one that this operation takes.";
    PayloadTooLarge "PAYLOAD_TOO_LARGE" 413 false "Body too large"
        "The body is larger than this operation takes.";
    RateLimited "RATE_LIMITED" 429 false "Too many requests"
        "The project's rate limit is used up; wait as long as `Retry-After` says.";
    IdempotencyKeyRequired "IDEMPOTENCY_KEY_REQUIRED" 400 false "Idempotency-Key required"
        "Every POST, PATCH, PUT and DELETE needs an `Idempotency-Key` header.";
    IdempotencyKeyInvalid "IDEMPOTENCY_KEY_INVALID" 400 false "Idempotency-Key invalid"
        "The key is one UUIDv4 or one ULID, bare or as a quoted string, in one header.";
    IdempotencyKeyReuseConflict "IDEMPOTENCY_KEY_REUSE_CONFLICT" 409 false "Idempotency-Key used for another request"
        "The key was used for a request with another method, path, query, content type or body. Use a new key for a new request.";
    IdempotencyKeyInProgress "IDEMPOTENCY_KEY_IN_PROGRESS" 409 false "Request still running"
        "The first request with this key is still running; try again after `Retry-After` seconds.";
    IdempotencyUnavailable "IDEMPOTENCY_UNAVAILABLE" 503 false "Store out of reach"
        "The store of answers cannot be reached; nothing was executed. Try again with the same key.";
    IdempotencyAnswerNotKept "IDEMPOTENCY_ANSWER_NOT_KEPT" 200 false "Answer too large to be kept"
        "The first request with this key was executed, and its answer was larger than 262,144 bytes, which are not kept. This replay has the first answer's status and `Location`; `detail` says where to read the result.";
    InvalidCursor "INVALID_CURSOR" 400 false "Invalid cursor"
        "The cursor was changed, or comes from another project, collection, order or filter. Start again without one.";
    InvalidCursorLimit "INVALID_CURSOR_LIMIT" 400 false "Invalid cursor_limit"
        "`cursor_limit` is a number from 1 to 200.";
    OffsetTooLarge "OFFSET_TOO_LARGE" 400 false "Offset too large"
        "`offset` goes up to 10,000; walk with cursors instead.";
    OffsetPaginationRetired "OFFSET_PAGINATION_RETIRED" 410 false "Offset pagination retired"
        "`pagination=offset` has ended; walk with cursors instead.";
    ContactExists "CONTACT_EXISTS" 409 true "Contact exists"
        "Another contact of this project has this phone number.";
    Conflict "CONFLICT" 409 true "Conflict"
        "The request does not fit the present state of the thing.";
    PluginInvalid "PLUGIN_INVALID" 400 false "Plugin invalid"
        "The upload is not a component of a world of `botix:webhook`; `detail` names what is wrong.";
    PluginInUse "PLUGIN_IN_USE" 409 true "Plugin in use"
        "An endpoint still names this plugin.";
    Internal "INTERNAL" 500 false "Internal error"
        "Something broke on our side; nothing was stored. Try again with the same key, and quote the request id to support.";
    Unavailable "UNAVAILABLE" 503 false "Unavailable"
        "A part of the platform cannot be reached right now; try again after `Retry-After` seconds.";
}

/// The body of every error answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Problem {
    /// Where the code is explained.
    #[serde(rename = "type")]
    #[schemars(with = "String")]
    pub kind: String,
    /// The code's title.
    pub title: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// The code, one of the list at `/error-codes`.
    #[schemars(schema_with = "code_names")]
    pub code: &'static str,
    /// What is wrong with this request.
    pub detail: String,
    /// The request id, for support.
    pub request_id: String,
    /// What is wrong at which place of the body; empty when the fault is elsewhere.
    pub errors: Vec<FieldError>,
}

fn code_names(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let names: Vec<_> = Code::ALL.iter().map(|code| code.name()).collect();
    schemars::json_schema!({"type": "string", "enum": names})
}

/// One fault in the body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FieldError {
    /// A JSON Pointer (RFC 6901) into the body.
    pub pointer: String,
    /// What is wrong there.
    pub detail: String,
}

/// A request that failed with a public code.
#[derive(Debug)]
pub struct ApiError {
    code: Code,
    detail: Cow<'static, str>,
    errors: Vec<FieldError>,
    retry_after: Option<u64>,
    allow: Option<String>,
    cause: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl ApiError {
    /// An error with a detail of its own.
    pub fn new(code: Code, detail: impl Into<Cow<'static, str>>) -> Self {
        let retry_after = match code {
            Code::IdempotencyKeyInProgress => Some(5),
            Code::IdempotencyUnavailable | Code::Unavailable => Some(2),
            _ => None,
        };
        Self {
            code,
            detail: detail.into(),
            errors: Vec::new(),
            retry_after,
            allow: None,
            cause: None,
        }
    }

    /// `METHOD_NOT_ALLOWED`, naming the methods that are.
    pub fn method_not_allowed(allow: impl Into<String>) -> Self {
        let mut error = Self::new(
            Code::MethodNotAllowed,
            "This path does not take this method.",
        );
        error.allow = Some(allow.into());
        error
    }

    /// `NOT_FOUND` for a thing of this kind.
    pub fn not_found(what: &'static str) -> Self {
        Self::new(
            Code::NotFound,
            format!("There is no such {what} in this project."),
        )
    }

    /// `INVALID_BODY` with one fault at a JSON Pointer.
    pub fn invalid_body(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        let (pointer, detail) = (pointer.into(), detail.into());
        let summary = if pointer.is_empty() {
            detail.clone()
        } else {
            format!("{pointer}: {detail}")
        };
        let mut error = Self::new(Code::InvalidBody, summary);
        error.errors.push(FieldError { pointer, detail });
        error
    }

    /// `INVALID_PARAMETER` for the parameter of this name.
    pub fn invalid_parameter(name: &str, detail: impl fmt::Display) -> Self {
        Self::new(Code::InvalidParameter, format!("{name}: {detail}"))
    }

    /// `INTERNAL`, keeping the cause for the log.
    pub fn internal(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        let mut error = Self::new(Code::Internal, "Something broke on our side.");
        error.cause = Some(cause.into());
        error
    }

    /// The same error under the code that says the idempotency store is out of reach.
    #[must_use]
    pub fn as_idempotency_unavailable(mut self) -> Self {
        if self.code == Code::Unavailable {
            self.code = Code::IdempotencyUnavailable;
        }
        self
    }

    /// The same error, to be tried again after so many seconds.
    #[must_use]
    pub fn with_retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The same error with another detail.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<Cow<'static, str>>) -> Self {
        self.detail = detail.into();
        self
    }

    /// The same error, with its faults below another place of the body.
    #[must_use]
    pub fn below(mut self, place: &str) -> Self {
        for error in &mut self.errors {
            error.pointer.insert_str(0, place);
            self.detail = format!("{}: {}", error.pointer, error.detail).into();
        }
        self
    }

    /// The public code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Where in the body the faults are, as JSON Pointers.
    pub fn pointers(&self) -> Vec<&str> {
        self.errors.iter().map(|error| &*error.pointer).collect()
    }
}

impl From<sqlx::Error> for ApiError {
    fn from(cause: sqlx::Error) -> Self {
        if db::is_unavailable(&cause) {
            let detail = if db::is_conflict(&cause) {
                "Requests stood in each other's way and this one gave way; nothing was executed."
            } else {
                "The store cannot be reached."
            };
            let mut error = Self::new(Code::Unavailable, detail);
            error.cause = Some(cause.into());
            error
        } else {
            Self::internal(cause)
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.detail)
    }
}

impl std::error::Error for ApiError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_ref().map(|cause| &**cause as _)
    }
}

impl ResponseError for ApiError {
    fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn as_response(&self) -> Response {
        if let Some(cause) = &self.cause {
            tracing::error!(request_id = %request_id::current(), code = self.code.name(), cause, "request failed");
        }
        let mut response = problem(self.code, self.status(), &self.detail, self.errors.clone());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert("retry-after", seconds.into());
        }
        if let Some(allow) = self.allow.as_ref().and_then(|allow| allow.parse().ok()) {
            response.headers_mut().insert("allow", allow);
        }
        if self.code == Code::Unauthenticated {
            response.headers_mut().insert(
                "www-authenticate",
                poem::http::HeaderValue::from_static("Bearer"),
            );
        }
        response.extensions_mut().insert(self.code);
        response
    }
}

/// The answer with a code's problem body; its status is the code's own, but for a replay's.
pub(super) fn problem(
    code: Code,
    status: StatusCode,
    detail: &str,
    errors: Vec<FieldError>,
) -> Response {
    let problem = Problem {
        kind: format!("{}/error-codes#{}", public_url(), code.name()),
        title: code.title(),
        status: status.as_u16(),
        code: code.name(),
        detail: detail.to_owned(),
        request_id: request_id::current().to_string(),
        errors,
    };
    Response::builder()
        .status(status)
        .content_type("application/problem+json")
        .body(payload::to_json(&problem))
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.as_response()
    }
}

impl poem_openapi::ApiResponse for ApiError {
    fn meta() -> poem_openapi::registry::MetaResponses {
        poem_openapi::registry::MetaResponses {
            responses: Vec::new(),
        }
    }

    fn register(registry: &mut poem_openapi::registry::Registry) {
        crate::contract::spec::note_schema::<Problem>(
            registry,
            crate::contract::spec::Use::Written,
        );
    }
}

static PUBLIC_URL: OnceLock<String> = OnceLock::new();

/// Sets what `type` links start with; the first call of the process counts.
pub fn set_public_url(url: &str) {
    let _ = PUBLIC_URL.set(url.trim_end_matches('/').to_owned());
}

fn public_url() -> &'static str {
    PUBLIC_URL.get().map_or("", String::as_str)
}

/// The answer to whatever a layer or the router failed with.
pub fn into_response(failure: poem::Error) -> Response {
    if failure.is_from_response() {
        return failure.into_response();
    }
    IntoResponse::into_response(from_poem(failure))
}

/// Turns whatever a layer or the router failed with into an [`ApiError`].
pub fn from_poem(error: poem::Error) -> ApiError {
    use poem::error::{MethodNotAllowedError, NotFoundError, ReadBodyError};
    use poem_openapi::error::{ContentTypeError, ParseParamError, ParsePathError};
    let error = match error.downcast::<ApiError>() {
        Ok(known) => return known,
        Err(other) => other,
    };
    if error.is::<NotFoundError>() {
        return ApiError::new(Code::NotFound, "There is nothing at this path.");
    }
    if error.is::<MethodNotAllowedError>() {
        // Outside of the public API, whose layer knows better, every path is only read.
        return ApiError::method_not_allowed("GET");
    }
    if let Some(error) = error.downcast_ref::<ParseParamError>() {
        return match error.name {
            "cursor_limit" => {
                ApiError::new(Code::InvalidCursorLimit, Code::InvalidCursorLimit.about())
            }
            "cursor" => ApiError::new(Code::InvalidCursor, Code::InvalidCursor.about()),
            name => ApiError::invalid_parameter(name, &error.reason),
        };
    }
    if error.is::<ParsePathError>() || error.is::<poem::error::ParsePathError>() {
        // A path parameter here is always an id: one that is malformed names nothing.
        return ApiError::new(Code::NotFound, "There is no such thing in this project.");
    }
    if let Some(error) = error.downcast_ref::<ContentTypeError>() {
        return ApiError::new(Code::UnsupportedMediaType, error.to_string());
    }
    match error.downcast_ref::<ReadBodyError>() {
        Some(ReadBodyError::PayloadTooLarge) => {
            return ApiError::new(Code::PayloadTooLarge, Code::PayloadTooLarge.about());
        }
        Some(_) => return ApiError::invalid_body("", "the body could not be read"),
        None => {}
    }
    match error.status().as_u16() {
        404 => ApiError::new(Code::NotFound, "There is nothing at this path."),
        405 => ApiError::method_not_allowed("GET"),
        413 => ApiError::new(Code::PayloadTooLarge, Code::PayloadTooLarge.about()),
        415 => ApiError::new(Code::UnsupportedMediaType, error.to_string()),
        400..500 => ApiError::new(Code::InvalidParameter, error.to_string()),
        _ => ApiError::internal(error.to_string()),
    }
}
