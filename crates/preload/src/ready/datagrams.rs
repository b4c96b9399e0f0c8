//! UDP sockets in an epoll set.
//!
//! The kernel's registration stays the program's own. A thread that sleeps in the set closes the rings first, and later datagrams come by
//! the kernel (protocol U6). A thread that is awake looks at the rings as well.
//!
//! With `EPOLLONESHOT` the kernel has the registration under a number of ours, a new one each time that the program arms it. The thread that finds
//! something first, in the ring or under that number, tells the program, and what is found later under the same number is dropped: when the
//! program arms the socket again, the kernel looks again whether it is ready.

use super::mask::{ET, IN, ONESHOT, OUT};
use super::registered_sockets::{MOST, RegisteredSocket};
use super::set::Set;
use super::tag::Tag;
use super::word::AtomicWord;
use crate::datagram::{self, Poller};
use crate::sys;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
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
    /// The program registers a UDP socket with `EPOLLONESHOT`, or arms it again. `None`: the kernel is to have that as the program made it.
    pub(super) fn control_once(
        &self,
        operation: c_int,
        fd: c_int,
        events: u32,
        data: u64,
    ) -> Option<Result<(), Errno>> {
        // Not under the lock: this may ask the broker.
        datagram::join_group(fd);
        let _held = self.hold()?;
        // A child that has the set does not know what is registered from here on, so the kernel is to have that as the program made it.
        if self.forks_since() || self.leaves_datagrams_to_kernel() || Tag::is_ours(data) || !datagram::entered_set(fd) {
            return None;
        }
        let known = self.datagrams.find(fd);
        let at = known.or_else(|| self.datagrams.free_place())?;
        let once = self.datagrams.free_once();
        self.tagged.put(1);
        let (socket, tag) = (sys::borrow(fd), EventData::new_u64(Tag::Datagrams(once).data()));
        let flags = EventFlags::from_bits_retain(events);
        let changed = match operation {
            libc::EPOLL_CTL_ADD => epoll::add(self.borrow(), socket, tag, flags),
            libc::EPOLL_CTL_MOD => epoll::modify(self.borrow(), socket, tag, flags),
            _ => return None,
        };
        if changed.is_ok() {
            // What the kernel has for it already waits for the lock.
            self.datagrams.enter(at, fd, events, data, once);
            self.tell_sleepers_of(at, known.is_none());
        }
        Some(changed)
    }

    /// Whether the kernel alone tells of datagrams in this set.
    fn leaves_datagrams_to_kernel(&self) -> bool {
        self.is_shared() || self.nested.get() != 0 || self.lost.get() != 0
    }

    /// A registration was entered. A thread that sleeps has not closed the rings of a new one, and does not know what lies in those of one
    /// that was changed. The bell wakes one of several sleepers, or none if another thread takes it first. So the rings of a new one stay
    /// closed until no thread sleeps that may not know of it.
    fn tell_sleepers_of(&self, at: usize, is_new: bool) {
        let Some(place) = self.datagrams.places().get(at) else { return };
        if is_new {
            // Before the look at the sleepers: either this thread sees the last one, or that sees this (`Set::sleeper_woke`).
            self.kept_closed.store(1, Ordering::SeqCst);
        }
        if self.sleepers.load(Ordering::SeqCst) == 0 || self.is_shared() {
            return;
        }
        if is_new {
            place.keep_closed();
        }
        if is_new || place.may_have_news() {
            self.ring();
        }
    }

    /// A thread sleeps no more. If it was the last one, rings are opened that were closed for those that slept.
    pub(super) fn sleeper_woke(&self) {
        if self.sleepers.fetch_sub(1, Ordering::SeqCst) != 1 || self.kept_closed.load(Ordering::SeqCst) == 0 {
            return;
        }
        let errno = sys::errno_number();
        let Some(_held) = self.hold() else { return };
        if self.sleepers.load(Ordering::SeqCst) == 0 {
            self.kept_closed.store(0, Ordering::SeqCst);
            self.datagrams.places().iter().for_each(RegisteredSocket::release_closed);
        }
        sys::restore_errno(errno);
    }

    /// Before a fork, with the lock held: the kernel gets all registrations with `EPOLLONESHOT` as the program made them. What the child would
    /// give back later would be what its parent had now, in place of what that has then.
    pub(super) fn give_once_back(&self) {
        for place in self.datagrams.places().iter().filter(|place| place.once.get() != 0) {
            place.give_back(self.borrow());
        }
    }

    /// A child may have the set: rings of sockets with `EPOLLONESHOT` are not used any more, since the kernel has those as the program made them,
    /// and the two would tell of the same twice.
    pub(super) fn give_once_up(&self) {
        if !self.datagrams.is_empty()
            && let Some(_held) = self.hold()
        {
            for place in self.datagrams.places().iter().filter(|place| place.events.get() & ONESHOT != 0) {
                if let Some(poller) = place.poller() {
                    poller.give_up();
                }
            }
        }
    }

    /// The kernel has told of a socket that was armed under this number. Returns the program's event, unless the program was told already.
    pub(super) fn claim_once(&self, once: u32, events: u32) -> Option<(u32, u64)> {
        let Some(_held) = self.hold() else {
            self.arm_once_again(once);
            return None;
        };
        let place = self.datagrams.armed(once)?;
        let wanted = place.events.get();
        if wanted == 0 {
            return None;
        }
        let by_ring = if place.news().is_some() { wanted & IN } else { 0 };
        place.events.put(0);
        Some((events | by_ring, place.data.get()))
    }

    /// The kernel has told of it to a call that cannot tell the program: it is to tell again. A handler that has interrupted a holder of the
    /// set comes here without the lock.
    #[cold]
    pub(super) fn arm_once_again(&self, once: u32) {
        let is_armed = |place: &&RegisteredSocket| place.events.get() != 0 && place.has_its_descriptor();
        if let Some(place) = self.datagrams.armed(once).filter(is_armed) {
            let tag = EventData::new_u64(Tag::Datagrams(once).data());
            let flags = EventFlags::from_bits_retain(place.events.get());
            let _ = epoll::modify(self.borrow(), sys::borrow(place.fd()), tag, flags);
        }
    }

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
        // The kernel reports to a thread that watches the set from outside, and for `EPOLLONESHOT` where it has that as the program made it. `EPOLLEXCLUSIVE` concerns sleepers
        // only, and no thread sleeps while rings are open.
        if self.leaves_datagrams_to_kernel() || events & ONESHOT != 0 || Tag::is_ours(data) {
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
        sockets.enter(at, fd, events, data, 0);
        self.tell_sleepers_of(at, known.is_none());
    }

    /// The set is watched from outside, by a thread that only the kernel can notify. Datagrams in rings are still reported.
    pub(super) fn give_datagrams_up(&self) {
        if !self.datagrams.is_empty()
            && let Some(_held) = self.hold()
        {
            for place in self.datagrams.places() {
                if let Some(poller) = place.poller() {
                    poller.give_up();
                }
                if place.once.get() != 0 {
                    // The old number is not used any more.
                    place.give_back(self.borrow());
                }
            }
        }
    }

    /// Whether something lies in a ring that was not told yet.
    pub(super) fn has_waiting_datagrams(&self) -> bool {
        !self.datagrams.is_empty()
            && self.hold().is_some_and(|_held| self.datagrams.places().iter().any(|place| place.news().is_some()))
    }

    /// Tells of those with something in a ring. `merge` adds events to an entry that the answer already has under the same number, and returns
    /// whether there is one. `tell` makes a new entry. Returns how many new entries there are, at most `max`.
    pub(super) fn scan_datagrams(
        &self,
        max: usize,
        merge: impl Fn(u32, u64) -> bool,
        mut tell: impl FnMut(u32, u64),
    ) -> usize {
        if self.datagrams.is_empty() {
            return 0;
        }
        let Some(_held) = self.hold() else { return 0 };
        let mut told = 0;
        for (at, place) in self.datagrams.in_turn() {
            let Some(mark) = place.news() else { continue };
            let (events, data) = (place.events.get(), place.data.get());
            if !merge(events & IN, data) {
                if told == max {
                    continue;
                }
                tell(events & IN, data);
                told += 1;
                self.datagrams.next_turn_after(at);
            }
            place.told.put(mark);
            if events & ONESHOT != 0 {
                place.events.put(0);
                if place.once.get() == 0 {
                    // The kernel would tell of it once more.
                    place.give_back(self.borrow());
                }
            }
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

    /// Looks after what its sockets have sent by rings, from time to time: a program that always finds something else ready does not sleep.
    pub(super) fn look_after_datagrams(&self) {
        if !self.datagrams.is_empty()
            && let Some(_held) = self.hold()
        {
            self.datagrams.pollers().for_each(Poller::found_nothing);
        }
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
