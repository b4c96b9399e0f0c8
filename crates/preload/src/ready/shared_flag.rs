//! The flag in shared memory by which processes say that several of them use a set, and the count of this process's forks.
#![expect(unsafe_code, reason = "maps a page that children share")]

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};

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

    /// Whether several processes have said that they use the set. Without a page to say so in, every fork is taken for that.
    pub(super) fn is_raised(&self) -> bool {
        self.get().is_none_or(|flag| flag.load(Ordering::Relaxed) != 0)
    }

    /// Says so, if there is a page.
    pub(super) fn raise(&self) {
        if let Some(flag) = self.get() {
            flag.store(1, Ordering::Relaxed);
        }
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
    pub(super) fn begin(&self) {
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

/// This process has forked, as the parent.
pub(super) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How often it has.
pub(super) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}
