//! Looking at the counters of live channels, in their regions.

use crate::session::unexpected;
use crate::{Domain, Error, Result};
use partywall_region::PeerRegion;
use partywall_shm::counters::Snapshot;
use partywall_shm::layout::{Geometry, RegionKind};
use partywall_shm::wire::{Message, Side};
use rustix::fd::AsFd;
use std::sync::atomic::Ordering;

/// The control page of one side of a live channel, mapped read-only. Reading it disturbs nobody.
#[derive(Debug)]
pub struct StatPage {
    region: PeerRegion,
    side: Side,
}

impl StatPage {
    /// Whether this is the connecting side.
    pub fn is_connecting(&self) -> bool {
        self.side == Side::Connecting
    }

    /// What this side has written.
    pub fn written(&self) -> Snapshot {
        self.region.page().tx.counters.snapshot()
    }

    /// What this side has read.
    pub fn read(&self) -> Snapshot {
        self.region.page().rx.counters.snapshot()
    }

    /// Bytes of the ring that this side began with; 0 if it does not write.
    pub fn initial_ring_size(&self) -> u64 {
        self.region.geometry().ring_size()
    }

    /// Bytes that this side ever committed and released.
    pub fn cursors(&self) -> (u64, u64) {
        let page = self.region.page();
        (page.tx.cursor.tail.load(Ordering::Relaxed), page.rx.cursor.head.load(Ordering::Relaxed))
    }
}

impl Domain {
    /// Maps the control pages of a channel (protocol C10): the connecting side's first; the other's once it has accepted.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no such channel or it is not for this user to see.
    pub fn inspect(&self, channel: u64) -> Result<Vec<StatPage>> {
        let (_, fds) = match self.request(&Message::Inspect { channel }, &[])? {
            (message @ Message::Regions { .. }, fds) => (message, fds),
            (other, _) => return Err(unexpected(&other)),
        };
        let sides = [Side::Connecting, Side::Accepting];
        fds.into_iter()
            .zip(sides)
            .map(|(fd, side)| {
                // The size is the truth here: the seals that `attach` verifies keep it so.
                let stat = rustix::fs::fstat(&fd).map_err(|e| Error::system("look at a region", e))?;
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                let huge = stat.st_blksize > 4096;
                let offset = if huge { partywall_shm::layout::HUGE_PAGE } else { partywall_shm::layout::PAGE };
                let geometry = Geometry::new(offset, size.saturating_sub(offset))
                    .map_err(|_| partywall_shm::corrupt::Corrupt::BadRegion)?;
                let region = PeerRegion::attach(fd.as_fd(), RegionKind::Endpoint, geometry)?;
                Ok(StatPage { region, side })
            })
            .collect()
    }
}
