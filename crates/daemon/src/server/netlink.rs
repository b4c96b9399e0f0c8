//! Sockets by which the kernel answers questions about sockets (`NETLINK_SOCK_DIAG`).

use std::os::fd::OwnedFd;

use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// The groups `SKNLGRP_INET_UDP_DESTROY` (2) and `SKNLGRP_INET6_UDP_DESTROY` (4), as bits.
pub(super) const DESTROYED: u32 = 1 << (2 - 1) | 1 << (4 - 1);

/// A netlink socket of the calling thread's network namespace that hears these groups.
pub(super) fn netlink(groups: u32) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(SOCK_DIAG))?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}
