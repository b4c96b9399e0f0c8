//! How the broker's threads rank among all that want a processor.
//!
//! The event loop answers everybody in microseconds and then sleeps, and no user gets more than a share of its time (protocol C16).
//! So it may go before programs that keep all processors busy, and everybody's answers come sooner. What works for one user or
//! machine alone (readers, attendants of machines) ranks as any program does: it must not use a processor at others' expense.

use rustix::process::{getpriority_process, setpriority_process};

/// The nice value of the event loop, if it may have that.
const URGENT: i32 = -10;
/// The nice value that programs have unless somebody says otherwise.
const ORDINARY: i32 = 0;

/// Has the calling thread go before ordinary ones, unless the operator has chosen a priority. Without
/// `CAP_SYS_NICE`, or a limit (`RLIMIT_NICE`) that allows it, the thread stays as it is.
pub fn raise() {
    // For Linux, "this process" is the calling thread here.
    if getpriority_process(None) == Ok(ORDINARY)
        && let Err(error) = setpriority_process(None, URGENT)
    {
        tracing::debug!(%error, "the broker runs at an ordinary priority: while others keep all processors busy, answers come later");
    }
}

/// Has the calling thread rank as any program does, though the thread that made it goes before them.
pub(crate) fn lower() {
    if getpriority_process(None).is_ok_and(|nice| nice < ORDINARY) {
        // Nobody needs a right for that.
        let _ = setpriority_process(None, ORDINARY);
    }
}
