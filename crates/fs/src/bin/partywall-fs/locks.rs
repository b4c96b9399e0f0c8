//! Threads that wait for locks. The server never waits, so a client that wants to asks again and again.
//!
//! `fuser` does not pass on the kernel's interrupts, so a waiting process could not be killed. The thread that asks for it looks at the process's
//! pending signals instead, and answers `EINTR` as soon as there is one that is not blocked or ignored. The kernel turns `EINTR` into
//! `ERESTARTSYS`, which a program without a signal would get as an unknown error. So a wait that ends without one fails with `EAGAIN`.

use rustix::io::Errno;
use std::time::{Duration, Instant};

/// The first and the longest pause between two questions.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The longest that a thread of another PID namespace waits. Until then it cannot be killed.
const LONGEST_BLIND_WAIT: Duration = Duration::from_secs(30);

/// Asks until `ask` has an answer other than `EAGAIN`, or until a signal for the thread `pid` is pending. For a thread of another PID namespace,
/// whose signals are not known, it asks for [`LONGEST_BLIND_WAIT`] at most, and then returns `EAGAIN`.
pub(crate) fn wait<T>(pid: u32, ask: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    wait_blindly_for(LONGEST_BLIND_WAIT, pid, ask)
}

fn wait_blindly_for<T>(longest: Duration, pid: u32, mut ask: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let (begin, mut pause) = (Instant::now(), PAUSES.0);
    loop {
        match ask() {
            Err(Errno::AGAIN) => {}
            other => return other,
        }
        if has_signal(pid) {
            return Err(Errno::INTR);
        }
        if pid == 0 && begin.elapsed() >= longest {
            return Err(Errno::AGAIN);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Whether a thread has a signal to take, or is gone. A thread of another pid namespace has the number 0 and is not known.
fn has_signal(pid: u32) -> bool {
    if pid == 0 {
        return false;
    }
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| u64::from_str_radix(line.trim_start_matches(':').trim(), 16).ok()).unwrap_or(0)
    };
    (mask("SigPnd") | mask("ShdPnd")) & !mask("SigBlk") & !mask("SigIgn") != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A lock that is free at the third question.
    fn third(asked: &Cell<u32>) -> Result<(), Errno> {
        asked.set(asked.get() + 1);
        if asked.get() < 3 { Err(Errno::AGAIN) } else { Ok(()) }
    }

    #[test]
    fn wait_of_unknown_thread_ends_after_its_time() {
        let asked = Cell::new(0);
        assert_eq!(wait_blindly_for(Duration::ZERO, 0, || third(&asked)), Err(Errno::AGAIN));
        assert_eq!(asked.get(), 1);
        assert_eq!(wait_blindly_for(LONGEST_BLIND_WAIT, 0, || third(&asked)), Ok(()));
    }

    #[test]
    fn wait_of_known_thread_without_signals_goes_on() {
        let asked = Cell::new(0);
        assert_eq!(wait_blindly_for(Duration::ZERO, std::process::id(), || third(&asked)), Ok(()));
    }
}
