//! The requests of UDP sockets to the broker (protocol U).

use super::packet::Descriptors;
use super::session::{self, Turn, Urgency};
use super::{directory, netns, reason, tick};
use crate::sys;
use partywall_protocol::directory::{Fingerprint, Transport, is_scoped};
use partywall_protocol::wire::{BorrowedMessage, Located, RegionReference};
use partywall_shm::address::wide;
use partywall_shm::layout::Geometry;
use partywall_shm::status::Reason;
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
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

/// Whether a program offers a ring for datagrams from `from` to this port. `netns` keeps the socket's namespace for later calls, which then
/// need no system call.
pub(crate) fn knows_datagram_offer((fd, netns): (c_int, &mut Option<u64>), port: u16, from: SocketAddr) -> bool {
    let Some(directory) = directory() else { return false };
    let netns = if is_scoped(from.ip()) { *netns.get_or_insert_with(|| netns::cookie(fd)) } else { 0 };
    let to = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
    directory.has_offer(Fingerprint::offer(Transport::Udp, to, from, netns))
}

/// The two halves of an address, as messages have them: the upper half first.
fn halves(ip: IpAddr) -> (u64, u64) {
    let bits = wide(ip);
    ((bits >> 64) as u64, bits as u64)
}

/// Offers a ring for what this socket sends to `to`, by the region that has it. Returns the number of the flow that it may become. If the
/// receiver is on another machine, `move_to` makes another region at a byte of a window.
pub(crate) fn offer_datagrams(
    fd: c_int,
    to: SocketAddr,
    region: (Geometry, BorrowedFd<'_>),
    move_to: impl FnOnce(u64, BorrowedFd<'_>) -> Result<(), Reason>,
) -> Result<u64, Reason> {
    let (to_high, to_low) = halves(to.ip());
    let request = |region| BorrowedMessage::OfferDatagrams { to_high, to_low, to_port: to.port(), region };
    show_with(fd, request, region, move_to, |answer, _| match answer {
        BorrowedMessage::Offered { offer } => Some(offer),
        _ => None,
    })
}

/// The region of the receiver that has taken a flow that this process offered: where it is, its shape, and its memory, not yet verified.
pub(crate) fn fetch_receiver(flow: u64) -> Result<((Located, Geometry), OwnedFd), Reason> {
    let turn = Turn::take(Urgency::Brief).map_err(reason)?;
    let fetched = turn.ask(&BorrowedMessage::FetchReceiver { flow }, &[], |answer, [memory, ..]| match answer {
        BorrowedMessage::Receiver { region } => Some((region.check(), memory.take())),
        _ => None,
    });
    drop(turn);
    let (place, memory) = fetched.map_err(reason)?;
    // A region for which this process had no descriptor is lost.
    Ok((place.map_err(|_| Reason::Corrupt)?, memory.ok_or(Reason::Resources)?))
}

/// The answer to a flow that was taken.
#[derive(Debug)]
pub(crate) struct Flow {
    /// Its number.
    pub(crate) number: u64,
    /// Where the sender's region is, its shape, and the memory that it is in, not yet verified. If it cannot be used, the caller has to close
    /// the flow nevertheless: it has begun.
    pub(crate) region: Result<((Located, Geometry), OwnedFd), Reason>,
}

/// Takes a ring for what comes from `from`, as the kernel has said. If the sender is on another machine, `move_to` makes another region at
/// a byte of a window.
pub(crate) fn take_datagrams(
    fd: c_int,
    from: SocketAddr,
    region: (Geometry, BorrowedFd<'_>),
    move_to: impl FnOnce(u64, BorrowedFd<'_>) -> Result<(), Reason>,
) -> Result<Flow, Reason> {
    let (from_high, from_low) = halves(from.ip());
    let request = |region| BorrowedMessage::TakeDatagrams { from_high, from_low, from_port: from.port(), region };
    show_with(fd, request, region, move_to, |answer, [memory, ..]| match answer {
        BorrowedMessage::DatagramsTaken { flow, region } => {
            let place = region.check().map_err(|_| Reason::Corrupt);
            // A region for which this process had no descriptor is lost.
            let region = place.and_then(|place| Ok((place, memory.take().ok_or(Reason::Resources)?)));
            Some(Flow { number: flow, region })
        }
        _ => None,
    })
}

/// Shows a socket with a region, and again with one in a window if the broker says where that is to be. Both requests are made in one turn.
fn show_with<T>(
    fd: c_int,
    request: impl Fn(RegionReference) -> BorrowedMessage<'static>,
    (geometry, memory): (Geometry, BorrowedFd<'_>),
    move_to: impl FnOnce(u64, BorrowedFd<'_>) -> Result<(), Reason>,
    read: impl Fn(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
) -> Result<T, Reason> {
    let turn = Turn::take(Urgency::Brief).map_err(reason)?;
    let show = |region: RegionReference, memory: BorrowedFd<'_>| {
        let read = |answer: BorrowedMessage<'_>, found: &mut Descriptors| match answer {
            // A datagram's ring is as large as it was asked for.
            BorrowedMessage::RoomIs { base, size } if size == geometry.region_size() => {
                Some(Err((base, found[0].take())))
            }
            other => read(other, found).map(Ok),
        };
        turn.ask(&request(region), &[sys::borrow(fd), memory], read).map_err(reason)
    };
    let (base, window) = match show(RegionReference::own_memory(geometry), memory)? {
        Ok(done) => return Ok(done),
        Err((base, window)) => (base, window.ok_or(Reason::Resources)?),
    };
    move_to(base, window.as_fd())?;
    show(RegionReference::in_window(base, geometry), window.as_fd())?.map_err(|_| Reason::Refused)
}
