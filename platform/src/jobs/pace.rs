//! When a worker looks for jobs: at once when this process has enqueued some, every 10 ms while there
//! is work, and ten times a second when there has been none for a while.
//!
//! A commit of this process that enqueued a job wakes its workers, and wakes that come thick and fast are
//! taken together: each look costs the same whether it finds one job or a hundred. Jobs of other nodes,
//! and jobs whose time has come, are found by looking. An idle process costs ten cheap queries a second and queue.

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

const BUSY: Duration = Duration::from_millis(10);
const IDLE: Duration = Duration::from_millis(100);

/// How long after its last job a worker still counts as busy.
const CALM: Duration = Duration::from_secs(2);

/// Wakes that are followed at once, when there were none before.
const BURST: u32 = 4;

/// How long it takes until one more may be.
const EACH: Duration = Duration::from_millis(8);

/// The pace of one worker.
pub(super) struct Pace {
    enqueued: Arc<Notify>,
    notified: Pin<Box<OwnedNotified>>,
    sleep: Pin<Box<Sleep>>,
    interval: Duration,
    /// When all of the burst is back.
    rested: Instant,
}

impl Pace {
    /// The pace of a worker that `enqueued` wakes.
    pub(super) fn new(enqueued: Arc<Notify>) -> Self {
        Self {
            notified: Box::pin(enqueued.clone().notified_owned()),
            enqueued,
            sleep: Box::pin(sleep(BUSY)),
            interval: BUSY,
            rested: Instant::now(),
        }
    }

    /// Whether a wake is followed at once.
    fn follows(&mut self, now: Instant) -> bool {
        let rested = self.rested.max(now) + EACH;
        let follows = rested - now <= EACH * BURST;
        if follows {
            self.rested = rested;
        }
        follows
    }
}

impl PollStrategy for Pace {
    fn poll_drive(&mut self, cx: &mut Context<'_>, _: &PollSnapshot) -> Poll<Option<()>> {
        let mut due = false;
        while self.notified.as_mut().poll(cx).is_ready() {
            self.notified = Box::pin(self.enqueued.clone().notified_owned());
            let now = Instant::now();
            // Soon, or soon once more: a query that is running now may have begun before the commit.
            let soon = now + BUSY;
            if self.sleep.deadline() > soon {
                self.sleep.as_mut().reset(soon);
            }
            due |= self.follows(now);
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::{sync::Notify, time::Instant};

    use super::{BURST, EACH, Pace};

    #[tokio::test]
    async fn a_few_wakes_are_followed_at_once_and_a_flood_of_them_evenly() {
        let mut pace = Pace::new(Arc::new(Notify::new()));
        let mut now = Instant::now();
        for _ in 0..BURST {
            assert!(pace.follows(now));
        }
        assert!(!pace.follows(now));
        for _ in 0..10 {
            now += EACH;
            assert!(pace.follows(now));
            assert!(!pace.follows(now));
        }
        now += EACH * 100;
        assert!((0..BURST).all(|_| pace.follows(now)));
        assert!(!pace.follows(now));
    }
}
