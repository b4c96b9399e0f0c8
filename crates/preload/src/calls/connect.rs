//! `connect`, and `socket`.
#![expect(unsafe_code, reason = "C functions, and the caller's addresses")]

use super::adopt::adopt;
use super::close::forget;
use crate::conn::{Conn, ends};
use crate::sockaddr::ProgramAddress;
use crate::table::{self, DescriptorKind, Entry};
use crate::{broker, datagram, ready, real, sys, unconnected, watched};
use libc::{c_int, sockaddr, sockaddr_storage, socklen_t};
use partywall_shm::status::Role;
use std::net::SocketAddr;

/// A connection is under way, or about to be, to a listener that may be one of ours.
fn begin(fd: c_int, peer: SocketAddr) {
    let is_known = broker::knows_listener(fd, peer);
    if (is_known || broker::directory().is_none()) && (unconnected::is_tcp(fd) || super::listen::is_tcp(fd)) {
        adopt(fd, Role::Connecting, is_known, 0, peer);
    }
}

/// Another thread may wait for this socket in a set, and send as soon as it is connected, before `connect` returns. So the connection
/// begins before the call, and its bytes are counted from the first. Returns its entry if it has begun.
///
/// # Safety
/// If `len` bytes at `address` can be read at all, they are the caller's, and do not change meanwhile.
unsafe fn begin_before(fd: c_int, address: *const sockaddr, len: socklen_t) -> Option<Entry> {
    let len_fits = len as usize <= size_of::<sockaddr_storage>();
    if !ready::is_early(fd)
        || table::get(fd) != Entry::NONE
        || !len_fits
        || !sys::is_readable(address.cast::<u8>(), len as usize)
    {
        return None;
    }
    // SAFETY: they can be read, and are the caller's.
    let given = unsafe { ProgramAddress::new(address, len) };
    begin(fd, given.read()?);
    let entry = table::get(fd);
    (entry.kind() == DescriptorKind::Connection).then_some(entry)
}

/// The kernel has disconnected a socket, which stays open and may be connected again. All its descriptors are the kernel's from here on: sets
/// may have it, so its next connection stays on TCP.
fn disconnected(conn: &'static Conn, fd: c_int) {
    let mut linger = libc::linger { l_onoff: 0, l_linger: 0 };
    sys::read_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut linger);
    ready::disconnected(conn);
    let entry = table::get(fd);
    for (fd, _) in table::entries(0, u32::MAX).filter(|(_, other)| *other == entry) {
        watched::watch(fd);
        unconnected::goes_elsewhere(fd);
        forget(fd);
    }
    // A connection that ends with unread bytes has changed it.
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    ends::note();
}

export! {
    /// `connect`. Blocking or not, the connection counts from its first byte.
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
        // The process that accepts it must know by then where we are. (The address is not looked at before the kernel has.)
        broker::before_connect(fd);
        // SAFETY: the caller's address, for the time of this call.
        let begun = unsafe { begin_before(fd, address, len) };
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::connect(fd, address, len) };
        let errno = sys::errno_number();
        let is_under_way = result == 0 || errno == libc::EINPROGRESS;
        if let Some(entry) = begun {
            if is_under_way {
                ready::connected(fd);
            } else if table::get(fd) == entry {
                // With another entry, another thread has closed the socket, and the number may belong to another socket.
                ready::not_connected(fd);
                forget(fd);
            }
            sys::restore_errno(errno);
            return result;
        }
        // SAFETY: the caller's address, of as many bytes as it says. It is followed only after the kernel has read it without `EFAULT`.
        let given = unsafe { ProgramAddress::new(address, len) };
        if result == 0
            && given.is_unspecified()
            && let Some(conn) = Conn::of(fd)
        {
            disconnected(conn, fd);
            sys::restore_errno(errno);
            return result;
        }
        if fd >= 0
            && is_under_way
            && table::get(fd) == Entry::NONE
            && let Some(peer) = given.read()
        {
            begin(fd, peer);
            ready::connected(fd);
            sys::restore_errno(errno);
        }
        if result == 0 && datagram::is(fd) {
            datagram::connected(fd, given);
            sys::restore_errno(errno);
        }
        result
    }

    /// `socket`: its number was free, whatever the table has.
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
        ready::renumbered(fd);
        unconnected::made(fd, inet && stream);
        datagram::made(fd, domain, kind, protocol);
        fd
    }
}

#[cfg(test)]
mod tests;
