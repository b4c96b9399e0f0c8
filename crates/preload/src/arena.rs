//! Connections live in memory that `fork` shares: parent and child hold the same socket, so they must agree on its counts,
//! its cursors and its locks. They share nothing else: a child may give up rights that its parent keeps, and a process that compromises
//! the child must not reach connections that the parent makes later.
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

mod blocks;

use crate::lock::ThisThread;
use crate::process;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

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
const _: () = assert!(PAGE.is_multiple_of(BLOCK), "a block lies in one page");
/// The blocks of this arena, as [`blocks::Blocks`] counts them.
type ArenaBlocks = blocks::Blocks<CONNECTIONS, { PAGE / BLOCK }, { CONNECTIONS / 64 }, { (BYTES / PAGE).div_ceil(64) }>;
const PAGES: usize = ArenaBlocks::PAGES;
const _: () = assert!(PAGES * PAGE == BYTES);

static BASE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// Which of them are in use. Memory of this process alone.
static BLOCKS: ArenaBlocks = ArenaBlocks::new();

/// A block that was chosen for a new connection. To be kept until the connection is in the table: a fork in between would leave it in a page
/// that the child may write too.
pub(crate) struct NewBlock(blocks::ChosenBlock<'static, ThisThread>);

impl NewBlock {
    /// Its number.
    pub(crate) fn index(&self) -> u16 {
        self.0.index()
    }
}

/// The block at `index`: [`BLOCK`] bytes that stay mapped for as long as the process lives. They are zeros, or what the last user has
/// left, and other threads and processes may write them. `None` while there is no arena.
#[inline]
pub(crate) fn get(index: u16) -> Option<NonNull<u8>> {
    // EDGE arena: acquires from `prepare`.
    let base = NonNull::new(BASE.load(Ordering::Acquire))?;
    // SAFETY: the arena is never unmapped, only replaced by zeros where nothing lives, and has a block for every `u16`.
    Some(unsafe { base.add(usize::from(index) * BLOCK) })
}

/// The index of the block that begins here.
#[inline]
pub(crate) fn index_of(block: *const u8) -> u16 {
    let offset = block.addr() - BASE.load(Ordering::Relaxed).addr();
    (offset / BLOCK) as u16
}

/// Makes the arena if there is none. Called also before a program that listens forks.
pub(crate) fn prepare() -> bool {
    // EDGE arena: as in `get`.
    if !BASE.load(Ordering::Acquire).is_null() {
        return true;
    }
    // SAFETY: new memory at an address that the kernel chooses.
    let Ok(base) = (unsafe { mmap_anonymous(ptr::null_mut(), BYTES, prot(), MapFlags::SHARED | MapFlags::NORESERVE) })
    else {
        return false;
    };
    let (base, none) = (base.cast::<u8>(), ptr::null_mut());
    // EDGE arena: releases the mapping to `get`; if another thread was first, acquires its.
    if BASE.compare_exchange(none, base, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: made above, and not shared yet: another thread was first.
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
pub(crate) fn allocate(is_vacant: impl Fn(u16) -> bool) -> Option<NewBlock> {
    // First: a child by a bare system call is found out by this, and replaces its pages.
    let _ = process::owner();
    if !prepare() {
        return None;
    }
    BLOCKS.choose(ThisThread, is_vacant).map(NewBlock)
}

/// This process uses the block no more.
pub(crate) fn free(index: u16) {
    BLOCKS.free(index);
}

/// Whether a block is in use.
#[cfg(test)]
pub(crate) fn is_in_use(index: u16) -> bool {
    BLOCKS.is_taken(index)
}

/// Before a fork: from here until [`after_fork`] no block is chosen, and each that was is a connection in the table.
pub(crate) fn before_fork() {
    BLOCKS.before_fork(&ThisThread);
}

/// After a fork, in the parent: the child has the pages in which something lives, and no others.
pub(crate) fn after_fork() {
    part();
    BLOCKS.after_fork(&ThisThread);
}

/// After a fork, in the child.
pub(crate) fn after_fork_in_child() {
    part();
    BLOCKS.after_fork_in_child(&ThisThread);
}

/// Replaces the pages in which nothing lives, and notes which others are shared.
pub(crate) fn part() {
    // EDGE arena: as in `get`.
    let base = BASE.load(Ordering::Acquire);
    if base.is_null() {
        return;
    }
    BLOCKS.part();
    let mut from = 0;
    while from < PAGES {
        let is_shared = BLOCKS.is_shared(from);
        let to = (from..PAGES).find(|page| BLOCKS.is_shared(*page) != is_shared).unwrap_or(PAGES);
        if !is_shared {
            let at = base.wrapping_add(from * PAGE).cast();
            let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: pages of the arena in which no block of this process lies. A thread that looks at a block there by an old number finds
            // zeros, which is a block that is not in use.
            if unsafe { mmap_anonymous(at, (to - from) * PAGE, prot(), flags) }.is_err() {
                // They stay shared, and are not used.
                (from..to).for_each(|page| BLOCKS.share(page));
            }
        }
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::blocks::Bits;
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
            let page = ArenaBlocks::page_of(index);
            assert!(page * PAGE <= index * BLOCK && (index + 1) * BLOCK <= (page + 1) * PAGE && page < PAGES);
        }
    }
}
