//! An open port: sessions of the guest's programs, links of its channels, and the windows that it gets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use partywall_protocol::agent::{LastName, Say};
use partywall_protocol::socket::SocketFacts;
use partywall_protocol::window::WindowId;
use partywall_protocol::wire::{self, BellWay, Message, Refusal, RungBy};
use partywall_region::packet;
use partywall_region::relay::{Doorbells, LinkUse, Notice, Notices, Relay};
use partywall_vm::ivshmem::Switchboard;
use rustix::event::{PollFd, PollFlags};

use super::held::HeldPackets;
use super::sent::{SentPacket, SentPackets, Sessions};
use super::{Announced, Announcement, Attend, Part, PortOrders, Stop, wait};
use crate::control::Errand;
use crate::core::MachineNews;
use crate::machines::{Task, carried};

/// Sessions that one guest may have at a time.
pub(crate) const MOST_SESSIONS: usize = 512;
/// Links that one guest may have at a time.
const MOST_LINKS: usize = 4096;
/// While this many bytes wait for the port, sessions have to wait too (protocol P5).
const HIGH: usize = 64 << 10;
/// While this many of a port's errands wait for the event loop, its guest is not heard (protocol P5). Some bring a descriptor.
pub(super) const MOST_ERRANDS: usize = 64;
/// Questions about sockets whose answers are passed on: more than the event loop sends before it asks them again.
pub(super) const MOST_ASKED: usize = 256;
const SOON: Duration = Duration::from_millis(5);
/// How long an agent may take to give up the windows: longer than it waits for its programs.
const RELEASE: Duration = Duration::from_secs(60);

/// How many links a request of a guest's program asks for: those of a channel to another machine, and the one of a connection that may lead to
/// one.
fn links_of(message: &Message) -> usize {
    match message {
        Message::Connect { directions, region, .. } if region.is_in_window() => directions.count(),
        // The broker finds out whether the other end is on another machine.
        Message::Offer { .. } | Message::Take { .. } => 1,
        _ => 0,
    }
}

/// A port whose other end is open.
pub(super) struct Open<'a> {
    at: &'a Attend,
    relay: Relay,
    sessions: Sessions,
    /// The next packet of each session, in the order of the broker.
    sent: SentPackets,
    /// Packets for the broker that wait for room in the sockets of their sessions. The guest is not heard meanwhile.
    held: HeldPackets<'a>,
    links: BTreeSet<u32>,
    /// Numbers that the guest has given to links which the broker is asked to make: by session and request.
    connecting: BTreeMap<(u32, u32), Vec<u32>>,
    next_link: u32,
    windows: Vec<Announcement>,
    /// The newest questions about sockets that the guest has not answered, in the order in which they were sent.
    asked: VecDeque<u32>,
    /// Orders wait until the guest takes something.
    orders_left: bool,
    /// A connection was turned down.
    has_turned_down: bool,
    /// The doorbell device that the guest has been told of, and whether it has said that it uses it.
    doorbell: Option<(Switchboard, bool)>,
    /// When the guest must have given up its windows, if it is to.
    release_by: Option<Instant>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.end_release(Some("its agent has ended, or the port was closed".to_owned()));
    }
}

impl<'a> Open<'a> {
    pub(super) fn new(at: &'a Attend, relay: Relay) -> Self {
        let (sessions, links, connecting) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        // The guest's own links have even numbers.
        Self {
            at,
            relay,
            sessions,
            sent: SentPackets::default(),
            held: HeldPackets::new(at.nothing.as_fd()),
            links,
            connecting,
            next_link: 1,
            windows: Vec::new(),
            asked: VecDeque::new(),
            orders_left: false,
            has_turned_down: false,
            doorbell: None,
            release_by: None,
        }
    }

    /// Until the port is closed.
    pub(super) fn serve(&mut self, notices: &Notices) -> Result<(), Stop> {
        loop {
            for session in self.held.send_waiting(&self.sessions) {
                self.close(session);
            }
            let full = self.is_full();
            let polled = if full { 0 } else { self.sessions.len() };
            let ready = {
                let mut fds = vec![PollFd::new(&*self.at.bell, PollFlags::IN)];
                fds.extend(self.sessions.values().take(polled).map(|socket| PollFd::new(socket, PollFlags::IN)));
                if self.may_hear() {
                    fds.push(PollFd::new(notices, PollFlags::IN));
                }
                let full_socket = self.held.full_socket(&self.sessions);
                fds.extend(full_socket.map(|socket| PollFd::new(socket, PollFlags::OUT)));
                let limit = match (full, self.sent.is_empty()) {
                    (false, false) => Some(Duration::ZERO),
                    _ if full || self.orders_left => Some(SOON),
                    _ => self.release_patience(),
                };
                wait(&fds, limit).unwrap_or_default()
            };
            let ready_sessions = self.sessions.keys().copied().zip(ready.iter().skip(1).take(polled));
            let sessions: Vec<u32> = ready_sessions.filter_map(|(s, r)| r.then_some(s)).collect();
            self.hear_orders()?;
            if self.release_patience().is_some_and(|left| left.is_zero()) {
                self.end_release(Some(format!("its agent has not answered within {RELEASE:?}")));
                // An answer that still comes must not count for the next request. Both sides begin again.
                return Ok(());
            }
            // The relay stops reading when this thread does.
            while self.may_hear()
                && let Some(notice) = notices.try_recv()
            {
                match notice {
                    Notice::Up => self.begin(),
                    Notice::Control(bytes) => match Say::decode(&bytes) {
                        Ok(said) => self.heard(said),
                        Err(error) => {
                            if self.at.log.may(Instant::now()) {
                                tracing::warn!(machine = self.at.name, %error, "port closed");
                            }
                            return Ok(());
                        }
                    },
                    Notice::Closed(link) => drop(self.links.remove(&link)),
                    Notice::Silent => {
                        tracing::warn!(machine = self.at.name, "the machine hangs, or its agent has ended");
                        self.forget_sessions();
                        self.at.say_up(false);
                    }
                    Notice::Down { why } => {
                        if self.at.log.may(Instant::now()) {
                            tracing::info!(machine = self.at.name, why, "port closed");
                        }
                        return Ok(());
                    }
                    Notice::Alone => {}
                }
            }
            if !self.is_full() {
                self.pass_on(&sessions);
            }
        }
    }

    /// More waits for the port, or for the event loop, than may (protocol P5).
    fn is_full(&self) -> bool {
        self.relay.waiting() > HIGH || self.at.errands.waiting() >= MOST_ERRANDS
    }

    /// Whether the guest's messages are read. They may need answers, so none are read while answers wait. None are read either while an
    /// earlier one waits for room in the socket of its session. The packets of the broker are passed on then, so neither side waits for the other.
    fn may_hear(&self) -> bool {
        !self.is_full() && self.held.is_empty()
    }

    /// An agent has greeted: it knows nothing of sessions before.
    fn begin(&mut self) {
        self.forget_sessions();
        self.end_release(Some("its agent has started again meanwhile".to_owned()));
        // They are announced again, as far as they are there.
        self.windows.drain(..).for_each(|window| self.relay.forget(window.id));
        self.asked.clear();
        self.doorbell = None;
        self.say(&Say::Name { name: LastName(self.at.name.clone()) });
        self.at.say_up(true);
        self.at.shared.has_greeted.store(true, Ordering::Relaxed);
        self.at.task(Task::Up { machine: self.at.machine });
    }

    fn release_patience(&self) -> Option<Duration> {
        self.release_by.map(|by| by.saturating_duration_since(Instant::now()))
    }

    /// The guest has given up its windows, or has not, if it was to.
    fn end_release(&mut self, failure: Option<String>) {
        if self.release_by.take().is_some() {
            self.at.released(failure);
        }
    }

    fn hear_orders(&mut self) -> Result<(), Stop> {
        let _ = rustix::io::read(&self.at.bell, &mut [0; 8]);
        let (PortOrders { announce, release, stop }, left) = self.at.shared.take(self.is_full());
        self.orders_left = left;
        if let Some(announced) = announce {
            self.announce(announced);
        }
        self.ask();
        if release {
            self.release_by = Some(Instant::now() + RELEASE);
            // Before the guest hears of it: whatever of its channels ends from now on, has moved.
            self.relay.leave();
            self.say(&Say::Release {});
        }
        if stop { Err(Stop) } else { Ok(()) }
    }

    fn announce(&mut self, Announced { windows, doorbell }: Announced) {
        self.announce_doorbell(doorbell);
        for window in &windows {
            // No region of a channel lies in a group's window, so no place is taken from it.
            if let (Part::Between(..), Ok(memory)) = (window.part, window.memory.try_clone()) {
                self.relay.window(window.id, memory);
            }
            let (id, peer) = (window.id, LastName(window.other.chars().take(64).collect()));
            self.say(&Say::Window { id, owner: window.own, peer });
        }
        for gone in self.windows.iter().filter(|old| windows.iter().all(|new| new.id != old.id)) {
            self.relay.forget(gone.id);
        }
        self.windows = windows;
    }

    fn announce_doorbell(&mut self, doorbell: Option<Switchboard>) {
        let told = self.doorbell.as_ref().map(|(told, _)| told.id());
        if let Some(doorbell) = doorbell.filter(|doorbell| told != Some(doorbell.id())) {
            self.say(&Say::Doorbell { id: doorbell.id() });
            self.doorbell = Some((doorbell, false));
        }
    }

    /// Asks the guest about its sockets, unless it takes nothing. Earlier questions stay open: an agent rests between its looks at groups, while other
    /// questions are asked and answered. The event loop judges whether an answer is too late.
    fn ask(&mut self) {
        if self.is_full() {
            self.orders_left |= self.at.questions.is_any();
            return;
        }
        for question in self.at.questions.take() {
            if let Say::FindReceivers { number, .. } = question {
                if self.asked.len() >= MOST_ASKED {
                    self.asked.pop_front();
                }
                self.asked.push_back(number);
                self.say(&question);
            }
        }
    }

    /// Whether the guest was asked this, and has not answered. It can answer once.
    fn takes_answer(&mut self, number: u32) -> bool {
        let at = self.asked.iter().position(|asked| *asked == number);
        at.and_then(|at| self.asked.remove(at)).is_some()
    }

    fn forget_sessions(&mut self) {
        self.sessions.clear();
        self.sent = SentPackets::default();
        self.links.clear();
        self.connecting.clear();
    }

    fn forget_session(&mut self, session: u32) {
        self.sessions.remove(&session);
        self.sent.forget(session);
        let connecting: Vec<u32> =
            self.connecting.extract_if(.., |(of, _), _| *of == session).flat_map(|(_, links)| links).collect();
        self.drop_links(&connecting);
    }

    /// These numbers of the guest's get no links.
    fn drop_links(&mut self, numbers: &[u32]) {
        for link in numbers {
            self.links.remove(link);
            self.relay.forget_link(*link);
        }
    }

    fn say(&self, what: &Say) {
        // All messages here are short enough.
        let _ = self.relay.control(&what.encode());
    }

    fn heard(&mut self, said: Say) {
        match said {
            Say::Open { session, pid } => self.open(session, pid),
            Say::Close { session, by_program } => {
                let socket = self.sessions.remove(&session);
                self.forget_session(session);
                if let Some(socket) = socket.filter(|_| by_program) {
                    self.held.send_gone(&self.sessions, socket);
                }
            }
            Say::Packet { session, links, socket, bytes, .. } => {
                if self.sessions.contains_key(&session)
                    && self.pass_in(session, &links, socket.as_ref(), &bytes).is_err()
                {
                    self.close(session);
                }
                // The links of a request that was not passed on.
                let unused: Vec<u32> = links.into_iter().filter(|link| !self.links.contains(link)).collect();
                self.drop_links(&unused);
            }
            // Before anything that the agent says later: by that the broker may end the flow (protocol U15.10).
            Say::FlowWritten { flow, tail } => self.at.written(flow, tail),
            Say::Seen { id, owner } => {
                let machine = self.at.machine;
                if let Some(window) = self.windows.iter().find(|w| w.id == id && w.own == owner) {
                    self.at.errand(Errand::News(match window.part {
                        Part::Between(owner, peer) => MachineNews::Seen { machine, owner, peer },
                        Part::Group(of) => MachineNews::GroupSeen { machine, of },
                    }));
                }
            }
            Say::DoorbellSeen { id } => {
                if let Some((doorbell, seen @ false)) = &mut self.doorbell
                    && doorbell.id() == id
                {
                    *seen = true;
                    self.relay.doorbells(Doorbells::Host(Box::new(doorbell.clone())));
                    let (machine, rung_by) = (self.at.machine, RungBy::Interrupts);
                    self.at.errand(Errand::News(MachineNews::Rung { machine, rung_by }));
                }
            }
            // What was not asked is not passed on, so a guest cannot keep the event loop busy with answers.
            Say::ReceiversAre { number, netns, at, receivers } if self.takes_answer(number) => {
                let machine = self.at.machine;
                self.at.errand(Errand::Receivers { machine, number, netns, at, receivers: receivers.0 });
            }
            Say::Released { held } if self.release_by.is_some() => {
                // The machine has no sessions any more, and its programs no places: later messages about them are ignored.
                self.forget_sessions();
                self.end_release(Some(held.0).filter(|held| !held.is_empty()));
            }
            // Not for a guest to say, or not asked for.
            Say::Released { .. }
            | Say::Release {}
            | Say::Window { .. }
            | Say::Name { .. }
            | Say::Doorbell { .. }
            | Say::FindReceivers { .. }
            | Say::ReceiversAre { .. } => {}
        }
    }

    fn open(&mut self, session: u32, pid: u32) {
        if self.sessions.len() >= MOST_SESSIONS || self.sessions.contains_key(&session) {
            return self.close(session);
        }
        let Ok((ours, theirs)) = packet::pair() else { return self.close(session) };
        self.at.errand(Errand::Admit(theirs, self.at.machine, pid));
        self.sessions.insert(session, ours);
    }

    fn close(&mut self, session: u32) {
        self.forget_session(session);
        self.say(&Say::Close { session, by_program: false });
    }

    /// Passes a packet of the guest's on to the broker, now or when the session's socket has room.
    fn pass_in(&mut self, session: u32, links: &[u32], shown: Option<&SocketFacts>, bytes: &[u8]) -> io::Result<()> {
        let mut stand_ins = 0;
        let mut socket = None;
        if let Ok((request, message)) = wire::decode(bytes) {
            // The memory of a region is not here, and a socket is what the agent says of it.
            socket = shown.filter(|_| message.brings_socket());
            stand_ins = message.fd_count() - usize::from(message.brings_socket());
            let due = links_of(&message);
            if due > 0 {
                let known = links.iter().any(|link| self.links.contains(link));
                let is_twice = links.windows(2).any(|two| two[0] == two[1]);
                if known || is_twice || links.len() != due {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                if self.links.len() + links.len() > MOST_LINKS {
                    self.refuse(session, request, "this machine has as many links as it may have");
                    return Ok(());
                }
                self.links.extend(links);
                // An earlier request with this number gets no links.
                if let Some(earlier) = self.connecting.insert((session, request), links.to_vec()) {
                    self.drop_links(&earlier);
                }
            }
        }
        self.held.send(&self.sessions, session, carried::encode(socket, bytes), stand_ins)
    }

    /// Takes what the broker says to programs, and passes it on in the order in which it was said.
    fn pass_on(&mut self, ready: &[u32]) {
        let newest = self.sent.look(ready, &self.sessions);
        while let Some(newest) = newest
            && !self.is_full()
            && let Some(SentPacket { session, bytes, fds }) = self.sent.next(newest, &self.sessions)
        {
            self.pass_out(session, &bytes, fds);
        }
        for session in self.sent.take_ended() {
            self.close(session);
        }
    }

    fn pass_out(&mut self, session: u32, bytes: &[u8], fds: Vec<OwnedFd>) {
        let mut packet = bytes.to_vec();
        let (mut window, mut links) = (None, Vec::new());
        let mut fds = fds.into_iter();
        match wire::decode(bytes) {
            Ok((_, Message::Incoming { channel, region, .. })) if region.is_in_window() => {
                window = fds.next().and_then(|memory| self.window_of(&memory));
                if window.is_none() || self.links.len() + fds.len() > MOST_LINKS {
                    return self.turn_down(session, channel);
                }
                for end in fds {
                    links.push((self.next_link, end));
                    self.links.insert(self.next_link);
                    self.next_link = self.next_link.wrapping_add(2);
                }
            }
            Ok((request, answer @ (Message::Connected { .. } | Message::Bell { .. }))) => {
                let (carries, is_far) = match answer {
                    Message::Bell { way, region, .. } => {
                        let between = way == BellWay::Relays;
                        (if between { LinkUse::BellBetweenMachines } else { LinkUse::Bell }, region.is_in_window())
                    }
                    _ => (LinkUse::Channel, true),
                };
                // Within the guest, its agent makes the links.
                if is_far && let Some(numbers) = self.connecting.remove(&(session, request)) {
                    let links: Vec<_> = numbers.into_iter().zip(fds.by_ref()).collect();
                    let window = fds.next().and_then(|memory| self.window_of(&memory));
                    let said = Say::Packet { session, window, links: Vec::new(), socket: None, bytes: packet };
                    let _ = self.relay.control_with(&said.encode(), links, carries);
                    return;
                }
                self.forget_links_asked_for(session, request);
            }
            Ok((request, Message::Refused { .. })) => {
                self.forget_links_asked_for(session, request);
            }
            Ok((
                request,
                Message::RoomIs { .. }
                | Message::GroupWindowIs { .. }
                | Message::DirectoryIs { .. }
                | Message::DatagramsTaken { .. }
                | Message::Receiver { .. }
                | Message::PeerIs { .. },
            )) => {
                window = fds.next().and_then(|memory| self.window_of(&memory));
                self.forget_links_asked_for(session, request);
            }
            Ok((_, Message::RegionAdded { region, .. })) if region.is_in_window() => {
                window = fds.next().and_then(|memory| self.window_of(&memory));
            }
            // Regions of channels within the guest are not here, and those in windows cannot be mapped by the asker.
            Ok((request, Message::Regions { .. })) => {
                wire::encode(request, &Message::Regions { connecting: false, accepting: false }, &mut packet);
            }
            _ => {}
        }
        let numbers = links.iter().map(|(number, _)| *number).collect();
        let said = Say::Packet { session, window, links: numbers, socket: None, bytes: packet };
        let _ = self.relay.control_with(&said.encode(), links, LinkUse::Channel);
    }

    /// The broker has made no links for a request that asked for some.
    fn forget_links_asked_for(&mut self, session: u32, request: u32) {
        let numbers = self.connecting.remove(&(session, request)).unwrap_or_default();
        self.drop_links(&numbers);
    }

    /// Refuses a request in the broker's place.
    fn refuse(&self, session: u32, request: u32, reason: &str) {
        let mut bytes = Vec::new();
        let refused = Message::Refused { code: Refusal::OutOfResources, reason: reason.to_owned() };
        wire::encode(request, &refused, &mut bytes);
        self.say(&Say::Packet { session, window: None, links: Vec::new(), socket: None, bytes });
    }

    /// A connection that this guest cannot be given.
    fn turn_down(&mut self, session: u32, channel: u64) {
        // Once for each port: a guest could fill the log otherwise.
        if !std::mem::replace(&mut self.has_turned_down, true) {
            tracing::warn!(
                machine = self.at.name,
                channel,
                "a connection was turned down: too many links, or no window; further ones are not reported"
            );
        }
        let mut packet = Vec::new();
        wire::encode(0, &Message::Closed { channel }, &mut packet);
        if self.held.send(&self.sessions, session, carried::encode(None, &packet), 0).is_err() {
            self.close(session);
        }
    }

    fn window_of(&self, memory: &OwnedFd) -> Option<WindowId> {
        let file = |fd: &OwnedFd| rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino));
        let wanted = file(memory)?;
        self.windows.iter().find(|w| file(&w.memory) == Some(wanted)).map(|w| w.id)
    }
}
