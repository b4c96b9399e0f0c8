//! The registrations of UDP sockets in one epoll set.

use super::mask::{ET, IN, ONESHOT};
use super::tag::NUMBERS;
use super::word::AtomicWord;
use crate::datagram::Poller;
use crate::{sys, table};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::BorrowedFd;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Sockets that one set looks at, at most. Further ones stay on the kernel.
pub(super) const MOST: usize = 8;
/// A mark that stands for nothing told.
const UNTOLD: u64 = u64::MAX;

/// A number for one time that a socket is armed.
fn next_once() -> u32 {
    static LAST: AtomicU32 = AtomicU32::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) % (NUMBERS as u32 - 1) + 1
}

/// A registration of a UDP socket.
#[derive(Debug)]
pub(super) struct RegisteredSocket {
    fd: AtomicI32,
    /// The socket's entry in the table of descriptors. As in the kernel, it is the socket that was registered: it stays when this
    /// descriptor is closed and another one of it is open.
    entry: AtomicU32,
    pub(super) events: AtomicU32,
    pub(super) data: AtomicU64,
    /// With `EPOLLONESHOT`: the number of this time that it is armed, under which the kernel has it ([`Tag::Datagrams`]). 0: the kernel has
    /// the registration as the program made it.
    pub(super) once: AtomicU32,
    /// For sockets with `EPOLLET`: the content of the rings at the last event.
    pub(super) told: AtomicU64,
    /// Its rings are closed for threads that sleep in the set and do not know of it.
    kept_closed: AtomicU32,
}

impl RegisteredSocket {
    const fn new() -> Self {
        Self {
            fd: AtomicI32::new(0),
            entry: AtomicU32::new(0),
            events: AtomicU32::new(0),
            data: AtomicU64::new(0),
            once: AtomicU32::new(0),
            told: AtomicU64::new(0),
            kept_closed: AtomicU32::new(0),
        }
    }

    /// The descriptor under which it was registered.
    pub(super) fn fd(&self) -> c_int {
        self.fd.get()
    }

    fn is(&self, fd: c_int) -> bool {
        self.fd.get() == fd && self.entry.get() == table::get(fd).bits()
    }

    /// Whether the descriptor under which it was registered is still one of the same socket. If not, what the kernel has under that number
    /// is another descriptor's registration.
    pub(super) fn has_its_descriptor(&self) -> bool {
        self.is(self.fd.get())
    }

    /// `None` once it was closed.
    pub(super) fn poller(&self) -> Option<Poller> {
        Poller::registered(self.entry.get())
    }

    /// The mark of a datagram in a ring, if it is to be reported to the program.
    pub(super) fn news(&self) -> Option<u64> {
        let events = self.events.get();
        let mark = self.poller().filter(|_| events & IN != 0)?.mark()?;
        (events & ET == 0 || self.told.get() != mark).then_some(mark)
    }

    /// Whether bytes lie in a ring that may be reported to the program, now or once they are proved to be the sender's.
    pub(super) fn may_have_news(&self) -> bool {
        self.events.get() & IN != 0 && self.poller().is_some_and(Poller::has_bytes)
    }

    /// Closes its rings for threads that sleep in the set already.
    pub(super) fn keep_closed(&self) {
        if self.kept_closed.get() == 0
            && let Some(poller) = self.poller()
            && poller.fall_asleep_unless(|_| false)
        {
            self.kept_closed.put(1);
        }
    }

    /// Those threads sleep no more, or its registration ends.
    pub(super) fn release_closed(&self) {
        if self.kept_closed.get() != 0 {
            self.kept_closed.put(0);
            if let Some(poller) = self.poller() {
                poller.stay_awake();
            }
        }
    }

    /// In a child, whose other threads are no more, and whose sockets count no sleepers.
    pub(super) fn forget_sleepers(&self) {
        self.kept_closed.put(0);
    }

    /// Puts it into the kernel's set in place of the one that is there, under the program's number. `false` if the descriptor under which the
    /// kernel has it is closed.
    pub(super) fn give_back(&self, set: BorrowedFd<'_>) -> bool {
        if !self.has_its_descriptor() {
            return false;
        }
        let events = match self.events.get() {
            // The kernel has no call that makes a registration which was told once. This one may tell of an error.
            0 => ET | ONESHOT,
            events => events,
        };
        let flags = EventFlags::from_bits_retain(events);
        let is_back =
            epoll::modify(set, sys::borrow(self.fd.get()), EventData::new_u64(self.data.get()), flags).is_ok();
        if is_back {
            self.once.put(0);
        }
        is_back
    }

    fn copy(&self, from: &Self) {
        // Found by its number while the rest is not there yet, it would be armed wrongly (`Set::arm_once_again`).
        self.once.put(0);
        self.fd.put(from.fd.get());
        self.entry.put(from.entry.get());
        self.events.put(from.events.get());
        self.data.put(from.data.get());
        self.told.put(from.told.get());
        self.kept_closed.put(from.kept_closed.get());
        self.once.put(from.once.get());
    }
}

/// The datagram sockets of one set. A thread that uses them holds the set's lock.
#[derive(Debug)]
pub(super) struct Datagrams {
    count: AtomicU32,
    /// The place at which the next look for datagrams begins, so that an answer with little room does not always have the same sockets.
    turn: AtomicU32,
    places: [RegisteredSocket; MOST],
}

impl Datagrams {
    pub(super) const fn new() -> Self {
        Self { count: AtomicU32::new(0), turn: AtomicU32::new(0), places: [const { RegisteredSocket::new() }; MOST] }
    }

    /// Whether there are any; to be asked without the lock.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        // EDGE set-datagrams: acquires from `Datagrams::enter`.
        self.count.load(Ordering::Acquire) == 0
    }

    pub(super) fn clear(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    pub(super) fn places(&self) -> &[RegisteredSocket] {
        &self.places[..(self.count.get() as usize).min(MOST)]
    }

    /// The places with their numbers, from the one whose turn it is.
    pub(super) fn in_turn(&self) -> impl Iterator<Item = (usize, &RegisteredSocket)> {
        let places = self.places();
        let first = self.turn.get() as usize % places.len().max(1);
        let (before, from) = places.split_at(first);
        (first..).zip(from).chain((0..).zip(before))
    }

    /// The socket at this place was reported. The next look begins behind it.
    pub(super) fn next_turn_after(&self, at: usize) {
        self.turn.put(at as u32 + 1);
    }

    pub(super) fn pollers(&self) -> impl Iterator<Item = Poller> {
        self.places().iter().filter_map(RegisteredSocket::poller)
    }

    /// The place of a socket that is registered under this descriptor.
    pub(super) fn find(&self, fd: c_int) -> Option<usize> {
        self.places().iter().position(|place| place.is(fd))
    }

    /// The place for one more, once those of closed sockets are given back.
    pub(super) fn free_place(&self) -> Option<usize> {
        for at in (0..self.places().len()).rev() {
            if self.places[at].poller().is_none() {
                self.remove(at);
            }
        }
        Some(self.places().len()).filter(|&at| at < MOST)
    }

    /// A number under which no socket of this set is armed.
    pub(super) fn free_once(&self) -> u32 {
        loop {
            let once = next_once();
            if self.armed(once).is_none() {
                return once;
            }
        }
    }

    /// The place of a socket that is armed under this number.
    pub(super) fn armed(&self, once: u32) -> Option<&RegisteredSocket> {
        self.places().iter().find(|place| place.once.get() == once)
    }

    /// Enters a registration, or changes it. `at` is its place, or a free one, and `once` its number if the kernel has it under that.
    pub(super) fn enter(&self, at: usize, fd: c_int, events: u32, data: u64, once: u32) {
        let place = &self.places[at];
        if at == self.places().len() {
            place.kept_closed.put(0);
        }
        // As in `RegisteredSocket::copy`.
        place.once.put(0);
        place.fd.put(fd);
        place.entry.put(table::get(fd).bits());
        place.events.put(events);
        place.data.put(data);
        place.told.put(UNTOLD);
        place.once.put(once);
        if at == self.places().len() {
            // EDGE set-datagrams: releases the place; acquired in `Datagrams::is_empty`.
            self.count.store(at as u32 + 1, Ordering::Release);
        }
    }

    /// Takes a registration out.
    pub(super) fn remove(&self, at: usize) {
        let last = self.places().len() - 1;
        self.places[at].release_closed();
        self.places[at].copy(&self.places[last]);
        // EDGE set-datagrams: releases the places that were moved.
        self.count.store(last as u32, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_in_use_is_not_given_to_another_socket() {
        let sockets = Datagrams::new();
        let next = next_once();
        for at in 0..MOST {
            sockets.enter(at, -1, ONESHOT | IN, 0, next + 1 + at as u32);
        }
        let once = sockets.free_once();
        assert!(sockets.armed(once).is_none(), "{once} is armed already");
    }
}
