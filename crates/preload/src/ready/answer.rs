//! The answer of `epoll_wait` to a program: the only place where events are returned.
//!
//! The kernel writes into the program's own array, and not all of its events are for the program: registrations of ours are in the same
//! set, under [tags](Tag) in place of the program's numbers. So no event of the kernel is passed on without translation.
//!
//! ```text
//!   the kernel's wait --> KernelEvent --translate--> ProgramEvent --> the program's array, Told::count
//!                              |                          ^
//!                              +--> a tag: Set::note      +-- what rings and datagrams have ready
//! ```
//!
//! A [`ProgramEvent`] cannot be made of a tag, only a [`ProgramEvent`] is written into a [`ReadyList`], and only a [`ReadyList`] makes the
//! number that a waiting call returns.
#![expect(unsafe_code, reason = "fills in the caller's array of events")]

use super::set::Set;
use super::tag::Tag;
use libc::{c_int, epoll_event};

/// An event as the kernel has it: for the program, or for us.
#[derive(Clone, Copy)]
struct KernelEvent(epoll_event);

/// An event under a number of the program's own.
#[derive(Clone, Copy)]
struct ProgramEvent(epoll_event);

enum Addressee {
    Program(ProgramEvent),
    Library(Tag, u32),
}

impl KernelEvent {
    #[inline]
    fn translate(self) -> Addressee {
        let (events, data) = (self.0.events, self.0.u64);
        match Tag::of(data) {
            Some(tag) => Addressee::Library(tag, events),
            None => Addressee::Program(ProgramEvent(self.0)),
        }
    }
}

impl ProgramEvent {
    /// `None` for a tag of ours, which the program can have registered only by guessing it.
    #[inline]
    fn new(events: u32, data: u64) -> Option<Self> {
        (!Tag::is_ours(data)).then_some(Self(epoll_event { events, u64: data }))
    }
}

/// The array of a waiting call, and the number of entries filled in. The entries behind them are scratch space of the kernel's.
pub(super) struct ReadyList {
    events: *mut epoll_event,
    max: usize,
    told: usize,
}

/// The kernel's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelAnswer {
    /// It had nothing.
    pub(super) nothing: bool,
    /// All the room it had is used up: it may have more.
    pub(super) full: bool,
    /// The array was full, and some of it is free again: events of ours, and events reported before, take no place.
    pub(super) more: bool,
}

impl ReadyList {
    /// An empty answer.
    ///
    /// # Safety
    /// `events` is valid for writes of `max` entries until the answer is given, and nobody else uses it meanwhile.
    #[inline]
    pub(super) unsafe fn new(events: *mut epoll_event, max: c_int) -> Self {
        Self { events, max: usize::try_from(max).unwrap_or(0), told: 0 }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.told == 0
    }

    /// How many more events fit.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.max - self.told
    }

    /// Has the kernel fill in the rest of the array by `wait`, which gets the place and its size and returns what `epoll_wait` does.
    /// Keeps what is the program's, and notes in `set` what is ours. `None`: `wait` has failed, and `errno` says why.
    ///
    /// The kernel reports what is level-triggered each time that it is asked. A program that frees an object at its first event would use it at
    /// the second. So what the answer has told of before under the same number is added to that event.
    #[inline]
    pub(super) fn ask(
        &mut self,
        set: &Set,
        wait: impl FnOnce(*mut epoll_event, c_int) -> c_int,
    ) -> Option<KernelAnswer> {
        let (begin, room) = (self.told, self.room());
        let place = self.events.wrapping_add(begin);
        let n = usize::try_from(wait(place, c_int::try_from(room).unwrap_or(c_int::MAX))).ok()?.min(room);
        let mut is_some_free = false;
        for at in begin..begin + n {
            // SAFETY: an entry of the caller's array, which the kernel has filled in just now.
            let event = KernelEvent(unsafe { *self.events.add(at) });
            match event.translate() {
                Addressee::Program(event) if self.merge(event, begin) => is_some_free = true,
                Addressee::Program(event) => self.push(event),
                Addressee::Library(Tag::Datagrams(number), events) => {
                    let claimed = set.claim_once(number, events).and_then(|(e, data)| ProgramEvent::new(e, data));
                    match claimed {
                        Some(event) if !self.merge(event, begin) => self.push(event),
                        _ => is_some_free = true,
                    }
                }
                Addressee::Library(tag, events) => {
                    is_some_free = true;
                    set.note(tag, events);
                }
            }
        }
        let full = n == room;
        Some(KernelAnswer { nothing: n == 0, full, more: is_some_free && full })
    }

    /// Adds the bits of an event to the one that the first `count` entries have under the same number, if they have one.
    #[inline]
    fn merge(&mut self, event: ProgramEvent, count: usize) -> bool {
        Told { events: self.events, count }.merge(event.0.events, event.0.u64)
    }

    /// Tells the program of something that the kernel does not know of. Without room it is dropped.
    #[inline]
    pub(super) fn tell(&mut self, events: u32, data: u64) {
        if let Some(event) = ProgramEvent::new(events, data) {
            self.push(event);
        }
    }

    #[inline]
    fn push(&mut self, event: ProgramEvent) {
        if self.told < self.max {
            // SAFETY: an entry of the caller's array.
            unsafe { self.events.add(self.told).write(event.0) };
            self.told += 1;
        }
    }

    /// The events reported so far, to be looked up while more are added.
    #[inline]
    pub(super) fn so_far(&self) -> Told {
        Told { events: self.events, count: self.told }
    }

    /// The result of the call.
    #[inline]
    pub(super) fn count(&self) -> c_int {
        debug_assert!(!self.so_far().any(Tag::is_ours), "an event of ours is about to reach the program");
        // At most as many as the caller has room for, which is a `c_int`.
        c_int::try_from(self.told).unwrap_or(c_int::MAX)
    }
}

/// The first entries of an answer. Their numbers do not change any more, and their events only grow.
#[derive(Clone, Copy)]
pub(super) struct Told {
    events: *mut epoll_event,
    count: usize,
}

impl Told {
    /// Adds events to the entry under this number, if there is one. This takes no room.
    #[inline]
    pub(super) fn merge(self, events: u32, data: u64) -> bool {
        for at in 0..self.count {
            // SAFETY: an entry of the caller's array that is filled in, and not used elsewhere within the call.
            let told = unsafe { &mut *self.events.add(at) };
            if told.u64 == data {
                told.events |= events;
                return true;
            }
        }
        false
    }

    /// Whether any number that has been told is as asked.
    #[inline]
    pub(super) fn any(self, wanted: impl Fn(u64) -> bool) -> bool {
        // SAFETY: entries of the caller's array that are filled in, and that are used within the call alone.
        (0..self.count).any(|at| wanted(unsafe { (*self.events.add(at)).u64 }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::set;
    use super::*;
    use rustix::event::epoll::{CreateFlags, create};
    use std::os::fd::IntoRawFd;

    #[test]
    fn own_events_are_removed_from_answer_of_kernel() {
        let fd = create(CreateFlags::CLOEXEC).unwrap().into_raw_fd();
        set::enter(fd);
        let set = set::of(fd).unwrap();
        let none = epoll_event { events: 0, u64: 0 };
        let mut array = [none; 8];
        // SAFETY: an array of that length, which outlives the answer.
        let mut answer = unsafe { ReadyList::new(array.as_mut_ptr(), 8) };
        answer.tell(4, 40);
        let from_kernel =
            [Tag::Socket(1).data(), 7, Tag::Link(70_000).data(), u64::MAX, Tag::Bell.data(), Tag::Socket(2).data(), 9];
        let asked = answer.ask(set, |place, room| {
            assert_eq!(room, 7);
            for (at, data) in from_kernel.into_iter().enumerate() {
                // SAFETY: `room` entries were promised.
                unsafe { place.add(at).write(epoll_event { events: 1, u64: data }) };
            }
            room
        });
        assert_eq!(asked, Some(KernelAnswer { nothing: false, full: true, more: true }));
        answer.tell(4, Tag::Socket(1).data());
        assert_eq!(answer.count(), 4);
        assert!(answer.so_far().any(|data| data == 9) && !answer.so_far().any(Tag::is_ours));
        assert_eq!(answer.ask(set, |_, _| -1), None);
        let told = array.map(|event| event.u64);
        assert_eq!(told[..4], [40, 7, u64::MAX, 9]);
        crate::calls::testing::close(fd);
    }

    #[test]
    fn repeated_event_data_merges_bits_of_both_events() {
        let fd = create(CreateFlags::CLOEXEC).unwrap().into_raw_fd();
        set::enter(fd);
        let set = set::of(fd).unwrap();
        let mut array = [epoll_event { events: 0, u64: 0 }; 4];
        // SAFETY: an array of that length, which outlives the answer.
        let mut answer = unsafe { ReadyList::new(array.as_mut_ptr(), 4) };
        let mut ask = |given: &[(u32, u64)]| {
            answer.ask(set, |place, _| {
                for (at, &(events, u64)) in given.iter().enumerate() {
                    // SAFETY: as many as there is room for.
                    unsafe { place.add(at).write(epoll_event { events, u64 }) };
                }
                given.len() as c_int
            })
        };
        // Two descriptors that the program has entered under one number are its own matter.
        assert_eq!(ask(&[(1, 7), (4, 7)]), Some(KernelAnswer { nothing: false, full: false, more: false }));
        assert_eq!(ask(&[(8, 7), (1, 9)]), Some(KernelAnswer { nothing: false, full: true, more: true }));
        assert_eq!(ask(&[(1, 5)]), Some(KernelAnswer { nothing: false, full: true, more: false }));
        assert_eq!(answer.count(), 4);
        let told = array.map(|event| (event.events, event.u64));
        assert_eq!(told, [(9, 7), (4, 7), (1, 9), (1, 5)]);
        crate::calls::testing::close(fd);
    }
}
