//! A port whose guest is played by the test.

use super::open::{MOST_ASKED, MOST_ERRANDS, MOST_SESSIONS};
use super::*;
use crate::machines::carried;
use partywall_protocol::agent::Say;
use partywall_protocol::port::{Decoder, Frame, Item, greeting};
use partywall_protocol::socket::ReceiverCookies;
use partywall_protocol::wire::{self, Message};
use partywall_region::{Link, LinkEvent, packet};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::time::Instant;

/// Longer is a hang.
pub(super) const HANG: Duration = Duration::from_secs(20);

/// A guest that speaks for itself, in place of a QEMU.
pub(super) struct Guest {
    stream: UnixStream,
    decoder: Decoder,
}

impl Guest {
    fn greet(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        let mut guest = Self { stream, decoder: Decoder::default() };
        guest.stream.write_all(&greeting(7)).unwrap();
        while guest.next() != Some(Item::Greeting(7)) {}
        guest
    }

    /// The same guest, for a thread that only speaks. It waits while the port takes nothing.
    pub(super) fn speaker(&self) -> Self {
        Self { stream: self.stream.try_clone().unwrap(), decoder: Decoder::default() }
    }

    /// As an agent that has started again.
    pub(super) fn greet_again(&mut self) {
        self.stream.write_all(&greeting(8)).unwrap();
    }

    pub(super) fn say(&mut self, bytes: Vec<u8>) {
        let mut out = Vec::new();
        Frame::Control { message: bytes }.encode(&mut out);
        self.stream.write_all(&out).unwrap();
    }

    /// Waits until the relay has taken what was said before. A greeting behind it would have it ignored.
    pub(super) fn ping(&mut self) {
        let mut out = Vec::new();
        Frame::Ping {}.encode(&mut out);
        self.stream.write_all(&out).unwrap();
        while self.next() != Some(Item::Frame(Frame::Pong {})) {}
    }

    /// The next thing said; `None` at the end.
    fn next(&mut self) -> Option<Item> {
        loop {
            if let Some(item) = self.decoder.take().unwrap() {
                return Some(item);
            }
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => return None,
                Ok(n) => self.decoder.push(&piece[..n]),
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return None,
                Err(e) => panic!("{e}"),
            }
        }
    }

    pub(super) fn next_said(&mut self) -> Option<Say> {
        loop {
            match self.next()? {
                Item::Frame(Frame::Control { message: bytes }) => return Some(Say::decode(&bytes).unwrap()),
                _ => continue,
            }
        }
    }
}

/// A port that is served, until this is dropped, for a guest that the test plays.
pub(super) struct Served {
    /// Ends first, with its thread.
    pub(super) port: Port,
    /// Where a QEMU would listen.
    pub(super) listener: UnixListener,
    control: ServerControl,
    pub(super) tasks: AttendantTasks,
    _folder: tempfile::TempDir,
}

impl Served {
    pub(super) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("port");
        let listener = UnixListener::bind(&path).unwrap();
        let tasks = AttendantTasks::default();
        let name = Name::new("a").unwrap();
        let silence = Duration::from_secs(600);
        let control = ServerControl::new().unwrap();
        let path = path.to_str().unwrap();
        let port = Port::start(MachineId::MIN, &name, path, silence, control.clone(), tasks.clone()).unwrap();
        Self { port, listener, control, tasks, _folder: folder }
    }

    /// A guest that has greeted and heard its name.
    pub(super) fn greet(&self) -> Guest {
        let mut guest = Guest::greet(&self.listener);
        assert_eq!(guest.next_said(), Some(Say::Name { name: "a".into() }));
        guest
    }

    /// Takes errands, as the event loop does, and keeps what they bring until this is dropped.
    fn take_errands(&self) -> impl Drop + use<> {
        struct Taking(Arc<AtomicBool>, Option<JoinHandle<Vec<Errand>>>);
        impl Drop for Taking {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
                drop(self.1.take().map(JoinHandle::join));
            }
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (control, stopped) = (self.control.clone(), Arc::clone(&stop));
        let take = move || {
            let mut taken = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                taken.extend(control.take_errands());
                std::thread::sleep(Duration::from_millis(1));
            }
            taken
        };
        Taking(stop, Some(std::thread::spawn(take)))
    }

    /// Opens a session, and returns the broker's end of it.
    pub(super) fn open(&self, guest: &mut Guest, session: u32) -> OwnedFd {
        guest.say(Say::Open { session, pid: 1 }.encode());
        self.admitted()
    }

    /// The broker's end of the first session that was opened.
    pub(super) fn admitted(&self) -> OwnedFd {
        let opened = self.errands_until(|errand| matches!(errand, Errand::Admit(..)));
        let socket = opened.into_iter().find_map(|errand| match errand {
            Errand::Admit(socket, ..) => Some(socket),
            _ => None,
        });
        socket.unwrap()
    }

    /// All errands up to the turn in which there is such a one.
    fn errands_until(&self, wanted: impl Fn(&Errand) -> bool) -> Vec<Errand> {
        let (start, mut errands) = (Instant::now(), Vec::new());
        while !errands.iter().any(&wanted) {
            assert!(start.elapsed() < HANG, "no session was opened");
            std::thread::sleep(Duration::from_millis(1));
            errands.extend(self.control.take_errands());
        }
        errands
    }
}

/// A guest's request to connect to another machine.
fn connect() -> Vec<u8> {
    let mut packet = Vec::new();
    let connect = Message::Connect {
        target: "b".into(),
        service: "s".into(),
        kind: wire::Kind::Stream,
        directions: wire::Directions::BOTH,
        region: wire::RegionReference {
            within: wire::Within::Window,
            base: 3 << 20,
            ..wire::RegionReference::with_ring(4096)
        },
    };
    wire::encode(1, &connect, &mut packet);
    packet
}

/// The event loop's packets, with their numbers.
pub(super) fn broker_says(session: &OwnedFd, number: u64, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut packet = bytes.to_vec();
    carried::number(number, &mut packet);
    packet::try_send(session.as_fd(), &packet, fds).unwrap();
}

#[test]
fn guest_numbers_its_links_and_broker_makes_them() {
    let served = Served::start();
    let mut guest = served.greet();
    guest.say(Say::Open { session: 5, pid: 1 }.encode());
    guest.say(Say::Packet { session: 5, window: None, links: vec![2, 4], socket: None, bytes: connect() }.encode());
    let broker = served.admitted();
    let mut buf = [0; wire::MAX_PACKET];
    assert_eq!(packet::recv(broker.as_fd(), &mut buf).unwrap().fds.len(), 1, "what stands for the memory");
    // A number has one link.
    guest.say(Say::Open { session: 6, pid: 1 }.encode());
    guest.say(Say::Packet { session: 6, window: None, links: vec![4, 6], socket: None, bytes: connect() }.encode());
    assert_eq!(guest.next_said(), Some(Say::Close { session: 6, by_program: false }));

    let (forward, reverse) = (Link::pair().unwrap(), Link::pair().unwrap());
    let mut answer = Vec::new();
    wire::encode(1, &Message::Connected { channel: 9, domain: 1, epoch: 1, links: 2 }, &mut answer);
    broker_says(&broker, 1, &answer, &[forward.0.as_fd(), reverse.0.as_fd()]);
    drop((forward.0, reverse.0));
    let told = Say::Packet { session: 5, window: None, links: vec![], socket: None, bytes: answer };
    assert_eq!(guest.next_said(), Some(told), "the agent has the program's ends");
    for (far, number) in [(&forward.1, 2), (&reverse.1, 4)] {
        packet::try_send(far.as_fd(), &[0x42], &[]).unwrap();
        assert_eq!(guest.next(), Some(Item::Frame(Frame::Bell { link: number })));
    }
    drop(forward.1);
    assert_eq!(guest.next(), Some(Item::Frame(Frame::HungUp { link: 2 })), "nobody else has this end");
    drop(served);
}

#[test]
fn guest_hears_packets_in_the_order_in_which_they_were_sent() {
    let served = Served::start();
    let mut guest = served.greet();
    let sockets = [5, 6].map(|session| served.open(&mut guest, session));
    // Each answer to 5 says that 6 has been sent something.
    for number in (1..2000).step_by(2) {
        broker_says(&sockets[1], number, b"region", &[]);
        broker_says(&sockets[0], number + 1, b"answer", &[]);
        for expected in [6, 5] {
            let said = guest.next_said();
            assert!(matches!(said, Some(Say::Packet { session, .. }) if session == expected), "{number}: {said:?}");
        }
    }
}

#[test]
fn refused_session_delivers_last_packet_while_guest_sends() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let speak = |guest: &mut Guest| {
        guest.say(
            Say::Packet { session: 5, window: None, links: vec![], socket: None, bytes: b"request".into() }.encode(),
        );
    };
    speak(&mut guest);
    // It is refused with a request unread, and has sent more before it hears of that.
    wait(&[PollFd::new(&broker, PollFlags::IN)], Some(HANG)).unwrap();
    broker_says(&broker, 1, b"refused", &[]);
    drop(broker);
    for _ in 0..3 {
        speak(&mut guest);
    }
    assert!(matches!(guest.next_said(), Some(Say::Packet { bytes, .. }) if bytes == b"refused"));
    assert_eq!(guest.next_said(), Some(Say::Close { session: 5, by_program: false }));
}

/// A connection from another machine, whose window the guest has not got.
pub(super) fn incoming(channel: u64) -> Vec<u8> {
    let mut packet = Vec::new();
    let region = wire::RegionReference { within: wire::Within::Window, ..wire::RegionReference::with_ring(4096) };
    let (kind, directions) = (wire::Kind::Stream, wire::Directions::BOTH);
    let (user, name) = (wire::User::Host(0), "b".into());
    let message = Message::Incoming {
        channel,
        domain: 1,
        epoch: 1,
        name,
        user,
        pid: 1,
        at_home: false,
        kind,
        directions,
        region,
    };
    wire::encode(0, &message, &mut packet);
    packet
}

#[test]
fn connection_that_a_guest_cannot_be_given_is_turned_down_alone() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    broker_says(&broker, 1, &incoming(9), &[]);
    let mut buf = [0; wire::MAX_PACKET];
    rustix::net::sockopt::set_socket_timeout(&broker, rustix::net::sockopt::Timeout::Recv, Some(HANG)).unwrap();
    let received = packet::recv(broker.as_fd(), &mut buf).unwrap();
    let (socket, bytes) = carried::decode(&buf[..received.len]).unwrap();
    assert_eq!((socket, wire::decode(bytes).unwrap()), (None, (0, Message::Closed { channel: 9 })));
    broker_says(&broker, 2, b"more", &[]);
    assert!(matches!(guest.next_said(), Some(Say::Packet { session: 5, .. })), "the session lives");
}

#[test]
fn report_about_a_ring_counts_before_later_messages() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let said =
        |bytes: &[u8]| Say::Packet { session: 5, window: None, links: Vec::new(), socket: None, bytes: bytes.to_vec() };
    // The broker does not read the session, which holds these.
    (0..20).for_each(|_| guest.say(said(&[0; 1000]).encode()));
    guest.say(Say::FlowWritten { flow: 9, tail: 640 }.encode());
    // What the agent has said before this is passed on.
    let other = served.open(&mut guest, 6);
    assert_eq!(served.control.ring_reports().take(), [(MachineId::MIN, 9, 640)]);
    drop((broker, other));
}

#[test]
fn links_end_as_moved_once_guest_is_to_release_its_windows() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let mut ends = Vec::new();
    for links in [vec![2, 4], vec![6, 8]] {
        guest.say(Say::Packet { session: 5, window: None, links, socket: None, bytes: connect() }.encode());
        packet::recv(broker.as_fd(), &mut [0; wire::MAX_PACKET]).unwrap();
        let (forward, reverse) = (Link::pair().unwrap(), Link::pair().unwrap());
        let mut answer = Vec::new();
        wire::encode(1, &Message::Connected { channel: 9, domain: 1, epoch: 1, links: 2 }, &mut answer);
        broker_says(&broker, 1, &answer, &[forward.0.as_fd(), reverse.0.as_fd()]);
        assert!(matches!(guest.next_said(), Some(Say::Packet { .. })), "the guest has its links");
        ends.extend([forward.1, reverse.1].map(|end| Link::crossing(end, HANG).unwrap()));
    }
    let hang_up = |guest: &mut Guest, link| {
        let mut out = Vec::new();
        Frame::HungUp { link }.encode(&mut out);
        guest.stream.write_all(&out).unwrap();
    };
    let ended = |link: &Link| matches!(link.wait(Some(Instant::now() + HANG)).unwrap(), LinkEvent::HungUp);
    hang_up(&mut guest, 2);
    assert!(ended(&ends[0]) && !ends[0].has_moved(), "a program has died");
    served.port.release();
    assert_eq!(guest.next_said(), Some(Say::Release {}));
    hang_up(&mut guest, 4);
    assert!(ended(&ends[1]) && ends[1].has_moved());
    // The others end with the port.
    drop(served);
    for end in &ends[2..] {
        assert!(ended(end) && end.has_moved());
    }
}

#[test]
fn request_number_that_is_used_again_frees_its_links() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    for links in [vec![2, 4], vec![6, 8]] {
        guest.say(Say::Packet { session: 5, window: None, links, socket: None, bytes: connect() }.encode());
        packet::recv(broker.as_fd(), &mut [0; wire::MAX_PACKET]).unwrap();
    }
    let other = served.open(&mut guest, 6);
    guest.say(Say::Packet { session: 6, window: None, links: vec![2, 4], socket: None, bytes: connect() }.encode());
    assert_eq!(packet::recv(other.as_fd(), &mut [0; wire::MAX_PACKET]).unwrap().fds.len(), 1);
    // Both links of one connection cannot be the same.
    let _third = served.open(&mut guest, 7);
    guest.say(Say::Packet { session: 7, window: None, links: vec![10, 10], socket: None, bytes: connect() }.encode());
    assert_eq!(guest.next_said(), Some(Say::Close { session: 7, by_program: false }));
    drop(served);
}

#[test]
fn port_input_stops_while_guest_reads_no_answers() {
    let served = Served::start();
    let _taking = served.take_errands();
    let mut guest = served.greet();
    // Each session beyond the limit is answered. The answers are not read, so at some point the port takes no more.
    guest.stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut piece = Vec::new();
    for session in 0..1024 {
        Frame::Control { message: Say::Open { session: 1 << 20 | session, pid: 1 }.encode() }.encode(&mut piece);
    }
    let mut taken = 0;
    let stopped = loop {
        match guest.stream.write(&piece[taken % piece.len()..]) {
            Ok(n) => taken += n,
            Err(e) => break e,
        }
        assert!(taken < 32 << 20, "the broker takes without end what it cannot answer");
    };
    assert_eq!(stopped.kind(), io::ErrorKind::WouldBlock);
    // Once the guest reads, its port goes on.
    let mut reader = Guest { stream: guest.stream.try_clone().unwrap(), decoder: Decoder::default() };
    std::mem::swap(&mut reader.decoder, &mut guest.decoder);
    let reading =
        std::thread::spawn(
            move || while reader.next_said() != Some(Say::Close { session: 7 << 20, by_program: false }) {},
        );
    guest.stream.set_write_timeout(Some(HANG)).unwrap();
    guest.stream.write_all(&piece[taken % piece.len()..]).unwrap();
    // Whichever of the two comes to a full table or to its own number is answered.
    guest.say(Say::Open { session: 7 << 20, pid: 1 }.encode());
    guest.say(Say::Open { session: 7 << 20, pid: 1 }.encode());
    reading.join().unwrap();
    drop(served);
}

#[test]
fn nonsense_closes_the_port_and_storms_are_bounded() {
    let served = Served::start();
    let taking = served.take_errands();
    let mut guest = served.greet();
    assert!(matches!(served.tasks.next_within(HANG), Some(Task::Up { machine: MachineId::MIN })));
    guest.say(vec![99]);
    assert_eq!(guest.next_said(), None, "closed");

    // It may come again, and open `MOST_SESSIONS` sessions.
    let mut guest = served.greet();
    let most = MOST_SESSIONS as u32;
    for session in 0..most + 3 {
        guest.say(Say::Open { session, pid: 1 }.encode());
    }
    let mut closed = Vec::new();
    while closed.len() < 3 {
        if let Some(Say::Close { session, .. }) = guest.next_said() {
            closed.push(session);
        }
    }
    assert_eq!(closed, [most, most + 1, most + 2]);
    // A connection that does not bring the links that it speaks of ends its session, and no other.
    guest.say(Say::Packet { session: 5, window: None, links: vec![2], socket: None, bytes: connect() }.encode());
    loop {
        if let Some(Say::Close { session, .. }) = guest.next_said() {
            assert_eq!(session, 5);
            break;
        }
    }
    let start = Instant::now();
    drop(served);
    drop(taking);
    assert!(start.elapsed() < HANG);
    assert_eq!(guest.next_said().map(drop).or(guest.next_said().map(drop)), None, "closed with the port");
}

/// A guest that reads all that the broker says, on a thread, until it has read this.
fn reads_until(guest: &mut Guest, last: Item) -> std::thread::JoinHandle<()> {
    let mut reader = Guest { stream: guest.stream.try_clone().unwrap(), decoder: Decoder::default() };
    std::mem::swap(&mut reader.decoder, &mut guest.decoder);
    std::thread::spawn(move || while reader.next().unwrap() != last {})
}

#[test]
fn greetings_without_end_leave_a_handful_queued() {
    const GREETINGS: u64 = 100_000;
    let served = Served::start();
    let mut guest = served.greet();
    let reading = reads_until(&mut guest, Item::Greeting(GREETINGS));
    let many: Vec<u8> = (1..=GREETINGS).flat_map(greeting).collect();
    guest.stream.write_all(&many).unwrap();
    reading.join().unwrap();
    // The session is opened when everything before it was heard.
    guest.say(Say::Open { session: 1, pid: 1 }.encode());
    let errands = served.errands_until(|errand| matches!(errand, Errand::Admit(..))).len();
    assert!(errands <= 4, "{errands} errands wait for the event loop");
    assert_eq!(served.tasks.len(), 1, "one greeting waits");
    assert!(matches!(served.tasks.next_within(HANG), Some(Task::Up { .. })));
    // The next greeting is another.
    guest.greet_again();
    assert!(matches!(served.tasks.next_within(HANG), Some(Task::Up { .. })));
    drop(served);
}

#[test]
fn waiting_errands_of_port_are_bounded_and_all_done() {
    const OPENED: u32 = 20_000;
    let served = Served::start();
    let guest = served.greet();
    let mut many = Vec::new();
    for session in 0..OPENED {
        Frame::Control { message: Say::Open { session, pid: 1 }.encode() }.encode(&mut many);
        Frame::Control { message: Say::Close { session, by_program: false }.encode() }.encode(&mut many);
    }
    let mut stream = guest.stream.try_clone().unwrap();
    let writing = std::thread::spawn(move || stream.write_all(&many).unwrap());
    let (start, mut opened, mut most) = (Instant::now(), 0, 0);
    while opened < OPENED {
        assert!(start.elapsed() < 2 * HANG, "{opened} of {OPENED} sessions were opened");
        std::thread::sleep(Duration::from_millis(1));
        let errands = served.control.take_errands();
        most = most.max(errands.len());
        opened += errands.iter().filter(|errand| matches!(errand, Errand::Admit(..))).count() as u32;
    }
    assert!(most <= MOST_ERRANDS + 1, "{most} errands waited at once");
    writing.join().unwrap();
    drop(served);
}

/// The message to a guest without windows.
fn nothing_announced() -> Announced {
    Announced { windows: Vec::new(), doorbell: None }
}

#[test]
fn latest_list_of_windows_replaces_one_that_was_not_said() {
    let shared = PortShared::default();
    let announce = |windows| shared.order(|orders| orders.announce = Some(Announced { windows, doorbell: None }));
    let memory = || std::fs::File::open("/dev/null").unwrap().into();
    let numbered = |number: u8| format!("{number:032x}").parse::<WindowId>().unwrap();
    for id in [numbered(1), numbered(2)] {
        let part = Part::Between(Origin::Host, MachineId::MIN.into());
        announce(vec![Announcement { id, own: false, part, other: "b".into(), memory: memory() }]);
    }
    // A guest that takes nothing gets nothing, except the request to give up its windows.
    let (taken, left) = shared.take(true);
    assert!(taken.announce.is_none() && left);
    let (taken, left) = shared.take(false);
    let ids: Vec<_> = taken.announce.unwrap().windows.iter().map(|window| window.id).collect();
    assert_eq!((ids, left), (vec![numbered(2)], false));
    shared.order(|orders| orders.announce = Some(nothing_announced()));
    shared.order(|orders| orders.release = true);
    let (taken, left) = shared.take(true);
    assert!(taken.announce.is_some() && taken.release && !left);
    assert!(shared.take(false).0.announce.is_none());
}

/// A port whose guest is asked about sockets, as the event loop asks.
struct AskedGuest {
    served: Served,
    guest: Guest,
    questions: PortQuestions,
}

impl AskedGuest {
    fn start() -> Self {
        let served = Served::start();
        let guest = served.greet();
        let errands = served.errands_until(|errand| matches!(errand, Errand::Port(..)));
        let questions = errands.into_iter().find_map(|errand| match errand {
            Errand::Port(MachineId::MIN, questions) => Some(questions),
            _ => None,
        });
        Self { served, guest, questions: questions.unwrap() }
    }

    /// Asks, and has the guest take the questions.
    fn ask(&mut self, numbers: &[u32]) {
        let question = |number: &u32| Say::FindReceivers { number: *number, questions: Vec::new() };
        self.questions.ask(numbers.iter().map(question).collect());
        for number in numbers {
            assert_eq!(self.guest.next_said(), Some(question(number)));
        }
    }

    /// Has the guest answer, and returns the numbers of the answers that are passed on.
    fn passed_on(&mut self, answers: &[u32]) -> Vec<u32> {
        for number in answers {
            let receivers = ReceiverCookies(vec![5]);
            self.guest.say(Say::ReceiversAre { number: *number, netns: 1, at: 2, receivers }.encode());
        }
        // All of them were heard when this is.
        self.guest.say(Say::Open { session: 1, pid: 7 }.encode());
        let errands = self.served.errands_until(|errand| matches!(errand, Errand::Admit(..)));
        let number = |errand| match errand {
            Errand::Receivers { number, receivers, .. } => {
                assert_eq!(receivers, [5]);
                Some(number)
            }
            _ => None,
        };
        errands.into_iter().filter_map(number).collect()
    }
}

#[test]
fn answer_about_sockets_is_passed_on_once_if_it_was_asked_for() {
    let mut asked = AskedGuest::start();
    asked.ask(&[3]);
    assert_eq!(asked.passed_on(&[4, 3, 3]), [3]);
}

#[test]
fn answer_about_groups_after_later_question_is_passed_on() {
    let mut asked = AskedGuest::start();
    asked.ask(&[3, 4]);
    asked.ask(&[5]);
    assert_eq!(asked.passed_on(&[5, 4]), [5, 4]);
}

#[test]
fn unanswered_questions_beyond_limit_are_forgotten_oldest_first() {
    let mut asked = AskedGuest::start();
    let last = MOST_ASKED as u32;
    let numbers: Vec<u32> = (0..=last).collect();
    numbers.chunks(10).for_each(|some| asked.ask(some));
    assert_eq!(asked.passed_on(&[0, 1, last]), [1, last]);
}
