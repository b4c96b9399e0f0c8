//! `epoll` and its kin.
#![expect(unsafe_code, reason = "C functions")]

use crate::patience::TimeLimit;
use crate::ready::{self, Call};
use crate::real;
use libc::{c_int, epoll_event, sigset_t, timespec};

export! {
    /// `epoll_create`
    fn epoll_create(size: c_int) -> c_int {
        // SAFETY: the caller's argument.
        let fd = unsafe { real::epoll_create(size) };
        ready::made_set(fd);
        fd
    }

    /// `epoll_create1`
    fn epoll_create1(flags: c_int) -> c_int {
        // SAFETY: the caller's argument.
        let fd = unsafe { real::epoll_create1(flags) };
        ready::made_set(fd);
        fd
    }

    /// `epoll_ctl`
    fn epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
        // SAFETY: the caller's event, if it gives one.
        let wanted = unsafe { event.as_ref() }.map(|e| (e.events, e.u64));
        // SAFETY: the caller's arguments, passed on.
        ready::control(set, operation, fd, wanted, || unsafe { real::epoll_ctl(set, operation, fd, event) })
    }

    /// `epoll_wait`
    fn epoll_wait(set: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int {
        let patience = TimeLimit::from_millis(timeout);
        // SAFETY: the caller's array, valid by the contract of its call.
        let call = unsafe { Call::new(set, events, max, patience) };
        // SAFETY: the caller's arguments, passed on.
        ready::wait_in_set(call, || unsafe { real::epoll_wait(set, events, max, timeout) })
    }

    /// `epoll_pwait`
    fn epoll_pwait(set: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int {
        // SAFETY: the caller's array and mask, valid by the contract of its call.
        let call = unsafe { Call::new(set, events, max, TimeLimit::from_millis(timeout)).with_mask(mask) };
        // SAFETY: the caller's arguments, passed on.
        ready::wait_in_set(call, || unsafe { real::epoll_pwait(set, events, max, timeout, mask) })
    }

    /// `epoll_pwait2`
    fn epoll_pwait2(
        set: c_int,
        events: *mut epoll_event,
        max: c_int,
        timeout: *const timespec,
        mask: *const sigset_t,
    ) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let plain = || unsafe { real::epoll_pwait2(set, events, max, timeout, mask) };
        // SAFETY: the caller's time, if it gives one.
        match TimeLimit::from_timespec(unsafe { timeout.as_ref() }) {
            Some(patience) => {
                // SAFETY: the caller's array and mask, valid by the contract of its call.
                let call = unsafe { Call::new(set, events, max, patience).with_mask(mask) };
                ready::wait_in_set(call.exactly(), plain)
            }
            None => plain(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
