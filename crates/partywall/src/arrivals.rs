//! Further regions that have arrived for one end of a channel, and what that end takes (protocol F).

use crate::{Error, Result};
use partywall_protocol::wire::{Message, Refusal, RegionReference, Side};
use partywall_shm::layout::Geometry;
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, VecDeque};

/// Regions of one kind that a side takes at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowance {
    pub(crate) count: u8,
    pub(crate) bytes: u64,
}

impl Allowance {
    /// No regions.
    pub(crate) const NOTHING: Self = Self { count: 0, bytes: 0 };
}

/// The request that tells the broker what an end takes of a kind.
pub(crate) fn take_message((channel, side): (u64, Side), kind: u32, allowance: Allowance) -> Message {
    let Allowance { count, bytes } = allowance;
    Message::TakeRegions { channel, side, kind, count, bytes }
}

/// A region as one end names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HeldKey {
    /// Whether the region is this end's. Otherwise it is the peer's.
    pub(crate) own: bool,
    pub(crate) number: u32,
}

/// A region of the peer that has arrived and is not mapped yet.
#[derive(Debug)]
pub(crate) struct ArrivedRegion {
    pub(crate) number: u32,
    pub(crate) kind: u32,
    /// Where it begins in a window; 0 if it has separate memory.
    pub(crate) base: u64,
    pub(crate) geometry: Geometry,
    pub(crate) memory: OwnedFd,
}

/// The further regions of one end: what it takes, what it has, and what has arrived.
///
/// The broker enforces what an end takes. The end checks it again, so that a broker that errs fills no process with descriptors.
#[derive(Debug, Default)]
pub(crate) struct FurtherMail {
    takes: BTreeMap<u32, Allowance>,
    /// Kind and bytes of the regions that this end has not given up.
    held: BTreeMap<HeldKey, (u32, u64)>,
    arrived: VecDeque<ArrivedRegion>,
    /// Numbers of those that came and cannot be used, to be given up.
    unusable: Vec<u32>,
    /// This process had no descriptor for one of them.
    lost: bool,
}

impl FurtherMail {
    /// Changes what the end takes of a kind. Returns what it took before.
    pub(crate) fn take(&mut self, kind: u32, allowance: Allowance) -> Option<Allowance> {
        match allowance.count {
            0 => self.takes.remove(&kind),
            _ => self.takes.insert(kind, allowance),
        }
    }

    /// The requests that tell a new broker what the end takes (protocol F6).
    pub(crate) fn take_requests(&self, end: (u64, Side)) -> Vec<Message> {
        self.takes.iter().map(|(kind, allowance)| take_message(end, *kind, *allowance)).collect()
    }

    /// The requests that tell a new broker which regions the end still has, and the region of each (protocol F6).
    pub(crate) fn reclaim_requests(&self, (channel, side): (u64, Side)) -> Vec<(HeldKey, Message)> {
        let message =
            |HeldKey { own, number }, (kind, bytes)| Message::ReclaimRegion { channel, side, own, number, kind, bytes };
        self.held.iter().map(|(key, region)| (*key, message(*key, *region))).collect()
    }

    /// Files a region that the broker has passed on. Regions that this end does not take are dropped (protocol F3.1).
    pub(crate) fn deliver(&mut self, number: u32, kind: u32, region: RegionReference, fds: Vec<OwnedFd>) {
        let memory = fds.into_iter().next();
        self.lost |= memory.is_none();
        let usable = memory.zip(region.check_further().ok()).is_some_and(|(memory, (located, geometry))| {
            self.put(ArrivedRegion { number, kind, base: located.base(), geometry, memory }).is_ok()
        });
        if !usable {
            self.unusable.push(number);
        }
    }

    /// Adds a region that has arrived, if this end takes it.
    pub(crate) fn put(&mut self, region: ArrivedRegion) -> Result<()> {
        let (kind, bytes) = (region.kind, region.geometry.ring_size());
        let refused = |code, reason: String| Err(Error::Refused { code, reason });
        let Some(allowance) = self.takes.get(&kind) else {
            return refused(Refusal::KindMismatch, format!("the other side takes no further regions of kind {kind}"));
        };
        let of_kind = || self.held.iter().filter(|(key, (of, _))| !key.own && *of == kind).map(|(_, region)| region);
        let total = of_kind().map(|(_, bytes)| bytes).sum::<u64>().saturating_add(bytes);
        if of_kind().count() >= usize::from(allowance.count) || total > allowance.bytes {
            return refused(Refusal::Quota, format!("the other side takes no more regions of kind {kind}"));
        }
        self.held.insert(HeldKey { own: false, number: region.number }, (kind, bytes));
        self.arrived.push_back(region);
        Ok(())
    }

    /// Numbers of those that came and cannot be used.
    pub(crate) fn take_unusable(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unusable)
    }

    /// The next region that has arrived.
    pub(crate) fn arrived(&mut self) -> Result<Option<ArrivedRegion>> {
        if std::mem::take(&mut self.lost) {
            let full = std::io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
            return Err(Error::system("take a further region of the peer", full));
        }
        Ok(self.arrived.pop_front())
    }

    /// The broker has passed on a region of this end.
    pub(crate) fn keep_own(&mut self, number: u32, kind: u32, bytes: u64) {
        self.held.insert(HeldKey { own: true, number }, (kind, bytes));
    }

    /// Whether this end has a region that it has not given up.
    pub(crate) fn has(&self, key: HeldKey) -> bool {
        self.held.contains_key(&key)
    }

    /// This end has given up a region.
    pub(crate) fn forget(&mut self, key: HeldKey) {
        self.held.remove(&key);
    }
}
