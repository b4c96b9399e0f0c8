//! The clock that both processes share.

use std::time::Duration;

use rustix::{
    thread::{ClockId as Sleeper, clock_nanosleep_absolute},
    time::{ClockId, Timespec, clock_gettime},
};

/// Nanoseconds on the machine's monotonic clock: the same in every process.
pub(crate) fn now() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

/// Sleeps until the clock shows `at`.
pub(super) fn sleep_until(at: u64) {
    let at = Timespec { tv_sec: (at / 1_000_000_000).cast_signed(), tv_nsec: (at % 1_000_000_000) as i64 };
    while clock_nanosleep_absolute(Sleeper::Monotonic, &at) == Err(rustix::io::Errno::INTR) {}
}

/// The difference between two readings.
pub(super) fn between(start: u64, end: u64) -> Duration {
    Duration::from_nanos(end.saturating_sub(start))
}

pub(super) fn nanoseconds(t: Timespec) -> u64 {
    t.tv_sec.cast_unsigned() * 1_000_000_000 + t.tv_nsec.cast_unsigned()
}
