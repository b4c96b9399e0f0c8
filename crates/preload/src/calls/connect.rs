//! `connect`, and `socket`.
#![expect(unsafe_code, reason = "C functions, and the caller's addresses")]

use super::adopt::adopt;
use super::close::forget;
use crate::sockaddr::ProgramAddress;
use crate::table::{self, DESCRIPTORS, Entry};
use crate::{broker, datagram, real, sys};
use libc::{c_int, sockaddr, socklen_t};
use partywall_shm::status::Role;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, Ordering};

/// Descriptors that `socket` has given for TCP. One that is not noted here may be for it all the same.
static STREAMS: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(0) }; DESCRIPTORS];

fn note_kind(fd: c_int, is_stream: bool) {
    let is_stream = u8::from(is_stream);
    if let Some(place) = STREAMS.get(fd as usize)
        && place.load(Ordering::Relaxed) != is_stream
    {
        place.store(is_stream, Ordering::Relaxed);
    }
}

/// A descriptor is about to be closed.
#[inline]
pub(super) fn forget_kind(fd: c_int) {
    note_kind(fd, false);
}

/// Whether it is a TCP socket. Numbers that are copied, or closed inside the C library, may say so wrongly: the broker sees
/// what a socket is before anything comes of it.
fn is_tcp(fd: c_int) -> bool {
    STREAMS.get(fd as usize).is_some_and(|place| place.load(Ordering::Relaxed) != 0) || super::listen::is_tcp(fd)
}

/// A connection is under way to a listener that may be one of ours.
fn begin(fd: c_int, peer: SocketAddr) {
    let is_known = broker::knows_listener(fd, peer);
    if (is_known || broker::directory().is_none()) && is_tcp(fd) {
        adopt(fd, Role::Connecting, is_known, 0, peer);
    }
}

export! {
    /// `connect`. Blocking or not, the connection counts from its first byte.
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
        // The process that accepts it must know by then where we are. (The address is not looked at before the kernel has.)
        broker::before_connect(fd);
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::connect(fd, address, len) };
        let errno = sys::errno_number();
        // SAFETY: the caller's address, of as many bytes as it says. It is followed only after the kernel has read it without `EFAULT`.
        let given = unsafe { ProgramAddress::new(address, len) };
        if fd >= 0
            && (result == 0 || errno == libc::EINPROGRESS)
            && table::get(fd) == Entry::NONE
            && let Some(peer) = given.read()
        {
            begin(fd, peer);
            sys::restore_errno(errno);
        }
        if result == 0 && datagram::is(fd) {
            datagram::connected(fd, given);
            sys::restore_errno(errno);
        }
        result
    }

    /// `socket`: its number was free, whatever we believed.
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let mut fd = unsafe { real::socket(domain, kind, protocol) };
        if fd < 0 && sys::errno() == rustix::io::Errno::MFILE && crate::local::give_back() {
            // SAFETY: as above.
            fd = unsafe { real::socket(domain, kind, protocol) };
        }
        if table::get(fd) != Entry::NONE {
            forget(fd);
        }
        let inet = domain == libc::AF_INET || domain == libc::AF_INET6;
        let stream = kind & 0xf == libc::SOCK_STREAM && (protocol == 0 || protocol == libc::IPPROTO_TCP);
        note_kind(fd, inet && stream);
        datagram::made(fd, domain, kind, protocol);
        fd
    }
}
