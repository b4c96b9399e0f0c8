//! The few control messages that a socket's client needs, written and read on the stack.
//!
//! The codec of `protocol::wire` allocates, and what is here may run in a signal handler that interrupted the allocator. The
//! tests hold the two against each other.

use partywall_protocol::wire::{HEADER, MAGIC};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;

/// Bytes of the longest request: a `Publish` with all the addresses it can have.
const LONGEST: usize = HEADER + 2 + 64 * 16;

/// A packet that is being written; what does not fit makes it [`broken`](Self::is_broken).
#[derive(Debug)]
pub(super) struct Request {
    bytes: [u8; LONGEST],
    len: usize,
    broken: bool,
}

impl Request {
    pub(super) fn new(kind: u16, request: u32) -> Self {
        let mut this = Self { bytes: [0; LONGEST], len: 0, broken: false };
        this.put(&MAGIC.to_le_bytes());
        this.put(&kind.to_le_bytes());
        this.put(&request.to_le_bytes());
        this
    }

    pub(super) fn u8(mut self, value: u8) -> Self {
        self.put(&[value]);
        self
    }

    pub(super) fn u16(mut self, value: u16) -> Self {
        self.put(&value.to_le_bytes());
        self
    }

    pub(super) fn u64(mut self, value: u64) -> Self {
        self.put(&value.to_le_bytes());
        self
    }

    pub(super) fn string(self, text: &[u8]) -> Self {
        // Names are of 64 bytes at most.
        let mut this = self.u16(text.len() as u16);
        this.put(text);
        this
    }

    pub(super) fn ip(mut self, bits: u128) -> Self {
        self.put(&bits.to_be_bytes());
        self
    }

    fn put(&mut self, bytes: &[u8]) {
        match self.bytes.get_mut(self.len..self.len + bytes.len()) {
            Some(room) => room.copy_from_slice(bytes),
            None => self.broken = true,
        }
        self.len += bytes.len();
    }

    /// The packet, if it is one.
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        if self.broken { None } else { self.bytes.get(..self.len) }
    }
}

/// As much of an answer as matters, and more than any but a refusal has. Of a long refusal, the reason is cut.
#[derive(Debug)]
pub(super) struct Answer {
    bytes: [u8; 256],
    len: usize,
    fds: [Option<OwnedFd>; 2],
}

impl Answer {
    /// Receives a packet without waiting; `None` at the end of the session.
    pub(super) fn receive(from: BorrowedFd<'_>) -> Result<Option<Self>, Errno> {
        let mut this = Self { bytes: [0; 256], len: 0, fds: [None, None] };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = rustix::net::recvmsg(from, &mut [IoSliceMut::new(&mut this.bytes)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                for (place, fd) in this.fds.iter_mut().zip(rights) {
                    *place = Some(fd);
                }
            }
        }
        this.len = got.bytes.min(this.bytes.len());
        Ok((this.len > 0).then_some(this))
    }

    /// Its kind and request number, if it begins as a packet does.
    pub(super) fn header(&self) -> Option<(u16, u32)> {
        let mut fields = Fields(self.bytes.get(..self.len)?);
        (fields.u16()? == MAGIC).then_some(())?;
        Some((fields.u16()?, fields.u32()?))
    }

    /// What follows the header.
    pub(super) fn fields(&self) -> Fields<'_> {
        Fields(self.bytes.get(HEADER..self.len).unwrap_or_default())
    }

    /// The descriptor at a place.
    pub(super) fn take_fd(&mut self, at: usize) -> Option<OwnedFd> {
        self.fds.get_mut(at)?.take()
    }
}

/// The fields of an answer, in order.
#[derive(Debug, Clone)]
pub(super) struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::wire::{self, Addresses, Message, User};
    use std::net::IpAddr;

    fn wire(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        wire::encode(7, message, &mut out);
        out
    }

    #[test]
    fn requests_are_what_the_codec_writes() {
        let ips: Vec<IpAddr> = ["10.0.0.1", "::1", "fe80::1:2"].map(|ip| ip.parse().unwrap()).into();
        let publish = ips.iter().fold(Request::new(21, 7).u16(3), |r, ip| r.ip(partywall_shm::address::wide(*ip)));
        let (ring_offset, ring_size) = (4096, 8192);
        for (ours, theirs) in [
            (Request::new(1, 7).u16(1).string(b"web-1"), Message::Join { version: 1, name: "web-1".into() }),
            (Request::new(10, 7).u64(5), Message::Closed { channel: 5 }),
            (Request::new(19, 7), Message::Directory {}),
            (publish, Message::Publish { addresses: Addresses(ips.clone()) }),
            (Request::new(23, 7).u64(5), Message::Withdraw { key: 5 }),
            (Request::new(24, 7).u64(4096).u64(8192), Message::Offer { ring_offset, ring_size }),
            (Request::new(26, 7).u64(5), Message::Cancel { offer: 5 }),
            (Request::new(49, 7).u64(5), Message::FetchReceiver { flow: 5 }),
            (Request::new(27, 7).u64(4096).u64(8192), Message::Take { ring_offset, ring_size }),
            (Request::new(52, 7).u64(5), Message::Confirm { offer: 5 }),
            (Request::new(53, 7).u64(5), Message::Finish { offer: 5 }),
            (
                Request::new(47, 7).u64(5).u8(1).u64(4096).u64(8192),
                Message::ReclaimSocket { channel: 5, side: wire::Side::Accepting, ring_offset, ring_size },
            ),
        ] {
            assert_eq!(ours.bytes().unwrap(), wire(&theirs), "{theirs:?}");
        }
    }

    #[test]
    fn the_longest_publish_fits_and_nothing_longer() {
        let full = (0..64).fold(Request::new(21, 7).u16(64), |r, i| r.ip(i));
        assert_eq!(full.bytes().unwrap().len(), LONGEST);
        assert!(full.u16(0).bytes().is_none());
    }

    #[test]
    fn answers_of_the_codec_are_read_and_a_long_refusal_is_cut() {
        let (a, b) = partywall_region::packet::pair().unwrap();
        let refused = Message::Refused { code: wire::Refusal::Quota, reason: "x".repeat(500) };
        let peer =
            Message::PeerIs { ring_offset: 4096, ring_size: 8192, pid: 3, user: User::Host(4), name: "n".repeat(64) };
        use rustix::fd::AsFd;
        partywall_region::packet::send(a.as_fd(), &wire(&refused), &[]).unwrap();
        partywall_region::packet::send(a.as_fd(), &wire(&peer), &[a.as_fd(), b.as_fd()]).unwrap();
        let answer = Answer::receive(b.as_fd()).unwrap().unwrap();
        assert_eq!((answer.header(), answer.fields().u16()), (Some((3, 7)), Some(10)));
        let mut answer = Answer::receive(b.as_fd()).unwrap().unwrap();
        let mut fields = answer.fields();
        assert_eq!((fields.u64(), fields.u64(), fields.u32()), (Some(4096), Some(8192), Some(3)));
        assert!(answer.take_fd(0).is_some() && answer.take_fd(1).is_some() && answer.take_fd(1).is_none());
        assert_eq!(Answer::receive(b.as_fd()).unwrap_err(), Errno::AGAIN);
        drop(a);
        assert!(Answer::receive(b.as_fd()).unwrap().is_none());
    }
}
