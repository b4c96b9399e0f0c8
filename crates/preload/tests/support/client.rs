//! A client of the broker, packet by packet: sets the policy, and looks at socket connections.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use partywall_protocol::wire::{self, ChannelRow, MAX_PACKET, Message, Text, What};
use partywall_region::packet;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub(crate) struct Client {
    socket: OwnedFd,
    request: u32,
}

impl Client {
    pub(crate) fn try_connect(path: &Path) -> Option<Self> {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
        Some(Self { socket, request: 0 })
    }

    /// `None` if the broker has gone.
    pub(crate) fn join(path: &Path, name: &str) -> Option<Self> {
        let mut client = Self::try_connect(path)?;
        let (answer, _) = client.ask(&Message::Join { version: wire::VERSION, name: name.to_owned() })?;
        assert!(matches!(answer, Message::Joined { .. }), "{answer:?}");
        Some(client)
    }

    fn ask(&mut self, message: &Message) -> Option<(Message, Vec<OwnedFd>)> {
        self.ask_with(message, &[])
    }

    /// `None` if the broker has gone.
    pub(crate) fn ask_with(
        &mut self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
    ) -> Option<(Message, Vec<OwnedFd>)> {
        self.request += 1;
        let mut bytes = Vec::new();
        wire::encode(self.request, message, &mut bytes);
        packet::send(self.socket.as_fd(), &bytes, descriptors).ok()?;
        let mut buffer = vec![0; MAX_PACKET];
        let received = packet::recv(self.socket.as_fd(), &mut buffer).ok()?;
        if received.len == 0 {
            return None;
        }
        let (request, answer) = wire::decode(&buffer[..received.len]).unwrap();
        assert_eq!(request, self.request);
        Some((answer, received.fds))
    }

    /// The move rules, in the words of `protocol::upgrade`.
    pub(crate) fn set_policy(&mut self, clauses: &str) -> bool {
        let message =
            Message::SetMoveRules { reset: false, clauses: Text(clauses.into()), ring_size: 0, spin_us: u32::MAX };
        match self.ask(&message) {
            Some((Message::MoveRulesAre { .. }, _)) => true,
            Some((other, _)) => panic!("{other:?}"),
            None => false,
        }
    }

    /// Whether a process has joined, as one of the first domains.
    pub(crate) fn knows(&mut self, process: u32) -> bool {
        match self.ask(&Message::List { what: What::Domains, after: 0 }) {
            Some((Message::Domains { page }, _)) => page.rows.iter().any(|row| row.pid == process),
            _ => false,
        }
    }

    /// Every channel, of every kind.
    pub(crate) fn channels(&mut self) -> Vec<ChannelRow> {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let Some((Message::Channels { page }, _)) = self.ask(&Message::List { what: What::Channels, after }) else {
                return all;
            };
            let last = page.rows.last().map(|row| row.channel);
            all.extend(page.rows);
            match (page.more, last) {
                (true, Some(last)) => after = last,
                _ => return all,
            }
        }
    }

    /// The memory of both sides of a channel; `None` if it is gone.
    pub(crate) fn inspect(&mut self, channel: u64) -> Option<Vec<OwnedFd>> {
        match self.ask(&Message::Inspect { channel })? {
            (Message::Regions { .. }, fds) => Some(fds),
            _ => None,
        }
    }

    /// The result of [`look_at`] for both sides of a channel; `None` if it is gone.
    pub(crate) fn look(&mut self, channel: u64) -> Option<Vec<(u64, u32)>> {
        self.inspect(channel)?.iter().map(look_at).collect()
    }
}

/// Bytes committed to the ring in this memory, and how often its side has switched.
pub(crate) fn look_at(side: &OwnedFd) -> Option<(u64, u32)> {
    // The tail (protocol M4), and the switches of the tx path: read, not mapped, so that nothing of it is held.
    let mut page = [0; 512];
    rustix::io::pread(side, &mut page, 0).ok()?;
    let at = |offset: usize| page[offset..offset + 8].first_chunk::<8>().copied();
    let tail = u64::from_ne_bytes(at(64)?);
    let switches = u32::from_ne_bytes(*page[456..460].first_chunk::<4>()?);
    Some((tail, switches))
}
