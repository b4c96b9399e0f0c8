//! Descriptors of ours that the program does not know of: links, the broker's session, epoll sets to sleep on, and, while numbers
//! are plentiful, the memory of rings.
//!
//! They live high, near the limit, where the program's own numbers do not come: programs close ranges of descriptors, count on
//! getting the lowest number free, and index arrays by them. What the program closes by number passes these by.

use crate::table::{self, Entry, Kind};
use rustix::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use rustix::process::Resource;
use std::ffi::c_int;

/// Moves a descriptor high, enters it as hidden, and returns its number. [`discard`] closes it.
pub(crate) fn keep(fd: OwnedFd) -> c_int {
    // With less than nothing to be had there, the number stays what it is.
    let fd = match rustix::io::fcntl_dupfd_cloexec(&fd, ours().0) {
        Ok(high) => high,
        Err(_) => fd,
    };
    enter(fd)
}

/// The same for a descriptor that one can do without: `None`, and it is closed, unless at least half of our numbers are free.
pub(crate) fn keep_if_plenty(fd: OwnedFd) -> Option<c_int> {
    let (floor, top) = ours();
    let high = rustix::io::fcntl_dupfd_cloexec(&fd, floor).ok()?;
    // The lowest number that is free: those below are in use.
    (high.as_raw_fd() < floor + (top - floor) / 2).then(|| enter(high))
}

/// The numbers that are for us: the last quarter below the limit.
fn ours() -> (c_int, c_int) {
    let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(1024);
    let top = limit.min(table::DESCRIPTORS as u64);
    let number = |n: u64| c_int::try_from(n).unwrap_or(c_int::MAX);
    (number(top - top / 4), number(top))
}

fn enter(fd: OwnedFd) -> c_int {
    let number = fd.into_raw_fd();
    table::set(number, Entry::new(Kind::Hidden, 0, 0));
    number
}

/// Closes a descriptor that [`keep`] has returned.
#[expect(unsafe_code, reason = "takes back ownership of a descriptor that was kept by number")]
pub(crate) fn discard(number: c_int) {
    if table::get(number).kind() == Kind::Hidden {
        table::set(number, Entry::NONE);
        // SAFETY: `keep` gave ownership up for this number, the table says that it is still ours, and it is out of the
        // table from here on.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }
}

/// Whether the program must not touch it.
pub(crate) fn is(number: c_int) -> bool {
    table::get(number).kind() == Kind::Hidden
}
