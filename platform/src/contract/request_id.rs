//! `X-Request-Id: req_<ULID>` on every response, and in every log line of the request.

use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;
use poem::{Endpoint, IntoResponse, Middleware, Request, Response, http::HeaderValue};
use tracing::Instrument as _;

use crate::{
    contract::{ApiError, error},
    db::{Id, Kind},
};

/// A request, inbound or outbound.
pub struct RequestKind;

impl Kind for RequestKind {
    const PREFIX: &'static str = "req";
}

/// The id of a request.
pub type RequestId = Id<RequestKind>;

tokio::task_local! {
    static CURRENT: RequestId;
}

/// The id of the request that this task answers; a new one outside of any.
pub fn current() -> RequestId {
    CURRENT
        .try_with(|id| *id)
        .unwrap_or_else(|_| RequestId::generate())
}

/// Runs a future as part of the request `id`; for work that goes on in a task of its own.
pub fn within<F: Future>(id: RequestId, work: F) -> impl Future<Output = F::Output> {
    CURRENT.scope(id, work)
}

/// Gives each request its id and each failure its problem body; the outermost layer.
#[derive(Debug)]
pub struct RequestIds;

impl<E: Endpoint> Middleware<E> for RequestIds {
    type Output = RequestIdsEndpoint<E>;

    fn transform(&self, inner: E) -> Self::Output {
        RequestIdsEndpoint(inner)
    }
}

/// See [`RequestIds`].
#[derive(Debug)]
pub struct RequestIdsEndpoint<E>(E);

impl<E: Endpoint> Endpoint for RequestIdsEndpoint<E> {
    type Output = Response;

    async fn call(&self, request: Request) -> poem::Result<Response> {
        let id = RequestId::generate();
        let span = tracing::info_span!("request", %id, method = %request.method(), path = request.uri().path());
        CURRENT
            .scope(id, async move {
                let answered = AssertUnwindSafe(self.0.call(request)).catch_unwind().await;
                let mut response = match answered {
                    Ok(Ok(response)) => response.into_response(),
                    Ok(Err(failure)) => error::into_response(failure),
                    Err(_) => ApiError::internal("a handler panicked").into_response(),
                };
                if let Ok(value) = HeaderValue::from_str(&id.to_string()) {
                    response.headers_mut().insert("x-request-id", value);
                }
                tracing::debug!(status = response.status().as_u16(), "answered");
                Ok(response)
            })
            .instrument(span)
            .await
    }
}
