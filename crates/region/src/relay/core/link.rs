//! The state of one link in a relay's state machine.

use partywall_shm::layout::Geometry;
use std::collections::VecDeque;

/// Memory that could not be delivered yet (protocol P4). An honest producer is never further ahead than this (protocol A4).
const MOST_PENDING: usize = 8;

/// Memory in transit to a process.
#[derive(Debug)]
pub(in super::super) struct MemoryDelivery<M> {
    pub(in super::super) base: u64,
    pub(in super::super) start: u64,
    pub(in super::super) generation: u32,
    pub(in super::super) geometry: Geometry,
    pub(in super::super) memory: M,
}

/// How rings of a link go past the port (protocol I).
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Shortcut {
    /// In the guest: the vector that rings its process. On the host: the guest has named it.
    pub(super) vector: Option<u32>,
    /// In the guest: as which peer its device rings the other end. On the host: as which peer the guest has been told to.
    pub(super) peer: Option<u32>,
    /// How often this relay has rung by the device, or by a vector of it.
    pub(super) rings: u64,
    /// On the host, where the guest cannot ring the other end itself: there is an event to signal for it.
    pub(super) event: bool,
}

/// The purpose of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkUse {
    /// A direction of a channel: doorbells, memory, and events to be rung by.
    Channel,
    /// The bell of a connection of unmodified programs (protocol T4.1): nothing but doorbells. A descriptor must not reach its process by
    /// the link.
    Bell,
    /// On the host: such a bell whose socket is between this relay and that of another machine. Events may go by it, and reach no process.
    BellBetweenMachines,
}

impl LinkUse {
    /// Whether an event may be sent and accepted by the link's socket.
    pub(super) fn passes_events(self) -> bool {
        matches!(self, Self::Channel | Self::BellBetweenMachines)
    }
}

/// One link.
#[derive(Debug)]
pub(super) struct LinkState<M> {
    pub(super) carries: LinkUse,
    pub(super) pending: VecDeque<MemoryDelivery<M>>,
    /// The other end has hung up. So does this one, once everything is delivered.
    pub(super) ending: bool,
    /// The end of this link is a move: a host's relay has reported that a machine at the other end is being migrated (protocol G7.8).
    pub(super) moved: bool,
    pub(super) shortcut: Shortcut,
}

impl<M> LinkState<M> {
    pub(super) fn new(carries: LinkUse) -> Self {
        Self { carries, pending: VecDeque::new(), ending: false, moved: false, shortcut: Shortcut::default() }
    }

    /// More memory waits than an honest producer sends.
    pub(super) fn is_overfull(&self) -> bool {
        self.pending.len() > MOST_PENDING
    }

    /// Everything that the other end sent has been delivered.
    pub(super) fn is_over(&self) -> bool {
        self.ending && self.pending.is_empty()
    }
}
