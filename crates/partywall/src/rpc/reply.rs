//! A reply: as it is received, and as the caller holds it.

use super::error::CallError;
use super::status::CallStatus;
use super::view::{PeerHeap, PeerView};
use partywall_shm::call::{CallBytes, CallRecord};
use partywall_shm::corrupt::Corrupt;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

type CallResult<T> = Result<T, CallError>;

/// A reply that has been received.
pub(crate) struct ReceivedReply {
    pub(crate) status: CallStatus,
    pub(crate) code: u32,
    pub(crate) view: PeerView,
    /// The peer's block that is to be released.
    pub(crate) held: Option<u64>,
}

impl ReceivedReply {
    /// Judges a *reply* record (protocol K5, K7).
    #[inline]
    pub(crate) fn judge(record: &CallRecord, heap: &PeerHeap) -> Result<Self, Corrupt> {
        let status = CallStatus::from_wire(record.status).filter(|status| status.admits(record.method));
        let status = status.ok_or(Corrupt::BadRecord)?;
        let view = PeerView::from_record(&record.bytes, heap).ok_or(Corrupt::BadRecord)?;
        let held = match record.bytes {
            CallBytes::Inline(..) => None,
            CallBytes::Reference { address, .. } => Some(address),
        };
        Ok(Self { status, code: record.method, view, held })
    }
}

/// A client as its replies see it.
pub(crate) trait ReleasesBlocks: fmt::Debug + Send + Sync {
    /// Gives a block of the server's back.
    fn release(&self, address: u64);
}

/// The result of a call. The server keeps its memory until this is dropped.
#[derive(Debug)]
pub struct Reply {
    view: PeerView,
    held: Option<(Arc<dyn ReleasesBlocks>, u64)>,
}

impl Reply {
    /// A reply whose memory this client releases.
    #[inline]
    pub(crate) fn held_by<R: ReleasesBlocks + 'static>(
        outcome: ReceivedReply,
        client: impl FnOnce() -> Arc<R>,
    ) -> CallResult<Self> {
        let ReceivedReply { status, code, view, held } = outcome;
        let reply = Self { view, held: held.map(|address| (client() as Arc<dyn ReleasesBlocks>, address)) };
        match status.error(code, &reply) {
            None => Ok(reply),
            Some(error) => Err(error),
        }
    }

    /// The bytes of the result. The server may change them when this reply has been dropped.
    pub fn view(&self) -> &PeerView {
        &self.view
    }
}

impl Deref for Reply {
    type Target = PeerView;

    fn deref(&self) -> &PeerView {
        &self.view
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some((core, address)) = self.held.take() {
            core.release(address);
        }
    }
}
