//! The invariants of the core between any two events, and the changes that one event may make in the accounts of channels. Tests and fuzz
//! targets check them after each event.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use partywall_protocol::directory::slot_of;
use partywall_protocol::wire::{Message, Side};

use super::channel::{Channel, EndState};
use super::connect::{Offered, Offering};
use super::ended_handshakes::HandshakeSide;
use super::further::MOST_OWNED;
use super::further_regions::{Addition, FurtherKey};
use super::id::ChannelId;
use super::service::MAX_WAITING;
use super::socket::{FlowRecord, NamespaceIndex, Offer, Publication, Sockets};
use super::{Action, Core, CoreEvent, Descriptor, OfferDelivery, SessionId};

/// The account of each end of a channel before an event, and the change that the event may make.
///
/// A sum over ends cannot show a region that counts for too few or too many of them. So the permitted change of each event is computed
/// here a second time, from the message and its answer alone.
#[derive(Debug)]
pub(super) struct AccountsBefore {
    ends: BTreeMap<(ChannelId, Side), EndAccount>,
    due: DueChange,
}

/// The account of one end of a channel.
#[derive(Debug)]
struct EndAccount {
    state: EndState,
    ring_size: u64,
    /// Bytes of further regions.
    regions: BTreeMap<FurtherKey, u64>,
}

/// The change that an event must make to ends that keep their holder.
#[derive(Debug)]
enum DueChange {
    Nothing,
    /// An end's ring has another size.
    Ring {
        at: (ChannelId, Side),
        size: u64,
    },
    /// A further region counts for both ends.
    Region(Addition),
    /// A further region counts for one end, if this request is answered by `Done`.
    Reclaimed {
        session: SessionId,
        request: u32,
        at: (ChannelId, Side),
        key: FurtherKey,
        bytes: u64,
    },
    /// A further region no longer counts for one end.
    Dropped {
        at: (ChannelId, Side),
        key: FurtherKey,
    },
}

impl DueChange {
    /// The change to one end.
    fn apply<F>(&self, at: (ChannelId, Side), account: &mut EndAccount, actions: &[Action<F>]) {
        match *self {
            Self::Ring { at: of, size } if of == at => account.ring_size = size,
            Self::Region(Addition { channel, side, number, region, .. }) if channel == at.0 => {
                let before = account.regions.insert(FurtherKey { own: side == at.1, number }, region.ring_size);
                assert_eq!(
                    before, None,
                    "region {number} of the {side} side of channel {channel} has been added twice"
                );
            }
            Self::Reclaimed { session, request, at: of, key, bytes } if of == at => {
                let is_done = |action: &Action<F>| {
                    matches!(action, Action::Send { session: to, request: of, message: Message::Done {}, .. }
                        if (*to, *of) == (session, request))
                };
                if actions.iter().any(is_done) {
                    account.regions.entry(key).or_insert(bytes);
                }
            }
            Self::Dropped { at: of, key } if of == at => drop(account.regions.remove(&key)),
            _ => {}
        }
    }
}

impl<F: Descriptor> Core<F> {
    /// The accounts of channels, and what this event is to change of them.
    pub(super) fn accounts_before(&self, event: &CoreEvent<F>) -> AccountsBefore {
        AccountsBefore { ends: self.end_accounts(), due: self.due_change(event) }
    }

    fn end_accounts(&self) -> BTreeMap<(ChannelId, Side), EndAccount> {
        let of = |id: ChannelId, channel: &Channel<F>, side: Side| {
            let end = channel.end(side);
            let regions = end.further.bytes_by_key();
            ((id, side), EndAccount { state: end.state, ring_size: end.ring_size, regions })
        };
        self.channels.iter().flat_map(|(id, c)| Side::ALL.iter().map(move |side| of(*id, c, *side))).collect()
    }

    fn due_change(&self, event: &CoreEvent<F>) -> DueChange {
        let holds = |session: SessionId, channel: ChannelId, side: Side| {
            self.member(session).zip(self.channels.get(&channel)).is_some_and(|((domain, _, peer), channel)| {
                channel.end(side).state == EndState::Held { domain, pid: peer.pid }
            })
        };
        match event {
            CoreEvent::Offered { channel: id, delivery: OfferDelivery::Done } => match &self.offering {
                Some(Offering { channel, what: Offered::Ring { side, size, .. }, .. }) if channel == id => {
                    DueChange::Ring { at: (*id, *side), size: *size }
                }
                Some(Offering { channel, what: Offered::Further(addition), .. }) if channel == id => {
                    DueChange::Region(*addition)
                }
                _ => DueChange::Nothing,
            },
            CoreEvent::Message {
                session,
                request,
                message: Message::ReclaimRegion { channel, side, own, number, bytes, .. },
                ..
            } if holds(*session, *channel, *side) => {
                let (at, key) = ((*channel, *side), FurtherKey { own: *own, number: *number });
                DueChange::Reclaimed { session: *session, request: *request, at, key, bytes: *bytes }
            }
            CoreEvent::Message {
                session,
                message: Message::DropRegion { channel, side, own, number },
                descriptors,
                ..
            } if descriptors.is_empty() && holds(*session, *channel, *side) => {
                DueChange::Dropped { at: (*channel, *side), key: FurtherKey { own: *own, number: *number } }
            }
            _ => DueChange::Nothing,
        }
    }

    /// Panics if an event has changed accounts of channels otherwise than it may, or if the tables contradict each other.
    pub(super) fn check_step(&self, before: AccountsBefore, actions: &[Action<F>]) {
        let AccountsBefore { mut ends, due } = before;
        for (at, after) in self.end_accounts() {
            match ends.remove(&at).filter(|account| account.state == after.state) {
                Some(mut account) if matches!(after.state, EndState::Held { .. }) => {
                    due.apply(at, &mut account, actions);
                    let expected = (account.ring_size, account.regions);
                    assert_eq!((after.ring_size, after.regions), expected, "what counts for {at:?} after {due:?}");
                }
                _ => assert!(after.regions.is_empty(), "{at:?} begins or ends with further regions"),
            }
        }
        // An offer that was handed to a session is neither delivered nor refused yet.
        if self.offering.is_none() {
            self.check_invariants();
        }
    }

    /// Panics if the tables contradict each other.
    pub(crate) fn check_invariants(&self) {
        self.check_sessions();
        self.check_domains();
        self.check_services();
        self.check_channels();
        self.check_sockets();
        self.check_groups();
        self.check_cluster();
        self.check_windows();
        assert!(self.actions.is_empty() && self.offering.is_none());
    }

    fn check_sessions(&self) {
        let mut of_account = HashMap::new();
        for (id, session) in &self.sessions {
            *of_account.entry(session.peer.account()).or_insert(0) += 1;
            if let Some(domain) = session.domain {
                let domain = &self.domains[&domain];
                assert_eq!(domain.founder.user, session.peer.user, "a session in another user's domain");
                assert!(domain.processes.contains_key(&session.peer.pid));
            } else {
                assert!(session.services.is_empty() && session.waiting.is_empty());
            }
            for key in &session.services {
                assert_eq!(self.services[key].session, *id);
            }
            for channel in &session.waiting {
                let end = self.channels[channel].end(Side::Accepting);
                assert!(matches!(end.state, EndState::Waiting { listener, .. } if listener == *id));
            }
            assert!(session.waiting.len() <= MAX_WAITING);
        }
        assert_eq!(of_account, self.sessions_by_account);
        assert!(self.sessions.len() <= self.capacity.sessions);
    }

    fn check_domains(&self) {
        assert_eq!(self.domain_ids.len(), self.domains.len());
        for (id, domain) in &self.domains {
            assert_eq!(self.domain_ids[&domain.name], *id);
            let members = self.sessions.values().filter(|s| s.domain == Some(*id));
            assert_eq!(domain.sessions as usize, members.clone().count());
            assert!(domain.sessions > 0, "a domain without sessions");
            let services = self.services.values().filter(|s| s.domain == *id).count();
            assert_eq!(domain.services as usize, services);
            let live = || self.channels.values().flat_map(|c| &c.ends).filter(|e| e.state.is_live() && e.domain == *id);
            assert!(
                self.machines.ended.keys().all(|id| !self.channels.contains_key(id)),
                "a handshake that is a channel"
            );
            let ended = || self.machines.ended.values().flatten().filter(|side| side.domain == *id);
            assert_eq!(domain.ends as usize, live().count() + ended().count(), "ends of {}", domain.name);
            let bytes = live().map(|e| e.ring_size + e.further.bytes()).sum::<u64>();
            let bytes = bytes + ended().map(|side| side.ring_size).sum::<u64>();
            assert_eq!(domain.ring_bytes, bytes, "bytes of rings and further regions of {}", domain.name);
            for (pid, process) in &domain.processes {
                let sessions = members.clone().filter(|s| s.peer.pid == *pid).count();
                assert_eq!(process.sessions as usize, sessions);
                assert!(process.sessions > 0, "a process without sessions");
                let state = EndState::Held { domain: *id, pid: *pid };
                let held: BTreeSet<_> = (self.channels.iter())
                    .flat_map(|(id, c)| [Side::Connecting, Side::Accepting].map(|side| (*id, side, c.end(side).state)))
                    .filter(|(_, _, s)| *s == state)
                    .map(|(id, side, _)| (id, side))
                    .collect();
                assert_eq!(process.held, held);
                let is_its = |side: &HandshakeSide| (side.domain, side.pid) == (*id, *pid);
                let ended = self.machines.ended.iter().filter(|(_, sides)| sides.iter().any(is_its));
                assert_eq!(process.ended, ended.map(|(handshake, _)| *handshake).collect());
            }
        }
    }

    fn check_services(&self) {
        assert_eq!(self.service_keys.len(), self.services.len());
        for (key, service) in &self.services {
            assert_eq!(self.service_keys[&(service.domain, service.name.clone())], *key);
            let listener = &self.sessions[&service.session];
            assert!(listener.domain == Some(service.domain) && listener.services.contains(key));
            let waits = |state| matches!(state, EndState::Waiting { service, .. } if service == *key);
            let waiting = self.channels.values().filter(|c| waits(c.end(Side::Accepting).state)).count();
            assert_eq!(usize::from(service.waiting), waiting);
            assert!(service.waiting <= service.backlog);
        }
    }

    fn check_sockets(&self) {
        let Sockets { publications, offers, offered, in_use, listening, entries, .. } = &self.sockets;
        for (id, domain) in &self.domains {
            let of = publications.values().filter(|p| p.domain == *id);
            assert_eq!(domain.entries as usize, of.map(Publication::entries).sum::<usize>());
            assert_eq!(domain.offers as usize, offers.values().filter(|o| o.domain == *id).count());
        }
        assert_eq!(*entries, publications.values().map(Publication::entries).sum::<usize>());
        let mut of_machines = BTreeMap::<_, (usize, usize, usize)>::new();
        for offer in offers.values() {
            let Some(machine) = offer.peer.origin().machine() else { continue };
            let counts = of_machines.entry(machine).or_default();
            (counts.0, counts.2) = (counts.0 + 1, counts.2 + usize::from(offer.to().is_some()));
        }
        for machine in self.sockets.flows.values().flat_map(FlowRecord::machines) {
            of_machines.entry(machine).or_default().2 += 1;
        }
        for publication in publications.values() {
            let Some(machine) = publication.netns.origin.machine() else { continue };
            of_machines.entry(machine).or_default().1 += publication.entries();
        }
        let counts =
            self.sockets.machine_counts.iter().map(|(machine, of)| (*machine, (of.offers, of.entries, of.flow_slots)));
        let some = |(_, counts): &(_, (usize, usize, usize))| *counts != (0, 0, 0);
        assert!(counts.filter(some).eq(of_machines.into_iter().filter(some)), "what counts for machines");
        assert!(*entries <= self.capacity.entries && offers.len() <= self.capacity.offers);
        let published: usize = self.sessions.values().map(|s| s.publications.len()).sum();
        assert_eq!(published, publications.len(), "every publication is of one session");
        assert_eq!(self.sessions.values().map(|s| s.offers.len()).sum::<usize>(), offers.len());
        let taken = offers.values().filter(|o| o.handshake().is_some_and(|h| h.taker.is_some())).count();
        assert_eq!(self.sessions.values().map(|s| s.takes.len()).sum::<usize>(), taken);
        for (id, offer) in offers {
            assert!(self.sessions[&offer.session].offers.contains(id));
            assert!(offered[&offer.ends].contains(id));
            // A socket sends to many.
            assert!(offer.to().is_some() || in_use[&offer.socket.id()] == *id);
            assert!(!self.channels.contains_key(id), "taken, and offered still");
            let Some(handshake) = offer.handshake() else { continue };
            let end = offer.translated_end();
            assert_eq!(end.is_some(), !handshake.translated.is_empty(), "numbers are known of what may be translated");
            assert!(end.is_none_or(|end| self.sockets.translated[&end].contains(id)));
            assert!(
                !handshake.is_shown_translated || end.is_some() && handshake.far.is_some(),
                "shown after it was taken"
            );
            assert_eq!(handshake.far.is_none(), handshake.taker.is_some(), "who has the bells has taken");
            assert!(handshake.confirmed.is_none() || handshake.taker.is_some());
            if let Some(taker) = &handshake.taker {
                assert!(self.sessions[&taker.session].takes.contains(id) && in_use[&taker.socket.id()] == *id);
            }
        }
        assert_eq!(offered.values().map(Vec::len).sum::<usize>(), offers.len());
        let translated = offers.values().filter(|offer| offer.translated_end().is_some()).count();
        assert_eq!(self.sockets.translated.values().map(Vec::len).sum::<usize>(), translated);
        let mut of_ends = BTreeMap::new();
        for (end, handshake) in offers.values().filter_map(|offer| offer.translated_end().zip(offer.handshake())) {
            for namespace in &handshake.namespaces {
                *of_ends.entry((end.accepting(), *namespace)).or_insert(0) += 1;
            }
        }
        assert_eq!(self.sockets.guesses.counts(), of_ends);
        let may_be_shown =
            |id| offers.get(id).and_then(|o| o.handshake()).is_some_and(|h| h.far.is_some() && !h.is_shown_translated);
        assert!(self.sockets.young.iter().all(may_be_shown));
        for (socket, id) in in_use {
            let of_end = |c: &Channel<F>| c.ends.iter().any(|end| end.socket == Some(*socket));
            let taker = |o: &Offer<F>| o.handshake().and_then(|h| h.taker.as_ref()).map(|t| t.socket.id());
            let known = offers.get(id).is_some_and(|o| o.socket.id() == *socket || taker(o) == Some(*socket));
            assert!(known || self.channels.get(id).is_some_and(of_end), "a socket of nothing");
        }
        for (id, socket) in &self.sockets.claimed {
            let channel = &self.channels[id];
            let live = channel.ends.iter().filter(|end| end.state.is_live());
            assert!(live.map(|end| end.socket).eq([Some(socket.id())]), "claimed by other than one end");
        }
        let flows: BTreeSet<_> = self.sockets.flows.keys().copied().collect();
        assert!(
            flows.iter().all(|id| self.channels.get(id).is_some_and(Channel::is_flow)),
            "a flow without its channel"
        );
        let ended = self.channels.iter().filter(|(id, channel)| channel.is_flow() && !flows.contains(id));
        assert!(ended.map(|(_, channel)| channel).all(Channel::is_between_machines), "a flow that is not watched");
        let offered = offers.iter().filter(|(_, offer)| offer.to().is_some()).map(|(id, _)| *id);
        let slots: Vec<_> = flows.iter().copied().chain(offered).map(slot_of).collect();
        assert_eq!(slots.len(), self.sockets.slots.len(), "two flows of one slot");
        assert!(slots.iter().all(|slot| self.sockets.slots.contains(slot)));
        let ends = self.channels.values().flat_map(|c| &c.ends);
        for end in ends {
            assert!(end.socket.is_none_or(|s| end.state.is_live() && in_use.contains_key(&s)));
        }
        let (mut counted, mut residences) = (NamespaceIndex::default(), NamespaceIndex::default());
        for publication in publications.values() {
            for listener in &publication.listeners {
                counted.add(listener.fingerprint, publication.netns);
            }
            for address in publication.residences() {
                residences.add(address, publication.netns);
            }
        }
        assert_eq!((&counted, &residences), (listening, &self.sockets.resident));
    }

    fn check_channels(&self) {
        let mut regions = 0;
        for (id, channel) in &self.channels {
            assert!(*id < self.next_channel);
            assert!(channel.is_live(), "a channel that nobody answers for");
            for end in &channel.ends {
                regions += usize::from(end.region.is_some());
                assert!(end.further.owned() <= MOST_OWNED);
                let own = end.further.keys().filter(|key| key.own).map(|key| key.number);
                assert!(own.max() <= Some(end.further.last), "a region has a greater number than the greatest");
                match end.state {
                    EndState::Waiting { listener, service } => {
                        assert!(self.sessions[&listener].waiting.contains(id));
                        assert!(self.services.contains_key(&service) && end.region.is_none());
                    }
                    EndState::Held { domain, pid } => {
                        assert!(domain == end.domain && self.domains[&domain].processes.contains_key(&pid));
                    }
                    EndState::Unclaimed | EndState::Released => {
                        assert!(end.region.is_none() && end.ring_size == 0 && end.further.bytes() == 0);
                    }
                }
            }
        }
        for (channel, side) in self.inboxes.keys() {
            assert!(matches!(self.channels[channel].end(*side).state, EndState::Held { .. }), "an inbox of nobody");
        }
        assert_eq!(self.regions, regions);
        assert!(regions <= self.capacity.regions);
    }
}
