//! The book of a window: which of its pages are in use, a byte for each, in the part of the file before the data.
//!
//! The broker keeps it, and reads it when it starts again: programs of before may still use their places. A machine whose windows are
//! memory devices sees nothing of it. One whose windows are PCI devices can write the book of a window that it owns; what
//! that spoils are its own connections.

use crate::RegionError;
use partywall_protocol::window::{BOOK_OFFSET, BOOK_PAGES, DATA_OFFSET};
use partywall_shm::layout::PAGE;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::ops::Range;

/// The first bytes of the block before the pages.
const MAGIC: &[u8; 8] = b"PWPLACES";
/// Bytes of the block that has the magic.
const BLOCK: u64 = PAGE;

/// Begins the book of a new window, in which nothing is in use.
pub(super) fn begin(window: BorrowedFd<'_>) -> rustix::io::Result<()> {
    write(window, BOOK_OFFSET, MAGIC)
}

/// Notes that a part of a window is in use from now on, or no longer: bytes from the header on.
///
/// # Errors
/// The window is too large for a book, or the system's.
pub fn note(window: BorrowedFd<'_>, part: Range<u64>, in_use: bool) -> Result<(), RegionError> {
    let error = |e| RegionError::system("note a place of a window", part.start, e);
    let (from, to) = (part.start / PAGE, part.end.div_ceil(PAGE));
    if from > to || to > BOOK_PAGES {
        return Err(error(Errno::RANGE));
    }
    let marks = vec![u8::from(in_use); usize::try_from(to - from).map_err(|_| error(Errno::RANGE))?];
    write(window, BOOK_OFFSET + BLOCK + from, &marks).map_err(error)
}

/// The parts that are in use, in order; `None` if the window has no book.
pub fn noted(window: BorrowedFd<'_>) -> Option<Vec<Range<u64>>> {
    let mut magic = [0; MAGIC.len()];
    let size = u64::try_from(rustix::fs::fstat(window).ok()?.st_size).ok()?;
    let pages = size.checked_sub(DATA_OFFSET)? / PAGE;
    if pages > BOOK_PAGES || read(window, BOOK_OFFSET, &mut magic).is_none() || magic != *MAGIC {
        return None;
    }
    // A private copy: an owner may write its book at any time.
    let mut marks = vec![0; usize::try_from(pages).ok()?];
    read(window, BOOK_OFFSET + BLOCK, &mut marks)?;
    let mut parts: Vec<Range<u64>> = Vec::new();
    for (page, _) in (0..).zip(&marks).filter(|(_, mark)| **mark != 0) {
        let start = page * PAGE;
        match parts.last_mut() {
            Some(last) if last.end == start => last.end += PAGE,
            _ => parts.push(start..start + PAGE),
        }
    }
    Some(parts)
}

fn write(window: BorrowedFd<'_>, at: u64, bytes: &[u8]) -> rustix::io::Result<()> {
    match rustix::io::pwrite(window, bytes, at)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(Errno::NOSPC),
    }
}

fn read(window: BorrowedFd<'_>, at: u64, bytes: &mut [u8]) -> Option<()> {
    let len = bytes.len();
    (rustix::io::pread(window, bytes, at).ok()? == len).then_some(())
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::pmem::{WindowFile, WindowSpec};
    use rustix::fd::AsFd as _;

    fn spec() -> WindowSpec {
        WindowSpec { room: 4 << 20, owner: "a".into(), peer: "b".into() }
    }

    #[test]
    fn parts_in_use_are_read_again() {
        let window = WindowFile::begin(&spec()).unwrap();
        let noted = || noted(window.as_fd()).unwrap();
        assert_eq!(noted(), []);
        note(window.as_fd(), 2 * PAGE..4 * PAGE, true).unwrap();
        note(window.as_fd(), 4 * PAGE..5 * PAGE, true).unwrap();
        note(window.as_fd(), 9 * PAGE..9 * PAGE + 1, true).unwrap();
        assert_eq!(noted(), [2 * PAGE..5 * PAGE, 9 * PAGE..10 * PAGE]);
        note(window.as_fd(), 3 * PAGE..4 * PAGE, false).unwrap();
        assert_eq!(noted(), [2 * PAGE..3 * PAGE, 4 * PAGE..5 * PAGE, 9 * PAGE..10 * PAGE]);
    }

    #[test]
    fn part_beyond_the_book_is_refused() {
        let window = WindowFile::begin(&spec()).unwrap();
        let far = BOOK_PAGES * PAGE;
        assert!(note(window.as_fd(), far - PAGE..far + 1, true).is_err());
        assert!(noted(window.as_fd()).is_some_and(|parts| parts.is_empty()));
    }

    #[test]
    fn window_without_book_has_none() {
        let window = WindowFile::begin(&spec()).unwrap();
        rustix::io::pwrite(&window, &[0; 8], BOOK_OFFSET).unwrap();
        assert_eq!(noted(window.as_fd()), None);
    }
}
