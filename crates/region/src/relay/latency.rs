//! How long a relay takes from the moment at which it wakes until a bell is delivered.
//!
//! Two reads of the clock for each bell; counters that any thread may read at the same time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper ends of the buckets in microseconds. Longer times are in one more bucket.
const BOUNDS_US: [u64; BellBuckets::COUNT] = [10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 250_000];

/// The direction in which a bell goes through a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BellDirection {
    /// From a process, or from another relay, until the port has taken it.
    ToPort,
    /// From the port until its process, or another relay, has it.
    FromPort,
}

/// Histograms of the times that bells spent in the relays of one owner. Counts never fall.
#[derive(Debug, Default)]
pub struct RelayLatency {
    to_port: DirectionLatency,
    from_port: DirectionLatency,
}

#[derive(Debug, Default)]
struct DirectionLatency {
    buckets: [AtomicU64; BellBuckets::COUNT + 1],
    sum_ns: AtomicU64,
}

/// The counts of one direction at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct BellBuckets {
    /// Upper end in seconds, and how many bells took as long and longer than the bucket before. The last end is infinite.
    pub buckets: [(f64, u64); Self::COUNT + 1],
    /// Seconds of all bells together.
    pub sum: f64,
}

impl BellBuckets {
    /// Buckets that have an end.
    pub const COUNT: usize = 12;

    /// How many bells there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }
}

impl RelayLatency {
    fn of(&self, direction: BellDirection) -> &DirectionLatency {
        match direction {
            BellDirection::ToPort => &self.to_port,
            BellDirection::FromPort => &self.from_port,
        }
    }

    /// Counts this many bells that took as long.
    pub(super) fn observe(&self, direction: BellDirection, took: Duration, bells: u64) {
        let of = self.of(direction);
        let at = BOUNDS_US.iter().position(|bound| took <= Duration::from_micros(*bound)).unwrap_or(BOUNDS_US.len());
        of.buckets[at].fetch_add(bells, Ordering::Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).saturating_mul(bells);
        of.sum_ns.fetch_add(nanos, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn buckets(&self, direction: BellDirection) -> BellBuckets {
        let of = self.of(direction);
        let end = |at: usize| BOUNDS_US.get(at).map_or(f64::INFINITY, |bound| *bound as f64 / 1e6);
        BellBuckets {
            buckets: std::array::from_fn(|at| (end(at), of.buckets[at].load(Ordering::Relaxed))),
            sum: of.sum_ns.load(Ordering::Relaxed) as f64 / 1e9,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bell_is_counted_in_the_bucket_that_ends_at_or_after_it() {
        let latency = RelayLatency::default();
        for (us, bells) in [(10, 1), (11, 2), (3_600_000_000, 1)] {
            latency.observe(BellDirection::ToPort, Duration::from_micros(us), bells);
        }
        let counted = latency.buckets(BellDirection::ToPort);
        let full: Vec<_> = counted.buckets.into_iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(full, [(1e-5, 1), (2e-5, 2), (f64::INFINITY, 1)]);
        assert_eq!((counted.count(), counted.sum), (4, 3_600.000_032));
        assert_eq!(latency.buckets(BellDirection::FromPort).count(), 0);
    }
}
