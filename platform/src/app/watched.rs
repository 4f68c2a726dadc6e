//! What a process shows to whoever watches over it: whether it lives, whether it can do its work, and its
//! figures; at its public address, and at one of their own where the settings name one.

use poem::{EndpointExt as _, Route, Server, get};
use tokio_util::sync::CancellationToken;

use super::{App, Bound, StartError};
use crate::{
    console::health::{self, Metrics, Ready},
    contract::request_id::RequestIds,
    webhooks::gauges,
};

impl App {
    /// Answers those who watch, and nobody else, until `stop`.
    pub async fn be_watched(
        &self,
        bound: Bound,
        stop: CancellationToken,
    ) -> Result<(), StartError> {
        tracing::info!("health and metrics are at {}/metrics too", bound.local_url);
        let routes = self.watched(Route::new()).with(RequestIds);
        let serving = Server::new_with_acceptor(bound.acceptor).run(routes);
        tokio::select! {
            served = serving => served?,
            () = stop.cancelled() => {}
        }
        Ok(())
    }

    /// Keeps the figures true until `stop`.
    pub async fn observe(&self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.store.config.sweep_every) => {}
            }
            health::tidy();
            if let Err(error) = gauges::observe(&self.store.db).await {
                tracing::warn!(%error, "the gauges could not be read");
            }
        }
    }

    /// With the three pages of those who watch.
    pub(super) fn watched(&self, routes: Route) -> Route {
        let ready = Ready {
            db: self.store.db.clone(),
            shared: self.store.shared.clone(),
        };
        routes
            .at("/healthz", get(health::alive))
            .at("/readyz", get(ready))
            .at("/metrics", get(Metrics))
    }
}
