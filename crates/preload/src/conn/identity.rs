//! Which connection it is, and who holds it.

use super::Holders;
use crate::sys;
use partywall_shm::address::wide;
use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

/// Who holds the connection, and which addresses it has.
#[derive(Debug)]
#[repr(C)]
pub(super) struct SocketIdentity {
    pub(super) holders: Holders,
    pub(super) addresses: AddressWords,
}

impl SocketIdentity {
    /// The addresses of both ends; of our own, only the port, or nothing, until it was asked for.
    pub(super) fn addresses(&self) -> (SocketAddr, SocketAddr) {
        self.addresses.load()
    }

    /// Asks the kernel for our own address, if it is not known yet.
    pub(super) fn know_own_address(&self, fd: c_int) {
        let (local, peer) = self.addresses();
        if local.ip().is_unspecified()
            && let Ok(name) = rustix::net::getsockname(sys::borrow(fd))
            && let Ok(local) = SocketAddr::try_from(name)
        {
            self.addresses.store(local, peer);
        }
    }
}

/// Addresses as words, in memory that several processes read.
#[derive(Debug)]
pub(super) struct AddressWords {
    words: [AtomicU64; 5],
}

impl AddressWords {
    pub(super) fn store(&self, local: SocketAddr, peer: SocketAddr) {
        let [l, p] = [local, peer].map(|a| wide(a.ip()));
        let four = u64::from(local.is_ipv4());
        let last = u64::from(local.port()) | u64::from(peer.port()) << 16 | four << 32;
        for (word, value) in self.words.iter().zip([l as u64, (l >> 64) as u64, p as u64, (p >> 64) as u64, last]) {
            word.store(value, Ordering::Relaxed);
        }
    }

    pub(super) fn load(&self) -> (SocketAddr, SocketAddr) {
        let word = |i: usize| self.words[i].load(Ordering::Relaxed);
        let last = word(4);
        let address = |at: usize, port: u64| {
            let wide = std::net::Ipv6Addr::from(u128::from(word(at)) | u128::from(word(at + 1)) << 64);
            let ip = match wide.to_ipv4_mapped() {
                Some(narrow) if last >> 32 != 0 => IpAddr::V4(narrow),
                _ => IpAddr::V6(wide),
            };
            SocketAddr::new(ip, (port & 0xffff) as u16)
        };
        (address(0, last), address(2, last >> 16))
    }
}
