//! What the broker has passed on for one end of a channel, until that end takes it.

use super::MOST_RINGS;
use crate::arrivals::FurtherMail;
use partywall_protocol::wire::RegionReference;
use partywall_shm::layout::Geometry;
use rustix::fd::OwnedFd;
use std::collections::VecDeque;

/// Memory that the broker has passed on.
#[derive(Debug)]
pub(crate) struct Parcel {
    /// 0 for the endpoint region.
    pub(crate) generation: u32,
    /// The byte of the stream to begin at.
    pub(crate) start: u64,
    pub(crate) geometry: Geometry,
    pub(crate) memory: OwnedFd,
}

/// The messages and regions for one end of a channel.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    region: Option<Parcel>,
    rings: VecDeque<Parcel>,
    pub(crate) further: FurtherMail,
    /// More than an honest peer sends, or something that is no memory.
    corrupt: bool,
    /// Something was lost because this process had no descriptor for it.
    lost: bool,
}

/// An item of a mailbox.
#[derive(Debug)]
pub(crate) enum Mail {
    Nothing,
    Memory(Parcel),
    /// The peer has sent what no honest peer sends.
    Corrupt,
    /// It came, and this process had no descriptor left for it.
    Lost,
}

impl Mailbox {
    pub(super) fn put(&mut self, generation: Option<u32>, start: u64, region: RegionReference, fds: Vec<OwnedFd>) {
        let Some(memory) = fds.into_iter().next() else {
            self.lost = true;
            return;
        };
        match (region.check_own_memory(), generation) {
            (Ok(geometry), None) if self.region.is_none() => {
                self.region = Some(Parcel { generation: 0, start, geometry, memory });
            }
            (Ok(geometry), Some(generation @ 1..)) => {
                self.corrupt |= !self.put_ring(Parcel { generation, start: 0, geometry, memory });
            }
            _ => self.corrupt = true,
        }
    }

    pub(super) fn take_region(&mut self) -> Mail {
        match self.region.take() {
            Some(parcel) => Mail::Memory(parcel),
            None => self.nothing(),
        }
    }

    /// Adds a ring; `false` if there are as many as an honest peer sends.
    ///
    /// One of the same generation takes the other's place: the broker ended before it could answer the writer, which sent another.
    pub(crate) fn put_ring(&mut self, ring: Parcel) -> bool {
        if self.rings.back().is_some_and(|last| last.generation == ring.generation) {
            self.rings.pop_back();
        }
        let has_room = self.rings.len() < MOST_RINGS;
        if has_room {
            self.rings.push_back(ring);
        }
        has_room
    }

    pub(crate) fn take_ring(&mut self) -> Mail {
        match self.rings.pop_front() {
            Some(parcel) => Mail::Memory(parcel),
            None => self.nothing(),
        }
    }

    fn nothing(&self) -> Mail {
        match (self.corrupt, self.lost) {
            (true, _) => Mail::Corrupt,
            (_, true) => Mail::Lost,
            _ => Mail::Nothing,
        }
    }
}
