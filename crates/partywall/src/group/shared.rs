//! Buffers of others, read where they are.

use super::Inner;
use crate::{Error, Result};
use partywall_region::pmem::Joint;
use partywall_shm::bytes::PeerBytes;
use partywall_shm::group::{HOPS, Handle, State};
use rustix::fd::BorrowedFd;
use std::sync::Arc;

/// A buffer of another process's. Its owner does not use the memory again before this is dropped or passed on.
///
/// The owner could change it all the same: look at what was copied out, not at the memory twice.
#[derive(Debug)]
pub struct Shared {
    group: Arc<Inner>,
    map: Arc<Joint>,
    handle: Handle,
    passed: bool,
}

impl Shared {
    pub(super) fn new(group: &Arc<Inner>, map: Arc<Joint>, handle: Handle) -> Self {
        Self { group: Arc::clone(group), map, handle, passed: false }
    }

    /// How many bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a buffer has at least one byte")]
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// Where it is: the same as in its owner.
    pub fn address(&self) -> u64 {
        self.handle.address
    }

    /// Where it is, for system calls and foreign code that can read memory which its owner may change.
    pub fn as_ptr(&self) -> *const u8 {
        self.bytes().as_ptr()
    }

    /// Copies from byte `from` on as much as there is and fits. How much that was.
    pub fn copy_to(&self, from: usize, to: &mut [u8]) -> usize {
        self.bytes().slice(from, to.len()).copy_to(to)
    }

    /// Writes from byte `from` on, at most `max` bytes, to a descriptor. How much that was.
    ///
    /// # Errors
    /// What the system says.
    pub fn write_to(&self, fd: BorrowedFd<'_>, from: usize, max: usize) -> std::io::Result<usize> {
        partywall_region::write_racing(fd, self.bytes().slice(from, max))
    }

    /// Reads no more, and makes of it a handle for the next. This process must take part until the next has opened it: if it ends
    /// before, the owner takes the token for lost.
    ///
    /// # Errors
    /// [`Error::Invalid`] after 16383 times; it is then released.
    pub fn pass(mut self) -> Result<Handle> {
        if self.handle.hop >= HOPS {
            return Err(Error::Invalid(format!("a handle is passed on at most {HOPS} times")));
        }
        self.passed = true;
        Ok(Handle { hop: self.handle.hop + 1, ..self.handle })
    }

    fn bytes(&self) -> PeerBytes<'_> {
        let offset = self.handle.address.saturating_sub(self.map.address());
        // Looked at when it was opened.
        self.map.bytes(offset, self.handle.len).expect("a buffer is in its window, and not in this process's seat")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.group.end(&self.handle, if self.passed { State::Passed } else { State::Released });
    }
}
