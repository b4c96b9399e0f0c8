//! The allocator of a window's pages.
//!
//! It is private bookkeeping that no peer sees. The broker allocates the places of a window with it, and a member of a group its buffers.

use crate::layout::PAGE;
use alloc::collections::BTreeMap;

/// The taken and the free bytes of a range, in pages.
#[derive(Debug, Clone)]
pub struct Carve {
    /// Where free parts begin, and how long they are. No two touch.
    free: BTreeMap<u64, u64>,
    /// Where taken parts begin, and how long they are.
    taken: BTreeMap<u64, u64>,
    /// Where the range ends.
    end: u64,
}

impl Carve {
    /// All of `from..to` is free.
    pub fn new(from: u64, to: u64) -> Self {
        let from = from.next_multiple_of(PAGE);
        let len = (to / PAGE * PAGE).saturating_sub(from);
        Self { free: (len > 0).then_some((from, len)).into_iter().collect(), taken: BTreeMap::new(), end: from + len }
    }

    /// The range goes on up to `to`, and what is new of it is free.
    pub fn extend(&mut self, to: u64) {
        let from = self.end;
        let to = to / PAGE * PAGE;
        if to > from {
            self.end = to;
            self.release(from, to - from);
        }
    }

    /// Takes `len` bytes, rounded up to pages, from the first free part that is large enough.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let (&start, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&start);
        if room > len {
            self.free.insert(start + len, room - len);
        }
        self.taken.insert(start, len);
        Some(start)
    }

    /// Takes this part, in pages, if all of it is free.
    pub fn take_at(&mut self, start: u64, len: u64) -> bool {
        let Some(len) = len.max(1).checked_next_multiple_of(PAGE) else { return false };
        let Some(end) = start.checked_add(len).filter(|_| start.is_multiple_of(PAGE)) else { return false };
        let Some((&from, &room)) = self.free.range(..=start).next_back() else { return false };
        if end > from + room {
            return false;
        }
        self.free.remove(&from);
        for (part, room) in [(from, start - from), (end, from + room - end)] {
            if room > 0 {
                self.free.insert(part, room);
            }
        }
        self.taken.insert(start, len);
        true
    }

    /// Gives back what `take` has given; `false` if it has not, or it has been given back.
    pub fn give_back(&mut self, start: u64) -> bool {
        let Some(len) = self.taken.remove(&start) else { return false };
        self.release(start, len);
        true
    }

    /// Makes a part free that is neither.
    fn release(&mut self, mut start: u64, mut len: u64) {
        if let Some(after) = self.free.remove(&(start + len)) {
            len += after;
        }
        if let Some((&before, &room)) = self.free.range(..start).next_back()
            && before + room == start
        {
            start = before;
            len += room;
        }
        self.free.insert(start, len);
    }

    /// Bytes that are free, in all.
    pub fn free(&self) -> u64 {
        self.free.values().sum()
    }

    /// Bytes that are taken, in all.
    pub fn taken(&self) -> u64 {
        self.taken.values().sum()
    }

    /// Whether nothing is taken.
    pub fn is_unused(&self) -> bool {
        self.taken.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn parts_never_overlap_and_all_are_returned() {
        let mut carve = Carve::new(1, 1 + 100 * PAGE);
        let whole = carve.free();
        assert_eq!(whole, 99 * PAGE, "whole pages only");
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut random = 1u64;
        for _ in 0..5000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = (random >> 40) % (20 * PAGE);
            if random & 1 << 33 == 0 {
                if let Some(start) = carve.take(len) {
                    assert!(start >= PAGE && start + len <= 100 * PAGE && start.is_multiple_of(PAGE));
                    assert!(taken.iter().all(|(s, l)| start + len.max(1) <= *s || s + l <= start), "overlap");
                    taken.push((start, len.max(1).next_multiple_of(PAGE)));
                }
            } else if !taken.is_empty() {
                let (start, _) = taken.swap_remove((random >> 8) as usize % taken.len());
                assert!(carve.give_back(start));
                assert!(!carve.give_back(start), "once only");
            }
            assert_eq!(carve.free() + taken.iter().map(|(_, l)| l).sum::<u64>(), whole);
        }
        taken.iter().for_each(|(start, _)| assert!(carve.give_back(*start)));
        assert!(carve.is_unused());
        assert_eq!(carve.take(whole), Some(PAGE), "one piece again");
        assert_eq!(carve.take(1), None);
    }

    #[test]
    fn take_at_rejects_used_and_outside_ranges() {
        let mut carve = Carve::new(PAGE, 11 * PAGE);
        assert!(carve.take_at(3 * PAGE, 2 * PAGE));
        for (start, len) in
            [(0, PAGE), (2 * PAGE, 2 * PAGE), (4 * PAGE, PAGE), (10 * PAGE, 2 * PAGE), (u64::MAX - 1, 9)]
        {
            assert!(!carve.take_at(start, len), "{start} {len}");
        }
        assert_eq!(carve.free(), 8 * PAGE);
        assert_eq!(carve.take(2 * PAGE), Some(PAGE));
        assert_eq!(carve.take(PAGE), Some(5 * PAGE));
        assert!(carve.give_back(3 * PAGE) && carve.take_at(3 * PAGE, PAGE) && carve.take_at(10 * PAGE, 1));
    }

    #[test]
    fn extend_merges_with_trailing_free_range() {
        let mut carve = Carve::new(PAGE, 3 * PAGE);
        carve.extend(3 * PAGE);
        carve.extend(PAGE);
        assert_eq!((carve.free(), carve.take(3 * PAGE)), (2 * PAGE, None));
        let first = carve.take(PAGE).unwrap();
        carve.extend(5 * PAGE + 5);
        assert_eq!(carve.free(), 3 * PAGE, "whole pages");
        assert_eq!(carve.take(3 * PAGE), Some(first + PAGE));
        carve.extend(6 * PAGE);
        assert_eq!(carve.take(PAGE), Some(5 * PAGE), "behind what is taken");
        assert!(carve.give_back(first) && carve.give_back(5 * PAGE) && carve.give_back(first + PAGE));
        assert!(carve.is_unused());
        assert_eq!(carve.take(5 * PAGE), Some(PAGE));
        // A range that began empty.
        let mut carve = Carve::new(2 * PAGE, PAGE);
        assert_eq!(carve.take(1), None);
        carve.extend(3 * PAGE);
        assert_eq!((carve.take(1), carve.take(1)), (Some(2 * PAGE), None));
    }

    #[test]
    fn impossible_requests_are_refused() {
        let mut carve = Carve::new(0, 10 * PAGE);
        assert_eq!(carve.take(u64::MAX), None);
        assert_eq!(carve.take(11 * PAGE), None);
        assert!(!carve.give_back(0));
        assert_eq!(Carve::new(10 * PAGE, PAGE).take(1), None);
    }
}
