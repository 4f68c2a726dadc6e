//! `/healthz`, `/readyz` and `/metrics`, for whoever runs the process.

use std::{sync::OnceLock, time::Duration};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use poem::{Endpoint, Request, Response, handler, http::StatusCode};
use serde_json::json;

use crate::{db::Db, shared::Shared};

/// Says that the process lives.
#[handler]
pub fn alive() -> Response {
    answer(StatusCode::OK, &json!({"status": "ok"}))
}

/// Says whether the process can do its work.
#[derive(Debug)]
pub struct Ready {
    /// The database.
    pub db: Db,
    /// Redis, if there is one.
    pub shared: Option<Shared>,
}

impl Endpoint for Ready {
    type Output = Response;

    async fn call(&self, _: Request) -> poem::Result<Response> {
        let ping = tokio::time::timeout(Duration::from_secs(2), self.db.ping()).await;
        // Without Redis the process works on, so it is told and does not count.
        let redis = match &self.shared {
            None => "none",
            Some(shared) if shared.ping().await.is_ok() => "ok",
            Some(_) => "does not answer; SQL and the process do its work",
        };
        Ok(match ping {
            Ok(Ok(())) => answer(
                StatusCode::OK,
                &json!({"status": "ready", "database": "ok", "redis": redis}),
            ),
            failed => {
                tracing::warn!(?failed, "not ready: the database does not answer");
                answer(
                    StatusCode::SERVICE_UNAVAILABLE,
                    &json!({"status": "unavailable", "database": "does not answer", "redis": redis}),
                )
            }
        })
    }
}

fn answer(status: StatusCode, body: &serde_json::Value) -> Response {
    Response::builder()
        .status(status)
        .content_type("application/json")
        .body(body.to_string())
}

/// The figures of this process, whoever counts them.
static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// From now on this process counts.
pub fn install() {
    RECORDER.get_or_init(|| {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        if metrics::set_global_recorder(recorder).is_err() {
            tracing::warn!("another metrics recorder is installed");
        }
        handle
    });
}

/// Sums up what was measured since the last time, which is kept one by one until then: where nobody asks
/// for the figures it would grow for ever.
pub fn tidy() {
    if let Some(figures) = RECORDER.get() {
        figures.run_upkeep();
    }
}

/// The figures, in the text form of Prometheus.
#[derive(Debug)]
pub struct Metrics;

impl Endpoint for Metrics {
    type Output = Response;

    async fn call(&self, _: Request) -> poem::Result<Response> {
        tidy();
        let figures = RECORDER.get().map(PrometheusHandle::render);
        Ok(Response::builder()
            .content_type("text/plain; version=0.0.4")
            .body(figures.unwrap_or_default()))
    }
}
