//! Which UDP socket receives a datagram with certain ends (protocol U11): the broker asks the host's kernel, and the agent its machine's.
//!
//! The kernel looks for the socket that would receive such a datagram, exactly as it does for a real one (`NETLINK_SOCK_DIAG`). It answers
//! for the network namespace in which the question's socket was made.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use partywall_protocol::socket::ReceiverQuestion;
use rustix::io::Errno;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use rustix::time::{ClockId, clock_gettime};

use super::option;

/// Questions that are sent at once. Their answers lie in the socket's buffer together.
const BATCH: usize = 32;
/// Notices of destroyed sockets that are read in one turn.
const NOTICES: usize = 256;
/// The groups `SKNLGRP_INET_UDP_DESTROY` (2) and `SKNLGRP_INET6_UDP_DESTROY` (4), as bits.
const DESTROYED: u32 = 1 << (2 - 1) | 1 << (4 - 1);

/// `SOCK_DIAG_BY_FAMILY`, the type of a question, of its answer and of a notice.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// Bytes of `nlmsghdr`, and of a question: that header and `inet_diag_req_v2`.
const HEADER: usize = 16;
const QUESTION: usize = HEADER + 56;
/// Where `inet_diag_msg` has the cookie, behind the header.
const COOKIE: usize = HEADER + 44;
/// Where it has the state, and that of a connected socket (`TCP_ESTABLISHED`, of UDP too).
const STATE: usize = HEADER + 1;
const CONNECTED: u8 = 1;

/// Asks the kernel about the sockets of one network namespace.
#[derive(Debug)]
pub struct ReceiverFinder {
    socket: OwnedFd,
    netns: u64,
    sequence: u32,
}

impl ReceiverFinder {
    /// For the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open() -> rustix::io::Result<Self> {
        let socket = netlink(0)?;
        let netns = option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        Ok(Self { socket, netns, sequence: 0 })
    }

    /// The number of that namespace.
    pub fn netns(&self) -> u64 {
        self.netns
    }

    /// Whether the kernel finds a socket that is there. To be called in that namespace.
    pub fn works(&mut self) -> bool {
        let Ok(socket) = UdpSocket::bind(("127.0.0.1", 0)) else { return false };
        let (Ok(to), Ok(cookie)) = (socket.local_addr(), sockopt::socket_cookie(&socket)) else { return false };
        let question = ReceiverQuestion { from: SocketAddr::new(to.ip(), 9), to, in_group: false };
        self.find(&[question]) == [Some(FoundReceiver { cookie, is_connected: false })]
    }

    /// The socket that receives a datagram with these ends, for each of these; `None` where the kernel gives no answer.
    pub fn find(&mut self, questions: &[ReceiverQuestion]) -> Vec<Option<FoundReceiver>> {
        let mut receivers = vec![None; questions.len()];
        for (asked, receivers) in questions.chunks(BATCH).zip(receivers.chunks_mut(BATCH)) {
            let first = self.sequence;
            // Answers to an earlier batch that broke off have other numbers.
            self.sequence = self.sequence.wrapping_add(BATCH as u32);
            let mut packet = Vec::with_capacity(BATCH * QUESTION);
            for (at, question) in (0u32..).zip(asked) {
                put_question(&mut packet, first.wrapping_add(at), *question);
            }
            if rustix::net::send(&self.socket, &packet, SendFlags::DONTWAIT).is_err() {
                continue;
            }
            let mut packet = [0; 4096];
            let mut answers = 0;
            // The kernel has answered all of them before `send` returned.
            while answers < asked.len() {
                let len = match rustix::net::recv(&self.socket, &mut packet, RecvFlags::DONTWAIT) {
                    Ok((len, _)) => len,
                    Err(Errno::INTR) => continue,
                    Err(_) => break,
                };
                for one in messages(packet.get(..len).unwrap_or_default()) {
                    let at = one.sequence.wrapping_sub(first) as usize;
                    if let Some(receiver) = receivers.get_mut(at) {
                        answers += 1;
                        *receiver = if one.kind == BY_FAMILY { receiver_of(one.bytes) } else { None };
                    }
                }
            }
        }
        receivers
    }
}

/// A socket that hears when UDP sockets of the calling thread's network namespace are destroyed ([`read_notices`]).
///
/// # Errors
/// The kernel's.
pub fn destroy_notices() -> rustix::io::Result<OwnedFd> {
    netlink(DESTROYED)
}

/// Milliseconds of the clock by which proofs of flows are dated.
pub fn coarse_now() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    // Neither is negative.
    (now.tv_sec * 1000 + now.tv_nsec / 1_000_000).cast_unsigned()
}

/// A netlink socket of the calling thread's network namespace that hears these groups.
fn netlink(groups: u32) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(SOCK_DIAG))?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// Reads notices of destroyed sockets. Returns `false` if some were lost for want of room: then all flows are to be looked at.
pub fn read_notices(socket: BorrowedFd<'_>, mut heard: impl FnMut(u64)) -> bool {
    let mut packet = [0; 4096];
    let mut are_all = true;
    for _ in 0..NOTICES {
        match rustix::net::recv(socket, &mut packet, RecvFlags::DONTWAIT) {
            Ok((len, _)) => {
                let notices = messages(packet.get(..len).unwrap_or_default()).filter(|one| one.kind == BY_FAMILY);
                notices.filter_map(|one| cookie_of(one.bytes)).for_each(&mut heard);
            }
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR) => {}
            Err(_) => are_all = false,
        }
    }
    are_all
}

/// Appends the question which socket receives a datagram with these ends.
fn put_question(out: &mut Vec<u8>, sequence: u32, ReceiverQuestion { from, to, .. }: ReceiverQuestion) {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    // `nlmsghdr {len u32, type u16, flags u16, sequence u32, port u32}`.
    out.extend((QUESTION as u32).to_ne_bytes());
    out.extend(BY_FAMILY.to_ne_bytes());
    out.extend(REQUEST.to_ne_bytes());
    out.extend(sequence.to_ne_bytes());
    out.extend(0u32.to_ne_bytes());
    // `inet_diag_req_v2 {family u8, protocol u8, ext u8, pad u8, states u32, id}`. Families are small numbers.
    out.extend([family.as_raw() as u8, libc::IPPROTO_UDP as u8, 0, 0]);
    out.extend(u32::MAX.to_ne_bytes());
    // `inet_diag_sockid {sport be16, dport be16, src [16], dst [16], if u32, cookie [u32; 2]}`. Of UDP, the kernel takes the first
    // for where a datagram is from, and the second for where it goes.
    out.extend(from.port().to_be_bytes());
    out.extend(to.port().to_be_bytes());
    for at in [from, to] {
        let mut bytes = [0; 16];
        match at.ip() {
            IpAddr::V4(four) => bytes[..4].copy_from_slice(&four.octets()),
            IpAddr::V6(six) => bytes = six.octets(),
        }
        out.extend(bytes);
    }
    out.extend(0u32.to_ne_bytes());
    // `INET_DIAG_NOCOOKIE`, twice: the kernel is to say which, and not whether it is a certain one.
    out.extend(u64::MAX.to_ne_bytes());
}

/// One message of a netlink packet.
struct NetlinkMessage<'a> {
    kind: u16,
    sequence: u32,
    /// All of it, header included.
    bytes: &'a [u8],
}

fn messages(mut rest: &[u8]) -> impl Iterator<Item = NetlinkMessage<'_>> {
    std::iter::from_fn(move || {
        let len = word(rest, 0)? as usize;
        let bytes = rest.get(..len).filter(|bytes| bytes.len() >= HEADER)?;
        let kind = u16::from_ne_bytes(rest.get(4..6)?.try_into().ok()?);
        let sequence = word(rest, 8)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(NetlinkMessage { kind, sequence, bytes })
    })
}

/// A socket that the kernel has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundReceiver {
    /// Its number (`SO_COOKIE`).
    pub cookie: u64,
    /// It is connected.
    pub is_connected: bool,
}

fn receiver_of(message: &[u8]) -> Option<FoundReceiver> {
    Some(FoundReceiver { cookie: cookie_of(message)?, is_connected: *message.get(STATE)? == CONNECTED })
}

/// The number of the socket that a message is about.
fn cookie_of(message: &[u8]) -> Option<u64> {
    Some(u64::from(word(message, COOKIE)?) | u64::from(word(message, COOKIE + 4)?) << 32)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn receivers_are_found_by_both_ends() {
        let mut finder = ReceiverFinder::open().unwrap();
        assert!(finder.works());
        let [one, other] = [(); 2].map(|()| UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        let [at, from] = [&one, &other].map(|socket| socket.local_addr().unwrap());
        let cookie = |socket: &UdpSocket| sockopt::socket_cookie(socket).unwrap();
        // More than a batch.
        let mut questions = vec![ReceiverQuestion { from, to: at, in_group: false }; BATCH + 1];
        questions[BATCH - 1].to = from;
        let found = finder.find(&questions);
        let expected = |n: usize| FoundReceiver {
            cookie: cookie(if n == BATCH - 1 { &other } else { &one }),
            is_connected: false,
        };
        assert!(found.iter().enumerate().all(|(n, found)| *found == Some(expected(n))), "{found:?}");
        one.connect(from).unwrap();
        assert!(finder.find(&questions[..1])[0].unwrap().is_connected);
        one.connect(("127.0.0.1", 9)).unwrap();
        assert_eq!(finder.find(&questions[..1]), [None], "it receives from another end alone");
    }
}
