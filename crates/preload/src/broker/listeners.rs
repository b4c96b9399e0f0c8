//! The listening sockets that are, or ought to be, published.
//!
//! In ordinary memory, which `fork` copies with the descriptors themselves: a child publishes what it has inherited when the
//! session that has published it is gone. Changed by the thread that has the turn with the broker.

use super::state::LISTENERS;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// One listener that was published.
#[derive(Debug)]
pub(super) struct ListenerEntry {
    /// Its descriptor plus 1; 0 for a free slot. Stored last.
    fd: AtomicU32,
    /// Counts the uses of the slot.
    uses: AtomicU32,
    /// The socket's cookie.
    cookie: AtomicU64,
    /// The process that entered it: a child finds its parent's here.
    process: AtomicU32,
    /// 1 once that process has sent its publication in its session. A child finds here whether its parent had done so before the `fork`.
    sent: AtomicU32,
}

static TABLE: [ListenerEntry; LISTENERS] = [const { ListenerEntry::new() }; LISTENERS];
/// Slots that were ever used.
static USED: AtomicU32 = AtomicU32::new(0);
/// Slots in use.
static LIVE: AtomicU32 = AtomicU32::new(0);

impl ListenerEntry {
    const fn new() -> Self {
        let [fd, uses, process, sent] = [const { AtomicU32::new(0) }; 4];
        Self { fd, uses, cookie: AtomicU64::new(0), process, sent }
    }

    /// The process that has entered it.
    pub(super) fn process(&self) -> u32 {
        self.process.load(Ordering::Relaxed)
    }

    /// Whether the session of that process has, or will have, the publication.
    pub(super) fn is_sent(&self) -> bool {
        self.sent.load(Ordering::Relaxed) != 0
    }

    /// The process that entered it has sent its publication in its session, or has begun another one.
    pub(super) fn set_sent(&self, sent: bool) {
        if self.process() == crate::process::kernel_pid() {
            self.sent.store(sent.into(), Ordering::Relaxed);
        }
    }

    /// Its descriptor, if the slot is in use.
    pub(super) fn fd(&self) -> Option<c_int> {
        // EDGE listener-entry: acquires from `add`.
        self.fd.load(Ordering::Acquire).checked_sub(1).map(u32::cast_signed)
    }

    pub(super) fn cookie(&self) -> u64 {
        self.cookie.load(Ordering::Relaxed)
    }

    /// Frees the slot.
    pub(super) fn clear(&self) {
        if self.fd.swap(0, Ordering::Relaxed) != 0 {
            LIVE.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The handle of this use of the slot at `at`.
    pub(super) fn handle(&self, at: usize) -> u64 {
        (at as u64) << 32 | u64::from(self.uses.load(Ordering::Relaxed))
    }
}

/// All slots in use, by number.
pub(super) fn all() -> impl Iterator<Item = (usize, &'static ListenerEntry)> {
    let used = USED.load(Ordering::Relaxed) as usize;
    TABLE.iter().take(used).enumerate().filter(|(_, listener)| listener.fd().is_some())
}

/// In the child of a `fork`, which may have come between two changes of another thread.
pub(super) fn recount() {
    // It is a number of `LISTENERS` at most.
    LIVE.store(all().count() as u32, Ordering::Relaxed);
}

/// Whether any slot is in use.
#[inline]
pub(super) fn is_any() -> bool {
    LIVE.load(Ordering::Relaxed) != 0
}

/// The listener in a slot, whether it is in use or not.
pub(super) fn at(slot: usize) -> Option<&'static ListenerEntry> {
    TABLE.get(slot)
}

/// Enters one more; `None` if there is no room.
pub(super) fn add(fd: c_int, cookie: u64) -> Option<(usize, &'static ListenerEntry)> {
    let (at, listener) = TABLE.iter().enumerate().find(|(_, listener)| listener.fd().is_none())?;
    listener.cookie.store(cookie, Ordering::Relaxed);
    listener.process.store(crate::process::kernel_pid(), Ordering::Relaxed);
    listener.sent.store(0, Ordering::Relaxed);
    listener.uses.fetch_add(1, Ordering::Relaxed);
    LIVE.fetch_add(1, Ordering::Relaxed);
    // EDGE listener-entry: releases what the entry says; acquired in `ListenerEntry::fd`.
    listener.fd.store(fd.cast_unsigned() + 1, Ordering::Release);
    // It is a position among `LISTENERS`.
    USED.fetch_max(at as u32 + 1, Ordering::Relaxed);
    Some((at, listener))
}

/// The slot that a handle names, if it is still that use of it.
pub(super) fn find(handle: u64) -> Option<(usize, &'static ListenerEntry)> {
    let at = usize::try_from(handle >> 32).ok()?;
    let listener = TABLE.get(at).filter(|listener| listener.fd().is_some() && listener.handle(at) == handle)?;
    Some((at, listener))
}
