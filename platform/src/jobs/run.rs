//! Running the jobs of a queue: one worker after the other, and what they leave behind.
//!
//! A worker that loses the database ends, and the next one starts. What the first had begun goes on under its
//! name, so signs of life are given for it too, until all has ended; what it held and had not begun is
//! given back.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use apalis::{layers::WorkerBuilderExt as _, prelude::*};
use apalis_core::{error::BoxDynError, task::task_id::TaskId};
use futures::FutureExt as _;
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use ulid::Ulid;

use super::{
    Begin, Ended, Hand, Handler, Job, JobId, Taken,
    lanes::Lanes,
    pace::Pace,
    queue::{Brought, Queue},
    store::{self, Store},
};
use crate::db::{self, Db, announced};

/// How often a worker says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(3);

/// How long a worker gives no sign of life before it counts as dead.
const DEAD: Duration = Duration::from_secs(12);

/// How long nobody is judged by a process that has just started, or could not say itself that it lives: others
/// lost the database with it, and need a heartbeat and the time that a failing one takes.
const GRACE: Duration = Duration::from_secs(9);

/// How long a job that did not begin stays.
const UNTIL_UNACKNOWLEDGED: Duration = Duration::from_millis(200);

/// How long a stopping worker waits for the jobs that run.
const DRAIN: Duration = Duration::from_secs(35);

/// How a queue is worked on.
pub struct Run<J> {
    /// The database.
    pub db: Db,
    /// Jobs at a time.
    pub concurrency: usize,
    /// What does a job.
    pub handler: Handler<J>,
    /// Through which jobs may be handed to it.
    pub hand: Option<Hand>,
    /// What is known of its lanes.
    pub lanes: Option<Arc<dyn Lanes>>,
    /// What marks a job as begun before its handler gets it; nothing, where the handler sees to that.
    pub begin: Option<Begin>,
}

/// A worker, from its registration to the end of the last of its jobs.
struct Life {
    name: Arc<str>,
    running: TaskTracker,
}

/// The workers that one [`Run`] had and has; the last is the present one.
#[derive(Default)]
struct Lives(Mutex<Vec<Life>>);

impl Lives {
    fn all(&self) -> MutexGuard<'_, Vec<Life>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn names(&self) -> Vec<Arc<str>> {
        self.all().iter().map(|life| life.name.clone()).collect()
    }

    fn begin(&self, name: &str) -> TaskTracker {
        let running = TaskTracker::new();
        self.all().push(Life {
            name: name.into(),
            running: running.clone(),
        });
        running
    }
}

/// The name of the worker.
#[derive(Clone)]
struct Name(Arc<str>);

impl<J: Job> Run<J> {
    /// A queue without lanes, whose jobs are found by looking, and begun before anything is done.
    pub fn plain(db: Db, concurrency: usize, handler: Handler<J>) -> Self {
        Self {
            begin: Some(Begin::new(db.clone())),
            db,
            concurrency,
            handler,
            hand: None,
            lanes: None,
        }
    }

    /// Runs jobs until `stop`.
    ///
    /// After it no further job starts; this returns when those that run have ended, or after [`DRAIN`],
    /// and hands back those that were fetched and did not start.
    pub async fn until(self, stop: CancellationToken) {
        let lives = Lives::default();
        // A worker is stopped by dropping it: one that is told to stop waits for its jobs without looking
        // after its own query, which may hold the very connection that the jobs wait for.
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.live(&lives) => {}
            () = beat(&self.db, J::QUEUE, &lives) => {}
        }
        if let Some(hand) = &self.hand {
            hand.close();
        }
        tokio::select! {
            () = drain(&self.db, J::QUEUE, &lives) => {}
            // Others are not to take over what is still running.
            () = beat(&self.db, J::QUEUE, &lives) => {}
        }
    }

    /// One worker after the other.
    async fn live(&self, lives: &Lives) {
        let mut pause = Duration::from_millis(100);
        loop {
            let name = format!("{}-{}", J::QUEUE, Ulid::generate());
            let started = Instant::now();
            let brought = Brought {
                running: lives.begin(&name),
                hand: self.hand.clone(),
                lanes: self.lanes.clone(),
            };
            let ended = self.worker(&name, brought).await;
            if let Some(hand) = &self.hand {
                hand.close();
            }
            if started.elapsed() > Duration::from_secs(10) {
                pause = Duration::from_millis(100);
            }
            if let Err(error) = ended {
                tracing::warn!(queue = J::QUEUE, %error, ?pause, "a worker ended; the next one starts");
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }

    async fn worker(&self, name: &str, brought: Brought) -> Result<(), WorkerError> {
        let config = apalis_postgres::Config::default()
            .queue(J::QUEUE)
            .batch_size(self.concurrency.min(200))
            .heartbeat_interval(HEARTBEAT)
            .lock_tasks(false);
        let running = brought.running.clone();
        let queue = Queue::<J>::new(self.db.clone(), config, brought);
        let store = Store {
            db: self.db.clone(),
            queue: J::QUEUE,
        };
        WorkerBuilder::new(name)
            .backend(queue.poll_with_strategy(Pace::new(announced().clone())))
            .concurrency(self.concurrency)
            .data(self.handler.clone())
            .data(Name(name.into()))
            .data(self.begin.clone())
            .data(store)
            .parallelize(move |job| running.spawn(job))
            .build(handle::<J>)
            .run()
            .await
    }
}

async fn handle<J: Job>(
    job: J,
    id: TaskId,
    handler: Data<Handler<J>>,
    name: Data<Name>,
    begin: Data<Option<Begin>>,
    store: Data<Store>,
) -> Result<Ended, BoxDynError> {
    let taken = Taken {
        job,
        id: JobId(id.to_string()),
        worker: (*name).0.clone(),
        is_marked: false,
    };
    let (id, worker) = (taken.id.clone(), taken.worker.clone());
    let work = async {
        if let Some(begin) = &*begin
            && !until_done("beginning a job", || begin.mark(&taken)).await
        {
            return Ended::NotBegun;
        }
        handler(taken).await
    };
    let ended = unless_it_panics(&store, &worker, &id, work).await;
    if ended == Ended::NotBegun {
        // Its worker is gone before it could note an end.
        tokio::time::sleep(UNTIL_UNACKNOWLEDGED).await;
    }
    Ok(ended)
}

/// Does a job's work. If it panics, the job counts as lost and rests before it runs again.
pub(super) async fn unless_it_panics(
    store: &Store,
    worker: &str,
    id: &JobId,
    work: impl Future<Output = Ended>,
) -> Ended {
    if let Ok(ended) = AssertUnwindSafe(work).catch_unwind().await {
        return ended;
    }
    tracing::error!(
        queue = store.queue,
        job = id.as_str(),
        "a job panicked; it runs again later"
    );
    until_done("giving back a job that panicked", || {
        store.rest(worker, id.as_str())
    })
    .await;
    Ended::Removed
}

/// Says that workers live, for as long as it is polled, tidies up after those that ended, and takes over from
/// those of other processes that died.
async fn beat(db: &Db, queue: &'static str, lives: &Lives) {
    let store = Store {
        db: db.clone(),
        queue,
    };
    let mut judges_from = Instant::now() + GRACE;
    loop {
        let names = lives.names();
        let beating = async {
            store::beat(db, &names).await?;
            tidy(&store, lives).await?;
            // Whoever has not just said himself that he lives may not find that another is dead.
            if Instant::now() >= judges_from {
                store.recover(DEAD).await?;
            }
            Ok(())
        };
        if let Err(error) = db::within(db.patience(), beating).await.flatten() {
            tracing::warn!(queue, %error, "a worker could not say that it lives");
            judges_from = Instant::now() + GRACE;
        }
        tokio::time::sleep(HEARTBEAT).await;
    }
}

/// Gives back what workers held that ended, and forgets those whose jobs have ended too.
async fn tidy(store: &Store, lives: &Lives) -> sqlx::Result<()> {
    let names = lives.names();
    let Some((_, former)) = names.split_last() else {
        return Ok(());
    };
    for name in former {
        store.hand_back_unbegun(name).await?;
    }
    // Those that came meanwhile are not among `former`.
    (lives.all()).retain(|life| !life.running.is_empty() || !former.contains(&life.name));
    Ok(())
}

/// Waits for the jobs that run, and gives back to the queue what their workers hold.
///
/// Among these are jobs that ended and were not acknowledged any more; run again, they find that all
/// is settled.
async fn drain(db: &Db, queue: &'static str, lives: &Lives) {
    let store = Store {
        db: db.clone(),
        queue,
    };
    // Others may have at once what was not begun.
    for name in lives.names() {
        let handed_back = db::within(db::PATIENCE, store.hand_back_unbegun(&name)).await;
        if let Err(error) = handed_back.flatten() {
            tracing::warn!(queue, %error, "jobs that were not begun could not be handed back yet");
            break;
        }
    }
    let running: Vec<_> = (lives.all().iter())
        .map(|life| life.running.clone())
        .collect();
    let ending = async {
        for running in &running {
            running.close();
            running.wait().await;
        }
    };
    let have_ended = tokio::time::timeout(DRAIN, ending).await.is_ok();
    if !have_ended {
        tracing::warn!(
            queue,
            "some jobs did not end in time; they run again elsewhere"
        );
    }
    for name in lives.names() {
        let handed_back = db::within(db::PATIENCE, store.hand_back(&name, have_ended)).await;
        if let Err(error) = handed_back.flatten() {
            tracing::warn!(%error, "jobs could not be handed back; they run again when this worker counts as dead");
            return;
        }
    }
}

/// Tries a job's work again until it is done: while the database is away, nothing can be settled.
pub async fn until_done<T, F: Future<Output = sqlx::Result<T>>>(
    what: &str,
    work: impl Fn() -> F,
) -> T {
    let mut pause = Duration::from_millis(100);
    loop {
        match work().await {
            Ok(done) => return done,
            Err(error) => {
                tracing::warn!(what, %error, ?pause, "a job's work failed; trying again");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}
