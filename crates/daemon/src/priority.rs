//! The scheduling priority of the broker's threads.
//!
//! The event loop serves all users, and no user gets more than a share of its time (protocol C16). It runs at a higher priority than
//! ordinary programs, so answers come soon while other programs keep all processors busy. A reader, which works for one user, has
//! that priority while it uses little (C16.1). Other threads and processes that work for one user or one machine run at the ordinary
//! priority: at a higher one, that user could take a processor from others.
//!
//! All of them ask the scheduler for short slices instead. A thread with a short slice runs soon after it is woken, also while threads
//! with longer slices keep all processors busy, and is interrupted sooner in turn. Its share of the processors stays the same, so no user
//! gains time by it, and no right is needed.
#![expect(unsafe_code, reason = "a system call that neither rustix nor nix has")]

use std::io;

use rustix::process::{getpriority_process, setpriority_process};

/// The nice value of the event loop, if it may have that.
const URGENT: i32 = -10;
/// The shortest slice that Linux grants, in nanoseconds. A packet takes less.
const SLICE: u64 = 100_000;
/// The nice value that programs have unless somebody says otherwise.
const ORDINARY: i32 = 0;

/// Raises the calling thread's priority above the ordinary one, unless the operator has chosen a priority. Without `CAP_SYS_NICE` or a
/// limit (`RLIMIT_NICE`) that allows it, the priority stays as it is.
pub fn raise() {
    if is_ordinary()
        && let Err(error) = try_raise()
    {
        tracing::debug!(%error, "the broker runs at an ordinary priority: while others keep all processors busy, answers come later");
    }
}

/// Whether the calling thread runs at the ordinary priority.
pub(crate) fn is_ordinary() -> bool {
    getpriority_process(None) == Ok(ORDINARY)
}

/// Raises the calling thread's priority, whatever it is.
pub(crate) fn try_raise() -> rustix::io::Result<()> {
    // Linux applies this call to the calling thread alone.
    setpriority_process(None, URGENT)
}

/// Linux's `struct sched_attr`, as of its first version.
#[repr(C)]
struct SchedulingAttributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks for short slices for the calling thread, and for processes that it forks from now on, if its policy is the ordinary one. Kernels
/// before 6.12 take no notice.
///
/// # Errors
/// The system calls are forbidden, for example by a filter. Everything works all the same.
pub fn shorten_slices() -> io::Result<()> {
    let mut now =
        SchedulingAttributes { size: 0, policy: 0, flags: 0, nice: 0, priority: 0, runtime: 0, deadline: 0, period: 0 };
    let size = size_of::<SchedulingAttributes>() as u32;
    // SAFETY: the kernel writes at most `size` bytes into the structure, about the calling thread (0).
    if unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut now, size, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if now.policy != libc::SCHED_OTHER.cast_unsigned() {
        // An operator has chosen another.
        return Ok(());
    }
    let short = SchedulingAttributes { size, flags: 0, runtime: SLICE, deadline: 0, period: 0, ..now };
    // SAFETY: the kernel reads `size` bytes of the structure.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const short, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the calling thread back to the ordinary priority, if it inherited a higher one.
pub(crate) fn lower() {
    if getpriority_process(None).is_ok_and(|nice| nice < ORDINARY) {
        // Lowering a priority needs no right, so this does not fail.
        let _ = setpriority_process(None, ORDINARY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_slices_leave_priority_and_policy_as_they_are() {
        let thread = std::thread::spawn(|| {
            let before = getpriority_process(None);
            shorten_slices().unwrap();
            // SAFETY: a question about the calling thread.
            let policy = unsafe { libc::sched_getscheduler(0) };
            (before == getpriority_process(None), policy)
        });
        assert_eq!(thread.join().unwrap(), (true, libc::SCHED_OTHER));
    }
}
