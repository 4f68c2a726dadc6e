//! The way into the public API: every request below `/public/v1` passes here.
//!
//! Order: authentication, scope, then for a mutation the form of its key, the size of its body and
//! its idempotent execution. Nothing below this layer can be reached around it.

use std::sync::Arc;

use poem::{Body, Endpoint, Middleware, Request, Response, http::Method};

use crate::{
    contract::{
        ApiError, Code, auth,
        idempotency::{Asked, Idempotency, Key, fingerprint},
    },
    db::Db,
};

const MIB: usize = 1 << 20;

/// The largest body an operation takes, in bytes.
fn body_limit(path: &str) -> usize {
    if path == "/plugins" || (path.starts_with("/plugins/") && path.ends_with("/versions")) {
        16 * MIB
    } else if path == "/catalog/imports" {
        32 * MIB
    } else {
        // The data of an event may have 1 MiB; its envelope comes on top.
        MIB + 1024
    }
}

/// The layer in front of the typed handlers.
#[derive(Debug)]
pub struct Contract {
    /// Where keys are looked up.
    pub db: Db,
    /// What executes mutations.
    pub idempotency: Idempotency,
}

impl<E: Endpoint + 'static> Middleware<E> for Contract {
    type Output = ContractEndpoint<E>;

    fn transform(&self, inner: E) -> Self::Output {
        ContractEndpoint {
            db: self.db.clone(),
            idempotency: self.idempotency.clone(),
            inner: Arc::new(inner),
        }
    }
}

/// See [`Contract`].
#[derive(Debug)]
pub struct ContractEndpoint<E> {
    db: Db,
    idempotency: Idempotency,
    inner: Arc<E>,
}

impl<E: Endpoint + 'static> Endpoint for ContractEndpoint<E> {
    type Output = Response;

    async fn call(&self, mut request: Request) -> poem::Result<Response> {
        let mutates = is_mutation(request.method());
        let caller = auth::authenticate(&self.db, request.headers())
            .await
            .map_err(|error| if mutates { error.as_idempotency_unavailable() } else { error })?;
        caller.require(request.method(), request.uri().path())?;
        let project = caller.project;
        request.extensions_mut().insert(caller);
        if !mutates {
            return self.inner.get_response_result(request).await;
        }
        let key = Key::from_headers(request.headers())?;
        let body = read_body(&mut request).await?;
        let fingerprint = fingerprint(
            request.method(),
            request.original_uri(),
            request.headers().get("content-type").map(AsRef::as_ref),
            &body,
        );
        let asked = Asked { project, key, fingerprint };
        Ok(self.idempotency.execute(self.inner.clone(), asked, request, body).await?)
    }
}

fn is_mutation(method: &Method) -> bool {
    matches!(*method, Method::POST | Method::PATCH | Method::PUT | Method::DELETE)
}

async fn read_body(request: &mut Request) -> Result<bytes::Bytes, ApiError> {
    let limit = body_limit(request.uri().path());
    let too_large = || {
        ApiError::new(Code::PayloadTooLarge, format!("The body may have at most {limit} bytes."))
    };
    let announced = request
        .headers()
        .get("content-length")
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let body: Body = request.take_body();
    match body.into_bytes_limit(limit).await {
        Ok(bytes) => Ok(bytes),
        Err(poem::error::ReadBodyError::PayloadTooLarge) => Err(too_large()),
        Err(error) => Err(ApiError::invalid_body("", format!("the body did not arrive whole: {error}"))),
    }
}

trait Passing: Endpoint {
    /// Calls on, giving the response in its one type.
    async fn get_response_result(&self, request: Request) -> poem::Result<Response> {
        self.call(request).await.map(poem::IntoResponse::into_response)
    }
}

impl<E: Endpoint> Passing for E {}
