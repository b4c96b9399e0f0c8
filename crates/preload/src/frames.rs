//! Whether this thread is inside a signal handler, found out from its stack.
#![expect(unsafe_code, reason = "walks the stack by the functions of the compiler's support library")]

use std::ffi::{c_int, c_void};

/// `_URC_NO_REASON` and `_URC_END_OF_STACK`.
const GO_ON: c_int = 0;
const END: c_int = 5;

// SAFETY: as the Itanium C++ ABI declares them; std links the library that has them.
unsafe extern "C" {
    fn _Unwind_Backtrace(frame: extern "C" fn(*mut c_void, *mut c_void) -> c_int, argument: *mut c_void) -> c_int;
    fn _Unwind_GetIPInfo(context: *mut c_void, interrupted: *mut c_int) -> usize;
}

struct Walk {
    interrupted: bool,
    /// The last address that was seen: 0 at the true end of a stack.
    last: usize,
}

extern "C" fn frame(context: *mut c_void, argument: *mut c_void) -> c_int {
    let mut interrupted = 0;
    // SAFETY: what the walk gave us, and a number of our own.
    let last = unsafe { _Unwind_GetIPInfo(context, &raw mut interrupted) };
    // SAFETY: the argument that `may_be_in_handler` gave to the walk, not used elsewhere during the walk.
    let walk = unsafe { &mut *argument.cast::<Walk>() };
    walk.last = last;
    walk.interrupted |= interrupted != 0;
    GO_ON
}

/// Whether a frame of this thread's stack was interrupted by a signal. `true` also if the stack cannot be followed to its end, as through
/// functions that a program has generated.
#[cold]
pub(crate) fn may_be_in_handler() -> bool {
    let mut walk = Walk { interrupted: false, last: 1 };
    // SAFETY: the callback takes what it is given here.
    let end = unsafe { _Unwind_Backtrace(frame, (&raw mut walk).cast()) };
    walk.interrupted || end != END || walk.last != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    static SEEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handler(_: c_int) {
        SEEN.store(1 + u32::from(may_be_in_handler()), Ordering::Relaxed);
    }

    #[test]
    fn signal_handler_frame_is_detected() {
        assert!(!may_be_in_handler());
        // SAFETY: a handler that stores a number, for a signal that nothing else here uses.
        unsafe {
            libc::signal(libc::SIGUSR2, handler as *const () as libc::sighandler_t);
            libc::raise(libc::SIGUSR2);
        }
        assert_eq!(SEEN.load(Ordering::Relaxed), 2);
        assert!(!may_be_in_handler());
    }
}
