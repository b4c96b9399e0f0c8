//! The policy by which a ring changes its size.
//!
//! A quiet connection should cost next to nothing, so a ring starts small and grows once it is used. The fastest size depends on the
//! processor, not on the stream alone. Where two cores share a cache closely, a copying stream gets several times faster
//! from 128 KiB to 8 MiB. Where each core has a private cache of 1 MiB, a ring of 8 MiB is slower than one that fits.
//! So the size is found by measurement: [`Sizing`] tries its neighbours, keeps the fastest, and tries again now and then.
//!
//! ```text
//!   Rising ----hot, up to 1 MiB----> Resting ----pause is over and hot----> Trying: 4x, 1/4, 2x, 1/2
//!     ^                                ^  ^                                   |
//!     |                                |  +--- nothing faster: longer pause --+
//!     +------------- cold -------------+  +--- back at the fastest -----------+
//! ```
//!
//! The clock is read once a window (a few revolutions of the ring, or some MiB), and nothing is measured in between.

/// Bytes per second from which a stream is hot: its ring grows, and other sizes are tried.
const HOT: u64 = 200 << 20;
/// Bytes per second up to which a stream is cold: its ring shrinks.
const COLD: u64 = 2 << 20;
/// Hot windows in a row before a ring that is still rising grows.
const HOT_WINDOWS: u32 = 2;
/// Factor by which a ring rises, and shrinks when it is cold.
const STEP: u64 = 8;
/// Up to this size a hot ring rises without a measurement. Smaller rings switch between writer and reader too often everywhere.
const RISES_TO: u64 = 1 << 20;
/// Revolutions that a size is measured for, and the least bytes.
const SAMPLE_REVOLUTIONS: u64 = 8;
const SAMPLE_BYTES: u64 = 16 << 20;
/// Revolutions of a new ring that do not count: its pages are touched for the first time, and the reader finds its pace.
const WARM_UP_REVOLUTIONS: u64 = 2;
const WARM_UP_BYTES: u64 = 1 << 20;
/// A size has to be faster than the present one by this many parts of 1024 to be kept.
const GAIN: u64 = 24;
/// Nanoseconds between two rounds of trials: the first pause, and the longest. Each round without a gain doubles it.
const FIRST_PAUSE: u64 = 500_000_000;
const LONGEST_PAUSE: u64 = 16_000_000_000;
/// Windows that a change may take to come into force before it counts as refused.
const MISSED_WINDOWS: u32 = 3;

/// Decides the size of one ring. Time is handed in, so that tests need no clock.
#[derive(Debug)]
pub struct Sizing {
    min: u64,
    max: u64,
    size: u64,
    /// Where the present window began.
    since_bytes: u64,
    since_ns: u64,
    /// Whether other sizes are tried, and not only larger ones taken.
    tries: bool,
    phase: SizingPhase,
    judges: bool,
}

#[derive(Debug, Clone, Copy)]
enum SizingPhase {
    /// Small, and growing by steps as long as it is hot.
    Rising { hot: u32 },
    /// At a size that is kept until `until_ns`.
    Resting { until_ns: u64, pause_ns: u64 },
    /// The fastest size so far is measured, then its neighbours in turn.
    Trying(Trial),
}

#[derive(Debug, Clone, Copy)]
struct Trial {
    /// The size that is measured now, or asked for.
    at: u64,
    /// Index of `at` among the neighbours of `base`, plus 1. 0 is `base` itself.
    step: usize,
    /// The size that the round began with.
    base: u64,
    /// The fastest size of this round, and its bytes per second.
    best: u64,
    best_rate: u64,
    /// Whether the window to be judged next is only a warm-up.
    is_warm_up: bool,
    /// Windows since the change to `at` was asked for and has not come.
    missed: u32,
    pause_ns: u64,
}

/// The neighbours that a round tries: multiplied by the first, divided by the second.
const NEIGHBOURS: [(u64, u64); 4] = [(4, 1), (1, 4), (2, 1), (1, 2)];

impl Sizing {
    /// A ring that starts with `min` bytes and may grow to `max`; equal values make a fixed size. Powers of two.
    pub const fn new(min: u64, max: u64) -> Self {
        let phase = SizingPhase::Rising { hot: 0 };
        Self { min, max, size: min, since_bytes: 0, since_ns: 0, tries: true, phase, judges: min != max }
    }

    /// A ring whose memory cannot be given back, as in a window: it rises to `max` while it is hot. Other sizes are not tried, because
    /// the way back from each would cost another place.
    pub const fn rising(min: u64, max: u64) -> Self {
        let mut sizing = Self::new(min, max);
        sizing.tries = false;
        sizing
    }

    /// Whether a window is over, so that [`Sizing::judge`] needs the time.
    #[inline]
    pub const fn is_due(&self, tail: u64) -> bool {
        tail - self.since_bytes >= self.window() && self.judges
    }

    /// Bytes of the present window.
    #[inline]
    const fn window(&self) -> u64 {
        match self.phase {
            SizingPhase::Rising { .. } => self.size,
            SizingPhase::Resting { .. } => at_least(self.size, 4 << 20),
            SizingPhase::Trying(Trial { is_warm_up: true, .. }) => {
                at_least(self.size.saturating_mul(WARM_UP_REVOLUTIONS), WARM_UP_BYTES)
            }
            SizingPhase::Trying(_) => at_least(self.size.saturating_mul(SAMPLE_REVOLUTIONS), SAMPLE_BYTES),
        }
    }

    /// Judges the window that ended at `tail` bytes, `now_ns` on a monotonic clock. Returns the size to change to.
    ///
    /// The change may come later, or never: [`Sizing::changed`] reports it.
    pub fn judge(&mut self, tail: u64, now_ns: u64) -> Option<u64> {
        let bytes = tail - self.since_bytes;
        let elapsed = now_ns.saturating_sub(self.since_ns).max(1);
        let is_first = self.since_ns == 0;
        self.since_bytes = tail;
        self.since_ns = now_ns;
        if is_first {
            return None;
        }
        let rate = u128::from(bytes) * 1_000_000_000 / u128::from(elapsed);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        if rate <= COLD {
            self.phase = SizingPhase::Rising { hot: 0 };
            return (self.size > self.min).then(|| (self.size / STEP).max(self.min));
        }
        match self.phase {
            SizingPhase::Rising { hot } if rate >= HOT => self.rise(hot + 1, now_ns),
            SizingPhase::Rising { .. } => {
                self.phase = SizingPhase::Rising { hot: 0 };
                None
            }
            SizingPhase::Resting { until_ns, pause_ns } => {
                if now_ns >= until_ns && rate >= HOT {
                    self.phase = SizingPhase::Trying(Trial {
                        at: self.size,
                        step: 0,
                        base: self.size,
                        best: self.size,
                        best_rate: 0,
                        is_warm_up: false,
                        missed: 0,
                        pause_ns,
                    });
                }
                None
            }
            SizingPhase::Trying(trial) => self.try_next(trial, rate, now_ns),
        }
    }

    fn rise(&mut self, hot: u32, now_ns: u64) -> Option<u64> {
        let top = if self.tries { self.max.min(RISES_TO.max(self.min)) } else { self.max };
        if self.size >= top {
            if self.tries {
                self.phase = SizingPhase::Resting { until_ns: now_ns, pause_ns: FIRST_PAUSE };
            }
            return None;
        }
        self.phase = SizingPhase::Rising { hot };
        (hot >= HOT_WINDOWS).then(|| self.size.saturating_mul(STEP).min(top))
    }

    fn try_next(&mut self, mut trial: Trial, rate: u64, now_ns: u64) -> Option<u64> {
        if self.size != trial.at {
            // The change has been asked for and has not come.
            trial.missed += 1;
            if trial.missed < MISSED_WINDOWS {
                self.phase = SizingPhase::Trying(trial);
                return Some(trial.at);
            }
            if trial.at == trial.best {
                // Not even the way back is open: the present size is kept.
                self.rest(now_ns, trial.pause_ns.saturating_mul(2));
                return None;
            }
        } else if trial.is_warm_up {
            trial.is_warm_up = false;
            self.phase = SizingPhase::Trying(trial);
            return None;
        } else if u128::from(rate) * 1024 > u128::from(trial.best_rate) * u128::from(1024 + GAIN) || trial.step == 0 {
            trial.best = trial.at;
            trial.best_rate = rate;
        }
        while let Some((up, down)) = NEIGHBOURS.get(trial.step).copied() {
            trial.step += 1;
            let next = trial.base.saturating_mul(up) / down;
            if next >= self.min && next <= self.max {
                return self.ask(trial, next);
            }
        }
        if trial.best == trial.base {
            self.rest(now_ns, trial.pause_ns.saturating_mul(2));
        } else {
            // Something was faster: its own neighbours are tried soon.
            self.rest(now_ns, FIRST_PAUSE);
            if let SizingPhase::Resting { until_ns, .. } = &mut self.phase {
                *until_ns = now_ns;
            }
        }
        (self.size != trial.best).then_some(trial.best)
    }

    fn ask(&mut self, trial: Trial, size: u64) -> Option<u64> {
        self.phase = SizingPhase::Trying(Trial { at: size, is_warm_up: true, missed: 0, ..trial });
        Some(size)
    }

    fn rest(&mut self, now_ns: u64, pause_ns: u64) {
        let pause_ns = pause_ns.clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.phase = SizingPhase::Resting { until_ns: now_ns.saturating_add(pause_ns), pause_ns };
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

    /// The ring keeps its size from now on, except for a span that does not fit.
    pub fn settle(&mut self) {
        self.judges = false;
    }

    /// The ring now has `size` bytes.
    pub fn changed(&mut self, size: u64) {
        self.size = size;
        match &mut self.phase {
            SizingPhase::Rising { hot } => *hot = 0,
            SizingPhase::Resting { .. } => {}
            SizingPhase::Trying(trial) if trial.at == size => {}
            // The caller changed the size, for a span or for a pause, so earlier measurements are void.
            phase => *phase = SizingPhase::Rising { hot: 0 },
        }
    }
}

const fn at_least(n: u64, least: u64) -> u64 {
    if n < least { least } else { n }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    /// A stream whose speed is a function of the ring's size.
    struct Stream {
        sizing: Sizing,
        tail: u64,
        now: u64,
        /// Whether changes come into force.
        grants: bool,
        switches: u32,
    }

    impl Stream {
        fn new(min: u64, max: u64) -> Self {
            Self { sizing: Sizing::new(min, max), tail: 0, now: 1, grants: true, switches: 0 }
        }

        /// Sends until `ns` have passed; returns the bytes per second of all of it.
        fn run(&mut self, ns: u64, mut rate: impl FnMut(u64) -> u64) -> u64 {
            let (began, from) = (self.now, self.tail);
            while self.now - began < ns {
                let window = self.sizing.window();
                self.now += (u128::from(window) * 1_000_000_000 / u128::from(rate(self.sizing.size))) as u64;
                self.tail += window;
                assert!(self.sizing.is_due(self.tail) || !self.sizing.judges);
                if self.sizing.judges
                    && let Some(size) = self.sizing.judge(self.tail, self.now)
                {
                    assert!(size.is_power_of_two() && (self.sizing.min..=self.sizing.max).contains(&size), "{size}");
                    if self.grants {
                        self.sizing.changed(size);
                        self.switches += 1;
                    }
                }
            }
            ((self.tail - from) as u128 * 1_000_000_000 / u128::from(self.now - began)) as u64
        }
    }

    const SECOND: u64 = 1_000_000_000;

    /// Noise of a few percent that is the same in each run of the test.
    fn noisy(seed: &mut u64, rate: u64) -> u64 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        rate / 100 * (98 + (*seed >> 60) / 4)
    }

    #[test]
    fn close_caches_grow_the_ring_to_its_limit() {
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.run(SECOND, |size| (2 << 30) + size * 1000);
        assert_eq!(s.sizing.size, 8 * MIB);
    }

    #[test]
    fn ring_stays_within_private_cache_if_faster() {
        // 10.4 GB/s up to 1 MiB, 7.4 at 8 MiB.
        let speed = |size: u64| if size <= MIB { 10_400_000_000 } else { 7_400_000_000 };
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        let mut seed = 7;
        let mean = s.run(4 * SECOND, |size| noisy(&mut seed, speed(size)));
        assert!(s.sizing.size <= MIB, "{}", s.sizing.size);
        assert!(mean > 10_400_000_000 / 100 * 95, "{mean}");
    }

    #[test]
    fn valley_between_two_good_sizes_is_crossed() {
        let speed = |size: u64| match size / KIB {
            0..=256 => 9_500_000_000,
            257..=1024 => 5_000_000_000,
            _ => 6_700_000_000,
        };
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.run(4 * SECOND, speed);
        assert_eq!(s.sizing.size, 256 * KIB);
    }

    #[test]
    fn equal_sizes_leave_the_ring_alone() {
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.run(60 * SECOND, |_| 1 << 30);
        assert_eq!(s.sizing.size, MIB);
        assert!(s.switches < 60, "{} switches in a minute", s.switches);
    }

    #[test]
    fn changed_speed_is_noticed_by_a_later_round() {
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.run(4 * SECOND, |size| if size <= MIB { 8 << 30 } else { 4 << 30 });
        assert_eq!(s.sizing.size, MIB);
        s.run(20 * SECOND, |size| (1 << 30) + size * 1000);
        assert_eq!(s.sizing.size, 8 * MIB);
    }

    #[test]
    fn lukewarm_stream_keeps_its_size() {
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.run(SECOND, |_| 50 << 20);
        assert_eq!((s.sizing.size, s.switches), (16 * KIB, 0));
    }

    #[test]
    fn cold_stream_shrinks_by_steps_to_where_it_began() {
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.run(SECOND, |size| (2 << 30) + size * 1000);
        assert_eq!(s.sizing.size, 8 * MIB);
        s.run(120 * SECOND, |_| 1 << 20);
        assert_eq!(s.sizing.size, 16 * KIB);
    }

    #[test]
    fn refused_changes_leave_the_present_size() {
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.run(SECOND, |_| 2 << 30);
        let size = s.sizing.size;
        s.grants = false;
        s.run(20 * SECOND, |size| (2 << 30) + size * 1000);
        assert_eq!(s.sizing.size, size);
        s.grants = true;
        s.run(40 * SECOND, |size| (2 << 30) + size * 1000);
        assert_eq!(s.sizing.size, 8 * MIB);
    }

    #[test]
    fn rising_ring_grows_to_its_limit_whatever_is_faster() {
        let mut s = Stream::new(MIB, 8 * MIB);
        s.sizing = Sizing::rising(MIB, 8 * MIB);
        s.run(20 * SECOND, |size| if size <= MIB { 8 << 30 } else { 4 << 30 });
        assert_eq!((s.sizing.size, s.switches), (8 * MIB, 1));
    }

    #[test]
    fn fixed_ring_stays() {
        let mut s = Stream::new(MIB, MIB);
        s.run(SECOND, |_| 16 << 30);
        assert_eq!(s.sizing.size, MIB);
        assert_eq!(s.sizing.fit(2 * MIB), None);
        assert_eq!(s.sizing.trim(), None);
    }

    #[test]
    fn settled_ring_stays() {
        let mut s = Stream::new(16 * KIB, 8 * MIB);
        s.sizing.settle();
        s.run(SECOND, |_| 16 << 30);
        assert_eq!(s.sizing.size, 16 * KIB);
        assert!(!s.sizing.is_due(1 << 40));
        assert_eq!(s.sizing.fit(MIB), Some(MIB));
    }

    #[test]
    fn span_grows_the_ring_to_the_power_of_two_that_fits() {
        let s = Sizing::new(4096, MIB);
        assert_eq!(s.fit(4096), None);
        assert_eq!(s.fit(4097), Some(8192));
        assert_eq!(s.fit(MIB), Some(MIB));
        assert_eq!(s.fit(MIB + 1), None);
    }
}
