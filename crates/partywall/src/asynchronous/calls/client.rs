//! The client of a connection of calls, driven by tokio.

use super::make_room;
use super::shared_calls::{SharedCalls, check_task, wake, when_there_is_room};
use crate::domain::lock;
use crate::rpc::error::CallError;
use crate::rpc::heap::{Block, Heap};
use crate::rpc::method::Method;
use crate::rpc::reply::{ReceivedReply, ReleasesBlocks, Reply};
use crate::rpc::sender::prepare;
use crate::rpc::view::PeerView;
use crate::{Error, PeerInfo};
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::task::AbortHandle;

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
pub(super) struct ClientHandle {
    pub(super) shared: Arc<SharedCalls>,
    pub(super) task: AbortHandle,
    pub(super) timeout: Option<Duration>,
    pub(super) peer: PeerInfo,
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

impl AsyncCallClient {
    pub(super) fn of(handle: ClientHandle) -> Self {
        Self { handle: Arc::new(handle) }
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
            let id = state.slots.open();
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
        let result = match (outcome, state.slots.ended.as_ref().map(|end| end.error())) {
            (Some(outcome), _) => {
                self.is_over = true;
                wake(state);
                Reply::held_by(outcome, || handle)
            }
            (None, Some(error)) => {
                let seen = state.sender.tx.is_taken(self.position);
                wake(state);
                Err(error.with_seen(seen))
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
