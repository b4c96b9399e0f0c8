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
///
/// ```
/// use partywall::{Domain, Error, Listener, Stream};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut listener = Listener::bind("echo")?;
/// listener.set_nonblocking(true);
/// assert!(matches!(listener.accept(), Err(Error::WouldBlock)));
///
/// let client = Stream::connect("web:echo")?;
/// listener.set_nonblocking(false);
/// let (server, peer) = listener.accept()?;
/// assert_eq!(peer.name, "web");
/// assert_eq!(server.channel_id(), client.channel_id());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    ///
    /// ```
    /// use partywall::{Domain, Error, Refusal};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _listener = web.bind("echo")?;
    /// // A domain binds each of its services once.
    /// assert!(matches!(web.bind("echo"), Err(Error::Refused { code: Refusal::ServiceTaken, .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bind(&self, service: &str) -> Result<Listener> {
        self.bind_with(service, &Options::default())
    }

    /// Binds with options, which accepted streams will have.
    ///
    /// # Errors
    /// As [`Domain::bind`], and [`Error::Invalid`] for sizes that make no sense.
    ///
    /// ```
    /// use partywall::{Domain, Options, RingSize};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let options = Options::default().ring(RingSize::Fixed(1 << 20)).backlog(16);
    /// let mut listener = web.bind_with("echo", &options)?;
    /// let _client = web.connect("web:echo")?;
    /// let (mut server, _) = listener.accept()?;
    /// assert_eq!(server.writer()?.ring_size(), 1 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bind_with(&self, service: &str, options: &Options) -> Result<Listener> {
        Ok(Listener { acceptor: Acceptor::bind(self, service, Kind::Stream, options)? })
    }

    /// Connects to `DOMAIN:SERVICE`. Returns once the connection is in the listener's backlog: it can be written to at once.
    ///
    /// # Errors
    /// [`Error::Refused`]: no such domain or service, backlog full, policy, quota.
    ///
    /// ```
    /// use partywall::Domain;
    /// use std::io::{Read, Write};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let mut listener = web.bind("echo")?;
    /// let mut client = web.connect("web:echo")?;
    /// client.write_all(b"hello")?; // The peer may accept later.
    ///
    /// let mut hello = [0; 5];
    /// listener.accept()?.0.read_exact(&mut hello)?;
    /// assert_eq!(&hello, b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn connect(&self, target: &str) -> Result<Stream> {
        self.connect_with(target, &Options::default())
    }

    /// Connects with options.
    ///
    /// # Errors
    /// As [`Domain::connect`], and [`Error::Invalid`] for sizes that make no sense.
    ///
    /// ```
    /// use partywall::{Domain, Options};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let mut listener = web.bind("log")?;
    /// let mut client = web.connect_with("web:log", &Options::default().one_way(true))?;
    /// assert!(client.reader().is_err()); // No memory is spent on the way back.
    /// assert!(listener.accept()?.0.writer().is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
///
/// ```
/// use partywall::{Options, Stream};
/// use std::io::{Read, Write};
/// use std::net::Shutdown;
///
/// let (mut client, mut server) = Stream::pair(&Options::default())?;
/// client.write_all(b"question")?;
/// client.shutdown(Shutdown::Write)?;
///
/// let mut question = String::new();
/// server.read_to_string(&mut question)?; // Up to the end that `shutdown` made.
/// assert_eq!(question, "question");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    ///
    /// ```
    /// use partywall::{Domain, Stream};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _listener = web.bind("echo")?;
    /// let stream = Stream::connect("web:echo")?;
    /// assert_eq!(stream.peer().map(|peer| peer.name.as_str()), Some("web"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{Read, Write};
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// client.write_all(b"hello")?;
    /// client.writer()?.finish();
    ///
    /// let (read, write) = server.halves()?;
    /// std::io::copy(read, write)?; // An echo server.
    /// drop(server);
    ///
    /// let mut echo = String::new();
    /// client.read_to_string(&mut echo)?;
    /// assert_eq!(echo, "hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn halves(&mut self) -> Result<(&mut ReadHalf, &mut WriteHalf)> {
        match (&mut self.read, &mut self.write) {
            (Some(read), Some(write)) => Ok((read, write)),
            _ => Err(ONE_WAY),
        }
    }

    /// The halves, to use independently, in two threads for instance. A one-way connection has only one.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{Read, Write};
    ///
    /// let (here, mut there) = Stream::pair(&Options::default())?;
    /// let (Some(mut read), Some(mut write)) = here.into_halves() else { unreachable!("two ways") };
    /// let writer = std::thread::spawn(move || write.write_all(b"from a thread")); // `write` is dropped at its end.
    ///
    /// let mut text = String::new();
    /// there.read_to_string(&mut text)?;
    /// assert_eq!(text, "from a thread");
    /// writer.join().expect("no panic")?;
    ///
    /// drop(there);
    /// assert_eq!(read.read(&mut [0])?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_halves(self) -> (Option<ReadHalf>, Option<WriteHalf>) {
        (self.read, self.write)
    }

    /// The reading half.
    ///
    /// # Errors
    /// [`Error::Closed`] if this side of a one-way connection only writes.
    ///
    /// ```
    /// use partywall::{Options, Stream};
    ///
    /// let (mut client, mut server) = Stream::pair(&Options::default())?;
    /// client.writer()?.reserve(3)?.commit(3);
    /// assert_eq!(server.reader()?.peek()?.len(), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
    ///
    /// ```
    /// use partywall::{Options, Stream};
    /// use std::io::{ErrorKind, Read};
    ///
    /// let (mut client, _server) = Stream::pair(&Options::default())?;
    /// client.set_nonblocking(true);
    /// assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_nonblocking(&mut self, yes: bool) {
        if let Some(read) = &mut self.read {
            read.set_nonblocking(yes);
        }
        if let Some(write) = &mut self.write {
            write.set_nonblocking(yes);
        }
    }

    /// The longest that a read may wait; `None` for ever.
    ///
    /// ```
    /// use partywall::{Options, RingSize, Stream};
    /// use std::io::{ErrorKind, Read, Write};
    /// use std::time::Duration;
    ///
    /// let (mut client, _server) = Stream::pair(&Options::default().ring(RingSize::Fixed(4096)))?;
    /// client.set_read_timeout(Some(Duration::from_millis(1)));
    /// assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
    ///
    /// client.set_write_timeout(Some(Duration::from_millis(1)));
    /// client.write_all(&[0; 4096])?; // The ring is full now.
    /// assert_eq!(client.write(&[0]).unwrap_err().kind(), ErrorKind::TimedOut);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// Waits for at least `n` bytes, at most the peer's ring.
    ///
    /// There are fewer at the end of the stream, and just before the peer changes to a ring of another size. If the peer
    /// waits at the same time for room that only a release here makes, both wait for ever: `n` here and what the peer
    /// reserves together should not exceed the ring.
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

    /// Says that this side reads no more: the peer's writes fail with [`Error::Closed`].
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

    /// Whether calls return [`Error::WouldBlock`] instead of waiting. After that error, the descriptor becomes readable when
    /// there is something to look at.
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

    /// The longest that a call may wait; `None` for ever.
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

    /// Bytes of the ring that is being read, 0 before the peer has accepted.
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

    /// What this half has done.
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

    /// Who is on the other side.
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
