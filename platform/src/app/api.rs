//! The public API: every handler, every event type, every list and the published document.

use poem_openapi::OpenApiService;

use crate::{
    config::{MasterKey, OffsetPagination},
    contract::{
        deprecation::Deprecation,
        page::{self, ListTexts},
        spec::{self, Version},
    },
    db::{Db, Sealer},
    plugins::{self, PluginsApi},
    resources::contacts::{self, Contact, ContactsApi, DeletedContact},
    webhooks::{
        attempts::{self, AttemptsApi},
        dead_letters::{self, DeadLettersApi},
        deliveries::{self, DeliveriesApi},
        dispatch::Dispatch,
        endpoints::{self, EndpointsApi, actions::EndpointActionsApi},
        event_types::{self, EventType, EventTypesApi},
        events::{self, EventsApi},
        inspector::{self, InspectorApi},
        publishing::Publisher,
        redeliveries::{self, RedeliveriesApi},
        repeats::RepeatsApi,
        signals,
    },
};

/// All built-in event types.
pub fn event_types() -> Vec<EventType> {
    let mut types = vec![
        EventType::of::<Contact>("contact.created", "A contact was created."),
        EventType::of::<Contact>("contact.updated", "A contact was changed."),
        EventType::of::<DeletedContact>("contact.deleted", "A contact was deleted."),
    ];
    types.extend(event_types::announced());
    types.extend(event_types::general());
    types.extend(signals::event_types());
    types
}

/// The query texts of every list, for those who look at their plans.
pub fn lists() -> Vec<ListTexts> {
    [
        contacts::lists(),
        events::lists(),
        endpoints::lists(),
        deliveries::lists(),
        attempts::lists(),
        dead_letters::lists(),
        redeliveries::lists(),
        inspector::lists(),
        plugins::lists(),
    ]
    .concat()
}

/// Everything deprecated, with the last days of these settings.
pub fn deprecations(offset: &OffsetPagination) -> Vec<Deprecation> {
    let lists = lists();
    let with_offset = lists
        .iter()
        .filter(|list| list.offset.is_some())
        .map(|list| list.resource);
    vec![page::offset::deprecation(with_offset, offset.sunset)]
}

/// The handlers.
pub(super) type PublicApi = (
    ContactsApi,
    EventsApi,
    EventTypesApi,
    EndpointsApi,
    EndpointActionsApi,
    DeliveriesApi,
    RepeatsApi,
    AttemptsApi,
    DeadLettersApi,
    RedeliveriesApi,
    PluginsApi,
    InspectorApi,
);

/// The handlers as a service, and what is needed to say what they do.
pub(super) fn service(
    db: &Db,
    sealer: &Sealer,
    public_url: &str,
    dispatch: Option<Dispatch>,
) -> OpenApiService<PublicApi, ()> {
    let apis = (
        ContactsApi { db: db.clone() },
        EventsApi {
            db: db.clone(),
            publisher: Publisher::new(db.clone(), dispatch),
            types: event_types(),
        },
        EventTypesApi {
            types: event_types(),
        },
        EndpointsApi {
            db: db.clone(),
            sealer: sealer.clone(),
        },
        EndpointActionsApi {
            sealer: sealer.clone(),
        },
        DeliveriesApi { db: db.clone() },
        RepeatsApi {
            public_url: public_url.to_owned(),
        },
        AttemptsApi { db: db.clone() },
        DeadLettersApi { db: db.clone() },
        RedeliveriesApi { db: db.clone() },
        PluginsApi { db: db.clone() },
        InspectorApi {
            db: db.clone(),
            public_url: public_url.to_owned(),
        },
    );
    OpenApiService::new(apis, "BOTIX", env!("CARGO_PKG_VERSION"))
        .summary(
            "A messaging and CRM platform with safe retries, stable lists and no lost webhook.",
        )
        .description(include_str!("../../../openapi/description.md"))
        .server("/public/v1")
}

/// The published document of one version.
pub fn openapi(version: Version, deprecations: &[Deprecation]) -> serde_json::Value {
    // The document depends on the handlers' types alone; no handler of this copy ever runs.
    let pool = sqlx::sqlite::SqlitePoolOptions::new()
        .connect_lazy_with(sqlx::sqlite::SqliteConnectOptions::new());
    let db = Db::Sqlite {
        writer: pool.clone(),
        readers: pool,
    };
    let service = service(&db, &Sealer::new(&MasterKey::generate()), "", None);
    let webhooks: Vec<_> = event_types().iter().map(EventType::webhook).collect();
    spec::document(version, || service.spec(), &webhooks, deprecations)
}
