//! The scheduling priority of the broker's threads.
//!
//! The event loop serves all users, and no user gets more than a share of its time (protocol C16). It runs at a higher priority than
//! ordinary programs, so answers come soon while other programs keep all processors busy. Threads and processes that work for one
//! user or one machine (readers, attendants of machines) run at the ordinary priority: at a higher one, that user could take a
//! processor from others.

use rustix::process::{getpriority_process, setpriority_process};

/// The nice value of the event loop, if it may have that.
const URGENT: i32 = -10;
/// The nice value that programs have unless somebody says otherwise.
const ORDINARY: i32 = 0;

/// Raises the calling thread's priority above the ordinary one, unless the operator has chosen a priority. Without `CAP_SYS_NICE` or a
/// limit (`RLIMIT_NICE`) that allows it, the priority stays as it is.
pub fn raise() {
    // Linux applies this call to the calling thread alone.
    if getpriority_process(None) == Ok(ORDINARY)
        && let Err(error) = setpriority_process(None, URGENT)
    {
        tracing::debug!(%error, "the broker runs at an ordinary priority: while others keep all processors busy, answers come later");
    }
}

/// Sets the calling thread back to the ordinary priority, if it inherited a higher one.
pub(crate) fn lower() {
    if getpriority_process(None).is_ok_and(|nice| nice < ORDINARY) {
        // Lowering a priority needs no right, so this does not fail.
        let _ = setpriority_process(None, ORDINARY);
    }
}
