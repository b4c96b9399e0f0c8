//! A connection whose rings are over, while its socket goes on by TCP, begins again as a candidate (protocol T13.9, T15.9).
//!
//! Its rings are over for one of two reasons: the machine of one end was migrated ([`super::parting`]), or every process that held the
//! peer's end of the bell has closed it while the kernel's connection stays ESTABLISHED. Then another program has the peer's socket, by
//! `exec` or by a passed descriptor.
//!
//! ```text
//!   rings are over -- pause --> replaced in the table: a candidate with the kernel's counts --> offer, take, ... --> rings
//!         ^                                                                                                           |
//!         +--------------------------- MOST_RINGS rings at most, each pause twice as long ----------------------------+
//! ```
//!
//! The connection is *replaced*: the table of descriptors gets another block of the arena, as for a socket that the library meets for the
//! first time. Nothing of the old block is used again: no word, bell, region, generation or chain of registrations. A thread that is
//! inside the old one would use it still, and nothing counts such threads. So a connection is replaced only at the beginning of a call of
//! the only thread of its process, outside signal handlers and with signals held back. A process with more threads keeps the connection on
//! TCP.

use super::waiters::waiters;
use super::{Conn, ConnStage, Pages, accounts, candidate, flags, shown};
use crate::log::log;
use crate::signals::BlockedSignals;
use crate::{arena, broker, frames, process, sys, table, watched};
use partywall_shm::layout::path_flags;
use partywall_shm::path::Way;
use partywall_shm::status::Reason;
use partywall_shm::sync::{load_acquire, load_acquire_u32};
use rustix::event::epoll::EventFlags;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// How often one socket has rings, at most.
const MOST_RINGS: u32 = 8;
/// The pause between the first rings and the second, in milliseconds. Each later one is twice as long.
const FIRST_PAUSE_MS: u64 = 1000;
/// Between two looks whether the rings are over.
const BETWEEN_LOOKS_MS: u64 = 20;
/// A connection with one of these is never replaced.
const PERMANENT: u32 = flags::STAYS_ON_TCP
    | flags::BROKEN
    | flags::RESET
    | flags::ERROR_SEEN
    | flags::READ_SHUT
    | flags::WRITE_SHUT
    | flags::LEFT;

/// Whether a connection that is on TCP for this reason may have rings again. The others last as long as the socket: something was done with
/// it that only TCP can do, or other processes have it.
pub(super) const fn may_follow(reason: Reason) -> bool {
    matches!(reason, Reason::LinkLost | Reason::MovesNever | Reason::ProgramNotListed)
}

impl Conn {
    /// Replaces a connection whose rings are over, if it is time to. Returns what stands in the table now. A call that has the connection's
    /// reference from the table, and has done nothing with it yet, goes on with that.
    #[inline]
    pub(super) fn renewed(&'static self, fd: c_int) -> Option<&'static Self> {
        if !self.has(flags::PEER_GONE | flags::PARTED) { None } else { take_step(self, fd) }
    }
}

/// Whether another program that gets the connection by `exec` may have rings for it, and is the only one that has it. To be asked before the
/// connection goes back to TCP for that program, by the only thread of the process.
pub(crate) fn may_be_inherited(conn: &'static Conn) -> bool {
    let may_have_rings = matches!(conn.settle(), ConnStage::Candidate | ConnStage::Offered | ConnStage::Attached);
    may_have_rings && !conn.has(PERMANENT) && !conn.is_shared() && waiters().may_be_renewed(conn)
}

/// How often a connection that goes on in the next program has had rings by then. `None`: that is too often for further ones.
pub(crate) fn rings_after_exec(conn: &Conn) -> Option<u32> {
    let rings = conn.moves.renewals.load(Ordering::Relaxed).saturating_add(1);
    (rings < MOST_RINGS).then_some(rings)
}

#[cold]
fn take_step(conn: &'static Conn, fd: c_int) -> Option<&'static Conn> {
    let moves = &conn.moves;
    // Loaded once: a child may write the block, and any value is taken.
    let renewals = moves.renewals.load(Ordering::Relaxed);
    if conn.has(PERMANENT) || renewals >= MOST_RINGS - 1 {
        return None;
    }
    let now = sys::coarse_now().as_millis() as u64;
    if now < moves.next_renewal_at.load(Ordering::Relaxed) {
        return None;
    }
    if !are_rings_over(conn) {
        moves.rings_are_over.store(0, Ordering::Relaxed);
        moves.next_renewal_at.store(now + BETWEEN_LOOKS_MS, Ordering::Relaxed);
        return None;
    }
    // An end that the peer's kernel is sending at this moment comes during the pause.
    let is_first_look = moves.rings_are_over.swap(1, Ordering::Relaxed) == 0;
    let new = if is_first_look { None } else { replace(conn, fd, renewals + 1) };
    if new.is_none() {
        moves.next_renewal_at.store(now + (FIRST_PAUSE_MS << renewals), Ordering::Relaxed);
    }
    new
}

/// Whether no byte goes by the rings any more, both are empty, and no process can put a byte there.
fn are_rings_over(conn: &'static Conn) -> bool {
    let (Some(tx), Some(rx)) = (conn.tx.try_hold(), conn.rx.try_hold()) else { return false };
    if !conn.is_up() || conn.errors().has_kept() {
        return false;
    }
    if conn.has(flags::PARTED) {
        return true;
    }
    let Some(pages) = conn.pages() else { return false };
    let Pages { own, peer, .. } = pages;
    // A peer that lives although its bell has hung up does not go to its ring from here on, or has done so before the next look.
    // EDGE want-tcp: the flag alone, as in `Conn::ask_for_tcp`.
    own.rx_path.flags.fetch_or(path_flags::WANT_TCP, Ordering::AcqRel);
    // What it left there was sent again.
    let is_sent = conn.has(flags::SENT_AGAIN) || !pages.owes() && tx.again.is_none() && pages.unsent() == 0;
    // EDGE path: as in `Receiver::refresh`.
    let is_followed = rx.path.way() == Way::Tcp
        && load_acquire_u32(&peer.tx_path.switches) == rx.path.seen()
        && rx.path.limit().is_none();
    // EDGE tail (protocol R2): as in `Consumer::refresh`.
    let is_drained = load_acquire(&peer.control.tx.cursor.tail) == rx.half.head();
    is_sent && is_followed && is_drained
}

/// Replaces a connection whose rings are over, for this time. `None` if that is not possible now.
fn replace(old: &'static Conn, fd: c_int, time: u32) -> Option<&'static Conn> {
    if process::is_visitor() || !is_only_thread() || frames::may_be_in_handler() {
        return None;
    }
    let mut signals = BlockedSignals::none();
    signals.hold();
    // A handler may have run until now.
    if !signals.is_held() || !is_only_thread() || !old.is_of(fd) || !are_rings_over(old) || old.has(PERMANENT) {
        return None;
    }
    // Threads that were in the kernel with it before it had rings have left their calls by a jump.
    if !old.kernel.is_quiet() || old.is_shared() || !waiters().may_be_renewed(old) {
        return None;
    }
    let entry = old.entry();
    let descriptors = || table::entries(0, u32::MAX).filter(|(_, other)| *other == entry).map(|(fd, _)| fd);
    let has_copies = old.local().descriptors.load(Ordering::Relaxed) > 1;
    if watched::was_watched(fd) || has_copies && descriptors().any(watched::was_watched) {
        return None;
    }
    let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
    if sys::poll_now(fd, ends.bits()) != 0 {
        return None;
    }
    old.kernel.give_cork(fd);
    // By the kernel's counts: bytes of the rings are in none of them, and the peer's next side begins by the same.
    let counts = accounts::kernel_counts(old.role(), fd)?;
    let (local, peer) = old.identity.addresses();
    let new = candidate::adopt_carrying(counts, fd, old.role(), local, peer)?;
    new.moves.renewals.store(time, Ordering::Relaxed);
    if has_copies {
        for copy in descriptors() {
            new.local().descriptors.fetch_add(1, Ordering::Relaxed);
            table::set(copy, new.entry());
        }
    }
    waiters().renewed(old, new);
    end(old);
    log!("fd {fd} begins again, with {} bytes sent and {} received by the kernel", counts.0, counts.1);
    Some(new)
}

/// Ends what no descriptor stands for any more. No thread has a reference to it but the caller.
fn end(old: &'static Conn) {
    let local = old.local();
    old.set_stage(ConnStage::Tcp);
    shown::end(old);
    // Before the socket is shown again, in the same session: the broker refuses a socket that has a channel (protocol T5.1).
    let channel = local.channel.swap(0, Ordering::Relaxed);
    if channel != 0 {
        broker::closed(channel);
    }
    local.bell.discard();
    local.discard_memory();
    local.own.vacate();
    local.peer.vacate();
    local.descriptors.store(0, Ordering::Relaxed);
    local.set_fd(-1);
    old.identity.holders.leave(process::owner());
    arena::free(old.index());
}

#[cfg(not(test))]
fn is_only_thread() -> bool {
    process::has_one_thread()
}

#[cfg(test)]
thread_local! {
    /// Whether the thread of a test counts as the only one.
    pub(super) static ONLY_THREAD: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[cfg(test)]
fn is_only_thread() -> bool {
    ONLY_THREAD.get()
}
