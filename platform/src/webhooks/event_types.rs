//! The built-in event types, each with a schema that its data must fit.
//!
//! A type is a name, a sentence and a Rust type; the schema is derived from the type and data is
//! checked by reading it as the type, so the two cannot disagree. Members that a type does not name
//! are allowed and go through unread.

use poem_openapi::OpenApi;
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    contract::{
        ApiError, Caller,
        page::{Page, PageRequest},
        payload::{RawJson, parse_json},
        spec::{Tag, WebhookSchema},
    },
    db::Timestamp,
};

/// A built-in event type.
#[derive(Clone, Copy)]
pub struct EventType {
    /// The dotted name.
    pub name: &'static str,
    /// When it happens.
    pub about: &'static str,
    schema: fn(&mut SchemaGenerator) -> Schema,
    check: fn(&[u8]) -> Result<(), ApiError>,
}

impl std::fmt::Debug for EventType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl EventType {
    /// The type whose data is a `T`.
    pub fn of<T: JsonSchema + DeserializeOwned>(name: &'static str, about: &'static str) -> Self {
        Self {
            name,
            about,
            schema: |generator| generator.subschema_for::<T>(),
            check: |data| parse_json::<T>(data).map(drop),
        }
    }

    /// Fails with `INVALID_BODY`, pointing below `/data`, when data does not fit.
    pub fn check(&self, data: &str) -> Result<(), ApiError> {
        (self.check)(data.as_bytes()).map_err(|error| error.below("/data"))
    }

    /// The type as the API's documents describe its webhook.
    pub fn webhook(&self) -> WebhookSchema {
        WebhookSchema {
            event_type: self.name,
            about: self.about,
            data: self.schema,
        }
    }

    fn schema(&self) -> serde_json::Value {
        let mut generator = SchemaSettings::draft2020_12()
            .with(|settings| settings.inline_subschemas = true)
            .into_generator();
        (self.schema)(&mut generator).to_value()
    }
}

/// The types that belong to no resource of this API: tenants' backends publish them, or we do to test.
pub fn general() -> Vec<EventType> {
    vec![
        EventType::of::<Payment>("payment.succeeded", "A payment went through."),
        EventType::of::<Payment>("payment.failed", "A payment did not go through."),
        EventType::of::<Subscription>("subscription.created", "A subscription began."),
        EventType::of::<Subscription>("subscription.cancelled", "A subscription ended."),
        EventType::of::<TestMessage>("webhook.test", "Somebody tries an endpoint."),
    ]
}

/// The types of resources whose rooms are still to be built; tenants may publish them meanwhile.
pub fn announced() -> Vec<EventType> {
    vec![
        EventType::of::<Message>("message.sent", "A message left through its channel."),
        EventType::of::<Message>("message.delivered", "A message reached its contact."),
        EventType::of::<Message>("message.failed", "A message could not be sent."),
        EventType::of::<Import>(
            "catalog.import.completed",
            "An import of catalog items ended.",
        ),
        EventType::of::<ScenarioRun>(
            "scenario.run.completed",
            "A run went through all its steps.",
        ),
        EventType::of::<ScenarioRun>("scenario.run.failed", "A run stopped at a step."),
    ]
}

/// Data of `payment.*`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(example = serde_json::json!({"id": "pay_81", "amount": 1990, "currency": "EUR"}))]
pub struct Payment {
    /// The amount, in the unit that the tenant's backend counts in.
    pub amount: f64,
    /// The currency, ISO 4217.
    pub currency: String,
    /// The payment's id at the tenant.
    pub id: Option<String>,
    /// Who paid.
    pub contact_id: Option<String>,
    /// Why it failed.
    pub reason: Option<String>,
}

/// Data of `subscription.*`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(example = serde_json::json!({"id": "sub_7", "plan": "basic"}))]
pub struct Subscription {
    /// The subscription's id at the tenant.
    pub id: String,
    /// What is subscribed to.
    pub plan: Option<String>,
    /// Who subscribed.
    pub contact_id: Option<String>,
}

/// Data of `webhook.test`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(example = serde_json::json!({"message": "Hello from BOTIX"}))]
pub struct TestMessage {
    /// A greeting.
    pub message: String,
}

/// Data of `message.*`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Message {
    /// The message.
    pub id: String,
    /// To whom.
    pub contact_id: String,
    /// Through which channel.
    pub channel_id: Option<String>,
    /// What it says.
    pub text: Option<String>,
    /// How far it is.
    pub status: String,
    /// Why it failed.
    pub error: Option<String>,
}

/// Data of `catalog.import.completed`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Import {
    /// The import.
    pub id: String,
    /// How it ended.
    pub status: String,
    /// Rows in all.
    pub total: u64,
    /// Rows that made an item.
    pub created: u64,
    /// Rows that changed an item.
    pub updated: u64,
    /// Rows that were refused.
    pub rejected: u64,
}

/// Data of `scenario.run.*`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct ScenarioRun {
    /// The run.
    pub id: String,
    /// The scenario.
    pub scenario_id: String,
    /// For whom it ran.
    pub contact_id: String,
    /// How it ended.
    pub status: String,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
}

/// A built-in event type as clients see it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EventTypeView {
    /// The dotted name.
    #[serde(rename = "type")]
    pub name: &'static str,
    /// When it happens.
    pub description: &'static str,
    /// The JSON Schema of `data`.
    pub schema: RawJson,
}

/// The handlers of `/event-types`.
#[derive(Debug)]
pub struct EventTypesApi {
    /// All built-in types.
    pub types: Vec<EventType>,
}

#[OpenApi(tag = "Tag::Events")]
impl EventTypesApi {
    /// List the built-in event types
    ///
    /// Each with the JSON Schema of its data.
    #[oai(
        path = "/event-types",
        method = "get",
        operation_id = "list_event_types"
    )]
    #[allow(
        clippy::unused_async,
        reason = "handlers are async, also this one that waits for nothing"
    )]
    async fn list(
        &self,
        caller: Caller,
        page: PageRequest,
    ) -> Result<Page<EventTypeView>, ApiError> {
        let views = self.types.iter().map(|event_type| {
            let schema = serde_json::value::to_raw_value(&event_type.schema())
                .map_err(ApiError::internal)?;
            Ok(EventTypeView {
                name: event_type.name,
                description: event_type.about,
                schema: RawJson(schema),
            })
        });
        let views = views.collect::<Result<_, ApiError>>()?;
        Page::of_declared(&page, caller.project, "event-types", views)
    }
}
