//! Connections live in memory that `fork` shares: parent and child hold the same socket, so they must agree on its counts,
//! its cursors and its locks. And they share nothing else: a child may give up rights that its parent keeps, and a process that takes it over
//! then must not reach the connections that the parent makes later.
//!
//! ```text
//!   parent   | a   b | c     |       |       |      pages, and the connections in them
//!   fork     | a   b | c     |       |       |      a, b and c live in both, and these pages are shared
//!   parent   | a     | c     | d     | e     |      what is new in either ...
//!   child    |     b | c     | f     |       |      ... lies in pages that the other does not have
//! ```
//!
//! The arena is made by the first candidate of a process and never given back; its pages cost memory only once used. Which blocks are in
//! use, and which pages are shared, is noted in memory of this process alone. At a fork each of the two replaces every page in which
//! nothing lives, and from then on makes no connection in those that are left.
#![expect(unsafe_code, reason = "maps shared anonymous memory and divides it into blocks")]

use crate::lock::{Lock, Taken};
use crate::process;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// How many connections a process has at once, at most. More stay on TCP.
pub(crate) const CONNECTIONS: usize = 1 << 16;
/// Bytes of a block. A connection that is laid over one checks that it fits.
pub(crate) const BLOCK: usize = 512;
/// Every block begins at a multiple of this.
pub(crate) const ALIGNMENT: usize = 64;
const _: () = assert!(BLOCK.is_multiple_of(ALIGNMENT) && PAGE.is_multiple_of(ALIGNMENT));
/// Bytes of a page, and of the arena.
const PAGE: usize = 4096;
const BYTES: usize = (CONNECTIONS * BLOCK).next_multiple_of(PAGE);
const PAGES: usize = BYTES / PAGE;

static BASE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// How many blocks are in use, or have been.
static USED: AtomicU32 = AtomicU32::new(0);
/// Where the search for a free block goes on.
static NEXT: AtomicU32 = AtomicU32::new(0);
/// Blocks that this process uses.
static TAKEN: Bits<{ CONNECTIONS / 64 }> = Bits::new();
/// Pages that another process may write.
static SHARED: Bits<{ PAGES.div_ceil(64) }> = Bits::new();
/// Held while a block is chosen, and from before a fork until the pages have been replaced.
static CHOOSING: Lock = Lock::new();
/// Whether the thread that forks holds it. Written by that thread alone, under the lock.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// A set of numbers.
struct Bits<const WORDS: usize>([AtomicU64; WORDS]);

impl<const WORDS: usize> Bits<WORDS> {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }

    fn has(&self, at: usize) -> bool {
        self.0[at / 64].load(Ordering::Acquire) >> (at % 64) & 1 != 0
    }

    /// All numbers that are in it. Most words are empty.
    fn all(&self) -> impl Iterator<Item = usize> {
        let words = self.0.iter().map(|word| word.load(Ordering::Acquire)).enumerate().filter(|(_, word)| *word != 0);
        words.flat_map(|(at, word)| (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| at * 64 + bit))
    }

    fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Release));
    }

    /// Puts a number in or takes it out.
    fn set(&self, at: usize, on: bool) {
        let bit = 1 << (at % 64);
        if on {
            self.0[at / 64].fetch_or(bit, Ordering::AcqRel);
        } else {
            self.0[at / 64].fetch_and(!bit, Ordering::AcqRel);
        }
    }
}

/// The block at `index`: [`BLOCK`] bytes that stay mapped for as long as the process lives. They are zeros, or what the last user has
/// left, and other threads and processes may write them. `None` while there is no arena.
#[inline]
pub(crate) fn get(index: u16) -> Option<NonNull<u8>> {
    let base = NonNull::new(BASE.load(Ordering::Acquire))?;
    // SAFETY: the arena is never unmapped, only replaced by zeros where nothing lives, and has a block for every `u16`.
    Some(unsafe { base.add(usize::from(index) * BLOCK) })
}

/// Which block begins here.
#[inline]
pub(crate) fn index_of(block: *const u8) -> u16 {
    let offset = block.addr() - BASE.load(Ordering::Relaxed).addr();
    (offset / BLOCK) as u16
}

/// Makes the arena if there is none. Called also before a program that listens forks.
pub(crate) fn prepare() -> bool {
    if !BASE.load(Ordering::Acquire).is_null() {
        return true;
    }
    // SAFETY: new memory at an address that the kernel chooses.
    let Ok(base) = (unsafe { mmap_anonymous(ptr::null_mut(), BYTES, prot(), MapFlags::SHARED | MapFlags::NORESERVE) })
    else {
        return false;
    };
    let (base, none) = (base.cast::<u8>(), ptr::null_mut());
    if BASE.compare_exchange(none, base, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: ours, and nobody has heard of it: another thread was first.
        let _ = unsafe { rustix::mm::munmap(base.cast(), BYTES) };
        return true;
    }
    crate::status::prepare();
    true
}

fn prot() -> ProtFlags {
    ProtFlags::READ | ProtFlags::WRITE
}

/// A block for a new connection, in pages that no other process has. Its bytes are as the last user left them, of which `is_vacant` says
/// whether that user is through with them.
pub(crate) fn allocate(is_vacant: impl Fn(u16) -> bool) -> Option<u16> {
    // First: a child by a bare system call is found out by this, and replaces its pages.
    let _ = process::owner();
    if !prepare() || CHOOSING.lock() == Taken::Recursive {
        return None;
    }
    let found = choose(is_vacant);
    CHOOSING.unlock();
    found
}

/// A free block, taken from here on.
fn choose(is_vacant: impl Fn(u16) -> bool) -> Option<u16> {
    let take = |index: usize| {
        let free = !TAKEN.has(index) && pages_of(index).all(|page| !SHARED.has(page)) && is_vacant(index as u16);
        if free {
            TAKEN.set(index, true);
        }
        free.then_some(index as u16)
    };
    // Blocks that have been used once are used again, as long as some of them are free, so that few pages are touched.
    let used = USED.load(Ordering::Relaxed).clamp(64, CONNECTIONS as u32);
    for _ in 0..used.min(256) {
        let index = (NEXT.fetch_add(1, Ordering::Relaxed) % used) as usize;
        if let Some(found) = take(index) {
            return Some(found);
        }
    }
    let more = USED.fetch_max((used * 2).min(CONNECTIONS as u32), Ordering::Relaxed).max(used);
    (more as usize..CONNECTIONS).take(256).find_map(take)
}

/// The pages that a block lies in.
fn pages_of(index: usize) -> Range<usize> {
    index * BLOCK / PAGE..((index + 1) * BLOCK).div_ceil(PAGE)
}

/// This process uses the block no more.
pub(crate) fn free(index: u16) {
    TAKEN.set(usize::from(index), false);
}

/// Before a fork: from here until [`after_fork`] no block is chosen.
pub(crate) fn before_fork() {
    // A handler that has interrupted the choice forks at its own risk: what it chose last may be missed.
    let holds = CHOOSING.lock() != Taken::Recursive;
    FORKING.store(holds.into(), Ordering::Relaxed);
}

/// After a fork, in parent and child: the other one has the pages in which something lives, and no others.
pub(crate) fn after_fork() {
    part();
    if FORKING.swap(0, Ordering::Relaxed) != 0 {
        CHOOSING.unlock();
    }
}

/// Replaces the pages in which nothing lives, and notes which others are shared.
pub(crate) fn part() {
    let base = BASE.load(Ordering::Acquire);
    if base.is_null() {
        return;
    }
    SHARED.clear();
    for index in TAKEN.all() {
        pages_of(index).for_each(|page| SHARED.set(page, true));
    }
    let mut from = 0;
    while from < PAGES {
        let is_shared = SHARED.has(from);
        let to = (from..PAGES).find(|page| SHARED.has(*page) != is_shared).unwrap_or(PAGES);
        if !is_shared {
            let at = base.wrapping_add(from * PAGE).cast();
            let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: pages of the arena in which no block of this process lies. A thread that looks at a block there by an old number finds
            // zeros, which is a block that is not in use.
            if unsafe { mmap_anonymous(at, (to - from) * PAGE, prot(), flags) }.is_err() {
                // They stay shared, and are not used.
                (from..to).for_each(|page| SHARED.set(page, true));
            }
        }
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_in_a_set_until_they_are_taken_out() {
        let bits = Bits::<2>::new();
        bits.set(0, true);
        bits.set(127, true);
        assert!(bits.has(0) && bits.has(127) && !bits.has(1) && !bits.has(64));
        assert!(bits.all().eq([0, 127]));
        bits.set(127, false);
        assert!(bits.has(0) && !bits.has(127));
        bits.clear();
        assert_eq!(bits.all().count(), 0);
    }

    #[test]
    fn blocks_lie_in_the_pages_that_their_bytes_are_in() {
        for index in [0, 1, 5, CONNECTIONS - 1] {
            let pages = pages_of(index);
            assert!(pages.start * PAGE <= index * BLOCK && (index + 1) * BLOCK <= pages.end * PAGE);
            assert!(pages.end <= PAGES && pages.len() <= BLOCK.div_ceil(PAGE) + 1);
        }
    }
}
