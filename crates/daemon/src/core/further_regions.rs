//! The accounts of a channel's end: the further regions that it takes, and those that are charged to it (protocol F).

use std::collections::BTreeMap;

use partywall_protocol::wire::{Refusal, RegionReference, Side};

use super::id::ChannelId;
use super::refuse::{Refuse, refuse};

/// The further regions of one end of a channel.
#[derive(Debug, Default)]
pub(super) struct FurtherRegions {
    /// The kinds that the end takes of the other side, with their limits.
    pub(super) takes: BTreeMap<u32, TakenKind>,
    /// The regions that are charged to this end, its own and the other side's.
    pub(super) counted: BTreeMap<FurtherKey, FurtherRegion>,
    /// The greatest number that a region of this side has had.
    pub(super) last: u32,
    /// The end came by `Reclaim`, so it may have regions that this broker has not passed on.
    pub(super) reclaimed: bool,
}

/// Regions of one kind that a side takes at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct TakenKind {
    pub(super) count: u8,
    pub(super) bytes: u64,
}

/// A further region, as one end of its channel names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FurtherKey {
    /// Whether the region is that end's.
    pub(super) own: bool,
    pub(super) number: u32,
}

/// The charged part of a further region.
#[derive(Debug, Clone, Copy)]
pub(super) struct FurtherRegion {
    pub(super) kind: u32,
    pub(super) bytes: u64,
}

/// A client's description of a region that it wants to add.
#[derive(Debug, Clone, Copy)]
pub(super) struct Addition {
    pub(super) channel: ChannelId,
    pub(super) side: Side,
    pub(super) number: u32,
    pub(super) kind: u32,
    pub(super) region: RegionReference,
}

impl FurtherKey {
    /// The same region, from the point of view of the other end.
    pub(super) fn seen_from_other_side(self) -> Self {
        Self { own: !self.own, ..self }
    }
}

impl FurtherRegions {
    /// The regions of an end that came by `Reclaim`.
    pub(super) fn of_reclaimed_end() -> Self {
        Self { reclaimed: true, ..Self::default() }
    }

    /// The regions that are charged to the end.
    pub(super) fn keys(&self) -> impl Iterator<Item = FurtherKey> {
        self.counted.keys().copied()
    }

    /// The regions that are charged to the end, with their bytes.
    #[cfg(any(test, feature = "invariants"))]
    pub(super) fn bytes_by_key(&self) -> BTreeMap<FurtherKey, u64> {
        self.counted.iter().map(|(key, region)| (*key, region.bytes)).collect()
    }

    /// Whether a region counts for the end.
    pub(super) fn counts(&self, key: FurtherKey) -> bool {
        self.counted.contains_key(&key)
    }

    /// Bytes that count against the domain of the end.
    pub(super) fn bytes(&self) -> u64 {
        self.counted.values().map(|region| region.bytes).sum()
    }

    /// How many the end owns.
    pub(super) fn owned(&self) -> usize {
        self.counted.keys().filter(|key| key.own).count()
    }

    /// Whether the end takes another region of the other side, and if not, why.
    pub(super) fn would_take(&self, kind: u32, bytes: u64) -> Result<(), Refuse> {
        let Some(allowance) = self.takes.get(&kind) else {
            return refuse(Refusal::KindMismatch, format!("the other side takes no further regions of kind {kind}"));
        };
        let has = || self.counted.iter().filter(|(key, region)| !key.own && region.kind == kind);
        if has().count() >= usize::from(allowance.count) {
            let most = allowance.count;
            return refuse(
                Refusal::Quota,
                format!("the other side has {most} regions of kind {kind}, and takes no more"),
            );
        }
        let total = has().map(|(_, region)| region.bytes).sum::<u64>().saturating_add(bytes);
        if total > allowance.bytes {
            let most = allowance.bytes;
            let reason = format!("with this one, {total} bytes of kind {kind}; the other side takes {most} at a time");
            return refuse(Refusal::Quota, reason);
        }
        Ok(())
    }

    /// Charges a region to the end.
    pub(super) fn add(&mut self, key: FurtherKey, region: FurtherRegion) {
        if key.own {
            self.last = self.last.max(key.number);
        }
        self.counted.insert(key, region);
    }
}
