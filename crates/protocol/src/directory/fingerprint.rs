//! Fingerprints: 64 bits that stand for an address, a listener or a connection.
//!
//! Two things may have the same fingerprint; a program that finds one asks the broker, which knows the things themselves.
//!
//! An address that means something else in every network namespace (loopback, link-local) is fingerprinted together with
//! the **scope**: the cookie of the namespace, as `SO_NETNS_COOKIE` tells it. Other addresses have scope 0.
//! IPv4 addresses and the IPv6 addresses that stand for them (`::ffff:a.b.c.d`) are the same address.

use core::hash::Hasher as _;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use partywall_shm::address::wide;

/// A slot that has never been used, or that no search has to pass any more.
pub(super) const EMPTY: u64 = 0;
/// A slot that is free, but that searches must pass.
pub(super) const TOMBSTONE: u64 = 1;

/// The sort of socket, by its number as a protocol of IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Transport {
    /// A stream socket.
    Tcp = 6,
    /// A datagram socket.
    Udp = 17,
}

/// A key that only the broker and the programs of one network namespace know. Programs find the offers of their connections with it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct OfferKey(pub [u64; 2]);

impl core::fmt::Debug for OfferKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("OfferKey(not shown)")
    }
}

/// The entry of a table for one object. It is never a value that means a free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// A listener at `at`, in the namespace with the cookie `netns`.
    ///
    /// All of 127.0.0.0/8 counts as one address, and so does "this host" (`0.0.0.0`, `::`) as the destination of a connect.
    pub fn listener(transport: Transport, at: SocketAddr, netns: u64) -> Self {
        let ip = canonical(at.ip());
        Self::of(1, &[transport as u64 | u64::from(at.port()) << 8, low(ip), high(ip), scope(ip, netns)])
    }

    /// Some program under Partywall runs where `ip` is its own address.
    pub fn address(ip: IpAddr, netns: u64) -> Self {
        let ip = canonical(ip);
        Self::of(2, &[low(ip), high(ip), scope(ip, netns)])
    }

    /// Datagrams between these two ends are offered a ring.
    pub fn offer(transport: Transport, accepting: SocketAddr, connecting: SocketAddr, netns: u64) -> Self {
        let (to, from) = (wide(accepting.ip()), wide(connecting.ip()));
        let ports = u64::from(accepting.port()) << 8 | u64::from(connecting.port()) << 24;
        let scope = scope(to, netns) | scope(from, netns);
        Self::of(3, &[transport as u64 | ports, low(to), high(to), low(from), high(from), scope])
    }

    /// The TCP connection with these two ends is offered, to programs that have this key.
    ///
    /// Without the key no program can tell which connection a fingerprint stands for.
    pub fn connection(accepting: SocketAddr, connecting: SocketAddr, key: OfferKey) -> Self {
        Self::keyed(&[accepting, connecting], key)
    }

    /// A connection to this end is offered, to programs that have this key, and may have another connecting end than the offering side
    /// sees, because its addresses are translated on the way.
    pub fn translated(accepting: SocketAddr, key: OfferKey) -> Self {
        Self::keyed(&[accepting], key)
    }

    /// Among the addresses of programs: connections may come from addresses that no program has, because programs run in several network
    /// namespaces, and addresses may be translated between those.
    pub fn translators() -> Self {
        Self::of(4, &[])
    }

    fn keyed(ends: &[SocketAddr], key: OfferKey) -> Self {
        let OfferKey([low, high]) = key;
        #[expect(deprecated, reason = "the only keyed hash of core, which is SipHash 2-4 permanently")]
        let mut hasher = core::hash::SipHasher::new_with_keys(low, high);
        for end in ends {
            hasher.write(&wide(end.ip()).to_le_bytes());
            hasher.write(&end.port().to_le_bytes());
        }
        Self::from_hash(hasher.finish())
    }

    fn of(kind: u64, words: &[u64]) -> Self {
        let hash = words.iter().fold(fold(kind ^ SEED, SEED), |hash, word| fold(hash ^ word, STEP));
        Self::from_hash(fold(hash, SEED))
    }

    fn from_hash(hash: u64) -> Self {
        // The two values that mean a free slot move elsewhere.
        Self(if hash <= TOMBSTONE { !hash } else { hash })
    }

    /// The word that a slot holds for it.
    pub const fn word(self) -> u64 {
        self.0
    }

    /// The fingerprint that a word is; `None` if it means a free slot.
    pub const fn from_word(word: u64) -> Option<Self> {
        if word <= TOMBSTONE { None } else { Some(Self(word)) }
    }
}

/// Whether the address means something else in every network namespace, so that a fingerprint of it needs the namespace's cookie.
pub fn is_scoped(ip: IpAddr) -> bool {
    scoped(canonical(ip))
}

const MAPPED: u128 = 0xffff_0000_0000;
const LOOPBACK_4: u128 = MAPPED | Ipv4Addr::LOCALHOST.to_bits() as u128;
const LOOPBACK_6: u128 = Ipv6Addr::LOCALHOST.to_bits();

/// The address that stands for all addresses of this host that it is equal to.
fn canonical(ip: IpAddr) -> u128 {
    let bits = wide(ip);
    match bits {
        0 => LOOPBACK_6,
        MAPPED => LOOPBACK_4,
        _ if bits >> 24 == LOOPBACK_4 >> 24 => LOOPBACK_4,
        _ => bits,
    }
}

fn scoped(bits: u128) -> bool {
    // 169.254/16 and fe80::/10 are link-local.
    bits == LOOPBACK_6
        || bits >> 24 == LOOPBACK_4 >> 24
        || bits >> 16 == (MAPPED | 0xa9fe_0000) >> 16
        || bits >> 118 == 0xfe80 >> 6
}

fn scope(bits: u128, netns: u64) -> u64 {
    if scoped(bits) { netns } else { 0 }
}

fn low(bits: u128) -> u64 {
    bits as u64
}

fn high(bits: u128) -> u64 {
    (bits >> 64) as u64
}

/// Odd, with about as many ones as zeros, and nothing else special about them.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
const STEP: u64 = 0xd6e8_feb8_6659_fd93;

/// Multiplies, and folds the upper half of the product into the lower.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    low(product) ^ high(product) ^ a.rotate_left(32)
}
