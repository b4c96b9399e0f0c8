//! The IP addresses that belong to ports: no other port sends from them.

use super::PortNumber;
use super::packet::{
    ADVERTISEMENT, ARP, ArpSender, ICMPV6, IPV4, IPV6, Ipv6Upper, SOLICITATION, ipv6_address, ipv6_upper, untagged,
    without_snap,
};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The IP addresses that belong to ports. IPv4 addresses that are mapped to IPv6 count as IPv4 addresses.
///
/// The guard of a port says what it may send from. This is the other half, for ports whose guard would let an address pass: one without
/// IP addresses, and one that could make the link-local address of another port. While there are owners, a port sends no ARP, IPv4 or IPv6
/// whose addresses the switch cannot read.
#[derive(Debug, Default)]
pub(super) struct AddressOwners(HashMap<IpAddr, PortNumber>);

impl AddressOwners {
    pub(super) fn new(owners: impl IntoIterator<Item = (IpAddr, PortNumber)>) -> Self {
        Self(owners.into_iter().map(|(address, owner)| (address.to_canonical(), owner)).collect())
    }

    /// Whether the frame that begins with `head` names no address of another port than `from` as its sender.
    pub(super) fn permit(&self, from: PortNumber, head: &[u8]) -> bool {
        self.0.is_empty() || self.permit_frame(from, head)
    }

    fn permit_frame(&self, from: PortNumber, head: &[u8]) -> bool {
        let Some(packet) = untagged(head) else { return false };
        match without_snap(packet) {
            (ARP, body) => ArpSender::of(body).is_some_and(|sender| self.is_free(from, sender.claimed())),
            (IPV4, body) => body.first_chunk::<20>().is_some_and(|header| {
                let source = Ipv4Addr::new(header[12], header[13], header[14], header[15]);
                header[0] >> 4 == 4 && self.is_free(from, source)
            }),
            (IPV6, body) => body.first_chunk::<40>().is_some_and(|header| {
                let source = ipv6_address(&header[8..24]);
                header[0] >> 4 == 6 && self.is_free(from, source) && self.permit_upper(from, source, body)
            }),
            _ => true,
        }
    }

    /// A neighbour advertisement, and a solicitation without a sender, say whose an address is, as the sender of ARP does.
    fn permit_upper(&self, from: PortNumber, source: Ipv6Addr, packet: &[u8]) -> bool {
        match ipv6_upper(packet) {
            Ipv6Upper::Header(ICMPV6, message) => match message.first() {
                Some(&kind) if kind == ADVERTISEMENT || kind == SOLICITATION && source.is_unspecified() => {
                    let target = message.get(8..24).map(ipv6_address);
                    target.is_some_and(|target: Ipv6Addr| self.is_free(from, target))
                }
                Some(_) => true,
                None => false,
            },
            Ipv6Upper::Header(..) | Ipv6Upper::LaterFragment => true,
            Ipv6Upper::Hidden => false,
        }
    }

    /// Whether the address belongs to no other port.
    fn is_free(&self, from: PortNumber, address: impl Into<IpAddr>) -> bool {
        self.0.get(&address.into().to_canonical()).is_none_or(|owner| *owner == from)
    }
}
