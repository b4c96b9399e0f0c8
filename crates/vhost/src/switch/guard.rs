//! The guard of source addresses: a port sends only with addresses that the operator has set.

use super::MacAddress;
use super::packet::{
    ADVERTISEMENT, ARP, ArpSender, ICMPV6, IPV4, IPV6, Ipv6Upper, SOLICITATION, UDP, ipv6_address, ipv6_upper,
    untagged, without_snap,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The UDP port of DHCP clients, as a datagram has it.
const DHCP_CLIENT: [u8; 2] = 68_u16.to_be_bytes();
/// The UDP port of DHCPv6 clients.
const DHCPV6_CLIENT: [u8; 2] = 546_u16.to_be_bytes();

/// The addresses that a port may send from. Without any, all pass.
///
/// With Ethernet addresses, a frame's source and the sender in ARP must be one of them. That holds for ARP behind a SNAP header too.
///
/// With IP addresses, only ARP, IPv4 and IPv6 without such a header pass, and only from these, and no router advertisements, redirects
/// or answers of DHCP servers. A datagram to the port of DHCP clients counts as such an answer, whichever port it comes from. Before a
/// station has an address it may send from `0.0.0.0` to a DHCP server, from `::`, and probes for its addresses; it also has the link-local
/// address that its Ethernet address makes.
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
        if self.addresses.is_empty() {
            return match without_snap((kind, body)) {
                (ARP, packet) => self.permits_arp(packet),
                _ => true,
            };
        }
        match kind {
            ARP => self.permits_arp(body),
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

    /// Only Ethernet and IPv4, whose sender must be the port's. A probe for another station's address would have that station give it up.
    fn permits_arp(&self, body: &[u8]) -> bool {
        ArpSender::of(body).is_some_and(|sender| self.has(sender.mac) && self.owns(sender.claimed()))
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
            // A client takes answers from any port of a server.
            let reaches_client = |ports: &[u8; 4]| ports[2..] == DHCP_CLIENT;
            let answers = header[9] == UDP && !later_fragment && ports.is_none_or(reaches_client);
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
        let is_own = |address: Ipv6Addr| self.owns(address) || address == link_local(mac);
        let source = ipv6_address(&header[8..24]);
        if !source.is_unspecified() && !is_own(source) {
            return false;
        }
        match ipv6_upper(body) {
            // An advertisement, and a solicitation without a sender, say whose an address is: their target must be the port's. A port with fixed
            // addresses sends them where the switch can see it; a receiver ignores them in fragments.
            Ipv6Upper::Header(ICMPV6, message) => {
                const ROUTER: u8 = 134;
                const REDIRECT: u8 = 137;
                match message.first() {
                    Some(&kind) if kind == ADVERTISEMENT || kind == SOLICITATION && source.is_unspecified() => {
                        message.get(8..24).is_some_and(|target| is_own(ipv6_address(target)))
                    }
                    Some(&(ROUTER | REDIRECT)) | None => false,
                    Some(_) => true,
                }
            }
            Ipv6Upper::Header(UDP, datagram) => {
                datagram.first_chunk::<4>().is_some_and(|ports| ports[2..] != DHCPV6_CLIENT)
            }
            Ipv6Upper::Header(..) | Ipv6Upper::LaterFragment => true,
            Ipv6Upper::Hidden => false,
        }
    }
}

/// The address that a station makes of its Ethernet address (RFC 4291).
fn link_local(mac: MacAddress) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}
