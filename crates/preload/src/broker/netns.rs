//! The number of a socket's network namespace.
#![expect(unsafe_code, reason = "a socket option that rustix has no name for")]

use crate::{real, sys};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// What was last found out; 0 if that is too long ago.
static RECENT: AtomicU64 = AtomicU64::new(0);

/// The namespace that a socket is probably in: nearly every process has all of its sockets in one. To look something up with;
/// what one does thereupon, the broker decides by the socket itself.
#[inline]
pub(super) fn probable_cookie(fd: c_int) -> u64 {
    match RECENT.load(Ordering::Relaxed) {
        0 => {
            let cookie = cookie(fd);
            RECENT.store(cookie, Ordering::Relaxed);
            cookie
        }
        known => known,
    }
}

/// A process may have gone to another namespace since.
pub(super) fn doubt() {
    RECENT.store(0, Ordering::Relaxed);
}

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
