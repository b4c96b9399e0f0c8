//! Connecting and accepting without blocking the runtime's threads.
//!
//! Connecting and accepting are requests to the broker. They take microseconds, but a broker may be stopped, so the requests run on the
//! runtime's threads for blocking calls.

use crate::{Domain, Error, Listener, MessageListener, Options, PeerInfo, Result, Stream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;
use tokio::io::Interest;
use tokio::task::{JoinHandle, spawn_blocking};

use super::blocking::{blocking, ended};
use super::{AsyncMessageSocket, AsyncStream, register};

/// How long an accepting thread may wait for what has woken it. It is longer only while the broker is away.
const LOOK: Duration = Duration::from_millis(200);

impl AsyncStream {
    /// Connects from the [current](Domain::current) domain to `DOMAIN:SERVICE`, within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// As [`Domain::connect`], and as [`AsyncReadHalf::new`](super::AsyncReadHalf::new).
    pub async fn connect(target: &str) -> Result<Self> {
        Self::connect_with(&Domain::current()?, target, &Options::default()).await
    }

    /// Connects from a domain, with options.
    ///
    /// # Errors
    /// As [`Domain::connect_with`], and [`Error::Closed`] for a one-way stream.
    pub async fn connect_with(domain: &Domain, target: &str, options: &Options) -> Result<Self> {
        let (domain, target, options) = (domain.clone(), target.to_owned(), options.clone());
        Self::new(blocking(move || domain.connect_with(&target, &options)).await?)
    }
}

/// A listener whose connections can be waited for: what streams and messages have in common.
pub(super) trait Accepting: AsFd + Send + 'static {
    type Accepted: std::fmt::Debug + Send + 'static;
    fn accept_for(&mut self, longest: Duration) -> Result<Self::Accepted>;
}

impl Accepting for Listener {
    type Accepted = (Stream, PeerInfo);
    fn accept_for(&mut self, longest: Duration) -> Result<Self::Accepted> {
        self.set_nonblocking(false);
        self.set_timeout(Some(longest));
        self.accept()
    }
}

impl Accepting for MessageListener {
    type Accepted = (crate::MessageSocket, PeerInfo);
    fn accept_for(&mut self, longest: Duration) -> Result<Self::Accepted> {
        self.set_nonblocking(false);
        self.set_timeout(Some(longest));
        self.accept()
    }
}

type Visit<L> = (L, Result<<L as Accepting>::Accepted>);

/// Where the listener is.
#[derive(Debug)]
pub(super) enum Turnstile<L: Accepting> {
    /// Here, until its descriptor is readable.
    Waiting(L),
    /// A thread accepts. If the call is cancelled, the next call gets the thread's result.
    Accepting(JoinHandle<Visit<L>>),
    /// The thread that had the endpoint has panicked.
    Lost,
}

impl<L: Accepting> Turnstile<L> {
    pub(super) async fn accept(&mut self) -> Result<L::Accepted> {
        loop {
            if let Self::Waiting(listener) = self {
                // Another descriptor after each restart of the broker.
                let fd =
                    listener.as_fd().try_clone_to_owned().map_err(|e| Error::system("wait for a connection", e))?;
                let readable = register(Readable(fd))?;
                let ready = readable.ready(Interest::READABLE).await;
                drop(ready.map_err(|e| Error::system("wait for a connection", e))?);
                let Self::Waiting(mut listener) = std::mem::replace(self, Self::Lost) else { continue };
                *self = Self::Accepting(spawn_blocking(move || {
                    let accepted = listener.accept_for(LOOK);
                    (listener, accepted)
                }));
            }
            let Self::Accepting(thread) = self else {
                return Err(Error::Closed("the thread that accepted has panicked"));
            };
            let (listener, accepted) = match thread.await {
                Ok(visit) => visit,
                Err(error) => {
                    *self = Self::Lost;
                    return Err(ended(error));
                }
            };
            *self = Self::Waiting(listener);
            match accepted {
                Err(Error::TimedOut) => {}
                other => return other,
            }
        }
    }
}

/// A descriptor to wait for.
#[derive(Debug)]
pub(super) struct Readable(OwnedFd);

impl AsRawFd for Readable {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Accepts streams for a service, driven by tokio.
///
/// ```
/// use partywall::asynchronous::{AsyncListener, AsyncStream};
/// use partywall::{Domain, Options};
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut listener = AsyncListener::new(web.bind("echo")?);
/// let echo = tokio::spawn(async move {
///     let (stream, peer) = listener.accept().await?;
///     assert_eq!(peer.name, "web");
///     let (mut reader, mut writer) = stream.into_halves();
///     tokio::io::copy(&mut reader, &mut writer).await?;
///     writer.shutdown().await
/// });
/// let mut client = AsyncStream::connect("web:echo").await?;
/// client.write_all(b"hello").await?;
/// client.shutdown().await?;
/// let mut answer = String::new();
/// client.read_to_string(&mut answer).await?;
/// assert_eq!(answer, "hello");
/// echo.await??;
///
/// let mut other = AsyncListener::new(web.bind("other")?);
/// let options = Options::default().backlog(16);
/// let (connected, accepted) = tokio::join!(AsyncStream::connect_with(&web, "web:other", &options), other.accept());
/// assert!(connected.is_ok() && accepted.is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncListener {
    turnstile: Turnstile<Listener>,
}

impl AsyncListener {
    /// Takes over a listener. Its blocking mode and timeout have no effect any more.
    pub fn new(listener: Listener) -> Self {
        Self { turnstile: Turnstile::Waiting(listener) }
    }

    /// Waits for a connection, within a tokio runtime with I/O enabled. A call that is cancelled loses no connection. After a restart of the
    /// broker the listener binds again automatically.
    ///
    /// A one-way stream, which an [`AsyncStream`] cannot be, is closed, and the next connection is waited for: any domain that may connect can make one.
    ///
    /// # Errors
    /// As [`Listener::accept`], and as [`AsyncStream::new`] otherwise.
    pub async fn accept(&mut self) -> Result<(AsyncStream, PeerInfo)> {
        loop {
            let (stream, peer) = self.turnstile.accept().await?;
            match AsyncStream::new(stream) {
                Err(Error::Closed(_)) => tracing::info!(peer = peer.name, "a one-way stream was closed"),
                other => return Ok((other?, peer)),
            }
        }
    }
}

/// Accepts connections that carry messages, driven by tokio.
///
/// ```
/// use partywall::asynchronous::{AsyncMessageListener, AsyncMessageSocket};
/// use partywall::{Domain, MessageListener, Options};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let listener = MessageListener::bind(&web, "orders", &Options::default())?;
/// let mut listener = AsyncMessageListener::new(listener);
/// let mut client = AsyncMessageSocket::connect("web:orders").await?;
/// client.send(b"two apples").await?;
///
/// let (mut server, _peer) = listener.accept().await?;
/// let mut order = Vec::new();
/// server.recv(&mut order).await?;
/// assert_eq!(order, b"two apples");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncMessageListener {
    turnstile: Turnstile<MessageListener>,
}

impl AsyncMessageListener {
    /// Takes over a listener. Its blocking mode and timeout have no effect any more.
    pub fn new(listener: MessageListener) -> Self {
        Self { turnstile: Turnstile::Waiting(listener) }
    }

    /// Waits for a connection, as [`AsyncListener::accept`].
    ///
    /// # Errors
    /// As [`AsyncListener::accept`].
    pub async fn accept(&mut self) -> Result<(AsyncMessageSocket, PeerInfo)> {
        let (socket, peer) = self.turnstile.accept().await?;
        Ok((AsyncMessageSocket::new(socket)?, peer))
    }
}
