//! Flows of datagrams between network namespaces that the operator lists.

use super::datagrams::{at, code, offer, socket, take};
use super::*;
use partywall_protocol::wire::AddressList;

/// The broker's own namespace, two others that are listed, and one that is not.
const OWN: u64 = 1;
const BLUE: u64 = 2;
const RED: u64 = 3;
const STRANGE: u64 = 4;

/// What belongs to which namespace.
const LIST: [(&str, u64); 4] = [("10.0.0.1", OWN), ("10.0.0.2", BLUE), ("fd00::2", BLUE), ("10.0.0.3", RED)];

fn host_namespace(cookie: u64) -> NamespaceId {
    NamespaceId { origin: Origin::Host, cookie }
}

fn networks(list: &[(&str, u64)]) -> Networks {
    Networks::new(Some(OWN), list.iter().map(|(ip, netns)| (ip.parse().unwrap(), host_namespace(*netns))))
}

fn world() -> (World, u64, u64) {
    let mut w = World::new();
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    w.feed(CoreEvent::Networks(networks(&LIST)));
    (w, web, db)
}

/// A socket in a namespace.
fn shown(netns: u64, local: &str) -> SocketFacts {
    SocketFacts { netns, cookie: socket(local).cookie ^ netns << 56, ..socket(local) }
}

/// Offers and takes. `None`: one of the two was refused.
fn flow(
    (w, web, db): &mut (World, u64, u64),
    (sender_in, sender, to): (u64, &str, &str),
    (receiver_in, receiver, from): (u64, &str, &str),
) -> Option<u64> {
    let (sender, receiver) = (shown(sender_in, sender), shown(receiver_in, receiver));
    let Message::Offered { .. } = offer(w, *web, sender, to) else { return None };
    match take(w, *db, receiver, from) {
        Message::DatagramsTaken { flow, .. } => Some(flow),
        Message::Refused { code: Refusal::NoSuchOffer | Refusal::BadSocket, .. } => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn flow_between_namespaces_needs_listed_addresses_of_both() {
    for (sender, receiver, well) in [
        ((BLUE, "10.0.0.2:5000", "10.0.0.3:53"), (RED, "10.0.0.3:53", "10.0.0.2:5000"), true),
        ((BLUE, "0.0.0.0:5000", "10.0.0.3:53"), (RED, "0.0.0.0:53", "10.0.0.2:5000"), true),
        ((BLUE, "[::]:5000", "10.0.0.3:53"), (RED, "[::]:53", "10.0.0.2:5000"), true),
        ((RED, "0.0.0.0:5000", "10.0.0.2:53"), (BLUE, "0.0.0.0:53", "10.0.0.3:5000"), true),
        ((OWN, "0.0.0.0:5000", "10.0.0.2:53"), (BLUE, "0.0.0.0:53", "10.0.0.1:5000"), true),
        ((BLUE, "10.0.0.2:5000", "10.0.0.1:53"), (OWN, "0.0.0.0:53", "10.0.0.2:5000"), true),
        // Without another address of its family, the sender's source is not known.
        ((RED, "[::]:5000", "[fd00::2]:53"), (BLUE, "[::]:53", "[fd00::3]:5000"), false),
        ((BLUE, "[fd00::2]:5000", "10.0.0.3:53"), (RED, "0.0.0.0:53", "[fd00::2]:5000"), false),
        // Root of a container gives an interface an address of another namespace.
        ((BLUE, "10.0.0.3:5000", "10.0.0.1:53"), (OWN, "10.0.0.1:53", "10.0.0.3:5000"), false),
        ((BLUE, "10.0.0.2:5000", "10.0.0.1:53"), (RED, "10.0.0.1:53", "10.0.0.2:5000"), false),
        ((STRANGE, "10.0.0.2:5000", "10.0.0.3:53"), (RED, "10.0.0.3:53", "10.0.0.2:5000"), false),
        ((BLUE, "10.0.0.2:5000", "10.0.0.3:53"), (STRANGE, "10.0.0.3:53", "10.0.0.2:5000"), false),
        // The broker's own namespace has an address that is listed for another one.
        ((OWN, "10.0.0.2:5000", "10.0.0.3:53"), (RED, "10.0.0.3:53", "10.0.0.2:5000"), false),
        // A wildcard receives for its own namespace alone.
        ((BLUE, "0.0.0.0:5000", "10.0.0.3:53"), (OWN, "0.0.0.0:53", "10.0.0.2:5000"), false),
        ((BLUE, "0.0.0.0:5000", "10.0.0.9:53"), (RED, "0.0.0.0:53", "10.0.0.2:5000"), false),
        ((STRANGE, "0.0.0.0:5000", "10.0.0.3:53"), (RED, "0.0.0.0:53", "10.0.0.3:5000"), false),
        // Loopback is another in each namespace.
        ((BLUE, "0.0.0.0:5000", "127.0.0.1:53"), (RED, "0.0.0.0:53", "127.0.0.1:5000"), false),
        ((BLUE, "127.0.0.1:5000", "10.0.0.3:53"), (RED, "0.0.0.0:53", "127.0.0.1:5000"), false),
    ] {
        let mut world = world();
        assert_eq!(flow(&mut world, sender, receiver).is_some(), well, "{sender:?} {receiver:?}");
    }
}

#[test]
fn flow_within_listed_namespace_uses_its_addresses_and_loopback() {
    for (netns, sender, to, receiver, from, well) in [
        (BLUE, "0.0.0.0:5000", "127.0.0.1:53", "0.0.0.0:53", "127.0.0.1:5000", true),
        (BLUE, "127.0.0.1:5000", "127.0.0.1:53", "127.0.0.1:53", "127.0.0.1:5000", true),
        (BLUE, "0.0.0.0:5000", "10.0.0.2:53", "0.0.0.0:53", "10.0.0.2:5000", true),
        (BLUE, "10.0.0.2:5000", "10.0.0.2:53", "10.0.0.2:53", "10.0.0.2:5000", true),
        (OWN, "0.0.0.0:5000", "10.0.0.1:53", "0.0.0.0:53", "10.0.0.1:5000", true),
        (BLUE, "10.0.0.9:5000", "10.0.0.2:53", "10.0.0.2:53", "10.0.0.9:5000", false),
        (BLUE, "0.0.0.0:5000", "10.0.0.9:53", "10.0.0.9:53", "10.0.0.9:5000", false),
        (STRANGE, "0.0.0.0:5000", "127.0.0.1:53", "0.0.0.0:53", "127.0.0.1:5000", false),
    ] {
        let mut world = world();
        let taken = flow(&mut world, (netns, sender, to), (netns, receiver, from));
        assert_eq!(taken.is_some(), well, "in {netns}: {sender} to {to}");
    }
}

#[test]
fn wildcard_sender_with_two_listed_addresses_is_refused() {
    let (mut w, web, _) = world();
    w.feed(CoreEvent::Networks(networks(&TWO_SOURCES)));
    let sender = shown(BLUE, "0.0.0.0:5000");
    assert_eq!(code(offer(&mut w, web, sender, "10.0.0.3:53")), Refusal::BadSocket);
    let sender = shown(BLUE, "10.0.1.2:5000");
    assert!(matches!(offer(&mut w, web, sender, "10.0.0.3:53"), Message::Offered { .. }));
}

#[test]
fn namespace_of_the_socket_counts_not_of_its_session() {
    let (mut w, web, db) = world();
    // One session shows sockets of two namespaces, as after a descriptor was passed on.
    let (blue, red) = (shown(BLUE, "0.0.0.0:5000"), shown(RED, "0.0.0.0:5000"));
    offer(&mut w, web, blue, "10.0.0.1:53");
    offer(&mut w, web, red, "10.0.0.1:53");
    let receiver = shown(OWN, "0.0.0.0:53");
    for (from, sender) in [("10.0.0.3:5000", red), ("10.0.0.2:5000", blue)] {
        let Message::DatagramsTaken { flow, .. } = take(&mut w, db, receiver, from) else { panic!("{from}") };
        let [watched, _] = w.watched[&flow];
        assert_eq!((watched.cookie, watched.namespace, watched.to), (sender.cookie, sender.namespace(), at(from)));
    }
}

#[test]
fn flow_ends_when_its_namespace_leaves_the_list() {
    let flow_of = |world: &mut _| {
        let (sender, receiver) = ((BLUE, "0.0.0.0:5000", "10.0.0.3:53"), (RED, "0.0.0.0:53", "10.0.0.2:5000"));
        flow(world, sender, receiver).unwrap()
    };
    // The receiver's and the sender's namespace gone, another namespace at a path, an address given to another, and an empty list.
    for list in [
        &[("10.0.0.2", BLUE)][..],
        &[("10.0.0.3", RED)],
        &[("10.0.0.2", BLUE), ("10.0.0.3", STRANGE)],
        &[("10.0.0.2", RED), ("10.0.0.3", RED)],
        &[],
    ] {
        let mut world = world();
        let flow = flow_of(&mut world);
        let w = &mut world.0;
        w.feed(CoreEvent::Networks(networks(&LIST)));
        assert!(w.flows.contains(&flow), "the same list");
        w.feed(CoreEvent::Networks(networks(list)));
        // The sender sends by the kernel what was not read.
        assert_eq!((w.flows.len(), w.watched.len(), w.ended.get(&flow)), (0, 0, Some(&0)), "{list:?}");
        assert_eq!(w.core.status().channels, 0);
    }
}

#[test]
fn flow_within_own_namespace_needs_no_list() {
    let mut world = world();
    let (sender, receiver) = ((OWN, "10.7.7.7:5000", "127.0.0.1:53"), (OWN, "127.0.0.1:53", "10.7.7.7:5000"));
    let flow = flow(&mut world, sender, receiver).unwrap();
    world.0.feed(CoreEvent::Networks(networks(&[])));
    assert!(world.0.flows.contains(&flow));
}

#[test]
fn offer_of_a_namespace_that_left_the_list_is_not_taken() {
    let (mut w, web, db) = world();
    let (sender, receiver) = (shown(BLUE, "0.0.0.0:5000"), shown(RED, "0.0.0.0:53"));
    offer(&mut w, web, sender, "10.0.0.3:53");
    w.feed(CoreEvent::Networks(networks(&[("10.0.0.3", RED)])));
    assert_eq!(code(take(&mut w, db, receiver, "10.0.0.2:5000")), Refusal::NoSuchOffer);
}

/// A list by which the kernel may choose another source for a wildcard in [`BLUE`] than 10.0.0.2, though that one is listed.
const TWO_SOURCES: [(&str, u64); 3] = [("10.0.0.2", BLUE), ("10.0.1.2", BLUE), ("10.0.0.3", RED)];

#[test]
fn flow_of_wildcard_ends_when_its_source_is_in_doubt() {
    for (list, sender, well) in [
        (&TWO_SOURCES[..], "0.0.0.0:5000", false),
        // The socket's own address is the source, whatever else is listed.
        (&TWO_SOURCES, "10.0.0.2:5000", true),
        (&LIST, "0.0.0.0:5000", true),
    ] {
        let mut world = world();
        let flow = flow(&mut world, (BLUE, sender, "10.0.0.3:53"), (RED, "0.0.0.0:53", "10.0.0.2:5000")).unwrap();
        world.0.feed(CoreEvent::Networks(networks(list)));
        assert_eq!(world.0.flows.contains(&flow), well, "{sender} {list:?}");
        assert_eq!(world.0.ended.get(&flow), (!well).then_some(&0), "{sender} {list:?}");
    }
}

#[test]
fn offer_of_wildcard_ends_when_its_source_is_in_doubt() {
    for (list, sender, well) in [
        (&TWO_SOURCES[..], "0.0.0.0:5000", false),
        (&TWO_SOURCES, "10.0.0.2:5000", true),
        (&LIST, "0.0.0.0:5000", true),
    ] {
        let (mut w, web, db) = world();
        let entries = w.listed.len();
        offer(&mut w, web, shown(BLUE, sender), "10.0.0.3:53");
        w.feed(CoreEvent::Networks(networks(list)));
        assert_eq!(w.listed.len() > entries, well, "{sender} {list:?}");
        let taken = take(&mut w, db, shown(RED, "0.0.0.0:53"), "10.0.0.2:5000");
        assert_eq!(matches!(taken, Message::DatagramsTaken { .. }), well, "{sender} {list:?}: {taken:?}");
    }
}

#[test]
fn listed_namespaces_still_need_a_connect_rule() {
    for (rule, well) in [("", false), ("[[connect]]\nfrom = 'web'\nto = 'db'\nservice = 'udp-53'\n", true)] {
        let mut w = World::with_policy(&format!("[[join]]\ndomain = '*'\nusers = ['*']\n{rule}"));
        let (web, db) = (w.join_as(1, "web", 1), w.join_as(2, "db", 2));
        w.feed(CoreEvent::Networks(networks(&LIST)));
        let (sender, receiver) = (shown(BLUE, "0.0.0.0:5000"), shown(RED, "0.0.0.0:53"));
        offer(&mut w, web, sender, "10.0.0.3:53");
        match take(&mut w, db, receiver, "10.0.0.2:5000") {
            Message::DatagramsTaken { .. } => assert!(well),
            other => assert!(!well && code(other) == Refusal::Denied),
        }
    }
}

#[test]
fn receiver_is_listed_while_its_namespace_is() {
    let (mut w, web, _) = world();
    w.feed(CoreEvent::Networks(networks(&[])));
    let grouped = SocketFacts { state: SocketState::Grouped, ..shown(BLUE, "0.0.0.0:53") };
    let addresses = AddressList(vec!["10.0.0.2".parse().unwrap()]);
    let published = w.say_of(web, Message::Publish { addresses }, grouped, vec![]);
    let Some(Message::Published { key, .. }) = published else { panic!("{published:?}") };
    let entries = w.listed.len();
    let is_listed = |w: &World| {
        let listed = w.listed.contains_key(&('l', Fingerprint::listener(Transport::Udp, at("10.0.0.2:53"), BLUE)));
        assert_eq!(listed, w.members == [grouped.cookie], "a listener and a member of its group");
        listed
    };
    assert!(!is_listed(&w));
    w.feed(CoreEvent::Networks(networks(&LIST)));
    assert!(is_listed(&w), "the namespace was listed after the program had begun");
    w.feed(CoreEvent::Networks(networks(&[("10.0.0.3", RED)])));
    assert!(!is_listed(&w));
    assert_eq!(w.listed.len(), entries);
    w.feed(CoreEvent::Networks(networks(&LIST)));
    w.ask(web, Message::Withdraw { key });
    assert!(!is_listed(&w) && w.listed.keys().all(|(table, _)| *table == 'a'), "the program's addresses are left");
    w.feed(CoreEvent::Networks(networks(&[])));
    w.feed(CoreEvent::Networks(networks(&LIST)));
    assert!(!is_listed(&w), "nothing of the socket comes back");
    w.end(web);
    assert!(w.listed.is_empty());
}

#[test]
fn quota_keeps_a_receiver_out_of_the_directory() {
    for (quota, well) in [(4, false), (100, true)] {
        let mut w = World::with_policy(&format!("administrators = [1000]\n[quota]\nlisteners = {quota}\n"));
        let web = w.join("web", 1);
        let addresses = AddressList(vec!["10.0.0.2".parse().unwrap()]);
        w.say_of(web, Message::Publish { addresses }, shown(BLUE, "0.0.0.0:53"), vec![]);
        w.feed(CoreEvent::Networks(networks(&LIST)));
        assert_eq!(w.listed.keys().any(|(table, _)| *table == 'l'), well, "{quota}");
    }
}
