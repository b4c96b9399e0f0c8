//! The steps of an offer and its take, with sequence numbers, and who they are refused to.

use super::*;

pub(super) const NUMBERS: Numbers = Numbers { sent_from: 1000, received_from: 70 };

/// As the broker sees a socket whose sequence numbers it may read: the connecting side's counter begins one earlier.
pub(super) fn numbered(socket: SocketFacts, numbers: Numbers) -> SocketFacts {
    SocketFacts { identity: Identity { numbers: Some(numbers), ..socket.identity }, ..socket }
}

pub(super) fn crossed(numbers: Numbers) -> Numbers {
    Numbers { sent_from: numbers.received_from, received_from: numbers.sent_from + 1 }
}

#[test]
fn region_that_is_not_made_is_shown_but_not_handed_over() {
    for unmade in [Side::Connecting, Side::Accepting] {
        let (mut w, web, db) = world();
        let memory = |w: &World, side, ring| if side == unmade { w.reserved(ring) } else { w.region(ring) };
        let offer = Message::Offer { region: RegionReference::with_ring(8192) };
        let memories = [memory(&w, Side::Connecting, 8192), memory(&w, Side::Accepting, 16384)];
        let [offered, taken] = memories;
        let Some(Message::Bell { offer, .. }) = w.say_of(web, offer, client(), vec![offered]) else { panic!() };
        let take = Message::Take { region: RegionReference::with_ring(16384) };
        assert_eq!(w.say_of(db, take, server(), vec![taken]), Some(near_bell(offer)));
        let confirmed = confirm(&mut w, web, offer, client());
        let refused = if unmade == Side::Accepting { confirmed } else { finish(&mut w, db, offer, server()) };
        assert_eq!(code(refused), Refusal::NoSuchOffer, "the refused side has made its own: {unmade:?}");
        w.sent.clear();
        assert_eq!((w.core.status().channels, w.open_descriptors(), is_offered(&w)), (0, 0, false), "{unmade:?}");
    }
}

#[test]
fn between_namespaces_sequence_numbers_decide_and_nothing_else() {
    let elsewhere = |socket: SocketFacts| SocketFacts { netns: 2, trusted: false, ..socket };
    let (mine, yours) = (numbered(client(), NUMBERS), numbered(elsewhere(server()), crossed(NUMBERS)));
    let world = || {
        let (mut w, web, db) = world();
        published(&mut w, db, elsewhere(listening(SERVER[0])), &[]);
        (w, web, db)
    };
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
    assert_eq!(code(take(&mut w, db, elsewhere(server()))), Refusal::NoSuchOffer, "the numbers of neither");
}

#[test]
fn mismatched_sequence_numbers_are_refused_within_namespace() {
    let (mut w, web, db) = world();
    offered(&mut w, web, numbered(client(), NUMBERS));
    let behind_a_translator = numbered(server(), Numbers { sent_from: 5, received_from: 9 });
    assert_eq!(code(take(&mut w, db, behind_a_translator)), Refusal::NoSuchOffer);
    met(&mut w, (web, numbered(client(), NUMBERS)), (db, numbered(server(), crossed(NUMBERS))));
}

#[test]
fn equal_offers_of_two_namespaces_differ_by_sequence_numbers() {
    let other = Numbers { sent_from: 3, received_from: 4 };
    let there = numbered(SocketFacts { netns: 2, cookie: 9, ..client() }, other);
    let (mut w, web, db) = world();
    // The listener is in a third namespace, and so may the accepting end be.
    published(&mut w, db, SocketFacts { netns: 3, ..listening(SERVER[0]) }, &[]);
    let here = offered(&mut w, web, numbered(client(), NUMBERS));
    let forged = offered(&mut w, web, there);
    let third = |numbers, cookie| numbered(SocketFacts { netns: 3, cookie, ..server() }, numbers);
    assert_eq!(take(&mut w, db, third(crossed(NUMBERS), 10)), near_bell(here));
    assert_eq!(take(&mut w, db, third(crossed(other), 11)), near_bell(forged));
}

#[test]
fn offer_goes_only_to_namespaces_where_it_may_be_accepted() {
    let (mut w, web, db) = world();
    let id = offered(&mut w, web, numbered(client(), NUMBERS));
    // Its numbers are right: they are those of the same ends in another namespace, if the moments are.
    let elsewhere = numbered(SocketFacts { netns: 4, cookie: 10, ..server() }, crossed(NUMBERS));
    assert_eq!(code(take(&mut w, db, elsewhere)), Refusal::NoSuchOffer);
    assert_eq!(take(&mut w, db, numbered(server(), crossed(NUMBERS))), near_bell(id));
}

#[test]
fn connection_gets_no_ring_after_takes_with_other_numbers() {
    let tried = |wrong: u32| {
        let (mut w, web, db) = world();
        offered(&mut w, web, numbered(client(), NUMBERS));
        for i in 0..wrong {
            let guess = Numbers { sent_from: 3, received_from: i };
            assert_eq!(code(take(&mut w, db, numbered(server(), guess))), Refusal::NoSuchOffer);
        }
        (w, web, db)
    };
    let right = numbered(server(), crossed(NUMBERS));
    let (mut w, _, db) = tried(3);
    assert!(matches!(take(&mut w, db, right), Message::Bell { .. }));
    // The answer does not tell that the numbers are right, also if the bytes are not.
    let (mut w, web, db) = tried(4);
    assert_eq!(code(take(&mut w, db, right)), Refusal::NoSuchOffer);
    assert_eq!(code(take(&mut w, db, SocketFacts { received: 99, ..right })), Refusal::NoSuchOffer);
    // The numbers are the same in the connection's next offer.
    for _ in 0..30 {
        w.feed(CoreEvent::Tick);
    }
    let shape = numbered(client(), NUMBERS);
    assert_eq!(code(offer(&mut w, web, shape)), Refusal::Ambiguous);
    // Another connection with these ends may have a ring.
    offered(&mut w, web, SocketFacts { cookie: 55, ..shape });
    assert!(matches!(take(&mut w, db, right), Message::Bell { .. }));
}

#[test]
fn wrong_takes_are_counted_over_offers_of_connection() {
    let (mut w, web, db) = world();
    let shape = numbered(client(), NUMBERS);
    for i in 0..4 {
        let id = offered(&mut w, web, shape);
        let guess = Numbers { sent_from: 3, received_from: i };
        assert_eq!(code(take(&mut w, db, numbered(server(), guess))), Refusal::NoSuchOffer);
        assert_eq!(w.ask(web, Message::Cancel { offer: id }), Message::Done {});
    }
    assert_eq!(code(offer(&mut w, web, shape)), Refusal::Ambiguous);
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
        assert_eq!(take(&mut w, db, taker), near_bell(id));
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
        |w: &World, netns| Fingerprint::connection(at(SERVER[0]), at(SERVER[1]), w.core.sockets.key_of(near(netns)));
    let (mut w, web, db) = world();
    let c = numbered(client(), NUMBERS);
    let id = offered(&mut w, web, c);
    assert!(w.listed.contains_key(&('o', fingerprint(&w, 1))) && !w.listed.contains_key(&('o', fingerprint(&w, 2))));
    w.ask(web, Message::Cancel { offer: id });
    // There is no listener in its own namespace, and one in another.
    published(&mut w, db, SocketFacts { netns: 2, ..listening("10.0.0.1:80") }, &[]);
    offered(&mut w, web, c);
    assert!(!w.listed.contains_key(&('o', fingerprint(&w, 1))) && w.listed.contains_key(&('o', fingerprint(&w, 2))));
    // Without numbers it could not be taken there.
    offered(&mut w, web, SocketFacts { cookie: 78, ..client() });
    assert!(w.listed.contains_key(&('o', fingerprint(&w, 1))));
    let answer = publish(&mut w, db, SocketFacts { netns: 2, ..listening("10.0.0.1:81") }, &[]);
    let Message::Published { secret_low, secret_high, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(OfferKey([secret_low, secret_high]), w.core.sockets.key_of(near(2)), "programs that are there get it");
}

#[test]
fn offer_without_listener_is_for_namespace_of_programs() {
    let (mut w, web, db) = world();
    let is_for = |w: &World, netns| {
        let key = w.core.sockets.key_of(near(netns));
        w.listed.contains_key(&('o', Fingerprint::connection(at(SERVER[0]), at(SERVER[1]), key)))
    };
    let offer_is_for = |w: &mut World, socket, netns| {
        let id = offered(w, web, socket);
        assert!(is_for(w, netns) && !is_for(w, 3 - netns), "namespace {netns}");
        w.ask(web, Message::Cancel { offer: id });
    };
    // The listener is closed. The program that has the connection has published its addresses.
    let c = numbered(client(), NUMBERS);
    let elsewhere = published(&mut w, db, SocketFacts { netns: 2, ..server() }, &[]);
    offer_is_for(&mut w, c, 2);
    offer_is_for(&mut w, client(), 1);
    // A listener decides, and a program in the namespace of the offer is before those elsewhere.
    let nearer = w.join("nearer", 3);
    let listener = published(&mut w, nearer, listening(SERVER[0]), &[]);
    offer_is_for(&mut w, c, 1);
    // Its program may have accepted the connection before it closed the listener.
    w.ask(nearer, Message::Withdraw { key: listener });
    offer_is_for(&mut w, c, 1);
    w.end(nearer);
    offer_is_for(&mut w, c, 2);
    let here = published(&mut w, db, server(), &[]);
    offer_is_for(&mut w, c, 1);
    w.ask(db, Message::Withdraw { key: here });
    offer_is_for(&mut w, c, 2);
    w.ask(db, Message::Withdraw { key: elsewhere });
    offer_is_for(&mut w, c, 1);
}

#[test]
fn loopback_does_not_reach_into_other_namespaces() {
    let (mut w, web, db) = world();
    let (mine, yours) = (socket("127.0.0.1:5000", "127.0.0.1:80"), socket("127.0.0.1:80", "127.0.0.1:5000"));
    offered(&mut w, web, mine);
    let yours = SocketFacts { acknowledged: 50, received: 100, ..yours };
    let elsewhere = SocketFacts { netns: 2, ..yours };
    assert_eq!(code(take(&mut w, db, elsewhere)), Refusal::NoSuchOffer);
    met(&mut w, (web, mine), (db, yours));
}

#[test]
fn take_with_contradicting_byte_counts_is_ambiguous() {
    for wrong in [SocketFacts { received: 99, ..server() }, SocketFacts { sent: 49, ..server() }] {
        let (mut w, web, db) = world();
        offered(&mut w, web, client());
        assert_eq!(code(take(&mut w, db, wrong)), Refusal::Ambiguous);
    }
    // Bytes in transit count as sent, and not as received yet.
    let (mut w, web, db) = world();
    offered(&mut w, web, SocketFacts { sent: 500, ..client() });
    let busy = SocketFacts { sent: 900, received: 300, ..server() };
    met(&mut w, (web, SocketFacts { sent: 500, received: 70, ..client() }), (db, busy));
}
