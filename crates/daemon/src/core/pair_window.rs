//! A window from one machine to another: its places, and who holds each (protocol G).

use std::collections::BTreeMap;

use partywall_protocol::wire::Side;
use partywall_shm::carve::Carve;

use super::id::{ChannelId, DomainId, SessionId};

/// The holder of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// A process that is about to connect.
    Process { domain: DomainId, pid: u32 },
    /// A channel, until both its ends are gone.
    Channel(ChannelId),
    /// A program whose session has ended without the program: it may live, and read or write there. Until the window goes.
    Abandoned,
}

/// The content of a place, as far as the broker knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PlaceContent {
    /// No region yet, or a ring that has replaced another: the broker does not learn of those.
    Unknown,
    /// The region of an end.
    Endpoint,
    /// A further region of this side (protocol F).
    Further { side: Side, number: u32 },
}

/// A place that was handed out.
#[derive(Debug)]
pub(super) struct WindowPlace {
    pub(super) size: u64,
    pub(super) holder: Holder,
    pub(super) content: PlaceContent,
}

#[derive(Debug)]
pub(super) struct PairWindow<F> {
    pub(super) memory: F,
    pub(super) reader: F,
    pub(super) size: u64,
    /// The bytes that have memory: places are only given out there.
    pub(super) allocated: u64,
    /// Why the rest of the window has no memory.
    pub(super) shortage: Option<String>,
    pub(super) carve: Carve,
    /// Places that were taken or freed since the book was written: start, bytes, and whether the place is taken.
    pub(super) changes: Vec<(u64, u64, bool)>,
    /// By the byte at which they begin.
    pub(super) places: BTreeMap<u64, WindowPlace>,
    pub(super) seen_by_owner: bool,
    pub(super) seen_by_peer: bool,
    /// Whether there is a directory in it.
    pub(super) has_directory: bool,
}

/// A request for a place that waits for memory to be allocated.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) session: SessionId,
    pub(super) request: u32,
    /// The second in which it came.
    pub(super) since: u64,
    pub(super) channel: ChannelId,
    pub(super) size: u64,
    pub(super) target: String,
}

impl WindowPlace {
    /// Whether this holder may make a region of this size there (protocol G4.7). The region must fill its place: the broker charges the
    /// region, and a larger place would take more of the window.
    pub(super) fn may_take(&self, holder: Holder, size: u64) -> bool {
        self.is_unused_by(holder) && self.size == size
    }

    /// Whether it is this holder's, and nothing is known to lie there.
    pub(super) fn is_unused_by(&self, holder: Holder) -> bool {
        self.holder == holder && self.content == PlaceContent::Unknown
    }
}

impl<F> PairWindow<F> {
    /// A window that no machine sees yet. Its places lie between byte `first` and the end of its memory.
    pub(super) fn new(memory: F, reader: F, size: u64, allocated: u64, first: u64) -> Self {
        Self {
            memory,
            reader,
            size,
            allocated,
            shortage: None,
            carve: Carve::new(first, allocated.max(first)),
            changes: Vec::new(),
            places: BTreeMap::new(),
            seen_by_owner: false,
            seen_by_peer: false,
            has_directory: false,
        }
    }

    /// The window has memory up to this byte.
    pub(super) fn extend(&mut self, to: u64) {
        self.allocated = self.allocated.max(to);
        self.shortage = None;
        self.carve.extend(to);
    }

    /// Bytes whose memory is being made.
    pub(super) fn coming(&self) -> u64 {
        if self.shortage.is_none() { self.size.saturating_sub(self.allocated) } else { 0 }
    }

    /// Hands out a place, if there is one. Returns where it is, and the memory for the owner.
    pub(super) fn place(&mut self, size: u64, holder: Holder) -> Option<(u64, F)>
    where
        F: Clone,
    {
        let base = self.carve.take(size)?;
        self.places.insert(base, WindowPlace { size, holder, content: PlaceContent::Unknown });
        self.changes.push((base, size, true));
        Some((base, self.memory.clone()))
    }

    /// Keeps places from being given out: programs that the last broker gave them to may still read or write there.
    pub(super) fn abandon_places(&mut self, places: &[(u64, u64)]) {
        for &(base, size) in places {
            if self.carve.take_at(base, size) {
                let (holder, content) = (Holder::Abandoned, PlaceContent::Unknown);
                self.places.insert(base, WindowPlace { size, holder, content });
            }
        }
    }

    /// Why there is no place of this size.
    pub(super) fn no_room(&self, wanted: u64, from: &str, to: &str) -> String {
        let free = self.carve.free() + self.coming();
        let mut reason = format!("the window from {from} to {to} has no room for {wanted} bytes ({free} are free)");
        let abandoned: u64 =
            self.places.values().filter(|place| place.holder == Holder::Abandoned).map(|place| place.size).sum();
        if abandoned > 0 {
            reason.push_str(&format!(
                "; {abandoned} bytes are kept for programs that the end of an agent or a broker has cut off, until the machine is detached"
            ));
        }
        if let Some(why) = &self.shortage {
            let Self { allocated, size, .. } = self;
            reason.push_str(&format!("; only {allocated} of its {size} bytes have memory: {why}"));
        }
        reason
    }

    pub(super) fn free_one(&mut self, base: u64) {
        if let Some(place) = self.places.remove(&base) {
            self.changes.push((base, place.size, false));
            self.carve.give_back(base);
        }
    }

    pub(super) fn free(&mut self, gone: impl Fn(&WindowPlace) -> bool) {
        let Self { carve, changes, .. } = self;
        self.places.retain(|base, place| {
            let goes = gone(place);
            if goes {
                changes.push((*base, place.size, false));
                carve.give_back(*base);
            }
            !goes
        });
    }
}
