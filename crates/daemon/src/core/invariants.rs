//! What is true of the core between any two events. Tests ask after every one of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use partywall_protocol::directory::slot_of;
use partywall_protocol::wire::Origin;
use partywall_protocol::wire::Side;

use super::channel::{Channel, EndState};
use super::further::MOST_OWNED;
use super::service::MAX_WAITING;
use super::socket::{Offer, Publication, Sockets};
use super::{Core, Descriptor};

impl<F: Descriptor> Core<F> {
    /// Panics if the tables contradict each other.
    pub(crate) fn check_invariants(&self) {
        self.check_sessions();
        self.check_domains();
        self.check_services();
        self.check_channels();
        self.check_sockets();
        self.check_groups();
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
            assert_eq!(domain.ends as usize, live().count());
            assert_eq!(domain.ring_bytes, live().map(|e| e.ring_size + e.further.bytes()).sum::<u64>());
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
        for (machine, counts) in &self.sockets.machine_counts {
            let of = |origin: Origin| origin == (*machine).into();
            assert_eq!(counts.offers, offers.values().filter(|offer| of(offer.peer.origin())).count());
            let published = publications.values().filter(|publication| of(publication.netns.origin));
            assert_eq!(counts.entries, published.map(Publication::entries).sum::<usize>());
        }
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
            assert_eq!(handshake.far.is_none(), handshake.taker.is_some(), "who has the bells has taken");
            assert!(handshake.confirmed.is_none() || handshake.taker.is_some());
            if let Some(taker) = &handshake.taker {
                assert!(self.sessions[&taker.session].takes.contains(id) && in_use[&taker.socket.id()] == *id);
            }
        }
        assert_eq!(offered.values().map(Vec::len).sum::<usize>(), offers.len());
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
        let flows: BTreeSet<_> = self.channels.iter().filter(|(_, c)| c.is_flow()).map(|(id, _)| *id).collect();
        assert_eq!(flows, self.sockets.flows.keys().copied().collect());
        let offered = offers.iter().filter(|(_, offer)| offer.to().is_some()).map(|(id, _)| *id);
        let slots: Vec<_> = flows.iter().copied().chain(offered).map(slot_of).collect();
        assert_eq!(slots.len(), self.sockets.slots.len(), "two flows of one slot");
        assert!(slots.iter().all(|slot| self.sockets.slots.contains(slot)));
        let ends = self.channels.values().flat_map(|c| &c.ends);
        for end in ends {
            assert!(end.socket.is_none_or(|s| end.state.is_live() && in_use.contains_key(&s)));
        }
        let mut counted = HashMap::<_, BTreeMap<_, u32>>::new();
        for publication in publications.values() {
            for listener in &publication.listeners {
                *counted.entry(listener.fingerprint).or_default().entry(publication.netns).or_default() += 1;
            }
        }
        assert_eq!(counted, *listening);
    }

    fn check_channels(&self) {
        let mut regions = 0;
        for (id, channel) in &self.channels {
            assert!(*id < self.next_channel);
            assert!(channel.is_live(), "a channel that nobody answers for");
            for end in &channel.ends {
                regions += usize::from(end.region.is_some());
                assert!(end.further.owned() <= MOST_OWNED);
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
