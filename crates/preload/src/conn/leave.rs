//! The ways out of a ring: back to TCP for good, an error for good, and closing.

use super::{Conn, Pages, Stage, flags};
use crate::log::log;
use crate::table::{self, Entry};
use crate::{broker, hidden, ready, real, status, sys};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::path_flags;
use partywall_shm::path::Way;
use partywall_shm::state::{RxState, TxState};
use partywall_shm::status::{Reason, State};
use partywall_shm::sync::{load_acquire, load_acquire_u32};
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a connection that must go back to TCP waits for its peer, which may be busy.
const PATIENCE: Duration = Duration::from_secs(1);

impl Conn {
    /// The peer broke the protocol.
    #[cold]
    pub(super) fn corrupt(&self, what: Corrupt) -> Errno {
        log!("fd {}: the peer broke the protocol: {what}", self.fd());
        self.fail_for_good("corrupt")
    }

    /// Nothing can be trusted any more: the connection is reset, on both sides.
    #[cold]
    pub(super) fn fail_for_good(&self, why: &str) -> Errno {
        log!("fd {}: reset: {why}", self.fd());
        self.set_flag(flags::BROKEN, true);
        self.because(Reason::Corrupt);
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
        self.settle();
        match self.stage() {
            Stage::Candidate => {
                self.because(reason);
                self.set_stage(Stage::Tcp);
            }
            Stage::Offered => self.cancel_offer(reason),
            Stage::Attached => self.ask_for_tcp(reason),
            Stage::Tcp => {}
        }
    }

    /// Waits for another thread that is attaching rings just now.
    fn settle(&self) {
        if self.stage.load(Ordering::SeqCst) == super::ATTACHING {
            drop(self.tx.hold());
        }
    }

    /// Wants both directions on TCP from now on.
    fn ask_for_tcp(&'static self, reason: Reason) {
        self.because(reason);
        self.set_flag(flags::WANT_TCP, true);
        status::show(self, State::Down);
        let Some(Pages { own, .. }) = self.pages() else { return };
        own.rx_path.flags.fetch_or(path_flags::WANT_TCP, Ordering::AcqRel);
        self.follow();
        self.ring();
    }

    /// May have its ring back.
    pub(crate) fn allow_ring(&self) {
        self.set_flag(flags::WANT_TCP, false);
        self.because(Reason::None);
        status::show(self, State::Up);
        if let Some(Pages { own, .. }) = self.pages() {
            own.rx_path.flags.fetch_and(!path_flags::WANT_TCP, Ordering::AcqRel);
        }
    }

    /// Both directions are on TCP, and nothing is left in our ring's counterpart.
    fn is_on_tcp(&self) -> bool {
        let Some(Pages { own, peer, .. }) = self.pages() else { return true };
        let sends = Way::after(own.tx_path.switches.load(Ordering::Relaxed));
        let reads = Way::after(own.rx_path.seen.load(Ordering::Relaxed));
        // What the peer sends may have left the ring already, with nothing of it unread.
        let announced = load_acquire_u32(&peer.tx_path.switches);
        let drained = load_acquire(&peer.control.tx.cursor.tail) == own.control.rx.cursor.head.load(Ordering::Relaxed);
        sends == Way::Tcp && drained && (reads == Way::Tcp || Way::after(announced) == Way::Tcp)
    }

    /// Whether no byte goes by a ring any more, nor will: those who wait for it may ask the kernel alone.
    pub(crate) fn is_tcp_for_good(&self) -> bool {
        match self.stage() {
            Stage::Tcp => true,
            Stage::Attached => {
                self.has(flags::BROKEN | flags::PEER_GONE) || (self.has(flags::WANT_TCP) && self.is_on_tcp())
            }
            Stage::Candidate | Stage::Offered => false,
        }
    }

    /// Brings it back to TCP now, because somebody is about to use its socket past us. Waits a little for the peer. What cannot
    /// be brought back, because bytes of the peer lie in the ring unread, is reset rather than garbled.
    pub(crate) fn bring_down(&'static self, reason: Reason) {
        self.settle();
        if self.stage() != Stage::Attached {
            self.stay_on_tcp(reason);
            return;
        }
        let until = sys::now() + PATIENCE;
        self.ask_for_tcp(reason);
        let mut nap = Duration::from_micros(20);
        while !self.is_on_tcp() && !self.has(flags::PEER_GONE | flags::BROKEN) {
            if sys::now() >= until {
                self.fail_for_good("the peer did not go back to TCP in time, or left bytes in the ring");
                return;
            }
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: i64::from(nap.subsec_nanos()),
            });
            nap = (nap * 2).min(Duration::from_millis(5));
            self.follow();
            self.ring();
        }
        log!("fd {} is back on TCP: {}", self.fd(), reason.words());
    }

    /// A descriptor of it is another, too.
    pub(crate) fn add_descriptor(&'static self, fd: c_int) {
        if fd <= 2 || !table::fits(fd) {
            self.bring_down(Reason::RawCalls);
            return;
        }
        self.local().descriptors.fetch_add(1, Ordering::AcqRel);
        table::set(fd, self.entry());
    }

    /// A descriptor of it is about to be closed, or replaced, by the program. To be called *before* the kernel does it: what
    /// is left to say is said now.
    pub(crate) fn drop_descriptor(&'static self, fd: c_int) {
        let entry = self.entry();
        if !table::remove(fd, entry) {
            return;
        }
        let local = self.local();
        if local.descriptors.fetch_sub(1, Ordering::AcqRel) > 1 {
            if local.fd() == fd {
                let other = table::entries(0, u32::MAX).find(|(_, e)| *e == entry);
                local.set_fd(other.map_or(-1, |(fd, _)| fd));
            }
            return;
        }
        let me = sys::process();
        let is_last = !self.holders.has_others(me);
        if self.stage() == Stage::Offered && is_last {
            self.cancel_offer(Reason::None);
        }
        ready::gone(self);
        if self.stage() == Stage::Attached {
            self.part(fd, is_last);
        }
        local.set_fd(-1);
        if is_last {
            status::end(self);
        } else {
            status::show(self, self.state_of(self.stage()));
        }
        self.holders.leave(me);
    }

    /// This process' part in a ring ends; with the last process, the ring does.
    fn part(&'static self, fd: c_int, is_last: bool) {
        // Whoever is inside finishes first. A handler that interrupted this very thread inside cannot wait for it: then the
        // mappings stay until their place is used again.
        let (tx, rx) = (self.tx.hold(), self.rx.hold());
        if let (Ok(_), Ok(_), Some(Pages { own, peer, .. })) = (&tx, &rx, self.pages())
            && is_last
        {
            TxState::Finished.store(&own.control.tx.control.state);
            RxState::Closed.store(&own.control.rx.control.state);
            super::heavy_fence();
            let unread =
                load_acquire(&peer.control.tx.cursor.tail) != own.control.rx.cursor.head.load(Ordering::Relaxed);
            if unread && !self.has(flags::BROKEN) {
                // As the kernel does with a connection that is closed before all was read.
                reset_on_close(fd);
            }
            self.set_stage(Stage::Tcp);
            let channel = self.channel.swap(0, Ordering::Relaxed);
            if channel != 0 {
                broker::closed(channel);
            }
        }
        let local = self.local();
        let link = local.link();
        if link >= 0 {
            if is_last {
                // Wakes those of our own threads that still sleep on it, too.
                let _ = rustix::net::shutdown(sys::borrow(link), rustix::net::Shutdown::Both);
            }
            local.set_link(-1);
            hidden::discard(link);
        }
        if tx.is_ok() && rx.is_ok() {
            local.own.vacate();
            local.peer.vacate();
        }
    }

    /// The program's `shutdown`. To be called before the kernel's for writing.
    pub(crate) fn shut(&'static self, how: c_int) {
        if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
            self.set_flag(flags::READ_SHUT, true);
        }
        if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
            // Under the lock: after it no byte follows in the ring, and the kernel's end comes after the last one.
            let held = self.tx.hold();
            self.set_flag(flags::WRITE_SHUT, true);
            if self.is_up()
                && let Some(Pages { own, .. }) = self.pages()
            {
                TxState::Finished.store(&own.control.tx.control.state);
            }
            drop(held);
        }
        if self.is_candidate() {
            // A connection that is being ended is not worth it any more.
            self.stay_on_tcp(Reason::TooShort);
        }
        if self.is_up() {
            self.ring();
        }
    }
}

/// The kernel forgets what it has and tells the peer that the connection was reset, when the socket is closed.
pub(super) fn reset_on_close(fd: c_int) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    #[expect(unsafe_code, reason = "a socket option with a structure")]
    // SAFETY: a structure of the size told.
    unsafe {
        real::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        );
    }
}

/// The descriptor is somebody else's by now: forgets whatever was entered for it.
pub(crate) fn forget(fd: c_int) {
    let entry = table::get(fd);
    if entry == Entry::NONE {
        return;
    }
    match Conn::of(fd) {
        Some(conn) => conn.drop_descriptor(fd),
        None => {
            table::remove(fd, entry);
        }
    }
}
