//! The way into the public API: every request below `/public/v1` passes here.
//!
//! Order: authentication, scope, rate limit, then for a mutation the form of its key, the size of its body and
//! its idempotent execution. Nothing below this layer can be reached around it. Whatever the answer to a
//! request that uses a deprecated thing is, it says so.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _};
use poem::{Endpoint, Middleware, Request, Response, http::Method};

use crate::{
    contract::{
        ApiError, Code,
        auth::{self, Caller, Keys},
        deprecation::{Deprecations, Used},
        error,
        idempotency::{Asked, Idempotency, Key, fingerprint},
        rate_limit::{RateLimits, Standing},
        routes::Routes,
    },
    db,
    shared::Circuit,
};

const MIB: usize = 1 << 20;

/// How long a client may take to send a body.
const BODY_PATIENCE: Duration = Duration::from_mins(1);

/// How long a read may take.
const READ_PATIENCE: Duration = Duration::from_secs(30);

/// The largest body an operation takes, in bytes.
fn body_limit(path: &str) -> usize {
    if path == "/plugins" || (path.starts_with("/plugins/") && path.ends_with("/versions")) {
        16 * MIB
    } else if path == "/catalog/imports" {
        32 * MIB
    } else {
        MIB
    }
}

/// The layer in front of the typed handlers.
#[derive(Debug)]
pub struct Contract {
    /// Where keys are looked up.
    pub keys: Keys,
    /// What executes mutations.
    pub idempotency: Idempotency,
    /// Which methods each path takes.
    pub routes: Routes,
    /// How much projects may ask.
    pub rate_limits: RateLimits,
    /// What turns requests away at once while the store is out of reach.
    pub store: Arc<Circuit>,
    /// What is deprecated.
    pub deprecations: Deprecations,
}

impl<E: Endpoint + 'static> Middleware<E> for Contract {
    type Output = ContractEndpoint<E>;

    fn transform(&self, inner: E) -> Self::Output {
        ContractEndpoint {
            keys: self.keys.clone(),
            idempotency: self.idempotency.clone(),
            routes: self.routes.clone(),
            rate_limits: self.rate_limits.clone(),
            store: self.store.clone(),
            deprecations: self.deprecations.clone(),
            inner: Arc::new(inner),
        }
    }
}

/// See [`Contract`].
#[derive(Debug)]
pub struct ContractEndpoint<E> {
    keys: Keys,
    idempotency: Idempotency,
    routes: Routes,
    rate_limits: RateLimits,
    store: Arc<Circuit>,
    deprecations: Deprecations,
    inner: Arc<E>,
}

impl<E: Endpoint + 'static> Endpoint for ContractEndpoint<E> {
    type Output = Response;

    async fn call(&self, mut request: Request) -> poem::Result<Response> {
        if request.method() == Method::HEAD {
            // The connection leaves the body out, and says how long it would be.
            request.set_method(Method::GET);
        }
        let mut standing = None;
        let used = self.deprecations.used_by(&request);
        // On the heap, or every layer around this one would move it.
        let answering = Box::pin(self.answer(request, &used, &mut standing));
        let mut response = match answering.await {
            Ok(response) => response,
            Err(failure) => error::into_response(failure),
        };
        used.write(response.headers_mut());
        if let Some(standing) = standing {
            standing.write(response.headers_mut());
        }
        Ok(response)
    }
}

enum Admitted {
    Read,
    Mutation(Asked, bytes::Bytes),
}

impl<E: Endpoint + 'static> ContractEndpoint<E> {
    async fn answer(
        &self,
        mut request: Request,
        used: &Used<'_>,
        standing: &mut Option<Standing>,
    ) -> poem::Result<Response> {
        match self.admit(&mut request, used, standing).await {
            Ok(Admitted::Read) => {
                let reading = Box::pin(self.inner.get_response_result(request));
                db::within(READ_PATIENCE, reading)
                    .await
                    .map_err(ApiError::from)?
            }
            Ok(Admitted::Mutation(asked, body)) => Ok(self
                .idempotency
                .execute(self.inner.clone(), asked, request, body)
                .await?),
            Err(error) => {
                // A body left unread would reset the connection before the client sees the answer.
                discard(request.take_body().into_bytes_stream()).await;
                Err(error.into())
            }
        }
    }

    async fn admit(
        &self,
        request: &mut Request,
        used: &Used<'_>,
        standing: &mut Option<Standing>,
    ) -> Result<Admitted, ApiError> {
        let mutates = is_mutation(request.method());
        let caller = self.authenticate(request).await.map_err(|error| {
            if mutates {
                error.as_idempotency_unavailable()
            } else {
                error
            }
        })?;
        let project = caller.project;
        if let Err(error) = caller.require(request.method(), request.uri().path()) {
            *standing = Some(self.rate_limits.look(project).await);
            return Err(error);
        }
        let (stands, allowed) = self.rate_limits.count(project).await;
        *standing = Some(stands);
        allowed?;
        request.extensions_mut().insert(caller);
        let key = mutates
            .then(|| Key::from_headers(request.headers()))
            .transpose()?;
        self.routes.check(request.method(), request.uri().path())?;
        used.check()?;
        let Some(key) = key else {
            return Ok(Admitted::Read);
        };
        let body = tokio::time::timeout(BODY_PATIENCE, read_body(request))
            .await
            .map_err(|_| ApiError::invalid_body("", "the body did not arrive in time"))??;
        let fingerprint = fingerprint(
            request.method(),
            request.original_uri(),
            request.headers().get("content-type").map(AsRef::as_ref),
            &body,
        );
        Ok(Admitted::Mutation(
            Asked {
                project,
                key,
                fingerprint,
                path: request.original_uri().path().to_owned(),
            },
            body,
        ))
    }
}

impl<E> ContractEndpoint<E> {
    /// Who asks. It is the first that a request wants from the store: where that does not answer, the
    /// next requests are told so at once.
    async fn authenticate(&self, request: &Request) -> Result<Caller, ApiError> {
        let key = auth::presented(request.headers())?;
        if !self.store.admits(Instant::now()) {
            let code = Code::Unavailable;
            return Err(ApiError::new(code, "The store cannot be reached."));
        }
        let found = db::within(db::PATIENCE, self.keys.find(key)).await;
        match found.flatten() {
            Ok(caller) => {
                self.store.answered();
                caller.ok_or_else(auth::unauthenticated)
            }
            Err(error) => {
                if db::is_unavailable(&error) {
                    self.store.failed(Instant::now());
                }
                Err(error.into())
            }
        }
    }
}

/// Reads what is left of a refused request's body, within bounds.
async fn discard<E>(mut chunks: impl Stream<Item = Result<bytes::Bytes, E>> + Unpin) {
    let mut left = 40 * MIB;
    let reading = async {
        while let Some(Ok(chunk)) = chunks.next().await {
            left = left.saturating_sub(chunk.len());
            if left == 0 {
                return;
            }
        }
    };
    // Whoever sends slower than this gets the reset.
    let _ = tokio::time::timeout(Duration::from_secs(2), reading).await;
}

fn is_mutation(method: &Method) -> bool {
    matches!(
        *method,
        Method::POST | Method::PATCH | Method::PUT | Method::DELETE
    )
}

async fn read_body(request: &mut Request) -> Result<bytes::Bytes, ApiError> {
    let limit = body_limit(request.uri().path());
    let too_large = || {
        ApiError::new(
            Code::PayloadTooLarge,
            format!("The body may have at most {limit} bytes."),
        )
    };
    let announced = request
        .headers()
        .get("content-length")
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut chunks = request.take_body().into_bytes_stream();
    // What is announced may never come: memory grows with what arrives.
    let mut body = bytes::BytesMut::with_capacity(announced.unwrap_or(0).min(64 << 10));
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            ApiError::invalid_body("", format!("the body did not arrive whole: {error}"))
        })?;
        if body.len() + chunk.len() > limit {
            discard(chunks).await;
            return Err(too_large());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

trait Passing: Endpoint {
    /// Calls on, giving the response in its one type.
    async fn get_response_result(&self, request: Request) -> poem::Result<Response> {
        self.call(request)
            .await
            .map(poem::IntoResponse::into_response)
    }
}

impl<E: Endpoint> Passing for E {}
