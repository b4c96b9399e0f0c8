//! The blocks of the arena that are in use, and its pages that another process may write.
//!
//! Without memory behind them, so that loom runs this code (`crates/shm/tests/loom_preload.rs`).

use crate::lock::word::{LockHost, LockWord, Taken};
use partywall_shm::sync::{AtomicU32, AtomicU64, Ordering};

/// How many blocks are looked at before the search is given up, once among those that were used before, and once among the others.
const SEARCH: usize = 256;
/// Blocks that the search covers before it goes on to new ones.
const FIRST: usize = 64;

/// A set of numbers.
pub(super) struct Bits<const WORDS: usize>([AtomicU64; WORDS]);

impl<const WORDS: usize> Bits<WORDS> {
    #[cfg(not(loom))]
    pub(super) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }

    #[cfg(loom)]
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    pub(super) fn has(&self, at: usize) -> bool {
        // EDGE block: acquires from `Bits::set`; what the last user of the block did to it is over.
        self.0[at / 64].load(Ordering::Acquire) >> (at % 64) & 1 != 0
    }

    /// All numbers that are in it. Most words are empty.
    pub(super) fn all(&self) -> impl Iterator<Item = usize> {
        // EDGE block: acquires from `Bits::set`.
        let words = self.0.iter().map(|word| word.load(Ordering::Acquire)).enumerate().filter(|(_, word)| *word != 0);
        words.flat_map(|(at, word)| (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| at * 64 + bit))
    }

    pub(super) fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Puts a number in or takes it out.
    pub(super) fn set(&self, at: usize, on: bool) {
        let bit = 1 << (at % 64);
        // EDGE block: releases what the user of the block did to it; acquired in `Bits::has`.
        let _ = match on {
            true => self.0[at / 64].fetch_or(bit, Ordering::AcqRel),
            false => self.0[at / 64].fetch_and(!bit, Ordering::AcqRel),
        };
    }
}

/// The blocks of an arena of `BLOCKS` blocks, `PER_PAGE` to a page.
pub(super) struct Blocks<const BLOCKS: usize, const PER_PAGE: usize, const WORDS: usize, const PAGE_WORDS: usize> {
    /// How many blocks are in use, or have been.
    used: AtomicU32,
    /// Where the search for a free block goes on.
    next: AtomicU32,
    /// Blocks that this process uses.
    taken: Bits<WORDS>,
    /// Pages that another process may write. Written under the lock.
    shared: Bits<PAGE_WORDS>,
    /// Held while a block is chosen and made into a connection, and from before a fork until the pages have been replaced.
    choosing: LockWord,
}

/// A block that was chosen for a new connection. No fork of this process happens until this is dropped.
#[derive(Debug)]
pub(super) struct ChosenBlock<'a, H: LockHost> {
    index: u16,
    choosing: &'a LockWord,
    host: H,
}

impl<H: LockHost> ChosenBlock<'_, H> {
    /// Its number.
    pub(super) fn index(&self) -> u16 {
        self.index
    }
}

impl<H: LockHost> Drop for ChosenBlock<'_, H> {
    fn drop(&mut self) {
        self.choosing.unlock(&self.host);
    }
}

impl<const BLOCKS: usize, const PER_PAGE: usize, const WORDS: usize, const PAGE_WORDS: usize>
    Blocks<BLOCKS, PER_PAGE, WORDS, PAGE_WORDS>
{
    /// How many pages the blocks lie in.
    pub(super) const PAGES: usize = BLOCKS.div_ceil(PER_PAGE);
    const FITS: () = assert!(WORDS * 64 >= BLOCKS && PAGE_WORDS * 64 >= Self::PAGES);

    /// All blocks are free, and no page is shared.
    #[cfg(not(loom))]
    pub(super) const fn new() -> Self {
        let () = Self::FITS;
        Self {
            used: AtomicU32::new(0),
            next: AtomicU32::new(0),
            taken: Bits::new(),
            shared: Bits::new(),
            choosing: LockWord::new(),
        }
    }

    /// All blocks are free, and no page is shared.
    #[cfg(loom)]
    pub(super) fn new() -> Self {
        let () = Self::FITS;
        Self {
            used: AtomicU32::new(0),
            next: AtomicU32::new(0),
            taken: Bits::new(),
            shared: Bits::new(),
            choosing: LockWord::new(),
        }
    }

    /// The page that a block lies in.
    pub(super) const fn page_of(index: usize) -> usize {
        index / PER_PAGE
    }

    /// Whether another process may write this page.
    pub(super) fn is_shared(&self, page: usize) -> bool {
        self.shared.has(page)
    }

    /// Another process may write this page, and no block in it is chosen any more. Between [`Blocks::before_fork`] and the end of the fork.
    pub(super) fn share(&self, page: usize) {
        self.shared.set(page, true);
    }

    /// A free block in a page of this process alone, taken from here on. `None` also in a signal handler that has interrupted the choice.
    pub(super) fn choose<H: LockHost>(&self, host: H, is_vacant: impl Fn(u16) -> bool) -> Option<ChosenBlock<'_, H>> {
        if self.choosing.lock(&host) == Taken::Recursive {
            return None;
        }
        let found = self.find(is_vacant);
        if found.is_none() {
            self.choosing.unlock(&host);
        }
        found.map(|index| ChosenBlock { index, choosing: &self.choosing, host })
    }

    /// The lock is held.
    fn find(&self, is_vacant: impl Fn(u16) -> bool) -> Option<u16> {
        let take = |index: usize| {
            let free = !self.taken.has(index) && !self.is_shared(Self::page_of(index)) && is_vacant(index as u16);
            if free {
                self.taken.set(index, true);
            }
            free.then_some(index as u16)
        };
        // Blocks that have been used once are used again, as long as some of them are free, so that few pages are touched.
        let used = self.used.load(Ordering::Relaxed).clamp(FIRST.min(BLOCKS) as u32, BLOCKS as u32);
        for _ in 0..used.min(SEARCH as u32) {
            let index = (self.next.fetch_add(1, Ordering::Relaxed) % used) as usize;
            if let Some(found) = take(index) {
                return Some(found);
            }
        }
        let more = self.used.fetch_max((used * 2).min(BLOCKS as u32), Ordering::Relaxed).max(used);
        (more as usize..BLOCKS).take(SEARCH).find_map(take)
    }

    /// This process uses the block no more.
    pub(super) fn free(&self, index: u16) {
        self.taken.set(usize::from(index), false);
    }

    /// Whether this process uses the block.
    #[cfg(test)]
    pub(super) fn is_taken(&self, index: u16) -> bool {
        self.taken.has(usize::from(index))
    }

    /// Before a fork: until [`Blocks::after_fork`] no block is chosen, and every block that was is a connection by now. A handler that has
    /// interrupted the choice forks at its own risk: the block that was chosen last may be missed.
    pub(super) fn before_fork(&self, host: &impl LockHost) {
        self.choosing.freeze(host);
    }

    /// Notes as shared the pages in which something lives. The others are to be replaced.
    pub(super) fn part(&self) {
        self.shared.clear();
        for index in self.taken.all() {
            self.share(Self::page_of(index));
        }
    }

    /// After a fork, in the parent.
    pub(super) fn after_fork(&self, host: &impl LockHost) {
        self.choosing.thaw(host);
    }

    /// After a fork, in the child.
    pub(super) fn after_fork_in_child(&self, host: &impl LockHost) {
        self.choosing.thaw_in_child(host);
    }
}
