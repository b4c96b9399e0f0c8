//! File bytes straight from a peer's heap to the kernel's FUSE device.
//!
//! The bytes are handed to the kernel by their address. No code of this process reads them, so a peer that changes them meanwhile changes what the
//! kernel copies, and nothing else.
#![expect(unsafe_code, reason = "hands memory that a peer can change to the kernel, by its address")]

use partywall::rpc::Reply;
use rustix::io::Errno;

/// The body of a reply.
#[derive(Debug)]
pub struct RemoteData {
    pub(crate) bytes: DataBytes,
}

#[derive(Debug)]
pub(crate) enum DataBytes {
    Own(Vec<u8>),
    /// In the server's heap, which keeps them until this is dropped.
    Lent(Reply),
}

impl RemoteData {
    /// How many bytes.
    pub fn len(&self) -> usize {
        match &self.bytes {
            DataBytes::Own(bytes) => bytes.len(),
            DataBytes::Lent(reply) => reply.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of the bytes, which nobody else can change.
    ///
    /// # Errors
    /// `EIO` if there is no memory for it.
    pub fn into_vec(self) -> Result<Vec<u8>, Errno> {
        match self.bytes {
            DataBytes::Own(bytes) => Ok(bytes),
            DataBytes::Lent(reply) => reply.try_to_vec().map_err(|_| Errno::IO),
        }
    }

    /// The bytes in place.
    ///
    /// # Safety
    /// The caller must not read the bytes, only pass their address and length to the kernel: the server can change them at any time.
    pub unsafe fn for_the_kernel(&self) -> &[u8] {
        match &self.bytes {
            DataBytes::Own(bytes) => bytes,
            // SAFETY: no code of this process reads the bytes, which is the caller's promise, and the kernel copes with bytes that change.
            DataBytes::Lent(reply) => unsafe { reply.view().trusting() },
        }
    }
}
