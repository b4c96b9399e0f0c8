//! The server of calls, driven by tokio: one task for each client, and one for each call under way.

use super::calls_back::{CallOfTask, ClientCallsBack, EndOfCall};
use super::functions::TaskMethods;
use super::{copied_len, make_room};
use crate::asynchronous::blocking::blocking;
use crate::asynchronous::register;
use crate::asynchronous::services::{Accepting, Turnstile};
use crate::domain::lock;
use crate::further::Regions;
use crate::listener::Acceptor;
use crate::rpc::answer::CallAnswer;
use crate::rpc::calling_peer::CallingPeer;
use crate::rpc::channel_options;
use crate::rpc::conversation::MOST_KEPT;
use crate::rpc::error::CallError;
use crate::rpc::heap::{Heap, HeapShare};
use crate::rpc::incoming::IncomingCall;
use crate::rpc::reply_side::ReplySide;
use crate::rpc::sender::{CallSender, check_hello};
use crate::rpc::server::{CallServerBuilder, Limits, PAUSE};
use crate::rpc::view::{PeerHeap, take_heap};
use crate::rx::StreamRx;
use crate::tx::StreamTx;
use crate::{Domain, Error, PeerInfo, Result};
use partywall_protocol::wire::Kind;
use partywall_shm::call::{CallRecord, RecordKind};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::task::{JoinHandle, JoinSet};

type CallResult<T> = std::result::Result<T, CallError>;

/// Calls of one client that are executed at the same time, unless the builder says otherwise.
const AT_ONCE: usize = 64;

/// The methods of a server whose functions are futures.
///
/// ```
/// use partywall::asynchronous::{AsyncCallClient, AsyncCallServer, AsyncCallServerBuilder};
/// use partywall::rpc::CallError;
///
/// fn methods() -> AsyncCallServerBuilder {
///     AsyncCallServer::builder()
///         .method("echo", |call| async move { Ok(call.args().to_vec().into()) })
///         .method("withdraw", |_| async { Err(CallError::application(7, "the account is empty")) })
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = methods().bind(&web, "bank").await?;
/// let client = AsyncCallClient::connect("web:bank").await?;
/// assert_eq!(client.call("echo", b"hello").await?.to_vec(), b"hello");
/// assert!(matches!(client.call("withdraw", &[]).await, Err(CallError::Application { code: 7, .. })));
/// # Ok(())
/// # }
/// ```
pub struct AsyncCallServerBuilder {
    methods: TaskMethods,
    wrong: Option<String>,
    limits: Limits,
    at_once: usize,
}

impl Default for AsyncCallServerBuilder {
    fn default() -> Self {
        Self { methods: TaskMethods::default(), wrong: None, limits: Limits::default(), at_once: AT_ONCE }
    }
}

impl fmt::Debug for AsyncCallServerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncCallServerBuilder").field("methods", &self.methods).finish_non_exhaustive()
    }
}

impl AsyncCallServerBuilder {
    /// Offers a function under a name. The function's future runs as a task of the runtime, so it must not block. When a client ends, the server
    /// drops the futures of the client's calls. The futures of its notices ([`CallClient::notify`](crate::rpc::CallClient::notify)) run to their end.
    #[must_use]
    pub fn method<F, A>(mut self, name: &str, function: F) -> Self
    where
        F: Fn(IncomingCall<'static>) -> A + Send + Sync + 'static,
        A: Future<Output = CallResult<CallAnswer>> + Send + 'static,
    {
        self.methods.add(name, function);
        self
    }

    /// Takes the options and limits of a builder that has no methods: those of heaps and of clients, for instance.
    ///
    /// ```
    /// use partywall::asynchronous::AsyncCallServer;
    /// use partywall::rpc::CallServer;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let few = CallServer::builder().max_clients(10);
    /// let _server = AsyncCallServer::builder().limits(few).bind(&web, "math").await?;
    /// let not_for_threads = CallServer::builder().method("null", |_| Ok(().into()));
    /// assert!(AsyncCallServer::builder().limits(not_for_threads).bind(&web, "other").await.is_err());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn limits(mut self, of: CallServerBuilder) -> Self {
        match of.into_limits() {
            Some(limits) => self.limits = limits,
            None => self.wrong = Some("methods of a server with threads: add them to the server with tasks".into()),
        }
        self
    }

    /// The most calls of one client that are executed at the same time, 64 unless this is called. The server takes no further records of
    /// that client meanwhile. With 1, the calls of a client are executed in order.
    ///
    /// ```
    /// # use partywall::asynchronous::{AsyncCallClient, AsyncCallServer};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let server = AsyncCallServer::builder().calls_at_once(1).method("null", |_| async { Ok(().into()) });
    /// let _server = server.bind(&web, "math").await?;
    /// # AsyncCallClient::connect("web:math").await?.call("null", &[]).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn calls_at_once(mut self, calls: usize) -> Self {
        self.at_once = calls.max(1);
        self
    }

    /// Binds a service of the domain and serves it by tasks of this runtime, which has I/O and time enabled.
    ///
    /// # Errors
    /// As [`CallServerBuilder::bind`].
    pub async fn bind(self, domain: &Domain, service: &str) -> Result<AsyncCallServer> {
        let Self { methods, wrong, limits, at_once } = self;
        if let Some(wrong) = wrong {
            return Err(Error::Invalid(wrong));
        }
        methods.check()?;
        let (domain, service, options) = (domain.clone(), service.to_owned(), channel_options(&limits.options));
        let bound = blocking(move || Acceptor::bind(&domain, &service, Kind::Message, &options));
        let turnstile = Turnstile::Waiting(CallAcceptor(bound.await?));
        let core = Arc::new(TaskServerCore { methods, limits, at_once, clients: Mutex::default() });
        let accepting = tokio::spawn(accept(turnstile, Arc::clone(&core)));
        Ok(AsyncCallServer { core, accepting })
    }
}

/// A service whose methods are futures, driven by tokio. Dropping this closes all connections, and drops the futures of calls under way.
///
/// ```
/// use partywall::asynchronous::{AsyncCallClient, AsyncCallServer};
/// use partywall::rpc::CallError;
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let server = AsyncCallServer::builder()
///     .method("slow", |call| async move {
///         tokio::time::sleep(Duration::from_millis(5)).await;
///         Ok(call.args().to_vec().into())
///     })
///     .bind(&web, "math")
///     .await?;
///
/// let client = AsyncCallClient::connect("web:math").await?;
/// // Both are executed at the same time.
/// let (one, two) = tokio::join!(client.call("slow", &[1]), client.call("slow", &[2; 100]));
/// assert_eq!((one?.to_vec(), two?.len()), (vec![1], 100));
/// assert_eq!(server.clients(), 1);
/// drop(server);
/// assert!(matches!(client.call("slow", &[]).await, Err(CallError::Closed { .. })));
/// # Ok(())
/// # }
/// ```
///
/// Typed methods are declared by [`service!`](crate::service) with `tasks`:
///
/// ```
/// use partywall::asynchronous::{AsyncCallClient, AsyncCallServer};
/// use partywall::rpc::{CallError, IncomingCall, PeerSlice};
///
/// partywall::service! {
///     trait Math, tasks MathTasks, client MathClient {
///         fn sum(numbers: &[u64]) -> u64;
///     }
/// }
///
/// struct Adder;
/// impl MathTasks for Adder {
///     async fn sum(&self, _: IncomingCall<'static>, numbers: PeerSlice<u64>) -> Result<u64, CallError> {
///         tokio::task::yield_now().await;
///         numbers.iter().sum()
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = Adder.add_to(AsyncCallServer::builder()).bind(&web, "math").await?;
/// let client = MathClient::new(AsyncCallClient::connect("web:math").await?);
/// assert_eq!(client.sum(&[1, 2, 3]).await?, 6);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncCallServer {
    core: Arc<TaskServerCore>,
    accepting: JoinHandle<()>,
}

struct TaskServerCore {
    methods: TaskMethods,
    limits: Limits,
    at_once: usize,
    clients: Mutex<TaskClients>,
}

impl fmt::Debug for TaskServerCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskServerCore").field("methods", &self.methods).finish_non_exhaustive()
    }
}

/// The domains of the connected clients, and what the clients of each share.
#[derive(Debug, Default)]
struct TaskClients {
    next: u64,
    open: HashMap<u64, (u32, Arc<HeapShare>)>,
}

impl AsyncCallServer {
    /// A server without methods; add them to the result.
    pub fn builder() -> AsyncCallServerBuilder {
        AsyncCallServerBuilder::default()
    }

    /// The number of connected clients.
    pub fn clients(&self) -> usize {
        lock(&self.core.clients).open.len()
    }
}

impl Drop for AsyncCallServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

#[derive(Debug)]
struct CallAcceptor(Acceptor);

impl AsFd for CallAcceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Accepting for CallAcceptor {
    type Accepted = (Option<StreamTx>, Option<StreamRx>, PeerInfo);

    fn accept_for(&mut self, longest: Duration) -> Result<Self::Accepted> {
        self.0.timeout = Some(longest);
        self.0.accept()
    }
}

/// Accepts clients until the server is dropped, which ends the tasks of all clients.
async fn accept(mut turnstile: Turnstile<CallAcceptor>, core: Arc<TaskServerCore>) {
    let mut connections = JoinSet::new();
    loop {
        match turnstile.accept().await {
            Ok((Some(tx), Some(rx), info)) => match ClientPlace::take(&core, info.domain_id) {
                Ok((place, share)) => {
                    connections.spawn(async move {
                        let name = info.name.clone();
                        if let Err(e) = serve(&place.core, tx, rx, info, share).await {
                            tracing::debug!(client = name, error = %e, "a client has ended");
                        }
                    });
                }
                Err(e) => tracing::warn!(error = %e, "a client was not taken"),
            },
            // A client that reads no replies: its channel is dropped.
            Ok(_) => {}
            Err(e) => {
                tracing::warn!(error = %e, "no client can be accepted now");
                tokio::time::sleep(PAUSE).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

/// A client's place among those that the server may have.
struct ClientPlace {
    core: Arc<TaskServerCore>,
    number: u64,
}

impl ClientPlace {
    fn take(core: &Arc<TaskServerCore>, domain: u32) -> Result<(Self, Arc<HeapShare>)> {
        let limits = &core.limits;
        let mut clients = lock(&core.clients);
        if clients.open.len() >= limits.max_clients {
            return Err(Error::Full("the server has as many clients as it may"));
        }
        let of_domain = || clients.open.values().filter(|(other, _)| *other == domain);
        if of_domain().count() >= limits.max_clients_of_domain.unwrap_or(limits.max_clients.div_ceil(4)) {
            return Err(Error::Full("the server has as many clients of this domain as it may"));
        }
        let share = of_domain().next().map(|(_, share)| Arc::clone(share));
        let share = share.unwrap_or_else(|| HeapShare::new(limits.heap.max));
        let number = clients.next;
        clients.next += 1;
        clients.open.insert(number, (domain, Arc::clone(&share)));
        Ok((Self { core: Arc::clone(core), number }, share))
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        lock(&self.core.clients).open.remove(&self.number);
    }
}

/// The records of one client.
struct ClientRecords {
    rx: StreamRx,
    arrivals: AsyncFd<OwnedFd>,
}

impl ClientRecords {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<CallRecord>>> {
        loop {
            match self.rx.next_record() {
                Err(Error::WouldBlock) => {}
                other => return Poll::Ready(other),
            }
            let ready = ready!(self.arrivals.poll_read_ready(cx));
            ready.map_err(|e| Error::system("wait for calls", e))?.clear_ready();
        }
    }
}

impl ClientRecords {
    /// Ready once the client has gone. Records may be there all the same.
    fn poll_hang_up(&self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match ready!(self.arrivals.poll_read_ready(cx)) {
                // Records are looked for before the next wait for them.
                Ok(mut guard) => guard.clear_ready(),
                Err(_) => return Poll::Ready(()),
            }
            // Asked after the clearing, and of the link: to another machine, what is waited for is an `epoll` set, which does not hang up itself.
            if self.rx.waiter.link.is_hung_up() {
                return Poll::Ready(());
            }
        }
    }
}

/// Serves one client until it ends. The futures of its calls are dropped then.
async fn serve(
    core: &Arc<TaskServerCore>,
    tx: StreamTx,
    mut rx: StreamRx,
    info: PeerInfo,
    share: Arc<HeapShare>,
) -> Result<()> {
    let limits = core.limits.clone();
    let opened = blocking(move || {
        let regions = Regions::of(Some(rx.endpoint()));
        take_heap(&regions, limits.max_peer_heap)?;
        let heap = Heap::within(regions.clone(), limits.heap, share);
        let mut sender = CallSender::new(tx, heap.clone());
        sender.hello(false)?;
        rx.waiter.nonblocking = true;
        let client = CallingPeer { info, heap, peer_heap: PeerHeap::new(regions, limits.same_address) };
        Ok((sender, rx, client))
    });
    let (sender, rx, client) = opened.await?;
    let link = rx.waiter.link.as_fd().try_clone_to_owned().map_err(|e| Error::system("keep a link", e))?;
    let mut inbox = ClientRecords { rx, arrivals: register(link)? };
    // Until then the client takes a place of `max_clients` for nothing.
    let first = tokio::time::timeout(core.limits.first_record, poll_fn(|cx| inbox.poll_next(cx)));
    let Some(first) = first.await.map_err(|_| Error::TimedOut)?? else { return Ok(()) };
    let replies = Arc::new(Mutex::new(ReplySide::new(sender)));
    let outcome = match check_hello(&first) {
        Ok(takes_calls) => {
            let client = Arc::new(client);
            let back = ClientCallsBack::new(Arc::clone(&client), Arc::clone(&replies), takes_calls);
            serve_calls(core, &mut inbox, &client, &replies, &back).await
        }
        Err(e) => Err(e),
    };
    match outcome {
        Err(Error::Corrupt(what)) => Err(inbox.rx.blame(what)),
        other => other,
    }
}

/// What the task of a client does next.
enum ServeStep {
    Take(CallRecord),
    /// As many calls as may be are executed, and one of them waits for a call back.
    Keep(CallRecord),
    /// The client has gone while as many of its calls as may be are executed.
    Leave,
    End,
}

async fn serve_calls(
    core: &Arc<TaskServerCore>,
    inbox: &mut ClientRecords,
    client: &Arc<CallingPeer>,
    replies: &Arc<Mutex<ReplySide>>,
    back: &Arc<ClientCallsBack>,
) -> Result<()> {
    let (mut calls, mut notices) = (JoinSet::new(), JoinSet::new());
    let mut has_left = false;
    // Calls and notices that have arrived while functions wait for calls back, and are executed later.
    let mut kept = VecDeque::new();
    let mut has_ended = false;
    let outcome = loop {
        let next = poll_fn(|cx| {
            // An answer that cannot be sent ends the connection.
            while let Poll::Ready(Some(joined)) = calls.poll_join_next(cx) {
                if let Ok(Err(e)) = joined {
                    return Poll::Ready(Err(e));
                }
            }
            while let Poll::Ready(Some(_)) = notices.poll_join_next(cx) {}
            let awaits_answer = match back.awaits_answer(cx.waker(), kept.len() >= MOST_KEPT) {
                Ok(awaits_answer) => awaits_answer,
                Err(e) => return Poll::Ready(Err(e)),
            };
            let is_free = calls.len() + notices.len() < core.at_once;
            if is_free && let Some(record) = kept.pop_front() {
                return Poll::Ready(Ok(ServeStep::Take(record)));
            }
            if is_free && has_ended {
                return Poll::Ready(Ok(ServeStep::End));
            }
            if is_free || (awaits_answer && !has_left) {
                let step = |record: CallRecord| match record.kind {
                    RecordKind::Call | RecordKind::Notice if !is_free => ServeStep::Keep(record),
                    _ => ServeStep::Take(record),
                };
                return inbox.poll_next(cx).map_ok(|record| record.map_or(ServeStep::End, step));
            }
            // The end of a call wakes this task, and so does that of the client.
            if has_left { Poll::Pending } else { inbox.poll_hang_up(cx).map(|()| Ok(ServeStep::Leave)) }
        });
        match next.await {
            Ok(ServeStep::Take(record)) if record.kind == RecordKind::Call => {
                // There is nobody to answer any more.
                if has_left {
                    continue;
                }
                let (core, client, replies) = (Arc::clone(core), Arc::clone(client), Arc::clone(replies));
                let call = CallOfTask::new(back, record.id);
                let end = EndOfCall(Arc::clone(&call));
                calls.spawn(async move {
                    let follows = core.limits.max_follows;
                    let result = core.methods.execute(&record, &client, follows, Some(call)).await;
                    // Nothing is called back after the answer.
                    drop(end);
                    // An answer that finds no memory says so.
                    let _ = make_room(&client.heap, copied_len(&result)).await;
                    lock(&replies).answer(&client, record.id, result)
                });
            }
            Ok(ServeStep::Take(record)) if record.kind == RecordKind::Notice => {
                let (core, client) = (Arc::clone(core), Arc::clone(client));
                let follows = core.limits.max_follows;
                notices.spawn(async move { core.methods.execute(&record, &client, follows, None).await.map(drop) });
            }
            Ok(ServeStep::Keep(record)) => {
                kept.push_back(record);
                if kept.len() >= MOST_KEPT {
                    back.give_up_all();
                }
            }
            Ok(ServeStep::Take(record)) if record.kind == RecordKind::Reply => {
                if let Err(e) = back.take(&record) {
                    break Err(e);
                }
            }
            Ok(ServeStep::Take(record)) => {
                if let Err(e) = lock(replies).take(client, &record) {
                    break Err(e);
                }
            }
            Ok(ServeStep::Leave) => {
                has_left = true;
                calls.abort_all();
            }
            // Notices that were kept are executed all the same.
            Ok(ServeStep::End) if !kept.is_empty() => {
                (has_left, has_ended) = (true, true);
                calls.abort_all();
            }
            Ok(ServeStep::End) => break Ok(()),
            Err(e) => break Err(e),
        }
    };
    drop(calls);
    // The client wants no answer to these, and may have gone as soon as they were sent.
    while !matches!(outcome, Err(Error::Corrupt(_))) && notices.join_next().await.is_some() {}
    outcome
}
