//! The rights to publish, offer and take, and the identity of connections.

mod forwarded;
mod handshake;
mod policy;
mod publishing;
mod reclaim;
mod translated;

use std::net::SocketAddr;

use partywall_protocol::directory::{OfferKey, Transport};
use partywall_protocol::wire::{AddressList, BellWay, RegionReference, Side, Text, What};

use super::*;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A connected socket in namespace 1, which is trusted; its cookie is made of its ends.
fn socket(local: &str, remote: &str) -> SocketFacts {
    let (local, remote) = (at(local), at(remote));
    let cookie = u64::from(local.port()) << 16 | u64::from(remote.port());
    let base = facts(Transport::Tcp, local, Some(remote));
    SocketFacts { cookie, acknowledged: 100, received: 50, sent: 100, ..base }
}

/// A network namespace of the host.
fn near(cookie: u64) -> NamespaceId {
    NamespaceId { origin: Origin::Host, cookie }
}

/// A listening socket at this address.
pub(crate) fn listening(local: &str) -> SocketFacts {
    let base = socket(local, "0.0.0.0:0");
    SocketFacts { remote: None, state: SocketState::Listening, ..base }
}

const CLIENT: [&str; 2] = ["10.0.0.2:5000", "10.0.0.1:80"];
const SERVER: [&str; 2] = ["10.0.0.1:80", "10.0.0.2:5000"];

/// The connecting end of a TCP connection.
pub(crate) fn client() -> SocketFacts {
    socket(CLIENT[0], CLIENT[1])
}

/// The other end of [`client`].
fn server() -> SocketFacts {
    SocketFacts { acknowledged: 50, received: 100, sent: 50, ..socket(SERVER[0], SERVER[1]) }
}

fn offer(w: &mut World, session: u64, socket: SocketFacts) -> Message {
    let with = vec![w.region(8192)];
    w.say_of(session, Message::Offer { region: RegionReference::with_ring(8192) }, socket, with).expect("an answer")
}

fn offered(w: &mut World, session: u64, socket: SocketFacts) -> u64 {
    match offer(w, session, socket) {
        Message::Bell { offer, .. } => offer,
        other => panic!("not offered: {other:?}"),
    }
}

/// The offering side's answer once the other has taken.
fn confirm(w: &mut World, session: u64, offer: u64, socket: SocketFacts) -> Message {
    w.say_of(session, Message::Confirm { offer }, socket, vec![]).expect("an answer")
}

/// The accepting side's, once that has confirmed.
fn finish(w: &mut World, session: u64, offer: u64, socket: SocketFacts) -> Message {
    w.say_of(session, Message::Finish { offer }, socket, vec![]).expect("an answer")
}

/// All that follows an offer, up to the channel or the first refusal: what the accepting side hears last.
fn meet(w: &mut World, (web, client): (u64, SocketFacts), (db, server): (u64, SocketFacts)) -> Message {
    let offer = match take(w, db, server) {
        Message::Bell { offer, .. } => offer,
        refused => return refused,
    };
    match confirm(w, web, offer, client) {
        Message::PeerIs { .. } => finish(w, db, offer, server),
        refused => refused,
    }
}

fn met(w: &mut World, web: (u64, SocketFacts), db: (u64, SocketFacts)) {
    let answer = meet(w, web, db);
    assert!(matches!(answer, Message::PeerIs { .. }), "{answer:?}");
}

fn take(w: &mut World, session: u64, socket: SocketFacts) -> Message {
    let with = vec![w.region(16384)];
    w.say_of(session, Message::Take { region: RegionReference::with_ring(16384) }, socket, with).expect("an answer")
}

/// The answer to [`take`] within one machine.
fn near_bell(offer: u64) -> Message {
    Message::Bell { offer, way: BellWay::Link, region: RegionReference::with_ring(16384) }
}

fn publish(w: &mut World, session: u64, socket: SocketFacts, addresses: &[&str]) -> Message {
    let addresses = AddressList(addresses.iter().map(|ip| ip.parse().unwrap()).collect());
    w.say_of(session, Message::Publish { addresses }, socket, vec![]).expect("an answer")
}

fn published(w: &mut World, session: u64, socket: SocketFacts, addresses: &[&str]) -> u64 {
    match publish(w, session, socket, addresses) {
        Message::Published { key, .. } => key,
        other => panic!("not published: {other:?}"),
    }
}

fn code(message: Message) -> Refusal {
    match message {
        Message::Refused { code, reason } => {
            assert!(!reason.is_empty());
            code
        }
        other => panic!("not refused: {other:?}"),
    }
}

fn listens(w: &World, text: &str) -> bool {
    w.listed.contains_key(&('l', Fingerprint::listener(Transport::Tcp, at(text), 1)))
}

fn runs_at(w: &World, text: &str) -> bool {
    w.listed.contains_key(&('a', Fingerprint::address(text.parse().unwrap(), 1)))
}

fn is_offered(w: &World) -> bool {
    let key = w.core.sockets.key_of(near(1));
    w.listed.contains_key(&('o', Fingerprint::connection(at(SERVER[0]), at(SERVER[1]), key)))
}

/// A client (user 1000, process 1) and a server (process 2).
fn world() -> (World, u64, u64) {
    let mut w = World::new();
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    (w, web, db)
}

#[test]
fn taken_offer_makes_channel_for_both_ends() {
    let (mut w, web, db) = world();
    let id = offered(&mut w, web, client());
    assert!(is_offered(&w));
    assert_eq!(take(&mut w, db, server()), near_bell(id));
    let answer = confirm(&mut w, web, id, client());
    let Message::PeerIs { region, program: accepting, user, ref name } = answer else { panic!("{answer:?}") };
    assert_eq!((region.ring_size, user, name.as_str()), (16384, User::Host(1000), "db"));
    assert!(is_offered(&w) && w.core.status().channels == 0);
    let answer = finish(&mut w, db, id, server());
    let Message::PeerIs { region, program: connecting, user, ref name } = answer else { panic!("{answer:?}") };
    assert_eq!((region.ring_size, user, name.as_str()), (8192, User::Host(1000), "web"));
    assert_ne!(accepting, connecting, "each program has a number");
    assert!(!is_offered(&w));
    let channel = id;
    let Message::Channels { page } = w.ask(web, Message::List { what: What::Channels, after: 0 }) else { panic!() };
    let row = &page.rows[0];
    assert_eq!((row.channel, row.kind, row.directions), (id, Kind::Socket, Directions::BOTH));
    assert_eq!((&*row.from_name, &*row.to_name, &*row.service), ("web", "db", "tcp-80"));
    assert_eq!(w.ask(db, Message::Inspect { channel }), Message::Regions { connecting: true, accepting: true });
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 2, "the regions for those who inspect, and no link");
    for session in [web, db] {
        assert_eq!(w.say(session, Message::Closed { channel }, vec![]), None);
    }
    assert_eq!((w.core.status().channels, w.open_descriptors()), (0, 0));
    // The same sockets can get a ring again.
    offered(&mut w, web, client());
    met(&mut w, (web, client()), (db, server()));
}

#[test]
fn ipv4_mapped_address_matches_ipv4_offer() {
    let (mut w, web, db) = world();
    offered(&mut w, web, client());
    let six = SocketFacts { local: at("[::ffff:10.0.0.1]:80"), remote: Some(at("[::ffff:10.0.0.2]:5000")), ..server() };
    met(&mut w, (web, client()), (db, six));
}

#[test]
fn only_the_other_end_gets_an_offer() {
    let (mut w, web, db) = world();
    offered(&mut w, web, client());
    for not in [
        socket("10.0.0.1:80", "10.0.0.2:5001"),
        socket("10.0.0.1:81", "10.0.0.2:5000"),
        socket("10.0.0.3:80", "10.0.0.2:5000"),
        // The same end, in another socket.
        SocketFacts { cookie: 9, ..client() },
    ] {
        assert_eq!(
            code(take(&mut w, db, SocketFacts { sent: 1 << 20, received: 1 << 20, ..not })),
            Refusal::NoSuchOffer
        );
    }
    assert!(is_offered(&w));
    // A socket that is connected to itself has the ends of its other end.
    let own = SocketFacts { sent: 1 << 20, received: 1 << 20, ..socket("10.0.0.1:7", "10.0.0.1:7") };
    offered(&mut w, web, own);
    assert_eq!(code(take(&mut w, web, own)), Refusal::SelfContradiction);
}

#[test]
fn only_a_connected_socket_is_offered_or_taken() {
    let (mut w, web, db) = world();
    for (state, remote) in
        [(SocketState::Listening, None), (SocketState::Other, Some(at(CLIENT[1]))), (SocketState::Established, None)]
    {
        let bad = SocketFacts { state, remote, ..client() };
        assert_eq!(code(offer(&mut w, web, bad)), Refusal::BadSocket);
        assert_eq!(code(take(&mut w, db, bad)), Refusal::BadSocket);
    }
    let with = vec![w.region(8192)];
    w.feed(CoreEvent::Message {
        session: SessionId(web),
        request: 5,
        message: Message::Offer { region: RegionReference::with_ring(8192) },
        descriptors: with,
        socket: Some(Err("a pipe".into())),
    });
    assert!(matches!(&w.sent[0].message, Message::Refused { code: Refusal::BadSocket, .. }));
}

#[test]
fn lying_descriptors_are_refused_and_closed() {
    let (mut w, web, db) = world();
    let region = RegionReference::with_ring(8192);
    let message = Message::Offer { region };
    for (with, expected) in [
        (vec![w.other()], Refusal::BadRegion),
        (vec![w.region(4096)], Refusal::BadRegion),
        (vec![], Refusal::Protocol),
        (vec![w.region(8192), w.other()], Refusal::Protocol),
    ] {
        assert_eq!(code(w.say_of(web, message.clone(), client(), with).unwrap()), expected);
    }
    let none = Message::Offer { region: RegionReference::with_ring(0) };
    let with = vec![w.region(0)];
    assert_eq!(code(w.say_of(web, none, client(), with).unwrap()), Refusal::BadRegion);
    let with = vec![w.other(), w.region(8192)];
    assert_eq!(w.refused(web, message, with), Refusal::Protocol, "no socket came");
    offered(&mut w, web, client());
    let with = vec![w.other()];
    let answer = w.say_of(db, Message::Take { region }, server(), with).unwrap();
    assert_eq!(code(answer), Refusal::BadRegion);
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 2, "those of the one offer: a region, the far end of its bell");
}

#[test]
fn one_socket_is_offered_once() {
    let (mut w, web, db) = world();
    let id = offered(&mut w, web, client());
    assert_eq!(code(offer(&mut w, web, client())), Refusal::SelfContradiction);
    assert_eq!(code(offer(&mut w, db, client())), Refusal::SelfContradiction);
    met(&mut w, (web, client()), (db, server()));
    for socket in [client(), server()] {
        assert_eq!(code(offer(&mut w, web, socket)), Refusal::SelfContradiction);
        assert_eq!(code(take(&mut w, web, socket)), Refusal::SelfContradiction);
    }
    assert_eq!(w.refused(web, Message::Cancel { offer: id }, vec![]), Refusal::NoSuchOffer, "it is a channel now");
    // When one side's process has gone, its socket may be another's.
    w.end(web);
    let again = w.join("web", 9);
    offered(&mut w, again, client());
}

#[test]
fn newer_socket_with_the_same_ends_replaces_the_stale_offer() {
    let (mut w, web, db) = world();
    let stale = offered(&mut w, web, client());
    let twin = SocketFacts { cookie: 9, ..client() };
    let offer = offered(&mut w, db, twin);
    assert_eq!(w.refused(web, Message::Cancel { offer: stale }, vec![]), Refusal::NoSuchOffer);
    assert_eq!(take(&mut w, web, server()), near_bell(offer));
}

#[test]
fn offer_ends_by_cancel_session_end_or_age() {
    let (mut w, web, db) = world();
    let id = offered(&mut w, web, client());
    assert_eq!(w.refused(db, Message::Cancel { offer: id }, vec![]), Refusal::NoSuchOffer);
    assert_eq!(w.ask(web, Message::Cancel { offer: id }), Message::Done {});
    assert!(!is_offered(&w) && w.open_descriptors() == 0 && !w.core.wants_ticks());

    offered(&mut w, web, client());
    w.end(web);
    assert!(!is_offered(&w) && w.open_descriptors() == 0);

    let web = w.join("web", 1);
    offered(&mut w, web, client());
    let mut ticks = 0;
    while w.core.wants_ticks() {
        assert!(is_offered(&w) && ticks < 1000);
        w.feed(CoreEvent::Tick);
        ticks += 1;
    }
    assert!(ticks > 10 && !is_offered(&w) && w.open_descriptors() == 0, "{ticks}");
    assert_eq!(code(take(&mut w, db, server())), Refusal::NoSuchOffer);
}

#[test]
fn offers_have_a_quota_and_a_bound() {
    let mut w = World::with_policy("administrators = [1000]\n[quota]\noffers = 1");
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    let id = offered(&mut w, web, client());
    assert_eq!(code(offer(&mut w, web, socket("10.0.0.2:5001", "10.0.0.1:80"))), Refusal::Quota);
    offered(&mut w, db, socket("10.0.0.2:5002", "10.0.0.1:80"));
    assert_eq!(w.ask(web, Message::Cancel { offer: id }), Message::Done {});
    offered(&mut w, web, client());

    let capacity = Capacity { sessions: 9, regions: 9, offers: 1, entries: 10 };
    let mut w = World::sized(Policy::for_user(1000), INSTANCE, capacity);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    offered(&mut w, web, client());
    assert_eq!(code(offer(&mut w, db, socket("10.0.0.2:5002", "10.0.0.1:80"))), Refusal::OutOfResources);
}

#[test]
fn channels_and_rings_of_sockets_count_against_both_sides() {
    let mut w =
        World::with_policy("administrators = [1000]\n[quota]\nchannels = 2\nring_bytes = 30000\nmax_ring = 16384");
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    offered(&mut w, web, client());
    met(&mut w, (web, client()), (db, server()));
    // 16384 of the server's 30000 are gone, and 8192 of the client's.
    let (other, its) = (socket("10.0.0.2:5001", "10.0.0.1:80"), socket("10.0.0.1:80", "10.0.0.2:5001"));
    offered(&mut w, web, other);
    assert_eq!(code(take(&mut w, db, SocketFacts { received: 100, ..its })), Refusal::Quota);
    // Both ends in one domain need two.
    let (mine, yours) = (socket("10.0.0.2:6", "10.0.0.1:80"), socket("10.0.0.1:80", "10.0.0.2:6"));
    offered(&mut w, web, mine);
    assert_eq!(code(take(&mut w, web, SocketFacts { received: 100, ..yours })), Refusal::Quota);
}

#[test]
fn socket_channel_cannot_be_bound_connected_or_reclaimed() {
    let (mut w, web, _) = world();
    let bind = Message::Bind { service: "s".into(), kind: Kind::Socket, backlog: 1 };
    assert_eq!(w.refused(web, bind, vec![]), Refusal::Protocol);
    let with = vec![w.region(8192)];
    let (kind, directions) = (Kind::Socket, Directions::BOTH);
    let message = Message::Connect {
        target: "db".into(),
        service: "s".into(),
        kind,
        directions,
        region: RegionReference::with_ring(8192),
    };
    assert_eq!(w.refused(web, message, with), Refusal::Protocol);
    let with = vec![w.region(8192)];
    let message = Message::Reclaim {
        channel: INSTANCE - 1,
        side: Side::Connecting,
        peer: "db".into(),
        service: "tcp-80".into(),
        kind,
        directions,
        region: RegionReference::with_ring(8192),
    };
    assert_eq!(w.refused(web, message, with), Refusal::Protocol);
}

#[test]
fn directory_is_given_only_to_joined_sessions() {
    let (mut w, web, _) = world();
    assert_eq!(w.refused(web, Message::Directory {}, vec![]), Refusal::OutOfResources);
    let directory = w.other();
    let actions = w.core.set_directory(directory);
    w.perform(actions);
    assert_eq!(
        w.ask(web, Message::Directory {}),
        Message::DirectoryIs { base: 0, size: partywall_protocol::directory::SIZE }
    );
    let stranger = w.open(1000, 9);
    assert_eq!(w.refused(stranger, Message::Directory {}, vec![]), Refusal::Protocol);
}
