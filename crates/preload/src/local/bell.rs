//! Our end of a connection's bell, by which the peer rings and is rung: a link, and between machines with doorbell devices two events.

use crate::{hidden, sys};
use partywall_region::bell::{self, Heard};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Waits, bells and switches between two looks whether a link is filling up. Each of them brings four bells at most (two for each wish: W3), and
/// a link holds some 270.
const OFTEN: u32 = 8;
/// A link that holds less than this is left alone.
const FULL: u64 = 32;
/// The least number of bells that stays in a link.
const SOME: u64 = 16;

/// An interrupt may be lost, so a thread that may be rung by one looks again after this time (protocol I6).
const LATE: Duration = Duration::from_secs(1);

/// The bells of this process that are rung by interrupts.
static INTERRUPTED: AtomicU32 = AtomicU32::new(0);

/// The longest sleep of a thread that waits for connections of which one may be rung by an interrupt; `None`: there is no limit.
pub(crate) fn longest_sleep() -> Option<Duration> {
    (INTERRUPTED.load(Ordering::Relaxed) != 0).then_some(LATE)
}

/// The end of a bell that this process has.
#[derive(Debug)]
pub(crate) struct OwnBell {
    /// The descriptor of the link, plus 1; 0 if there is none.
    link: AtomicU32,
    /// The same of the event that an interrupt signals when the peer rings. It is never read: each signal is an edge.
    heard: AtomicU32,
    /// The same of the event that rings the peer.
    ringing: AtomicU32,
    /// Bells, waits and switches, to look after the link now and then.
    uses: AtomicU32,
}

impl OwnBell {
    pub(crate) const fn new() -> Self {
        let [link, heard, ringing, uses] = [const { AtomicU32::new(0) }; 4];
        Self { link, heard, ringing, uses }
    }

    /// The descriptor, which also hangs up when the peer is gone; -1 if there is none.
    #[inline]
    pub(crate) fn fd(&self) -> c_int {
        self.link.load(Ordering::Relaxed).wrapping_sub(1).cast_signed()
    }

    /// The descriptors that a sleeper listens to.
    pub(crate) fn listening(&self) -> impl Iterator<Item = c_int> {
        [&self.link, &self.heard]
            .into_iter()
            .filter_map(|place| place.load(Ordering::Relaxed).checked_sub(1))
            .map(u32::cast_signed)
    }

    /// Whether the peer rings by an interrupt.
    pub(crate) fn is_interrupt(&self) -> bool {
        self.heard.load(Ordering::Relaxed) != 0
    }

    /// Takes a ring of the peer's, if there is one, while nothing sleeps on this bell: from the link, or by an interrupt. A ring by interrupt stays in its
    /// event, so this asks for the first one.
    pub(crate) fn hear(&self) -> Heard {
        let link = self.fd();
        if link < 0 {
            return Heard::Gone;
        }
        match bell::hear(sys::borrow(link)) {
            Heard::Nothing if self.is_interrupted() => Heard::Bell,
            other => other,
        }
    }

    fn is_interrupted(&self) -> bool {
        let Some(heard) = self.heard.load(Ordering::Relaxed).checked_sub(1) else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut one = [PollFd::from_borrowed_fd(sys::borrow(heard.cast_signed()), PollFlags::IN)];
        rustix::event::poll(&mut one, Some(&now)) == Ok(1)
    }

    /// Keeps a new end, and the events that are heard and rung by, if there are any. `false` if there are no numbers to spare for them.
    pub(crate) fn keep(&self, link: OwnedFd, events: Option<(OwnedFd, OwnedFd)>) -> bool {
        let keep = |place: &AtomicU32, fd: OwnedFd| {
            let kept = hidden::keep_high(fd);
            kept.inspect(|kept| place.store(kept.cast_unsigned().wrapping_add(1), Ordering::Relaxed)).is_some()
        };
        let mut is_kept = keep(&self.link, link);
        if let Some((heard, ringing)) = events {
            is_kept = is_kept && keep(&self.heard, heard);
            if is_kept {
                INTERRUPTED.fetch_add(1, Ordering::Relaxed);
            }
            is_kept = is_kept && keep(&self.ringing, ringing);
        }
        if !is_kept {
            self.discard();
        }
        is_kept
    }

    /// Closes the end, by which the peer sees that we have gone. One in which the peer has left descriptors stays open.
    pub(crate) fn discard(&self) {
        if let Some(heard) = self.heard.swap(0, Ordering::Relaxed).checked_sub(1) {
            INTERRUPTED.fetch_sub(1, Ordering::Relaxed);
            hidden::discard(heard.cast_signed());
        }
        if let Some(ringing) = self.ringing.swap(0, Ordering::Relaxed).checked_sub(1) {
            hidden::discard(ringing.cast_signed());
        }
        if let Some(fd) = self.link.swap(0, Ordering::Relaxed).checked_sub(1).map(u32::cast_signed)
            && !bell::is_poisoned(sys::borrow(fd))
        {
            hidden::discard(fd);
        }
    }

    /// Rings the peer. Whether a thread that sleeps there hears it: a full bell has no edges.
    #[inline]
    pub(crate) fn ring(&self) -> bool {
        if let Some(ringing) = self.ringing.load(Ordering::Relaxed).checked_sub(1) {
            // Full, it is signalled already.
            let rung = rustix::io::write(sys::borrow(ringing.cast_signed()), &1u64.to_ne_bytes());
            return matches!(rung, Ok(_) | Err(Errno::AGAIN));
        }
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
