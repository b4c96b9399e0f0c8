//! Whether an interrupted call is to be taken up again.
//!
//! The kernel restarts a `recv` that a signal handler interrupted if that handler was installed with `SA_RESTART`; it never
//! restarts what our calls sleep in. Which handler ran nobody tells us: when every handler that the program has asks for a
//! restart, so did this one. Where they differ the call fails with `EINTR`, for which such a program has to be prepared.
#![expect(unsafe_code, reason = "asks for the handlers of signals, and for the cancellation of this thread")]

/// Called after a wait that a handler interrupted. A thread that is being cancelled ends here.
pub(crate) fn all_restart() -> bool {
    // SAFETY: no lock is held and nothing is half done where waits are interrupted.
    unsafe { pthread_testcancel() };
    // 32 and 33 are the C library's own, which restart.
    (1..=64).filter(|n| !(32..34).contains(n)).all(restarts)
}

// SAFETY: the signature that POSIX gives it.
unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

fn restarts(signal: i32) -> bool {
    // SAFETY: all zeros is a valid value, and the kernel fills it in.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks only; no handler is installed.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    asked != 0
        || action.sa_sigaction == libc::SIG_DFL
        || action.sa_sigaction == libc::SIG_IGN
        || action.sa_flags & libc::SA_RESTART != 0
}
