//! The client of a connection of calls.

use super::answer::CallAnswer;
use super::calling_peer::CallingPeer;
use super::channel_options;
use super::driver::{ClientCore, kept_here};
use super::error::CallError;
use super::functions::ClientFunctions;
use super::heap::{Heap, HeapOptions};
use super::incoming::IncomingCall;
use super::method::Method;
use super::methods::Methods;
use super::reply::Reply;
use super::sender::{CallSender, check_hello, prepare};
use super::view::{PeerHeap, PeerView, take_heap};
use crate::connect;
use crate::further::Regions;
use crate::rx::StreamRx;
use crate::{Domain, Error, Options, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Kind};
use partywall_shm::call::{CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;
use rustix::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest that a client waits for the server to accept it.
const ACCEPTANCE: Duration = Duration::from_secs(10);

type CallResult<T> = std::result::Result<T, CallError>;

/// Options for connecting a client.
///
/// ```
/// use partywall::rpc::{CallClient, HeapOptions, CallServer};
/// use std::time::Duration;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
/// let client = CallClient::builder()
///     .timeout(Duration::from_secs(5))
///     .heap(HeapOptions::default().first(1 << 20))
///     .max_peer_heap(1 << 20)
///     .connect(&web, "web:math")?;
/// client.call("null", &[])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CallClientBuilder {
    options: Options,
    heap: HeapOptions,
    max_peer_heap: u64,
    same_address: bool,
    timeout: Option<Duration>,
    methods: Methods,
}

impl Default for CallClientBuilder {
    fn default() -> Self {
        Self {
            options: Options::default(),
            heap: HeapOptions::default(),
            max_peer_heap: 256 << 20,
            same_address: false,
            timeout: None,
            methods: Methods::default(),
        }
    }
}

impl CallClientBuilder {
    /// Options of the channel: how long to spin, for instance. The size of the ring is fixed.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Options of this side's heap.
    #[must_use]
    pub fn heap(mut self, heap: HeapOptions) -> Self {
        self.heap = heap;
        self
    }

    /// The most bytes of heap that the server may have on this connection.
    #[must_use]
    pub fn max_peer_heap(mut self, bytes: u64) -> Self {
        self.max_peer_heap = bytes;
        self
    }

    /// Whether a server's heap that cannot be mapped at the server's address ends the connection. Otherwise it is mapped elsewhere, and
    /// [`PeerView::offset`] has the difference.
    #[must_use]
    pub fn same_address(mut self, required: bool) -> Self {
        self.same_address = required;
        self
    }

    /// The longest that a call may take. There is no limit unless this is called.
    #[must_use]
    pub fn timeout(mut self, longest: Duration) -> Self {
        self.timeout = Some(longest);
        self
    }

    /// Offers a function to the server, which calls it back while it executes a call of this client ([`IncomingCall::call_back`]). The thread
    /// that waits for that call executes it. The function cannot wait for another call of the same connection. A function
    /// that holds the client keeps the connection open.
    ///
    /// ```
    /// use partywall::rpc::{CallClient, CallServer};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = CallServer::builder()
    ///     .method("sign", |call| Ok(call.call_back("password", &[])?.to_vec().into()))
    ///     .bind(&web, "notary")?;
    /// let client = CallClient::builder().method("password", |_| Ok(vec![7; 100].into())).connect(&web, "web:notary")?;
    /// assert_eq!(client.call("sign", &[])?.to_vec(), [7; 100]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn method<F>(mut self, name: &str, function: F) -> Self
    where
        F: Fn(&IncomingCall<'_>) -> CallResult<CallAnswer> + Send + Sync + 'static,
    {
        self.methods.add(Method::named(name), Some(name), Arc::new(function));
        self
    }

    /// Offers a function to the server under a number, as [`CallClientBuilder::method`] does under a name.
    ///
    /// ```
    /// use partywall::rpc::{CallClient, CallServer, Method};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = CallServer::builder()
    ///     .method("ask", |call| Ok(call.call_back(Method::numbered(7), &[])?.to_vec().into()))
    ///     .bind(&web, "math")?;
    /// let client = CallClient::builder().numbered(Method::numbered(7), |_| Ok([42].into())).connect(&web, "web:math")?;
    /// assert_eq!(client.call("ask", &[])?.to_vec(), [42]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn numbered<F>(mut self, method: Method, function: F) -> Self
    where
        F: Fn(&IncomingCall<'_>) -> CallResult<CallAnswer> + Send + Sync + 'static,
    {
        self.methods.add(method, None, Arc::new(function));
        self
    }

    /// Whether the server may call back.
    #[cfg(feature = "tokio")]
    pub(crate) fn takes_calls(&self) -> bool {
        !self.methods.is_empty()
    }

    /// Connects a domain to `DOMAIN:SERVICE`, and waits until the server has accepted, at most ten seconds.
    ///
    /// # Errors
    /// As [`Domain::connect`]; [`Error::TimedOut`] if the server does not accept; [`Error::Corrupt`] if the service is not one of calls;
    /// [`Error::Invalid`] if two methods have one number.
    pub fn connect(&self, domain: &Domain, target: &str) -> Result<CallClient> {
        self.methods.check()?;
        let ClientParts { sender, rx, room_link, heap, peer_heap, timeout } =
            self.open(domain, target, !self.methods.is_empty())?;
        let functions = (!self.methods.is_empty()).then(|| {
            let info = rx.endpoint().info().clone();
            let server = CallingPeer { info, heap: heap.clone(), peer_heap: peer_heap.clone() };
            ClientFunctions::new(self.methods.clone(), server)
        });
        let core = ClientCore::new(sender, rx, room_link, heap, peer_heap, timeout, functions);
        Ok(CallClient { core: Arc::new(core) })
    }

    /// Connects, and leaves to the caller how calls wait.
    pub(crate) fn open(&self, domain: &Domain, target: &str, takes_calls: bool) -> Result<ClientParts> {
        let options = channel_options(&self.options);
        let (tx, rx) = connect::open(domain, target, Kind::Message, Directions::BOTH, &options)?;
        let (Some(tx), Some(mut rx)) = (tx, rx) else {
            return Err(Error::BrokerConfused("a one-way connection for calls".into()));
        };
        let regions = Regions::of(Some(rx.endpoint()));
        take_heap(&regions, self.max_peer_heap)?;
        let heap = Heap::new(regions.clone(), self.heap.clone());
        let room_link = tx.core.waiter.link.as_fd().try_clone_to_owned();
        let room_link = room_link.map_err(|e| Error::system("keep a link", e))?;
        let mut sender = CallSender::new(tx, heap.clone());
        sender.hello(takes_calls)?;
        rx.waiter.timeout = Some(ACCEPTANCE);
        match rx.next_record()? {
            // A server has no calls to take.
            Some(record) if check_hello(&record)? => return Err(Corrupt::BadRecord.into()),
            Some(_) => {}
            None => return Err(Error::Closed("the server has closed the connection")),
        }
        let peer_heap = PeerHeap::new(regions, self.same_address);
        Ok(ClientParts { sender, rx, room_link, heap, peer_heap, timeout: self.timeout })
    }
}

/// A connection that the server has accepted.
pub(crate) struct ClientParts {
    pub(crate) sender: CallSender,
    pub(crate) rx: StreamRx,
    pub(crate) room_link: OwnedFd,
    pub(crate) heap: Heap,
    pub(crate) peer_heap: PeerHeap,
    pub(crate) timeout: Option<Duration>,
}

/// A connection to a server. Threads may use it, and clones of it, at the same time.
///
/// Dropping the last clone closes the connection, once all replies are dropped.
///
/// ```
/// use partywall::rpc::{CallClient, CallServer};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("echo", |call| Ok(call.args().to_vec().into())).bind(&web, "math")?;
/// let client = CallClient::connect("web:math")?;
/// // Several calls under way, answered in order.
/// let first = client.start("echo", b"one")?;
/// let second = client.start("echo", b"two")?;
/// assert_eq!(second.wait()?.to_vec(), b"two");
/// assert_eq!(first.wait()?.to_vec(), b"one");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CallClient {
    core: Arc<ClientCore>,
}

impl CallClient {
    /// Connects from the [current](Domain::current) domain to `DOMAIN:SERVICE`.
    ///
    /// # Errors
    /// As [`CallClientBuilder::connect`].
    pub fn connect(target: &str) -> Result<Self> {
        CallClientBuilder::default().connect(&Domain::current()?, target)
    }

    /// Options for connecting; [`CallClientBuilder::connect`] connects.
    pub fn builder() -> CallClientBuilder {
        CallClientBuilder::default()
    }

    pub(crate) fn core(&self) -> &Arc<ClientCore> {
        &self.core
    }

    /// The heap of this side. Arguments that lie in it are passed without a copy.
    pub fn heap(&self) -> &Heap {
        &self.core.heap
    }

    /// The server's side of the connection.
    pub fn peer(&self) -> &PeerInfo {
        &self.core.peer
    }

    /// Calls a method and waits for its result. Up to 40 bytes travel with the call; more are passed by reference if they are in a block of
    /// this connection's heap, and copied there otherwise.
    ///
    /// # Errors
    /// [`CallError`] names every outcome.
    pub fn call(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Reply> {
        self.call_by(self.core.deadline(None), method.into(), arguments)
    }

    /// Calls a method with a separate limit: the longest time that this call may take.
    ///
    /// ```
    /// use partywall::rpc::{CallError, CallClient, CallServer};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("sleep", |_| {
    /// #     std::thread::sleep(Duration::from_millis(50));
    /// #     Ok(().into())
    /// # }).bind(&web, "math")?;
    /// let client = CallClient::connect("web:math")?;
    /// let result = client.call_within(Duration::from_millis(1), "sleep", &[]);
    /// assert!(matches!(result, Err(CallError::TimedOut)));
    /// client.call("sleep", &[])?; // The late result of the first call is dropped.
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn call_within(&self, longest: Duration, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Reply> {
        self.call_by(self.core.deadline(Some(longest)), method.into(), arguments)
    }

    /// The whole call under one lock, if no other thread wants it.
    #[inline]
    fn call_by(&self, deadline: Option<Instant>, method: Method, arguments: &[u8]) -> CallResult<Reply> {
        let core = &self.core;
        let prepared = prepare(&core.heap, arguments)?;
        let state = core.enter_unless_kept().ok_or_else(kept_here)?;
        let (state, outcome) = core.call(state, deadline, method.number(), prepared);
        drop(state);
        Reply::held_by(outcome?, || Arc::clone(core))
    }

    /// Begins a call and does not wait for its result. At most 512 calls of a connection are unanswered at a time; beginning another one blocks until
    /// an answer arrives.
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn start(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Ongoing> {
        self.begin(self.core.deadline(None), method.into(), arguments)
    }

    /// Starts a call with a limit for the whole call: the time until it has begun and the time until its result.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// use std::time::Duration;
    ///
    /// let call = client.start_within(Duration::from_secs(60), "null", &[])?;
    /// assert!(call.wait()?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn start_within(&self, longest: Duration, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Ongoing> {
        self.begin(self.core.deadline(Some(longest)), method.into(), arguments)
    }

    fn begin(&self, deadline: Option<Instant>, method: Method, arguments: &[u8]) -> CallResult<Ongoing> {
        let core = &self.core;
        let prepared = prepare(&core.heap, arguments)?;
        let state = core.enter_unless_kept().ok_or_else(kept_here)?;
        let (state, begun) = core.begin(state, deadline, method.number(), prepared);
        drop(state);
        let (id, position) = begun?;
        Ok(Ongoing { core: Arc::clone(core), id, position, deadline, is_over: false })
    }

    /// Calls a method without a result. Returns when the call is in transit; no reply reports its success.
    ///
    /// ```
    /// use partywall::rpc::{CallClient, CallServer};
    /// use std::sync::mpsc::channel;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let (sender, lines) = channel();
    /// let _server = CallServer::builder().method("log", move |call| {
    ///     let _ = sender.send(call.args().to_vec());
    ///     Ok(().into())
    /// }).bind(&web, "log")?;
    /// CallClient::connect("web:log")?.notify("log", b"a line")?;
    /// assert_eq!(lines.recv()?, b"a line");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::call`]; [`CallError::OutOfMemory`] for more than 40 bytes that are not in the heap, because no reply
    /// would show when a copy of them may be freed.
    pub fn notify(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<()> {
        self.notify_by(self.core.deadline(None), method.into(), arguments)
    }

    /// Sends a call without a reply, and waits at most this long until the server has taken earlier calls.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("log", |_| Ok(().into())).bind(&web, "log")?;
    /// let client = CallClient::connect("web:log")?;
    /// client.notify_within(std::time::Duration::from_secs(60), "log", b"a line")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::notify`]. After [`CallError::TimedOut`], the server will not see the call.
    pub fn notify_within(&self, longest: Duration, method: impl Into<Method>, arguments: &[u8]) -> CallResult<()> {
        self.notify_by(self.core.deadline(Some(longest)), method.into(), arguments)
    }

    fn notify_by(&self, deadline: Option<Instant>, method: Method, arguments: &[u8]) -> CallResult<()> {
        let (bytes, copied) = prepare(&self.core.heap, arguments)?;
        if copied.is_some() {
            return Err(CallError::OutOfMemory(
                "more than 40 bytes of a notice: put them into a block of the heap".into(),
            ));
        }
        let record = CallRecord { kind: RecordKind::Notice, id: 0, method: method.number(), status: 0, bytes };
        let state = self.core.enter_unless_kept().ok_or_else(kept_here)?;
        let (state, sent) = self.core.send(state, &record, deadline);
        drop(state);
        sent?;
        Ok(())
    }

    /// `len` bytes at an address of the server that an earlier reply contained. The server must keep them until they are read.
    ///
    /// # Errors
    /// [`CallError::BadPointer`] unless all of them are in the server's heap.
    pub fn follow(&self, address: u64, len: u64) -> CallResult<PeerView> {
        self.core.peer_heap.view(address, len).ok_or(CallError::BadPointer)
    }
}

/// A call in progress. Dropping it gives the call up: the server still executes it, and its result is dropped.
///
/// ```
/// # use partywall::rpc::{CallClient, CallServer};
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
/// # let client = CallClient::connect("web:math")?;
/// let calls = (0..1000).map(|_| client.start("null", &[])).collect::<Result<Vec<_>, _>>()?;
/// for call in calls {
///     assert!(call.wait()?.is_empty());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Ongoing {
    core: Arc<ClientCore>,
    id: u32,
    position: u64,
    deadline: Option<Instant>,
    is_over: bool,
}

impl Ongoing {
    /// Waits for the result.
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn wait(mut self) -> CallResult<Reply> {
        let state = self.core.enter_unless_kept().ok_or_else(kept_here)?;
        let (state, outcome) = self.core.finish(state, self.deadline, self.id, self.position);
        drop(state);
        let outcome = outcome?;
        self.is_over = true;
        Reply::held_by(outcome, || Arc::clone(&self.core))
    }

    /// Waits for the result, but no longer than this. `None` if there is no result yet; the call is still in progress then.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// use std::time::Duration;
    ///
    /// let (answer, wait) = std::sync::mpsc::channel();
    /// let wait = std::sync::Mutex::new(wait);
    /// let _server = CallServer::builder().method("wait", move |_| {
    ///     wait.lock().unwrap().recv().unwrap();
    ///     Ok(().into())
    /// }).bind(&web, "math")?;
    /// let client = CallClient::connect("web:math")?;
    /// let mut call = client.start("wait", &[])?;
    /// assert!(call.wait_for(Duration::from_millis(1))?.is_none());
    /// answer.send(())?;
    /// assert!(call.wait_for(Duration::from_secs(60))?.is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::call`]; the call is over then. [`CallError::Connection`] if it was over before.
    pub fn wait_for(&mut self, longest: Duration) -> CallResult<Option<Reply>> {
        if self.is_over {
            return Err(CallError::Connection(Error::Invalid("the result of this call was taken before".into())));
        }
        let now = Instant::now();
        let soon = now.checked_add(longest);
        let until = soon.into_iter().chain(self.deadline).min();
        let outcome = self.core.enter_unless_kept().ok_or_else(kept_here).and_then(|state| {
            let (state, outcome) = self.core.finish(state, until, self.id, self.position);
            drop(state);
            outcome
        });
        match outcome {
            Err(CallError::TimedOut) if self.deadline.is_none_or(|deadline| Instant::now() < deadline) => Ok(None),
            Err(e) => {
                self.give_up();
                Err(e)
            }
            Ok(outcome) => {
                self.is_over = true;
                Reply::held_by(outcome, || Arc::clone(&self.core)).map(Some)
            }
        }
    }

    /// The longest that the result may take from now on, in place of the limit from the beginning of the call; `None`: no limit.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// let mut call = client.start("null", &[])?;
    /// call.set_timeout(Some(std::time::Duration::from_secs(60)));
    /// assert!(call.wait()?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.deadline = longest.and_then(|longest| Instant::now().checked_add(longest));
    }

    fn give_up(&mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.core.give_up(self.id);
        }
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        self.give_up();
    }
}
