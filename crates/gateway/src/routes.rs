//! Connections of this host's programs to domains of other hosts.

use std::sync::Arc;
use std::time::Duration;

use partywall::cluster::{Name, Route, RouteListener};
use partywall::{Error, Refusal};

use crate::carry::carry;
use crate::counters::{GatewayCounters, StreamDirection};
use crate::directory::ClusterDirectory;
use crate::frame::{self, RemoteRefusal, RouteRequest};
use crate::peers::{PeerHosts, StreamCount};

/// How long another host may take to answer. With the time to connect to it, this is shorter than the broker waits.
const ANSWER: Duration = Duration::from_secs(4);

/// What it takes to find and reach another host.
pub(crate) struct Router {
    pub(crate) directory: Arc<ClusterDirectory>,
    pub(crate) peers: Arc<PeerHosts>,
    pub(crate) counters: Arc<GatewayCounters>,
}

impl Router {
    /// Takes connections until the broker refuses this gateway; in a separate thread.
    pub(crate) fn serve(self: &Arc<Self>, mut listener: RouteListener, runtime: &tokio::runtime::Handle) -> Error {
        loop {
            match listener.next() {
                Ok(route) => {
                    let router = Arc::clone(self);
                    runtime.spawn(async move { router.answer(route).await });
                }
                Err(Error::TimedOut | Error::WouldBlock) => {}
                Err(error) => return error,
            }
        }
    }

    /// Finds the host of a connection, connects there, and carries the stream.
    async fn answer(&self, route: Route) {
        let client = route.client().to_owned();
        // The client may have gone, or the policy have refused the host. The broker has answered it then.
        let Some((route, wanted)) = blocking(move || route.target().map(|target| (route, target))).await else {
            return;
        };
        let (target, service) = wanted;
        let (host, address) = match self.directory.find(&target) {
            Ok(found) => found,
            Err(refusal) => return self.refuse(route, refusal).await,
        };
        let named = host.clone();
        let Some(route) = blocking(move || route.set_host(named.as_str()).map(|()| route)).await else { return };
        let directions = route.directions();
        let request = RouteRequest { from: client, target, service, directions };
        match self.open(&host, &address, &request).await {
            Ok((count, send, receive)) => {
                let RouteRequest { from, target, service, .. } = request;
                tracing::info!(from, target, service, %host, "connected to another host");
                match blocking(move || route.accept()).await {
                    Some(stream) => {
                        let _open = self.counters.opened(&host, StreamDirection::Out);
                        carry(stream, send, receive, &self.counters).await;
                    }
                    // The streams are reset, so the other host sees a death.
                    None => drop((send, receive)),
                }
                drop(count);
            }
            Err(refusal) => self.refuse(route, refusal).await,
        }
    }

    async fn refuse(&self, route: Route, RemoteRefusal { code, reason }: RemoteRefusal) {
        self.counters.refused(StreamDirection::Out, code);
        blocking(move || route.refuse(code, &reason)).await;
    }

    async fn open(
        &self,
        host: &Name,
        address: &str,
        request: &RouteRequest,
    ) -> Result<(StreamCount, quinn::SendStream, quinn::RecvStream), RemoteRefusal> {
        let unreachable = |reason: String| {
            RemoteRefusal::new(Refusal::OutOfResources, format!("the host {host} cannot be reached: {reason}"))
        };
        let peer = self.peers.get(host, address).await.map_err(unreachable)?;
        let count = StreamCount::of(&peer);
        let exchange = async {
            let (mut send, mut receive) = peer.open().await?;
            request.send(&mut send).await?;
            let answer = frame::receive_answer(&mut receive).await?;
            Ok::<_, String>((answer, send, receive))
        };
        let exchanged = tokio::time::timeout(ANSWER, exchange).await;
        let exchanged = exchanged.unwrap_or_else(|_| Err("its gateway does not answer in time".to_owned()));
        // The stream knows only that the connection is lost.
        let (answer, send, receive) = exchanged.map_err(|reason| unreachable(peer.end().unwrap_or(reason)))?;
        answer.map(|()| (count, send, receive))
    }
}

/// Makes a request to the broker. An error has been dealt with by the broker, or means that the broker is gone.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> partywall::Result<T> + Send + 'static) -> Option<T> {
    match tokio::task::spawn_blocking(call).await {
        Ok(Ok(done)) => Some(done),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a connection to another host was not made");
            None
        }
        Err(_) => None,
    }
}
