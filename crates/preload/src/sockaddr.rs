//! Addresses as the program gives them, in its own memory.
#![expect(unsafe_code, reason = "reads the caller's addresses")]

use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ptr;

/// An address of the program's, or none.
///
/// Invariant, from [`new`](Self::new): the pointer is null, or valid for reads of `len` bytes as long as this is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgramAddress {
    address: *const sockaddr,
    len: socklen_t,
}

impl ProgramAddress {
    /// No address: the call has none, or is for the address that the socket is connected to.
    pub(crate) const NONE: Self = Self { address: ptr::null(), len: 0 };

    /// The address at this place.
    ///
    /// # Safety
    /// `address` is null, or valid for reads of `len` bytes for as long as the value is used, which is the time of the program's call.
    pub(crate) const unsafe fn new(address: *const sockaddr, len: socklen_t) -> Self {
        Self { address, len }
    }

    /// Whether the program gave none.
    pub(crate) fn is_none(self) -> bool {
        self.address.is_null()
    }

    /// Whether it is none that a socket could be connected to: `connect` disconnects a socket by it.
    pub(crate) fn is_unspecified(self) -> bool {
        // SAFETY: by the invariant there are `len` bytes to read, which is at least what is read here.
        let family = || unsafe { self.address.cast::<libc::sa_family_t>().read_unaligned() };
        !self.address.is_null()
            && self.len as usize >= size_of::<libc::sa_family_t>()
            && c_int::from(family()) == libc::AF_UNSPEC
    }

    /// An internet address; `None` for other families.
    pub(crate) fn read(self) -> Option<SocketAddr> {
        self.read_with_scope().map(|(address, _)| address)
    }

    /// An internet address that can stand for itself: without a scope, and IPv4 in one spelling.
    pub(crate) fn read_unscoped(self) -> Option<SocketAddr> {
        let (address, scope) = self.read_with_scope()?;
        (scope == 0).then(|| SocketAddr::new(address.ip().to_canonical(), address.port()))
    }

    fn read_with_scope(self) -> Option<(SocketAddr, u32)> {
        let len = self.len as usize;
        if self.address.is_null() || len < size_of::<sockaddr_in>() {
            return None;
        }
        // SAFETY: by the invariant there are `len` bytes to read, which is at least what is read here for either family. They are copied, since
        // they may be at any alignment and another thread of the program may change them.
        unsafe {
            match c_int::from(self.address.cast::<libc::sa_family_t>().read_unaligned()) {
                libc::AF_INET => {
                    let four = self.address.cast::<sockaddr_in>().read_unaligned();
                    let ip = Ipv4Addr::from(u32::from_be(four.sin_addr.s_addr));
                    Some((SocketAddr::new(IpAddr::V4(ip), u16::from_be(four.sin_port)), 0))
                }
                libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
                    let six = self.address.cast::<sockaddr_in6>().read_unaligned();
                    let ip = Ipv6Addr::from(six.sin6_addr.s6_addr);
                    Some((SocketAddr::new(IpAddr::V6(ip), u16::from_be(six.sin6_port)), six.sin6_scope_id))
                }
                _ => None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn six(scope: u32, ip: Ipv6Addr) -> sockaddr_in6 {
        sockaddr_in6 {
            sin6_family: libc::AF_INET6 as libc::sa_family_t,
            sin6_port: 80u16.to_be(),
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
            sin6_scope_id: scope,
        }
    }

    fn given(name: &sockaddr_in6, len: usize) -> ProgramAddress {
        // SAFETY: `name` outlives what each test does with the value, and no test gives more bytes than it has.
        unsafe { ProgramAddress::new(ptr::from_ref(name).cast(), len as socklen_t) }
    }

    #[test]
    fn address_with_a_scope_or_too_short_stands_for_nothing() {
        let whole = size_of::<sockaddr_in6>();
        let mapped = Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped();
        let (plain, scoped) = (six(0, mapped), six(3, Ipv6Addr::LOCALHOST));
        assert_eq!(given(&plain, whole).read(), Some(SocketAddr::new(IpAddr::V6(mapped), 80)));
        assert_eq!(given(&plain, whole).read_unscoped(), Some("10.0.0.1:80".parse().unwrap()));
        assert_eq!(given(&scoped, whole).read(), Some("[::1]:80".parse().unwrap()));
        assert_eq!(given(&scoped, whole).read_unscoped(), None);
        for short in [0, 1, size_of::<sockaddr_in>() - 1, whole - 1] {
            assert_eq!(given(&plain, short).read(), None, "{short} bytes");
        }
        assert!(ProgramAddress::NONE.is_none() && ProgramAddress::NONE.read().is_none());
    }
}
