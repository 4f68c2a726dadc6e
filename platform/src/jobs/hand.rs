//! From hand to hand: jobs that begin where they are enqueued, without a look into the queue.
//!
//! A process that enqueues and works may begin what it has just committed. The job is written as taken
//! by this process's worker, so nobody else takes it, and it begins once the commit is through. It is a
//! job like any other all the same: if this process dies it runs elsewhere, when its worker counts as
//! dead. Only so many are under way at a time; what comes beyond that waits in the queue.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

use super::{
    Ended, Job, JobId,
    run::{unless_it_panics, until_done},
    store::Store,
};
use crate::db::{Db, Gather};

/// Jobs in one acknowledgement.
const LARGEST: usize = 200;

/// How long after a commit of which nobody knows whether it happened it surely has, or has not:
/// longer than PostgreSQL lets a statement run.
const UNTIL_KNOWN: Duration = Duration::from_secs(20);

/// The hand of this process's worker; empty while there is none.
#[derive(Clone)]
pub struct Hand(Arc<Inner>);

struct Inner {
    store: Store,
    worker: Mutex<Option<Worker>>,
    slots: Arc<Semaphore>,
    done: Gather<JobId, ()>,
}

/// Whose hand it is.
#[derive(Clone)]
struct Worker {
    name: Arc<str>,
    running: TaskTracker,
}

impl fmt::Debug for Hand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hand").finish_non_exhaustive()
    }
}

/// Room for one job, held from before it is written until it has ended.
///
/// Dropped after the job was perhaps written and before it began, it leaves the job to the queue.
pub struct Grip {
    hand: Hand,
    worker: Worker,
    written: Option<JobId>,
    _slot: OwnedSemaphorePermit,
    /// Whoever stops waits for it: what is written in its name must not come after the handing back.
    _held: TaskTrackerToken,
}

impl Hand {
    /// For at most `size` jobs of a kind at a time.
    pub fn new<J: Job>(db: Db, size: usize) -> Self {
        let store = Store {
            db,
            queue: J::QUEUE,
        };
        let of_done = store.clone();
        Self(Arc::new(Inner {
            store,
            worker: Mutex::default(),
            slots: Arc::new(Semaphore::new(size)),
            done: Gather::new(LARGEST, move |ids| {
                let store = of_done.clone();
                Box::pin(async move {
                    let all: Vec<&str> = ids.iter().map(JobId::as_str).collect();
                    store.remove(&all).await?;
                    Ok(vec![(); ids.len()])
                })
            }),
        }))
    }

    fn worker(&self) -> MutexGuard<'_, Option<Worker>> {
        self.0.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on jobs may be taken in the name of this worker, which is registered.
    pub(super) fn open(&self, name: &str, running: &TaskTracker) {
        *self.worker() = Some(Worker {
            name: name.into(),
            running: running.clone(),
        });
    }

    /// From now on none may be taken.
    pub(super) fn close(&self) {
        *self.worker() = None;
    }

    /// Room for one job, if there is any now.
    pub fn take(&self) -> Option<Grip> {
        // The token while the hand is open: whoever closes it waits for those that were taken before.
        let (worker, held) = {
            let worker = self.worker();
            let worker = worker.as_ref()?;
            (worker.clone(), worker.running.token())
        };
        let slot = self.0.slots.clone().try_acquire_owned().ok()?;
        Some(Grip {
            hand: self.clone(),
            _held: held,
            worker,
            written: None,
            _slot: slot,
        })
    }
}

impl Grip {
    /// The worker in whose name the job is to be written.
    pub fn worker(&self) -> &Arc<str> {
        &self.worker.name
    }

    /// Notes which job is about to be written in the worker's name.
    pub fn writes(&mut self, id: JobId) {
        self.written = Some(id);
    }

    /// Lets go: the job was surely not written.
    pub fn release(mut self) {
        self.written = None;
    }

    /// Begins the job, which is committed.
    pub fn begin(mut self, work: impl Future<Output = Ended> + Send + 'static) {
        let Some(id) = self.written.take() else {
            return;
        };
        let running = self.worker.running.clone();
        running.spawn(async move {
            // All of it, so that the slot is taken until the end.
            let grip = self;
            let store = &grip.hand.0.store;
            let ended = unless_it_panics(store, &grip.worker.name, &id, work).await;
            if ended == Ended::NotBegun {
                // Marked from the start: left like this, it would count as lost.
                let given_back = store.give_back(&grip.worker.name, &[id.as_str()]).await;
                if let Err(error) = given_back {
                    tracing::warn!(%error, "a job that was not begun could not be given back");
                }
            }
            if ended == Ended::Settled {
                let done = || grip.hand.0.done.get(id.clone());
                until_done("acknowledging a job", done).await;
            }
        });
    }
}

impl Drop for Grip {
    fn drop(&mut self) {
        if let Some(id) = self.written.take() {
            let (hand, worker) = (self.hand.clone(), self.worker.clone());
            let running = worker.running.clone();
            running.spawn(give_back(hand, worker, id));
        }
    }
}

/// Leaves a job of which nobody knows whether it was committed to the queue, once that is sure.
async fn give_back(hand: Hand, worker: Worker, id: JobId) {
    tokio::time::sleep(UNTIL_KNOWN).await;
    let ids = [id.as_str()];
    let store = &hand.0.store;
    until_done("giving a job back", || store.give_back(&worker.name, &ids)).await;
}
