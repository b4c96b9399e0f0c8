//! A session opens across calls, with a broker that answers late.

use super::*;
use crate::broker::claim::{ConnClaim, EachClaim};
use crate::broker::opening::{OpeningStep, SILENCE};
use crate::broker::session::LIMIT;
use crate::calls::testing::EpollSet;
use partywall_region::packet;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// A broker whose answers reach the client when the test says so.
pub(super) struct LateBroker {
    /// What the client connects to.
    listener: OwnedFd,
    /// The broker's own path.
    behind: std::path::PathBuf,
    /// The two ends of each session: the client's, and the one with the broker.
    pub(super) sessions: Vec<(OwnedFd, OwnedFd)>,
    _broker: Broker,
}

impl LateBroker {
    pub(super) fn start() -> Self {
        std::fs::create_dir_all(path().parent().unwrap()).unwrap();
        let behind = path().with_file_name("behind.sock");
        let broker = Broker::start(&Config::new(&behind)).unwrap();
        let _ = std::fs::remove_file(path());
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(path()).unwrap()).unwrap();
        rustix::net::listen(&listener, 100).unwrap();
        if let Some(state) = state::peek() {
            state.retry_at.store(0, Ordering::Relaxed);
        }
        Self { listener, behind, sessions: Vec::new(), _broker: broker }
    }

    /// Takes the next session that a client has begun.
    pub(super) fn accept(&mut self) {
        readable(&self.listener);
        let client = rustix::net::accept(&self.listener).unwrap();
        let broker =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&broker, &rustix::net::SocketAddrUnix::new(&self.behind).unwrap()).unwrap();
        self.sessions.push((client, broker));
    }

    /// Passes the next request of a session to the broker, and the answer to the client.
    pub(super) fn answer(&self, session: usize) {
        let (client, broker) = &self.sessions[session];
        pass(client, broker);
        pass(broker, client);
    }

    /// Whether another session was begun.
    fn has_another(&self) -> bool {
        is_readable(&self.listener)
    }

    /// Whether a request of a session waits to be passed on.
    pub(super) fn is_asked(&self, session: usize) -> bool {
        is_readable(&self.sessions[session].0)
    }
}

impl Drop for LateBroker {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(path());
    }
}

pub(super) fn is_readable(fd: &OwnedFd) -> bool {
    let mut ready = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut ready, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

fn readable(fd: &OwnedFd) {
    let limit = rustix::event::Timespec { tv_sec: 100, tv_nsec: 0 };
    let mut ready = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut ready, Some(&limit)), Ok(1), "nothing has come");
}

fn pass(from: &OwnedFd, to: &OwnedFd) {
    readable(from);
    let mut bytes = [0; 4096];
    let got = packet::recv(from.as_fd(), &mut bytes).unwrap();
    let fds: Vec<_> = got.fds.iter().map(AsFd::as_fd).collect();
    packet::send(to.as_fd(), &bytes[..got.len], &fds).unwrap();
}

/// What a data call of a program does while there is no session, as often as it takes to notice something.
pub(super) fn data_calls() {
    for _ in 0..20 {
        Turn::take(Urgency::Brief).unwrap().look(true);
    }
}

fn step() -> OpeningStep {
    Turn::take(Urgency::Brief).unwrap().step()
}

fn session_number() -> u32 {
    state::peek().unwrap().session.load(Ordering::Relaxed)
}

/// A process that has had a session, whose broker has ended, with a listener that was published.
fn left_by_first_broker() -> (TcpListener, TcpStream, TcpStream, u64) {
    let first = broker();
    let (listener, client, server) = connection();
    let key = publish(listener.as_raw_fd()).unwrap();
    drop(first);
    // This has noticed it.
    assert_eq!(offer_of(&client).0.unwrap_err(), Reason::BrokerAbsent);
    (listener, client, server, key)
}

#[test]
fn late_broker_is_joined_across_calls_that_do_not_wait() {
    let Some(_alone) = alone!() else { return };
    let (listener, client, server, _key) = left_by_first_broker();
    let mut late = LateBroker::start();
    data_calls();
    late.accept();
    let session = session_number();
    // A call that waited would give the session up in the end, and begin another.
    for expected in [OpeningStep::Join, OpeningStep::Directory] {
        data_calls();
        assert_eq!(offer_of(&client).0.unwrap_err(), Reason::BrokerAbsent);
        assert!(!knows_listener(client.as_raw_fd(), "192.0.2.1:80".parse().unwrap()), "not the first connect");
        assert_eq!((step(), session_number(), late.has_another()), (expected, session, false));
        assert!(directory().is_none());
        late.answer(0);
        data_calls();
    }
    // It is open, and the broker gets what was published.
    assert!(directory().is_some());
    assert_eq!((step(), opening::is_under_way()), (OpeningStep::Publish, true));
    late.answer(0);
    data_calls();
    Turn::take(Urgency::Brief).unwrap().be_quick();
    data_calls();
    assert_eq!((step(), opening::is_under_way(), session_number()), (OpeningStep::None, false, session));
    assert!(knows_listener_with(&mut late, &client, listener.local_addr().unwrap()));
    let offered = asked(&late, || (offer_with_bell(&client).map(drop), take_of(&server).map(drop)));
    assert_eq!(offered, (Ok(()), Ok(())));
}

/// Runs `calls` while the requests of session 0 are answered at once.
fn asked<T>(late: &LateBroker, calls: impl FnOnce() -> T) -> T {
    let over = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while over.load(Ordering::Relaxed) == 0 {
                if late.is_asked(0) {
                    late.answer(0);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let result = calls();
        over.store(1, Ordering::Relaxed);
        result
    })
}

fn knows_listener_with(late: &mut LateBroker, client: &TcpStream, at: SocketAddr) -> bool {
    asked(late, || knows_listener(client.as_raw_fd(), at))
}

#[test]
fn first_connect_waits_for_late_broker() {
    let Some(_alone) = alone!() else { return };
    let mut late = LateBroker::start();
    let (_listener, client, _server) = connection();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            late.accept();
            // Longer than a data call waits.
            std::thread::sleep(Duration::from_millis(50));
            late.answer(0);
            late.answer(0);
        });
        assert!(!knows_listener(client.as_raw_fd(), "192.0.2.1:80".parse().unwrap()));
        assert!(directory().is_some());
    });
}

#[test]
fn broker_that_dies_between_steps_is_replaced() {
    let Some(_alone) = alone!() else { return };
    let (listener, client, _server, _key) = left_by_first_broker();
    for answers in 0..3 {
        let mut late = LateBroker::start();
        data_calls();
        late.accept();
        for _ in 0..answers {
            late.answer(0);
            data_calls();
        }
        let expected = [OpeningStep::Join, OpeningStep::Directory, OpeningStep::Publish][answers];
        assert_eq!(step(), expected);
        drop(late);
        data_calls();
        assert_eq!((session_number(), step(), directory().is_none()), (0, OpeningStep::None, true));
    }
    let _broker = broker();
    becomes_known(&listener, true);
    offers_soon(&client);
}

#[test]
fn broker_that_never_answers_is_given_up_and_left_alone() {
    let Some(_alone) = alone!() else { return };
    let (listener, _client, _server, _key) = left_by_first_broker();
    let mut late = LateBroker::start();
    for _ in 0..3 {
        data_calls();
        late.accept();
        let session = session_number();
        data_calls();
        assert!(session != 0 && session == session_number());
        let turn = Turn::take(Urgency::Brief).unwrap();
        turn.be_late(SILENCE);
        turn.look(true);
        drop(turn);
        assert_eq!((session_number(), step()), (0, OpeningStep::None));
        data_calls();
        assert!(!late.has_another(), "it is left alone");
        Turn::take(Urgency::Brief).unwrap().retry_now();
    }
    drop(late);
    let _broker = broker();
    becomes_known(&listener, true);
}

#[test]
fn child_forked_between_steps_joins_by_itself() {
    let Some(_alone) = alone!() else { return };
    let (_listener, client, _server, _key) = left_by_first_broker();
    let mut late = LateBroker::start();
    data_calls();
    late.accept();
    let session = session_number();
    let (told, tell) = rustix::pipe::pipe().unwrap();
    let child = fork(|| {
        crate::process::became_child();
        after_fork();
        let begun_empty = !opening::is_under_way();
        hear(&told);
        // The first connect of this process waits.
        let known = knows_listener(client.as_raw_fd(), "192.0.2.1:80".parse().unwrap());
        begun_empty && !known && directory().is_some()
    });
    late.answer(0);
    rustix::io::write(&tell, &[1]).unwrap();
    late.accept();
    late.answer(1);
    late.answer(1);
    // What the child tells the broker after that is not waited for here.
    let (to_child, to_broker) = late.sessions.pop().unwrap();
    let relay = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(got) = packet::recv(to_child.as_fd(), &mut bytes)
            && got.len > 0
        {
            let fds: Vec<_> = got.fds.iter().map(AsFd::as_fd).collect();
            packet::send(to_broker.as_fd(), &bytes[..got.len], &fds).unwrap();
            pass(&to_broker, &to_child);
        }
    });
    assert!(ended_well(child));
    relay.join().unwrap();
    data_calls();
    assert_eq!((step(), session_number()), (OpeningStep::Directory, session), "the parent's session goes on");
    late.answer(0);
    data_calls();
    assert!(directory().is_some());
}

#[test]
fn session_of_parent_that_has_not_taken_an_answer_is_there() {
    let Some(_alone) = alone!() else { return };
    let (_listener, _client, _server, _key) = left_by_first_broker();
    let late = open_with_late_publication();
    late.answer(0);
    let child_finds_session = || {
        ended_well(fork(|| {
            crate::process::became_child();
            after_fork();
            Turn::take(Urgency::Brief).unwrap().has_ancestors()
        }))
    };
    assert!(child_finds_session());
    drop(late);
    assert!(!child_finds_session());
}

#[test]
fn several_threads_open_one_session() {
    let Some(_alone) = alone!() else { return };
    let (_listener, _client, _server, _key) = left_by_first_broker();
    let mut late = LateBroker::start();
    let over = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while over.load(Ordering::Relaxed) == 0 {
                    if let Ok(turn) = Turn::take(Urgency::Brief) {
                        turn.look(true);
                    }
                }
            });
        }
        late.accept();
        for _ in 0..3 {
            late.answer(0);
        }
        let start = Instant::now();
        while opening::is_under_way() && start.elapsed() < Duration::from_secs(100) {
            std::thread::sleep(Duration::from_millis(1));
        }
        over.store(1, Ordering::Relaxed);
    });
    assert!(directory().is_some() && !late.has_another() && !late.is_asked(0));
}

#[test]
fn listener_closed_before_its_late_publication_is_withdrawn() {
    let Some(_alone) = alone!() else { return };
    let (listener, client, _server, key) = left_by_first_broker();
    let at = listener.local_addr().unwrap();
    let mut late = open_with_late_publication();
    asked(&late, || withdraw(key));
    assert!(!knows_listener_with(&mut late, &client, at));
    assert_eq!(step(), OpeningStep::None);
}

#[test]
fn listener_published_twice_has_one_key_at_a_late_broker() {
    let Some(_alone) = alone!() else { return };
    let (listener, client, _server, key) = left_by_first_broker();
    let mut late = open_with_late_publication();
    assert_eq!(asked(&late, || publish(listener.as_raw_fd())), Ok(key));
    asked(&late, || withdraw(key));
    assert!(!knows_listener_with(&mut late, &client, listener.local_addr().unwrap()), "the second is left");
}

/// A turn in which no answer is waited for.
fn hasty(is_patient: bool) -> Turn {
    let mut turn = Turn::take(Urgency::Brief).unwrap();
    (turn.deadline, turn.is_patient) = (turn.begun, is_patient);
    turn
}

#[test]
fn first_listener_whose_publication_is_late_is_published() {
    let Some(_alone) = alone!() else { return };
    let (listener, client, _server, _key) = left_by_first_broker();
    let mut late = LateBroker::start();
    assert_eq!(hasty(true).be_open(), Err(BrokerFailure::Absent), "it has joined");
    late.accept();
    late.answer(0);
    assert_eq!(hasty(true).be_open(), Err(BrokerFailure::Absent), "it has asked for the directory");
    late.answer(0);
    assert_eq!(hasty(true).be_open(), Ok(()));
    let session = session_number();
    assert_eq!((step(), late.has_another()), (OpeningStep::Publish, false));
    late.answer(0);
    assert!(knows_listener_with(&mut late, &client, listener.local_addr().unwrap()));
    assert_eq!(session_number(), session);
}

#[test]
fn further_listeners_whose_publications_are_late_are_published() {
    let Some(_alone) = alone!() else { return };
    let (_listener, client, _server, _key) = left_by_first_broker();
    let mut late = open_with_late_publication();
    late.answer(0);
    data_calls();
    Turn::take(Urgency::Brief).unwrap().be_quick();
    data_calls();
    let session = session_number();
    let further = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let places = further.each_ref().map(|listener| {
        let (fd, turn) = (listener.as_raw_fd(), hasty(false));
        let (at, _) = listeners::add(fd, sockopt::socket_cookie(listener).unwrap()).unwrap();
        (turn.publish(at, fd), at)
    });
    // The second waits for the answer about the first.
    assert_eq!(places.map(|(how, _)| how), [Ok(PublicationStep::Outstanding), Ok(PublicationStep::Deferred)]);
    for _ in &further {
        data_calls();
        assert_eq!((step(), session_number(), late.has_another()), (OpeningStep::Publish, session, false));
        late.answer(0);
    }
    for listener in &further {
        assert!(knows_listener_with(&mut late, &client, listener.local_addr().unwrap()));
    }
}

/// Its listener's publication is outstanding for longer than a call waits for it.
fn behind() -> LateBroker {
    let late = open_with_late_publication();
    Turn::take(Urgency::Brief).unwrap().be_late(LIMIT);
    late
}

#[test]
fn broker_that_is_behind_is_asked_nothing_but_withdrawals() {
    let Some(_alone) = alone!() else { return };
    let (listener, client, _server, _key) = left_by_first_broker();
    let mut late = behind();
    let session = session_number();
    let begun = Instant::now();
    for _ in 0..100 {
        assert_eq!(offer_of(&client).0.unwrap_err(), Reason::BrokerAbsent);
    }
    assert!(begun.elapsed() < 100 * LIMIT, "each of them has waited");
    assert_eq!((step(), session_number(), late.has_another()), (OpeningStep::Publish, session, false));
    late.answer(0);
    assert!(knows_listener_with(&mut late, &client, listener.local_addr().unwrap()));
    assert!(asked(&late, || offer_of(&client).0.is_ok()));
    assert_eq!(session_number(), session);
}

#[test]
fn child_publishes_listener_that_its_parent_had_not_sent() {
    let Some(_alone) = alone!() else { return };
    let (_listener, client, _server, _key) = left_by_first_broker();
    let further = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut late = behind();
    listeners::add(further.as_raw_fd(), sockopt::socket_cookie(&further).unwrap()).unwrap();
    let child = fork(|| {
        crate::process::became_child();
        after_fork();
        // It has its parent's directory, so that no call of it waits: each takes the answers that are there.
        let keys = || {
            let turn = Turn::take(Urgency::Long).unwrap();
            turn.look(true);
            [0, 1].map(|at| turn.key(at).unwrap().load(Ordering::Relaxed) != 0)
        };
        let ends = Instant::now() + Duration::from_secs(100);
        while keys() == [false, false] && Instant::now() < ends {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The parent's session has the request for the first one, and is there.
        let has_ancestors = Turn::take(Urgency::Long).unwrap().has_ancestors();
        let is_known = knows_listener(client.as_raw_fd(), further.local_addr().unwrap());
        is_known && has_ancestors && keys() == [false, true]
    });
    late.accept();
    // It joins, asks for the directory, and publishes one listener.
    for _ in 0..3 {
        late.answer(1);
    }
    assert!(ended_well(child));
}

#[test]
fn session_closed_by_program_between_steps_is_begun_again() {
    let Some(_alone) = alone!() else { return };
    let (_listener, _client, _server, _key) = left_by_first_broker();
    let mut late = LateBroker::start();
    data_calls();
    late.accept();
    let (stranger, other) = packet::pair().unwrap();
    replace((session_number() - 1).cast_signed(), stranger.as_fd());
    data_calls();
    late.accept();
    for _ in 0..2 {
        late.answer(1);
        data_calls();
    }
    assert!(directory().is_some());
    let heard = packet::try_recv(other.as_fd(), &mut [0; 8]);
    assert_eq!(heard.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "the stranger heard nothing");
}

/// The connection whose ring is older than the broker, and how often the broker was told of it.
static OLD: AtomicU32 = AtomicU32::new(0);
static REPORTS: AtomicU32 = AtomicU32::new(0);
static EACH_OLD: EachClaim = |_, tell| {
    for _ in REPORTS.load(Ordering::Relaxed)..2 {
        REPORTS.fetch_add(1, Ordering::Relaxed);
        if !tell(&claim_of(OLD.load(Ordering::Relaxed).cast_signed())) {
            return;
        }
    }
};

/// A ring that is older than the broker, as it is shown.
fn claim_of(fd: c_int) -> ConnClaim {
    let (socket, role) = (sys::borrow(fd), partywall_shm::status::Role::Connecting);
    ConnClaim { channel: 7, role, geometry: Geometry::new(PAGE, 8192).unwrap(), socket, region: socket }
}

/// A session that is open, with the answer about the listener outstanding.
fn open_with_late_publication() -> LateBroker {
    let mut late = LateBroker::start();
    data_calls();
    late.accept();
    for _ in 0..2 {
        late.answer(0);
        data_calls();
    }
    assert_eq!(step(), OpeningStep::Publish);
    late
}

#[test]
fn late_answer_about_listener_is_taken_beside_other_requests() {
    let Some(_alone) = alone!() else { return };
    let (listener, client, _server, _key) = left_by_first_broker();
    let mut late = open_with_late_publication();
    let session = session_number();
    // The answer about the listener comes before that to the offer.
    assert!(asked(&late, || offer_of(&client).0.is_ok()));
    assert_eq!((step(), session_number()), (OpeningStep::None, session));
    assert!(knows_listener_with(&mut late, &client, listener.local_addr().unwrap()));
}

#[test]
fn late_answer_to_any_request_makes_the_broker_slow() {
    let Some(_alone) = alone!() else { return };
    let (_listener, client, _server, _key) = left_by_first_broker();
    let late = open_with_late_publication();
    late.answer(0);
    data_calls();
    Turn::take(Urgency::Brief).unwrap().be_quick();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            readable(&late.sessions[0].0);
            std::thread::sleep(Duration::from_millis(50));
            late.answer(0);
        });
        // It may be refused.
        assert_ne!(offer_of(&client).0.err(), Some(Reason::BrokerAbsent));
    });
    assert!(Turn::take(Urgency::Brief).unwrap().is_slow());
    assert!(!reclaim(|_| panic!("the broker is slow")));
}

#[test]
fn slow_broker_is_shown_older_rings_only_when_it_is_quick_again() {
    let Some(_alone) = alone!() else { return };
    let (_listener, _client, server, _key) = left_by_first_broker();
    OLD.store(server.as_raw_fd().cast_unsigned(), Ordering::Relaxed);
    claim::install(&EACH_OLD);
    let late = open_with_late_publication();
    late.answer(0);
    let deadline = Instant::now() + Duration::from_secs(100);
    while step() != OpeningStep::None && Instant::now() < deadline {
        // In case the thread that runs this was stopped for long.
        state::peek().unwrap().slow_until.store(u64::MAX, Ordering::Relaxed);
        data_calls();
    }
    assert_eq!((REPORTS.load(Ordering::Relaxed), opening::is_under_way(), late.is_asked(0)), (0, true, false));
    assert!(!reclaim(|_| panic!("the broker is slow")));
    Turn::take(Urgency::Brief).unwrap().be_quick();
    asked(&late, || {
        while opening::is_under_way() && Instant::now() < deadline {
            data_calls();
        }
    });
    assert_eq!((REPORTS.load(Ordering::Relaxed), opening::is_under_way()), (2, false));
}

#[test]
fn claim_without_answer_ends_before_its_turn() {
    let Some(_alone) = alone!() else { return };
    let (_listener, _client, server, _key) = left_by_first_broker();
    let late = open_with_late_publication();
    late.answer(0);
    data_calls();
    let mut turn = Turn::take(Urgency::Brief).unwrap();
    // A claim that waited for this would hang.
    turn.deadline += Duration::from_secs(1000);
    assert!(!turn.claim(&claim_of(server.as_raw_fd())));
    assert!(turn.is_slow() && turn.session().is_none());
}

#[test]
fn wait_in_set_without_connections_takes_the_next_steps() {
    let Some(_alone) = alone!() else { return };
    let (_listener, _client, _server, _key) = left_by_first_broker();
    let mut late = LateBroker::start();
    let set = EpollSet::new();
    let (told, tell) = rustix::pipe::pipe().unwrap();
    set.add(told.as_raw_fd(), libc::EPOLLIN as u32, 3);
    data_calls();
    late.accept();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| set.wait());
        // Each of the requests after the first is sent by that thread, which makes no other call.
        for _ in 0..3 {
            late.answer(0);
        }
        rustix::io::write(&tell, &[1]).unwrap();
        assert_eq!(waits.join().unwrap(), [(libc::EPOLLIN as u32, 3)]);
    });
    assert!(directory().is_some());
}
