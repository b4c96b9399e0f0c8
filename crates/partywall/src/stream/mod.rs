//! Streams: bytes in order, both ways or one, with half-close.

mod listener;
mod read_half;
mod write_half;

pub use listener::Listener;
pub use read_half::ReadHalf;
pub use write_half::WriteHalf;

use crate::endpoint::Endpoint;
use crate::further::Regions;
use crate::rx::StreamRx;
use crate::tx::StreamTx;
use crate::{Domain, Error, Options, PeerInfo, Result};
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

/// A connection: a [`ReadHalf`] and a [`WriteHalf`]. A one-way connection has only one of them on each side.
///
/// It is `Send`, so it or its halves can be moved to other threads. Each half is for one thread at a time. Dropping it
/// closes it cleanly: the peer can still read the written bytes. A process that ends without dropping it (killed, or
/// `exit`) is *dead* to the peer, which can still read the written bytes. The child of a `fork` must not use it.
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
        let stream = |(tx, rx): (Option<StreamTx>, Option<StreamRx>)| Self {
            read: rx.map(ReadHalf::new),
            write: tx.map(WriteHalf::new),
        };
        Ok((stream(a), stream(b)))
    }

    /// A stream of one end's halves.
    pub(crate) fn of((tx, rx): (Option<StreamTx>, Option<StreamRx>)) -> Self {
        Self { read: rx.map(ReadHalf::new), write: tx.map(WriteHalf::new) }
    }

    /// Both halves, for alternate use.
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

    /// The halves, for independent use, for instance in two threads. A one-way connection has only one.
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

    /// The other side of the connection.
    pub fn peer(&self) -> Option<&PeerInfo> {
        self.endpoint().map(|s| s.info())
    }

    /// The channel's number, as `partywall list` shows it.
    pub fn channel_id(&self) -> Option<u64> {
        self.endpoint().map(|s| s.id())
    }

    /// The further regions of this connection: memory beside its rings. See [`Regions`].
    pub fn regions(&self) -> Regions {
        Regions::of(self.endpoint())
    }

    fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        let write = self.write.as_ref().map(|w| w.tx.core.endpoint());
        write.or_else(|| self.read.as_ref().map(|r| r.rx.endpoint()))
    }

    /// Ends one direction or both. After `Write`, the peer reads the written bytes and then the end.
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

    /// The longest that a read may wait; `None`: no limit.
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

    /// The longest single wait of a write for room; `None`: no limit. See [`WriteHalf::set_timeout`].
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
