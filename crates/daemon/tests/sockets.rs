//! Transparent sockets: real TCP sockets and a real broker, to which clients lie about them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use common::netns::Netns;
use common::{Client, HANG, alone, eventually, open_descriptors};
use partywall_daemon::Broker;
use partywall_protocol::directory::{Directory, Fingerprint, Transport};
use partywall_protocol::wire::{AddressList, BellWay, Message, Refusal, RegionReference};
use partywall_region::bell::{self, Heard};
use partywall_region::{OwnRegion, RegionOptions, directory};
use partywall_shm::layout::RegionKind;
use partywall_shm::sync::Peer;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::time::{Duration, Instant};

const OFFER: Message = Message::Offer { region: RegionReference::with_ring(8192) };
const TAKE: Message = Message::Take { region: RegionReference::with_ring(8192) };

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

/// A connection whose client was bound to a separate port. A port that `connect` chooses can also be the port of an ended connection to
/// another address, and then it cannot be bound for a minute.
fn connection_from_own_port() -> (TcpListener, TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Keeps the port until the client is bound to it by number: only such a socket keeps its port.
    let port = bound(SocketAddr::from(([127, 0, 0, 1], 0)));
    let from = TcpStream::from(port.try_clone().unwrap()).local_addr().unwrap();
    let client = connect_from(from, listener.local_addr().unwrap());
    let (server, _) = listener.accept().unwrap();
    (listener, client, server)
}

/// Where a listener of this host is connected to.
fn reachable(listener: &TcpListener) -> SocketAddr {
    let at = listener.local_addr().unwrap();
    if at.ip().is_unspecified() { SocketAddr::from(([127, 0, 0, 1], at.port())) } else { at }
}

/// Offers, and keeps the bells of the answer.
fn offer(client: &mut Client, socket: impl AsFd) -> (Message, Vec<OwnedFd>) {
    let region = region();
    let answer = client.ask_with(&OFFER, &[socket.as_fd(), region.as_fd()]);
    (answer.message, answer.fds)
}

fn take(client: &mut Client, socket: impl AsFd) -> Message {
    let region = region();
    client.ask_with(&TAKE, &[socket.as_fd(), region.as_fd()]).message
}

/// All that follows an offer: what the accepting side hears last, and the number of the offer.
fn meet(web: &mut Client, client: impl AsFd, db: &mut Client, server: impl AsFd) -> Result<u64, Message> {
    let offer = match take(db, server.as_fd()) {
        Message::Bell { offer, .. } => offer,
        refused => return Err(refused),
    };
    match web.ask_with(&Message::Confirm { offer }, &[client.as_fd()]).message {
        Message::PeerIs { .. } => {}
        refused => return Err(refused),
    }
    match db.ask_with(&Message::Finish { offer }, &[server.as_fd()]).message {
        Message::PeerIs { .. } => Ok(offer),
        refused => Err(refused),
    }
}

fn publish(client: &mut Client, socket: BorrowedFd<'_>, addresses: &[&str]) -> u64 {
    let addresses = AddressList(addresses.iter().map(|ip| ip.parse().unwrap()).collect());
    match client.ask_with(&Message::Publish { addresses }, &[socket]).message {
        Message::Published { key, .. } => key,
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
fn connection_ends_meet_over_ipv4_ipv6_and_dual_stack() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let directory = directory_of(&mut db);
    for at in ["127.0.0.1:0", "[::1]:0", "[::]:0", "0.0.0.0:0"] {
        let (_listener, client, server) = connection(at);
        let before = directory.offer_generation();
        let (offered, mine) = offer(&mut web, &client);
        let Message::Bell { offer: id, .. } = offered else { panic!("{at}: {offered:?}") };
        assert_ne!(directory.offer_generation(), before);
        let region = region();
        let answer = db.ask_with(&TAKE, &[server.as_fd(), region.as_fd()]);
        let Message::Take { region: shown } = TAKE else { panic!("{TAKE:?}") };
        assert_eq!(answer.message, Message::Bell { offer: id, way: BellWay::Link, region: shown }, "{at}");
        let theirs = answer.fds;
        assert!(bell::ring(&theirs[0], b'B') && bell::hear(&mine[0]) == Heard::Bell, "{at}: the region is made");
        let answer = web.ask_with(&Message::Confirm { offer: id }, &[client.as_fd()]);
        assert!(
            matches!(answer.message, Message::PeerIs { region: RegionReference { ring_size: 8192, .. }, .. }),
            "{at}: {:?}",
            answer.message
        );
        assert_eq!(bell::hear(&theirs[0]), Heard::Nothing, "{at}: the broker has no end to ring by");
        assert!(bell::ring(&mine[0], b'B') && bell::hear(&theirs[0]) == Heard::Bell, "{at}: it is to finish");
        let answer = db.ask_with(&Message::Finish { offer: id }, &[server.as_fd()]);
        assert!(
            matches!(answer.message, Message::PeerIs { region: RegionReference { ring_size: 8192, .. }, .. }),
            "{at}: {:?}",
            answer.message
        );
        // The broker has no end of theirs any more.
        assert!(bell::ring(&theirs[0], b'B') && bell::hear(&mine[0]) == Heard::Bell, "{at}: their bells");
        drop(theirs);
        assert_eq!(bell::hear(&mine[0]), Heard::Gone, "{at}");
    }
}

#[test]
fn connection_with_bytes_under_way_is_matched_and_unharmed() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let (_listener, mut client, mut server) = connection("127.0.0.1:0");
    let (mut sent, mut received) = ([0usize; 2], [0usize; 2]);
    for round in 0..100 {
        // No thread is in the kernel with them while they are shown, but bytes lie in the queues in both directions.
        for (from, n) in [(&mut client, 0), (&mut server, 1)] {
            let piece: Vec<u8> = (0..round * 7 % 3000).map(|i| (sent[n] + i) as u8).collect();
            std::io::Write::write_all(from, &piece).unwrap();
            sent[n] += piece.len();
        }
        let (offered, _mine) = offer(&mut web, &client);
        assert!(matches!(offered, Message::Bell { .. }), "{round}: {offered:?}");
        let channel =
            meet(&mut web, &client, &mut db, &server).unwrap_or_else(|refused| panic!("{round}: {refused:?}"));
        for side in [&mut web, &mut db] {
            side.tell(&Message::Closed { channel }, &[]);
        }
        assert!(db.is_served() && web.is_served());
        for (to, n) in [(&mut server, 0), (&mut client, 1)] {
            let mut buffer = vec![0; (sent[n] - received[n]) / 2];
            to.read_exact(&mut buffer).unwrap();
            assert!(buffer.iter().enumerate().all(|(i, b)| *b == (received[n] + i) as u8));
            received[n] += buffer.len();
        }
    }
}

#[test]
fn descriptor_other_than_connected_tcp_socket_is_refused() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let before = open_descriptors();
    {
        let (listener, client, server) = connection("127.0.0.1:0");
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.connect(listener.local_addr().unwrap()).unwrap();
        let (unix, _other) = link();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fresh = tcp_socket();
        for bad in [udp.as_fd(), unix.as_fd(), file.as_fd(), fresh.as_fd(), listener.as_fd()] {
            assert_eq!(code(&offer(&mut web, bad).0), Refusal::BadSocket);
            assert_eq!(code(&take(&mut db, bad)), Refusal::BadSocket);
        }
        for bad in [unix.as_fd(), file.as_fd()] {
            let publish = Message::Publish { addresses: AddressList::default() };
            assert_eq!(code(&web.ask_with(&publish, &[bad]).message), Refusal::BadSocket);
        }
        let region = region();
        // Too few, and the socket in the wrong place.
        assert_eq!(code(&web.ask_with(&OFFER, &[client.as_fd()]).message), Refusal::Protocol);
        let fds = [region.as_fd(), client.as_fd()];
        assert_eq!(code(&web.ask_with(&OFFER, &fds).message), Refusal::BadSocket);
        assert!(matches!(offer(&mut web, &client).0, Message::Bell { .. }));
        // After an end of either side nothing is shown any more.
        server.shutdown(Shutdown::Write).unwrap();
        eventually("CLOSE_WAIT", || client.peek(&mut [0]).is_ok_and(|n| n == 0));
        assert_eq!(code(&offer(&mut db, &client).0), Refusal::BadSocket);
        assert_eq!(code(&take(&mut db, &server)), Refusal::BadSocket);
    }
    // The region and the bells of the one offer are the broker's, until it ends.
    drop(web);
    eventually("all closed", || open_descriptors() < before);
}

fn has_ended(socket: &mut TcpStream) -> bool {
    socket.set_read_timeout(Some(common::HANG)).unwrap();
    socket.read(&mut [0]).is_ok_and(|n| n == 0)
}

#[test]
fn broker_keeps_no_copy_of_sockets() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    let (listener, client, mut server) = connection("127.0.0.1:0");
    assert!(matches!(offer(&mut web, &client).0, Message::Bell { .. }));
    drop(client);
    assert!(has_ended(&mut server), "the end, while the offer waits");

    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let (_, _mine) = offer(&mut web, &client);
    assert!(meet(&mut web, &client, &mut db, &server).is_ok());
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
fn containers_meet_by_network_and_forged_addresses_do_not() {
    let _alone = alone();
    let (Some(a), Some(b), Some(third)) = (Netns::own(), Netns::own(), Netns::own()) else {
        println!("skipped: network namespaces need root, and `ip`");
        return;
    };
    a.join(&b);
    let (_broker, mut web, mut db) = world();
    let listener = b.within(|| TcpListener::bind("192.0.2.2:0")).unwrap();
    let at = listener.local_addr().unwrap();
    publish(&mut db, listener.as_fd(), &[]);
    let connect = || {
        let client = a.within(|| TcpStream::connect(at)).unwrap();
        (client, listener.accept().unwrap().0)
    };
    let (client, server) = connect();
    let (_, _bells) = offer(&mut web, &client);
    let met = meet(&mut web, &client, &mut db, &server);
    assert!(met.is_ok(), "{met:?}");

    // Another container, which gave itself both addresses, has a connection between the same two ends.
    for address in ["192.0.2.1/32", "192.0.2.2/32"] {
        assert!(third.ip(&format!("address add {address} dev lo")));
    }
    let mut other = Client::join(_broker.path(), "other");
    let (client, server) = connect();
    let (from, to) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
    let (forger, own, forged) = third.within(|| {
        let listener = TcpListener::bind(to).unwrap();
        let own = connect_from(from, to);
        let forged = listener.accept().unwrap().0;
        (listener, own, forged)
    });
    publish(&mut other, forger.as_fd(), &[]);
    let (_, _bells) = offer(&mut web, &client);
    // As much as it likes: numbers of bytes prove nothing.
    std::io::Write::write_all(&mut &own, &[0; 10_000]).unwrap();
    assert_eq!(code(&take(&mut other, &forged)), Refusal::NoSuchOffer, "it claims the accepting side");
    let (offered, _more) = offer(&mut other, &own);
    assert!(matches!(offered, Message::Bell { .. }), "{offered:?}");
    assert!(meet(&mut web, &client, &mut db, &server).is_ok(), "and spoils nothing by an offer");

    // Loopback of one is not that of the other, though the ends have the same names.
    let in_a = a.within(|| connection("127.0.0.1:0"));
    let port = in_a.0.local_addr().unwrap().port();
    let from = in_a.1.local_addr().unwrap();
    let forged = b.within(|| both_ends(from, SocketAddr::from(([127, 0, 0, 1], port))));
    let (_, _bells) = offer(&mut web, &in_a.1);
    assert_eq!(code(&take(&mut db, &forged.1)), Refusal::NoSuchOffer);
    assert!(meet(&mut web, &in_a.1, &mut db, &in_a.2).is_ok());
}

/// A connection from and to exactly these, whatever else is bound there.
fn both_ends(from: SocketAddr, at: SocketAddr) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(at).unwrap();
    let client = connect_from(from, at);
    (client, listener.accept().unwrap().0)
}

fn connect_from(from: SocketAddr, to: SocketAddr) -> TcpStream {
    let socket = bound(from);
    // A process that is just being started has a copy of the earlier connection until its `exec`.
    let deadline = Instant::now() + HANG;
    while let Err(error) = rustix::net::connect(&socket, &to) {
        assert!(error == Errno::ADDRNOTAVAIL && Instant::now() < deadline, "{to}: {error}");
        std::thread::sleep(Duration::from_millis(10));
    }
    socket.into()
}

/// A socket of TCP, which the broker's processes that begin at this moment do not keep.
fn tcp_socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// A socket with this address, whose port others may have as well if they say so too.
fn bound(at: SocketAddr) -> OwnedFd {
    let socket = tcp_socket();
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    // The kernel may have given the port to a connection of another test, which ends in its own time.
    let deadline = Instant::now() + HANG;
    while let Err(error) = rustix::net::bind(&socket, &at) {
        assert!(error == Errno::ADDRINUSE && Instant::now() < deadline, "{at}: {error}");
        std::thread::sleep(Duration::from_millis(10));
    }
    socket
}

/// Ends a connection by a reset, and nothing of it remains.
fn reset(socket: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&socket, Some(std::time::Duration::ZERO)).unwrap();
}

#[test]
fn offer_for_reset_port_does_not_match_next_owner() {
    let _alone = alone();
    let (_broker, mut evil, mut server) = world();
    let (listener, attacker, _first) = connection_from_own_port();
    let (port, at) = (attacker.local_addr().unwrap(), listener.local_addr().unwrap());
    let (offered, _bells) = offer(&mut evil, &attacker);
    let Message::Bell { offer, .. } = offered else { panic!("{offered:?}") };
    reset(attacker);
    let victim = connect_from(port, at);
    let (accepted, _) = listener.accept().unwrap();
    // By its numbers; or, where the broker may not read them, when the attacker has to show its socket.
    match take(&mut server, &accepted) {
        Message::Refused { code, .. } => assert_eq!(code, Refusal::NoSuchOffer),
        _ => {
            let fresh = tcp_socket();
            let answer = evil.ask_with(&Message::Confirm { offer }, &[fresh.as_fd()]).message;
            assert_eq!(code(&answer), Refusal::BadSocket);
        }
    }
    drop(victim);
}

/// E listens, publishes its listener, and closes it by a bare system call. The broker lists it still when another program has the port.
#[test]
fn publication_of_closed_socket_grants_nothing() {
    let _alone = alone();
    let (_broker, mut evil, mut web) = world();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    publish(&mut evil, listener.as_fd(), &[]);
    // It keeps a connection that has the port as well.
    let kept = TcpStream::connect(at).unwrap();
    let (kept_end, _) = listener.accept().unwrap();
    drop(listener);
    let next = socket_that_reuses(at);
    let honest = TcpStream::connect(at).unwrap();
    let (served, _) = next.accept().unwrap();
    let (offered, mine) = offer(&mut web, &honest);
    let Message::Bell { offer, .. } = offered else { panic!("{offered:?}") };
    for socket in [kept.as_fd(), kept_end.as_fd()] {
        assert_eq!(code(&take(&mut evil, socket)), Refusal::NoSuchOffer);
    }
    // No program has taken the offer.
    assert_eq!(code(&web.ask_with(&Message::Confirm { offer }, &[honest.as_fd()]).message), Refusal::NoSuchOffer);
    drop((mine, served));
}

/// A listener at an address at which connections of another one are left.
fn socket_that_reuses(at: SocketAddr) -> TcpListener {
    let socket = tcp_socket();
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    rustix::net::bind(&socket, &at).unwrap();
    rustix::net::listen(&socket, 8).unwrap();
    socket.into()
}

#[test]
fn reconnected_socket_does_not_match_its_earlier_offer() {
    let _alone = alone();
    let (_broker, mut evil, mut server) = world();
    let (listener, attacker, _first) = connection_from_own_port();
    let (from, at) = (attacker.local_addr().unwrap(), listener.local_addr().unwrap());
    let (_, _bells) = offer(&mut evil, &attacker);
    let cookie = rustix::net::sockopt::socket_cookie(&attacker).unwrap();
    // The same socket, with the same cookie, the same two ends, and another connection. A bound socket keeps its port.
    rustix::net::connect_unspec(&attacker).unwrap();
    rustix::net::connect(&attacker, &at).unwrap();
    assert_eq!(attacker.local_addr().unwrap(), from);
    assert_eq!(rustix::net::sockopt::socket_cookie(&attacker).unwrap(), cookie);
    let (accepted, _) = listener.accept().unwrap();
    let met = meet(&mut evil, &attacker, &mut server, &accepted);
    if rustix::process::geteuid().is_root() {
        assert!(met.is_err(), "{met:?}");
    } else {
        // Both ends belong to one connection, whatever was before: it cannot be another user's.
        assert!(met.is_ok(), "{met:?}");
    }
}

#[test]
fn options_of_a_socket_are_as_before_after_it_was_shown() {
    let _alone = alone();
    let (_broker, mut web, mut db) = world();
    for reuse in [false, true] {
        let (_listener, client, server) = connection("127.0.0.1:0");
        for socket in [&client, &server] {
            rustix::net::sockopt::set_socket_reuseaddr(socket, reuse).unwrap();
        }
        let (_, _bells) = offer(&mut web, &client);
        assert!(meet(&mut web, &client, &mut db, &server).is_ok());
        for (mut from, mut to) in [(&client, &server), (&server, &client)] {
            assert_eq!(rustix::net::sockopt::socket_reuseaddr(from).unwrap(), reuse);
            std::io::Write::write_all(&mut from, b"as then").unwrap();
            let mut buffer = [0; 7];
            to.read_exact(&mut buffer).unwrap();
        }
        // An end is an end.
        drop(client);
        assert_eq!((&server).read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn untrusted_namespace_meets_only_itself() {
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
    // The same four numbers in both: in one namespace made by the users of the broker, in the other by any user.
    let (from, at) = (SocketAddr::from(([192, 0, 2, 1], 5000)), SocketAddr::from(([192, 0, 2, 2], 80)));
    let honest = own.within(|| both_ends(from, at));
    let forged = foreign.within(|| both_ends(from, at));
    let (offered, _mine) = offer(&mut web, &honest.0);
    assert!(matches!(offered, Message::Bell { .. }));
    assert_eq!(code(&take(&mut db, &forged.1)), Refusal::NoSuchOffer, "it claims another's connection");
    let (offered, _also) = offer(&mut db, &forged.0);
    assert!(matches!(offered, Message::Bell { .. }), "it spoils nothing: {offered:?}");
    assert!(meet(&mut web, &honest.0, &mut db, &honest.1).is_ok());
    assert!(meet(&mut db, &forged.0, &mut web, &forged.1).is_ok(), "and among itself it is served");
}
