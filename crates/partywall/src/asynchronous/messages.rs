//! Messages and broadcasts under tokio.

use super::blocking::blocking;
use super::register;
use crate::{Domain, Error, MessageReceiver, MessageSender, MessageSocket, Options, Result, Subscriber};
use std::future::poll_fn;
use std::os::fd::AsRawFd;
use std::task::{Poll, ready};
use tokio::io::unix::AsyncFd;

/// Calls until the call does not need to wait any more. The call does all or nothing, so it can be cancelled in between.
async fn drive<H: AsRawFd, T>(fd: &mut AsyncFd<H>, mut call: impl FnMut(&mut H) -> Result<T>) -> Result<T> {
    poll_fn(|cx| {
        loop {
            // Memory first: only when it has nothing is the doorbell asked.
            match call(fd.get_mut()) {
                Err(Error::WouldBlock) => match ready!(fd.poll_read_ready(cx)) {
                    Ok(mut guard) => guard.clear_ready(),
                    Err(e) => return Poll::Ready(Err(Error::system("wait for the peer", e))),
                },
                done => return Poll::Ready(done),
            }
        }
    })
    .await
}

/// A connection that carries messages, driven by tokio.
///
/// ```
/// use partywall::asynchronous::{AsyncMessageListener, AsyncMessageSocket};
/// use partywall::{Domain, MessageListener, Options};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// # let listener = MessageListener::bind(&web, "orders", &Options::default())?;
/// # let mut listener = AsyncMessageListener::new(listener);
/// let client = AsyncMessageSocket::connect_with(&web, "web:orders", &Options::default()).await?;
/// let (mut server, _) = listener.accept().await?;
/// let (Some(mut sender), Some(mut receiver)) = client.into_halves() else { unreachable!("two ways") };
/// let sending = tokio::spawn(async move { sender.send(b"two apples").await });
///
/// let mut order = Vec::new();
/// server.recv(&mut order).await?;
/// server.send(b"accepted").await?;
/// receiver.recv(&mut order).await?;
/// assert_eq!(order, b"accepted");
/// sending.await??;
/// server.finish();
/// assert!(receiver.recv(&mut order).await.is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncMessageSocket {
    sender: Option<AsyncMessageSender>,
    receiver: Option<AsyncMessageReceiver>,
}

/// The half of a connection that sends messages, driven by tokio. See [`AsyncMessageSocket`].
///
/// ```
/// use partywall::asynchronous::{AsyncMessageReceiver, AsyncMessageSender};
/// use partywall::{Error, Result};
///
/// /// Passes messages on until there are no more.
/// async fn forward(mut from: AsyncMessageReceiver, mut to: AsyncMessageSender) -> Result<()> {
///     let mut message = Vec::new();
///     loop {
///         match from.recv(&mut message).await {
///             Ok(()) => to.send(&message).await?,
///             Err(Error::Closed(_)) => break,
///             Err(error) => return Err(error),
///         }
///     }
///     to.finish();
///     Ok(())
/// }
/// # let _ = forward;
/// ```
#[derive(Debug)]
pub struct AsyncMessageSender {
    fd: AsyncFd<MessageSender>,
}

/// The half of a connection that receives messages, driven by tokio. See [`AsyncMessageSocket`].
///
/// ```
/// use partywall::asynchronous::AsyncMessageReceiver;
///
/// async fn count(mut from: AsyncMessageReceiver) -> usize {
///     let (mut count, mut message) = (0, Vec::new());
///     while from.recv(&mut message).await.is_ok() {
///         count += 1;
///     }
///     count
/// }
/// # let _ = count;
/// ```
#[derive(Debug)]
pub struct AsyncMessageReceiver {
    fd: AsyncFd<MessageReceiver>,
}

const ONE_WAY: Error = Error::Closed("the connection is one-way, the other way");

impl AsyncMessageSocket {
    /// Takes over a connection; within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// [`Error::System`] if the runtime cannot watch its descriptors.
    pub fn new(socket: MessageSocket) -> Result<Self> {
        let (sender, receiver) = socket.into_halves();
        let sender = sender.map(|mut half| {
            half.set_nonblocking(true);
            register(half).map(|fd| AsyncMessageSender { fd })
        });
        let receiver = receiver.map(|mut half| {
            half.set_nonblocking(true);
            register(half).map(|fd| AsyncMessageReceiver { fd })
        });
        Ok(Self { sender: sender.transpose()?, receiver: receiver.transpose()? })
    }

    /// Connects from the [current](Domain::current) domain to `DOMAIN:SERVICE`.
    ///
    /// # Errors
    /// As [`MessageSocket::connect`], and as [`AsyncMessageSocket::new`].
    pub async fn connect(target: &str) -> Result<Self> {
        Self::connect_with(&Domain::current()?, target, &Options::default()).await
    }

    /// Connects from a domain, with options.
    ///
    /// # Errors
    /// As [`MessageSocket::connect_with`], and as [`AsyncMessageSocket::new`].
    pub async fn connect_with(domain: &Domain, target: &str, options: &Options) -> Result<Self> {
        let (domain, target, options) = (domain.clone(), target.to_owned(), options.clone());
        Self::new(blocking(move || MessageSocket::connect_with(&domain, &target, &options)).await?)
    }

    /// The halves, for two tasks. A one-way connection has only one of them.
    pub fn into_halves(self) -> (Option<AsyncMessageSender>, Option<AsyncMessageReceiver>) {
        (self.sender, self.receiver)
    }

    /// Sends one message; waits while the ring is full. A call that is cancelled has sent nothing.
    ///
    /// # Errors
    /// As [`MessageSocket::send`].
    pub async fn send(&mut self, message: &[u8]) -> Result<()> {
        self.sender.as_mut().ok_or(ONE_WAY)?.send(message).await
    }

    /// Receives one message into `buf`, replacing its content. A call that is cancelled has received nothing.
    ///
    /// # Errors
    /// As [`MessageSocket::recv`].
    pub async fn recv(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        self.receiver.as_mut().ok_or(ONE_WAY)?.recv(buf).await
    }

    /// Ends the sending direction: no message follows.
    pub fn finish(&mut self) {
        if let Some(sender) = &mut self.sender {
            sender.finish();
        }
    }
}

impl AsyncMessageSender {
    /// As [`AsyncMessageSocket::send`].
    ///
    /// # Errors
    /// As [`MessageSocket::send`].
    pub async fn send(&mut self, message: &[u8]) -> Result<()> {
        drive(&mut self.fd, |half| half.send(message)).await
    }

    /// Ends the sending direction: no message follows. Dropping the half does so, too.
    pub fn finish(&mut self) {
        self.fd.get_mut().finish();
    }
}

impl AsyncMessageReceiver {
    /// As [`AsyncMessageSocket::recv`].
    ///
    /// # Errors
    /// As [`MessageSocket::recv`].
    pub async fn recv(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        drive(&mut self.fd, |half| half.recv(buf)).await
    }
}

/// Receives the messages of a publisher, driven by tokio.
///
/// ```
/// use partywall::asynchronous::AsyncSubscriber;
/// use partywall::{Domain, Options, Publisher, SlowReader};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut ticker = Publisher::bind(&web, "ticks", SlowReader::Hold, &Options::default())?;
/// let mut reader = AsyncSubscriber::connect("web:ticks").await?;
/// while ticker.subscribers() == 0 {
///     ticker.admit()?;
/// }
/// ticker.send(b"tick")?;
/// let mut tick = Vec::new();
/// reader.recv(&mut tick).await?;
/// assert_eq!(tick, b"tick");
/// drop(ticker);
/// assert!(reader.recv(&mut tick).await.is_err());
/// let _another = AsyncSubscriber::connect_with(&web, "web:ticks", &Options::default()).await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncSubscriber {
    fd: AsyncFd<Subscriber>,
}

impl AsyncSubscriber {
    /// Takes over a subscriber; within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// As [`AsyncMessageSocket::new`].
    pub fn new(mut subscriber: Subscriber) -> Result<Self> {
        subscriber.set_nonblocking(true);
        Ok(Self { fd: register(subscriber)? })
    }

    /// Subscribes from the [current](Domain::current) domain to `DOMAIN:SERVICE`.
    ///
    /// # Errors
    /// As [`Subscriber::connect`], and as [`AsyncMessageSocket::new`].
    pub async fn connect(target: &str) -> Result<Self> {
        Self::connect_with(&Domain::current()?, target, &Options::default()).await
    }

    /// Subscribes from a domain, with options.
    ///
    /// # Errors
    /// As [`Subscriber::connect_with`], and as [`AsyncMessageSocket::new`].
    pub async fn connect_with(domain: &Domain, target: &str, options: &Options) -> Result<Self> {
        let (domain, target, options) = (domain.clone(), target.to_owned(), options.clone());
        Self::new(blocking(move || Subscriber::connect_with(&domain, &target, &options)).await?)
    }

    /// Receives one message into `buf`, replacing its content. A call that is cancelled has received nothing.
    ///
    /// # Errors
    /// As [`Subscriber::recv`].
    pub async fn recv(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        drive(&mut self.fd, |subscriber| subscriber.recv(buf)).await
    }

    /// Receives the newest message into `buf`, and passes over the messages before it. A call that is cancelled has received nothing.
    ///
    /// # Errors
    /// As [`Subscriber::recv_newest`].
    ///
    /// ```
    /// use partywall::asynchronous::AsyncSubscriber;
    /// use partywall::{Domain, Options, Publisher, SlowReader};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let mut thermometer = Publisher::bind(&web, "celsius", SlowReader::Newest, &Options::default())?;
    /// let mut reader = AsyncSubscriber::connect("web:celsius").await?;
    /// while thermometer.subscribers() == 0 {
    ///     thermometer.admit()?;
    /// }
    /// let mut celsius = Vec::new();
    /// thermometer.send(b"20.0")?;
    /// reader.recv_newest(&mut celsius).await?;
    /// thermometer.send(b"20.1")?;
    /// thermometer.send(b"20.2")?;
    /// reader.recv_newest(&mut celsius).await?;
    /// assert_eq!((&celsius[..], reader.lost()), (&b"20.2"[..], 1));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn recv_newest(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        drive(&mut self.fd, |subscriber| subscriber.recv_newest(buf)).await
    }

    /// As [`Subscriber::lost`].
    pub fn lost(&self) -> u64 {
        self.fd.get_ref().lost()
    }
}
