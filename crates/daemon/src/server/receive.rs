//! Packets from sessions: what arrived, and what is wrong with it (protocol C4).

use std::io;
use std::os::fd::AsFd;

use partywall_protocol::wire::{self, MachineId, Refusal};
use partywall_region::packet;
use rustix::event::epoll::EventFlags;

use crate::credentials::Account;
use crate::machines::carried;
use partywall_region::ending;

use super::judge::{Judged, Sort, has_ended};
use super::readers::{self, MAX_REPORT, ReaderEnd, ReaderEvent, ReaderReport};
use super::{BURST, ClientDescriptor, CoreEvent, Server, SessionId};

impl Server {
    /// Something happened on sockets of a machine's sessions. They have one turn together, at the expense of the machine (protocol C16.7).
    pub(super) fn attend_machine(&mut self, machine: MachineId) {
        let account = Account::of_machine(machine);
        if self.shares.is_used_up(account) {
            // Its first session may have begun after its share was used up.
            return self.leave_alone(account);
        }
        let work = self.begin_work();
        let ready = self.machine_turns.ready(machine);
        let packets = BURST / ready.len().max(1);
        for (session, flags) in ready {
            self.attend(session, flags, packets);
        }
        self.charge_work(account, work);
    }

    /// Something happened on the socket of a session that is read here: of a program in a virtual machine, by a socket and with
    /// descriptors that the thread at the machine's port has made. Takes this many packets at most.
    fn attend(&mut self, session: SessionId, flags: EventFlags, packets: usize) {
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            return self.end_of_machine_session(session);
        }
        for _ in 0..packets {
            // An earlier packet may have ended it.
            let Some(open) = self.sessions.get(&session) else { return };
            let received = match packet::try_recv(open.socket.as_fd(), &mut self.incoming) {
                Ok(received) => received,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.lose(session),
            };
            if received.len == 0 && received.fds.is_empty() && has_ended(&open.socket) {
                return self.lose(session);
            }
            let packet::ReceivedPacket { len, truncated, fds } = received;
            if self.incoming.get(..len) == Some(&carried::GONE) {
                return self.closed_by_program(session);
            }
            let Some((socket, bytes)) = carried::decode(self.incoming.get(..len).unwrap_or_default()) else {
                tracing::error!("what a machine's port passes on makes no sense");
                return self.lose(session);
            };
            let (len, came, socket) = (bytes.len(), fds.len() + usize::from(socket.is_some()), socket.map(Ok));
            let judged = Judged { len, truncated, came, socket, sorts: Vec::new(), kept: Vec::new() };
            let descriptors = fds.into_iter().map(ClientDescriptor::from).collect();
            let event = understand(session, bytes, judged, descriptors);
            self.feed(event);
        }
    }

    /// Takes the first packet of a session if it is there already, has bytes and brings no descriptor (protocol C13.4). That is the `Join` of
    /// nearly every client, whose answer then waits for no other process. No reader has the session yet, so the packet that was examined
    /// is the one that is received.
    pub(super) fn hear_first(&mut self, session: SessionId) {
        let Some(open) = self.sessions.get(&session) else { return };
        let mut buffer = std::mem::take(&mut self.incoming);
        let room = buffer.get_mut(..wire::MAX_PACKET).unwrap_or_default();
        // The end is for the reader, as is whatever has no bytes.
        let first = packet::try_recv_without_descriptors(open.socket.as_fd(), room).ok().flatten();
        if let Some(packet::ReceivedPacket { len, truncated, .. }) = first {
            let judged = Judged { len, truncated, came: 0, socket: None, sorts: Vec::new(), kept: Vec::new() };
            let event = understand(session, buffer.get(..len).unwrap_or_default(), judged, Vec::new());
            self.feed(event);
        }
        self.incoming = buffer;
    }

    /// The port has given a session up. Its last packet says whether the program has ended. What the program gave up before counts (protocol
    /// C11.4).
    fn end_of_machine_session(&mut self, session: SessionId) {
        let Some(open) = self.sessions.get(&session) else { return };
        let (mut has_gone, mut farewells) = (false, Vec::new());
        while let Ok(received) = packet::try_recv(open.socket.as_fd(), &mut self.incoming) {
            if received.len == 0 {
                break;
            }
            let bytes = self.incoming.get(..received.len).unwrap_or_default();
            has_gone = bytes == carried::GONE;
            if let Some((None, packet)) = carried::decode(bytes)
                && let Ok((request, message)) = wire::decode(packet)
                && message.is_farewell()
            {
                farewells.push((request, message));
            }
        }
        for (request, message) in farewells {
            let (descriptors, socket) = (Vec::new(), None);
            self.feed(CoreEvent::Message { session, request, message, descriptors, socket });
        }
        if !self.sessions.contains_key(&session) {
            // The broker has ended it by what came last.
        } else if has_gone {
            self.closed_by_program(session);
        } else {
            self.lose(session);
        }
    }

    /// Something happened with the processes that read sessions.
    pub(super) fn attend_readers(&mut self, token: ReaderEvent, flags: EventFlags) {
        match token {
            ReaderEvent::Spawner => self.readers.watch_spawner(),
            ReaderEvent::Timer(reader) if self.readers.is_hung(reader) => {
                let user = self.readers.account_of(reader).map(tracing::field::display);
                tracing::warn!(user, "a descriptor hung the process that reads this user's sessions; it is killed");
                self.lose_reader(reader, ReaderEnd::Hung);
            }
            ReaderEvent::Timer(_) => {}
            ReaderEvent::Socket(reader) => {
                if flags.contains(EventFlags::OUT) {
                    self.readers.writable(reader);
                }
                self.hear(reader, flags);
            }
        }
    }

    fn hear(&mut self, reader: u32, flags: EventFlags) {
        if self.readers.is_killed(reader) {
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                self.readers.forget(reader);
            }
            return;
        }
        let Some(account) = self.readers.account_of(reader) else { return };
        // The end of a reader still has to be handled.
        if self.shares.is_used_up(account) && !flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            return;
        }
        let work = self.begin_work();
        let mut buffer = std::mem::take(&mut self.incoming);
        buffer.resize(MAX_REPORT, 0);
        for _ in 0..BURST {
            match self.readers.receive(reader, &mut buffer) {
                readers::FromReader::Nothing => break,
                readers::FromReader::Dead => {
                    let user = self.readers.account_of(reader).map(tracing::field::display);
                    tracing::error!(user, "the process that reads this user's sessions has ended");
                    self.lose_reader(reader, ReaderEnd::Ended);
                    self.readers.forget(reader);
                    break;
                }
                readers::FromReader::Report(received) => {
                    let Some(report) = ReaderReport::decode(&buffer[..received.len.min(MAX_REPORT)]) else {
                        tracing::error!("a report of a reading process makes no sense");
                        continue;
                    };
                    self.reported(reader, report, received);
                }
            }
        }
        self.incoming = buffer;
        self.charge_work(account, work);
    }

    fn reported(&mut self, reader: u32, report: ReaderReport<'_>, received: packet::ReceivedPacket) {
        match report {
            ReaderReport::Packet { session, mut judged, bytes } => {
                let session = SessionId(session);
                let came = received.fds.len();
                let mut fds = received.fds.into_iter();
                let descriptors = judged.sorts.iter().map(|sort| match sort {
                    Sort::Nothing => ClientDescriptor::Nothing,
                    Sort::Memory => fds.next().map_or(ClientDescriptor::Nothing, ClientDescriptor::from),
                });
                let descriptors: Vec<_> = descriptors.collect();
                if !self.sessions.contains_key(&session) {
                    return;
                }
                if came < judged.sorts.iter().filter(|sort| **sort != Sort::Nothing).count() {
                    // This process has no room for them.
                    (judged.truncated, judged.came) = (true, 0);
                }
                if let Some(Ok(facts)) = &judged.socket {
                    self.look_before_judging(facts);
                }
                self.feed(understand(session, bytes, judged, descriptors));
            }
            ReaderReport::Gone { session } => {
                if self.sessions.contains_key(&SessionId(session)) {
                    self.closed_by_program(SessionId(session));
                }
            }
            ReaderReport::Ended { .. } => self.readers.ended(reader),
            ReaderReport::Synced { .. } => self.synced += 1,
        }
    }

    /// Gives a reader up, and ends the sessions that it read.
    fn lose_reader(&mut self, reader: u32, end: ReaderEnd) {
        let Some(account) = self.readers.account_of(reader) else { return };
        self.readers.kill(reader, end);
        let mut lost: Vec<SessionId> =
            self.sessions.iter().filter(|(_, open)| open.is_read_by(reader)).map(|(session, _)| *session).collect();
        lost.sort_unstable();
        for session in lost {
            let reason = format!("{}; join again later", end.reason(account));
            self.refuse(session, Refusal::OutOfResources, reason);
        }
        self.readers.empty_disposer();
    }

    /// A session has ended, and its program may live.
    fn lose(&mut self, session: SessionId) {
        self.hang_up(session);
        self.feed(CoreEvent::Closed { session, by_program: false });
    }

    /// No process has the other end of a session any more. One of the host may live on without its session: that matters where it has places
    /// in windows.
    fn closed_by_program(&mut self, session: SessionId) {
        self.hang_up(session);
        let by_program = self.core.process_in_windows(session).is_none_or(ending::has_ended);
        self.feed(CoreEvent::Closed { session, by_program });
    }
}

/// Translates a packet for the core.
fn understand(
    session: SessionId,
    bytes: &[u8],
    judged: Judged,
    descriptors: Vec<ClientDescriptor>,
) -> CoreEvent<ClientDescriptor> {
    let request = wire::request_of(bytes).unwrap_or(0);
    let malformed = |code, reason, fatal| CoreEvent::Malformed { session, request, code, reason, fatal };
    match wire::decode(bytes) {
        // The kernel drops descriptors that do not find a place in this process: no fault of the sender.
        Ok((_, message)) if judged.truncated && judged.came < message.fd_count() => {
            let reason = "the broker is out of descriptors and could not take those of the message; try again later";
            malformed(Refusal::OutOfResources, reason.to_owned(), false)
        }
        _ if judged.truncated => {
            let (bytes, fds) = (wire::MAX_PACKET, packet::MAX_FDS);
            let reason = format!("a packet has at most {bytes} bytes and {fds} descriptors; this one had more");
            malformed(Refusal::Protocol, reason, true)
        }
        Ok((request, message)) => CoreEvent::Message { session, request, message, descriptors, socket: judged.socket },
        Err(e) => malformed(Refusal::Protocol, e.to_string(), e.breaks_framing()),
    }
}
