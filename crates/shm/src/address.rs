//! IP addresses in the one form that shared memory, messages and hashes have: 128 bits, an IPv4 address as the IPv6 address that maps it.

use core::net::{IpAddr, Ipv6Addr};

/// An address in 128 bits.
pub const fn wide(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(four) => four.to_ipv6_mapped().to_bits(),
        IpAddr::V6(six) => six.to_bits(),
    }
}

/// The address that [`wide`] made these bits of. A mapped IPv4 address is one of IPv4.
pub const fn narrow(bits: u128) -> IpAddr {
    let six = Ipv6Addr::from_bits(bits);
    match six.to_ipv4_mapped() {
        Some(four) => IpAddr::V4(four),
        None => IpAddr::V6(six),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_of_mapped_and_plain_ipv4_is_one_number() {
        let plain: IpAddr = "10.1.2.3".parse().unwrap();
        let mapped: IpAddr = "::ffff:10.1.2.3".parse().unwrap();
        let six: IpAddr = "2001:db8::1".parse().unwrap();
        assert_eq!(wide(plain), wide(mapped));
        assert_eq!((narrow(wide(mapped)), narrow(wide(six))), (plain, six));
    }
}
