//! Sockets when the process is copied, or its program replaced.

use super::{all, all_ever, flags, flow, give_up};
use crate::sys;
use crate::table::{self, DescriptorKind};
use std::sync::atomic::Ordering;

/// Before a fork: parent and child will both receive what comes to a socket, which only the kernel can share out.
pub(crate) fn before_fork() {
    for socket in all() {
        socket.become_shared();
    }
    for socket in all_ever() {
        socket.rx.freeze();
        socket.tx.freeze();
        socket.remote.freeze();
    }
}

/// In the parent, or in the child.
pub(crate) fn forked(child: bool) {
    for socket in all_ever() {
        socket.rx.thaw(child);
        socket.tx.thaw(child);
        socket.remote.thaw(child);
        if child {
            // A call that the forking handler has interrupted goes on in the child, with what it holds. Then the socket stays on the kernel.
            match socket.rx.hold() {
                Some(mut rx) => rx.forget(),
                None => socket.set(flags::KERNEL, true),
            }
            match socket.tx.hold() {
                Some(mut tx) => tx.forget(),
                None => socket.set(flags::KERNEL, true),
            }
            socket.inbound.store(0, Ordering::Relaxed);
            socket.sleepers.reset(socket.generation());
            socket.enter_holders();
        }
    }
    if child {
        flow::after_fork();
    }
}

/// Before another program takes over: those that stay open are the kernel's.
pub(crate) fn before_exec() {
    if crate::process::is_visitor() {
        return;
    }
    for (fd, entry) in table::entries(0, u32::MAX) {
        let stays =
            |fd| rustix::io::fcntl_getfd(sys::borrow(fd)).is_ok_and(|f| !f.contains(rustix::io::FdFlags::CLOEXEC));
        if entry.kind() == DescriptorKind::Datagram && stays(fd) {
            give_up(fd);
        }
    }
}
