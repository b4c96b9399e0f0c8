//! A ring from one UDP socket to another, seen from one of its ends: two regions, and the broker's proof of it (protocol U1, U5, U11).
//!
//! Only the regions connect the two ends, so only checked words can come from the other end. The broker publishes the end of the other
//! end in the directory.

use crate::sys;
use partywall_protocol::directory::Proof;
use partywall_protocol::wire::Located;
use partywall_region::RegionOptions;
use partywall_region::berth::Berth;
use partywall_shm::layout::{Geometry, PAGE, RegionKind, SocketPage};
use partywall_shm::status::Reason;
use partywall_shm::sync::{Own, Peer};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// How many ends of flows a process has at once, at most.
const FLOWS: usize = 1024;
/// How old a proof may be for a sender, in milliseconds. An older one: the broker is gone, or does not get to look.
const SENDER_LEASE: u64 = 500;
/// And for a receiver: longer, so that it reads what a sender wrote at the end of the sender's lease.
const RECEIVER_LEASE: u64 = 1000;

/// The places of one end. All zeros when new.
#[derive(Debug)]
pub(super) struct FlowPlaces {
    used: AtomicU32,
    /// Our region.
    pub(super) own: Berth,
    /// The other end's.
    pub(super) peer: Berth,
    /// The other end is on another machine: both regions are in windows.
    far: AtomicBool,
}

static TABLE: [FlowPlaces; FLOWS] = [const { FlowPlaces::new() }; FLOWS];

impl FlowPlaces {
    const fn new() -> Self {
        Self { used: AtomicU32::new(0), own: Berth::new(), peer: Berth::new(), far: AtomicBool::new(false) }
    }

    /// A free one.
    pub(super) fn allocate() -> Option<&'static Self> {
        // EDGE flow-place: acquires the place from `FlowPlaces::free`.
        TABLE.iter().find(|flow| flow.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Makes our region, with so large a ring. Returns its memory and its shape.
    pub(super) fn make_region(&self, ring_size: u64) -> Result<(OwnedFd, Geometry), Reason> {
        let geometry = Geometry::new(PAGE, ring_size).map_err(|_| Reason::Resources)?;
        let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(ring_size) };
        let region = self.own.create(&options).map_err(|_| Reason::Resources)?;
        self.far.store(false, Ordering::Relaxed);
        Ok((region, geometry))
    }

    /// Makes our region at byte `base` of a window, in place of the one that `make_region` has made.
    pub(super) fn move_region(&self, ring_size: u64, base: u64, window: BorrowedFd<'_>) -> Result<(), Reason> {
        let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(ring_size) };
        self.own.create_in(window, base, &options).map_err(|_| Reason::Resources)?;
        self.far.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Maps the other end's region.
    pub(super) fn attach_peer(&self, (located, geometry): (Located, Geometry), memory: &OwnedFd) -> Result<(), Reason> {
        let attached = match located {
            Located::OwnMemory => self.peer.attach(memory.as_fd(), RegionKind::Socket, geometry),
            Located::Window { base } => self.peer.attach_in(memory.as_fd(), base, RegionKind::Socket, geometry),
        };
        attached.map(|_| ()).map_err(|_| Reason::Corrupt)
    }

    #[cfg(test)]
    pub(super) fn pretend_between_machines(&self) {
        self.far.store(true, Ordering::Relaxed);
    }

    /// Whether the other end is on another machine. The numbers of its cores mean nothing here then (protocol U14.13).
    pub(super) fn is_between_machines(&self) -> bool {
        self.far.load(Ordering::Relaxed)
    }

    /// Gives everything back. The caller holds the lock under which the pages are used.
    pub(super) fn free(&self) {
        self.own.vacate();
        self.peer.vacate();
        // EDGE flow-place: releases the place, whose berths are vacant; acquired in `FlowPlaces::allocate`.
        self.used.store(0, Ordering::Release);
    }

    /// The first pages of both regions. Only between `make_region` and `free`, under the lock of the end that it is.
    #[inline]
    pub(super) fn pages(&self) -> Option<(&'static SocketPage<Own>, &'static SocketPage<Peer>)> {
        #[expect(unsafe_code, reason = "reaches the page of a region that stays mapped")]
        // SAFETY: our region's berth is only ever filled by `Berth::create`, and vacated under the same lock.
        let own = unsafe { self.own.own_page() }?;
        Some((own, self.peer.peer_page()?))
    }
}

/// The broker's proof of a flow that this process sends by.
#[inline]
pub(super) fn proof_for_sender(number: u64) -> Proof {
    proof(number, SENDER_LEASE)
}

/// The broker's proof of a flow that this process receives by.
#[inline]
pub(super) fn proof_for_receiver(number: u64) -> Proof {
    proof(number, RECEIVER_LEASE)
}

/// As if the broker did not get to look at flows.
#[cfg(test)]
pub(super) static IS_BROKER_LATE: AtomicBool = AtomicBool::new(false);

#[inline]
fn proof(number: u64, lease: u64) -> Proof {
    #[cfg(test)]
    if IS_BROKER_LATE.load(Ordering::Relaxed) {
        return Proof::Stale;
    }
    // Also that of a broker that has gone: its proofs grow old.
    let Some(directory) = crate::broker::last_directory() else { return Proof::Unknown };
    directory.proof(number, sys::coarse_millis(), lease)
}

/// In a child: none of them is its own.
pub(super) fn after_fork() {
    for flow in TABLE.iter().filter(|flow| flow.used.load(Ordering::Relaxed) != 0) {
        flow.free();
    }
}
