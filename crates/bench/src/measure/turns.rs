//! How long each of many turns takes, one after the other.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::error::{BenchError, Result};
use crate::report::metric::Metric;
use crate::task::Figures;

/// Turns beyond this count as this long, in nanoseconds: a minute.
const LONGEST_TURN: u64 = 60_000_000_000;

/// The times of turns since the start.
#[derive(Debug)]
pub(crate) struct TurnTimes {
    histogram: Histogram<u64>,
    begin: Instant,
    last: Instant,
}

impl TurnTimes {
    /// The first turn begins now.
    pub(crate) fn start() -> Result<Self> {
        let histogram = Histogram::new_with_max(LONGEST_TURN, 3);
        let histogram = histogram.map_err(|e| BenchError::transport("making a histogram", e))?;
        let begin = Instant::now();
        Ok(Self { histogram, begin, last: begin })
    }

    /// A turn has ended, and the next one begins.
    pub(crate) fn note(&mut self) {
        let now = Instant::now();
        self.histogram.saturating_record(now.duration_since(self.last).as_nanos() as u64);
        self.last = now;
    }

    /// The next turn begins now: what was since the last one does not count.
    pub(crate) fn skip(&mut self) {
        self.last = Instant::now();
    }

    /// The time from the start to the end of the last turn.
    pub(crate) fn elapsed(&self) -> Duration {
        self.last.duration_since(self.begin)
    }

    /// How many turns there were.
    pub(crate) fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// The percentiles, the longest turn and the mean.
    pub(crate) fn figures(&self) -> Figures {
        let at = |quantile: f64| self.histogram.value_at_quantile(quantile) as f64;
        Figures::from([
            (Metric::P50Ns, at(0.5)),
            (Metric::P99Ns, at(0.99)),
            (Metric::P999Ns, at(0.999)),
            (Metric::MaxNs, self.histogram.max() as f64),
            (Metric::MeanNs, self.histogram.mean()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_turn_is_not_counted() {
        let mut turns = TurnTimes::start().unwrap();
        turns.note();
        std::thread::sleep(Duration::from_millis(50));
        turns.skip();
        turns.note();
        assert_eq!(turns.count(), 2);
        assert!(turns.elapsed() >= Duration::from_millis(50));
        assert!(turns.figures()[&Metric::MeanNs] * 2.0 < turns.elapsed().as_nanos() as f64);
    }
}
