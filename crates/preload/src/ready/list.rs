//! Circular lists through the registrations, which are found by number: nothing is allocated, nothing moves.

use super::registration::{self, Links};
use super::word::AtomicWord;
use std::sync::atomic::AtomicU32;

/// The list of those that are looked at.
pub(super) const HOT: usize = 0;
/// The list of all of a set.
pub(super) const ALL: usize = 1;

/// A list; a thread that touches it holds the lock of its set.
#[derive(Debug)]
pub(super) struct List<const WHICH: usize> {
    head: AtomicU32,
    len: AtomicU32,
}

impl<const WHICH: usize> List<WHICH> {
    pub(super) const fn new() -> Self {
        Self { head: AtomicU32::new(0), len: AtomicU32::new(0) }
    }

    fn links(number: u32) -> &'static Links {
        &registration::get(number).links[WHICH]
    }

    /// How many are in it.
    pub(super) fn len(&self) -> u32 {
        self.len.get()
    }

    /// The first, 0 if there is none.
    pub(super) fn first(&self) -> u32 {
        self.head.get()
    }

    /// The member after `number`; after the last comes the first.
    #[inline]
    pub(super) fn next(number: u32) -> u32 {
        Self::links(number).next.get()
    }

    /// Makes a member the first, those before it the last.
    pub(super) fn rotate(&self, number: u32) {
        self.head.put(number);
    }

    /// Puts it before all others.
    pub(super) fn insert(&self, number: u32) {
        let own = Self::links(number);
        match self.head.get() {
            0 => {
                own.next.put(number);
                own.prev.put(number);
            }
            head => {
                let last = Self::links(head).prev.get();
                own.next.put(head);
                own.prev.put(last);
                Self::links(last).next.put(number);
                Self::links(head).prev.put(number);
            }
        }
        self.head.put(number);
        self.len.put(self.len.get() + 1);
    }

    /// Takes a member out.
    pub(super) fn remove(&self, number: u32) {
        let own = Self::links(number);
        let (next, prev) = (own.next.get(), own.prev.get());
        if next == number {
            self.head.put(0);
        } else {
            Self::links(prev).next.put(next);
            Self::links(next).prev.put(prev);
            if self.head.get() == number {
                self.head.put(next);
            }
        }
        self.len.put(self.len.get() - 1);
    }

    /// Every member, from the first on. During the iteration only the member just given may be taken out.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + use<WHICH> {
        let mut next = self.head.get();
        (0..self.len.get()).map(move |_| {
            let this = next;
            next = Self::next(this);
            this
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_keeps_order_through_insert_remove_and_rotate() {
        // Numbers that no other test's registrations have: the pool is taken from its beginning.
        let list = List::<HOT>::new();
        let order = |l: &List<HOT>| l.iter().map(|n| n - 100_000).collect::<Vec<_>>();
        for n in 1..=4 {
            list.insert(100_000 + n);
        }
        assert_eq!(order(&list), [4, 3, 2, 1]);
        list.rotate(100_002);
        assert_eq!(order(&list), [2, 1, 4, 3]);
        list.remove(100_002);
        list.remove(100_004);
        assert_eq!(order(&list), [1, 3]);
        assert_eq!(List::<HOT>::next(100_003), 100_001);
        for n in [3, 1] {
            list.remove(100_000 + n);
        }
        assert_eq!((list.len(), list.first()), (0, 0));
    }
}
