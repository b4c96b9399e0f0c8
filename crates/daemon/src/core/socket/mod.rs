//! Transparent sockets (protocol T): the listeners, the connections that are offered a ring, and the takers of offers.
//!
//! ```text
//!   connecting program             broker                    accepting program
//!                                  directory <--- Publish --- listens
//!   finds the listener there
//!   Offer [socket, region] -------> an offer, in the directory ---> finds its connection there
//!   <------- Bell -----------------
//!                                  <--- Take [socket, region] ---
//!   <------- rings ---------------- the other end? -------- Bell ---------->
//!   Confirm [socket] -------------> the same, still established?
//!   <------- PeerIs [region] ------ ----------------------- rings --------->
//!                                  <--- Finish [socket] ----------
//!                                  the same, still established?
//!                                  a channel ------------- PeerIs [region] ->
//! ```
//!
//! The kernel identifies the connection: both sides bring the socket, twice and in turn, and the event loop reads its
//! [`SocketFacts`]. The accepting side's socket is established when it is first and last shown, and in between the connecting side's is:
//! so both are at one moment, when no two sockets of one namespace have the same ends.
//! The sockets themselves never come here; they are closed before the core gets their facts.

mod datagram;
mod directory;
mod facts;
mod flow_slots;
mod forwarded;
mod guesses;
mod handshake;
mod namespace_index;
mod offer;
mod open;
mod passed;
mod publish;
mod reclaim;
mod take;
mod translated;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};

use partywall_protocol::directory::OfferKey;
use partywall_protocol::passed::PassedSockets;
use partywall_protocol::wire::{MachineId, Origin, Refusal, User};

pub(super) use datagram::{FlowRecord, at};
pub(super) use facts::{Ends, NumberedEnd};
pub(super) use namespace_index::NamespaceIndex;
pub(super) use offer::Offer;
pub use partywall_protocol::socket::{Identity, NamespaceId, Numbers, SocketFacts, SocketId, SocketState};
pub(super) use publish::Publication;

use guesses::Guesses;

use super::id::ChannelId;
use super::networks::Networks;
use super::refuse::{Refuse, refuse};
use crate::credentials::Home;

/// One machine may have at most this fraction of what all domains share: one part in four.
const SHARE_OF_MACHINE: usize = 4;

/// The counts of one machine in tables that all domains share. Its programs may join as any number of domains, so quotas of domains do
/// not limit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SharedCounts {
    pub(super) offers: usize,
    pub(super) entries: usize,
    /// Flows with an end in the machine, and offers of flows by its programs.
    pub(super) flow_slots: usize,
}

/// All that the core knows of sockets.
#[derive(Debug)]
pub(super) struct Sockets<F> {
    pub(super) publications: BTreeMap<u64, Publication>,
    pub(super) next_publication: u64,
    /// Fingerprints that publications have in the directory, over all of them.
    pub(super) entries: usize,
    /// By the number of the channel that each will be.
    pub(super) offers: BTreeMap<ChannelId, Offer<F>>,
    /// The offers of a connection: one, unless two namespaces have the same addresses.
    pub(super) offered: HashMap<Ends, Vec<ChannelId>>,
    /// The offers to other namespaces by the accepting end and the numbers of the accepting side: one each, unless a machine lies.
    pub(super) translated: HashMap<NumberedEnd, Vec<ChannelId>>,
    /// Sockets that have asked for a translated offer and had none.
    pub(super) guesses: Guesses,
    /// Offers to other namespaces that are neither taken nor entered by their accepting end alone yet.
    pub(super) young: BTreeSet<ChannelId>,
    /// Offers from this number on were not there when the core last looked at the young ones.
    pub(super) looked_at: ChannelId,
    /// The network namespaces with publications, and the number of these.
    pub(super) namespaces: BTreeMap<NamespaceId, u32>,
    /// Sockets that are offered or have a channel: none can be in two.
    pub(super) in_use: HashMap<SocketId, ChannelId>,
    /// Flows of datagrams, by the number of their channel.
    pub(super) flows: BTreeMap<ChannelId, FlowRecord<F>>,
    /// The network namespaces between which there may be flows.
    pub(super) networks: Networks,
    /// Slots of the directory that flows, and offers of flows, have.
    pub(super) slots: BTreeSet<usize>,
    /// For channels that only one side has reclaimed since this broker started: the facts of its socket.
    pub(super) claimed: BTreeMap<ChannelId, SocketFacts>,
    /// The network namespaces with a listener at an address.
    pub(super) listening: NamespaceIndex,
    /// The network namespaces with programs at an address that means the same everywhere.
    pub(super) resident: NamespaceIndex,
    /// Statements about sockets of the host that were passed to other processes.
    pub(super) passed: PassedSockets<(User, Home)>,
    /// The number of offers, of directory entries and of slots of flows of each machine.
    pub(super) machine_counts: BTreeMap<MachineId, SharedCounts>,
    /// The secret from which the keys of network namespaces are derived.
    pub(super) secret: [RandomState; 2],
}

impl<F> Sockets<F> {
    pub(super) fn new() -> Self {
        Self {
            publications: BTreeMap::new(),
            next_publication: 1,
            entries: 0,
            offers: BTreeMap::new(),
            offered: HashMap::new(),
            translated: HashMap::new(),
            guesses: Guesses::default(),
            young: BTreeSet::new(),
            looked_at: 0,
            namespaces: BTreeMap::new(),
            in_use: HashMap::new(),
            flows: BTreeMap::new(),
            networks: Networks::default(),
            slots: BTreeSet::new(),
            claimed: BTreeMap::new(),
            listening: NamespaceIndex::default(),
            resident: NamespaceIndex::default(),
            passed: PassedSockets::default(),
            machine_counts: BTreeMap::new(),
            secret: [RandomState::new(), RandomState::new()],
        }
    }

    /// The counts of a machine, to be changed; `None` for the host.
    pub(super) fn counts_of(&mut self, origin: Origin) -> Option<&mut SharedCounts> {
        Some(self.machine_counts.entry(origin.machine()?).or_default())
    }

    /// Whether a machine may have as many more of what there are `capacity` in all. The host may always.
    pub(super) fn may_have(
        &self,
        origin: Origin,
        of: impl Fn(&SharedCounts) -> usize,
        more: usize,
        capacity: usize,
    ) -> Result<(), Refuse> {
        let has = origin.machine().and_then(|machine| self.machine_counts.get(&machine)).map_or(0, of);
        if origin != Origin::Host && has + more > capacity / SHARE_OF_MACHINE {
            return refuse(Refusal::Quota, format!("this machine has {has} of {capacity} that all programs share"));
        }
        Ok(())
    }

    /// The key of a network namespace: only programs that have a socket there get it, and by it they find offers.
    pub(super) fn key_of(&self, netns: NamespaceId) -> OfferKey {
        let [low, high] = &self.secret;
        OfferKey([low.hash_one(netns), high.hash_one(netns)])
    }
}
