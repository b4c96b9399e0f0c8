//! IP addresses that a port can have. All are in one form: an IPv4 address that is mapped to IPv6 becomes an IPv4 address, which frames have.

use serde::{Deserialize, Deserializer};
use std::net::IpAddr;

/// The IP address of one host. An IPv4 address that is mapped to IPv6 becomes an IPv4 address.
///
/// # Errors
/// How to write it.
pub fn parse_host_address(text: &str) -> Result<IpAddr, String> {
    let Ok(ip) = text.parse::<IpAddr>().map(|ip| ip.to_canonical()) else {
        return Err(format!(
            "`{text}` is no IP address: write one as in 10.0.0.12 or fd00::12, without a prefix length"
        ));
    };
    if is_host_address(ip) { Ok(ip) } else { Err(format!("`{text}` is not the address of one host")) }
}

/// Whether this is the address of one host on a network, as frames have it.
pub(crate) fn is_host_address(ip: IpAddr) -> bool {
    let is_broadcast = matches!(ip, IpAddr::V4(four) if four.is_broadcast());
    let is_mapped = ip.to_canonical() != ip;
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_broadcast || is_mapped)
}

/// Addresses of a request or of a file of JSON.
pub(crate) fn canonical_list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<IpAddr>, D::Error> {
    let list = Vec::<IpAddr>::deserialize(from)?;
    Ok(list.into_iter().map(|ip| ip.to_canonical()).collect())
}
