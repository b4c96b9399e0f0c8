//! What each other host may have here at the same time: streams, and connections that wait for this host's broker.
//!
//! ```text
//!   request --> is there room for one more that waits?  of the service, of the host, of all hosts --> a thread asks the broker
//!               no: refused, with the reason            (turns; the others wait without a thread)
//! ```
//!
//! The runtime has 512 threads for blocking calls, and its own host's programs need some of them. So a host that connects without pause, or a
//! broker that answers slowly, uses a part of them, and requests of other hosts go on (protocol H6.2).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use partywall::Refusal;
use partywall::cluster::Name;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::frame::{RemoteRefusal, RouteRequest};

/// Requests of one host for one service that are made at the same time.
const TURNS_OF_SERVICE: usize = 8;
/// Requests of one host that are made at the same time.
const TURNS_OF_HOST: usize = 16;
/// Requests of all hosts that are made at the same time. The library makes no more for one process.
const TURNS_OF_ALL: usize = 64;
/// Requests of one host for one service that wait or are made. A service has no larger backlog.
pub(crate) const WAITING_OF_SERVICE: usize = 128;
/// Requests of one host that wait or are made.
const WAITING_OF_HOST: usize = 512;
/// How long a request may wait for its turn. The other host waits no longer for an answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// A domain and a service of it.
type ServiceName = (String, String);

/// What one host has here.
#[derive(Debug)]
struct HostShare {
    streams: usize,
    waiting: usize,
    turns: Arc<Semaphore>,
    services: HashMap<ServiceName, ServiceShare>,
}

/// What one host has waiting for one service.
#[derive(Debug)]
struct ServiceShare {
    waiting: usize,
    turns: Arc<Semaphore>,
}

/// The shares of all hosts that have a stream here.
#[derive(Debug)]
pub(crate) struct HostShares {
    own: Name,
    streams_per_host: usize,
    turns: Arc<Semaphore>,
    hosts: Mutex<HashMap<Name, HostShare>>,
}

/// A stream of another host. It counts until this is dropped.
#[derive(Debug)]
pub(crate) struct StreamShare {
    shares: Arc<HostShares>,
    host: Name,
}

/// A request of another host that waits or is made. It counts until this is dropped.
#[derive(Debug)]
pub(crate) struct WaitingShare {
    shares: Arc<HostShares>,
    host: Name,
    service: ServiceName,
}

/// The right to make a request.
#[derive(Debug)]
pub(crate) struct RequestTurn {
    _permits: [OwnedSemaphorePermit; 3],
    _share: WaitingShare,
}

impl HostShares {
    pub(crate) fn new(own: Name, streams_per_host: u32) -> Arc<Self> {
        Arc::new(Self {
            own,
            streams_per_host: usize::try_from(streams_per_host).unwrap_or(usize::MAX),
            turns: Arc::new(Semaphore::new(TURNS_OF_ALL)),
            hosts: Mutex::default(),
        })
    }

    fn hosts(&self) -> MutexGuard<'_, HashMap<Name, HostShare>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more stream of a host, over all its connections.
    pub(crate) fn stream(self: &Arc<Self>, host: &Name) -> Result<StreamShare, RemoteRefusal> {
        let mut hosts = self.hosts();
        let share = hosts.entry(host.clone()).or_insert_with(HostShare::new);
        if share.streams >= self.streams_per_host {
            let (own, most) = (&self.own, self.streams_per_host);
            let reason = format!("{host} has {most} streams to {own}, as many as `streams_per_host` of {own} allows");
            return Err(RemoteRefusal::new(Refusal::OutOfResources, reason));
        }
        share.streams += 1;
        Ok(StreamShare { shares: Arc::clone(self), host: host.clone() })
    }

    /// Counts one more request of a host. The stream that it came by is counted already.
    fn wait(self: &Arc<Self>, host: &Name, request: &RouteRequest) -> Result<WaitingShare, RemoteRefusal> {
        let mut hosts = self.hosts();
        let share = hosts.entry(host.clone()).or_insert_with(HostShare::new);
        let (own, all) = (&self.own, share.waiting);
        if all >= WAITING_OF_HOST {
            let reason = format!(
                "{all} connections of {host} wait on {own} already: {host} connects faster than the broker of {own} answers"
            );
            return Err(RemoteRefusal::new(Refusal::BacklogFull, reason));
        }
        let service = (request.target.clone(), request.service.clone());
        let of_service = share.services.entry(service.clone()).or_insert_with(ServiceShare::new);
        if of_service.waiting >= WAITING_OF_SERVICE {
            let (waiting, (target, name)) = (of_service.waiting, &service);
            let reason = format!(
                "{waiting} connections of {host} wait for {target}:{name} on {own} already: {host} connects to it faster than \
                 the broker of {own} answers"
            );
            return Err(RemoteRefusal::new(Refusal::BacklogFull, reason));
        }
        of_service.waiting += 1;
        share.waiting += 1;
        Ok(WaitingShare { shares: Arc::clone(self), host: host.clone(), service })
    }

    /// Waits until a request may be made. Requests that wait occupy no thread.
    pub(crate) async fn turn(
        self: &Arc<Self>,
        host: &Name,
        request: &RouteRequest,
    ) -> Result<RequestTurn, RemoteRefusal> {
        let share = self.wait(host, request)?;
        let turns = self.turns_of(&share);
        let permits = async {
            let [service, host, all] = turns;
            // The widest last: a request that waits for its service's turn holds none of its host's.
            Ok::<_, tokio::sync::AcquireError>([
                service.acquire_owned().await?,
                host.acquire_owned().await?,
                all.acquire_owned().await?,
            ])
        };
        let own = &self.own;
        match tokio::time::timeout(PATIENCE, permits).await {
            Ok(Ok(permits)) => Ok(RequestTurn { _permits: permits, _share: share }),
            // Semaphores are never closed.
            Ok(Err(closed)) => Err(RemoteRefusal::new(Refusal::OutOfResources, closed.to_string())),
            Err(_) => {
                let seconds = PATIENCE.as_secs();
                let reason =
                    format!("the broker of {own} has not answered earlier connections of {host} for {seconds} s");
                Err(RemoteRefusal::new(Refusal::OutOfResources, reason))
            }
        }
    }

    fn turns_of(&self, share: &WaitingShare) -> [Arc<Semaphore>; 3] {
        let hosts = self.hosts();
        let host = hosts.get(&share.host);
        let service = host.and_then(|host| host.services.get(&share.service));
        let turns = |of: Option<&Arc<Semaphore>>| Arc::clone(of.unwrap_or(&self.turns));
        [turns(service.map(|of| &of.turns)), turns(host.map(|of| &of.turns)), turns(None)]
    }
}

impl HostShare {
    fn new() -> Self {
        let turns = Arc::new(Semaphore::new(TURNS_OF_HOST));
        Self { streams: 0, waiting: 0, turns, services: HashMap::new() }
    }
}

impl ServiceShare {
    fn new() -> Self {
        Self { waiting: 0, turns: Arc::new(Semaphore::new(TURNS_OF_SERVICE)) }
    }
}

impl Drop for StreamShare {
    fn drop(&mut self) {
        let mut hosts = self.shares.hosts();
        if let Some(share) = hosts.get_mut(&self.host) {
            share.streams -= 1;
            if share.streams == 0 && share.waiting == 0 {
                hosts.remove(&self.host);
            }
        }
    }
}

impl Drop for WaitingShare {
    fn drop(&mut self) {
        let mut hosts = self.shares.hosts();
        let Some(share) = hosts.get_mut(&self.host) else { return };
        share.waiting -= 1;
        if let Some(service) = share.services.get_mut(&self.service) {
            service.waiting -= 1;
            if service.waiting == 0 {
                share.services.remove(&self.service);
            }
        }
        if share.streams == 0 && share.waiting == 0 {
            hosts.remove(&self.host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall::Directions;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn request(service: &str) -> RouteRequest {
        let (from, target, service) = ("web".into(), "db".into(), service.into());
        RouteRequest { from, target, service, directions: Directions::BOTH }
    }

    #[test]
    fn requests_beyond_shares_of_service_and_host_are_refused() {
        let (alpha, gamma) = (name("alpha"), name("gamma"));
        let shares = HostShares::new(name("beta"), 2);
        let refusal = |host: &Name, service: &str| shares.wait(host, &request(service)).unwrap_err();
        let mut all: Vec<_> = (0..WAITING_OF_SERVICE).map(|_| shares.wait(&alpha, &request("a")).unwrap()).collect();
        let refused = refusal(&alpha, "a");
        assert!(refused.code == Refusal::BacklogFull && refused.reason.contains("of alpha wait for db:a on beta"));
        for service in ["b", "c", "d"] {
            all.extend((0..WAITING_OF_SERVICE).map(|_| shares.wait(&alpha, &request(service)).unwrap()));
        }
        let refused = refusal(&alpha, "e");
        assert!(refused.reason.contains("alpha connects faster than the broker of beta"), "{}", refused.reason);
        drop(shares.wait(&gamma, &request("a")).unwrap());
        drop(all);
        assert!(shares.hosts().is_empty(), "nothing is left of hosts that have nothing here");
    }

    #[test]
    fn streams_of_all_connections_of_host_count_together() {
        let (alpha, gamma) = (name("alpha"), name("gamma"));
        let shares = HostShares::new(name("beta"), 2);
        let first = shares.stream(&alpha).unwrap();
        let _second = shares.stream(&alpha).unwrap();
        let refused = shares.stream(&alpha).unwrap_err();
        assert!(refused.code == Refusal::OutOfResources && refused.reason.starts_with("alpha has 2 streams"));
        let _other = shares.stream(&gamma).unwrap();
        drop(first);
        drop(shares.stream(&alpha).unwrap());
    }
}
