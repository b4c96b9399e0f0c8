//! The sequence numbers that a TCP connection began with, which no other connection has (protocol T5.5).
//!
//! While the socket is in repair mode, the kernel reports the current sequence numbers to a process with `CAP_NET_ADMIN` in the socket's
//! user namespace. It also counts bytes. The difference gives the initial numbers.
//!
//! In repair mode the program's own calls fail ([`super::repair`]). So clients show a socket only while no thread of theirs is in
//! the kernel with it (T3.3), and here only system calls that do not wait are made between entering and leaving the mode. Signals are
//! blocked during that time. Only SIGKILL ends the process in between. The connection then stays in repair mode until a process with
//! `CAP_NET_ADMIN` ends it: the client or the next broker (T3.6).
#![expect(unsafe_code, reason = "a request and a signal mask that no safe function makes")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use partywall_protocol::socket::Numbers;

use super::repair::{RepairMode, TcpQueue};
use super::{ESTABLISHED, info};

/// Looks until the numbers hold still.
const LOOKS: u32 = 16;

/// The numbers of an established connection; `None` without the right to read them, or while they move.
pub(super) fn read(socket: BorrowedFd<'_>) -> Option<Numbers> {
    let _blocked = SignalsBlocked::begin();
    let mode = RepairMode::enter(socket).ok()?;
    (0..LOOKS).find_map(|_| look(socket, &mode).ok().flatten())
}

/// One reading, or `None` if bytes have come or were acknowledged during it.
fn look(socket: BorrowedFd<'_>, mode: &RepairMode<'_>) -> io::Result<Option<Numbers>> {
    let before = info(socket)?;
    if before.state != ESTABLISHED {
        return Ok(None);
    }
    let written = mode.sequence_number(TcpQueue::Sending)?;
    let received = mode.sequence_number(TcpQueue::Receiving)?;
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
