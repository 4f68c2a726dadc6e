//! What one delivery's plugin may use, and the limiter that counts its memory.
//!
//! The budget belongs to the delivery: `transform` and `sign` draw on the same fuel, processor time
//! and log. Fuel is what stops a busy plugin, because it gives the same verdict on every machine and
//! under every load. A JavaScript plugin that turns 64 KiB into bytes by hand and has them signed
//! takes 210 million units, the most of any honest guest that we tried; 500 million are 50 ms of
//! ordinary code and 430 ms of the tightest loop. Processor time catches what fuel prices too
//! cheaply (divisions, cache misses); it is counted in ticks that the plugin itself ran through, so
//! a crowded machine does not use it up. Wall time is the last resort against starvation and is
//! generous for the same reason: a false timeout costs a tenant a ladder step.

use std::time::Duration;

use wasmtime::ResourceLimiter;

/// The ceiling of a single plugin's linear memories, together.
const MEMORY_BYTES: usize = 64 << 20;

/// What one run of a plugin may take in, give out and use up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of an event's body, and of the configuration.
    pub input_bytes: usize,
    /// Most bytes of the body that a plugin answers with.
    pub output_bytes: usize,
    /// Most headers in an answer.
    pub headers: usize,
    /// Most bytes of an answer's header names and values together.
    pub header_bytes: usize,
    /// Most bytes of linear memory, over all memories of a store. At most 64 MiB.
    pub memory_bytes: usize,
    /// Fuel, in wasmtime's units (about one per instruction).
    pub fuel: u64,
    /// Processor time spent inside the plugin, to the tick (2 ms).
    pub cpu: Duration,
    /// Time from the first instruction to the last, waiting for a processor included.
    pub wall: Duration,
    /// Most lines that are kept of a log.
    pub log_lines: usize,
    /// Most bytes that are kept of a log.
    pub log_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            input_bytes: 65_536,
            output_bytes: 65_536,
            headers: 32,
            header_bytes: 8_192,
            memory_bytes: MEMORY_BYTES,
            fuel: 500_000_000,
            cpu: Duration::from_millis(500),
            wall: Duration::from_secs(5),
            log_lines: 100,
            log_bytes: 16_384,
        }
    }
}

/// Sums the linear memory of every instance in a store and refuses growth over the limit.
///
/// A refused `memory.grow` answers -1, as WebAssembly has it; most guests then abort, so the refusal
/// is remembered and lets the trap that follows be told as what it is.
#[derive(Debug)]
pub(super) struct MemoryBudget {
    limit: usize,
    used: usize,
    last_growth: usize,
    table_elements: usize,
    refused: bool,
}

impl MemoryBudget {
    /// A budget of `limit` bytes, of which nothing is used.
    pub(super) fn new(limit: usize, table_elements: usize) -> Self {
        Self {
            limit,
            used: 0,
            last_growth: 0,
            table_elements,
            refused: false,
        }
    }

    /// Whether the store asked for more than it may have.
    pub(super) fn refused(&self) -> bool {
        self.refused
    }
}

impl ResourceLimiter for MemoryBudget {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let growth = desired.saturating_sub(current);
        let total = self.used.saturating_add(growth);
        if total > self.limit {
            self.refused = true;
            return Ok(false);
        }
        // Over the memory's own maximum wasmtime refuses by itself, and nothing is used.
        if maximum.is_none_or(|maximum| desired <= maximum) {
            self.used = total;
            self.last_growth = growth;
        } else {
            self.last_growth = 0;
        }
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.used = self.used.saturating_sub(self.last_growth);
        self.last_growth = 0;
        Ok(())
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(desired <= self.table_elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memories_are_summed_and_the_refusal_is_remembered() {
        let mut budget = MemoryBudget::new(100, 10);
        assert!(budget.memory_growing(0, 60, None).unwrap());
        assert!(budget.memory_growing(0, 40, Some(50)).unwrap());
        assert!(!budget.refused());
        assert!(!budget.memory_growing(40, 41, Some(50)).unwrap());
        assert!(budget.refused());
    }

    #[test]
    fn growth_that_failed_or_passed_its_own_maximum_is_given_back() {
        let mut budget = MemoryBudget::new(100, 10);
        assert!(budget.memory_growing(0, 60, None).unwrap());
        budget
            .memory_grow_failed(wasmtime::Error::msg("no memory"))
            .unwrap();
        assert!(budget.memory_growing(0, 90, Some(10)).unwrap());
        budget
            .memory_grow_failed(wasmtime::Error::msg("over its maximum"))
            .unwrap();
        assert!(budget.memory_growing(0, 100, None).unwrap());
        assert!(!budget.refused());
    }

    #[test]
    fn absurd_sizes_are_refused_without_overflow() {
        let mut budget = MemoryBudget::new(100, 10);
        assert!(!budget.memory_growing(0, usize::MAX, None).unwrap());
        assert!(!budget.table_growing(0, usize::MAX, None).unwrap());
    }
}
