//! The way of a connection back to TCP, because a program is about to use its socket past this library.

use super::{Conn, ConnStage, Pages, flags};
use crate::log::log;
use crate::{process, sys};
use partywall_shm::path::Way;
use partywall_shm::status::Reason;
use partywall_shm::sync::{load_acquire, load_acquire_u32};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a connection that must go back to TCP waits for its peer, which may be busy.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long where there is nothing to be lost: longer than a call of the peer's takes from looking to sending.
const GRACE: Duration = Duration::from_millis(100);

const FIRST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(5);

/// A connection that is to go back to TCP, in two steps. Any number of connections take the first, then one fence follows, and then all take
/// the second.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Descent {
    pub(crate) conn: &'static Conn,
    pub(crate) reason: Reason,
    /// Others go on with it whatever becomes of it here.
    pub(crate) shared: bool,
}

/// Waits a moment for other processes to close these connections, as far as something lies unread in their rings.
///
/// After a `fork`, the parent often closes its copy while the child is about to execute another program. The peer sends again what is unread, if
/// this process alone holds the connection when it leaves the ring ([`super::again`]). It does not while others may read it there.
pub(crate) fn await_lone_hold(conns: impl Iterator<Item = &'static Conn>) {
    // The parent of a child after `vfork` does nothing meanwhile.
    if process::is_visitor() {
        return;
    }
    let begin = sys::now();
    for conn in conns {
        let is_waited_for = || conn.is_shared() && conn.pages().is_some_and(|pages| pages.has_unread_ring());
        let mut nap = FIRST_NAP;
        while is_waited_for() && sys::now().saturating_sub(begin) < GRACE {
            nap = sleep_for(nap);
        }
    }
}

/// Sleeps, and returns the time for the next sleep.
fn sleep_for(nap: Duration) -> Duration {
    let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(nap.subsec_nanos()) };
    let _ = rustix::thread::nanosleep(&time);
    (nap * 2).min(LONGEST_NAP)
}

impl Descent {
    /// The first step: asks the peer. A fence must follow.
    pub(crate) fn begin(self) {
        // One that replaces it meanwhile has no ring, and gets none: there is no second step for that.
        self.conn.for_each_successor(|conn| Self { conn, ..self }.begin_this());
    }

    fn begin_this(self) {
        let Self { conn, reason, shared } = self;
        conn.forbid_passing(reason);
        if conn.settle() == ConnStage::Attached {
            if !shared {
                conn.leave_ring();
            }
            conn.ask_for_tcp(reason, true);
            conn.kernel.give_cork(conn.fd());
        } else {
            conn.stay_on_tcp(reason);
        }
    }

    /// The second step: waits until it is done, since `begin`.
    pub(crate) fn end(self, begin: Duration) {
        let Self { conn, reason, shared } = self;
        if conn.ring_path.stage() != ConnStage::Attached {
            return;
        }
        let mut nap = FIRST_NAP;
        loop {
            conn.follow();
            conn.finish_segment();
            let waited = sys::now().saturating_sub(begin);
            if conn.pages().is_none_or(|pages| pages.is_on_tcp())
                || conn.has(flags::BROKEN)
                || waited >= GRACE && conn.pages().is_none_or(|pages| pages.is_idle())
            {
                break;
            }
            let gone = conn.has(flags::PEER_GONE);
            if shared && (gone || waited >= GRACE) {
                log!("fd {} is not back on TCP, and left to the other processes that hold it", conn.fd());
                return;
            }
            if gone && conn.pages().is_none_or(|pages| pages.is_drained()) {
                break;
            }
            if waited >= PATIENCE
                && conn.has(flags::LEFT)
                && !gone
                && conn.pages().is_none_or(|pages| pages.sends_by_tcp())
            {
                // It is busy with something else, and has all that is needed when it comes back.
                log!("fd {}: the peer makes no call; what it has sent by the ring comes when it does", conn.fd());
                break;
            }
            if gone || waited >= PATIENCE {
                conn.fail_permanently("the peer did not go back to TCP in time, or left bytes in the ring");
                return;
            }
            nap = sleep_for(nap);
            conn.death().look();
        }
        if !shared {
            conn.announce_tcp_only();
        }
        log!("fd {} is back on TCP: {}", conn.fd(), reason.words());
    }
}

impl Pages<'_> {
    /// Both directions are on TCP, and nothing is left in our ring's counterpart.
    pub(super) fn is_on_tcp(&self) -> bool {
        let Self { own, peer, .. } = self;
        let sends = Way::after(own.tx_path.switches.load(Ordering::Relaxed));
        let reads = Way::after(own.rx_path.seen.load(Ordering::Relaxed));
        // The peer's bytes may have left the ring already, with none of them unread.
        // EDGE path: as in `Receiver::refresh`; the tail that is loaded next holds all that the peer sent before it left the ring.
        let announced = load_acquire_u32(&peer.tx_path.switches);
        if self.path.has(flags::LEFT) {
            // Once the peer has followed us, it sends what we have left there before anything else.
            return sends == Way::Tcp && Way::after(announced) == Way::Tcp && !self.owes();
        }
        // EDGE tail (protocol R2): as in `Consumer::refresh`.
        let drained = load_acquire(&peer.control.tx.cursor.tail) == own.control.rx.cursor.head.load(Ordering::Relaxed);
        sends == Way::Tcp && !self.owes() && drained && (reads == Way::Tcp || Way::after(announced) == Way::Tcp)
    }

    /// Whether all bytes of this side go over TCP.
    pub(super) fn sends_by_tcp(&self) -> bool {
        Way::after(self.own.tx_path.switches.load(Ordering::Relaxed)) == Way::Tcp && !self.owes()
    }

    /// Whether all bytes of this side go over TCP, and the ring that it reads is empty and about to be left: the peer was asked to leave
    /// it with its next byte, and may. This is reliable only some time after the request, when no earlier call of the peer can be in
    /// progress.
    fn is_idle(&self) -> bool {
        let Self { own, peer, .. } = self;
        let unread = self.has_unread_ring();
        // EDGE path: as in `Receiver::refresh`.
        let announced = load_acquire_u32(&peer.tx_path.switches) != own.rx_path.seen.load(Ordering::Relaxed);
        self.sends_by_tcp() && !unread && (!announced || self.path.has(flags::LEFT))
    }

    /// Whether something lies unread in the ring that we read.
    fn has_unread_ring(&self) -> bool {
        // EDGE tail (protocol R2): as in `Consumer::refresh`.
        load_acquire(&self.peer.control.tx.cursor.tail) != self.own.control.rx.cursor.head.load(Ordering::Relaxed)
    }

    /// Whether the ring that we read is empty, or the peer has sent its content once more.
    fn is_drained(&self) -> bool {
        // EDGE path: as above.
        !self.has_unread_ring()
            || self.path.has(flags::LEFT) && Way::after(load_acquire_u32(&self.peer.tx_path.switches)) == Way::Tcp
    }
}
