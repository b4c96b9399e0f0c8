//! The ways out of a ring: back to TCP permanently, a permanent error, and closing.

use super::bring_up;
use super::descent::{self, Descent};
use super::passing::PassedStatement;
use super::renewal;
use super::shown;
use super::waiters::waiters;
use super::{Conn, ConnStage, Pages, flags};
use crate::log::log;
use crate::{arena, broker, process, sys, table};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::path_flags;
use partywall_shm::state::{RxState, TxState};
use partywall_shm::status::{LineState, Reason};
use partywall_shm::sync::load_acquire_u32;
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long closing a descriptor waits for another thread's step towards a ring: longer than the broker is waited for.
const STEP: Duration = Duration::from_secs(8);

impl Conn {
    /// The peer broke the protocol.
    #[cold]
    pub(super) fn corrupt(&self, what: Corrupt) -> Errno {
        log!("fd {}: the peer broke the protocol: {what}", self.fd());
        self.fail_permanently("corrupt")
    }

    /// A fatal inconsistency: the connection is reset, on both sides.
    #[cold]
    pub(super) fn fail_permanently(&self, why: &str) -> Errno {
        if self.successor().is_some() {
            // A thread that is late has found zeros where the rings were. The socket is another connection's.
            return Errno::CONNRESET;
        }
        log!("fd {}: reset: {why}", self.fd());
        self.ring_path.set_flag(flags::BROKEN, true);
        self.ring_path.because(Reason::Corrupt);
        let fd = self.fd();
        if fd >= 0 {
            reset_on_close(fd);
            let _ = rustix::net::shutdown(sys::borrow(fd), rustix::net::Shutdown::Both);
        }
        Errno::CONNRESET
    }

    /// It is never to have a ring: something was done with it that only TCP can do. If it has one, it goes back to TCP, at
    /// once where the peer lets us, and otherwise when the peer gets to it.
    pub(crate) fn stay_on_tcp(&'static self, reason: Reason) {
        self.forbid_passing(reason);
        // The thread that brings it up holds this direction: another thread must not be in the middle of it, or it would be up on the other
        // side and not on ours.
        let held = self.tx.hold();
        if let Some(next) = self.successor() {
            drop(held);
            next.stay_on_tcp(reason);
            return;
        }
        match self.ring_path.stage() {
            ConnStage::Candidate | ConnStage::Offered if held.is_err() => {
                // This very thread is about to take a step, below a signal handler, and finds this at the end.
                self.ring_path.because(reason);
                self.ring_path.set_flag(flags::WANT_TCP, true);
            }
            ConnStage::Candidate => {
                self.ring_path.because(reason);
                self.set_stage(ConnStage::Tcp);
            }
            ConnStage::Offered => bring_up::withdraw(self, reason),
            ConnStage::Attached => {
                drop(held);
                self.ask_for_tcp(reason, false);
                if let Some(next) = self.successor_after_change() {
                    next.stay_on_tcp(reason);
                }
            }
            ConnStage::Tcp => {}
            // The thread that took this step has abandoned it.
            ConnStage::Attaching if held.is_ok() => bring_up::withdraw(self, reason),
            // This very thread takes it, below a signal handler, and finds this at the end.
            ConnStage::Attaching => {
                self.ring_path.because(reason);
                self.ring_path.set_flag(flags::WANT_TCP, true);
            }
        }
    }

    /// Its next holder is to leave it on TCP, if it was or will be passed to one, unless the reason passes.
    pub(super) fn forbid_passing(&self, reason: Reason) {
        if reason != Reason::Passed && !renewal::may_follow(reason) {
            self.passing.forbid();
        }
    }

    /// The stage, once no other thread takes a step towards a ring. [`ConnStage::Attaching`] only if this very thread does, below a signal
    /// handler.
    pub(super) fn settle(&self) -> ConnStage {
        loop {
            let stage = self.ring_path.stage();
            if stage != ConnStage::Attaching {
                return stage;
            }
            let Ok(_held) = self.tx.hold() else { return stage };
            if self.ring_path.stage() == ConnStage::Attaching {
                // The thread that took the step has died, or left it by `longjmp` from a signal handler.
                bring_up::withdraw(self, Reason::NotTaken);
            }
            // A step may have begun since, of another thread.
        }
    }

    /// Wants both directions of an attached connection on TCP from now on. A caller that is not in a hurry rings once for each of the
    /// peer's segments: a policy that changes to and fro would fill the link of a peer that does not listen.
    ///
    /// The thread that attaches the ring calls this itself, and [`Conn::stay_on_tcp`] is for others: that takes the sending direction,
    /// and a thread that takes what it holds is believed to have abandoned it. The connection would be reset.
    pub(super) fn ask_for_tcp(&'static self, reason: Reason, is_urgent: bool) {
        if !renewal::may_follow(reason) {
            self.ring_path.set_flag(flags::STAYS_ON_TCP, true);
        }
        self.ring_path.because(reason);
        self.ring_path.set_flag(flags::WANT_TCP, true);
        shown::state(self, LineState::Down);
        let Some(Pages { own, peer, .. }) = self.pages() else { return };
        // EDGE want-tcp: releases the reason; the peer needs no more than the flag.
        own.rx_path.flags.fetch_or(path_flags::WANT_TCP, Ordering::AcqRel);
        self.follow();
        // Never 0, which stands for none.
        // EDGE path: as in `Receiver::refresh`.
        let segment = load_acquire_u32(&peer.tx_path.switches) | 1 << 31;
        if self.ring_path.asked.swap(segment, Ordering::Relaxed) != segment || is_urgent {
            self.bell().ring();
        }
    }

    /// May have its ring back, if this is the reason why it is on TCP.
    pub(crate) fn allow_ring(&'static self, reason: Reason) {
        // A request for TCP stores its reason before it sets the flag. So if the reason has changed, the request is another thread's.
        let (from, to) = (reason as u32, Reason::None as u32);
        if !self.has(flags::LINK_LOST)
            && self.ring_path.reason.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            take_wish_back(self);
        }
    }

    /// Whether no byte goes by a ring any more, nor will: those who wait for it may ask the kernel alone.
    pub(crate) fn is_tcp_permanently(&self) -> bool {
        match self.ring_path.stage() {
            ConnStage::Tcp => true,
            ConnStage::Attached => {
                let may_be_mapped = self.has(flags::LINK_LOST) && !self.has(flags::PARTED);
                self.has(flags::BROKEN | flags::PEER_GONE)
                    || (self.has(flags::WANT_TCP)
                        && self.pages().is_none_or(|pages| pages.is_on_tcp())
                        && !may_be_mapped)
            }
            ConnStage::Candidate | ConnStage::Offered | ConnStage::Attaching => false,
        }
    }

    /// Moves the connection back to TCP now, because a program is about to use its socket past this library. Waits a little for the peer.
    /// The peer sends unread ring bytes again (see `again`), unless other processes hold the connection longer than a moment, which can and
    /// most likely will read them. If the peer cannot, the connection is reset rather than garbled.
    pub(crate) fn bring_down(&'static self, reason: Reason) {
        descent::await_lone_hold(std::iter::once(self));
        let descent = Descent { conn: self, reason, shared: self.is_shared() };
        descent.begin();
        super::heavy_fence();
        descent.end(sys::now());
    }

    /// A descriptor of it is another, too.
    pub(crate) fn add_descriptor(&'static self, fd: c_int) {
        if fd <= 2 || !table::fits(fd) {
            self.bring_down(Reason::RawCalls);
            return;
        }
        // EDGE descriptors: counted before the table has the copy; the last to close it acquires what all did with theirs.
        self.local().descriptors.fetch_add(1, Ordering::AcqRel);
        table::set(fd, self.entry());
        // Either the thread that replaces it meanwhile finds the descriptor, or this one hands it over.
        let mut conn = self;
        while let Some(next) = conn.successor_after_change() {
            conn.hand_over(fd, next);
            conn = next;
        }
    }

    /// A descriptor of it is about to be closed, or replaced, by the program. To be called *before* the kernel does it: what
    /// is left to say is said now, except what is true only afterwards: the caller makes that statement if the kernel has done it.
    pub(crate) fn drop_descriptor(&'static self, fd: c_int) -> Option<PassedStatement> {
        let births = process::births();
        let entry = self.entry();
        if !table::remove(fd, entry) {
            return self.replacement_at(fd).and_then(|next| next.drop_descriptor(fd));
        }
        // A thread that takes a step towards a ring ends it first, since it may show the descriptor to the broker, and may come to a ring.
        // No step begins any more with this descriptor ([`bring_up::may_step`]).
        let held = (!self.is_up()).then(|| self.tx.hold_within(STEP));
        let local = self.local();
        // EDGE descriptors: releases what was done with this one; the last acquires it.
        if local.descriptors.fetch_sub(1, Ordering::AcqRel) > 1 {
            if local.fd() == fd {
                let other = table::entries(0, u32::MAX).find(|(_, e)| *e == entry);
                local.set_fd(other.map_or(-1, |(fd, _)| fd));
            }
            return None;
        }
        let me = process::owner();
        let is_last = !self.identity.holders.has_others(me);
        if matches!(held, Some(Err(_))) {
            // The caller is a signal handler above the step, or a thread has abandoned the step by `longjmp`. The remains of the step
            // stay with the block, which no other connection gets.
            self.ring_path.set_flag(flags::WANT_TCP, true);
            waiters().gone(self);
            local.set_fd(-1);
            return None;
        }
        // Only where the direction is held: another process that has the block may have changed the stage since.
        if is_last && held.is_some() && matches!(self.ring_path.stage(), ConnStage::Offered | ConnStage::Attaching) {
            bring_up::withdraw(self, Reason::None);
        }
        drop(held);
        waiters().gone(self);
        if self.ring_path.stage() == ConnStage::Attached {
            if is_last {
                self.send_again_before_the_end(fd);
            }
            part(self, fd, is_last);
        }
        local.set_fd(-1);
        let statement = if is_last { self.take_statement(births) } else { None };
        if is_last {
            shown::end(self);
        } else {
            shown::state(self, self.ring_path.state_of(self.ring_path.stage()));
        }
        self.identity.holders.leave(me);
        self.free_ancestors();
        arena::free(self.index());
        statement
    }

    /// The program's `shutdown`. To be called before the kernel's for writing.
    pub(crate) fn shut(&'static self, how: c_int) {
        self.for_each_successor(|conn| conn.shut_this(how));
    }

    fn shut_this(&'static self, how: c_int) {
        let before = self.ring_path.flags.load(Ordering::Relaxed);
        if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
            self.ring_path.set_flag(flags::READ_SHUT, true);
        }
        if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
            self.send_again_before_the_end(self.fd());
            // Under the lock: after it no byte follows in the ring, and the kernel's end comes after the last one.
            let held = self.tx.hold();
            self.ring_path.set_flag(flags::WRITE_SHUT, true);
            if self.is_up()
                && let Some(Pages { own, .. }) = self.pages()
            {
                TxState::Finished.store(&own.control.tx.control.state);
            }
            drop(held);
        }
        if self.has(flags::READ_SHUT)
            && self.has(flags::WRITE_SHUT)
            && self.is_up()
            && let Some(Pages { own, .. }) = self.pages()
        {
            // The kernel answers bytes that come from here on with a reset, so the peer must send them there.
            RxState::Closed.store(&own.control.rx.control.state);
        }
        if self.ring_path.is_candidate() {
            // A connection that is being ended is not worth it any more.
            self.stay_on_tcp(Reason::TooShort);
        }
        // Once for each direction: bells that tell nothing new would fill the link.
        if self.is_up() && self.ring_path.flags.load(Ordering::Relaxed) != before {
            self.bell().ring();
        }
    }
}

/// Another thread may ask for TCP with the same flag at any moment, because the bell is lost or for another reason. So the reason is
/// checked once more after the flag is cleared: of the two threads, the later one sees the other's change.
pub(super) fn take_wish_back(conn: &'static Conn) {
    conn.ring_path.set_flag(flags::WANT_TCP, false);
    shown::state(conn, LineState::Up);
    if let Some(Pages { own, .. }) = conn.pages() {
        // A side that has said that it sends by TCP alone does not take that back ([`super::parting`]).
        let allowed = |flags: u32| (flags & path_flags::TCP_ONLY == 0).then_some(flags & !path_flags::WANT_TCP);
        // EDGE want-tcp: in one order with the other threads that ask for TCP, since each changes the same word.
        let _ = own.rx_path.flags.fetch_update(Ordering::AcqRel, Ordering::Acquire, allowed);
    }
    if conn.has(flags::LINK_LOST) {
        conn.ask_for_tcp(Reason::LinkLost, false);
    } else if conn.ring_path.reason() != Reason::None {
        conn.ask_for_tcp(conn.ring_path.reason(), false);
    }
}

/// This process' part in a ring ends; with the last process, the ring does.
fn part(conn: &'static Conn, fd: c_int, is_last: bool) {
    // A thread that is inside finishes first. A handler that interrupted this very thread inside cannot wait for it: then the
    // mappings stay until their place is used again.
    let (tx, rx) = (conn.tx.hold(), conn.rx.hold());
    if let (Ok(_), Ok(_), Some(pages)) = (&tx, &rx, conn.pages())
        && is_last
    {
        pages.say_end(fd);
        conn.set_stage(ConnStage::Tcp);
        let channel = conn.local().channel.swap(0, Ordering::Relaxed);
        // Without that, no statement may follow that the connection was passed (protocol T13.18).
        if channel != 0 && !broker::closed(channel) {
            conn.passing.forbid();
        }
    }
    let local = conn.local();
    if is_last && local.bell.fd() >= 0 {
        // Wakes those of our own threads that still sleep on it, too.
        let _ = rustix::net::shutdown(sys::borrow(local.bell.fd()), rustix::net::Shutdown::Both);
    }
    local.bell.discard();
    local.discard_memory();
    if tx.is_ok() && rx.is_ok() {
        local.own.vacate();
        local.peer.vacate();
    }
}

impl Pages<'_> {
    /// Stores in memory that both directions end, as the kernel does for its socket (protocol S5, T10.5). Both are held.
    ///
    /// Bytes that are unread now make it a reset, without an orderly end before. Bytes that the peer commits while this side closes come after
    /// the end, as those that TCP answers with a reset: the peer then finds both words.
    fn say_end(&self, fd: c_int) {
        let own = self.own;
        let counts = !self.path.has(flags::BROKEN | flags::LEFT);
        if counts && self.reading().has_unread() {
            RxState::Reset.store(&own.control.rx.control.state);
            reset_on_close(fd);
            return;
        }
        TxState::Finished.store(&own.control.tx.control.state);
        if counts {
            self.reading().close();
        } else {
            RxState::Closed.store(&own.control.rx.control.state);
        }
    }
}

/// The kernel forgets what it has and tells the peer that the connection was reset, when the socket is closed.
pub(super) fn reset_on_close(fd: c_int) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
}

/// The program ends, and with it all its connections.
#[cfg_attr(test, expect(dead_code, reason = "tests do not end"))]
pub(crate) fn before_exit() {
    for (fd, _) in table::entries(0, u32::MAX) {
        if let Some(conn) = Conn::of(fd) {
            conn.send_again_before_the_end(fd);
        }
    }
}
