//! Transparent sockets: real TCP sockets before a real broker, which is told lies about them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use common::netns::Netns;
use common::{Client, alone, eventually, open_descriptors};
use partywall_daemon::Broker;
use partywall_region::{OwnRegion, RegionOptions, directory};
use partywall_shm::directory::{Directory, Fingerprint, Transport};
use partywall_shm::layout::RegionKind;
use partywall_shm::sync::Peer;
use partywall_shm::wire::{Addresses, Message, Refusal};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

const OFFER: Message = Message::Offer { ring_offset: 4096, ring_size: 8192 };
const TAKE: Message = Message::Take { ring_offset: 4096, ring_size: 8192 };

fn region() -> OwnedFd {
    let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(8192) };
    OwnRegion::create(&options).unwrap().1
}

fn link() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// Both ends of a connection to `at`, and its listener.
fn connection(at: &str) -> (TcpListener, TcpStream, TcpStream) {
    let listener = TcpListener::bind(at).unwrap();
    let client = TcpStream::connect(reachable(&listener)).unwrap();
    let (server, _) = listener.accept().unwrap();
    (listener, client, server)
}

/// Where a listener of this host is connected to.
fn reachable(listener: &TcpListener) -> SocketAddr {
    let at = listener.local_addr().unwrap();
    if at.ip().is_unspecified() { SocketAddr::from(([127, 0, 0, 1], at.port())) } else { at }
}

fn offer(client: &mut Client, socket: impl AsFd) -> (Message, OwnedFd) {
    let (region, (mine, theirs)) = (region(), link());
    let fds = [socket.as_fd(), region.as_fd(), theirs.as_fd()];
    (client.ask_with(&OFFER, &fds).message, mine)
}

fn take(client: &mut Client, socket: impl AsFd) -> Message {
    let region = region();
    client.ask_with(&TAKE, &[socket.as_fd(), region.as_fd()]).message
}

fn publish(client: &mut Client, socket: BorrowedFd<'_>, addresses: &[&str]) -> u64 {
    let addresses = Addresses(addresses.iter().map(|ip| ip.parse().unwrap()).collect());
    match client.ask_with(&Message::Publish { addresses }, &[socket]).message {
        Message::Published { key } => key,
        other => panic!("not published: {other:?}"),
    }
}

fn code(message: &Message) -> Refusal {
    match message {
        Message::Refused { code, .. } => *code,
        other => panic!("not refused: {other:?}"),
    }
}

fn directory_of(client: &mut Client) -> &'static Directory<Peer> {
    let answer = client.ask_with(&Message::Directory {}, &[]);
    directory::attach(answer.fds[0].as_fd(), None).unwrap()
}

/// A broker, and the sessions of two programs.
fn world() -> (Broker, Client, Client) {
    let broker = Broker::embedded().unwrap();
    let (web, db) = (Client::join(broker.path(), "web"), Client::join(broker.path(), "db"));
    (broker, web, db)
}

#[test]
fn the_two_ends_of_a_connection_find_each_other_over_ipv4_and_ipv6_and_both() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let directory = directory_of(&mut db);
    for at in ["127.0.0.1:0", "[::1]:0", "[::]:0", "0.0.0.0:0"] {
        let (_listener, client, server) = connection(at);
        let before = directory.offer_generation();
        let (offered, mine) = offer(&mut web, &client);
        let Message::Offered { offer: id } = offered else { panic!("{at}: {offered:?}") };
        assert_ne!(directory.offer_generation(), before);
        let region = region();
        let answer = db.ask_with(&TAKE, &[server.as_fd(), region.as_fd()]);
        let Message::Taken { channel, .. } = answer.message else { panic!("{at}: {:?}", answer.message) };
        assert_eq!(channel, id);
        rustix::io::write(&answer.fds[1], b"x").unwrap();
        assert_eq!(rustix::io::read(&mine, &mut [0; 2]), Ok(1), "{at}: its link");
    }
}

/// Ends the traffic of a connection when it is dropped.
struct End<'a>([&'a TcpStream; 2]);

impl Drop for End<'_> {
    fn drop(&mut self) {
        for socket in self.0 {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

#[test]
fn a_connection_that_has_carried_bytes_is_matched_at_any_moment_of_its_traffic() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let (_listener, client, server) = connection("127.0.0.1:0");
    std::thread::scope(|scope| {
        let (a, b) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        for (mut from, mut to) in [(a.try_clone().unwrap(), b.try_clone().unwrap()), (b, a)] {
            scope.spawn(move || while std::io::Write::write_all(&mut from, &[7; 4096]).is_ok() {});
            scope.spawn(move || while to.read(&mut [0; 3000]).is_ok_and(|n| n > 0) {});
        }
        // Also if something goes wrong here, or the threads would go on for ever.
        let _end = End([&client, &server]);
        for round in 0..200 {
            let (offered, _mine) = offer(&mut web, &client);
            assert!(matches!(offered, Message::Offered { .. }), "{round}: {offered:?}");
            let taken = take(&mut db, &server);
            let Message::Taken { channel, .. } = taken else { panic!("{round}: {taken:?}") };
            for side in [&mut web, &mut db] {
                side.tell(&Message::Closed { channel }, &[]);
            }
            assert!(db.is_served() && web.is_served());
        }
    });
}

#[test]
fn what_is_no_connected_tcp_socket_is_refused_and_closed() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let before = open_descriptors();
    {
        let (listener, client, server) = connection("127.0.0.1:0");
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.connect(listener.local_addr().unwrap()).unwrap();
        let (unix, _other) = link();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fresh = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        for bad in [udp.as_fd(), unix.as_fd(), file.as_fd(), fresh.as_fd(), listener.as_fd()] {
            assert_eq!(code(&offer(&mut web, bad).0), Refusal::BadSocket);
            assert_eq!(code(&take(&mut db, bad)), Refusal::BadSocket);
        }
        for bad in [unix.as_fd(), file.as_fd()] {
            let publish = Message::Publish { addresses: Addresses::default() };
            assert_eq!(code(&web.ask_with(&publish, &[bad]).message), Refusal::BadSocket);
        }
        // A link of the other sort, and none.
        let region = region();
        for bad in [partywall_region::packet::pair().unwrap().0.as_fd(), file.as_fd()] {
            let fds = [client.as_fd(), region.as_fd(), bad];
            assert_eq!(code(&web.ask_with(&OFFER, &fds).message), Refusal::BadLink);
        }
        // Too few, and the socket in the wrong place.
        assert_eq!(code(&web.ask_with(&OFFER, &[client.as_fd()]).message), Refusal::Protocol);
        let fds = [region.as_fd(), client.as_fd(), unix.as_fd()];
        assert_eq!(code(&web.ask_with(&OFFER, &fds).message), Refusal::BadSocket);
        // After the peer's FIN it can still be offered; after one's own it cannot.
        server.shutdown(Shutdown::Write).unwrap();
        eventually("CLOSE_WAIT", || client.peek(&mut [0]).is_ok_and(|n| n == 0));
        assert!(matches!(offer(&mut web, &client).0, Message::Offered { .. }));
        assert_eq!(code(&take(&mut db, &server)), Refusal::BadSocket);
    }
    // The region and link end of the one offer are the broker's, until it ends.
    drop(web);
    eventually("all closed", || open_descriptors() < before);
}

fn has_ended(socket: &mut TcpStream) -> bool {
    socket.set_read_timeout(Some(common::HANG)).unwrap();
    socket.read(&mut [0]).is_ok_and(|n| n == 0)
}

#[test]
fn the_broker_keeps_no_copy_of_a_socket() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let (listener, client, mut server) = connection("127.0.0.1:0");
    assert!(matches!(offer(&mut web, &client).0, Message::Offered { .. }));
    drop(client);
    assert!(has_ended(&mut server), "the end, while the offer waits");

    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let (_, _mine) = offer(&mut web, &client);
    assert!(matches!(take(&mut db, &server), Message::Taken { .. }));
    drop(client);
    assert!(has_ended(&mut server), "the end, while the channel stands");

    let at = listener.local_addr().unwrap();
    publish(&mut web, listener.as_fd(), &[]);
    drop(listener);
    assert!(TcpStream::connect(at).is_err(), "nobody listens any more");
}

#[test]
fn listeners_are_in_the_directory_while_their_session_lasts() {
    let _alone = alone();
    let (broker, mut web, mut db) = world();
    let directory = directory_of(&mut db);
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let there = Fingerprint::listener(Transport::Tcp, SocketAddr::from(([192, 0, 2, 77], port)), 0);
    assert!(!directory.has_listener(there));
    publish(&mut web, listener.as_fd(), &["192.0.2.77"]);
    assert!(directory.has_listener(there));
    assert!(directory.has_address(Fingerprint::address("192.0.2.77".parse().unwrap(), 0)));
    drop(web);
    eventually("withdrawn", || !directory.has_listener(there));
    assert!(!directory.is_closed());
    drop(broker);
    assert!(directory.is_closed());
}

#[test]
fn containers_meet_over_their_network_and_strangers_with_their_addresses_do_not() {
    let _alone = alone();
    let (Some(a), Some(b), Some(third)) = (Netns::own(), Netns::own(), Netns::own()) else {
        println!("skipped: network namespaces need root, and `ip`");
        return;
    };
    a.join(&b);
    let (_broker, mut web, mut db) = world();
    let listener = b.within(|| TcpListener::bind("192.0.2.2:0")).unwrap();
    let at = listener.local_addr().unwrap();
    let connect = || {
        let client = a.within(|| TcpStream::connect(at)).unwrap();
        (client, listener.accept().unwrap().0)
    };
    let (client, server) = connect();
    offer(&mut web, &client);
    let taken = take(&mut db, &server);
    assert!(matches!(taken, Message::Taken { .. }), "{taken:?}");

    // Another container with the address of either: nobody can tell any more who is meant.
    let mut other = Client::join(_broker.path(), "other");
    let elsewhere = third.within(|| TcpListener::bind("0.0.0.0:0")).unwrap();
    for address in ["192.0.2.1", "192.0.2.2"] {
        let key = publish(&mut other, elsewhere.as_fd(), &[address]);
        let (client, server) = connect();
        offer(&mut web, &client);
        assert_eq!(code(&take(&mut db, &server)), Refusal::Ambiguous, "{address}");
        assert_eq!(other.ask(&Message::Withdraw { key }), Message::Done {});
    }

    // Loopback of one is not that of the other, though the ends have the same names.
    let in_a = a.within(|| connection("127.0.0.1:0"));
    let port = in_a.0.local_addr().unwrap().port();
    let from = in_a.1.local_addr().unwrap();
    let forged = b.within(|| {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let client = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&client, &from).unwrap();
        rustix::net::connect(&client, &listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, client)
    });
    offer(&mut web, &in_a.1);
    assert_eq!(code(&take(&mut db, &forged.0)), Refusal::NoSuchOffer);
    assert!(matches!(take(&mut db, &in_a.2), Message::Taken { .. }));
}

#[test]
fn a_namespace_that_anybody_can_make_meets_only_itself() {
    let _alone = alone();
    let (Some(own), Some(foreign)) = (Netns::own(), Netns::foreign()) else {
        println!("skipped: network namespaces need root, `ip`, and user namespaces");
        return;
    };
    let (_broker, mut web, mut db) = world();
    for netns in [&own, &foreign] {
        for address in ["192.0.2.1/32", "192.0.2.2/32"] {
            assert!(netns.ip(&format!("address add {address} dev lo")));
        }
    }
    // The same four numbers in both: in the one by those who run the broker, in the other by whoever likes to.
    let both_ends = |from: SocketAddr, at: SocketAddr| {
        let listener = TcpListener::bind(at).unwrap();
        let client = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&client, &from).unwrap();
        rustix::net::connect(&client, &at).unwrap();
        (client, listener.accept().unwrap().0)
    };
    let (from, at) = (SocketAddr::from(([192, 0, 2, 1], 5000)), SocketAddr::from(([192, 0, 2, 2], 80)));
    let honest = own.within(|| both_ends(from, at));
    let forged = foreign.within(|| both_ends(from, at));
    let (offered, _mine) = offer(&mut web, &honest.0);
    assert!(matches!(offered, Message::Offered { .. }));
    assert_eq!(code(&take(&mut db, &forged.1)), Refusal::NoSuchOffer, "it claims another's connection");
    let (offered, _also) = offer(&mut db, &forged.0);
    assert!(matches!(offered, Message::Offered { .. }), "it spoils nothing: {offered:?}");
    assert!(matches!(take(&mut db, &honest.1), Message::Taken { .. }));
    assert!(matches!(take(&mut web, &forged.1), Message::Taken { .. }), "and among itself it is served");
}
