//! Readiness: `poll`, `select`, `epoll`, and what blocking calls sleep on.
//!
//! ```text
//!   many, wait       poll and select; waiting in a set
//!   answer           what the program gets, and nothing else
//!   look, early      the hot ones of a set; sockets that are put in before they are connected
//!   control, lift    what the program puts in and takes out; how the kernel comes to have it
//!   inherit          sets that several processes use
//!   datagrams        UDP sockets in a set
//!   set, waiter      what the program has in an epoll set; sleeping for one connection
//!   list, registered_sockets, shared_flag, thread    what a set consists of; a hidden epoll set per thread
//!   registration     a connection in a set
//!   local_readiness  what this process keeps of a connection
//!   mask, tag, budget, word    what a connection is ready for, event numbers, staying awake
//! ```
//!
//! A module uses only modules on lines below its own, and `mask` uses `word`.
//!
//! Locks, in the order in which they are taken: a set's, then that of the registrations' chains. Neither is held while
//! anything is waited for, nor while a connection's directions are taken other than by trying.

mod answer;
mod budget;
mod control;
mod datagrams;
mod early;
mod inherit;
mod lift;
mod list;
mod local_readiness;
mod look;
mod many;
mod mask;
mod registered_sockets;
mod registration;
mod set;
mod shared_flag;
mod tag;
mod thread;
mod wait;
mod waiter;
mod word;

pub(crate) use early::{connected, copied as copied_early, is_early, not_connected, passed_on, renumbered};
pub(crate) use many::{concerns, poll};
pub(crate) use wait::{Call, wait as wait_in_set};

use crate::conn::{self, Conn, ConnWaiters, Deadline, Interest, WaitOutcome};
use crate::log::log;
use crate::table::{self, DescriptorKind};
use crate::{sys, unseen, watched};
use control::Stays;
use local_readiness::{forbid, local};
use partywall_shm::status::{Reason, Role};
use registration::{LINKED, SetRegistration};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use waiter::arm;
use word::AtomicWord;

/// The implementation of [`ConnWaiters`].
pub(crate) static WAITERS: &dyn ConnWaiters = &Readiness;

struct Readiness;

impl ConnWaiters for Readiness {
    fn wait(&self, conn: &'static Conn, interest: Interest, deadline: Deadline, may_restart: bool) -> WaitOutcome {
        waiter::wait(conn, interest, deadline, may_restart)
    }

    fn brought_up(&self, conn: &'static Conn) -> bool {
        brought_up(conn)
    }

    fn may_come_up(&self, conn: &Conn) -> bool {
        may_come_up(conn)
    }

    fn may_be_renewed(&self, conn: &Conn) -> bool {
        let is_shared = |r: &SetRegistration| set::numbered(r.set.get().wrapping_sub(1)).is_shared();
        local(conn).unknown.load(Ordering::Relaxed) == 0
            && !unseen::was_found()
            && !set::is_held_by_this_thread()
            && !registration::are_held_by_this_thread()
            && registration::search(conn, is_shared).is_none()
    }

    fn renewed(&self, old: &'static Conn, new: &'static Conn) {
        // A thread that has the old one from the table, and has found it there still when it had taken the lock of a set, is through.
        set::settle();
        while let Some((_, number)) = registration::search(old, |_| true) {
            if !set::numbered(number).move_one_of(old, new) {
                // What the set has of it is not known any more.
                forbid(new, Reason::Shared);
                break;
            }
        }
        gone(old);
    }

    fn gone(&self, conn: &'static Conn) {
        gone(conn);
    }
}

/// As a set that is about to sleep.
#[cfg(test)]
pub(crate) fn arm_for_tests(conn: &Conn) {
    arm(conn, Interest(Interest::IN.0 | Interest::OUT.0));
}

/// Calls `what` while this thread holds a set, as below a signal handler.
#[cfg(test)]
pub(crate) fn hold_set_for_tests(fd: c_int, what: impl FnOnce()) {
    let set = set::of(fd).unwrap();
    let held = set.hold().unwrap();
    what();
    drop(held);
}

/// Whether a thread sleeps on its ring outside sets, or is about to.
#[cfg(test)]
pub(crate) fn is_waited_for(conn: &Conn) -> bool {
    local(conn).is_hidden()
}

/// As if it were in an epoll set that we do not know.
#[cfg(test)]
pub(crate) fn make_unknown(conn: &Conn) {
    local(conn).unknown.store(1, Ordering::Relaxed);
}

/// The kernel disarms a one-shot registration of the program's own when it reports it, and does not say so. To change such a
/// registration into ours could report the same once more.
fn may_have_fired(r: &SetRegistration) -> bool {
    !r.is(registration::RING) && r.events.get() & mask::ONESHOT != 0
}

/// See [`ConnWaiters::may_come_up`].
fn may_come_up(conn: &Conn) -> bool {
    registration::search(conn, may_have_fired).is_none()
}

/// See [`ConnWaiters::brought_up`].
fn brought_up(conn: &'static Conn) -> bool {
    let local = local(conn);
    local.leave_hidden();
    if local.unknown.load(Ordering::Relaxed) != 0 || !is_seen(conn) || !may_come_up(conn) {
        return false;
    }
    let plain = |r: &SetRegistration| r.state.load(Ordering::Relaxed) & LINKED == 0;
    while let Some((_, number)) = registration::search(conn, plain) {
        let set = set::numbered(number);
        if set.is_shared() || !set.lift_all_of(conn) {
            return false;
        }
    }
    true
}

/// The program has set `SO_RCVLOWAT`. As in the kernel, readable bytes are an edge again, even if they were reported before. For bytes in
/// its own socket, the kernel reports that itself.
pub(crate) fn low_water_was_set(conn: &'static Conn) {
    if conn.look().readable() != conn::RingReadiness::Yes {
        return;
    }
    let is_to_tell = |r: &SetRegistration| r.is(registration::RING) && r.edge.get() & mask::IN != mask::IN;
    while let Some((number, set)) = registration::search(conn, is_to_tell) {
        if !set::numbered(set).tell_edge(number, conn, mask::IN) {
            break;
        }
    }
}

/// See [`ConnWaiters::gone`].
fn gone(conn: &'static Conn) {
    drop_registrations(conn, set::Set::forget_one_of);
    local(conn).reset();
}

/// The kernel has disconnected a connection's socket, which stays open: its registrations are the program's own from here on.
pub(crate) fn disconnected(conn: &'static Conn) {
    drop_registrations(conn, set::Set::release_one_of);
}

/// `drop_one` takes one of a connection's registrations out of a set, or returns `false`.
fn drop_registrations(conn: &'static Conn, drop_one: fn(&set::Set, &Conn) -> bool) {
    while let Some((_, number)) = registration::search(conn, |_| true) {
        if !drop_one(set::numbered(number), conn) {
            break;
        }
    }
}

/// A descriptor is about to be closed, or replaced.
pub(crate) fn closed(fd: c_int) {
    if let Some(set) = set::of(fd) {
        set.leave_descriptor(fd);
    }
}

/// Two descriptors are one now: `to` is a copy of `from`.
pub(crate) fn duplicated(from: c_int, to: c_int) {
    if let Some(set) = set::of(from) {
        set.add_descriptor(to);
    }
}

/// The program has made an epoll set.
pub(crate) fn made_set(fd: c_int) {
    if fd >= 0 {
        set::enter(fd);
    }
}

/// `epoll_ctl`; `event` is what the program wants to hear and under which number, `real` the call as it made it.
pub(crate) fn control(
    set_fd: c_int,
    operation: c_int,
    fd: c_int,
    event: Option<(u32, u64)>,
    real: impl Fn() -> c_int + Copy,
) -> c_int {
    let set = set::of(set_fd);
    // Before the look at the table: a socket that is connected has an entry there before its early registrations are taken over.
    let is_early = early::concerns(operation, fd);
    let conn = Conn::of(fd);
    if let Some(conn) = conn {
        conn.wait_until_complete();
    }
    if is_early {
        match (set, conn) {
            // Another thread has connected it a moment ago.
            (_, Some(conn)) => early::take_over(fd, conn),
            (Some(set), None) => match early::control(set, operation, fd, event, real) {
                Some(result) => return result,
                None => return control(set_fd, operation, fd, event, real),
            },
            (None, None) => {}
        }
    }
    let (Some(set), Some(conn)) = (set, conn) else {
        if conn.is_none()
            && let (Some(set), Some((events, data))) = (set, event)
            && let Some(result) = control_once(set, operation, fd, events, data)
        {
            return result;
        }
        let result = real();
        if result == 0
            && conn.is_none()
            && let Some(set) = set
        {
            match operation {
                libc::EPOLL_CTL_ADD => _ = set.strangers.fetch_add(1, Ordering::Relaxed),
                libc::EPOLL_CTL_DEL => set.less_strangers(),
                _ => {}
            }
        }
        if result == 0 && crate::datagram::is(fd) {
            match set {
                Some(set) => {
                    set.datagrams_changed(operation, fd, event);
                    if set.nested.load(Ordering::Relaxed) != 0 {
                        set.leave();
                    }
                }
                None => crate::datagram::give_up(fd),
            }
        }
        if result == 0 && operation == libc::EPOLL_CTL_ADD {
            match conn {
                Some(conn) => forbid(conn, Reason::Shared),
                None => match set::of(fd) {
                    Some(inner) => inner.nest(),
                    None => watched::watch(fd),
                },
            }
        }
        return result;
    };
    let kernel = || if real() == 0 { Ok(()) } else { Err(sys::errno()) };
    if operation != libc::EPOLL_CTL_DEL {
        inherit::check(set);
    }
    match set.control(operation, conn, fd, event, kernel) {
        // Another connection stands for the descriptor since a moment ago.
        Ok(Stays::Replaced) => control(set_fd, operation, fd, event, real),
        Ok(Stays::Either) => 0,
        Ok(Stays::OnTcp) => {
            forbid(conn, Reason::Shared);
            0
        }
        Err(error) => {
            sys::set_errno(error);
            -1
        }
    }
}

/// Registers a UDP socket with `EPOLLONESHOT`, or arms it again. `None`: the kernel is to have the call as the program made it.
fn control_once(set: &'static set::Set, operation: c_int, fd: c_int, events: u32, data: u64) -> Option<c_int> {
    if events & mask::ONESHOT == 0 || operation == libc::EPOLL_CTL_DEL || !crate::datagram::is(fd) {
        return None;
    }
    inherit::check(set);
    if let Err(error) = set.control_once(operation, fd, events, data)? {
        sys::set_errno(error);
        return Some(-1);
    }
    if operation == libc::EPOLL_CTL_ADD {
        set.strangers.fetch_add(1, Ordering::Relaxed);
    }
    Some(0)
}

/// There is a ring that we cannot read: every connection goes to TCP, every UDP socket to the kernel, and they stay there.
#[cold]
pub(crate) fn found_unseen(what: &str) {
    if !unseen::note() {
        return;
    }
    log!("{what}: all connections stay on TCP");
    for (fd, entry) in table::entries(0, u32::MAX) {
        match entry.kind() {
            DescriptorKind::Connection => {
                if let Some(conn) = Conn::at(entry.index()) {
                    forbid(conn, Reason::RawCalls);
                }
            }
            DescriptorKind::Datagram => crate::datagram::give_up(fd),
            _ => {}
        }
    }
}

/// A connection of ours goes to a ring only if this says yes: a thread that waits for it can be woken.
fn is_seen(conn: &Conn) -> bool {
    // The accepting side has asked a moment ago; on the connecting side the offer may be old.
    !unseen::was_found() && (conn.role() != Role::Connecting || !unseen::may_be())
}

/// A descriptor is about to be used, or waited for, past our functions. `takes_events`: if it is a set, the kernel tells the program
/// itself what is in it.
pub(crate) fn used_past_us(fd: c_int, takes_events: bool) {
    match table::get(fd).kind() {
        DescriptorKind::Connection => {
            if let Some(conn) = Conn::of(fd) {
                forbid(conn, Reason::RawCalls);
            }
        }
        DescriptorKind::Datagram => crate::datagram::give_up(fd),
        DescriptorKind::Epoll if takes_events => hand_over(fd),
        DescriptorKind::Epoll => watch_set(fd),
        DescriptorKind::Stranger | DescriptorKind::Listener | DescriptorKind::Hidden | DescriptorKind::Ring => {}
    }
}

/// The kernel is to judge what is done with a descriptor in a set: what the program has taken out is taken out there, too.
pub(crate) fn settle_removed(set_fd: c_int, fd: c_int) {
    if let (Some(set), Some(conn)) = (set::of(set_fd), Conn::of(fd)) {
        set.settle_removed(conn, fd);
    }
}

/// Whether a descriptor is an epoll set that we know; it is watched from outside from here on.
pub(crate) fn watch_set(fd: c_int) {
    if table::get(fd).kind() == DescriptorKind::Epoll
        && let Some(set) = set::of(fd)
    {
        set.nest();
        set.freshen();
    }
}

/// A descriptor is about to reach a program that knows nothing of us, by `exec` or over a socket. If it is a set, the kernel
/// must tell all there is to tell from here on.
pub(crate) fn hand_over(fd: c_int) {
    if let Some(set) = set::of(fd) {
        inherit::lose(set);
    }
}

/// This process is about to fork.
pub(crate) fn before_fork() {
    set::before_fork();
    registration::before_fork();
}

/// It has forked, and this is the parent.
pub(crate) fn forked() {
    registration::forked();
    set::forked();
    shared_flag::forked();
}

/// This is the child.
pub(crate) fn after_fork() {
    registration::after_fork();
    set::after_fork();
}
