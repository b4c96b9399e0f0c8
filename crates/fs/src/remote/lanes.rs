//! The connections of calls to one server: several, because a server executes the calls of a connection one after the other.
//!
//! ```text
//!   thread 1 --- call ---> lane 1, which waits for the disk
//!   thread 2 --- call ---> lane 2
//!   thread 3 --- no lane is free ---> the stream, whose requests the server executes at the same time; meanwhile lane 3 is made
//! ```
//! A lane has one call under way, so a call never waits for another one.

use crate::mutex::lock;
use partywall::Domain;
use partywall::rpc::{CallClient, CallClientBuilder, CallError, Method};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Connections of calls.
const MOST_LANES: usize = 4;
/// How long a lane is waited for whose call its caller has given up. The end of the connection ends this wait as well.
const LONGEST_LATE: Duration = Duration::from_secs(365 * 24 * 3600);
/// A number that no operation has: a server answers it as soon as it has executed the calls before it.
const PROBE: Method = Method::numbered(0);

/// How further lanes are made.
#[derive(Debug)]
struct LaneTarget {
    builder: CallClientBuilder,
    domain: Domain,
    service: String,
}

#[derive(Debug)]
struct LaneState {
    /// Lanes without a call under way. The latest is taken first.
    idle: Vec<CallClient>,
    /// Lanes that there are or that are being made.
    count: usize,
    is_growing: bool,
}

/// The connections of calls to one server. There is one at first.
#[derive(Debug)]
pub(super) struct CallLanes {
    target: LaneTarget,
    first: CallClient,
    state: Arc<Mutex<LaneState>>,
}

/// A lane for one call.
#[derive(Debug)]
pub(super) struct LaneInUse {
    client: Option<CallClient>,
    state: Arc<Mutex<LaneState>>,
}

impl CallLanes {
    /// # Errors
    /// As [`CallClientBuilder::connect`].
    pub(super) fn connect(builder: CallClientBuilder, domain: &Domain, service: String) -> partywall::Result<Self> {
        let first = builder.connect(domain, &service)?;
        let state = LaneState { idle: vec![first.clone()], count: 1, is_growing: false };
        let target = LaneTarget { builder, domain: domain.clone(), service };
        Ok(Self { target, first, state: Arc::new(Mutex::new(state)) })
    }

    /// Takes a lane. Returns `None` if each has a call under way, and then has a thread make a further one if there may be more.
    pub(super) fn take(self: &Arc<Self>) -> Option<LaneInUse> {
        let mut state = lock(&self.state);
        if let Some(client) = state.idle.pop() {
            return Some(LaneInUse { client: Some(client), state: Arc::clone(&self.state) });
        }
        if !state.is_growing && state.count < MOST_LANES {
            (state.count, state.is_growing) = (state.count + 1, true);
            drop(state);
            self.grow();
        }
        None
    }

    /// A lane for what has no reply, also if it has a call under way. A notice can wait for the server's disk, so this is the lane that is taken last.
    pub(super) fn for_notices(&self) -> CallClient {
        lock(&self.state).idle.first().unwrap_or(&self.first).clone()
    }

    fn grow(self: &Arc<Self>) {
        let lanes = Arc::clone(self);
        let grow = move || {
            let LaneTarget { builder, domain, service } = &lanes.target;
            let made = builder.connect(domain, service);
            let mut state = lock(&lanes.state);
            match made {
                Ok(client) => {
                    state.idle.push(client);
                    state.is_growing = false;
                }
                // Another attempt would fail as well, and its place stays taken.
                Err(e) => tracing::debug!(error = %e, "no further connection of calls; the stream is used"),
            }
        };
        if let Err(e) = std::thread::Builder::new().name("pw-fs-lane".into()).spawn(grow) {
            tracing::debug!(error = %e, "no thread for a further connection of calls; the stream is used");
        }
    }
}

impl LaneInUse {
    /// The connection.
    pub(super) fn client(&self) -> &CallClient {
        // Only the drop of this value takes it.
        self.client.as_ref().expect("a lane in use has its connection")
    }

    /// The caller has given its call up, and the server may still execute it. Waits for that on another thread before the lane is used again.
    pub(super) fn give_up(mut self) {
        let Some(client) = self.client.take() else { return };
        let state = Arc::clone(&self.state);
        let wait = move || {
            let outcome = client.call_within(LONGEST_LATE, PROBE, &[]);
            if matches!(outcome, Ok(_) | Err(CallError::UnknownMethod)) {
                lock(&state).idle.push(client);
            }
        };
        // Without a thread, the lane is lost to this connection.
        if let Err(e) = std::thread::Builder::new().name("pw-fs-late".into()).spawn(wait) {
            tracing::debug!(error = %e, "no thread that waits for a late call");
        }
    }
}

impl Drop for LaneInUse {
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            lock(&self.state).idle.push(client);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use partywall::rpc::{CallServer, IncomingCall};
    use partywall_daemon::Broker;
    use std::sync::mpsc;
    use std::time::Instant;

    /// Only a guard against hanging.
    const GUARD: Duration = Duration::from_secs(20);
    const NOTICE: Method = Method::numbered(1);
    const CALL: Method = Method::numbered(2);

    #[test]
    fn notice_that_waits_does_not_delay_the_next_call() {
        let broker = Broker::embedded().unwrap();
        let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (files, client) = (join("files"), join("client"));
        let (open, door) = mpsc::channel();
        let door = Mutex::new(door);
        let wait = move |_: &IncomingCall<'_>| {
            let _ = lock(&door).recv_timeout(GUARD);
            Ok(().into())
        };
        let server = CallServer::builder().numbered(NOTICE, wait).numbered(CALL, |_| Ok(().into()));
        let _server = server.bind(&files, "data").unwrap();
        let lanes = Arc::new(CallLanes::connect(CallClient::builder(), &client, "files:data".into()).unwrap());
        let first = lanes.take().unwrap();
        let begun = Instant::now();
        let second = loop {
            match lanes.take() {
                Some(lane) => break lane,
                None if begun.elapsed() < GUARD => std::thread::sleep(Duration::from_millis(1)),
                None => unreachable!("there is no second lane"),
            }
        };
        drop((first, second));
        lanes.for_notices().notify(NOTICE, &[]).unwrap();
        let lane = lanes.take().unwrap();
        assert!(lane.client().call_within(GUARD / 2, CALL, &[]).is_ok(), "the call waits behind the notice");
        open.send(()).unwrap();
    }
}
