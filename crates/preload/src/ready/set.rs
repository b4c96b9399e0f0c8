//! An epoll set that this process has made: the program's registrations, and those that are looked at.
//!
//! The kernel's set stays the truth for everything that is not a connection with a ring. Of those connections, the waiting thread looks
//! at the *hot* ones. The others are *armed*: their peers ring, and the kernel reports the bell. A thread that goes to sleep
//! arms the hot ones too. While another thread sleeps on the set, or the set itself is watched from outside, a thread that leaves it arms
//! them again: the program may not come back for a long time.

use super::budget::SpinBudget;
use super::list::{ALL, HOT, List};
use super::registered_sockets::{Datagrams, RegisteredSocket};
use super::shared_flag::{self, SharedFlag};
use super::word::AtomicWord;
use crate::conn::Conn;
use crate::lock::{Lock, Taken};
use crate::table::{self, DescriptorKind, Entry};
use crate::{hidden, process, sys};
use rustix::fd::BorrowedFd;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How many sets are looked after. Connections in a further one stay on TCP.
pub(super) const SETS: usize = 4096;
/// Hot ones beyond this number are armed instead, if they have been idle.
pub(super) const MANY: u32 = 128;

/// A set. All zeros when new.
#[derive(Debug)]
pub(super) struct Set {
    lock: Lock,
    used: AtomicU32,
    generation: AtomicU32,
    /// The process in which it was made, and the number of forks since.
    epoch: AtomicU32,
    forks: AtomicU32,
    /// Handed to a program without this library.
    pub(super) lost: AtomicU32,
    /// Where other processes say that they use it.
    pub(super) shared: SharedFlag,
    /// One of the set's descriptors, plus 1.
    fd: AtomicU32,
    descriptors: AtomicU32,
    /// How many registrations are under our tag.
    pub(super) rings: AtomicU32,
    /// Threads that sleep in it, or may.
    pub(super) sleepers: AtomicU32,
    /// Rings of UDP sockets may be closed for threads that sleep and do not know of the sockets.
    pub(super) kept_closed: AtomicU32,
    /// Watched from outside: by another set, or by `poll`.
    pub(super) nested: AtomicU32,
    /// Something was registered under a tag of ours. Its events may come after it has gone: of a bell, and of a descriptor that
    /// was closed here and is open elsewhere, be it in the broker that has passed it on a moment ago.
    pub(super) tagged: AtomicU32,
    /// Descriptors in it that are no connections of ours; some of them may have been closed since.
    pub(super) strangers: AtomicU32,
    /// An eventfd of ours in it, plus 1, for what only we know.
    pub(super) bell: AtomicU32,
    /// Times that the program was told something.
    pub(super) answers: AtomicU32,
    pub(super) asked_answers: AtomicU32,
    pub(super) asked_ticks: AtomicU64,
    /// When it last looked for lost interrupts, in milliseconds of the coarse clock.
    pub(super) looked_for_lost: AtomicU64,
    /// Answers in a row that had no room for all ends that the kernel may have.
    pub(super) unfinished_answers: AtomicU32,
    pub(super) budget: SpinBudget,
    pub(super) hot: List<HOT>,
    pub(super) all: List<ALL>,
    pub(super) datagrams: Datagrams,
}

impl Set {
    const fn new() -> Self {
        Self {
            lock: Lock::new(),
            used: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            forks: AtomicU32::new(0),
            lost: AtomicU32::new(0),
            shared: SharedFlag::new(),
            fd: AtomicU32::new(0),
            descriptors: AtomicU32::new(0),
            rings: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            kept_closed: AtomicU32::new(0),
            nested: AtomicU32::new(0),
            tagged: AtomicU32::new(0),
            strangers: AtomicU32::new(0),
            bell: AtomicU32::new(0),
            answers: AtomicU32::new(0),
            asked_answers: AtomicU32::new(0),
            asked_ticks: AtomicU64::new(0),
            looked_for_lost: AtomicU64::new(0),
            unfinished_answers: AtomicU32::new(0),
            budget: SpinBudget::new(),
            hot: List::new(),
            all: List::new(),
            datagrams: Datagrams::new(),
        }
    }
}

static TABLE: [Set; SETS] = [const { Set::new() }; SETS];
static NEXT: AtomicU32 = AtomicU32::new(0);

/// The set of a descriptor.
#[inline]
pub(super) fn of(fd: c_int) -> Option<&'static Set> {
    let entry = table::get(fd);
    if entry == Entry::NONE || entry.kind() != DescriptorKind::Epoll {
        return None;
    }
    let set = TABLE.get(usize::from(entry.index()))?;
    (set.generation.load(Ordering::Relaxed) & 0xfff == entry.generation()).then_some(set)
}

fn at(number: u32) -> &'static Set {
    &TABLE[number as usize % SETS]
}

/// A new set has this descriptor.
pub(super) fn enter(fd: c_int) {
    if !table::fits(fd) {
        return;
    }
    for _ in 0..SETS {
        let number = NEXT.fetch_add(1, Ordering::Relaxed) as usize % SETS;
        let set = &TABLE[number];
        // EDGE set-place: acquires the place from `Set::leave_descriptor`, and releases it as taken.
        if set.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            continue;
        }
        let generation = set.generation.get().wrapping_add(1);
        set.generation.put(generation);
        set.epoch.put(process::fork_epoch());
        set.forks.put(shared_flag::forks());
        set.shared.begin();
        set.fd.put(fd.cast_unsigned() + 1);
        set.descriptors.put(1);
        for word in [
            &set.lost,
            &set.sleepers,
            &set.kept_closed,
            &set.nested,
            &set.tagged,
            &set.strangers,
            &set.answers,
            &set.asked_answers,
        ] {
            word.put(0);
        }
        set.asked_ticks.put(0);
        set.unfinished_answers.put(0);
        set.datagrams.clear();
        set.budget.reset();
        // Closed behind our back.
        if let Some(statement) = Conn::of(fd).and_then(|conn| conn.drop_descriptor(fd)) {
            statement.make();
        }
        let before = table::set(fd, Entry::new(DescriptorKind::Epoll, generation, number as u16));
        if before.kind() == DescriptorKind::Epoll && usize::from(before.index()) != number {
            let other = &TABLE[usize::from(before.index()) % SETS];
            if other.generation.get() & 0xfff == before.generation() {
                other.leave_descriptor(fd);
            }
        }
        return;
    }
}

/// Those that have ever been in use.
fn all() -> impl Iterator<Item = &'static Set> {
    TABLE[..(NEXT.load(Ordering::Relaxed) as usize).min(SETS)].iter()
}

/// Whether this thread holds a set, in a call that a signal handler has interrupted.
pub(super) fn is_held_by_this_thread() -> bool {
    all().any(|set| set.lock.is_own())
}

/// Every thread that held a set when this was called has left it.
pub(super) fn settle() {
    all().for_each(|set| drop(set.hold()));
}

/// Lets no other thread be in the middle of something when a child gets its copy.
pub(super) fn before_fork() {
    // Those too that end just now, under their lock.
    for set in all() {
        set.lock.freeze();
        set.shared.expose();
        if set.fd.get() != 0 && set.is_own() {
            set.give_once_back();
        }
    }
}

/// In the parent.
pub(super) fn forked() {
    all().for_each(|set| set.lock.thaw());
}

/// In the child, whose other threads are no more.
pub(super) fn after_fork() {
    for set in all() {
        set.lock.thaw_in_child();
        set.sleepers.put(0);
        set.kept_closed.put(0);
        set.datagrams.places().iter().for_each(RegisteredSocket::forget_sleepers);
    }
}

/// The lock of a set; what a set does while it is held neither waits nor calls the program.
pub(super) struct SetGuard<'a>(&'a Set);

impl Drop for SetGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.lock.unlock();
    }
}

impl Set {
    #[inline]
    pub(super) fn number(&self) -> u32 {
        let offset = std::ptr::from_ref(self).addr() - TABLE.as_ptr().addr();
        (offset / size_of::<Self>()) as u32
    }

    fn fd(&self) -> c_int {
        self.fd.get().wrapping_sub(1).cast_signed()
    }

    pub(super) fn borrow(&self) -> BorrowedFd<'static> {
        sys::borrow(self.fd())
    }

    /// `None` in a signal handler that has interrupted a holder.
    #[inline]
    pub(super) fn hold(&self) -> Option<SetGuard<'_>> {
        (self.lock.lock() != Taken::Recursive).then(|| SetGuard(self))
    }

    /// Whether this process made it: another one's registrations are not known, nor are ours to it.
    #[inline]
    pub(super) fn is_own(&self) -> bool {
        self.epoch.get() == process::fork_epoch()
    }

    /// Whether there may be children that have inherited it.
    #[inline]
    pub(super) fn forks_since(&self) -> bool {
        self.forks.get() != shared_flag::forks()
    }

    /// Whether several processes use it.
    pub(super) fn is_shared(&self) -> bool {
        !self.is_own() || self.lost.load(Ordering::Relaxed) != 0 || self.forks_since() && self.shared.is_raised()
    }

    /// Whether there is anything in it that the kernel does not tell of by itself.
    #[inline]
    pub(super) fn has_own_sources(&self) -> bool {
        // EDGE set-rings: acquires from `Set::forget`, `Set::lower` and `Set::leave_to_stranger`.
        self.rings.load(Ordering::SeqCst) != 0 || !self.datagrams.is_empty()
    }

    /// Whether threads other than the caller may sleep in the set, or another process or set watches it.
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.sleepers.load(Ordering::SeqCst) != 0 || self.nested.load(Ordering::Relaxed) != 0
    }

    /// One more descriptor of the same set.
    pub(super) fn add_descriptor(&self, to: c_int) {
        if table::fits(to) {
            // EDGE set-descriptors: as in `Set::leave_descriptor`.
            self.descriptors.fetch_add(1, Ordering::AcqRel);
            table::set(to, Entry::new(DescriptorKind::Epoll, self.generation.get(), self.number() as u16));
        }
    }

    /// A descriptor of it is about to be closed.
    pub(super) fn leave_descriptor(&self, fd: c_int) {
        // EDGE set-descriptors: releases what this descriptor was used for; the last one acquires it from all others.
        if self.descriptors.fetch_sub(1, Ordering::AcqRel) > 1 {
            if self.fd() == fd {
                let mine = Entry::new(DescriptorKind::Epoll, self.generation.get(), self.number() as u16);
                let other = table::entries(0, u32::MAX).find(|&(other, entry)| entry == mine && other != fd);
                self.fd.put(other.map_or(0, |(fd, _)| fd.cast_unsigned() + 1));
            }
            return;
        }
        let Some(_held) = self.hold() else { return };
        while self.all.first() != 0 {
            self.forget(self.all.first());
        }
        self.discard_bell();
        self.datagrams.places().iter().for_each(RegisteredSocket::release_closed);
        self.fd.put(0);
        // EDGE set-place: releases the place to `enter`.
        self.used.store(0, Ordering::Release);
    }

    /// The lock is held.
    pub(super) fn discard_bell(&self) {
        let bell = self.bell.get();
        if bell != 0 {
            self.bell.put(0);
            hidden::discard(bell.cast_signed() - 1);
        }
    }
}

/// The set that a registration belongs to.
pub(super) fn numbered(number: u32) -> &'static Set {
    at(number)
}
