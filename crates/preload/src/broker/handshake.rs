//! The steps by which a connection gets its rings (protocol T4), each one request to the broker.

use super::late::{self, LateStep, StepAnswer};
use super::packet::Descriptors;
use super::repair_mode::{abort, end_repair_mode, is_in_repair_by_program};
use super::session::{BrokerFailure, Turn, Urgency, done};
use super::{reason, state};
use crate::log::log;
use crate::sys;
use partywall_protocol::wire::{BellWay, BorrowedMessage, Located, RegionReference};
use partywall_shm::layout::Geometry;
use partywall_shm::status::Reason;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The state of a connection that was shown to the broker with the memory of a region.
#[derive(Debug)]
pub(crate) struct BegunHandshake {
    /// Our end of its bell.
    pub(crate) bell: OwnedFd,
    /// What an interrupt signals when the peer rings, and what to signal in place of the link (protocol I7).
    pub(crate) events: Option<(OwnedFd, OwnedFd)>,
    /// The other end is on another machine: our region is to be made there, in place of the one that was shown.
    pub(crate) place: Option<PlaceOfRegion>,
}

/// A place in a window.
#[derive(Debug)]
pub(crate) struct PlaceOfRegion {
    /// The byte at which it begins. Not yet verified.
    pub(crate) base: u64,
    /// The region that fills it. Its ring may be smaller than that of the region that was shown.
    pub(crate) shape: Geometry,
    pub(crate) window: OwnedFd,
}

/// How long a step is repeated while a killed broker has left the connection in repair mode.
const REPAIR_LIMIT: Duration = Duration::from_secs(5);
/// From one attempt to the next.
const REPEAT_INTERVAL: Duration = Duration::from_millis(50);

/// Shows a connection, the first of these descriptors, with a request. Returns the turn with what `read` makes of the answer. If the answer comes later,
/// `late` gets what identifies it.
///
/// If the step leaves the connection in repair mode, it is repeated (protocol T3.6): the next broker ends the mode. Calls of the program on this
/// connection wait meanwhile, because no thread may be inside a system call on a socket that is being read (T3.3).
fn show<T>(
    request: &BorrowedMessage<'_>,
    with: &[BorrowedFd<'_>],
    late: &AtomicU64,
    mut read: impl FnMut(BorrowedMessage<'_>, &mut Descriptors) -> Option<T>,
) -> Result<(Turn, StepAnswer<T>), Reason> {
    let is_excepted = with.first().is_none_or(|socket| is_in_repair_by_program(*socket));
    let end = sys::now() + REPAIR_LIMIT;
    let mut is_first = true;
    loop {
        let shown = Turn::take(Urgency::Brief).and_then(|turn| {
            if !is_first {
                turn.retry_now();
            }
            turn.tell_owed();
            let answer = turn.ask_step(request, with, late, &mut read)?;
            Ok((turn, answer))
        });
        is_first = false;
        let is_out = |socket: &BorrowedFd<'_>| end_repair_mode(*socket, sys::now() + REPEAT_INTERVAL);
        if shown.is_ok() || is_excepted || with.first().is_none_or(is_out) {
            return shown.map_err(reason);
        }
        if sys::now() >= end {
            log!(
                "aborted a connection: the broker was killed while it read the connection, and no broker with \
                 CAP_NET_ADMIN has come in {REPAIR_LIMIT:?}"
            );
            with.iter().take(1).for_each(|socket| abort(*socket));
            return shown.map_err(reason);
        }
    }
}

/// What identifies a handshake of a connection. Each word is stored while no signal handler can run: a thread that ends in the middle of a step
/// leaves it to be taken back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandshakeWords<'a> {
    /// The number of the offer.
    pub(crate) number: &'a AtomicU64,
    /// The step whose answer comes later ([`LateStep::of`]).
    pub(crate) late: &'a AtomicU64,
}

/// Offers a ring for a connected socket, with the memory of our region.
pub(crate) fn offer(
    fd: c_int,
    geometry: Geometry,
    memory: BorrowedFd<'_>,
    words: HandshakeWords<'_>,
) -> Result<StepAnswer<BegunHandshake>, Reason> {
    let region = RegionReference::own_memory(geometry);
    show_with(&BorrowedMessage::Offer { region }, fd, (geometry, memory), words)
}

/// Takes the offer that the other end of this accepted connection has made, likewise.
pub(crate) fn take(
    fd: c_int,
    geometry: Geometry,
    memory: BorrowedFd<'_>,
    words: HandshakeWords<'_>,
) -> Result<StepAnswer<BegunHandshake>, Reason> {
    let region = RegionReference::own_memory(geometry);
    show_with(&BorrowedMessage::Take { region }, fd, (geometry, memory), words)
}

fn show_with(
    request: &BorrowedMessage<'_>,
    fd: c_int,
    (shown, memory): (Geometry, BorrowedFd<'_>),
    words: HandshakeWords<'_>,
) -> Result<StepAnswer<BegunHandshake>, Reason> {
    let read = |answer: BorrowedMessage<'_>, found: &mut Descriptors| read_begun(answer, found, shown, words.number);
    match show(request, &[sys::borrow(fd), memory], words.late, read)? {
        (_, StepAnswer::Later) => Ok(StepAnswer::Later),
        (turn, StepAnswer::Now(handshake)) => or_cancel(&turn, handshake, words.number).map(StepAnswer::Now),
    }
}

/// The answer to an offer or a take that comes later, if it is here. `shown` is the shape of the region that was shown.
pub(crate) fn late_bell(step: LateStep, shown: Geometry, number: &AtomicU64) -> Option<Result<BegunHandshake, Reason>> {
    let result = late::take(step, |answer, found| read_begun(answer, found, shown, number))?;
    Some(result.map_err(late_reason).and_then(|(turn, handshake)| or_cancel(&turn, handshake, number)))
}

/// Why there is no answer to a step that was left to a later call. Without a broker, this attempt is over.
fn late_reason(failure: BrokerFailure) -> Reason {
    match reason(failure) {
        Reason::BrokerAbsent => Reason::NotTaken,
        other => other,
    }
}

/// Reads the answer to an offer or a take, and stores its number. The outer `None` is for another message.
fn read_begun(
    answer: BorrowedMessage<'_>,
    found: &mut Descriptors,
    shown: Geometry,
    number: &AtomicU64,
) -> Option<Result<BegunHandshake, Reason>> {
    let BorrowedMessage::Bell { offer, way, region } = answer else { return None };
    let place = region.check().ok()?;
    number.store(offer, Ordering::Relaxed);
    Some(read_bell(way, place, shown, found))
}

/// Takes an offer or a take back whose answer is of no use.
fn or_cancel(
    turn: &Turn,
    handshake: Result<BegunHandshake, Reason>,
    number: &AtomicU64,
) -> Result<BegunHandshake, Reason> {
    handshake.inspect_err(|_| {
        let _ = turn.ask(&BorrowedMessage::Cancel { offer: number.swap(0, Ordering::Relaxed) }, &[], done);
    })
}

/// Reads the answer to an offer or a take. It is of no use if a descriptor found no room in this process: events that are not there would be
/// missed. Neither is a place for a larger ring than was shown (protocol T4.10).
pub(super) fn read_bell(
    way: BellWay,
    (located, shape): (Located, Geometry),
    shown: Geometry,
    [bell, first, second, third]: &mut Descriptors,
) -> Result<BegunHandshake, Reason> {
    let bell = bell.take().ok_or(Reason::Resources)?;
    let (events, window) = match way {
        BellWay::Interrupts => (first.take().zip(second.take()), third.take()),
        BellWay::Link | BellWay::Relays => (None, first.take()),
    };
    if (way == BellWay::Interrupts) != events.is_some() {
        return Err(Reason::Resources);
    }
    let place = match located {
        Located::OwnMemory => None,
        Located::Window { base } => {
            let is_usable =
                shape.ring_offset() == shown.ring_offset() && (1..=shown.ring_size()).contains(&shape.ring_size());
            if !is_usable {
                return Err(Reason::Refused);
            }
            // The window may have gone meanwhile.
            Some(PlaceOfRegion { base, shape, window: window.ok_or(Reason::NoWindow)? })
        }
    };
    Ok(BegunHandshake { bell, events, place })
}

/// The other side of a connection.
#[derive(Debug)]
pub(crate) struct PeerSide {
    /// Where its region is, and its shape.
    pub(crate) place: (Located, Geometry),
    /// The memory that its region is in, not yet verified.
    pub(crate) region: OwnedFd,
    /// The number of its domain, which no other domain has.
    pub(crate) program: u64,
}

/// Shows the socket of an offer once more, which the other side has taken.
pub(crate) fn confirm(fd: c_int, offer: u64, late: &AtomicU64) -> Result<StepAnswer<PeerSide>, Reason> {
    show_again(&BorrowedMessage::Confirm { offer }, fd, late)
}

/// Shows the socket of a take once more, which the other side has confirmed: from here on the two have a channel.
pub(crate) fn finish(fd: c_int, offer: u64, late: &AtomicU64) -> Result<StepAnswer<PeerSide>, Reason> {
    show_again(&BorrowedMessage::Finish { offer }, fd, late)
}

fn show_again(request: &BorrowedMessage<'_>, fd: c_int, late: &AtomicU64) -> Result<StepAnswer<PeerSide>, Reason> {
    match show(request, &[sys::borrow(fd)], late, read_peer)?.1 {
        StepAnswer::Later => Ok(StepAnswer::Later),
        StepAnswer::Now(peer) => peer.map(StepAnswer::Now),
    }
}

/// The answer to such a step that comes later, if it is here.
pub(crate) fn late_peer(step: LateStep) -> Option<Result<PeerSide, Reason>> {
    Some(late::take(step, read_peer)?.map_err(late_reason).and_then(|(_, peer)| peer))
}

/// Reads the answer to `Confirm` and `Finish`. The outer `None` is for another message. A region for which this process had no descriptor is
/// lost.
fn read_peer(answer: BorrowedMessage<'_>, [memory, ..]: &mut Descriptors) -> Option<Result<PeerSide, Reason>> {
    let BorrowedMessage::PeerIs { region, program, .. } = answer else { return None };
    let peer = memory.take().ok_or(Reason::Resources).and_then(|memory| {
        let place = region.check().map_err(|_| Reason::Corrupt)?;
        Ok(PeerSide { place, region: memory, program })
    });
    Some(peer)
}

/// Withdraws an offer or a take. `false` if there was none any more: it has become a channel, or the broker is another one. Such a
/// channel is given up. If the session is busy, a later call does it.
pub(crate) fn cancel(offer: u64) -> bool {
    let cancelled = cancel_untaken(offer);
    if !cancelled {
        closed(offer);
    }
    cancelled
}

/// Takes an offer or a take back, unless it is a channel by now, or the broker does not answer.
pub(crate) fn cancel_untaken(offer: u64) -> bool {
    let Ok(turn) = Turn::take(Urgency::Long) else { return false };
    turn.ask(&BorrowedMessage::Cancel { offer }, &[], done).is_ok()
}

/// A channel that was offered or taken has come to its end. `false` if a broker that may know the channel was not told. If the session is
/// busy, a later call tells it.
pub(crate) fn closed(channel: u64) -> bool {
    match Turn::take(Urgency::Long) {
        Ok(turn) => turn.tell(&BorrowedMessage::Closed { channel }),
        Err(BrokerFailure::Busy) => {
            state::owe(channel);
            false
        }
        Err(_) => true,
    }
}
