//! Streams that other hosts open: the gateway connects to the service here as the remote client.

use std::sync::Arc;
use std::time::Duration;

use partywall::cluster::Name;
use partywall::{Domain, Error, Options, Refusal, Stream};
use quinn::{RecvStream, SendStream};

use crate::carry::carry;
use crate::counters::{GatewayCounters, StreamDirection};
use crate::frame::{self, RemoteRefusal, RouteRequest};
use crate::peers::{PeerHost, StreamCount};
use crate::shares::HostShares;

/// How long another host may take to say what it wants (protocol H6.4).
const REQUEST: Duration = Duration::from_secs(5);

/// Connects to a service here for a client of another host. It blocks until the broker has answered.
type Connect = dyn Fn(&Name, &RouteRequest) -> partywall::Result<Stream> + Send + Sync;

/// Answers other hosts.
pub(crate) struct InboundServer {
    connect: Arc<Connect>,
    shares: Arc<HostShares>,
    counters: Arc<GatewayCounters>,
}

/// The refusal that the client on the other host gets for an error here.
pub(crate) fn as_refusal(error: &Error) -> RemoteRefusal {
    match error {
        Error::Refused { code, reason } => RemoteRefusal::new(*code, reason.clone()),
        other => RemoteRefusal::new(Refusal::OutOfResources, other.to_string()),
    }
}

impl InboundServer {
    pub(crate) fn new(
        domain: Domain,
        options: Options,
        shares: Arc<HostShares>,
        counters: Arc<GatewayCounters>,
    ) -> Self {
        Self::with(shares, counters, move |host, request| {
            let RouteRequest { from, target, service, directions } = request;
            domain.connect_for((from, host.as_str()), (target, service), *directions, &options)
        })
    }

    pub(crate) fn with(
        shares: Arc<HostShares>,
        counters: Arc<GatewayCounters>,
        connect: impl Fn(&Name, &RouteRequest) -> partywall::Result<Stream> + Send + Sync + 'static,
    ) -> Self {
        Self { connect: Arc::new(connect), shares, counters }
    }

    /// Answers the request at the beginning of a stream, and carries the stream.
    pub(crate) async fn answer(&self, peer: &Arc<PeerHost>, mut send: SendStream, mut receive: RecvStream) {
        let _count = StreamCount::of(peer);
        let request = match tokio::time::timeout(REQUEST, RouteRequest::receive(&mut receive)).await {
            Ok(Ok(request)) => request,
            Ok(Err(reason)) => return tracing::warn!(host = %peer.host, reason, "a stream without a request"),
            Err(_) => return tracing::warn!(host = %peer.host, "a stream without a request in time"),
        };
        let share = self.shares.stream(&peer.host);
        let connected = match &share {
            Ok(_) => self.connect(&peer.host, &request).await,
            Err(refusal) => Err(refusal.clone()),
        };
        let answer = connected.as_ref().map(drop).map_err(Clone::clone);
        let (host, RouteRequest { from, target, service, .. }) = (&peer.host, request);
        match &answer {
            Ok(()) => tracing::info!(%host, from, target, service, "connected for another host"),
            Err(RemoteRefusal { code, reason }) => {
                self.counters.refused(StreamDirection::In, *code);
                tracing::info!(%host, from, target, service, reason, "refused to another host");
            }
        }
        let told = frame::send_answer(&mut send, &answer).await;
        match connected {
            Ok(stream) if told.is_ok() => {
                let _open = self.counters.opened(host, StreamDirection::In);
                carry(stream, send, receive, &self.counters).await;
            }
            Ok(stream) => abort(stream),
            Err(_) => {
                let _ = send.finish();
                let _ = send.stopped().await;
            }
        }
    }

    /// Connects when it is the turn of this request.
    async fn connect(&self, host: &Name, request: &RouteRequest) -> Result<Stream, RemoteRefusal> {
        let turn = self.shares.turn(host, request).await?;
        let (connect, host, request) = (Arc::clone(&self.connect), host.clone(), request.clone());
        let connected = tokio::task::spawn_blocking(move || {
            // The turn lasts as long as the thread is occupied.
            let _turn = turn;
            connect(&host, &request)
        });
        match connected.await {
            Ok(connected) => connected.map_err(|error| as_refusal(&error)),
            Err(_) => Err(RemoteRefusal::new(Refusal::OutOfResources, "the gateway fails")),
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

#[cfg(test)]
mod tests;
