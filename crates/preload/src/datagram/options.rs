//! The options that keep a socket one of plain datagrams between two addresses (protocol U9).

use libc::c_int;

/// The options that split a call's bytes into datagrams and join them again. What they are set to is followed.
pub(super) const SEGMENTS: [(c_int, c_int); 2] = [(libc::SOL_UDP, libc::UDP_SEGMENT), (libc::SOL_UDP, libc::UDP_GRO)];

/// Whether datagrams may go by rings after this option was set. Unknown options are not harmless.
pub(super) fn is_harmless(level: c_int, name: c_int) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_RCVBUF
                | libc::SO_SNDBUF
                | libc::SO_RCVBUFFORCE
                | libc::SO_SNDBUFFORCE
                | libc::SO_RCVTIMEO
                | libc::SO_SNDTIMEO
                | libc::SO_RCVLOWAT
                | libc::SO_REUSEADDR
                | libc::SO_BROADCAST
                | libc::SO_KEEPALIVE
                | libc::SO_LINGER
                | libc::SO_PRIORITY
                | libc::SO_BUSY_POLL
        ),
        libc::IPPROTO_IP => matches!(
            name,
            libc::IP_TOS
                | libc::IP_TTL
                | libc::IP_MTU_DISCOVER
                | libc::IP_MULTICAST_TTL
                | libc::IP_MULTICAST_LOOP
                | libc::IP_MULTICAST_IF
        ),
        libc::IPPROTO_IPV6 => matches!(
            name,
            libc::IPV6_V6ONLY
                | libc::IPV6_TCLASS
                | libc::IPV6_UNICAST_HOPS
                | libc::IPV6_MTU_DISCOVER
                | libc::IPV6_MULTICAST_HOPS
                | libc::IPV6_MULTICAST_LOOP
                | libc::IPV6_MULTICAST_IF
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_beyond_plain_bytes_are_not_harmless() {
        for (level, name) in [
            (libc::IPPROTO_IP, libc::IP_PKTINFO),
            (libc::IPPROTO_IP, libc::IP_RECVTTL),
            (libc::IPPROTO_IP, libc::IP_RECVERR),
            (libc::IPPROTO_IP, libc::IP_OPTIONS),
            (libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP),
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
            (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF),
            (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_EBPF),
            (libc::SOL_SOCKET, libc::SO_INCOMING_CPU),
            (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER),
            (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
            (libc::SOL_SOCKET, libc::SO_PEEK_OFF),
            (libc::IPPROTO_UDP, libc::UDP_CORK),
        ] {
            assert!(!is_harmless(level, name), "{level} {name}");
        }
        assert!(is_harmless(libc::SOL_SOCKET, libc::SO_RCVBUF));
    }
}
