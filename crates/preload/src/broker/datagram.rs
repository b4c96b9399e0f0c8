//! What UDP sockets ask the broker (protocol U).

use super::packet::Request;
use super::session::{self, Patience, Turn};
use super::{directory, netns, reason, shape, tick};
use crate::sys;
use partywall_protocol::directory::{Fingerprint, Transport, is_scoped};
use partywall_shm::address::wide;
use partywall_shm::layout::Geometry;
use partywall_shm::status::Reason;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Opens a session if there is none, and it is time to try.
pub(crate) fn be_open() {
    if directory().is_none()
        && session::may_be_open()
        && let Ok(turn) = Turn::take(Patience::Brief)
    {
        turn.look(true);
    }
}

/// Changes whenever somebody has come to receive.
#[inline]
pub(crate) fn listener_generation() -> u64 {
    directory().map_or(0, |directory| directory.instance().wrapping_add(directory.listener_generation()))
}

/// Whether a program of ours receives datagrams there.
pub(crate) fn knows_receiver(fd: c_int, at: SocketAddr) -> bool {
    tick();
    let Some(directory) = directory() else { return false };
    let netns = if is_scoped(at.ip()) { netns::cookie(fd) } else { 0 };
    directory.has_listener(Fingerprint::listener(Transport::Udp, at, netns))
}

/// Whether somebody offers a ring for datagrams from there to this port.
pub(crate) fn knows_datagram_offer(fd: c_int, port: u16, from: SocketAddr) -> bool {
    let Some(directory) = directory() else { return false };
    let netns = if is_scoped(from.ip()) { netns::cookie(fd) } else { 0 };
    let to = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
    directory.has_offer(Fingerprint::offer(Transport::Udp, to, from, netns))
}

fn address(request: Request, at: SocketAddr) -> Request {
    let bits = wide(at.ip());
    request.u64((bits >> 64) as u64).u64(bits as u64).u16(at.port())
}

/// Offers a ring for what this socket sends to `to`, by the region that has it. Returns the number of the flow that it may become.
pub(crate) fn offer_datagrams(
    fd: c_int,
    to: SocketAddr,
    geometry: Geometry,
    region: BorrowedFd<'_>,
) -> Result<u64, Reason> {
    let turn = Turn::take(Patience::Brief).map_err(reason)?;
    let request = |number| shape(address(Request::new(38, number), to), geometry);
    let answer = turn.ask(request, &[sys::borrow(fd), region], 25).map_err(reason)?;
    answer.fields().u64().ok_or(Reason::BrokerAbsent)
}

/// The region of the receiver that has taken a flow that this process offered.
pub(crate) fn fetch_receiver(flow: u64) -> Result<OwnedFd, Reason> {
    let turn = Turn::take(Patience::Brief).map_err(reason)?;
    let mut answer = turn.ask(|number| Request::new(49, number).u64(flow), &[], 50).map_err(reason)?;
    // One that found no room in this process is lost.
    answer.take_fd(0).ok_or(Reason::Resources)
}

/// What a flow that was taken brings.
#[derive(Debug)]
pub(crate) struct Flow {
    /// Its number.
    pub(crate) number: u64,
    /// Shape of the sender's region.
    pub(crate) geometry: Geometry,
    /// The sender's region, not yet verified.
    pub(crate) region: OwnedFd,
}

/// Takes a ring for what comes from `from`, as the kernel has said.
pub(crate) fn take_datagrams(fd: c_int, from: SocketAddr, region: BorrowedFd<'_>) -> Result<Flow, Reason> {
    let turn = Turn::take(Patience::Brief).map_err(reason)?;
    let request = |number| address(Request::new(39, number), from);
    let mut answer = turn.ask(request, &[sys::borrow(fd), region], 48).map_err(reason)?;
    drop(turn);
    let mut fields = answer.fields();
    match (fields.u64(), fields.u64(), fields.u64(), answer.take_fd(0)) {
        (Some(number), Some(offset), Some(size), Some(region)) => {
            let geometry = Geometry::new(offset, size).map_err(|_| Reason::Corrupt)?;
            Ok(Flow { number, geometry, region })
        }
        _ => Err(Reason::Resources),
    }
}
