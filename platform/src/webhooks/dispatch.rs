//! Dispatch: deliveries that begin where their event was accepted, as soon as that is committed.
//!
//! Only where this process also works, has a slot, and there is room at the endpoint at this moment;
//! all others wait in the queue like any job. So a fresh webhook does not stand behind a backlog, and one for
//! an endpoint that hangs takes nothing but the endpoint's own room.

use std::sync::{Arc, OnceLock};

use super::{
    endpoints::EndpointId,
    planning::DeliverWebhook,
    rooms::Place,
    worker::{Fresh, HeadStart, Worker},
};
use crate::{
    contract::auth::ProjectId,
    jobs::{Grip, Hand, JobId, Taken},
};

/// What begins deliveries in this process; nothing does before [`Dispatch::start`].
#[derive(Clone)]
pub struct Dispatch {
    hand: Hand,
    worker: Arc<OnceLock<Worker>>,
}

/// A slot and a place for one delivery. Dropped when its job may have been written, it leaves the job to
/// the queue.
pub(super) struct Start {
    grip: Grip,
    place: Place,
    worker: Worker,
}

impl Dispatch {
    /// Through this hand.
    pub fn new(hand: Hand) -> Self {
        Self {
            hand,
            worker: Arc::default(),
        }
    }

    /// Lets `worker` make the attempts from now on.
    pub fn start(&self, worker: Worker) {
        // Who came first stays.
        let _ = self.worker.set(worker);
    }

    /// The hand, for whoever runs the worker's queue.
    pub fn hand(&self) -> &Hand {
        &self.hand
    }

    /// Room for a delivery to begin at once, if there is any.
    pub(super) fn take(&self, project: ProjectId, endpoint: EndpointId) -> Option<Start> {
        let worker = self.worker.get()?;
        let grip = self.hand.take()?;
        let place = worker.rooms.try_enter(project, endpoint)?;
        Some(Start {
            grip,
            place,
            worker: worker.clone(),
        })
    }
}

impl Start {
    /// In whose name its job is to be written.
    pub(super) fn worker(&self) -> &Arc<str> {
        self.grip.worker()
    }

    /// Notes which job is about to be written.
    pub(super) fn writes(&mut self, id: JobId) {
        self.grip.writes(id);
    }

    /// Lets go: nothing was written.
    pub(super) fn release(self) {
        self.grip.release();
    }

    /// Begins, once the job is committed.
    pub(super) fn begin(self, taken: Taken<DeliverWebhook>, event: Arc<Fresh>) {
        let Self {
            grip,
            place,
            worker,
        } = self;
        let start = Some(HeadStart { place, event });
        grip.begin(Box::pin(
            async move { worker.deliver_from(taken, start).await },
        ));
    }
}
