//! Room for requests in flight, per endpoint: what keeps a slow one from taking every slot.
//!
//! An endpoint has room for so many requests and a waiting room of a bounded part of the process's
//! slots. Whoever finds both full is put off, to a time that grows with those put off before and with
//! how long this endpoint's requests take: a fast one is kept busy, one that hangs is asked rarely.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::endpoints::EndpointId;
use crate::db::Timestamp;

/// The least time that somebody is put off by.
const PUT_OFF: Duration = Duration::from_secs(1);

/// The most time that somebody is put off by, so that no delivery waits long for an endpoint that
/// has become fast again.
const LONGEST: Duration = Duration::from_secs(30);

/// Rooms of all endpoints.
#[derive(Clone, Debug)]
pub struct Rooms {
    size: usize,
    waiting: usize,
    rooms: Arc<Mutex<HashMap<EndpointId, Weak<Room>>>>,
}

/// The room of one endpoint.
#[derive(Debug)]
pub(super) struct Room {
    size: usize,
    slots: Arc<Semaphore>,
    waiting_room: usize,
    waiting: AtomicUsize,
    pace: Mutex<Pace>,
}

/// How fast an endpoint takes requests, and when the next one that was put off may come back.
#[derive(Debug)]
struct Pace {
    usual: Duration,
    next: Timestamp,
}

/// A place in a room.
#[derive(Debug)]
pub(super) struct Place(
    #[allow(dead_code, reason = "held, and freed when dropped")] OwnedSemaphorePermit,
);

impl Rooms {
    /// Rooms for `size` requests each, of a process that makes `concurrency` attempts at a time.
    pub fn new(size: usize, concurrency: usize) -> Self {
        Self {
            size,
            waiting: concurrency / 4,
            rooms: Arc::default(),
        }
    }

    /// The room of an endpoint.
    pub(super) fn of(&self, endpoint: EndpointId) -> Arc<Room> {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(room) = rooms.get(&endpoint).and_then(Weak::upgrade) {
            return room;
        }
        if rooms.len() >= 1_024 {
            rooms.retain(|_, room| room.strong_count() > 0);
        }
        let room = Arc::new(Room {
            size: self.size,
            slots: Arc::new(Semaphore::new(self.size)),
            waiting_room: self.waiting,
            waiting: AtomicUsize::new(0),
            pace: Mutex::new(Pace {
                usual: Duration::from_millis(50),
                next: Timestamp::now(),
            }),
        });
        rooms.insert(endpoint, Arc::downgrade(&room));
        room
    }
}

impl Room {
    /// A place, after waiting for it; `Err` with the time to come back when the waiting room is full.
    pub(super) async fn enter(&self) -> Result<Place, Timestamp> {
        if let Ok(permit) = self.slots.clone().try_acquire_owned() {
            return Ok(Place(permit));
        }
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        if before >= self.waiting_room {
            return Err(self.come_back());
        }
        // The semaphore is never closed.
        self.slots
            .clone()
            .acquire_owned()
            .await
            .map(Place)
            .map_err(|_| self.come_back())
    }

    /// Notes how long a request took.
    pub(super) fn took(&self, duration: Duration) {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        pace.usual = (pace.usual * 7 + duration) / 8;
    }

    fn come_back(&self) -> Timestamp {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Timestamp::now();
        // Twice as many come back as are expected to find room: the estimate may be too low.
        let step = pace.usual / u32::try_from(self.size.saturating_mul(2)).unwrap_or(u32::MAX);
        let soonest = now + PUT_OFF;
        let at = if pace.next > soonest {
            pace.next
        } else {
            soonest
        };
        pace.next = at + step;
        at.min(now + LONGEST)
    }
}

struct Waiting<'w>(&'w AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{EndpointId, Rooms};
    use crate::db::Timestamp;

    #[tokio::test]
    async fn an_endpoint_has_its_own_room_and_an_empty_one_is_forgotten() {
        let rooms = Rooms::new(1, 0);
        let (one, two) = (EndpointId::generate(), EndpointId::generate());
        let room = rooms.of(one);
        let place = room.enter().await;
        assert!(place.is_ok());
        assert!(rooms.of(one).enter().await.is_err());
        assert!(rooms.of(two).enter().await.is_ok());
        drop(place);
        assert!(rooms.of(one).enter().await.is_ok());
    }

    #[tokio::test]
    async fn whoever_waits_gets_the_place_that_becomes_free() {
        let rooms = Rooms::new(1, 4);
        let room = rooms.of(EndpointId::generate());
        let place = room.enter().await;
        let waiting = room.enter();
        let leaving = async { drop(place) };
        let (entered, ()) = tokio::join!(waiting, leaving);
        assert!(entered.is_ok());
    }

    #[tokio::test]
    async fn those_put_off_come_back_one_after_the_other_and_later_at_a_slow_endpoint() {
        let rooms = Rooms::new(1, 0);
        let room = rooms.of(EndpointId::generate());
        let _place = room.enter().await;
        for _ in 0..100 {
            room.took(Duration::from_secs(2));
        }
        let begun = Timestamp::now();
        let mut last = begun;
        for _ in 0..100 {
            let at = room.enter().await.err();
            assert!(
                at.is_some_and(|at| at >= last && at <= Timestamp::now() + Duration::from_secs(30))
            );
            last = at.unwrap_or(last);
        }
        assert!(last.since(begun) >= Duration::from_secs(20));
    }
}
