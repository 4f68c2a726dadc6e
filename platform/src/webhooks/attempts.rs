//! Attempts: the record of each time a webhook was sent, or could not be.
//!
//! Bytes are shown as text where they are UTF-8 without NUL, otherwise as base64, and a member beside
//! them says which.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use poem_openapi::{OpenApi, param::Query};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{deliveries::DeliveryId, endpoints::EndpointId, retention};
use crate::{
    contract::{
        ApiError, Caller,
        cursor::Position,
        page::{self, Filter, ListTexts, Listed, Page, PageRequest},
        request_id::RequestId,
        spec::Tag,
    },
    db::{Db, Id, JsonText, Kind, Timestamp},
    plugins::{LogLine, PluginId},
};

/// An attempt; names the kind of its id.
pub struct AttemptKind;

impl Kind for AttemptKind {
    const PREFIX: &'static str = "att";
}

/// The id of an attempt.
pub type AttemptId = Id<AttemptKind>;

/// What made an attempt happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "AttemptTrigger")]
pub enum Trigger {
    /// The ladder.
    Ladder,
    /// Somebody asked for it.
    Manual,
    /// Somebody sent it to the inspector.
    Redirect,
    /// Somebody tried an endpoint.
    Test,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "AttemptStatus")]
pub enum Status {
    /// With a 2xx, or as the plugin wished, with nothing sent.
    Succeeded,
    /// Any other way.
    Failed,
}

impl Status {
    /// The written form, as in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        }
    }
}

/// How bytes are written in a JSON string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// As text.
    Utf8,
    /// As base64, because they are not text.
    Base64,
}

/// Bytes as they are written in JSON.
pub fn written(bytes: Vec<u8>) -> (String, Encoding) {
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => (text, Encoding::Utf8),
        Ok(text) => (STANDARD.encode(text), Encoding::Base64),
        Err(error) => (STANDARD.encode(error.as_bytes()), Encoding::Base64),
    }
}

/// What a plugin did in an attempt.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "AttemptPlugin")]
pub struct PluginUse {
    /// The plugin.
    pub id: PluginId,
    /// The version that ran.
    pub version: i64,
    /// What it logged.
    pub log: Vec<LogLine>,
}

/// Headers by lower-case name; a header that came twice has both values, with a comma between.
pub type HeaderView = BTreeMap<String, String>;

/// Headers as they are shown.
pub fn shown_headers<'h>(headers: impl IntoIterator<Item = (&'h str, &'h str)>) -> HeaderView {
    let mut shown = HeaderView::new();
    for (name, value) in headers {
        shown
            .entry(name.to_ascii_lowercase())
            .and_modify(|before| {
                before.push_str(", ");
                before.push_str(value);
            })
            .or_insert_with(|| value.to_owned());
    }
    shown
}

/// An attempt.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Attempt {
    /// Its id.
    pub id: AttemptId,
    /// The delivery it belongs to.
    pub delivery_id: DeliveryId,
    /// Its number in the delivery, from 1.
    pub number: i64,
    /// What made it happen.
    pub trigger: Trigger,
    /// Where it went.
    pub url: String,
    /// `X-Botix-Request-Id` as sent.
    pub request_id: RequestId,
    /// How it ended.
    pub status: Status,
    /// The status code of the answer, if one came.
    pub status_code: Option<i64>,
    /// The kind of failure and a colon before its detail, where it was not the status code alone.
    /// `interrupted` says that the process which made it ended before the outcome was known: the webhook
    /// may have arrived, and the next attempt follows at once.
    pub error: Option<String>,
    /// How long it took, in milliseconds.
    pub duration_ms: i64,
    /// The headers as sent; values of the endpoint's own are masked.
    pub request_headers: HeaderView,
    /// The body as sent; null when nothing was.
    pub payload: Option<String>,
    /// The headers of the answer.
    pub response_headers: HeaderView,
    /// The first 4,096 bytes of the answer's body.
    pub response_body: String,
    /// How `response_body` is written.
    pub response_body_encoding: Encoding,
    /// What the plugin did, where there is one.
    pub plugin: Option<PluginUse>,
    /// When it was made.
    pub created_at: Timestamp,
}

/// An attempt as it is kept.
#[derive(Debug, sqlx::FromRow)]
pub(super) struct AttemptRow {
    id: AttemptId,
    delivery_id: DeliveryId,
    number: i64,
    trigger: JsonText<Trigger>,
    url: String,
    request_id: RequestId,
    status: String,
    status_code: Option<i64>,
    error: Option<String>,
    duration_ms: i64,
    request_headers: JsonText<HeaderView>,
    payload: Option<String>,
    response_headers: JsonText<HeaderView>,
    response_body: Vec<u8>,
    plugin: Option<JsonText<PluginUse>>,
    created_at: Timestamp,
}

impl Listed for AttemptRow {
    const RESOURCE: &'static str = "webhook-attempts";
    const TABLE: &'static str = "webhook_attempts";
    const COLUMNS: &'static str = "id, delivery_id, number, trigger, url, request_id, status, \
                                   status_code, error, duration_ms, request_headers, payload, \
                                   response_headers, response_body, plugin, created_at";
    const SHOWN_FOR: Option<Duration> = Some(retention::FINISHED);

    fn position(&self) -> Position {
        Position {
            created_at: self.created_at,
            id: self.id.into(),
        }
    }
}

impl AttemptRow {
    pub(super) fn show(self) -> Result<Attempt, ApiError> {
        let (response_body, response_body_encoding) = written(self.response_body);
        Ok(Attempt {
            id: self.id,
            delivery_id: self.delivery_id,
            number: self.number,
            trigger: self.trigger.0,
            url: self.url,
            request_id: self.request_id,
            status: status(&self.status).map_err(ApiError::internal)?,
            status_code: self.status_code,
            error: self.error,
            duration_ms: self.duration_ms,
            request_headers: self.request_headers.0,
            payload: self.payload,
            response_headers: self.response_headers.0,
            response_body,
            response_body_encoding,
            plugin: self.plugin.map(|plugin| plugin.0),
            created_at: self.created_at,
        })
    }
}

fn status(text: &str) -> Result<Status, String> {
    [Status::Succeeded, Status::Failed]
        .into_iter()
        .find(|status| status.as_str() == text)
        .ok_or_else(|| format!("`{text}` is no status of an attempt: succeeded or failed"))
}

/// The handlers of `/webhook-attempts`.
#[derive(Debug)]
pub struct AttemptsApi {
    /// The database.
    pub db: Db,
}

#[OpenApi(tag = "Tag::Deliveries")]
impl AttemptsApi {
    /// List attempts
    ///
    /// Of all deliveries, newest first. Attempts are kept for 14 days.
    #[oai(
        path = "/webhook-attempts",
        method = "get",
        operation_id = "list_webhook_attempts"
    )]
    async fn list(
        &self,
        caller: Caller,
        page: PageRequest,
        /// Only attempts that ended so: `succeeded` or `failed`.
        status: Query<Option<String>>,
        /// Only attempts at this endpoint.
        endpoint_id: Query<Option<EndpointId>>,
        /// Only attempts for events of this type.
        event_type: Query<Option<String>>,
        /// Only attempts made at this time or later, RFC 3339.
        since: Query<Option<String>>,
        /// Only attempts made before this time, RFC 3339.
        until: Query<Option<String>>,
    ) -> Result<Page<Attempt>, ApiError> {
        let mut filters = Vec::new();
        if let Some(text) = status.0 {
            let status = self::status(&text)
                .map_err(|error| ApiError::invalid_parameter("status", error))?;
            filters.push(Filter::text("status", status.as_str()));
        }
        filters.extend(endpoint_id.0.map(|id| Filter::id("endpoint_id", id)));
        filters.extend(
            event_type
                .0
                .map(|event_type| Filter::text("event_type", event_type)),
        );
        if let Some(text) = since.0 {
            filters.push(Filter::since(time("since", &text)?));
        }
        if let Some(text) = until.0 {
            filters.push(Filter::until(time("until", &text)?));
        }
        Page::fetch(
            &self.db,
            page,
            caller.project,
            &filters,
            |row: AttemptRow| row.show(),
        )
        .await
    }
}

/// A time given as a query parameter.
pub(super) fn time(name: &str, text: &str) -> Result<Timestamp, ApiError> {
    text.parse()
        .map_err(|_| ApiError::invalid_parameter(name, "a time is written in RFC 3339"))
}

/// The query texts of this resource's lists.
pub fn lists() -> Vec<ListTexts> {
    let moment = Timestamp::from_micros(0);
    vec![
        page::texts::<AttemptRow>(&[]),
        page::texts::<AttemptRow>(&[Filter::text("status", "")]),
        page::texts::<AttemptRow>(&[Filter::id("endpoint_id", EndpointId::generate())]),
        page::texts::<AttemptRow>(&[Filter::text("event_type", "")]),
        page::texts::<AttemptRow>(&[Filter::id("delivery_id", DeliveryId::generate())]),
        page::texts::<AttemptRow>(&[Filter::since(moment), Filter::until(moment)]),
    ]
}

#[cfg(test)]
mod tests {
    use super::{Encoding, shown_headers, written};

    #[test]
    fn bytes_that_are_no_text_are_written_in_base64() {
        assert_eq!(written(b"ok".to_vec()), ("ok".to_owned(), Encoding::Utf8));
        assert_eq!(
            written(b"a\0b".to_vec()),
            ("YQBi".to_owned(), Encoding::Base64)
        );
        assert_eq!(
            written(vec![0xff, 0xfe]),
            ("//4=".to_owned(), Encoding::Base64)
        );
    }

    #[test]
    fn a_header_that_came_twice_has_both_values() {
        let shown = shown_headers([("Set-Cookie", "a"), ("set-cookie", "b"), ("x", "1")]);
        assert_eq!(shown["set-cookie"], "a, b");
        assert_eq!(shown.len(), 2);
    }
}
