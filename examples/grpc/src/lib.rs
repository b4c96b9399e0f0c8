//! gRPC over streams of Partywall, by tonic: the two functions that a project needs.
//!
//! - [`channel`] connects a client of tonic.
//! - [`incoming`] has the connections for a server of tonic. Its handlers find the caller, as the broker reports it, in the request's
//!   extensions ([`Caller`]).
//! - [`Echo`] is an example service: one call, and one stream of calls. `src/bin/` has its server and its client.

use hyper_util::rt::TokioIo;
use partywall::asynchronous::AsyncStream;
use partywall::{Domain, Error, Listener, PeerInfo};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status, Streaming};

/// The code that the build script generates from the service: its client and its server.
#[allow(missing_docs, clippy::all, reason = "made by tonic's generator")]
pub mod generated {
    include!(concat!(env!("OUT_DIR"), "/partywall.example.Echo.rs"));
}

/// The message of the service.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Words {
    /// A text.
    #[prost(string, tag = "1")]
    pub text: String,
}

/// The program at the other end, as the broker vouches for it. A handler finds it in the request's extensions.
#[derive(Clone, Debug)]
pub struct Caller(pub PeerInfo);

/// A connection as tonic's server takes it.
#[derive(Debug)]
pub struct Connection {
    stream: AsyncStream,
    caller: Caller,
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Connections for `Server::serve_with_incoming`, within a tokio runtime. A thread accepts them until the server is gone.
pub fn incoming(mut listener: Listener) -> impl Stream<Item = io::Result<Connection>> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        loop {
            let accepted = listener.accept();
            // Without memory or descriptors for one connection, the next may be accepted.
            if let Err(Error::Memory(_) | Error::System { .. }) = accepted {
                continue;
            }
            let is_over = accepted.is_err();
            if sender.blocking_send(accepted.map_err(io::Error::from)).is_err() || is_over {
                return;
            }
        }
    });
    ReceiverStream::new(receiver).filter_map(|accepted| match accepted {
        // A one-way stream affects only its visitor.
        Ok((stream, peer)) => {
            AsyncStream::new(stream).ok().map(|stream| Ok(Connection { stream, caller: Caller(peer) }))
        }
        Err(error) => Some(Err(error)),
    })
}

/// A channel of tonic's to a service `DOMAIN:SERVICE`. It connects again by itself after the server was away.
///
/// # Errors
/// What the broker says of the first connection.
pub async fn channel(domain: Domain, target: &'static str) -> Result<Channel, tonic::transport::Error> {
    // The address is not used: the connector knows where to go. It becomes the `:authority` of requests.
    let connector = tower::service_fn(move |_| {
        let domain = domain.clone();
        async move {
            // The broker's answer is waited for on a thread that may wait.
            let connected = tokio::task::spawn_blocking(move || domain.connect(target)).await;
            let stream = connected.map_err(io::Error::other)??;
            Ok::<_, io::Error>(TokioIo::new(AsyncStream::new(stream)?))
        }
    });
    Endpoint::from_static("http://partywall").connect_with_connector(connector).await
}

/// The service: it sends back the request and the name of the caller.
#[derive(Debug, Default)]
pub struct Echo;

fn caller_of<T>(request: &Request<T>) -> String {
    let caller = request.extensions().get::<Caller>();
    caller.map_or_else(|| "nobody known".to_owned(), |Caller(peer)| peer.name.clone())
}

#[tonic::async_trait]
impl generated::echo_server::Echo for Echo {
    async fn say(&self, request: Request<Words>) -> Result<Response<Words>, Status> {
        let caller = caller_of(&request);
        let Words { text } = request.into_inner();
        if text.is_empty() {
            return Err(Status::invalid_argument("no words"));
        }
        Ok(Response::new(Words { text: format!("{text}, {caller}") }))
    }

    type RepeatStream = Pin<Box<dyn Stream<Item = Result<Words, Status>> + Send>>;

    async fn repeat(&self, request: Request<Streaming<Words>>) -> Result<Response<Self::RepeatStream>, Status> {
        Ok(Response::new(Box::pin(request.into_inner())))
    }
}
