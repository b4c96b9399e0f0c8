//! The table of the program's descriptors: a word for each, 0 for those that are not ours.
//!
//! The table is private memory, as descriptors are a process' own: `fork` copies both, and `vfork` shares both (the child's
//! descriptors are copies, though: who may be such a child asks [`crate::process::is_visitor`] before it writes here).
//!
//! ```text
//!    31      28 27           16 15             0
//!   +----------+---------------+----------------+
//!   |   kind   |  generation   |     index      |
//!   +----------+---------------+----------------+
//! ```

mod words;

use std::ffi::c_int;
use words::DescriptorWords;

/// Descriptors from here on are never ours.
pub(crate) const DESCRIPTORS: usize = 1 << 20;

/// Untouched pages of it cost nothing.
static TABLE: DescriptorWords<DESCRIPTORS> = DescriptorWords::new();

/// The kind of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum DescriptorKind {
    /// Not ours.
    Stranger = 0,
    /// A connection; `index` and `generation` say which block of the arena.
    Connection = 1,
    /// A listening socket that is published; `index` is the listeners' own.
    Listener = 2,
    /// An epoll set; `index` is the sets' own.
    Epoll = 3,
    /// A descriptor of ours that the program does not know of.
    Hidden = 4,
    /// A UDP socket; `index` is [`crate::datagram`]'s own.
    Datagram = 5,
    /// A ring of `io_uring`, whose entries we read.
    Ring = 6,
}

/// A word of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(u32);

impl Entry {
    /// The entry of a descriptor that is not ours.
    pub(crate) const NONE: Self = Self(0);

    /// An entry; `generation` counts modulo 4096.
    pub(crate) const fn new(kind: DescriptorKind, generation: u32, index: u16) -> Self {
        Self((kind as u32) << 28 | (generation & 0xfff) << 16 | index as u32)
    }

    /// As it stands in the table.
    pub(crate) const fn bits(self) -> u32 {
        self.0
    }

    pub(crate) const fn kind(self) -> DescriptorKind {
        match self.0 >> 28 {
            1 => DescriptorKind::Connection,
            2 => DescriptorKind::Listener,
            3 => DescriptorKind::Epoll,
            4 => DescriptorKind::Hidden,
            5 => DescriptorKind::Datagram,
            6 => DescriptorKind::Ring,
            _ => DescriptorKind::Stranger,
        }
    }

    pub(crate) const fn generation(self) -> u32 {
        self.0 >> 16 & 0xfff
    }

    pub(crate) const fn index(self) -> u16 {
        (self.0 & 0xffff) as u16
    }
}

/// The entry of a descriptor. This is what every call of a stranger costs.
#[inline]
pub(crate) fn get(fd: c_int) -> Entry {
    // A negative number becomes a large one.
    Entry(TABLE.get(fd as usize))
}

/// Sets the entry of a descriptor and returns what it was. The entry of a descriptor beyond the table is lost: see [`fits`].
pub(crate) fn set(fd: c_int, entry: Entry) -> Entry {
    Entry(TABLE.set(fd as usize, entry.0))
}

/// Puts another entry in the place of this one, if it is still there.
pub(crate) fn replace(fd: c_int, from: Entry, to: Entry) -> bool {
    TABLE.replace(fd as usize, from.0, to.0)
}

/// Takes the entry out if it is still the one given.
pub(crate) fn remove(fd: c_int, entry: Entry) -> bool {
    TABLE.remove(fd as usize, entry.0)
}

/// Whether the table has room for this descriptor.
pub(crate) fn fits(fd: c_int) -> bool {
    usize::try_from(fd).is_ok_and(|fd| fd < DESCRIPTORS)
}

/// Every descriptor from `first` to `last` that has an entry.
pub(crate) fn entries(first: u32, last: u32) -> impl Iterator<Item = (c_int, Entry)> {
    TABLE.entries(first, last).map(|(fd, entry)| (fd as c_int, Entry(entry)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_keeps_kind_generation_and_index() {
        let e = Entry::new(DescriptorKind::Connection, 0x1abc, 0xffff);
        assert_eq!((e.kind(), e.generation(), e.index()), (DescriptorKind::Connection, 0xabc, 0xffff));
        assert_eq!(Entry::NONE.kind(), DescriptorKind::Stranger);
    }

    #[test]
    fn descriptors_out_of_range_are_strangers() {
        assert_eq!(get(-1), Entry::NONE);
        assert_eq!(get(c_int::MAX), Entry::NONE);
        assert_eq!(set(-1, Entry::new(DescriptorKind::Hidden, 0, 0)), Entry::NONE);
        assert!(!fits(-1) && !fits(DESCRIPTORS as c_int) && fits(DESCRIPTORS as c_int - 1));
    }

    #[test]
    fn only_the_entry_that_was_meant_is_removed() {
        // Far from any descriptor that tests of this process open.
        let fd = DESCRIPTORS as c_int - 5;
        let (old, new) = (Entry::new(DescriptorKind::Listener, 1, 7), Entry::new(DescriptorKind::Listener, 2, 7));
        set(fd, old);
        assert_eq!(set(fd, new), old);
        assert!(!remove(fd, old) && !replace(fd, old, old), "the number was used again meanwhile");
        assert!(replace(fd, new, old) && replace(fd, old, new));
        assert_eq!(entries(0, u32::MAX).find(|(f, _)| *f == fd), Some((fd, new)));
        assert!(entries(0, fd as u32 - 1).all(|(f, _)| f != fd));
        assert!(remove(fd, new));
        assert_eq!(get(fd), Entry::NONE);
    }
}
