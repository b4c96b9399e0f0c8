//! When a ring should become larger or smaller.
//!
//! What limits a copying stream is how fast one core reads lines that are dirty in the other's cache, and that gets
//! faster with the memory the ring walks over: several-fold from 128 KiB to 8 MiB. A quiet connection, on the other hand,
//! should cost next to nothing. So rings start small, and are judged once a *revolution* (each time as many
//! bytes as the ring holds have passed): the clock is read that seldom, and nothing is measured in between.

/// Bytes per second from which a revolution counts as hot.
const HOT: u64 = 200 << 20;
/// Bytes per second up to which a revolution counts as cold.
const COLD: u64 = 2 << 20;
/// Hot revolutions in a row before the ring grows.
const PATIENCE: u32 = 2;
/// Factor by which a ring grows or shrinks.
const STEP: u64 = 8;

/// Decides the size of one ring. Time is handed in, so that tests need no clock.
#[derive(Debug)]
pub struct Sizing {
    min: u64,
    max: u64,
    size: u64,
    since_bytes: u64,
    since_ns: u64,
    hot: u32,
    judges: bool,
}

impl Sizing {
    /// A ring that starts with `min` bytes and may grow to `max`; equal values make a fixed size. Powers of two.
    pub const fn new(min: u64, max: u64) -> Self {
        Self { min, max, size: min, since_bytes: 0, since_ns: 0, hot: 0, judges: min != max }
    }

    /// Whether a revolution is over, so that [`Sizing::judge`] wants to know the time.
    #[inline]
    pub const fn is_due(&self, tail: u64) -> bool {
        tail - self.since_bytes >= self.size && self.judges
    }

    /// Judges the revolution that ended at `tail` bytes, `now_ns` on a monotonic clock. Returns the size to change to.
    pub fn judge(&mut self, tail: u64, now_ns: u64) -> Option<u64> {
        let bytes = tail - self.since_bytes;
        let elapsed = now_ns.saturating_sub(self.since_ns).max(1);
        let first = self.since_ns == 0;
        self.since_bytes = tail;
        self.since_ns = now_ns;
        if first {
            return None;
        }
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(elapsed);
        if rate >= u128::from(HOT) {
            self.hot = self.hot.saturating_add(1);
            (self.hot >= PATIENCE && self.size < self.max).then(|| self.size.saturating_mul(STEP).min(self.max))
        } else {
            self.hot = 0;
            (rate <= u128::from(COLD) && self.size > self.min).then(|| (self.size / STEP).max(self.min))
        }
    }

    /// The size to change to so that a span of `n` bytes fits, if it does not and may.
    pub fn fit(&self, n: u64) -> Option<u64> {
        (n > self.size && n <= self.max).then(|| n.next_power_of_two().min(self.max))
    }

    /// The smallest size, to change to when the connection is known to become quiet.
    pub fn trim(&self) -> Option<u64> {
        (self.size > self.min).then_some(self.min)
    }

    /// The largest size this ring may have.
    pub const fn max(&self) -> u64 {
        self.max
    }

    /// The ring keeps its size from now on, but for a span that does not fit.
    pub fn settle(&mut self) {
        self.judges = false;
    }

    /// The ring now has `size` bytes.
    pub fn changed(&mut self, size: u64) {
        self.size = size;
        self.hot = 0;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Sends `revolutions` of the present ring at `rate` bytes a second; returns the size it ends with.
    fn run(s: &mut Sizing, tail: &mut u64, now: &mut u64, revolutions: u32, rate: u64) -> u64 {
        for _ in 0..revolutions {
            *now += s.size * 1_000_000_000 / rate;
            *tail += s.size;
            if s.is_due(*tail)
                && let Some(size) = s.judge(*tail, *now)
            {
                s.changed(size);
            }
        }
        s.size
    }

    #[test]
    fn grows_when_hot_and_shrinks_when_cold() {
        let (mut s, mut tail, mut now) = (Sizing::new(16 << 10, 8 << 20), 0, 1);
        assert_eq!(run(&mut s, &mut tail, &mut now, 20, 50 << 20), 16 << 10, "lukewarm stays");
        assert_eq!(run(&mut s, &mut tail, &mut now, 1, 1 << 30), 16 << 10, "one burst is not enough");
        assert_eq!(run(&mut s, &mut tail, &mut now, 20, 1 << 30), 8 << 20, "hot grows to the limit");
        assert_eq!(run(&mut s, &mut tail, &mut now, 1, 1 << 20), 1 << 20, "cold shrinks by steps");
        assert_eq!(run(&mut s, &mut tail, &mut now, 20, 1 << 20), 16 << 10, "down to where it began");
    }

    #[test]
    fn a_fixed_ring_stays() {
        let (mut s, mut tail, mut now) = (Sizing::new(1 << 20, 1 << 20), 0, 1);
        assert_eq!(run(&mut s, &mut tail, &mut now, 50, 1 << 34), 1 << 20);
        assert_eq!(s.fit(2 << 20), None);
        assert_eq!(s.trim(), None);
    }

    #[test]
    fn a_settled_ring_stays() {
        let (mut s, mut tail, mut now) = (Sizing::new(16 << 10, 8 << 20), 0, 1);
        s.settle();
        assert_eq!(run(&mut s, &mut tail, &mut now, 50, 1 << 34), 16 << 10);
        assert!(!s.is_due(1 << 40));
        assert_eq!(s.fit(1 << 20), Some(1 << 20));
    }

    #[test]
    fn fits_what_may_fit() {
        let s = Sizing::new(4096, 1 << 20);
        assert_eq!(s.fit(4096), None);
        assert_eq!(s.fit(4097), Some(8192));
        assert_eq!(s.fit(1 << 20), Some(1 << 20));
        assert_eq!(s.fit((1 << 20) + 1), None);
    }
}
