//! What of a socket's options changes what its calls do: read when it gets a ring, followed from then on.

use super::candidate::queued;
use super::{Conn, flags};
use crate::{real, sys};
use libc::{c_int, socklen_t};
use partywall_shm::path::Way;
use rustix::fs::OFlags;
use rustix::net::sockopt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes that the kernel has not sent at all yet.
const SIOCOUTQNSD: libc::Ioctl = 0x894B;
/// `TCP_CORK` is off in the kernel.
const UNCORKED: u32 = 0;
/// It is on there.
const CORKED: u32 = 1;
/// The program has set it, and the kernel does not know.
const CORK_KEPT: u32 = 2;

/// Has the kernel find out within seconds that the peer's machine is gone, unless the program has asked for that itself.
///
/// Bytes that lie in a ring when a machine ends are lost, and the kernel has sent nothing that would be missed.
pub(super) fn keep_alive(fd: c_int) {
    let fd = sys::borrow(fd);
    if sockopt::socket_keepalive(fd) != Ok(false) {
        return;
    }
    // Where one is refused, the kernel's own times hold.
    let _ = sockopt::set_tcp_keepidle(fd, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepintvl(fd, Duration::from_secs(2));
    let _ = sockopt::set_tcp_keepcnt(fd, 5);
    let _ = sockopt::set_socket_keepalive(fd, true);
}

impl Conn {
    /// Asks the kernel for all of them.
    pub(super) fn learn_options(&self, fd: c_int) {
        self.learn_waiting(fd);
        self.learn_low_water(fd);
        self.learn_cork(fd);
    }

    fn learn_waiting(&self, fd: c_int) {
        if let Ok(status) = rustix::fs::fcntl_getfl(sys::borrow(fd)) {
            self.set_flag(flags::NONBLOCK, status.contains(OFlags::NONBLOCK));
        }
        self.learn_timeout(fd, libc::SO_RCVTIMEO, &self.receive_timeout);
        self.learn_timeout(fd, libc::SO_SNDTIMEO, &self.send_timeout);
    }

    fn learn_timeout(&self, fd: c_int, name: c_int, word: &AtomicU64) {
        let mut value = libc::timeval { tv_sec: 0, tv_usec: 0 };
        if get(fd, libc::SOL_SOCKET, name, &mut value) {
            let seconds = u64::try_from(value.tv_sec).unwrap_or(0);
            let microseconds = u64::try_from(value.tv_usec).unwrap_or(0);
            word.store(seconds.saturating_mul(1_000_000_000).saturating_add(microseconds * 1000), Ordering::Relaxed);
        }
    }

    fn learn_low_water(&self, fd: c_int) {
        let mut value: c_int = 1;
        if get(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &mut value) {
            self.low_water.store(u32::try_from(value).unwrap_or(1), Ordering::Relaxed);
        }
    }

    /// The program has set an option, and the kernel has taken it.
    pub(crate) fn option_was_set(&'static self, fd: c_int, level: c_int, name: c_int) {
        if level == libc::SOL_SOCKET {
            match name {
                libc::SO_RCVTIMEO => self.learn_timeout(fd, libc::SO_RCVTIMEO, &self.receive_timeout),
                libc::SO_SNDTIMEO => self.learn_timeout(fd, libc::SO_SNDTIMEO, &self.send_timeout),
                libc::SO_RCVLOWAT => self.learn_low_water(fd),
                _ => {}
            }
        } else if (level, name) == (libc::IPPROTO_TCP, libc::TCP_CORK) {
            self.learn_cork(fd);
            self.release_unless_corked(fd);
        } else if (level, name) == (libc::IPPROTO_TCP, libc::TCP_NODELAY) {
            // Sends what waits even below a cork, as the kernel does (see tcp(7)).
            self.release_now(fd);
        }
    }

    /// The program sets or clears `TCP_CORK`, as some do around each answer. Bytes of a ring are held back accordingly ([`super::held`]), and
    /// the kernel need only know when the stream comes back to it. `false`: it is to be told now.
    pub(crate) fn keep_cork(&'static self, fd: c_int, on: bool) -> bool {
        if !self.is_up() || self.has(flags::WANT_TCP) {
            return false;
        }
        let Ok(mut tx) = self.tx.hold() else { return false };
        if !self.is_of(fd) || !self.is_up() || tx.path.way() != Way::Ring || self.has(flags::WANT_TCP) {
            return false;
        }
        match (self.cork.load(Ordering::Relaxed), on) {
            // What it holds back is to go now.
            (CORKED, false) => return false,
            (CORKED, true) => {}
            (_, on) => self.cork.store(if on { CORK_KEPT } else { UNCORKED }, Ordering::Relaxed),
        }
        if !on && let Some(pages) = self.pages() {
            self.release_held(&mut tx, pages);
        }
        true
    }

    /// Whether the program has set `TCP_CORK`.
    #[inline]
    pub(super) fn is_corked(&self) -> bool {
        self.cork.load(Ordering::Relaxed) != UNCORKED
    }

    /// Tells the kernel.
    pub(crate) fn give_cork(&self, fd: c_int) {
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

    fn learn_cork(&self, fd: c_int) {
        let corked = rustix::net::sockopt::tcp_cork(sys::borrow(fd)).unwrap_or(false);
        self.cork.store(if corked { CORKED } else { UNCORKED }, Ordering::Relaxed);
    }

    /// Whether the socket does not block; to be asked before a call waits. One that has been handed on has descriptors that we do not
    /// know, whose users set it behind our back.
    pub(super) fn may_not_wait(&self, fd: c_int) -> bool {
        if self.has(flags::WANT_TCP) {
            self.learn_waiting(fd);
        }
        self.has(flags::NONBLOCK)
    }

    /// The program has set or cleared `O_NONBLOCK`.
    pub(crate) fn blocking_was_set(&self, nonblocking: bool) {
        self.set_flag(flags::NONBLOCK, nonblocking);
    }
}

/// Whether an option is one that bytes in memory cannot honour.
pub(crate) fn needs_tcp(level: c_int, name: c_int) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_ZEROCOPY
                | libc::SO_TIMESTAMP
                | libc::SO_TIMESTAMPNS
                | libc::SO_TIMESTAMPING
                | libc::SO_OOBINLINE
                | libc::SO_ATTACH_FILTER
                | libc::SO_ATTACH_BPF
        ),
        _ => changes_stream(level, name),
    }
}

/// Whether an option makes of the stream something else than what is read and written.
pub(crate) fn changes_stream(level: c_int, name: c_int) -> bool {
    level == libc::IPPROTO_TCP && matches!(name, libc::TCP_ULP | libc::TCP_REPAIR | libc::TCP_MD5SIG)
}

#[expect(unsafe_code, reason = "asks for a socket option by pointer")]
fn get<T>(fd: c_int, level: c_int, name: c_int, value: &mut T) -> bool {
    let mut len = size_of::<T>() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes of plain numbers.
    unsafe { real::getsockopt(fd, level, name, std::ptr::from_mut(value).cast(), &raw mut len) == 0 }
}
