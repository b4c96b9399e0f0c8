//! Where the directory is mapped: one place for the life of the process, so that a look at it needs no care.

use partywall_protocol::directory::Directory;
use partywall_region::revocation::Revocation;
use partywall_region::{RegionError, directory};
use partywall_shm::sync::Peer;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The place; set by the first directory, and taken over by every later one.
static PLACE: OnceLock<&'static Directory<Peer>> = OnceLock::new();
/// Whether what is there is of a broker that we have a session with.
static VALID: AtomicBool = AtomicBool::new(false);

/// In a virtual machine: whether the directory is about to go away with its device. If so, it must not be read.
static REVOCATION: Revocation = Revocation::new();

/// The directory, while there is one.
#[inline]
pub(super) fn get() -> Option<&'static Directory<Peer>> {
    // EDGE directory: acquires from `map`.
    if !REVOCATION.is_revoked() && VALID.load(Ordering::Acquire) { PLACE.get().copied() } else { None }
}

/// The last directory. Its broker may have ended, so it may be out of date.
pub(super) fn last() -> Option<&'static Directory<Peer>> {
    PLACE.get().copied().filter(|_| !REVOCATION.is_revoked())
}

/// Maps a directory. One thread at a time.
///
/// In a virtual machine `base` is where the directory begins in the window from the host, and `word` is what revokes it. On the host `base`
/// is 0, and there is no word.
pub(super) fn map(memory: &OwnedFd, base: u64, word: Option<&OwnedFd>) -> Result<(), RegionError> {
    let before = PLACE.get().copied();
    let mapped = match base {
        0 => directory::attach(memory.as_fd(), before)?,
        base => directory::attach_in_window(memory.as_fd(), base, before)?,
    };
    if before.is_none() {
        // There is no other writer: one thread at a time has the turn.
        let _ = PLACE.set(mapped);
    }
    // Only now: a directory that was revoked is not looked at before the new one is in its place.
    if let Some(word) = word {
        REVOCATION.attach(word.as_fd())?;
    }
    // EDGE directory: releases the mapping; acquired in `get`.
    VALID.store(true, Ordering::Release);
    Ok(())
}

/// Its broker is gone.
pub(super) fn forget() {
    VALID.store(false, Ordering::Relaxed);
}
