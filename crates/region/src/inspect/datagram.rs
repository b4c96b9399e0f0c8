//! The kernel's facts about a UDP socket (protocol U2).

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use partywall_protocol::directory::Transport;
use partywall_protocol::socket::{Identity, SocketFacts, SocketState};
use partywall_protocol::wire::Origin;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::{Inspector, option};

/// `SO_BINDTOIFINDEX`: the number of the device that a socket is bound to, 0 for none.
const BOUND_TO: libc::c_int = 62;

pub(super) fn read(
    inspector: &mut Inspector,
    socket: BorrowedFd<'_>,
    family: AddressFamily,
) -> io::Result<SocketFacts> {
    let netns: u64 = option(socket, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)?;
    let local = SocketAddr::try_from(rustix::net::getsockname(socket)?)?;
    let remote = match rustix::net::getpeername(socket) {
        Ok(at) => at.map(SocketAddr::try_from).transpose()?,
        Err(rustix::io::Errno::NOTCONN) => None,
        Err(e) => return Err(e.into()),
    };
    let grouped: libc::c_int = option(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT)?;
    let device: libc::c_int = option(socket, libc::SOL_SOCKET, BOUND_TO)?;
    let is_reached = local.port() != 0 && device == 0 && may_be_local(local.ip().to_canonical(), netns);
    let state = match is_reached {
        false => SocketState::Other,
        true if grouped == 0 => SocketState::Listening,
        true => SocketState::Grouped,
    };
    Ok(SocketFacts {
        origin: Origin::Host,
        transport: Transport::Udp,
        local,
        remote,
        state,
        only_v6: family == AddressFamily::INET6 && sockopt::ipv6_v6only(socket)?,
        cookie: sockopt::socket_cookie(socket)?,
        netns,
        trusted: inspector.is_trusted(socket, netns),
        acknowledged: 0,
        received: 0,
        sent: 0,
        identity: Identity::default(),
    })
}

/// Whether an address that a socket is bound to may be one of its namespace. Sockets can be bound to any address (`IP_FREEBIND`),
/// and would send as that by a ring, which the kernel would not let them.
///
/// Addresses of another namespace cannot be tested from here. The broker judges sockets there by its list of namespaces.
fn may_be_local(ip: IpAddr, netns: u64) -> bool {
    if ip.is_unspecified() || ip.is_loopback() {
        return true;
    }
    own_namespace().is_ok_and(|own| own != netns || UdpSocket::bind((ip, 0)).is_ok())
}

/// The number of this thread's network namespace.
fn own_namespace() -> io::Result<u64> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)
}
