//! Watches the sockets of flows of datagrams, without keeping them open (protocol U11): a kept copy of a socket would keep its port from
//! the next owner.
//!
//! ```text
//!   kernel: destroyed UDP sockets -- netlink group ----> Watch::destroyed --+
//!                                                                           +--> Event::SocketGone, Event::FlowLost
//!   every LOOK: which socket would receive this? ------> Watch::look -------+
//! ```
//!
//! The notices are quick, but can be delayed by a process that holds a reference to a socket, and tell nothing of a socket that gave its port back
//! and lives on, or that shares its port. The look is what proves: the kernel looks for the socket that would receive a datagram with these
//! ends, exactly as it does for a real one, and that must be the flow's.
//!
//! Of a `SO_REUSEPORT` group the kernel chooses a socket by a hash of both ends, and so it does for the look. But a member can make it choose by a
//! program, for each datagram and for the whole group, and the kernel tells of no such program. So the flows of a group last only while each
//! member that the looks find is published: the library withdraws a socket for which its program has asked for that.
//!
//! The kernel answers for the network namespace in which a question's socket was made. The broker has such sockets in its own namespace,
//! and in each other one that has flows ([`super::namespaces`]).

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use partywall_protocol::wire::Side;
use partywall_region::inspect::option;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, sockopt};
use rustix::time::{ClockId, clock_gettime};

use super::namespaces::EnteredNamespace;
use super::netlink::{DESTROYED, netlink};
use crate::core::FlowSocket;

/// How often all flows are looked at, while there are any.
const LOOK: Duration = Duration::from_millis(100);
/// At most this fraction of the broker's time goes into looking: one part in ten.
const SHARE: u32 = 10;
/// Questions that are sent at once. Their answers lie in the socket's buffer together.
const BATCH: usize = 32;
/// Questions by which the members of a group are found in one look. Of two members, one stays unfound in one look of 2^64.
const PROBES: u16 = 64;
/// Groups that have flows, at most: their questions must not crowd out the looks at all other flows.
const GROUPS: usize = 64;
/// Notices of destroyed sockets that are read in one turn.
const NOTICES: usize = 256;

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

/// The sockets of flows, and how to ask the kernel about them.
#[derive(Debug)]
pub(super) struct FlowWatch {
    /// Where questions are asked, and of which network namespace; `None` if this kernel answers none.
    diag: Option<(OwnedFd, u64)>,
    /// The kernel's notices of destroyed sockets, while there are flows.
    notices: Option<DestroyNotices>,
    /// Other namespaces that have flows, by number.
    others: BTreeMap<u64, OtherNamespace>,
    /// How many ends of flows each namespace has.
    namespaces: HashMap<u64, u32>,
    flows: BTreeMap<u64, [FlowSocket; 2]>,
    /// How many ends of flows each socket has.
    cookies: HashMap<u64, u32>,
    /// How often each socket of a group is published.
    members: HashMap<u64, u32>,
    next: Option<Instant>,
    /// When the last look has been paid for, so that there may be another.
    rested: Instant,
    sequence: u32,
}

/// A socket that hears of destroyed sockets.
#[derive(Debug)]
struct DestroyNotices {
    socket: OwnedFd,
    /// The event loop waits for it.
    is_awaited: bool,
}

impl DestroyNotices {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, is_awaited: false }
    }
}

/// A namespace that is not the broker's own.
#[derive(Debug)]
struct OtherNamespace {
    diag: OwnedFd,
    notices: Option<DestroyNotices>,
}

impl FlowWatch {
    pub(super) fn open() -> Self {
        let mut this = Self {
            diag: None,
            notices: None,
            others: BTreeMap::new(),
            namespaces: HashMap::new(),
            flows: BTreeMap::new(),
            cookies: HashMap::new(),
            members: HashMap::new(),
            next: None,
            rested: Instant::now(),
            sequence: 0,
        };
        let opened = netlink(0).and_then(|diag| {
            let netns = option(diag.as_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
            Ok((diag, netns))
        });
        match opened {
            Ok(diag) => this.diag = Some(diag),
            Err(error) => tracing::info!(%error, "datagrams stay on the kernel: it does not tell of sockets"),
        }
        if this.diag.is_some() && !this.works() {
            tracing::info!("datagrams stay on the kernel: it does not find UDP sockets (CONFIG_INET_UDP_DIAG)");
            this.diag = None;
        }
        this
    }

    /// Whether the kernel finds a socket that is there.
    fn works(&mut self) -> bool {
        let Ok(socket) = UdpSocket::bind(("127.0.0.1", 0)) else { return false };
        let (Ok(to), Ok(cookie)) = (socket.local_addr(), sockopt::socket_cookie(&socket)) else { return false };
        let (from, netns) = (SocketAddr::new(to.ip(), 9), self.own().unwrap_or(0));
        self.prove(&[FlowSocket { cookie, netns, from, to, is_chosen: false }]) == [true]
    }

    /// The broker's own namespace; `None` if the kernel does not report sockets.
    pub(super) fn own(&self) -> Option<u64> {
        self.diag.as_ref().map(|(_, netns)| *netns)
    }

    /// Has the event loop wait for the notices of destroyed sockets for which it does not wait yet.
    pub(super) fn await_notices(&mut self, mut wait: impl FnMut(BorrowedFd<'_>)) {
        for notices in self.notices_mut().filter(|notices| !notices.is_awaited) {
            notices.is_awaited = true;
            wait(notices.socket.as_fd());
        }
    }

    fn notices_mut(&mut self) -> impl Iterator<Item = &mut DestroyNotices> {
        self.notices.iter_mut().chain(self.others.values_mut().filter_map(|other| other.notices.as_mut()))
    }

    /// Whether flows of this namespace need sockets that it does not have here yet.
    pub(super) fn lacks(&self, netns: u64) -> bool {
        self.own() != Some(netns) && !self.others.contains_key(&netns)
    }

    /// Takes the sockets of another namespace, of which a flow is about to be added. They are dropped with its last flow.
    pub(super) fn take_in(&mut self, EnteredNamespace { cookie, diag, notices }: EnteredNamespace) {
        self.others.insert(cookie, OtherNamespace { diag, notices: notices.map(DestroyNotices::new) });
    }

    /// Begins to watch a flow. Returns the side that has no socket any more, if there is one.
    pub(super) fn add(&mut self, flow: u64, sockets: [FlowSocket; 2]) -> Option<Side> {
        if self.notices.is_none() {
            // Without notices the looks do, later.
            self.notices = netlink(DESTROYED).ok().map(DestroyNotices::new);
        }
        for socket in sockets {
            *self.cookies.entry(socket.cookie).or_default() += 1;
            *self.namespaces.entry(socket.netns).or_default() += 1;
        }
        self.flows.insert(flow, sockets);
        if self.next.is_none() {
            self.next = Some(Instant::now() + LOOK);
        }
        // After the notices have begun: a socket that goes now is in a notice, one that has gone is not found.
        lost(&self.prove(&sockets))
    }

    /// Whether this is the only flow, so that no look has proved anything for a while.
    pub(super) fn is_first(&self) -> bool {
        self.flows.len() == 1
    }

    pub(super) fn remove(&mut self, flow: u64) {
        for socket in self.flows.remove(&flow).into_iter().flatten() {
            if let Some(ends) = self.cookies.get_mut(&socket.cookie) {
                *ends -= 1;
                if *ends == 0 {
                    self.cookies.remove(&socket.cookie);
                }
            }
            if let Some(ends) = self.namespaces.get_mut(&socket.netns) {
                *ends -= 1;
                if *ends == 0 {
                    self.namespaces.remove(&socket.netns);
                    // The namespace can go away now.
                    self.others.remove(&socket.netns);
                }
            }
        }
        if self.flows.is_empty() {
            (self.notices, self.next) = (None, None);
        }
    }

    /// A socket of a group was published, or is published no more.
    pub(super) fn count_member(&mut self, cookie: u64, is_published: bool) {
        let count = self.members.entry(cookie).or_default();
        *count = if is_published { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            self.members.remove(&cookie);
        }
        // The kernel chooses others from here on, or its program is about to have it choose otherwise.
        let soon = self.rested.max(Instant::now());
        self.next = self.next.map(|at| at.min(soon));
    }

    /// How long until the next look.
    pub(super) fn due_in(&self) -> Option<Duration> {
        self.next.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// If it is time, looks at all flows. Returns those that have lost a socket, and the moment for which the others are proved.
    pub(super) fn look(&mut self) -> Option<(Vec<(u64, Side)>, u64)> {
        let start = Instant::now();
        self.next.filter(|at| *at <= start)?;
        let now = coarse_now();
        let sockets: Vec<FlowSocket> = self.flows.values().flatten().copied().collect();
        let proved = self.prove(&sockets);
        let flows = self.flows.keys().copied().zip(proved.chunks(2));
        let gone = flows.filter_map(|(flow, both)| Some((flow, lost(both)?))).collect();
        self.rested = start + start.elapsed() * SHARE;
        self.next = Some(self.rested.max(start + LOOK));
        Some((gone, now))
    }

    /// Reads notices. Returns the numbers of those sockets that were flows', each once at least.
    pub(super) fn destroyed(&mut self) -> Vec<u64> {
        let (mut gone, mut were_lost) = (Vec::new(), false);
        let all = self.notices.iter().chain(self.others.values().filter_map(|other| other.notices.as_ref()));
        for notices in all {
            were_lost |= !read_notices(notices.socket.as_fd(), |cookie| {
                gone.extend(self.cookies.contains_key(&cookie).then_some(cookie));
            });
        }
        if were_lost {
            self.next = Some(Instant::now());
        }
        gone
    }

    /// Whether each socket is the one that receives what is sent to it. Where the kernel gives no answer, it is not.
    fn prove(&mut self, sockets: &[FlowSocket]) -> Vec<bool> {
        let receivers = self.receivers_of(sockets);
        let is_found = |(receiver, socket): (&Option<FoundReceiver>, &FlowSocket)| {
            receiver.is_some_and(|it| it.cookie == socket.cookie)
        };
        let mut proved: Vec<bool> = receivers.iter().zip(sockets).map(is_found).collect();
        // A socket that is connected comes before the other members.
        let is_chosen = |receiver: &Option<FoundReceiver>, socket: &FlowSocket| {
            socket.is_chosen && receiver.is_some_and(|it| !it.is_connected)
        };
        // A server has one socket for many clients.
        let mut groups = HashMap::new();
        let asked = receivers.iter().zip(sockets).zip(&mut proved);
        for ((_, socket), proved) in asked.filter(|((at, socket), proved)| **proved && is_chosen(at, socket)) {
            *proved = match groups.get(&(socket.netns, socket.to)) {
                Some(known) => *known,
                None => {
                    let known = groups.len() < GROUPS && self.knows_all(socket);
                    groups.insert((socket.netns, socket.to), known);
                    known
                }
            };
        }
        proved
    }

    /// The socket that receives what is sent to each of these, in its namespace.
    fn receivers_of(&mut self, sockets: &[FlowSocket]) -> Vec<Option<FoundReceiver>> {
        let mut receivers = vec![None; sockets.len()];
        let mut by_namespace: BTreeMap<u64, Vec<_>> = BTreeMap::new();
        for (socket, receiver) in sockets.iter().zip(&mut receivers) {
            by_namespace.entry(socket.netns).or_default().push((socket, receiver));
        }
        for (netns, asked) in by_namespace {
            let questions: Vec<_> = asked.iter().map(|(socket, _)| (socket.from, socket.to)).collect();
            for ((_, receiver), found) in asked.into_iter().zip(self.ask(netns, &questions)) {
                *receiver = found;
            }
        }
        receivers
    }

    /// Whether all members of a socket's group, as far as one look finds them, are published. The kernel chooses one for each port that a
    /// datagram could be from; which one for which port is its secret.
    fn knows_all(&mut self, socket: &FlowSocket) -> bool {
        let random = RandomState::new();
        // Ports from 1 on.
        let port = |at: u16| (random.hash_one(at) as u16).max(1);
        let questions: Vec<_> =
            (0..PROBES).map(|at| (SocketAddr::new(socket.from.ip(), port(at)), socket.to)).collect();
        let found = self.ask(socket.netns, &questions);
        let unknown = found.iter().find(|found| !found.is_some_and(|it| self.members.contains_key(&it.cookie)));
        if let Some(unknown) = unknown {
            tracing::debug!(at = %socket.to, ?unknown, "a socket of a group is not published");
        }
        unknown.is_none()
    }

    /// The socket of a namespace that receives a datagram from one address to another, for each of these; `None` where the kernel gives no
    /// answer.
    fn ask(&mut self, netns: u64, ends: &[(SocketAddr, SocketAddr)]) -> Vec<Option<FoundReceiver>> {
        let mut receivers = vec![None; ends.len()];
        let diag = match &self.diag {
            Some((diag, own)) if *own == netns => diag,
            _ => match self.others.get(&netns) {
                Some(other) => &other.diag,
                None => return receivers,
            },
        };
        for (ends, receivers) in ends.chunks(BATCH).zip(receivers.chunks_mut(BATCH)) {
            let first = self.sequence;
            // Answers to an earlier batch that broke off have other numbers.
            self.sequence = self.sequence.wrapping_add(BATCH as u32);
            let mut questions = Vec::with_capacity(BATCH * QUESTION);
            for (at, (from, to)) in (0u32..).zip(ends) {
                put_question(&mut questions, first.wrapping_add(at), *from, *to);
            }
            if rustix::net::send(diag, &questions, SendFlags::DONTWAIT).is_err() {
                continue;
            }
            let mut packet = [0; 4096];
            let mut answers = 0;
            // The kernel has answered all of them before `send` returned.
            while answers < ends.len() {
                let len = match rustix::net::recv(diag, &mut packet, RecvFlags::DONTWAIT) {
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

/// The side of a flow that has no socket any more, of both.
fn lost(proved: &[bool]) -> Option<Side> {
    match proved {
        // The receiver's first: what was not read goes to the present owner of its address.
        [_, false] => Some(Side::Accepting),
        [false, _] => Some(Side::Connecting),
        _ => None,
    }
}

/// Milliseconds of the clock by which proofs are dated.
pub(super) fn coarse_now() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    // Neither is negative.
    (now.tv_sec * 1000 + now.tv_nsec / 1_000_000).cast_unsigned()
}

/// Reads notices of destroyed sockets. Returns `false` if some were lost for want of room: then all flows are to be looked at.
fn read_notices(socket: BorrowedFd<'_>, mut heard: impl FnMut(u64)) -> bool {
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
fn put_question(out: &mut Vec<u8>, sequence: u32, from: SocketAddr, to: SocketAddr) {
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
#[derive(Debug, Clone, Copy)]
struct FoundReceiver {
    cookie: u64,
    is_connected: bool,
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
    use rustix::net::{SocketFlags, SocketType};

    fn of(socket: &UdpSocket, from: &UdpSocket) -> FlowSocket {
        let (to, from) = (socket.local_addr().unwrap(), from.local_addr().unwrap());
        let netns = option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE).unwrap();
        FlowSocket { cookie: sockopt::socket_cookie(socket).unwrap(), netns, from, to, is_chosen: false }
    }

    fn pair(at: &str) -> (UdpSocket, UdpSocket) {
        (UdpSocket::bind((at, 0)).unwrap(), UdpSocket::bind((at, 0)).unwrap())
    }

    #[test]
    fn sockets_with_their_addresses_are_proved() {
        let mut watch = FlowWatch::open();
        for at in ["127.0.0.1", "::1"] {
            let (a, b) = pair(at);
            assert_eq!(watch.add(1, [of(&a, &b), of(&b, &a)]), None, "{at}");
            a.connect(b.local_addr().unwrap()).unwrap();
            assert_eq!(watch.prove(&[of(&a, &b)]), [true], "connected to the flow's other end");
            watch.remove(1);
        }
        assert!(watch.notices.is_none() && watch.due_in().is_none() && watch.cookies.is_empty());
    }

    #[test]
    fn closed_socket_is_reported_though_its_port_is_reused() {
        let mut watch = FlowWatch::open();
        let (a, b) = pair("127.0.0.1");
        let (a_was, b_was) = (of(&a, &b), of(&b, &a));
        assert_eq!(watch.add(1, [a_was, b_was]), None);
        let port = b.local_addr().unwrap();
        drop(b);
        let _next = UdpSocket::bind(port).unwrap();
        let mut gone = Vec::new();
        while gone.is_empty() {
            gone = watch.destroyed();
        }
        assert_eq!(gone, [b_was.cookie]);
        watch.next = Some(Instant::now());
        assert_eq!(watch.look().unwrap().0, [(1, Side::Accepting)]);
        assert_eq!(watch.add(2, [b_was, a_was]), Some(Side::Connecting));
    }

    #[test]
    fn unconnected_or_reconnected_socket_is_reported_lost() {
        let mut watch = FlowWatch::open();
        let (a, b) = pair("127.0.0.1");
        // A port that the kernel chose at the first connect goes back when the connection is taken away.
        let c = UdpSocket::from(
            rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap(),
        );
        c.connect(a.local_addr().unwrap()).unwrap();
        let was = of(&c, &a);
        assert_eq!(watch.prove(&[was]), [true]);
        rustix::net::connect_unspec(&c).unwrap();
        assert_eq!(watch.prove(&[was]), [false]);
        let was = of(&b, &a);
        b.connect(("127.0.0.1", 9)).unwrap();
        assert_eq!(watch.prove(&[was]), [false]);
    }

    #[test]
    fn many_sockets_are_asked_about_at_once() {
        let mut watch = FlowWatch::open();
        let from = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let sockets: Vec<_> = (0..100).map(|_| UdpSocket::bind(("127.0.0.1", 0)).unwrap()).collect();
        let mut probes: Vec<_> = sockets.iter().map(|socket| of(socket, &from)).collect();
        probes[70].cookie += 1;
        let proved = watch.prove(&probes);
        let wrong: Vec<_> = proved.iter().enumerate().filter(|(_, proved)| !**proved).map(|(at, _)| at).collect();
        assert_eq!(wrong, [70]);
    }

    /// A socket in the group at this address; port 0 begins one.
    fn member(at: SocketAddr) -> UdpSocket {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None).unwrap();
        sockopt::set_socket_reuseport(&socket, true).unwrap();
        rustix::net::bind(&socket, &at).unwrap();
        UdpSocket::from(socket)
    }

    fn chosen(socket: &UdpSocket, from: &UdpSocket) -> FlowSocket {
        FlowSocket { is_chosen: true, ..of(socket, from) }
    }

    #[test]
    fn lone_group_member_is_proved_while_it_is_published() {
        let mut watch = FlowWatch::open();
        let one = member("127.0.0.1:0".parse().unwrap());
        let from = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let probe = chosen(&one, &from);
        assert_eq!(watch.prove(&[probe]), [false], "not published");
        watch.count_member(probe.cookie, true);
        watch.count_member(probe.cookie, true);
        assert_eq!(watch.prove(&[probe]), [true]);
        watch.count_member(probe.cookie, false);
        assert_eq!(watch.prove(&[probe]), [true], "published once still");
        watch.count_member(probe.cookie, false);
        assert_eq!(watch.prove(&[probe]), [false]);
        assert!(watch.members.is_empty());
    }

    #[test]
    fn group_with_unpublished_member_is_not_proved() {
        let mut watch = FlowWatch::open();
        let one = member("127.0.0.1:0".parse().unwrap());
        let from = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        watch.count_member(of(&one, &from).cookie, true);
        assert_eq!(watch.prove(&[chosen(&one, &from)]), [true]);
        let two = member(one.local_addr().unwrap());
        let both = [chosen(&one, &from), chosen(&two, &from)];
        assert_eq!(watch.prove(&both), [false; 2], "the second could have a program choose");
        watch.count_member(both[1].cookie, true);
        // The kernel chooses one of them, and that one alone.
        let proved = watch.prove(&both);
        assert_ne!(proved[0], proved[1]);
        drop(two);
        assert_eq!(watch.prove(&both[..1]), [true], "alone again");
    }

    #[test]
    fn connected_group_member_needs_no_other_to_be_published() {
        let mut watch = FlowWatch::open();
        let one = member("127.0.0.1:0".parse().unwrap());
        let two = member(one.local_addr().unwrap());
        let from = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        two.connect(from.local_addr().unwrap()).unwrap();
        assert_eq!(watch.prove(&[chosen(&two, &from), chosen(&one, &from)]), [true, false]);
        drop(one);
        rustix::net::connect_unspec(&two).unwrap();
        let probe = chosen(&two, &from);
        assert_eq!(watch.prove(&[probe]), [false], "a member like others from here on, and not published");
        watch.count_member(probe.cookie, true);
        assert_eq!(watch.prove(&[probe]), [true]);
    }

    #[test]
    fn flows_of_too_many_groups_are_not_proved() {
        let mut watch = FlowWatch::open();
        let from = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let members: Vec<_> = (0..GROUPS + 2).map(|_| member("127.0.0.1:0".parse().unwrap())).collect();
        let mut probes: Vec<_> = members.iter().map(|member| chosen(member, &from)).collect();
        probes.iter().for_each(|probe| watch.count_member(probe.cookie, true));
        // Two flows of one group count once.
        probes.insert(1, probes[0]);
        let proved = watch.prove(&probes);
        assert_eq!(proved.iter().filter(|proved| !**proved).count(), 2);
    }

    #[test]
    fn change_of_a_group_hastens_the_next_look() {
        let mut watch = FlowWatch::open();
        let (a, b) = pair("127.0.0.1");
        assert_eq!(watch.add(1, [of(&a, &b), of(&b, &a)]), None);
        watch.next = Some(Instant::now() + Duration::from_secs(1000));
        watch.count_member(7, true);
        assert_eq!(watch.due_in(), Some(Duration::ZERO));
        let later = Instant::now() + Duration::from_secs(500);
        (watch.next, watch.rested) = (Some(later + Duration::from_secs(500)), later);
        watch.count_member(7, false);
        assert_eq!(watch.next, Some(later), "not before the last look is paid for");
    }
}
