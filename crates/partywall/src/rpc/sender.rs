//! The writing half of a connection of calls: what client and server have in common.

use super::heap::{Block, Heap};
use crate::tx::StreamTx;
use crate::{Error, Result};
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;

/// The version of the protocol of calls (protocol K3.1).
const VERSION: u32 = 1;

/// A record without a call.
fn plain(kind: RecordKind, id: u32, bytes: CallBytes) -> CallRecord {
    CallRecord { kind, id, method: 0, status: 0, bytes }
}

/// The first record of a side.
fn hello() -> CallRecord {
    CallRecord { method: VERSION, ..plain(RecordKind::Hello, 0, CallBytes::EMPTY) }
}

/// Judges the first record of the peer.
pub(crate) fn check_hello(record: &CallRecord) -> Result<()> {
    if *record == hello() { Ok(()) } else { Err(Error::Corrupt(Corrupt::BadRecord)) }
}

/// Sends records, and before each what the peer must know of this side's heap to understand it.
#[derive(Debug)]
pub(crate) struct CallSender {
    pub(crate) tx: StreamTx,
    heap: Heap,
    /// Segments of the heap that the peer has been told of.
    announced: usize,
    /// Addresses of the peer's blocks that are released, and whose records found no room.
    unreleased: Vec<u64>,
}

impl CallSender {
    /// A sender that does not wait for room: sending fails with [`Error::WouldBlock`] where there is none.
    pub(crate) fn new(mut tx: StreamTx, heap: Heap) -> Self {
        tx.core.waiter.nonblocking = true;
        Self { tx, heap, announced: 0, unreleased: Vec::new() }
    }

    pub(crate) fn hello(&mut self) -> Result<()> {
        self.tx.put_record(&hello()).map(drop)
    }

    /// Sends a record, and returns the byte of the stream where it begins.
    #[inline]
    pub(crate) fn send(&mut self, record: &CallRecord) -> Result<u64> {
        if self.announced < self.heap.memory.count() || !self.unreleased.is_empty() {
            self.send_owed()?;
        }
        self.tx.put_record(record)
    }

    #[cold]
    fn send_owed(&mut self) -> Result<()> {
        for notice in self.heap.memory.notices(self.announced) {
            let bytes = CallBytes::Reference { address: notice.address, len: notice.size };
            self.tx.put_record(&plain(RecordKind::Segment, notice.number, bytes))?;
            self.announced += 1;
        }
        while let Some(address) = self.unreleased.last().copied() {
            self.tx.put_record(&release_of(address))?;
            self.unreleased.pop();
        }
        Ok(())
    }

    /// Gives a block of the peer's back. Where there is no room now, or unless it `may_send`, the record goes before the next one.
    pub(crate) fn release(&mut self, address: u64, may_send: bool) {
        // An error that is not the lack of room ends the connection, and its end gives all blocks back.
        if !may_send || matches!(self.tx.put_record(&release_of(address)), Err(Error::WouldBlock)) {
            self.unreleased.push(address);
        }
    }
}

fn release_of(address: u64) -> CallRecord {
    plain(RecordKind::Release, 0, CallBytes::Reference { address, len: 0 })
}

/// How the bytes of a call or a reply are sent: in the record, where they are in the heap, or in a block that they are copied to.
#[inline]
pub(crate) fn prepare(heap: &Heap, bytes: &[u8]) -> Result<(CallBytes, Option<Block>)> {
    if let Some(inline) = CallBytes::inline(bytes) {
        return Ok((inline, None));
    }
    let len = bytes.len() as u64;
    if heap.holds(bytes) {
        return Ok((CallBytes::Reference { address: bytes.as_ptr().addr() as u64, len }, None));
    }
    let mut block = heap.allocate(bytes.len())?;
    block.copy_from_slice(bytes);
    Ok((CallBytes::Reference { address: block.address(), len }, Some(block)))
}
