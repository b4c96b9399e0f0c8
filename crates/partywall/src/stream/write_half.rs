//! What a stream is written by.

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

    /// Waits until `n` contiguous bytes of the ring are free, and lends them to be filled in place. A ring that is too small
    /// grows, if its options allow.
    ///
    /// To grow it sends the new ring to the peer over the link. That can be full, of doorbells that a peer which does not
    /// wait has not taken: after some hundred writes before it accepted, for instance. A non-blocking half then says
    /// [`Error::WouldBlock`], and its descriptor becomes not readable but *writable* when the peer has taken them. So, after
    /// that error for an `n` of more than [`WriteHalf::ring_size`], wait until the descriptor is readable; or, if it is not
    /// writable now, until it is either.
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

    /// A descriptor that hangs up (`POLLHUP`) when the peer's half is gone, whether in order or not, for a caller that waits for something
    /// else and has nothing to write. Nothing is read from it, and it becomes readable as it pleases: poll it for no events at all.
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

    /// Says that nothing follows: the peer reads what was written, and then the end.
    pub fn finish(&mut self) {
        self.tx.core.finish();
    }

    /// Goes back to the smallest ring, for a connection that is about to be quiet.
    ///
    /// # Errors
    /// [`Error::Memory`] if not even that can be had.
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
    /// there is room; [`WriteHalf::reserve`] has one more case.
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

    /// The longest that a call may wait; `None` for ever.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.tx.core.waiter.timeout = longest;
    }

    /// Bytes of the present ring.
    pub fn ring_size(&self) -> u64 {
        self.tx.core.capacity()
    }

    /// What this half has done.
    pub fn counters(&self) -> Snapshot {
        self.tx.core.counters()
    }

    /// Who is on the other side.
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

    /// Nothing to do: what `write` has accepted is committed.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for WriteHalf {
    /// *Readable* when there is something to look at, such as new room: write until [`Error::WouldBlock`], then wait for it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tx.core.waiter.link.as_fd()
    }
}

impl AsRawFd for WriteHalf {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
