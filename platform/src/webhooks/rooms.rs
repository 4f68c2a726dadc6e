//! Room for attempts, per endpoint and per project: what keeps slow tenants from taking every slot.
//!
//! An endpoint has room for so many requests. Of the slots of those who come from the queue, and of those who
//! begin where they were accepted, a project may hold half, and so may all endpoints together that are slow or have not
//! answered yet, of which those of one project half again. A few who find the room of a fast endpoint full wait at its door. All others are turned away, and their
//! jobs are parked until there are places ([`Lanes`](crate::jobs::Lanes)), the fresh ones before the others.

mod counts;
mod crowded;
mod running;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::endpoints::EndpointId;
use crate::contract::auth::ProjectId;
use counts::{Counted, Counts};
use crowded::Crowded;
pub(super) use crowded::lane;
pub use running::Running;

/// An endpoint whose requests take longer is a slow one.
const SLOW: Duration = Duration::from_secs(1);

/// Endpoints whose speed is remembered, beside those that have requests.
const REMEMBERED: usize = 10_000;

/// The rooms of one process.
#[derive(Clone, Debug)]
pub struct Rooms(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    size: usize,
    from_queue: Part,
    at_hand: Part,
    endpoints: Mutex<HashMap<EndpointId, Arc<Room>>>,
    waiting: Arc<Counts<EndpointId>>,
    crowded: Crowded,
}

/// The slots that attempts take which come from the queue, or those of attempts that begin where their event
/// was accepted: how many may be held so that one more is given.
#[derive(Debug)]
struct Part {
    projects: Arc<Counts<ProjectId>>,
    slow: Arc<Counts<()>>,
    slow_of: Arc<Counts<ProjectId>>,
    most_of_project: usize,
    /// At slow endpoints.
    most_slow: usize,
    /// At slow endpoints, of one project.
    most_slow_of: usize,
    /// At slow endpoints, if it is for the first request of an unknown one: so that it becomes known, however
    /// many hang.
    probing: usize,
}

/// One more of a project.
#[derive(Debug)]
struct Share {
    _of_project: Counted<ProjectId>,
    slow: Option<(Counted<()>, Counted<ProjectId>)>,
}

/// The room of one endpoint.
#[derive(Debug)]
struct Room {
    slots: Arc<Semaphore>,
    speed: Mutex<Speed>,
}

/// How fast an endpoint takes requests.
#[derive(Debug, Default)]
struct Speed {
    /// How long its requests took lately, once one has ended.
    usual: Option<Duration>,
    /// When those that are there now came, by number; the oldest first.
    there: BTreeMap<u64, Instant>,
    came: u64,
    /// How many left since the last request: their deliveries were cancelled, or their plugin failed.
    idle: u32,
}

/// A place at an endpoint, free again when dropped.
#[derive(Debug)]
pub struct Place {
    room: Arc<Room>,
    number: u64,
    _slot: OwnedSemaphorePermit,
    _share: Share,
}

impl Rooms {
    /// Rooms for `size` requests each, of a process that makes so many attempts from the queue at a time, and so
    /// many that begin where their event was accepted.
    pub fn new(size: usize, of_queue: usize, at_hand: usize) -> Self {
        Self(Arc::new(Inner {
            size,
            from_queue: Part::new(of_queue),
            at_hand: Part::new(at_hand),
            endpoints: Mutex::default(),
            waiting: Arc::default(),
            crowded: Crowded::default(),
        }))
    }

    /// A place for who comes from the queue, perhaps after waiting, if there is room.
    pub(super) async fn enter(&self, project: ProjectId, endpoint: EndpointId) -> Option<Place> {
        let room = self.of(endpoint);
        self.0.crowded.belongs(project, endpoint);
        let share = self.0.from_queue.share(project, &room)?;
        let slot = if let Ok(slot) = room.slots.clone().try_acquire_owned() {
            slot
        } else {
            if share.slow.is_some() {
                return None;
            }
            let _waiting = Counts::add(&self.0.waiting, endpoint, self.0.size / 4)?;
            // The semaphore is never closed.
            let slot = room.slots.clone().acquire_owned().await.ok()?;
            // It may have begun to hang meanwhile.
            if room.is_slow() {
                return None;
            }
            slot
        };
        Some(Place::new(room, slot, share))
    }

    /// A place for who begins where its event was accepted, if one is free now.
    pub(super) fn try_enter(&self, project: ProjectId, endpoint: EndpointId) -> Option<Place> {
        let room = self.of(endpoint);
        // Those that wait get half of what becomes free.
        if room.slots.available_permits() <= self.0.size / 2 && self.0.crowded.knows(endpoint) {
            return None;
        }
        let slot = room.slots.clone().try_acquire_owned().ok()?;
        let share = self.0.at_hand.share(project, &room)?;
        Some(Place::new(room, slot, share))
    }

    /// Notes that a delivery to this endpoint is about to be parked; false when too many endpoints are crowded
    /// for this one to be looked after.
    pub(super) fn is_to_park(&self, project: ProjectId, endpoint: EndpointId) -> bool {
        self.0.crowded.note(project, endpoint)
    }

    fn of(&self, endpoint: EndpointId) -> Arc<Room> {
        let mut endpoints = locked(&self.0.endpoints);
        if let Some(room) = endpoints.get(&endpoint) {
            return room.clone();
        }
        if endpoints.len() >= REMEMBERED {
            endpoints.retain(|_, room| Arc::strong_count(room) > 1);
        }
        let room = Arc::new(Room {
            slots: Arc::new(Semaphore::new(self.0.size)),
            speed: Mutex::default(),
        });
        endpoints.insert(endpoint, room.clone());
        room
    }
}

impl Part {
    fn new(slots: usize) -> Self {
        Self {
            projects: Arc::default(),
            slow: Arc::default(),
            slow_of: Arc::default(),
            most_of_project: slots.div_ceil(2),
            most_slow: slots.div_ceil(2),
            most_slow_of: slots.div_ceil(4),
            probing: (slots * 3).div_ceil(4),
        }
    }

    /// One more of a project at this endpoint, if there may be.
    fn share(&self, project: ProjectId, room: &Room) -> Option<Share> {
        let of_project = Counts::add(&self.projects, project, self.most_of_project)?;
        let slow = if room.is_slow() {
            Some((
                Counts::add(&self.slow, (), self.most_at(room))?,
                Counts::add(&self.slow_of, project, self.most_slow_of)?,
            ))
        } else {
            None
        };
        Some(Share {
            _of_project: of_project,
            slow,
        })
    }

    /// How many may be at slow endpoints, so that one more at this one is let in.
    fn most_at(&self, room: &Room) -> usize {
        if room.is_unknown_and_empty() {
            self.probing
        } else {
            self.most_slow
        }
    }
}

impl Place {
    fn new(room: Arc<Room>, slot: OwnedSemaphorePermit, share: Share) -> Self {
        Self {
            number: room.arrive(),
            room,
            _slot: slot,
            _share: share,
        }
    }

    /// Notes how long a request took. It has ended: however long its outcome takes to settle, the endpoint is not
    /// slow for that.
    pub(super) fn took(&self, duration: Duration) {
        let mut speed = locked(&self.room.speed);
        speed.there.remove(&self.number);
        speed.idle = 0;
        speed.usual = Some(match speed.usual {
            Some(usual) => (usual * 7 + duration) / 8,
            None => duration,
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut speed = locked(&self.room.speed);
        speed.there.remove(&self.number);
        speed.idle += 1;
    }
}

impl Room {
    fn arrive(&self) -> u64 {
        let mut speed = locked(&self.speed);
        speed.came += 1;
        let number = speed.came;
        speed.there.insert(number, Instant::now());
        number
    }

    /// Whether its requests take long, or have not shown yet that they do not. One that began to hang shows it by
    /// those that are still there.
    fn is_slow(&self) -> bool {
        let speed = locked(&self.speed);
        let oldest = speed.there.first_key_value();
        let age = oldest.map_or(Duration::ZERO, |(_, came)| came.elapsed());
        speed.usual.is_none_or(|usual| usual.max(age) > SLOW)
    }

    /// How many of those that wait are to be let in at once: of an unknown endpoint one, whose request tells how
    /// fast it is, and more when those let in came to no request.
    fn opening(&self) -> usize {
        let speed = locked(&self.speed);
        match speed.usual {
            Some(_) => usize::MAX,
            None if speed.there.is_empty() => 1 << speed.idle.min(6),
            None => 0,
        }
    }

    fn is_unknown_and_empty(&self) -> bool {
        let speed = locked(&self.speed);
        speed.usual.is_none() && speed.there.is_empty()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{EndpointId, Place, ProjectId, Rooms, SLOW, lane};
    use crate::jobs::Lanes as _;

    /// An endpoint whose requests took so long.
    fn known(rooms: &Rooms, took: Duration) -> (ProjectId, EndpointId) {
        let (project, endpoint) = (ProjectId::generate(), EndpointId::generate());
        let place = rooms.try_enter(project, endpoint).expect("a place");
        place.took(took);
        (project, endpoint)
    }

    fn fast(rooms: &Rooms) -> (ProjectId, EndpointId) {
        known(rooms, Duration::from_millis(5))
    }

    fn slow(rooms: &Rooms) -> (ProjectId, EndpointId) {
        known(rooms, Duration::from_secs(5))
    }

    fn fill(rooms: &Rooms, project: ProjectId, endpoint: EndpointId) -> Vec<Place> {
        std::iter::from_fn(|| rooms.try_enter(project, endpoint)).collect()
    }

    #[tokio::test]
    async fn whoever_waits_at_a_fast_endpoint_gets_the_place_that_becomes_free() {
        let rooms = Rooms::new(4, 40, 40);
        let (project, endpoint) = fast(&rooms);
        let mut places = fill(&rooms, project, endpoint);
        assert_eq!(places.len(), 4);
        let waiting = rooms.enter(project, endpoint);
        let next = rooms.enter(project, endpoint);
        let leaving = async { drop(places.pop()) };
        let (entered, next, ()) = tokio::join!(waiting, next, leaving);
        assert!(entered.is_some() && next.is_none(), "one may wait");
    }

    #[tokio::test]
    async fn nobody_waits_at_a_slow_one() {
        let rooms = Rooms::new(1, 8, 8);
        let (project, endpoint) = slow(&rooms);
        let _place = rooms.enter(project, endpoint).await.expect("a place");
        assert!(rooms.enter(project, endpoint).await.is_none());
    }

    #[tokio::test]
    async fn a_project_with_many_endpoints_leaves_room_for_others() {
        let rooms = Rooms::new(4, 16, 16);
        let (busy, other) = (ProjectId::generate(), fast(&rooms));
        let known: Vec<_> = (0..20).map(|_| fast(&rooms).1).collect();
        let mut places = Vec::new();
        for endpoint in &known {
            places.extend(rooms.enter(busy, *endpoint).await);
        }
        assert_eq!(places.len(), 8, "half of the queue's slots");
        for endpoint in &known[2..] {
            places.extend(fill(&rooms, busy, *endpoint));
        }
        assert_eq!(places.len(), 16, "and half of those at hand");
        assert!(rooms.enter(other.0, other.1).await.is_some());
        places.truncate(7);
        assert!(rooms.enter(busy, known[0]).await.is_some());
    }

    #[tokio::test]
    async fn slow_and_unknown_endpoints_of_many_projects_leave_half_to_fast_ones() {
        let rooms = Rooms::new(64, 400, 400);
        let (project, healthy) = fast(&rooms);
        let mut places = Vec::new();
        for _ in 0..20 {
            let (project, endpoint) = slow(&rooms);
            for _ in 0..64 {
                places.extend(rooms.enter(project, endpoint).await);
            }
        }
        assert_eq!(places.len(), 200);
        // Those that hang from their very first request, too; but each shows what it is.
        for _ in 0..20 {
            let (project, endpoint) = (ProjectId::generate(), EndpointId::generate());
            for _ in 0..64 {
                places.extend(rooms.enter(project, endpoint).await);
            }
        }
        assert_eq!(places.len(), 220);
        assert_eq!(fill(&rooms, project, healthy).len(), 64);
    }

    #[tokio::test]
    async fn a_project_whose_slow_endpoints_hang_leaves_room_to_other_slow_ones() {
        let rooms = Rooms::new(64, 400, 400);
        let (hanging, other) = (ProjectId::generate(), slow(&rooms));
        let mut places = Vec::new();
        for _ in 0..10 {
            let (_, endpoint) = slow(&rooms);
            places.extend(fill(&rooms, hanging, endpoint));
            for _ in 0..64 {
                places.extend(rooms.enter(hanging, endpoint).await);
            }
        }
        assert_eq!(places.len(), 200, "a quarter of each");
        assert!(rooms.enter(other.0, other.1).await.is_some());
        let (_, quick) = fast(&rooms);
        assert!(rooms.enter(hanging, quick).await.is_some());
    }

    #[test]
    fn parked_deliveries_are_asked_for_as_there_are_places() {
        let rooms = Rooms::new(8, 40, 40);
        let (project, endpoint) = fast(&rooms);
        let places = fill(&rooms, project, endpoint);
        assert_eq!(places.len(), 8);
        assert!(rooms.is_to_park(project, endpoint));
        assert!(rooms.is_crowded(&lane(endpoint)) && rooms.openings(100).is_empty());
        drop(places);
        assert_eq!(rooms.openings(100), [(lane(endpoint), 8)]);
        assert_eq!(rooms.openings(3), [(lane(endpoint), 3)]);
        // One alone has to wait for others, for a moment.
        let _places: Vec<_> = (0..7)
            .map(|_| {
                rooms.0.endpoints.lock().expect("rooms")[&endpoint]
                    .slots
                    .clone()
                    .try_acquire_owned()
            })
            .collect();
        assert!(rooms.openings(100).is_empty());
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(rooms.openings(100), [(lane(endpoint), 1)]);
    }

    #[test]
    fn the_places_of_a_project_go_round_among_its_endpoints() {
        let rooms = Rooms::new(8, 20, 1_000);
        let project = ProjectId::generate();
        let mut endpoints: Vec<_> = (0..3).map(|_| EndpointId::generate()).collect();
        endpoints.sort();
        for endpoint in &endpoints {
            rooms
                .try_enter(project, *endpoint)
                .expect("a place")
                .took(Duration::ZERO);
            assert!(rooms.is_to_park(project, *endpoint));
        }
        let [a, b, c] = endpoints[..] else {
            panic!("three endpoints");
        };
        assert_eq!(rooms.openings(100), [(lane(a), 8), (lane(b), 2)]);
        assert_eq!(rooms.openings(100), [(lane(c), 8), (lane(a), 2)]);
        assert_eq!(rooms.openings(100), [(lane(b), 8), (lane(c), 2)]);
    }

    #[tokio::test]
    async fn an_endpoint_is_not_slow_because_its_outcomes_take_long_to_settle() {
        let rooms = Rooms::new(4, 40, 40);
        let (project, endpoint) = fast(&rooms);
        let settling = rooms.enter(project, endpoint).await.expect("a place");
        settling.took(Duration::from_millis(5));
        std::thread::sleep(SLOW + Duration::from_millis(50));
        assert!(!rooms.of(endpoint).is_slow());
        let hanging = rooms.enter(project, endpoint).await.expect("a place");
        std::thread::sleep(SLOW + Duration::from_millis(50));
        assert!(rooms.of(endpoint).is_slow());
        drop((settling, hanging));
    }

    /// As after a restart.
    #[tokio::test]
    async fn of_lanes_that_others_filled_one_delivery_is_asked_for_first_and_tells_whose_they_are()
    {
        let rooms = Rooms::new(8, 20, 20);
        let (project, endpoint) = (ProjectId::generate(), EndpointId::generate());
        rooms.found(vec![lane(endpoint), "nonsense".to_owned()]);
        assert_eq!(rooms.openings(100), [(lane(endpoint), 1)]);
        assert!(rooms.is_crowded(&lane(endpoint)));
        let first = rooms.enter(project, endpoint).await.expect("a place");
        first.took(Duration::from_millis(5));
        drop(first);
        assert_eq!(rooms.openings(100), [(lane(endpoint), 8)]);
    }
}
