//! A call as the function that executes it sees it.

use super::calling_peer::CallingPeer;
use super::error::CallError;
use super::heap::Heap;
use super::method::Method;
use super::view::PeerView;
use crate::PeerInfo;
use std::borrow::Cow;
use std::fmt;
#[cfg(feature = "tokio")]
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

type CallResult<T> = std::result::Result<T, CallError>;

/// A call, as the function that executes it sees it.
///
/// ```
/// use partywall::rpc::{CallError, CallClient, CallServer};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// // A list in the client's heap: each node is a value and the address of the next node.
/// let _server = CallServer::builder().method("sum", |call| {
///     let (mut next, mut sum) = (u64::from_le_bytes(call.args().array(0)?), 0);
///     while next != 0 {
///         let node = call.follow(next, 16)?;
///         sum += u64::from_le_bytes(node.array(0)?);
///         next = u64::from_le_bytes(node.array(8)?);
///     }
///     Ok(sum.to_le_bytes().into())
/// }).bind(&web, "lists")?;
///
/// let client = CallClient::connect("web:lists")?;
/// let (mut first, mut nodes) = (0u64, Vec::new());
/// for value in 1..=10u64 {
///     let mut node = client.heap().allocate(16)?;
///     node[..8].copy_from_slice(&value.to_le_bytes());
///     node[8..].copy_from_slice(&first.to_le_bytes());
///     first = node.address();
///     nodes.push(node);
/// }
/// let reply = client.call("sum", &first.to_le_bytes())?;
/// assert_eq!(u64::from_le_bytes(reply.array(0)?), 55);
///
/// // A list that leads back to itself ends at the limit of pointers.
/// nodes[0][8..].copy_from_slice(&first.to_le_bytes());
/// assert!(matches!(client.call("sum", &first.to_le_bytes()), Err(CallError::BadPointer)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct IncomingCall<'a> {
    pub(crate) args: Cow<'a, PeerView>,
    pub(crate) client: Cow<'a, Arc<CallingPeer>>,
    pub(crate) method: u32,
    /// Pointers that may still be followed.
    pub(crate) follows: AtomicU64,
    /// `None` where the function cannot call back.
    pub(crate) back: Option<&'a dyn CallsBack>,
    /// `None` except in a server of tasks.
    #[cfg(feature = "tokio")]
    pub(crate) later: Option<Arc<dyn CallsBackLater>>,
}

impl fmt::Debug for IncomingCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncomingCall").field("method", &self.method).field("args", &self.args).finish_non_exhaustive()
    }
}

impl IncomingCall<'_> {
    /// The arguments.
    pub fn args(&self) -> &PeerView {
        &self.args
    }

    /// The called method.
    pub fn method(&self) -> Method {
        Method::numbered(self.method)
    }

    /// The calling side.
    pub fn peer(&self) -> &PeerInfo {
        &self.client.info
    }

    /// The heap of this connection, for results that the client is to read in place.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = CallServer::builder().method("ones", |call| {
    ///     let len = u32::from_le_bytes(call.args().array(0)?);
    ///     let mut ones = call.heap().allocate(len as usize)?;
    ///     ones.fill(1);
    ///     Ok(ones.into())
    /// }).bind(&web, "math")?;
    /// let reply = CallClient::connect("web:math")?.call("ones", &1000u32.to_le_bytes())?;
    /// assert_eq!(reply.to_vec(), [1; 1000]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn heap(&self) -> &Heap {
        &self.client.heap
    }

    /// `len` bytes at an address of the client, in its heap.
    ///
    /// # Errors
    /// [`CallError::BadPointer`] unless all of them are in the client's heap, or if this call has followed the most pointers that are allowed
    /// ([`CallServerBuilder::max_follows`](super::CallServerBuilder::max_follows)).
    pub fn follow(&self, address: u64, len: u64) -> CallResult<PeerView> {
        let less = |left: u64| left.checked_sub(1);
        let may_follow = self.follows.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        may_follow.map_err(|_| CallError::BadPointer)?;
        self.client.peer_heap.view(address, len).ok_or(CallError::BadPointer)
    }

    /// Calls a function of the client ([`CallClientBuilder::method`](super::CallClientBuilder::method)) and waits for the function's result. In a
    /// client with threads, the thread that waits for this call executes the function. The client may change the bytes of the result after this call
    /// has been answered.
    ///
    /// Other calls of the client that arrive in the meantime are executed after this call. A call may call back 65,536 times.
    ///
    /// ```
    /// use partywall::rpc::{CallClient, CallServer};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = CallServer::builder().method("copy", |call| {
    ///     for part in 1..=3u8 {
    ///         call.call_back("progress", &[part])?;
    ///     }
    ///     Ok(().into())
    /// }).bind(&web, "files")?;
    ///
    /// let (sender, parts) = std::sync::mpsc::channel();
    /// let client = CallClient::builder().method("progress", move |call| {
    ///     let _ = sender.send(call.args().to_vec());
    ///     Ok(().into())
    /// }).connect(&web, "web:files")?;
    /// client.call("copy", &[])?;
    /// drop(client);
    /// assert_eq!(parts.iter().collect::<Vec<_>>(), [[1], [2], [3]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::call`](super::CallClient::call), with the sides exchanged. [`CallError::Refused`] if the client has no functions or has
    /// given up its call, in a notice, in a call that [`IncomingCall::to_owned`] has copied, and in a server of tasks.
    pub fn call_back(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<PeerView> {
        self.call_back_by(None, method.into(), arguments)
    }

    /// Calls a function of the client as [`IncomingCall::call_back`] does, and waits at most `longest` for the result. After [`CallError::TimedOut`]
    /// the client may still execute the function. This call cannot call back again until the client has answered.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallError, CallServer};
    /// # use std::time::Duration;
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = CallServer::builder().method("ask", |call| {
    ///     match call.call_back_within(Duration::from_millis(1), "slow", &[]) {
    ///         Err(CallError::TimedOut) => Ok(vec![0].into()),
    ///         answer => Ok(answer?.to_vec().into()),
    ///     }
    /// }).bind(&web, "math")?;
    /// let client = CallClient::builder().method("slow", |_| {
    ///     std::thread::sleep(Duration::from_millis(50));
    ///     Ok(vec![1].into())
    /// }).connect(&web, "web:math")?;
    /// assert_eq!(client.call("ask", &[])?.to_vec(), [0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`IncomingCall::call_back`].
    pub fn call_back_within(
        &self,
        longest: Duration,
        method: impl Into<Method>,
        arguments: &[u8],
    ) -> CallResult<PeerView> {
        self.call_back_by(Instant::now().checked_add(longest), method.into(), arguments)
    }

    /// Calls a function of the client from a server of tasks, as [`IncomingCall::call_back`] does from a server with threads. The task waits, and no
    /// thread is blocked. Dropping the future, as a time limit does, gives the call back up. The client may still execute the function, and this call
    /// cannot call back again until the client has answered. The calls back of one call are made one after the other.
    ///
    /// ```
    /// use partywall::asynchronous::{AsyncCallClient, AsyncCallServer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = AsyncCallServer::builder()
    ///     .method("sign", |call| async move { Ok(call.call_back_later("password", &[]).await?.to_vec().into()) })
    ///     .bind(&web, "notary")
    ///     .await?;
    /// let client = AsyncCallClient::builder().method("password", |_| async { Ok(vec![7; 100].into()) });
    /// let client = client.connect(&web, "web:notary").await?;
    /// assert_eq!(client.call("sign", &[]).await?.to_vec(), [7; 100]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`IncomingCall::call_back`]. [`CallError::Refused`] in a server with threads, and when the function has returned.
    #[cfg(feature = "tokio")]
    pub async fn call_back_later(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<PeerView> {
        let cannot = "calls back of tasks are for a call that a task of its server executes, and for no notice";
        let later = self.later.as_ref().ok_or_else(|| CallError::Refused(cannot.into()))?;
        later.call_back(method.into().number(), arguments).await
    }

    fn call_back_by(&self, deadline: Option<Instant>, method: Method, arguments: &[u8]) -> CallResult<PeerView> {
        let cannot = "calls back are for a call that its server's own thread executes, and for no notice";
        let back = self.back.ok_or_else(|| CallError::Refused(cannot.into()))?;
        back.call_back(&self.client, method.number(), arguments, deadline)
    }

    /// The same call without a borrow, for a function that passes it to another thread. The client may change its arguments when the call
    /// is answered. It cannot call back.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let _server = CallServer::builder().method("len", |call| {
    ///     let call = call.to_owned();
    ///     let len = std::thread::spawn(move || call.args().len() as u64).join();
    ///     Ok(len.unwrap_or(0).to_le_bytes().into())
    /// }).bind(&web, "math")?;
    /// let reply = CallClient::connect("web:math")?.call("len", b"abc")?;
    /// assert_eq!(u64::from_le_bytes(reply.array(0)?), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_owned(&self) -> IncomingCall<'static> {
        IncomingCall {
            args: Cow::Owned(PeerView::clone(&self.args)),
            client: Cow::Owned(Arc::clone(&self.client)),
            method: self.method,
            follows: AtomicU64::new(self.follows.load(Ordering::Relaxed)),
            back: None,
            #[cfg(feature = "tokio")]
            later: self.later.clone(),
        }
    }
}

/// A call of a server of tasks, which can call back.
#[cfg(feature = "tokio")]
pub(crate) trait CallsBackLater: Send + Sync {
    fn call_back<'a>(
        &'a self,
        method: u32,
        arguments: &'a [u8],
    ) -> Pin<Box<dyn Future<Output = CallResult<PeerView>> + Send + 'a>>;
}

/// A call that can call back. The trait hides the borrow of the conversation, so that a call may be borrowed for a shorter time.
pub(crate) trait CallsBack: Send + Sync {
    fn call_back(
        &self,
        client: &CallingPeer,
        method: u32,
        arguments: &[u8],
        deadline: Option<Instant>,
    ) -> CallResult<PeerView>;
}
