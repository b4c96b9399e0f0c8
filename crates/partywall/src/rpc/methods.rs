//! The functions of one side of a connection, and how one of them is executed.

use super::conversation::CallsBack;
use super::error::{CallError, CallStatus};
use super::heap::{Block, Heap};
use super::incoming::{AnswerBytes, CallAnswer, IncomingCall};
use super::method::Method;
use super::sender::prepare;
use super::view::{PeerHeap, PeerView};
use crate::{Error, PeerInfo, Result};
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};
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
        let args = PeerView::from_record(record.bytes, &peer.peer_heap).ok_or(CallError::BadPointer)?;
        let follows = AtomicU64::new(max_follows);
        let call = IncomingCall { args, client: Cow::Borrowed(peer), method: record.method, follows, back };
        catch_unwind(AssertUnwindSafe(|| function(&call))).unwrap_or(Err(CallError::Panicked))
    }
}

/// The side whose calls are executed: what they all share.
pub(crate) struct CallingPeer {
    pub(crate) info: PeerInfo,
    /// This side's heap, for results.
    pub(crate) heap: Heap,
    pub(crate) peer_heap: PeerHeap,
}

impl CallingPeer {
    fn prepare(&self, answer: CallAnswer) -> CallResult<(CallBytes, Option<Block>)> {
        match answer.bytes {
            AnswerBytes::Inline(bytes) => Ok((bytes, None)),
            AnswerBytes::Copied(bytes) => Ok(prepare(&self.heap, &bytes)?),
            AnswerBytes::Block(block) => {
                if !self.heap.holds(&block) {
                    return Err(CallError::Refused(
                        "the function has answered with memory of another connection".into(),
                    ));
                }
                Ok((CallBytes::Reference { address: block.address(), len: block.len() as u64 }, Some(block)))
            }
        }
    }

    /// The record that answers a call, and the block that it refers to.
    #[inline]
    pub(crate) fn reply(&self, id: u32, result: CallResult<CallAnswer>) -> (CallRecord, Option<Block>) {
        let prepared = result.and_then(|answer| self.prepare(answer));
        let (status, code, (bytes, lent)) = match prepared {
            Ok(prepared) => (CallStatus::Done, 0, prepared),
            Err(error) => {
                let (status, code, text) = CallStatus::from_error(error);
                // A text that finds no memory is cut.
                let short = || (inline_text(&text), None);
                (status, code, prepare(&self.heap, text.as_bytes()).unwrap_or_else(|_| short()))
            }
        };
        (CallRecord { kind: RecordKind::Reply, id, method: code, status: status as u16, bytes }, lent)
    }
}

/// The beginning of a text, as much of it as a record carries.
pub(crate) fn inline_text(text: &str) -> CallBytes {
    let cut = &text.as_bytes()[..text.floor_char_boundary(partywall_shm::call::INLINE)];
    CallBytes::inline(cut).unwrap_or(CallBytes::EMPTY)
}
