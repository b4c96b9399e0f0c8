//! Packets that the broker has sent to the programs of one machine, in the order in which it has sent them.
//!
//! Each session has a socket, and what lies in two sockets has no order. But an answer to one program may say that another was sent something
//! before (protocol G5.7). So the event loop numbers what it sends to programs of machines. When a packet has been read, all earlier packets
//! for this machine lie in its sockets, or have been read. Of each session at most one packet is held here, its head, so the sockets still
//! fill up if the machine takes nothing:
//!
//! ```text
//!   ready sockets --> heads --> newest head --> heads of all other sessions
//!                                                        |
//!   the port <-- lowest head, up to the newest <---------+<-- next head of that session
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use partywall_region::packet;
use rustix::event::{PollFd, PollFlags};

use super::wait;
use crate::machines::carried;

/// This end of the sessions of a machine's programs, by number.
pub(super) type Sessions = BTreeMap<u32, OwnedFd>;

/// A packet for a program.
#[derive(Debug)]
pub(super) struct SentPacket {
    pub(super) session: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// The heads of sessions: packets that were read and are not passed on yet.
#[derive(Debug, Default)]
pub(super) struct SentPackets {
    heads: BTreeMap<u64, SentPacket>,
    /// The number of each session's head.
    numbers: BTreeMap<u32, u64>,
    /// Sessions that the broker has ended, and whose last packets have been passed on.
    ended: Vec<u32>,
}

impl SentPackets {
    /// Whether no packet is held.
    pub(super) fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// Reads the heads of sessions that are ready, and then those of all others. Returns the number up to which no packet is missing before a
    /// head; `None` if there is no head.
    pub(super) fn read(&mut self, ready: &[u32], sessions: &Sessions) -> Option<u64> {
        for session in ready {
            if let Some(socket) = sessions.get(session) {
                self.read_head(*session, socket);
            }
        }
        let (newest, _) = self.heads.last_key_value()?;
        let newest = *newest;
        let others = sessions.iter().filter(|(session, _)| !self.numbers.contains_key(session)).collect::<Vec<_>>();
        let polled = others.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::IN)).collect::<Vec<_>>();
        // Without an answer of the kernel, each is read.
        let ready = wait(&polled, Some(Duration::ZERO)).unwrap_or_else(|_| vec![true; others.len()]);
        for ((session, socket), _) in others.into_iter().zip(ready).filter(|(_, ready)| *ready) {
            self.read_head(*session, socket);
        }
        Some(newest)
    }

    /// Reads the next packet of a session that has no head.
    fn read_head(&mut self, session: u32, socket: &OwnedFd) {
        if self.numbers.contains_key(&session) || self.ended.contains(&session) {
            return;
        }
        let mut buf = [0; carried::MAX_NUMBERED];
        let received = match packet::try_recv(socket.as_fd(), &mut buf) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
            Ok(received) if received.len > 0 => received,
            _ => return self.ended.push(session),
        };
        // A program that gets a packet without its descriptors would take that for its peer's fault.
        if received.truncated {
            tracing::warn!("a session of a machine's program ends: this process has no descriptors left for it");
            return self.ended.push(session);
        }
        let Some((number, bytes)) = carried::numbered(&buf[..received.len]) else {
            tracing::error!("what the event loop sends to a machine makes no sense");
            return self.ended.push(session);
        };
        self.heads.insert(number, SentPacket { session, bytes: bytes.to_vec(), fds: received.fds });
        self.numbers.insert(session, number);
    }

    /// Takes the next packet to be passed on, of those up to `newest`. The next packet of its session becomes a head.
    pub(super) fn next(&mut self, newest: u64, sessions: &Sessions) -> Option<SentPacket> {
        let packet = self.heads.first_entry().filter(|first| *first.key() <= newest)?.remove();
        self.numbers.remove(&packet.session);
        // Whatever has a number up to `newest` lies in the socket by now.
        if let Some(socket) = sessions.get(&packet.session) {
            self.read_head(packet.session, socket);
        }
        Some(packet)
    }

    /// Takes the sessions that have ended.
    pub(super) fn take_ended(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.ended)
    }

    /// The guest has ended a session. Its next session may have the same number.
    pub(super) fn forget(&mut self, session: u32) {
        if let Some(number) = self.numbers.remove(&session) {
            self.heads.remove(&number);
        }
        self.ended.retain(|ended| *ended != session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(to: &OwnedFd, number: u64) {
        let mut packet = vec![number as u8];
        carried::number(number, &mut packet);
        packet::try_send(to.as_fd(), &packet, &[]).unwrap();
    }

    /// Sessions from 1 on, and the broker's ends of their sockets.
    fn sessions<const N: usize>() -> (Sessions, [OwnedFd; N]) {
        let pairs = (1..=N as u32).map(|session| {
            let (ours, theirs) = packet::pair().unwrap();
            ((session, ours), theirs)
        });
        let (ours, theirs): (Sessions, Vec<OwnedFd>) = pairs.unzip();
        (ours, theirs.try_into().unwrap())
    }

    /// What is passed on after a look, `most` packets at most.
    fn passed(packets: &mut SentPackets, ready: &[u32], sessions: &Sessions, most: usize) -> Vec<(u32, u8)> {
        let Some(newest) = packets.read(ready, sessions) else { return Vec::new() };
        let next = || packets.next(newest, sessions).map(|packet| (packet.session, packet.bytes[0]));
        std::iter::from_fn(next).take(most).collect()
    }

    #[test]
    fn packets_of_several_sessions_keep_their_order() {
        let mut packets = SentPackets::default();
        let (ours, [one, two, three]) = sessions();
        // The answer for 1 follows what 2 and 3 were sent, of which nothing was known when the sockets were polled.
        for number in 1..=30 {
            send(&three, number);
        }
        send(&two, 40);
        send(&one, 41);
        send(&two, 42);
        drop(three);
        let first = passed(&mut packets, &[1], &ours, 20);
        assert_eq!(first, (1..=20).map(|number| (3, number)).collect::<Vec<_>>());
        assert_eq!(packets.heads.len(), 3, "one of each session");
        // The port was full for a time.
        send(&one, 50);
        let rest = passed(&mut packets, &[1, 2, 3], &ours, 20);
        assert_eq!(rest[..10], (21..=30).map(|number| (3, number)).collect::<Vec<_>>());
        assert_eq!(rest[10..], [(2, 40), (1, 41)]);
        assert_eq!(packets.take_ended(), [3]);
        assert_eq!(passed(&mut packets, &[], &ours, 20), [(2, 42), (1, 50)]);
        assert!(packets.is_empty());
    }

    #[test]
    fn session_ends_after_its_last_packet() {
        let mut packets = SentPackets::default();
        let (ours, [theirs]) = sessions();
        send(&theirs, 7);
        send(&theirs, 8);
        drop(theirs);
        assert_eq!(passed(&mut packets, &[1], &ours, 1), [(1, 7)]);
        assert_eq!(packets.take_ended(), Vec::<u32>::new());
        assert_eq!(passed(&mut packets, &[1], &ours, 1), [(1, 8)]);
        assert_eq!(packets.take_ended(), [1]);
    }

    #[test]
    fn session_that_the_guest_has_ended_leaves_nothing() {
        let mut packets = SentPackets::default();
        let (ours, [one, two]) = sessions();
        send(&one, 1);
        send(&two, 2);
        packets.read(&[1, 2], &ours);
        packets.forget(1);
        // The next session with this number.
        let (again, _broker) = packet::pair().unwrap();
        let ours: Sessions = ours.into_iter().filter(|(session, _)| *session != 1).chain([(1, again)]).collect();
        assert_eq!(passed(&mut packets, &[], &ours, 9), [(2, 2)]);
        drop(two);
        packets.read(&[2], &ours);
        packets.forget(2);
        assert_eq!(packets.take_ended(), Vec::<u32>::new());
    }
}
