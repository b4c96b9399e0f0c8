//! Streams that other hosts open: the gateway connects to the service here as the remote client.

use std::sync::Arc;
use std::time::Duration;

use partywall::{Domain, Error, Options, Refusal};
use quinn::{RecvStream, SendStream};

use crate::carry::carry;
use crate::frame::{self, RemoteRefusal, RouteRequest};
use crate::peers::{PeerHost, StreamCount};

/// How long another host may take to say what it wants.
const REQUEST: Duration = Duration::from_secs(5);

/// Answers other hosts.
#[derive(Debug)]
pub(crate) struct InboundServer {
    pub(crate) domain: Domain,
    pub(crate) options: Options,
}

/// The refusal that the client on the other host gets for an error here.
pub(crate) fn as_refusal(error: &Error) -> RemoteRefusal {
    match error {
        Error::Refused { code, reason } => RemoteRefusal::new(*code, reason.clone()),
        other => RemoteRefusal::new(Refusal::OutOfResources, other.to_string()),
    }
}

impl InboundServer {
    /// Answers the request at the beginning of a stream, and carries the stream.
    pub(crate) async fn answer(&self, peer: &Arc<PeerHost>, mut send: SendStream, mut receive: RecvStream) {
        let _count = StreamCount::of(peer);
        let request = match tokio::time::timeout(REQUEST, RouteRequest::receive(&mut receive)).await {
            Ok(Ok(request)) => request,
            Ok(Err(reason)) => return tracing::warn!(host = %peer.host, reason, "a stream without a request"),
            Err(_) => return tracing::warn!(host = %peer.host, "a stream without a request in time"),
        };
        let (domain, options, host) = (self.domain.clone(), self.options.clone(), peer.host.clone());
        let RouteRequest { from, target, service, directions } = request.clone();
        let connect = move || domain.connect_for((&from, host.as_str()), (&target, &service), directions, &options);
        let connected = match tokio::task::spawn_blocking(connect).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(as_refusal(&error)),
            Err(_) => Err(RemoteRefusal::new(Refusal::OutOfResources, "the gateway fails")),
        };
        let answer = connected.as_ref().map(drop).map_err(Clone::clone);
        let (host, RouteRequest { from, target, service, .. }) = (&peer.host, request);
        match &answer {
            Ok(()) => tracing::info!(%host, from, target, service, "connected for another host"),
            Err(RemoteRefusal { reason, .. }) => {
                tracing::info!(%host, from, target, service, reason, "refused to another host");
            }
        }
        let told = frame::send_answer(&mut send, &answer).await;
        match connected {
            Ok(stream) if told.is_ok() => carry(stream, send, receive).await,
            Ok(stream) => abort(stream),
            Err(_) => {
                let _ = send.finish();
                let _ = send.stopped().await;
            }
        }
    }
}

/// Ends a stream as dead.
pub(crate) fn abort(stream: partywall::Stream) {
    let (read, write) = stream.into_halves();
    if let Some(mut read) = read {
        read.abort();
    }
    if let Some(mut write) = write {
        write.abort();
    }
}
