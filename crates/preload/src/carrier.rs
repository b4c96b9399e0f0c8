//! The other end of a UNIX socket, by the kernel's cookie: descriptors that are sent by one end arrive in the queue of the other.
//!
//! Asked of the kernel by `NETLINK_SOCK_DIAG`, since no other call names the other end. Where that is not to be had (without `unix_diag` in the
//! kernel, in a sandbox without netlink, or in another network namespace than the socket's), the other end is not known.

use crate::netlink::{attributes, half, word};
use crate::sys;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::FileType;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// `SOCK_DIAG_BY_FAMILY`, of a question and its answer.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`
const REQUEST: u16 = 1;
/// Bytes of `nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of `unix_diag_msg {family u8, type u8, state u8, pad u8, inode u32, cookie [u32; 2]}`.
const FIXED: usize = 16;
/// `UDIAG_SHOW_PEER`
const SHOW_PEER: u32 = 4;
/// `UNIX_DIAG_PEER`
const PEER: u16 = 2;

/// Ends that were asked about before, and their other ends. A socket of this kind has one other end for as long as it lives, and no cookie is
/// used again.
static KNOWN: [(AtomicU64, AtomicU64); 16] = [const { (AtomicU64::new(0), AtomicU64::new(0)) }; 16];

/// The cookie of the other end of a connected UNIX socket of streams or of packets in order.
pub(crate) fn other_end(fd: c_int) -> Option<u64> {
    if fd < 0 {
        return None;
    }
    let fd = sys::borrow(fd);
    let own = sockopt::socket_cookie(fd).ok()?;
    let (known, other) = KNOWN.get(own as usize % KNOWN.len())?;
    if known.load(Ordering::Relaxed) == own {
        return Some(other.load(Ordering::Relaxed));
    }
    let found = ask(fd)?;
    // Another thread may store its own pair in between. A pair that is mixed names an end to which nothing was sent, and is of no use.
    known.store(0, Ordering::Relaxed);
    other.store(found, Ordering::Relaxed);
    known.store(own, Ordering::Relaxed);
    Some(found)
}

fn ask(fd: BorrowedFd<'_>) -> Option<u64> {
    let stat = rustix::fs::fstat(fd).ok()?;
    let own = u32::try_from(stat.st_ino).ok().filter(|_| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)?;
    let kernel =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(SOCK_DIAG))
            .ok()?;
    let near = UnixEnd::ask(&kernel, own).filter(|near| near.inode == own)?;
    // The inode is 0 until the other end is accepted.
    let other = near.peer.filter(|inode| *inode != 0)?;
    let far = UnixEnd::ask(&kernel, other).filter(|far| far.peer == Some(own))?;
    Some(far.cookie)
}

/// What the kernel says of one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct UnixEnd {
    inode: u32,
    cookie: u64,
    /// The inode of the other end.
    peer: Option<u32>,
}

impl UnixEnd {
    fn ask(kernel: &OwnedFd, inode: u32) -> Option<Self> {
        // `nlmsghdr {len u32, type u16, flags u16, sequence u32, port u32}`, then `unix_diag_req {family u8, protocol u8, pad u16, states u32,
        // inode u32, show u32, cookie [u32; 2]}`.
        let mut question = [0u8; HEADER + 24];
        let words =
            [(0, question.len() as u32), (20, u32::MAX), (24, inode), (28, SHOW_PEER), (32, u32::MAX), (36, u32::MAX)];
        question[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        question[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
        question[16] = AddressFamily::UNIX.as_raw() as u8;
        for (at, word) in words {
            question[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        rustix::net::send(kernel.as_fd(), &question, SendFlags::empty()).ok()?;
        let mut answer = [0u8; 512];
        // The kernel has the answer ready before the question's call returns.
        let (len, _) = rustix::net::recv(kernel.as_fd(), &mut answer, RecvFlags::DONTWAIT).ok()?;
        Self::read(answer.get(..len)?)
    }

    /// Reads an answer. `None` if it is none, or of a socket of datagrams, which may have several senders.
    fn read(answer: &[u8]) -> Option<Self> {
        let len = usize::try_from(word(answer, 0)?).ok()?;
        let message = answer.get(HEADER..len)?;
        let family = *message.first()?;
        let kind = u32::from(*message.get(1)?);
        let is_in_order = [SocketType::STREAM, SocketType::SEQPACKET].iter().any(|kept| kept.as_raw() == kind);
        if half(answer, 4)? != BY_FAMILY || u16::from(family) != AddressFamily::UNIX.as_raw() || !is_in_order {
            return None;
        }
        let cookie = u64::from(word(message, 8)?) | u64::from(word(message, 12)?) << 32;
        let peer = attributes(message.get(FIXED..)?).find_map(|(kind, value)| word(value, 0).filter(|_| kind == PEER));
        Some(Self { inode: word(message, 4)?, cookie, peer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    fn cookie(socket: &impl AsFd) -> Option<u64> {
        sockopt::socket_cookie(socket).ok()
    }

    #[test]
    fn other_end_of_pair_is_known_by_its_cookie() {
        let (a, b) = UnixStream::pair().unwrap();
        assert_eq!(other_end(a.as_raw_fd()), cookie(&b));
        assert_eq!(other_end(b.as_raw_fd()), cookie(&a));
        let copy = a.try_clone().unwrap();
        assert_eq!(other_end(copy.as_raw_fd()), cookie(&b), "and for a copy, from what was found before");
        let (c, d) = UnixStream::pair().unwrap();
        drop(d);
        assert_eq!(other_end(c.as_raw_fd()), None);
    }

    #[test]
    fn other_end_is_known_once_it_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let near = UnixStream::connect(folder.path().join("s")).unwrap();
        assert_eq!(other_end(near.as_raw_fd()), None);
        let (far, _) = listener.accept().unwrap();
        assert_eq!(other_end(near.as_raw_fd()), cookie(&far));
        assert_eq!(other_end(listener.as_raw_fd()), None);
    }

    #[test]
    fn other_descriptors_have_no_other_end() {
        let (a, _b) = UnixDatagram::pair().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for fd in [a.as_raw_fd(), tcp.as_raw_fd(), file.as_raw_fd(), -1] {
            assert_eq!(other_end(fd), None);
        }
    }

    #[test]
    fn malformed_answer_names_no_end() {
        let mut answer = vec![0u8; HEADER + FIXED + 8];
        answer[0..4].copy_from_slice(&(HEADER as u32 + FIXED as u32 + 8).to_ne_bytes());
        answer[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        (answer[16], answer[17]) = (1, 1);
        answer[32..34].copy_from_slice(&8u16.to_ne_bytes());
        answer[34..36].copy_from_slice(&PEER.to_ne_bytes());
        answer[36] = 9;
        assert_eq!(UnixEnd::read(&answer), Some(UnixEnd { inode: 0, cookie: 0, peer: Some(9) }));
        for len in 0..HEADER + FIXED {
            assert_eq!(UnixEnd::read(&answer[..len]), None);
        }
        answer[32..34].copy_from_slice(&900u16.to_ne_bytes());
        assert_eq!(UnixEnd::read(&answer).unwrap().peer, None);
        answer[4] = 2;
        assert_eq!(UnixEnd::read(&answer), None, "an error");
    }
}
