//! Connecting a client whose calls are futures, with the functions that its server may call back.

use super::client::{AsyncCallClient, ClientHandle};
use super::functions::TaskMethods;
use super::shared_calls::{CallsState, SharedCalls, TaskFunctions, drive};
use crate::asynchronous::blocking::blocking;
use crate::asynchronous::register;
use crate::rpc::WINDOW;
use crate::rpc::answer::CallAnswer;
use crate::rpc::calling_peer::CallingPeer;
use crate::rpc::client::{CallClientBuilder, ClientParts};
use crate::rpc::driver::CallReceiver;
use crate::rpc::error::CallError;
use crate::rpc::incoming::IncomingCall;
use crate::rpc::slots::Slots;
use crate::{Domain, Error, Result};
use rustix::fd::AsFd;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

type CallResult<T> = std::result::Result<T, CallError>;

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
        Ok(AsyncCallClient::of(ClientHandle { shared, task, timeout, peer }))
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
}
