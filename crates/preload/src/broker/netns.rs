//! The number of a socket's network namespace.
#![expect(unsafe_code, reason = "a socket option that rustix has no name for")]

use crate::{real, sys};
use std::ffi::c_int;

/// `SO_NETNS_COOKIE` of a socket; 0 if the kernel does not say. `errno` is left alone.
pub(super) fn cookie(fd: c_int) -> u64 {
    let errno = sys::errno();
    let mut cookie = 0u64;
    // It is 8.
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cookie`.
    let result = unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut len)
    };
    if result == 0 {
        return cookie;
    }
    sys::set_errno(errno);
    0
}
