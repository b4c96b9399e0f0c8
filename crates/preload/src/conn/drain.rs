//! Taking surplus bells out of a connection's own link.

use super::Conn;
use crate::sys;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// Waits, bells and switches between two looks whether a link is filling up. Each of them brings four bells at most (two for each wish: W3), and
/// a link holds some 270.
const OFTEN: u32 = 8;
/// A link that holds less than this is left alone.
const FULL: u64 = 32;
/// The least number of bells that stays in a link.
const SOME: u64 = 16;

impl Conn {
    /// Looks, now and then, whether the link is filling up with bells, and takes some out. To be called for whatever may bring a bell:
    /// a wish, and a switch.
    ///
    /// A full link has no edges: a thread that sleeps on it would not hear the next bell. An honest peer rings twice for a wish and once for a
    /// switch at most, so a link whose bells are counted here never gets full. A dishonest peer keeps only itself waiting.
    #[inline]
    pub(crate) fn drain(&self) {
        if self.local().bells.fetch_add(1, Ordering::Relaxed).is_multiple_of(OFTEN) {
            self.drain_now();
        }
    }

    /// Never takes all, however many threads do this at once: an edge is delivered only while there is something to read.
    #[cold]
    pub(crate) fn drain_now(&self) {
        let link: c_int = self.link();
        if link < 0 {
            return;
        }
        let link = sys::borrow(link);
        while let Ok(waiting) = rustix::io::ioctl_fionread(link)
            && waiting > FULL
        {
            let mut bells = [0u8; 64];
            let few = usize::try_from((waiting - SOME) / 4).unwrap_or(0).min(bells.len());
            if !matches!(partywall_region::bell::take(link, &mut bells[..few.max(1)]), Ok(1..)) {
                return;
            }
        }
    }
}
