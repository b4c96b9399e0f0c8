//! The socket options that change the results of calls: read when a connection gets a ring, and followed from then on.

use super::tx::SendTurn;
use super::{Conn, flags};
use crate::sys;
use libc::c_int;
use partywall_shm::path::Way;
use rustix::fs::OFlags;
use rustix::net::sockopt;
use std::time::Duration;

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
    /// The program has set an option, and the kernel has taken it.
    pub(crate) fn option_was_set(&'static self, fd: c_int, level: c_int, name: c_int) {
        if level == libc::SOL_SOCKET {
            match name {
                libc::SO_RCVTIMEO => self.kernel.learn_receive_timeout(fd),
                libc::SO_SNDTIMEO => self.kernel.learn_send_timeout(fd),
                libc::SO_RCVLOWAT => self.kernel.learn_low_water(fd),
                _ => {}
            }
        } else if (level, name) == (libc::IPPROTO_TCP, libc::TCP_CORK) {
            self.kernel.learn_cork(fd);
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
        if !self.kernel.keep_cork(on) {
            return false;
        }
        if !on && let Some(pages) = self.pages() {
            SendTurn { conn: self, pages, tx: &mut tx }.release_held();
        }
        true
    }

    /// Tells the kernel of `TCP_CORK`, which the stream needs there from now on.
    pub(crate) fn give_cork(&self, fd: c_int) {
        self.kernel.give_cork(fd);
    }

    /// Whether the socket is nonblocking, asked before a call waits. A socket that was passed on has descriptors that this library does
    /// not know, and their users set the flag without its knowledge.
    pub(super) fn may_not_wait(&self, fd: c_int) -> bool {
        if self.has(flags::WANT_TCP) {
            learn_waiting(self, fd);
        }
        self.has(flags::NONBLOCK)
    }

    /// The program has set or cleared `O_NONBLOCK`.
    pub(crate) fn blocking_was_set(&self, nonblocking: bool) {
        self.ring_path.set_flag(flags::NONBLOCK, nonblocking);
    }
}

/// Asks the kernel for all of them.
pub(super) fn learn(conn: &Conn, fd: c_int) {
    learn_waiting(conn, fd);
    conn.kernel.learn_low_water(fd);
    conn.kernel.learn_cork(fd);
}

fn learn_waiting(conn: &Conn, fd: c_int) {
    if let Ok(status) = rustix::fs::fcntl_getfl(sys::borrow(fd)) {
        conn.ring_path.set_flag(flags::NONBLOCK, status.contains(OFlags::NONBLOCK));
    }
    conn.kernel.learn_receive_timeout(fd);
    conn.kernel.learn_send_timeout(fd);
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
