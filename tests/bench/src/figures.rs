//! Latencies, and numbers as people read them.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Latencies, to a microsecond and three digits.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        Self(Histogram::new(3).expect("three digits are allowed"))
    }
}

impl Latencies {
    /// Adds one.
    pub fn record(&mut self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.0
            .record(micros)
            .expect("a histogram that grows takes everything");
    }

    /// Adds those of another.
    pub fn add(&mut self, other: &Self) {
        self.0
            .add(&other.0)
            .expect("a histogram that grows takes everything");
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The latency that `percent` of all stay at or under, in milliseconds.
    pub fn percentile(&self, percent: f64) -> f64 {
        float(self.0.value_at_percentile(percent)) / 1_000.0
    }

    /// The longest, in milliseconds.
    pub fn max(&self) -> f64 {
        float(self.0.max()) / 1_000.0
    }

    /// Their mean, in milliseconds.
    pub fn mean(&self) -> f64 {
        self.0.mean() / 1_000.0
    }
}

/// `count` per second.
pub fn per_second(count: u64, time: Duration) -> f64 {
    float(count) / time.as_secs_f64().max(1e-9)
}

/// A count as a number to calculate with.
#[allow(
    clippy::cast_precision_loss,
    reason = "counts and microseconds of a bounded run stay far below 2^52"
)]
pub fn float(count: u64) -> f64 {
    count as f64
}

/// A number with its thousands apart: `1,234,567`.
pub fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{Latencies, thousands};
    use std::time::Duration;

    #[test]
    fn percentiles_are_in_milliseconds() {
        let mut latencies = Latencies::default();
        for millis in 1..=100 {
            latencies.record(Duration::from_millis(millis));
        }
        assert!((latencies.percentile(50.0) - 50.0).abs() < 0.1);
        assert!((latencies.max() - 100.0).abs() < 0.1);
    }

    #[test]
    fn thousands_stand_apart() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567].map(thousands),
            ["0", "999", "1,000", "1,234,567"]
        );
    }
}
