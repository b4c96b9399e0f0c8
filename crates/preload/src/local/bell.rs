//! Our end of a connection's link, by which the peer rings and is rung.

use crate::{hidden, sys};
use partywall_region::bell;
use rustix::fd::OwnedFd;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

/// Waits, bells and switches between two looks whether a link is filling up. Each of them brings four bells at most (two for each wish: W3), and
/// a link holds some 270.
const OFTEN: u32 = 8;
/// A link that holds less than this is left alone.
const FULL: u64 = 32;
/// The least number of bells that stays in a link.
const SOME: u64 = 16;

/// The end of a link that this process has.
#[derive(Debug)]
pub(crate) struct OwnBell {
    /// Its descriptor, plus 1; 0 if there is none.
    link: AtomicU32,
    /// Bells, waits and switches, to look after the link now and then.
    uses: AtomicU32,
}

impl OwnBell {
    pub(super) const fn new() -> Self {
        Self { link: AtomicU32::new(0), uses: AtomicU32::new(0) }
    }

    /// The descriptor, which also hangs up when the peer is gone; -1 if there is none.
    #[inline]
    pub(crate) fn fd(&self) -> c_int {
        self.link.load(Ordering::Relaxed).wrapping_sub(1).cast_signed()
    }

    /// Keeps a new end. `false` if there is no number to spare for it.
    pub(crate) fn keep(&self, bell: OwnedFd) -> bool {
        let Some(kept) = hidden::keep_high(bell) else { return false };
        self.link.store(kept.cast_unsigned().wrapping_add(1), Ordering::Relaxed);
        true
    }

    /// Closes the end, by which the peer sees that we have gone. One in which the peer has left descriptors stays open.
    pub(crate) fn discard(&self) {
        if let Some(fd) = self.link.swap(0, Ordering::Relaxed).checked_sub(1).map(u32::cast_signed)
            && !bell::is_poisoned(sys::borrow(fd))
        {
            hidden::discard(fd);
        }
    }

    /// Rings the peer. Whether a thread that sleeps there hears it: a full bell has no edges.
    #[inline]
    pub(crate) fn ring(&self) -> bool {
        let link = self.fd();
        link >= 0 && bell::try_ring(sys::borrow(link), b'B').is_ok()
    }

    /// Looks, now and then, whether the link is filling up with bells, and takes some out. To be called for whatever may bring a bell:
    /// a wish, and a switch.
    ///
    /// A full link has no edges: a thread that sleeps on it would not hear the next bell. An honest peer rings twice for a wish and once for a
    /// switch at most, so a link whose bells are counted here never gets full. A dishonest peer keeps only itself waiting.
    #[inline]
    pub(crate) fn drain(&self) {
        if self.uses.fetch_add(1, Ordering::Relaxed).is_multiple_of(OFTEN) {
            self.drain_now();
        }
    }

    /// Never takes all, however many threads do this at once: an edge is delivered only while there is something to read.
    #[cold]
    pub(crate) fn drain_now(&self) {
        let link = self.fd();
        if link < 0 {
            return;
        }
        let link = sys::borrow(link);
        while let Ok(waiting) = rustix::io::ioctl_fionread(link)
            && waiting > FULL
        {
            let mut bells = [0u8; 64];
            let few = usize::try_from((waiting - SOME) / 4).unwrap_or(0).min(bells.len());
            if !matches!(bell::take(link, &mut bells[..few.max(1)]), Ok(1..)) {
                return;
            }
        }
    }
}
