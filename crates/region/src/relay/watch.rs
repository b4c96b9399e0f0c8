//! Looking after a half whose rings may get lost (protocol P6).

use crate::PeerRegion;
use partywall_shm::sync::Ordering;
use partywall_shm::wake::AWAKE;

/// Both regions of a direction, and which of its halves is looked after.
#[derive(Debug)]
pub struct DirectionWatch {
    /// The region of the half that is looked after.
    half: PeerRegion,
    /// The region of its peer.
    peer: PeerRegion,
    reads: bool,
}

impl DirectionWatch {
    /// Looks after the half that reads, whose wish is in `half`, for bytes of `peer`.
    pub fn reader(half: PeerRegion, peer: PeerRegion) -> Self {
        Self { half, peer, reads: true }
    }

    /// Looks after the half that writes, for room that `peer` makes.
    pub fn writer(half: PeerRegion, peer: PeerRegion) -> Self {
        Self { half, peer, reads: false }
    }

    /// Whether it sleeps although what it waits for is there. All values are hostile, and none can do more than cost a ring.
    pub(super) fn oversleeps(&self) -> bool {
        let (half, peer) = (self.half.page(), self.peer.page());
        let (wish, cursor) = if self.reads {
            (&half.rx.control.data_wanted, &peer.tx.cursor.tail)
        } else {
            (&half.tx.control.space_wanted, &peer.rx.cursor.head)
        };
        let wish = wish.load(Ordering::Relaxed);
        wish != AWAKE && cursor.load(Ordering::Relaxed) > wish
    }
}
