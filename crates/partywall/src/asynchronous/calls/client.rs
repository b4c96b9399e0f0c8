//! The client of a connection of calls, driven by tokio.
//!
//! One lock guards the ring of records and the replies, and nobody keeps it while waiting. Each call that is polled takes what has arrived,
//! also for other calls, and wakes those. The connection's task does the same whenever the descriptor becomes readable.

use super::functions::TaskMethods;
use super::{copied_len, make_room};
use crate::asynchronous::blocking::blocking;
use crate::asynchronous::register;
use crate::domain::lock;
use crate::rpc::WINDOW;
use crate::rpc::answer::CallAnswer;
use crate::rpc::calling_peer::CallingPeer;
use crate::rpc::client::{CallClientBuilder, ClientParts};
use crate::rpc::driver::{CallReceiver, ServerRecord};
use crate::rpc::error::CallError;
use crate::rpc::functions::refusal;
use crate::rpc::heap::{Block, Heap};
use crate::rpc::incoming::IncomingCall;
use crate::rpc::method::Method;
use crate::rpc::methods::MOST_FOLLOWS;
use crate::rpc::reply::{ReceivedReply, ReleasesBlocks, Reply};
use crate::rpc::sender::{CallSender, prepare};
use crate::rpc::slots::{CallStep, ConnectionEnd, Slots};
use crate::rpc::view::{PeerHeap, PeerView};
use crate::{Domain, Error, PeerInfo, Result};
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::task::{AbortHandle, JoinSet};

type CallResult<T> = std::result::Result<T, CallError>;

/// A connection to a server, for the tasks of a program. Clones of it use the same connection, and their calls are under way at the same time.
///
/// A call is cancelled by dropping its future. If the server has it already, it still executes it, and its result is dropped.
///
/// ```
/// use partywall::asynchronous::AsyncCallClient;
/// use partywall::rpc::{CallError, CallServer};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = CallServer::builder()
///     .method("echo", |call| Ok(call.args().to_vec().into()))
///     .method("sleep", |_| {
///         std::thread::sleep(Duration::from_millis(50));
///         Ok(().into())
///     })
///     .bind(&web, "math")?;
///
/// let client = AsyncCallClient::connect("web:math").await?;
/// let other = client.clone();
/// let task = tokio::spawn(async move { other.call("echo", &[7; 1000]).await.map(|reply| reply.to_vec()) });
/// assert_eq!(client.call("echo", b"one").await?.to_vec(), b"one");
/// assert_eq!(task.await??, [7; 1000]);
/// let late = client.call_within(Duration::from_millis(1), "sleep", &[]).await;
/// assert!(matches!(late, Err(CallError::TimedOut)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct AsyncCallClient {
    handle: Arc<ClientHandle>,
}

/// What clones of a client, its calls and their replies share. The connection ends with it.
struct ClientHandle {
    shared: Arc<SharedCalls>,
    task: AbortHandle,
    timeout: Option<Duration>,
    peer: PeerInfo,
}

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientHandle").field("peer", &self.peer.name).finish_non_exhaustive()
    }
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        self.task.abort();
        if let Some(functions) = &self.shared.functions {
            lock(&functions.running).abort_all();
        }
    }
}

impl ReleasesBlocks for ClientHandle {
    fn release(&self, address: u64) {
        lock(&self.shared.state).sender.release(address, true);
    }
}

/// What calls share with the connection's task.
struct SharedCalls {
    state: Mutex<CallsState>,
    /// A permit for each call that may be begun.
    window: Semaphore,
    /// Told when there may be room in the ring.
    room: Notify,
    heap: Heap,
    peer_heap: PeerHeap,
    /// `None` if the server may not call back.
    functions: Option<TaskFunctions>,
}

/// The functions of a client, each of which a task executes when the server calls it back.
struct TaskFunctions {
    methods: TaskMethods,
    server: Arc<CallingPeer>,
    runtime: Handle,
    /// Aborted with the client.
    running: Mutex<JoinSet<()>>,
    /// The connection, for those tasks.
    shared: Weak<SharedCalls>,
}

tokio::task_local! {
    /// The connection whose server waits for the function that this task executes.
    static CALLED_BACK: Weak<SharedCalls>;
}

impl TaskFunctions {
    fn spawn(&self, record: CallRecord) {
        let (methods, server, shared) = (self.methods.clone(), Arc::clone(&self.server), self.shared.clone());
        let executing = CALLED_BACK.scope(self.shared.clone(), async move {
            let result = methods.execute(&record, &server, MOST_FOLLOWS, None).await;
            // An answer that finds no memory says so.
            let _ = make_room(&server.heap, copied_len(&result)).await;
            let (reply, mut lent) = server.reply(record.id, result);
            let Some(shared) = shared.upgrade() else { return };
            // A connection that has ended takes no reply.
            let _ = when_there_is_room(&shared, |state| {
                let sent = state.sender.send(&reply);
                if !matches!(sent, Err(Error::WouldBlock)) {
                    state.called_back -= 1;
                    state.slots.end_call_back(record.id, lent.take());
                }
                sent
            })
            .await;
        });
        let mut running = lock(&self.running);
        while running.try_join_next().is_some() {}
        running.spawn_on(executing, &self.runtime);
    }
}

/// Fails in a function that is called back: the server executes no other call before it is answered (protocol K8.6).
fn check_task(shared: &Arc<SharedCalls>) -> CallResult<()> {
    let is_same = |other: &Weak<SharedCalls>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(shared));
    if CALLED_BACK.try_with(is_same).unwrap_or(false) {
        let why = "a function that is called back cannot wait for a call of the same connection, because the server waits for the function";
        return Err(CallError::Refused(why.into()));
    }
    Ok(())
}

struct CallsState {
    sender: CallSender,
    receiver: CallReceiver,
    slots: Slots,
    /// Calls that are to be woken by their replies.
    wakers: HashMap<u32, Waker>,
    /// Calls back that this side has not answered.
    called_back: usize,
    /// Those of them whose replies are here. They are woken without the lock, since what that does is not known.
    woken: Vec<Waker>,
}

impl SharedCalls {
    /// Takes everything that has arrived. `true` once nothing more will come.
    ///
    /// It ends: the server may answer the calls that are under way, and no other begins meanwhile.
    fn receive(&self, state: &mut CallsState) -> bool {
        while state.slots.ended.is_none() {
            let filed = match state.receiver.receive_now() {
                Ok(ServerRecord::Reply(id, outcome)) => self.file(state, id, outcome),
                Ok(ServerRecord::CallBack(record)) => self.file_call_back(state, record),
                Ok(ServerRecord::Memory) => Ok(()),
                Err(Error::WouldBlock) => return false,
                Err(e) => Err(e),
            };
            if let Err(e) = filed {
                let end = ConnectionEnd::from_error(&e);
                if let ConnectionEnd::Corrupt(what) = end {
                    state.receiver.blame(what);
                }
                self.end(state, end);
            }
        }
        true
    }

    fn file(&self, state: &mut CallsState, id: u32, outcome: ReceivedReply) -> Result<()> {
        let unwanted = state.slots.deliver(id, outcome).map_err(Error::Corrupt)?;
        self.window.add_permits(1);
        if let Some(address) = unwanted {
            state.sender.release(address, true);
        }
        state.woken.extend(state.wakers.remove(&id));
        Ok(())
    }

    /// Begins a call back, or refuses one whose caller has given its call up.
    fn file_call_back(&self, state: &mut CallsState, record: CallRecord) -> Result<()> {
        let functions = self.functions.as_ref().ok_or(Corrupt::BadRecord)?;
        // A server has no more calls back unanswered (protocol K8.4).
        if state.sender.owed_replies() >= WINDOW || state.called_back >= WINDOW {
            return Err(Corrupt::BadRecord.into());
        }
        state.slots.call_back(record)?;
        while let Some(id) = state.slots.refused.pop() {
            state.sender.owe(refusal(id), true);
        }
        if let Some(CallStep::CalledBack(record)) = state.slots.take_step(record.id) {
            state.called_back += 1;
            functions.spawn(record);
        }
        Ok(())
    }

    /// Nothing more will come: everyone who waits is woken.
    fn end(&self, state: &mut CallsState, end: ConnectionEnd) {
        state.slots.ended.get_or_insert(end);
        state.woken.extend(state.wakers.drain().map(|(_, waker)| waker));
        self.window.close();
        self.room.notify_waiters();
    }

    /// The same with the lock taken here. The calls whose replies have arrived are woken.
    fn receive_and_wake(&self) -> bool {
        let mut state = lock(&self.state);
        let has_ended = self.receive(&mut state);
        wake(state);
        has_ended
    }

    fn error_of_end(&self) -> CallError {
        lock(&self.state).slots.ended.unwrap_or(ConnectionEnd::Failed).error()
    }
}

/// Releases the lock and wakes the calls that have their replies.
fn wake(mut state: MutexGuard<'_, CallsState>) {
    let woken = std::mem::take(&mut state.woken);
    drop(state);
    woken.into_iter().for_each(Waker::wake);
}

/// Ends the connection's calls when its task ends, for whatever reason.
struct TaskEnd(Weak<SharedCalls>);

impl Drop for TaskEnd {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            let mut state = lock(&shared.state);
            shared.end(&mut state, ConnectionEnd::Failed);
            wake(state);
        }
    }
}

/// The task of a connection: receives whenever there is something, and tells those who wait for room.
async fn drive(shared: Weak<SharedCalls>, arrivals: AsyncFd<OwnedFd>, room: AsyncFd<OwnedFd>) {
    let end = TaskEnd(shared);
    let mut watches_room = true;
    loop {
        // The client is kept no longer than this, so that dropping it closes the connection.
        match end.0.upgrade() {
            Some(shared) if !shared.receive_and_wake() => {}
            _ => return,
        }
        let has_failed = poll_fn(|cx| {
            while watches_room && let Poll::Ready(ready) = room.poll_read_ready(cx) {
                // A link that has hung up stays ready. Attempts to send then fail at once.
                watches_room = match ready {
                    Ok(mut guard) => {
                        let has_hung_up = guard.ready().is_read_closed();
                        guard.clear_ready();
                        !has_hung_up
                    }
                    Err(_) => false,
                };
                if let Some(shared) = end.0.upgrade() {
                    shared.room.notify_waiters();
                }
            }
            arrivals.poll_read_ready(cx).map(|ready| ready.map(|mut guard| guard.clear_ready()).is_err())
        });
        if has_failed.await {
            return;
        }
    }
}

/// The functions of a client that are futures, and its options.
///
/// ```
/// use partywall::asynchronous::AsyncCallClient;
/// use partywall::rpc::{CallClient, CallServer};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = CallServer::builder()
///     .method("sign", |call| Ok(call.call_back("password", &[])?.to_vec().into()))
///     .bind(&web, "notary")?;
/// let client = AsyncCallClient::builder()
///     .method("password", |_| async {
///         tokio::time::sleep(Duration::from_millis(1)).await;
///         Ok(vec![7; 100].into())
///     })
///     .options(CallClient::builder().timeout(Duration::from_secs(60)))
///     .connect(&web, "web:notary")
///     .await?;
/// assert_eq!(client.call("sign", &[]).await?.to_vec(), [7; 100]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct AsyncCallClientBuilder {
    methods: TaskMethods,
    options: CallClientBuilder,
}

impl AsyncCallClientBuilder {
    /// Offers a function to the server, which calls it back while it executes a call of this client. Its future is a task of the runtime, also
    /// if no task awaits that call. A task of this function cannot wait for another call of the same connection. A function that holds the
    /// client keeps the connection open.
    #[must_use]
    pub fn method<F, A>(mut self, name: &str, function: F) -> Self
    where
        F: Fn(IncomingCall<'static>) -> A + Send + Sync + 'static,
        A: Future<Output = CallResult<CallAnswer>> + Send + 'static,
    {
        self.methods.add(name, function);
        self
    }

    /// Takes the options of a builder that has no methods.
    #[must_use]
    pub fn options(mut self, of: CallClientBuilder) -> Self {
        self.options = of;
        self
    }

    /// Connects a domain to `DOMAIN:SERVICE`, within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// As [`AsyncCallClient::connect_with`]; [`Error::Invalid`] if two methods have one number.
    pub async fn connect(&self, domain: &Domain, target: &str) -> Result<AsyncCallClient> {
        let Self { methods, options } = self.clone();
        if options.takes_calls() {
            return Err(Error::Invalid(
                "methods of a client with threads: add them to AsyncCallClient::builder instead".into(),
            ));
        }
        methods.check()?;
        let (domain, target, takes_calls) = (domain.clone(), target.to_owned(), !methods.is_empty());
        let parts = blocking(move || options.open(&domain, &target, takes_calls)).await?;
        let ClientParts { sender, mut rx, room_link, heap, peer_heap, timeout } = parts;
        rx.waiter.nonblocking = true;
        let link = rx.waiter.link.as_fd().try_clone_to_owned().map_err(|e| Error::system("keep a link", e))?;
        let (arrivals, room_fd) = (register(link)?, register(room_link)?);
        let peer = rx.endpoint().info().clone();
        let receiver = CallReceiver::new(rx, peer_heap.clone());
        let state = CallsState {
            sender,
            receiver,
            slots: Slots::default(),
            wakers: HashMap::new(),
            called_back: 0,
            woken: Vec::new(),
        };
        let runtime = Handle::current();
        let shared = Arc::new_cyclic(|shared| SharedCalls {
            state: Mutex::new(state),
            window: Semaphore::new(WINDOW),
            room: Notify::new(),
            functions: takes_calls.then(|| TaskFunctions {
                methods,
                server: Arc::new(CallingPeer { info: peer.clone(), heap: heap.clone(), peer_heap: peer_heap.clone() }),
                runtime,
                running: Mutex::default(),
                shared: shared.clone(),
            }),
            heap,
            peer_heap,
        });
        let task = tokio::spawn(drive(Arc::downgrade(&shared), arrivals, room_fd)).abort_handle();
        Ok(AsyncCallClient { handle: Arc::new(ClientHandle { shared, task, timeout, peer }) })
    }
}

impl AsyncCallClient {
    /// Connects from the [current](Domain::current) domain to `DOMAIN:SERVICE`, within a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// As [`CallClientBuilder::connect`]; [`Error::System`] if the runtime cannot watch its descriptors.
    pub async fn connect(target: &str) -> Result<Self> {
        Self::connect_with(&Domain::current()?, target, &CallClientBuilder::default()).await
    }

    /// Connects a domain, with the options of a builder. With a time limit for calls, the runtime has time enabled.
    ///
    /// ```
    /// use partywall::asynchronous::AsyncCallClient;
    /// use partywall::rpc::{CallClient, CallServer, HeapOptions};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
    /// let options = CallClient::builder().timeout(std::time::Duration::from_secs(60));
    /// let client = AsyncCallClient::connect_with(&web, "web:math", &options.heap(HeapOptions::default())).await?;
    /// assert!(client.call("null", &[]).await?.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncCallClient::connect`]; [`Error::Invalid`] for options with methods, because functions of this client are futures.
    pub async fn connect_with(domain: &Domain, target: &str, options: &CallClientBuilder) -> Result<Self> {
        Self::builder().options(options.clone()).connect(domain, target).await
    }

    /// A client that the server may call back; [`AsyncCallClientBuilder::connect`] connects.
    pub fn builder() -> AsyncCallClientBuilder {
        AsyncCallClientBuilder::default()
    }

    /// The heap of this side. Arguments that lie in it are passed without a copy.
    pub fn heap(&self) -> &Heap {
        &self.handle.shared.heap
    }

    /// The server's side of the connection.
    pub fn peer(&self) -> &PeerInfo {
        &self.handle.peer
    }

    /// Calls a method, as [`CallClient::call`](crate::rpc::CallClient::call) does.
    ///
    /// # Errors
    /// As [`CallClient::call`](crate::rpc::CallClient::call).
    pub async fn call(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Reply> {
        let method = method.into();
        match self.handle.timeout {
            Some(longest) => self.call_within(longest, method, arguments).await,
            None => self.start(method, arguments).await?.await,
        }
    }

    /// The same with a separate limit: the longest that this call may take. The runtime has time enabled.
    ///
    /// # Errors
    /// As [`AsyncCallClient::call`].
    pub async fn call_within(
        &self,
        longest: Duration,
        method: impl Into<Method>,
        arguments: &[u8],
    ) -> CallResult<Reply> {
        let method = method.into();
        let call = async { self.start(method, arguments).await?.await };
        tokio::time::timeout(longest, call).await.unwrap_or(Err(CallError::TimedOut))
    }

    /// Begins a call and does not wait for its result. At most 512 calls of a connection are unanswered; beginning another one waits
    /// until an answer arrives.
    ///
    /// ```
    /// # use partywall::asynchronous::AsyncCallClient;
    /// # use partywall::rpc::CallServer;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("echo", |call| Ok(call.args().to_vec().into())).bind(&web, "math")?;
    /// # let client = AsyncCallClient::connect("web:math").await?;
    /// let (first, second) = (client.start("echo", b"one").await?, client.start("echo", b"two").await?);
    /// assert_eq!(second.await?.to_vec(), b"two");
    /// assert_eq!(first.await?.to_vec(), b"one");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`AsyncCallClient::call`].
    pub async fn start(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<AsyncOngoing> {
        let (shared, method) = (&self.handle.shared, method.into());
        check_task(shared)?;
        let (bytes, copied) = self.prepare(arguments).await?;
        let permit = shared.window.acquire().await.map_err(|_| shared.error_of_end())?;
        let mut copied = Some(copied);
        let begun = when_there_is_room(shared, |state| {
            let id = state.slots.open(None);
            let record = CallRecord { kind: RecordKind::Call, id, method: method.number(), status: 0, bytes };
            match state.sender.send(&record) {
                Ok(position) => {
                    state.slots.keep(id, copied.take().flatten());
                    Ok((id, position))
                }
                Err(e) => {
                    // Nothing is received meanwhile, so there is no answer.
                    let _ = state.slots.withdraw(id);
                    Err(e)
                }
            }
        });
        let (id, position) = begun.await?;
        // It comes back with the answer, also if the call is given up.
        permit.forget();
        Ok(AsyncOngoing { handle: Arc::clone(&self.handle), id, position, is_over: false })
    }

    async fn prepare(&self, arguments: &[u8]) -> CallResult<(CallBytes, Option<Block>)> {
        let heap = &self.handle.shared.heap;
        if !heap.holds(arguments) {
            make_room(heap, arguments.len()).await?;
        }
        Ok(prepare(heap, arguments)?)
    }

    /// Calls a method without a result, as [`CallClient::notify`](crate::rpc::CallClient::notify) does. A future that is dropped before it
    /// has ended has sent nothing.
    ///
    /// ```
    /// # use partywall::asynchronous::AsyncCallClient;
    /// # use partywall::rpc::CallServer;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("log", |_| Ok(().into())).bind(&web, "log")?;
    /// AsyncCallClient::connect("web:log").await?.notify("log", b"a line").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::notify`](crate::rpc::CallClient::notify).
    pub async fn notify(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<()> {
        let heap = &self.handle.shared.heap;
        let bytes = match CallBytes::inline(arguments) {
            Some(inline) => inline,
            None if heap.holds(arguments) => prepare(heap, arguments)?.0,
            None => {
                return Err(CallError::OutOfMemory(
                    "more than 40 bytes of a notice: put them into a block of the heap".into(),
                ));
            }
        };
        let method = method.into().number();
        let record = CallRecord { kind: RecordKind::Notice, id: 0, method, status: 0, bytes };
        when_there_is_room(&self.handle.shared, |state| state.sender.send(&record)).await.map(drop)
    }

    /// `len` bytes at an address of the server that an earlier reply contained, as
    /// [`CallClient::follow`](crate::rpc::CallClient::follow).
    ///
    /// ```
    /// # use partywall::asynchronous::AsyncCallClient;
    /// # use partywall::rpc::{CallError, CallServer};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("where", |_| Ok(7u64.to_le_bytes().into())).bind(&web, "math")?;
    /// let client = AsyncCallClient::connect("web:math").await?;
    /// assert_eq!(client.peer().service, "math");
    /// let block = client.heap().allocate(100)?;
    /// let address = u64::from_le_bytes(client.call("where", &block).await?.array(0)?);
    /// // This server lies: the address is not in its heap.
    /// assert!(matches!(client.follow(address, 8), Err(CallError::BadPointer)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`CallError::BadPointer`] unless all of them are in the server's heap.
    pub fn follow(&self, address: u64, len: u64) -> CallResult<PeerView> {
        self.handle.shared.peer_heap.view(address, len).ok_or(CallError::BadPointer)
    }
}

/// Makes attempts to send until one finds room.
async fn when_there_is_room<T>(
    shared: &SharedCalls,
    mut attempt: impl FnMut(&mut CallsState) -> Result<T>,
) -> CallResult<T> {
    loop {
        // Told from here on: an attempt that fails has asked the server to say when there is room.
        let mut room = pin!(shared.room.notified());
        room.as_mut().enable();
        {
            let mut state = lock(&shared.state);
            if let Some(end) = state.slots.ended {
                return Err(end.error());
            }
            match attempt(&mut state) {
                Err(Error::WouldBlock) => {}
                done => {
                    // This attempt may have taken the ring of the doorbell that another one waits for.
                    shared.room.notify_waiters();
                    return done.map_err(CallError::from);
                }
            }
        }
        room.await;
    }
}

/// A call in progress, to be awaited. Dropping it gives the call up: the server still executes it, and its result is dropped.
///
/// ```
/// use partywall::asynchronous::{AsyncCallClient, AsyncOngoing};
/// use partywall::rpc::{CallError, CallServer};
///
/// /// Begins all calls before it waits for the first.
/// async fn squares(client: &AsyncCallClient, numbers: &[u32]) -> Result<Vec<u32>, CallError> {
///     let mut calls: Vec<AsyncOngoing> = Vec::new();
///     for number in numbers {
///         calls.push(client.start("square", &number.to_le_bytes()).await?);
///     }
///     let mut squares = Vec::new();
///     for call in calls {
///         squares.push(u32::from_le_bytes(call.await?.array(0)?));
///     }
///     Ok(squares)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("square", |call| {
/// #     Ok(u32::from_le_bytes(call.args().array(0)?).pow(2).to_le_bytes().into())
/// # }).bind(&web, "math")?;
/// let client = AsyncCallClient::connect("web:math").await?;
/// assert_eq!(squares(&client, &[2, 3]).await?, [4, 9]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a call is given up when this is dropped"]
pub struct AsyncOngoing {
    handle: Arc<ClientHandle>,
    id: u32,
    position: u64,
    is_over: bool,
}

impl Future for AsyncOngoing {
    type Output = CallResult<Reply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<CallResult<Reply>> {
        if self.is_over {
            let taken = Error::Invalid("the result of this call was taken before".into());
            return Poll::Ready(Err(CallError::Connection(taken)));
        }
        let (handle, id) = (Arc::clone(&self.handle), self.id);
        let mut state = lock(&handle.shared.state);
        let outcome = state.slots.take_answer(id).or_else(|| {
            handle.shared.receive(&mut state);
            state.slots.take_answer(id)
        });
        let result = match (outcome, state.slots.ended) {
            (Some(outcome), _) => {
                self.is_over = true;
                wake(state);
                Reply::held_by(outcome, || handle)
            }
            (None, Some(end)) => {
                let seen = state.sender.tx.is_taken(self.position);
                wake(state);
                Err(match end.error() {
                    CallError::Dead { .. } => CallError::Dead { seen },
                    CallError::Closed { .. } => CallError::Closed { seen },
                    other => other,
                })
            }
            (None, None) => {
                if let Err(e) = check_task(&handle.shared) {
                    wake(state);
                    return Poll::Ready(Err(e));
                }
                let before = state.wakers.insert(id, cx.waker().clone());
                wake(state);
                drop(before);
                return Poll::Pending;
            }
        };
        Poll::Ready(result)
    }
}

impl Drop for AsyncOngoing {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut state = lock(&self.handle.shared.state);
        let _waker = state.wakers.remove(&self.id);
        match state.slots.take_answer(self.id) {
            None => state.slots.abandon(self.id),
            Some(ReceivedReply { held: Some(address), .. }) => state.sender.release(address, true),
            Some(_) => {}
        }
        drop(state);
    }
}
