//! The loop: what programs say goes to the port, what the port says goes to programs, and descriptors are put in place.

mod inward;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use partywall_protocol::agent::{LastReason, Say};
use partywall_protocol::passed::{PassedSocket, PassedSockets, PassedState};
use partywall_protocol::socket::{ReceiverCookies, SocketFacts, SocketState};
use partywall_protocol::wire::{self, Message, Refusal};
use partywall_region::ending::has_ended;
use partywall_region::inspect::receivers::coarse_now;
use partywall_region::inspect::{Inspector, Unhurried};
use partywall_region::relay::{Doorbells, LinkUse, Notice, Notices, Relay};
use partywall_region::revocation::Revoker;
use partywall_region::{Link, packet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::doorbell::Doorbell;
use crate::flows::{FlowRequest, LocalFlows};
use crate::ghosts::{GhostHunt, HuntStep};
use crate::handshake::LocalHandshakes;
use crate::introduce::{Giver, Introductions, NearEnd, NoRoom, Parcel, ParcelContent};
use crate::listen::Listening;
use crate::receivers::{MachineReceivers, PublishRequest};
use crate::release::{ReleaseStep, Releasing};
use crate::removal;
use crate::windows::GuestWindows;

/// Between two looks for windows that are not there yet.
const LOOK: Duration = Duration::from_millis(100);
/// The pause between two looks for a doorbell device. A device that is there may never be usable, for want of an IOMMU.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// While this many bytes wait for the port, programs have to wait too (protocol P5).
const HIGH: usize = 64 << 10;
const SOON: Duration = Duration::from_millis(5);

/// The port is closed.
#[derive(Debug)]
pub(crate) struct ServingEnd {
    pub(crate) why: String,
}

/// A doorbell device that the host has told of.
#[derive(Debug)]
struct Expected {
    id: u128,
    seen: bool,
    /// Why it is not seen has been told.
    told: bool,
    next: Instant,
}

/// The session of a program.
#[derive(Debug)]
struct ProgramSession {
    socket: OwnedFd,
    /// The process that opened it; 0 if it has no number here.
    pid: u32,
    /// Its user. `None` if the kernel does not say.
    user: Option<u32>,
}

/// An agent at work.
#[derive(Debug)]
pub(crate) struct Serving {
    relay: Relay,
    listening: Listening,
    sessions: BTreeMap<u32, ProgramSession>,
    next_session: u32,
    next_link: u32,
    windows: GuestWindows,
    doorbell: Option<Expected>,
    introductions: Introductions,
    handshakes: LocalHandshakes,
    /// Flows of datagrams between programs of this machine.
    flows: LocalFlows,
    /// What programs state of sockets that they have passed on, by user.
    passed: PassedSockets<u32>,
    /// When the agent began, by which it counts the seconds.
    begun: Instant,
    inspector: Inspector,
    /// Which sockets receive datagrams.
    receivers: MachineReceivers,
    /// The revocation word for the directories of this machine's programs.
    revoker: Revoker,
    /// The windows that are being given up, because the machine is to be migrated.
    releasing: Option<Releasing>,
    /// Devices were removed, so the kernel has to look for them if the host announces windows again.
    has_removed: bool,
    hunt: GhostHunt,
}

impl Serving {
    pub(crate) fn new(relay: Relay, listening: Listening, number_record: &Path) -> io::Result<Self> {
        Ok(Self {
            relay,
            listening,
            sessions: BTreeMap::new(),
            next_session: 1,
            // The broker's links have odd numbers.
            next_link: 2,
            windows: GuestWindows::default(),
            doorbell: None,
            introductions: Introductions::default(),
            handshakes: LocalHandshakes::default(),
            flows: LocalFlows::default(),
            passed: PassedSockets::default(),
            begun: Instant::now(),
            inspector: Inspector::new().with_record_at(Some(number_record.to_owned())),
            receivers: MachineReceivers::open(),
            revoker: Revoker::new().map_err(io::Error::other)?,
            releasing: None,
            // An agent before it may have removed devices.
            has_removed: true,
            hunt: GhostHunt::default(),
        })
    }

    /// Until the port is closed.
    pub(crate) fn serve(mut self, notices: &Notices) -> io::Result<ServingEnd> {
        loop {
            let (accept, ready) = self.wait(notices)?;
            while let Some(notice) = notices.try_recv() {
                match notice {
                    Notice::Up => self.begin()?,
                    Notice::Alone => self.end("the broker is gone"),
                    Notice::Control(bytes) => match Say::decode(&bytes) {
                        Ok(said) => self.heard(said),
                        Err(error) => return Ok(ServingEnd { why: error.to_string() }),
                    },
                    Notice::Down { why } => return Ok(ServingEnd { why }),
                    Notice::Closed(_) | Notice::Silent => {}
                }
            }
            self.answer_about_receivers();
            self.look_for_windows();
            self.look_for_doorbell();
            self.go_on_releasing();
            self.handshakes.forget_old();
            self.flows.forget_old();
            self.introductions.forget_old();
            self.turn_down_given_up();
            if accept {
                self.accept();
            }
            for session in ready {
                self.read(session);
            }
        }
    }

    /// Whether a program wants to connect, and which sessions have input.
    fn wait(&self, notices: &Notices) -> io::Result<(bool, Vec<u32>)> {
        let mut fds = vec![PollFd::new(notices, PollFlags::IN)];
        let full = self.relay.waiting() > HIGH;
        // Once: the socket is in the list, or the wait ends with its rest.
        let rest = self.listening.rest();
        if !full {
            fds.extend(self.sessions.values().map(|of| PollFd::new(&of.socket, PollFlags::IN)));
            let listener = self.listening.ready_socket().filter(|_| rest.is_none());
            fds.extend(listener.map(|socket| PollFd::new(socket, PollFlags::IN)));
        }
        let looks = self.releasing.is_some()
            || !self.windows.all_seen()
            || self.doorbell.as_ref().is_some_and(|doorbell| !doorbell.seen);
        let offers = self.handshakes.patience().or(self.flows.patience()).or(self.introductions.patience());
        let limit = if full { Some(SOON) } else { looks.then_some(LOOK).or(offers) };
        let limit = limit.into_iter().chain(self.receivers.due_in()).chain(rest).min();
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready: Vec<bool> = fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect();
        let sessions = self.sessions.keys().copied().zip(&ready).filter_map(|(s, ready)| ready.then_some(s)).collect();
        Ok((ready.get(self.sessions.len()).is_some_and(|ready| *ready), sessions))
    }

    /// There is a broker, which knows nothing of what was before.
    fn begin(&mut self) -> io::Result<()> {
        self.end("a broker has greeted");
        // Programs that have the old word join again, and get this one.
        if self.revoker.is_revoked() {
            self.revoker = Revoker::new().map_err(io::Error::other)?;
        }
        self.listening.open()
    }

    /// The machine is to be migrated: ends what goes through windows, and begins to give these up.
    fn release(&mut self) {
        tracing::info!(sessions = self.sessions.len(), "the machine is to be migrated");
        self.listening.close();
        // No session is ended by its number: the broker ends them all when this is done.
        self.sessions.clear();
        self.introductions = Introductions::default();
        self.handshakes = LocalHandshakes::default();
        self.flows = LocalFlows::default();
        self.receivers.forget_all();
        self.revoker.revoke();
        let windows = self.windows.take();
        windows.ids.iter().for_each(|id| self.relay.forget(*id));
        // Programs of this machine find their channels to others moved, and not their peers dead (protocol G7.8).
        self.relay.leave();
        self.relay.hang_up_all();
        self.releasing = Some(Releasing::new(windows, self.revoker.inode()));
    }

    fn go_on_releasing(&mut self) {
        let Some(ReleaseStep::End(held)) = self.releasing.as_ref().map(Releasing::step) else { return };
        self.releasing = None;
        self.has_removed = true;
        if let Some(why) = &held {
            tracing::warn!(why, "the windows were not given up");
        }
        self.say(&Say::Released { held: LastReason(held.unwrap_or_default()) });
    }

    /// Looks for windows that are not there yet. A ghost would stand for one of them, so ghosts are removed before.
    fn look_for_windows(&mut self) {
        if self.windows.all_seen() {
            return self.hunt.end();
        }
        match self.hunt.step(self.revoker.inode()) {
            HuntStep::Wait => return,
            HuntStep::Removed => {
                self.has_removed = true;
                self.rescan();
            }
            HuntStep::Over => {}
        }
        for ((id, owner), memory) in self.windows.look() {
            self.relay.window(id, memory);
            self.say(&Say::Seen { id, owner });
        }
    }

    /// Has the kernel look for devices that were removed before.
    fn rescan(&mut self) {
        if std::mem::take(&mut self.has_removed)
            && let Err(error) = removal::rescan()
        {
            tracing::warn!(%error, "the kernel does not look for PCI devices, so windows that were removed may stay away");
        }
    }

    /// Ends all sessions; what links there were have been hung up.
    fn end(&mut self, why: &str) {
        tracing::info!(sessions = self.sessions.len(), "{why}");
        self.listening.close();
        self.sessions.clear();
        self.windows.take().ids.into_iter().for_each(|id| self.relay.forget(id));
        if self.doorbell.take().is_some() {
            self.relay.doorbells(Doorbells::None);
        }
        self.introductions = Introductions::default();
        self.handshakes = LocalHandshakes::default();
        self.flows = LocalFlows::default();
        self.receivers.forget_all();
        self.releasing = None;
    }

    /// Takes the doorbell device into use as soon as it is there.
    fn look_for_doorbell(&mut self) {
        let now = Instant::now();
        let Some(expected) = self.doorbell.as_mut().filter(|expected| !expected.seen && now >= expected.next) else {
            return;
        };
        let id = expected.id;
        match Doorbell::open(id) {
            Ok(Some(doorbell)) => {
                expected.seen = true;
                tracing::info!("programs in other machines ring, and are rung, by interrupts");
                self.relay.doorbells(Doorbells::Guest(Box::new(doorbell)));
                self.say(&Say::DoorbellSeen { id });
            }
            Ok(None) => expected.next = now + LOOK,
            Err(error) => {
                expected.next = now + LOOK_AGAIN;
                if !std::mem::replace(&mut expected.told, true) {
                    tracing::warn!(%error, "rings go by the serial port, which is slower");
                }
            }
        }
    }

    fn say(&self, what: &Say) {
        // Nothing that is said here is too long.
        let _ = self.relay.control(&what.encode());
    }

    fn accept(&mut self) {
        let Some(socket) = self.listening.accept() else { return };
        let peer = getsockopt(&socket, PeerCredentials).ok();
        let pid = peer.and_then(|peer| u32::try_from(peer.pid()).ok()).unwrap_or(0);
        let user = peer.map(|peer| peer.uid());
        let session = self.next_session;
        self.next_session = session.wrapping_add(1);
        self.sessions.insert(session, ProgramSession { socket, pid, user });
        self.say(&Say::Open { session, pid });
    }

    /// Ends a session whose program may live.
    fn close(&mut self, session: u32) {
        self.end_session(session, false);
    }

    fn end_session(&mut self, session: u32, by_program: bool) {
        if self.sessions.remove(&session).is_some() {
            self.introductions.session_ended(session);
            self.handshakes.session_ended(session);
            self.receivers.session_ended(session);
            // First: the broker ends these flows with the session.
            for (flow, tail) in self.flows.session_ended(session) {
                self.say(&Say::FlowWritten { flow, tail });
            }
            self.say(&Say::Close { session, by_program });
        }
    }

    /// Takes what a program says.
    fn read(&mut self, session: u32) {
        let mut buf = [0; wire::MAX_PACKET];
        let Some(of) = self.sessions.get(&session) else { return };
        match packet::try_recv(of.socket.as_fd(), &mut buf) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Ok(received) if received.len > 0 && !received.truncated => {
                self.pass_out(session, &buf[..received.len], received.fds);
            }
            _ => {
                // A program may also give its session up and live on.
                let by_program = packet::has_hung_up(of.socket.as_fd()) && has_ended(of.pid);
                self.end_session(session, by_program);
            }
        }
    }

    fn pass_out(&mut self, session: u32, bytes: &[u8], fds: Vec<OwnedFd>) {
        let mut links = Vec::new();
        let said = wire::decode(bytes);
        let numbered = said.as_ref().map_or(Some(false), |(request, _)| self.introductions.number(session, *request));
        // A program whose requests have one number could have its peer get memory that the broker has not accepted.
        let Some(is_new) = numbered else { return self.close(session) };
        match said {
            Ok((request, message)) if message.fd_count() != fds.len() => {
                let (due, came) = (message.fd_count(), fds.len());
                let reason = format!("{} brings {due} descriptors, but {came} came", message.name());
                return self.refuse(session, request, Refusal::Protocol, &reason);
            }
            Ok((request, message)) if message.brings_socket() => {
                return self.pass_out_socket((session, request, is_new), &message, bytes, fds);
            }
            Ok((_, Message::Cancel { offer })) => {
                self.handshakes.cancelled(session, offer);
                self.flows.cancelled(session, offer);
            }
            Ok((_, Message::Closed { channel })) => {
                self.handshakes.cancelled(session, channel);
                // First: the broker ends the flow by this message.
                if let Some(tail) = self.flows.closed(session, channel) {
                    self.say(&Say::FlowWritten { flow: channel, tail });
                }
            }
            Ok((request, Message::FetchReceiver { flow })) => match self.flows.fetch((session, request), flow) {
                FlowRequest::Twice => return self.close(session),
                FlowRequest::Full => return self.refuse_flow(session, request),
                FlowRequest::Fine | FlowRequest::BadRegion => {}
            },
            // First: what the agent answers from here on does not count the socket.
            Ok((_, Message::Withdraw { key })) => self.receivers.withdrawn(session, key),
            // To the broker, all programs of this machine are of one user.
            Ok((_, Message::Passed { socket, carrier, side, rings })) => {
                return self.passed(session, PassedSocket { socket, carrier }, PassedState { side, rings });
            }
            Ok((request, Message::TakePassed { socket, carrier })) => {
                return self.take_passed(session, request, PassedSocket { socket, carrier });
            }
            Ok((request, Message::Connect { directions, region, .. })) => {
                if region.is_in_window() {
                    let Ok(near) = self.begin_links(directions.count(), &mut links) else { return self.close(session) };
                    self.introductions.ask_elsewhere(session, request, near);
                } else {
                    self.introductions.ask(session, request, fds);
                }
            }
            Ok((_, message)) if !is_new && parcel_of(&message).is_some() => return self.close(session),
            Ok((request, message)) => {
                if let Some(parcel) = parcel_of(&message)
                    && self.give((session, request), parcel, fds).is_err()
                {
                    let reason = "too much memory is in transit between programs of this machine; try again";
                    return self.refuse(session, request, Refusal::OutOfResources, reason);
                }
            }
            Err(_) => {}
        }
        self.pass_on(session, links, LinkUse::Channel, None, bytes);
    }

    /// A program brings memory for its peer.
    fn give(&mut self, (session, request): (u32, u32), parcel: Parcel, fds: Vec<OwnedFd>) -> Result<(), NoRoom> {
        let from = Giver { session, request, user: self.sessions.get(&session).and_then(|of| of.user) };
        fds.into_iter().try_for_each(|memory| self.introductions.give(from, parcel, memory))
    }

    /// A program has passed a socket to another one, and holds it no more (protocol T13.15).
    fn passed(&mut self, session: u32, of: PassedSocket, state: PassedState) {
        if let Some(user) = self.sessions.get(&session).and_then(|of| of.user) {
            self.passed.state(user, of, state, self.begun.elapsed().as_secs());
        }
    }

    /// A program has received a socket, and asks whether it is the only one that holds it.
    fn take_passed(&mut self, session: u32, request: u32, of: PassedSocket) {
        let user = self.sessions.get(&session).and_then(|of| of.user);
        let state = user.and_then(|user| self.passed.take(&user, of, self.begun.elapsed().as_secs()));
        let answer = state.map_or(Message::Done {}, |PassedState { side, rings }| Message::PassedIs { side, rings });
        let mut out = Vec::new();
        wire::encode(request, &answer, &mut out);
        self.send(session, &out, &[]);
    }

    /// A program shows a socket: what this machine's kernel says of it goes to the broker, and the socket does not.
    fn pass_out_socket(
        &mut self,
        (session, request, is_new): (u32, u32, bool),
        message: &Message,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) {
        let mut fds = fds.into_iter();
        let Some(socket) = fds.next() else { return };
        let facts = match self.inspector.inspect(Unhurried(socket), message.shows_connection()) {
            Ok(facts) => facts,
            Err(why) => return self.refuse(session, request, Refusal::BadSocket, &why),
        };
        if message.shows_connection() && facts.state == SocketState::Established && facts.identity.numbers.is_none() {
            static TOLD: std::sync::Once = std::sync::Once::new();
            TOLD.call_once(|| {
                tracing::warn!(
                    "connections of unmodified programs to other machines stay on TCP: the agent may not read their sequence numbers; it takes CAP_NET_ADMIN, or `partywall numbers on` before they begin"
                );
            });
        }
        let mut links = Vec::new();
        if matches!(message, Message::Offer { .. } | Message::Take { .. }) {
            // The broker knows whether the other end is on another machine, where the bell is a link.
            let Ok(near) = self.begin_links(1, &mut links) else { return self.close(session) };
            self.introductions.ask_elsewhere(session, request, near);
        }
        // The broker's answer to an earlier request of this number would count for the socket.
        if is_new && matches!(message, Message::Publish { .. }) {
            match self.receivers.show((session, request), &facts) {
                PublishRequest::Fine => {}
                PublishRequest::Twice => return self.close(session),
                PublishRequest::Full => {
                    let reason = "too many sockets of SO_REUSEPORT groups wait for the broker's answer";
                    return self.refuse(session, request, Refusal::OutOfResources, reason);
                }
            }
        }
        let memory = fds.next();
        if matches!(message, Message::OfferDatagrams { .. } | Message::TakeDatagrams { .. }) {
            match self.flows.bring((session, request), message, &facts, memory) {
                FlowRequest::Fine => {}
                FlowRequest::Twice => return self.close(session),
                FlowRequest::Full => return self.refuse_flow(session, request),
                FlowRequest::BadRegion => {
                    let reason = "a region must be a memfd of the size that is said, wholly allocated and sealed (protocol M1, M2)";
                    return self.refuse(session, request, Refusal::BadRegion, reason);
                }
            }
        } else {
            self.handshakes.ask((session, request), message, memory);
        }
        self.pass_on(session, links, LinkUse::Bell, Some(facts), bytes);
        // Last: a program that does not take it loses its session, and with it what the agent keeps for the request.
        if message.is_step_of_handshake() {
            // The program may use the socket again, while the host's answer is under way (protocol T3.12).
            let mut read = Vec::new();
            wire::encode(request, &Message::SocketRead {}, &mut read);
            self.send(session, &read, &[]);
        }
    }

    /// Makes links to another machine. Returns the program's ends, and appends the relay's ends with their numbers to `links`.
    fn begin_links(&mut self, count: usize, links: &mut Vec<(u32, OwnedFd)>) -> io::Result<Vec<NearEnd>> {
        let mut near = Vec::new();
        for _ in 0..count {
            let (here, there) = Link::pair()?;
            near.push(NearEnd { link: self.next_link, end: here });
            links.push((self.next_link, there));
            self.next_link = self.next_link.wrapping_add(2);
        }
        Ok(near)
    }

    fn pass_on(
        &mut self,
        session: u32,
        links: Vec<(u32, OwnedFd)>,
        carries: LinkUse,
        socket: Option<SocketFacts>,
        bytes: &[u8],
    ) {
        let numbers = links.iter().map(|(number, _)| *number).collect();
        let said = Say::Packet { session, window: None, links: numbers, socket, bytes: bytes.to_vec() };
        let _ = self.relay.control_with(&said.encode(), links, carries);
    }

    fn refuse(&mut self, session: u32, request: u32, code: Refusal, reason: &str) {
        let mut out = Vec::new();
        wire::encode(request, &Message::Refused { code, reason: reason.to_owned() }, &mut out);
        self.send(session, &out, &[]);
    }

    /// The agent keeps as many flows within this machine as it may. Their programs' datagrams stay on the kernel.
    fn refuse_flow(&mut self, session: u32, request: u32) {
        const REASON: &str = "the agent keeps as many flows of datagrams within this machine as it can";
        static TOLD: std::sync::Once = std::sync::Once::new();
        TOLD.call_once(|| tracing::warn!("{REASON}; more datagrams between its programs stay on the kernel"));
        self.refuse(session, request, Refusal::OutOfResources, REASON);
    }

    /// Sends to a program. A program that does not read its answers is disconnected (protocol C12).
    fn send(&mut self, session: u32, bytes: &[u8], with: &[OwnedFd]) {
        let Some(of) = self.sessions.get(&session) else { return };
        let with: Vec<BorrowedFd<'_>> = with.iter().map(AsFd::as_fd).collect();
        if packet::try_send(of.socket.as_fd(), bytes, &with).is_err() {
            self.close(session);
        }
    }

    fn heard(&mut self, said: Say) {
        match said {
            Say::Name { name } => tracing::info!("this machine is {name}"),
            // Announcements that were under way when the release began are of no use.
            Say::Window { .. } if self.releasing.is_some() => {}
            Say::Window { id, owner, peer } => {
                self.rescan();
                if self.windows.is_seen(id, owner) {
                    self.say(&Say::Seen { id, owner });
                }
                self.windows.expect(id, owner, peer.0);
            }
            Say::Doorbell { id } => {
                if self.doorbell.as_ref().is_none_or(|known| known.id != id) {
                    self.relay.doorbells(Doorbells::None);
                    self.doorbell = Some(Expected { id, seen: false, told: false, next: Instant::now() });
                }
            }
            Say::Close { session, .. } => {
                self.sessions.remove(&session);
                self.introductions.session_ended(session);
                self.handshakes.session_ended(session);
                self.receivers.session_ended(session);
                // The broker has ended the flows already.
                self.flows.session_ended(session);
            }
            Say::Packet { session, window, links, bytes, .. } => self.pass_in(session, window, &links, &bytes),
            Say::Release {} => self.release(),
            Say::FindReceivers { number, questions } => self.receivers.ask(number, questions),
            // Not for a broker to say.
            Say::Released { .. }
            | Say::Open { .. }
            | Say::Seen { .. }
            | Say::DoorbellSeen { .. }
            | Say::ReceiversAre { .. }
            | Say::FlowWritten { .. } => {}
        }
    }

    /// Answers the broker's questions which sockets of this machine receive certain datagrams (protocol U14), as far as it is their turn.
    fn answer_about_receivers(&mut self) {
        while let Some((number, questions)) = self.receivers.next_question() {
            // Before the kernel is asked: what it says holds from then on.
            let at = coarse_now();
            let netns = self.receivers.netns();
            let (receivers, lost) = self.flows.answer(&questions, |questions| self.receivers.find(questions));
            // First: the broker ends these flows by the answer.
            for (flow, tail) in lost {
                self.say(&Say::FlowWritten { flow, tail });
            }
            self.say(&Say::ReceiversAre { number, netns, at, receivers: ReceiverCookies(receivers) });
        }
    }
}

/// The memory that a program brings for its peer by this message. The host cannot check it: it only names the program that is to get it.
fn parcel_of(message: &Message) -> Option<Parcel> {
    match *message {
        Message::Accepted { channel, region, .. } if !region.is_in_window() => Some((channel, ParcelContent::Endpoint)),
        Message::Grow { channel, side, generation, .. } => Some((channel, ParcelContent::Ring(side, generation))),
        Message::AddRegion { channel, side, number, region, .. } if !region.is_in_window() => {
            Some((channel, ParcelContent::Further(side, number)))
        }
        _ => None,
    }
}
