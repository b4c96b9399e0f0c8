//! One connection for each pair of hosts.
//!
//! Either gateway connects when it first needs to. If both connect at the same moment, the connection of the host whose name comes first is
//! used, and the other one is closed when its streams have ended. If nothing comes by the used one any more, the other one is used.

mod spare;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use partywall::cluster::Name;
use quinn::congestion::CubicConfig;
use quinn::{
    AckFrequencyConfig, Connection, Endpoint, EndpointConfig, Incoming, MtuDiscoveryConfig, RecvStream, SendStream,
    TokioRuntime, TransportConfig, VarInt,
};
use spare::{SpareOutcome, SpareWatch};

use crate::GatewayError;
use crate::config::GatewayConfig;
use crate::frame::printable;
use crate::handshakes::Handshakes;
use crate::socket::{GatewaySocket, LARGEST_DATAGRAM};
use crate::tls::{HostCredentials, peer_host};

/// How long a host may take to answer when this one connects.
const CONNECT: Duration = Duration::from_secs(3);
/// How long a host may send nothing before its streams are dead.
const SILENCE: Duration = Duration::from_secs(5);
/// How often a gateway sends something.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// The longest pause between two attempts to connect to a host.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
/// Bytes that a new connection has under way at most: a datagram that tries out the path, one of data, and the window that RFC 9002 (7.2) recommends. Within
/// that window alone, each trial would hold back all data until it is answered or lost. It would also hold back the end of a connection that is
/// refused, and the other host would never learn the reason: up to its version 0.11.19, `quinn-proto` sends nothing more after that.
const FIRST_WINDOW: u64 = 2 * LARGEST_DATAGRAM as u64 + 14_720;
/// Datagrams that may come without an acknowledgement, and for how long. By default QUIC acknowledges every second datagram, which wakes both
/// gateways, or after 25 ms (draft-ietf-quic-ack-frequency).
const UNACKNOWLEDGED: u32 = 8;
const LONGEST_ACK_DELAY: Duration = Duration::from_millis(2);
/// Connections that another host may have, of which all but one are about to end.
const CONNECTIONS_PER_HOST: usize = 4;

/// A connection to another host.
#[derive(Debug)]
pub(crate) struct PeerHost {
    pub(crate) host: Name,
    connection: Connection,
    /// The host that has connected.
    dialer: Name,
    streams: AtomicUsize,
    /// Streams that it has had.
    begun: AtomicUsize,
}

/// Counts a stream while it lives.
#[derive(Debug)]
pub(crate) struct StreamCount(Arc<PeerHost>);

impl StreamCount {
    pub(crate) fn of(peer: &Arc<PeerHost>) -> Self {
        peer.streams.fetch_add(1, Ordering::Relaxed);
        peer.begun.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(peer))
    }
}

impl Drop for StreamCount {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PeerHost {
    fn is_alive(&self) -> bool {
        self.connection.close_reason().is_none()
    }

    /// Why the connection has ended, if it has.
    pub(crate) fn end(&self) -> Option<String> {
        self.connection.close_reason().map(printable)
    }

    /// Datagrams that have come from the other gateway.
    fn received(&self) -> u64 {
        self.connection.stats().udp_rx.datagrams
    }

    /// Opens a stream. Waits while the other host has as many of this one as it takes.
    pub(crate) async fn open(&self) -> Result<(SendStream, RecvStream), String> {
        self.connection.open_bi().await.map_err(printable)
    }
}

/// A host that could not be reached.
#[derive(Debug)]
struct Unreachable {
    until: Instant,
    pause: Duration,
    reason: String,
}

/// Answers a stream that another host has opened, in a separate task.
pub(crate) type Answer = dyn Fn(Arc<PeerHost>, SendStream, RecvStream) + Send + Sync;

/// The connections to other hosts.
pub(crate) struct PeerHosts {
    own: Name,
    endpoint: Endpoint,
    answer: Box<Answer>,
    peers: Mutex<HashMap<Name, Arc<PeerHost>>>,
    /// Live connections of each host, used or not.
    counts: Arc<Mutex<HashMap<Name, usize>>>,
    handshakes: Arc<Handshakes>,
    unreachable: Mutex<HashMap<Name, Unreachable>>,
    /// Held while this host connects to another.
    dialing: Mutex<HashMap<Name, Arc<tokio::sync::Mutex<()>>>>,
}

/// A live connection of a host. It counts until this is dropped.
#[derive(Debug)]
struct ConnectionCount {
    counts: Arc<Mutex<HashMap<Name, usize>>>,
    host: Name,
}

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        let mut counts = lock(&self.counts);
        if let Some(count) = counts.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.host);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PeerHosts {
    /// Listens for other gateways; within a tokio runtime.
    pub(crate) fn listen(
        config: &GatewayConfig,
        credentials: HostCredentials,
        answer: Box<Answer>,
    ) -> Result<Self, GatewayError> {
        let mut transport = TransportConfig::default();
        let silence = SILENCE.try_into().map_err(|_| GatewayError::Directory("a time beyond its range".to_owned()))?;
        transport
            .max_concurrent_bidi_streams(VarInt::from_u32(config.streams_per_host))
            .max_concurrent_uni_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .stream_receive_window(VarInt::from_u32(config.stream_window))
            .send_window(u64::from(config.stream_window) * 8)
            .max_idle_timeout(Some(silence))
            .keep_alive_interval(Some(SIGN_OF_LIFE));
        // Datagrams begin small, and become as large as the path carries.
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(LARGEST_DATAGRAM);
        transport.mtu_discovery_config(Some(discovery));
        let mut congestion = CubicConfig::default();
        congestion.initial_window(FIRST_WINDOW);
        transport.congestion_controller_factory(Arc::new(congestion));
        let mut acks = AckFrequencyConfig::default();
        acks.ack_eliciting_threshold(VarInt::from_u32(UNACKNOWLEDGED)).max_ack_delay(Some(LONGEST_ACK_DELAY));
        transport.ack_frequency_config(Some(acks));
        let transport = Arc::new(transport);
        let HostCredentials { client, server, host } = credentials;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(server));
        server.transport_config(Arc::clone(&transport));
        let mut client = quinn::ClientConfig::new(Arc::new(client));
        client.transport_config(transport);
        let mut received = EndpointConfig::default();
        received
            .max_udp_payload_size(LARGEST_DATAGRAM)
            .map_err(|_| GatewayError::Directory("a datagram beyond its range".to_owned()))?;
        let mut endpoint = GatewaySocket::bind(config.listen)
            .and_then(|socket| {
                Endpoint::new_with_abstract_socket(received, Some(server), Arc::new(socket), Arc::new(TokioRuntime))
            })
            .map_err(|source| GatewayError::System { doing: "listen for other gateways", source })?;
        endpoint.set_default_client_config(client);
        Ok(Self {
            own: host,
            endpoint,
            answer,
            peers: Mutex::default(),
            counts: Arc::default(),
            handshakes: Arc::default(),
            unreachable: Mutex::default(),
            dialing: Mutex::default(),
        })
    }

    /// Where it listens.
    #[cfg(test)]
    pub(crate) fn local_address(&self) -> std::net::SocketAddr {
        self.endpoint.local_addr().unwrap()
    }

    /// How many streams a host has on the connection in use.
    #[cfg(test)]
    pub(crate) fn streams_of(&self, host: &Name) -> usize {
        self.live(host).map_or(0, |peer| peer.streams.load(Ordering::Relaxed))
    }

    /// The connection to a host, which is made if there is none.
    pub(crate) async fn get(self: &Arc<Self>, host: &Name, address: &str) -> Result<Arc<PeerHost>, String> {
        if let Some(peer) = self.live(host) {
            return Ok(peer);
        }
        let turn = Arc::clone(lock(&self.dialing).entry(host.clone()).or_default());
        let _turn = turn.lock().await;
        if let Some(peer) = self.live(host) {
            return Ok(peer);
        }
        if let Some(failed) = lock(&self.unreachable).get(host).filter(|failed| Instant::now() < failed.until) {
            return Err(failed.reason.clone());
        }
        match tokio::time::timeout(CONNECT, self.dial(host, address)).await {
            Ok(Ok(connection)) => {
                lock(&self.unreachable).remove(host);
                tracing::info!(%host, address, "connected");
                let count = self.count(&mut lock(&self.counts), host);
                Ok(self.adopt(connection, self.own.clone(), count))
            }
            Ok(Err(reason)) => Err(self.failed(host, format!("the gateway at {address}: {reason}"))),
            Err(_) => Err(self.failed(host, format!("the gateway at {address} does not answer"))),
        }
    }

    fn live(&self, host: &Name) -> Option<Arc<PeerHost>> {
        lock(&self.peers).get(host).filter(|peer| peer.is_alive()).cloned()
    }

    async fn dial(&self, host: &Name, address: &str) -> Result<Connection, String> {
        let is_ipv4 = self.endpoint.local_addr().is_ok_and(|address| address.is_ipv4());
        let mut found = tokio::net::lookup_host(address).await.map_err(|e| e.to_string())?;
        let address = found.find(|address| !is_ipv4 || address.is_ipv4()).ok_or("it has no address that fits")?;
        // The certificate must be that of this host.
        let connecting = self.endpoint.connect(address, host.as_str()).map_err(|e| e.to_string())?;
        connecting.await.map_err(printable)
    }

    /// Notes that a host cannot be reached now, and waits longer each time before the next attempt.
    fn failed(&self, host: &Name, reason: String) -> String {
        let mut all = lock(&self.unreachable);
        let pause = all.get(host).map_or(SHORTEST_PAUSE, |last| (last.pause * 2).min(LONGEST_PAUSE));
        tracing::warn!(%host, reason, "the host cannot be reached");
        all.insert(host.clone(), Unreachable { until: Instant::now() + pause, pause, reason: reason.clone() });
        reason
    }

    /// Counts one more connection of a host.
    fn count(&self, counts: &mut HashMap<Name, usize>, host: &Name) -> ConnectionCount {
        *counts.entry(host.clone()).or_default() += 1;
        ConnectionCount { counts: Arc::clone(&self.counts), host: host.clone() }
    }

    /// The same for one that the host has made, if it may have one more.
    fn count_if_allowed(&self, host: &Name) -> Option<ConnectionCount> {
        let mut counts = lock(&self.counts);
        let live = counts.get(host).copied().unwrap_or_default();
        (live < CONNECTIONS_PER_HOST).then(|| self.count(&mut counts, host))
    }

    /// Uses a connection for a host, or keeps the one that is in use, and serves the streams that the host opens on it.
    fn adopt(self: &Arc<Self>, connection: Connection, dialer: Name, count: ConnectionCount) -> Arc<PeerHost> {
        let host = count.host.clone();
        let peer = Arc::new(PeerHost {
            host: host.clone(),
            connection,
            dialer,
            streams: AtomicUsize::new(0),
            begun: AtomicUsize::new(0),
        });
        let mut peers = lock(&self.peers);
        let (used, spare) = match peers.get(&host).filter(|known| known.is_alive()) {
            Some(known) if known.dialer < peer.dialer => (Arc::clone(known), Some(Arc::clone(&peer))),
            known => (Arc::clone(&peer), known.cloned()),
        };
        peers.insert(host, Arc::clone(&used));
        drop(peers);
        if let Some(spare) = spare {
            tokio::spawn(Arc::clone(self).retire(Arc::clone(&used), spare));
        }
        tokio::spawn(Arc::clone(self).serve(peer, count));
        used
    }

    /// Closes a connection that is not used for new streams, when its streams have ended. If the used one turns out to be dead, as after a crash of
    /// the other gateway, this one is used in its place.
    async fn retire(self: Arc<Self>, mut used: Arc<PeerHost>, mut spare: Arc<PeerHost>) {
        // What had come by a connection that was replaced.
        let mut replaced_at = None;
        loop {
            match SpareWatch::of(&used, &spare).outcome(&used, &spare).await {
                SpareOutcome::Ended => return,
                SpareOutcome::Unneeded => {
                    return spare.connection.close(VarInt::from_u32(0), b"another connection is used");
                }
                SpareOutcome::Needed => {}
            }
            let mut peers = lock(&self.peers);
            let other = peers.get(&spare.host).filter(|known| known.is_alive() && !Arc::ptr_eq(known, &used)).cloned();
            match other {
                Some(known) if Arc::ptr_eq(&known, &spare) => return,
                // A third one, which was made meanwhile.
                Some(known) => used = known,
                // Nothing has come by it since, so it ends by itself soon.
                None if replaced_at == Some(spare.received()) => return,
                None => {
                    tracing::info!(host = %spare.host, "the connection in use is silent: another one is used");
                    replaced_at = Some(used.received());
                    peers.insert(spare.host.clone(), Arc::clone(&spare));
                    std::mem::swap(&mut used, &mut spare);
                }
            }
        }
    }

    /// Serves a connection until it ends. It counts as one of its host until then.
    async fn serve(self: Arc<Self>, peer: Arc<PeerHost>, _count: ConnectionCount) {
        let reason = loop {
            match peer.connection.accept_bi().await {
                Ok((send, receive)) => (self.answer)(Arc::clone(&peer), send, receive),
                Err(reason) => break printable(reason),
            }
        };
        tracing::info!(host = %peer.host, reason, "the connection has ended");
    }

    /// Takes connections of other gateways, until the gateway ends.
    pub(crate) async fn accept(self: Arc<Self>) {
        while let Some(incoming) = self.endpoint.accept().await {
            // A sender that has not shown that it has its address costs one packet.
            if !incoming.remote_address_validated() {
                let _ = incoming.retry();
                continue;
            }
            let Some(handshake) = self.handshakes.begin(incoming.remote_address().ip()) else {
                incoming.refuse();
                continue;
            };
            let peers = Arc::clone(&self);
            tokio::spawn(async move {
                let _handshake = handshake;
                let address = incoming.remote_address();
                match tokio::time::timeout(CONNECT, peers.greet(incoming)).await {
                    Ok(Ok(host)) => tracing::info!(%host, %address, "accepted"),
                    Ok(Err(reason)) => tracing::warn!(%address, reason, "a connection was refused"),
                    Err(_) => tracing::warn!(%address, "a connection was not set up in time"),
                }
            });
        }
    }

    async fn greet(self: &Arc<Self>, incoming: Incoming) -> Result<Name, String> {
        let connection = incoming.await.map_err(printable)?;
        let refuse = |reason: String| {
            connection.close(VarInt::from_u32(1), reason.as_bytes());
            reason
        };
        let host = peer_host(connection.peer_identity()).map_err(refuse)?;
        if host == self.own {
            return Err(refuse(format!("it says that it is this host, {host}")));
        }
        let Some(count) = self.count_if_allowed(&host) else {
            return Err(refuse(format!("{host} has {CONNECTIONS_PER_HOST} connections already")));
        };
        // It can be reached: an attempt to connect to it need not wait.
        lock(&self.unreachable).remove(&host);
        self.adopt(connection, host.clone(), count);
        Ok(host)
    }

    /// Ends all connections.
    pub(crate) async fn close(&self) {
        self.endpoint.close(VarInt::from_u32(0), b"the gateway ends");
        let _ = tokio::time::timeout(Duration::from_secs(1), self.endpoint.wait_idle()).await;
    }
}

#[cfg(test)]
mod paths;
#[cfg(test)]
mod tests;
