//! A connection whose rings are over, while its socket goes on by TCP, begins again as a candidate (protocol T13.9, T15.9).
//!
//! Its rings are over for one of two reasons: the machine of one end was migrated ([`super::parting`]), or every process that held the
//! peer's end of the bell has closed it while the kernel's connection stays ESTABLISHED. Then another program has the peer's socket, by
//! `exec` or by a passed descriptor.
//!
//! ```text
//!   rings are over -- pause --> replaced in the table: a candidate with the kernel's counts --> offer, take, ... --> rings
//!         ^                                                                                                           |
//!         +---------- MOST_RINGS rings at most; each pause after rings that did not last is twice as long ------------+
//! ```
//!
//! The connection is *replaced*: the table of descriptors gets another block of the arena, as for a socket that the library meets for the
//! first time. Nothing of the old block is used again: no word, bell, region, generation or chain of registrations. Other threads may be
//! inside the old one at this moment, in a call, asleep, or below the signal handler that replaces it. They go on by the new one
//! ([`super::succession`]).
//!
//! The thread that replaces it holds, in this order: its signals back, a new block, both directions of the old one, and the sending direction
//! of the new one. The block keeps forks out. A thread that forks waits for directions after that, so the directions are only tried.

use super::direction::DirectionGuard;
use super::rx::ConnRx;
use super::tx::ConnTx;
use super::waiters::waiters;
use super::{Conn, ConnStage, Pages, accounts, candidate, flags, shown};
use crate::arena::{self, NewBlock};
use crate::log::log;
use crate::signals::BlockedSignals;
use crate::{broker, process, sys, table, watched};
use partywall_shm::layout::path_flags;
use partywall_shm::path::Way;
use partywall_shm::status::Reason;
use partywall_shm::sync::{load_acquire, load_acquire_u32};
use rustix::event::epoll::EventFlags;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// How often one socket has rings, at most. Each keeps a block of the arena until the socket is closed.
const MOST_RINGS: u32 = 32;
/// The pause after the first rings, and after rings that have lasted, in milliseconds. After further rings that have not, each pause is
/// twice as long.
const FIRST_PAUSE_MS: u64 = 1000;
/// How often the pause doubles, at most: to 64 seconds.
const MOST_DOUBLINGS: u32 = 6;
/// Rings that were up for this long have lasted, in milliseconds.
const LASTING_MS: u64 = 2000;
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
    may_have_rings
        && !conn.passing.is_received()
        && !conn.has(PERMANENT)
        && !conn.is_shared()
        && waiters().may_be_renewed(conn)
}

/// How often a connection that goes on in the next program has had rings by then. `None`: that is too often for further ones.
pub(crate) fn rings_after_exec(conn: &Conn) -> Option<u32> {
    let rings = rings_so_far(conn);
    (rings < MOST_RINGS).then_some(rings)
}

#[cold]
fn take_step(conn: &'static Conn, fd: c_int) -> Option<&'static Conn> {
    let moves = &conn.moves;
    let is_time = |now: u64| now >= moves.next_renewal_at.load(Ordering::Relaxed);
    let now = sys::coarse_millis();
    if !is_time(now) || conn.has(PERMANENT) || rings_so_far(conn) >= MOST_RINGS {
        return None;
    }
    // The pause is no part of the rings' life.
    if moves.rings_are_over.load(Ordering::Relaxed) == 0 && have_lasted(conn, now) {
        moves.short_lived.store(0, Ordering::Relaxed);
    }
    let next = now + (FIRST_PAUSE_MS << moves.short_lived.load(Ordering::Relaxed).min(MOST_DOUBLINGS));
    {
        let held = HeldConn::try_hold(conn)?;
        // Another thread may have looked a moment ago.
        if !is_time(now) {
            return None;
        }
        if !held.are_rings_over() {
            moves.rings_are_over.store(0, Ordering::Relaxed);
            moves.next_renewal_at.store(now + BETWEEN_LOOKS_MS, Ordering::Relaxed);
            return None;
        }
        // An end that the peer's kernel is sending at this moment comes during the pause.
        let is_first_look = moves.rings_are_over.swap(1, Ordering::Relaxed) == 0;
        // For the case that the next step cannot be taken. No other thread takes it meanwhile.
        moves.next_renewal_at.store(next, Ordering::Relaxed);
        if is_first_look {
            return None;
        }
    }
    replace(conn, fd, next)
}

/// Whether the connection's present rings have lasted by `now`.
fn have_lasted(conn: &Conn, now: u64) -> bool {
    let up_at = conn.moves.up_at.load(Ordering::Relaxed);
    up_at != 0 && now.saturating_sub(up_at) >= LASTING_MS
}

/// How many times the socket has had rings. A child may write the block, and any value is taken.
fn rings_so_far(conn: &Conn) -> u32 {
    conn.moves.renewals.load(Ordering::Relaxed).saturating_add(1)
}

/// A connection with a ring, both directions of which are held. No other thread moves a byte of it, and none replaces it.
struct HeldConn {
    conn: &'static Conn,
    tx: DirectionGuard<'static, ConnTx>,
    rx: DirectionGuard<'static, ConnRx>,
}

impl HeldConn {
    fn try_hold(conn: &'static Conn) -> Option<Self> {
        let (tx, rx) = (conn.tx.try_hold()?, conn.rx.try_hold()?);
        conn.is_up().then_some(Self { conn, tx, rx })
    }

    /// Whether no byte goes by the rings any more, both are empty, and no process can put a byte there.
    fn are_rings_over(&self) -> bool {
        let Self { conn, tx, rx } = self;
        if conn.errors().has_kept() {
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

    /// Whether it may be replaced at this moment.
    fn may_be_replaced(&self, fd: c_int) -> bool {
        let Self { conn, .. } = self;
        // Threads that were in the kernel with it before it had rings have left their calls by a jump.
        let is_alone = conn.is_of(fd) && conn.kernel.is_quiet() && !conn.is_shared();
        let may_be = is_alone && self.are_rings_over() && !conn.has(PERMANENT) && waiters().may_be_renewed(conn);
        let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        may_be && !self.descriptors().any(watched::was_watched) && sys::poll_now(fd, ends.bits()) == 0
    }

    /// All descriptors of the connection. Costs a look at the whole table if there are several.
    fn descriptors(&self) -> impl Iterator<Item = c_int> {
        let (entry, only) = (self.conn.entry(), self.conn.fd());
        let has_copies = self.conn.local().descriptors.load(Ordering::Relaxed) > 1;
        let copies = has_copies.then(|| table::entries(0, u32::MAX).filter(move |(_, other)| *other == entry));
        let all = copies.into_iter().flatten().map(|(fd, _)| fd);
        all.chain((!has_copies).then_some(only).into_iter().filter(|fd| *fd >= 0))
    }
}

/// Replaces a connection whose rings are over. `None` if that is not possible now; it is tried again at `next`.
fn replace(old: &'static Conn, fd: c_int, next: u64) -> Option<&'static Conn> {
    if process::is_visitor() {
        return None;
    }
    let mut signals = BlockedSignals::none();
    signals.hold();
    if !signals.is_held() {
        return None;
    }
    // The broker may be slow. A connection that it does not know is as good, since its rings are over.
    close_channel(old, fd, next)?;
    // Before the directions: a thread that forks waits for them while no block can be chosen. Until this is dropped, no fork happens.
    let block = candidate::new_block()?;
    let new = hold_to_replace(old, fd, next).and_then(|held| replace_held(&held, &block, fd));
    if new.is_none() {
        arena::free(block.index());
    }
    new
}

/// Holds a connection that may be replaced at this moment. If only other threads are in the way, which are in the middle of a call, the next
/// time comes soon.
fn hold_to_replace(old: &'static Conn, fd: c_int, next: u64) -> Option<HeldConn> {
    let held = HeldConn::try_hold(old);
    if held.is_none() {
        let soon = sys::coarse_millis() + BETWEEN_LOOKS_MS;
        // Not if another thread has begun another pause since.
        let time = &old.moves.next_renewal_at;
        let _ = time.compare_exchange(next, soon, Ordering::Relaxed, Ordering::Relaxed);
    }
    held.filter(|held| held.may_be_replaced(fd))
}

/// The end of the channel is reported before the socket is shown again, in the same session: the broker refuses a socket that has a
/// channel (protocol T5.1). `None` if the connection may not be replaced.
fn close_channel(old: &'static Conn, fd: c_int, next: u64) -> Option<()> {
    let held = hold_to_replace(old, fd, next)?;
    let channel = old.local().channel.swap(0, Ordering::Relaxed);
    drop(held);
    if channel != 0 {
        broker::closed(channel);
    }
    Some(())
}

fn replace_held(held: &HeldConn, block: &NewBlock, fd: c_int) -> Option<&'static Conn> {
    let old = held.conn;
    old.kernel.give_cork(fd);
    // By the kernel's counts: bytes of the rings are in none of them, and the peer's next side begins by the same.
    let counts = accounts::kernel_counts(old.role(), fd)?;
    let (local, peer) = old.identity.addresses();
    let new = candidate::begin_carrying(block, counts, fd, old.role(), local, peer)?;
    new.moves.renewals.store(rings_so_far(old), Ordering::Relaxed);
    let short_lived = old.moves.short_lived.load(Ordering::Relaxed).saturating_add(1);
    new.moves.short_lived.store(short_lived, Ordering::Relaxed);
    new.set_predecessor(old);
    old.discard_bells_of_ancestors();
    // Threads that meet the new one wait until it is complete.
    let incomplete = new.tx.try_hold();
    if incomplete.is_none() || !table::replace(fd, old.entry(), new.entry()) {
        // Another thread closes the descriptor.
        drop(incomplete);
        shown::end(new);
        new.local().predecessor.store(0, Ordering::Relaxed);
        new.local().set_fd(-1);
        new.identity.holders.leave(process::owner());
        return None;
    }
    old.set_successor(new);
    // Another thread adds its descriptors itself if it has not added them before this.
    if old.local().descriptors.load(Ordering::Relaxed) > 1 {
        held.descriptors().for_each(|copy| old.hand_over(copy, new));
    }
    waiters().renewed(old, new);
    // What another thread has done to the old one, after `may_be_replaced` and before it could see the new one.
    if old.has(PERMANENT) {
        new.ring_path.because(old.ring_path.reason());
        new.set_stage(ConnStage::Tcp);
    } else {
        new.set_stage(ConnStage::Candidate);
    }
    end(old);
    drop(incomplete);
    log!("fd {fd} begins again, with {} bytes sent and {} received by the kernel", counts.0, counts.1);
    Some(new)
}

/// Ends what no descriptor stands for any more, and what threads may still use that have met it before ([`super::succession`]). Both
/// directions are held.
fn end(old: &'static Conn) {
    let local = old.local();
    // Ordered after the successor, which a thread looks for that finds this stage.
    old.set_stage(ConnStage::Tcp);
    shown::end(old);
    // Sleepers look at the stage when they are woken, and others before they sleep.
    old.silence_bell();
    local.discard_memory();
    local.own.vacate();
    local.peer.vacate();
    local.set_fd(-1);
    old.identity.holders.leave(process::owner());
}
