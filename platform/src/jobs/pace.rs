//! When a worker looks for jobs: at once when this process has enqueued some, every 5 ms while there
//! is work, and ten times a second when there has been none for a while.
//!
//! A commit of this process that enqueued a job wakes its workers. Jobs of other nodes, and jobs
//! whose time has come, are found by looking. An idle process costs twenty cheap queries a second.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use apalis_core::backend::ext::poll_strategy::{PollSnapshot, PollStrategy};
use tokio::{
    sync::{Notify, futures::OwnedNotified},
    time::{Instant, Sleep, sleep},
};

const BUSY: Duration = Duration::from_millis(5);
const IDLE: Duration = Duration::from_millis(100);

/// How long after its last job a worker still counts as busy.
const CALM: Duration = Duration::from_secs(2);

/// The pace of one worker.
pub(super) struct Pace {
    enqueued: Arc<Notify>,
    notified: Pin<Box<OwnedNotified>>,
    sleep: Pin<Box<Sleep>>,
    interval: Duration,
}

impl Pace {
    /// The pace of a worker that `enqueued` wakes.
    pub(super) fn new(enqueued: Arc<Notify>) -> Self {
        Self {
            notified: Box::pin(enqueued.clone().notified_owned()),
            enqueued,
            sleep: Box::pin(sleep(BUSY)),
            interval: BUSY,
        }
    }
}

impl PollStrategy for Pace {
    fn poll_drive(&mut self, cx: &mut Context<'_>, _: &PollSnapshot) -> Poll<Option<()>> {
        let mut due = false;
        while self.notified.as_mut().poll(cx).is_ready() {
            self.notified = Box::pin(self.enqueued.clone().notified_owned());
            // Soon once more: a query that is running now may have begun before the commit.
            self.sleep.as_mut().reset(Instant::now() + BUSY);
            due = true;
        }
        while self.sleep.as_mut().poll(cx).is_ready() {
            let next = Instant::now() + self.interval;
            self.sleep.as_mut().reset(next);
            due = true;
        }
        if due {
            Poll::Ready(Some(()))
        } else {
            Poll::Pending
        }
    }

    fn on_poll(&mut self, snapshot: &PollSnapshot) {
        let busy = snapshot.total_ready > 0 && snapshot.idle_for < CALM;
        self.interval = if busy { BUSY } else { IDLE };
    }
}
