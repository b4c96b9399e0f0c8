//! The examination of descriptors from clients, and the part of them that reaches the broker.
//!
//! ```text
//!   a session's packet ----> bytes, unchanged ----------------------------------> the broker decodes them
//!     descriptor of a socket that the message brings --> SocketFacts, closed ---> facts
//!     memory: a file of shmem or hugetlbfs that answers F_GET_SEALS ------------> kept
//!     anything else ------------------------------------------------------------> closed, and said to be nothing
//! ```
//!
//! Closing memory never waits, and neither does asking for its kind, its seals, its size and its blocks. A seek in it may wait for its maker, so
//! the broker makes none (protocol M2.6). All other descriptors are examined and closed here, in the process that reads the user's sessions
//! and may hang ([`super::readers`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use partywall_protocol::wire;
use partywall_region::inspect::{Inspector, Unhurried};
use partywall_region::packet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::core::SocketFacts;

/// The kind that a descriptor was found to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Sort {
    /// Closed already.
    Nothing = 0,
    /// Memory that can be sealed.
    Memory = 1,
}

/// A packet's descriptors after they were judged.
#[derive(Debug)]
pub(super) struct Judged {
    /// Bytes of the packet.
    pub(super) len: usize,
    /// Bytes or descriptors were lost.
    pub(super) truncated: bool,
    /// How many descriptors came.
    pub(super) came: usize,
    /// The facts about the socket that the message brings, or the reason why it is none.
    pub(super) socket: Option<Result<SocketFacts, String>>,
    /// The other descriptors, in order.
    pub(super) sorts: Vec<Sort>,
    /// The descriptors that are kept.
    pub(super) kept: Vec<OwnedFd>,
}

impl Judged {
    pub(super) fn take_kept(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.kept)
    }
}

/// Judges the descriptors of a packet, and closes those that no process is to have.
pub(super) fn judge(inspector: &mut Inspector, bytes: &[u8], received: packet::ReceivedPacket) -> Judged {
    let packet::ReceivedPacket { len, truncated, fds } = received;
    let came = fds.len();
    let mut judged = Judged { len, truncated, came, socket: None, sorts: Vec::new(), kept: Vec::new() };
    let mut fds = fds.into_iter();
    let close = |fds: std::vec::IntoIter<OwnedFd>| fds.for_each(|fd| drop(Unhurried(fd)));
    let (brings_socket, with_numbers) = match wire::decode(&bytes[..len.min(bytes.len())]) {
        Ok((_, message)) if !truncated => (message.brings_socket(), message.shows_connection()),
        // A message that cannot be decoded brings no descriptors.
        _ => {
            close(fds);
            return judged;
        }
    };
    if brings_socket {
        judged.socket = fds.next().map(|socket| inspector.inspect(Unhurried(socket), with_numbers));
    }
    for fd in fds {
        let sort = sort(fd.as_fd());
        judged.sorts.push(sort);
        if sort == Sort::Nothing {
            drop(Unhurried(fd));
        } else {
            judged.kept.push(fd);
        }
    }
    judged
}

/// Sorts a descriptor. Only files of shmem and hugetlbfs answer `F_GET_SEALS`, without calling their owner.
fn sort(fd: BorrowedFd<'_>) -> Sort {
    if rustix::fs::fcntl_get_seals(fd).is_ok() { Sort::Memory } else { Sort::Nothing }
}

/// Whether a client has closed its end of a session: earlier packets cannot be answered any more.
pub(super) fn is_hung_up(socket: impl AsFd) -> bool {
    // Reported in any case.
    has_any(socket, PollFlags::empty())
}

/// Whether reading nothing meant the end, or was a packet of no bytes.
pub(super) fn has_ended(socket: impl AsFd) -> bool {
    has_any(socket, PollFlags::RDHUP)
}

fn has_any(socket: impl AsFd, flags: PollFlags) -> bool {
    let mut fds = [PollFd::new(&socket, flags)];
    loop {
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Err(Errno::INTR) => {}
            // If it cannot be asked, it cannot be served.
            Err(_) => return true,
            Ok(_) => return !fds[0].revents().is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::wire::{AddressList, Message};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    #[test]
    fn numbers_of_published_connection_are_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut bytes = Vec::new();
        wire::encode(1, &Message::Publish { addresses: AddressList::default() }, &mut bytes);
        let received = packet::ReceivedPacket { len: bytes.len(), truncated: false, fds: vec![connection.into()] };
        let facts = judge(&mut Inspector::new(), &bytes, received).socket.unwrap().unwrap();
        // They may be known if the message is another one.
        assert_eq!(facts.identity.numbers, None);
    }

    #[test]
    fn only_memory_is_passed_on_to_event_loop() {
        let memory = rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        assert_eq!(sort(memory.as_fd()), Sort::Memory);
        let (stream, _other) = UnixStream::pair().unwrap();
        let (packets, _other) = packet::pair().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for fd in [stream.as_fd(), packets.as_fd(), reader.as_fd(), writer.as_fd(), file.as_fd()] {
            assert_eq!(sort(fd), Sort::Nothing, "{fd:?}");
        }
    }
}
