//! The composition root: builds every part once and hands it on.

mod store;
mod sweep;

use std::{io, sync::Arc, time::Duration};

use futures::{
    FutureExt as _, TryStreamExt as _, future::LocalBoxFuture, stream::FuturesUnordered,
};
use poem::{
    Endpoint, EndpointExt as _, Response, Route, Server, get,
    listener::{Acceptor as _, Listener as _, TcpListener},
};
use poem_openapi::OpenApiService;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use store::Store;

use crate::{
    config::{Config, ConfigError, MasterKey, OffsetPagination},
    console,
    contract::{
        auth::Keys,
        cursor::CursorKeys,
        deprecation::{Deprecation, Deprecations},
        error,
        idempotency::{Idempotency, Protection},
        layer::Contract,
        page::{self, ListTexts, PublicUrl},
        rate_limit::RateLimits,
        request_id::RequestIds,
        routes::Routes,
        spec::{self, Version},
    },
    db::{Db, OpenError, Sealer},
    jobs::{self, Begin, Ended, Hand, Parking, Run},
    plugins::{self, Limits, PluginEngine, PluginHost, PluginsApi},
    resources::contacts::{self, Contact, ContactsApi, DeletedContact},
    webhooks::{
        Rooms, Running, Together,
        attempts::{self, AttemptsApi},
        chores::Chore,
        dead_letters::{self, DeadLettersApi},
        deliveries::{self, DeliveriesApi},
        dispatch::Dispatch,
        endpoints::{self, EndpointsApi, actions::EndpointActionsApi},
        event_types::{self, EventType, EventTypesApi},
        events::{self, EventsApi},
        inspector::{self, InspectorApi, Receive},
        planning::DeliverWebhook,
        publishing::Publisher,
        redeliveries::{self, RedeliveriesApi},
        repeats::RepeatsApi,
        sender::{Sender, SenderError},
        signals,
        target::TargetPolicy,
        worker::{Loads, Worker},
    },
};

/// How long a stopping process waits for what it has begun.
pub const DRAIN: Duration = Duration::from_secs(35);

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    /// Answers requests.
    Api,
    /// Runs jobs.
    Worker,
}

/// Why a process could not start: one line.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The database.
    #[error(transparent)]
    Database(#[from] OpenError),
    /// The address.
    #[error("listen: {0}: {1}; choose another address with --listen or BOTIX_LISTEN")]
    Listen(std::net::SocketAddr, io::Error),
    /// The key file beside an embedded database.
    #[error("master key: {0}")]
    MasterKey(String),
    /// The address of Redis.
    #[error("redis_url: {0}")]
    Redis(String),
    /// The plugin engine.
    #[error("plugins: {0}")]
    Plugins(#[from] plugins::EngineError),
    /// The sender.
    #[error("webhooks: {0}")]
    Sender(#[from] SenderError),
    /// The server broke.
    #[error("server: {0}")]
    Server(#[from] io::Error),
}

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

type PublicApi = (
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

fn public_api(
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
    let service = public_api(&db, &Sealer::new(&MasterKey::generate()), "", None);
    let webhooks: Vec<_> = event_types().iter().map(EventType::webhook).collect();
    spec::document(version, || service.spec(), &webhooks, deprecations)
}

/// A bound address, not yet served.
pub struct Bound {
    acceptor: poem::listener::TcpAcceptor,
    /// The URL of the address.
    pub local_url: String,
}

impl Bound {
    /// Binds the address of the settings.
    pub async fn new(config: &Config) -> Result<Self, StartError> {
        let acceptor = TcpListener::bind(config.listen)
            .into_acceptor()
            .await
            .map_err(|error| StartError::Listen(config.listen, error))?;
        let port = acceptor
            .local_addr()
            .first()
            .and_then(|address| address.as_socket_addr().map(std::net::SocketAddr::port))
            .unwrap_or(config.listen.port());
        let host = match config.listen.ip() {
            ip if ip.is_unspecified() => "127.0.0.1".to_owned(),
            std::net::IpAddr::V6(ip) => format!("[{ip}]"),
            std::net::IpAddr::V4(ip) => ip.to_string(),
        };
        Ok(Self {
            acceptor,
            local_url: format!("http://{host}:{port}"),
        })
    }
}

/// A running process.
pub struct App {
    store: Store,
    public_url: String,
    executions: TaskTracker,
    idempotency: Idempotency,
    dispatch: Dispatch,
}

impl App {
    /// Builds the parts of a process that is reached at `local_url`, unless the settings say where.
    pub fn new(store: Store, local_url: &str, protection: Protection) -> Self {
        let public_url = store
            .config
            .public_url
            .as_ref()
            .map_or(local_url, |url| url.as_str())
            .trim_end_matches('/')
            .to_owned();
        error::set_public_url(&public_url);
        let executions = TaskTracker::new();
        let idempotency = Idempotency::new(
            protection,
            store.db.clone(),
            store.shared.clone(),
            Sealer::new(&store.master),
            &store.config.idempotency,
            executions.clone(),
        );
        let hand = Hand::new::<DeliverWebhook>(store.db.clone(), at_hand(&store.config));
        Self {
            store,
            public_url,
            executions,
            idempotency,
            dispatch: Dispatch::new(hand),
        }
    }

    /// What links start with.
    pub fn public_url(&self) -> &str {
        &self.public_url
    }

    fn policy(&self) -> TargetPolicy {
        TargetPolicy {
            allow_private: self.store.config.webhooks.allow_private_targets,
        }
    }

    /// Answers requests until `stop`, then finishes those in flight.
    pub async fn serve(&self, bound: Bound, stop: CancellationToken) -> Result<(), StartError> {
        let until = stop.clone();
        let deadline = async {
            stop.cancelled().await;
            tokio::time::sleep(DRAIN).await;
        };
        tokio::pin!(deadline);
        let serving = async {
            Server::new_with_acceptor(bound.acceptor)
                .run_with_graceful_shutdown(
                    self.routes(),
                    async move { until.cancelled().await },
                    Some(DRAIN),
                )
                .await?;
            self.executions.close();
            self.executions.wait().await;
            Ok(())
        };
        tokio::select! {
            served = serving => served,
            () = &mut deadline => {
                tracing::warn!("some requests did not finish in time; their transactions roll back");
                Ok(())
            }
        }
    }

    fn routes(&self) -> impl Endpoint<Output = Response> + 'static {
        let db = &self.store.db;
        let sealer = Sealer::new(&self.store.master);
        let service = public_api(db, &sealer, &self.public_url, Some(self.dispatch.clone()));
        let deprecations = deprecations(&self.store.config.offset_pagination);
        let deprecations = Deprecations::new(deprecations, &self.public_url);
        let changelog = console::changelog::Changelog::new(deprecations.all(), &self.public_url);
        let keys = Keys::new(db.clone());
        let developers = console::developers::Developers {
            db: db.clone(),
            keys: keys.clone(),
        };
        let contract = Contract {
            keys,
            idempotency: self.idempotency.clone(),
            routes: Routes::of(&service.spec()),
            rate_limits: RateLimits::new(&self.store.config.rate_limit, self.store.shared.clone()),
            store: Arc::default(),
            deprecations: deprecations.clone(),
        };
        let [modern, older] =
            [Version::V3_1, Version::V3_0].map(|version| openapi(version, deprecations.all()));
        let docs = console::docs::page(&service.swagger_ui_html(), &service.spec());
        let api = service
            .with(contract)
            .data(CursorKeys::new(
                &self.store.master,
                &self.store.config.cursors,
            ))
            .data(PublicUrl(self.public_url.clone()))
            .data(deprecations);
        Route::new()
            .nest("/public/v1", api)
            .nest("/inspect", Receive { db: db.clone() })
            .at("/", get(console::pages::home))
            .at("/docs", get(console::docs::Static::html(docs)))
            .at("/openapi.json", get(console::docs::Static::json(&modern)))
            .at(
                "/openapi-3.0.json",
                get(console::docs::Static::json(&older)),
            )
            .at("/error-codes", get(console::pages::error_codes))
            .at("/changelog/rss", get(changelog.feed()))
            .at("/changelog", get(changelog))
            .at("/developers", get(developers.clone()).post(developers))
            .at("/healthz", get(console::health::alive))
            .at(
                "/readyz",
                get(console::health::Ready {
                    db: db.clone(),
                    shared: self.store.shared.clone(),
                }),
            )
            .at("/metrics", get(console::health::Metrics::install()))
            .with(RequestIds)
    }

    /// Runs jobs and sweeps until `stop`, then finishes those in flight. `accepts` says whether this process
    /// also answers requests, and may begin what it accepts.
    pub async fn work(&self, accepts: bool, stop: CancellationToken) -> Result<(), StartError> {
        let config = &self.store.config;
        let db = &self.store.db;
        let hand = accepts.then(|| self.dispatch.hand().clone());
        let at_hand = if accepts { at_hand(config) } else { 0 };
        // Of the queue: what a project may hold of it is reckoned by this.
        let concurrency = config.webhooks.concurrency - at_hand;
        let engine = PluginEngine::new(Limits::default(), 64)?;
        let plugins = PluginHost::new(db.clone(), engine, &self.store.master);
        let sender = |policy| {
            let webhooks = &config.webhooks;
            Sender::new(
                policy,
                webhooks.connect_timeout,
                webhooks.read_timeout,
                None,
            )
        };
        let anywhere = TargetPolicy {
            allow_private: true,
        };
        let rooms = Rooms::new(config.webhooks.endpoint_concurrency, concurrency, at_hand);
        let worker = Worker {
            db: db.clone(),
            sealer: Sealer::new(&self.store.master),
            plugins: plugins.clone(),
            sender: sender(self.policy())?,
            to_inspector: sender(anywhere)?,
            ladder: config.webhooks.ladder.clone().into(),
            public_url: (&*self.public_url).into(),
            rooms: rooms.clone(),
            running: Running::default(),
            loads: Loads::new(db.clone()),
            parking: Parking::new(db.clone()),
            begin: Begin::new(db.clone()),
            together: Together::new(db.clone()),
            stop: stop.clone(),
        };
        self.dispatch.start(worker.clone());
        let deliver: jobs::Handler<DeliverWebhook> = Arc::new(move |taken| {
            let worker = worker.clone();
            Box::pin(async move { worker.deliver(taken).await })
        });
        let compile: jobs::Handler<plugins::CompilePlugin> = Arc::new(move |taken| {
            let plugins = plugins.clone();
            Box::pin(async move {
                plugins.compile(taken.job).await;
                Ended::Settled
            })
        });
        let of_chores = db.clone();
        let chores: jobs::Handler<Chore> = Arc::new(move |taken| {
            let chore = taken.job.run(of_chores.clone());
            Box::pin(chore.map(|()| Ended::Settled))
        });
        let deliver = Run {
            db: db.clone(),
            concurrency,
            handler: deliver,
            hand,
            lanes: Some(Arc::new(rooms)),
            begin: None,
        };
        together([
            deliver.until(stop.clone()).map(Ok).boxed_local(),
            Run::plain(db.clone(), 2, compile)
                .until(stop.clone())
                .map(Ok)
                .boxed_local(),
            Run::plain(db.clone(), 4, chores)
                .until(stop.clone())
                .map(Ok)
                .boxed_local(),
            sweep::run(db, &self.idempotency, config.sweep_every, stop)
                .map(Ok)
                .boxed_local(),
        ])
        .await
    }
}

/// How many of a process's deliveries may be those that it has just accepted itself.
fn at_hand(config: &Config) -> usize {
    // On SQLite none begin so.
    match config.sqlite_path() {
        Some(_) => 0,
        None => config.webhooks.concurrency / 2,
    }
}

/// Runs futures side by side to their ends, or to the first failure.
///
/// Each is polled when it is woken itself. Joined plainly, whatever wakes one would poll all, and a
/// worker looks for jobs whenever it is polled: two of them would keep each other awake for ever.
pub async fn together<'f, E>(
    futures: impl IntoIterator<Item = LocalBoxFuture<'f, Result<(), E>>>,
) -> Result<(), E> {
    futures
        .into_iter()
        .collect::<FuturesUnordered<_>>()
        .try_collect()
        .await
}
