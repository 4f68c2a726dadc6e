//! A handler's side of a mutation: what it writes in, and how it says what it wrote.
//!
//! A handler that takes [`Work`] gets the mutation's transaction, open and with the key's lock, and can
//! neither commit nor roll back. One whose answer does not depend on what the store says takes [`Later`]
//! and leaves its write: it is made with the record once the answer is known, together with others. Nothing
//! is begun before a handler asks for it.

use std::{panic::AssertUnwindSafe, sync::Arc};

use futures::{FutureExt as _, future::BoxFuture};
use poem::{Endpoint, FromRequest, Request, RequestBody, Response};
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::{Asked, Ran, in_progress, record::Answer, record::Record};
use crate::{
    contract::{ApiError, Code, error},
    db::{Conn, Queryable, Tx},
};

/// The open transaction of a mutation, in the hands of its handler.
#[derive(Debug)]
pub struct Work(OwnedMutexGuard<Stage>);

/// Where a handler leaves a write that is made with its answer's record.
#[derive(Debug)]
pub struct Later(OwnedMutexGuard<Stage>);

/// A write that can be made once its answer is known, with others of its kind.
pub trait Deferred: Send + Sync {
    /// Commits the write together with the record; false where it has to be made alone, because the
    /// key is in use or was used, or for reasons of its own. Nothing is written then.
    fn together<'a>(
        &'a self,
        asked: &'a Asked,
        record: &'a Record,
    ) -> BoxFuture<'a, sqlx::Result<bool>>;

    /// Writes within a transaction.
    fn alone<'a>(&'a self, tx: &'a mut Tx) -> BoxFuture<'a, Result<(), ApiError>>;
}

/// How far the writing of one mutation is.
pub(super) enum Stage {
    /// Nobody asked for the transaction.
    Unopened,
    /// The handler works, or worked, in it.
    Open(Tx),
    /// The handler left its write.
    Left(Box<dyn Deferred>),
    /// There is nothing to execute: it was answered before, or the transaction did not begin.
    Over(Result<Ran, ApiError>),
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unopened => "Unopened",
            Self::Open(_) => "Open",
            Self::Left(_) => "Left",
            Self::Over(_) => "Over",
        })
    }
}

pub(super) type Opening = dyn Fn() -> BoxFuture<'static, Stage> + Send + Sync;

#[derive(Clone)]
struct Slot {
    stage: Arc<Mutex<Stage>>,
    open: Arc<Opening>,
}

impl Slot {
    fn of(request: &Request) -> Result<Self, ApiError> {
        let slot = request.extensions().get::<Self>().cloned();
        slot.ok_or_else(|| ApiError::internal("a mutation was mounted outside of its layer"))
    }
}

impl<'a> FromRequest<'a> for Work {
    async fn from_request(request: &'a Request, _: &mut RequestBody) -> poem::Result<Self> {
        let slot = Slot::of(request)?;
        let mut stage = slot.stage.lock_owned().await;
        if matches!(*stage, Stage::Unopened) {
            *stage = (slot.open)().await;
        }
        if matches!(*stage, Stage::Open(_)) {
            Ok(Self(stage))
        } else {
            // Whoever called the handler finds there why, and answers that.
            Err(in_progress().into())
        }
    }
}

impl<'a> FromRequest<'a> for Later {
    async fn from_request(request: &'a Request, _: &mut RequestBody) -> poem::Result<Self> {
        Ok(Self(Slot::of(request)?.stage.lock_owned().await))
    }
}

impl Later {
    /// Leaves the write.
    pub fn leave(mut self, write: impl Deferred + 'static) {
        *self.0 = Stage::Left(Box::new(write));
    }
}

impl Work {
    fn tx(&mut self) -> &mut Tx {
        match &mut *self.0 {
            Stage::Open(tx) => tx,
            _ => unreachable!("the stage was open when Work was made, and Work never changes it"),
        }
    }
}

impl Queryable for Work {
    fn conn(&mut self) -> Conn<'_> {
        self.tx().conn()
    }

    fn is_postgres(&self) -> bool {
        matches!(&*self.0, Stage::Open(tx) if tx.is_postgres())
    }

    fn settled(&mut self) {
        self.tx().settled();
    }

    fn doubt(&mut self) {
        self.tx().doubt();
    }

    fn announce(&mut self) {
        self.tx().announce();
    }
}

/// What a handler decided.
pub(super) enum Decided {
    /// 2xx: the business write stands.
    Done(Answer),
    /// A business 4xx: nothing was written, the answer stands.
    Refused(Answer),
    /// Anything else: nothing stands.
    Nothing(Response),
}

/// Runs the handler; `open` begins its transaction if it asks for one.
pub(super) async fn run(
    inner: &impl Endpoint,
    mut request: Request,
    body: bytes::Bytes,
    open: Arc<Opening>,
) -> Result<(Decided, Stage), ApiError> {
    let slot = Slot {
        stage: Arc::new(Mutex::new(Stage::Unopened)),
        open,
    };
    request.extensions_mut().insert(slot.clone());
    request.set_body(body);
    let called = AssertUnwindSafe(Box::pin(answer(inner, request)))
        .catch_unwind()
        .await;
    let mut stage = slot.stage.lock().await;
    let stage = std::mem::replace(&mut *stage, Stage::Unopened);
    let (response, is_decided) = called.unwrap_or_else(|panic| {
        let panic = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let error = ApiError::internal(format!("panic: {panic}"));
        (poem::IntoResponse::into_response(error), false)
    });
    if !is_decided {
        return Ok((Decided::Nothing(response), stage));
    }
    let is_success = response.status().is_success();
    let answer = Answer::read(response).await.map_err(ApiError::internal)?;
    let decided = if is_success {
        Decided::Done(answer)
    } else {
        Decided::Refused(answer)
    };
    Ok((decided, stage))
}

/// The response, and whether it is decided: a 2xx, or an error of a decided code.
async fn answer(inner: &impl Endpoint, request: Request) -> (Response, bool) {
    match inner.call(request).await {
        Ok(response) => {
            let response = poem::IntoResponse::into_response(response);
            let is_success = response.status().is_success();
            (response, is_success)
        }
        Err(failure) => {
            let known = failure.downcast_ref::<ApiError>().map(ApiError::code);
            let error = error::from_poem(failure).as_idempotency_unavailable();
            (
                poem::IntoResponse::into_response(error),
                known.is_some_and(Code::is_decided),
            )
        }
    }
}
