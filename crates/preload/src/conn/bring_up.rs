//! From the offer of a ring to both directions being attached.
//!
//! ```text
//!   connecting side               broker                accepting side
//!        | -- Offer: socket, region ------->|                        |
//!        |<---------------- bells ----------|                        |
//!        |                                  | directory: an offer    |
//!        |                                  |<- Take: socket, region |
//!        |                                  |-- bells -------------->|
//!        |<--------------------- a bell -----------------------------|
//!        | -- Confirm: socket ------------->|                        |
//!        |<---------------- its region -----|-- a bell ------------->|
//!        |                                  |<------ Finish: socket -|
//!        |                                  |-- its region --------->| attaches, is WATCHING
//!        | sees that, attaches, is WATCHING |                        |
//! ```
//!
//! What a side shows is the memory of a region that it makes when it has its bell. If the two are on different machines, a place in a window comes
//! with the bell, and the side makes its region there instead. The accepting side rings the first bell when it has done so: the connecting side
//! reads the region after `Confirm`.
//!
//! In a virtual machine the answer to each of these requests comes in two parts: at once, that the agent has read the socket, and later the rest. Then
//! the call that has sent the request returns, and a later call takes the rest ([`broker::LateStep`]).
//!
//! Nobody waits for anybody: each side looks on its next call. No byte changes its way by this; that is for the senders, later.
//! The broker reads a socket only while no thread of ours is in the kernel with it ([`is_quiet`]): what it does to read the
//! connection's numbers would make such a thread's call fail.

use super::accounts;
use super::moves::Guess;
use super::options;
use super::pace::PACE;
use super::rx::ConnRx;
use super::tx::ConnTx;
use super::waiters::waiters;
use super::{Conn, ConnStage, Pages, flags};
use crate::broker::{BegunHandshake, FoundOffer, HandshakeWords, LateStep, PeerSide, PlaceOfRegion, StepAnswer};
use crate::log::log;
use crate::signals::BlockedSignals;
use crate::{broker, hidden, process, sys, unseen};
use partywall_protocol::upgrade::Upgrade;
use partywall_protocol::wire::Located;
use partywall_region::RegionOptions;
use partywall_region::bell::Heard;
use partywall_region::berth::ReservedRegion;
use partywall_shm::layout::{Geometry, PAGE, RegionKind, path_flags};
use partywall_shm::status::{Reason, Role};
use partywall_shm::sync::load_acquire_u32;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// Larger rings of a peer than this are not mapped.
const MAX_PEER_RING: u64 = 64 << 20;
/// The stages of an offer: waiting for the other side; the bell has rung, and it is our turn; the connecting side has confirmed, and
/// waits for the peer to watch its ring; no process answers any more, or none in time; waiting for our end of the bell.
const WAITS: u32 = 0;
const HEARD: u32 = 1;
const CONFIRMED: u32 = 2;
const GONE: u32 = 3;
const ASKED: u32 = 4;

/// Whether a reason passes.
const fn may_try_again(reason: Reason) -> bool {
    use Reason::{BrokerAbsent, MovesNever, NoPeer, NoWindow, NotTaken, ProgramNotListed, Resources, Shared};
    matches!(reason, BrokerAbsent | Resources | NotTaken | NoPeer | NoWindow | MovesNever | ProgramNotListed | Shared)
}

/// Whether a reason may pass with another policy, or with another broker, which may have more rights. `judge_again` makes the next
/// attempt then.
const fn may_pass_with_policy(reason: Reason) -> bool {
    matches!(reason, Reason::Refused | Reason::Ambiguous)
}

/// The connecting side's first step.
#[cold]
pub(super) fn offer(conn: &'static Conn, fd: c_int) {
    if !may_begin(conn, fd) {
        return;
    }
    let _signals = BlockedSignals::during_step();
    let Some(_held) = conn.tx.try_hold() else { return };
    if !may_step(conn, fd, ConnStage::Candidate) {
        return;
    }
    if has_left(conn, fd) {
        log!("no ring for fd {fd} until its peer is back");
        conn.ring_path.because(Reason::NoPeer);
        conn.ring_path.set_flag(flags::UNKNOWN_PEER, true);
        wait_for_policy(conn);
        return conn.moves.judge_later();
    }
    if !is_quiet(conn) {
        conn.ring_path.set_stage(ConnStage::Candidate);
        return;
    }
    match paced(conn, || make_offer(conn, fd)) {
        Ok(()) => {
            conn.ring_path.because(Reason::NotTaken);
            conn.set_stage(ConnStage::Offered);
            log!("offered fd {fd}");
        }
        Err(reason) => {
            conn.local().own.vacate();
            conn.ring_path.set_stage(ConnStage::Candidate);
            put_off(conn, reason);
        }
    }
}

/// Whether the connection has lost its peer's machine, and no program of ours is at the peer's address now. The broker would show an offer where
/// the peer is not, and the connection would wait for as long as the offer lives.
fn has_left(conn: &Conn, fd: c_int) -> bool {
    let may_be_away = conn.moves.renewals.load(Ordering::Relaxed) > 0 || conn.ring_path.reason() == Reason::NoWindow;
    let peer = conn.identity.addresses().1;
    may_be_away && broker::directory().is_some() && !broker::knows_program(fd, peer)
}

fn make_offer(conn: &Conn, fd: c_int) -> Result<(), Reason> {
    if !waiters().may_come_up(conn) {
        // Until the program arms it again.
        return Err(Reason::BrokerAbsent);
    }
    may_be_handed_over(conn, fd)?;
    match accounts::is_accounted_for(conn, fd) {
        Some(true) => {}
        Some(false) => return Err(Reason::RawCalls),
        // Bytes come just now, or it ends.
        None => return Err(Reason::BrokerAbsent),
    }
    conn.identity.know_own_address(fd);
    super::bell::note_neighbour(conn, None);
    begin_handshake(conn, |geometry, memory, words| broker::offer(fd, geometry, memory, words))
}

/// Shows the memory of our region to the broker with the socket by `show`.
fn begin_handshake(
    conn: &Conn,
    show: impl FnOnce(Geometry, BorrowedFd<'_>, HandshakeWords<'_>) -> Result<StepAnswer<BegunHandshake>, Reason>,
) -> Result<(), Reason> {
    let local = conn.local();
    conn.ring_path.set_flag(flags::FAR, false);
    // A handler that jumps out would leave the memory or our end of the bell open, and one that returns would end the allocation of memory.
    let mut signals = BlockedSignals::none();
    signals.hold();
    let region = reserve_region(conn)?;
    let words = HandshakeWords { number: &local.channel, late: &local.late };
    match show(region.geometry(), region.as_fd(), words)? {
        StepAnswer::Later => {
            local.suspend_region(region);
            conn.ring_path.shown.store(ASKED, Ordering::Relaxed);
            conn.moves.wait_for_answer(sys::coarse_millis());
            Ok(())
        }
        StepAnswer::Now(begun) => enter_handshake(conn, begun, || region.fill().ok()).inspect_err(|_| give_back(conn)),
    }
}

/// Whether a connection may begin a handshake, as far as the [`PACE`] says. One with both ends at one address is within this machine.
fn may_begin(conn: &Conn, fd: c_int) -> bool {
    let knows_near = || {
        conn.identity.know_own_address(fd);
        is_near(conn)
    };
    PACE.may_begin(sys::coarse_now) || knows_near()
}

fn is_near(conn: &Conn) -> bool {
    let (local, peer) = conn.identity.addresses();
    peer.ip().is_loopback() || peer.ip() == local.ip()
}

/// Takes a step of a handshake. If the other end is on another machine, or may be, it counts for the [`PACE`]. So does one that is refused: the
/// refusal may come before the broker says where the other end is.
fn paced(conn: &Conn, step: impl FnOnce() -> Result<(), Reason>) -> Result<(), Reason> {
    let begun = sys::now();
    let result = step();
    if may_be_far(conn) || result.is_err_and(|reason| reason != Reason::BrokerAbsent) {
        PACE.took(begun, sys::now());
    }
    result
}

/// Whether the other end of a handshake is on another machine, or is not known yet.
fn may_be_far(conn: &Conn) -> bool {
    conn.has(flags::FAR) || conn.ring_path.shown.load(Ordering::Relaxed) == ASKED && !is_near(conn)
}

/// The broker has an offer or a take of ours. `make_region` makes our region of the memory that was shown, and returns this.
fn enter_handshake(
    conn: &Conn,
    begun: BegunHandshake,
    make_region: impl FnOnce() -> Option<OwnedFd>,
) -> Result<(), Reason> {
    let BegunHandshake { bell, events, place } = begun;
    let local = conn.local();
    conn.ring_path.set_flag(flags::FAR, place.is_some());
    match place {
        // To be shown to a later broker. A region in a window is of no use to that one, which has other windows.
        None => local.keep_memory(make_region().ok_or(Reason::Resources)?),
        Some(PlaceOfRegion { base, shape, window }) => {
            let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(shape.ring_size()) };
            local.own.create_in(window.as_fd(), base, &options).map_err(|_| Reason::Resources)?;
        }
    }
    if !local.bell.keep(bell, events) {
        return Err(Reason::Resources);
    }
    // The region is made: the connecting side is to confirm. Nothing else would make it do so. The bell is empty, so only a side that is gone
    // cannot be rung.
    if conn.role() == Role::Accepting && !local.bell.ring() {
        return Err(Reason::NotTaken);
    }
    conn.ring_path.shown.store(WAITS, Ordering::Relaxed);
    conn.moves.wait_for_answer(sys::coarse_millis());
    Ok(())
}

/// The answer to an offer or a take is here, which an earlier call has sent.
fn enter_late_handshake(conn: &Conn) -> Result<(), Reason> {
    let local = conn.local();
    // As in `begin_handshake`.
    let mut signals = BlockedSignals::none();
    signals.hold();
    let step = LateStep::of(&local.late).ok_or(Reason::NotTaken)?;
    let shown = Geometry::new(PAGE, local.own.ring_size()).map_err(|_| Reason::Resources)?;
    let begun = broker::late_bell(step, shown, &local.channel).ok_or(Reason::BrokerAbsent)?;
    local.late.store(0, Ordering::Relaxed);
    let begun = begun?;
    if begun.place.is_some() {
        // What was shown is of no use.
        local.discard_memory();
    }
    enter_handshake(conn, begun, || local.resume_region())?;
    conn.ring_path.set_stage(ConnStage::Offered);
    Ok(())
}

/// What a step by `show` tells of the other side, or an earlier call's step. `None` if a later call is to look again.
fn learn_peer(
    conn: &Conn,
    show: impl FnOnce(&AtomicU64) -> Result<StepAnswer<PeerSide>, Reason>,
) -> Result<Option<PeerSide>, Reason> {
    let late = &conn.local().late;
    match LateStep::of(late) {
        Some(step) => {
            let Some(peer) = broker::late_peer(step) else { return Ok(None) };
            late.store(0, Ordering::Relaxed);
            peer.map(Some)
        }
        None => match show(late)? {
            StepAnswer::Now(peer) => Ok(Some(peer)),
            StepAnswer::Later => {
                conn.moves.wait_for_answer(sys::coarse_millis());
                Ok(None)
            }
        },
    }
}

/// Whether the broker may have the socket for a moment.
fn may_be_handed_over(conn: &Conn, fd: c_int) -> Result<(), Reason> {
    if conn.identity.holders.has_others(process::kernel_pid()) {
        return Err(Reason::Shared);
    }
    if !hidden::are_plenty(sys::borrow(fd)) {
        // The program needs the numbers itself.
        return Err(Reason::Resources);
    }
    if unseen::may_be() {
        return Err(Reason::RawCalls);
    }
    // The last process that closes the socket would linger then, and that could be the broker.
    match rustix::net::sockopt::socket_linger(sys::borrow(fd)) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err(Reason::Option),
        Err(_) => Err(Reason::Resources),
    }
}

fn reserve_region(conn: &Conn) -> Result<ReservedRegion<'_>, Reason> {
    let size = conn.local().planned_ring.load(Ordering::Relaxed);
    let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(size) };
    conn.local().own.reserve(&options).map_err(|_| Reason::Resources)
}

/// Not now; and if that is permanent, not at all.
pub(super) fn put_off(conn: &Conn, reason: Reason) {
    if reason == Reason::BrokerAbsent && broker::directory().is_some() {
        // It is there, but another thread speaks to it just now, or the socket did not hold still.
        conn.moves.try_again_soon();
        return;
    }
    log!("no ring for fd {}: {}", conn.fd(), reason.words());
    conn.ring_path.because(reason);
    if may_try_again(reason) {
        conn.moves.try_again_later(sys::coarse_millis());
        conn.set_stage(ConnStage::Candidate);
    } else if may_pass_with_policy(reason) {
        wait_for_policy(conn);
    } else {
        conn.set_stage(ConnStage::Tcp);
    }
}

/// The next attempt comes with the next policy. The sending direction is held.
fn wait_for_policy(conn: &Conn) {
    conn.moves.set_due(Upgrade::Never);
    conn.set_stage(ConnStage::Candidate);
}

/// The further steps of both sides: is it our turn?
#[inline]
pub(super) fn look_for_answer(conn: &'static Conn, fd: c_int) {
    // First: a look that the pace puts off is none.
    if may_continue(conn) && conn.moves.is_to_look() {
        look_at_bell(conn, fd);
    }
}

/// Whether the pace lets this connection take its next step. One that has waited for long does not wait for the pace as well: it would be given up, by
/// its peer or by this side.
#[inline]
fn may_continue(conn: &Conn) -> bool {
    !may_be_far(conn) || PACE.may_continue(sys::coarse_now) || conn.moves.has_waited_long(sys::coarse_millis())
}

#[cold]
fn look_at_bell(conn: &'static Conn, fd: c_int) {
    // A child of `vfork` has neither the session nor the descriptors of the handshake, and must not end it.
    if process::is_visitor() {
        return;
    }
    let _signals = BlockedSignals::during_step();
    let (Some(mut tx), Some(mut rx)) = (conn.tx.try_hold(), conn.rx.try_hold()) else { return };
    if !may_step(conn, fd, ConnStage::Offered) {
        return;
    }
    // Before the bell is taken: it comes once.
    if !is_quiet(conn) || !is_our_turn(conn) {
        conn.ring_path.set_stage(ConnStage::Offered);
        return;
    }
    let result = paced(conn, || match (conn.ring_path.shown.load(Ordering::Relaxed), conn.role()) {
        (GONE, _) => Err(Reason::NotTaken),
        (ASKED, _) => enter_late_handshake(conn),
        (CONFIRMED, _) => begin(conn, fd, &mut tx, &mut rx),
        (_, Role::Accepting) => finish(conn, fd, &mut tx, &mut rx),
        _ => confirm(conn, fd),
    });
    let Err(reason) = result else { return };
    if reason == Reason::BrokerAbsent && broker::directory().is_some() {
        // Another thread speaks to it just now.
        conn.ring_path.set_stage(ConnStage::Offered);
        return;
    }
    withdraw(conn, reason);
    if may_try_again(reason) {
        match conn.role() {
            Role::Accepting => conn.set_stage(ConnStage::Candidate),
            _ => put_off(conn, reason),
        }
    } else if may_pass_with_policy(reason) {
        wait_for_policy(conn);
    }
}

/// Whether there is something to be done: the bell has rung, or the peer watches its ring, or is gone.
fn is_our_turn(conn: &Conn) -> bool {
    let shown = conn.ring_path.shown.load(Ordering::Relaxed);
    if shown != GONE
        && let Some(step) = LateStep::of(&conn.local().late)
    {
        // A place that comes with the answer is given back as soon as it comes.
        if conn.moves.is_wait_over(sys::coarse_millis()) {
            conn.ring_path.shown.store(GONE, Ordering::Relaxed);
            return true;
        }
        return broker::is_answered(step);
    }
    let watches = || {
        // EDGE watching (protocol T7): acquires from the peer's `Pages::watch`; its region is set up.
        let flags = |p: Pages| load_acquire_u32(&p.peer.rx_path.flags);
        conn.pages().is_some_and(|p| flags(p) & path_flags::WATCHING != 0)
    };
    if shown == HEARD || shown == CONFIRMED && watches() {
        return true;
    }
    let news = match conn.bell().hear() {
        Heard::Bell if shown != CONFIRMED => HEARD,
        Heard::Gone => GONE,
        // The peer lives, and has not taken its step in time. It could hold our memory as long as the connection lasts.
        _ if conn.moves.is_wait_over(sys::coarse_millis()) => GONE,
        // Confirmed, it waits for the peer's memory to say so, whatever the bell does.
        Heard::Bell | Heard::Nothing => return false,
    };
    conn.ring_path.shown.store(news, Ordering::Relaxed);
    true
}

/// The connecting side shows its socket once more, and maps the peer's region.
fn confirm(conn: &'static Conn, fd: c_int) -> Result<(), Reason> {
    may_be_handed_over(conn, fd)?;
    if let Some(peer) = learn_peer(conn, |late| broker::confirm(fd, conn.channel(), late))? {
        map_peer(conn, peer.region.as_fd(), peer.place)?;
        // The accepting side is to finish.
        conn.bell().ring();
        conn.ring_path.shown.store(CONFIRMED, Ordering::Relaxed);
        conn.moves.wait_for_answer(sys::coarse_millis());
    }
    conn.ring_path.set_stage(ConnStage::Offered);
    Ok(())
}

/// The accepting side shows its socket once more, and has its ring.
fn finish(conn: &'static Conn, fd: c_int, tx: &mut ConnTx, rx: &mut ConnRx) -> Result<(), Reason> {
    may_be_handed_over(conn, fd)?;
    let Some(peer) = learn_peer(conn, |late| broker::finish(fd, conn.channel(), late))? else {
        conn.ring_path.set_stage(ConnStage::Offered);
        return Ok(());
    };
    super::bell::note_neighbour(conn, Some(peer.program));
    attach(conn, fd, tx, rx, peer.region.as_fd(), peer.place)
}

/// The accepting side's first step.
#[cold]
pub(super) fn look_for_offer(conn: &'static Conn, fd: c_int, generation: u64) {
    if !may_begin(conn, fd) {
        return;
    }
    conn.identity.know_own_address(fd);
    let (local, peer) = conn.identity.addresses();
    conn.moves.offers_seen.store(generation, Ordering::Relaxed);
    let Some(found) = broker::find_offer(fd, local, peer) else { return };
    if found == FoundOffer::Unseen {
        return look_at_offers_again(conn, generation);
    }
    let is_guess = found == FoundOffer::Translated;
    let now = if is_guess { sys::coarse_millis() } else { 0 };
    if is_guess {
        // An address that a program has is probably not a translator's.
        match conn.moves.may_guess(now, !broker::knows_resident(fd, peer)) {
            Guess::Now => {}
            Guess::Later => {
                look_at_offers_again(conn, generation);
                return;
            }
            Guess::Never => return,
        }
    }
    let _signals = BlockedSignals::during_step();
    let Some(_held) = conn.tx.try_hold() else { return };
    if !may_step(conn, fd, ConnStage::Candidate) {
        return;
    }
    if !is_quiet(conn) {
        conn.ring_path.set_stage(ConnStage::Candidate);
        look_at_offers_again(conn, generation);
        return;
    }
    if is_guess {
        conn.moves.count_guess(now);
    }
    match paced(conn, || take(conn, fd)) {
        Ok(()) => {
            conn.ring_path.because(Reason::NotTaken);
            conn.set_stage(ConnStage::Offered);
        }
        Err(reason) => {
            withdraw(conn, reason);
            // Bytes under way are no reason to miss the connection's own offer, if this was another one's.
            if may_try_again(reason) || is_guess && reason == Reason::TooShort {
                conn.set_stage(ConnStage::Candidate);
            } else if may_pass_with_policy(reason) {
                wait_for_policy(conn);
            }
            if matches!(reason, Reason::BrokerAbsent | Reason::Shared) {
                // The offer stands, and no other will be made.
                look_at_offers_again(conn, generation);
                conn.moves.try_again_soon();
            }
        }
    }
}

/// The next call looks at the offers, though they may not have changed.
fn look_at_offers_again(conn: &Conn, generation: u64) {
    conn.moves.offers_seen.store(generation.wrapping_sub(1), Ordering::Relaxed);
}

fn take(conn: &'static Conn, fd: c_int) -> Result<(), Reason> {
    may_be_handed_over(conn, fd)?;
    match accounts::is_accounted_for(conn, fd) {
        Some(true) => {}
        Some(false) => return Err(Reason::RawCalls),
        None => return Err(Reason::TooShort),
    }
    begin_handshake(conn, |geometry, memory, words| broker::take(fd, geometry, memory, words))
}

/// Whether the step from this stage may be taken, with this descriptor. The sending direction is held.
///
/// A thread that closes the descriptor takes it out of the table before it takes the direction. So a step that begins now ends before
/// that thread looks at the stage, and none begins later.
fn may_step(conn: &Conn, fd: c_int, from: ConnStage) -> bool {
    conn.ring_path.stage() == from && conn.is_of(fd)
}

/// No other thread is in the kernel with this connection, and none gets there until the stage is set again.
pub(super) fn is_quiet(conn: &Conn) -> bool {
    conn.ring_path.set_stage(ConnStage::Attaching);
    conn.kernel.is_quiet()
}

pub(super) fn attach(
    conn: &'static Conn,
    fd: c_int,
    tx: &mut ConnTx,
    rx: &mut ConnRx,
    memory: BorrowedFd<'_>,
    place: (Located, Geometry),
) -> Result<(), Reason> {
    map_peer(conn, memory, place)?;
    begin(conn, fd, tx, rx)
}

fn map_peer(conn: &Conn, memory: BorrowedFd<'_>, (located, geometry): (Located, Geometry)) -> Result<(), Reason> {
    if geometry.ring_size() > MAX_PEER_RING || geometry.ring_size() == 0 {
        return Err(Reason::Corrupt);
    }
    let (peer, kind) = (&conn.local().peer, RegionKind::Socket);
    let attached = match located {
        // Each side's region is where the other's is: both in windows or neither.
        Located::OwnMemory if !conn.has(flags::FAR) => peer.attach(memory, kind, geometry),
        Located::Window { base } if conn.has(flags::FAR) => peer.attach_in(memory, base, kind, geometry),
        _ => return Err(Reason::Corrupt),
    };
    attached.map(drop).map_err(|_| Reason::Corrupt)
}

/// Both regions are mapped: the stage is what they are for.
fn begin(conn: &'static Conn, fd: c_int, tx: &mut ConnTx, rx: &mut ConnRx) -> Result<(), Reason> {
    match accounts::is_accounted_for(conn, fd) {
        Some(true) => {}
        Some(false) => return Err(Reason::RawCalls),
        None => return Err(Reason::TooShort),
    }
    let local = conn.local();
    local.held.reset();
    *tx = ConnTx::new(local.own.ring_size(), conn.tx.counted.load(Ordering::Relaxed));
    *rx = ConnRx::new(local.peer.ring_size(), conn.rx.counted.load(Ordering::Relaxed));
    options::learn(conn, fd);
    if !conn.has(flags::WANT_TCP) {
        conn.ring_path.because(Reason::None);
    }
    // It may have changed since the offer.
    conn.moves.judge_later();
    conn.kernel.said.store(0, Ordering::Relaxed);
    conn.moves.looks_for_answer.store(0, Ordering::Relaxed);
    conn.moves.up_at.store(sys::coarse_millis(), Ordering::Relaxed);
    conn.set_stage(ConnStage::Attached);
    // A thread that waits for several descriptors learns of the link before the first byte can come by the ring.
    let all_are_notified = waiters().brought_up(conn);
    if !all_are_notified || conn.has(flags::WANT_TCP) {
        // Then none comes by the ring.
        let reason = if all_are_notified { conn.ring_path.reason() } else { Reason::Shared };
        conn.ask_for_tcp(reason, false);
        return Ok(());
    }
    if let Some(pages) = conn.pages() {
        pages.watch();
    }
    log!("fd {fd} has a ring: {} bytes out, {} in", local.own.ring_size(), local.peer.ring_size());
    Ok(())
}

/// Gives back what an attempt has made, and stays on TCP.
pub(super) fn withdraw(conn: &Conn, reason: Reason) {
    log!("no ring for fd {}: {}", conn.fd(), reason.words());
    give_back(conn);
    conn.ring_path.because(reason);
    conn.set_stage(ConnStage::Tcp);
}

fn give_back(conn: &Conn) {
    let local = conn.local();
    local.bell.discard();
    local.discard_memory();
    // Before the broker hears of it, which may give our place in a window to another connection from then on (protocol T4.11).
    local.own.vacate();
    local.peer.vacate();
    if let Some(step) = LateStep::take_from(&local.late) {
        broker::give_up(step);
    }
    let channel = local.channel.swap(0, Ordering::Relaxed);
    if channel != 0 {
        broker::cancel(channel);
    }
}

/// The policy says never by now. Should the peer have taken the offer already, its ring is attached all the same, and then left:
/// the peer would have one that leads nowhere.
pub(super) fn take_offer_back(conn: &Conn, reason: Reason) {
    let Some(_held) = conn.tx.try_hold() else {
        conn.moves.judge_later();
        return;
    };
    if conn.ring_path.stage() != ConnStage::Offered {
        return;
    }
    // Once the broker has heard of it, nobody may attach a region that is at a place of ours, or of the peer's.
    let shown = conn.ring_path.shown.swap(GONE, Ordering::Relaxed);
    if shown == ASKED || broker::cancel_untaken(conn.channel()) {
        conn.local().channel.store(0, Ordering::Relaxed);
        withdraw(conn, reason);
        conn.moves.set_due(Upgrade::Never);
        conn.set_stage(ConnStage::Candidate);
    } else {
        conn.ring_path.shown.store(shown, Ordering::Relaxed);
    }
}

/// Our region, as a handshake makes it.
#[cfg(test)]
pub(super) fn make_region(conn: &Conn) -> Result<(rustix::fd::OwnedFd, Geometry), Reason> {
    let region = reserve_region(conn)?;
    let geometry = region.geometry();
    Ok((region.fill().map_err(|_| Reason::Resources)?, geometry))
}

/// As if the broker had confirmed its offer, with this region of the peer's. The next call attaches the ring.
#[cfg(test)]
pub(super) fn be_confirmed(conn: &Conn, region: BorrowedFd<'_>, geometry: Geometry) {
    map_peer(conn, region, (Located::OwnMemory, geometry)).unwrap();
    conn.ring_path.shown.store(CONFIRMED, Ordering::Relaxed);
    conn.moves.wait_for_answer(sys::coarse_millis());
    conn.set_stage(ConnStage::Offered);
}

impl Pages<'_> {
    /// Lets the peer use its ring.
    pub(super) fn watch(&self) {
        // EDGE watching (protocol T7): releases the region and its wishes; acquired in the peer's `is_our_turn`, and in `Sender::ask`.
        self.own.rx_path.flags.fetch_or(path_flags::WATCHING, Ordering::Release);
    }
}
