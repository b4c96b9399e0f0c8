//! Packets to and from the broker, written and read on the stack.
//!
//! Nothing here allocates, since it may run in a signal handler that interrupted the allocator.

use partywall_protocol::wire::{self, BorrowedMessage, MessageKind};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;

/// Bytes of the longest request that is sent. A `TestPolicy` has one text here, and is shorter.
pub(super) const LONGEST_REQUEST: usize = MessageKind::longest_of(&[
    MessageKind::Join,
    MessageKind::Closed,
    MessageKind::Directory,
    MessageKind::Publish,
    MessageKind::Withdraw,
    MessageKind::Offer,
    MessageKind::Take,
    MessageKind::Confirm,
    MessageKind::Finish,
    MessageKind::Cancel,
    MessageKind::OfferDatagrams,
    MessageKind::TakeDatagrams,
    MessageKind::FetchReceiver,
    MessageKind::ReclaimSocket,
    MessageKind::Passed,
    MessageKind::TakePassed,
]);
/// Bytes of the longest answer to one of them.
const LONGEST_ANSWER: usize = MessageKind::longest_of(&[
    MessageKind::Joined,
    MessageKind::Refused,
    MessageKind::Done,
    MessageKind::PolicyDecides,
    MessageKind::DirectoryIs,
    MessageKind::Published,
    MessageKind::RoomIs,
    MessageKind::Bell,
    MessageKind::PeerIs,
    MessageKind::Offered,
    MessageKind::DatagramsTaken,
    MessageKind::Receiver,
    MessageKind::PassedIs,
]);

/// Descriptors that an answer has brought, in their order.
pub(super) type Descriptors = [Option<OwnedFd>; 4];

/// A packet from the broker.
#[derive(Debug)]
pub(super) struct Answer {
    bytes: [u8; LONGEST_ANSWER],
    len: usize,
    fds: Descriptors,
}

impl Answer {
    /// Receives a packet without waiting; `None` at the end of the session. A packet that is too long for any answer is empty.
    pub(super) fn receive(from: BorrowedFd<'_>) -> Result<Option<Self>, Errno> {
        let mut this = Self { bytes: [0; LONGEST_ANSWER], len: 0, fds: [const { None }; 4] };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
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
        if got.bytes == 0 {
            return Ok(None);
        }
        if !got.flags.contains(ReturnFlags::TRUNC) {
            this.len = got.bytes;
        }
        Ok(Some(this))
    }

    /// The request that it answers, and what it says. `None` if it is no message.
    pub(super) fn message(&self) -> Option<(u32, BorrowedMessage<'_>)> {
        wire::decode_borrowed(self.bytes.get(..self.len)?).ok()
    }

    /// The message and its descriptors.
    pub(super) fn parts(&mut self) -> Option<(BorrowedMessage<'_>, &mut Descriptors)> {
        let (_, message) = wire::decode_borrowed(self.bytes.get(..self.len)?).ok()?;
        Some((message, &mut self.fds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::wire::{
        AddressList, BorrowedAddresses, MAX_STRING, Message, Refusal, RegionReference, User,
    };
    use rustix::fd::AsFd;

    fn packet(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        wire::encode(7, message, &mut out);
        out
    }

    #[test]
    fn longest_publish_fits_its_memory() {
        let list = [[1; 16]; AddressList::MAX];
        let publish = BorrowedMessage::Publish { addresses: BorrowedAddresses::new(&list) };
        let mut memory = [0; LONGEST_REQUEST];
        assert_eq!(wire::encode_into(7, &publish, &mut memory).unwrap().len(), LONGEST_REQUEST);
    }

    #[test]
    fn longest_answers_are_read_and_longer_packets_are_not() {
        let (a, b) = partywall_region::packet::pair().unwrap();
        let (name, reason) = ("n".repeat(MAX_STRING), "x".repeat(MAX_STRING));
        let refused = Message::Refused { code: Refusal::Quota, reason: reason.clone() };
        let region = RegionReference::with_ring(8192);
        let peer = Message::PeerIs { region, program: 3, user: User::Host(4), name };
        let joined = Message::Joined {
            domain: 1,
            epoch: 2,
            instance: 3,
            max_ring: 4,
            max_channels: 5,
            user: User::Host(6),
            name: reason.clone(),
        };
        for message in [&refused, &joined] {
            partywall_region::packet::send(a.as_fd(), &packet(message), &[]).unwrap();
            let answer = Answer::receive(b.as_fd()).unwrap().unwrap();
            let (number, read) = answer.message().unwrap();
            assert_eq!((number, Message::own(read)), (7, message.clone()));
        }
        partywall_region::packet::send(a.as_fd(), &packet(&peer), &[a.as_fd(), b.as_fd(), a.as_fd(), b.as_fd()])
            .unwrap();
        let mut answer = Answer::receive(b.as_fd()).unwrap().unwrap();
        let (message, fds) = answer.parts().unwrap();
        assert!(matches!(message, BorrowedMessage::PeerIs { region: read, program: 3, .. } if read == region));
        assert!(fds.iter_mut().all(|fd| fd.take().is_some()));
        for bad in [&[0xff; LONGEST_ANSWER][..], &[0; 4000], &packet(&refused)[..20]] {
            partywall_region::packet::send(a.as_fd(), bad, &[]).unwrap();
            assert!(Answer::receive(b.as_fd()).unwrap().unwrap().message().is_none());
        }
        assert_eq!(Answer::receive(b.as_fd()).unwrap_err(), Errno::AGAIN);
        drop(a);
        assert!(Answer::receive(b.as_fd()).unwrap().is_none());
    }
}
