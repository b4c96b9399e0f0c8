//! Connections to an address that is translated to a listener's, as the policy lists it.

use std::sync::Arc;

use super::handshake::{NUMBERS, crossed, numbered};
use super::translated::{age, inside, outside, shown, world_with_policy};
use super::*;

const FORWARD: &str =
    "administrators = [1000]\n[[forward]]\naddresses = ['192.0.2.1:8080', '192.0.2.2:8080']\nto = '10.0.0.1:80'\n";
const PUBLIC: &str = "192.0.2.1:8080";

/// The connecting end, in namespace 1, as it sees the connection.
fn forwarded() -> SocketFacts {
    SocketFacts { remote: Some(at(PUBLIC)), ..inside() }
}

/// The accepting end, in namespace 2, where only the destination was translated.
fn accepted() -> SocketFacts {
    SocketFacts { remote: Some(at(CLIENT[0])), ..outside() }
}

/// How often each of these listeners, in no namespace's own address, is in the directory.
fn listed(w: &World, addresses: [&str; 3]) -> [u32; 3] {
    let count = |text| w.listed.get(&('l', Fingerprint::listener(Transport::Tcp, at(text), 0))).copied().unwrap_or(0);
    addresses.map(count)
}

/// Whether the offer is in the directory by these ends.
fn is_shown(w: &World, accepting: &str, connecting: &str) -> bool {
    let key = w.core.sockets.key_of(near(2));
    w.listed.contains_key(&('o', Fingerprint::connection(at(accepting), at(connecting), key)))
}

#[test]
fn listener_is_listed_at_addresses_forwarded_to_it() {
    let everywhere = [SERVER[0], PUBLIC, "192.0.2.2:8080"];
    let (mut w, _, db) = world_with_policy(FORWARD);
    assert_eq!(listed(&w, everywhere), [1, 1, 1]);
    published(&mut w, db, SocketFacts { netns: 2, ..listening("10.0.0.1:81") }, &[]);
    published(&mut w, db, SocketFacts { netns: 3, ..listening(SERVER[0]) }, &[]);
    assert_eq!(listed(&w, everywhere), [2, 2, 2]);
    let policy = |text: &str| Arc::new(crate::policy::Policy::parse(text).unwrap());
    let other = FORWARD.replace("192.0.2.1", "192.0.2.3");
    for (text, wanted) in [("administrators = [1000]", [2, 0, 0]), (&*other, [2, 0, 2]), (FORWARD, [2, 2, 2])] {
        let actions = w.core.set_policy(policy(text));
        w.perform(actions);
        assert_eq!(listed(&w, everywhere), wanted, "{text}");
    }
    w.end(db);
    assert_eq!(listed(&w, everywhere), [0; 3]);
}

#[test]
fn forwarded_entries_count_for_quota_of_listeners() {
    let (mut w, web, _) = world_with_policy(&format!("{FORWARD}[quota]\nlisteners = 6\n"));
    // A listener at one address, two forwarded ones, its own address and loopback of both families.
    assert_eq!(listed(&w, [SERVER[0], PUBLIC, "192.0.2.2:8080"]), [1, 1, 1]);
    let few = format!("{FORWARD}[quota]\nlisteners = 5\n");
    let mut small = World::with_policy(&few);
    let db = small.join("db", 2);
    assert_eq!(code(publish(&mut small, db, listening(SERVER[0]), &[])), Refusal::Quota);
    w.end(web);
}

#[test]
fn forwarded_connection_is_found_by_the_ends_its_listener_sees() {
    let (mut w, web, db) = world_with_policy(FORWARD);
    offered(&mut w, web, forwarded());
    assert!(is_shown(&w, SERVER[0], CLIENT[0]) && is_shown(&w, PUBLIC, CLIENT[0]));
    met(&mut w, (web, forwarded()), (db, accepted()));
    assert!(!is_shown(&w, SERVER[0], CLIENT[0]) && !is_shown(&w, PUBLIC, CLIENT[0]));
    assert_eq!(w.core.status().channels, 1);
}

#[test]
fn connection_translated_at_both_ends_is_shown_by_its_listener() {
    let (mut w, web, db) = world_with_policy(FORWARD);
    offered(&mut w, web, forwarded());
    age(&mut w);
    assert_eq!(shown(&w), 1);
    met(&mut w, (web, forwarded()), (db, outside()));
    assert_eq!(shown(&w), 0);
}

#[test]
fn forwarded_connection_goes_only_to_crossing_numbers() {
    let (mut w, web, db) = world_with_policy(FORWARD);
    let id = offered(&mut w, web, forwarded());
    for wrong in [
        SocketFacts { identity: Identity::default(), ..accepted() },
        numbered(accepted(), NUMBERS),
        numbered(accepted(), Numbers { sent_from: 3, ..crossed(NUMBERS) }),
        // The numbers are right, and this is not where the address leads.
        SocketFacts { local: at(PUBLIC), remote: Some(at("10.0.0.9:5000")), ..outside() },
        SocketFacts { netns: 3, ..accepted() },
    ] {
        assert_eq!(code(take(&mut w, db, wrong)), Refusal::NoSuchOffer, "{wrong:?}");
    }
    assert_eq!(take(&mut w, db, accepted()), near_bell(id));
    let unread = SocketFacts { identity: Identity::default(), ..forwarded() };
    assert_eq!(code(confirm(&mut w, web, id, unread)), Refusal::Ambiguous);
}

#[test]
fn connection_to_unlisted_translated_address_finds_no_end() {
    let (mut w, web, db) = world_with_policy("administrators = [1000]");
    offered(&mut w, web, forwarded());
    assert!(!is_shown(&w, SERVER[0], CLIENT[0]));
    assert_eq!(code(take(&mut w, db, accepted())), Refusal::NoSuchOffer);
}

#[test]
fn forwarded_connection_is_reclaimed_by_its_numbers() {
    const OLD: u64 = INSTANCE - 7;
    let reclaim = |w: &mut World, session, side, socket| {
        let message = Message::ReclaimSocket { channel: OLD, side, region: RegionReference::with_ring(8192) };
        let with = vec![w.region(8192)];
        w.say_of(session, message, socket, with).expect("an answer")
    };
    let sides = [(Side::Connecting, forwarded()), (Side::Accepting, accepted())];
    for order in [[0, 1], [1, 0]] {
        let (mut w, web, db) = world_with_policy(FORWARD);
        let [first, second] = order.map(|of| ([web, db][of], sides[of]));
        assert_eq!(reclaim(&mut w, first.0, first.1.0, first.1.1), Message::Done {});
        let wrong = numbered(second.1.1, Numbers { sent_from: 7, received_from: 9 });
        assert_eq!(code(reclaim(&mut w, second.0, second.1.0, wrong)), Refusal::SelfContradiction);
        assert_eq!(reclaim(&mut w, second.0, second.1.0, second.1.1), Message::Done {});
        match w.ask(web, Message::List { what: What::Channels, after: 0 }) {
            Message::Channels { page } => assert_eq!(page.rows[0].service, "tcp-80", "the listener's, in either order"),
            other => panic!("no list: {other:?}"),
        }
    }
}
