//! The client against a real broker, in one process that has both ends of each connection.

pub(crate) mod alone;
mod late;
pub(crate) mod late_steps;

use super::handshake::read_bell;
use super::*;
use alone::alone;
use partywall_daemon::{Broker, Config};
use partywall_protocol::wire::{BellWay, Located};
use partywall_region::bell::{self, Heard};
use partywall_region::{OwnRegion, RegionOptions};
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::net::{TcpListener, TcpStream};

fn region() -> (OwnedFd, Geometry) {
    let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(8192) };
    (OwnRegion::create(&options).unwrap().1, Geometry::new(PAGE, 8192).unwrap())
}

/// The path that tests of this process serve.
pub(super) fn path() -> std::path::PathBuf {
    std::env::temp_dir().join(format!("partywall-preload-{}", std::process::id())).join("broker.sock")
}

/// A broker on that path, and a client that has forgotten the one before.
pub(crate) fn broker() -> Broker {
    let path = path();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let broker = Broker::start(&Config::new(&path)).unwrap();
    if let Some(state) = state::peek() {
        state.retry_at.store(0, Ordering::Relaxed);
    }
    broker
}

/// The turn of another thread of this process: until it is dropped, requests that can be made again later find the session busy.
#[derive(Debug)]
pub(crate) struct BusySession {
    _turn: Turn,
}

/// Makes the session busy.
pub(crate) fn busy_session() -> BusySession {
    BusySession { _turn: Turn::take(Urgency::Long).unwrap() }
}

/// The requests that this process has made so far.
pub(crate) fn requests() -> u32 {
    state::peek().unwrap().request.load(Ordering::Relaxed)
}

/// Puts something else under a number, past everything that keeps account of numbers.
#[expect(unsafe_code, reason = "does to a descriptor what a program might")]
fn replace(number: c_int, with: BorrowedFd<'_>) {
    // SAFETY: two descriptors and a flag; that the owner of the number loses it is the point.
    assert!(unsafe { libc::syscall(libc::SYS_dup3, with.as_raw_fd(), number, libc::O_CLOEXEC) } >= 0);
}

/// Both ends of a connection.
fn connection() -> (TcpListener, TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    (listener, client, server)
}

/// The answer to a step, which has come at once.
fn now<T>(answer: Result<StepAnswer<T>, Reason>) -> Result<T, Reason> {
    match answer? {
        StepAnswer::Now(answer) => Ok(answer),
        StepAnswer::Later => panic!("the broker of the host answers at once"),
    }
}

/// The number of a handshake, and its bell.
fn handshake(
    show: impl FnOnce(HandshakeWords<'_>) -> Result<StepAnswer<BegunHandshake>, Reason>,
) -> Result<(u64, OwnedFd), Reason> {
    let (number, late) = (AtomicU64::new(0), AtomicU64::new(0));
    let begun = now(show(HandshakeWords { number: &number, late: &late }))?;
    assert!(begun.place.is_none(), "both ends are on this host");
    Ok((number.into_inner(), begun.bell))
}

fn offer_with_bell(client: &TcpStream) -> Result<(u64, OwnedFd), Reason> {
    let (region, geometry) = region();
    handshake(|words| offer(client.as_raw_fd(), geometry, region.as_fd(), words))
}

fn offer_of(client: &TcpStream) -> (Result<u64, Reason>, Option<OwnedFd>) {
    match offer_with_bell(client) {
        Ok((offer, bell)) => (Ok(offer), Some(bell)),
        Err(reason) => (Err(reason), None),
    }
}

/// Offers until the session is open, which takes as many calls as the broker is slow.
fn offers_soon(client: &TcpStream) -> (u64, OwnedFd) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(100);
    loop {
        match offer_with_bell(client) {
            Err(Reason::BrokerAbsent) => assert!(std::time::Instant::now() < deadline, "no session opens"),
            result => return result.unwrap(),
        }
    }
}

fn take_of(server: &TcpStream) -> Result<(u64, OwnedFd), Reason> {
    let (region, geometry) = region();
    handshake(|words| take(server.as_raw_fd(), geometry, region.as_fd(), words))
}

fn confirm_of(socket: &TcpStream, offer: u64) -> Result<PeerSide, Reason> {
    now(confirm(socket.as_raw_fd(), offer, &AtomicU64::new(0)))
}

fn finish_of(socket: &TcpStream, offer: u64) -> Result<PeerSide, Reason> {
    now(finish(socket.as_raw_fd(), offer, &AtomicU64::new(0)))
}

fn is_offered(server: &TcpStream) -> bool {
    let found = find_offer(server.as_raw_fd(), server.local_addr().unwrap(), server.peer_addr().unwrap());
    assert_ne!(found, Some(FoundOffer::Translated), "both ends are in one namespace");
    found.is_some()
}

#[test]
fn place_in_window_is_for_ring_as_shown_or_smaller() {
    let shown = Geometry::new(PAGE, 64 << 10).unwrap();
    let read = |ring: u64, fds: usize| {
        let mut found = [const { None }; 4];
        found.iter_mut().take(fds).for_each(|place| *place = Some(region().0));
        let place = (Located::Window { base: PAGE }, Geometry::new(PAGE, ring).unwrap());
        let begun = read_bell(BellWay::Link, place, shown, &mut found)?;
        Ok(begun.place.map(|PlaceOfRegion { base, shape, .. }| (base, shape.ring_size())))
    };
    for ring in [4 << 10, 16 << 10, 64 << 10] {
        assert_eq!(read(ring, 2), Ok(Some((PAGE, ring))));
    }
    assert_eq!(read(0, 2), Err(Reason::Refused));
    assert_eq!(read(128 << 10, 2), Err(Reason::Refused));
    assert_eq!(read(64 << 10, 1), Err(Reason::NoWindow), "the window has gone");
    assert_eq!(read(64 << 10, 0), Err(Reason::Resources), "no descriptor found room");
}

#[test]
fn bell_with_interrupts_needs_both_events() {
    let (memory, shape) = region();
    for fds in 0..=4 {
        let mut found = [const { None }; 4];
        found.iter_mut().take(fds).for_each(|place| *place = Some(memory.try_clone().unwrap()));
        let begun = read_bell(BellWay::Interrupts, (Located::OwnMemory, shape), shape, &mut found);
        assert_eq!(begun.is_ok(), fds >= 3, "{fds}");
    }
}

#[test]
fn listener_is_known_from_publish_to_withdraw() {
    let Some(_alone) = alone!() else { return };
    let _broker = broker();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let probe = TcpStream::connect(at).unwrap();
    assert!(!knows_listener(probe.as_raw_fd(), at));
    let key = publish(listener.as_raw_fd()).unwrap();
    assert_eq!(publish(listener.as_raw_fd()), Ok(key), "once more is nothing new");
    assert!(knows_listener(probe.as_raw_fd(), at));
    assert!(knows_resident(probe.as_raw_fd(), at));
    assert!(!knows_listener(probe.as_raw_fd(), SocketAddr::new(at.ip(), at.port() ^ 1)));
    assert!(!knows_listener(probe.as_raw_fd(), "192.0.2.1:80".parse().unwrap()));
    assert!(!knows_resident(probe.as_raw_fd(), "192.0.2.1:80".parse().unwrap()));
    withdraw(key);
    assert!(!knows_listener(probe.as_raw_fd(), at));
}

#[test]
fn offer_is_found_and_taken_by_other_end_only() {
    let Some(_alone) = alone!() else { return };
    let _broker = broker();
    let (listener, client, server) = connection();
    let (_other_listener, _other_client, other_server) = connection();
    publish(listener.as_raw_fd()).unwrap();
    assert_eq!(take_of(&server).unwrap_err(), Reason::NotTaken, "not offered yet");
    let before = offer_generation();
    let (offer, client_bell) = offer_with_bell(&client).unwrap();
    assert_ne!(offer_generation(), before);
    assert!(is_offered(&server) && !is_offered(&other_server) && !is_offered(&client));
    assert_eq!(offer_of(&client).0.unwrap_err(), Reason::Refused, "twice");
    assert_eq!(take_of(&other_server).unwrap_err(), Reason::NotTaken);
    assert!(take_of(&client).is_err(), "its own");
    assert_eq!(confirm_of(&client, offer).unwrap_err(), Reason::NotTaken, "nobody has taken it");
    assert_eq!(bell::hear(&client_bell), Heard::Nothing);
    let (channel, server_bell) = take_of(&server).unwrap();
    assert_eq!(channel, offer);
    assert_eq!(bell::hear(&client_bell), Heard::Nothing, "the taker rings, once its region is made");
    assert_eq!(finish_of(&server, offer).unwrap_err(), Reason::NotTaken, "not confirmed");
    assert!(confirm_of(&other_server, offer).is_err(), "another socket");
    // That request has ended the handshake.
    assert_eq!(bell::hear(&server_bell), Heard::Nothing, "our end of its bell is open still");
    drop((client_bell, server_bell));
    let (offer, client_bell) = offer_with_bell(&client).unwrap();
    let (_, server_bell) = take_of(&server).unwrap();
    let accepting = confirm_of(&client, offer).unwrap();
    assert_eq!(bell::hear(&server_bell), Heard::Nothing, "the offering side rings, once it has mapped the region");
    let offering = finish_of(&server, offer).unwrap();
    assert_eq!(accepting.program, offering.program, "both ends are of this program");
    assert!(!is_offered(&server));
    for side in [accepting, offering] {
        partywall_region::PeerRegion::attach(side.region.as_fd(), RegionKind::Socket, side.place.1).unwrap();
    }
    // The bells are theirs alone.
    assert!(bell::ring(&server_bell, b'B') && bell::hear(&client_bell) == Heard::Bell);
    drop(server_bell);
    // Before Linux 6.16 another process closes the broker's copy.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(100);
    while bell::hear(&client_bell) != Heard::Gone {
        assert!(std::time::Instant::now() < deadline, "the broker keeps its copy");
    }
    assert!(!cancel(offer), "a channel by now");
    // The broker has no copy of either socket: closing one ends the connection.
    drop(client);
    assert_eq!(std::io::Read::read(&mut &server, &mut [0; 1]).unwrap(), 0);
}

#[test]
fn cancelled_offer_hangs_up_and_can_be_repeated() {
    let Some(_alone) = alone!() else { return };
    let _broker = broker();
    let (_listener, client, server) = connection();
    let (offer, mine) = offers_soon(&client);
    assert!(cancel(offer));
    assert!(!is_offered(&server));
    assert_eq!(take_of(&server).unwrap_err(), Reason::NotTaken);
    assert_eq!(bell::hear(mine), Heard::Gone);
    assert!(offer_of(&client).0.is_ok());
    assert!(take_of(&server).is_ok());
}

#[test]
fn offer_that_could_not_be_taken_back_is_taken_back_later() {
    let Some(_alone) = alone!() else { return };
    let _broker = broker();
    let (_listener, client, server) = connection();
    let (_other_listener, other_client, _other_server) = connection();
    let (offer, bell) = offers_soon(&client);
    // As `closed` does when the session is busy.
    state::owe(offer);
    assert!(is_offered(&server));
    assert_eq!(bell::hear(&bell), Heard::Nothing);
    offer_of(&other_client).0.unwrap();
    assert!(!is_offered(&server));
    assert_eq!(bell::hear(&bell), Heard::Gone);
    assert_eq!(state::take_owed(), None);
}

/// Whether a listener is known, looked at as often as it takes the client to notice something.
fn becomes_known(listener: &TcpListener, expected: bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(100);
    let at = listener.local_addr().unwrap();
    while knows_listener(listener.as_raw_fd(), at) != expected {
        assert!(std::time::Instant::now() < deadline, "it never became {expected}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn requests_without_broker_fail_and_are_made_up_after_start() {
    let Some(_alone) = alone!() else { return };
    drop(broker());
    let (listener, client, server) = connection();
    let at = listener.local_addr().unwrap();
    assert!(publish(listener.as_raw_fd()).is_ok());
    assert!(!knows_listener(client.as_raw_fd(), at));
    assert_eq!(offer_of(&client).0.unwrap_err(), Reason::BrokerAbsent);
    assert_eq!(take_of(&server).unwrap_err(), Reason::BrokerAbsent);
    assert!(!cancel(7) && offer_generation() == 0 && policy_generation() == 0);
    closed(7);
    let _broker = broker();
    becomes_known(&listener, true);
    let _offer = offers_soon(&client);
    assert!(take_of(&server).is_ok());
}

#[test]
fn earlier_listeners_stay_known_while_broker_is_replaced() {
    let Some(_alone) = alone!() else { return };
    let first = broker();
    let (listener, client, server) = connection();
    let at = listener.local_addr().unwrap();
    assert!(publish(listener.as_raw_fd()).is_ok() && knows_listener(client.as_raw_fd(), at));
    let before = policy(80, at.ip()).upgrade;
    drop(first);
    assert_eq!(offer_of(&client).0.unwrap_err(), Reason::BrokerAbsent);
    assert!(directory().is_none() && knows_listener(client.as_raw_fd(), at));
    assert!(knows_resident(server.as_raw_fd(), server.peer_addr().unwrap()));
    assert!(before != Upgrade::Never && policy(80, at.ip()).upgrade == before);
    assert_eq!((offer_generation(), policy_generation()), (0, 0), "it is known that there is no broker");
}

#[test]
fn restarted_broker_gets_listeners_again_and_accepts_offers() {
    let Some(_alone) = alone!() else { return };
    let first = broker();
    let (listener, client, server) = connection();
    let key = publish(listener.as_raw_fd()).unwrap();
    let (old_offer, _link) = offer_of(&client);
    let generation = offer_generation();
    drop(first);
    let second = broker();
    // Noticed by a request as well as by looking.
    let (new_offer, mine) = offers_soon(&client);
    assert_ne!(new_offer, old_offer.unwrap());
    assert_ne!(offer_generation(), generation);
    becomes_known(&listener, true);
    assert!(take_of(&server).is_ok());
    drop((second, mine));
    let _third = broker();
    becomes_known(&listener, true);
    withdraw(key);
    becomes_known(&listener, false);
}

#[test]
fn join_refusal_is_reported_and_ends_with_policy_change() {
    let Some(_alone) = alone!() else { return };
    let broker = broker();
    let user = rustix::process::geteuid().as_raw();
    let policy = |text: &str| broker.set_policy(partywall_daemon::policy::Policy::parse(text).unwrap());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(100);
    // The second lets the user keep a session open, but not under our name.
    let another_name = format!("administrators = []\n[[join]]\ndomain = 'another'\nusers = [{user}]");
    let (listener, client, _server) = connection();
    for text in ["administrators = []", &another_name] {
        policy(text);
        // The broker takes a policy up at its next turn.
        loop {
            let turn = Turn::take(Urgency::Long).unwrap();
            turn.look(false);
            turn.retry_now();
            let opened = turn.be_open();
            // `Absent`: the answer is not there yet.
            if opened.is_err_and(|failure| failure != BrokerFailure::Absent) {
                assert_eq!(opened, Err(BrokerFailure::Refused(Refusal::Denied)), "{text}");
                break;
            }
            assert!(std::time::Instant::now() < deadline);
        }
        // A connection that asks when the next attempt is due may have a ring later all the same.
        Turn::take(Urgency::Long).unwrap().retry_now();
        assert_eq!(offer_of(&client).0.unwrap_err(), Reason::BrokerAbsent);
    }
    publish(listener.as_raw_fd()).unwrap();
    policy("administrators = ['*']");
    becomes_known(&listener, true);
}

#[test]
fn hanging_broker_is_asked_rarely_and_then_avoided() {
    let Some(_alone) = alone!() else { return };
    drop(broker());
    let address = rustix::net::SocketAddrUnix::new(path()).unwrap();
    let silent =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
    rustix::net::bind(&silent, &address).unwrap();
    rustix::net::listen(&silent, 100).unwrap();
    let (listener, client, _server) = connection();
    let at = listener.local_addr().unwrap();
    // Were each of them to wait, this would take a hundred seconds and more.
    let begin = std::time::Instant::now();
    for _ in 0..1000 {
        assert!(!knows_listener(client.as_raw_fd(), at));
        assert!(offer_of(&client).0.is_err());
    }
    assert!(begin.elapsed() < std::time::Duration::from_secs(60));
    let mut calls = 0;
    while rustix::net::accept(&silent).is_ok() {
        calls += 1;
    }
    // A minute has at most this many attempts in them.
    assert!((1..=8).contains(&calls), "{calls}");
    drop(silent);
    std::fs::remove_file(path()).unwrap();
    let _broker = broker();
    becomes_known(&listener, false);
}

#[test]
fn policy_is_read_from_broker_and_follows_changes() {
    let Some(_alone) = alone!() else { return };
    let broker = broker();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    publish(listener.as_raw_fd()).unwrap();
    let ip = "10.0.0.1".parse().unwrap();
    let before = policy_generation();
    assert_eq!(policy(80, ip).upgrade, Terms::DEFAULT.upgrade);
    let text = "administrators = ['*']\n[sockets]\nupgrade='now'\nring_size=4096\nspin_us=3\nrules=['never@port=22']";
    broker.set_policy(partywall_daemon::policy::Policy::parse(text).unwrap());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(100);
    while policy_generation() == before || policy_generation() % 2 != before % 2 {
        assert!(std::time::Instant::now() < deadline);
    }
    let now = policy(80, ip);
    assert_eq!((now.upgrade, now.ring_size, now.spin_us), (Upgrade::Now, 4096, 3));
    assert_eq!(policy(22, ip).upgrade, Upgrade::Never);
}

#[test]
fn closed_session_is_reopened_and_reused_number_untouched() {
    let Some(_alone) = alone!() else { return };
    let broker = broker();
    let (listener, client, server) = connection();
    publish(listener.as_raw_fd()).unwrap();
    let session = state::peek().unwrap().session.load(Ordering::Relaxed) - 1;
    // As by a raw system call, and its number used again at once, for one end of a pair.
    let (stranger, other) = partywall_region::packet::pair().unwrap();
    replace(session.cast_signed(), stranger.as_fd());
    let _offer = offers_soon(&client);
    assert!(take_of(&server).is_ok());
    let mut buf = [0; 8];
    let heard = partywall_region::packet::try_recv(other.as_fd(), &mut buf);
    assert_eq!(heard.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "the stranger heard nothing");
    drop(broker);
}

/// Runs a child, and says how it ended. A child must not unwind into the test runner.
#[expect(unsafe_code, reason = "makes processes")]
pub(crate) fn fork(child: impl FnOnce() -> bool) -> rustix::process::Pid {
    // SAFETY: the child runs `child` and nothing else of the runner's; glibc keeps its allocator usable in it.
    match unsafe { libc::fork() } {
        0 => {
            let well = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: ends the child at once, without the runner's handlers.
            unsafe { libc::_exit(i32::from(!well)) }
        }
        pid => rustix::process::Pid::from_raw(pid).expect("a child"),
    }
}

pub(crate) fn ended_well(child: rustix::process::Pid) -> bool {
    let status = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty()).unwrap().unwrap().1;
    status.exit_status() == Some(0)
}

/// Waits for a byte from another process, with a limit in case that process has failed.
fn hear(pipe: &OwnedFd) {
    let limit = rustix::event::Timespec { tv_sec: 100, tv_nsec: 0 };
    let mut ready = [rustix::event::PollFd::new(pipe, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut ready, Some(&limit)), Ok(1), "no word from the other process");
    assert_eq!(rustix::io::read(pipe, &mut [0]), Ok(1));
}

fn sessions(broker: &Broker, expected: usize) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(100);
    while broker.status().sessions != expected {
        assert!(std::time::Instant::now() < deadline, "{} sessions, not {expected}", broker.status().sessions);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn forked_child_opens_its_own_session() {
    let Some(_alone) = alone!() else { return };
    let broker = broker();
    let (listener, client, server) = connection();
    let handle = publish(listener.as_raw_fd()).unwrap();
    let child = fork(|| {
        crate::process::became_child();
        after_fork();
        // Closes what it does not need of its parent's, without a word to the broker.
        withdraw(handle);
        let known = knows_listener(client.as_raw_fd(), listener.local_addr().unwrap());
        let (offer, _link) = offers_soon(&client);
        known && offer > 0 && broker.status().sessions >= 1
    });
    assert!(ended_well(child));
    sessions(&broker, 1);
    assert!(knows_listener(client.as_raw_fd(), listener.local_addr().unwrap()));
    assert!(offer_of(&client).0.is_ok() && take_of(&server).is_ok());
}

#[test]
fn vfork_child_in_parent_memory_sends_nothing() {
    let Some(_alone) = alone!() else { return };
    let broker = broker();
    let (listener, client, _server) = connection();
    publish(listener.as_raw_fd()).unwrap();
    // Like a child of `vfork`, it does not know that it is a child.
    let child = fork(|| publish(listener.as_raw_fd()).is_err() && offer_of(&client).0.is_err());
    assert!(ended_well(child));
    assert_eq!(broker.status().sessions, 1);
    assert!(offer_of(&client).0.is_ok());
}

#[test]
fn listener_stays_known_while_server_forks_and_exits() {
    let Some(_alone) = alone!() else { return };
    let broker = broker();
    let (listener, client, server) = connection();
    let (told, tell) = rustix::pipe::pipe().unwrap();
    let (heard, say) = rustix::pipe::pipe().unwrap();
    let first = fork(|| {
        crate::process::became_child();
        let published = publish(listener.as_raw_fd()).is_ok();
        fork(|| {
            crate::process::became_child();
            after_fork();
            let peer = client.local_addr().unwrap();
            // It is asked to accept, and then to end.
            hear(&told);
            let end = std::time::Instant::now() + std::time::Duration::from_secs(100);
            let is_open = || {
                state::peek().is_some_and(|state| state.session.load(Ordering::Relaxed) != 0)
                    && !opening::is_under_way()
            };
            while !is_open() && std::time::Instant::now() < end {
                knows_resident(server.as_raw_fd(), peer);
            }
            rustix::io::write(&say, &[1]).unwrap();
            hear(&told);
            true
        });
        published
    });
    assert!(ended_well(first));
    // The broker has handled everything that the first said before this.
    becomes_known(&listener, true);
    std::thread::sleep(std::time::Duration::from_millis(50));
    becomes_known(&listener, true);
    rustix::io::write(&tell, &[1]).unwrap();
    hear(&heard);
    // The second's own, the first's that it has inherited, and this test's.
    assert!(broker.status().sessions >= 2);
    becomes_known(&listener, true);
    rustix::io::write(&tell, &[1]).unwrap();
    becomes_known(&listener, false);
}

#[test]
fn process_is_announced_before_it_connects() {
    let Some(_alone) = alone!() else { return };
    let broker = broker();
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let datagrams = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    for _ in 0..3 {
        before_connect(-1);
        before_connect(datagrams.as_raw_fd());
    }
    assert_eq!(broker.status().sessions, 0, "no reason to speak to anybody");
    before_connect(socket.as_raw_fd());
    sessions(&broker, 1);
    let here = Fingerprint::address("127.0.0.1".parse().unwrap(), netns::cookie(socket.as_raw_fd()));
    assert!(directory().unwrap().has_address(here));
    assert!(session::has_announced());
}

#[test]
fn child_forked_during_broker_request_is_not_blocked() {
    let Some(_alone) = alone!() else { return };
    let _broker = broker();
    let (listener, client, _server) = connection();
    publish(listener.as_raw_fd()).unwrap();
    let turn = Turn::take(Urgency::Long).unwrap();
    let child = fork(|| {
        crate::process::became_child();
        offers_soon(&client).0 > 0
    });
    assert!(ended_well(child));
    drop(turn);
}
