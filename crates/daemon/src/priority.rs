//! The scheduling priority of the broker's threads.
//!
//! The event loop serves all users, and no user gets more than a share of its time (protocol C16). It runs in real time, within limits
//! (C16.6), so answers come soon while other programs keep all processors busy. Where it may not, it runs at a higher priority than
//! ordinary programs. A reader, which works for one user, has that priority while it uses little (C16.1). Other threads and processes
//! that work for one user or one machine run at the ordinary priority: at a higher one, that user could take a processor from others.
//!
//! All of them ask the scheduler for short slices instead. A thread with a short slice runs soon after it is woken, also while threads
//! with longer slices keep all processors busy, and is interrupted sooner in turn. Its share of the processors stays the same, so no user
//! gains time by it, and no right is needed.
#![expect(unsafe_code, reason = "a system call that neither rustix nor nix has")]

use std::io;

use rustix::process::{getpriority_process, setpriority_process};

/// The nice value of the event loop outside of real time, and of a reader that uses little, if they may have that.
const URGENT: i32 = -20;
/// The real-time priority of the event loop: the lowest. Programs that the operator runs in real time keep going before it.
const REAL_TIME: libc::c_int = 1;
/// The shortest slice that Linux grants, in nanoseconds. A packet takes less.
const SLICE: u64 = 100_000;
/// The nice value that programs have unless somebody says otherwise.
const ORDINARY: i32 = 0;

/// Raises the calling thread's priority above the ordinary one, unless the operator has chosen a priority, and asks for short slices. Without
/// `CAP_SYS_NICE` or a limit (`RLIMIT_NICE`) that allows it, the priority stays as it is.
pub(crate) fn raise() {
    if is_ordinary()
        && let Err(error) = try_raise()
    {
        tracing::debug!(%error, "the broker runs at an ordinary priority: while others keep all processors busy, answers come later");
    }
    if let Err(error) = shorten_slices() {
        tracing::debug!(%error, "the broker has slices of the usual length: while others keep all processors busy, answers come later");
    }
}

/// Makes the calling thread a real-time thread, of the lowest such priority. Threads and processes that it makes are ordinary ones.
///
/// # Errors
/// Without `CAP_SYS_NICE` or a limit (`RLIMIT_RTPRIO`) that allows it, and in control groups without real-time budget.
pub(crate) fn enter_real_time() -> io::Result<()> {
    set_policy(libc::SCHED_RR, REAL_TIME)
}

/// Makes the calling thread an ordinary one again, at the priority and with the slices that it had.
pub(crate) fn leave_real_time() {
    // Neither needs a right, so neither fails.
    let _ = set_policy(libc::SCHED_OTHER, 0);
    let _ = shorten_slices();
}

fn set_policy(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads the structure, which outlives the call, and changes the calling thread (0) alone.
    match unsafe { libc::sched_setscheduler(0, policy | libc::SCHED_RESET_ON_FORK, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the calling thread runs at the ordinary priority, and under the ordinary policy.
pub(crate) fn is_ordinary() -> bool {
    // SAFETY: a question about the calling thread.
    let policy = unsafe { libc::sched_getscheduler(0) };
    policy == libc::SCHED_OTHER && getpriority_process(None) == Ok(ORDINARY)
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
pub(crate) fn shorten_slices() -> io::Result<()> {
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

    #[test]
    fn thread_and_children_are_ordinary_after_real_time() {
        let thread = std::thread::spawn(|| {
            // SAFETY: a question about the calling thread.
            let policy = || unsafe { libc::sched_getscheduler(0) } & !libc::SCHED_RESET_ON_FORK;
            enter_real_time()?;
            let inside = policy();
            let child = std::thread::spawn(is_ordinary).join();
            leave_real_time();
            Ok::<_, io::Error>((inside, child.is_ok_and(|ordinary| ordinary), policy()))
        });
        match thread.join().unwrap() {
            Ok(seen) => assert_eq!(seen, (libc::SCHED_RR, true, libc::SCHED_OTHER)),
            Err(error) => println!("SKIPPED: this system permits no real time here: {error}"),
        }
    }
}
