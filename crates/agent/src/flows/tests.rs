//! Programs, a broker and a kernel that say anything, and what the agent keeps and reports.

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

/// From 127.0.0.1:5000.
fn take() -> Message {
    let (from_low, region) = (0xffff_7f00_0001, RegionReference::with_ring(0));
    Message::TakeDatagrams { from_high: 0, from_low, from_port: 5000, region }
}

/// A flow with this number, whose sender has written up to a tail of these bytes.
/// Returns the descriptor of the receiver's region.
fn begun(all: &mut LocalFlows, flow: u64, byte: u8) -> i32 {
    begun_to(all, flow, byte, "127.0.0.1:53".parse().unwrap())
}

fn begun_to(all: &mut LocalFlows, flow: u64, byte: u8, to: SocketAddr) -> i32 {
    let (ring, taken) = (page_of(byte), region(0));
    let number = taken.as_raw_fd();
    offered_to(all, ring, flow, to);
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
    assert!(all.asked.is_empty() && all.patience() == Some(LOOK));
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
        begun_to(&mut all, flow, flow as u8, to_port(flow));
    }
    assert_eq!(all.closed(OTHER, 7), None);
    assert_eq!(all.open.len(), 3, "another program's");
    assert_eq!(all.closed(SENDER, 7), Some(tail(7)));
    assert_eq!(all.closed(SENDER, 7), None, "closed already");
    assert_eq!(all.closed(RECEIVER, 8), None, "what the receiver has not read is not its sender's");
    assert_eq!(all.session_ended(OTHER), []);
    assert_eq!(all.session_ended(SENDER), [(9, tail(9))]);
    assert!(all.open.is_empty() && all.patience().is_none());
    begun(&mut all, 10, 1);
    assert_eq!(all.session_ended(RECEIVER), []);
    assert!(all.open.is_empty());
}

/// What a page of these bytes has as its tail.
fn tail(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// An address of this machine with another port for each of these numbers.
fn to_port(number: u64) -> SocketAddr {
    SocketAddr::new("127.0.0.1".parse().unwrap(), 1000 + number as u16)
}

fn asked(from: &str, to: &str) -> ReceiverQuestion {
    ReceiverQuestion { from: from.parse().unwrap(), to: to.parse().unwrap(), in_group: false }
}

/// The broker's questions about both ends of a flow from 127.0.0.1:5000.
fn about(to: SocketAddr) -> [ReceiverQuestion; 2] {
    let source = "127.0.0.1:5000".parse().unwrap();
    [(to, source), (source, to)].map(|(from, to)| ReceiverQuestion { from, to, in_group: false })
}

/// The flows that are reported if the kernel answers each of these questions so.
fn reported(all: &mut LocalFlows, questions: &[ReceiverQuestion], found: u64) -> Vec<(u64, u64)> {
    let (answers, lost) = all.answer(questions, |questions| vec![found; questions.len()]);
    assert_eq!(answers, vec![found; questions.len()]);
    lost
}

#[test]
fn tail_is_reported_when_kernel_finds_another_sender() {
    for (from, to, found, expected) in [
        ("127.0.0.1:53", "127.0.0.1:5000", COOKIE, false),
        ("127.0.0.1:53", "127.0.0.1:5000", COOKIE + 1, true),
        ("[::ffff:127.0.0.1]:53", "[::ffff:127.0.0.1]:5000", 0, true),
        // About ends of other flows.
        ("127.0.0.1:54", "127.0.0.1:5000", 0, false),
        ("127.0.0.1:53", "127.0.0.1:5001", 0, false),
        ("127.0.0.1:53", "127.0.0.2:5000", 0, false),
        ("127.0.0.1:5000", "127.0.0.1:53", 0, false),
    ] {
        let mut all = LocalFlows::default();
        begun(&mut all, 7, 1);
        let expected = if expected { vec![(7, tail(1))] } else { vec![] };
        assert_eq!(reported(&mut all, &[asked(from, to)], found), expected, "{from} {to} {found}");
        assert_eq!(all.open.len(), 1, "the broker judges");
    }
    let connected = SenderSocket::new(&socket(Some("[::ffff:127.0.0.9]:53")), "127.0.0.1:53".parse().unwrap());
    let [(from, _), _] = connected.questions("127.0.0.1:5000".parse().unwrap());
    assert_eq!(from, "127.0.0.9:53".parse().unwrap(), "it is reached from its peer");
    let mut all = LocalFlows::default();
    offered(&mut all, page_of(1), 8);
    assert_eq!(reported(&mut all, &[asked("127.0.0.1:53", "127.0.0.1:5000")], 0), [], "an offer has no receiver");
}

#[test]
fn each_lost_flow_is_reported_once() {
    const FLOWS: u64 = 100;
    let mut all = LocalFlows::default();
    let to: SocketAddr = "127.0.0.1:53".parse().unwrap();
    // Of several sockets, one after the other, which had the same address: the broker asks the same about each.
    for flow in 1..=FLOWS {
        let sender = SenderSocket { cookie: 1000 + flow, ..SenderSocket::new(&socket(None), to) };
        all.asked.insert((SENDER, 10), FlowStep::Offer(page_of(1), sender));
        all.offered(SENDER, 10, flow);
        bring(&mut all, (RECEIVER, 20), &take(), region(0));
        all.taken(RECEIVER, 20, flow).unwrap();
    }
    let questions: Vec<_> = (0..FLOWS / 2).flat_map(|_| about(to)).collect();
    let lost: Vec<u64> = reported(&mut all, &questions, COOKIE).into_iter().map(|(flow, _)| flow).collect();
    assert_eq!(lost, (1..=FLOWS).collect::<Vec<_>>());
    assert_eq!(reported(&mut all, &questions, COOKIE), [], "they were reported");
}

#[test]
fn bytes_that_are_written_after_the_loss_do_not_count() {
    let mut all = LocalFlows::default();
    begun(&mut all, 7, 1);
    let ring = all.open[&7].ring.try_clone().unwrap();
    let write = |byte: u8| assert_eq!(rustix::io::pwrite(&ring, &[byte; 4096], 0), Ok(4096));
    let questions = about("127.0.0.1:53".parse().unwrap());
    write(2);
    let lost = all.answer(&questions, |questions| {
        write(3);
        vec![0; questions.len()]
    });
    assert_eq!(lost.1, [(7, tail(2))]);
    write(4);
    assert_eq!(reported(&mut all, &questions, 0), []);
    assert_eq!(all.closed(SENDER, 7), Some(tail(2)));
    // The broker has not used the answer, and the socket is there again.
    begun(&mut all, 8, 1);
    assert_eq!(reported(&mut all, &questions, 0), [(8, tail(1))]);
    assert_eq!(reported(&mut all, &questions, COOKIE), []);
    assert_eq!(reported(&mut all, &questions, 0), [(8, tail(1))]);
    assert_eq!(all.session_ended(SENDER), [(8, tail(1))]);
}

#[test]
fn agent_without_answers_reports_nothing() {
    let mut all = LocalFlows::default();
    begun(&mut all, 7, 1);
    let questions = about("127.0.0.1:53".parse().unwrap());
    assert_eq!(all.answer(&questions, |_| Vec::new()), (vec![], vec![]));
    assert_eq!(reported(&mut all, &questions, 0), [(7, tail(1))]);
}

#[test]
fn flow_is_forgotten_when_broker_no_longer_asks() {
    let mut all = LocalFlows::default();
    for flow in 1..=4 {
        begun_to(&mut all, flow, 1, to_port(flow));
    }
    let age = |all: &mut LocalFlows| {
        for taken in all.open.values_mut().filter_map(|flow| flow.taken.as_mut()) {
            taken.questions.iter_mut().for_each(|(_, asked)| *asked -= UNNAMED);
            taken.lost = taken.lost.map(|(tail, since)| (tail, since - UNNAMED));
        }
    };
    all.forget_old();
    assert_eq!(all.open.len(), 4);
    age(&mut all);
    // About both ends of the first, one end of the second and third, and none of the fourth.
    let [sender, receiver] = [2, 3].map(|flow| about(to_port(flow)));
    let questions = [&about(to_port(1))[..], &sender[..1], &receiver[1..]].concat();
    assert_eq!(reported(&mut all, &questions, COOKIE), []);
    all.forget_old();
    assert_eq!(all.open.keys().copied().collect::<Vec<_>>(), [1]);
    // A lost one has ended, whatever the questions are about.
    assert_eq!(reported(&mut all, &about(to_port(1)), 0).len(), 1);
    all.forget_old();
    assert_eq!(all.open.len(), 1, "it may be asked about until the broker has the answer");
    age(&mut all);
    assert_eq!(reported(&mut all, &about(to_port(1)), 0), []);
    all.forget_old();
    assert!(all.open.is_empty());
}

#[test]
fn next_flow_between_the_same_sockets_replaces_the_last() {
    let mut all = LocalFlows::default();
    begun(&mut all, 7, 1);
    begun_to(&mut all, 8, 1, to_port(8));
    begun(&mut all, 9, 1);
    assert_eq!(all.open.keys().copied().collect::<Vec<_>>(), [8, 9]);
}

#[test]
fn full_table_refuses_offers_and_keeps_flows() {
    let mut all = LocalFlows::default();
    let flows = MOST as u64 - 2;
    for flow in 0..flows {
        begun_to(&mut all, flow, 1, to_port(flow));
    }
    let offer_to = |all: &mut LocalFlows, request, to_port| {
        let Message::OfferDatagrams { to_high, to_low, region: shape, .. } = offer() else { panic!() };
        let message = Message::OfferDatagrams { to_high, to_low, to_port, region: shape };
        bring(all, (SENDER, request), &message, region(RING))
    };
    assert_eq!(offer_to(&mut all, 1, 1), FlowRequest::Fine);
    all.offered(SENDER, 1, flows);
    assert_eq!(offer_to(&mut all, 2, 2), FlowRequest::Fine, "the last one");
    assert_eq!(offer_to(&mut all, 3, 3), FlowRequest::Full, "what is asked counts");
    all.offered(SENDER, 2, flows + 1);
    assert_eq!(offer_to(&mut all, 3, 3), FlowRequest::Full);
    assert_eq!(offer_to(&mut all, 4, 2), FlowRequest::Fine, "in place of the one before");
    all.offered(SENDER, 4, flows + 2);
    assert_eq!(all.open.len(), MOST);
    assert_eq!(bring(&mut all, (RECEIVER, 5), &take(), region(0)), FlowRequest::Fine, "it needs no further room");
    assert!(all.taken(RECEIVER, 5, flows).is_some());
    assert!((0..=flows).all(|flow| all.open[&flow].taken.is_some()), "flows stay");
    assert_eq!(all.closed(SENDER, 3), Some(tail(1)));
    assert_eq!(offer_to(&mut all, 6, 6), FlowRequest::Fine);
}

#[test]
fn requests_that_wait_for_the_broker_are_bounded() {
    let mut all = LocalFlows::default();
    for request in 0..MOST_ASKED as u32 {
        assert_eq!(all.fetch((SENDER, request), 7), FlowRequest::Fine);
    }
    assert_eq!(all.fetch((OTHER, 1), 7), FlowRequest::Full);
    assert_eq!(bring(&mut all, (OTHER, 1), &take(), region(0)), FlowRequest::Full);
    assert_eq!(bring(&mut all, (OTHER, 1), &offer(), region(RING)), FlowRequest::Full);
    all.refused(SENDER, 3);
    assert_eq!(all.fetch((OTHER, 1), 7), FlowRequest::Fine);
}

#[test]
fn fetch_of_a_flow_needs_no_room_beside_other_requests() {
    let mut all = LocalFlows::default();
    for flow in [7, 8] {
        begun_to(&mut all, flow, 1, to_port(flow));
    }
    for request in 0..MOST_ASKED as u32 {
        assert_eq!(all.fetch((OTHER, request), 7), FlowRequest::Fine);
    }
    assert_eq!(all.fetch((SENDER, 11), 7), FlowRequest::Fine);
    assert_eq!(all.fetch((SENDER, 11), 8), FlowRequest::Twice);
    assert_eq!(all.fetch((SENDER, 12), 7), FlowRequest::Full, "one for each flow");
    assert_eq!(all.fetch((SENDER, 13), 8), FlowRequest::Fine);
    assert_eq!(all.fetch((RECEIVER, 14), 8), FlowRequest::Full, "for its sender alone");
    all.refused(OTHER, 3);
    assert_eq!(all.fetch((OTHER, 3), 9), FlowRequest::Fine, "these two took no room");
    assert!(all.fetched(SENDER, 11).is_some());
    assert_eq!(all.fetch((SENDER, 15), 7), FlowRequest::Fine, "the last one is answered");
    // Without its flow, a request takes room as any other.
    assert_eq!(all.closed(SENDER, 8), Some(tail(1)));
    all.refused(OTHER, 3);
    assert_eq!(all.fetch((OTHER, 3), 9), FlowRequest::Full);
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
    begun_to(&mut all, 10, 1, to_port(10));
    all.open.values_mut().for_each(|flow| flow.offered -= PATIENCE);
    all.forget_old();
    assert_eq!(all.open.keys().copied().collect::<Vec<_>>(), [10], "a flow stays");
}

#[test]
fn cancelled_offer_that_is_a_flow_stays() {
    let mut all = LocalFlows::default();
    begun(&mut all, 7, 1);
    all.cancelled(SENDER, 7);
    assert_eq!(all.closed(SENDER, 7), Some(tail(1)), "the broker has it still");
}

#[test]
fn offer_of_one_socket_to_one_address_is_replaced() {
    let mut all = LocalFlows::default();
    begun(&mut all, 1, 1);
    for number in [2, 3] {
        offered(&mut all, page_of(1), number);
    }
    offered_to(&mut all, page_of(1), 4, to_port(4));
    assert_eq!(all.open.keys().copied().collect::<Vec<_>>(), [1, 3, 4]);
}
