//! The event loop turned by hand, against sockets that say anything at all.

mod machines;
mod readers;
mod rings;

use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use partywall_protocol::wire::{self, Directions, Kind, Message, Refusal, RegionReference, Side, User, What};
use partywall_region::{OwnRegion, RegionOptions, packet};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::*;
use crate::credentials::Home;

/// A server in its own directory, turned by the test.
struct Bench {
    server: Server,
    _dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// One server at a time: each forks, and until a new process has closed its copies, the kernel reports no hang-up of another test's
/// sockets.
static ALONE: Mutex<()> = Mutex::new(());

/// Held by a test of this crate while it starts another program: until that program is executed, its process has copies of all descriptors.
pub(super) fn forks_alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bench {
    fn new() -> Self {
        let alone = forks_alone();
        let dir = tempfile::tempdir().unwrap();
        let server = Server::open(&Config::new(dir.path().join("b.sock"))).unwrap();
        Self { server, _dir: dir, _alone: alone }
    }

    fn connect(&self) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(self.server.path()).unwrap()).unwrap();
        socket
    }

    /// Turns until nothing is left to do, and checks the core.
    fn settle(&mut self) {
        // The first round has new sessions accepted, the second what they said read, the third what followed from that.
        for _ in 0..3 {
            for _ in 0..5 {
                self.server.turn(Some(Duration::ZERO)).unwrap();
            }
            let wanted = self.server.synced + self.server.readers.sync(0);
            let begin = Instant::now();
            while self.server.synced < wanted {
                self.server.turn(Some(Duration::from_millis(100))).unwrap();
                assert!(begin.elapsed() < Duration::from_secs(60), "a reading process does not answer");
            }
        }
        self.server.core.check_invariants();
        assert_eq!(self.server.sessions.len(), self.server.core.status().sessions);
    }

    /// Puts a session in the queue.
    fn push(&mut self, arrival: accept::Arrival) -> Option<accept::Arrival> {
        self.server.arrivals.push(arrival.account(), arrival)
    }
}

fn arrival(socket: OwnedFd, peer: libc::ucred) -> accept::Arrival {
    accept::Arrival { socket, peer: peer.into(), home: Home::Broker, program: None }
}

/// A request to connect to the service `s` of `a`, with a ring in memory.
fn connect() -> Message {
    Message::Connect {
        target: "a".to_owned(),
        service: "s".to_owned(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region: RegionReference::with_ring(4096),
    }
}

/// An action of a random client with one packet in transit.
#[derive(Debug, Clone)]
struct Packet {
    client: usize,
    bytes: Vec<u8>,
    /// The descriptors that go with it, as indices.
    with: Vec<usize>,
}

fn valid() -> impl Strategy<Value = Message> {
    let name = || proptest::sample::select(vec!["a", "b", "x y"]).prop_map(str::to_owned);
    let kind = Kind::Stream;
    // The server's own numbers are not known here; small ones are not in use, and can be reclaimed.
    prop_oneof![
        4 => name().prop_map(|name| Message::Join { version: wire::VERSION, name }),
        2 => (name(), 0u16..9).prop_map(move |(service, backlog)| Message::Bind { service, kind, backlog }),
        6 => (name(), name()).prop_map(move |(target, service)| Message::Connect {
            target, service, kind, directions: Directions::BOTH, region: RegionReference::with_ring(4096),
        }),
        1 => (0u64..3).prop_map(|channel| Message::Accepted { channel, start: 0, region: RegionReference::with_ring(4096) }),
        1 => (0u64..3).prop_map(|channel| Message::Closed { channel }),
        1 => (0u64..3).prop_map(|channel| Message::Grow {
            channel, side: Side::Connecting, generation: 1, region: RegionReference::with_ring(4096),
        }),
        1 => (0u64..3, 0u32..2).prop_map(|(channel, kind)| Message::TakeRegions {
            channel, side: Side::Accepting, kind, count: 2, bytes: 1 << 20,
        }),
        1 => (0u64..3, 0u32..3, 0u32..2).prop_map(|(channel, number, kind)| Message::AddRegion {
            channel, side: Side::Connecting, number, kind, region: RegionReference::with_ring(4096),
        }),
        1 => (0u64..3, any::<bool>(), 0u32..3).prop_map(|(channel, own, number)| Message::DropRegion {
            channel, side: Side::Accepting, own, number,
        }),
        1 => (0u64..3, any::<bool>(), 0u32..3).prop_map(|(channel, own, number)| Message::ReclaimRegion {
            channel, side: Side::Connecting, own, number, kind: 0, bytes: 4096,
        }),
        2 => (0u64..3, name()).prop_map(move |(channel, peer)| Message::Reclaim {
            channel, side: Side::Connecting, peer, service: "a".to_owned(), kind,
            directions: Directions::BOTH, region: RegionReference::with_ring(4096),
        }),
        1 => proptest::sample::select(What::ALL).prop_map(|what| Message::List { what, after: 0 }),
        1 => (0u64..3).prop_map(|channel| Message::Inspect { channel }),
        1 => Just(Message::Directory {}),
        2 => Just(Message::Publish { addresses: partywall_protocol::wire::AddressList::default() }),
        2 => Just(Message::Offer { region: RegionReference::with_ring(4096) }),
        2 => Just(Message::Take { region: RegionReference::with_ring(4096) }),
        1 => (0u64..3).prop_map(|offer| Message::Confirm { offer }),
        1 => (0u64..3).prop_map(|offer| Message::Finish { offer }),
    ]
}

fn packet() -> impl Strategy<Value = Packet> {
    let encoded = || {
        (any::<u32>(), valid()).prop_map(|(request, message)| {
            let mut bytes = Vec::new();
            wire::encode(request, &message, &mut bytes);
            let with = match message {
                // The client's end or the server's, and a region.
                Message::Offer { .. } => vec![5, 0],
                Message::Take { .. } => vec![6, 0],
                Message::Publish { .. } | Message::Finish { .. } => vec![6],
                Message::Confirm { .. } => vec![5],
                _ => (0..message.fd_count()).collect::<Vec<_>>(),
            };
            (bytes, with)
        })
    };
    let mutated = (encoded(), any::<proptest::sample::Index>(), any::<u8>()).prop_map(|((mut bytes, with), at, to)| {
        let at = at.index(bytes.len());
        bytes[at] = to;
        (bytes, with)
    });
    let cut = (encoded(), any::<proptest::sample::Index>()).prop_map(|((mut bytes, with), at)| {
        bytes.truncate(at.index(bytes.len()));
        (bytes, with)
    });
    let strange = (encoded(), proptest::collection::vec(0usize..8, 0..5)).prop_map(|((bytes, _), with)| (bytes, with));
    let noise = (proptest::collection::vec(any::<u8>(), 0..64), proptest::collection::vec(0usize..5, 0..5));
    let huge = (4000usize..6000).prop_map(|n| (vec![0x57; n], vec![0, 1]));
    let bytes = prop_oneof![10 => encoded(), 3 => mutated, 1 => cut, 2 => strange, 1 => noise, 1 => huge];
    (0usize..4, bytes).prop_map(|(client, (bytes, with))| Packet { client, bytes, with })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_packets_from_any_clients(packets in proptest::collection::vec(packet(), 1..60)) {
        let mut bench = Bench::new();
        let region = OwnRegion::create(&RegionOptions::endpoint(4096)).unwrap().1;
        let (a, b) = packet::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        // In this order they are what a Connect needs; then two lies, and what an Offer and a Take need.
        let (_listener, client, server) = tcp();
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let fds = [region.as_fd(), a.as_fd(), b.as_fd(), file.as_fd(), bench.server.socket.as_fd()];
        let sockets = [client.as_fd(), server.as_fd(), stream.as_fd()];
        let hand: Vec<_> = fds.iter().chain(&sockets).map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let mut clients: Vec<Option<OwnedFd>> = vec![None, None, None, None];
        for Packet { client, bytes, with } in packets {
            let socket = clients[client].get_or_insert_with(|| bench.connect());
            bench.server.turn(Some(Duration::ZERO)).unwrap();
            let fds: Vec<_> = with.iter().take(packet::MAX_FDS).map(|&i| hand[i].as_fd()).collect();
            if packet::try_send(socket.as_fd(), &bytes, &fds).is_err() {
                // Hung up on, or full of what it does not read: it goes, and another comes in its place.
                clients[client] = None;
            }
            bench.settle();
        }
        clients.clear();
        bench.settle();
        prop_assert_eq!(bench.server.core.status(), CoreStatus::default());
    }
}

/// A listener, and both ends of a connection to it.
fn tcp() -> (std::net::TcpListener, std::net::TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    (listener, client, server)
}

#[test]
fn lingering_socket_does_not_block_broker() {
    let mut bench = Bench::new();
    let session = bench.connect();
    say(&session, &Message::Join { version: wire::VERSION, name: "a".to_owned() }, &[]);
    bench.settle();
    let (_listener, client, _server) = tcp();
    // Full of unread bytes, and closed only when all of them have arrived, or after two minutes.
    client.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &client, &[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::from_secs(120))).unwrap();
    let region = OwnRegion::create(&RegionOptions::endpoint(4096)).unwrap().1;
    let offer = Message::Offer { region: RegionReference::with_ring(4096) };
    say(&session, &offer, &[client.as_fd(), region.as_fd()]);
    // Not the last descriptor: that is in transit to the broker.
    drop(client);
    let begin = Instant::now();
    bench.settle();
    // And once more, for a client that does not stay to hear the answer.
    let (_listener, client, _server) = tcp();
    client.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &client, &[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::from_secs(120))).unwrap();
    say(&session, &offer, &[client.as_fd(), region.as_fd()]);
    drop((client, session));
    bench.settle();
    assert!(begin.elapsed() < Duration::from_secs(60), "the broker waited for a stranger's peer");
}

#[test]
fn hang_up_is_noticed_in_next_turn() {
    let mut bench = Bench::new();
    let client = bench.connect();
    bench.settle();
    assert_eq!(bench.server.core.status().sessions, 1);
    drop(client);
    // Without a timeout: if the hang-up did not wake it, this would hang.
    bench.server.turn(None).unwrap();
    assert_eq!(bench.server.core.status().sessions, 0);
}

fn say(socket: &OwnedFd, message: &Message, fds: &[BorrowedFd<'_>]) {
    let mut bytes = Vec::new();
    wire::encode(1, message, &mut bytes);
    packet::try_send(socket.as_fd(), &bytes, fds).unwrap();
}

#[test]
fn packets_of_a_client_that_is_gone_are_not_read() {
    let mut bench = Bench::new();
    let db = bench.connect();
    let join = Message::Join { version: wire::VERSION, name: "a".to_owned() };
    say(&db, &join, &[]);
    say(&db, &Message::Bind { service: "s".to_owned(), kind: Kind::Stream, backlog: 1 }, &[]);
    bench.settle();
    // The client has gone before the server has looked.
    let web = bench.connect();
    say(&web, &join, &[]);
    let region = OwnRegion::create(&RegionOptions::endpoint(4096)).unwrap().1;
    let (a, b) = packet::pair().unwrap();
    let connect = connect();
    say(&web, &connect, &[region.as_fd(), a.as_fd(), b.as_fd()]);
    drop(web);
    bench.settle();
    let status = bench.server.core.status();
    assert_eq!((status.sessions, status.services, status.channels), (1, 1, 0));
}

/// The process has another session in the domain, so the end of the first does not release its channels.
#[test]
fn channel_closed_just_before_its_session_is_released() {
    let mut bench = Bench::new();
    let [db, web, _other] = ["a", "b", "b"].map(|name| {
        let session = bench.connect();
        say(&session, &Message::Join { version: wire::VERSION, name: name.to_owned() }, &[]);
        session
    });
    say(&db, &Message::Bind { service: "s".to_owned(), kind: Kind::Stream, backlog: 1 }, &[]);
    bench.settle();
    let region = OwnRegion::create(&RegionOptions::endpoint(4096)).unwrap().1;
    let connect = connect();
    say(&web, &connect, &[region.as_fd()]);
    bench.settle();
    let mut buffer = [0; wire::MAX_PACKET];
    let channel = loop {
        let received = packet::try_recv(web.as_fd(), &mut buffer).unwrap();
        if let Ok((_, Message::Connected { channel, .. })) = wire::decode(&buffer[..received.len]) {
            break channel;
        }
    };
    let closed = Message::Closed { channel };
    say(&db, &closed, &[]);
    // Behind packets that need answers.
    for _ in 0..20 {
        say(&web, &Message::Ping {}, &[]);
    }
    say(&web, &closed, &[]);
    drop(web);
    bench.settle();
    let status = bench.server.core.status();
    assert_eq!((status.sessions, status.channels), (2, 0));
}

#[test]
fn half_closed_session_is_ended() {
    let mut bench = Bench::new();
    let client = bench.connect();
    bench.settle();
    rustix::net::shutdown(&client, rustix::net::Shutdown::Write).unwrap();
    bench.settle();
    assert_eq!(bench.server.core.status().sessions, 0);
}

#[test]
fn while_the_gate_is_closed_the_loop_sleeps_and_then_accepts() {
    let mut bench = Bench::new();
    // As when neither accepting nor turning away worked.
    bench.server.gate.shut_for_test(bench.server.epoll.as_fd(), listeners(&bench.server.socket, None));
    let _client = bench.connect();
    bench.server.turn(Some(Duration::ZERO)).unwrap();
    assert_eq!(bench.server.core.status().sessions, 0);
    while bench.server.core.status().sessions == 0 {
        bench.server.turn(None).unwrap();
    }
}

#[test]
fn new_session_behind_many_of_other_user_is_next() {
    let mut bench = Bench::new();
    let other = libc::ucred { pid: rustix::process::getpid().as_raw_nonzero().get(), uid: 65_534, gid: 65_534 };
    let mut clients = Vec::new();
    for _ in 0..500 {
        let (socket, client) = packet::pair().unwrap();
        assert!(bench.push(arrival(socket, other)).is_none());
        clients.push(client);
    }
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (socket, _honest) = packet::pair().unwrap();
    assert!(bench.push(arrival(socket, libc::ucred { uid, gid, ..other })).is_none());
    // A turn ends after one session if its time is over by then. The next one goes on with the user who is next.
    for turn in 1..=2 {
        let before = bench.server.next_session;
        bench.server.turn(Some(Duration::ZERO)).unwrap();
        assert!(bench.server.next_session - before <= 2 * BURST as u64, "a turn begins few sessions of each user");
        let core = &bench.server.core;
        if bench.server.sessions.keys().any(|session| core.user_of_session(*session) == Some(User::Host(uid))) {
            return;
        }
        assert!(turn == 1 && bench.server.next_session - before == 1, "it waits for more than one of the other user");
    }
}

/// A packet with which a client joins.
fn join() -> Vec<u8> {
    let mut packet = Vec::new();
    wire::encode(1, &Message::Join { version: wire::VERSION, name: "a".into() }, &mut packet);
    packet
}

/// The event loop alone: another turn would be needed to hear what a reader reports.
#[test]
fn join_that_came_with_its_connection_is_answered_in_same_turn() {
    let mut bench = Bench::new();
    let client = bench.connect();
    packet::try_send(client.as_fd(), &join(), &[]).unwrap();
    bench.server.turn(Some(Duration::ZERO)).unwrap();
    let mut answer = [0; wire::MAX_PACKET];
    let len = packet::try_recv(client.as_fd(), &mut answer).unwrap().len;
    assert!(matches!(wire::decode(&answer[..len]), Ok((1, Message::Joined { .. }))));
    // Its reader has the session from then on.
    let mut packet = Vec::new();
    wire::encode(2, &Message::Ping {}, &mut packet);
    packet::try_send(client.as_fd(), &packet, &[]).unwrap();
    bench.settle();
    let len = packet::try_recv(client.as_fd(), &mut answer).unwrap().len;
    assert!(matches!(wire::decode(&answer[..len]), Ok((2, Message::Done {}))));
}

#[test]
fn first_packet_with_descriptors_is_left_to_reader() {
    let mut bench = Bench::new();
    let client = bench.connect();
    packet::try_send(client.as_fd(), &join(), &[client.as_fd()]).unwrap();
    bench.server.turn(Some(Duration::ZERO)).unwrap();
    let mut answer = [0; wire::MAX_PACKET];
    let waits = packet::try_recv(client.as_fd(), &mut answer).unwrap_err();
    assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock, "the event loop has received a stranger's descriptor");
    bench.settle();
    let len = packet::try_recv(client.as_fd(), &mut answer).unwrap().len;
    assert!(matches!(wire::decode(&answer[..len]), Ok((1, Message::Refused { .. }))));
}

#[test]
fn connections_whose_clients_have_left_delay_no_new_session() {
    let mut bench = Bench::new();
    for _ in 0..2 * accept::LEFT {
        let left = bench.connect();
        packet::try_send(left.as_fd(), &join(), &[]).unwrap();
    }
    let honest = bench.connect();
    packet::try_send(honest.as_fd(), &join(), &[]).unwrap();
    while !bench.server.arrivals.has_any(|_| true) && bench.server.next_session == FIRST_SESSION {
        bench.server.turn(Some(Duration::ZERO)).unwrap();
    }
    bench.server.turn(Some(Duration::ZERO)).unwrap();
    assert_eq!(bench.server.next_session, FIRST_SESSION + 1, "sessions were begun for nobody, or none for the client");
    assert!(packet::try_recv(honest.as_fd(), &mut [0; wire::MAX_PACKET]).is_ok());
}

#[test]
fn connection_whose_client_has_left_is_charged_to_its_user() {
    let mut bench = Bench::new();
    for _ in 0..accept::LEFT + 1 {
        drop(bench.connect());
    }
    bench.server.accept(accept::Door::Host);
    let user = User::Host(rustix::process::geteuid().as_raw());
    assert!(!bench.server.shares.used_for_test(Account::of(user, Home::Unknown)).is_zero());
    assert!(bench.server.shares.used_for_test(Account::of(user, Home::Broker)).is_zero(), "it may be a container's");
    let waiting = rustix::event::poll(
        &mut [rustix::event::PollFd::new(&bench.server.socket, rustix::event::PollFlags::IN)],
        Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }),
    );
    assert_eq!(waiting, Ok(1), "one more than a turn takes");
}

#[test]
fn descriptor_is_closed_after_disposer_has_ended() {
    let mut bench = Bench::new();
    let (one, its_peer) = packet::pair().unwrap();
    let (other, others_peer) = packet::pair().unwrap();
    bench.server.readers.lose_disposer();
    bench.server.readers.close(None, one);
    bench.server.readers.keep_undisposed(other);
    assert!(bench.server.readers.has_waste());
    let begin = Instant::now();
    while bench.server.readers.has_waste() || !judge::is_hung_up(&its_peer) || !judge::is_hung_up(&others_peer) {
        bench.server.turn(Some(Duration::from_millis(100))).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "a descriptor stays open");
    }
}

#[test]
fn link_with_descriptors_is_closed_by_closer() {
    use crate::core::Descriptor as _;

    let mut bench = Bench::new();
    // As memory goes by it, it refuses no descriptor on any kernel.
    let (near, far) = ClientDescriptor::link_to_machine().unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    packet::send(near.fd().unwrap(), b"x", &[reader.as_fd()]).unwrap();
    drop(reader);
    let is_open = || {
        let mut fds = [rustix::event::PollFd::new(&writer, rustix::event::PollFlags::empty())];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
    };
    drop((near, far));
    assert!(is_open(), "the event loop has closed what a client sent");
    let begin = Instant::now();
    while is_open() || bench.server.readers.has_waste() {
        bench.server.turn(Some(Duration::from_millis(100))).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "it stays open");
    }
}

#[test]
fn made_end_is_closed_without_event_loop_turn() {
    let mut bench = Bench::new();
    let mut closers = Vec::new();
    // More than a closer may have, so its answers must count.
    for _ in 0..200 {
        // As before Linux 6.16: it refuses no descriptors.
        let (near, far) = packet::pair().unwrap();
        bench.server.readers.close_made(near);
        closers.push(bench.server.readers.closer_for_test());
        let begin = Instant::now();
        while !judge::is_hung_up(&far) {
            assert!(begin.elapsed() < Duration::from_secs(60), "it stays open");
        }
    }
    let begin = Instant::now();
    while bench.server.readers.has_waste() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not answer");
    }
    closers.dedup();
    assert_eq!(closers.len(), 1, "none was replaced");
}

#[test]
fn made_end_with_lingering_socket_keeps_no_other_open() {
    let mut bench = Bench::new();
    let (_listener, client, _server) = tcp();
    client.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &client, &[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::from_secs(120))).unwrap();
    let (first, firsts_peer) = packet::pair().unwrap();
    packet::send(firsts_peer.as_fd(), b"x", &[client.as_fd()]).unwrap();
    drop((client, firsts_peer));
    let (second, seconds_peer) = packet::pair().unwrap();
    let begin = Instant::now();
    for made in [first, second] {
        bench.server.readers.close_made(made);
    }
    let closer = bench.server.readers.closer_for_test();
    bench.server.next_emptying = Some(begin);
    while bench.server.readers.has_waste() || !judge::is_hung_up(&seconds_peer) {
        bench.server.turn(Some(Duration::from_millis(100))).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "it waits for the peer of what the other holds");
    }
    assert_ne!(bench.server.readers.closer_for_test(), closer, "the one that waited was replaced");
}

#[test]
fn end_of_broker_does_not_wait_for_lingering_socket() {
    use crate::core::Descriptor as _;

    let bench = Bench::new();
    let (near, far) = ClientDescriptor::link_to_machine().unwrap();
    let (_listener, client, _server) = tcp();
    client.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &client, &[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::from_secs(120))).unwrap();
    packet::send(far.fd().unwrap(), b"x", &[client.as_fd()]).unwrap();
    drop((client, near, far));
    // Nothing but the end of the server takes what was dropped, and no copy of it is left in this thread.
    let begin = Instant::now();
    drop(bench);
    assert!(descriptor::take_left().is_empty());
    assert!(begin.elapsed() < Duration::from_secs(60), "it waits for a stranger's peer");
}

/// Accounts of two other users.
fn two_accounts() -> [Account; 2] {
    [65_533, 65_534].map(|uid| Account::of(User::Host(uid), Home::Broker))
}

#[test]
fn descriptors_of_user_behind_hung_spawner_are_bounded() {
    let mut bench = Bench::new();
    let [user, other] = two_accounts();
    let blocked = bench.server.readers.block_spawner();
    let mut disposed = 0;
    while !bench.server.readers.is_clogged() {
        let (socket, peer) = packet::pair().unwrap();
        drop(peer);
        bench.server.readers.dispose(Some(user), socket);
        disposed += 1;
        assert!(disposed < 1000, "there is no limit");
    }
    assert!(bench.server.readers.is_clogged_by(Some(user)) && !bench.server.readers.is_clogged_by(Some(other)));
    let (orders, undisposed) = bench.server.readers.waiting_for_test(Some(user));
    assert_eq!((orders, undisposed), (0, 128));
    let (orders, _) = bench.server.readers.waiting_for_test(None);
    assert!(orders <= 6, "{orders} orders about disposers wait");
    // Connections wait in the kernel's queue, and sessions of this user in the broker's.
    let honest = bench.connect();
    say(&honest, &Message::Join { version: wire::VERSION, name: "honest".to_owned() }, &[]);
    let peer = libc::ucred { pid: rustix::process::getpid().as_raw_nonzero().get(), uid: 65_533, gid: 65_533 };
    let (socket, client) = packet::pair().unwrap();
    assert!(bench.push(arrival(socket, peer)).is_none());
    for _ in 0..5 {
        bench.server.turn(Some(Duration::ZERO)).unwrap();
    }
    assert_eq!(bench.server.core.status().sessions, 0);
    assert_eq!(bench.server.readers.waiting_for_test(Some(user)).1, 128);
    // All of it goes on when the spawner does.
    bench.server.readers.unblock_spawner(blocked);
    let begin = Instant::now();
    let mut is_answered = false;
    while bench.server.readers.has_waste() || !is_answered || bench.server.arrivals.has_any(|_| true) {
        bench.server.turn(Some(Duration::from_millis(100))).unwrap();
        is_answered |= packet::try_recv(honest.as_fd(), &mut [0; 4096]).is_ok();
        assert!(begin.elapsed() < Duration::from_secs(60), "the broker does not go on");
    }
    drop(client);
}

#[test]
fn orders_about_user_behind_hung_spawner_are_bounded() {
    let mut bench = Bench::new();
    let [user, other] = two_accounts();
    let blocked = bench.server.readers.block_spawner();
    let mut readers = 0;
    while let Ok(number) = bench.server.readers.reader_of(user) {
        bench.server.readers.forget(number);
        readers += 1;
        assert!(readers < 1000, "there is no limit");
    }
    assert_eq!(bench.server.readers.waiting_for_test(Some(user)).0, 4);
    assert!(bench.server.readers.reader_of(other).is_ok(), "another user gets a reader");
    bench.server.readers.unblock_spawner(blocked);
    let begin = Instant::now();
    while bench.server.readers.reader_of(user).is_err() {
        bench.server.turn(Some(Duration::from_millis(100))).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "the user gets no reader again");
    }
}

#[test]
fn session_dropped_for_user_limit_counts_as_quota_refusal() {
    let mut bench = Bench::new();
    let other = libc::ucred { pid: rustix::process::getpid().as_raw_nonzero().get(), uid: 65_534, gid: 65_534 };
    let mut clients = Vec::new();
    let hung_up_on = loop {
        let (socket, client) = packet::pair().unwrap();
        clients.push(client);
        if let Some(dropped) = bench.push(arrival(socket, other)) {
            break dropped;
        }
    };
    drop(hung_up_on);
    let _honest = bench.connect();
    bench.server.turn(Some(Duration::ZERO)).unwrap();
    let refusals = bench.server.core.report().refusals;
    assert_eq!(refusals.get(&("session", Refusal::Quota)), Some(&1), "{refusals:?}");
}

#[test]
fn user_with_used_share_waits_while_other_users_are_heard() {
    let mut bench = Bench::new();
    let speaks = bench.connect();
    bench.settle();
    // The period that begins in an hour is not over while this test runs.
    bench.server.shares = Shares::new(Instant::now() + Duration::from_secs(3600));
    let own = Account::of(User::Host(rustix::process::geteuid().as_raw()), Home::Broker);
    bench.server.charge(own, Duration::from_secs(1));

    packet::try_send(speaks.as_fd(), &join(), &[]).unwrap();
    let _late = bench.connect();
    let begun = bench.server.next_session;
    let heard = |bench: &mut Bench| bench.server.core.status().domains == 1;
    bench.server.readers.await_report(own);
    for _ in 0..10 {
        bench.server.turn(Some(Duration::ZERO)).unwrap();
    }
    assert!(!heard(&mut bench), "a user who used up a share was heard");
    assert_eq!(bench.server.next_session, begun, "a session was begun for that user");

    let other = libc::ucred { pid: rustix::process::getpid().as_raw_nonzero().get(), uid: 65_534, gid: 65_534 };
    let (socket, _client) = packet::pair().unwrap();
    bench.push(arrival(socket, other));
    bench.server.turn(Some(Duration::ZERO)).unwrap();
    assert_eq!(bench.server.next_session, begun + 1, "another user waits, too");

    bench.server.shares = Shares::new(Instant::now());
    bench.server.readers.listen_to_all();
    bench.settle();
    assert!(heard(&mut bench), "the user is not heard again");
}

#[test]
fn container_programs_have_other_reader_than_host_user() {
    let mut bench = Bench::new();
    let own = User::Host(rustix::process::geteuid().as_raw());
    let place = |number| Home::Container { user: number, pid: number };
    let [host, one, other, unknown] =
        [Home::Broker, place(1), place(2), Home::Unknown].map(|home| Account::of(own, home));
    let readers = &mut bench.server.readers;
    let reader = readers.reader_of(host).unwrap();
    let theirs = readers.reader_of(one).unwrap();
    assert_ne!(reader, theirs);
    assert_eq!([readers.reader_of(other), readers.reader_of(unknown)], [Ok(theirs), Ok(theirs)]);
    // It hangs, and its user is refused.
    readers.kill(theirs, super::readers::ReaderEnd::Hung);
    assert!(readers.reader_of(other).unwrap_err().contains("of containers"));
    assert_eq!(readers.reader_of(host), Ok(reader));
}

#[test]
fn stop_ends_loop_and_last_policy_applies() {
    let mut bench = Bench::new();
    let control = bench.server.control();
    control.set_policy(crate::policy::Policy::parse("administrators = []").unwrap());
    control.stop();
    bench.server.run(|_| ()).unwrap();
    let _client = bench.connect();
    bench.settle();
    assert_eq!(bench.server.core.status().sessions, 0, "a policy without rules admits nobody");
}
