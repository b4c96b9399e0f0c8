//! What is known of the kernel's socket of a connection without a question to the kernel.

use super::accounts::queued;
use crate::sys;
use libc::c_int;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bytes that the kernel has not sent at all yet.
const SIOCOUTQNSD: libc::Ioctl = 0x894B;
/// `TCP_CORK` is off in the kernel.
const UNCORKED: u32 = 0;
/// It is on there.
const CORKED: u32 = 1;
/// The program has set it, and the kernel does not know.
const CORK_KEPT: u32 = 2;

/// The kernel's events when nothing can be sent any more.
pub(super) const SEND_ENDS: u32 = EventFlags::HUP.bits() | EventFlags::ERR.bits();

/// Options of the socket, news of it, and threads in calls on it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct KernelFacts {
    /// `SO_RCVLOWAT`.
    pub(super) low_water: AtomicU32,
    /// What the kernel knows of `TCP_CORK`, and is to be told before the next byte goes by it ([`super::options`]).
    cork: AtomicU32,
    /// The events on the kernel's socket that were reported but not processed yet.
    pub(super) said: AtomicU32,
    /// Threads that sleep, or may sleep, in the kernel on this socket.
    pub(super) in_kernel: AtomicU32,
    /// An error that the kernel has reported once and that is to be reported when the ring is empty; 0 if none.
    pub(super) error: AtomicU32,
    /// The limit in nanoseconds; 0 is no limit.
    pub(super) receive_timeout: AtomicU64,
    pub(super) send_timeout: AtomicU64,
}

impl KernelFacts {
    /// For a new connection, whose socket nobody has asked about. Threads that are in the kernel with the last one have left.
    pub(super) fn begin(&self) {
        for word in [&self.low_water, &self.cork, &self.said, &self.error] {
            word.store(0, Ordering::Relaxed);
        }
        self.receive_timeout.store(0, Ordering::Relaxed);
        self.send_timeout.store(0, Ordering::Relaxed);
    }

    /// An event on the socket said this.
    pub(crate) fn note(&self, events: u32) {
        let end = EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        let events = events & end.bits();
        if events & !self.said.load(Ordering::Relaxed) != 0 {
            self.said.fetch_or(events, Ordering::Relaxed);
        }
    }

    /// What the socket has been heard to say, and has not been looked into.
    #[inline]
    pub(super) fn said(&self) -> u32 {
        self.said.load(Ordering::Relaxed)
    }

    /// What it has been heard to say of its end: of `EPOLLRDHUP | EPOLLHUP | EPOLLERR`.
    pub(crate) fn has_hung_up(&self) -> u32 {
        self.said() & (EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR).bits()
    }

    /// That there were bytes has been looked into.
    pub(super) fn take_readable(&self) {
        self.said.fetch_and(!EventFlags::IN.bits(), Ordering::Relaxed);
    }

    /// Keeps an error that the kernel has reported.
    pub(super) fn keep_error(&self, error: Errno) {
        self.error.store(error.raw_os_error().cast_unsigned(), Ordering::Relaxed);
        self.note(EventFlags::ERR.bits());
    }

    /// Whether an error is kept.
    pub(super) fn has_error(&self) -> bool {
        self.kept_error() != 0
    }

    /// The number of the error that is kept; 0 if there is none.
    pub(super) fn kept_error(&self) -> i32 {
        self.error.load(Ordering::Relaxed).cast_signed()
    }

    /// Takes the error that was kept.
    pub(super) fn take_error(&self) -> Option<Errno> {
        let error = self.error.swap(0, Ordering::Relaxed).cast_signed();
        // The word may be another process' after a fork.
        (1..4096).contains(&error).then(|| Errno::from_raw_os_error(error))
    }

    /// A thread is about to enter the kernel with this socket.
    pub(super) fn enter(&self) {
        // EDGE in-kernel: in one order with the stage. Either the thread finds `Attaching` after this, or the thread that takes a step
        // finds this one.
        self.in_kernel.fetch_add(1, Ordering::SeqCst);
    }

    /// A thread has come back. Not below 0: what looked abandoned may come back after all, on another stack of the same thread, and a child of
    /// `fork` has a copy of what its parent's thread noted.
    pub(super) fn leave(&self) {
        // EDGE in-kernel: releases the call of the kernel; acquired in `KernelFacts::is_quiet`.
        let _ = self.in_kernel.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
    }

    /// Whether no thread is in the kernel with this socket.
    pub(super) fn is_quiet(&self) -> bool {
        // EDGE in-kernel: acquires from `KernelFacts::leave`. In one order with the stage, as in `KernelFacts::enter`.
        self.in_kernel.load(Ordering::SeqCst) == 0
    }

    /// The number of bytes that a call waits for: all, or `SO_RCVLOWAT`. Even a call that receives no bytes waits for one.
    pub(super) fn enough_of(&self, wanted: usize, all: bool) -> usize {
        match wanted {
            0 => 0,
            _ if all => wanted,
            _ => wanted.min(self.low_water.load(Ordering::Relaxed).max(1) as usize),
        }
    }

    /// Asks the kernel for `SO_RCVTIMEO`.
    pub(super) fn learn_receive_timeout(&self, fd: c_int) {
        learn_timeout(fd, libc::SO_RCVTIMEO, &self.receive_timeout);
    }

    /// Asks the kernel for `SO_SNDTIMEO`.
    pub(super) fn learn_send_timeout(&self, fd: c_int) {
        learn_timeout(fd, libc::SO_SNDTIMEO, &self.send_timeout);
    }

    /// Asks the kernel for `SO_RCVLOWAT`.
    pub(super) fn learn_low_water(&self, fd: c_int) {
        let mut value: c_int = 1;
        if sys::read_option(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &mut value) {
            self.low_water.store(u32::try_from(value).unwrap_or(1), Ordering::Relaxed);
        }
    }

    /// Keeps that the program has set or cleared `TCP_CORK`. `false`: the kernel is to be told now, since what it holds back is to go.
    pub(super) fn keep_cork(&self, on: bool) -> bool {
        let kept = if on { CORK_KEPT } else { UNCORKED };
        // In one step: another thread may give it to the kernel meanwhile.
        let keep = |cork| (cork != CORKED).then_some(kept);
        self.cork.fetch_update(Ordering::Relaxed, Ordering::Relaxed, keep).is_ok() || on
    }

    /// Whether the program has set `TCP_CORK`.
    #[inline]
    pub(super) fn is_corked(&self) -> bool {
        self.cork.load(Ordering::Relaxed) != UNCORKED
    }

    /// Tells the kernel.
    pub(super) fn give_cork(&self, fd: c_int) {
        let is_kept = self.cork.load(Ordering::Relaxed) == CORK_KEPT;
        if is_kept && self.cork.compare_exchange(CORK_KEPT, CORKED, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let _ = rustix::net::sockopt::set_tcp_cork(sys::borrow(fd), true);
        }
    }

    /// The stream goes on by the ring: what the kernel holds back until more comes (by `MSG_MORE`, `TCP_CORK` or Nagle's rule) is to go
    /// now. Nothing more will come there, and the peer reads it first.
    pub(super) fn push_tcp(&self, fd: c_int) {
        let socket = sys::borrow(fd);
        if queued(socket, SIOCOUTQNSD) == Ok(0) {
            return;
        }
        if self.cork.compare_exchange(CORKED, CORK_KEPT, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let _ = rustix::net::sockopt::set_tcp_cork(socket, false);
        }
        let waits = rustix::net::sockopt::tcp_nodelay(socket) == Ok(false);
        let _ = rustix::net::sockopt::set_tcp_nodelay(socket, true);
        if waits {
            let _ = rustix::net::sockopt::set_tcp_nodelay(socket, false);
        }
    }

    /// Asks the kernel for `TCP_CORK`.
    pub(super) fn learn_cork(&self, fd: c_int) {
        let corked = rustix::net::sockopt::tcp_cork(sys::borrow(fd)).unwrap_or(false);
        self.cork.store(if corked { CORKED } else { UNCORKED }, Ordering::Relaxed);
    }
}

/// Asks the kernel for a time limit, which it gives in microseconds.
fn learn_timeout(fd: c_int, name: c_int, word: &AtomicU64) {
    let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
    if sys::read_option(fd, libc::SOL_SOCKET, name, &mut value) {
        let seconds = u64::try_from(value.tv_sec).unwrap_or(0);
        let microseconds = u64::try_from(value.tv_usec).unwrap_or(0);
        word.store(seconds.saturating_mul(1_000_000_000).saturating_add(microseconds * 1000), Ordering::Relaxed);
    }
}
