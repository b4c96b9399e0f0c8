//! The ends of flows within a machine, as its agent reports them and as programs of the machine find them in its directory.

use super::*;
use std::sync::Arc;

use crate::control::PortQuestions;
use crate::core::tests::sockets::listening;
use crate::machines::carried;
use partywall_protocol::agent::Say;
use partywall_protocol::directory::{Proof, Transport};
use partywall_protocol::wire::Name;
use partywall_region::pmem::{WindowFile, WindowSpec};
use rustix::event::{EventfdFlags, eventfd};

const MACHINE: MachineId = MachineId::MIN;
/// The namespace of the machine's agent, and of its programs.
const NETNS: u64 = 1;
/// A window with room for a directory.
const WINDOW: u64 = 16 << 20;
const RING: u64 = 8192;
const SENDER: &str = "127.0.0.1:5000";
const RECEIVER: &str = "127.0.0.1:53";

/// A broker with a machine, in which a flow leads from one program to another.
struct Flowing {
    bench: Bench,
    window: OwnedFd,
    questions: PortQuestions,
    flow: u64,
    /// The port's ends of the sessions of the sender and the receiver.
    sender: OwnedFd,
    _receiver: OwnedFd,
}

impl Flowing {
    fn new() -> Self {
        let mut bench = Bench::new();
        let spec = WindowSpec { room: WINDOW, owner: String::new(), peer: "a".to_owned() };
        let window = WindowFile::begin(&spec).unwrap().as_fd().try_clone_to_owned().unwrap();
        let questions = PortQuestions::new(Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
        let [memory, reader] = [(); 2].map(|()| window.try_clone().unwrap());
        let (owner, peer) = (Origin::Host, Origin::Machine(MACHINE));
        let (name, monitor, port) = (Name::new("a").unwrap(), String::new(), String::new());
        let control = bench.server.control();
        for news in [
            MachineNews::Added { machine: MACHINE, name, monitor, port },
            MachineNews::Up { machine: MACHINE, up: true },
            MachineNews::Window { owner, peer, memory, reader, size: WINDOW, allocated: WINDOW },
        ] {
            control.errand(Errand::News(news));
        }
        control.errand(Errand::Port(MACHINE, questions.clone()));
        bench.server.turn(None).unwrap();
        bench.server.namespaces.learn(MACHINE, Some(NETNS));
        bench.server.follow_networks();
        let [sender, receiver] = ["web", "db"].map(|name| {
            let (socket, port) = packet::pair().unwrap();
            bench.server.admit_as(socket, MACHINE, 7).unwrap();
            let join = Message::Join { version: wire::VERSION, name: name.to_owned() };
            let answer = ask(&mut bench, &port, None, &join, &[]);
            assert!(matches!(answer, Message::Joined { .. }), "{answer:?}");
            port
        });
        let nothing = std::fs::File::open("/dev/null").unwrap();
        // 127.0.0.1, as IPv6 has it.
        let low = 0xffff_7f00_0001;
        let region = RegionReference::with_ring(RING);
        let offer = Message::OfferDatagrams { to_high: 0, to_low: low, to_port: 53, region };
        let answer = ask(&mut bench, &sender, Some(SENDER), &offer, &[nothing.as_fd()]);
        assert!(matches!(answer, Message::Offered { .. }), "{answer:?}");
        let region = RegionReference::with_ring(0);
        let take = Message::TakeDatagrams { from_high: 0, from_low: low, from_port: 5000, region };
        let flow = match ask(&mut bench, &receiver, Some(RECEIVER), &take, &[nothing.as_fd()]) {
            Message::DatagramsTaken { flow, .. } => flow,
            other => panic!("{other:?}"),
        };
        Self { bench, window, questions, flow, sender, _receiver: receiver }
    }

    /// The agent reports how far the ring is written.
    fn report(&self, tail: u64) {
        self.bench.server.control.ring_reports().put(MACHINE, self.flow, tail);
    }

    /// The sender's program sends this many packets that the broker has not read.
    fn send_packets(&self, count: u32) {
        let mut packet = Vec::new();
        wire::encode(9, &Message::Ping {}, &mut packet);
        (0..count).for_each(|_| packet::try_send(self.sender.as_fd(), &carried::encode(None, &packet), &[]).unwrap());
    }

    /// The agent answers the broker's questions by these sockets, 0 for none.
    fn answer(&mut self, receivers: &[u64]) {
        let server = &mut self.bench.server;
        server.machine_sockets.ask(&[], coarse_now());
        let [Say::FindReceivers { number, .. }] = self.questions.take()[..] else { panic!("one question") };
        server.hear_of_machine_sockets((MACHINE, NETNS), (number, 1), receivers);
    }

    /// What programs of the machine find in its directory.
    fn proof(&self) -> Proof {
        let base = partywall_shm::layout::HUGE_PAGE;
        let directory = partywall_region::directory::attach_in_window(self.window.as_fd(), base, None).unwrap();
        directory.proof(self.flow, 0, u64::MAX >> 1)
    }
}

/// The agent's description of a UDP socket at this address.
fn socket(local: &str) -> SocketFacts {
    let cookie = if local == SENDER { 5 } else { 6 };
    SocketFacts { transport: Transport::Udp, cookie, netns: NETNS, ..listening(local) }
}

/// A program of the machine sends a packet, with a socket of this address and stand-ins for other descriptors; the answer.
fn ask(bench: &mut Bench, port: &OwnedFd, shown: Option<&str>, message: &Message, with: &[BorrowedFd<'_>]) -> Message {
    let mut bytes = Vec::new();
    wire::encode(1, message, &mut bytes);
    let shown = shown.map(socket);
    packet::try_send(port.as_fd(), &carried::encode(shown.as_ref(), &bytes), with).unwrap();
    let mut answer = vec![0; carried::NUMBER + wire::MAX_PACKET];
    let begin = Instant::now();
    let len = loop {
        // More than one turn if the machine has used up its share of a period.
        bench.server.turn(Some(Duration::from_millis(100))).unwrap();
        if let Ok(received) = packet::try_recv(port.as_fd(), &mut answer) {
            break received.len;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "the broker does not answer");
    };
    wire::decode(&answer[carried::NUMBER..len]).unwrap().1
}

#[test]
fn report_counts_before_answer_however_many_packets_wait() {
    for packets in [0, 50] {
        let mut flowing = Flowing::new();
        assert_eq!(flowing.proof(), Proof::Good);
        let [sender, receiver] = [SENDER, RECEIVER].map(|local| socket(local).cookie);
        flowing.send_packets(packets);
        flowing.answer(&[sender, receiver]);
        assert_eq!(flowing.proof(), Proof::Good);
        flowing.report(640);
        flowing.answer(&[0, receiver]);
        assert_eq!(flowing.proof(), Proof::Ended { limit: 640 }, "{packets}");
    }
}

#[test]
fn report_counts_when_session_or_machine_ends() {
    for is_machine in [false, true] {
        let mut flowing = Flowing::new();
        flowing.report(320);
        flowing.report(640);
        if is_machine {
            // Its agent has gone, so nobody says what else was written.
            flowing.bench.server.control().errand(Errand::News(MachineNews::Up { machine: MACHINE, up: false }));
        } else {
            flowing.send_packets(50);
            flowing.sender = packet::pair().unwrap().0;
        }
        let begin = Instant::now();
        while flowing.proof() == Proof::Good {
            flowing.bench.server.turn(Some(Duration::from_millis(100))).unwrap();
            assert!(begin.elapsed() < Duration::from_secs(60), "the flow goes on");
        }
        // When the namespace of the agent is unknown, the receiver counts as gone.
        let limit = if is_machine { 0 } else { 640 };
        assert_eq!(flowing.proof(), Proof::Ended { limit });
    }
}

#[test]
fn agent_is_asked_again_when_a_question_is_lost() {
    let mut bench = Bench::new();
    let questions = PortQuestions::new(Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
    let (name, monitor, port) = (Name::new("a").unwrap(), String::new(), String::new());
    let control = bench.server.control();
    control.errand(Errand::Port(MACHINE, questions.clone()));
    control.errand(Errand::News(MachineNews::Added { machine: MACHINE, name, monitor, port }));
    control.errand(Errand::News(MachineNews::Up { machine: MACHINE, up: true }));
    bench.server.turn(None).unwrap();
    let [Say::FindReceivers { number: lost, .. }] = questions.take()[..] else { panic!("one question") };
    let begin = Instant::now();
    while !questions.is_any() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it is not asked again");
        bench.server.turn(Some(Duration::from_secs(10))).unwrap();
    }
    let [Say::FindReceivers { number, .. }] = questions.take()[..] else { panic!("one question") };
    assert_ne!(number, lost);
    bench.server.hear_of_machine_sockets((MACHINE, NETNS), (number, 1), &[]);
    bench.server.turn(Some(Duration::ZERO)).unwrap();
    assert_eq!((bench.server.next_question, questions.is_any()), (None, false), "it has answered");
}
