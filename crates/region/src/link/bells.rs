//! A link between two processes of one machine: it carries bells and nothing else (protocol L).
//!
//! The broker makes both ends and gives each away once, so no third process can read from an end or change its options. Only the peer can
//! send. Its descriptors must not arrive: the thread that closes one may wait for a FUSE server or a lingering TCP socket of the peer's,
//! for as long as the peer likes.
//!
//! - From Linux 6.16 on, each end refuses descriptors. The peer's `sendmsg` fails.
//! - Before that, the receiver looks at each packet before it takes it. A packet with descriptors stays where it is, the link is corrupt,
//!   and its socket stays open until the process ends, because closing it would close what lies in it.
//!
//! A pipe would carry no descriptors at all. But the kernel copies from and to a pipe under a lock that both ends share: a peer that writes
//! from memory, or reads into memory, whose page faults it answers late (FUSE, userfaultfd) blocks the other's reads, writes and `close`,
//! non-blocking or not. A socket copies before it takes any lock of the other end's.

use super::{BELL, DROPPED, hung_up_or, poll_until};
use crate::event::LinkEvent;
use crate::packet;
use crate::sockopt::{guarded_pair, refuses_descriptors};
use partywall_shm::corrupt::Corrupt;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Makes a link. The caller gives each end away and keeps none.
///
/// # Errors
/// Out of descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    guarded_pair(SocketType::SEQPACKET, SocketFlags::empty())
}

/// One end of such a link.
#[derive(Debug)]
pub struct Bells {
    /// Counted, so that it can be left open.
    socket: Arc<OwnedFd>,
    /// The kernel keeps descriptors away, so nothing has to be looked at before it is taken.
    refuses: bool,
}

/// The next packet in the socket.
enum Next {
    Event(LinkEvent),
    /// A packet with descriptors, which has not been taken.
    Descriptors,
}

impl Bells {
    pub(super) fn new(socket: OwnedFd) -> Self {
        let refuses = refuses_descriptors(&socket);
        Self { socket: Arc::new(socket), refuses }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    #[inline]
    pub(super) fn ring(&self) {
        self.send(BELL);
    }

    pub(super) fn say_dropped(&self) {
        self.send(DROPPED);
    }

    #[inline]
    fn send(&self, packet: [u8; 1]) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while let Err(Errno::INTR) = rustix::net::send(&*self.socket, &packet, flags) {}
    }

    pub(super) fn try_next(&self) -> io::Result<Option<LinkEvent>> {
        match self.receive(RecvFlags::DONTWAIT) {
            Ok(event) => Ok(Some(event)),
            Err(e) => hung_up_or(e),
        }
    }

    pub(super) fn wait(&self, deadline: Option<Instant>) -> io::Result<LinkEvent> {
        if deadline.is_none() {
            // One system call instead of two. The descriptor belongs to this process alone, and stays blocking.
            return match self.receive(RecvFlags::empty()) {
                Ok(event) => Ok(event),
                Err(e) => hung_up_or(e).map(|event| event.unwrap_or(LinkEvent::Bell)),
            };
        }
        loop {
            if !poll_until(&mut [PollFd::from_borrowed_fd(self.socket(), PollFlags::IN)], deadline)? {
                return Ok(LinkEvent::TimedOut);
            }
            if let Some(event) = self.try_next()? {
                return Ok(event);
            }
        }
    }

    fn receive(&self, how: RecvFlags) -> io::Result<LinkEvent> {
        match self.next(how)? {
            Next::Event(event) => Ok(event),
            Next::Descriptors => Ok(LinkEvent::Corrupt(Corrupt::BadPacket)),
        }
    }

    /// Takes the next packet, unless it has descriptors.
    #[inline]
    fn next(&self, how: RecvFlags) -> io::Result<Next> {
        if !self.refuses && self.has_descriptors(how)? {
            return Ok(Next::Descriptors);
        }
        // One byte longer than any packet, so that a longer one shows. No room for ancillary data: the kernel passes none.
        let mut packet = [0; 2];
        let len = packet::retry_reset(|| rustix::net::recv(&*self.socket, &mut packet, how).map(|(len, _)| len))?;
        Ok(Next::Event(match packet.get(..len).unwrap_or_default() {
            [] => LinkEvent::HungUp,
            data if data == BELL => LinkEvent::Bell,
            data if data == DROPPED => LinkEvent::Dropped,
            _ => LinkEvent::Corrupt(Corrupt::BadPacket),
        }))
    }

    /// Whether the next packet has descriptors. They are not taken, so none has to be closed.
    fn has_descriptors(&self, how: RecvFlags) -> io::Result<bool> {
        packet::retry_reset(|| packet::has_descriptors(&*self.socket, how))
    }
}

impl Drop for Bells {
    fn drop(&mut self) {
        if self.refuses {
            return;
        }
        // After the shutdown no more packets are added to the socket.
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        if !packet::is_harmless_to_close(self.socket(), packet::ALL) {
            std::mem::forget(Arc::clone(&self.socket));
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::{Link, packet};
    use std::time::Duration;

    const HANG: Duration = Duration::from_secs(60);

    fn links() -> (Link, Link) {
        let (a, b) = pair().unwrap();
        (Link::bells(a).unwrap(), Link::bells(b).unwrap())
    }

    /// An end that does not refuse descriptors, as before Linux 6.16.
    fn unguarded() -> (Link, Link) {
        let (a, b) = packet::pair().unwrap();
        (Link::bells(a).unwrap(), Link::bells(b).unwrap())
    }

    /// The socket of an end.
    fn bells(link: &Link) -> &Arc<OwnedFd> {
        match link {
            Link::Bells(bells) => &bells.socket,
            other => panic!("{other:?}"),
        }
    }

    /// A descriptor that is open only as long as it, or a copy in transit, is.
    fn watched() -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe().unwrap()
    }

    fn is_closed(other: &OwnedFd) -> bool {
        let mut fds = [PollFd::new(other, PollFlags::empty())];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
    }

    fn next(link: &Link) -> LinkEvent {
        link.wait(Some(Instant::now() + HANG)).unwrap()
    }

    #[test]
    fn descriptor_cannot_be_sent_on_link() {
        let (a, b) = links();
        let (spare, _other) = watched();
        let sent = packet::try_send(a.as_fd(), &BELL, &[spare.as_fd()]);
        let old_kernel = !refuses_descriptors(b.as_fd());
        assert!(old_kernel || sent.unwrap_err().raw_os_error() == Some(Errno::PERM.raw_os_error()));
    }

    #[test]
    fn descriptor_on_unguarded_link_is_corrupt_and_never_closed() {
        for wait in [true, false] {
            let (a, b) = unguarded();
            let (spare, other) = watched();
            a.ring();
            packet::try_send(a.as_fd(), &BELL, &[spare.as_fd()]).unwrap();
            drop(spare);
            assert!(matches!(next(&b), LinkEvent::Bell));
            for _ in 0..2 {
                let event = if wait { b.wait(None).unwrap() } else { b.try_next().unwrap().unwrap() };
                assert!(matches!(event, LinkEvent::Corrupt(Corrupt::BadPacket)));
            }
            drop((a, b));
            assert!(!is_closed(&other), "the receiver has closed what the sender sent");
        }
    }

    #[test]
    fn descriptor_left_unread_on_unguarded_link_is_never_closed() {
        // An empty packet looks like the end.
        for before in [&b"B"[..], b""] {
            for before in [&[before][..], &[before, before, before]] {
                let (a, b) = unguarded();
                let (spare, other) = watched();
                for packet in before {
                    packet::try_send(a.as_fd(), packet, &[]).unwrap();
                }
                packet::try_send(a.as_fd(), b"x", &[spare.as_fd()]).unwrap();
                drop(spare);
                drop(b);
                assert!(!is_closed(&other), "after {before:?}");
                // Without any, the socket is closed.
                let (a, b) = unguarded();
                let of_b = Arc::downgrade(bells(&b));
                for packet in before {
                    packet::try_send(a.as_fd(), packet, &[]).unwrap();
                }
                drop(b);
                assert!(a.is_hung_up() && of_b.strong_count() == 0, "after {before:?}");
            }
        }
    }

    #[test]
    fn dropped_second_handle_leaves_link_open() {
        for (a, b) in [links(), unguarded()] {
            let second = a.second_handle().unwrap();
            second.ring();
            drop(second);
            assert!(matches!(next(&b), LinkEvent::Bell));
            assert!(!b.is_hung_up() && !a.is_hung_up());
            a.second_handle().unwrap().hang_up();
            assert!(matches!(next(&b), LinkEvent::HungUp));
        }
    }

    #[test]
    fn unknown_packet_is_corrupt() {
        for (a, b) in [links(), unguarded()] {
            for packet in [&b"C"[..], b"BB", &[0; 32]] {
                packet::try_send(a.as_fd(), packet, &[]).unwrap();
                assert!(matches!(b.try_next().unwrap(), Some(LinkEvent::Corrupt(Corrupt::BadPacket))), "{packet:?}");
            }
            a.say_dropped();
            assert!(matches!(next(&b), LinkEvent::Dropped));
        }
    }

    #[test]
    fn only_seqpacket_socket_is_link() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(Link::bells(reader).is_err());
    }
}
