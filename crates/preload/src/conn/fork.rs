//! Around `fork`: parent and child hold the same connections afterwards.

use super::holders::UNBORN;
use super::{Conn, ConnStage, Descent};
use super::{bring_up, shown};
use crate::{arena, hidden, process, status, sys, table};
use partywall_shm::status::Reason;
use std::time::Duration;

/// How long a fork waits for a thread that copies out of a ring.
const RECEIVER: Duration = Duration::from_millis(50);

fn each(mut what: impl FnMut(&'static Conn)) {
    // A connection with several descriptors comes several times.
    for (fd, _) in table::entries(0, u32::MAX) {
        if let Some(conn) = Conn::of(fd)
            && conn.fd() == fd
        {
            what(conn);
        }
    }
}

/// Brings all connections back to TCP before a child that could not share them (protocol T13.8). Locks and holders are numbers of
/// threads and processes, which mean others in another pid namespace.
fn leave_rings() {
    let descent = |conn: &'static Conn| Descent { conn, reason: Reason::Shared, shared: conn.is_shared() };
    each(|conn| descent(conn).begin());
    super::heavy_fence();
    let begin = sys::now();
    each(|conn| descent(conn).end(begin));
}

/// Before: each connection of this process is about to have one more holder. Offers that are under way are taken back, since
/// only a connection of one process can be brought up.
pub(crate) fn before() {
    if process::children_leave_pid_namespace() {
        leave_rings();
    }
    arena::before_fork();
    let me = process::kernel_pid();
    each(|conn| {
        conn.local().expose();
        // A thread that receives just now does not hold the private lock yet. The fork does not wait long for it.
        let _ = conn.rx.hold_within(RECEIVER);
        // Another thread may be attaching rings just now, which the child would not have: let it finish, or not begin.
        let held = conn.tx.hold();
        if held.is_ok() && conn.ring_path.stage() == ConnStage::Offered {
            bring_up::withdraw(conn, Reason::Shared);
            // Once only one of the two has it, it is worth another try.
            bring_up::put_off(conn, Reason::Shared);
        }
        conn.identity.holders.add(me | UNBORN);
        drop(held);
    });
}

/// After, in the parent. The child has its own number, which it enters itself. Where there is no child, for want of memory,
/// the marks stay, and those connections count as shared, because the parent does not learn of the failure.
pub(crate) fn in_parent() {
    arena::after_fork();
}

/// After, in the child.
pub(crate) fn in_child() {
    arena::after_fork_in_child();
    let me = process::kernel_pid();
    status::in_child();
    each(|conn| {
        conn.local().in_child();
        conn.identity.holders.rename(process::forker() | UNBORN, me);
        shown::begin_again(conn);
    });
}

/// In a child that was made by a raw system call, which ran no handlers: found out when it changes a descriptor of ours.
pub(crate) fn in_stray_child() {
    // The child does not have connections that its parent makes from here on, and the reverse. (The parent has not noticed the fork, and
    // keeps the pages that both had until now.)
    arena::part();
    hidden::became_child();
    let me = process::kernel_pid();
    status::in_child();
    each(|conn| {
        conn.local().in_child();
        conn.identity.holders.add(me);
        shown::begin_again(conn);
    });
}
