//! The requests of UDP sockets to the broker (protocol U).

use super::session::{self, Turn, Urgency};
use super::{directory, netns, reason, tick};
use crate::sys;
use partywall_protocol::directory::{Fingerprint, Transport, is_scoped};
use partywall_protocol::wire::{BorrowedMessage, RegionReference};
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
        && let Ok(turn) = Turn::take(Urgency::Brief)
    {
        turn.look(true);
    }
}

/// A number that changes whenever a new receiver appears.
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

/// Whether a program offers a ring for datagrams from `from` to this port.
pub(crate) fn knows_datagram_offer(fd: c_int, port: u16, from: SocketAddr) -> bool {
    let Some(directory) = directory() else { return false };
    let netns = if is_scoped(from.ip()) { netns::cookie(fd) } else { 0 };
    let to = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
    directory.has_offer(Fingerprint::offer(Transport::Udp, to, from, netns))
}

/// The two halves of an address, as messages have them: the upper half first.
fn halves(ip: IpAddr) -> (u64, u64) {
    let bits = wide(ip);
    ((bits >> 64) as u64, bits as u64)
}

/// Offers a ring for what this socket sends to `to`, by the region that has it. Returns the number of the flow that it may become.
pub(crate) fn offer_datagrams(
    fd: c_int,
    to: SocketAddr,
    geometry: Geometry,
    region: BorrowedFd<'_>,
) -> Result<u64, Reason> {
    let turn = Turn::take(Urgency::Brief).map_err(reason)?;
    let (to_high, to_low) = halves(to.ip());
    let request = BorrowedMessage::OfferDatagrams {
        to_high,
        to_low,
        to_port: to.port(),
        region: RegionReference::own_memory(geometry),
    };
    let offered = turn.ask(&request, &[sys::borrow(fd), region], |answer, _| match answer {
        BorrowedMessage::Offered { offer } => Some(offer),
        _ => None,
    });
    offered.map_err(reason)
}

/// The region of the receiver that has taken a flow that this process offered.
pub(crate) fn fetch_receiver(flow: u64) -> Result<OwnedFd, Reason> {
    let turn = Turn::take(Urgency::Brief).map_err(reason)?;
    let region = turn.ask(&BorrowedMessage::FetchReceiver { flow }, &[], |answer, [region, ..]| match answer {
        BorrowedMessage::Receiver {} => Some(region.take()),
        _ => None,
    });
    // A region for which this process had no descriptor is lost.
    region.map_err(reason)?.ok_or(Reason::Resources)
}

/// The answer to a flow that was taken.
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
    let turn = Turn::take(Urgency::Brief).map_err(reason)?;
    let (from_high, from_low) = halves(from.ip());
    let request = BorrowedMessage::TakeDatagrams { from_high, from_low, from_port: from.port() };
    let taken = turn.ask(&request, &[sys::borrow(fd), region], |answer, [memory, ..]| match answer {
        BorrowedMessage::DatagramsTaken { flow, region } => Some((flow, region.check_own_memory(), memory.take())),
        _ => None,
    });
    drop(turn);
    let (number, geometry, region) = taken.map_err(reason)?;
    let region = region.ok_or(Reason::Resources)?;
    Ok(Flow { number, geometry: geometry.map_err(|_| Reason::Corrupt)?, region })
}
