//! Who may publish, offer and take what, and whose connection is whose.

use std::net::SocketAddr;

use partywall_protocol::directory::{OfferKey, Transport};
use partywall_protocol::wire::{AddressList, RegionReference, Side, Text, What};

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
        state: SocketState::Established,
        only_v6: false,
        cookie: u64::from(local.port()) << 16 | u64::from(remote.port()),
        netns: 1,
        trusted: true,
        acknowledged: 100,
        received: 50,
        sent: 100,
        identity: Identity::default(),
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
    let with = vec![w.region(8192)];
    w.say_of(session, Message::Offer { region: RegionReference::with_ring(8192) }, socket, with).expect("an answer")
}

fn offered(w: &mut World, session: u64, socket: SocketFacts) -> u64 {
    match offer(w, session, socket) {
        Message::Bell { offer } => offer,
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
        Message::Bell { offer } => offer,
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
    let key = w.core.sockets.key_of(1);
    w.listed.contains_key(&('o', Fingerprint::connection(at(SERVER[0]), at(SERVER[1]), key)))
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
    assert_eq!(take(&mut w, db, server()), Message::Bell { offer: id });
    assert_eq!(w.rung, [1], "the offering side is rung");
    let answer = confirm(&mut w, web, id, client());
    let Message::PeerIs { region, pid, user, ref name, .. } = answer else { panic!("{answer:?}") };
    assert_eq!((region.ring_size, pid, user, name.as_str()), (16384, 2, User::Host(1000), "db"));
    assert_eq!(w.rung, [1, 0], "and then the accepting side");
    assert!(is_offered(&w) && w.core.status().channels == 0);
    let answer = finish(&mut w, db, id, server());
    let Message::PeerIs { region, pid, user, ref name, .. } = answer else { panic!("{answer:?}") };
    assert_eq!((region.ring_size, pid, user, name.as_str()), (8192, 1, User::Host(1000), "web"));
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
    // The same sockets can come up again.
    offered(&mut w, web, client());
    met(&mut w, (web, client()), (db, server()));
}

#[test]
fn the_same_connection_in_other_spellings_is_the_same() {
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
    assert_eq!(
        w.open_descriptors(),
        3,
        "those of the one offer: a region, the far end of its bell, a copy of the near one"
    );
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
    assert_eq!(take(&mut w, web, server()), Message::Bell { offer });
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

const NUMBERS: Numbers = Numbers { sent_from: 1000, received_from: 70 };

/// As the broker sees a socket whose sequence numbers it may read: the connecting side's counter begins one earlier.
fn numbered(socket: SocketFacts, numbers: Numbers) -> SocketFacts {
    SocketFacts { identity: Identity { numbers: Some(numbers), ..socket.identity }, ..socket }
}

fn crossed(numbers: Numbers) -> Numbers {
    Numbers { sent_from: numbers.received_from, received_from: numbers.sent_from + 1 }
}

#[test]
fn between_namespaces_sequence_numbers_decide_and_nothing_else() {
    let elsewhere = |socket: SocketFacts| SocketFacts { netns: 2, trusted: false, ..socket };
    let (mine, yours) = (numbered(client(), NUMBERS), numbered(elsewhere(server()), crossed(NUMBERS)));
    let (mut w, web, db) = world();
    offered(&mut w, web, mine);
    met(&mut w, (web, mine), (db, yours));
    for wrong in [
        // A container that gave itself the address, with its own connection.
        numbered(yours, Numbers { sent_from: 70, received_from: 1000 }),
        numbered(yours, Numbers { sent_from: 71, received_from: 1001 }),
        numbered(yours, Numbers { sent_from: 0, received_from: 0 }),
        // The broker may not read one of them.
        elsewhere(server()),
    ] {
        let (mut w, web, db) = world();
        offered(&mut w, web, mine);
        let refused = code(take(&mut w, db, wrong));
        assert!(matches!(refused, Refusal::NoSuchOffer | Refusal::Ambiguous), "{wrong:?}: {refused}");
    }
    let (mut w, web, db) = world();
    offered(&mut w, web, client());
    assert_eq!(code(take(&mut w, db, elsewhere(server()))), Refusal::Ambiguous, "the numbers of neither");
}

#[test]
fn sequence_numbers_that_do_not_cross_refuse_within_a_namespace_too() {
    let (mut w, web, db) = world();
    offered(&mut w, web, numbered(client(), NUMBERS));
    let behind_a_translator = numbered(server(), Numbers { sent_from: 5, received_from: 9 });
    assert_eq!(code(take(&mut w, db, behind_a_translator)), Refusal::NoSuchOffer);
    met(&mut w, (web, numbered(client(), NUMBERS)), (db, numbered(server(), crossed(NUMBERS))));
}

#[test]
fn offers_of_two_namespaces_with_the_same_ends_are_told_apart_by_their_numbers() {
    let other = Numbers { sent_from: 3, received_from: 4 };
    let there = numbered(SocketFacts { netns: 2, cookie: 9, ..client() }, other);
    let (mut w, web, db) = world();
    let here = offered(&mut w, web, numbered(client(), NUMBERS));
    let forged = offered(&mut w, web, there);
    let third = |numbers, cookie| numbered(SocketFacts { netns: 3, cookie, ..server() }, numbers);
    assert_eq!(take(&mut w, db, third(crossed(NUMBERS), 10)), Message::Bell { offer: here });
    assert_eq!(take(&mut w, db, third(crossed(other), 11)), Message::Bell { offer: forged });
}

#[test]
fn socket_that_was_reset_since_its_offer_is_not_confirmed() {
    // The attacker's socket has gone; what has its ends now is another's.
    let next_owner = SocketFacts { cookie: 77, ..client() };
    let reset = SocketFacts { state: SocketState::Other, remote: None, ..client() };
    let half_closed = SocketFacts { state: SocketState::HalfClosed, ..client() };
    // The same socket, connected again (`AF_UNSPEC` between).
    let reconnected = SocketFacts { remote: Some(at("10.0.0.1:81")), ..client() };
    let numbers = Numbers { sent_from: 1, received_from: 2 };
    for (offered_as, now) in [
        (client(), next_owner),
        (client(), reset),
        (client(), half_closed),
        (client(), reconnected),
        (numbered(client(), NUMBERS), numbered(client(), numbers)),
    ] {
        let (mut w, web, db) = world();
        let id = offered(&mut w, web, offered_as);
        let taker = match offered_as.identity.numbers {
            Some(numbers) => numbered(server(), crossed(numbers)),
            None => server(),
        };
        assert_eq!(take(&mut w, db, taker), Message::Bell { offer: id });
        assert_eq!(code(confirm(&mut w, web, id, now)), Refusal::BadSocket, "{now:?}");
        assert_eq!(code(finish(&mut w, db, id, taker)), Refusal::NoSuchOffer);
        w.sent.clear();
        assert_eq!(w.open_descriptors(), 0, "the bells have hung up");
    }
}

#[test]
fn accepting_socket_that_is_another_by_now_does_not_finish() {
    for now in [
        SocketFacts { cookie: 77, ..server() },
        SocketFacts { state: SocketState::HalfClosed, ..server() },
        SocketFacts { remote: Some(at("10.0.0.2:5001")), ..server() },
    ] {
        let (mut w, web, db) = world();
        let id = offered(&mut w, web, client());
        take(&mut w, db, server());
        assert!(matches!(confirm(&mut w, web, id, client()), Message::PeerIs { .. }));
        assert_eq!(code(finish(&mut w, db, id, now)), Refusal::BadSocket, "{now:?}");
        assert_eq!(w.core.status().channels, 0);
        w.sent.clear();
        assert_eq!(w.open_descriptors(), 0);
    }
}

#[test]
fn handshake_out_of_order_or_by_others_is_refused() {
    let (mut w, web, db) = world();
    let id = offered(&mut w, web, client());
    assert_eq!(code(confirm(&mut w, web, id, client())), Refusal::NoSuchOffer, "nobody has taken it");
    assert_eq!(code(finish(&mut w, db, id, server())), Refusal::NoSuchOffer);
    take(&mut w, db, server());
    assert_eq!(code(finish(&mut w, db, id, server())), Refusal::NoSuchOffer, "not confirmed");
    assert_eq!(code(confirm(&mut w, db, id, client())), Refusal::NoSuchOffer, "not its offer");
    let again = w.join("web", 1);
    assert_eq!(code(confirm(&mut w, again, id, client())), Refusal::NoSuchOffer, "another session of that user");
    assert!(matches!(confirm(&mut w, web, id, client()), Message::PeerIs { .. }));
    assert_eq!(code(confirm(&mut w, web, id, client())), Refusal::NoSuchOffer, "twice");
    assert_eq!(code(finish(&mut w, web, id, server())), Refusal::NoSuchOffer, "not its take");
    assert!(matches!(finish(&mut w, db, id, server()), Message::PeerIs { .. }));
    assert_eq!(code(finish(&mut w, db, id, server())), Refusal::NoSuchOffer);
}

#[test]
fn unfinished_handshake_ends_by_either_side_and_by_age() {
    for end in 0..4 {
        let (mut w, web, db) = world();
        let offer = offered(&mut w, web, client());
        take(&mut w, db, server());
        confirm(&mut w, web, offer, client());
        match end {
            0 => w.end(web),
            1 => w.end(db),
            2 => assert_eq!(w.ask(db, Message::Cancel { offer }), Message::Done {}),
            _ => (0..100).for_each(|_| w.feed(CoreEvent::Tick)),
        }
        w.sent.clear();
        assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0), "{end}");
        assert!(!is_offered(&w));
    }
}

#[test]
fn socket_bound_to_a_device_is_refused_without_numbers() {
    let bound = |s: SocketFacts| SocketFacts { identity: Identity { bound_to_device: true, ..s.identity }, ..s };
    for (c, s) in [(bound(client()), server()), (client(), bound(server()))] {
        let (mut w, web, db) = world();
        offered(&mut w, web, c);
        assert_eq!(code(meet(&mut w, (web, c), (db, s))), Refusal::Ambiguous);
    }
    // Bound between two showings.
    let (mut w, web, db) = world();
    offered(&mut w, web, client());
    assert_eq!(code(meet(&mut w, (web, bound(client())), (db, server()))), Refusal::Ambiguous);
}

#[test]
fn tracked_connection_of_two_users_needs_numbers() {
    let tracked = |s: SocketFacts| SocketFacts { identity: Identity { tracked: true, ..s.identity }, ..s };
    let policy = "[[join]]\ndomain = '*'\nusers = [1, 2]\n[[connect]]\nfrom = '*'\nto = '*'";
    let mut w = World::with_policy(policy);
    let (web, db, near) = (w.join_as(1, "web", 1), w.join_as(2, "db", 2), w.join_as(1, "near", 3));
    let (c, s) = (tracked(client()), tracked(server()));
    offered(&mut w, web, c);
    // A translator may have made these ends of another's connection.
    assert_eq!(code(take(&mut w, db, s)), Refusal::Ambiguous);
    met(&mut w, (web, c), (near, s));
    w.end(near);
    w.end(web);
    let web = w.join_as(1, "web", 1);
    let (c, s) = (numbered(c, NUMBERS), numbered(s, crossed(NUMBERS)));
    offered(&mut w, web, c);
    met(&mut w, (web, c), (db, s));
}

#[test]
fn offer_is_found_only_with_the_key_of_the_accepting_namespace() {
    let fingerprint =
        |w: &World, netns| Fingerprint::connection(at(SERVER[0]), at(SERVER[1]), w.core.sockets.key_of(netns));
    let (mut w, web, db) = world();
    let c = numbered(client(), NUMBERS);
    let id = offered(&mut w, web, c);
    assert!(w.listed.contains_key(&('o', fingerprint(&w, 1))) && !w.listed.contains_key(&('o', fingerprint(&w, 2))));
    w.ask(web, Message::Cancel { offer: id });
    // Nobody listens there in its own namespace, and somebody does in another.
    published(&mut w, db, SocketFacts { netns: 2, ..listening("10.0.0.1:80") }, &[]);
    offered(&mut w, web, c);
    assert!(!w.listed.contains_key(&('o', fingerprint(&w, 1))) && w.listed.contains_key(&('o', fingerprint(&w, 2))));
    // Without numbers it could not be taken there.
    offered(&mut w, web, SocketFacts { cookie: 78, ..client() });
    assert!(w.listed.contains_key(&('o', fingerprint(&w, 1))));
    let answer = publish(&mut w, db, SocketFacts { netns: 2, ..listening("10.0.0.1:81") }, &[]);
    let Message::Published { secret_low, secret_high, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(OfferKey([secret_low, secret_high]), w.core.sockets.key_of(2), "programs that are there get it");
}

#[test]
fn loopback_does_not_reach_into_other_namespaces() {
    let (mut w, web, db) = world();
    let (mine, yours) = (socket("127.0.0.1:5000", "127.0.0.1:80"), socket("127.0.0.1:80", "127.0.0.1:5000"));
    offered(&mut w, web, mine);
    let yours = SocketFacts { acknowledged: 50, received: 100, ..yours };
    let elsewhere = SocketFacts { netns: 2, ..yours };
    assert_eq!(code(take(&mut w, db, elsewhere)), Refusal::Ambiguous);
    met(&mut w, (web, mine), (db, yours));
}

#[test]
fn ends_whose_numbers_contradict_each_other_are_not_of_one_connection() {
    for wrong in [SocketFacts { received: 99, ..server() }, SocketFacts { sent: 49, ..server() }] {
        let (mut w, web, db) = world();
        offered(&mut w, web, client());
        assert_eq!(code(take(&mut w, db, wrong)), Refusal::Ambiguous);
    }
    // What is under way has gone out, and has not come yet.
    let (mut w, web, db) = world();
    offered(&mut w, web, SocketFacts { sent: 500, ..client() });
    let busy = SocketFacts { sent: 900, received: 300, ..server() };
    met(&mut w, (web, SocketFacts { sent: 500, received: 70, ..client() }), (db, busy));
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
    met(&mut w, (web, client()), (db, server()));
    let (other, its) = (socket("10.0.0.2:5001", "10.0.0.1:81"), socket("10.0.0.1:81", "10.0.0.2:5001"));
    offered(&mut w, web, SocketFacts { acknowledged: 0, received: 0, ..other });
    assert_eq!(code(take(&mut w, db, its)), Refusal::Denied);
    // Between two domains of one user no rule is needed, since a separate rule says so.
    let again = w.join_as(1, "shop", 3);
    let (near, its) = (socket("10.0.0.2:5003", "10.0.0.1:99"), socket("10.0.0.1:99", "10.0.0.2:5003"));
    let [near, its] = [near, its].map(|end| SocketFacts { acknowledged: 0, received: 0, ..end });
    offered(&mut w, web, near);
    met(&mut w, (web, near), (again, its));
    // The other way round nothing is allowed at all.
    let (back, its) = (socket("10.0.0.1:5002", "10.0.0.2:80"), socket("10.0.0.2:80", "10.0.0.1:5002"));
    offered(&mut w, db, SocketFacts { acknowledged: 0, received: 0, ..back });
    assert_eq!(code(take(&mut w, web, its)), Refusal::Denied);
}

#[test]
fn one_user_is_no_exception_where_the_policy_says_so() {
    let policy = "[[join]]\ndomain = '*'\nusers = [1]\n[sockets]\nsame_user = false";
    let mut w = World::with_policy(policy);
    let (web, db) = (w.join_as(1, "web", 1), w.join_as(1, "db", 2));
    offered(&mut w, web, client());
    assert_eq!(code(take(&mut w, db, server())), Refusal::Denied);
    assert!(!is_offered(&w));
}

#[test]
fn policy_that_changes_during_a_handshake_holds() {
    let policy = "[[join]]\ndomain = '*'\nusers = [1, 2]\n";
    let mut w = World::with_policy(&format!("{policy}[[connect]]\nfrom = 'web'\nto = 'db'"));
    let (web, db) = (w.join_as(1, "web", 1), w.join_as(2, "db", 2));
    let id = offered(&mut w, web, client());
    take(&mut w, db, server());
    confirm(&mut w, web, id, client());
    let actions = w.core.set_policy(Arc::new(Policy::parse(policy).unwrap()));
    w.perform(actions);
    assert_eq!(code(finish(&mut w, db, id, server())), Refusal::Denied);
}

#[test]
fn a_channel_of_a_socket_is_made_by_take_alone() {
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
fn the_directory_is_handed_to_whoever_has_joined() {
    let (mut w, web, _) = world();
    assert_eq!(w.refused(web, Message::Directory {}, vec![]), Refusal::OutOfResources);
    let directory = w.other();
    let actions = w.core.set_directory(directory);
    w.perform(actions);
    assert_eq!(w.ask(web, Message::Directory {}), Message::DirectoryIs { size: partywall_protocol::directory::SIZE });
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
    // A policy file that is loaded again is what holds.
    w.ask(root, set("never"));
    let actions = w.core.set_policy(Arc::new(Policy::parse(policy).unwrap()));
    w.perform(actions);
    assert_eq!(w.ask(user, Message::GetPolicy {}), from_file);
    assert_eq!(w.terms.clone().unwrap().0.spin_us, 7);
}

/// A connection that some broker before this one knew.
const OLD: u64 = INSTANCE - 7;

fn reclaim(w: &mut World, session: u64, side: Side, socket: SocketFacts) -> Message {
    let message = Message::ReclaimSocket { channel: OLD, side, region: RegionReference::with_ring(8192) };
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
        assert_eq!(
            w.ask(web, Message::Inspect { channel: OLD }),
            Message::Regions { connecting: true, accepting: true }
        );
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
    let future = Message::ReclaimSocket {
        channel: INSTANCE + 9,
        side: Side::Accepting,
        region: RegionReference::with_ring(8192),
    };
    assert_eq!(code(w.say_of(db, future, server(), with).unwrap()), Refusal::NoSuchChannel);
    let offer = offered(&mut w, web, client());
    let with = vec![w.region(8192)];
    let of_offer =
        Message::ReclaimSocket { channel: offer, side: Side::Accepting, region: RegionReference::with_ring(8192) };
    assert_eq!(code(w.say_of(db, of_offer, server(), with).unwrap()), Refusal::NoSuchChannel);
    let with = vec![w.region(8192)];
    let of_offer = Message::Reclaim {
        channel: offer,
        side: Side::Accepting,
        peer: "web".into(),
        service: "s".into(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region: RegionReference::with_ring(8192),
    };
    assert_eq!(w.refused(db, of_offer, with), Refusal::NoSuchChannel);
    met(&mut w, (web, client()), (db, server()));
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
    for (session, connecting, accepting) in [(web, true, false), (db, false, true), (root, true, true)] {
        let shown = Message::Regions { connecting, accepting };
        assert_eq!(w.ask(session, Message::Inspect { channel: OLD }), shown);
    }
}
