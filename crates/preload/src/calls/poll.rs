//! `poll` and its kin.
#![expect(unsafe_code, reason = "C functions")]

use crate::patience::TimeLimit;
use crate::ready;
use crate::{real, sys};
use libc::{c_int, nfds_t, pollfd, sigset_t, size_t, timespec};
use std::ptr;

/// The caller's array, if there is anything in it that is not the kernel's alone, in a call that waits for this long.
///
/// # Safety
/// It is valid, as the C library demands of its callers.
unsafe fn concerning<'a>(fds: *mut pollfd, count: nfds_t, patience: &TimeLimit) -> Option<&'a mut [pollfd]> {
    // More than the kernel would take are for it to refuse.
    let count = usize::try_from(count).ok().filter(|n| *n <= 1 << 20)?;
    if count == 0 || fds.is_null() {
        return None;
    }
    // SAFETY: by the caller's word.
    let fds = unsafe { std::slice::from_raw_parts_mut(fds, count) };
    let mut any = false;
    for one in fds.iter() {
        any |= ready::concerns(one.fd, patience);
    }
    any.then_some(fds)
}

fn answer(result: Result<usize, rustix::io::Errno>) -> c_int {
    // At most as many as the array has.
    c_int::try_from(sys::give(result)).unwrap_or(c_int::MAX)
}

export! {
    /// `poll`
    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
        let patience = TimeLimit::from_millis(timeout);
        // SAFETY: the caller's array.
        match unsafe { concerning(fds, count, &patience) } {
            // SAFETY: the caller's arguments, passed on.
            None => unsafe { real::poll(fds, count, timeout) },
            // SAFETY: no mask.
            Some(fds) => answer(unsafe { ready::poll(fds, patience, ptr::null()) }),
        }
    }

    /// `ppoll`
    fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int {
        // SAFETY: the caller's time, if it gives one.
        let patience = TimeLimit::from_timespec(unsafe { timeout.as_ref() });
        // SAFETY: the caller's array.
        let concerned = patience.as_ref().and_then(|patience| unsafe { concerning(fds, count, patience) });
        match (patience, concerned) {
            // SAFETY: the caller's mask, as the C library demands.
            (Some(patience), Some(fds)) => answer(unsafe { ready::poll(fds, patience, mask) }),
            // SAFETY: the caller's arguments, passed on.
            _ => unsafe { real::ppoll(fds, count, timeout, mask) },
        }
    }

    /// `poll`, as compiled with `_FORTIFY_SOURCE`: the array's size was not known to suffice.
    fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int {
        check(count, size);
        // SAFETY: the caller's arguments, passed on.
        unsafe { poll(fds, count, timeout) }
    }

    /// `ppoll`, likewise.
    fn __ppoll_chk(
        fds: *mut pollfd,
        count: nfds_t,
        timeout: *const timespec,
        mask: *const sigset_t,
        size: size_t,
    ) -> c_int {
        check(count, size);
        // SAFETY: the caller's arguments, passed on.
        unsafe { ppoll(fds, count, timeout, mask) }
    }
}

/// Ends the program as the C library does when an array is shorter than it was said to be.
fn check(count: nfds_t, size: size_t) {
    // SAFETY: this is the signature that the C library gives this function.
    unsafe extern "C-unwind" {
        fn __chk_fail() -> !;
    }
    if (size / size_of::<pollfd>()) < usize::try_from(count).unwrap_or(usize::MAX) {
        // SAFETY: takes no argument and does not return.
        unsafe { __chk_fail() }
    }
}

#[cfg(test)]
mod tests;
