//! The server's answers to one client, and the memory that they lend.

use super::answer::CallAnswer;
use super::calling_peer::CallingPeer;
use super::error::CallError;
use super::heap::Block;
use super::sender::CallSender;
use crate::{Error, Result};
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;
use std::collections::HashMap;

type CallResult<T> = std::result::Result<T, CallError>;

/// The sending half to one client.
pub(crate) struct ReplySide {
    sender: CallSender,
    /// Results that the client reads in place, by address. They come back by a *release* record, or with the end of the connection.
    lent: HashMap<u64, Block>,
}

impl ReplySide {
    pub(crate) fn new(sender: CallSender) -> Self {
        Self { sender, lent: HashMap::new() }
    }

    /// Takes a record about memory. No other kind is left for a client to send.
    pub(crate) fn take(&mut self, client: &CallingPeer, record: &CallRecord) -> Result<()> {
        match (record.kind, record.bytes) {
            (RecordKind::Release, CallBytes::Reference { address, .. }) => {
                // To release what is not lent, or twice, is a lie (protocol K7).
                self.lent.remove(&address).map(drop).ok_or(Error::Corrupt(Corrupt::BadRecord))
            }
            (RecordKind::Segment, CallBytes::Reference { address, len }) => {
                client.peer_heap.admit(record.id, address, len)
            }
            _ => Err(Corrupt::BadRecord.into()),
        }
    }

    #[inline]
    pub(crate) fn answer(&mut self, client: &CallingPeer, id: u32, result: CallResult<CallAnswer>) -> Result<()> {
        let (record, lent) = client.reply(id, result);
        if let Some(block) = lent {
            let before = self.lent.insert(block.address(), block);
            debug_assert!(before.is_none(), "the books give each address to one block at a time");
        }
        self.send(&record).map(drop)
    }

    /// Sends a record. A client whose ring has no room for it has too many calls under way (protocol K4.1).
    #[inline]
    pub(crate) fn send(&mut self, record: &CallRecord) -> Result<u64> {
        match self.sender.send(record) {
            Err(Error::WouldBlock) => Err(Corrupt::BadRecord.into()),
            other => other,
        }
    }

    /// Whether the client has taken the record that begins at this byte of the stream.
    pub(crate) fn is_taken(&mut self, position: u64) -> bool {
        self.sender.tx.is_taken(position)
    }
}
