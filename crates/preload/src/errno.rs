//! The C library's `errno`.
#![expect(unsafe_code, reason = "errno is reached through a pointer")]

use rustix::io::Errno;
use std::ffi::c_int;

/// Sets `errno`.
pub(crate) fn set_errno(error: Errno) {
    // SAFETY: the C library's own pointer to this thread's `errno`, always valid.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// Reads `errno` after a failure.
pub(crate) fn errno() -> Errno {
    // The type has no room for a zero, which would be a C library's mistake here.
    let number = errno_number();
    if (1..4096).contains(&number) { Errno::from_raw_os_error(number) } else { Errno::IO }
}

/// `errno` as it is, which may be 0: to be put back after what the program must not notice.
pub(crate) fn errno_number() -> c_int {
    // SAFETY: as in `set_errno`.
    unsafe { *libc::__errno_location() }
}

/// Puts back what [`errno_number`] gave.
pub(crate) fn restore_errno(number: c_int) {
    // SAFETY: as in `set_errno`.
    unsafe { *libc::__errno_location() = number };
}

/// Fails as C functions do.
pub(crate) fn fail(error: Errno) -> isize {
    set_errno(error);
    -1
}
