//! A new connection is looked after from here on.

use crate::conn::{self, Conn};
use crate::ready;
use partywall_shm::status::Role;
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Begins to look after a connection. `is_known`: its peer is one of our programs; otherwise there is no broker that could say so. `port` is
/// the connection's own, or 0.
pub(super) fn adopt(fd: c_int, role: Role, is_known: bool, port: u16, peer: SocketAddr) {
    // Before our constructor has run, constructors of other libraries may connect. So this is done for each connection, and costs a load.
    conn::install(&ready::WAITERS);
    let unspecified: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let adopt = if is_known { Conn::adopt } else { Conn::adopt_unknown };
    adopt(fd, role, SocketAddr::new(unspecified, port), peer);
}
