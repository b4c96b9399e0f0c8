//! The registrations of UDP sockets in one epoll set.

use super::mask::{ET, IN};
use super::word::AtomicWord;
use crate::datagram::Poller;
use crate::table;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Sockets that one set looks at, at most. Further ones stay on the kernel.
pub(super) const MOST: usize = 8;
/// A mark that stands for nothing told.
const UNTOLD: u64 = u64::MAX;

/// A registration of a UDP socket.
#[derive(Debug)]
pub(super) struct RegisteredSocket {
    fd: AtomicI32,
    /// The socket's entry in the table of descriptors. As in the kernel, it is the socket that was registered: it stays when this
    /// descriptor is closed and another one of it is open.
    entry: AtomicU32,
    pub(super) events: AtomicU32,
    pub(super) data: AtomicU64,
    /// For sockets with `EPOLLET`: the content of the rings at the last event.
    pub(super) told: AtomicU64,
}

impl RegisteredSocket {
    const fn new() -> Self {
        Self {
            fd: AtomicI32::new(0),
            entry: AtomicU32::new(0),
            events: AtomicU32::new(0),
            data: AtomicU64::new(0),
            told: AtomicU64::new(0),
        }
    }

    fn is(&self, fd: c_int) -> bool {
        self.fd.get() == fd && self.entry.get() == table::get(fd).bits()
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

    fn copy(&self, from: &Self) {
        self.fd.put(from.fd.get());
        self.entry.put(from.entry.get());
        self.events.put(from.events.get());
        self.data.put(from.data.get());
        self.told.put(from.told.get());
    }
}

/// The datagram sockets of one set. A thread that uses them holds the set's lock.
#[derive(Debug)]
pub(super) struct Datagrams {
    count: AtomicU32,
    places: [RegisteredSocket; MOST],
}

impl Datagrams {
    pub(super) const fn new() -> Self {
        Self { count: AtomicU32::new(0), places: [const { RegisteredSocket::new() }; MOST] }
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

    /// Enters a registration, or changes it. `at` is its place, or a free one.
    pub(super) fn enter(&self, at: usize, fd: c_int, events: u32, data: u64) {
        let place = &self.places[at];
        place.fd.put(fd);
        place.entry.put(table::get(fd).bits());
        place.events.put(events);
        place.data.put(data);
        place.told.put(UNTOLD);
        if at == self.places().len() {
            // EDGE set-datagrams: releases the place; acquired in `Datagrams::is_empty`.
            self.count.store(at as u32 + 1, Ordering::Release);
        }
    }

    /// Takes a registration out.
    pub(super) fn remove(&self, at: usize) {
        let last = self.places().len() - 1;
        self.places[at].copy(&self.places[last]);
        // EDGE set-datagrams: releases the places that were moved.
        self.count.store(last as u32, Ordering::Release);
    }
}
