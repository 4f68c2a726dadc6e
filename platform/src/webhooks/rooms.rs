//! Room for requests in flight, per endpoint: what keeps a slow one from taking every slot.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::Semaphore;

use super::endpoints::EndpointId;

/// Room for requests in flight, per endpoint.
#[derive(Clone, Debug)]
pub struct Rooms {
    size: usize,
    rooms: Arc<Mutex<HashMap<EndpointId, Weak<Semaphore>>>>,
}

impl Rooms {
    /// Rooms for `size` requests each.
    pub fn new(size: usize) -> Self {
        Self {
            size,
            rooms: Arc::default(),
        }
    }

    /// The room of an endpoint.
    pub(super) fn of(&self, endpoint: EndpointId) -> Arc<Semaphore> {
        let mut rooms = self.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(room) = rooms.get(&endpoint).and_then(Weak::upgrade) {
            return room;
        }
        if rooms.len() >= 1_024 {
            rooms.retain(|_, room| room.strong_count() > 0);
        }
        let room = Arc::new(Semaphore::new(self.size));
        rooms.insert(endpoint, Arc::downgrade(&room));
        room
    }
}

#[cfg(test)]
mod tests {
    use super::{EndpointId, Rooms};

    #[test]
    fn an_endpoint_has_its_own_room_and_an_empty_one_is_forgotten() {
        let rooms = Rooms::new(1);
        let (one, two) = (EndpointId::generate(), EndpointId::generate());
        let room = rooms.of(one);
        let place = room.try_acquire();
        assert!(place.is_ok());
        assert!(rooms.of(one).try_acquire().is_err());
        assert!(rooms.of(two).try_acquire().is_ok());
        drop(place);
        assert!(rooms.of(one).try_acquire().is_ok());
    }
}
