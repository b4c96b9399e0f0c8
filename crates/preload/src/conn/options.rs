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

/// The options of a connection's socket, as the program sets them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SocketOptions(&'static Conn);

impl SocketOptions {
    /// The program has set an option, and the kernel has taken it.
    pub(crate) fn was_set(self, fd: c_int, level: c_int, name: c_int) {
        let kernel = &self.0.kernel;
        if level == libc::SOL_SOCKET {
            match name {
                libc::SO_RCVTIMEO => kernel.learn_receive_timeout(fd),
                libc::SO_SNDTIMEO => kernel.learn_send_timeout(fd),
                libc::SO_RCVLOWAT => kernel.learn_low_water(fd),
                _ => {}
            }
        } else if (level, name) == (libc::IPPROTO_TCP, libc::TCP_CORK) {
            kernel.learn_cork(fd);
            if !kernel.is_corked() {
                self.release_held(fd);
            }
        } else if (level, name) == (libc::IPPROTO_TCP, libc::TCP_NODELAY) {
            // Sends what waits even below a cork, as the kernel does (see tcp(7)).
            self.release_held(fd);
        }
    }

    /// The program has asked for what waits to be sent.
    fn release_held(self, fd: c_int) {
        let Self(conn) = self;
        if !conn.is_up() {
            return;
        }
        if let Ok(mut tx) = conn.tx.hold()
            && conn.is_of(fd)
            && conn.is_up()
            && let Some(pages) = conn.pages()
        {
            SendTurn { conn, pages, tx: &mut tx }.release_held();
        }
    }

    /// The program sets or clears `TCP_CORK`, as some do around each answer. Bytes of a ring are held back accordingly ([`super::held`]), and
    /// the kernel need only know when the stream comes back to it. `false`: it is to be told now.
    pub(crate) fn keep_cork(self, fd: c_int, on: bool) -> bool {
        let Self(conn) = self;
        if !conn.is_up() || conn.has(flags::WANT_TCP) {
            return false;
        }
        let Ok(mut tx) = conn.tx.hold() else { return false };
        if !conn.is_of(fd) || !conn.is_up() || tx.path.way() != Way::Ring || conn.has(flags::WANT_TCP) {
            return false;
        }
        if !conn.kernel.keep_cork(on) {
            return false;
        }
        if !on && let Some(pages) = conn.pages() {
            SendTurn { conn, pages, tx: &mut tx }.release_held();
        }
        true
    }

    /// Tells the kernel of `TCP_CORK`, which the program asks it for.
    pub(crate) fn give_cork(self, fd: c_int) {
        self.0.kernel.give_cork(fd);
    }

    /// The program has set or cleared `O_NONBLOCK`.
    pub(crate) fn blocking_was_set(self, nonblocking: bool) {
        self.0.ring_path.set_flag(flags::NONBLOCK, nonblocking);
    }
}

impl Conn {
    /// The options of its socket.
    pub(crate) fn options(&'static self) -> SocketOptions {
        SocketOptions(self)
    }

    /// Whether the socket is nonblocking, asked before a call waits. A socket that was passed on has descriptors that this library does
    /// not know, and their users set the flag without its knowledge.
    pub(super) fn may_not_wait(&self, fd: c_int) -> bool {
        if self.has(flags::WANT_TCP) {
            learn_waiting(self, fd);
        }
        self.has(flags::NONBLOCK)
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
