//! Counting what is held.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
    sync::{Arc, Mutex},
};

use super::locked;

/// How many there are of each.
#[derive(Debug)]
pub(super) struct Counts<K: Eq + Hash>(Mutex<HashMap<K, usize>>);

impl<K: Eq + Hash> Default for Counts<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// One of those counted, until dropped.
#[derive(Debug)]
pub(super) struct Counted<K: Eq + Hash + Copy>(Arc<Counts<K>>, K);

impl<K: Eq + Hash + Copy> Counts<K> {
    /// One more, unless there are `most`.
    pub(super) fn add(counts: &Arc<Self>, key: K, most: usize) -> Option<Counted<K>> {
        let mut all = locked(&counts.0);
        if all.get(&key).copied().unwrap_or(0) >= most {
            return None;
        }
        *all.entry(key).or_insert(0) += 1;
        Some(Counted(counts.clone(), key))
    }

    /// How many there are now.
    pub(super) fn of(&self, key: K) -> usize {
        locked(&self.0).get(&key).copied().unwrap_or(0)
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
