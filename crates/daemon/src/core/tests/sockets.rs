//! Who may publish, offer and take what, and whose connection is whose.

use std::net::SocketAddr;

use partywall_shm::directory::Transport;
use partywall_shm::wire::{Addresses, Side, Text, What};

use super::*;

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A connected socket in namespace 1, which is trusted; its cookie is made of its ends.
fn socket(local: &str, remote: &str) -> SocketFacts {
    let (local, remote) = (at(local), at(remote));
    SocketFacts {
        transport: Transport::Tcp,
        local,
        remote: Some(remote),
        state: SocketState::Connected,
        only_v6: false,
        cookie: u64::from(local.port()) << 16 | u64::from(remote.port()),
        netns: 1,
        trusted: true,
        acknowledged: 100,
        received: 50,
        sent: 100,
    }
}

fn listening(local: &str) -> SocketFacts {
    let base = socket(local, "0.0.0.0:0");
    SocketFacts { remote: None, state: SocketState::Listening, ..base }
}

const CLIENT: [&str; 2] = ["10.0.0.2:5000", "10.0.0.1:80"];
const SERVER: [&str; 2] = ["10.0.0.1:80", "10.0.0.2:5000"];

fn client() -> SocketFacts {
    socket(CLIENT[0], CLIENT[1])
}

/// The other end of [`client`].
fn server() -> SocketFacts {
    SocketFacts { acknowledged: 50, received: 100, sent: 50, ..socket(SERVER[0], SERVER[1]) }
}

fn offer(w: &mut World, session: u64, socket: SocketFacts) -> Message {
    let with = vec![w.region(8192), w.stream_link()];
    w.say_of(session, Message::Offer { ring_offset: 4096, ring_size: 8192 }, socket, with).expect("an answer")
}

fn offered(w: &mut World, session: u64, socket: SocketFacts) -> u64 {
    match offer(w, session, socket) {
        Message::Offered { offer } => offer,
        other => panic!("not offered: {other:?}"),
    }
}

fn take(w: &mut World, session: u64, socket: SocketFacts) -> Message {
    let with = vec![w.region(16384)];
    w.say_of(session, Message::Take { ring_offset: 4096, ring_size: 16384 }, socket, with).expect("an answer")
}

fn publish(w: &mut World, session: u64, socket: SocketFacts, addresses: &[&str]) -> Message {
    let addresses = Addresses(addresses.iter().map(|ip| ip.parse().unwrap()).collect());
    w.say_of(session, Message::Publish { addresses }, socket, vec![]).expect("an answer")
}

fn published(w: &mut World, session: u64, socket: SocketFacts, addresses: &[&str]) -> u64 {
    match publish(w, session, socket, addresses) {
        Message::Published { key } => key,
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
    w.listed.contains_key(&('o', Fingerprint::offer(Transport::Tcp, at(SERVER[0]), at(SERVER[1]), 0)))
}

/// A client (user 1000, process 1) and a server (process 2).
fn world() -> (World, u64, u64) {
    let mut w = World::new();
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    (w, web, db)
}

#[test]
fn a_listener_is_listed_where_the_kernel_says_and_a_wildcard_where_the_client_says() {
    let (mut w, web, _) = world();
    let here = ["10.0.0.1", "fd00::1"];
    for (local, only_v6, yes, no) in [
        ("10.0.0.1:80", false, &["10.0.0.1:80"][..], &["127.0.0.1:80", "10.0.0.1:81", "[fd00::1]:80"][..]),
        ("127.0.0.1:80", false, &["127.0.0.1:80"], &["10.0.0.1:80", "[::1]:80"]),
        ("0.0.0.0:80", false, &["10.0.0.1:80", "127.0.0.1:80"], &["[fd00::1]:80", "[::1]:80"]),
        ("[::]:80", false, &["10.0.0.1:80", "127.0.0.1:80", "[fd00::1]:80", "[::1]:80"], &["10.0.0.9:80"]),
        ("[::]:80", true, &["[fd00::1]:80", "[::1]:80"], &["10.0.0.1:80", "127.0.0.1:80"]),
        ("192.0.2.1:80", false, &["192.0.2.1:80"], &["10.0.0.1:80"]),
    ] {
        let key = published(&mut w, web, SocketFacts { only_v6, ..listening(local) }, &here);
        for there in yes {
            assert!(listens(&w, there), "{local} at {there}");
        }
        for there in no {
            assert!(!listens(&w, there), "{local} not at {there}");
        }
        assert!(runs_at(&w, "10.0.0.1") && runs_at(&w, "fd00::1") && runs_at(&w, "127.0.0.1"));
        assert_eq!(w.ask(web, Message::Withdraw { key }), Message::Done {});
        assert!(w.listed.is_empty(), "{local}: {:?}", w.listed);
    }
}

#[test]
fn a_socket_that_does_not_listen_says_only_where_it_runs() {
    let (mut w, web, _) = world();
    let quiet = SocketFacts { state: SocketState::Other, remote: None, ..socket("0.0.0.0:0", "0.0.0.0:0") };
    published(&mut w, web, quiet, &["10.0.0.2"]);
    assert!(runs_at(&w, "10.0.0.2") && w.listed.keys().all(|(table, _)| *table == 'a'));
}

#[test]
fn what_several_publish_stays_until_the_last_has_gone() {
    let (mut w, web, db) = world();
    published(&mut w, web, listening("10.0.0.1:80"), &[]);
    let key = published(&mut w, db, listening("10.0.0.1:80"), &[]);
    assert_eq!(w.refused(web, Message::Withdraw { key }, vec![]), Refusal::NoSuchService, "another session's");
    w.end(web);
    assert!(listens(&w, "10.0.0.1:80"));
    w.end(db);
    assert!(w.listed.is_empty());
}

#[test]
fn publications_have_a_quota_and_a_bound() {
    let policy = "administrators = [1000]\n[quota]\nlisteners = 10";
    let mut w = World::with_policy(policy);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    // One listener and three addresses each.
    let first = published(&mut w, web, listening("10.0.0.1:80"), &[]);
    published(&mut w, web, listening("10.0.0.1:81"), &[]);
    assert_eq!(code(publish(&mut w, web, listening("10.0.0.1:82"), &[])), Refusal::Quota);
    published(&mut w, db, listening("10.0.0.1:82"), &[]);
    assert_eq!(w.ask(web, Message::Withdraw { key: first }), Message::Done {});
    published(&mut w, web, listening("10.0.0.1:82"), &[]);

    let capacity = Capacity { sessions: 9, regions: 9, offers: 9, entries: 10 };
    let mut w = World::sized(Policy::for_user(1000), INSTANCE, capacity);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    published(&mut w, web, listening("10.0.0.1:80"), &[]);
    published(&mut w, db, listening("10.0.0.1:80"), &[]);
    assert_eq!(code(publish(&mut w, db, listening("10.0.0.1:80"), &[])), Refusal::OutOfResources);
}

#[test]
fn the_other_end_of_an_offer_gets_it_and_both_hold_a_channel() {
    let (mut w, web, db) = world();
    let id = offered(&mut w, web, client());
    assert!(is_offered(&w));
    let answer = take(&mut w, db, server());
    let Message::Taken { channel, ring_size, pid, uid, ref name, .. } = answer else { panic!("{answer:?}") };
    assert_eq!((channel, ring_size, pid, uid, name.as_str()), (id, 8192, 1, 1000, "web"));
    assert!(!is_offered(&w));
    let Message::Channels { page } = w.ask(web, Message::List { what: What::Channels, after: 0 }) else { panic!() };
    let row = &page.rows[0];
    assert_eq!((row.channel, row.kind, row.directions), (id, Kind::Socket, Directions::BOTH));
    assert_eq!((&*row.from_name, &*row.to_name, &*row.service), ("web", "db", "tcp-80"));
    assert_eq!(w.ask(db, Message::Inspect { channel }), Message::Regions { count: 2 });
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 2, "the regions for those who inspect, and no link");
    for session in [web, db] {
        assert_eq!(w.say(session, Message::Closed { channel }, vec![]), None);
    }
    assert_eq!((w.core.status().channels, w.open_descriptors()), (0, 0));
    // The same sockets can come up again.
    offered(&mut w, web, client());
    assert!(matches!(take(&mut w, db, server()), Message::Taken { .. }));
}

#[test]
fn the_same_connection_in_other_spellings_is_the_same() {
    let (mut w, web, db) = world();
    offered(&mut w, web, client());
    let six = SocketFacts { local: at("[::ffff:10.0.0.1]:80"), remote: Some(at("[::ffff:10.0.0.2]:5000")), ..server() };
    assert!(matches!(take(&mut w, db, six), Message::Taken { .. }));
}

#[test]
fn only_the_other_end_gets_an_offer() {
    let (mut w, web, db) = world();
    offered(&mut w, web, client());
    for not in [
        socket("10.0.0.1:80", "10.0.0.2:5001"),
        socket("10.0.0.1:81", "10.0.0.2:5000"),
        socket("10.0.0.3:80", "10.0.0.2:5000"),
        // The same end again, in another socket.
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
        [(SocketState::Listening, None), (SocketState::Other, Some(at(CLIENT[1]))), (SocketState::Connected, None)]
    {
        let bad = SocketFacts { state, remote, ..client() };
        assert_eq!(code(offer(&mut w, web, bad)), Refusal::BadSocket);
        assert_eq!(code(take(&mut w, db, bad)), Refusal::BadSocket);
    }
    let with = vec![w.region(8192), w.stream_link()];
    w.feed(Event::Message {
        session: SessionId(web),
        request: 5,
        message: Message::Offer { ring_offset: 4096, ring_size: 8192 },
        descriptors: with,
        socket: Some(Err("a pipe".into())),
    });
    assert!(matches!(&w.sent[0].message, Message::Refused { code: Refusal::BadSocket, .. }));
}

#[test]
fn lying_descriptors_are_refused_and_closed() {
    let (mut w, web, db) = world();
    let (ring_offset, ring_size) = (4096, 8192);
    let message = Message::Offer { ring_offset, ring_size };
    for (with, expected) in [
        (vec![w.other(), w.stream_link()], Refusal::BadRegion),
        (vec![w.region(4096), w.stream_link()], Refusal::BadRegion),
        (vec![w.region(8192), w.link()], Refusal::BadLink),
        (vec![w.region(8192), w.other()], Refusal::BadLink),
        (vec![w.region(8192)], Refusal::Protocol),
        (vec![w.region(8192), w.stream_link(), w.other()], Refusal::Protocol),
    ] {
        assert_eq!(code(w.say_of(web, message.clone(), client(), with).unwrap()), expected);
    }
    let none = Message::Offer { ring_offset, ring_size: 0 };
    let with = vec![w.region(0), w.stream_link()];
    assert_eq!(code(w.say_of(web, none, client(), with).unwrap()), Refusal::BadRegion);
    let with = vec![w.other(), w.region(8192), w.stream_link()];
    assert_eq!(w.refused(web, message, with), Refusal::Protocol, "no socket came");
    offered(&mut w, web, client());
    let with = vec![w.other()];
    let answer = w.say_of(db, Message::Take { ring_offset, ring_size }, server(), with).unwrap();
    assert_eq!(code(answer), Refusal::BadRegion);
    assert_eq!(w.open_descriptors(), 2, "those of the one offer");
}

#[test]
fn one_socket_is_offered_once() {
    let (mut w, web, db) = world();
    let id = offered(&mut w, web, client());
    assert_eq!(code(offer(&mut w, web, client())), Refusal::SelfContradiction);
    assert_eq!(code(offer(&mut w, db, client())), Refusal::SelfContradiction);
    take(&mut w, db, server());
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
fn two_sockets_with_the_same_ends_are_refused_both() {
    let (mut w, web, db) = world();
    offered(&mut w, web, client());
    let twin = SocketFacts { cookie: 9, ..client() };
    assert_eq!(code(offer(&mut w, db, twin)), Refusal::Ambiguous);
    assert!(!is_offered(&w));
    assert_eq!(w.open_descriptors(), 0, "the first offer's link has hung up");
    assert_eq!(code(take(&mut w, db, server())), Refusal::NoSuchOffer);
}

#[test]
fn an_offer_is_taken_back_by_who_made_it_and_ends_with_its_session_or_with_age() {
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
        w.feed(Event::Tick);
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
    assert!(matches!(take(&mut w, db, server()), Message::Taken { .. }));
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
fn namespaces_meet_only_if_their_makers_run_the_broker_and_their_addresses_are_clear() {
    let elsewhere = |socket: SocketFacts| SocketFacts { netns: 2, ..socket };
    let foreign = |socket: SocketFacts| SocketFacts { trusted: false, ..socket };
    for (offered_by, taken_by, expected) in [
        (client(), server(), None),
        (foreign(client()), foreign(server()), None),
        (client(), elsewhere(server()), None),
        (foreign(client()), elsewhere(server()), Some(Refusal::NoSuchOffer)),
        (client(), foreign(elsewhere(server())), Some(Refusal::NoSuchOffer)),
        (foreign(client()), foreign(elsewhere(server())), Some(Refusal::NoSuchOffer)),
    ] {
        let (mut w, web, db) = world();
        offered(&mut w, web, offered_by);
        let answer = take(&mut w, db, taken_by);
        match expected {
            None => assert!(matches!(answer, Message::Taken { .. }), "{answer:?}"),
            Some(expected) => assert_eq!(code(answer), expected),
        }
    }
}

#[test]
fn a_third_namespace_with_one_of_the_addresses_makes_a_connection_between_two_ambiguous() {
    let elsewhere = SocketFacts { netns: 2, ..server() };
    for (address, netns, trusted, expected) in [
        ("10.0.0.1", 2, true, None),
        ("10.0.0.2", 1, true, None),
        ("10.0.0.9", 3, true, None),
        ("10.0.0.1", 3, true, Some(Refusal::Ambiguous)),
        ("10.0.0.2", 3, true, Some(Refusal::Ambiguous)),
        ("10.0.0.2", 2, true, Some(Refusal::Ambiguous)),
        // Whoever can make namespaces of his own can have any address there, and spoils nothing by it.
        ("10.0.0.1", 3, false, None),
    ] {
        let (mut w, web, db) = world();
        let third = w.join("third", 3);
        published(&mut w, third, SocketFacts { netns, trusted, ..listening("0.0.0.0:1") }, &[address]);
        offered(&mut w, web, client());
        let answer = take(&mut w, db, elsewhere);
        match expected {
            None => assert!(matches!(answer, Message::Taken { .. }), "{address} in {netns}: {answer:?}"),
            Some(expected) => assert_eq!(code(answer), expected, "{address} in {netns}"),
        }
        // Within one namespace it makes no difference.
        let (mut w, web, db) = world();
        let third = w.join("third", 3);
        published(&mut w, third, SocketFacts { netns, trusted, ..listening("0.0.0.0:1") }, &[address]);
        offered(&mut w, web, client());
        assert!(matches!(take(&mut w, db, server()), Message::Taken { .. }));
    }
}

#[test]
fn two_namespaces_that_offer_the_same_ends_are_told_apart_or_refused() {
    let there = SocketFacts { netns: 2, cookie: 9, ..client() };
    let (mut w, web, db) = world();
    let here = offered(&mut w, web, client());
    let other = offered(&mut w, web, there);
    // In each of the two, its own; in a third, nobody can tell.
    let third = SocketFacts { netns: 3, cookie: 10, ..server() };
    assert_eq!(code(take(&mut w, db, third)), Refusal::Ambiguous);
    let taken = |answer| if let Message::Taken { channel, .. } = answer { channel } else { panic!("{answer:?}") };
    assert_eq!(taken(take(&mut w, db, server())), here);
    assert_eq!(taken(take(&mut w, db, SocketFacts { netns: 2, cookie: 11, ..server() })), other);
}

#[test]
fn loopback_does_not_reach_into_other_namespaces() {
    let (mut w, web, db) = world();
    let (mine, yours) = (socket("127.0.0.1:5000", "127.0.0.1:80"), socket("127.0.0.1:80", "127.0.0.1:5000"));
    offered(&mut w, web, mine);
    let elsewhere = SocketFacts { netns: 2, received: 100, ..yours };
    assert_eq!(code(take(&mut w, db, elsewhere)), Refusal::NoSuchOffer);
    assert!(matches!(take(&mut w, db, SocketFacts { received: 100, ..yours }), Message::Taken { .. }));
}

#[test]
fn ends_whose_numbers_contradict_each_other_are_not_of_one_connection() {
    for wrong in [SocketFacts { received: 99, ..server() }, SocketFacts { sent: 49, ..server() }] {
        let (mut w, web, db) = world();
        offered(&mut w, web, client());
        assert_eq!(code(take(&mut w, db, wrong)), Refusal::Ambiguous);
        assert!(!is_offered(&w));
    }
    // What is under way has gone out, and has not come yet.
    let (mut w, web, db) = world();
    offered(&mut w, web, SocketFacts { sent: 500, ..client() });
    assert!(matches!(take(&mut w, db, SocketFacts { sent: 900, received: 300, ..server() }), Message::Taken { .. }));
}

#[test]
fn the_policy_says_who_may_have_a_ring_with_whom() {
    let policy = "
[[join]]
domain = '*'
users = [1, 2]
[[connect]]
from = 'web'
to = 'db'
service = 'tcp-80'
";
    let mut w = World::with_policy(policy);
    let (web, db) = (w.join_as(1, "web", 1), w.join_as(2, "db", 2));
    offered(&mut w, web, client());
    assert!(matches!(take(&mut w, db, server()), Message::Taken { .. }));
    let (other, its) = (socket("10.0.0.2:5001", "10.0.0.1:81"), socket("10.0.0.1:81", "10.0.0.2:5001"));
    offered(&mut w, web, SocketFacts { acknowledged: 0, received: 0, ..other });
    assert_eq!(code(take(&mut w, db, its)), Refusal::Denied);
    // Between two domains of one user there is no wall.
    let again = w.join_as(1, "shop", 3);
    let (near, its) = (socket("10.0.0.2:5003", "10.0.0.1:99"), socket("10.0.0.1:99", "10.0.0.2:5003"));
    offered(&mut w, web, SocketFacts { acknowledged: 0, received: 0, ..near });
    assert!(matches!(take(&mut w, again, its), Message::Taken { .. }));
    // The other way round nothing is allowed at all.
    let (back, its) = (socket("10.0.0.1:5002", "10.0.0.2:80"), socket("10.0.0.2:80", "10.0.0.1:5002"));
    offered(&mut w, db, SocketFacts { acknowledged: 0, received: 0, ..back });
    assert_eq!(code(take(&mut w, web, its)), Refusal::Denied);
}

#[test]
fn a_channel_of_a_socket_is_made_by_take_alone() {
    let (mut w, web, _) = world();
    let bind = Message::Bind { service: "s".into(), kind: Kind::Socket, backlog: 1 };
    assert_eq!(w.refused(web, bind, vec![]), Refusal::Protocol);
    let with = w.three(8192);
    let (kind, directions) = (Kind::Socket, Directions::BOTH);
    let message = Message::Connect {
        target: "db".into(),
        service: "s".into(),
        kind,
        directions,
        ring_offset: 4096,
        ring_size: 8192,
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
        ring_offset: 4096,
        ring_size: 8192,
    };
    assert_eq!(w.refused(web, message, with), Refusal::Protocol);
}

#[test]
fn the_directory_is_handed_to_whoever_has_joined() {
    let (mut w, web, _) = world();
    assert_eq!(w.refused(web, Message::Directory {}, vec![]), Refusal::OutOfResources);
    let directory = w.other();
    let actions = w.core.set_directory(directory);
    w.perform(actions);
    assert_eq!(w.ask(web, Message::Directory {}), Message::DirectoryIs { size: partywall_shm::directory::SIZE });
    let stranger = w.open(1000, 9);
    assert_eq!(w.refused(stranger, Message::Directory {}, vec![]), Refusal::Protocol);
}

fn set(clauses: &str) -> Message {
    Message::SetPolicy { reset: false, clauses: Text(clauses.into()), ring_size: 0, spin_us: u32::MAX }
}

#[test]
fn an_administrator_sets_the_policy_and_the_file_comes_back() {
    let policy = "
administrators = [1000]
[[join]]
domain = '*'
users = [1]
[sockets]
upgrade = 'after=3'
ring_size = 65536
spin_us = 7
rules = ['never@port=22']
";
    let mut w = World::with_policy(policy);
    let (root, user) = (w.join("root", 1), w.join_as(1, "user", 2));
    let is = |live, clauses: &str, ring_size, spin_us| Message::PolicyIs {
        live,
        clauses: Text(clauses.into()),
        ring_size,
        spin_us,
    };
    let from_file = is(false, "after=3 never@port=22", 65536, 7);
    assert_eq!(w.ask(user, Message::GetPolicy {}), from_file);
    assert_eq!(w.refused(user, set("never"), vec![]), Refusal::Denied);
    assert_eq!(w.ask(root, set("now never@program=a* ")), is(true, "after=3 now never@program=a*", 65536, 7));
    let sizes = Message::SetPolicy { reset: false, clauses: Text("never".into()), ring_size: 4096, spin_us: 0 };
    assert_eq!(w.ask(root, sizes), is(true, "after=3 never", 4096, 0));
    let (terms, clauses) = w.terms.clone().unwrap();
    assert_eq!((terms.ring_size, terms.spin_us, clauses), (4096, 0, vec![Clause::parse("never").unwrap()]));
    for bad in ["soon", "never@port=0", "now@program=a/b"] {
        assert_eq!(w.refused(root, set(bad), vec![]), Refusal::Protocol, "{bad}");
    }
    let odd = Message::SetPolicy { reset: false, clauses: Text(String::new()), ring_size: 5000, spin_us: 0 };
    assert_eq!(w.refused(root, odd, vec![]), Refusal::Protocol);
    assert_eq!(w.ask(user, Message::GetPolicy {}), is(true, "after=3 never", 4096, 0), "a refusal changes nothing");
    let reset = Message::SetPolicy { reset: true, clauses: Text(String::new()), ring_size: 0, spin_us: 0 };
    assert_eq!(w.ask(root, reset), from_file);
    // A policy file that is loaded anew is what holds.
    w.ask(root, set("never"));
    let actions = w.core.set_policy(Arc::new(Policy::parse(policy).unwrap()));
    w.perform(actions);
    assert_eq!(w.ask(user, Message::GetPolicy {}), from_file);
    assert_eq!(w.terms.clone().unwrap().0.spin_us, 7);
}

/// A connection that some broker before this one knew.
const OLD: u64 = INSTANCE - 7;

fn reclaim(w: &mut World, session: u64, side: Side, socket: SocketFacts) -> Message {
    let message = Message::ReclaimSocket { channel: OLD, side, ring_offset: 4096, ring_size: 8192 };
    let with = vec![w.region(8192)];
    w.say_of(session, message, socket, with).expect("an answer")
}

fn row(w: &mut World, session: u64) -> Option<(u32, u32, String)> {
    match w.ask(session, Message::List { what: What::Channels, after: 0 }) {
        Message::Channels { page } => page.rows.first().map(|row| (row.from, row.to, row.service.clone())),
        other => panic!("no list: {other:?}"),
    }
}

#[test]
fn the_ends_of_an_old_connection_come_back_in_either_order_and_go() {
    let sides = [(Side::Connecting, client()), (Side::Accepting, server())];
    for order in [[0, 1], [1, 0]] {
        let (mut w, web, db) = world();
        let sessions = [web, db];
        assert_eq!(reclaim(&mut w, sessions[order[0]], sides[order[0]].0, sides[order[0]].1), Message::Done {});
        let (from, to, service) = row(&mut w, web).unwrap();
        assert_eq!(((from == 0, to == 0), service.as_str()), ((order[0] == 1, order[0] == 0), "tcp-80"));
        assert_eq!(reclaim(&mut w, sessions[order[1]], sides[order[1]].0, sides[order[1]].1), Message::Done {});
        assert!(matches!(row(&mut w, db), Some((1.., 1.., _))));
        assert_eq!(w.ask(web, Message::Inspect { channel: OLD }), Message::Regions { count: 2 });
        w.sent.clear();
        // A socket that has a ring is not offered another.
        assert_eq!(code(offer(&mut w, web, client())), Refusal::SelfContradiction);
        w.say(web, Message::Closed { channel: OLD }, vec![]);
        w.end(db);
        assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
    }
}

#[test]
fn one_end_that_goes_before_the_other_comes_leaves_nothing() {
    let (mut w, web, db) = world();
    assert_eq!(reclaim(&mut w, web, Side::Connecting, client()), Message::Done {});
    w.end(web);
    assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
    assert_eq!(reclaim(&mut w, db, Side::Accepting, server()), Message::Done {});
    assert_eq!(w.core.status().channels, 1);
}

#[test]
fn nobody_comes_back_as_an_end_that_its_socket_is_not() {
    let (mut w, web, db) = world();
    assert_eq!(reclaim(&mut w, web, Side::Connecting, client()), Message::Done {});
    let elsewhere = |facts: SocketFacts| SocketFacts { netns: 2, cookie: 99, ..facts };
    for (side, socket) in [
        // The side that is there; ends that are not the other's; more received than was sent; a namespace that anybody made.
        (Side::Connecting, SocketFacts { cookie: 99, ..client() }),
        (Side::Accepting, socket(SERVER[0], "10.0.0.2:5001")),
        (Side::Accepting, socket("10.0.0.3:80", SERVER[1])),
        (Side::Accepting, SocketFacts { received: 99, ..server() }),
        (Side::Accepting, SocketFacts { sent: 49, ..server() }),
        (Side::Accepting, SocketFacts { trusted: false, ..elsewhere(server()) }),
        // The very socket.
        (Side::Accepting, client()),
    ] {
        assert_eq!(code(reclaim(&mut w, db, side, socket)), Refusal::SelfContradiction, "{side} {socket:?}");
    }
    let unconnected = SocketFacts { state: SocketState::Other, ..server() };
    assert_eq!(code(reclaim(&mut w, db, Side::Accepting, unconnected)), Refusal::BadSocket);
    assert_eq!(reclaim(&mut w, db, Side::Accepting, elsewhere(server())), Message::Done {});
}

#[test]
fn a_number_that_no_channel_can_have_is_not_reclaimed() {
    let (mut w, web, db) = world();
    let with = vec![w.region(8192)];
    let future =
        Message::ReclaimSocket { channel: INSTANCE + 9, side: Side::Accepting, ring_offset: 4096, ring_size: 8192 };
    assert_eq!(code(w.say_of(db, future, server(), with).unwrap()), Refusal::NoSuchChannel);
    let offer = offered(&mut w, web, client());
    let with = vec![w.region(8192)];
    let of_offer = Message::ReclaimSocket { channel: offer, side: Side::Accepting, ring_offset: 4096, ring_size: 8192 };
    assert_eq!(code(w.say_of(db, of_offer, server(), with).unwrap()), Refusal::NoSuchChannel);
    let with = vec![w.region(8192)];
    let of_offer = Message::Reclaim {
        channel: offer,
        side: Side::Accepting,
        peer: "web".into(),
        service: "s".into(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        ring_offset: 4096,
        ring_size: 8192,
    };
    assert_eq!(w.refused(db, of_offer, with), Refusal::NoSuchChannel);
    assert!(matches!(take(&mut w, db, server()), Message::Taken { .. }));
}

#[test]
fn what_an_end_carries_is_shown_to_its_user_and_administrators_alone() {
    let policy = "
administrators = [0]
[[join]]
domain = '*'
users = ['*']
";
    let mut w = World::with_policy(policy);
    let (web, db, root) = (w.join_as(1000, "web", 1), w.join_as(1001, "db", 2), w.join_as(0, "root", 3));
    assert_eq!(reclaim(&mut w, web, Side::Connecting, client()), Message::Done {});
    assert_eq!(reclaim(&mut w, db, Side::Accepting, server()), Message::Done {});
    for (session, count) in [(web, 1), (db, 1), (root, 2)] {
        assert_eq!(w.ask(session, Message::Inspect { channel: OLD }), Message::Regions { count });
    }
}
