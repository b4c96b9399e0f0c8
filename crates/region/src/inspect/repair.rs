//! TCP's repair mode, in which the kernel reports a connection's sequence numbers (`TCP_REPAIR` in tcp(7)).
//!
//! Entering and leaving it needs `CAP_NET_ADMIN` in the user namespace that owns the socket's network namespace. While a connection is in the mode,
//! its `recv` fails with `EPERM`; its `send` fails with `EINVAL`, or returns success without sending if a queue is chosen; its last `close`
//! sends no FIN. If a process is killed after it has put a connection into repair mode, the connection stays there, for all processes that
//! have it.
//!
//! The mode gives rights to the program that has the socket, without a capability: it may choose a queue, and while the kernel forces the
//! address to be reusable it may bind the socket to an address that another one listens at. So the second ends at once ([`RepairMode::enter`]),
//! and a program that has made its connection a listener meanwhile loses it (protocol T3.10).

use rustix::fd::BorrowedFd;
use rustix::net::{Shutdown, sockopt};
use std::io;

use super::{LISTEN, info};
use crate::sockopt::{option, set_option};

/// `TCP_REPAIR`, and the values that enter the mode, and leave it without sending a probe.
const REPAIR: libc::c_int = 19;
const ON: libc::c_int = 1;
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

/// Keeps a connection in repair mode until it is dropped.
#[derive(Debug)]
pub(crate) struct RepairMode<'a> {
    socket: BorrowedFd<'a>,
    reuse: bool,
}

impl<'a> RepairMode<'a> {
    /// Enters repair mode.
    ///
    /// # Errors
    /// The kernel's: without the capability, `EPERM`.
    pub(crate) fn enter(socket: BorrowedFd<'a>) -> io::Result<Self> {
        let reuse = sockopt::socket_reuseaddr(socket)?;
        set(socket, REPAIR, ON)?;
        // The mode has forced it.
        let _ = sockopt::set_socket_reuseaddr(socket, reuse);
        Ok(Self { socket, reuse })
    }

    /// The sequence number after the last byte in a queue.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn sequence_number(&self, queue: TcpQueue) -> io::Result<u32> {
        set(self.socket, REPAIR_QUEUE, queue as libc::c_int)?;
        let number = option(self.socket, libc::IPPROTO_TCP, QUEUE_SEQ);
        // As long as a queue is chosen, the program's `send` would put bytes there.
        set(self.socket, REPAIR_QUEUE, TcpQueue::Neither as libc::c_int)?;
        number
    }

    fn leave(&self) -> io::Result<()> {
        // Each step is to be taken even if one before fails.
        let _ = set(self.socket, REPAIR_QUEUE, TcpQueue::Neither as libc::c_int);
        let left = set(self.socket, REPAIR, OFF);
        // To leave clears it, and a server whose connections lack it cannot listen again while they last.
        let _ = sockopt::set_socket_reuseaddr(self.socket, self.reuse);
        left
    }
}

impl Drop for RepairMode<'_> {
    fn drop(&mut self) {
        let left = self.leave();
        let is_listening = info(self.socket).is_ok_and(|info| info.state == LISTEN);
        if left.is_err() || is_listening {
            // The kernel lets nobody end the mode of a listener.
            let _ = rustix::net::shutdown(self.socket, Shutdown::Both);
            let _ = self.leave();
        }
    }
}

/// Ends the mode on a socket that a killed process has left in it, if that is still so. A connection whose numbers are read in the mode needs no such
/// call. Returns whether the socket is out of the mode.
pub(super) fn end(socket: BorrowedFd<'_>) -> bool {
    if is_off(socket) {
        return true;
    }
    drop(RepairMode::enter(socket));
    is_off(socket)
}

fn is_off(socket: BorrowedFd<'_>) -> bool {
    option::<libc::c_int>(socket, libc::IPPROTO_TCP, REPAIR).is_ok_and(|on| on == 0)
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

    /// As the program with the socket could do while a broker reads it.
    #[test]
    fn connection_in_repair_mode_takes_no_address_of_a_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for at in [address, "127.0.0.1:0".parse().unwrap()] {
            let socket = TcpStream::connect(address).unwrap();
            let Ok(mode) = RepairMode::enter(socket.as_fd()) else {
                return eprintln!("skipped: repair mode takes CAP_NET_ADMIN");
            };
            rustix::net::connect_unspec(&socket).unwrap();
            let bound = rustix::net::bind(&socket, &at);
            assert_eq!(bound.is_ok(), at != address, "{bound:?}");
            rustix::net::listen(&socket, 1).unwrap();
            drop(mode);
            assert_ne!(info(socket.as_fd()).unwrap().state, LISTEN);
            assert_eq!(option::<libc::c_int>(socket.as_fd(), libc::IPPROTO_TCP, REPAIR).unwrap(), 0);
        }
    }

    #[test]
    fn half_closed_connection_is_taken_out_of_repair_mode() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let Ok(mode) = RepairMode::enter(socket.as_fd()) else {
            return eprintln!("skipped: repair mode takes CAP_NET_ADMIN");
        };
        // As a process that is killed leaves it. Then the other side closes.
        std::mem::forget(mode);
        drop(listener.accept().unwrap());
        let facts = crate::inspect::Inspector::new()
            .inspect(crate::inspect::Unhurried(socket.try_clone().unwrap().into()), true);
        assert_eq!(facts.unwrap().state, partywall_protocol::socket::SocketState::HalfClosed);
        assert_eq!(option::<libc::c_int>(socket.as_fd(), libc::IPPROTO_TCP, REPAIR).unwrap(), 0);
    }
}
