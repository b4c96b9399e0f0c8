//! The side of a link that its process is at: what the process sends, and what became of what was sent to it.

use super::link::MemoryDelivery;
use super::{BOTH_WAYS, DoorbellSide, LinkUse, RelayCore, RelayEffect};
use crate::relay::{Notice, PortSide};
use partywall_protocol::port::Frame;
use partywall_protocol::window::WindowId;

/// Packets from a process.
impl<M: Clone> RelayCore<M> {
    /// It rings the other end: without the port if there is a way.
    pub(in super::super) fn ring(&mut self, link: u32) {
        let Some(state) = self.links.get_mut(&link) else { return };
        if self.doorbells == DoorbellSide::Host && !state.carries.passes_events() && state.shortcut.vector.is_some() {
            self.effects.push_back(RelayEffect::SignalVector(link));
            state.shortcut.rings += 1;
            if state.shortcut.rings > BOTH_WAYS {
                return;
            }
        }
        if let (DoorbellSide::Guest, Some(peer)) = (self.doorbells, state.shortcut.peer) {
            self.effects.push_back(RelayEffect::RingPeer(peer));
            state.shortcut.rings += 1;
            if state.shortcut.rings > BOTH_WAYS {
                return;
            }
            // From then on its process rings without this relay.
            if state.shortcut.rings == BOTH_WAYS {
                self.effects.push_back(RelayEffect::PassPeer { link, peer });
            }
        }
        self.send(&Frame::Bell { link });
    }

    /// It lets its subscriber go.
    pub(in super::super) fn dropped(&mut self, link: u32) {
        self.send(&Frame::Dropped { link });
    }

    /// It reports a move. On the host another relay may be at that end, whose guest is being migrated. In a guest a process is, which has
    /// no such packet.
    pub(in super::super) fn moved(&mut self, link: u32) {
        match self.side {
            PortSide::Guest => self.hang_up(link),
            PortSide::Host => self.links.get_mut(&link).into_iter().for_each(|state| state.moved = true),
        }
    }

    /// It gives the other end memory of a window; of `None` if the memory is in no window of this port.
    pub(in super::super) fn attach(&mut self, link: u32, given: MemoryDelivery<Option<WindowId>>) {
        let MemoryDelivery { base, start, generation, geometry, memory } = given;
        match memory {
            Some(window) if base != 0 => {
                self.send(&Frame::Attach { link, generation, geometry, start, base, window });
            }
            // Memory that the other side cannot have.
            _ => self.hang_up(link),
        }
    }

    /// It names an event that rings the other end. Whether the guest is to ring it (protocol I4): at most once per link, because a
    /// guest's device has a limited number of peers.
    pub(in super::super) fn wants_event(&self, link: u32) -> bool {
        let unknown = |shortcut: &super::Shortcut| shortcut.peer.is_none() && !shortcut.event;
        let takes = |state: &super::LinkState<M>| state.carries.passes_events() && unknown(&state.shortcut);
        self.side == PortSide::Host && self.links.get(&link).is_some_and(takes)
    }

    /// The guest's device rings that event as this peer; `None` if it cannot, and the event is signalled for it.
    pub(in super::super) fn introduced(&mut self, link: u32, peer: Option<u32>) {
        let Some(state) = self.links.get_mut(&link) else { return };
        (state.shortcut.peer, state.shortcut.event) = (peer, peer.is_none());
        if let Some(peer) = peer {
            self.send(&Frame::RingAs { link, peer });
        }
    }
}

/// Outcomes of effects.
impl<M: Clone> RelayCore<M> {
    /// In a guest: this vector rings the process of the link (protocol I3).
    pub(in super::super) fn vector_taken(&mut self, link: u32, vector: u32) {
        let Some(state) = self.links.get_mut(&link) else {
            return self.effects.push_back(RelayEffect::GiveBackVector(vector));
        };
        state.shortcut.vector = Some(vector);
        self.send(&Frame::RungBy { link, vector });
    }

    /// On the host: the guest has such a vector, and the link uses it. It is taken once for each link.
    pub(in super::super) fn vector_passed(&mut self, link: u32, vector: u32) {
        if let Some(state) = self.links.get_mut(&link) {
            state.shortcut.vector = Some(vector);
        }
    }

    /// The memory that the process of a link gets next.
    pub(in super::super) fn next_delivery(&self, link: u32) -> Option<&MemoryDelivery<M>> {
        self.links.get(&link)?.pending.front()
    }

    /// It is delivered, or the process has gone, which its hang-up reports.
    pub(in super::super) fn delivered(&mut self, link: u32) {
        if let Some(state) = self.links.get_mut(&link) {
            state.pending.pop_front();
        }
    }

    /// There is no room for it yet. Too much that waits ends the link (protocol P4.2).
    pub(in super::super) fn not_delivered(&mut self, link: u32) {
        if self.links.get(&link).is_some_and(super::LinkState::is_overfull) {
            self.hang_up(link);
        }
    }

    pub(in super::super) fn is_waiting_for_room(&self, link: u32) -> bool {
        self.next_delivery(link).is_some()
    }

    /// Closes the links that have ended and have delivered everything.
    pub(in super::super) fn close_finished(&mut self) {
        let over: Vec<u32> = self.links.iter().filter(|(_, state)| state.is_over()).map(|(link, _)| *link).collect();
        for link in over {
            self.remove(link);
            self.report(Notice::Closed(link));
        }
    }
}

/// The end of links.
impl<M> RelayCore<M> {
    pub(super) fn remove(&mut self, link: u32) -> bool {
        let Some(state) = self.links.remove(&link) else { return false };
        // The other side may be hanging up at this moment, too.
        self.early.forget(link);
        // A vector that a host was told of goes to another link some day, and then the event is announced again.
        if self.doorbells == DoorbellSide::Guest {
            self.effects.extend(state.shortcut.vector.map(RelayEffect::GiveBackVector));
            self.effects.extend(state.shortcut.peer.map(RelayEffect::ForgetPeer));
        }
        let moved = self.leaving || state.moved && self.side == PortSide::Guest;
        if moved && state.carries == LinkUse::Channel {
            self.effects.push_back(RelayEffect::SayMoved(link));
        }
        self.effects.push_back(RelayEffect::Close(link));
        true
    }

    /// All links are over. Returns which there were.
    pub(super) fn forget_links(&mut self) -> Vec<u32> {
        let links: Vec<u32> = self.links.keys().copied().collect();
        for link in &links {
            self.remove(*link);
        }
        links
    }
}
