//! Packets that the broker has sent to the programs of one machine, in the order in which it has sent them.
//!
//! Each session has a socket, and what lies in two sockets has no order. But an answer to one program may imply that another was sent something
//! before (protocol G5.7). So the event loop numbers what it sends to programs of machines. Once a number has been seen, all packets of this
//! machine with lower numbers lie in its sockets, or have been passed on. A packet is taken out of its socket only when it is next, so the
//! sockets fill up if the machine takes nothing:
//!
//! ```text
//!   sockets that are ready --> numbers of their heads --> the newest one --> numbers of all other heads
//!                                                                                     |
//!   the port <-- packet with the lowest number, up to the newest <--------------------+<-- next head of that socket
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

/// The heads of sessions: the first packet in the socket of each.
#[derive(Debug, Default)]
pub(super) struct SentPackets {
    /// The session of each head, by the packet's number.
    heads: BTreeMap<u64, u32>,
    /// The number of each session's head.
    numbers: BTreeMap<u32, u64>,
    /// Sessions from which no more is read. They are closed after what [`Self::next`] has returned.
    ended: Vec<u32>,
}

impl SentPackets {
    /// Whether no head is known.
    pub(super) fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// Looks for the heads of sessions that are ready, and then for those of all others. Returns the number of the newest head: every packet
    /// with a lower number is a head, or lies behind one. `None` if there is no head.
    pub(super) fn look(&mut self, ready: &[u32], sessions: &Sessions) -> Option<u64> {
        for session in ready {
            if let Some(socket) = sessions.get(session) {
                self.look_for_head(*session, socket);
            }
        }
        let (newest, _) = self.heads.last_key_value()?;
        let newest = *newest;
        let others = sessions.iter().filter(|(session, _)| !self.numbers.contains_key(session)).collect::<Vec<_>>();
        let polled = others.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::IN)).collect::<Vec<_>>();
        // Without an answer of the kernel, each is looked at.
        let ready = wait(&polled, Some(Duration::ZERO)).unwrap_or_else(|_| vec![true; others.len()]);
        for ((session, socket), _) in others.into_iter().zip(ready).filter(|(_, ready)| *ready) {
            self.look_for_head(*session, socket);
        }
        Some(newest)
    }

    /// Looks at the next packet of a session that has no head.
    fn look_for_head(&mut self, session: u32, socket: &OwnedFd) {
        if self.numbers.contains_key(&session) || self.ended.contains(&session) {
            return;
        }
        let mut number = [0; carried::NUMBER];
        match packet::try_peek(socket.as_fd(), &mut number) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Ok(carried::NUMBER) => {
                let number = u64::from_le_bytes(number);
                self.heads.insert(number, session);
                self.numbers.insert(session, number);
            }
            _ => self.ended.push(session),
        }
    }

    /// Takes the next packet to be passed on, of those up to `newest`. The next packet of its session becomes a head.
    pub(super) fn next(&mut self, newest: u64, sessions: &Sessions) -> Option<SentPacket> {
        loop {
            let session = self.heads.first_entry().filter(|first| *first.key() <= newest)?.remove();
            self.numbers.remove(&session);
            let Some(socket) = sessions.get(&session) else { continue };
            let mut buf = [0; carried::MAX_NUMBERED];
            match packet::try_recv(socket.as_fd(), &mut buf) {
                Ok(packet::ReceivedPacket { len, truncated: false, fds }) if len >= carried::NUMBER => {
                    self.look_for_head(session, socket);
                    let bytes = buf[carried::NUMBER..len].to_vec();
                    return Some(SentPacket { session, bytes, fds });
                }
                // A program that gets a packet without its descriptors would take that for its peer's fault.
                _ => self.ended.push(session),
            }
        }
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
        try_to_send(to, number).unwrap();
    }

    fn try_to_send(to: &OwnedFd, number: u64) -> io::Result<()> {
        let mut packet = vec![number as u8];
        carried::number(number, &mut packet);
        packet::try_send(to.as_fd(), &packet, &[])
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
        let Some(newest) = packets.look(ready, sessions) else { return Vec::new() };
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
    fn sockets_stay_full_while_little_is_passed_on() {
        let mut packets = SentPackets::default();
        let (ours, theirs) = sessions::<2>();
        let mut number = 0;
        let mut fill = || {
            let before = number;
            for socket in &theirs {
                while try_to_send(socket, number + 1).is_ok() {
                    number += 1;
                }
            }
            number - before
        };
        fill();
        let mut more = 0;
        for _ in 0..1000 {
            assert_eq!(passed(&mut packets, &[1, 2], &ours, 1).len(), 1);
            more += fill();
        }
        assert!(more <= 1000, "{more} packets found room when 1000 were passed on");
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
        packets.look(&[1, 2], &ours);
        packets.forget(1);
        // The next session with this number.
        let (again, _broker) = packet::pair().unwrap();
        let ours: Sessions = ours.into_iter().filter(|(session, _)| *session != 1).chain([(1, again)]).collect();
        assert_eq!(passed(&mut packets, &[], &ours, 9), [(2, 2)]);
        drop(two);
        packets.look(&[2], &ours);
        packets.forget(2);
        assert_eq!(packets.take_ended(), Vec::<u32>::new());
    }
}
