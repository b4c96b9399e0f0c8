//! The link of one direction of a channel (protocol L): its doorbell, the carrier of its memory, its notice of death.

use crate::double::DoubleLink;
use crate::packet;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::Geometry;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io;
use std::time::{Duration, Instant};

const BELL: [u8; 1] = [0x42];
const DROPPED: [u8; 1] = [0x44];
const ATTACH_LEN: usize = 32;
const ATTACH_AT_LEN: usize = 40;

/// What a link delivers.
#[derive(Debug)]
pub enum Event {
    /// Look again.
    Bell,
    /// The peer's memory.
    Attach {
        /// Which of the peer's rings this is.
        generation: u32,
        /// Its shape as the peer says.
        geometry: Geometry,
        /// The byte of the stream that the receiver begins at: 0, but for broadcast.
        start: u64,
        /// Where the region begins in its memory: 0, or a place in a window (protocol V4).
        base: u64,
        /// Its memory, not yet verified.
        memory: OwnedFd,
    },
    /// The publisher lets this subscriber go because it is too slow (protocol B2); the hang-up follows.
    Dropped,
    /// The peer's half is gone. Its state word says whether in order.
    HungUp,
    /// Nothing, up to the deadline.
    TimedOut,
    /// The peer broke the protocol.
    Corrupt(Corrupt),
}

/// One end of a link.
#[derive(Debug)]
pub enum Link {
    /// A `SOCK_SEQPACKET` socket.
    Socket(OwnedFd),
    /// The in-process double.
    Double(DoubleLink),
}

impl Link {
    /// A connected pair of sockets; either end can be sent to another process.
    pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
        packet::pair()
    }

    /// Takes an end that was received.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, Corrupt> {
        if packet::is_seqpacket(&fd) { Ok(Self::Socket(fd)) } else { Err(Corrupt::BadPacket) }
    }

    /// Rings the peer. Never blocks and never fails: a full link has rings waiting (L3), a hung-up one nobody to wake.
    #[inline]
    pub fn ring(&self) {
        match self {
            Self::Socket(fd) => {
                let _ = packet::try_send(fd.as_fd(), &BELL, &[]);
            }
            Self::Double(link) => link.ring(),
        }
    }

    /// Tells a subscriber that it is dropped. On a full link it is left to find out by what it reads, as L3 has it for rings.
    pub fn say_dropped(&self) {
        match self {
            Self::Socket(fd) => {
                let _ = packet::try_send(fd.as_fd(), &DROPPED, &[]);
            }
            Self::Double(link) => link.say_dropped(),
        }
    }

    /// Sends memory to the peer. `WouldBlock` if the link is full of rings that the peer has not looked at.
    pub fn attach(&self, generation: u32, geometry: Geometry, memory: BorrowedFd<'_>) -> io::Result<()> {
        self.attach_from(0, generation, geometry, memory)
    }

    /// The same for a receiver that begins at byte `start` of the stream (protocol B1).
    pub fn attach_from(
        &self,
        start: u64,
        generation: u32,
        geometry: Geometry,
        memory: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.attach_at(0, start, generation, geometry, memory)
    }

    /// The same for a region that begins at byte `base` of a window (protocol V4).
    pub fn attach_at(
        &self,
        base: u64,
        start: u64,
        generation: u32,
        geometry: Geometry,
        memory: BorrowedFd<'_>,
    ) -> io::Result<()> {
        match self {
            Self::Socket(fd) => {
                let packet = encode_attach(base, start, generation, geometry);
                let len = if base == 0 { ATTACH_LEN } else { ATTACH_AT_LEN };
                packet::try_send(fd.as_fd(), &packet[..len], &[memory])
            }
            Self::Double(link) => link.attach(base, start, generation, geometry, memory),
        }
    }

    /// Takes the next event without waiting; `None` if there is none.
    pub fn try_next(&self) -> io::Result<Option<Event>> {
        match self {
            Self::Socket(fd) => {
                let mut buf = [0; ATTACH_AT_LEN + 1];
                match packet::try_recv(fd.as_fd(), &mut buf) {
                    Ok(received) => Ok(Some(decode(&buf, received))),
                    Err(e) => hung_up_or(e),
                }
            }
            Self::Double(link) => Ok(link.try_next()),
        }
    }

    /// Waits for the next event, at most until `deadline`. Uses no CPU meanwhile.
    pub fn wait(&self, deadline: Option<Instant>) -> io::Result<Event> {
        match self {
            Self::Socket(fd) => wait_socket(fd.as_fd(), deadline),
            Self::Double(link) => Ok(link.wait(deadline)),
        }
    }

    /// Waits until [`Link::attach`] may go through again, or the peer has hung up; `false` if that was not before `deadline`.
    pub fn wait_to_send(&self, deadline: Option<Instant>) -> io::Result<bool> {
        match self {
            Self::Socket(fd) => Ok(poll_until(fd.as_fd(), PollFlags::OUT, deadline)? > 0),
            Self::Double(_) => Ok(true),
        }
    }

    /// Whether the peer's end is gone, found without taking an event.
    pub fn is_hung_up(&self) -> bool {
        match self {
            Self::Socket(fd) => {
                let mut fds = [PollFd::new(fd, PollFlags::empty())];
                matches!(rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1))
                    && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
            }
            Self::Double(link) => link.is_hung_up(),
        }
    }

    /// Hangs up: the peer sees the end of this link, as it would if this end were dropped.
    pub fn hang_up(&self) {
        match self {
            // It fails only if the peer has hung up before, which is as good.
            Self::Socket(fd) => drop(rustix::net::shutdown(fd, rustix::net::Shutdown::Both)),
            Self::Double(link) => link.hang_up(),
        }
    }
}

impl AsFd for Link {
    /// Readable when there is an event; hangs up when the peer's end is gone. (The double's does not hang up.)
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(fd) => fd.as_fd(),
            Self::Double(link) => link.as_fd(),
        }
    }
}

fn wait_socket(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<Event> {
    let mut buf = [0; ATTACH_AT_LEN + 1];
    if deadline.is_none() {
        // One system call instead of two. Whoever made the pair may have kept a copy of our end and made it non-blocking:
        // then this says `WouldBlock`, and the poll below does the waiting.
        match packet::recv(fd, &mut buf) {
            Ok(received) => return Ok(decode(&buf, received)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return hung_up_or(e).map(|event| event.unwrap_or(Event::Bell)),
        }
    }
    loop {
        if poll_until(fd, PollFlags::IN, deadline)? == 0 {
            return Ok(Event::TimedOut);
        }
        match packet::try_recv(fd, &mut buf) {
            Ok(received) => return Ok(decode(&buf, received)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return hung_up_or(e).map(|event| event.unwrap_or(Event::Bell)),
        }
    }
}

fn poll_until(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Option<Instant>) -> io::Result<usize> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let mut fds = [PollFd::new(&fd, flags)];
        match rustix::event::poll(&mut fds, left.map(timespec).as_ref()) {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
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
fn hung_up_or(e: io::Error) -> io::Result<Option<Event>> {
    match e.kind() {
        io::ErrorKind::WouldBlock => Ok(None),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Ok(Some(Event::HungUp)),
        _ => Err(e),
    }
}

/// The long form, of which the short form is the beginning but for its kind.
fn encode_attach(base: u64, start: u64, generation: u32, geometry: Geometry) -> [u8; ATTACH_AT_LEN] {
    let kind = if base == 0 { 1u32 } else { 2 };
    let mut packet = [0; ATTACH_AT_LEN];
    packet[0..4].copy_from_slice(&kind.to_le_bytes());
    packet[4..8].copy_from_slice(&generation.to_le_bytes());
    packet[8..16].copy_from_slice(&geometry.ring_offset().to_le_bytes());
    packet[16..24].copy_from_slice(&geometry.ring_size().to_le_bytes());
    packet[24..32].copy_from_slice(&start.to_le_bytes());
    packet[32..40].copy_from_slice(&base.to_le_bytes());
    packet
}

/// Protocol L2. `buf` is one byte longer than the longest packet, so that a longer one shows.
fn decode(buf: &[u8; ATTACH_AT_LEN + 1], mut received: packet::Received) -> Event {
    let data = &buf[..received.len];
    if received.truncated {
        return Event::Corrupt(Corrupt::BadPacket);
    }
    if data.is_empty() && received.fds.is_empty() {
        return Event::HungUp;
    }
    if data == BELL && received.fds.is_empty() {
        return Event::Bell;
    }
    if data == DROPPED && received.fds.is_empty() {
        return Event::Dropped;
    }
    let word = |at: usize| data.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let long = |at: usize| data.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let base = match (word(0), data.len()) {
        (Some(1), ATTACH_LEN) => Some(0),
        (Some(2), ATTACH_AT_LEN) => long(32).filter(|base| *base != 0),
        _ => None,
    };
    if received.fds.len() == 1
        && let (Some(base), Some(generation)) = (base, word(4))
        && let (Some(offset), Some(size), Some(start)) = (long(8), long(16), long(24))
        && let Ok(geometry) = Geometry::new(offset, size)
        && let Some(memory) = received.fds.pop()
    {
        return Event::Attach { generation, geometry, start, base, memory };
    }
    Event::Corrupt(Corrupt::BadPacket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_not_a_known_packet_is_corrupt() {
        let cases: [(&[u8], usize); 6] =
            [(b"C", 0), (b"BB", 0), (b"B", 1), (&[0; 32], 1), (&[1; 33], 1), (&[1; 200], 0)];
        for (data, fds) in cases {
            let (a, b) = Link::pair().unwrap();
            let spare = rustix::io::dup(&a).unwrap();
            packet::send(a.as_fd(), data, &vec![spare.as_fd(); fds]).unwrap();
            let link = Link::from_fd(b).unwrap();
            assert!(matches!(link.try_next().unwrap(), Some(Event::Corrupt(Corrupt::BadPacket))), "{data:?}");
        }
    }

    #[test]
    fn a_descriptor_that_is_no_link_is_refused() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(Link::from_fd(reader).is_err());
    }

    #[test]
    fn waiting_survives_an_end_made_non_blocking_by_the_peer() {
        let (a, b) = Link::pair().unwrap();
        rustix::io::ioctl_fionbio(&b, true).unwrap();
        let link = Link::from_fd(b).unwrap();
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(matches!(link.wait(Some(soon)).unwrap(), Event::TimedOut));
        let ringer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            Link::Socket(a).ring();
        });
        assert!(matches!(link.wait(None).unwrap(), Event::Bell));
        ringer.join().unwrap();
        assert!(matches!(link.wait(None).unwrap(), Event::HungUp));
    }
}
