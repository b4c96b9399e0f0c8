//! UDP sockets in an epoll set.
//!
//! The kernel's registration stays the program's own. A thread that sleeps in the set closes the rings first, and later datagrams come by
//! the kernel (protocol U6). A thread that is awake looks at the rings as well.

use super::mask::{ET, IN, ONESHOT, OUT};
use super::registered_sockets::MOST;
use super::set::Set;
use super::tag::Tag;
use super::word::AtomicWord;
use crate::datagram::{self, Poller};
use std::ffi::c_int;
use std::time::Duration;

/// Those whose rings are closed for the time of a sleep.
#[derive(Debug)]
pub(super) struct Asleep {
    pollers: [Option<Poller>; MOST],
}

impl Asleep {
    /// How long the sleep may last; `None`: until something comes by the kernel.
    pub(super) fn longest(&self) -> Option<Duration> {
        self.pollers.iter().flatten().filter_map(|poller| poller.longest_sleep()).min()
    }

    pub(super) fn wake_up(self, slept: Duration) {
        self.pollers.into_iter().flatten().for_each(|poller| poller.wake_up(slept));
    }
}

impl Set {
    /// The program has registered a UDP socket, changed that, or taken it out; the kernel has agreed.
    pub(super) fn datagrams_changed(&self, operation: c_int, fd: c_int, event: Option<(u32, u64)>) {
        // Not under the lock: this may ask the broker.
        datagram::join_group(fd);
        let Some(_held) = self.hold() else { return datagram::give_up(fd) };
        let sockets = &self.datagrams;
        let known = sockets.find(fd);
        let (Some((events, data)), true) = (event, operation != libc::EPOLL_CTL_DEL) else {
            if let Some(at) = known {
                sockets.remove(at);
            }
            return;
        };
        // The kernel reports for `EPOLLONESHOT`, and to a thread that watches the set from outside. `EPOLLEXCLUSIVE` concerns sleepers
        // only, and no thread sleeps while rings are open.
        let shared = self.is_shared() || self.nested.get() != 0 || self.lost.get() != 0;
        if shared || events & ONESHOT != 0 || Tag::is_ours(data) {
            datagram::give_up(fd);
        }
        let Some(at) = known.or_else(|| sockets.free_place()) else { return datagram::give_up(fd) };
        if !datagram::entered_set(fd) {
            // The rings are empty, and stay so.
            if known.is_some() {
                sockets.remove(at);
            }
            return;
        }
        sockets.enter(at, fd, events, data);
    }

    /// The set is watched from outside, by a thread that only the kernel can notify. Datagrams in rings are still reported.
    pub(super) fn give_datagrams_up(&self) {
        if !self.datagrams.is_empty()
            && let Some(_held) = self.hold()
        {
            self.datagrams.pollers().for_each(Poller::give_up);
        }
    }

    /// Whether something lies in a ring that was not told yet.
    pub(super) fn has_waiting_datagrams(&self) -> bool {
        !self.datagrams.is_empty()
            && self.hold().is_some_and(|_held| self.datagrams.places().iter().any(|place| place.news().is_some()))
    }

    /// Tells of those with something in a ring that are not among what `is_reported` knows of; returns how many.
    pub(super) fn scan_datagrams(
        &self,
        max: usize,
        is_reported: impl Fn(u64) -> bool,
        mut tell: impl FnMut(u32, u64),
    ) -> usize {
        if self.datagrams.is_empty() {
            return 0;
        }
        let Some(_held) = self.hold() else { return 0 };
        let mut told = 0;
        for place in self.datagrams.places() {
            let (events, data) = (place.events.get(), place.data.get());
            if told == max || is_reported(data) {
                continue;
            }
            let Some(mark) = place.news() else { continue };
            place.told.put(mark);
            if events & ONESHOT != 0 {
                place.events.put(0);
            }
            tell(events & IN, data);
            told += 1;
        }
        told
    }

    /// Whether the kernel must be asked before each answer, since it alone knows of room.
    pub(super) fn awaits_room_for_datagrams(&self) -> bool {
        !self.datagrams.is_empty()
            && self
                .hold()
                .is_some_and(|_held| self.datagrams.places().iter().any(|place| place.events.get() & OUT != 0))
    }

    /// Whether it is worth it to stay awake for them, and whether they come from another core.
    pub(super) fn hot_datagrams(&self) -> (bool, bool) {
        if self.datagrams.is_empty() {
            return (false, false);
        }
        let Some(_held) = self.hold() else { return (false, false) };
        let any = self.datagrams.pollers().any(Poller::is_open);
        (any, any && self.datagrams.pollers().any(Poller::is_hot))
    }

    /// Publishes to senders for which sockets the kernel's queue is empty (protocol U7).
    pub(super) fn settle_datagrams(&self) {
        if !self.datagrams.is_empty()
            && let Some(_held) = self.hold()
        {
            self.datagrams.pollers().for_each(Poller::settle);
        }
    }

    /// Closes their rings. `None`: something lies in one, and nothing is closed.
    pub(super) fn close_datagrams(&self) -> Option<Asleep> {
        let mut asleep = Asleep { pollers: [None; MOST] };
        if self.datagrams.is_empty() {
            return Some(asleep);
        }
        let Some(_held) = self.hold() else { return Some(asleep) };
        for (place, closed) in self.datagrams.places().iter().zip(&mut asleep.pollers) {
            let Some(poller) = place.poller() else { continue };
            let (events, told) = (place.events.get(), place.told.get());
            // An edge that was reported is no reason to stay awake.
            if poller.fall_asleep_unless(|mark| events & IN != 0 && (events & ET == 0 || mark != told)) {
                *closed = Some(poller);
            } else {
                asleep.pollers.into_iter().flatten().for_each(Poller::stay_awake);
                return None;
            }
        }
        Some(asleep)
    }
}
