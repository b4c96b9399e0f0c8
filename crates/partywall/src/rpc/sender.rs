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

/// The first record of a side, which says whether it is a client that takes calls back.
fn hello(takes_calls: bool) -> CallRecord {
    let record = plain(RecordKind::Hello, 0, CallBytes::EMPTY);
    CallRecord { method: VERSION, status: takes_calls.into(), ..record }
}

/// Judges the first record of the peer. Returns whether the peer takes calls.
pub(crate) fn check_hello(record: &CallRecord) -> Result<bool> {
    let takes_calls = record.status == 1;
    if *record == hello(takes_calls) { Ok(takes_calls) } else { Err(Error::Corrupt(Corrupt::BadRecord)) }
}

/// Sends records, and before each what the peer must know of this side's heap to understand it.
#[derive(Debug)]
pub(crate) struct CallSender {
    pub(crate) tx: StreamTx,
    heap: Heap,
    /// Segments of the heap that the peer has been told of.
    announced: usize,
    /// Records that found no room, and go before the next one: releases of the peer's blocks, and refusals of calls back.
    owed: Vec<CallRecord>,
}

impl CallSender {
    /// A sender that does not wait for room: sending fails with [`Error::WouldBlock`] where there is none.
    pub(crate) fn new(mut tx: StreamTx, heap: Heap) -> Self {
        tx.core.waiter.nonblocking = true;
        Self { tx, heap, announced: 0, owed: Vec::new() }
    }

    pub(crate) fn hello(&mut self, takes_calls: bool) -> Result<()> {
        self.tx.put_record(&hello(takes_calls)).map(drop)
    }

    /// Sends a record, and returns the byte of the stream where it begins.
    #[inline]
    pub(crate) fn send(&mut self, record: &CallRecord) -> Result<u64> {
        if self.announced < self.heap.memory.count() || !self.owed.is_empty() {
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
        while let Some(record) = self.owed.last() {
            self.tx.put_record(record)?;
            self.owed.pop();
        }
        Ok(())
    }

    /// Gives a block of the peer's back. Where there is no room now, or unless it `may_send`, the record goes before the next one.
    pub(crate) fn release(&mut self, address: u64, may_send: bool) {
        self.owe(release_of(address), may_send);
    }

    /// Sends a record that refers to no memory of this side. Where there is no room now, or unless it `may_send`, it goes before the next one.
    pub(crate) fn owe(&mut self, record: CallRecord, may_send: bool) {
        // An error that is not the lack of room ends the connection, and its end gives all blocks back.
        if !may_send || matches!(self.tx.put_record(&record), Err(Error::WouldBlock)) {
            self.owed.push(record);
        }
    }

    /// Replies that have found no room yet.
    pub(crate) fn owed_replies(&self) -> usize {
        self.owed.iter().filter(|record| record.kind == RecordKind::Reply).count()
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

/// The beginning of a text, as much of it as a record carries.
pub(crate) fn inline_text(text: &str) -> CallBytes {
    let cut = &text.as_bytes()[..text.floor_char_boundary(partywall_shm::call::INLINE)];
    CallBytes::inline(cut).unwrap_or(CallBytes::EMPTY)
}
