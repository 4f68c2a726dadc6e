//! The composition root: builds every part once and hands it on.

mod api;
mod presence;
mod store;
mod sweep;
mod watched;
mod work;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use futures::{TryStreamExt as _, future::LocalBoxFuture, stream::FuturesUnordered};
use poem::{
    Endpoint, EndpointExt as _, Response, Route, Server, get,
    listener::{Acceptor as _, Listener as _, TcpListener},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use api::{deprecations, lists, openapi};
pub use store::Store;

use crate::{
    config::{Config, ConfigError},
    console,
    contract::{
        auth::Keys,
        cursor::CursorKeys,
        deprecation::Deprecations,
        error,
        idempotency::{Idempotency, Protection},
        layer::Contract,
        page::PublicUrl,
        rate_limit::RateLimits,
        request_id::RequestIds,
        routes::Routes,
        spec::Version,
    },
    db::{OpenError, Sealer},
    jobs::Hand,
    plugins,
    webhooks::{
        dispatch::Dispatch, inspector::Receive, planning::DeliverWebhook, sender::SenderError,
        target::TargetPolicy,
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
    Listen(SocketAddr, io::Error),
    /// The address of those who watch.
    #[error("monitor_listen: {0}: {1}; choose another address with BOTIX_MONITOR_LISTEN")]
    MonitorListen(SocketAddr, io::Error),
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

/// A bound address, not yet served.
pub struct Bound {
    acceptor: poem::listener::TcpAcceptor,
    /// The URL of the address.
    pub local_url: String,
}

impl Bound {
    /// Binds the address at which requests are answered.
    pub async fn public(config: &Config) -> Result<Self, StartError> {
        let bound = Self::at(config.listen).await;
        bound.map_err(|error| StartError::Listen(config.listen, error))
    }

    /// Binds the address for those who watch, if there is one.
    pub async fn monitor(config: &Config) -> Result<Option<Self>, StartError> {
        let Some(address) = config.monitor_listen else {
            return Ok(None);
        };
        let bound = Self::at(address).await;
        let bound = bound.map_err(|error| StartError::MonitorListen(address, error))?;
        Ok(Some(bound))
    }

    async fn at(address: SocketAddr) -> io::Result<Self> {
        let acceptor = TcpListener::bind(address).into_acceptor().await?;
        let port = acceptor
            .local_addr()
            .first()
            .and_then(|address| address.as_socket_addr().map(SocketAddr::port))
            .unwrap_or(address.port());
        let host = match address.ip() {
            ip if ip.is_unspecified() => "127.0.0.1".to_owned(),
            IpAddr::V6(ip) => format!("[{ip}]"),
            IpAddr::V4(ip) => ip.to_string(),
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
        // Before anybody counts: what is counted earlier is nowhere to be seen.
        console::health::install();
        let executions = TaskTracker::new();
        let idempotency = Idempotency::new(
            protection,
            store.db.clone(),
            store.shared.clone(),
            Sealer::new(&store.master),
            &store.config.idempotency,
            work::share_of(&store.config),
            executions.clone(),
        );
        let hand = Hand::new::<DeliverWebhook>(store.db.clone(), work::at_hand(&store.config));
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
        let service = api::service(db, &sealer, &self.public_url, Some(self.dispatch.clone()));
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
        let routes = Route::new()
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
            .at("/developers", get(developers.clone()).post(developers));
        self.watched(routes).with(RequestIds)
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
