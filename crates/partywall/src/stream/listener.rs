//! Accepting streams, and connecting them.

use super::{ReadHalf, Stream, WriteHalf};
#[cfg(doc)]
use crate::Error;
use crate::connect;
use crate::listener::Acceptor;
use crate::{Domain, Options, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Kind};
use rustix::fd::{AsFd, BorrowedFd};
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

    /// Waits for a connection. After a restart of the broker the listener binds again automatically.
    ///
    /// It drops connections that break the protocol, and waits for the next one.
    ///
    /// # Errors
    /// [`Error::WouldBlock`] on a non-blocking listener; [`Error::TimedOut`]; [`Error::Memory`] or [`Error::System`] if this side cannot make its
    /// half: that connection is lost, and the next call accepts the next one.
    pub fn accept(&mut self) -> Result<(Stream, PeerInfo)> {
        let (tx, rx, info) = self.acceptor.accept()?;
        Ok((Stream { read: rx.map(ReadHalf::new), write: tx.map(WriteHalf::new) }, info))
    }

    /// Whether [`Listener::accept`] returns [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.acceptor.nonblocking = yes;
    }

    /// The longest that [`Listener::accept`] may wait for a connection; `None`: no limit.
    ///
    /// ```
    /// use partywall::{Domain, Error};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let mut listener = web.bind("echo")?;
    /// listener.set_timeout(Some(Duration::from_millis(1)));
    /// assert!(matches!(listener.accept(), Err(Error::TimedOut)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.acceptor.timeout = longest;
    }
}

impl AsFd for Listener {
    /// Readable when there is something to accept. It changes when the broker goes away and when it is back: ask again after each accept.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.acceptor.as_fd()
    }
}

impl Domain {
    /// Binds a service and returns the listener that accepts its streams. Blocks until the broker has answered.
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

    /// Binds with options, which apply to accepted streams.
    ///
    /// # Errors
    /// As [`Domain::bind`]. [`Error::Invalid`] for invalid ring sizes. [`Error::TooLarge`] if the smallest size of the ring is more than the broker's
    /// policy allows (`max_ring`).
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

    /// Connects to `DOMAIN:SERVICE`. Returns when the connection is in the listener's backlog, and does not wait for the accept. The caller can write
    /// to it at once. Blocks until the broker has answered.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no such domain or service, if the backlog is full, by policy, or by quota. [`Error::Invalid`] if `target` is
    /// not `DOMAIN:SERVICE`. [`Error::System`] if the broker is gone; [`Error::TimedOut`] if it does not answer within ten seconds.
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
    /// As [`Domain::connect`], and [`Error::Invalid`] for invalid sizes.
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
