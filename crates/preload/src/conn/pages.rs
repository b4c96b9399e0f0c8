//! The memory of a connection that carries rings.

use super::ring_path::RingPath;
use crate::local::LocalState;
use partywall_shm::half::{ReaderView, WriterView};
use partywall_shm::layout::SocketPage;
use partywall_shm::sync::{Own, Peer};

/// A connection that carries rings, seen from this process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages<'a> {
    pub(super) local: &'static LocalState,
    pub(super) path: &'a RingPath,
    pub(super) own: &'static SocketPage<Own>,
    pub(super) peer: &'static SocketPage<Peer>,
}

impl Pages<'_> {
    /// The direction that is read here, seen without holding it.
    #[inline]
    pub(super) fn reading(&self) -> ReaderView<'static, Peer> {
        ReaderView { own: &self.own.control.rx, peer: &self.peer.control.tx }
    }

    /// The direction that is written here, seen without holding it.
    #[inline]
    pub(super) fn writing(&self) -> WriterView<'static, Peer> {
        WriterView { own: &self.own.control.tx, peer: &self.peer.control.rx }
    }

    /// Whether the peer has said of either direction that it ends.
    #[inline]
    pub(super) fn has_said_end(&self) -> bool {
        !self.reading().is_written() || !self.writing().is_read()
    }

    /// Bytes of ours that wait in the ring for the peer.
    pub(super) fn unsent(&self) -> u64 {
        self.writing().unread(self.local.own.ring_size())
    }
}
