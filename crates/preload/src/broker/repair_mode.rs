//! Ends TCP's repair mode (`TCP_REPAIR` in tcp(7)) on a connection that a broker has left in it (protocol T3.5).
//!
//! A broker reads the sequence numbers of a connection in that mode. If its reading process is killed meanwhile, the connection stays in the
//! mode, for the program as well: `recv` fails with `EPERM`; `send` fails with `EINVAL`, or returns success without sending if the process
//! had chosen a queue; `close` sends no FIN. Only a process with `CAP_NET_ADMIN` may end the mode.

use crate::sys;
use rustix::event::Timespec;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::ffi::c_int;
use std::time::Duration;

/// `TCP_REPAIR`, and the value that ends it without a probe.
const REPAIR: c_int = 19;
const OFF: c_int = -1;
/// From one look to the next.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Whether a connection is in repair mode. To ask needs no capability.
pub(crate) fn is_in_repair_mode(socket: BorrowedFd<'_>) -> bool {
    let errno = sys::errno_number();
    let mut on: c_int = 0;
    let is_known = sys::read_option(socket.as_raw_fd(), libc::IPPROTO_TCP, REPAIR, &mut on);
    sys::restore_errno(errno);
    is_known && on != 0
}

/// Whether the program itself has put its connection into the mode. The mode forces the address to be reusable, and readers take that back at
/// once (protocol T3.10).
pub(super) fn is_in_repair_by_program(socket: BorrowedFd<'_>) -> bool {
    const FORCED: c_int = 2;
    let mut reuse: c_int = 0;
    is_in_repair_mode(socket)
        && sys::read_option(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, &mut reuse)
        && reuse == FORCED
}

/// Ends the mode if this process may. Otherwise waits until `until`, because the broker may be slow and not dead. Returns whether the
/// connection is out of repair mode.
pub(super) fn end_repair_mode(socket: BorrowedFd<'_>, until: Duration) -> bool {
    while is_in_repair_mode(socket) && !turn_off(socket) {
        if sys::now() >= until {
            return false;
        }
        let _ = rustix::thread::nanosleep(&POLL_INTERVAL);
    }
    true
}

/// Whether the kernel lets this process end the mode.
fn turn_off(socket: BorrowedFd<'_>) -> bool {
    let errno = sys::errno_number();
    // To leave the mode clears `SO_REUSEADDR`, and its former value is unknown. A server whose connections lack it cannot listen again while
    // they last.
    let is_off = sys::set_option(socket.as_raw_fd(), libc::IPPROTO_TCP, REPAIR, &OFF)
        && sys::set_option(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, &1);
    sys::restore_errno(errno);
    is_off
}

/// Aborts a connection that stays in repair mode: calls on it fail from now on, and no longer return success without an effect.
pub(super) fn abort(socket: BorrowedFd<'_>) {
    // In the mode the kernel sends no reset: the other side gets one when it sends.
    let _ = rustix::net::connect_unspec(socket);
}
