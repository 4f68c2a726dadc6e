//! The books of a run of deliveries: what has to balance, or the run is void.

use std::ops::RangeInclusive;

/// What has to balance.
pub struct Books {
    /// Events that were accepted, to those that may have been, where no answer came.
    pub accepted: RangeInclusive<u64>,
    /// Endpoints, each of which gets every event.
    pub endpoints: u64,
    /// Events in the database.
    pub events: u64,
    /// Deliveries in the database.
    pub states: Vec<(String, u64)>,
    /// Attempts that succeeded; with a plugin, those that it had a part in.
    pub attempts: u64,
    /// Events at the receiver, once for each endpoint.
    pub arrived: u64,
    /// Requests at the receiver that are no webhook of ours.
    pub strange: u64,
}

impl Books {
    /// Deliveries in certain states.
    pub fn count(&self, of: impl Fn(&str) -> bool) -> u64 {
        let of = self.states.iter().filter(|(state, _)| of(state));
        of.map(|(_, count)| count).sum()
    }

    /// What does not balance.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let delivered = self.count(|state| state == "delivered");
        let known = |state: &str| matches!(state, "delivered" | "dead" | "pending" | "retrying");
        let (accepted, possible) = (self.accepted.start(), self.accepted.end());
        if !self.accepted.contains(&self.events) {
            faults.push(format!(
                "{accepted} to {possible} events were accepted, {} are there",
                self.events
            ));
        }
        let published = self.events * self.endpoints;
        if self.count(known) != published {
            faults.push(format!(
                "{published} published are not delivered + dead + pending: {:?}",
                self.states
            ));
        }
        if self.count(|state| !known(state)) != 0 {
            faults.push(format!("states of no use here: {:?}", self.states));
        }
        if self.arrived != delivered {
            faults.push(format!(
                "{delivered} are delivered, {} came to the receiver",
                self.arrived
            ));
        }
        if self.attempts != delivered {
            faults.push(format!(
                "{delivered} are delivered, by {} attempts",
                self.attempts
            ));
        }
        if self.strange != 0 {
            faults.push(format!("{} strange requests came", self.strange));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::Books;

    fn balanced() -> Books {
        Books {
            accepted: 10..=11,
            endpoints: 2,
            events: 10,
            states: vec![("dead".into(), 1), ("delivered".into(), 19)],
            attempts: 19,
            arrived: 19,
            strange: 0,
        }
    }

    #[test]
    fn books_that_balance_have_no_faults() {
        assert_eq!(balanced().faults(), Vec::<String>::new());
    }

    #[test]
    fn a_run_is_void_when_anything_is_lost() {
        let spoils: [fn(&mut Books); 6] = [
            |books| books.events = 9,
            |books| books.events = 12,
            |books| books.states[0].1 = 0,
            |books| books.states[0].0 = "cancelled".into(),
            |books| books.arrived = 18,
            |books| books.attempts = 18,
        ];
        for (number, spoil) in spoils.into_iter().enumerate() {
            let mut books = balanced();
            spoil(&mut books);
            assert!(!books.faults().is_empty(), "{number}");
        }
    }
}
