//! The writing half of a stream.

#[cfg(doc)]
use crate::Error;
use crate::span::Reserved;
use crate::tx::StreamTx;
use crate::{PeerInfo, Result};
use partywall_shm::counters::Snapshot;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::io::{self, IoSlice, Write};
use std::time::Duration;

/// The writing half of a stream. For one thread at a time.
///
/// ```
/// use partywall::{Options, Stream};
/// use std::io::{Read, Write};
///
/// let (mut client, mut server) = Stream::pair(&Options::default())?;
/// let half = client.writer()?;
/// half.write_all(b"all of it")?;
/// half.finish();
///
/// let mut text = String::new();
/// server.read_to_string(&mut text)?;
/// assert_eq!(text, "all of it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct WriteHalf {
    pub(crate) tx: StreamTx,
}

impl WriteHalf {
    pub(crate) fn new(tx: StreamTx) -> Self {
        Self { tx }
    }

    /// Waits until `n` contiguous bytes of the ring are free, and lends them to the caller, who fills them in place. A ring that
    /// is too small grows if its options allow.
    ///
    /// The broker passes a larger ring on to the peer. A non-blocking half returns [`Error::WouldBlock`] until the broker has
    /// answered, and the descriptor does not become readable when the answer arrives. So after that error for an `n` of more
    /// than [`WriteHalf::ring_size`], call again after a short time, such as a millisecond, even if the descriptor is not readable.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if no ring of this half can hold `n` bytes; [`Error::Closed`], [`Error::Dead`],
    /// [`Error::WouldBlock`], [`Error::TimedOut`], [`Error::Corrupt`].
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{Read, Write};
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// let mut span = client.writer()?.reserve(64)?;
    /// let left = {
    ///     let mut free = &mut span[..];
    ///     write!(free, "made in place: {}", 42)?;
    ///     free.len()
    /// };
    /// let length = span.len() - left;
    /// span.commit(length);
    ///
    /// let mut text = vec![0; length];
    /// server.read_exact(&mut text)?;
    /// assert_eq!(text, b"made in place: 42");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reserve(&mut self, n: usize) -> Result<Reserved<'_>> {
        let (bytes, core) = self.tx.reserve(n as u64)?;
        Ok(Reserved { bytes, core })
    }

    /// A descriptor that hangs up (`POLLHUP`) when the peer's half is gone, whether it was closed or died. It is for a caller that waits for
    /// another event and has nothing to write. Poll it for no events: it may become readable at any time, and the caller must not read it.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use rustix::event::{PollFd, PollFlags, poll};
    ///
    /// let (mut client, server) = Stream::pair(&Options::default())?;
    /// drop(server);
    /// let half = client.writer()?;
    /// let mut gone = [PollFd::from_borrowed_fd(half.hang_up_fd(), PollFlags::empty())];
    /// poll(&mut gone, None)?;
    /// assert!(gone[0].revents().contains(PollFlags::HUP));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn hang_up_fd(&self) -> BorrowedFd<'_> {
        self.tx.core.waiter.link.life()
    }

    /// Ends the stream: the peer reads the written bytes, and then the end. Does not block.
    pub fn finish(&mut self) {
        self.tx.core.finish();
    }

    /// Ends the stream as if this process had died: the peer reads the written bytes, and then gets [`Error::Dead`] instead of the end.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{ErrorKind, Read, Write};
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// let half = client.writer()?;
    /// half.write_all(b"half of i")?;
    /// half.abort();
    ///
    /// let mut text = String::new();
    /// assert_eq!(server.read_to_string(&mut text).unwrap_err().kind(), ErrorKind::ConnectionAborted);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn abort(&mut self) {
        self.tx.core.abort();
    }

    /// Returns to the smallest ring, for a connection that is about to be quiet. Waits at most 100 ms for the broker; a later call completes
    /// the change. A ring in a window between machines keeps its size.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is no memory for the smallest ring.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    ///
    /// let (mut client, _server) = Stream::pair(&Options::default())?;
    /// let half = client.writer()?;
    /// let smallest = half.ring_size();
    /// drop(half.reserve(1 << 20)?); // Grows the ring.
    /// assert!(half.ring_size() > smallest);
    /// half.trim()?;
    /// assert_eq!(half.ring_size(), smallest);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn trim(&mut self) -> Result<()> {
        self.tx.trim()
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting. After that error, the descriptor becomes readable when
    /// there is room; see also [`WriteHalf::reserve`].
    ///
    /// ```
    /// use partywall::{Error, Options, RingSize, Stream};
    /// use std::time::Duration;
    ///
    /// let (mut client, _server) = Stream::pair(&Options::default().ring(RingSize::Fixed(4096)))?;
    /// let half = client.writer()?;
    /// half.reserve(4096)?.commit(4096);
    /// half.set_nonblocking(true);
    /// assert!(matches!(half.reserve(1), Err(Error::WouldBlock)));
    ///
    /// half.set_nonblocking(false);
    /// half.set_timeout(Some(Duration::from_millis(1)));
    /// assert!(matches!(half.reserve(1), Err(Error::TimedOut)));
    /// assert_eq!(half.counters().bytes, 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.tx.core.waiter.nonblocking = yes;
    }

    /// The longest single wait for room; `None`: no limit. A `write` of more bytes than the ring can hold may wait several times, each time at most
    /// this long. If a wait times out, `write` returns the number of bytes written so far, or fails with [`Error::TimedOut`] if there are none.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.tx.core.waiter.timeout = longest;
    }

    /// Bytes of the present ring.
    pub fn ring_size(&self) -> u64 {
        self.tx.core.capacity()
    }

    /// The counters of this half.
    pub fn counters(&self) -> Snapshot {
        self.tx.core.counters()
    }

    /// The other side of the connection.
    ///
    /// ```
    /// use partywall::Domain;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _listener = web.bind("echo")?;
    /// let mut client = web.connect("web:echo")?;
    /// assert_eq!(client.writer()?.peer().service, "echo");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn peer(&self) -> &PeerInfo {
        self.tx.core.endpoint().info()
    }
}

impl Write for WriteHalf {
    /// Writes all of `buf`, waiting for room as needed; a non-blocking half writes what fits.
    #[inline]
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        Ok(self.tx.write(buf)?)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(self.tx.write_vectored(bufs)?)
    }

    /// Does nothing: bytes that `write` has accepted are committed.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for WriteHalf {
    /// *Readable* when there may be new room, or the end of the connection: write until [`Error::WouldBlock`], then wait for it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tx.core.waiter.link.as_fd()
    }
}

impl AsRawFd for WriteHalf {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
