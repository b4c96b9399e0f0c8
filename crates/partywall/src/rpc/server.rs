//! The server of calls.

use super::answer::CallAnswer;
use super::calling_peer::CallingPeer;
use super::channel_options;
use super::conversation::{BackCaller, Conversation};
use super::error::CallError;
use super::heap::{Heap, HeapOptions, HeapShare};
use super::incoming::IncomingCall;
use super::method::Method;
use super::methods::{MOST_FOLLOWS, Methods};
use super::reply_side::ReplySide;
use super::sender::{CallSender, check_hello};
use super::view::{PeerHeap, take_heap};
use crate::domain::lock;
use crate::further::Regions;
use crate::listener::Acceptor;
use crate::rx::StreamRx;
use crate::tx::StreamTx;
use crate::{Domain, Error, Options, PeerInfo, Result};
use partywall_protocol::wire::Kind;
use partywall_shm::call::{CallRecord, RecordKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

type CallResult<T> = std::result::Result<T, CallError>;

/// The longest that a client may take to send its first record.
const FIRST_RECORD: Duration = Duration::from_secs(10);
/// Between two attempts to accept while the broker is away.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// The methods of a server, and the limits of its clients.
#[derive(Default)]
pub struct CallServerBuilder {
    methods: Methods,
    limits: Limits,
}

#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) options: Options,
    pub(crate) max_clients_of_domain: Option<usize>,
    pub(crate) heap: HeapOptions,
    pub(crate) max_peer_heap: u64,
    pub(crate) max_clients: usize,
    pub(crate) max_follows: u64,
    pub(crate) same_address: bool,
    /// The longest that a client may take to send its first record.
    pub(crate) first_record: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            options: Options::default(),
            max_clients_of_domain: None,
            heap: HeapOptions::default(),
            max_peer_heap: 256 << 20,
            max_clients: 4096,
            max_follows: MOST_FOLLOWS,
            same_address: false,
            first_record: FIRST_RECORD,
        }
    }
}

impl fmt::Debug for CallServerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallServerBuilder").field("methods", &self.methods).field("limits", &self.limits).finish()
    }
}

impl CallServerBuilder {
    /// Offers a function under a name. It runs on the thread of the calling client, so it may block.
    #[must_use]
    pub fn method<F>(mut self, name: &str, function: F) -> Self
    where
        F: Fn(&IncomingCall<'_>) -> CallResult<CallAnswer> + Send + Sync + 'static,
    {
        self.methods.add(Method::named(name), Some(name), Arc::new(function));
        self
    }

    /// Offers a function under a number.
    #[must_use]
    pub fn numbered<F>(mut self, method: Method, function: F) -> Self
    where
        F: Fn(&IncomingCall<'_>) -> CallResult<CallAnswer> + Send + Sync + 'static,
    {
        self.methods.add(method, None, Arc::new(function));
        self
    }

    /// Options of the channels.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.limits.options = options;
        self
    }

    /// Options of the heap of each connection, from which results are allocated. The heaps for all clients of one domain have at most
    /// [`HeapOptions::max`] bytes together, so a domain that keeps results takes no memory from another.
    #[must_use]
    pub fn heap(mut self, heap: HeapOptions) -> Self {
        self.limits.heap = heap;
        self
    }

    /// The most bytes of heap that a client may have.
    #[must_use]
    pub fn max_peer_heap(mut self, bytes: u64) -> Self {
        self.limits.max_peer_heap = bytes;
        self
    }

    /// The most clients at a time. Further ones are refused.
    #[must_use]
    pub fn max_clients(mut self, clients: usize) -> Self {
        self.limits.max_clients = clients;
        self
    }

    /// The most clients of one domain at a time, a quarter of all clients unless this is called. Further ones are refused.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let shop = partywall::Domain::builder().name("shop").broker(broker.path()).join()?;
    /// let _server = CallServer::builder().max_clients_of_domain(1).bind(&web, "math")?;
    /// let _first = CallClient::builder().connect(&shop, "web:math")?;
    /// assert!(CallClient::builder().connect(&shop, "web:math").is_err());
    /// let _other = CallClient::builder().connect(&web, "web:math")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn max_clients_of_domain(mut self, clients: usize) -> Self {
        self.limits.max_clients_of_domain = Some(clients);
        self
    }

    /// The most pointers that one call may follow ([`IncomingCall::follow`]), 65,536 unless this is called: a structure that leads back to itself
    /// ends there.
    #[must_use]
    pub fn max_follows(mut self, pointers: u64) -> Self {
        self.limits.max_follows = pointers;
        self
    }

    /// Whether a client's heap that cannot be mapped at the client's address ends the connection. Otherwise it is mapped elsewhere, and
    /// [`PeerView::offset`](super::PeerView::offset) has the difference.
    #[must_use]
    pub fn same_address(mut self, required: bool) -> Self {
        self.limits.same_address = required;
        self
    }

    /// The limits, if no methods were added.
    #[cfg(feature = "tokio")]
    pub(crate) fn into_limits(self) -> Option<Limits> {
        self.methods.is_empty().then_some(self.limits)
    }

    /// Binds a service of the domain and serves it on separate threads.
    ///
    /// # Errors
    /// As [`Domain::bind`]; [`Error::Invalid`] if two methods have one number.
    pub fn bind(self, domain: &Domain, service: &str) -> Result<CallServer> {
        let Self { methods, limits } = self;
        methods.check()?;
        let acceptor = Acceptor::bind(domain, service, Kind::Message, &channel_options(&limits.options))?;
        let error = |e| Error::system("make the event that stops a server", e);
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(error)?;
        let shared = Arc::new(ServerCore {
            methods,
            limits,
            stop,
            is_stopped: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let core = Arc::clone(&shared);
        let accepting = std::thread::Builder::new()
            .name("pw-accept".into())
            .spawn(move || accept(acceptor, &core))
            .map_err(|e| Error::system("start a thread", e))?;
        Ok(CallServer { core: shared, accepting: Some(accepting) })
    }
}

/// A service whose methods clients call. The server has one thread for each client, which sleeps while the client is idle. Dropping this value stops
/// the server: it closes all connections, and blocks until the calls in progress have ended.
///
/// ```
/// use partywall::rpc::{CallError, CallClient, CallServer};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
/// let client = CallClient::connect("web:math")?;
/// client.call("null", &[])?;
/// assert_eq!(server.clients(), 1);
/// server.stop();
/// assert!(matches!(client.call("null", &[]), Err(CallError::Closed { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CallServer {
    core: Arc<ServerCore>,
    accepting: Option<JoinHandle<()>>,
}

struct ServerCore {
    methods: Methods,
    limits: Limits,
    /// Readable once the server is to stop.
    stop: OwnedFd,
    is_stopped: AtomicBool,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    next: u64,
    open: HashMap<u64, Connection>,
    /// Threads that have served their client and may not have ended yet.
    finished: Vec<JoinHandle<()>>,
}

/// A client's thread, and the descriptor that wakes it ([`StreamRx::stopper`]).
struct Connection {
    domain: u32,
    link: OwnedFd,
    thread: Option<JoinHandle<()>>,
    share: Arc<HeapShare>,
}

impl fmt::Debug for ServerCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerCore").field("methods", &self.methods).finish_non_exhaustive()
    }
}

impl CallServer {
    /// A server without methods; add them to the result.
    pub fn builder() -> CallServerBuilder {
        CallServerBuilder::default()
    }

    /// The number of connected clients.
    pub fn clients(&self) -> usize {
        lock(&self.core.connections).open.len()
    }

    /// Closes all connections and waits for the calls in progress. Clients get [`CallError::Closed`].
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(accepting) = self.accepting.take() else { return };
        self.core.is_stopped.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.core.stop, &1u64.to_ne_bytes());
        let _ = accepting.join();
        let mut threads = Vec::new();
        let mut connections = lock(&self.core.connections);
        threads.append(&mut connections.finished);
        for connection in connections.open.values_mut() {
            // Wakes the thread that sleeps on this end, and no one else: the peer's end stays open until the thread has finished in order.
            let _ = rustix::net::shutdown(&connection.link, rustix::net::Shutdown::Read);
            threads.extend(connection.thread.take());
        }
        drop(connections);
        for thread in threads {
            // A function of this server may stop it.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for CallServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Accepts clients until the server stops.
fn accept(mut acceptor: Acceptor, core: &Arc<ServerCore>) {
    acceptor.nonblocking = true;
    while !core.is_stopped.load(Ordering::Acquire) {
        match acceptor.accept() {
            Ok((Some(tx), Some(rx), info)) => {
                if let Err(e) = take_in(core, tx, rx, info) {
                    tracing::warn!(error = %e, "a client was not taken");
                }
            }
            // A client that reads no replies: its channel is dropped.
            Ok(_) => {}
            Err(Error::WouldBlock) => {
                let mut fds = [PollFd::new(&acceptor, PollFlags::IN), PollFd::new(&core.stop, PollFlags::IN)];
                let _ = poll(&mut fds, None);
                // Without a broker, the listener's session stays readable until the broker is back.
                if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
                    pause(&core.stop);
                }
            }
            Err(e) => {
                tracing::warn!(error = %e, "no client can be accepted now");
                pause(&core.stop);
            }
        }
    }
}

/// Waits for a moment, or until the server is to stop.
fn pause(stop: &OwnedFd) {
    let longest = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
    let _ = poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&longest));
}

fn take_in(core: &Arc<ServerCore>, tx: StreamTx, rx: StreamRx, info: PeerInfo) -> Result<()> {
    let mut connections = lock(&core.connections);
    connections.finished.retain(|thread| !thread.is_finished());
    if connections.open.len() >= core.limits.max_clients {
        return Err(Error::Full("the server has as many clients as it may"));
    }
    let domain = info.domain_id;
    let limits = &core.limits;
    let of_domain = || connections.open.values().filter(|connection| connection.domain == domain);
    if of_domain().count() >= limits.max_clients_of_domain.unwrap_or(limits.max_clients.div_ceil(4)) {
        return Err(Error::Full("the server has as many clients of this domain as it may"));
    }
    let share = of_domain().next().map(|connection| Arc::clone(&connection.share));
    let share = share.unwrap_or_else(|| HeapShare::new(limits.heap.max));
    let share_of_thread = Arc::clone(&share);
    let link = rx.stopper()?;
    let number = connections.next;
    connections.next += 1;
    let core_of_thread = Arc::clone(core);
    let thread = std::thread::Builder::new()
        .name("pw-serve".into())
        .spawn(move || {
            let (core, name) = (core_of_thread, info.name.clone());
            if let Err(e) = serve(&core, tx, rx, info, share_of_thread) {
                tracing::debug!(client = name, error = %e, "a client has ended");
            }
            let mut connections = lock(&core.connections);
            let thread = connections.open.remove(&number).and_then(|connection| connection.thread);
            connections.finished.extend(thread);
        })
        .map_err(|e| Error::system("start a thread", e))?;
    connections.open.insert(number, Connection { domain, link, thread: Some(thread), share });
    Ok(())
}

/// Serves one client until it ends.
fn serve(core: &Arc<ServerCore>, tx: StreamTx, mut rx: StreamRx, info: PeerInfo, share: Arc<HeapShare>) -> Result<()> {
    let regions = Regions::of(Some(rx.endpoint()));
    take_heap(&regions, core.limits.max_peer_heap)?;
    let heap = Heap::within(regions.clone(), core.limits.heap.clone(), share);
    // The ring has room for an answer to every call that the client may have in flight. A client whose ring has no room breaks the
    // protocol (K4), so the server does not wait for it.
    let mut sender = CallSender::new(tx, heap.clone());
    sender.hello(false)?;
    // Until then the client takes a place of `max_clients` for nothing.
    rx.waiter.timeout = Some(core.limits.first_record);
    let Some(first) = rx.next_record()? else { return Ok(()) };
    rx.waiter.timeout = None;
    let peer_heap = PeerHeap::new(regions, core.limits.same_address);
    let client = Arc::new(CallingPeer { info, heap, peer_heap });
    let hello = check_hello(&first);
    let takes_calls = matches!(hello, Ok(true));
    let mut outcome = hello.map(drop);
    let mut conversation = Conversation::new(rx, ReplySide::new(sender), takes_calls);
    let mut record = CallRecord::BLANK;
    while outcome.is_ok() && !core.is_stopped.load(Ordering::Acquire) {
        outcome = match conversation.next_to(&mut record) {
            Ok(true) => take(core, &client, &mut conversation, &record),
            Ok(false) => break,
            Err(e) => Err(e),
        };
    }
    match outcome {
        Err(Error::Corrupt(what)) => Err(conversation.rx.blame(what)),
        // The server's own doing: the link was shut down to wake this thread.
        _ if core.is_stopped.load(Ordering::Acquire) && (outcome.is_err() || conversation.has_ended()) => {
            conversation.rx.close_after_shutdown();
            Ok(())
        }
        other => other,
    }
}

/// Takes a client's record, and executes a call on this thread.
#[inline]
fn take(
    core: &ServerCore,
    client: &Arc<CallingPeer>,
    conversation: &mut Conversation,
    record: &CallRecord,
) -> Result<()> {
    let most = core.limits.max_follows;
    match record.kind {
        RecordKind::Call => {
            let back = BackCaller::new(conversation, record.id);
            let result = core.methods.execute(record, client, most, Some(&back));
            conversation.replies.answer(client, record.id, result)
        }
        RecordKind::Notice => {
            let _ = core.methods.execute(record, client, most, None);
            Ok(())
        }
        _ => conversation.take(client, record),
    }
}
