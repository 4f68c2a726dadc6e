//! Room for attempts, per endpoint and per project: what keeps a slow tenant from taking every slot.
//!
//! An endpoint has room for so many requests. Whoever finds it full waits, as long as the waiting
//! room, which all endpoints share, and the project's part of the process's slots are not full;
//! otherwise it is put off, to a time that grows with those put off before and with how long this
//! endpoint's requests take: a fast one is kept busy, one that hangs is asked rarely.

use std::{
    collections::{BTreeMap, HashMap, HashSet, hash_map::Entry},
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{deliveries::DeliveryId, endpoints::EndpointId};
use crate::{contract::auth::ProjectId, db::Timestamp};

/// The least time that somebody is put off by.
const PUT_OFF: Duration = Duration::from_secs(1);

/// The most time that somebody is put off by, so that no delivery waits long for an endpoint that
/// has become fast again.
const LONGEST: Duration = Duration::from_secs(30);

/// The rooms of one process.
#[derive(Clone, Debug)]
pub struct Rooms {
    size: usize,
    waiting_room: usize,
    project_part: usize,
    endpoints: Arc<Mutex<HashMap<EndpointId, Weak<Room>>>>,
    waiting: Arc<Counts<()>>,
    projects: Arc<Counts<ProjectId>>,
}

/// The room of one endpoint.
#[derive(Debug)]
struct Room {
    size: usize,
    slots: Arc<Semaphore>,
    pace: Mutex<Pace>,
}

/// How fast an endpoint takes requests, and when the next one that was put off may come back.
#[derive(Debug)]
struct Pace {
    usual: Duration,
    next: Timestamp,
    /// When those that are there now came, by number; the oldest first.
    there: BTreeMap<u64, Instant>,
    came: u64,
}

/// A place at an endpoint, free again when dropped.
#[derive(Debug)]
pub struct Place {
    room: Arc<Room>,
    number: u64,
    _slot: OwnedSemaphorePermit,
    _of_project: Counted<ProjectId>,
}

impl Rooms {
    /// Rooms for `size` requests each, of a process that makes `concurrency` attempts at a time.
    pub fn new(size: usize, concurrency: usize) -> Self {
        Self {
            size,
            waiting_room: concurrency / 4,
            project_part: concurrency.div_ceil(2),
            endpoints: Arc::default(),
            waiting: Arc::default(),
            projects: Arc::default(),
        }
    }

    /// A place, perhaps after waiting; `Err` with the time to come back when there is too little room.
    pub(super) async fn enter(
        &self,
        project: ProjectId,
        endpoint: EndpointId,
    ) -> Result<Place, Timestamp> {
        let room = self.of(endpoint);
        let of_project = Counts::add(&self.projects, project, self.project_part)
            .ok_or_else(|| room.come_back())?;
        let slot = if let Ok(slot) = room.slots.clone().try_acquire_owned() {
            slot
        } else {
            let _waiting = Counts::add(&self.waiting, (), self.waiting_room)
                .ok_or_else(|| room.come_back())?;
            // The semaphore is never closed.
            let slot = room.slots.clone().acquire_owned().await;
            slot.map_err(|_| room.come_back())?
        };
        Ok(Place {
            number: room.arrive(),
            room,
            _slot: slot,
            _of_project: of_project,
        })
    }

    /// A place, if one is free now.
    pub(super) fn try_enter(&self, project: ProjectId, endpoint: EndpointId) -> Option<Place> {
        let room = self.of(endpoint);
        let slot = room.slots.clone().try_acquire_owned().ok()?;
        let of_project = Counts::add(&self.projects, project, self.project_part)?;
        Some(Place {
            number: room.arrive(),
            room,
            _slot: slot,
            _of_project: of_project,
        })
    }

    fn of(&self, endpoint: EndpointId) -> Arc<Room> {
        let mut endpoints = locked(&self.endpoints);
        if let Some(room) = endpoints.get(&endpoint).and_then(Weak::upgrade) {
            return room;
        }
        if endpoints.len() >= 1_024 {
            endpoints.retain(|_, room| room.strong_count() > 0);
        }
        let room = Arc::new(Room {
            size: self.size,
            slots: Arc::new(Semaphore::new(self.size)),
            pace: Mutex::new(Pace {
                usual: Duration::from_millis(50),
                next: Timestamp::now(),
                there: BTreeMap::new(),
                came: 0,
            }),
        });
        endpoints.insert(endpoint, Arc::downgrade(&room));
        room
    }
}

impl Place {
    /// Notes how long a request took.
    pub(super) fn took(&self, duration: Duration) {
        let mut pace = locked(&self.room.pace);
        pace.usual = (pace.usual * 7 + duration) / 8;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        locked(&self.room.pace).there.remove(&self.number);
    }
}

impl Room {
    fn arrive(&self) -> u64 {
        let mut pace = locked(&self.pace);
        pace.came += 1;
        let number = pace.came;
        pace.there.insert(number, Instant::now());
        number
    }

    fn come_back(&self) -> Timestamp {
        let mut pace = locked(&self.pace);
        let now = Timestamp::now();
        // One that began to hang shows it by those that are still there.
        let oldest = pace.there.first_key_value();
        let age = oldest.map_or(Duration::ZERO, |(_, came)| came.elapsed());
        // Twice as many come back as are expected to find room: the estimate may be too low.
        let step =
            pace.usual.max(age) / u32::try_from(self.size.saturating_mul(2)).unwrap_or(u32::MAX);
        let at = pace.next.max(now + PUT_OFF);
        pace.next = at + step;
        at.min(now + LONGEST)
    }
}

/// How many there are of each.
#[derive(Debug)]
struct Counts<K: Eq + Hash>(Mutex<HashMap<K, usize>>);

impl<K: Eq + Hash> Default for Counts<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// One of those counted, until dropped.
#[derive(Debug)]
struct Counted<K: Eq + Hash + Copy>(Arc<Counts<K>>, K);

impl<K: Eq + Hash + Copy> Counts<K> {
    fn add(counts: &Arc<Self>, key: K, most: usize) -> Option<Counted<K>> {
        let mut all = locked(&counts.0);
        let count = all.entry(key).or_insert(0);
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Counted(counts.clone(), key))
    }
}

impl<K: Eq + Hash + Copy> Drop for Counted<K> {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = locked(&self.0.0).entry(self.1) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }
}

/// The attempts that one process is making.
#[derive(Clone, Debug, Default)]
pub struct Running(Arc<Mutex<HashSet<(DeliveryId, i64)>>>);

/// An attempt that is being made, until dropped.
#[derive(Debug)]
pub(super) struct RunningAttempt(Running, (DeliveryId, i64));

impl Running {
    /// Begins an attempt, unless somebody is at it.
    pub(super) fn begin(&self, delivery: DeliveryId, number: i64) -> Option<RunningAttempt> {
        let attempt = (delivery, number);
        locked(&self.0)
            .insert(attempt)
            .then(|| RunningAttempt(self.clone(), attempt))
    }
}

impl Drop for RunningAttempt {
    fn drop(&mut self) {
        locked(&self.0.0).remove(&self.1);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{DeliveryId, EndpointId, ProjectId, Rooms, Running};
    use crate::db::Timestamp;

    #[tokio::test]
    async fn whoever_waits_gets_the_place_that_becomes_free() {
        let rooms = Rooms::new(1, 8);
        let (project, endpoint) = (ProjectId::generate(), EndpointId::generate());
        let place = rooms.enter(project, endpoint).await;
        assert!(place.is_ok());
        let waiting = rooms.enter(project, endpoint);
        let leaving = async { drop(place) };
        let (entered, ()) = tokio::join!(waiting, leaving);
        assert!(entered.is_ok());
    }

    #[tokio::test]
    async fn a_project_with_many_slow_endpoints_leaves_room_for_others() {
        let rooms = Rooms::new(4, 16);
        let (slow, other) = (ProjectId::generate(), ProjectId::generate());
        let mut places = Vec::new();
        for _ in 0..100 {
            places.extend(rooms.enter(slow, EndpointId::generate()).await);
        }
        assert_eq!(places.len(), 8, "half of the slots");
        assert!(rooms.enter(other, EndpointId::generate()).await.is_ok());
        places.pop();
        assert!(rooms.enter(slow, EndpointId::generate()).await.is_ok());
    }

    #[tokio::test]
    async fn those_put_off_come_back_one_after_the_other_and_later_at_a_slow_endpoint() {
        let rooms = Rooms::new(1, 2);
        let (project, endpoint) = (ProjectId::generate(), EndpointId::generate());
        let place = rooms.enter(project, endpoint).await.expect("a place");
        for _ in 0..100 {
            place.took(Duration::from_secs(2));
        }
        let begun = Timestamp::now();
        let mut last = begun;
        for _ in 0..100 {
            let at = rooms.enter(project, endpoint).await.expect_err("no room");
            assert!(at >= last && at <= Timestamp::now() + Duration::from_secs(30));
            last = at;
        }
        assert!(last.since(begun) >= Duration::from_secs(20));
    }

    #[test]
    fn an_attempt_is_made_once_at_a_time() {
        let running = Running::default();
        let delivery = DeliveryId::generate();
        let first = running.begin(delivery, 1);
        assert!(first.is_some() && running.begin(delivery, 1).is_none());
        assert!(running.begin(delivery, 2).is_some());
        drop(first);
        assert!(running.begin(delivery, 1).is_some());
    }
}
