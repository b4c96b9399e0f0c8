//! The guard of source addresses: a port sends only with addresses that the operator has set.

use super::{ETHERNET, MacAddress};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const TAGS: [u16; 2] = [0x8100, 0x88a8];
const ICMPV6: u8 = 58;
const UDP: u8 = 17;

/// The addresses that a port may send from. Without any, all pass.
///
/// With Ethernet addresses, a frame's source and the sender in ARP must be one of them. With IP addresses, only ARP, IPv4 and IPv6
/// pass, and only from these, and no router advertisements, redirects or answers of DHCP servers. Before a station has an address it may send from `0.0.0.0` to a DHCP server, and from `::`; it also has
/// the link-local address that its Ethernet address makes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceGuard {
    macs: Vec<MacAddress>,
    addresses: Vec<IpAddr>,
}

impl SourceGuard {
    /// A guard for these addresses.
    pub fn new(macs: Vec<MacAddress>, addresses: Vec<IpAddr>) -> Self {
        Self { macs, addresses }
    }

    /// Its Ethernet addresses.
    pub fn macs(&self) -> &[MacAddress] {
        &self.macs
    }

    /// Whether all frames pass.
    pub(crate) fn is_open(&self) -> bool {
        self.macs.is_empty() && self.addresses.is_empty()
    }

    /// Whether the frame that begins with `head` may come from this port.
    pub fn permits(&self, head: &[u8]) -> bool {
        if self.is_open() {
            return true;
        }
        let Some((_, source)) = MacAddress::pair(head) else { return false };
        if !self.has(source) {
            return false;
        }
        let Some((kind, body)) = untagged(head) else { return false };
        match kind {
            ARP => self.permits_arp(body),
            _ if self.addresses.is_empty() => true,
            IPV4 => self.permits_ipv4(body),
            IPV6 => self.permits_ipv6(source, body),
            _ => false,
        }
    }

    /// Whether it lets frames of this address pass, as far as Ethernet goes.
    pub(super) fn has(&self, mac: MacAddress) -> bool {
        self.macs.is_empty() || self.macs.contains(&mac)
    }

    fn owns(&self, address: impl Into<IpAddr>) -> bool {
        self.addresses.is_empty() || self.addresses.contains(&address.into())
    }

    /// Only Ethernet and IPv4, whose sender must be the port's. A probe for an address has none yet.
    fn permits_arp(&self, body: &[u8]) -> bool {
        let Some(packet) = body.first_chunk::<28>() else { return false };
        if packet[..6] != [0, 1, 8, 0, 6, 4] {
            return false;
        }
        let sender = MacAddress([packet[8], packet[9], packet[10], packet[11], packet[12], packet[13]]);
        let address = Ipv4Addr::new(packet[14], packet[15], packet[16], packet[17]);
        self.has(sender) && (self.owns(address) || address.is_unspecified())
    }

    fn permits_ipv4(&self, body: &[u8]) -> bool {
        let Some(header) = body.first_chunk::<20>() else { return false };
        if header[0] >> 4 != 4 {
            return false;
        }
        let source = Ipv4Addr::new(header[12], header[13], header[14], header[15]);
        let later_fragment = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
        let ports = body.get(usize::from(header[0] & 15) * 4..).and_then(|rest| rest.first_chunk::<4>());
        if !source.is_unspecified() {
            const SERVER: &[u8; 4] = &[0, 67, 0, 68];
            let answers = header[9] == UDP && !later_fragment && ports.is_none_or(|ports| ports == SERVER);
            return self.owns(source) && !answers;
        }
        // A DHCP client: from port 68 to port 67.
        header[9] == UDP && !later_fragment && ports == Some(&[0, 68, 0, 67])
    }

    fn permits_ipv6(&self, mac: MacAddress, body: &[u8]) -> bool {
        let Some(header) = body.first_chunk::<40>() else { return false };
        if header[0] >> 4 != 6 {
            return false;
        }
        let address = |bytes: &[u8]| <[u8; 16]>::try_from(bytes).map(Ipv6Addr::from).unwrap_or(Ipv6Addr::UNSPECIFIED);
        let is_own = |address: Ipv6Addr| self.owns(address) || address == link_local(mac);
        let source = address(&header[8..24]);
        if !source.is_unspecified() && !is_own(source) {
            return false;
        }
        // An advertisement says whose an address is: its target must be the port's. Behind other headers one could hide, so a port
        // with fixed addresses sends it plainly; a receiver ignores one in fragments.
        let (mut next, mut at) = (header[6], 40);
        for _ in 0..8 {
            match next {
                ICMPV6 => {
                    let Some(message) = body.get(at..).filter(|rest| !rest.is_empty()) else { return false };
                    const ROUTER: u8 = 134;
                    const ADVERTISEMENT: u8 = 136;
                    const REDIRECT: u8 = 137;
                    return match message[0] {
                        ADVERTISEMENT => message.get(8..24).is_some_and(|target| is_own(address(target))),
                        ROUTER | REDIRECT => false,
                        _ => true,
                    };
                }
                UDP => {
                    const SERVER: [u8; 4] = [0x02, 0x23, 0x02, 0x22];
                    let ports = body.get(at..).and_then(|rest| rest.first_chunk::<4>());
                    return ports.is_some_and(|ports| *ports != SERVER);
                }
                // A fragment: the first one has all headers.
                44 => {
                    let Some(fragment) = body.get(at..).and_then(|rest| rest.first_chunk::<8>()) else { return false };
                    if u16::from_be_bytes([fragment[2], fragment[3]]) & 0xfff8 != 0 {
                        return true;
                    }
                    next = fragment[0];
                    at += 8;
                }
                // Hop-by-hop options, routing, destination options: their length is in units of 8 bytes.
                0 | 43 | 60 => {
                    let Some(extension) = body.get(at..).and_then(|rest| rest.first_chunk::<2>()) else { return false };
                    next = extension[0];
                    at += 8 * (usize::from(extension[1]) + 1);
                }
                _ => return true,
            }
        }
        false
    }
}

/// The payload of the frame, behind two VLAN tags at most.
fn untagged(head: &[u8]) -> Option<(u16, &[u8])> {
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

/// The address that a station makes of its Ethernet address (RFC 4291).
fn link_local(mac: MacAddress) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}
