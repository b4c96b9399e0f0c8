//! Threads that wait for locks. The server never waits, so a client that wants to asks again and again.
//!
//! `fuser` does not pass on the kernel's interrupts, so a waiting process could not be killed. The thread that asks for it looks at the process's
//! pending signals instead, and answers `EINTR` as soon as there is one that is not blocked or ignored.

use std::time::Duration;

/// The first and the longest pause between two questions.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// Asks until `ask` has an answer other than `EAGAIN`, or until a signal for the thread `pid` is pending.
pub(crate) fn wait<T>(pid: u32, mut ask: impl FnMut() -> Result<T, rustix::io::Errno>) -> Result<T, rustix::io::Errno> {
    let mut pause = PAUSES.0;
    loop {
        match ask() {
            Err(rustix::io::Errno::AGAIN) => {}
            other => return other,
        }
        if has_signal(pid) {
            return Err(rustix::io::Errno::INTR);
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
