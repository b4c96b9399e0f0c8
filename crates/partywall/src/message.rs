//! Message sockets: datagrams between two domains, in order, each whole (protocol D).

use crate::connect;
use crate::further::Regions;
use crate::listener::Acceptor;
use crate::rx::StreamRx;
use crate::tx::StreamTx;
use crate::waiter::RetrySet;
use crate::{Domain, Error, Options, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Kind};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::record;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Accepts message sockets for a service.
///
/// ```
/// use partywall::{Domain, Error, MessageListener, MessageSocket, Options};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
/// listener.set_nonblocking(true);
/// assert!(matches!(listener.accept(), Err(Error::WouldBlock)));
///
/// let _client = MessageSocket::connect("web:orders")?;
/// listener.set_nonblocking(false);
/// let (_socket, peer) = listener.accept()?;
/// assert_eq!(peer.service, "orders");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MessageListener {
    acceptor: Acceptor,
}

impl MessageListener {
    /// Binds a service of the domain.
    ///
    /// # Errors
    /// As [`Domain::bind`].
    pub fn bind(domain: &Domain, service: &str, options: &Options) -> Result<Self> {
        Ok(Self { acceptor: Acceptor::bind(domain, service, Kind::Message, options)? })
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// As [`Listener::accept`](crate::Listener::accept).
    pub fn accept(&mut self) -> Result<(MessageSocket, PeerInfo)> {
        let (tx, rx, info) = self.acceptor.accept()?;
        Ok((MessageSocket::new(tx, rx), info))
    }

    /// Whether [`MessageListener::accept`] returns [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.acceptor.nonblocking = yes;
    }

    /// The longest that [`MessageListener::accept`] may wait for a connection; `None`: no limit.
    ///
    /// ```
    /// use partywall::{Domain, Error, MessageListener, Options};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
    /// listener.set_timeout(Some(Duration::from_millis(1)));
    /// assert!(matches!(listener.accept(), Err(Error::TimedOut)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.acceptor.timeout = longest;
    }
}

impl AsFd for MessageListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.acceptor.as_fd()
    }
}

/// A connection that carries messages. Each message arrives whole, once and in order, or not at all.
///
/// Closing, death and threads are as for a [`Stream`](crate::Stream).
///
/// ```
/// use partywall::{Domain, MessageListener, MessageSocket, Options};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
/// let mut client = MessageSocket::connect("web:orders")?;
/// client.send(b"two apples")?;
/// client.send(b"one pear")?;
///
/// let (mut server, _) = listener.accept()?;
/// let mut order = Vec::new();
/// server.recv(&mut order)?;
/// assert_eq!(order, b"two apples");
/// server.recv(&mut order)?;
/// assert_eq!(order, b"one pear");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MessageSocket {
    sender: Option<MessageSender>,
    receiver: Option<MessageReceiver>,
}

/// The sending half of a message socket, for one thread at a time.
///
/// ```
/// use partywall::{Domain, Error, MessageListener, MessageSocket, Options, RingSize};
/// use std::os::fd::AsFd;
/// use std::time::Duration;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
/// let small = Options::default().ring(RingSize::Fixed(4096));
/// let client = MessageSocket::connect_with(&web, "web:orders", &small)?;
/// # let (mut server, _) = listener.accept()?;
/// let (Some(mut sender), _) = client.into_halves() else { unreachable!("two ways") };
/// sender.send(&vec![0; sender.max_message()])?;
/// sender.set_timeout(Some(Duration::from_millis(1)));
/// assert!(matches!(sender.send(b"more"), Err(Error::TimedOut)));
/// sender.set_nonblocking(true);
/// assert!(matches!(sender.send(b"more"), Err(Error::WouldBlock)));
/// let _poll_for_readable = sender.as_fd();
///
/// sender.finish();
/// server.recv(&mut Vec::new())?;
/// assert!(matches!(server.recv(&mut Vec::new()), Err(Error::Closed(_))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MessageSender {
    tx: StreamTx,
    retry: RetrySet,
}

/// The receiving half of a message socket, for one thread at a time.
///
/// ```
/// use partywall::{Domain, Error, MessageListener, MessageSocket, Options};
/// use std::os::fd::AsFd;
/// use std::time::Duration;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
/// # let mut client = MessageSocket::connect("web:orders")?;
/// let (_, Some(mut receiver)) = listener.accept()?.0.into_halves() else { unreachable!("two ways") };
/// client.send(b"two apples")?;
/// client.send(b"one pear")?;
/// let mut order = [0; 64];
/// assert_eq!(receiver.recv_into(&mut order)?, 10);
/// let mut order = Vec::new();
/// receiver.recv(&mut order)?;
/// assert_eq!(order, b"one pear");
///
/// receiver.set_timeout(Some(Duration::from_millis(1)));
/// assert!(matches!(receiver.recv(&mut order), Err(Error::TimedOut)));
/// receiver.set_nonblocking(true);
/// assert!(matches!(receiver.recv(&mut order), Err(Error::WouldBlock)));
/// let _poll_for_readable = receiver.as_fd();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MessageReceiver {
    rx: StreamRx,
}

const ONE_WAY: Error = Error::Closed("the connection is one-way, the other way");

impl MessageSocket {
    /// Connects from the [current](Domain::current) domain to `DOMAIN:SERVICE`.
    ///
    /// # Errors
    /// As [`Domain::connect`].
    pub fn connect(target: &str) -> Result<Self> {
        Self::connect_with(&Domain::current()?, target, &Options::default())
    }

    /// Connects from a domain, with options.
    ///
    /// # Errors
    /// As [`Domain::connect_with`].
    ///
    /// ```
    /// use partywall::{Domain, Error, MessageListener, MessageSocket, Options, RingSize};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
    /// let options = Options::default().ring(RingSize::Fixed(1 << 16));
    /// let mut client = MessageSocket::connect_with(&web, "web:orders", &options)?;
    /// assert!(client.max_message() < 1 << 16);
    /// let too_long = vec![0; client.max_message() + 1];
    /// assert!(matches!(client.send(&too_long), Err(Error::TooLarge { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn connect_with(domain: &Domain, target: &str, options: &Options) -> Result<Self> {
        let directions = if options.one_way { Directions::FORWARD } else { Directions::BOTH };
        let (tx, rx) = connect::open(domain, target, Kind::Message, directions, options)?;
        Ok(Self::new(tx, rx))
    }

    fn new(tx: Option<StreamTx>, rx: Option<StreamRx>) -> Self {
        Self {
            sender: tx.map(|tx| MessageSender { tx, retry: RetrySet::default() }),
            receiver: rx.map(|rx| MessageReceiver { rx }),
        }
    }

    /// The halves, for independent use, for instance in two threads. A one-way connection has only one.
    ///
    /// ```
    /// use partywall::{Domain, MessageListener, MessageSocket, Options};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
    /// # let client = MessageSocket::connect("web:orders")?;
    /// # let (mut server, _) = listener.accept()?;
    /// let (Some(mut sender), Some(mut receiver)) = client.into_halves() else { unreachable!("two ways") };
    /// let sending = std::thread::spawn(move || sender.send(b"two apples")); // `sender` is dropped at its end.
    ///
    /// let mut order = Vec::new();
    /// server.recv(&mut order)?;
    /// server.send(b"accepted")?;
    /// receiver.recv(&mut order)?;
    /// assert_eq!(order, b"accepted");
    /// sending.join().expect("no panic")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_halves(self) -> (Option<MessageSender>, Option<MessageReceiver>) {
        (self.sender, self.receiver)
    }

    fn sender(&mut self) -> Result<&mut MessageSender> {
        self.sender.as_mut().ok_or(ONE_WAY)
    }

    fn receiver(&mut self) -> Result<&mut MessageReceiver> {
        self.receiver.as_mut().ok_or(ONE_WAY)
    }

    /// The longest message that can be sent, in bytes.
    pub fn max_message(&self) -> usize {
        self.sender.as_ref().map_or(0, MessageSender::max_message)
    }

    /// Sends one message. Waits while the ring is full, and grows the ring if the message requires it.
    ///
    /// # Errors
    /// [`Error::TooLarge`] over [`MessageSocket::max_message`]; nothing is sent then. [`Error::WouldBlock`],
    /// [`Error::TimedOut`], [`Error::Closed`], [`Error::Dead`], [`Error::Corrupt`].
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        self.sender()?.send(message)
    }

    /// Receives one message into `buf`, replacing its content.
    ///
    /// # Errors
    /// [`Error::Closed`] once the peer has finished and all messages were read; [`Error::WouldBlock`],
    /// [`Error::TimedOut`], [`Error::Dead`], [`Error::Corrupt`].
    pub fn recv(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        self.receiver()?.recv(buf)
    }

    /// Receives one message into a slice and returns its length.
    ///
    /// # Errors
    /// As [`MessageSocket::recv`], and [`Error::TooLarge`] if the message does not fit: it can still be received into a larger slice.
    ///
    /// ```
    /// use partywall::{Domain, Error, MessageListener, MessageSocket, Options};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
    /// # let mut client = MessageSocket::connect("web:orders")?;
    /// # let (mut server, _) = listener.accept()?;
    /// client.send(b"two apples")?;
    /// let mut order = [0; 64];
    /// assert!(matches!(server.recv_into(&mut order[..4]), Err(Error::TooLarge { asked: 10, .. })));
    /// let length = server.recv_into(&mut order)?;
    /// assert_eq!(&order[..length], b"two apples");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recv_into(&mut self, buf: &mut [u8]) -> Result<usize> {
        self.receiver()?.recv_into(buf)
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting.
    ///
    /// ```
    /// use partywall::{Domain, Error, MessageListener, MessageSocket, Options};
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
    /// # let mut client = MessageSocket::connect("web:orders")?;
    /// # let (mut server, _) = listener.accept()?;
    /// let mut order = Vec::new();
    /// server.set_timeout(Some(Duration::from_millis(1)));
    /// assert!(matches!(server.recv(&mut order), Err(Error::TimedOut)));
    ///
    /// server.set_nonblocking(true);
    /// while matches!(server.recv(&mut order), Err(Error::WouldBlock)) {
    ///     client.send(b"two apples")?;
    ///     poll(&mut [PollFd::from_borrowed_fd(server.receive_fd()?, PollFlags::IN)], None)?;
    /// }
    /// assert_eq!(order, b"two apples");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_nonblocking(&mut self, yes: bool) {
        if let Some(sender) = &mut self.sender {
            sender.set_nonblocking(yes);
        }
        if let Some(receiver) = &mut self.receiver {
            receiver.set_nonblocking(yes);
        }
    }

    /// The longest that a call may wait; `None`: no limit.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        if let Some(sender) = &mut self.sender {
            sender.set_timeout(longest);
        }
        if let Some(receiver) = &mut self.receiver {
            receiver.set_timeout(longest);
        }
    }

    /// Ends the sending direction: no message follows.
    ///
    /// ```
    /// use partywall::{Domain, Error, MessageListener, MessageSocket, Options};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
    /// # let mut client = MessageSocket::connect("web:orders")?;
    /// # let (mut server, _) = listener.accept()?;
    /// client.finish();
    /// assert!(matches!(server.recv(&mut Vec::new()), Err(Error::Closed(_))));
    /// server.send(b"but the other way still works")?;
    /// client.recv(&mut Vec::new())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn finish(&mut self) {
        if let Some(sender) = &mut self.sender {
            sender.finish();
        }
    }

    /// The further regions of this connection: memory beside its rings. See [`Regions`].
    ///
    /// ```
    /// use partywall::{MessageListener, MessageSocket, Options};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let mut listener = MessageListener::bind(&web, "frames", &Options::default())?;
    /// let client = MessageSocket::connect("web:frames")?;
    /// let (server, _) = listener.accept()?;
    /// server.regions().take(1, 1, 1 << 20)?;
    /// let frame = client.regions().add(1, 1 << 20)?;
    /// assert_eq!(server.regions().next()?.map(|frame| frame.number()), Some(frame.number()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn regions(&self) -> Regions {
        let endpoint = self.sender.as_ref().map(|sender| sender.tx.core.endpoint());
        Regions::of(endpoint.or_else(|| self.receiver.as_ref().map(|receiver| receiver.rx.endpoint())))
    }

    /// The descriptor that becomes readable when there may be a message.
    ///
    /// # Errors
    /// [`Error::Closed`] if this side only sends.
    pub fn receive_fd(&self) -> Result<BorrowedFd<'_>> {
        self.receiver.as_ref().map(AsFd::as_fd).ok_or(ONE_WAY)
    }

    /// The descriptor that becomes *readable* when there may be room for a message, after a non-blocking
    /// [`MessageSocket::send`] has failed with [`Error::WouldBlock`]. While the ring grows, it is also readable from time to time, since the
    /// broker's answer comes another way.
    ///
    /// # Errors
    /// [`Error::Closed`] if this side only receives.
    ///
    /// ```
    /// use partywall::{Domain, Error, MessageListener, MessageSocket, Options, RingSize};
    /// use rustix::event::{PollFd, PollFlags, poll};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let mut listener = MessageListener::bind(&web, "orders", &Options::default())?;
    /// let small = Options::default().ring(RingSize::Fixed(4096));
    /// let mut client = MessageSocket::connect_with(&web, "web:orders", &small)?;
    /// # let (mut server, _) = listener.accept()?;
    /// client.send(&[0; 4000])?; // The next one does not fit beside it.
    /// client.set_nonblocking(true);
    /// while matches!(client.send(&[1; 4000]), Err(Error::WouldBlock)) {
    ///     server.recv(&mut Vec::new())?;
    ///     poll(&mut [PollFd::from_borrowed_fd(client.send_fd()?, PollFlags::IN)], None)?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn send_fd(&self) -> Result<BorrowedFd<'_>> {
        self.sender.as_ref().map(AsFd::as_fd).ok_or(ONE_WAY)
    }
}

impl MessageSender {
    /// The longest message that can be sent, in bytes.
    pub fn max_message(&self) -> usize {
        record::longest(self.tx.core.max_ring()) as usize
    }

    /// Sends one message, as [`MessageSocket::send`].
    ///
    /// # Errors
    /// As [`MessageSocket::send`].
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        let tx = &mut self.tx;
        let too_large =
            |max| Error::TooLarge { asked: message.len() as u64, max, advice: "ask for a larger ring, or split it" };
        let len = u32::try_from(message.len()).map_err(|_| too_large(record::longest(tx.core.max_ring())))?;
        let footprint = record::footprint(u64::from(len));
        if footprint > tx.core.max_ring() {
            return Err(too_large(record::longest(tx.core.max_ring())));
        }
        let (span, core) = match tx.reserve(footprint) {
            Ok(reserved) => reserved,
            Err(e) => {
                if matches!(e, Error::WouldBlock) && self.tx.core.waits_for_broker(footprint) {
                    self.retry.begin_pause();
                }
                return Err(e);
            }
        };
        let (header, payload) = span.split_at_mut(record::HEADER as usize);
        header.copy_from_slice(&record::header(len));
        payload[..message.len()].copy_from_slice(message);
        core.commit(footprint);
        self.retry.stop();
        Ok(())
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.tx.core.waiter.nonblocking = yes;
    }

    /// The longest that a call may wait; `None`: no limit.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.tx.core.waiter.timeout = longest;
    }

    /// Ends the sending direction: no message follows. Dropping the half does so, too.
    pub fn finish(&mut self) {
        self.tx.core.finish();
    }
}

/// As [`AsFd`].
impl AsRawFd for MessageSender {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for MessageSender {
    /// *Readable* when there may be room, after [`Error::WouldBlock`]. While the ring grows, it is also readable from time to time, since the
    /// broker's answer comes another way.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.retry.descriptor(&self.tx.core.waiter.link)
    }
}

impl MessageReceiver {
    /// Receives one message into `buf`, replacing its content.
    ///
    /// # Errors
    /// As [`MessageSocket::recv`].
    pub fn recv(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        let len = next_len(&mut self.rx)?;
        buf.resize(len, 0);
        take(&mut self.rx, buf);
        Ok(())
    }

    /// Receives one message into a slice and returns its length.
    ///
    /// # Errors
    /// As [`MessageSocket::recv_into`].
    pub fn recv_into(&mut self, buf: &mut [u8]) -> Result<usize> {
        let len = next_len(&mut self.rx)?;
        let max = buf.len() as u64;
        let buf = buf.get_mut(..len).ok_or(Error::TooLarge {
            asked: len as u64,
            max,
            advice: "receive it into a larger buffer",
        })?;
        take(&mut self.rx, buf);
        Ok(len)
    }

    /// Whether calls return [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.rx.waiter.nonblocking = yes;
    }

    /// The longest that a call may wait; `None`: no limit.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.rx.waiter.timeout = longest;
    }
}

/// As [`AsFd`].
impl AsRawFd for MessageReceiver {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for MessageReceiver {
    /// Readable when there may be a message, after [`Error::WouldBlock`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.rx.waiter.link.as_fd()
    }
}

/// Waits for a record and returns its length. It is checked against what is committed (protocol D2).
pub(crate) fn next_len(rx: &mut StreamRx) -> Result<usize> {
    let available = rx.wait(record::HEADER)?;
    if available == 0 {
        return Err(Error::Closed("the peer has finished"));
    }
    let mut header = [0; record::HEADER as usize];
    let copied = rx.span(0, record::HEADER).map_or(0, |span| span.copy_to(&mut header));
    let parsed = if copied == header.len() {
        record::parse(header, available, record::longest(rx.capacity()))
    } else {
        // Records are committed whole: there is no honest way to less than a header.
        Err(Corrupt::BadRecord)
    };
    parsed.map(|len| len as usize).map_err(|what| rx.blame(what))
}

/// Copies the record whose length [`next_len`] has told, and releases it.
fn take(rx: &mut StreamRx, buf: &mut [u8]) {
    copy(rx, buf);
    rx.release(record::footprint(buf.len() as u64));
}

/// Copies the payload of the next record.
pub(crate) fn copy(rx: &StreamRx, buf: &mut [u8]) {
    if let Some(span) = rx.span(record::HEADER, buf.len() as u64) {
        span.copy_to(buf);
    }
}
