//! A connection whose bell is lost unmaps its rings, once both sides send by TCP alone (protocol T15.7).
//!
//! The windows that the rings lie in may be about to go away: a machine that is migrated removes them, and a process that maps one then gets a
//! bus error. Neither side waits for the other. Each publishes in its own region that it sends by TCP from now on, and unmaps when it has
//! seen that of the peer and has read everything in the peer's ring. The memory of the window keeps the last value for the peer.

use super::rx::ConnRx;
use super::shown;
use super::tx::{ConnTx, SendTurn};
use super::{Conn, Pages, flags};
use crate::log::log;
use crate::{broker, process};
use partywall_shm::layout::path_flags;
use partywall_shm::path::Way;
use partywall_shm::status::LineState;
use partywall_shm::sync::{load_acquire, load_acquire_u32};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long another thread's call may go on that sends bytes at this moment.
const CALL: Duration = Duration::from_millis(100);
/// Looks of sleepers for the peer's word, with naps in between: minutes.
const MOST_LOOKS: u32 = 1 << 14;

impl Conn {
    /// Takes the steps that can be taken now. Neither direction is held by this thread.
    #[inline]
    pub(super) fn part_if_lost(&'static self) {
        if self.has(flags::LINK_LOST) && !self.has(flags::PARTED) {
            try_to_part(self);
        }
    }

    /// The connection's next program has no part in these rings (protocol T15.7). A peer on another machine cannot tell its end of the bell
    /// from a lost link, and unmaps its rings when it finds this.
    pub(super) fn announce_tcp_only(&self) {
        // A thread in the middle of a call may not have sent the last byte.
        let (Ok(_held), Some(pages)) = (self.tx.hold_within(CALL), self.pages()) else { return };
        if pages.sends_by_tcp() {
            pages.announce_tcp_only();
        }
    }
}

impl Pages<'_> {
    /// This side sends by TCP alone, from its last switch on.
    fn announce_tcp_only(&self) {
        // EDGE tcp-only (protocol T15.7): releases the last switch and the last byte; acquired in `try_to_part`, in the peer.
        self.own.rx_path.flags.fetch_or(path_flags::TCP_ONLY | path_flags::WANT_TCP, Ordering::AcqRel);
    }
}

/// Whether a sleeper has to poll for the peer's word, because no ring announces it. A peer that makes no call does not give the word,
/// so the sleeper stops to poll after some time.
pub(super) fn may_part_soon(conn: &Conn) -> bool {
    !conn.has(flags::PARTED)
        && !conn.is_shared()
        && conn.moves.looks_for_answer.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS
}

#[cold]
fn try_to_part(conn: &'static Conn) {
    if !conn.is_up() || conn.has(flags::BROKEN) {
        return;
    }
    let (Some(mut tx), Some(mut rx)) = (conn.tx.try_hold(), conn.rx.try_hold()) else { return };
    // Another process has separate mappings, and would find the state of this one beside them. A fork in another thread holds the sending direction while it enters the child, so it comes before or after this.
    if conn.identity.holders.has_others(process::kernel_pid()) {
        return;
    }
    let Some(pages) = conn.pages().filter(|_| conn.is_up()) else { return };
    let Pages { peer, local, .. } = pages;
    if tx.path.way() == Way::Ring {
        // A side that only reads goes back here.
        let _ = SendTurn { conn, pages, tx: &mut tx }.choose_way();
    }
    if tx.path.way() != Way::Tcp || pages.owes() || tx.again.is_some() && !conn.has(flags::SENT_AGAIN) {
        return;
    }
    // `LINK_LOST` stays, so this direction does not go up any more. Releases the last switch.
    pages.announce_tcp_only();
    // EDGE tcp-only (protocol T15.7): acquires the peer's last switch and byte from the store in `Pages::announce_tcp_only`, in the peer.
    if load_acquire_u32(&peer.rx_path.flags) & path_flags::TCP_ONLY == 0 {
        return;
    }
    // The peer's last switch and last byte are there by now.
    let is_followed = load_acquire_u32(&peer.tx_path.switches) == rx.path.seen() && rx.path.way() == Way::Tcp;
    let is_drained = load_acquire(&peer.control.tx.cursor.tail) == rx.half.head();
    if !is_drained && !conn.has(flags::LEFT) || !is_followed && !conn.has(flags::LEFT) {
        return;
    }
    // From here on only the kernel's bytes count.
    let (sent, received) = (tx.path.total().wrapping_sub(tx.half.tail()), rx.path.total().wrapping_sub(rx.half.head()));
    (*tx, *rx) = (ConnTx::new(0, sent), ConnRx::new(0, received));
    conn.tx.counted.store(sent, Ordering::Relaxed);
    conn.rx.counted.store(received, Ordering::Relaxed);
    conn.ring_path.set_flag(flags::PARTED, true);
    local.own.vacate();
    local.peer.vacate();
    shown::state(conn, LineState::Tcp);
    log!("fd {}: the rings are unmapped; the connection goes on by TCP", conn.fd());
    drop((tx, rx));
    let channel = conn.local().channel.swap(0, Ordering::Relaxed);
    // Without that, no statement may follow that the connection was passed (protocol T13.18).
    if channel != 0 && !broker::closed(channel) {
        conn.passing.forbid();
    }
}
