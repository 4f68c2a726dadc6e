//! Which attempts this process is making.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
};

use super::locked;
use crate::webhooks::deliveries::DeliveryId;

/// The attempts that one process is making.
#[derive(Clone, Debug, Default)]
pub struct Running(Arc<Mutex<HashSet<(DeliveryId, i64)>>>);

/// An attempt that is being made, until dropped.
#[derive(Debug)]
pub(in crate::webhooks) struct RunningAttempt(Running, (DeliveryId, i64));

impl Running {
    /// Begins an attempt, unless somebody is at it.
    pub(in crate::webhooks) fn begin(
        &self,
        delivery: DeliveryId,
        number: i64,
    ) -> Option<RunningAttempt> {
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

#[cfg(test)]
mod tests {
    use super::{DeliveryId, Running};

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
