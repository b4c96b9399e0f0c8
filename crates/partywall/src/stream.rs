//! Streams: bytes in order, both ways or one, with half-close.

use crate::connect;
use crate::endpoint::Endpoint;
use crate::listener::Acceptor;
use crate::rx::Rx;
use crate::span::{Peeked, Reserved};
use crate::tx::Tx;
use crate::{Domain, Error, Options, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Kind};
use partywall_shm::counters::Snapshot;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::io::{self, BufRead, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

/// Accepts streams for a service.
#[derive(Debug)]
pub struct Listener {
    acceptor: Acceptor,
}

impl Listener {
    /// Binds a service of the [current](Domain::current) domain.
    ///
    /// # Errors
    /// As [`Domain::bind`].
    pub fn bind(service: &str) -> Result<Self> {
        Domain::current()?.bind(service)
    }

    /// Waits for a connection. After a restart of the broker it binds again by itself.
    ///
    /// Connections that break the protocol are dropped and not seen here.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] on a non-blocking listener; [`Error::Memory`] or [`Error::System`] if this side cannot make its
    /// half: that connection is lost, and the next call takes the next.
    pub fn accept(&mut self) -> Result<(Stream, PeerInfo)> {
        let (tx, rx, info) = self.acceptor.accept()?;
        Ok((Stream { read: rx.map(ReadHalf::new), write: tx.map(WriteHalf::new) }, info))
    }

    /// Whether [`Listener::accept`] returns [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.acceptor.nonblocking = yes;
    }
}

impl AsFd for Listener {
    /// Readable when there is something to accept. It changes when the broker restarts: ask again after each accept.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.acceptor.as_fd()
    }
}

impl Domain {
    /// Binds a service to accept streams for.
    ///
    /// # Errors
    /// [`Error::Refused`] if the name is invalid or taken, by policy, or by quota.
    pub fn bind(&self, service: &str) -> Result<Listener> {
        self.bind_with(service, &Options::default())
    }

    /// Binds with options, which accepted streams will have.
    ///
    /// # Errors
    /// As [`Domain::bind`], and [`Error::Invalid`] for sizes that make no sense.
    pub fn bind_with(&self, service: &str, options: &Options) -> Result<Listener> {
        Ok(Listener { acceptor: Acceptor::bind(self, service, Kind::Stream, options)? })
    }

    /// Connects to `DOMAIN:SERVICE`. Returns once the connection is in the listener's backlog: it can be written to at once.
    ///
    /// # Errors
    /// [`Error::Refused`]: no such domain or service, backlog full, policy, quota.
    pub fn connect(&self, target: &str) -> Result<Stream> {
        self.connect_with(target, &Options::default())
    }

    /// Connects with options.
    ///
    /// # Errors
    /// As [`Domain::connect`], and [`Error::Invalid`] for sizes that make no sense.
    pub fn connect_with(&self, target: &str, options: &Options) -> Result<Stream> {
        let directions = if options.one_way { Directions::FORWARD } else { Directions::BOTH };
        let (tx, rx) = connect::open(self, target, Kind::Stream, directions, options)?;
        Ok(Stream { read: rx.map(ReadHalf::new), write: tx.map(WriteHalf::new) })
    }
}

/// A connection: a [`ReadHalf`] and a [`WriteHalf`], of which a one-way connection has only one.
///
/// `Send`, so that it or its halves can be moved to other threads; each half is for one thread at a time. Dropping it
/// closes it in order: what was written stays readable for the peer. A process that ends without dropping it (killed, or
/// `exit`) is *dead* to the peer, which can still read what was written. The child of a `fork` must not use it.
#[derive(Debug)]
pub struct Stream {
    read: Option<ReadHalf>,
    write: Option<WriteHalf>,
}

impl Stream {
    /// Connects from the [current](Domain::current) domain to `DOMAIN:SERVICE`.
    ///
    /// # Errors
    /// As [`Domain::connect`].
    pub fn connect(target: &str) -> Result<Self> {
        Domain::current()?.connect(target)
    }

    /// Two connected streams within this process, without a broker: as `UnixStream::pair`.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::System`], [`Error::Invalid`].
    pub fn pair(options: &Options) -> Result<(Self, Self)> {
        let (a, b) = crate::channel::pair(options)?;
        let stream =
            |(tx, rx): (Option<Tx>, Option<Rx>)| Self { read: rx.map(ReadHalf::new), write: tx.map(WriteHalf::new) };
        Ok((stream(a), stream(b)))
    }

    /// Both halves, to use alternately.
    ///
    /// # Errors
    /// [`Error::Closed`] on a one-way connection.
    pub fn halves(&mut self) -> Result<(&mut ReadHalf, &mut WriteHalf)> {
        match (&mut self.read, &mut self.write) {
            (Some(read), Some(write)) => Ok((read, write)),
            _ => Err(ONE_WAY),
        }
    }

    /// The halves, to use independently, in two threads for instance. A one-way connection has only one.
    pub fn into_halves(self) -> (Option<ReadHalf>, Option<WriteHalf>) {
        (self.read, self.write)
    }

    /// The reading half.
    ///
    /// # Errors
    /// [`Error::Closed`] if this side of a one-way connection only writes.
    pub fn reader(&mut self) -> Result<&mut ReadHalf> {
        self.read.as_mut().ok_or(ONE_WAY)
    }

    /// The writing half.
    ///
    /// # Errors
    /// [`Error::Closed`] if this side of a one-way connection only reads.
    pub fn writer(&mut self) -> Result<&mut WriteHalf> {
        self.write.as_mut().ok_or(ONE_WAY)
    }

    /// Who is on the other side.
    pub fn peer(&self) -> Option<&PeerInfo> {
        self.endpoint().map(|s| s.info())
    }

    /// The channel's number, as `partywall list` shows it.
    pub fn channel_id(&self) -> Option<u64> {
        self.endpoint().map(|s| s.id())
    }

    fn endpoint(&self) -> Option<&Endpoint> {
        let write = self.write.as_ref().map(|w| &**w.tx.core.endpoint());
        write.or_else(|| self.read.as_ref().map(|r| &**r.rx.endpoint()))
    }

    /// Ends one direction or both. After `Write`, the peer reads what was written and then the end.
    ///
    /// # Errors
    /// None at present; the result is as of `TcpStream::shutdown`.
    pub fn shutdown(&mut self, how: Shutdown) -> Result<()> {
        if how != Shutdown::Read
            && let Some(write) = &mut self.write
        {
            write.finish();
        }
        if how != Shutdown::Write
            && let Some(read) = &mut self.read
        {
            read.close();
        }
        Ok(())
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, yes: bool) {
        if let Some(read) = &mut self.read {
            read.set_nonblocking(yes);
        }
        if let Some(write) = &mut self.write {
            write.set_nonblocking(yes);
        }
    }

    /// The longest that a read may wait; `None` for ever.
    pub fn set_read_timeout(&mut self, longest: Option<Duration>) {
        if let Some(read) = &mut self.read {
            read.set_timeout(longest);
        }
    }

    /// The longest that a write may wait; `None` for ever.
    pub fn set_write_timeout(&mut self, longest: Option<Duration>) {
        if let Some(write) = &mut self.write {
            write.set_timeout(longest);
        }
    }
}

const ONE_WAY: Error = Error::Closed("the connection is one-way, the other way");

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.reader()?.read(buf)
    }
}

impl BufRead for Stream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader()?.fill_buf()
    }

    fn consume(&mut self, n: usize) {
        // `fill_buf` has failed on a half that is not there; there is nothing to consume.
        if let Some(read) = &mut self.read {
            read.consume(n);
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.writer()?.write(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.writer()?.write_vectored(bufs)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The reading half of a stream. For one thread at a time.
#[derive(Debug)]
pub struct ReadHalf {
    pub(crate) rx: Rx,
}

impl ReadHalf {
    pub(crate) fn new(rx: Rx) -> Self {
        Self { rx }
    }

    /// Waits for at least one byte and shows what there is, in place. Empty at the end of the stream.
    ///
    /// # Errors
    /// [`Error::Dead`] once everything committed was read; [`Error::WouldBlock`], [`Error::TimedOut`], [`Error::Corrupt`].
    pub fn peek(&mut self) -> Result<Peeked<'_>> {
        self.peek_at_least(1)
    }

    /// Waits for at least `n` bytes, at most the peer's ring.
    ///
    /// There are fewer at the end of the stream, and just before the peer changes to a ring of another size. If the peer
    /// waits at the same time for room that only a release here makes, both wait for ever: `n` here and what the peer
    /// reserves together should not exceed the ring.
    ///
    /// # Errors
    /// As [`ReadHalf::peek`].
    pub fn peek_at_least(&mut self, n: usize) -> Result<Peeked<'_>> {
        self.rx.wait(n as u64)?;
        Ok(Peeked { rx: &mut self.rx })
    }

    /// Says that this side reads no more: the peer's writes fail with [`Error::Closed`].
    pub fn close(&mut self) {
        self.rx.close();
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting. After that error, the descriptor becomes readable when
    /// there is something to look at.
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.rx.waiter.nonblocking = yes;
    }

    /// The longest that a call may wait; `None` for ever.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.rx.waiter.timeout = longest;
    }

    /// Bytes of the ring that is being read, 0 before the peer has accepted.
    pub fn ring_size(&self) -> u64 {
        self.rx.capacity()
    }

    /// What this half has done.
    pub fn counters(&self) -> Snapshot {
        self.rx.counters()
    }

    /// Whether the peer's half has gone. Bytes may be left to read.
    pub fn is_hung_up(&self) -> bool {
        self.rx.is_hung_up()
    }

    /// Who is on the other side.
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

/// The writing half of a stream. For one thread at a time.
#[derive(Debug)]
pub struct WriteHalf {
    pub(crate) tx: Tx,
}

impl WriteHalf {
    pub(crate) fn new(tx: Tx) -> Self {
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
    pub fn reserve(&mut self, n: usize) -> Result<Reserved<'_>> {
        let (bytes, core) = self.tx.reserve(n as u64)?;
        Ok(Reserved { bytes, core })
    }

    /// A descriptor that hangs up (`POLLHUP`) when the peer's half is gone, whether in order or not, for a caller that waits for something
    /// else and has nothing to write. Nothing is read from it, and it becomes readable as it pleases: poll it for no events at all.
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
    pub fn trim(&mut self) -> Result<()> {
        self.tx.trim()
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting. After that error, the descriptor becomes readable when
    /// there is room; [`WriteHalf::reserve`] has one more case.
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
