//! The link of one direction of a channel (protocol L): its doorbell and its notice of death; to another machine, also the carrier of its
//! memory.

mod bells;
mod codec;
mod crossing;

use crate::double::DoubleLink;
use crate::event::LinkEvent;
use crate::packet;
use codec::{BELL, DROPPED, LISTEN, MOVED, PacketBuffer, RING_AT, decode};
use partywall_protocol::link::LinkMemory;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::Geometry;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io;
use std::time::{Duration, Instant};

pub use bells::{Bells, pair};
pub(crate) use codec::Packet;
pub use crossing::{Crossing, LATE};

/// One end of a link.
#[derive(Debug)]
pub enum Link {
    /// Between two processes of one machine. It carries no memory.
    Bells(Bells),
    /// Between a process and a relay to another machine, as the relay has it.
    Socket(OwnedFd),
    /// The process's end of a link to another machine. The relay may offer a shorter way for rings.
    Crossing(Crossing),
    /// The in-process double.
    Double(DoubleLink),
}

impl Link {
    /// A connected pair of sockets for a link to another machine, one for the process and one for the relay.
    pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
        packet::pair()
    }

    /// Takes an end of a link that the broker has made ([`pair`]).
    pub fn bells(fd: OwnedFd) -> Result<Self, Corrupt> {
        if packet::is_seqpacket(&fd) { Ok(Self::Bells(Bells::new(fd))) } else { Err(Corrupt::BadPacket) }
    }

    /// Whether it delivers memory, and not bells alone.
    pub fn carries_memory(&self) -> bool {
        !matches!(self, Self::Bells(_))
    }

    /// A link to another machine. Its other end belongs to a relay and is trusted (protocol I5). Where rings come by
    /// interrupts, the waiting half looks again at least every `late` ([`LATE`]).
    pub fn crossing(fd: OwnedFd, late: Duration) -> io::Result<Self> {
        Ok(Self::Crossing(Crossing::new(fd, late)?))
    }

    /// Tells a process that it is rung by this event, too (protocol I3).
    pub(crate) fn listen_to(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.send(&LISTEN, &[event])
    }

    /// Tells the other end to ring this event instead of the link (protocol I4).
    pub(crate) fn ring_at(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.send(&RING_AT, &[event])
    }

    /// Tells the other end that the hang-up which follows is a move (protocol G7.8). A link that is full of rings takes nothing, and its
    /// process then finds the hang-up alone.
    pub(crate) fn say_moved(&self) {
        drop(self.send(&MOVED, &[]));
    }

    /// Whether the relay at the other end has reported, before it hung up, that a machine is being migrated (protocol G7.8). It counts as
    /// soon as the packet has been taken from the link.
    pub fn has_moved(&self) -> bool {
        match self {
            Self::Crossing(link) => link.has_moved(),
            Self::Bells(_) | Self::Socket(_) | Self::Double(_) => false,
        }
    }

    fn send(&self, packet: &[u8], with: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self.socket() {
            Some(fd) => packet::try_send(fd, packet, with),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The socket, if it is one.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Bells(link) => Some(link.socket()),
            Self::Socket(fd) => Some(fd.as_fd()),
            Self::Crossing(link) => Some(link.socket()),
            Self::Double(_) => None,
        }
    }

    /// Rings the peer. Never blocks and never fails: a full link has rings waiting (L3), and a hung-up link has no peer to wake.
    #[inline]
    pub fn ring(&self) {
        match self {
            Self::Bells(link) => link.ring(),
            Self::Socket(fd) => {
                let _ = packet::try_send(fd.as_fd(), &BELL, &[]);
            }
            Self::Crossing(link) => link.ring(),
            Self::Double(link) => link.ring(),
        }
    }

    /// Tells a subscriber that it is dropped. On a full link it is left to find out by what it reads, as L3 has it for rings.
    pub fn say_dropped(&self) {
        match self {
            Self::Bells(link) => link.say_dropped(),
            Self::Double(link) => link.say_dropped(),
            Self::Socket(_) | Self::Crossing(_) => drop(self.send(&DROPPED, &[])),
        }
    }

    /// Sends memory to the peer. `WouldBlock` if the link is full of rings that the peer has not looked at, `Unsupported` if it carries
    /// none.
    pub fn attach(&self, generation: u32, geometry: Geometry, memory: BorrowedFd<'_>) -> io::Result<()> {
        self.attach_from(0, generation, geometry, memory)
    }

    /// Sends the ring's memory to a receiver that begins at byte `start` of the stream (protocol B1).
    pub fn attach_from(
        &self,
        start: u64,
        generation: u32,
        geometry: Geometry,
        memory: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.attach_at(0, start, generation, geometry, memory)
    }

    /// Sends a region that begins at byte `base` of a window (protocol V4).
    pub fn attach_at(
        &self,
        base: u64,
        start: u64,
        generation: u32,
        geometry: Geometry,
        memory: BorrowedFd<'_>,
    ) -> io::Result<()> {
        match self {
            Self::Bells(_) => Err(io::ErrorKind::Unsupported.into()),
            Self::Double(link) => link.attach(base, start, generation, geometry, memory),
            Self::Socket(_) | Self::Crossing(_) => {
                let attach = LinkMemory::new(base, start, generation, geometry);
                self.send(attach.encode(&mut [0; LinkMemory::MAX]), &[memory])
            }
        }
    }

    /// Takes the next event without waiting; `None` if there is none.
    pub fn try_next(&self) -> io::Result<Option<LinkEvent>> {
        match self {
            Self::Bells(link) => link.try_next(),
            Self::Socket(fd) => Ok(try_packet(fd.as_fd())?.map(Packet::expected)),
            Self::Crossing(link) => link.try_next(),
            Self::Double(link) => Ok(link.try_next()),
        }
    }

    /// For a relay: the next packet of whatever kind, without waiting.
    pub(crate) fn try_packet(&self) -> io::Result<Option<Packet>> {
        match self {
            Self::Socket(fd) => try_packet(fd.as_fd()),
            Self::Bells(_) | Self::Crossing(_) | Self::Double(_) => Ok(self.try_next()?.map(Packet::Event)),
        }
    }

    /// Waits for the next event, at most until `deadline`. Uses no CPU meanwhile.
    pub fn wait(&self, deadline: Option<Instant>) -> io::Result<LinkEvent> {
        match self {
            Self::Bells(link) => link.wait(deadline),
            Self::Socket(fd) => wait_socket(fd.as_fd(), deadline),
            Self::Crossing(link) => link.wait(deadline),
            Self::Double(link) => Ok(link.wait(deadline)),
        }
    }

    /// Waits until [`Link::attach`] may go through again, or the peer has hung up; `false` if that was not before `deadline`.
    pub fn wait_to_send(&self, deadline: Option<Instant>) -> io::Result<bool> {
        match self.socket() {
            Some(fd) => poll_until(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], deadline),
            None => Ok(true),
        }
    }

    /// Whether the peer's end is gone, found without taking an event.
    pub fn is_hung_up(&self) -> bool {
        match self {
            Self::Double(link) => link.is_hung_up(),
            Self::Bells(_) | Self::Socket(_) | Self::Crossing(_) => packet::has_hung_up(self.life()),
        }
    }

    /// Hangs up: the peer sees the end of this link, as it would if this end were dropped.
    pub fn hang_up(&self) {
        match self {
            Self::Double(link) => link.hang_up(),
            // It fails only if the peer has hung up before, which is as good.
            Self::Bells(_) | Self::Socket(_) | Self::Crossing(_) => {
                let _ = rustix::net::shutdown(self.life(), rustix::net::Shutdown::Both);
            }
        }
    }

    /// A second handle of this end. It rings and hangs up, and takes no events. This end stays as it is when the handle is dropped.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn second_handle(&self) -> io::Result<Self> {
        // Not as a link for bells: that shuts the socket down when it is dropped.
        Ok(Self::Socket(self.life().try_clone_to_owned()?))
    }

    /// A descriptor that hangs up when the peer's end is gone. (The double's does not hang up.)
    pub fn life(&self) -> BorrowedFd<'_> {
        self.socket().unwrap_or_else(|| self.as_fd())
    }
}

impl AsFd for Link {
    /// Readable when there is an event, and when the peer's end is gone. The descriptor stays the same while the link exists.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Bells(link) => link.socket(),
            Self::Socket(fd) => fd.as_fd(),
            Self::Crossing(link) => link.as_fd(),
            Self::Double(link) => link.as_fd(),
        }
    }
}

fn try_packet(fd: BorrowedFd<'_>) -> io::Result<Option<Packet>> {
    let mut buf = PacketBuffer::default();
    match packet::try_recv(fd, &mut buf) {
        Ok(received) => Ok(Some(decode(&buf, received))),
        Err(e) => Ok(hung_up_or(e)?.map(Packet::Event)),
    }
}

fn wait_socket(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<LinkEvent> {
    if deadline.is_none() {
        // One system call instead of two. The maker of the pair may have kept a copy of our end and made it non-blocking:
        // then this says `WouldBlock`, and the poll below does the waiting.
        let mut buf = PacketBuffer::default();
        match packet::recv(fd, &mut buf) {
            Ok(received) => return Ok(decode(&buf, received).expected()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return hung_up_or(e).map(|event| event.unwrap_or(LinkEvent::Bell)),
        }
    }
    loop {
        if !poll_until(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], deadline)? {
            return Ok(LinkEvent::TimedOut);
        }
        if let Some(packet) = try_packet(fd)? {
            return Ok(packet.expected());
        }
    }
}

/// Whether anything came before the deadline.
fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        match rustix::event::poll(fds, left.map(timespec).as_ref()) {
            Err(Errno::INTR) => {}
            other => return Ok(other? > 0),
        }
    }
}

/// A duration for `ppoll`, which rejects more than the kernel's own range.
fn timespec(d: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX).min(1 << 40),
        tv_nsec: i64::from(d.subsec_nanos()),
    }
}

/// A reset is a hang-up with packets of ours unread; `WouldBlock` is no event.
fn hung_up_or(e: io::Error) -> io::Result<Option<LinkEvent>> {
    match e.kind() {
        io::ErrorKind::WouldBlock => Ok(None),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Ok(Some(LinkEvent::HungUp)),
        _ => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_not_a_known_packet_is_corrupt() {
        let cases: [(&[u8], usize); 12] = [
            (b"C", 0),
            (b"BB", 0),
            (b"B", 1),
            (&[0; 32], 1),
            (&[1; 33], 1),
            (&[1; 200], 0),
            // Packets that only a relay sends, and only on links to another machine.
            (&RING_AT, 1),
            (&LISTEN, 1),
            (&RING_AT, 0),
            (&LISTEN, 2),
            (&MOVED, 0),
            (&MOVED, 1),
        ];
        for (data, fds) in cases {
            let (a, b) = Link::pair().unwrap();
            let spare = rustix::io::dup(&a).unwrap();
            packet::send(a.as_fd(), data, &vec![spare.as_fd(); fds]).unwrap();
            let link = Link::Socket(b);
            assert!(matches!(link.try_next().unwrap(), Some(LinkEvent::Corrupt(Corrupt::BadPacket))), "{data:?}");
        }
    }

    #[test]
    fn waiting_survives_an_end_made_non_blocking_by_the_peer() {
        let (a, b) = Link::pair().unwrap();
        rustix::io::ioctl_fionbio(&b, true).unwrap();
        let link = Link::Socket(b);
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(matches!(link.wait(Some(soon)).unwrap(), LinkEvent::TimedOut));
        let ringer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            Link::Socket(a).ring();
        });
        assert!(matches!(link.wait(None).unwrap(), LinkEvent::Bell));
        ringer.join().unwrap();
        assert!(matches!(link.wait(None).unwrap(), LinkEvent::HungUp));
    }
}
