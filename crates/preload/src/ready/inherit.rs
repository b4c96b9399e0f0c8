//! Sets that several processes use, since `fork` hands them on.
//!
//! A child that uses its parent's set knows neither what the parent has registered since, nor does the parent know what the
//! child does. So the child says in shared memory that it is there, and both leave that set to the kernel: its connections go
//! back to TCP, and none in it gets a ring any more. Most children never touch what they inherit.
#![expect(unsafe_code, reason = "maps a page that children share")]

use super::set::Set;
use partywall_shm::status::Reason;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

/// How long a parent sleeps at most before it looks whether a child has come to its set.
const SLICE: Duration = Duration::from_millis(100);
/// Bytes of a mapping.
const PAGE: usize = 4096;

/// Forks of this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Where the processes that have a set say that several of them use it: a page for each set that has lived through a `fork`. A child that has
/// such a set can do with it as it likes anyway, and has no page of the sets that its parent makes later.
#[derive(Debug)]
pub(super) struct SharedFlag(AtomicPtr<AtomicU8>);

impl SharedFlag {
    pub(super) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    fn get(&self) -> Option<&'static AtomicU8> {
        // EDGE exposure: acquires from `expose` and `begin`: the page is mapped.
        let page = self.0.load(Ordering::Acquire);
        // SAFETY: null, or a page of `map` that stays mapped.
        unsafe { page.as_ref() }
    }

    /// This process is about to fork, and the set lives.
    pub(super) fn expose(&self) {
        // Only threads that hold the set's lock store here.
        if self.0.load(Ordering::Relaxed).is_null() {
            // EDGE exposure: releases the mapping to `get`.
            self.0.store(map(ptr::null_mut()), Ordering::Release);
        }
    }

    /// A new set. Another process may have the page of the one before it.
    fn begin(&self) {
        // Nobody else stores here: the set is not in use yet.
        let page = self.0.load(Ordering::Relaxed);
        if !page.is_null() {
            // At the same place, so that a thread that looks at the set before finds something still.
            // EDGE exposure: releases the mapping to `get`.
            self.0.store(map(page), Ordering::Release);
        }
    }
}

/// Maps a page of zeros that the next child shares, over the page `at` or, if that is null, at a place that the kernel chooses. Null if there
/// is none to be had.
fn map(at: *mut AtomicU8) -> *mut AtomicU8 {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
    let flags = if at.is_null() { flags } else { flags | MapFlags::FIXED };
    // SAFETY: new memory at an address that the kernel chooses, or over a page that this function has mapped and of which only atomics are
    // used.
    unsafe { mmap_anonymous(at.cast(), PAGE, prot, flags) }.map_or(ptr::null_mut(), |page| page.cast())
}

fn flag(set: &Set) -> Option<&'static AtomicU8> {
    set.shared.get()
}

/// This process has forked, as the parent.
pub(super) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How often it has.
pub(super) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// A new set of that number.
pub(super) fn begin(set: &Set) {
    set.shared.begin();
}

/// Whether several processes use it; without memory to say so in, every fork is taken for that.
pub(super) fn is_shared(set: &Set) -> bool {
    if !set.is_own() || set.lost.load(Ordering::Relaxed) != 0 {
        return true;
    }
    set.forks_since() && flag(set).is_none_or(|f| f.load(Ordering::Relaxed) != 0)
}

/// To be called before and after waiting in a set: gives it up if it is shared.
#[inline]
pub(super) fn check(set: &'static Set) {
    if set.forks_since() || !set.is_own() {
        give_up(set);
    }
}

#[cold]
fn give_up(set: &'static Set) {
    if !set.is_own()
        && let Some(flag) = flag(set)
    {
        flag.store(1, Ordering::Relaxed);
    }
    if is_shared(set) {
        set.give_datagrams_up();
        empty(set);
    }
}

/// Leaves a set to the kernel permanently: a program without this library gets it.
pub(super) fn lose(set: &'static Set) {
    set.lost.store(1, Ordering::Relaxed);
    set.give_datagrams_up();
    if !set.is_own()
        && let Some(flag) = flag(set)
    {
        // Its maker must know, too.
        flag.store(1, Ordering::Relaxed);
    }
    empty(set);
    set.leave_to_stranger();
}

fn empty(set: &'static Set) {
    if set.rings.load(Ordering::Relaxed) != 0 {
        // One after the other: the lock of the set is not held while a connection waits for its peer.
        while let Some(conn) = set.first_ring(|c| !c.is_tcp_permanently()) {
            conn.bring_down(Reason::Shared);
        }
        set.lower_all();
    }
}

/// How long to sleep at most in this set.
pub(super) fn slice(set: &Set) -> Option<Duration> {
    set.forks_since().then_some(SLICE)
}
