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
//! The flows of a `SO_REUSEPORT` group last only while each member that the looks find is published ([`partywall_region::inspect::groups`]).
//!
//! The kernel answers for the network namespace in which a question's socket was made. The broker has such sockets in its own namespace,
//! and in each other one that has flows ([`super::namespaces`]). The kernel of a virtual machine is asked by its agent
//! ([`super::machine_sockets`]): sockets of machines count as proved here.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use partywall_protocol::socket::ReceiverQuestion;
use partywall_protocol::wire::Side;
use partywall_region::inspect::groups::{GroupLook, GroupMembers, SHARE};
use partywall_region::inspect::receivers::{FoundReceiver, ReceiverFinder, coarse_now, destroy_notices, read_notices};

use super::namespaces::EnteredNamespace;
use crate::core::FlowSocket;

/// How often all flows are looked at, while there are any.
const LOOK: Duration = Duration::from_millis(100);

/// The sockets of flows, and how to ask the kernel about them.
#[derive(Debug)]
pub(super) struct FlowWatch {
    /// Asks about the broker's own network namespace; `None` if this kernel answers no such questions.
    finder: Option<ReceiverFinder>,
    /// The kernel's notices of destroyed sockets, while there are flows.
    notices: Option<DestroyNotices>,
    /// Other namespaces that have flows, by number.
    others: BTreeMap<u64, OtherNamespace>,
    /// How many ends of flows each namespace has.
    namespaces: HashMap<u64, u32>,
    flows: BTreeMap<u64, [FlowSocket; 2]>,
    /// How many ends of flows each socket has.
    cookies: HashMap<u64, u32>,
    /// The published sockets of groups.
    members: GroupMembers,
    next: Option<Instant>,
    /// When the last look has been paid for, so that there may be another.
    rested: Instant,
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
    finder: ReceiverFinder,
    notices: Option<DestroyNotices>,
}

impl FlowWatch {
    pub(super) fn open() -> Self {
        let mut this = Self {
            finder: None,
            notices: None,
            others: BTreeMap::new(),
            namespaces: HashMap::new(),
            flows: BTreeMap::new(),
            cookies: HashMap::new(),
            members: GroupMembers::default(),
            next: None,
            rested: Instant::now(),
        };
        match ReceiverFinder::open() {
            Ok(mut finder) => match finder.works() {
                true => this.finder = Some(finder),
                false => {
                    tracing::info!("datagrams stay on the kernel: it does not find UDP sockets (CONFIG_INET_UDP_DIAG)");
                }
            },
            Err(error) => tracing::info!(%error, "datagrams stay on the kernel: it does not tell of sockets"),
        }
        this
    }

    /// The broker's own namespace; `None` if the kernel does not report sockets.
    pub(super) fn own(&self) -> Option<u64> {
        self.finder.as_ref().map(ReceiverFinder::netns)
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
    pub(super) fn take_in(&mut self, EnteredNamespace { finder, notices }: EnteredNamespace) {
        let netns = finder.netns();
        self.others.insert(netns, OtherNamespace { finder, notices: notices.map(DestroyNotices::new) });
    }

    /// Begins to watch a flow. Returns the side that has no socket any more, if there is one.
    pub(super) fn add(&mut self, flow: u64, sockets: [FlowSocket; 2]) -> Option<Side> {
        if self.notices.is_none() {
            // Without notices the looks do, later.
            self.notices = destroy_notices().ok().map(DestroyNotices::new);
        }
        for (socket, netns) in here(sockets) {
            *self.cookies.entry(socket.cookie).or_default() += 1;
            *self.namespaces.entry(netns).or_default() += 1;
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
        for (socket, netns) in self.flows.remove(&flow).into_iter().flat_map(here) {
            if let Some(ends) = self.cookies.get_mut(&socket.cookie) {
                *ends -= 1;
                if *ends == 0 {
                    self.cookies.remove(&socket.cookie);
                }
            }
            if let Some(ends) = self.namespaces.get_mut(&netns) {
                *ends -= 1;
                if *ends == 0 {
                    self.namespaces.remove(&netns);
                    // The namespace can go away now.
                    self.others.remove(&netns);
                }
            }
        }
        if self.flows.is_empty() {
            (self.notices, self.next) = (None, None);
        }
    }

    /// A socket of a group was published, or is published no more.
    pub(super) fn count_member(&mut self, cookie: u64, is_published: bool) {
        self.members.count(cookie, is_published);
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

    /// Whether each socket is the one that receives what is sent to it. Where the kernel gives no answer, it is not. Sockets of machines count as
    /// proved.
    fn prove(&mut self, sockets: &[FlowSocket]) -> Vec<bool> {
        let receivers = self.receivers_of(sockets);
        let is_found = |(receiver, socket): (&Option<FoundReceiver>, &FlowSocket)| {
            socket.host_netns().is_none() || receiver.is_some_and(|it| it.cookie == socket.cookie)
        };
        let mut proved: Vec<bool> = receivers.iter().zip(sockets).map(is_found).collect();
        let Self { finder, others, members, .. } = self;
        let mut groups = GroupLook::new(members);
        for ((receiver, socket), proved) in
            receivers.iter().zip(sockets).zip(&mut proved).filter(|(_, proved)| **proved)
        {
            if let (Some(found), Some(netns)) = (receiver, socket.host_netns()) {
                let of = ((socket.namespace, socket.to), socket.question());
                *proved = groups.counts(of, *found, |questions| ask(finder.as_mut(), others, netns, questions));
                if !*proved {
                    tracing::debug!(at = %socket.to, "a socket of the group is not published, or too many groups have flows");
                }
            }
        }
        proved
    }

    /// The socket that receives what is sent to each of these, in its namespace.
    fn receivers_of(&mut self, sockets: &[FlowSocket]) -> Vec<Option<FoundReceiver>> {
        let mut receivers = vec![None; sockets.len()];
        let mut by_namespace: BTreeMap<u64, Vec<_>> = BTreeMap::new();
        for (socket, receiver) in sockets.iter().zip(&mut receivers) {
            if let Some(netns) = socket.host_netns() {
                by_namespace.entry(netns).or_default().push((socket, receiver));
            }
        }
        for (netns, asked) in by_namespace {
            let questions: Vec<_> = asked.iter().map(|(socket, _)| socket.question()).collect();
            let found = ask(self.finder.as_mut(), &mut self.others, netns, &questions);
            for ((_, receiver), found) in asked.into_iter().zip(found) {
                *receiver = found;
            }
        }
        receivers
    }
}

/// The socket of a namespace that receives a datagram from one address to another, for each of these; `None` where the kernel gives no answer.
fn ask(
    own: Option<&mut ReceiverFinder>,
    others: &mut BTreeMap<u64, OtherNamespace>,
    netns: u64,
    ends: &[ReceiverQuestion],
) -> Vec<Option<FoundReceiver>> {
    let own = own.filter(|finder| finder.netns() == netns);
    let finder = own.or_else(|| others.get_mut(&netns).map(|other| &mut other.finder));
    finder.map_or_else(|| vec![None; ends.len()], |finder| finder.find(ends))
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

/// The sockets of a flow that this host has, with their namespaces.
fn here(sockets: [FlowSocket; 2]) -> impl Iterator<Item = (FlowSocket, u64)> {
    sockets.into_iter().filter_map(|socket| Some((socket, socket.host_netns()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::socket::NamespaceId;
    use partywall_protocol::wire::Origin;
    use partywall_region::inspect::groups::GROUPS;
    use partywall_region::inspect::option;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
    use std::net::{SocketAddr, UdpSocket};

    fn of(socket: &UdpSocket, from: &UdpSocket) -> FlowSocket {
        let (to, from) = (socket.local_addr().unwrap(), from.local_addr().unwrap());
        let netns = option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE).unwrap();
        let namespace = NamespaceId { origin: Origin::Host, cookie: netns };
        FlowSocket { cookie: sockopt::socket_cookie(socket).unwrap(), namespace, from, to, is_chosen: false }
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
