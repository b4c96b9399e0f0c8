//! `connect`, and `socket`.
#![expect(unsafe_code, reason = "C functions, and the caller's addresses")]

use crate::conn::Conn;
use crate::conn::leave::forget;
use crate::table::{self, Entry};
use crate::{broker, real, sys};
use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use partywall_shm::status::Role;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// An internet address of the program's; `None` for other families.
pub(super) fn address_of(address: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    if address.is_null() || (len as usize) < size_of::<sockaddr_in>() {
        return None;
    }
    // SAFETY: the caller's address, of at least as many bytes as are read by its own word; copied, since it may lie anywhere.
    unsafe {
        match c_int::from(address.cast::<libc::sa_family_t>().read_unaligned()) {
            libc::AF_INET => {
                let four = address.cast::<sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(four.sin_addr.s_addr));
                Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(four.sin_port)))
            }
            libc::AF_INET6 if len as usize >= size_of::<sockaddr_in6>() => {
                let six = address.cast::<sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(six.sin6_addr.s6_addr);
                Some(SocketAddr::new(IpAddr::V6(ip), u16::from_be(six.sin6_port)))
            }
            _ => None,
        }
    }
}

/// A socket's own address, or its peer's.
pub(super) fn name_of(fd: c_int, peer: bool) -> Option<SocketAddr> {
    let fd = sys::borrow(fd);
    let name = if peer { rustix::net::getpeername(fd).ok().flatten() } else { rustix::net::getsockname(fd).ok() };
    SocketAddr::try_from(name?).ok()
}

/// A connection is under way to a listener that may be one of ours.
fn adopt(fd: c_int, peer: SocketAddr) {
    if !broker::knows_listener(fd, peer) || !super::listen::is_tcp(fd) {
        return;
    }
    if let Some(local) = name_of(fd, false) {
        Conn::adopt(fd, Role::Connecting, local, peer);
    }
}

export! {
    /// `connect`. Blocking or not, the connection counts from its first byte.
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
        // Whoever accepts it must know by then where we are. (The address is not looked at before the kernel has.)
        broker::before_connect(fd);
        // SAFETY: the caller's arguments, passed on.
        let result = unsafe { real::connect(fd, address, len) };
        let errno = sys::errno_number();
        if fd >= 0
            && (result == 0 || errno == libc::EINPROGRESS)
            && table::get(fd) == Entry::NONE
            && let Some(peer) = address_of(address, len)
        {
            adopt(fd, peer);
            sys::restore_errno(errno);
        }
        result
    }

    /// `socket`: its number was free, whatever we believed.
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        // SAFETY: the caller's arguments, passed on.
        let fd = unsafe { real::socket(domain, kind, protocol) };
        if table::get(fd) != Entry::NONE {
            forget(fd);
        }
        fd
    }
}
