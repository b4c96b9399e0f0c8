//! Packets of a machine's programs that wait for room in the sockets of their sessions.
//!
//! A program can send faster than the event loop reads. While a packet waits, the port hears nothing more from the guest, so all that the guest
//! says later stays behind that packet. The event loop never waits for the port, so a packet waits only until the event loop has read the session.
//!
//! ```text
//!   the guest --port--> packet --> socket of its session --> event loop
//!                          |            ^
//!                          +-- no room -+ once there is room
//! ```
//!
//! At most one packet of the guest's waits. The others are reports of connections that were turned down. The event loop limits them: such a
//! connection has a place in a backlog until the report has been read (protocol C7.2, C7.3).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use partywall_region::packet;

use super::sent::Sessions;
use crate::machines::carried;

/// The session that a packet is for.
#[derive(Debug)]
enum Recipient {
    Open(u32),
    /// The guest has closed it. The packet is its last, and the guest may give its number to another session.
    Closed(OwnedFd),
}

#[derive(Debug)]
struct HeldPacket {
    recipient: Recipient,
    bytes: Vec<u8>,
    /// How many descriptors go with it. Each is a copy of the stand-in.
    stand_ins: usize,
}

impl HeldPacket {
    /// The socket that it is sent by; `None` if the session has ended.
    fn socket<'a>(&'a self, sessions: &'a Sessions) -> Option<&'a OwnedFd> {
        match &self.recipient {
            Recipient::Open(session) => sessions.get(session),
            Recipient::Closed(socket) => Some(socket),
        }
    }

    /// Sends it. It fails with `WouldBlock` if the socket has no room. A packet to a session that the broker has ended counts as sent: the guest
    /// gets `Close` after the last packets of the session.
    fn try_send(&self, sessions: &Sessions, stand_in: BorrowedFd<'_>) -> io::Result<()> {
        let Some(socket) = self.socket(sessions) else { return Ok(()) };
        let fds: Vec<BorrowedFd<'_>> = std::iter::repeat_n(stand_in, self.stand_ins).collect();
        match packet::try_send(socket.as_fd(), &self.bytes, &fds) {
            Err(e) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => Ok(()),
            sent => sent,
        }
    }
}

/// Packets to the event loop, in the order in which they are sent.
#[derive(Debug)]
pub(super) struct HeldPackets<'a> {
    waiting: VecDeque<HeldPacket>,
    /// A stand-in for descriptors that stay in the guest.
    stand_in: BorrowedFd<'a>,
}

impl<'a> HeldPackets<'a> {
    pub(super) fn new(stand_in: BorrowedFd<'a>) -> Self {
        Self { waiting: VecDeque::new(), stand_in }
    }

    /// Whether no packet waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The socket in which the first packet that waits needs room.
    pub(super) fn full_socket<'s>(&'s self, sessions: &'s Sessions) -> Option<&'s OwnedFd> {
        self.waiting.front()?.socket(sessions)
    }

    /// Sends a packet of a session, or keeps it until there is room. An error other than a lack of room ends the session.
    pub(super) fn send(
        &mut self,
        sessions: &Sessions,
        session: u32,
        bytes: Vec<u8>,
        stand_ins: usize,
    ) -> io::Result<()> {
        self.send_or_keep(sessions, HeldPacket { recipient: Recipient::Open(session), bytes, stand_ins })
    }

    /// Reports that no process has a session any more, by the last packet of its socket.
    pub(super) fn send_gone(&mut self, sessions: &Sessions, socket: OwnedFd) {
        let recipient = Recipient::Closed(socket);
        // If it cannot be sent at all, the program counts as alive.
        let _ = self.send_or_keep(sessions, HeldPacket { recipient, bytes: carried::GONE.to_vec(), stand_ins: 0 });
    }

    fn send_or_keep(&mut self, sessions: &Sessions, packet: HeldPacket) -> io::Result<()> {
        // Behind the packets that wait, which may be of the same session.
        let sent = if self.is_empty() {
            packet.try_send(sessions, self.stand_in)
        } else {
            Err(io::ErrorKind::WouldBlock.into())
        };
        match sent {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.waiting.push_back(packet);
                Ok(())
            }
            sent => sent,
        }
    }

    /// Sends the packets for which there is room now, and drops those of sessions that have ended. Returns the sessions whose packets cannot be
    /// sent at all.
    pub(super) fn send_waiting(&mut self, sessions: &Sessions) -> Vec<u32> {
        let mut failed = Vec::new();
        while let Some(packet) = self.waiting.front() {
            match packet.try_send(sessions, self.stand_in) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    if let Recipient::Open(session) = packet.recipient {
                        failed.push(session);
                    }
                }
                Ok(()) => {}
            }
            self.waiting.pop_front();
        }
        failed
    }
}
