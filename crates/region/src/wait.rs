//! Adaptive spinning before a sleep.
//!
//! Waking a sleeper costs more than most answers take to arrive, so a waiter spins for a while first. The budget is adapted per half, as
//! in KVM's halt polling: after a short sleep, a longer spin would have caught the event; after a long one, the spin was wasted. If
//! spinning brings nothing time after time, though
//! sleeps are short, it rests for a while. A half that shares a core with its peer does not spin (protocol W6): the peer could not run
//! during the spin.
//!
//! How *often* a reader looks matters too. In a stream of small messages, one that looks after every message takes the line
//! with the cursor away from the writer each time, and both get slow (by a factor of two or three, measured). A reader that
//! pauses a little before each look finds a batch worth the trip. But where the writer waits for the reader in turn, as
//! with a few requests under way, each pause only delays both. One look cannot tell the two cases apart, so now and then a reader that
//! finds little compares the rates with and without pauses, and keeps the faster way. Where a pause does not even bring more, that is the
//! end of the trial: questions and answers pay a few
//! microseconds, ever more rarely.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The longest spin unless the user says otherwise: about twice what it costs to sleep and be woken.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(100);
/// Where spinning starts again after it had stopped.
const FIRST: Duration = Duration::from_micros(10);
/// Polls between two looks at the clock.
const BATCH: u32 = 16;
/// The most pauses before a look: a microsecond or two.
const MAX_PAUSES: u32 = 64;
/// Bytes that are worth a look at the other core's cursor, in a ring that is large enough.
const BATCH_BYTES: u64 = 64 << 10;
/// Looks over which a rate is measured.
const SAMPLE: u32 = 32;
/// Looks until pauses have their length: they double with each.
const RAMP: u32 = 8;
/// Looks for which pauses that have paid are kept before they are tried again.
const KEEP: u32 = 1024;
/// Small finds until pauses are tried, at first; four times as many after each trial that did not pay, up to the most.
const PATIENCE: u32 = 32;
const MOST_PATIENCE: u32 = 1 << 17;
/// How much faster the stream has to be with pauses.
const WORTH: f64 = 1.1;
/// The number of successive spins without result after which this half stops to spin for a while, though sleeps are short: in this case
/// the peer only runs while this side sleeps. Two virtual machines on one core of their host cannot see that they share it.
const MOST_UNSUCCESSFUL: u32 = 16;
/// The number of sleeps before it spins again.
const REST: u32 = 512;

/// The spinning of one half.
#[derive(Debug)]
pub struct Spin {
    max: Duration,
    budget: Duration,
    pace: ReadingPace,
    /// The last spin ended with its first look.
    at_once: bool,
    /// Spins that brought nothing since one did.
    unsuccessful: u32,
    /// Sleeps before spinning is tried again.
    rest: u32,
}

/// How long a reader pauses before it looks.
///
/// ```text
///            enough small finds             SAMPLE looks            RAMP + SAMPLE looks
///   Unpaced -------------------> Comparing ------------> Trying ----------------------> Paced
///      ^                             ^                     |  it was faster               |
///      +-----------------------------|---------------------+                              |
///         it was not: more patience  +------------------------- KEEP looks ---------------+
/// ```
#[derive(Debug)]
struct ReadingPace {
    phase: PacePhase,
    /// Pauses before the next look.
    pauses: u32,
    /// Looks of this phase to come; of [`PacePhase::Unpaced`], small finds.
    left: u32,
    /// Bytes found while the rate is measured, and since when that is.
    bytes: u64,
    since: Duration,
    /// The average find of a look without pauses, and the rate in bytes per second.
    unpaced_find: u64,
    unpaced_rate: f64,
    patience: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PacePhase {
    /// No pauses.
    Unpaced,
    /// No pauses, and the rate is measured.
    Comparing,
    /// With pauses, and the rate is measured.
    Trying,
    /// The reader pauses before each look.
    Paced,
}

impl ReadingPace {
    const fn new() -> Self {
        Self {
            phase: PacePhase::Unpaced,
            pauses: 0,
            left: PATIENCE,
            bytes: 0,
            since: Duration::ZERO,
            unpaced_find: 0,
            unpaced_rate: 0.0,
            patience: PATIENCE,
        }
    }

    /// Learns from one look that found `bytes`, of which `batch` are worth it.
    #[inline]
    fn found(&mut self, bytes: u64, batch: u64, at_once: bool, now: impl FnOnce() -> Duration) {
        let small = bytes < batch;
        if self.phase == PacePhase::Unpaced && !small {
            self.left = (self.left + 1).min(self.patience);
            return;
        }
        self.left -= 1;
        match self.phase {
            PacePhase::Unpaced | PacePhase::Comparing => {}
            // Whether it was there at once says nothing yet: reader and writer may go in step, message by message.
            PacePhase::Trying if self.left >= SAMPLE => self.lengthen(small),
            PacePhase::Trying | PacePhase::Paced => self.lengthen(small && at_once),
        }
        self.bytes += bytes;
        if self.left == 0 {
            self.turn(now());
        } else if self.phase == PacePhase::Trying && self.left == SAMPLE {
            if bytes <= self.unpaced_find + self.unpaced_find / 2 {
                self.give_up();
            }
            (self.bytes, self.since) = (0, now());
        }
    }

    fn lengthen(&mut self, longer: bool) {
        self.pauses = if longer { (self.pauses * 2).clamp(1, MAX_PAUSES) } else { self.pauses / 2 };
    }

    /// The next phase.
    #[cold]
    fn turn(&mut self, now: Duration) {
        let rate = self.bytes as f64 / now.saturating_sub(self.since).as_secs_f64().max(1e-9);
        match self.phase {
            PacePhase::Unpaced | PacePhase::Paced => {
                (self.phase, self.left, self.pauses) = (PacePhase::Comparing, SAMPLE, 0);
            }
            PacePhase::Comparing => {
                (self.phase, self.left) = (PacePhase::Trying, RAMP + SAMPLE);
                (self.unpaced_find, self.unpaced_rate) = (self.bytes / u64::from(SAMPLE), rate);
            }
            PacePhase::Trying if rate > self.unpaced_rate * WORTH => {
                (self.phase, self.left, self.patience) = (PacePhase::Paced, KEEP, PATIENCE);
            }
            PacePhase::Trying => self.give_up(),
        }
        (self.bytes, self.since) = (0, now);
    }

    /// Pauses do not pay.
    fn give_up(&mut self) {
        self.patience = (self.patience * 4).min(MOST_PATIENCE);
        (self.phase, self.left, self.pauses) = (PacePhase::Unpaced, self.patience, 0);
    }

    /// Time in which nothing could be found tells nothing of the rate: a comparison under way begins again.
    fn interrupted(&mut self) {
        if matches!(self.phase, PacePhase::Comparing | PacePhase::Trying) {
            (self.phase, self.left, self.pauses) = (PacePhase::Unpaced, 1, 0);
        }
    }
}

impl Spin {
    /// Spins at most `max` per wait; zero means: sleep at once.
    pub fn new(max: Duration) -> Self {
        Self { max, budget: max, pace: ReadingPace::new(), at_once: false, unsuccessful: 0, rest: 0 }
    }

    /// Pauses before a look, where that has been found to pay.
    #[inline]
    pub fn pause(&self) {
        if !self.budget.is_zero() {
            for _ in 0..self.pace.pauses {
                std::hint::spin_loop();
            }
        }
    }

    /// Polls `ready` until it returns true, fails, or the budget is used up. `Ok(true)` if it became ready.
    ///
    /// `hopeless` is asked now and then whether to give up earlier.
    #[inline]
    pub fn spin<E>(
        &mut self,
        mut ready: impl FnMut() -> Result<bool, E>,
        mut hopeless: impl FnMut() -> bool,
    ) -> Result<bool, E> {
        self.at_once = false;
        if self.budget.is_zero() {
            return Ok(false);
        }
        if ready()? {
            self.at_once = true;
            return Ok(true);
        }
        // Most waits of a busy connection end within nanoseconds: the clock is not read for them.
        for _ in 0..BATCH {
            if ready()? {
                self.unsuccessful = 0;
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        loop {
            for _ in 0..BATCH {
                if ready()? {
                    self.unsuccessful = 0;
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.budget || hopeless() {
                self.unsuccessful += 1;
                return Ok(false);
            }
        }
    }

    /// Learns from a reader's look that found `bytes`, in a ring of `ring` bytes, without a wait.
    #[inline]
    pub fn found_at_once(&mut self, bytes: u64, ring: u64) {
        self.at_once = true;
        self.found(bytes, ring);
    }

    /// Adapts to the number of bytes that a reader's wait brought, in a ring of `ring` bytes.
    ///
    /// A batch is at most an eighth of the ring: the writer must not run out of room while the reader pauses.
    #[inline]
    pub fn found(&mut self, bytes: u64, ring: u64) {
        let at_once = std::mem::take(&mut self.at_once);
        if !self.budget.is_zero() {
            self.pace.found(bytes, BATCH_BYTES.min(ring / 8), at_once, monotonic);
        }
    }

    /// Learns from a sleep of the given length that followed a spin that found nothing.
    pub fn slept(&mut self, time: Duration) {
        self.pace.interrupted();
        if self.unsuccessful >= MOST_UNSUCCESSFUL {
            (self.unsuccessful, self.rest, self.budget) = (0, REST, Duration::ZERO);
        }
        if self.rest > 0 {
            self.rest -= 1;
        } else if time <= self.max {
            self.budget = (self.budget * 2).max(FIRST).min(self.max);
        } else {
            self.budget /= 2;
            if self.budget < FIRST {
                self.budget = Duration::ZERO;
            }
        }
    }

    /// How long the next wait would spin.
    pub fn budget(&self) -> Duration {
        self.budget
    }
}

fn monotonic() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the C library writes one structure; the clock exists on every Linux.
    #[expect(unsafe_code, reason = "the C library's clock: rustix' own way to it ends programs that valgrind runs")]
    unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now)
    };
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// The core this thread is on, as the `cpu` word wants it (protocol W6).
#[inline]
pub fn this_core() -> u32 {
    // SAFETY: takes and changes nothing.
    #[expect(unsafe_code, reason = "the C library's, as the clock")]
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).map_or(0, |cpu| cpu.wrapping_add(1))
}

/// Publishes the core this thread is on, if it has changed: the word shares a line that the peer reads often.
#[inline]
pub fn publish_core(word: &AtomicU32) -> u32 {
    let core = this_core();
    if word.load(Ordering::Relaxed) != core {
        word.store(core, Ordering::Relaxed);
    }
    core
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_lengthen_the_spin_and_long_ones_end_it() {
        let max = Duration::from_micros(100);
        let mut s = Spin::new(max);
        for _ in 0..10 {
            s.slept(Duration::from_millis(5));
        }
        assert_eq!(s.budget(), Duration::ZERO);
        s.slept(Duration::from_micros(30));
        assert_eq!(s.budget(), FIRST);
        for _ in 0..10 {
            s.slept(Duration::from_micros(30));
        }
        assert_eq!(s.budget(), max);
    }

    #[test]
    fn zero_limit_never_spins() {
        let mut s = Spin::new(Duration::ZERO);
        s.slept(Duration::ZERO);
        assert_eq!(s.budget(), Duration::ZERO);
        assert_eq!(s.spin::<()>(|| unreachable!(), || false), Ok(false));
    }

    #[test]
    fn repeated_spin_failures_suspend_spinning() {
        let mut s = Spin::new(Duration::from_micros(20));
        // One wait, in which nothing is found, or something after that many looks; then a short sleep.
        fn wait(s: &mut Spin, after: Option<u32>) {
            let mut looks = 0;
            let ready = || {
                looks += 1;
                Ok::<_, ()>(after.is_some_and(|after| looks > after))
            };
            assert_eq!(s.spin(ready, || true), Ok(after.is_some() && !s.budget().is_zero()));
            s.slept(Duration::from_micros(1));
        }
        for _ in 0..MOST_UNSUCCESSFUL {
            assert!(!s.budget().is_zero());
            wait(&mut s, None);
        }
        for _ in 1..REST {
            assert!(s.budget().is_zero());
            wait(&mut s, None);
        }
        wait(&mut s, None);
        // Then it is tried again; and while some bring something, soon or late, all count as useful.
        for soon_or_late in [1, BATCH + 1] {
            for round in 0..4 * MOST_UNSUCCESSFUL {
                assert!(!s.budget().is_zero(), "{round}");
                wait(&mut s, (round % 4 == 0).then_some(soon_or_late));
            }
        }
    }

    #[test]
    fn spin_ends_at_readiness_budget_or_error() {
        let mut s = Spin::new(Duration::from_micros(50));
        let mut n = 0;
        assert_eq!(
            s.spin::<()>(
                || {
                    n += 1;
                    Ok(n == 100)
                },
                || false
            ),
            Ok(true)
        );
        assert_eq!(s.spin::<()>(|| Ok(false), || false), Ok(false));
        assert_eq!(s.spin(|| Err("corrupt"), || false), Err("corrupt"));
    }

    /// Lets a reader look this many times at a peer for whom `look` says, of the pauses before it, what a look finds, whether
    /// at once, and what time it takes. Returns the sum of the pauses.
    fn reader(pace: &mut ReadingPace, looks: u32, mut look: impl FnMut(u32) -> (u64, bool, Duration)) -> u32 {
        let mut now = Duration::ZERO;
        let mut paused = 0;
        for _ in 0..looks {
            let (bytes, at_once, time) = look(pace.pauses);
            paused += pace.pauses;
            now += time;
            pace.found(bytes, BATCH_BYTES, at_once, || now);
        }
        paused
    }

    fn nanos(n: u32) -> Duration {
        Duration::from_nanos(n.into())
    }

    /// A look costs the writer 150 ns; without looks it writes 4 KiB in 80. Without pauses the reader waits for each.
    fn stream(pauses: u32) -> (u64, bool, Duration) {
        (u64::from(1 + pauses * 15 / 80) * 4096, pauses > 5, nanos(pauses * 15 + 80 + 150))
    }

    /// Few requests are under way, however long one waits for more.
    fn requests(pauses: u32) -> (u64, bool, Duration) {
        ((64 * u64::from(pauses + 1)).min(512), pauses > 3, nanos(pauses * 15 + 150))
    }

    #[test]
    fn pauses_that_bring_batches_faster_are_kept() {
        let mut pace = ReadingPace::new();
        let paused = reader(&mut pace, 10_000, stream);
        assert!(paused > 9_000 * MAX_PAUSES, "{paused} pauses before 10,000 looks");
        reader(&mut pace, 2 * KEEP, |_| (BATCH_BYTES, true, nanos(6000)));
        assert_eq!(pace.pauses, 0, "batches need none");
    }

    #[test]
    fn pauses_that_a_waiting_peer_waits_for_too_are_given_up() {
        let mut pace = ReadingPace::new();
        let paused = reader(&mut pace, 200_000, requests);
        assert!(paused < 8 * (RAMP + SAMPLE) * MAX_PAUSES, "{paused} pauses before 200,000 looks");
        // The same peer starts to stream. The reader notices it, though later after each unsuccessful trial.
        reader(&mut pace, MOST_PATIENCE * 2, stream);
        assert!(pace.phase != PacePhase::Unpaced, "a stream is read without pauses");
    }

    #[test]
    fn pauses_that_bring_nothing_end_before_they_are_measured() {
        let mut pace = ReadingPace::new();
        let paused = reader(&mut pace, 10_000, |pauses| (64, pauses > 10, nanos(150.max(pauses * 15))));
        assert!((1..5 * 2 * MAX_PAUSES).contains(&paused), "{paused} pauses before 10,000 answers");
    }

    #[test]
    fn sleep_discards_undecided_pacing_trial() {
        let mut pace = ReadingPace::new();
        reader(&mut pace, PATIENCE + SAMPLE + RAMP + 1, stream);
        assert_eq!(pace.phase, PacePhase::Trying);
        pace.interrupted();
        assert_eq!((pace.phase, pace.pauses), (PacePhase::Unpaced, 0));
        reader(&mut pace, 1 + SAMPLE + RAMP + SAMPLE, stream);
        assert_eq!((pace.phase, pace.patience), (PacePhase::Paced, PATIENCE));
        pace.interrupted();
        assert_eq!(pace.phase, PacePhase::Paced, "what has been decided stays");
    }

    #[test]
    fn find_at_first_look_of_spin_counts_as_at_once() {
        let mut s = Spin::new(Duration::from_secs(3600));
        (s.pace.phase, s.pace.left) = (PacePhase::Paced, KEEP);
        let (mut first, mut later) = (std::iter::repeat(true), [false, true].into_iter().cycle());
        for pauses in [1, 2, 4, 8] {
            assert_eq!(s.spin::<()>(|| Ok(first.next() == Some(true)), || false), Ok(true));
            s.found(64, 1 << 20);
            assert_eq!(s.pace.pauses, pauses);
        }
        assert_eq!(s.spin::<()>(|| Ok(later.next() == Some(true)), || false), Ok(true));
        s.found(64, 1 << 20);
        assert_eq!(s.pace.pauses, 4, "it had to be waited for");
        s.found_at_once(64, 1 << 20);
        assert_eq!(s.pace.pauses, 8);
        s.found_at_once(8 << 10, 64 << 10);
        assert_eq!(s.pace.pauses, 4, "an eighth of the ring is a batch");
    }

    #[test]
    fn spin_ends_on_request() {
        let mut endless = Spin::new(Duration::from_secs(3600));
        assert_eq!(endless.spin::<()>(|| Ok(false), || true), Ok(false));
    }
}
