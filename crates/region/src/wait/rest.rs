//! When spinning rests: while the peer runs only when this side sleeps.

use std::time::Duration;

/// The number of successive spins without result, each followed by a shorter sleep, after which spinning rests.
const MOST_UNSUCCESSFUL: u8 = 16;
/// The same after a rest.
const TRIALS: u8 = 2;
/// The number of sleeps of the first rest. It is small, because on a busy host other processes can take the peer's processor away for a while.
const SHORTEST: u16 = 16;
/// Each rest since a spin had a result is twice as long as the one before it, up to 4,096 sleeps.
const MOST_DOUBLINGS: u8 = 8;

/// Whether spinning rests, though sleeps are short. Two virtual machines on one processor of their host cannot see that they share it: each
/// spin then keeps the peer from running. A spin without result that is followed by a shorter sleep is a sign of that. A longer sleep is not,
/// since the peer may only have been slow.
///
/// It fits into a word, so that threads can share it. Threads that change it at the same time may lose a count.
///
/// ```
/// use partywall_region::wait::{SpinRest, SpinStep};
/// use std::time::Duration;
///
/// let mut rest = SpinRest::default();
/// let (spin, sleep) = (Duration::from_micros(50), Duration::from_micros(20));
/// for _ in 0..15 {
///     rest.spun(Some(spin));
///     assert_eq!(rest.slept(sleep), SpinStep::Learn);
/// }
/// rest.spun(Some(spin));
/// assert_eq!(rest.slept(sleep), SpinStep::Rest);
/// assert_eq!(SpinRest::from_word(rest.to_word()), rest);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpinRest {
    /// The length of the last spin in nanoseconds, if it had no result; otherwise 0.
    wasted: u32,
    /// Spins without result that were followed by a shorter sleep, since a spin had a result or the last rest.
    unsuccessful: u8,
    /// Sleeps until the present rest ends.
    left: u16,
    /// Rests since a spin had a result.
    rests: u8,
}

/// What a sleep means for the next spin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpinStep {
    /// The length of the sleep says how long to spin.
    Learn,
    /// Do not spin before the next sleep.
    Rest,
    /// The rest is over: spin for the longest time. The peer may be asleep now as well, and needs time to wake.
    Retry,
}

impl SpinRest {
    /// The words of [`SpinRest::to_word`].
    pub const fn from_word(word: u64) -> Self {
        let [a, b, c, d, unsuccessful, low, high, rests] = word.to_le_bytes();
        Self { wasted: u32::from_le_bytes([a, b, c, d]), unsuccessful, left: u16::from_le_bytes([low, high]), rests }
    }

    /// A word with the same content. That of a new one is 0.
    pub const fn to_word(self) -> u64 {
        let ([a, b, c, d], [low, high]) = (self.wasted.to_le_bytes(), self.left.to_le_bytes());
        u64::from_le_bytes([a, b, c, d, self.unsuccessful, low, high, self.rests])
    }

    /// A spin has ended: with a result, or without one after this time. What was there at the first look is no result.
    #[inline]
    pub fn spun(&mut self, wasted: Option<Duration>) {
        match wasted {
            None => *self = Self { left: self.left, ..Self::default() },
            Some(time) => self.wasted = nanos(time),
        }
    }

    /// A sleep of this length has ended.
    pub fn slept(&mut self, time: Duration) -> SpinStep {
        let wasted = std::mem::take(&mut self.wasted);
        if self.left > 0 {
            self.left -= 1;
            return if self.left == 0 { SpinStep::Retry } else { SpinStep::Rest };
        }
        if wasted > 0 && nanos(time) <= wasted {
            self.unsuccessful = self.unsuccessful.saturating_add(1);
        }
        if self.unsuccessful < if self.rests == 0 { MOST_UNSUCCESSFUL } else { TRIALS } {
            return SpinStep::Learn;
        }
        self.unsuccessful = 0;
        self.left = SHORTEST << self.rests.min(MOST_DOUBLINGS);
        self.rests = self.rests.saturating_add(1);
        SpinStep::Rest
    }
}

fn nanos(time: Duration) -> u32 {
    u32::try_from(time.as_nanos()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPIN: Option<Duration> = Some(Duration::from_micros(50));
    const SHORT: Duration = Duration::from_micros(20);

    /// The number of sleeps until spinning is tried again.
    fn length(rest: &mut SpinRest) -> u32 {
        (1..).find(|_| rest.slept(SHORT) == SpinStep::Retry).unwrap()
    }

    fn wasted_spins(rest: &mut SpinRest, most: u8) {
        for spin in 1..=most {
            rest.spun(SPIN);
            let step = if spin == most { SpinStep::Rest } else { SpinStep::Learn };
            assert_eq!(rest.slept(SHORT), step, "spin {spin} of {most}");
        }
    }

    #[test]
    fn rests_double_until_a_spin_has_a_result() {
        let mut rest = SpinRest::default();
        wasted_spins(&mut rest, MOST_UNSUCCESSFUL);
        for doublings in 0..12 {
            assert_eq!(length(&mut rest), 16 << doublings.min(8));
            wasted_spins(&mut rest, TRIALS);
        }
        length(&mut rest);
        rest.spun(None);
        assert_eq!(rest, SpinRest::default());
    }

    #[test]
    fn longer_sleep_or_result_is_no_sign() {
        let mut rest = SpinRest::default();
        for _ in 0..100 {
            rest.spun(SPIN);
            assert_eq!(rest.slept(Duration::from_micros(60)), SpinStep::Learn);
            assert_eq!(rest.slept(SHORT), SpinStep::Learn, "no spin before it");
        }
        for spin in 0..100 {
            rest.spun(SPIN.filter(|_| spin % 8 > 0));
            assert_eq!(rest.slept(SHORT), SpinStep::Learn);
        }
    }

    #[test]
    fn word_has_the_whole_content() {
        let rest = SpinRest { wasted: 0x1234_5678, unsuccessful: 0x9a, left: 0xbcde, rests: 0xf0 };
        assert_eq!(SpinRest::from_word(rest.to_word()), rest);
        assert_eq!(SpinRest::default().to_word(), 0);
    }
}
