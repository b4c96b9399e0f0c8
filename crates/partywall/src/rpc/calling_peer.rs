//! The side whose calls this side executes, and the records that answer them.

use super::answer::{AnswerBytes, CallAnswer};
use super::error::CallError;
use super::heap::{Block, Heap};
use super::sender::{inline_text, prepare};
use super::status::CallStatus;
use super::view::PeerHeap;
use crate::PeerInfo;
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};

type CallResult<T> = Result<T, CallError>;

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
        let done = (CallStatus::Done as u16, 0);
        let record = |(status, method), bytes| CallRecord { kind: RecordKind::Reply, id, method, status, bytes };
        // Most answers, without a copy of what surrounds the bytes: it would wait for the stores that have just made it.
        if let Ok(CallAnswer { bytes: AnswerBytes::Inline(CallBytes::Inline(bytes, len)) }) = &result {
            return (record(done, CallBytes::Inline(*bytes, *len)), None);
        }
        let prepared = result.and_then(|answer| self.prepare(answer));
        let (outcome, (bytes, lent)) = match prepared {
            Ok(prepared) => (done, prepared),
            Err(error) => {
                let (status, code, text) = CallStatus::from_error(error);
                // A text that finds no memory is cut.
                let short = || (inline_text(&text), None);
                ((status as u16, code), prepare(&self.heap, text.as_bytes()).unwrap_or_else(|_| short()))
            }
        };
        (record(outcome, bytes), lent)
    }
}
