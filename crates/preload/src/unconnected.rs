//! TCP sockets that `socket` has made, and whether they can still become a connection of ours.
//!
//! A program may enter a socket into an epoll set and connect it afterwards. The registration of such a socket is kept
//! ([`crate::ready`]), so that the connection may move to a ring. Nothing is kept for a socket that is connected elsewhere.

use crate::process;
use crate::table::DESCRIPTORS;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU8, Ordering};

/// No TCP socket, as far as is known.
const OTHER: u8 = 0;
/// Made by `socket`, and not connected.
const FRESH: u8 = 1;
/// Connected, or about to be, to a peer that has no ring.
const ELSEWHERE: u8 = 2;

/// Untouched pages of it cost nothing.
static SOCKETS: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(OTHER) }; DESCRIPTORS];

fn put(fd: c_int, state: u8) {
    if let Some(place) = SOCKETS.get(fd as usize)
        && place.load(Ordering::Relaxed) != state
    {
        place.store(state, Ordering::Relaxed);
    }
}

#[inline]
fn state(fd: c_int) -> u8 {
    SOCKETS.get(fd as usize).map_or(OTHER, |place| place.load(Ordering::Relaxed))
}

/// `socket` has given this number.
pub(crate) fn made(fd: c_int, is_tcp: bool) {
    put(fd, if is_tcp { FRESH } else { OTHER });
}

/// It is about to be connected to a peer that has no ring.
pub(crate) fn goes_elsewhere(fd: c_int) {
    if state(fd) == FRESH {
        put(fd, ELSEWHERE);
    }
}

/// Its number is about to be closed. A child after `vfork` closes its own number, and this memory is its parent's.
#[inline]
pub(crate) fn closed(fd: c_int) {
    match state(fd) {
        OTHER => {}
        FRESH if process::is_visitor() => {}
        _ => put(fd, OTHER),
    }
}

/// Whether `socket` has made it for TCP. Numbers that are copied, or closed inside the C library, may say so wrongly: the
/// broker sees what a socket is before anything comes of it.
pub(crate) fn is_tcp(fd: c_int) -> bool {
    state(fd) != OTHER
}

/// Whether it may still become a connection of ours.
#[inline]
pub(crate) fn is_fresh(fd: c_int) -> bool {
    state(fd) == FRESH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_is_fresh_until_it_connects_elsewhere_or_closes() {
        // Far from any descriptor that tests of this process open.
        let fd = DESCRIPTORS as c_int - 21;
        assert!(!is_tcp(fd) && !is_fresh(fd));
        goes_elsewhere(fd);
        assert!(!is_tcp(fd), "it was no socket before");
        made(fd, true);
        assert!(is_tcp(fd) && is_fresh(fd));
        goes_elsewhere(fd);
        assert!(is_tcp(fd) && !is_fresh(fd));
        closed(fd);
        assert!(!is_tcp(fd));
        made(fd, true);
        made(fd, false);
        assert!(!is_tcp(fd) && !is_tcp(-1));
    }
}
