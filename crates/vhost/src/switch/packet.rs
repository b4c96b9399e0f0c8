//! The parts of a frame that name IP addresses: ARP, IPv4, and IPv6 with what its headers lead to.

use super::{ETHERNET, MacAddress};
use std::net::{Ipv4Addr, Ipv6Addr};

pub(crate) const IPV4: u16 = 0x0800;
pub(super) const ARP: u16 = 0x0806;
pub(super) const IPV6: u16 = 0x86dd;
pub(super) const ICMPV6: u8 = 58;
pub(super) const UDP: u8 = 17;
/// The ICMPv6 message that says at which Ethernet address an IP address is.
pub(super) const SOLICITATION: u8 = 135;
pub(super) const ADVERTISEMENT: u8 = 136;
const TAGS: [u16; 2] = [0x8100, 0x88a8];

/// The type and the payload of a frame, behind two VLAN tags at most.
pub(crate) fn untagged(head: &[u8]) -> Option<(u16, &[u8])> {
    let mut at = ETHERNET - 2;
    for _ in 0..3 {
        let kind = u16::from_be_bytes(*head.get(at..)?.first_chunk::<2>()?);
        if !TAGS.contains(&kind) {
            return Some((kind, &head[at + 2..]));
        }
        at += 4;
    }
    None
}

/// The type and the payload behind an LLC and SNAP header, which some systems read as they read the type of Ethernet (RFC 1042, and
/// IEEE 802.1H for bridges). Without such a header they are those of the frame.
pub(super) fn without_snap((kind, body): (u16, &[u8])) -> (u16, &[u8]) {
    // Types begin at 0x600.
    const LONGEST_LENGTH: u16 = 0x5ff;
    match body {
        [0xaa, 0xaa, 3, 0, 0, 0 | 0xf8, high, low, rest @ ..] if kind <= LONGEST_LENGTH => {
            (u16::from_be_bytes([*high, *low]), rest)
        }
        _ => (kind, body),
    }
}

/// The sender that an ARP packet names.
pub(super) struct ArpSender {
    pub(super) mac: MacAddress,
    ip: Ipv4Addr,
    target: Ipv4Addr,
}

impl ArpSender {
    /// The sender, if the packet is for Ethernet and IPv4.
    pub(super) fn of(body: &[u8]) -> Option<Self> {
        let packet = body.first_chunk::<28>()?;
        if packet[..6] != [0, 1, 8, 0, 6, 4] {
            return None;
        }
        let mac = MacAddress([packet[8], packet[9], packet[10], packet[11], packet[12], packet[13]]);
        let ip = |at: usize| Ipv4Addr::new(packet[at], packet[at + 1], packet[at + 2], packet[at + 3]);
        Some(Self { mac, ip: ip(14), target: ip(24) })
    }

    /// The address that the packet claims for its sender. A probe has no sender yet, and claims its target (RFC 5227).
    pub(super) fn claimed(&self) -> Ipv4Addr {
        if self.ip.is_unspecified() { self.target } else { self.ip }
    }
}

/// The address in 16 bytes.
pub(super) fn ipv6_address(bytes: &[u8]) -> Ipv6Addr {
    <[u8; 16]>::try_from(bytes).map(Ipv6Addr::from).unwrap_or(Ipv6Addr::UNSPECIFIED)
}

/// What follows the extension headers of an IPv6 packet.
pub(super) enum Ipv6Upper<'a> {
    /// A header of this protocol, and as much of it as was read.
    Header(u8, &'a [u8]),
    /// A part of a packet whose headers are in another one.
    LaterFragment,
    /// The headers are too many or too long to look behind.
    Hidden,
}

/// Follows the extension headers of an IPv6 packet, whose fixed header is there.
pub(super) fn ipv6_upper(packet: &[u8]) -> Ipv6Upper<'_> {
    let (mut next, mut at) = (packet.get(6).copied().unwrap_or(0), 40);
    for _ in 0..8 {
        match next {
            // A fragment: the first one has all headers.
            44 => {
                let Some(fragment) = packet.get(at..).and_then(|rest| rest.first_chunk::<8>()) else {
                    return Ipv6Upper::Hidden;
                };
                if u16::from_be_bytes([fragment[2], fragment[3]]) & 0xfff8 != 0 {
                    return Ipv6Upper::LaterFragment;
                }
                next = fragment[0];
                at += 8;
            }
            // Hop-by-hop options, routing, destination options: their length is in units of 8 bytes.
            0 | 43 | 60 => {
                let Some(extension) = packet.get(at..).and_then(|rest| rest.first_chunk::<2>()) else {
                    return Ipv6Upper::Hidden;
                };
                next = extension[0];
                at += 8 * (usize::from(extension[1]) + 1);
            }
            _ => return packet.get(at..).map_or(Ipv6Upper::Hidden, |upper| Ipv6Upper::Header(next, upper)),
        }
    }
    Ipv6Upper::Hidden
}
