//! Shares: a place with few seats, of which nobody may take more than his part.
//!
//! Whoever waits for a lock inside a transaction keeps a connection while he waits. The lock may be in the
//! hands of a process that is frozen, and all who want it belong to one project or go to one endpoint: as
//! they are let in a few at a time, the connections are there for all others meanwhile.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Names that are remembered before those that have all their seats free are forgotten.
const REMEMBERED: usize = 1_000;

/// The parts of all, by name.
#[derive(Debug)]
pub struct Shares<K> {
    each: usize,
    of: Arc<Mutex<HashMap<K, Arc<Semaphore>>>>,
}

/// A seat; free again when dropped.
#[derive(Debug)]
pub struct Seat(#[expect(dead_code, reason = "held, not read")] OwnedSemaphorePermit);

impl<K> Clone for Shares<K> {
    fn clone(&self) -> Self {
        Self {
            each: self.each,
            of: self.of.clone(),
        }
    }
}

impl<K: Eq + Hash> Shares<K> {
    /// So many seats for each name, at least one.
    pub fn new(each: usize) -> Self {
        Self {
            each: each.max(1),
            of: Arc::default(),
        }
    }

    /// Waits for a seat: first come, first served among those of one name.
    pub async fn seat(&self, name: K) -> Seat {
        let seats = self.of(name);
        match seats.acquire_owned().await {
            Ok(seat) => Seat(seat),
            Err(_) => unreachable!("nobody closes it"),
        }
    }

    fn of(&self, name: K) -> Arc<Semaphore> {
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if of.len() >= REMEMBERED {
            // Whoever waits or sits has a handle too.
            of.retain(|_, seats| Arc::strong_count(seats) > 1);
        }
        let each = self.each;
        let seats = of
            .entry(name)
            .or_insert_with(|| Arc::new(Semaphore::new(each)));
        seats.clone()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn each_has_his_own_part_and_it_is_free_again() {
        let shares = Shares::new(2);
        let now = |name: u32| shares.seat(name).now_or_never();
        let (first, second) = (now(1), now(1));
        assert!(first.is_some() && second.is_some());
        assert!(now(1).is_none());
        assert!(now(2).is_some());
        drop(first);
        assert!(now(1).is_some());
    }

    #[test]
    fn those_who_sit_are_not_forgotten() {
        let shares = Shares::new(1);
        let seat = shares.seat(0).now_or_never();
        for name in 1..3 * REMEMBERED {
            assert!(shares.seat(name).now_or_never().is_some());
        }
        assert!(seat.is_some() && shares.seat(0).now_or_never().is_none());
        assert!(shares.of.lock().unwrap().len() <= REMEMBERED);
    }
}
