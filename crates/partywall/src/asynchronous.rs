//! Streams, messages, broadcasts and calls for tokio (feature `tokio`).
//!
//! ```
//! use partywall::asynchronous::AsyncStream;
//! use partywall::{Options, Stream};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (client, server) = Stream::pair(&Options::default())?;
//! let (mut client, mut server) = (AsyncStream::new(client)?, AsyncStream::new(server)?);
//! let echo = tokio::spawn(async move {
//!     let mut hello = [0; 5];
//!     server.read_exact(&mut hello).await?;
//!     server.write_all(&hello).await
//! });
//! client.write_all(b"hello").await?;
//! let mut hello = [0; 5];
//! client.read_exact(&mut hello).await?;
//! assert_eq!(&hello, b"hello");
//! echo.await??;
//! # Ok(())
//! # }
//! ```
#![expect(unsafe_code, reason = "tokio asks for a promise about descriptors")]

mod blocking;
mod calls;
mod messages;
mod services;

pub use calls::{AsyncCallClient, AsyncCallClientBuilder, AsyncCallServer, AsyncCallServerBuilder, AsyncOngoing};
pub use messages::{AsyncMessageReceiver, AsyncMessageSender, AsyncMessageSocket, AsyncSubscriber};
pub use services::{AsyncListener, AsyncMessageListener};

use crate::{Error, ReadHalf, Result, Stream, WriteHalf};
use std::io;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// A reading half driven by tokio.
///
/// ```
/// use partywall::asynchronous::AsyncReadHalf;
/// use partywall::{Options, Stream};
/// use std::io::Write;
/// use tokio::io::AsyncReadExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (mut client, server) = Stream::pair(&Options::default())?;
/// client.write_all(b"hello")?;
/// drop(client);
///
/// let (Some(read), _) = server.into_halves() else { unreachable!("two ways") };
/// let mut read = AsyncReadHalf::new(read)?;
/// let mut text = String::new();
/// read.read_to_string(&mut text).await?;
/// assert_eq!(text, "hello");
/// assert_eq!(read.into_inner().counters().bytes, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncReadHalf {
    fd: AsyncFd<ReadHalf>,
}

/// A writing half driven by tokio.
///
/// ```
/// use partywall::asynchronous::AsyncWriteHalf;
/// use partywall::{Options, Stream};
/// use std::io::Read;
/// use tokio::io::AsyncWriteExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (client, mut server) = Stream::pair(&Options::default())?;
/// let (_, Some(write)) = client.into_halves() else { unreachable!("two ways") };
/// let mut write = AsyncWriteHalf::new(write)?;
/// write.write_all(b"hello").await?;
/// write.shutdown().await?;
///
/// let mut text = String::new();
/// server.read_to_string(&mut text)?;
/// assert_eq!(text, "hello");
/// assert_eq!(write.into_inner().counters().bytes, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncWriteHalf {
    fd: AsyncFd<WriteHalf>,
}

/// How long the library may take to notice that a peer has gone, after the kernel has reported it.
const NOTICE: Duration = Duration::from_millis(1);

/// A two-way stream driven by tokio.
///
/// ```
/// use partywall::asynchronous::AsyncStream;
/// use partywall::{Options, Stream};
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (client, server) = Stream::pair(&Options::default())?;
/// let (mut read, _) = AsyncStream::new(client)?.into_halves();
/// let (_, mut write) = AsyncStream::new(server)?.into_halves();
/// let writer = tokio::spawn(async move { write.write_all(b"hello").await });
/// let mut hello = [0; 5];
/// read.read_exact(&mut hello).await?;
/// assert_eq!(&hello, b"hello");
/// writer.await??;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncStream {
    read: AsyncReadHalf,
    write: AsyncWriteHalf,
}

fn register<T: AsRawFd>(half: T) -> Result<AsyncFd<T>> {
    // SAFETY: only halves of connections are passed here, and `Readable` and `OwnedFd`, which own their descriptor. A half's descriptor is that of its link,
    // which is made with the half, never replaced, and closed when the half is dropped; the half is owned by the result and lent out by nobody.
    // A doorbell is always something to read, also for the half that writes.
    let registered = unsafe { AsyncFd::register_with_interest(half, Interest::READABLE) };
    registered.map_err(|e| Error::system("register with tokio", io::Error::from(e)))
}

impl AsyncReadHalf {
    /// Takes over a half; within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// [`Error::System`] if the runtime cannot watch its descriptor.
    pub fn new(mut half: ReadHalf) -> Result<Self> {
        half.set_nonblocking(true);
        Ok(Self { fd: register(half)? })
    }

    /// Gives the half back, still non-blocking.
    pub fn into_inner(self) -> ReadHalf {
        self.fd.into_inner()
    }
}

impl AsyncWriteHalf {
    /// Takes over a half; within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// As [`AsyncReadHalf::new`].
    pub fn new(mut half: WriteHalf) -> Result<Self> {
        half.set_nonblocking(true);
        Ok(Self { fd: register(half)? })
    }

    /// Gives the half back, still non-blocking.
    pub fn into_inner(self) -> WriteHalf {
        self.fd.into_inner()
    }

    /// Waits until the peer reads no more, whether it has closed or died, and returns the error of the next write. It is for a task that has
    /// nothing to write. A call that is cancelled loses nothing.
    ///
    /// ```
    /// use partywall::asynchronous::AsyncWriteHalf;
    /// use partywall::{Options, Stream};
    /// use std::io::ErrorKind;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (client, mut server) = Stream::pair(&Options::default())?;
    /// let (_, Some(write)) = client.into_halves() else { unreachable!("two ways") };
    /// let mut write = AsyncWriteHalf::new(write)?;
    /// server.reader()?.close();
    /// assert_eq!(write.peer_gone().await.kind(), ErrorKind::BrokenPipe);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn peer_gone(&mut self) -> io::Error {
        loop {
            if let Err(error) = self.fd.get_mut().tx.write(&[]) {
                return error.into();
            }
            // Asked before each wait, since a hang-up makes the link ready once. To another machine, the link is an `epoll` set, which does not hang up
            // itself.
            if self.fd.get_ref().tx.core.waiter.link.is_hung_up() {
                // The library notices it by another thread.
                tokio::time::sleep(NOTICE).await;
                continue;
            }
            match self.fd.readable().await {
                // A doorbell, which is still on the link, where the next write finds it; or a hang-up.
                Ok(mut ready) => ready.clear_ready(),
                Err(error) => return error,
            }
        }
    }
}

impl AsyncStream {
    /// Takes over a two-way stream; within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// [`Error::Closed`] for a one-way stream (use the half), and as [`AsyncReadHalf::new`].
    pub fn new(stream: Stream) -> Result<Self> {
        match stream.into_halves() {
            (Some(read), Some(write)) => {
                Ok(Self { read: AsyncReadHalf::new(read)?, write: AsyncWriteHalf::new(write)? })
            }
            _ => Err(Error::Closed("the connection is one-way: use its half")),
        }
    }

    /// The halves, for two tasks.
    pub fn into_halves(self) -> (AsyncReadHalf, AsyncWriteHalf) {
        (self.read, self.write)
    }
}

impl AsyncRead for AsyncReadHalf {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            // Memory first: only when it has nothing is the doorbell asked.
            match self.fd.get_mut().rx.read(buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(Error::WouldBlock) => ready!(self.fd.poll_read_ready(cx))?.clear_ready(),
                Err(e) => return Poll::Ready(Err(e.into())),
            }
        }
    }
}

impl AsyncWrite for AsyncWriteHalf {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.fd.get_mut().tx.write(buf) {
                Ok(n) => return Poll::Ready(Ok(n)),
                Err(Error::WouldBlock) => ready!(self.fd.poll_read_ready(cx))?.clear_ready(),
                Err(e) => return Poll::Ready(Err(e.into())),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.fd.get_mut().finish();
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for AsyncStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.read).poll_read(cx, buf)
    }
}

impl AsyncWrite for AsyncStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.write).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.write).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel;
    use crate::keeper::HangUpWatch;
    use crate::tx::StreamTx;
    use partywall_region::{Link, OwnRegion, RegionOptions, link};
    use partywall_shm::layout::PAGE;
    use partywall_shm::sizing::Sizing;
    use std::sync::Arc;

    #[tokio::test]
    async fn peer_gone_ends_if_keeper_notices_after_the_runtime() {
        let options = crate::Options::default();
        let ((tx, _back), _peer) = channel::pair(&options).unwrap();
        let endpoint = Arc::clone(tx.unwrap().core.endpoint());
        // A link to another machine. Its hang-up is that of a second link, which comes when the test says so.
        let (near, far) = Link::pair().unwrap();
        let (noticed, notice) = link::pair().unwrap();
        let (noticed, notice) = (Link::bells(noticed).unwrap(), Link::bells(notice).unwrap());
        let (ring, _memory) = OwnRegion::create(&RegionOptions::endpoint(PAGE)).unwrap();
        let watch = HangUpWatch::link(noticed.life()).unwrap();
        let link = channel::crossing(near).unwrap();
        let half = WriteHalf::new(StreamTx::new(endpoint, ring, link, watch, Sizing::new(PAGE, PAGE), &options));
        let mut half = AsyncWriteHalf::new(half).unwrap();
        drop(far);
        let _ = half.fd.readable().await.unwrap();
        let mut gone = Box::pin(half.peer_gone());
        let first = std::future::poll_fn(|cx| Poll::Ready(gone.as_mut().poll(cx).is_pending())).await;
        assert!(first, "the keeper has not noticed anything");
        notice.hang_up();
        let error = tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }
}
