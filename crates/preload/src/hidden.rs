//! Descriptors of this library that are hidden from the program: links, the broker's session, epoll sets to sleep on, and, while numbers
//! are plentiful, the memory of rings.
//!
//! They have high numbers, above the program's own: programs close ranges of descriptors, rely on getting the lowest free number, and
//! index arrays by them. Calls of the program that close by number skip these.
//!
//! ```text
//!   0          limit / 2       3/4 limit      limit (soft)                limit (hard)
//!   | the program's own                       |  ours, where the hard limit is higher |
//!   |    rings only while below: |   ours, if it is not  |
//! ```
//!
//! The kernel compares numbers with the soft limit, and does not count descriptors. So those of ours above it take nothing away from
//! the program. To put one there, the soft limit is raised for that moment.

use crate::sys;
use crate::table::{self, DescriptorKind, Entry};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// How many numbers above the soft limit are for us.
const ABOVE: u64 = 16_384;
/// The longest wait for that thread. Three calls of the kernel take less.
const LONGEST_RAISE: Duration = Duration::from_millis(1);
/// A thread has raised the soft limit for a moment.
static RAISED: AtomicBool = AtomicBool::new(false);
/// The children that are made just now, by threads that need the limit as it is.
static KEPT: AtomicU32 = AtomicU32::new(0);

/// Moves a descriptor high, enters it as hidden, and returns its number. [`discard`] closes it.
pub(crate) fn keep(fd: OwnedFd) -> c_int {
    if let Some(high) = move_above(&fd) {
        return enter(high);
    }
    // With less than nothing to be had there, the number stays what it is.
    let fd = match rustix::io::fcntl_dupfd_cloexec(&fd, ours().0) {
        Ok(high) => high,
        Err(_) => fd,
    };
    enter(fd)
}

/// Keeps a descriptor only at one of our own numbers: closes it and returns `None` if they are all in use.
pub(crate) fn keep_high(fd: OwnedFd) -> Option<c_int> {
    if let Some(high) = move_above(&fd) {
        return Some(enter(high));
    }
    rustix::io::fcntl_dupfd_cloexec(&fd, ours().0).ok().map(enter)
}

/// Keeps an optional descriptor: closes it and returns `None` unless at least half of our numbers are free.
pub(crate) fn keep_if_plenty(fd: OwnedFd) -> Option<c_int> {
    if let Some(high) = move_above(&fd) {
        return Some(enter(high));
    }
    let (floor, top) = ours();
    let high = rustix::io::fcntl_dupfd_cloexec(&fd, floor).ok()?;
    // The lowest number that is free: those below are in use.
    (high.as_raw_fd() < floor + (top - floor) / 2).then(|| enter(high))
}

/// Whether a ring may have descriptors of ours: above the soft limit always, and below it while the program has less than a half of
/// the numbers, and we have half of ours left. `fd` is any that is open.
pub(crate) fn are_plenty(fd: BorrowedFd<'_>) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if room_above(&limit).is_some() {
        return true;
    }
    let (floor, top) = ours();
    // The lowest numbers that are free: what is below them is in use.
    let lowest = |from| rustix::io::fcntl_dupfd_cloexec(fd, from).map_or(c_int::MAX, |copy| copy.as_raw_fd());
    lowest(0) < top / 2 && lowest(floor) < floor + (top - floor) / 2
}

/// While it exists, no thread raises the soft limit: a child is made, which would keep it.
#[derive(Debug)]
pub(crate) struct LimitKept;

impl LimitKept {
    /// Waits until no thread has the limit raised.
    pub(crate) fn begin() -> Self {
        keep_limit();
        Self
    }
}

impl Drop for LimitKept {
    fn drop(&mut self) {
        release_limit();
    }
}

/// As [`LimitKept::begin`], up to [`release_limit`].
pub(crate) fn keep_limit() {
    KEPT.fetch_add(1, Ordering::SeqCst);
    let begin = sys::now();
    // A handler that interrupts the thread that has raised it would wait for itself.
    while RAISED.load(Ordering::SeqCst) && sys::now().saturating_sub(begin) < LONGEST_RAISE {
        rustix::thread::sched_yield();
    }
}

/// The child is made.
pub(crate) fn release_limit() {
    KEPT.fetch_sub(1, Ordering::SeqCst);
}

/// This process is a child. The threads that may have been about to raise the limit, or to make children, are not here.
pub(crate) fn became_child() {
    KEPT.store(0, Ordering::SeqCst);
    // EDGE raised-limit: the limit is as it was.
    RAISED.store(false, Ordering::Release);
}

/// Where the soft limit may be raised to, if there are numbers above it that we can remember.
fn room_above(limit: &Rlimit) -> Option<(u64, u64)> {
    let soft = limit.current?;
    let hard = limit.maximum.unwrap_or(u64::MAX);
    let top = hard.min(soft.saturating_add(ABOVE)).min(table::DESCRIPTORS as u64);
    (top > soft).then_some((soft, top))
}

/// Copies a descriptor to a number above the soft limit. `None`: there is none to be had, or another thread does this just now.
fn move_above(fd: &OwnedFd) -> Option<OwnedFd> {
    let limit = getrlimit(Resource::Nofile);
    let (soft, top) = room_above(&limit)?;
    // EDGE raised-limit: acquires from the store below, so that the limit asked for here is that of before or after.
    if RAISED.swap(true, Ordering::SeqCst) {
        return None;
    }
    // A child would keep the raised limit, and so would the program that it executes. Either this thread sees that one is made, or the thread that
    // makes it sees the word.
    if KEPT.load(Ordering::SeqCst) != 0 {
        // EDGE raised-limit: the limit is as it was.
        RAISED.store(false, Ordering::Release);
        return None;
    }
    // Asked again: the first answer may have been another thread's raised limit.
    let is_same = getrlimit(Resource::Nofile).current == limit.current;
    let raised = Rlimit { current: Some(top), maximum: limit.maximum };
    let mut moved = None;
    if is_same && setrlimit(Resource::Nofile, raised).is_ok() {
        moved = rustix::io::fcntl_dupfd_cloexec(fd, c_int::try_from(soft).unwrap_or(c_int::MAX)).ok();
        // To lower it again is always allowed.
        let _ = setrlimit(Resource::Nofile, limit);
    }
    // EDGE raised-limit: releases the lowered limit; acquired in the swap above.
    RAISED.store(false, Ordering::Release);
    moved
}

/// The numbers that are for us where none are above the soft limit: the last quarter below it.
fn ours() -> (c_int, c_int) {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(1024);
    let top = limit.min(table::DESCRIPTORS as u64);
    let number = |n: u64| c_int::try_from(n).unwrap_or(c_int::MAX);
    (number(top - top / 4), number(top))
}

fn enter(fd: OwnedFd) -> c_int {
    let number = fd.into_raw_fd();
    table::set(number, Entry::new(DescriptorKind::Hidden, 0, 0));
    number
}

/// Closes a descriptor that [`keep`] has returned.
pub(crate) fn discard(number: c_int) {
    drop(take_back(number));
}

/// The descriptor that [`keep`] has returned, which is not hidden any more. `None` if it was closed since.
#[expect(unsafe_code, reason = "takes back ownership of a descriptor that was kept by number")]
pub(crate) fn take_back(number: c_int) -> Option<OwnedFd> {
    if !is(number) {
        return None;
    }
    table::set(number, Entry::NONE);
    // SAFETY: `keep` gave ownership up for this number, the table says that it is still ours, and it is out of the
    // table from here on.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Whether the program must not touch it.
pub(crate) fn is(number: c_int) -> bool {
    table::get(number).kind() == DescriptorKind::Hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_not_raised_while_a_child_is_made() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let limit = || getrlimit(Resource::Nofile).current;
        let kept = LimitKept::begin();
        let before = limit();
        assert!((0..1000).all(|_| move_above(&file).is_none() && limit() == before));
        drop(kept);
        if room_above(&getrlimit(Resource::Nofile)).is_some() {
            // Another test may make a child, or move a descriptor.
            assert!((0..100_000).any(|_| move_above(&file).is_some()));
        }
    }
}
