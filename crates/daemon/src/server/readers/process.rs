//! Processes made by `fork` alone, which need no executable: a child keeps the descriptors it is given and runs one function.
//!
//! The first child is made while the broker serves nobody, and it forks all others. So none of them ever has a copy of a
//! session, and each has one thread. The broker's own process may have more threads when the first is made (tests, programs
//! with a broker in them). A child therefore takes no lock that such a thread may have held: it does not log, print or panic.
//! The C library makes allocation work in such a child.
#![expect(unsafe_code, reason = "fork, and what a child must do before it may use anything")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::process::Pid;

use crate::priority;

/// The first number after standard input, output and error.
const FIRST: RawFd = 3;

/// Signals that are meant for the broker, and reach its children as well: of a terminal, or of a service manager that ends the
/// whole group. The broker decides when they end.
const IGNORED: [libc::c_int; 9] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGPIPE,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGTSTP,
];

/// Makes a child that runs `body` with copies of these descriptors, in this order, has no others, and ends.
pub(super) fn fork(name: &'static str, keep: &[BorrowedFd<'_>], body: impl FnOnce(Vec<OwnedFd>)) -> io::Result<Pid> {
    // SAFETY: the child calls only what is safe in a copy of a process with threads: system calls and, through the C library's
    // own preparations for a fork, the allocator (see above). It never returns from this function.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // A panic must not unwind into the caller's frames, which are the parent's.
            let _ = catch_unwind(AssertUnwindSafe(|| {
                reset_signals();
                // Where that is forbidden, it works all the same, and answers come later on a busy machine.
                let _ = priority::shorten_slices();
                if let Some(kept) = keep_only(keep) {
                    let _ =
                        rustix::thread::set_name(std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or(c""));
                    body(kept);
                }
            }));
            // SAFETY: ends the process without what the parent has registered to be done at its end.
            unsafe { libc::_exit(0) }
        }
        pid => Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process")),
    }
}

/// The parent's handlers write to descriptors that the child does not have, or has for something else.
fn reset_signals() {
    for signal in 1..=64 {
        let action = if IGNORED.contains(&signal) { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: neither action is a function. For the two signals that the C library keeps, this fails.
        unsafe { libc::signal(signal, action) };
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `sigemptyset` makes a valid set of it, which the second call reads.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
}

/// Gives these descriptors the first numbers, and closes all others.
fn keep_only(keep: &[BorrowedFd<'_>]) -> Option<Vec<OwnedFd>> {
    let end = FIRST + RawFd::try_from(keep.len()).ok()?;
    // First above the wanted numbers, so that each is copied before it is overwritten.
    let copies: Vec<RawFd> = keep
        .iter()
        // SAFETY: makes a new descriptor of one that is borrowed, and touches no memory.
        .map(|fd| unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD, end) })
        .collect();
    if copies.iter().any(|fd| *fd < 0) {
        return None;
    }
    for (copy, wanted) in copies.iter().zip(FIRST..) {
        // SAFETY: whatever had the number is the parent's; the child never uses or drops the owners of its descriptors.
        if unsafe { libc::dup3(*copy, wanted, libc::O_CLOEXEC) } < 0 {
            return None;
        }
    }
    // SAFETY: as above, for all numbers from `end` on.
    if unsafe { libc::syscall(libc::SYS_close_range, libc::c_long::from(end), libc::c_long::from(u32::MAX), 0) } != 0 {
        // Before Linux 5.9, or forbidden by a filter of system calls.
        let most =
            rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20).min(1 << 20);
        for fd in end..RawFd::try_from(most).ok()? {
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
    }
    // A child must not keep a pipe open as its standard output, or the pipe's reader would not see its end.
    if let Ok(nothing) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        for standard in 0..FIRST {
            // SAFETY: as above.
            unsafe { libc::dup2(nothing.as_raw_fd(), standard) };
        }
    }
    // SAFETY: these numbers were given out above, and nothing else in this process knows them.
    Some((FIRST..end).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect())
}
