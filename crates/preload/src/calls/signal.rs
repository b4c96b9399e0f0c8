//! `sigaction` and its kin: only noted.
#![expect(unsafe_code, reason = "C functions")]

use crate::{real, signals};
use libc::{c_int, sighandler_t};

export! {
    /// `sigaction`
    fn sigaction(signal: c_int, action: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::sigaction(signal, action, old) };
        if !action.is_null() {
            signals::changed();
        }
        result
    }

    /// `signal`
    fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's arguments, passed on.
        let before = unsafe { real::signal(signal, handler) };
        signals::changed();
        before
    }

    /// `signal`, as compiled for System V.
    fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's arguments, passed on.
        let before = unsafe { real::__sysv_signal(signal, handler) };
        signals::changed();
        before
    }

    /// `sysv_signal`
    fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's arguments, passed on.
        let before = unsafe { real::sysv_signal(signal, handler) };
        signals::changed();
        before
    }

    /// `bsd_signal`
    fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's arguments, passed on.
        let before = unsafe { real::bsd_signal(signal, handler) };
        signals::changed();
        before
    }

    /// `sigset`
    fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
        // SAFETY: the caller's arguments, passed on.
        let before = unsafe { real::sigset(signal, handler) };
        signals::changed();
        before
    }

    /// `siginterrupt`
    fn siginterrupt(signal: c_int, interrupt: c_int) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::siginterrupt(signal, interrupt) };
        signals::changed();
        result
    }
}
