//! Connections to an address that is translated to a listener's, as the policy lists it.

use std::sync::Arc;

use super::handshake::{NUMBERS, crossed, numbered};
use super::reclaim::reclaim;
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

fn set_policy(w: &mut World, text: &str) {
    let actions = w.core.set_policy(NOW, Arc::new(crate::policy::Policy::parse(text).unwrap()));
    w.perform(actions);
}

#[test]
fn listener_is_listed_at_addresses_forwarded_to_it() {
    let everywhere = [SERVER[0], PUBLIC, "192.0.2.2:8080"];
    let (mut w, _, db) = world_with_policy(FORWARD);
    assert_eq!(listed(&w, everywhere), [1, 1, 1]);
    published(&mut w, db, SocketFacts { netns: 2, ..listening("10.0.0.1:81") }, &[]);
    published(&mut w, db, SocketFacts { netns: 3, ..listening(SERVER[0]) }, &[]);
    assert_eq!(listed(&w, everywhere), [2, 2, 2]);
    let other = FORWARD.replace("192.0.2.1", "192.0.2.3");
    for (text, wanted) in [("administrators = [1000]", [2, 0, 0]), (&*other, [2, 0, 2]), (FORWARD, [2, 2, 2])] {
        set_policy(&mut w, text);
        assert_eq!(listed(&w, everywhere), wanted, "{text}");
    }
    w.end(db);
    assert_eq!(listed(&w, everywhere), [0; 3]);
}

#[test]
fn forwarded_addresses_are_listed_within_quota_only() {
    // A listener at one address, its own address, loopback of both families, and two forwarded ones.
    for (quota, wanted) in [(6, [1, 1, 1]), (5, [1, 0, 0]), (4, [1, 0, 0])] {
        let (w, ..) = world_with_policy(&format!("{FORWARD}[quota]\nlisteners = {quota}\n"));
        assert_eq!(listed(&w, [SERVER[0], PUBLIC, "192.0.2.2:8080"]), wanted);
    }
    let mut small = World::with_policy(&format!("{FORWARD}[quota]\nlisteners = 3\n"));
    let db = small.join("db", 2);
    assert_eq!(code(publish(&mut small, db, listening(SERVER[0]), &[])), Refusal::Quota);
}

#[test]
fn reload_lists_forwarded_addresses_under_its_own_quota() {
    let addresses = [SERVER[0], PUBLIC, "192.0.2.2:8080"];
    let (mut w, ..) = world_with_policy("administrators = [1000]\n[quota]\nlisteners = 4\n");
    for (quota, wanted) in [(6, [1, 1, 1]), (6, [1, 1, 1]), (4, [1, 1, 1]), (3, [1, 1, 1])] {
        set_policy(&mut w, &format!("{FORWARD}[quota]\nlisteners = {quota}\n"));
        assert_eq!(listed(&w, addresses), wanted, "{quota}: what is listed stays");
    }
    // What goes needs no room.
    set_policy(&mut w, "administrators = [1000]\n[quota]\nlisteners = 3\n");
    assert_eq!(listed(&w, addresses), [1, 0, 0]);
}

#[test]
fn forwarded_address_changes_its_listener_at_full_quota() {
    let forward = |to: &str| {
        format!("administrators = [1000]\n[[forward]]\naddresses = ['{PUBLIC}']\nto = '{to}'\n[quota]\nlisteners = 9\n")
    };
    // Two listeners, and three addresses for each.
    for order in [["10.0.0.1:80", "10.0.0.1:81"], ["10.0.0.1:81", "10.0.0.1:80"]] {
        let (mut w, _, db) = world_with_policy(&forward(order[0]));
        published(&mut w, db, SocketFacts { netns: 2, ..listening("10.0.0.1:81") }, &[]);
        for to in [order[1], order[0]] {
            set_policy(&mut w, &forward(to));
            assert_eq!(listed(&w, ["10.0.0.1:80", "10.0.0.1:81", PUBLIC]), [1, 1, 1], "to {to}");
        }
    }
}

#[test]
fn listener_at_forwarded_address_meets_clients_of_dead_forward() {
    let (mut w, web, db) = world_with_policy(&FORWARD.replace("10.0.0.1:80", "10.0.0.7:80"));
    published(&mut w, db, SocketFacts { netns: 2, ..listening(PUBLIC) }, &[]);
    offered(&mut w, web, forwarded());
    met(&mut w, (web, forwarded()), (db, SocketFacts { local: at(PUBLIC), ..outside() }));
}

#[test]
fn forward_leads_out_of_the_namespace_of_a_like_listener() {
    let (mut w, web, db) = world_with_policy(FORWARD);
    published(&mut w, web, SocketFacts { netns: 1, ..listening(SERVER[0]) }, &[]);
    offered(&mut w, web, forwarded());
    met(&mut w, (web, forwarded()), (db, accepted()));
}

#[test]
fn forward_leads_to_programs_where_no_listener_is_left() {
    let mut w = World::with_policy(FORWARD);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    published(&mut w, db, SocketFacts { netns: 2, ..server() }, &[]);
    offered(&mut w, web, forwarded());
    met(&mut w, (web, forwarded()), (db, accepted()));
}

#[test]
fn offer_within_namespace_is_shown_by_its_own_ends_alone() {
    let mut w = World::with_policy(FORWARD);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    published(&mut w, db, listening(SERVER[0]), &[]);
    offered(&mut w, web, forwarded());
    let offers: u32 = w.listed.iter().filter(|((kind, _), _)| *kind == 'o').map(|(_, count)| *count).sum();
    assert_eq!(offers, 1, "the accepting side could not take it");
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
fn offer_has_one_entry_for_each_address_however_it_is_spelled() {
    for (remote, entries) in [(SERVER[0], 1), ("[::ffff:10.0.0.1]:80", 1), (PUBLIC, 2), ("[::ffff:192.0.2.1]:8080", 2)]
    {
        let (mut w, web, _) = world_with_policy(FORWARD);
        offered(&mut w, web, SocketFacts { remote: Some(at(remote)), ..inside() });
        let offers = w.listed.iter().filter(|((kind, _), _)| *kind == 'o').map(|(_, count)| *count);
        assert_eq!(offers.sum::<u32>(), entries, "{remote}");
        assert!(is_shown(&w, SERVER[0], CLIENT[0]), "{remote}");
    }
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
