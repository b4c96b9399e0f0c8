//! The words of the table, by descriptor. Loom runs this code (`crates/shm/tests/loom_preload.rs`).

use partywall_shm::sync::{AtomicU32, Ordering};

/// A word for each of `N` descriptors, 0 for no entry.
pub(super) struct DescriptorWords<const N: usize> {
    words: [AtomicU32; N],
    /// No descriptor at or above this was ever entered.
    highest: AtomicU32,
}

impl<const N: usize> DescriptorWords<N> {
    /// No descriptor has an entry.
    #[cfg(not(loom))]
    pub(super) const fn new() -> Self {
        Self { words: [const { AtomicU32::new(0) }; N], highest: AtomicU32::new(0) }
    }

    /// No descriptor has an entry.
    #[cfg(loom)]
    pub(super) fn new() -> Self {
        Self { words: std::array::from_fn(|_| AtomicU32::new(0)), highest: AtomicU32::new(0) }
    }

    /// The word of a descriptor; 0 beyond the last.
    #[inline]
    pub(super) fn get(&self, fd: usize) -> u32 {
        // EDGE entry: acquires from `DescriptorWords::set`; what the entry stands for is complete.
        self.words.get(fd).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Sets the word of a descriptor and returns what it was. Beyond the last it is lost.
    pub(super) fn set(&self, fd: usize, entry: u32) -> u32 {
        let Some(word) = self.words.get(fd) else { return 0 };
        if entry != 0 && self.highest.load(Ordering::Relaxed) <= fd as u32 {
            // The swap below releases it, with the entry: a thread that sees the entry finds it in `entries`.
            self.highest.fetch_max(fd as u32 + 1, Ordering::Relaxed);
        }
        // EDGE entry: releases what the entry stands for; acquired in `DescriptorWords::get`. Acquires what the entry before it stood for.
        word.swap(entry, Ordering::AcqRel)
    }

    /// Takes the entry out if it is still the one given. Of several threads that do, one succeeds.
    pub(super) fn remove(&self, fd: usize, entry: u32) -> bool {
        self.replace(fd, entry, 0)
    }

    /// Puts another entry in the place of the one given, if that is still there. Of several threads that do so or take it out, one succeeds.
    pub(super) fn replace(&self, fd: usize, from: u32, to: u32) -> bool {
        // EDGE entry: as in `DescriptorWords::set`.
        self.words.get(fd).is_some_and(|w| w.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Every descriptor from `first` to `last` that has an entry.
    pub(super) fn entries(&self, first: u32, last: u32) -> impl Iterator<Item = (usize, u32)> {
        let end = self.highest.load(Ordering::Relaxed).min(last.saturating_add(1));
        (first..end).map(|fd| (fd as usize, self.get(fd as usize))).filter(|(_, entry)| *entry != 0)
    }
}
