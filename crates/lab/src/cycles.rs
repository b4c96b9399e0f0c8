//! How fast the processor's cycle counter counts, which emulated guests are to know.
//!
//! QEMU hands a guest the host's counter. The guest's kernel measures it against an emulated timer while it boots, and where the host is
//! busy at that moment, it measures far too little: its clock then runs many times too fast, and its time-outs strike at once.
#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "reads the cycle counter"))]

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Cycles per millisecond, measured once. `None` on processors other than x86-64.
pub(crate) fn per_millisecond() -> Option<u64> {
    static MEASURED: OnceLock<Option<u64>> = OnceLock::new();
    *MEASURED.get_or_init(measure)
}

/// Long enough that the reading of two clocks one after the other is a millionth of it.
const LENGTH: Duration = Duration::from_millis(20);

fn measure() -> Option<u64> {
    let (begin, first) = both()?;
    std::thread::sleep(LENGTH);
    let (end, last) = both()?;
    let nanoseconds = end.duration_since(begin).as_nanos();
    let cycles = u128::from(last.checked_sub(first)?);
    u64::try_from(cycles * 1_000_000 / nanoseconds).ok().filter(|n| *n > 0)
}

/// The clock and the counter at one moment: the closest of some readings, since the thread may be interrupted between the two.
fn both() -> Option<(Instant, u64)> {
    let read = || {
        let before = cycles()?;
        let now = Instant::now();
        let between = cycles()?.checked_sub(before)?;
        Some((between, (now, before + between / 2)))
    };
    (0..16).filter_map(|_| read()).min_by_key(|(between, _)| *between).map(|(_, both)| both)
}

#[cfg(target_arch = "x86_64")]
fn cycles() -> Option<u64> {
    // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it unless they ask for the contrary.
    Some(unsafe { core::arch::x86_64::_rdtsc() })
}

#[cfg(not(target_arch = "x86_64"))]
fn cycles() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn two_measurements_of_the_counter_agree() {
        let (one, other) = (super::measure().unwrap(), super::measure().unwrap());
        assert!(one.abs_diff(other) < one / 100, "{one} and {other} cycles per millisecond");
    }
}
