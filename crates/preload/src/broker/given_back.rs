//! A connection that a broker has left in TCP's repair mode (`TCP_REPAIR` in tcp(7); protocol T3.5).
//!
//! A broker reads the sequence numbers of a connection in that mode. If it is killed then, the connection stays in it, for the program as well: `recv`
//! fails with `EPERM`, `send` with `EINVAL`, and the last `close` sends no end. Only a process with `CAP_NET_ADMIN` may end it.

use crate::sys;
use rustix::event::Timespec;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::ffi::c_int;
use std::time::Duration;

/// `TCP_REPAIR`, and the value that ends it without a probe.
const REPAIR: c_int = 19;
const OFF: c_int = -1;
/// Between two looks.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Whether a connection is out of repair mode, after it was shown to a broker that gave no answer. This process ends the mode if it may.
/// Otherwise it waits until then for the broker to do so, which may be only slow.
pub(super) fn is_given_back(socket: BorrowedFd<'_>, until: Duration) -> bool {
    let errno = sys::errno_number();
    let is_free = wait(socket, until);
    sys::restore_errno(errno);
    is_free
}

fn wait(socket: BorrowedFd<'_>, until: Duration) -> bool {
    while is_in_repair(socket) && !end_repair(socket) {
        if sys::now() >= until {
            return false;
        }
        let _ = rustix::thread::nanosleep(&PAUSE);
    }
    true
}

/// Takes no capability.
fn is_in_repair(socket: BorrowedFd<'_>) -> bool {
    let mut on: c_int = 0;
    sys::read_option(socket.as_raw_fd(), libc::IPPROTO_TCP, REPAIR, &mut on) && on != 0
}

/// Whether this process has ended the mode. It may not without `CAP_NET_ADMIN`.
fn end_repair(socket: BorrowedFd<'_>) -> bool {
    // The mode has forced the address to be reusable. Nobody knows whether it was.
    sys::set_option(socket.as_raw_fd(), libc::IPPROTO_TCP, REPAIR, &OFF)
        && sys::set_option(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, &1)
}
