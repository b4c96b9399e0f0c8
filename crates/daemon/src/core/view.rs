//! `List` and `Inspect`: what a domain may see of the others (protocol C10).
//!
//! A client sees its user's domains and those that the policy lets it reach or be reached from, the services it may
//! connect to, and its user's channels. An administrator sees everything.

use partywall_protocol::wire::{ChannelRow, DomainRow, Kind, Message, Page, Refusal, ServiceRow, Side, What};

use super::channel::{Channel, ChannelEnd, EndState};
use super::domain::DomainRecord;
use super::id::{ChannelId, DomainId};
use super::refuse::{Refuse, refuse};
use super::service::Service;
use super::{Action, Core, Descriptor, SessionId};
use crate::credentials::Credentials;

/// More rows than the smallest of them fit into a packet; encoding cuts the page to what does.
const ROWS: usize = 140;

/// The client that a list is made for.
struct ViewSubject<'a> {
    id: DomainId,
    domain: &'a DomainRecord,
    peer: Credentials,
    administrator: bool,
}

impl<F: Descriptor> Core<F> {
    /// The domain and credentials of a session that has joined.
    pub(super) fn member(&self, id: SessionId) -> Option<(DomainId, &DomainRecord, Credentials)> {
        let session = self.sessions.get(&id)?;
        let domain = session.domain?;
        Some((domain, self.domains.get(&domain)?, session.peer))
    }

    pub(super) fn list(&mut self, id: SessionId, request: u32, what: What, after: u64) -> Result<(), Refuse> {
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        let administrator = self.policy.is_administrator(peer);
        let viewer = ViewSubject { id: domain_id, domain, peer, administrator };
        // Every key is far below the greatest number, which therefore has nothing after it.
        let from = after.saturating_add(1);
        let message = match what {
            What::Domains => {
                let from = DomainId::try_from(from).ok();
                let all = from.into_iter().flat_map(|from| self.domains.range(from..));
                let seen = all.filter(|(_, domain)| self.sees_domain(&viewer, domain));
                Message::Domains { page: page(seen.map(|(&id, domain)| domain_row(id, domain))) }
            }
            What::Services => {
                let seen = self.services.range(from..).filter(|(_, service)| self.sees_service(&viewer, service));
                Message::Services { page: page(seen.map(|(&key, service)| self.service_row(key, service))) }
            }
            What::Channels => {
                let seen = self.channels.range(from..).filter(|(_, channel)| sees_channel(&viewer, channel));
                Message::Channels { page: page(seen.map(|(&id, channel)| channel_row(id, channel))) }
            }
            What::Machines if !administrator => {
                return refuse(Refusal::Denied, "virtual machines are for administrators to see");
            }
            What::Machines => Message::Machines { page: page(self.machine_rows(after).into_iter()) },
            What::Groups => Message::Groups { page: page(self.group_rows(&domain.name, peer, after).into_iter()) },
        };
        self.send(id, request, message);
        Ok(())
    }

    pub(super) fn inspect(&mut self, id: SessionId, request: u32, channel: ChannelId) -> Result<(), Refuse> {
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        let administrator = self.policy.is_administrator(peer);
        let own = |end: &ChannelEnd<F>| is_own(end, domain, peer);
        let visible = |c: &&Channel<F>| administrator || c.ends.iter().any(own);
        let Some(found) = self.channels.get(&channel).filter(visible) else {
            return refuse(Refusal::NoSuchChannel, format!("there is no channel {channel}, or it is none of yours"));
        };
        // The content of a connection is shown only to the user of that end. The other end, if it is honest, has mapped it already.
        let shown = |end: &&ChannelEnd<F>| administrator || found.kind != Kind::Socket || own(end);
        let region = |side| Some(found.end(side)).filter(shown).and_then(|end| end.region.clone());
        let (connecting, accepting) = (region(Side::Connecting), region(Side::Accepting));
        let message = Message::Regions { connecting: connecting.is_some(), accepting: accepting.is_some() };
        let descriptors: Vec<F> = connecting.into_iter().chain(accepting).collect();
        self.actions.push(Action::Send { session: id, request, message, descriptors });
        Ok(())
    }

    fn sees_domain(&self, viewer: &ViewSubject<'_>, domain: &DomainRecord) -> bool {
        let me = &viewer.domain.name;
        viewer.administrator
            || *me == domain.name
            || viewer.peer.is_user_of(domain.founder)
            || self.policy.may_reach(me, &domain.name)
            || self.policy.may_reach(&domain.name, me)
    }

    fn sees_service(&self, viewer: &ViewSubject<'_>, service: &Service) -> bool {
        let Some(domain) = self.domains.get(&service.domain) else { return false };
        let me = &viewer.domain.name;
        viewer.id == service.domain
            || viewer.peer.is_user_of(domain.founder)
            || self.policy.may_connect(viewer.peer, me, &domain.name, &service.name)
    }

    fn service_row(&self, key: u64, service: &Service) -> ServiceRow {
        ServiceRow {
            key,
            domain: service.domain,
            kind: service.kind,
            accepted: service.accepted,
            waiting: service.waiting,
            name: service.name.to_string(),
            domain_name: self.domains.get(&service.domain).map(|d| d.name.to_string()).unwrap_or_default(),
        }
    }
}

/// Whether an end is the client's own: of its user, or, for a client in a container, of its user and its domain.
fn is_own<F>(end: &ChannelEnd<F>, domain: DomainId, peer: Credentials) -> bool {
    end.user == Some(peer.user) && (peer.sees_what_its_user_has() || end.domain == domain)
}

/// A side that has not come back after a restart is known by name only; its domain sees the channel all the same.
fn sees_channel<F>(viewer: &ViewSubject<'_>, channel: &Channel<F>) -> bool {
    viewer.administrator
        || channel.ends.iter().any(|end| match end.user {
            Some(_) => is_own(end, viewer.id, viewer.peer),
            // The name of such an end of a connection is not verified.
            None => channel.kind != Kind::Socket && end.name == viewer.domain.name,
        })
}

fn page<T>(rows: impl Iterator<Item = T>) -> Page<T> {
    let mut rows: Vec<T> = rows.take(ROWS + 1).collect();
    let more = rows.len() > ROWS;
    rows.truncate(ROWS);
    Page { more, rows }
}

fn domain_row(id: DomainId, domain: &DomainRecord) -> DomainRow {
    DomainRow {
        id,
        epoch: domain.epoch,
        sessions: domain.sessions,
        channels: domain.ends - domain.processes.values().map(|process| process.ended.len() as u32).sum::<u32>(),
        user: domain.founder.user,
        pid: domain.founder.pid,
        name: domain.name.to_string(),
    }
}

fn channel_row<F>(channel: ChannelId, of: &Channel<F>) -> ChannelRow {
    let (from, to) = (of.end(Side::Connecting), of.end(Side::Accepting));
    ChannelRow {
        channel,
        from: from.domain,
        to: to.domain,
        kind: of.kind,
        directions: of.directions,
        accepted: !matches!(to.state, EndState::Waiting { .. }),
        since_s: of.since,
        from_name: from.name.to_string(),
        to_name: to.name.to_string(),
        service: of.service.to_string(),
    }
}
