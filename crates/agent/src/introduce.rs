//! Connections that programs of this machine ask for: until the broker has answered, their memory and links are kept here.
//!
//! Between two programs of this machine, the broker introduces them, and memory and links stay here. The connecting program's answer and the listener's message come in either order; whichever is first waits for the other.

use partywall_protocol::wire::Side;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Both come at once, unless one of the two programs has ended meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);
/// Introductions that wait at a time; beyond them the oldest is void.
const MOST: usize = 256;

/// What the listener is to get.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) session: u32,
    pub(crate) packet: Vec<u8>,
}

#[derive(Debug)]
enum Half {
    Brought(Vec<OwnedFd>),
    Awaited(Incoming),
}

/// Introductions under way.
#[derive(Debug, Default)]
pub(crate) struct Introductions {
    /// By session and request, before the broker has numbered the channel.
    asked: BTreeMap<(u32, u32), Vec<OwnedFd>>,
    /// The same of connections to other machines: the program's ends of the links.
    asked_elsewhere: BTreeMap<(u32, u32), Vec<OwnedFd>>,
    halves: BTreeMap<u64, (Instant, Half)>,
    /// Memory in transit from one program to the other, until the broker names the receiver.
    parcels: BTreeMap<Parcel, OwnedFd>,
}

/// Which memory of which channel.
pub(crate) type Parcel = (u64, ParcelContent);

/// What the memory of a channel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ParcelContent {
    /// The accepting side's region.
    Endpoint,
    /// The next ring of a side, by its generation.
    Ring(Side, u32),
    /// A further region of a side, by its number.
    Further(Side, u32),
}

impl Introductions {
    /// A program asks to connect, and brings this.
    pub(crate) fn ask(&mut self, session: u32, request: u32, brought: Vec<OwnedFd>) {
        self.asked.insert((session, request), brought);
    }

    /// A program asks to connect to another machine, and is to get these ends of links.
    pub(crate) fn ask_elsewhere(&mut self, session: u32, request: u32, links: Vec<OwnedFd>) {
        self.asked_elsewhere.insert((session, request), links);
    }

    /// It is connected to another machine, and gets these. `None` if it has not asked for that.
    pub(crate) fn connected_elsewhere(&mut self, session: u32, request: u32) -> Option<Vec<OwnedFd>> {
        self.asked_elsewhere.remove(&(session, request))
    }

    /// A program gives memory to its peer. What the broker has refused is void when there are too many.
    pub(crate) fn give(&mut self, parcel: Parcel, memory: OwnedFd) {
        if self.parcels.len() >= MOST {
            self.parcels.pop_first();
        }
        self.parcels.insert(parcel, memory);
    }

    /// The broker says that the peer is to have it.
    pub(crate) fn take(&mut self, parcel: Parcel) -> Option<OwnedFd> {
        self.parcels.remove(&parcel)
    }

    /// It was refused, or has ended.
    pub(crate) fn refused(&mut self, session: u32, request: u32) {
        self.asked.remove(&(session, request));
        self.asked_elsewhere.remove(&(session, request));
    }

    pub(crate) fn session_ended(&mut self, session: u32) {
        self.asked.retain(|(of, _), _| *of != session);
        self.asked_elsewhere.retain(|(of, _), _| *of != session);
    }

    /// It is connected, and these are the listener's ends of the links. Returns what the listener is to get, if its message is there.
    pub(crate) fn connected(
        &mut self,
        session: u32,
        request: u32,
        channel: u64,
        links: Vec<OwnedFd>,
    ) -> Option<(Incoming, Vec<OwnedFd>)> {
        let mut brought = self.asked.remove(&(session, request))?;
        brought.extend(links);
        match self.halves.remove(&channel) {
            Some((_, Half::Awaited(incoming))) => Some((incoming, brought)),
            _ => {
                self.keep(channel, Half::Brought(brought));
                None
            }
        }
    }

    /// The listener's message. Returns it with what belongs to it, if that is there.
    pub(crate) fn incoming(&mut self, channel: u64, incoming: Incoming) -> Option<(Incoming, Vec<OwnedFd>)> {
        match self.halves.remove(&channel) {
            Some((_, Half::Brought(brought))) => Some((incoming, brought)),
            _ => {
                self.keep(channel, Half::Awaited(incoming));
                None
            }
        }
    }

    fn keep(&mut self, channel: u64, half: Half) {
        let now = Instant::now();
        self.halves.retain(|_, (since, _)| now < *since + PATIENCE);
        if self.halves.len() >= MOST {
            self.halves.pop_first();
        }
        self.halves.insert(channel, (now, half));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn brought() -> Vec<OwnedFd> {
        vec![std::fs::File::open("/dev/null").unwrap().into()]
    }

    #[test]
    fn link_ends_match_in_either_order() {
        let mut all = Introductions::default();
        let incoming = || Incoming { session: 2, packet: vec![7] };
        all.ask(1, 10, brought());
        assert!(all.connected(1, 10, 99, brought()).is_none());
        let (to, with) = all.incoming(99, incoming()).unwrap();
        assert_eq!((to.session, to.packet, with.len()), (2, vec![7], 2));

        all.ask(1, 11, brought());
        assert!(all.incoming(100, incoming()).is_none());
        assert_eq!(all.connected(1, 11, 100, vec![]).unwrap().0.session, 2);
        assert!(all.asked.is_empty() && all.halves.is_empty());
    }

    #[test]
    fn links_to_another_machine_are_given_once_and_only_if_connected() {
        let mut all = Introductions::default();
        for request in 1..=3 {
            all.ask_elsewhere(7, request, brought());
        }
        assert_eq!(all.connected_elsewhere(7, 1).map(|links| links.len()), Some(1));
        assert!(all.connected_elsewhere(7, 1).is_none(), "given once");
        all.refused(7, 2);
        assert!(all.connected_elsewhere(7, 2).is_none(), "refused");
        all.session_ended(7);
        assert!(all.asked_elsewhere.is_empty());
    }

    #[test]
    fn unmatched_link_ends_are_bounded_and_forgotten() {
        let mut all = Introductions::default();
        for channel in 0..2 * MOST as u64 {
            assert!(all.incoming(channel, Incoming { session: 1, packet: vec![] }).is_none());
        }
        assert_eq!(all.halves.len(), MOST);
        all.ask(1, 1, brought());
        all.ask(1, 2, brought());
        all.refused(1, 1);
        all.session_ended(1);
        assert!(all.asked.is_empty());
        assert!(
            all.connected(1, 2, 5, vec![]).is_none() && all.halves.len() == MOST,
            "what was not asked is not connected"
        );
    }
}
