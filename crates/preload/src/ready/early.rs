//! Sockets that a program enters into an epoll set before it connects them.
//!
//! ```text
//!   epoll_ctl(ADD)     connect              the ring comes
//!        |                |                       |
//!     an early         the connection's        lifted: ours,
//!   registration  ->  plain registration  ->   under a tag
//! ```
//!
//! The kernel's set has the program's own events and number in the first two steps, so the program waits as it would without this
//! library. The registration is kept here, because the kernel does not report it.
//!
//! `epoll_ctl` and `connect` may run at the same time. `connect` enters the connection into the table of descriptors and then takes over
//! the registrations in the descriptor's chain; `epoll_ctl` enters its registration into the chain and then looks at the table. Both use
//! the lock of
//! chains, so one of the two sees the change of the other.

use super::inherit;
use super::local_readiness;
use super::mask::ONESHOT;
use super::registration as reg;
use super::set::{self, Set};
use super::tag::Tag;
use super::word::AtomicWord;
use crate::conn::Conn;
use crate::table::{self, Entry};
use crate::{process, unconnected, watched};
use partywall_shm::status::Reason;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// Whether a change of a set is about a socket that may become a connection.
#[inline]
pub(super) fn concerns(operation: c_int, fd: c_int) -> bool {
    reg::has_early(fd) || operation == libc::EPOLL_CTL_ADD && unconnected::is_fresh(fd) && table::get(fd) == Entry::NONE
}

/// `epoll_ctl` for such a socket. `real` is the kernel's answer to the program's own arguments. `None`: nothing was done, since another thread
/// has made the socket a connection.
pub(super) fn control(
    set: &'static Set,
    operation: c_int,
    fd: c_int,
    event: Option<(u32, u64)>,
    real: impl Fn() -> c_int,
) -> Option<c_int> {
    if operation != libc::EPOLL_CTL_DEL {
        inherit::check(set);
    }
    let Some(held) = set.hold() else {
        // In a signal handler that has interrupted a holder: what the kernel has is not known any more.
        let _ = forget(fd);
        watched::watch(fd);
        let result = real();
        match operation {
            libc::EPOLL_CTL_ADD if result == 0 => {
                set.strangers.fetch_add(1, Ordering::Relaxed);
            }
            libc::EPOLL_CTL_DEL if result == 0 => set.less_strangers(),
            _ => {}
        }
        return Some(result);
    };
    let found = reg::find_early(fd, set.number());
    if found == 0 && operation != libc::EPOLL_CTL_ADD && Conn::of(fd).is_some() {
        // Between the caller's look and this lock it was connected, and the registration was taken over.
        return None;
    }
    let result = real();
    if result != 0 {
        return Some(result);
    }
    match (operation, event) {
        (libc::EPOLL_CTL_DEL, _) => {
            set.less_strangers();
            if found != 0 {
                set.forget(found);
            }
        }
        (_, Some((events, data))) => {
            if operation == libc::EPOLL_CTL_ADD {
                set.strangers.fetch_add(1, Ordering::Relaxed);
            }
            let is_known = !set.is_shared() && !Tag::is_ours(data);
            // A registration of a number that was closed past us is replaced.
            let is_kept = is_known && (found != 0 || operation == libc::EPOLL_CTL_ADD);
            if !is_kept || !set.remember_early(found, fd, events, data) {
                if found != 0 {
                    set.forget(found);
                }
                watched::watch(fd);
            }
        }
        _ => {}
    }
    drop(held);
    if let Some(conn) = Conn::of(fd) {
        // The socket was connected in the meantime.
        if watched::was_watched(fd) {
            local_readiness::forbid(conn, Reason::Shared);
        }
        take_over(fd, conn);
    }
    Some(result)
}

impl Set {
    /// Enters or changes an early registration. The lock is held. `false` if there is no place for it.
    fn remember_early(&self, found: u32, fd: c_int, events: u32, data: u64) -> bool {
        let number = match found {
            0 => match reg::allocate_early(fd, self.number()) {
                Some(number) => {
                    self.all.insert(number);
                    number
                }
                None => return false,
            },
            number => number,
        };
        let r = reg::get(number);
        r.events.put(events);
        r.data.put(data);
        true
    }

    /// One descriptor that is no connection of ours has been taken out.
    pub(super) fn less_strangers(&self) {
        let less = |n: u32| n.checked_sub(1);
        let _ = self.strangers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Makes an early registration that of a connection. `false`: the connection must stay on TCP.
    fn take_over(&self, number: u32, fd: c_int, conn: &'static Conn) -> bool {
        let is_shared = self.is_shared();
        let Some(_held) = self.hold() else { return false };
        if !reg::take_over(number, fd, self.number(), conn) {
            // Another thread has taken it, or has taken it out.
            return true;
        }
        self.less_strangers();
        let is_one_shot = reg::get(number).events.get() & ONESHOT != 0;
        // The connection is up by now. Then it is unknown whether this thread or the one that lifts all registrations came first.
        !is_shared && (!conn.is_up() || !is_one_shot && self.lift(number))
    }
}

/// A socket has become a connection: what sets have of it is the connection's from here on.
pub(super) fn take_over(fd: c_int, conn: &'static Conn) {
    while let Some((number, set)) = reg::first_early(fd) {
        if !set::numbered(set).take_over(number, fd, conn) {
            local_readiness::forbid(conn, Reason::Shared);
            if !forget(fd) {
                watched::watch(fd);
                return;
            }
        }
    }
}

/// Forgets what sets have of a socket; the kernel has it still. `false`: a signal handler has interrupted a holder of one of the sets, and what
/// that has stays.
#[must_use]
fn forget(fd: c_int) -> bool {
    while let Some((number, set)) = reg::first_early(fd) {
        let set = set::numbered(set);
        // In a signal handler that has interrupted a holder, the remaining entries have no effect: the kernel refuses to change an entry
        // that it does not have.
        let Some(_held) = set.hold() else { return false };
        if reg::is_early(number, fd, set.number()) {
            set.forget(number);
        }
    }
    true
}

/// The program has connected a socket: to a peer of ours if it is a connection by now.
pub(crate) fn connected(fd: c_int) {
    match Conn::of(fd) {
        Some(conn) => take_over(fd, conn),
        None => {
            unconnected::goes_elsewhere(fd);
            if reg::has_early(fd) {
                not_connected(fd);
            }
        }
    }
}

/// It could not be connected, and is no connection any more. Should it be connected again, what the sets have is not followed.
pub(crate) fn not_connected(fd: c_int) {
    watched::watch(fd);
    let _ = forget(fd);
}

/// Whether sets have a socket that is no connection yet.
#[inline]
pub(crate) fn is_early(fd: c_int) -> bool {
    reg::has_early(fd)
}

/// A number is about to be closed, or stands for something new.
#[inline]
pub(crate) fn renumbered(fd: c_int) {
    if (reg::has_early(fd) || watched::was_watched(fd)) && !process::is_visitor() {
        watched::unwatch(fd);
        let _ = forget(fd);
    }
}

/// `copy` is a copy of `fd`, which sets do not know. Neither number would see a ring that the other gets, so a socket that is not
/// connected yet stays on TCP by both.
pub(crate) fn copied(fd: c_int, copy: c_int) {
    let is_fresh = unconnected::is_fresh(fd);
    if is_fresh {
        watched::watch(fd);
    }
    if is_fresh || reg::has_early(fd) || watched::was_watched(fd) {
        watched::watch(copy);
    }
}

/// Another program gets this socket, and may connect it or wait for it.
pub(crate) fn passed_on(fd: c_int) {
    if unconnected::is_fresh(fd) {
        watched::watch(fd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::testing::{EpollSet, close};
    use crate::conn::Pair;
    use crate::ready::control::Stays;
    use rustix::event::epoll::{CreateFlags, create};
    use std::os::fd::IntoRawFd;
    use std::sync::atomic::AtomicI32;

    static SET: AtomicI32 = AtomicI32::new(-1);
    static SOCKET: AtomicI32 = AtomicI32::new(-1);
    /// How many strangers the set has had after the program's changes.
    static STRANGERS: [AtomicI32; 2] = [const { AtomicI32::new(-1) }; 2];

    extern "C" fn handler(_: c_int) {
        let fd = SOCKET.load(Ordering::Relaxed);
        let (Some(set), Some(conn)) = (set::of(SET.load(Ordering::Relaxed)), Conn::of(fd)) else { return };
        take_over(fd, conn);
        for (operation, strangers) in [libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_DEL].into_iter().zip(&STRANGERS) {
            control(set, operation, fd, None, || 0);
            strangers.store(set.strangers.load(Ordering::Relaxed).cast_signed(), Ordering::Relaxed);
        }
    }

    #[test]
    fn connect_in_handler_above_holder_of_set_returns() {
        let fd = create(CreateFlags::CLOEXEC).unwrap().into_raw_fd();
        set::enter(fd);
        let set = set::of(fd).unwrap();
        let pair = Pair::candidates(64 << 10);
        SET.store(fd, Ordering::Relaxed);
        SOCKET.store(pair.a, Ordering::Relaxed);
        let held = set.hold();
        assert!(set.remember_early(0, pair.a, libc::EPOLLIN as u32, 7));
        #[expect(unsafe_code, reason = "a signal handler of this test")]
        // SAFETY: the handler takes locks that it may find taken, and stores numbers; nothing else here uses the signal.
        unsafe {
            libc::signal(libc::SIGPWR, handler as *const () as libc::sighandler_t);
            libc::raise(libc::SIGPWR);
        }
        assert!(watched::was_watched(pair.a), "it stays on TCP");
        assert_eq!(STRANGERS.each_ref().map(|n| n.load(Ordering::Relaxed)), [1, 0]);
        drop(held);
        drop(pair);
        close(fd);
    }

    #[test]
    fn change_after_registration_was_taken_over_does_nothing() {
        let of_program = EpollSet::new();
        let pair = Pair::candidates(64 << 10);
        of_program.add(pair.a, libc::EPOLLIN as u32, 7);
        let set = set::of(of_program.0).unwrap();
        let change = Some((libc::EPOLLIN as u32, 8));
        let kernel = || unreachable!("the change is the connection's");
        assert_eq!(control(set, libc::EPOLL_CTL_MOD, pair.a, change, kernel), None);
        assert!(!watched::was_watched(pair.a));
    }

    #[test]
    fn change_while_the_ring_comes_up_keeps_the_ring() {
        let of_program = EpollSet::new();
        let pair = Pair::candidates(64 << 10);
        of_program.add(pair.a, libc::EPOLLIN as u32, 7);
        let set = set::of(of_program.0).unwrap();
        let change = Some((libc::EPOLLIN as u32, 8));
        let stays = std::thread::scope(|scope| {
            let kernel = || {
                scope.spawn(|| pair.bring_up());
                while !pair.conn_a().is_up() {
                    std::thread::yield_now();
                }
                Ok(())
            };
            set.control(libc::EPOLL_CTL_MOD, pair.conn_a(), pair.a, change, kernel)
        });
        assert_eq!(stays, Ok(Stays::Either));
        assert!(pair.is_on_ring());
    }
}
