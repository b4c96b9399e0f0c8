//! The sequence numbers that a TCP connection began with, which no other connection has (protocol T5.5).
//!
//! While the socket is in repair mode, the kernel reports the current sequence numbers to a process with `CAP_NET_ADMIN` in the socket's
//! user namespace. It also counts bytes. The difference gives the initial numbers.
//!
//! In repair mode the program's own calls fail, and a socket that is closed in it sends no end. So clients show a socket only while no
//! thread of theirs is in the kernel with it (T3.3), and here only system calls that do not wait are made between entering and leaving
//! the mode. Signals are blocked during that time: only SIGKILL ends the process in between.
#![expect(unsafe_code, reason = "socket options and a signal mask that no safe function sets")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::net::sockopt;

use partywall_protocol::socket::Numbers;

use super::{ESTABLISHED, info, option};

/// `TCP_REPAIR_QUEUE` and its values, and `TCP_QUEUE_SEQ`.
const REPAIR_QUEUE: libc::c_int = 20;
const NO_QUEUE: libc::c_int = 0;
const RECEIVE_QUEUE: libc::c_int = 1;
const SEND_QUEUE: libc::c_int = 2;
const QUEUE_SEQ: libc::c_int = 21;
/// `TCP_REPAIR` and its values; the last one leaves without sending a probe.
const REPAIR: libc::c_int = 19;
const ON: libc::c_int = 1;
const OFF: libc::c_int = -1;

/// Looks until the numbers hold still.
const LOOKS: u32 = 16;

/// The numbers of an established connection; `None` without the right to read them, or while they move.
pub(super) fn read(socket: BorrowedFd<'_>) -> Option<Numbers> {
    // Repair mode forgets it, and a server whose connections have lost it cannot listen again while they last.
    let reuse = sockopt::socket_reuseaddr(socket).ok()?;
    let _quiet = SignalsBlocked::begin();
    set(socket, REPAIR, ON).ok()?;
    let found = (0..LOOKS).find_map(|_| look(socket).ok().flatten());
    // This must be done even if an earlier call has failed.
    let _ = set(socket, REPAIR_QUEUE, NO_QUEUE);
    // A kernel that does not know how to leave quietly leaves with a probe.
    let _ = set(socket, REPAIR, OFF).or_else(|_| set(socket, REPAIR, 0));
    let _ = sockopt::set_socket_reuseaddr(socket, reuse);
    found
}

/// One reading, or `None` if bytes have come or were acknowledged during it.
fn look(socket: BorrowedFd<'_>) -> io::Result<Option<Numbers>> {
    let before = info(socket)?;
    if before.state != ESTABLISHED {
        return Ok(None);
    }
    set(socket, REPAIR_QUEUE, SEND_QUEUE)?;
    let written: u32 = option(socket, libc::IPPROTO_TCP, QUEUE_SEQ)?;
    set(socket, REPAIR_QUEUE, RECEIVE_QUEUE)?;
    let received: u32 = option(socket, libc::IPPROTO_TCP, QUEUE_SEQ)?;
    let unacknowledged = unacknowledged(socket)?;
    let after = info(socket)?;
    let same = (before.bytes_acked, before.bytes_received, before.state)
        == (after.bytes_acked, after.bytes_received, after.state);
    // Sequence numbers are what the counts are modulo 2^32.
    Ok(same.then(|| Numbers {
        sent_from: written.wrapping_sub(unacknowledged).wrapping_sub(before.bytes_acked as u32),
        received_from: received.wrapping_sub(before.bytes_received as u32),
    }))
}

/// Bytes that were written and not acknowledged yet.
fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut n: libc::c_int = 0;
    // SAFETY: the request writes one `int`.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut n) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(n.cast_unsigned()) }
}

fn set(socket: BorrowedFd<'_>, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads one `int`.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, name, (&raw const value).cast(), len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// No signal interrupts this thread while it lives.
struct SignalsBlocked {
    before: MaybeUninit<libc::sigset_t>,
}

impl SignalsBlocked {
    fn begin() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigfillset` initialises `all`, and `pthread_sigmask` reads it and initialises `before`; neither fails with these
        // arguments.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        }
        Self { before }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `before` was initialised by `begin`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, self.before.as_ptr(), std::ptr::null_mut()) };
    }
}
