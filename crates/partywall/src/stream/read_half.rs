//! The reading half of a stream.

#[cfg(doc)]
use crate::Error;
use crate::rx::StreamRx;
use crate::span::Peeked;
use crate::{PeerInfo, Result};
use partywall_shm::counters::Snapshot;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::io::{self, BufRead, IoSliceMut, Read};
use std::time::Duration;

/// The reading half of a stream. For one thread at a time.
///
/// ```
/// use partywall::{Options, Stream};
/// use std::io::{BufRead, Write};
///
/// let (mut client, mut server) = Stream::pair(&Options::default())?;
/// writeln!(client, "GET /")?;
///
/// let half = server.reader()?;
/// let mut line = String::new();
/// half.read_line(&mut line)?;
/// assert_eq!(line, "GET /\n");
/// assert_eq!(half.counters().bytes, 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ReadHalf {
    pub(crate) rx: StreamRx,
}

impl ReadHalf {
    pub(crate) fn new(rx: StreamRx) -> Self {
        Self { rx }
    }

    /// Waits for at least one byte, and returns the available bytes in place. The result is empty at the end of the stream.
    ///
    /// # Errors
    /// [`Error::Dead`] when all committed bytes were read; [`Error::WouldBlock`], [`Error::TimedOut`], [`Error::Corrupt`].
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::Write;
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// client.write_all(b"hello")?;
    ///
    /// let half = server.reader()?;
    /// let peeked = half.peek()?;
    /// let mut first = [0; 1];
    /// peeked.copy_to(0, &mut first);
    /// assert_eq!(&first, b"h");
    /// peeked.release(1); // What is not released is there at the next look.
    /// assert_eq!(half.peek()?.len(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn peek(&mut self) -> Result<Peeked<'_>> {
        self.peek_at_least(1)
    }

    /// Waits for at least `n` bytes; `n` is at most the size of the peer's ring.
    ///
    /// There are fewer at the end of the stream, and just before the peer changes to a ring of another size. If the peer
    /// waits at the same time for room that only a release here makes, both wait forever: `n` and the bytes that the peer
    /// reserves should not exceed the ring together.
    ///
    /// # Errors
    /// As [`ReadHalf::peek`].
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::Write;
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// client.write_all(&7u32.to_le_bytes())?;
    ///
    /// let mut length = [0; 4];
    /// server.reader()?.peek_at_least(length.len())?.copy_to(0, &mut length);
    /// assert_eq!(u32::from_le_bytes(length), 7);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn peek_at_least(&mut self, n: usize) -> Result<Peeked<'_>> {
        self.rx.wait(n as u64)?;
        Ok(Peeked { rx: &mut self.rx })
    }

    /// Ends reading: the peer's writes fail with [`Error::Closed`]. Does not block.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{ErrorKind, Write};
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// server.reader()?.close();
    /// assert_eq!(client.write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(&mut self) {
        self.rx.close();
    }

    /// Ends reading as if this process had died: as soon as the peer notices, its writes fail with [`Error::Dead`].
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{ErrorKind, Write};
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// server.reader()?.abort();
    /// let error = loop {
    ///     if let Err(error) = client.write(b"more") {
    ///         break error;
    ///     }
    /// };
    /// assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn abort(&mut self) {
        self.rx.abort();
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting. After that error, the descriptor becomes readable when
    /// there are bytes, or the end of the connection.
    ///
    /// ```
    /// use partywall::{Error, Options, Stream};
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// use std::io::Write;
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// let half = server.reader()?;
    /// half.set_nonblocking(true);
    /// while matches!(half.peek(), Err(Error::WouldBlock)) {
    ///     client.write_all(b"hello")?;
    ///     poll(&mut [PollFd::new(half, PollFlags::IN)], None)?;
    /// }
    /// assert_eq!(half.peek()?.len(), 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.rx.waiter.nonblocking = yes;
    }

    /// The longest that a call may wait; `None`: no limit.
    ///
    /// ```
    /// use partywall::{Error, Options, Stream};
    /// use std::time::Duration;
    ///
    /// let (_client, mut server) = Stream::pair(&Options::default())?;
    /// let half = server.reader()?;
    /// half.set_timeout(Some(Duration::from_millis(1)));
    /// assert!(matches!(half.peek(), Err(Error::TimedOut)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.rx.waiter.timeout = longest;
    }

    /// Size of the present ring of the peer in bytes; 0 before the peer has accepted.
    ///
    /// ```
    /// use partywall::{Options, RingSize, Stream};
    /// use std::io::Write;
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default().ring(RingSize::Fixed(1 << 16)))?;
    /// client.write_all(b"hello")?;
    /// let half = server.reader()?;
    /// half.peek()?; // The ring of a peer is looked at when there is something in it.
    /// assert_eq!(half.ring_size(), 1 << 16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ring_size(&self) -> u64 {
        self.rx.capacity()
    }

    /// The counters of this half.
    pub fn counters(&self) -> Snapshot {
        self.rx.counters()
    }

    /// Whether the peer's half has gone. Bytes may be left to read.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{Read, Write};
    /// use std::time::Duration;
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// let half = server.reader()?;
    /// assert!(!half.is_hung_up());
    /// client.write_all(b"bye")?;
    /// drop(client);
    /// while !half.is_hung_up() {
    ///     std::thread::sleep(Duration::from_millis(1)); // A thread of the library takes notice.
    /// }
    /// let mut bye = String::new();
    /// half.read_to_string(&mut bye)?;
    /// assert_eq!(bye, "bye");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn is_hung_up(&self) -> bool {
        self.rx.is_hung_up()
    }

    /// The other side of the connection.
    ///
    /// ```
    /// use partywall::Domain;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let mut listener = web.bind("echo")?;
    /// let _client = web.connect("web:echo")?;
    /// let (mut server, _) = listener.accept()?;
    /// assert_eq!(server.reader()?.peer().pid, Some(std::process::id()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn peer(&self) -> &PeerInfo {
        self.rx.endpoint().info()
    }
}

impl Read for ReadHalf {
    #[inline]
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(self.rx.read(buf)?)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut done = 0;
        for buf in bufs.iter_mut().filter(|b| !b.is_empty()) {
            // Only the first may wait.
            if done > 0 && self.rx.available() == 0 {
                break;
            }
            let n = self.rx.read(buf)?;
            done += n;
            if n < buf.len() {
                break;
            }
        }
        Ok(done)
    }
}

impl BufRead for ReadHalf {
    /// A private copy of the next bytes, at most 8 KiB; waits if there are none. [`ReadHalf::peek`] shows them without a copy.
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        Ok(self.rx.fill_front()?)
    }

    fn consume(&mut self, n: usize) {
        self.rx.release(n as u64);
    }
}

impl AsFd for ReadHalf {
    /// Readable when there is something to look at: read until [`Error::WouldBlock`], then wait for it again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.rx.waiter.link.as_fd()
    }
}

impl AsRawFd for ReadHalf {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
