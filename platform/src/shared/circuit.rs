//! A circuit in front of a store: after a failure nobody waits for it, but for one probe a pause.
//!
//! Closed, everybody passes. A failure opens it: for a pause everybody is turned away at once, then one
//! caller passes as a probe and the next pause begins; the first success closes it again. So a store
//! that is away costs its time-out once a pause, not once a request, and comes back by itself.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How long nobody asks a store that failed.
const PAUSE: Duration = Duration::from_secs(1);

/// A circuit, closed at first.
#[derive(Debug, Default)]
pub struct Circuit(Mutex<Option<Instant>>);

impl Circuit {
    /// Whether the caller may ask the store; open, one caller a pause may.
    pub fn admits(&self, now: Instant) -> bool {
        let mut probe_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *probe_at {
            None => true,
            Some(at) if at > now => false,
            Some(_) => {
                *probe_at = Some(now + PAUSE);
                true
            }
        }
    }

    /// The store failed; whether that opened the circuit.
    pub fn failed(&self, now: Instant) -> bool {
        let mut probe_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        probe_at.replace(now + PAUSE).is_none()
    }

    /// The store answered; whether that closed the circuit.
    pub fn answered(&self) -> bool {
        let mut probe_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        probe_at.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{Circuit, PAUSE};

    #[test]
    fn a_failure_turns_everybody_away_but_one_probe_a_pause() {
        let circuit = Circuit::default();
        let mut now = Instant::now();
        assert!(circuit.admits(now));
        assert!(circuit.failed(now));
        for _ in 0..3 {
            assert!(!circuit.admits(now));
            now += PAUSE;
            assert!(circuit.admits(now));
            assert!(!circuit.admits(now), "one probe is enough");
            assert!(!circuit.failed(now), "it was open");
        }
        now += PAUSE;
        assert!(circuit.admits(now));
        assert!(circuit.answered());
        assert!(circuit.admits(now) && circuit.admits(now));
        assert!(!circuit.answered(), "it was closed");
    }
}
