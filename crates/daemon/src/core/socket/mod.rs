//! Transparent sockets (protocol T): who listens where, which connections are offered a ring, and who takes them.
//!
//! ```text
//!   connecting program             broker                    accepting program
//!                                  directory <--- Publish --- listens
//!   finds the listener there
//!   Offer [socket, region, link] ---> an offer, in the directory ---> finds its connection there
//!                                  <--- Take [socket, region] ---
//!                                  ends, namespaces, numbers agree?
//!                                  --- Taken [region, link] --->
//!   <------------------------------ over the link: attach [region] ---
//! ```
//!
//! Whose connection it is, the kernel says: both sides bring the socket, and the event loop reads its [`SocketFacts`].
//! The sockets themselves never come here; they are closed before the core hears of them.

mod datagram;
mod directory;
mod facts;
mod offer;
mod publish;
mod reclaim;
mod take;

use std::collections::{BTreeMap, BTreeSet, HashMap};

pub use datagram::FlowSocket;
pub(super) use datagram::{Flow, at};
pub(super) use facts::Ends;
pub use facts::{SocketFacts, SocketState};
pub(super) use offer::Offer;
pub(super) use publish::Publication;

use super::channel::ChannelId;

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
    /// Sockets, by cookie, that are offered or have a channel: none can be in two.
    pub(super) cookies: HashMap<u64, ChannelId>,
    /// Flows of datagrams, by the number of their channel.
    pub(super) flows: BTreeMap<ChannelId, Flow<F>>,
    /// Slots of the directory that flows, and offers of flows, have.
    pub(super) slots: BTreeSet<usize>,
    /// Of channels that one side alone has spoken of since this broker came: what its socket is.
    pub(super) claimed: BTreeMap<ChannelId, SocketFacts>,
    /// In which namespaces of the broker's own user namespace an address was published, and how often.
    pub(super) residents: HashMap<u128, BTreeMap<u64, u32>>,
}

impl<F> Sockets<F> {
    pub(super) fn new() -> Self {
        Self {
            publications: BTreeMap::new(),
            next_publication: 1,
            entries: 0,
            offers: BTreeMap::new(),
            offered: HashMap::new(),
            cookies: HashMap::new(),
            flows: BTreeMap::new(),
            slots: BTreeSet::new(),
            claimed: BTreeMap::new(),
            residents: HashMap::new(),
        }
    }
}
