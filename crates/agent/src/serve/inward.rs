//! What the broker sends to programs of this machine: each packet with the memory and the links that belong to it.
//!
//! The host cannot send descriptors here. So the agent keeps what programs give and windows hold, and puts it in place. A packet is looked at
//! first ([`Serving::plan_in`]), and then goes to its program, or ends the program's session.

use super::Serving;
use crate::introduce::{GivenUp, Incoming, NearEnd, ParcelContent, ParcelTaken};
use partywall_protocol::wire::{self, BellWay, Message, Refusal, RegionReference};
use partywall_region::pmem::WindowId;
use partywall_region::relay::{BellEvents, LinkUse};
use partywall_region::{Link, link};
use std::io;
use std::os::fd::OwnedFd;

/// A packet of the broker's for a program.
#[derive(Debug, Clone, Copy)]
struct PacketIn<'a> {
    session: u32,
    window: Option<WindowId>,
    bytes: &'a [u8],
}

impl PacketIn<'_> {
    /// The packet, to be kept until its memory is here.
    fn to_incoming(self) -> Incoming {
        Incoming { session: self.session, packet: self.bytes.to_vec() }
    }
}

/// What becomes of a packet of the broker's.
#[derive(Debug)]
enum Inward {
    /// The program gets it, with these descriptors.
    Pass(Vec<OwnedFd>),
    /// Nothing more: it has gone already, waits for its memory, or was refused.
    Done,
    /// The program's session ends.
    Close,
}

impl Serving {
    /// Passes a packet of the broker's on to a program.
    pub(super) fn pass_in(&mut self, session: u32, window: Option<WindowId>, links: &[u32], bytes: &[u8]) {
        let Ok(ends) = self.take_links(links) else { return self.close(session) };
        let packet = PacketIn { session, window, bytes };
        let inward = match wire::decode(bytes) {
            Ok((request, message)) => self.plan_in(packet, request, &message, ends),
            Err(_) => Inward::Pass(Vec::new()),
        };
        match inward {
            Inward::Pass(with) => {
                // First: this packet may be the answer which says that another program was sent the memory (protocol G5.7).
                for (message, memory) in self.introductions.settled() {
                    self.send(message.session, &message.packet, &[memory]);
                }
                self.send(session, bytes, &with);
            }
            Inward::Done => {}
            Inward::Close => self.close(session),
        }
    }

    /// Gives each link an end at once, and returns the ends for the program. Whatever becomes of the program, the other side learns of it by
    /// its link.
    fn take_links(&mut self, links: &[u32]) -> io::Result<Vec<OwnedFd>> {
        let mut ends = Vec::new();
        for number in links {
            let (near, far) = Link::pair()?;
            self.relay.link(*number, near, None);
            ends.push(far);
        }
        Ok(ends)
    }

    /// Decides what becomes of a packet of the broker's, and takes what goes with it out of what the agent keeps.
    fn plan_in(&mut self, packet: PacketIn<'_>, request: u32, message: &Message, ends: Vec<OwnedFd>) -> Inward {
        let session = packet.session;
        let with = match *message {
            // A connection between two programs of this machine comes to the accepting one, once its memory is here.
            Message::Incoming { channel, region, .. } if !region.is_in_window() => {
                self.introductions.incoming(channel, packet.to_incoming());
                return Inward::Done;
            }
            Message::Incoming { channel, .. } => match self.memory(packet.window, false) {
                Some(memory) => return Inward::Pass(std::iter::once(memory).chain(ends).collect()),
                None => {
                    self.turn_down(session, channel);
                    return Inward::Done;
                }
            },
            Message::RoomIs { .. } => {
                self.flows.refused(session, request);
                return self.pass_window(packet, request, true, "the window");
            }
            Message::Offered { offer } => {
                self.flows.offered(session, request, offer);
                None
            }
            // Without the region, the program gives the flow up.
            Message::DatagramsTaken { flow, region } if !region.is_in_window() => {
                self.flows.taken(session, request, flow)
            }
            Message::Receiver { region } if !region.is_in_window() => self.flows.fetched(session, request),
            Message::DatagramsTaken { .. } | Message::Receiver { .. } => {
                // The region is in a window, and what the program asked is answered.
                self.flows.refused(session, request);
                return self.pass_window(packet, request, false, "the window from the other machine");
            }
            Message::GroupWindowIs { own, .. } => return self.pass_window(packet, request, own, "the group's window"),
            Message::DirectoryIs { .. } => return self.pass_directory(packet, request),
            Message::Attached { channel, .. } => return self.pass_parcel(packet, (channel, ParcelContent::Endpoint)),
            Message::Ring { channel, side, generation, .. } => {
                return self.pass_parcel(packet, (channel, ParcelContent::Ring(side, generation)));
            }
            Message::RegionAdded { region, .. } if packet.window.is_some() && region.is_in_window() => {
                self.memory(packet.window, false)
            }
            Message::RegionAdded { channel, side, number, .. } => {
                let content = (channel, ParcelContent::Further(side, number));
                match self.introductions.take(content, &packet.to_incoming()) {
                    ParcelTaken::Memory(memory) => Some(memory),
                    ParcelTaken::Held => return Inward::Done,
                    // Without its memory, the program gives the region up.
                    ParcelTaken::Nothing => None,
                }
            }
            Message::Connected { channel, links, .. } => return self.connect(packet, request, channel, links),
            Message::Bell { offer, region, .. } => {
                // Within this machine, the link that was begun is of no use, and ends.
                let near = self.introductions.connected_elsewhere(session, request);
                if region.is_in_window() {
                    self.handshakes.placed(session, request);
                    self.pass_bell(packet, request, (offer, region), near);
                    return Inward::Done;
                }
                match self.handshakes.bell(session, request, offer) {
                    Ok(end) => end,
                    Err(_) => return Inward::Close,
                }
            }
            Message::PeerIs { region, .. } => {
                let near = self.handshakes.peer(session, request);
                self.memory(packet.window.filter(|_| region.is_in_window()), false).or(near)
            }
            Message::Published { key, .. } => {
                self.receivers.published(session, request, key);
                self.introductions.done(session, request);
                None
            }
            Message::Refused { .. } => {
                self.receivers.refused(session, request);
                self.introductions.refused(session, request);
                self.handshakes.refused(session, request);
                self.flows.refused(session, request);
                None
            }
            _ => {
                self.introductions.done(session, request);
                None
            }
        };
        Inward::Pass(with.into_iter().collect())
    }

    /// The other end of a connection is elsewhere: the program gets its end of the bell, the events of an interrupt if there are any, and the
    /// window for its region. Without a window that has just gone, the program takes its request back.
    fn pass_bell(
        &mut self,
        packet: PacketIn<'_>,
        request: u32,
        (offer, region): (u64, RegionReference),
        near: Option<Vec<NearEnd>>,
    ) {
        let Some(NearEnd { link, end }) = near.and_then(|near| near.into_iter().next()) else { return };
        let (way, mut with) = match self.relay.take_bell_events(link) {
            Some(BellEvents { heard, ringing }) => (BellWay::Interrupts, vec![end, heard, ringing]),
            None => (BellWay::Link, vec![end]),
        };
        with.extend(self.memory(packet.window, true));
        let mut bytes = Vec::new();
        wire::encode(request, &Message::Bell { offer, way, region }, &mut bytes);
        self.send(packet.session, &bytes, &with);
    }

    /// A request to connect is granted: the program gets its links.
    fn connect(&mut self, packet: PacketIn<'_>, request: u32, channel: u64, links: u8) -> Inward {
        let session = packet.session;
        if let Some(near) = self.introductions.connected_elsewhere(session, request) {
            let near: Vec<OwnedFd> = near.into_iter().map(|near| near.end).collect();
            self.send(session, packet.bytes, &near);
            return Inward::Done;
        }
        // Both sides are here: so are their links.
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for _ in 0..links {
            let Ok((here, there)) = link::pair() else {
                self.introductions.give_up(channel);
                return Inward::Close;
            };
            near.push(here);
            far.push(there);
        }
        // The listener's message comes first, as the broker has sent it (protocol G5.8).
        if let Some((incoming, brought)) = self.introductions.connected(session, request, channel, far) {
            self.send(incoming.session, &incoming.packet, &brought);
        }
        self.send(session, packet.bytes, &near);
        Inward::Done
    }

    /// Closes the connections whose messages were given up: their places in the listeners' backlogs are then free again (protocol C7.2).
    pub(super) fn turn_down_given_up(&mut self) {
        for GivenUp { session, channel } in self.introductions.take_given_up() {
            self.turn_down(session, channel);
        }
    }

    /// Closes a connection in the place of its listener, which does not get it.
    fn turn_down(&mut self, session: u32, channel: u64) {
        let mut bytes = Vec::new();
        wire::encode(0, &Message::Closed { channel }, &mut bytes);
        self.pass_on(session, Vec::new(), LinkUse::Channel, None, &bytes);
    }

    /// Passes a packet on with the memory that another program of this machine has given for it.
    fn pass_parcel(&mut self, packet: PacketIn<'_>, content: (u64, ParcelContent)) -> Inward {
        match self.introductions.take(content, &packet.to_incoming()) {
            ParcelTaken::Memory(memory) => Inward::Pass(vec![memory]),
            ParcelTaken::Held | ParcelTaken::Nothing => Inward::Done,
        }
    }

    /// Passes a packet on with the window that it names. A window that has gone makes it a refusal.
    fn pass_window(&mut self, packet: PacketIn<'_>, request: u32, owner: bool, called: &str) -> Inward {
        match self.memory(packet.window, owner) {
            Some(memory) => Inward::Pass(vec![memory]),
            None => {
                self.refuse(packet.session, request, Refusal::Machine, &format!("{called} has just gone"));
                Inward::Done
            }
        }
    }

    /// Passes the host's directory on.
    fn pass_directory(&mut self, packet: PacketIn<'_>, request: u32) -> Inward {
        let mut inward = self.pass_window(packet, request, false, "the window from the host");
        if let Inward::Pass(with) = &mut inward {
            // Beside what the broker sends: the word by which the directory is revoked (protocol G7.5).
            with.extend(self.revoker.reader());
        }
        inward
    }

    /// The memory of a window, for its owner or for a reader.
    fn memory(&self, window: Option<WindowId>, owner: bool) -> Option<OwnedFd> {
        window.and_then(|id| self.windows.memory(id, owner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listen::Listening;
    use partywall_protocol::agent::Say;
    use partywall_protocol::wire::{Directions, Kind, User, Within};
    use partywall_region::relay::{Notice, Notices, PortSide, Relay};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    const CONNECTING: u32 = 1;
    const LISTENER: u32 = 2;
    const CHANNEL: u64 = 99;

    fn say(host: &Relay, session: u32, request: u32, message: &Message) {
        let mut bytes = Vec::new();
        wire::encode(request, message, &mut bytes);
        let said = Say::Packet { session, window: None, links: Vec::new(), socket: None, bytes };
        host.control(&said.encode()).unwrap();
    }

    fn incoming(within: Within) -> Message {
        let region = RegionReference { within, ..RegionReference::with_ring(4096) };
        Message::Incoming {
            channel: CHANNEL,
            domain: 1,
            epoch: 1,
            name: "a".into(),
            user: User::Host(0),
            pid: 1,
            at_home: true,
            kind: Kind::Message,
            directions: Directions::BOTH,
            region,
        }
    }

    fn next(notices: &Notices) -> Notice {
        notices.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    /// What an agent without programs says when it hears these packets.
    fn answer(packets: &[(u32, u32, Message)]) -> Say {
        let folder = tempfile::tempdir().unwrap();
        let (guest, port) = UnixStream::pair().unwrap();
        let (relay, guest) = Relay::start(guest.into(), PortSide::Guest).unwrap();
        let (host, notices) = Relay::start(port.into(), PortSide::Host).unwrap();
        let listening = Listening::new(&folder.path().join("socket"), 0o600);
        let serving = Serving::new(relay, listening, &folder.path().join("numbers")).unwrap();
        let served = std::thread::spawn(move || serving.serve(&guest));
        while next(&notices) != Notice::Up {}
        for (session, request, message) in packets {
            say(&host, *session, *request, message);
        }
        let answer = loop {
            if let Notice::Control(bytes) = next(&notices) {
                break Say::decode(&bytes).unwrap();
            }
        };
        // No message is this short: the agent ends.
        host.control(&[0]).unwrap();
        served.join().unwrap().unwrap();
        answer
    }

    /// Whether it is the `Closed` of the listener.
    fn turns_down(said: Say) -> bool {
        let Say::Packet { session: LISTENER, bytes, .. } = said else { return false };
        matches!(wire::decode(&bytes), Ok((0, Message::Closed { channel: CHANNEL })))
    }

    #[test]
    fn connection_without_connecting_program_is_closed() {
        let connected = Message::Connected { channel: CHANNEL, domain: 2, epoch: 1, links: 2 };
        assert!(turns_down(answer(&[(LISTENER, 0, incoming(Within::OwnMemory)), (CONNECTING, 1, connected)])));
    }

    #[test]
    fn connection_whose_window_has_gone_is_closed() {
        assert!(turns_down(answer(&[(LISTENER, 0, incoming(Within::Window))])));
    }
}
