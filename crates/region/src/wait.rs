//! How long to spin before sleeping.
//!
//! Waking a sleeper costs more than most answers take to arrive, so a waiter spins for a while first. How long that pays is
//! learned per half, as KVM's halt polling does: a wait that ended soon after falling asleep says that spinning
//! longer would have caught it, a long sleep says that spinning was wasted. Nobody spins who shares a core with
//! the peer (protocol W6): the peer could not get ahead meanwhile.
//!
//! How *often* a spinning reader looks matters too. In a stream of small messages, one that looks after every message takes
//! the line with the cursor away from the writer each time, and both get slow (by a factor of three, measured). So when
//! what it waits for is there at its very first look, and little of it, it pauses a little before the next first look, and
//! longer each time until it finds a batch worth the trip. When it is not there, as in question and answer, it does not.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The longest spin unless the user says otherwise: about twice what it costs to sleep and be woken.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(100);
/// Where spinning starts again after it had stopped.
const FIRST: Duration = Duration::from_micros(10);
/// Polls between two looks at the clock.
const BATCH: u32 = 16;
/// The most pauses before the first look: a microsecond or two.
const MAX_PACE: u32 = 64;
/// Bytes that are worth a look at the other core's cursor, in a ring that is large enough.
const BATCH_BYTES: u64 = 64 << 10;

/// The spinning of one half.
#[derive(Debug)]
pub struct Spin {
    max: Duration,
    budget: Duration,
    /// Pauses before the first look.
    pace: u32,
    /// The last spin ended with its first look.
    at_once: bool,
}

impl Spin {
    /// Spins at most `max` per wait; zero means: sleep at once.
    pub fn new(max: Duration) -> Self {
        Self { max, budget: max, pace: 0, at_once: false }
    }

    /// Polls `ready` until it says so, fails, or the budget is used up. `Ok(true)` if it became ready.
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
        for _ in 0..self.pace {
            std::hint::spin_loop();
        }
        if ready()? {
            self.at_once = true;
            return Ok(true);
        }
        // Most waits of a busy connection end within nanoseconds: the clock is not read for them.
        for _ in 0..BATCH {
            if ready()? {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        loop {
            for _ in 0..BATCH {
                if ready()? {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.budget || hopeless() {
                return Ok(false);
            }
        }
    }

    /// Learns from how many bytes of a ring of `ring` bytes a reader's wait brought.
    ///
    /// What is a batch is an eighth of the ring at most: the writer must not run out of room while the reader pauses.
    #[inline]
    pub fn found(&mut self, bytes: u64, ring: u64) {
        let batch = BATCH_BYTES.min(ring / 8);
        self.pace = if self.at_once && bytes < batch { (self.pace * 2).clamp(1, MAX_PACE) } else { self.pace / 2 };
    }

    /// Learns from a sleep of the given length that followed a spin in vain.
    pub fn slept(&mut self, time: Duration) {
        if time <= self.max {
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

/// The core this thread is on, as the `cpu` word wants it (protocol W6).
#[inline]
pub fn this_core() -> u32 {
    u32::try_from(rustix::thread::sched_getcpu()).map_or(0, |cpu| cpu.wrapping_add(1))
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
    fn a_zero_limit_never_spins() {
        let mut s = Spin::new(Duration::ZERO);
        s.slept(Duration::ZERO);
        assert_eq!(s.budget(), Duration::ZERO);
        assert_eq!(s.spin::<()>(|| unreachable!(), || false), Ok(false));
    }

    #[test]
    fn spinning_ends_with_readiness_or_the_budget_and_passes_errors_on() {
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

    #[test]
    fn small_finds_at_the_first_look_lengthen_the_pause_before_it_and_batches_end_it() {
        let mut s = Spin::new(Duration::from_micros(50));
        for _ in 0..10 {
            assert_eq!(s.spin::<()>(|| Ok(true), || false), Ok(true));
            s.found(64, 1 << 20);
        }
        assert_eq!(s.pace, MAX_PACE);
        for _ in 0..10 {
            assert_eq!(s.spin::<()>(|| Ok(true), || false), Ok(true));
            s.found(BATCH_BYTES, 1 << 20);
        }
        assert_eq!(s.pace, 0);
        let mut looks = 0;
        let second_look = || {
            looks += 1;
            Ok(looks > 1)
        };
        assert_eq!(s.spin::<()>(second_look, || false), Ok(true));
        s.found(64, 1 << 20);
        assert_eq!(s.pace, 0, "an answer that had to be waited for");
    }

    #[test]
    fn a_spin_can_be_given_up() {
        let mut endless = Spin::new(Duration::from_secs(3600));
        assert_eq!(endless.spin::<()>(|| Ok(false), || true), Ok(false));
    }
}
