//! `botix serve`.

use futures::FutureExt as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::CommandResult;
use crate::{
    app::{App, Bound, Role, Store, together},
    config::Config,
    contract::idempotency::Protection,
};

pub(super) async fn run(config: Config, roles: &[Role], protection: Protection) -> CommandResult {
    let stop = stop_signal()?;
    let api = roles.contains(&Role::Api);
    // Bound before the database is opened: a taken address is told at once.
    let bound = if api {
        Some(Bound::public(&config).await?)
    } else {
        None
    };
    let monitor = Bound::monitor(&config).await?;
    let local_url = bound.as_ref().map_or_else(
        || format!("http://{}", config.listen),
        |bound| bound.local_url.clone(),
    );
    let store = Store::open(config).await?;
    if let Some(shared) = &store.shared {
        // The log says so where Redis is away; the process starts all the same.
        let _ = shared.ping().await;
    }
    let app = App::new(store, &local_url, protection);
    if api {
        println!("listening on {local_url}");
    }
    tracing::info!(?roles, public_url = app.public_url(), "started");
    let serving = async {
        match bound {
            Some(bound) => app.serve(bound, stop.clone()).await,
            None => Ok(()),
        }
    };
    let working = async {
        if roles.contains(&Role::Worker) {
            app.work(api, stop.clone()).await
        } else {
            Ok(())
        }
    };
    // Whoever watches sees a stopping process to its end.
    let ended = CancellationToken::new();
    let watched = async {
        match monitor {
            Some(bound) => app.be_watched(bound, ended.clone()).await,
            None => Ok(()),
        }
    };
    let observing = app.observe(ended.clone()).map(Ok);
    let doing = async {
        together([serving.boxed_local(), working.boxed_local()]).await?;
        ended.cancel();
        Ok(())
    };
    together([
        doing.boxed_local(),
        watched.boxed_local(),
        observing.boxed_local(),
    ])
    .await?;
    tracing::info!("stopped");
    Ok(())
}

/// A token that SIGTERM or Ctrl-C cancels.
pub(super) fn stop_signal() -> std::io::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let token = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        // First of all: whatever the log does, the process stops.
        token.cancel();
        tracing::info!("stopping: finishing what is in flight");
    });
    Ok(stop)
}
