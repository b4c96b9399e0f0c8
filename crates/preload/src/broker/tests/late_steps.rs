//! Steps of handshakes whose answers come later, as in a virtual machine.

use super::late::{LateBroker, data_calls, is_readable};
use super::*;
use crate::broker::answer_place::STEPS;
use partywall_protocol::wire::{self, Message};
use partywall_region::packet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;

/// An agent: it reads a socket, says so, and passes the host's answers on while the test lets it.
pub(crate) struct TestAgent {
    late: Arc<LateBroker>,
    may_answer: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestAgent {
    /// An agent in which this process has a session, without a listener to be published.
    pub(crate) fn start() -> Self {
        let mut late = LateBroker::start();
        let opening = std::thread::spawn(|| Turn::take(Urgency::Long).unwrap().be_open());
        late.accept();
        for _ in 0..2 {
            late.answer(0);
        }
        assert_eq!(opening.join().unwrap(), Ok(()));
        let late = Arc::new(late);
        let (may_answer, is_over) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (late, may_answer, is_over) = (late.clone(), may_answer.clone(), is_over.clone());
            std::thread::spawn(move || {
                let (mut steps, mut kept) = (Vec::new(), Vec::new());
                while !is_over.load(Ordering::Relaxed) {
                    let (client, broker) = &late.sessions[0];
                    if late.is_asked(0) {
                        steps.extend(pass_request(&late));
                    }
                    if is_readable(broker) {
                        let answer = Packet::receive(broker);
                        // An answer that is late is not in the way of others.
                        if steps.contains(&answer.number) { kept.push(answer) } else { answer.send(client) }
                    }
                    if may_answer.load(Ordering::Relaxed) {
                        kept.drain(..).for_each(|answer| answer.send(client));
                    }
                    std::thread::sleep(Duration::from_micros(100));
                }
            })
        };
        Self { late, may_answer, is_over, thread: Some(thread) }
    }

    /// The host's answers to steps are kept back from here on.
    pub(crate) fn hold(&self) {
        self.may_answer.store(false, Ordering::Relaxed);
    }

    /// The host's answers come from here on, also those that were kept back.
    pub(crate) fn release(&self) {
        self.may_answer.store(true, Ordering::Relaxed);
    }

    /// Answers the latest request by this message.
    fn answer_falsely(&self, message: &Message) {
        let mut bytes = Vec::new();
        wire::encode(requests(), message, &mut bytes);
        packet::send(self.late.sessions[0].0.as_fd(), &bytes, &[]).unwrap();
    }

    /// Both ends of the session are closed.
    fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        let (client, _) = &self.late.sessions[0];
        rustix::net::shutdown(client, rustix::net::Shutdown::Both).unwrap();
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A packet that the agent passes on.
struct Packet {
    number: u32,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Packet {
    fn receive(from: &OwnedFd) -> Self {
        let mut bytes = [0; 4096];
        let got = packet::recv(from.as_fd(), &mut bytes).unwrap();
        let bytes = bytes[..got.len].to_vec();
        let number = wire::decode(&bytes).map_or(0, |(number, _)| number);
        Self { number, bytes, fds: got.fds }
    }

    fn send(&self, to: &OwnedFd) {
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        packet::send(to.as_fd(), &self.bytes, &fds).unwrap();
    }
}

/// Passes a request on, and says that its socket is read, if it is a step. Returns the step's number.
fn pass_request(late: &LateBroker) -> Option<u32> {
    let (client, broker) = &late.sessions[0];
    let request = Packet::receive(client);
    let (number, message) = wire::decode(&request.bytes).ok()?;
    request.send(broker);
    let is_step = message.is_step_of_handshake();
    if is_step {
        let mut bytes = Vec::new();
        wire::encode(number, &Message::SocketRead {}, &mut bytes);
        Packet { number, bytes, fds: Vec::new() }.send(client);
    }
    is_step.then_some(number)
}

/// A step that is left to later calls.
struct Step {
    number: AtomicU64,
    late: AtomicU64,
    shape: Geometry,
}

impl Step {
    fn begin(
        show: impl FnOnce(Geometry, BorrowedFd<'_>, HandshakeWords<'_>) -> Result<StepAnswer<BegunHandshake>, Reason>,
    ) -> Self {
        let (region, shape) = region();
        let (number, late) = (AtomicU64::new(0), AtomicU64::new(0));
        let answer = show(shape, region.as_fd(), HandshakeWords { number: &number, late: &late });
        assert!(matches!(answer, Ok(StepAnswer::Later)), "{answer:?}");
        Self { number, late, shape }
    }

    fn offer(client: &TcpStream) -> Self {
        Self::begin(|shape, memory, words| offer(client.as_raw_fd(), shape, memory, words))
    }

    fn take(server: &TcpStream) -> Self {
        Self::begin(|shape, memory, words| take(server.as_raw_fd(), shape, memory, words))
    }

    fn step(&self) -> LateStep {
        LateStep::of(&self.late).unwrap()
    }

    fn bell(&self) -> Option<Result<BegunHandshake, Reason>> {
        late_bell(self.step(), self.shape, &self.number)
    }

    fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }
}

/// An agent that keeps the answer to an offer back.
fn offer_without_answer() -> (TestAgent, (TcpListener, TcpStream, TcpStream), Step) {
    let agent = TestAgent::start();
    let sockets = connection();
    agent.hold();
    let offered = Step::offer(&sockets.1);
    (agent, sockets, offered)
}

/// Waits for the answer.
fn soon(step: LateStep) {
    let deadline = std::time::Instant::now() + Duration::from_secs(100);
    while !is_answered(step) {
        assert!(std::time::Instant::now() < deadline, "no answer has come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn peer_after(
    agent: &TestAgent,
    show: impl FnOnce(&AtomicU64) -> Result<StepAnswer<PeerSide>, Reason>,
) -> Result<PeerSide, Reason> {
    agent.hold();
    let late = AtomicU64::new(0);
    assert!(matches!(show(&late), Ok(StepAnswer::Later)));
    let step = LateStep::of(&late).unwrap();
    assert!(!is_answered(step) && late_peer(step).is_none());
    agent.release();
    soon(step);
    late_peer(step).unwrap()
}

#[test]
fn steps_with_late_answers_make_a_channel() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    let (listener, client, server) = connection();
    publish(listener.as_raw_fd()).unwrap();
    agent.hold();
    let offered = Step::offer(&client);
    data_calls();
    assert!(!is_answered(offered.step()) && offered.bell().is_none(), "the host is silent");
    agent.release();
    soon(offered.step());
    let client_bell = offered.bell().unwrap().unwrap().bell;
    assert!(is_offered(&server));
    agent.hold();
    let taken = Step::take(&server);
    agent.release();
    soon(taken.step());
    let server_bell = taken.bell().unwrap().unwrap().bell;
    assert_eq!(offered.number(), taken.number());
    let accepting = peer_after(&agent, |late| confirm(client.as_raw_fd(), offered.number(), late)).unwrap();
    let offering = peer_after(&agent, |late| finish(server.as_raw_fd(), taken.number(), late)).unwrap();
    for side in [accepting, offering] {
        partywall_region::PeerRegion::attach(side.region.as_fd(), RegionKind::Socket, side.place.1).unwrap();
    }
    assert!(bell::ring(&server_bell, b'B') && bell::hear(&client_bell) == Heard::Bell);
}

#[test]
fn refusal_that_comes_late_is_the_refusal_of_its_step() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    let (_listener, _client, server) = connection();
    agent.hold();
    let taken = Step::take(&server);
    agent.release();
    soon(taken.step());
    assert_eq!(taken.bell().unwrap().unwrap_err(), Reason::NotTaken, "nothing is offered");
    // It was taken out.
    assert_eq!(taken.bell().unwrap().unwrap_err(), Reason::NotTaken);
}

#[test]
fn offer_given_up_before_its_answer_is_taken_back() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    let (listener, client, server) = connection();
    publish(listener.as_raw_fd()).unwrap();
    for is_here in [false, true] {
        agent.hold();
        let offered = Step::offer(&client);
        if is_here {
            agent.release();
            soon(offered.step());
            assert!(is_offered(&server));
            give_up(offered.step());
        } else {
            give_up(offered.step());
            agent.release();
        }
        // The answer comes before that to a later request, and so does what it leads to. Less than the life of an offer, which is 30 s.
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        loop {
            data_calls();
            cancel_untaken(u64::MAX);
            if !is_offered(&server) {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "it is still offered");
        }
        assert!(offered.bell().unwrap().is_err());
    }
    assert!(state::peek().unwrap().session.load(Ordering::Relaxed) != 0, "the session goes on");
}

#[test]
fn session_that_ends_before_an_answer_ends_its_step() {
    let Some(_alone) = alone!() else { return };
    let (agent, _sockets, offered) = offer_without_answer();
    agent.end();
    soon(offered.step());
    assert_eq!(offered.bell().unwrap().unwrap_err(), Reason::NotTaken);
}

#[test]
fn answer_that_is_owed_too_long_ends_the_session() {
    let Some(_alone) = alone!() else { return };
    let (_agent, _sockets, offered) = offer_without_answer();
    data_calls();
    assert!(!is_answered(offered.step()));
    Turn::take(Urgency::Long).unwrap().age_late(Duration::from_secs(11));
    assert!(is_answered(offered.step()));
    assert_eq!(offered.bell().unwrap().unwrap_err(), Reason::NotTaken);
}

#[test]
fn answer_that_is_not_taken_is_taken_back() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    let (listener, client, server) = connection();
    publish(listener.as_raw_fd()).unwrap();
    agent.hold();
    let offered = Step::offer(&client);
    agent.release();
    soon(offered.step());
    assert!(is_offered(&server));
    Turn::take(Urgency::Long).unwrap().age_late(Duration::from_secs(61));
    Turn::take(Urgency::Long).unwrap().take_late_answers();
    cancel_untaken(u64::MAX);
    assert!(!is_offered(&server));
}

#[test]
fn further_step_is_put_off_while_all_places_are_in_use() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    agent.hold();
    let (listener, ..) = connection();
    let clients: Vec<_> = (0..=STEPS).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
    let steps: Vec<_> = clients[..STEPS].iter().map(Step::offer).collect();
    let (last, late) = (&clients[STEPS], AtomicU64::new(0));
    let requests = requests();
    let put_off = confirm(last.as_raw_fd(), 7, &late);
    assert_eq!(put_off.unwrap_err(), Reason::BrokerAbsent);
    assert_eq!(super::requests(), requests, "the broker was not asked");
    give_up(steps[0].step());
    assert_eq!(confirm(last.as_raw_fd(), 7, &late).unwrap_err(), Reason::BrokerAbsent, "its answer is still to come");
    agent.release();
    steps[1..].iter().for_each(|step| soon(step.step()));
    assert!(matches!(confirm(last.as_raw_fd(), 7, &late), Ok(StepAnswer::Later) | Err(Reason::NotTaken)));
}

#[test]
fn oldest_untaken_answer_gives_its_place_to_another_step() {
    let Some(_alone) = alone!() else { return };
    let agent = TestAgent::start();
    agent.hold();
    let (listener, ..) = connection();
    publish(listener.as_raw_fd()).unwrap();
    let clients: Vec<_> = (0..=STEPS).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
    let steps: Vec<_> = clients[..STEPS].iter().map(Step::offer).collect();
    agent.release();
    steps.iter().for_each(|step| soon(step.step()));
    agent.hold();
    let put_off = confirm(clients[STEPS].as_raw_fd(), 7, &AtomicU64::new(0));
    assert_eq!(put_off.unwrap_err(), Reason::BrokerAbsent, "their connections may take them soon");
    Turn::take(Urgency::Long).unwrap().age_late(Duration::from_secs(6));
    let further = Step::offer(&clients[STEPS]);
    let voided = steps.iter().filter(|step| step.bell().unwrap().is_err()).count();
    assert_eq!(voided, 1);
    agent.release();
    soon(further.step());
    further.bell().unwrap().unwrap();
}

#[test]
fn answer_that_came_while_no_call_looked_is_not_late() {
    let Some(_alone) = alone!() else { return };
    let (agent, (listener, _client, _server), offered) = offer_without_answer();
    agent.release();
    let session = state::peek().unwrap().session.load(Ordering::Relaxed);
    let deadline = std::time::Instant::now() + Duration::from_secs(100);
    while session::is_quiet(crate::sys::borrow(session.cast_signed() - 1)) {
        assert!(std::time::Instant::now() < deadline, "no answer has come");
        std::thread::sleep(Duration::from_millis(1));
    }
    Turn::take(Urgency::Long).unwrap().age_late(Duration::from_secs(11));
    let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    agent.hold();
    let _further = Step::offer(&other);
    assert_eq!(state::peek().unwrap().session.load(Ordering::Relaxed), session, "the session goes on");
    offered.bell().unwrap().unwrap();
}

#[test]
fn late_answer_to_another_request_ends_the_session() {
    let Some(_alone) = alone!() else { return };
    let (agent, _sockets, offered) = offer_without_answer();
    agent.answer_falsely(&Message::Done {});
    soon(offered.step());
    assert_eq!(offered.bell().unwrap().unwrap_err(), Reason::NotTaken);
    assert_eq!(state::peek().unwrap().session.load(Ordering::Relaxed), 0);
}

#[test]
fn forked_child_does_not_take_its_parents_answer() {
    let Some(_alone) = alone!() else { return };
    let (agent, _sockets, offered) = offer_without_answer();
    let child = fork(|| {
        crate::process::became_child();
        after_fork();
        is_answered(offered.step()) && offered.bell().is_some_and(|bell| bell.is_err())
    });
    assert!(ended_well(child));
    // Like a child of `vfork`, it does not know that it is a child.
    let visitor = fork(|| !is_answered(offered.step()));
    assert!(ended_well(visitor));
    assert!(!is_answered(offered.step()), "the parent waits on");
    agent.release();
    soon(offered.step());
    offered.bell().unwrap().unwrap();
}
