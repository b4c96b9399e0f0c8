//! The part of a connection that belongs to this process alone: the mappings of its regions, and its descriptors.
//!
//! Beside the arena, by the same index. Private memory: `fork` copies it, with the mappings and descriptors that it tells of.

mod bell;
mod succession;

use crate::arena::CONNECTIONS;
use crate::hidden;
use crate::lock::Lock;
pub(crate) use bell::{OwnBell, longest_sleep};
use partywall_region::RegionOptions;
use partywall_region::berth::{Berth, ReservedRegion};
use partywall_shm::layout::RegionKind;
use rustix::fd::OwnedFd;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use succession::SuccessorWord;
pub(crate) use succession::hand_over;

/// A process's record of bytes that a peer holds back (protocol T16).
#[derive(Debug)]
pub(crate) struct HeldBytes {
    /// The first byte of the latest hold that was seen, plus 1.
    pub(crate) from: AtomicU64,
    /// When that was, by the monotonic clock in nanoseconds.
    pub(crate) since: AtomicU64,
    /// Bytes before this one were waited for long enough.
    pub(crate) passed: AtomicU64,
}

impl HeldBytes {
    const fn new() -> Self {
        Self { from: AtomicU64::new(0), since: AtomicU64::new(0), passed: AtomicU64::new(0) }
    }

    /// Bytes of the peer before this one are not held back any more.
    #[inline]
    pub(crate) fn pass_to(&self, byte: u64) {
        self.passed.fetch_max(byte, Ordering::Relaxed);
    }

    /// For the next connection.
    pub(crate) fn reset(&self) {
        self.from.store(0, Ordering::Relaxed);
        self.passed.store(0, Ordering::Relaxed);
    }
}

/// One process' part of one connection.
#[derive(Debug)]
pub(crate) struct LocalState {
    /// The generation of the connection that this is about.
    pub(crate) generation: AtomicU32,
    /// Descriptors that this process has of it.
    pub(crate) descriptors: AtomicU32,
    /// One of the descriptors, plus 1.
    fd: AtomicU32,
    /// Our end of the bell.
    pub(crate) bell: OwnBell,
    /// The memory of our region, plus 1, to show it to a broker that comes after the one that we have now; 0 if it was not kept.
    memory: AtomicU32,
    /// The last broker, by number, that was told of a ring that it had not made.
    pub(crate) reclaimed: AtomicU64,
    /// Whether another process may have the connection's block, since this one has forked or was forked while it lived.
    exposed: AtomicU32,
    /// The locks of the two directions among the threads of this process, while it is exposed.
    pub(crate) sending: Lock,
    pub(crate) receiving: Lock,
    /// Number of the offer, or the channel; 0 if there is none. The broker acts on it, so no other process may write it.
    pub(crate) channel: AtomicU64,
    /// The step of a handshake whose answer comes later ([`crate::broker::LateStep`]); 0 if there is none.
    pub(crate) late: AtomicU64,
    /// The number by which the berth of our region recognises the memory that waits for that answer.
    reserved: AtomicU64,
    /// The peer's identity for bells ([`crate::conn::bell`]); 0 if it is not known. It decides which other connections are not rung.
    pub(crate) neighbour: AtomicU64,
    /// Bytes of the ring that is to be made.
    pub(crate) planned_ring: AtomicU64,
    /// The bytes that the peer holds back, as this process has seen them.
    pub(crate) held: HeldBytes,
    /// Our region.
    pub(crate) own: Berth,
    /// The peer's region, as it is mapped here.
    pub(crate) peer: Berth,
    /// The connection that has replaced this one.
    pub(crate) successor: SuccessorWord,
    /// The place of the connection that this one has replaced, plus 1; 0 if there is none.
    pub(crate) predecessor: AtomicU32,
}

impl LocalState {
    /// All zeros, so that untouched ones are neither in the file nor in memory.
    const fn new() -> Self {
        Self {
            generation: AtomicU32::new(0),
            descriptors: AtomicU32::new(0),
            fd: AtomicU32::new(0),
            bell: OwnBell::new(),
            memory: AtomicU32::new(0),
            reclaimed: AtomicU64::new(0),
            exposed: AtomicU32::new(0),
            sending: Lock::new(),
            receiving: Lock::new(),
            channel: AtomicU64::new(0),
            late: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            neighbour: AtomicU64::new(0),
            planned_ring: AtomicU64::new(0),
            held: HeldBytes::new(),
            own: Berth::new(),
            peer: Berth::new(),
            successor: SuccessorWord::new(),
            predecessor: AtomicU32::new(0),
        }
    }

    /// For the next connection, whose block no other process has.
    pub(crate) fn begin(&self) {
        for word in [&self.channel, &self.late, &self.neighbour] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.exposed, &self.predecessor] {
            word.store(0, Ordering::Relaxed);
        }
        self.successor.clear();
    }

    /// This process is about to fork. The directions are to be taken once after this, so that every thread that holds one holds the
    /// private lock as well.
    pub(crate) fn expose(&self) {
        self.exposed.store(1, Ordering::SeqCst);
    }

    /// Whether another process may write what this connection keeps in shared memory.
    #[inline]
    pub(crate) fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::Relaxed) != 0
    }

    /// In a child, whose other threads are no more: they held these locks in the parent.
    pub(crate) fn in_child(&self) {
        self.expose();
        self.sending.clear();
        self.receiving.clear();
    }

    /// A descriptor of it; -1 if this process has none.
    #[inline]
    pub(crate) fn fd(&self) -> c_int {
        self.fd.load(Ordering::Relaxed).wrapping_sub(1).cast_signed()
    }

    /// Sets the descriptor that is used for calls of the kernel; -1 for none.
    pub(crate) fn set_fd(&self, fd: c_int) {
        self.fd.store(fd.cast_unsigned().wrapping_add(1), Ordering::Relaxed);
    }

    /// The memory of our region, if it was kept.
    pub(crate) fn memory(&self) -> Option<c_int> {
        self.memory.load(Ordering::Relaxed).checked_sub(1).map(u32::cast_signed)
    }

    /// Keeps the memory of our region if there are numbers to spare.
    pub(crate) fn keep_memory(&self, region: OwnedFd) {
        if let Some(fd) = hidden::keep_if_plenty(region) {
            KEPT.fetch_add(1, Ordering::Relaxed);
            self.memory.store(fd.cast_unsigned().wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// Closes the descriptor of the region.
    pub(crate) fn discard_memory(&self) {
        drop(self.take_memory());
    }

    fn take_memory(&self) -> Option<OwnedFd> {
        let fd = self.memory.swap(0, Ordering::Relaxed).checked_sub(1)?;
        KEPT.fetch_sub(1, Ordering::Relaxed);
        hidden::take_back(fd.cast_signed())
    }

    /// Keeps the memory of a region that is made only when the broker has said where, if there are numbers to spare.
    pub(crate) fn suspend_region(&self, region: ReservedRegion<'_>) {
        let (memory, change) = region.suspend();
        self.reserved.store(change, Ordering::Relaxed);
        self.keep_memory(memory);
    }

    /// Makes the region of that memory. Returns the memory. `None` if it was not kept, or too little memory is free.
    pub(crate) fn resume_region(&self) -> Option<OwnedFd> {
        let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(self.own.ring_size()) };
        let region = self.own.resume(self.take_memory()?, self.reserved.load(Ordering::Relaxed), &options);
        region.and_then(ReservedRegion::fill).ok()
    }
}

/// Rings whose memory is kept.
static KEPT: AtomicU32 = AtomicU32::new(0);

/// The program has no number left for another descriptor: closes what can be done without. Returns whether there was any.
#[cold]
pub(crate) fn give_back() -> bool {
    if KEPT.load(Ordering::Relaxed) == 0 {
        return false;
    }
    LOCALS.iter().for_each(LocalState::discard_memory);
    true
}

/// Whether there is a ring that another broker could be shown.
pub(crate) fn any_is_kept() -> bool {
    KEPT.load(Ordering::Relaxed) != 0
}

static LOCALS: [LocalState; CONNECTIONS] = [const { LocalState::new() }; CONNECTIONS];

/// This process' part of the connection at `index` of the arena.
#[inline]
pub(crate) fn get(index: u16) -> &'static LocalState {
    &LOCALS[usize::from(index)]
}
