//! Descriptors that were put into an epoll set before they were connections of ours.
//!
//! A program may register a socket and connect it afterwards. That registration was not recorded, so such a connection stays on TCP.

use crate::table::DESCRIPTORS;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bit for each descriptor. Untouched pages of it cost nothing.
static WATCHED: [AtomicU64; DESCRIPTORS / 64] = [const { AtomicU64::new(0) }; DESCRIPTORS / 64];

#[inline]
fn bit(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    WATCHED.get(fd as usize / 64).map(|word| (word, 1 << (fd as usize % 64)))
}

/// It is in a set.
pub(crate) fn watch(fd: c_int) {
    if let Some((word, bit)) = bit(fd)
        && word.load(Ordering::Relaxed) & bit == 0
    {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// The number stands for something new, or for nothing.
#[inline]
pub(crate) fn unwatch(fd: c_int) {
    if let Some((word, bit)) = bit(fd)
        && word.load(Ordering::Relaxed) & bit != 0
    {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether it was put into a set.
pub(crate) fn was_watched(fd: c_int) -> bool {
    bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_number_is_watched_until_unwatched() {
        let fd = DESCRIPTORS as c_int - 9;
        assert!(!was_watched(fd));
        watch(fd);
        assert!(was_watched(fd) && !was_watched(fd - 1) && !was_watched(fd + 1));
        unwatch(fd);
        assert!(!was_watched(fd));
        watch(-1);
        assert!(!was_watched(-1));
    }
}
