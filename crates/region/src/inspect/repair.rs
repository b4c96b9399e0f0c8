//! TCP's repair mode, in which the kernel reports a connection's sequence numbers (`TCP_REPAIR` in tcp(7)).
//!
//! Entering and leaving it takes `CAP_NET_ADMIN` in the socket's user namespace. While a connection is in it, its `recv` fails with `EPERM`, its
//! `send` with `EINVAL`, and its last `close` sends no end. If a process is killed that has put a connection there, the connection stays
//! there, for all processes that have it.

use rustix::fd::BorrowedFd;
use rustix::net::sockopt;
use std::io;

use crate::sockopt::{option, set_option};

/// `TCP_REPAIR` and its values. The last one leaves without sending a probe.
const REPAIR: libc::c_int = 19;
const ON: libc::c_int = 1;
const OFF_WITH_PROBE: libc::c_int = 0;
const OFF: libc::c_int = -1;
/// `TCP_REPAIR_QUEUE`, and `TCP_QUEUE_SEQ`, which is about the queue that the former has chosen.
const REPAIR_QUEUE: libc::c_int = 20;
const QUEUE_SEQ: libc::c_int = 21;

/// A queue of a connection, as `TCP_REPAIR_QUEUE` numbers them.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(crate) enum TcpQueue {
    Neither = 0,
    Receiving = 1,
    Sending = 2,
}

/// A connection in repair mode, which ends with this value.
#[derive(Debug)]
pub(crate) struct RepairMode<'a> {
    socket: BorrowedFd<'a>,
    reuse: bool,
}

impl<'a> RepairMode<'a> {
    /// Enters it.
    ///
    /// # Errors
    /// The kernel's: without the capability, `EPERM`.
    pub(crate) fn enter(socket: BorrowedFd<'a>) -> io::Result<Self> {
        // Repair mode forgets it, and a server whose connections have lost it cannot listen again while they last.
        let reuse = sockopt::socket_reuseaddr(socket)?;
        set(socket, REPAIR, ON)?;
        Ok(Self { socket, reuse })
    }

    /// The sequence number after the last byte in a queue.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn sequence_number(&self, queue: TcpQueue) -> io::Result<u32> {
        set(self.socket, REPAIR_QUEUE, queue as libc::c_int)?;
        option(self.socket, libc::IPPROTO_TCP, QUEUE_SEQ)
    }
}

impl Drop for RepairMode<'_> {
    fn drop(&mut self) {
        // Each step must be taken even if one before fails. The kernel has allowed the way in, and checks the same on the way out.
        let _ = set(self.socket, REPAIR_QUEUE, TcpQueue::Neither as libc::c_int);
        // A kernel that does not know how to leave quietly leaves with a probe.
        let _ = set(self.socket, REPAIR, OFF).or_else(|_| set(self.socket, REPAIR, OFF_WITH_PROBE));
        let _ = sockopt::set_socket_reuseaddr(self.socket, self.reuse);
    }
}

fn set(socket: BorrowedFd<'_>, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, name, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    #[test]
    fn address_reuse_is_as_before_after_repair_mode() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for reuse in [true, false] {
            sockopt::set_socket_reuseaddr(&socket, reuse).unwrap();
            let Ok(mode) = RepairMode::enter(socket.as_fd()) else {
                return eprintln!("skipped: repair mode takes CAP_NET_ADMIN");
            };
            drop(mode);
            assert_eq!(sockopt::socket_reuseaddr(&socket).unwrap(), reuse);
        }
    }
}
