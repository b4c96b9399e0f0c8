//! Packets that the broker has sent to the programs of one machine, in the order in which it has sent them.
//!
//! Each session has a socket, and what lies in two sockets has no order. But an answer to one program may say that another has been sent
//! something before it, as in protocol G5.7. So the event loop numbers what it sends. Once a packet has been read, all packets with
//! lower numbers lie in the sockets:
//!
//! ```text
//!   ready sockets --read--> newest --> all sockets, up to newest --read--> lowest numbers first --> the port
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use partywall_region::packet;
use rustix::event::{PollFd, PollFlags};

use super::wait;
use crate::machines::carried;

/// Packets taken from one session before the others get their turn.
const BURST: usize = 16;

/// A packet for a program.
#[derive(Debug)]
pub(super) struct SentPacket {
    pub(super) session: u32,
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// Packets that were read from sessions and are not passed on yet.
#[derive(Debug, Default)]
pub(super) struct SentPackets {
    by_number: BTreeMap<u64, SentPacket>,
    /// Sessions that the broker has ended.
    ended: Vec<u32>,
}

impl SentPackets {
    /// Whether something is to be passed on.
    pub(super) fn is_empty(&self) -> bool {
        self.by_number.is_empty() && self.ended.is_empty()
    }

    /// Reads from sessions that are ready, and then from all sessions what was sent before the newest of that. Returns the number up to
    /// which nothing is missing.
    pub(super) fn read(&mut self, ready: &[u32], sessions: &BTreeMap<u32, OwnedFd>) -> u64 {
        for session in ready {
            if let Some(socket) = sessions.get(session) {
                self.read_session(*session, socket, None);
            }
        }
        let Some(newest) = self.by_number.last_key_value().map(|(number, _)| *number) else { return 0 };
        // Without an answer of the kernel, each is read.
        let all = sessions.values().map(|socket| PollFd::new(socket, PollFlags::IN)).collect::<Vec<_>>();
        let ready = wait(&all, Some(Duration::ZERO)).unwrap_or_else(|_| vec![true; sessions.len()]);
        for ((session, socket), _) in sessions.iter().zip(ready).filter(|(_, ready)| *ready) {
            self.read_session(*session, socket, Some(newest));
        }
        newest
    }

    /// Reads up to a number, or a burst.
    fn read_session(&mut self, session: u32, socket: &OwnedFd, until: Option<u64>) {
        let mut buf = [0; carried::MAX_NUMBERED];
        let mut left = BURST;
        while !self.ended.contains(&session) && (until.is_some() || left > 0) {
            left = left.saturating_sub(1);
            let received = match packet::try_recv(socket.as_fd(), &mut buf) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Ok(received) if received.len > 0 => received,
                _ => return self.ended.push(session),
            };
            // This program has numbered it.
            let Some((number, bytes)) = carried::numbered(&buf[..received.len]) else {
                return self.ended.push(session);
            };
            self.by_number.insert(number, SentPacket { session, bytes: bytes.to_vec(), fds: received.fds });
            if until.is_some_and(|until| number >= until) {
                return;
            }
        }
    }

    /// The next packet to be passed on, of those up to `newest`.
    pub(super) fn next(&mut self, newest: u64) -> Option<SentPacket> {
        let first = self.by_number.first_entry().filter(|first| *first.key() <= newest)?;
        Some(first.remove())
    }

    /// Sessions that have ended, and whose last packets have been passed on.
    pub(super) fn take_ended(&mut self) -> Vec<u32> {
        let Self { by_number, ended } = self;
        ended.extract_if(.., |session| by_number.values().all(|packet| packet.session != *session)).collect()
    }

    /// The guest has ended a session. Its next session may have the same number.
    pub(super) fn forget(&mut self, session: u32) {
        self.by_number.retain(|_, packet| packet.session != session);
        self.ended.retain(|ended| *ended != session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(to: &OwnedFd, number: u64) {
        packet::try_send(to.as_fd(), &carried::number(number, &[number as u8]), &[]).unwrap();
    }

    fn taken(packets: &mut SentPackets, newest: u64) -> Vec<(u32, u8)> {
        std::iter::from_fn(|| packets.next(newest)).map(|packet| (packet.session, packet.bytes[0])).collect()
    }

    #[test]
    fn packets_of_several_sessions_keep_their_order() {
        let mut packets = SentPackets::default();
        let (ours, theirs): (BTreeMap<u32, OwnedFd>, Vec<OwnedFd>) = (1..=3)
            .map(|session| {
                let (ours, theirs) = packet::pair().unwrap();
                ((session, ours), theirs)
            })
            .unzip();
        let [one, two, three] = <[OwnedFd; 3]>::try_from(theirs).unwrap();
        // The answer for 1 follows what 2 and 3 are sent, of which nothing was known when the sockets were polled.
        for number in 1..=2 * BURST as u64 {
            send(&three, number);
        }
        send(&two, 40);
        send(&one, 41);
        send(&two, 42);
        drop(three);
        let newest = packets.read(&[1], &ours);
        assert_eq!(newest, 41);
        let sent = taken(&mut packets, newest);
        assert_eq!(sent.len(), 2 * BURST + 2);
        assert!(sent.is_sorted_by_key(|(_, number)| *number), "{sent:?}");
        assert_eq!(sent[2 * BURST..], [(2, 40), (1, 41)]);
        let newest = packets.read(&[2, 3], &ours);
        assert_eq!(packets.take_ended(), [3]);
        assert_eq!(taken(&mut packets, newest), [(2, 42)]);
        assert!(packets.is_empty());
    }

    #[test]
    fn session_ends_after_its_last_packet() {
        let mut packets = SentPackets::default();
        let (ours, theirs) = packet::pair().unwrap();
        let sessions = BTreeMap::from([(5, ours)]);
        send(&theirs, 7);
        drop(theirs);
        let newest = packets.read(&[5], &sessions);
        assert_eq!((newest, packets.take_ended()), (7, vec![]));
        assert_eq!(taken(&mut packets, newest), [(5, 7)]);
        assert_eq!((packets.take_ended(), packets.is_empty()), (vec![5], true));
        // One that the guest has ended meanwhile is not ended once more.
        packets.read(&[5], &sessions);
        packets.forget(5);
        assert!(packets.is_empty());
    }
}
