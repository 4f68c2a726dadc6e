//! The half of a process that works: deliveries, compilations, chores and sweeps.

use std::sync::Arc;

use futures::FutureExt as _;
use tokio_util::sync::CancellationToken;

use super::{
    App, StartError,
    presence::{Others, Presence},
    sweep, together,
};
use crate::{
    config::Config,
    db::{Sealer, Shares},
    jobs::{self, Ended, Parking, Run},
    plugins::{self, Limits, PluginEngine, PluginHost},
    webhooks::{
        Rooms, Running, Together,
        chores::Chore,
        planning::DeliverWebhook,
        sender::Sender,
        target::TargetPolicy,
        worker::{Begin, Loads, Worker},
    },
};

impl App {
    /// Runs jobs and sweeps until `stop`, then finishes those in flight. `accepts` says whether this process
    /// also answers requests, and may begin what it accepts.
    pub async fn work(&self, accepts: bool, stop: CancellationToken) -> Result<(), StartError> {
        let config = &self.store.config;
        let db = &self.store.db;
        let _presence = self.be_present().await;
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
            seats: Shares::new(1),
            shares: Shares::new(share_of(config)),
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

    /// Takes up at once what the last process left of an SQLite file that nobody else works on. What this gives
    /// is kept as long as this process works on it.
    async fn be_present(&self) -> Option<Presence> {
        let path = self.store.config.sqlite_path()?;
        let db = &self.store.db;
        let presence = match Presence::announce(&path) {
            Ok(Others::Some(presence)) => return Some(presence),
            Ok(Others::None(presence)) => presence,
            Err(error) => {
                tracing::warn!(%error, "nobody can tell who works on the database: what others left has to wait");
                return None;
            }
        };
        let taking_over = async {
            jobs::take_over::<DeliverWebhook>(db).await?;
            jobs::take_over::<plugins::CompilePlugin>(db).await?;
            jobs::take_over::<Chore>(db).await
        };
        if let Err(error) = taking_over.await {
            tracing::warn!(%error, "what the last process left has to wait");
        }
        if let Err(error) = presence.share() {
            tracing::warn!(%error, "no other process can work on the database");
        }
        Some(presence)
    }
}

/// How many of the connections a project may have for its mutations, and as many for its attempts: a quarter.
pub(super) fn share_of(config: &Config) -> usize {
    usize::try_from(config.database_connections / 4).unwrap_or(usize::MAX)
}

/// How many of a process's deliveries may be those that it has just accepted itself.
pub(super) fn at_hand(config: &Config) -> usize {
    // On SQLite none begin so.
    match config.sqlite_path() {
        Some(_) => 0,
        None => config.webhooks.concurrency / 2,
    }
}
