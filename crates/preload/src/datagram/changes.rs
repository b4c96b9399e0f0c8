//! What a program does to a socket beside sending and receiving.

use super::{DatagramSocket, flags, options};
use crate::sockaddr::ProgramAddress;
use libc::c_int;
use std::sync::atomic::Ordering;

/// Something was done with it that only the kernel can follow.
pub(crate) fn give_up(fd: c_int) {
    if let Some(socket) = DatagramSocket::of(fd) {
        socket.stay_on_kernel();
    }
}

/// A call sends on it, and only the kernel can follow that.
pub(crate) fn past_rings<R>(fd: c_int, kernel: impl FnOnce() -> R) -> R {
    give_up(fd);
    kernel()
}

/// It was connected, or its connection taken away: from now on other datagrams come, and perhaps from another address of ours.
pub(crate) fn connected(fd: c_int, address: ProgramAddress) {
    let Some(socket) = DatagramSocket::of(fd) else { return };
    socket.close_rings();
    socket.unpublish();
    // The broker may want it at its next address.
    socket.set(flags::UNWANTED, false);
    socket.port.store(0, Ordering::Relaxed);
    socket.error.store(0, Ordering::Relaxed);
    for word in [&socket.came, &socket.bytes, &socket.publish_from] {
        word.store(0, Ordering::Relaxed);
    }
    if let Some(mut remote) = socket.remote.hold() {
        let at = address.read_unscoped().map(|at| (partywall_shm::address::wide(at.ip()), at.port()));
        *remote = at.unwrap_or((0, 0));
    }
}

/// The program has set or cleared `O_NONBLOCK`.
pub(crate) fn blocking_was_set(fd: c_int, nonblocking: bool) {
    if let Some(socket) = DatagramSocket::of(fd) {
        socket.set(flags::NONBLOCK, nonblocking);
    }
}

/// The program has set an option.
pub(crate) fn option_was_set(fd: c_int, level: c_int, name: c_int) {
    let Some(socket) = DatagramSocket::of(fd) else { return };
    if (level, name) == (libc::SOL_SOCKET, libc::SO_REUSEPORT) {
        socket.note_group(fd);
    } else if options::SEGMENTS.contains(&(level, name)) {
        socket.follow_segments(fd);
        // Datagrams that the kernel joins cannot be counted one by one.
        if socket.has(flags::JOINS) && socket.has(flags::ARRIVALS) {
            socket.close_rings();
        }
    } else if !options::is_harmless(level, name) {
        socket.stay_on_kernel();
    }
}
