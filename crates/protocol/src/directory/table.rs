//! A set of fingerprints that one process writes and any number read, without a lock.
//!
//! ```text
//!   bucket = one cache line = 8 slots                      slot: 0 empty, 1 tombstone, else a fingerprint
//!   +----+----+----+----+----+----+----+----+
//!   | f1 | f2 | f3 |  0 |  0 |  0 |  0 |  0 |     an empty slot in it: nothing that belongs here lies further on
//!   +----+----+----+----+----+----+----+----+
//!   | f4 | f5 | f6 |  1 | f8 | f9 | fa | fb |     none empty: a search goes on in the next bucket, up to MAX_PROBE
//!   +----+----+----+----+----+----+----+----+
//! ```
//!
//! A fingerprint begins its search at the bucket that its low bits say. At half load 19 of 20 searches, found or not, end in
//! that bucket: they touch one cache line.
//!
//! The writer knows how many fingerprints went past each bucket because it was full. A slot that is given up becomes a
//! tombstone while there are any, and empty when there are none; so a reader that runs beside the writer never misses a
//! fingerprint that is in the table throughout, nothing is ever moved, and no tombstone outlives its use.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::fingerprint::{EMPTY, Fingerprint, TOMBSTONE};
use partywall_shm::sync::{Access, Load, Ordering, Own, load_acquire};

/// Slots of a bucket.
pub const SLOTS: usize = 8;
/// Buckets in which a fingerprint can lie.
pub const MAX_PROBE: usize = 8;

/// One cache line of slots.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Bucket<A: Access = Own> {
    slots: [A::U64; SLOTS],
}

/// Whether `fingerprint` is in the table. `buckets` must be as many as a power of two.
#[inline]
pub fn contains<A: Access>(buckets: &[Bucket<A>], fingerprint: Fingerprint) -> bool {
    let wanted = fingerprint.word();
    for bucket in path(buckets.len(), fingerprint).filter_map(|at| buckets.get(at)) {
        let mut open = false;
        for slot in &bucket.slots {
            // SYNC POINT: acquires what the writer released with the fingerprint. The words are independent of each other.
            let word = load_acquire(slot);
            if word == wanted {
                return true;
            }
            open |= word == EMPTY;
        }
        if open {
            return false;
        }
    }
    false
}

/// The buckets in which it can lie, in the order of a search.
fn path(buckets: usize, fingerprint: Fingerprint) -> impl Iterator<Item = usize> {
    let mask = buckets.wrapping_sub(1);
    // The low bits choose the bucket; a table has fewer buckets than there are numbers, so the cast loses nothing that counts.
    let home = fingerprint.word() as usize;
    (0..MAX_PROBE.min(buckets)).map(move |step| home.wrapping_add(step) & mask)
}

/// The private state of a table's only writer. The words that it reads in the table are its own: no other process writes them.
#[derive(Debug)]
pub struct TableWriter {
    /// For each slot, how often its fingerprint was inserted.
    counts: Vec<u32>,
    /// For each bucket, how many fingerprints in the table are beyond it because it was full when they came.
    passed: Vec<u32>,
    /// Slots in use.
    used: usize,
    /// The entries that found no room, each with the number of times it was inserted. Their owners may remove them as any other; readers
    /// do not find them.
    spilled: BTreeMap<u64, u32>,
}

impl TableWriter {
    /// The writer of an empty table with this number of buckets, a power of two.
    pub fn new(buckets: usize) -> Self {
        debug_assert!(buckets.is_power_of_two());
        Self { counts: vec![0; buckets * SLOTS], passed: vec![0; buckets], used: 0, spilled: BTreeMap::new() }
    }

    /// How many different fingerprints there can be: half as many as slots, so that searches stay short.
    pub fn capacity(&self) -> usize {
        self.counts.len() / 2
    }

    /// How many different fingerprints readers find.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether nothing is inserted.
    pub fn is_empty(&self) -> bool {
        self.used == 0 && self.spilled.is_empty()
    }

    /// Inserts a fingerprint, or counts it once more if it is there. `false` if there is no room for it, in the table or where
    /// it belongs in it: readers will not find it, and it is to be removed all the same.
    pub fn insert(&mut self, buckets: &[Bucket], fingerprint: Fingerprint) -> bool {
        if let Some(count) = self.spilled.get_mut(&fingerprint.word()) {
            *count = count.saturating_add(1);
            return false;
        }
        if let Some((at, slot)) = self.find(buckets, fingerprint) {
            let count = &mut self.counts[at * SLOTS + slot];
            *count = count.saturating_add(1);
            return true;
        }
        let free = |at: usize| self.counts[at * SLOTS..][..SLOTS].iter().position(|count| *count == 0);
        let place = path(buckets.len(), fingerprint).find_map(|at| free(at).map(|slot| (at, slot)));
        let Some((at, slot)) = place.filter(|_| self.used < self.capacity()) else {
            self.spilled.insert(fingerprint.word(), 1);
            return false;
        };
        for full in path(buckets.len(), fingerprint).take_while(|bucket| *bucket != at) {
            self.passed[full] += 1;
        }
        self.counts[at * SLOTS + slot] = 1;
        self.used += 1;
        // SYNC POINT: whatever the writer stored before is seen by the reader that finds it.
        buckets[at].slots[slot].store(fingerprint.word(), Ordering::Release);
        true
    }

    /// Takes one insertion back; the fingerprint is gone with its last.
    pub fn remove(&mut self, buckets: &[Bucket], fingerprint: Fingerprint) {
        if let Some(count) = self.spilled.get_mut(&fingerprint.word()) {
            *count -= 1;
            if *count == 0 {
                self.spilled.remove(&fingerprint.word());
            }
            return;
        }
        let Some((at, slot)) = self.find(buckets, fingerprint) else { return };
        let count = &mut self.counts[at * SLOTS + slot];
        *count -= 1;
        if *count > 0 {
            return;
        }
        self.used -= 1;
        buckets[at].slots[slot].store(TOMBSTONE, Ordering::Release);
        for full in path(buckets.len(), fingerprint).take_while(|bucket| *bucket != at) {
            self.passed[full] -= 1;
            self.sweep(buckets, full);
        }
        self.sweep(buckets, at);
    }

    /// Makes the tombstones of a bucket empty if nothing has gone past it.
    fn sweep(&self, buckets: &[Bucket], at: usize) {
        if self.passed[at] == 0 {
            for (slot, count) in self.counts[at * SLOTS..][..SLOTS].iter().enumerate() {
                if *count == 0 {
                    buckets[at].slots[slot].store(EMPTY, Ordering::Release);
                }
            }
        }
    }

    fn find(&self, buckets: &[Bucket], fingerprint: Fingerprint) -> Option<(usize, usize)> {
        path(buckets.len(), fingerprint).find_map(|at| {
            let is_it = |slot: &usize| {
                self.counts[at * SLOTS + slot] != 0
                    && Load::load(&buckets[at].slots[*slot], Ordering::Relaxed) == fingerprint.word()
            };
            (0..SLOTS).find(is_it).map(|slot| (at, slot))
        })
    }
}

#[cfg(test)]
impl Bucket {
    pub(super) fn new() -> Self {
        Self { slots: core::array::from_fn(|_| partywall_shm::sync::AtomicU64::new(EMPTY)) }
    }

    pub(super) fn words(&self) -> [u64; SLOTS] {
        core::array::from_fn(|slot| self.slots[slot].load(Ordering::Relaxed))
    }
}
