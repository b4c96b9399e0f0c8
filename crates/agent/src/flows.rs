//! Flows of datagrams between two sockets of this machine (protocol U15): the broker decides, and the regions of both ends stay here.
//!
//! ```text
//!   sender                   agent                              broker of the host      receiver
//!   OfferDatagrams [region]   checks the region, keeps it ------->
//!   Offered <---------------- knows its number <---------------- Offered
//!                             checks the region, keeps it <--------------------- TakeDatagrams [region]
//!                             hands the sender's over <---------- DatagramsTaken ------------> [region]
//!   FetchReceiver ----------> notes of which flow -------------->
//!   Receiver [region] <------ hands the receiver's over <------- Receiver
//!   Closed -----------------> says up to where the ring is written, and passes it on -->
//! ```
//!
//! A region goes to one session only, that of the other end. The broker names the receiver, by the number of the flow. The sender is the session that
//! has brought the offer. So a program that uses the number of a request twice can at most confuse its own flows.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use partywall_protocol::socket::{ReceiverQuestion, SocketFacts};
use partywall_protocol::wire::{Located, Message, RegionReference};
use partywall_region::memfd;

/// Longer than the broker keeps an offer that is not taken (protocol U3.3).
const PATIENCE: Duration = Duration::from_secs(35);
/// Between two looks for old ones.
const LOOK: Duration = Duration::from_secs(5);
/// Offers and flows at a time, as many as the broker lets a machine have (protocol U15.11). Beyond them the oldest offer is void.
const MOST: usize = 512;

/// A request of a program that the broker has not answered.
#[derive(Debug)]
enum FlowStep {
    /// To offer a ring in this region.
    Offer(OwnedFd, SenderSocket),
    /// To take an offer, with this region.
    Take(OwnedFd),
    /// For the receiver's region of this flow.
    Fetch(u64),
}

/// The socket that a flow is sent by, and where to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SenderSocket {
    cookie: u64,
    /// Its own port.
    port: u16,
    /// Where the flow leads.
    to: SocketAddr,
    /// Where a datagram to it is from, for the broker's question who receives that.
    from: SocketAddr,
}

impl SenderSocket {
    /// A socket that sends to `to`.
    fn new(socket: &SocketFacts, to: SocketAddr) -> Self {
        // A socket that is connected is reached from its peer alone.
        let from = canonical(socket.remote.unwrap_or(to));
        Self { cookie: socket.cookie, port: socket.local.port(), to: canonical(to), from }
    }

    /// Whether a question is about its end of the flow, and the kernel has found another socket there.
    fn is_lost(self, question: &ReceiverQuestion, found: u64) -> bool {
        (canonical(question.from), question.to.port()) == (self.from, self.port) && found != self.cookie
    }
}

/// An address of which IPv4 has one spelling.
fn canonical(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

/// What the agent says to a request of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlowRequest {
    /// Noted, or not about a flow within the machine.
    Fine,
    /// The memory is no region of the shape that the program says.
    BadRegion,
    /// The program has another such request with the same number.
    Twice,
}

/// A flow, or an offer of one.
#[derive(Debug)]
struct LocalFlow {
    offered: Instant,
    /// The session of the sender, and its socket.
    sender: u32,
    socket: SenderSocket,
    /// The sender's region. Its tail is read when the sender gives the flow up.
    ring: OwnedFd,
    /// The session of the receiver, once it has taken the offer.
    receiver: Option<u32>,
    /// The receiver's region, until the sender has it.
    taken: Option<OwnedFd>,
}

impl LocalFlow {
    /// Whether a session has an end of it.
    fn is_of(&self, session: u32) -> bool {
        self.sender == session || self.receiver == Some(session)
    }

    /// Up to where the sender has written, if there is a receiver.
    fn written(&self) -> Option<u64> {
        self.receiver?;
        memfd::written(self.ring.as_fd(), 0)
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct LocalFlows {
    /// By session and request, until the broker has answered.
    asked: BTreeMap<(u32, u32), FlowStep>,
    /// By the number of the offer, which becomes that of the flow.
    open: BTreeMap<u64, LocalFlow>,
}

impl LocalFlows {
    /// A program offers a flow, or takes one, with a socket and the memory of its region.
    pub(crate) fn bring(
        &mut self,
        by: (u32, u32),
        message: &Message,
        socket: &SocketFacts,
        memory: Option<OwnedFd>,
    ) -> FlowRequest {
        let (Message::OfferDatagrams { region, .. } | Message::TakeDatagrams { region, .. }, Some(memory)) =
            (message, memory)
        else {
            return FlowRequest::Fine;
        };
        if region.is_in_window() {
            // The other end is elsewhere.
            return FlowRequest::Fine;
        }
        if !is_region(*region, &memory) {
            return FlowRequest::BadRegion;
        }
        let step = match *message {
            Message::OfferDatagrams { to_high, to_low, to_port, .. } => {
                let to = Ipv6Addr::from_bits(u128::from(to_high) << 64 | u128::from(to_low));
                FlowStep::Offer(memory, SenderSocket::new(socket, SocketAddr::new(IpAddr::V6(to), to_port)))
            }
            _ => FlowStep::Take(memory),
        };
        self.ask(by, step)
    }

    /// A program asks for the region of its receiver.
    pub(crate) fn fetch(&mut self, by: (u32, u32), flow: u64) -> FlowRequest {
        self.ask(by, FlowStep::Fetch(flow))
    }

    fn ask(&mut self, by: (u32, u32), step: FlowStep) -> FlowRequest {
        if self.asked.contains_key(&by) {
            return FlowRequest::Twice;
        }
        self.asked.insert(by, step);
        FlowRequest::Fine
    }

    /// The broker has numbered an offer.
    pub(crate) fn offered(&mut self, session: u32, request: u32, offer: u64) {
        let Some(FlowStep::Offer(ring, socket)) = self.asked.remove(&(session, request)) else { return };
        self.forget_old();
        // As for the broker, the new offer replaces one of the same socket to the same address.
        self.open.retain(|_, flow| flow.receiver.is_some() || (flow.sender, flow.socket) != (session, socket));
        if self.open.len() >= MOST {
            self.drop_oldest();
        }
        let offered = Instant::now();
        self.open.insert(offer, LocalFlow { offered, sender: session, socket, ring, receiver: None, taken: None });
    }

    /// Drops the oldest offer, or, where there is none, the oldest flow. Their numbers count up.
    fn drop_oldest(&mut self) {
        let offer = self.open.iter().find(|(_, flow)| flow.receiver.is_none()).map(|(number, _)| *number);
        match offer {
            Some(offer) => drop(self.open.remove(&offer)),
            None => drop(self.open.pop_first()),
        }
    }

    /// The broker has let a program take an offer. Returns the sender's region; `None` if it is not kept here.
    pub(crate) fn taken(&mut self, session: u32, request: u32, flow: u64) -> Option<OwnedFd> {
        let taken = self.asked.remove(&(session, request));
        let flow = self.open.get_mut(&flow)?;
        let Some(FlowStep::Take(region)) = taken else { return None };
        (flow.receiver, flow.taken) = (Some(session), Some(region));
        flow.ring.try_clone().ok()
    }

    /// The broker lets the sender of a flow have the receiver's region. Returns it; `None` if it is not kept here.
    pub(crate) fn fetched(&mut self, session: u32, request: u32) -> Option<OwnedFd> {
        let Some(FlowStep::Fetch(flow)) = self.asked.remove(&(session, request)) else { return None };
        self.open.get_mut(&flow).filter(|flow| flow.sender == session)?.taken.take()
    }

    /// A request was refused, or the other end is on another machine. What the program has brought is of no use.
    pub(crate) fn refused(&mut self, session: u32, request: u32) {
        self.asked.remove(&(session, request));
    }

    /// A program takes its offer back. If that is a flow by now, the program has not used it.
    pub(crate) fn cancelled(&mut self, session: u32, offer: u64) {
        if self.open.get(&offer).is_some_and(|flow| flow.sender == session) {
            self.open.remove(&offer);
        }
    }

    /// A program gives up its end of a flow. Returns up to where it has written, if it is the sender (protocol U15.6).
    pub(crate) fn closed(&mut self, session: u32, flow: u64) -> Option<u64> {
        self.open.get(&flow).filter(|flow| flow.is_of(session))?;
        self.open.remove(&flow).filter(|flow| flow.sender == session)?.written()
    }

    /// A session ends, and its ends of flows with it. Returns the flows of which it was the sender, and up to where it has written each.
    pub(crate) fn session_ended(&mut self, session: u32) -> Vec<(u64, u64)> {
        self.asked.retain(|(of, _), _| *of != session);
        let ends = self.open.iter().filter(|(_, flow)| flow.is_of(session)).map(|(number, _)| *number);
        let ends: Vec<u64> = ends.collect();
        ends.into_iter().filter_map(|flow| Some((flow, self.closed(session, flow)?))).collect()
    }

    /// The kernel has found this socket where the broker has asked for one; 0: none. Returns the flows that were sent by another socket there,
    /// with the sessions of their senders, and up to where these have written (protocol U15.7).
    pub(crate) fn lost(&self, question: &ReceiverQuestion, found: u64) -> Vec<(u32, u64, u64)> {
        let lost = self.open.iter().filter(|(_, flow)| flow.socket.is_lost(question, found));
        lost.filter_map(|(number, flow)| Some((flow.sender, *number, flow.written()?))).collect()
    }

    /// Forgets offers that the broker has forgotten.
    pub(crate) fn forget_old(&mut self) {
        let now = Instant::now();
        self.open.retain(|_, flow| flow.receiver.is_some() || now < flow.offered + PATIENCE);
    }

    /// When there may be something to forget.
    pub(crate) fn patience(&self) -> Option<Duration> {
        self.open.values().any(|flow| flow.receiver.is_none()).then_some(LOOK)
    }
}

/// Whether memory in this machine is a region as its program says. The host's broker cannot check it (protocol U15.2).
fn is_region(reference: RegionReference, memory: &OwnedFd) -> bool {
    match reference.check() {
        Ok((Located::OwnMemory, geometry)) => memfd::verify_blocks(memory.as_fd(), geometry).is_ok(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_region::RegionOptions;
    use partywall_region::berth::Berth;
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;

    const RING: u64 = 8192;
    const COOKIE: u64 = 77;
    /// The sessions of a sender, a receiver, and a program that has nothing to do with them.
    const SENDER: u32 = 1;
    const RECEIVER: u32 = 2;
    const OTHER: u32 = 3;

    /// The region of a side, made as a program makes it.
    fn region(ring: u64) -> OwnedFd {
        // Its place in the address space stays, as in a program.
        Box::leak(Box::new(Berth::new())).create(&RegionOptions::endpoint(ring)).unwrap()
    }

    /// A first page of which each byte is `byte`, the tail included.
    fn page_of(byte: u8) -> OwnedFd {
        let memory = rustix::fs::memfd_create("page", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(memory);
        file.write_all(&[byte; 4096]).unwrap();
        file.into()
    }

    /// To 127.0.0.1:53.
    fn offer() -> Message {
        let (to_low, region) = (0xffff_7f00_0001, RegionReference::with_ring(RING));
        Message::OfferDatagrams { to_high: 0, to_low, to_port: 53, region }
    }

    /// The socket of the sender, with port 5000.
    fn socket(remote: Option<&str>) -> SocketFacts {
        SocketFacts {
            origin: partywall_protocol::wire::Origin::Host,
            transport: partywall_protocol::directory::Transport::Udp,
            local: "[::]:5000".parse().unwrap(),
            remote: remote.map(|at| at.parse().unwrap()),
            state: partywall_protocol::socket::SocketState::Listening,
            only_v6: false,
            cookie: COOKIE,
            netns: 1,
            trusted: false,
            acknowledged: 0,
            received: 0,
            sent: 0,
            identity: partywall_protocol::socket::Identity::default(),
        }
    }

    /// A program brings a region of this size for an offer or a take.
    fn bring(all: &mut LocalFlows, by: (u32, u32), message: &Message, memory: OwnedFd) -> FlowRequest {
        all.bring(by, message, &socket(None), Some(memory))
    }

    /// An offer with this ring, which no program has made so.
    fn offered(all: &mut LocalFlows, ring: OwnedFd, number: u64) {
        offered_to(all, ring, number, "127.0.0.1:53".parse().unwrap());
    }

    fn offered_to(all: &mut LocalFlows, ring: OwnedFd, number: u64, to: SocketAddr) {
        all.asked.insert((SENDER, 10), FlowStep::Offer(ring, SenderSocket::new(&socket(None), to)));
        all.offered(SENDER, 10, number);
    }

    fn take() -> Message {
        Message::TakeDatagrams { from_high: 0, from_low: 0, from_port: 7, region: RegionReference::with_ring(0) }
    }

    /// A flow with this number, whose sender has written up to a tail of these bytes.
    /// Returns the descriptor of the receiver's region.
    fn begun(all: &mut LocalFlows, flow: u64, byte: u8) -> i32 {
        let (ring, taken) = (page_of(byte), region(0));
        let number = taken.as_raw_fd();
        offered(all, ring, flow);
        assert_eq!(bring(all, (RECEIVER, 20), &take(), taken), FlowRequest::Fine);
        assert!(all.taken(RECEIVER, 20, flow).is_some());
        number
    }

    #[test]
    fn regions_go_to_the_other_end_once() {
        let mut all = LocalFlows::default();
        assert_eq!(bring(&mut all, (SENDER, 10), &offer(), region(RING)), FlowRequest::Fine);
        all.offered(SENDER, 10, 7);
        assert!(all.taken(RECEIVER, 20, 7).is_none(), "it has asked for nothing");
        let taken = region(0);
        let number = taken.as_raw_fd();
        assert_eq!(bring(&mut all, (RECEIVER, 20), &take(), taken), FlowRequest::Fine);
        let ring = all.taken(RECEIVER, 20, 7).unwrap();
        assert!(is_region(RegionReference::with_ring(RING), &ring), "the sender's");
        assert!(all.taken(RECEIVER, 20, 7).is_none());
        assert_eq!(all.fetch((SENDER, 11), 7), FlowRequest::Fine);
        assert_eq!(all.fetched(SENDER, 11).unwrap().as_raw_fd(), number);
        assert_eq!(all.fetch((SENDER, 12), 7), FlowRequest::Fine);
        assert!(all.fetched(SENDER, 12).is_none(), "it has it");
        assert!(all.asked.is_empty() && all.patience().is_none());
    }

    #[test]
    fn receivers_region_goes_to_no_session_but_the_senders() {
        let mut all = LocalFlows::default();
        let number = begun(&mut all, 7, 1);
        // The broker has answered a request of the program for another flow, which has had the same number.
        for (session, request) in [(OTHER, 30), (RECEIVER, 31)] {
            all.fetch((session, request), 7);
            assert!(all.fetched(session, request).is_none(), "{session}");
        }
        all.fetch((SENDER, 11), 7);
        assert_eq!(all.fetched(SENDER, 11).unwrap().as_raw_fd(), number);
    }

    #[test]
    fn second_request_with_an_outstanding_number_is_refused() {
        let mut all = LocalFlows::default();
        let request = |all: &mut LocalFlows, by, which| match which {
            0 => bring(all, by, &offer(), region(RING)),
            1 => bring(all, by, &take(), region(0)),
            _ => all.fetch(by, 7),
        };
        for first in 0..3 {
            assert_eq!(request(&mut all, (SENDER, 10), first), FlowRequest::Fine);
            for second in 0..3 {
                assert_eq!(request(&mut all, (SENDER, 10), second), FlowRequest::Twice);
                assert_eq!(request(&mut all, (OTHER, 10), second), FlowRequest::Fine, "another session");
                all.refused(OTHER, 10);
            }
            all.refused(SENDER, 10);
        }
        assert!(all.asked.is_empty());
    }

    #[test]
    fn memory_that_is_no_such_region_is_refused() {
        let mut all = LocalFlows::default();
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        for memory in [null, page_of(0), region(2 * RING), region(0)] {
            assert_eq!(bring(&mut all, (SENDER, 10), &offer(), memory), FlowRequest::BadRegion);
        }
        assert_eq!(bring(&mut all, (SENDER, 10), &take(), region(RING)), FlowRequest::BadRegion);
        assert!(all.asked.is_empty());
    }

    #[test]
    fn region_in_a_window_is_not_kept() {
        let mut all = LocalFlows::default();
        let Message::OfferDatagrams { region, .. } = offer() else { panic!() };
        let far = RegionReference { within: partywall_protocol::wire::Within::Window, base: 4096, ..region };
        let offer = Message::OfferDatagrams { to_high: 0, to_low: 0, to_port: 53, region: far };
        assert_eq!(bring(&mut all, (SENDER, 10), &offer, page_of(0)), FlowRequest::Fine);
        assert!(all.asked.is_empty());
    }

    #[test]
    fn tail_is_reported_for_flows_that_a_session_sends_by() {
        let mut all = LocalFlows::default();
        for flow in [7, 8, 9] {
            begun(&mut all, flow, flow as u8);
        }
        let tail = |byte| u64::from_ne_bytes([byte; 8]);
        assert_eq!(all.closed(OTHER, 7), None);
        assert_eq!(all.open.len(), 3, "another program's");
        assert_eq!(all.closed(SENDER, 7), Some(tail(7)));
        assert_eq!(all.closed(SENDER, 7), None, "closed already");
        assert_eq!(all.closed(RECEIVER, 8), None, "what the receiver has not read is not its sender's");
        assert_eq!(all.session_ended(OTHER), []);
        assert_eq!(all.session_ended(SENDER), [(9, tail(9))]);
        assert!(all.open.is_empty());
        begun(&mut all, 10, 1);
        assert_eq!(all.session_ended(RECEIVER), []);
        assert!(all.open.is_empty());
    }

    #[test]
    fn tail_is_reported_when_kernel_finds_another_sender() {
        let mut all = LocalFlows::default();
        begun(&mut all, 7, 1);
        let tail = u64::from_ne_bytes([1; 8]);
        let question = |from: &str, to: &str| ReceiverQuestion { from: from.parse().unwrap(), to: to.parse().unwrap() };
        for (from, to, found, expected) in [
            ("127.0.0.1:53", "127.0.0.1:5000", COOKIE, vec![]),
            ("127.0.0.1:53", "127.0.0.1:5000", COOKIE + 1, vec![(SENDER, 7, tail)]),
            ("[::ffff:127.0.0.1]:53", "[::ffff:127.0.0.1]:5000", 0, vec![(SENDER, 7, tail)]),
            // About ends of other flows.
            ("127.0.0.1:54", "127.0.0.1:5000", 0, vec![]),
            ("127.0.0.1:53", "127.0.0.1:5001", 0, vec![]),
            ("127.0.0.1:5000", "127.0.0.1:53", 0, vec![]),
        ] {
            assert_eq!(all.lost(&question(from, to), found), expected, "{from} {to} {found}");
        }
        assert_eq!(all.open.len(), 1, "the broker judges");
        let connected = SenderSocket::new(&socket(Some("[::ffff:127.0.0.9]:53")), "127.0.0.1:53".parse().unwrap());
        assert!(connected.is_lost(&question("127.0.0.9:53", "127.0.0.1:5000"), 0), "it is reached from its peer");
        offered(&mut all, page_of(1), 8);
        assert_eq!(all.lost(&question("127.0.0.1:53", "127.0.0.1:5000"), 0).len(), 1, "an offer has no receiver");
    }

    #[test]
    fn offer_that_was_not_taken_has_no_tail_and_is_forgotten() {
        let mut all = LocalFlows::default();
        offered(&mut all, page_of(1), 7);
        assert_eq!((all.patience(), all.closed(SENDER, 7)), (Some(LOOK), None));
        offered(&mut all, page_of(1), 8);
        all.cancelled(OTHER, 8);
        assert_eq!(all.open.len(), 1, "another program's");
        all.cancelled(SENDER, 8);
        offered(&mut all, page_of(1), 9);
        assert_eq!(all.open.keys().copied().collect::<Vec<_>>(), [9]);
        all.open.values_mut().for_each(|flow| flow.offered -= PATIENCE);
        begun(&mut all, 10, 1);
        all.open.values_mut().for_each(|flow| flow.offered -= PATIENCE);
        all.forget_old();
        assert_eq!(all.open.keys().copied().collect::<Vec<_>>(), [10], "a flow stays");
    }

    #[test]
    fn offers_are_replaced_and_bounded_and_flows_stay() {
        let mut all = LocalFlows::default();
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let to = |number: u64| SocketAddr::new("127.0.0.1".parse().unwrap(), 1000 + number as u16);
        begun(&mut all, 1, 1);
        for number in [2, 3] {
            offered(&mut all, null(), number);
        }
        assert_eq!(all.open.keys().copied().collect::<Vec<_>>(), [1, 3], "of one socket to one address");
        for number in 4..MOST as u64 + 6 {
            offered_to(&mut all, null(), number, to(number));
        }
        assert_eq!(all.open.len(), MOST);
        assert_eq!(all.open.keys().take(2).copied().collect::<Vec<_>>(), [1, 7], "the flow, and the later offers");
    }
}
