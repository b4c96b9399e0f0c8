//! Events that clients follow: what the broker has decided, and what has come and gone (protocol C18).
//!
//! ```text
//!   note(happened) --> log, within the user's budget
//!                 \--> the queue of each follower that may see it --- FollowEvents { after } ---> Events { lost, page }
//! ```
//!
//! A queue is bounded: the oldest event makes room, and the answer to the follower counts the lost ones. Without followers nothing is kept.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use partywall_protocol::wire::{EventKind, EventRow, Message, Origin, Page, Refusal, User};

use super::happened::{Happened, Party, is_logged};
use super::id::{DomainId, SessionId};
use super::refuse::{Denial, Refuse, refuse};
use super::{Core, Descriptor};
use crate::credentials::{Credentials, Home};

/// Events that are kept for one follower.
pub(super) const KEPT: usize = 1024;
/// Events of one user that are kept in any case for each follower.
const KEPT_OF_USER: usize = KEPT / 8;
/// More rows than the smallest of them fit into a packet; encoding cuts the page to what does.
const ROWS: usize = 80;
/// Sessions of one account that follow.
const MOST_OF_ACCOUNT: usize = 4;
/// Sessions that follow and are no administrator's.
const MOST: usize = 32;

/// A session that follows.
#[derive(Debug)]
struct Follower {
    peer: Credentials,
    domain: DomainId,
    queue: VecDeque<Arc<EventRow>>,
    /// How many of the queue are of each user.
    by_user: HashMap<User, usize>,
    lost: u64,
    /// The request that waits for an event.
    waiting: Option<u32>,
}

/// The followers, and the number of the last event.
#[derive(Debug, Default)]
pub(super) struct EventQueues {
    last: u64,
    followers: BTreeMap<SessionId, Follower>,
}

impl EventQueues {
    /// Whether there are no followers.
    pub(super) fn is_idle(&self) -> bool {
        self.followers.is_empty()
    }

    pub(super) fn forget(&mut self, session: SessionId) {
        self.followers.remove(&session);
    }
}

/// The subject of a request, recorded in case the request is refused.
#[derive(Debug)]
pub(super) struct AskedFor {
    kind: EventKind,
    from: String,
    to: String,
    service: String,
}

impl AskedFor {
    pub(super) fn of(message: &Message) -> Option<Self> {
        let (to, service) = Default::default();
        match message {
            Message::Join { name, .. } => Some(Self { kind: EventKind::JoinRefused, from: name.clone(), to, service }),
            Message::Connect { target, service, .. } => {
                let (from, to, service) = (String::new(), target.clone(), service.clone());
                Some(Self { kind: EventKind::ConnectRefused, from, to, service })
            }
            _ => None,
        }
    }
}

impl Follower {
    /// Adds an event. If there is no room, the oldest is lost; but an event of a user who has many in a queue that is half full is lost itself,
    /// so one user does not push out the others' events.
    fn keep(&mut self, row: Arc<EventRow>) {
        let own = self.by_user.get(&row.user).copied().unwrap_or(0);
        if self.queue.len() >= KEPT / 2 && own >= KEPT_OF_USER {
            self.lost += 1;
            return;
        }
        if self.queue.len() >= KEPT {
            self.forget_oldest();
            self.lost += 1;
        }
        *self.by_user.entry(row.user).or_default() += 1;
        self.queue.push_back(row);
    }

    fn forget_oldest(&mut self) {
        let Some(row) = self.queue.pop_front() else { return };
        if let Some(own) = self.by_user.get_mut(&row.user) {
            *own -= 1;
            if *own == 0 {
                self.by_user.remove(&row.user);
            }
        }
    }

    fn may_see(&self, administrator: bool, kind: EventKind, parties: [Option<Party>; 2]) -> bool {
        administrator
            || !is_for_administrators(kind)
                && parties.into_iter().flatten().any(|party| {
                    party.user == self.peer.user
                        && (self.peer.sees_what_its_user_has() || party.domain == self.domain && party.domain != 0)
                })
    }
}

fn is_for_administrators(kind: EventKind) -> bool {
    matches!(
        kind,
        EventKind::MachineAttached
            | EventKind::MachineDetached
            | EventKind::MachineUp
            | EventKind::MachineDown
            | EventKind::PolicyChanged
            | EventKind::MovesChanged
    )
}

impl<F: Descriptor> Core<F> {
    pub(super) fn follow_events(&mut self, id: SessionId, request: u32, after: u64) -> Result<(), Refuse> {
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        if !self.events.followers.contains_key(&id) {
            self.may_follow(peer)?;
            let follower =
                Follower { peer, domain, queue: VecDeque::new(), by_user: HashMap::new(), lost: 0, waiting: None };
            self.events.followers.insert(id, follower);
            // At once, so that the client knows from which moment on it misses nothing.
            let page = Page { more: false, rows: Vec::new() };
            self.send(id, request, Message::Events { lost: 0, page });
            return Ok(());
        }
        let Some(follower) = self.events.followers.get_mut(&id) else { return Ok(()) };
        if follower.waiting.is_some() {
            return refuse(Refusal::Protocol, "this session waits for events already");
        }
        while follower.queue.front().is_some_and(|first| first.number <= after) {
            follower.forget_oldest();
        }
        follower.waiting = Some(request);
        Ok(())
    }

    fn may_follow(&self, peer: Credentials) -> Result<(), Refuse> {
        let account = peer.account();
        let followers = || self.events.followers.values();
        let of_account = followers().filter(|follower| follower.peer.account() == account).count();
        if of_account >= MOST_OF_ACCOUNT {
            return refuse(
                Refusal::Quota,
                format!("{of_account} sessions of {account} follow events, the most there can be"),
            );
        }
        let others = followers().filter(|follower| !self.policy.is_administrator(follower.peer)).count();
        if others >= MOST && !self.policy.is_administrator(peer) {
            return refuse(Refusal::Quota, format!("{others} sessions follow events, the most there can be"));
        }
        Ok(())
    }

    /// Notes an event of a program: for the log, and for those who follow.
    pub(super) fn note(&mut self, kind: EventKind, peer: Credentials, domain: DomainId, happened: Happened) {
        if is_logged(kind, happened.code) && self.log.allows(peer.user, self.now) {
            happened.log(kind, peer);
        }
        self.record(kind, peer.user, peer.pid, domain, happened);
    }

    /// Notes what the policy has denied.
    pub(super) fn note_denied(&mut self, denial: Denial) {
        let Denial { kind, peer, domain, from, to, service, other, ruling } = denial;
        if kind == EventKind::RingRefused {
            self.tally.decision("ring", &ruling);
        }
        let happened = Happened { code: Some(Refusal::Denied), from, to, service, other, ..Happened::by(&ruling) };
        self.note(kind, peer, domain, happened);
    }

    /// Notes a refusal for another reason than the policy's.
    pub(super) fn note_refused(&mut self, id: SessionId, wanted: Option<AskedFor>, code: Refusal, reason: &str) {
        let (Some(AskedFor { kind, from, to, service }), Some(session)) = (wanted, self.sessions.get(&id)) else {
            return;
        };
        let (peer, domain) = (session.peer, session.domain.unwrap_or(0));
        let from = self.name_of(domain).map_or(from, |name| name.to_string());
        let happened =
            Happened { code: Some(code), from, to, service, grounds: reason.to_owned(), ..Happened::default() };
        self.note(kind, peer, domain, happened);
    }

    /// Notes an event for those who follow, of no process.
    pub(super) fn note_of(&mut self, kind: EventKind, party: Party, happened: Happened) {
        self.record(kind, party.user, 0, party.domain, happened);
    }

    pub(super) fn record(&mut self, kind: EventKind, user: User, pid: u32, domain: DomainId, happened: Happened) {
        if self.events.followers.is_empty() {
            return;
        }
        self.events.last += 1;
        let parties = [Some(Party { user, domain }), happened.other];
        let Happened { channel, code, from, to, service, grounds, line, other: _ } = happened;
        let row = EventRow {
            number: self.events.last,
            at_s: self.now,
            kind,
            user,
            pid,
            channel,
            code: code.map_or(0, Refusal::number),
            line,
            from,
            to,
            service,
            grounds,
        };
        let row = Arc::new(row);
        for follower in self.events.followers.values_mut() {
            if !follower.may_see(self.policy.is_administrator(follower.peer), kind, parties) {
                continue;
            }
            follower.keep(Arc::clone(&row));
        }
    }

    /// Answers those who wait for events of which there are some now.
    pub(super) fn serve_followers(&mut self) {
        let mut answers = Vec::new();
        for (id, follower) in &mut self.events.followers {
            if follower.queue.is_empty() {
                continue;
            }
            if let Some(request) = follower.waiting.take() {
                let at_home = follower.peer.home == Home::Broker;
                let same_machine = |user: User| user.origin() == follower.peer.origin();
                let seen = |row: &Arc<EventRow>| {
                    let mut row = EventRow::clone(row);
                    // Where clauses are is no business of a container's or a virtual machine's (C18.4), and the number of a process means
                    // nothing elsewhere.
                    if !at_home {
                        row.line = 0;
                    }
                    // A user that the policy kept apart must not learn from the event whose domain it was.
                    if row.kind == EventKind::RingRefused && !self.policy.is_administrator(follower.peer) {
                        row.to.clear();
                    }
                    if follower.peer.origin() != Origin::Host && !same_machine(row.user) {
                        row.pid = 0;
                    }
                    row
                };
                let rows = follower.queue.iter().take(ROWS).map(seen).collect();
                let page = Page { more: follower.queue.len() > ROWS, rows };
                answers.push((*id, request, Message::Events { lost: follower.lost, page }));
            }
        }
        for (id, request, message) in answers {
            self.send(id, request, message);
        }
    }
}
