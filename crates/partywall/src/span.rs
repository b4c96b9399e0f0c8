//! Spans of ring memory lent to the caller: to fill in place, or to look at in place.

use crate::rx::StreamRx;
use crate::tx::TxCore;
use partywall_shm::bytes::PeerBytes;
use rustix::fd::AsFd;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};

/// Free bytes of this side's ring, to be filled in place and then committed. Dropping it commits nothing.
///
/// It contains bytes of an earlier revolution of the ring.
///
/// ```
/// use partywall::{Options, Stream};
/// use std::io::Read;
///
/// let (mut client, mut server) = Stream::pair(&Options::default())?;
/// let mut span = client.writer()?.reserve(1000)?;
/// span[..3].copy_from_slice(b"abc");
/// span.commit(3); // The other 997 bytes stay free.
///
/// let mut text = [0; 3];
/// server.read_exact(&mut text)?;
/// assert_eq!(&text, b"abc");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Reserved<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) core: &'a mut TxCore,
}

impl Reserved<'_> {
    /// Commits the first `n` bytes: the peer can read them now. No copy is made, so the call takes the same time for
    /// one byte as for a million.
    ///
    /// # Panics
    /// If `n` is more than was reserved.
    pub fn commit(self, n: usize) {
        assert!(n <= self.bytes.len(), "{n} bytes committed of {} reserved", self.bytes.len());
        self.core.commit(n as u64);
    }
}

impl Deref for Reserved<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl DerefMut for Reserved<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl fmt::Debug for Reserved<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reserved({} bytes)", self.bytes.len())
    }
}

/// Committed bytes of the peer, in place. They stay until they are released.
///
/// The peer owns this memory and, if it is malicious, can change it at any time. Copy bytes into private memory before you base
/// a decision on them, and decide by the copy. There is deliberately no `&[u8]` of them.
///
/// ```
/// use partywall::{Options, Stream};
/// use std::io::Write;
///
/// let (mut client, mut server) = Stream::pair(&Options::default())?;
/// client.write_all(b"hello, world")?;
///
/// let peeked = server.reader()?.peek()?;
/// assert!(!peeked.is_empty());
/// let mut world = [0; 5];
/// peeked.copy_to(7, &mut world); // Decide by the copy.
/// assert_eq!(&world, b"world");
/// let all = peeked.len();
/// peeked.release(all);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Peeked<'a> {
    pub(crate) rx: &'a mut StreamRx,
}

impl Peeked<'_> {
    fn bytes(&self) -> Option<PeerBytes<'_>> {
        self.rx.span(0, self.rx.available())
    }

    /// The number of bytes; 0 only at the end of the stream.
    pub fn len(&self) -> usize {
        self.rx.available() as usize
    }

    /// Whether the stream has ended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `from` on into `to`, as many as there are, and returns how many.
    pub fn copy_to(&self, from: usize, to: &mut [u8]) -> usize {
        self.bytes().map_or(0, |bytes| bytes.slice(from, to.len()).copy_to(to))
    }

    /// A pointer to them. Reading through it races with the peer. [`Peeked::len`] bytes are contiguous there until
    /// this value is dropped.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::Write;
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// client.write_all(b"hello")?;
    ///
    /// let peeked = server.reader()?.peek()?;
    /// // SAFETY: `len` bytes are there until `peeked` ends, and one byte is read once, whatever the peer makes of it.
    /// let first = unsafe { peeked.as_ptr().read_volatile() };
    /// assert_eq!(first, b'h');
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn as_ptr(&self) -> *const u8 {
        self.bytes().map_or(std::ptr::null(), |bytes| bytes.as_ptr())
    }

    /// Writes at most `max` bytes to a descriptor straight from the ring, and returns how many the kernel took. It does
    /// not release them.
    ///
    /// # Errors
    /// The error of `write`.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{Read, Seek, Write};
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// client.write_all(b"hello")?;
    ///
    /// let mut file = tempfile::tempfile()?;
    /// let peeked = server.reader()?.peek()?;
    /// let written = peeked.write_to(&file, usize::MAX)?;
    /// peeked.release(written);
    ///
    /// file.rewind()?;
    /// let mut text = String::new();
    /// file.read_to_string(&mut text)?;
    /// assert_eq!(text, "hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write_to(&self, fd: impl AsFd, max: usize) -> io::Result<usize> {
        match self.bytes() {
            Some(bytes) => partywall_region::write_racing(fd.as_fd(), bytes.slice(0, max)),
            None => Ok(0),
        }
    }

    /// Releases the first `n` bytes to the writer.
    ///
    /// # Panics
    /// If `n` is more than [`Peeked::len`].
    pub fn release(self, n: usize) {
        assert!(n <= self.len(), "{n} bytes released of {}", self.len());
        self.rx.release(n as u64);
    }
}

impl fmt::Debug for Peeked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peeked({} bytes)", self.len())
    }
}
