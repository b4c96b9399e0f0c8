//! Functions that are futures, of a server or of a client, and how one of them is executed.

use crate::rpc::answer::CallAnswer;
use crate::rpc::calling_peer::CallingPeer;
use crate::rpc::error::CallError;
use crate::rpc::incoming::{CallsBackLater, IncomingCall};
use crate::rpc::method::Method;
use crate::rpc::view::PeerView;
use crate::{Error, Result};
use partywall_shm::call::CallRecord;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::{Context, Poll};

type CallResult<T> = std::result::Result<T, CallError>;
type Answering = Pin<Box<dyn Future<Output = CallResult<CallAnswer>> + Send>>;
type TaskFunction = dyn Fn(IncomingCall<'static>) -> Answering + Send + Sync;

/// Functions by the numbers of their names.
#[derive(Default, Clone)]
pub(super) struct TaskMethods {
    functions: BTreeMap<u32, Arc<TaskFunction>>,
    clash: Option<String>,
}

impl fmt::Debug for TaskMethods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.functions.len())
    }
}

impl TaskMethods {
    pub(super) fn add<F, A>(&mut self, name: &str, function: F)
    where
        F: Fn(IncomingCall<'static>) -> A + Send + Sync + 'static,
        A: Future<Output = CallResult<CallAnswer>> + Send + 'static,
    {
        let boxed = move |call| Box::pin(function(call)) as Answering;
        if self.functions.insert(Method::named(name).number(), Arc::new(boxed)).is_some() {
            self.clash = Some(format!("`{name}` has the number of another method: rename one of them"));
        }
    }

    /// Fails if two methods have the same number.
    pub(super) fn check(&self) -> Result<()> {
        self.clash.as_ref().map_or(Ok(()), |clash| Err(Error::Invalid(clash.clone())))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Executes the function that a record names.
    pub(super) async fn execute(
        &self,
        record: &CallRecord,
        peer: &Arc<CallingPeer>,
        max_follows: u64,
        later: Option<Arc<dyn CallsBackLater>>,
    ) -> CallResult<CallAnswer> {
        let function = self.functions.get(&record.method).ok_or(CallError::UnknownMethod)?;
        let args = PeerView::from_record(&record.bytes, &peer.peer_heap).ok_or(CallError::BadPointer)?;
        let (client, follows) = (Cow::Owned(Arc::clone(peer)), AtomicU64::new(max_follows));
        let args = Cow::Owned(args);
        let call = IncomingCall { args, client, method: record.method, follows, back: None, later };
        let answering = catch_unwind(AssertUnwindSafe(|| function(call))).map_err(|_| CallError::Panicked)?;
        Caught(answering).await
    }
}

/// A function's future, whose panic is its answer.
struct Caught(Answering);

impl Future for Caught {
    type Output = CallResult<CallAnswer>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(cx)));
        polled.unwrap_or(Poll::Ready(Err(CallError::Panicked)))
    }
}
