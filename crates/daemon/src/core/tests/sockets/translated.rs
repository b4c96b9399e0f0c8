//! Connections whose addresses are translated between two network namespaces: who finds their offers, and who gets them.

use super::handshake::{NUMBERS, crossed, numbered};
use super::reclaim::reclaim;
use super::*;

/// Where the router between the two namespaces has the connections come from.
pub(super) const ROUTER: &str = "10.0.1.1:6000";

/// The connecting end, in namespace 1.
pub(super) fn inside() -> SocketFacts {
    numbered(client(), NUMBERS)
}

/// The accepting end, in namespace 2, as it sees the translated connection.
pub(super) fn outside() -> SocketFacts {
    let seen = SocketFacts { netns: 2, trusted: false, cookie: 99, remote: Some(at(ROUTER)), ..server() };
    numbered(seen, crossed(NUMBERS))
}

/// Another connection of the same client to the same listener.
fn another(of: SocketFacts, numbers: Numbers) -> SocketFacts {
    let local = SocketAddr::new(of.local.ip(), of.local.port() + 1);
    numbered(SocketFacts { local, cookie: of.cookie + 1, ..of }, numbers)
}

/// A client in namespace 1, and a server that listens in namespace 2.
fn apart() -> (World, u64, u64) {
    world_with_policy("administrators = [1000]")
}

pub(super) fn world_with_policy(policy: &str) -> (World, u64, u64) {
    let mut w = World::with_policy(policy);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    published(&mut w, db, SocketFacts { netns: 2, ..listening(SERVER[0]) }, &[]);
    (w, web, db)
}

/// The number of offers that are in the directory by their accepting end alone.
pub(super) fn shown(w: &World) -> u32 {
    let fingerprint = Fingerprint::translated(at(SERVER[0]), w.core.sockets.key_of(near(2)));
    w.listed.get(&('o', fingerprint)).copied().unwrap_or(0)
}

/// Time passes until no offer is young.
pub(super) fn age(w: &mut World) {
    let looks = (0..10).take_while(|_| {
        let wants = w.core.wants_look_at_untaken();
        w.feed(CoreEvent::LookAtUntaken);
        wants
    });
    assert_eq!(looks.count(), 2, "an offer is there for a whole period before it is entered");
}

#[test]
fn untaken_offer_to_other_namespace_is_shown_by_accepting_end() {
    let (mut w, web, db) = apart();
    offered(&mut w, web, inside());
    assert_eq!(shown(&w), 0);
    age(&mut w);
    assert_eq!(shown(&w), 1);
    met(&mut w, (web, inside()), (db, outside()));
    assert_eq!(shown(&w), 0);
}

#[test]
fn translated_connection_may_be_taken_before_its_offer_is_shown() {
    let (mut w, web, db) = apart();
    offered(&mut w, web, inside());
    met(&mut w, (web, inside()), (db, outside()));
    assert!(!w.core.wants_look_at_untaken());
}

#[test]
fn translated_offer_goes_only_to_crossing_numbers_and_its_end() {
    let (mut w, web, db) = apart();
    let id = offered(&mut w, web, inside());
    age(&mut w);
    let (sent_from, received_from) = (NUMBERS.received_from, NUMBERS.sent_from + 1);
    for wrong in [
        numbered(outside(), Numbers { sent_from, received_from: received_from + 1 }),
        numbered(outside(), Numbers { sent_from: sent_from + 1, received_from }),
        numbered(outside(), NUMBERS),
        SocketFacts { identity: Identity::default(), ..outside() },
        // The numbers are right, and the destination is another.
        SocketFacts { local: at("10.0.0.1:81"), ..outside() },
        SocketFacts { local: at("10.0.0.3:80"), ..outside() },
    ] {
        assert_eq!(code(take(&mut w, db, wrong)), Refusal::NoSuchOffer, "{wrong:?}");
        assert_eq!(shown(&w), 1, "the offer stands");
    }
    assert_eq!(take(&mut w, db, outside()), near_bell(id));
    // The offer is taken by one socket only, whichever ends it shows.
    let by_ends = SocketFacts { cookie: 98, remote: Some(at(CLIENT[0])), ..outside() };
    assert_eq!(code(take(&mut w, db, by_ends)), Refusal::NoSuchOffer);
    assert_eq!(code(take(&mut w, db, SocketFacts { cookie: 97, ..outside() })), Refusal::NoSuchOffer);
}

/// Sockets at the accepting end of [`outside`] ask with wrong numbers, all different.
fn guess(w: &mut World, db: u64, netns: u64, many: std::ops::Range<u32>) {
    for i in many {
        let numbers = Numbers { sent_from: 3, received_from: i };
        let socket = SocketFacts { cookie: 98, netns, ..outside() };
        assert_eq!(code(take(w, db, numbered(socket, numbers))), Refusal::NoSuchOffer);
    }
}

#[test]
fn translated_connection_gets_no_ring_after_many_guesses() {
    let other = Numbers { sent_from: 3, received_from: 1_000_000 };
    let theirs = numbered(SocketFacts { remote: Some(at("10.0.1.1:6001")), cookie: 100, ..outside() }, crossed(other));
    let (mut w, web, db) = apart();
    let first = offered(&mut w, web, inside());
    guess(&mut w, db, 2, 0..63);
    // Guesses before an offer do not concern it.
    let second = offered(&mut w, web, another(inside(), other));
    assert_eq!(take(&mut w, db, outside()), near_bell(first));
    guess(&mut w, db, 2, 100..163);
    assert_eq!(take(&mut w, db, theirs), near_bell(second));

    let (mut w, web, db) = apart();
    let first = offered(&mut w, web, inside());
    guess(&mut w, db, 2, 0..64);
    assert_eq!(code(take(&mut w, db, outside())), Refusal::NoSuchOffer);
    // Nor does the connection get one by another offer.
    assert_eq!(w.ask(web, Message::Cancel { offer: first }), Message::Done {});
    assert_eq!(code(offer(&mut w, web, inside())), Refusal::Ambiguous);
    let again = offered(&mut w, web, another(inside(), other));
    assert_eq!(take(&mut w, db, theirs), near_bell(again));
}

#[test]
fn only_different_numbers_of_accepting_namespace_are_guesses() {
    let (mut w, web, db) = apart();
    let offer = offered(&mut w, web, inside());
    // A connection of that listener that asks again and again, and strangers who have the address in their own namespaces.
    for _ in 0..100 {
        guess(&mut w, db, 2, 7..8);
    }
    guess(&mut w, db, 3, 0..100);
    assert_eq!(take(&mut w, db, outside()), near_bell(offer));
}

#[test]
fn within_namespace_ends_must_be_each_others() {
    let (mut w, web, db) = world();
    offered(&mut w, web, inside());
    assert!(!w.core.wants_look_at_untaken());
    let seen = SocketFacts { netns: 1, ..outside() };
    assert_eq!(code(take(&mut w, db, seen)), Refusal::NoSuchOffer);
    // Nor is an offer of unread numbers for another namespace.
    let (mut w, web, db) = apart();
    offered(&mut w, web, client());
    assert!(!w.core.wants_look_at_untaken());
    assert_eq!(code(take(&mut w, db, outside())), Refusal::NoSuchOffer);
}

#[test]
fn translated_connection_must_show_its_numbers_each_time() {
    let unread = |socket: SocketFacts| SocketFacts { identity: Identity::default(), ..socket };
    let (mut w, web, db) = apart();
    let offer = offered(&mut w, web, inside());
    take(&mut w, db, outside());
    assert_eq!(code(confirm(&mut w, web, offer, unread(inside()))), Refusal::Ambiguous);
    let offer = offered(&mut w, web, inside());
    take(&mut w, db, outside());
    assert!(matches!(confirm(&mut w, web, offer, inside()), Message::PeerIs { .. }));
    assert_eq!(code(finish(&mut w, db, offer, unread(outside()))), Refusal::Ambiguous);
    w.sent.clear();
    assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
}

#[test]
fn translated_connection_must_agree_in_bytes_and_be_allowed() {
    for wrong in [SocketFacts { received: 99, ..outside() }, SocketFacts { sent: 49, ..outside() }] {
        let (mut w, web, db) = apart();
        offered(&mut w, web, inside());
        assert_eq!(code(take(&mut w, db, wrong)), Refusal::Ambiguous);
    }
    let (mut w, web, db) = world_with_policy("[[join]]\ndomain = '*'\nusers = [1000]\n[sockets]\nsame_user = false");
    offered(&mut w, web, inside());
    age(&mut w);
    assert_eq!(code(take(&mut w, db, outside())), Refusal::Denied);
    assert_eq!(shown(&w), 0, "a refused offer goes");
}

#[test]
fn two_translated_offers_of_one_listener_find_their_own_ends() {
    let other = Numbers { sent_from: 3, received_from: 4 };
    let (mut w, web, db) = apart();
    let first = offered(&mut w, web, inside());
    let second = offered(&mut w, web, another(inside(), other));
    age(&mut w);
    assert_eq!(shown(&w), 2);
    let theirs = numbered(SocketFacts { remote: Some(at("10.0.1.1:6001")), cookie: 100, ..outside() }, crossed(other));
    assert_eq!(take(&mut w, db, theirs), near_bell(second));
    assert_eq!(take(&mut w, db, outside()), near_bell(first));
}

#[test]
fn two_offers_with_the_same_numbers_go_to_neither() {
    let (mut w, web, db) = apart();
    offered(&mut w, web, inside());
    let twin = offered(&mut w, web, another(inside(), NUMBERS));
    assert_eq!(code(take(&mut w, db, outside())), Refusal::NoSuchOffer);
    assert_eq!(w.ask(web, Message::Cancel { offer: twin }), Message::Done {});
    met(&mut w, (web, inside()), (db, outside()));
}

#[test]
fn shown_offer_goes_with_its_take_cancel_session_and_age() {
    for end in 0..4 {
        let (mut w, web, db) = apart();
        let offer = offered(&mut w, web, inside());
        age(&mut w);
        assert_eq!(shown(&w), 1);
        match end {
            0 => assert_eq!(take(&mut w, db, outside()), near_bell(offer)),
            1 => assert_eq!(w.ask(web, Message::Cancel { offer }), Message::Done {}),
            2 => w.end(web),
            _ => (0..100).for_each(|_| w.feed(CoreEvent::Tick)),
        }
        assert_eq!(shown(&w), 0, "{end}");
        w.end(db);
        w.sent.clear();
        assert!(!w.core.wants_look_at_untaken());
    }
}

#[test]
fn shown_offers_are_within_the_quota_of_offers() {
    let (mut w, web, db) = world_with_policy("administrators = [1000]\n[quota]\noffers = 3");
    let offers = (0..10u32).filter(|n| {
        let local = at(&format!("10.0.0.2:{}", 7000 + n));
        let socket = SocketFacts { local, cookie: (1000 + n).into(), ..inside() };
        let numbers = Numbers { sent_from: 5000 + n, received_from: *n };
        matches!(offer(&mut w, web, numbered(socket, numbers)), Message::Bell { .. })
    });
    assert_eq!(offers.count(), 3);
    age(&mut w);
    assert_eq!(shown(&w), 3);
    // Those who guess learn nothing, and leave nothing.
    for n in 0..100 {
        let guess = Numbers { sent_from: n, received_from: 9 * n };
        assert_eq!(code(take(&mut w, db, numbered(outside(), guess))), Refusal::NoSuchOffer);
    }
    w.end(web);
    assert_eq!(shown(&w), 0);
}

#[test]
fn directory_says_whether_programs_run_in_several_namespaces() {
    let says = |w: &World| w.listed.contains_key(&('a', Fingerprint::translators()));
    let (mut w, web, db) = world();
    published(&mut w, db, listening("10.0.0.1:80"), &[]);
    published(&mut w, db, listening("10.0.0.1:81"), &[]);
    assert!(!says(&w), "both are in one");
    let key = published(&mut w, web, SocketFacts { netns: 2, ..listening("10.0.0.2:80") }, &[]);
    assert!(says(&w));
    assert_eq!(w.ask(web, Message::Withdraw { key }), Message::Done {});
    assert!(says(&w), "the program is still there");
    w.end(web);
    assert!(!says(&w));
}

#[test]
fn translated_connection_is_reclaimed_by_its_numbers() {
    let sides = [(Side::Connecting, inside()), (Side::Accepting, outside())];
    for order in [[0, 1], [1, 0]] {
        let (mut w, web, _) = apart();
        let [first, second] = order.map(|of| sides[of]);
        assert_eq!(reclaim(&mut w, web, first.0, first.1), Message::Done {});
        for wrong in [
            numbered(second.1, Numbers { sent_from: 7, received_from: 9 }),
            SocketFacts { identity: Identity::default(), ..second.1 },
        ] {
            assert_eq!(code(reclaim(&mut w, web, second.0, wrong)), Refusal::SelfContradiction);
        }
        assert_eq!(reclaim(&mut w, web, second.0, second.1), Message::Done {});
    }
}
