//! The buffers of a program's call.
#![expect(unsafe_code, reason = "vouches for the caller's buffers")]

use libc::iovec;

/// The buffers that a program has given to a call. Code that has this may use them as that call does: a sending call reads them, and a receiving
/// call writes them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallerBuffers<'a>(&'a [iovec]);

impl<'a> CallerBuffers<'a> {
    /// No buffers.
    pub(crate) const NONE: Self = Self(&[]);

    /// Vouches for the buffers of a list.
    ///
    /// # Safety
    /// For `'a`, each buffer is valid for reads of a sending call, or for writes of a receiving call, as the C library demands of its callers.
    #[inline]
    pub(crate) const unsafe fn new(list: &'a [iovec]) -> Self {
        Self(list)
    }

    /// The list.
    #[inline]
    pub(crate) const fn list(self) -> &'a [iovec] {
        self.0
    }

    /// Whether there is any room, or any byte, in them.
    #[inline]
    pub(crate) fn has_bytes(self) -> bool {
        self.0.iter().any(|one| one.iov_len > 0)
    }

    /// How long they are together.
    pub(crate) fn len(self) -> usize {
        self.0.iter().fold(0usize, |sum, one| sum.saturating_add(one.iov_len))
    }

    /// Whether each buffer may be one: neither null nor near it, nor outside of what programs can have. Other addresses are followed, and
    /// a wrong one ends the program where the kernel would have said `EFAULT`.
    #[inline]
    pub(crate) fn are_plausible(self) -> bool {
        self.0.iter().all(|one| one.iov_len == 0 || (0x1000..1 << 56).contains(&one.iov_base.addr()))
    }
}
