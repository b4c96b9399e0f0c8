//! The descriptors of sockets: made, copied and closed.

use super::{DatagramSocket, TABLE, USED, flags};
use crate::table;
use libc::c_int;
use std::sync::atomic::Ordering;

/// `socket` has made a descriptor.
pub(crate) fn made(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) {
    let inet = domain == libc::AF_INET || domain == libc::AF_INET6;
    let datagram = kind & 0xf == libc::SOCK_DGRAM && (protocol == 0 || protocol == libc::IPPROTO_UDP);
    // Standard input and output are read and written inside the C library, past us.
    if !inet || !datagram || fd <= 2 || !table::fits(fd) || crate::process::is_visitor() {
        return;
    }
    let used = USED.load(Ordering::Relaxed) as usize;
    let free =
        // EDGE socket-place: acquires the place from `DatagramSocket::end`, and releases it as taken.
        |socket: &&DatagramSocket| socket.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    let Some(socket) = TABLE[..used].iter().find(free).or_else(|| TABLE[used..].iter().find(free)) else { return };
    socket.generation.fetch_add(1, Ordering::Relaxed);
    socket.sleepers.reset(socket.generation());
    let six = if domain == libc::AF_INET6 { flags::SIX } else { 0 };
    let nonblock = if kind & libc::SOCK_NONBLOCK != 0 { flags::NONBLOCK } else { 0 };
    socket.flags.store(six | nonblock, Ordering::Relaxed);
    socket.descriptors.store(1, Ordering::Relaxed);
    socket.fd.store(fd, Ordering::Relaxed);
    for word in [&socket.port, &socket.policy_seen, &socket.inbound, &socket.segment] {
        word.store(0, Ordering::Relaxed);
    }
    for word in [&socket.came, &socket.bytes, &socket.published, &socket.publish_from] {
        word.store(0, Ordering::Relaxed);
    }
    socket.error.store(0, Ordering::Relaxed);
    socket.budget.reset();
    if let Some(mut remote) = socket.remote.hold() {
        *remote = (0, 0);
    }
    let entry = socket.entry();
    // EDGE sockets: releases that the place is in use; acquired in `all_ever`.
    USED.fetch_max(u32::from(entry.index()) + 1, Ordering::Release);
    table::set(fd, entry);
}

/// `copy` is a copy of `fd` now.
pub(crate) fn copied(fd: c_int, copy: c_int) {
    if let Some(socket) = DatagramSocket::of(fd) {
        if copy > 2 && table::fits(copy) {
            // EDGE socket-descriptors: as in `dropped`.
            socket.descriptors.fetch_add(1, Ordering::AcqRel);
            table::set(copy, socket.entry());
        } else {
            socket.stay_on_kernel();
        }
    }
}

/// A descriptor is about to be closed, or stands for something else by now.
pub(crate) fn dropped(fd: c_int) {
    let Some(socket) = DatagramSocket::of(fd) else { return };
    let entry = socket.entry();
    if !table::remove(fd, entry) {
        return;
    }
    // EDGE socket-descriptors: releases what this descriptor was used for; the last one acquires it from all others.
    if socket.descriptors.fetch_sub(1, Ordering::AcqRel) == 1 {
        socket.end();
    } else if socket.fd.load(Ordering::Relaxed) == fd {
        let other = table::entries(0, u32::MAX).find(|(_, e)| *e == entry);
        socket.fd.store(other.map_or(-1, |(fd, _)| fd), Ordering::Relaxed);
    }
}
