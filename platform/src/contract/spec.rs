//! The published OpenAPI documents, 3.1 and 3.0, made from the typed handlers.
//!
//! poem-openapi lists paths, parameters and which schema goes where; schemars describes the schemas
//! in each version's own dialect; this module joins the two and adds what the layer in front of all
//! handlers promises on every route: the key of each mutation, the cursor of each list, the error
//! answers and the common headers. Which codes an operation can answer with follows from its form and
//! its collection.

use std::{cell::RefCell, collections::BTreeMap};

use poem_openapi::registry::{MetaSchema, Registry};
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::contract::{Code, deprecation::Deprecation};

/// A dialect of OpenAPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Version {
    /// With `webhooks` and JSON Schema 2020-12.
    #[value(name = "3.1")]
    V3_1,
    /// For older tools; webhooks stand under `x-webhooks`.
    #[value(name = "3.0")]
    V3_0,
}

/// The rooms of the documents.
#[derive(poem_openapi::Tags)]
pub enum Tag {
    /// The people a project talks to.
    Contacts,
    /// What happened, and the types of it.
    Events,
    /// Where webhooks go.
    #[oai(rename = "Webhook endpoints")]
    Endpoints,
    /// Webhooks on their way, and every attempt to send one.
    #[oai(rename = "Webhook deliveries")]
    Deliveries,
    /// WebAssembly components that transform and sign webhooks.
    Plugins,
    /// Bins that receive anything and show it.
    Inspector,
}

/// One event type, as the documents describe its webhook.
#[derive(Clone, Copy)]
pub struct WebhookSchema {
    /// The dotted event type.
    pub event_type: &'static str,
    /// When it happens.
    pub about: &'static str,
    /// The schema of `data`.
    pub data: fn(&mut SchemaGenerator) -> Schema,
}

type Describe = fn(&mut SchemaGenerator) -> Schema;

thread_local! {
    static NOTED: RefCell<BTreeMap<String, (Use, Describe)>> =
        const { RefCell::new(BTreeMap::new()) };
}

/// Whether a type is read or written: a member with a default may be absent from what is read, and
/// is always there in what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// In a request.
    Read,
    /// In an answer.
    Written,
}

/// Notes that a handler takes or gives a `T`, while poem-openapi walks the handlers.
pub fn note_schema<T: JsonSchema>(registry: &mut Registry, used: Use) {
    let name = T::schema_name().into_owned();
    registry
        .schemas
        .entry(name.clone())
        .or_insert_with(|| MetaSchema::new("object"));
    NOTED.with_borrow_mut(|noted| {
        noted.insert(
            name,
            (used, SchemaGenerator::subschema_for::<T> as Describe),
        )
    });
}

/// The document of one version; `list_handlers` gives poem-openapi's own, on this thread.
pub fn document(
    version: Version,
    list_handlers: impl FnOnce() -> String,
    webhooks: &[WebhookSchema],
    deprecations: &[Deprecation],
) -> Value {
    NOTED.with_borrow_mut(BTreeMap::clear);
    let mut document: Value = serde_json::from_str(&list_handlers()).unwrap_or_default();
    let noted = NOTED.with_borrow_mut(std::mem::take);
    let settings = match version {
        Version::V3_1 => SchemaSettings::draft2020_12()
            .with(|settings| settings.definitions_path = "/components/schemas".into()),
        Version::V3_0 => SchemaSettings::openapi3(),
    };
    let mut reading = settings.clone().for_deserialize().into_generator();
    let mut writing = settings.for_serialize().into_generator();
    for (used, describe) in noted.values() {
        match used {
            Use::Read => describe(&mut reading),
            Use::Written => describe(&mut writing),
        };
    }
    let webhooks: Map<String, Value> = webhooks
        .iter()
        .map(|webhook| {
            let described = describe_webhook(webhook, &mut reading);
            (webhook.event_type.to_owned(), described)
        })
        .collect();
    let mut schemas = reading.take_definitions(true);
    schemas.extend(writing.take_definitions(true));
    schemas.values_mut().for_each(drop_null_defaults);
    for (path, operations) in document["paths"].as_object_mut().into_iter().flatten() {
        for (method, operation) in operations.as_object_mut().into_iter().flatten() {
            promise(path, method, operation, deprecations);
        }
    }
    document["components"]["schemas"] = Value::Object(schemas);
    document["components"]["securitySchemes"] = json!({
        "bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "btx_live_…",
            "description": "An API key of the project."}
    });
    document["security"] = json!([{"bearer": []}]);
    match version {
        Version::V3_1 => {
            document["openapi"] = "3.1.0".into();
            document["webhooks"] = Value::Object(webhooks);
            modernise(&mut document["paths"]);
        }
        Version::V3_0 => {
            document["openapi"] = "3.0.3".into();
            if let Some(info) = document["info"].as_object_mut() {
                info.remove("summary");
            }
            document["x-webhooks"] = Value::Object(webhooks);
        }
    }
    document
}

/// Adds to one operation what the contract layer promises on it.
fn promise(path: &str, method: &str, operation: &mut Value, deprecations: &[Deprecation]) {
    let mutates = matches!(method, "post" | "patch" | "put" | "delete");
    let lists = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        .as_str()
        .is_some_and(|name| name.contains("/PageOf"));
    let mut parameters = operation["parameters"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    if mutates {
        parameters.push(json!({
            "name": "Idempotency-Key", "in": "header", "required": true,
            "description": "One UUIDv4 or one ULID, new for each new request and the same for each retry; the first answer is replayed for 24 hours.",
            "schema": {"type": "string"}, "example": "9b2f6c1e-3c53-4b8e-9d0a-1f2e3d4c5b6a"
        }));
    }
    if lists {
        parameters.push(json!({
            "name": "cursor", "in": "query", "required": false,
            "description": "`next_cursor` of the page before; absent for the first page.",
            "schema": {"type": "string"}
        }));
        parameters.push(json!({
            "name": "cursor_limit", "in": "query", "required": false,
            "description": "Rows on a page.",
            "schema": {"type": "integer", "minimum": 1, "maximum": 200, "default": 20}
        }));
    }
    if !parameters.is_empty() {
        operation["parameters"] = Value::Array(parameters);
    }
    let has_body = operation["requestBody"].is_object();
    let Some(responses) = operation["responses"].as_object_mut() else {
        return;
    };
    for answer in responses.values_mut() {
        let headers = answer["headers"].as_object().cloned().unwrap_or_default();
        answer["headers"] = Value::Object(common_headers(headers, mutates, lists));
    }
    let mut by_status: BTreeMap<u16, Vec<Code>> = BTreeMap::new();
    let ending: Vec<_> = deprecations
        .iter()
        .filter(|deprecation| deprecation.is_on(method, path))
        .collect();
    for code in Code::ALL {
        if applies(*code, path, mutates, lists, has_body)
            || ending.iter().any(|ends| ends.fails_with(*code))
        {
            by_status.entry(code.status()).or_default().push(*code);
        }
    }
    for (status, codes) in by_status {
        let names: Vec<_> = codes.iter().map(|code| code.name()).collect();
        let abouts: Vec<_> = codes
            .iter()
            .map(|code| format!("`{}`: {}", code.name(), code.about()))
            .collect();
        let mut answer = json!({
            "description": abouts.join("\n\n"),
            "headers": common_headers(Map::new(), false, false),
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
            "x-codes": names,
        });
        if status == 401 {
            // Whose limit it would be is not known.
            for name in RATE_LIMIT_HEADERS {
                if let Some(headers) = answer["headers"].as_object_mut() {
                    headers.remove(name);
                }
            }
        }
        if matches!(status, 409 | 429 | 503) {
            answer["headers"]["Retry-After"] = json!({
                "description": "Seconds to wait before another try.", "schema": {"type": "integer"}
            });
        }
        responses.insert(status.to_string(), answer);
    }
    for deprecation in ending {
        deprecation.mark(operation);
    }
}

/// What a project's rate limit is told in.
const RATE_LIMIT_HEADERS: [&str; 2] = ["RateLimit-Policy", "RateLimit"];

fn common_headers(
    mut headers: Map<String, Value>,
    mutates: bool,
    lists: bool,
) -> Map<String, Value> {
    headers.insert(
        "X-Request-Id".to_owned(),
        json!({"description": "Names this request to support.", "schema": {"type": "string"}}),
    );
    headers.insert(
        "RateLimit-Policy".to_owned(),
        json!({"description": "The project's quota `q` in a window of `w` seconds.",
            "schema": {"type": "string"}}),
    );
    headers.insert(
        "RateLimit".to_owned(),
        json!({"description": "Requests that remain, `r`, and the seconds until all are back, `t`.",
            "schema": {"type": "string"}}),
    );
    if mutates {
        headers.insert(
            "Idempotent-Replayed".to_owned(),
            json!({"description": "`true` when this is the stored answer of an earlier request.",
                "schema": {"type": "string"}}),
        );
    }
    if lists {
        headers.insert(
            "Link".to_owned(),
            json!({"description": "The next page, `rel=\"next\"`.", "schema": {"type": "string"}}),
        );
    }
    headers
}

/// Whether an operation can answer with a code.
fn applies(code: Code, path: &str, mutates: bool, lists: bool, has_body: bool) -> bool {
    match code {
        Code::Unauthenticated
        | Code::Forbidden
        | Code::RateLimited
        | Code::Internal
        | Code::Unavailable => true,
        Code::NotFound => path.contains('{'),
        Code::InvalidParameter => !mutates || path.ends_with("/plugins"),
        Code::InvalidBody | Code::UnsupportedMediaType => has_body,
        Code::PayloadTooLarge
        | Code::IdempotencyKeyRequired
        | Code::IdempotencyKeyInvalid
        | Code::IdempotencyKeyReuseConflict
        | Code::IdempotencyKeyInProgress
        | Code::IdempotencyUnavailable => mutates,
        Code::InvalidCursor | Code::InvalidCursorLimit => lists,
        Code::ContactExists => mutates && has_body && path.contains("/contacts"),
        Code::Conflict => mutates && !path.contains("/contacts"),
        Code::PluginInvalid => {
            mutates && (path.ends_with("/plugins") || path.ends_with("/versions"))
        }
        Code::PluginInUse => mutates && path.ends_with("/plugins/{id}"),
        // Those of deprecated things follow from their declarations.
        Code::OffsetTooLarge
        | Code::OffsetPaginationRetired
        | Code::MethodNotAllowed
        | Code::IdempotencyAnswerNotKept => false,
    }
}

fn describe_webhook(webhook: &WebhookSchema, generator: &mut SchemaGenerator) -> Value {
    let data = (webhook.data)(generator);
    let header = |name: &str, about: &str| {
        json!({"name": name, "in": "header", "required": true, "description": about,
            "schema": {"type": "string"}})
    };
    json!({"post": {
        "summary": webhook.about,
        "operationId": format!("webhook_{}", webhook.event_type.replace('.', "_")),
        "security": [],
        "parameters": [
            header("X-Botix-Event", "The event type."),
            header("X-Botix-Signature", "Lower-case hex HMAC-SHA256 of the exact body under the endpoint's secret."),
            header("X-Botix-Request-Id", "The same for every step of the ladder, new for a manual retry."),
            header("X-Delivery-Attempt", "The number of the attempt, from 1."),
            header("X-Botix-Signature-Previous", "The same under the secret before, as long as a rotation lets it sign too; else absent."),
            header("webhook-id", "The event id (Standard Webhooks)."),
            header("webhook-timestamp", "Unix seconds of this attempt (Standard Webhooks)."),
            header("webhook-signature", "`v1,<base64>`, several separated by spaces after a rotation (Standard Webhooks)."),
        ],
        "requestBody": {"required": true, "content": {"application/json": {"schema": {
            "type": "object",
            "required": ["id", "type", "timestamp", "project_id", "data"],
            "properties": {
                "id": {"type": "string", "description": "The event id, `evt_…`."},
                "type": {"type": "string", "enum": [webhook.event_type]},
                "timestamp": {"type": "string", "format": "date-time"},
                "project_id": {"type": "string"},
                "truncated": {"type": "boolean", "description": "Present and true when the whole would pass 65,536 bytes: `data` is then `{id, href}`."},
                "data": data,
            }
        }}}},
        "responses": {"2XX": {"description": "Received; nothing more is sent for this event."}}
    }})
}

/// Removes `"default": null`: it says that a member may be absent, which `required` says already, and
/// where null is no value of the member it is wrong.
fn drop_null_defaults(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if members.get("default") == Some(&Value::Null) {
                members.remove("default");
            }
            members.values_mut().for_each(drop_null_defaults);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_null_defaults),
        _ => {}
    }
}

/// Turns what is left of 3.0's `nullable` into 3.1's type lists.
fn modernise(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if members.remove("nullable") == Some(Value::Bool(true))
                && let Some(kind) = members.get("type").cloned()
            {
                members.insert("type".to_owned(), json!([kind, "null"]));
            }
            members.values_mut().for_each(modernise);
        }
        Value::Array(items) => items.iter_mut().for_each(modernise),
        _ => {}
    }
}
