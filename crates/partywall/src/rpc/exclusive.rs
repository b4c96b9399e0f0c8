//! A client that one thread holds for many calls.

use super::client::CallClient;
use super::driver::{ClientCore, Held, kept_here};
use super::error::CallError;
use super::method::Method;
use super::reply::Reply;
use super::sender::prepare;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

type CallResult<T> = std::result::Result<T, CallError>;

/// A [`CallClient`] that this thread holds for a series of calls ([`CallClient::exclusive`]). Calls through this value take no lock.
///
/// Other threads that use the client wait. They continue when this thread waits for an answer that does not arrive at once, when it executes a call
/// back, or when it drops this value. So hold the client for a series of calls, and not while the thread does other work.
///
/// While this value exists, calls that the same thread makes through the [`CallClient`] itself fail with [`CallError::Refused`]. Replies may be
/// dropped at any time. The server gets their memory back with the next call through this value, or when this value is dropped.
///
/// ```
/// use partywall::rpc::{CallClient, CallServer};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("echo", |call| Ok(call.args().to_vec().into())).bind(&web, "math")?;
/// let client = CallClient::connect("web:math")?;
/// let mut held = client.exclusive()?;
/// assert_eq!(held.call("echo", b"one")?.to_vec(), b"one");
/// // Several calls under way, answered in order.
/// for word in [b"two", b"six"] {
///     held.start("echo", word)?;
/// }
/// let mut answers = Vec::new();
/// while let Some(reply) = held.wait_next() {
///     answers.push(reply?.to_vec());
/// }
/// assert_eq!(answers, [b"two", b"six"]);
/// drop(held);
/// client.call("echo", &[])?; // Any thread again.
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ExclusiveClient<'a> {
    core: &'a Arc<ClientCore>,
    /// `None` while a call is under way.
    state: Option<Held<'a>>,
    /// Calls that were begun and not waited for, the oldest first.
    begun: VecDeque<BegunCall>,
}

#[derive(Clone, Copy)]
struct BegunCall {
    id: u32,
    position: u64,
    deadline: Option<Instant>,
}

impl fmt::Debug for ExclusiveClient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExclusiveClient").field("core", self.core).field("begun", &self.begun.len()).finish()
    }
}

impl CallClient {
    /// Holds the client for many calls of this thread.
    ///
    /// # Errors
    /// [`CallError::Refused`] if this thread holds it already.
    pub fn exclusive(&self) -> CallResult<ExclusiveClient<'_>> {
        let core = self.core();
        let state = core.enter_unless_kept().ok_or_else(kept_here)?;
        core.keep(&state);
        Ok(ExclusiveClient { core, state: Some(state), begun: VecDeque::new() })
    }
}

impl<'a> ExclusiveClient<'a> {
    /// Lets the core act with the lock, which may release it for a time.
    #[inline]
    fn with<T>(&mut self, act: impl FnOnce(&'a ClientCore, Held<'a>) -> (Held<'a>, T)) -> T {
        let core = self.core;
        // It is gone after a panic.
        let state = self.state.take().unwrap_or_else(|| core.enter());
        let (state, done) = act(core, core.resume(state));
        core.keep(&state);
        self.state = Some(state);
        done
    }

    /// As [`CallClient::call`].
    ///
    /// # Errors
    /// As [`CallClient::call`].
    #[inline]
    pub fn call(&mut self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Reply> {
        self.call_by(self.core.deadline(None), method.into(), arguments)
    }

    /// As [`CallClient::call_within`].
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn call_within(&mut self, longest: Duration, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Reply> {
        self.call_by(self.core.deadline(Some(longest)), method.into(), arguments)
    }

    #[inline]
    fn call_by(&mut self, deadline: Option<Instant>, method: Method, arguments: &[u8]) -> CallResult<Reply> {
        let prepared = prepare(&self.core.heap, arguments)?;
        let outcome = self.with(|core, state| core.call(state, deadline, method.number(), prepared))?;
        Reply::held_by(outcome, || Arc::clone(self.core))
    }

    /// Begins a call. [`ExclusiveClient::wait_next`] waits for its result. If 512 calls of the connection are unanswered, this waits
    /// until an answer arrives.
    ///
    /// # Errors
    /// As [`CallClient::call`].
    #[inline]
    pub fn start(&mut self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<()> {
        let deadline = self.core.deadline(None);
        let method = method.into().number();
        let prepared = prepare(&self.core.heap, arguments)?;
        let (id, position) = self.with(|core, state| core.begin(state, deadline, method, prepared))?;
        self.begun.push_back(BegunCall { id, position, deadline });
        Ok(())
    }

    /// Waits for the result of the oldest call that [`ExclusiveClient::start`] has begun. `None` if there is none. Calls that are not waited
    /// for are given up when this is dropped: the server still executes them.
    #[inline]
    pub fn wait_next(&mut self) -> Option<CallResult<Reply>> {
        let BegunCall { id, position, deadline } = self.begun.pop_front()?;
        let outcome = self.with(|core, state| core.finish_or_give_up(state, deadline, id, position));
        Some(outcome.and_then(|outcome| Reply::held_by(outcome, || Arc::clone(self.core))))
    }
}

impl Drop for ExclusiveClient<'_> {
    fn drop(&mut self) {
        let state = self.state.take().unwrap_or_else(|| self.core.enter());
        let mut state = self.core.resume(state);
        for call in &self.begun {
            state.give_up(call.id);
        }
    }
}
