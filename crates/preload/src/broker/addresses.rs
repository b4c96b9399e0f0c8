//! The addresses of this network namespace, asked of the kernel without the C library, whose function for it allocates.

use crate::netlink::{attributes, half, word};
use partywall_protocol::wire::{self, BorrowedAddresses};
use rustix::fd::AsFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The most that are looked at, which is the most that `Publish` takes.
const MAX: usize = wire::AddressList::MAX;

/// `RTM_GETADDR` and `RTM_NEWADDR`, the end of a list, and the attributes that hold an address.
const GET_ADDRESS: u16 = 22;
const NEW_ADDRESS: u16 = 20;
const DONE: u16 = 3;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// Whether an address is a private, shared or link-local one, which no host of the Internet has.
pub(super) fn is_private(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            let is_shared = u32::from(ip) >> 22 == u32::from(Ipv4Addr::new(100, 64, 0, 0)) >> 22;
            ip.is_private() || ip.is_link_local() || is_shared
        }
        IpAddr::V6(ip) => ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

/// Some addresses, as `Publish` has them.
#[derive(Debug)]
pub(super) struct Addresses {
    list: [[u8; 16]; MAX],
    len: usize,
}

impl Addresses {
    /// The addresses in the namespace of this thread. Those that the kernel does not report are left out.
    pub(super) fn in_this_namespace() -> Self {
        let mut this = Self { list: [[0; 16]; MAX], len: 0 };
        // An answer that is cut short or not to be had leaves what was found until then.
        let _ = this.ask();
        this
    }

    /// As a field of `Publish`.
    pub(super) fn field(&self) -> BorrowedAddresses<'_> {
        BorrowedAddresses::new(self.list.get(..self.len).unwrap_or_default())
    }

    fn ask(&mut self) -> rustix::io::Result<()> {
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        // `nlmsghdr {len u32, type u16, flags u16, sequence u32, port u32}`, then `ifaddrmsg` of zeros: every family.
        let mut question = [0u8; 24];
        question[0..4].copy_from_slice(&24u32.to_ne_bytes());
        question[4..6].copy_from_slice(&GET_ADDRESS.to_ne_bytes());
        // NLM_F_REQUEST | NLM_F_DUMP
        question[6..8].copy_from_slice(&0x301u16.to_ne_bytes());
        rustix::net::send(socket.as_fd(), &question, SendFlags::empty())?;
        let mut buffer = [0u8; 4096];
        // The kernel has the answer ready before the question's call returns, and continues it whenever some of it is read.
        loop {
            let (len, _) = rustix::net::recv(socket.as_fd(), &mut buffer, RecvFlags::DONTWAIT)?;
            if len == 0 || self.read(buffer.get(..len).unwrap_or_default()) {
                return Ok(());
            }
        }
    }

    /// Takes the addresses out of one datagram; whether it was the last.
    fn read(&mut self, mut rest: &[u8]) -> bool {
        while let (Some(len), Some(kind)) = (word(rest, 0), half(rest, 4)) {
            let Ok(len) = usize::try_from(len) else { return true };
            let Some(message) = rest.get(16..len) else { return true };
            match kind {
                NEW_ADDRESS => self.add(message),
                DONE => return true,
                // An error, or nonsense.
                _ => return true,
            }
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        false
    }

    /// One `ifaddrmsg {family u8, prefix u8, flags u8, scope u8, index u32}` and its attributes.
    fn add(&mut self, message: &[u8]) {
        let Some(family) = message.first().copied() else { return };
        let (mut address, mut local) = (None, None);
        for (kind, value) in attributes(message.get(8..).unwrap_or_default()) {
            match kind {
                IFA_ADDRESS => address = ip(family, value),
                // On a point-to-point interface IFA_ADDRESS is the peer's.
                IFA_LOCAL => local = ip(family, value),
                _ => {}
            }
        }
        if let Some(found) = local.or(address)
            && let Some(place) = self.list.get_mut(self.len)
        {
            *place = BorrowedAddresses::bytes(found);
            self.len += 1;
        }
    }
}

fn ip(family: u8, value: &[u8]) -> Option<IpAddr> {
    if family == AddressFamily::INET.as_raw() as u8 {
        <[u8; 4]>::try_from(value).ok().map(|bytes| Ipv4Addr::from(bytes).into())
    } else {
        <[u8; 16]>::try_from(value).ok().map(|bytes| Ipv6Addr::from(bytes).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_among_the_addresses_of_this_namespace() {
        let found = Addresses::in_this_namespace();
        assert!(found.field().iter().any(|ip| ip == Ipv4Addr::LOCALHOST), "{found:?}");
        assert!(found.field().iter().all(|ip| !ip.is_unspecified()));
    }

    #[test]
    fn public_and_loopback_addresses_are_not_private() {
        let are = |all: &[&str], expected: bool| {
            for text in all {
                assert_eq!(is_private(text.parse().unwrap()), expected, "{text}");
            }
        };
        are(&["10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.122.1", "100.64.0.1", "100.127.255.255"], true);
        are(&["169.254.1.1", "::ffff:10.0.0.1", "fd00::1", "fc00::1", "fe80::1"], true);
        are(&["172.32.0.1", "100.128.0.1", "100.63.255.255", "8.8.8.8", "198.51.100.1", "127.0.0.1"], false);
        are(&["2001:db8::1", "::ffff:8.8.8.8", "::1", "0.0.0.0"], false);
    }

    #[test]
    fn malformed_address_list_yields_no_addresses() {
        let empty = || Addresses { list: [[0; 16]; MAX], len: 0 };
        for bytes in [&[][..], &[0; 16], &[0xff; 64], &[20, 0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]] {
            let mut some = empty();
            some.read(bytes);
            assert_eq!(some.field().iter().count(), 0);
        }
    }
}
