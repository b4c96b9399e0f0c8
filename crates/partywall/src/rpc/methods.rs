//! The functions of one side of a connection, and how one of them is executed.

use super::answer::CallAnswer;
use super::calling_peer::CallingPeer;
use super::error::CallError;
use super::incoming::{CallsBack, IncomingCall};
use super::method::Method;
use super::view::PeerView;
use crate::{Error, Result};
use partywall_shm::call::CallRecord;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

type CallResult<T> = std::result::Result<T, CallError>;
pub(crate) type Function = dyn Fn(&IncomingCall<'_>) -> CallResult<CallAnswer> + Send + Sync;

/// Pointers that a call may follow, unless a builder says otherwise.
pub(crate) const MOST_FOLLOWS: u64 = 1 << 16;

/// Functions by the numbers of their names.
#[derive(Default, Clone)]
pub(crate) struct Methods {
    functions: BTreeMap<u32, Arc<Function>>,
    /// Two methods have one number. The text is empty if neither has a name.
    clash: Option<String>,
}

impl fmt::Debug for Methods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.functions.len())
    }
}

impl Methods {
    pub(crate) fn add(&mut self, method: Method, name: Option<&str>, function: Arc<Function>) {
        if self.functions.insert(method.number(), function).is_none() {
            return;
        }
        let clash = self.clash.get_or_insert_default();
        if let Some(name) = name.filter(|_| clash.is_empty()) {
            *clash = format!("`{name}` has the number of another method: rename one of them");
        }
    }

    /// Fails if two methods have the same number.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.clash {
            None => Ok(()),
            Some(clash) if clash.is_empty() => {
                Err(Error::Invalid("two methods have the same number: give each its own".into()))
            }
            Some(clash) => Err(Error::Invalid(clash.clone())),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Executes the function that a record names, on this thread.
    #[inline]
    pub(crate) fn execute(
        &self,
        record: &CallRecord,
        peer: &Arc<CallingPeer>,
        max_follows: u64,
        back: Option<&dyn CallsBack>,
    ) -> CallResult<CallAnswer> {
        let function = self.functions.get(&record.method).ok_or(CallError::UnknownMethod)?;
        let args = PeerView::from_record(&record.bytes, &peer.peer_heap);
        // By reference, and so is the result: a copy of either would wait for the stores that have just made it.
        let args = args.as_ref().ok_or(CallError::BadPointer)?;
        let follows = AtomicU64::new(max_follows);
        let call = IncomingCall {
            args: Cow::Borrowed(args),
            client: Cow::Borrowed(peer),
            method: record.method,
            follows,
            back,
            #[cfg(feature = "tokio")]
            later: None,
        };
        let mut result = Err(CallError::Panicked);
        let _ = catch_unwind(AssertUnwindSafe(|| result = function(&call)));
        result
    }
}
