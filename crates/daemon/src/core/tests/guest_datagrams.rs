//! Flows of datagrams between virtual machines, and between one and the host, that the operator lists; and flows within a machine.

use super::datagrams::{at, code, halves, socket};
use super::guest_sockets::{A, B, C, EVERYBODY, attached, news, refused, room};
use super::*;
use partywall_protocol::wire::{AddressList, RegionReference, Within};

const RING: u64 = 8192;
/// The namespaces of the host and of all agents have one number.
const NETNS: u64 = 1;
const LIST: [(&str, Origin); 3] =
    [("10.0.0.1", Origin::Machine(A)), ("10.0.0.2", Origin::Machine(B)), ("10.0.0.9", Origin::Host)];

fn networks(list: &[(&str, Origin)]) -> Networks {
    let namespace = |origin| NamespaceId { origin, cookie: NETNS };
    // The agent of `c` has not answered.
    let agents = [(A, NETNS), (B, NETNS)];
    Networks::new(Some(NETNS), list.iter().map(|(ip, origin)| (ip.parse().unwrap(), namespace(*origin))))
        .with_agents(agents)
}

fn world(policy: &str) -> World {
    let mut w = attached(policy);
    w.feed(CoreEvent::Networks(networks(&LIST)));
    w
}

/// A region of this ring, in separate memory or at a byte of a window.
fn region(ring: u64, base: Option<u64>) -> RegionReference {
    let near = RegionReference::with_ring(ring);
    base.map_or(near, |base| RegionReference { within: Within::Window, base, ..near })
}

fn offer(w: &mut World, session: u64, sender: &str, to: &str, base: Option<u64>) -> Message {
    let with = vec![w.region(RING)];
    let (to_high, to_low, to_port) = halves(at(to));
    let message = Message::OfferDatagrams { to_high, to_low, to_port, region: region(RING, base) };
    w.say_of(session, message, socket(sender), with).expect("an answer")
}

fn take(w: &mut World, session: u64, receiver: &str, from: &str, base: Option<u64>) -> Message {
    let with = vec![w.region(0)];
    let (from_high, from_low, from_port) = halves(at(from));
    let message = Message::TakeDatagrams { from_high, from_low, from_port, region: region(0, base) };
    w.say_of(session, message, socket(receiver), with).expect("an answer")
}

/// Offers in both steps.
fn offered(w: &mut World, session: u64, sender: &str, to: &str) -> (u64, u64) {
    let base = room(offer(w, session, sender, to, None));
    match offer(w, session, sender, to, Some(base)) {
        Message::Offered { offer } => (offer, base),
        other => panic!("{other:?}"),
    }
}

/// Takes in both steps.
fn taken(w: &mut World, session: u64, receiver: &str, from: &str) -> u64 {
    let base = room(take(w, session, receiver, from, None));
    match take(w, session, receiver, from, Some(base)) {
        Message::DatagramsTaken { flow, region } if region.is_in_window() => flow,
        other => panic!("{other:?}"),
    }
}

/// A flow from `a` to `b`, with the sessions of both.
fn flow(w: &mut World) -> (u64, u64, u64) {
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(B, "b.db", 7));
    let (offer, _) = offered(w, web, "0.0.0.0:5000", "10.0.0.2:53");
    let flow = taken(w, db, "0.0.0.0:53", "10.0.0.1:5000");
    assert_eq!(flow, offer);
    (flow, web, db)
}

#[test]
fn datagrams_of_listed_machines_meet_in_their_windows() {
    let mut w = world(EVERYBODY);
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(B, "b.db", 7));
    let (offer, base) = offered(&mut w, web, "0.0.0.0:5000", "10.0.0.2:53");
    let offers: Vec<_> =
        w.listed_in_machines.keys().filter(|(_, table, _)| *table == 'o').map(|(of, ..)| *of).collect();
    assert!(offers == [B] && w.listed.keys().all(|(table, _)| *table != 'o'), "the receiver's machine alone sees it");
    let flow = taken(&mut w, db, "0.0.0.0:53", "10.0.0.1:5000");
    assert_eq!(flow, offer);
    assert_eq!(w.shown_flows, BTreeSet::from([(flow, Some(A)), (flow, Some(B))]));
    let origins = w.watched[&flow].map(|socket| socket.namespace.origin);
    assert_eq!(origins, [Origin::Machine(A), Origin::Machine(B)]);
    assert_eq!(w.booked.len(), 2);
    assert!(w.booked.iter().any(|(at, _)| *at == base));
    let Message::Receiver { region } = w.ask(web, Message::FetchReceiver { flow }) else { panic!() };
    assert!(region.is_in_window() && region.ring_size == 0);
}

#[test]
fn datagrams_between_host_and_machine_use_directories_of_both() {
    let mut w = world(EVERYBODY);
    let (web, db) = (w.join("web", 7), w.join_as(B, "b.db", 7));
    offered(&mut w, web, "10.0.0.9:5000", "10.0.0.2:53");
    let there = taken(&mut w, db, "10.0.0.2:53", "10.0.0.9:5000");
    offered(&mut w, db, "0.0.0.0:53", "10.0.0.9:5000");
    let back = taken(&mut w, web, "10.0.0.9:5000", "10.0.0.2:53");
    let both = |flow| [(flow, None), (flow, Some(B))];
    assert_eq!(w.shown_flows, both(there).into_iter().chain(both(back)).collect());
}

#[test]
fn flow_between_machines_needs_listed_addresses_of_both() {
    for (machine, sender, to, why) in [
        (A, "10.0.0.7:5000", "10.0.0.2:53", "not listed"),
        (A, "10.0.0.2:5000", "10.0.0.2:53", "the other machine's"),
        (A, "127.0.0.1:5000", "10.0.0.2:53", "loopback"),
        (C, "0.0.0.0:5000", "10.0.0.2:53", "a machine that is not listed"),
        (C, "10.0.0.1:5000", "10.0.0.2:53", "likewise"),
    ] {
        let mut w = world(EVERYBODY);
        let web = w.join_as(machine, "web", 7);
        assert_eq!(code(offer(&mut w, web, sender, to, None)), Refusal::BadSocket, "{why}");
        assert_eq!(w.booked.len(), 0, "{why}");
    }
    // The offer is in order, and another machine or socket wants it.
    for (receiver_in, receiver, from, expected) in [
        (C, "0.0.0.0:53", "10.0.0.1:5000", Refusal::BadSocket),
        (C, "10.0.0.2:53", "10.0.0.1:5000", Refusal::BadSocket),
        (A, "0.0.0.0:53", "10.0.0.1:5000", Refusal::NoSuchOffer),
        (B, "0.0.0.0:54", "10.0.0.1:5000", Refusal::NoSuchOffer),
        (B, "0.0.0.0:53", "10.0.0.1:5001", Refusal::NoSuchOffer),
        (B, "127.0.0.1:53", "10.0.0.1:5000", Refusal::NoSuchOffer),
    ] {
        let mut w = world(EVERYBODY);
        let (web, other) = (w.join_as(A, "web", 7), w.join_as(receiver_in, "other", 8));
        offered(&mut w, web, "0.0.0.0:5000", "10.0.0.2:53");
        assert_eq!(code(take(&mut w, other, receiver, from, None)), expected, "{receiver} {from}");
    }
}

#[test]
fn receiver_in_machine_is_listed_elsewhere_at_its_address() {
    let mut w = world(EVERYBODY);
    let (db, other) = (w.join_as(B, "b.db", 7), w.join_as(C, "c.db", 7));
    let addresses = || AddressList(vec!["10.0.0.2".parse().unwrap(), "10.5.5.5".parse().unwrap()]);
    let mut publish = |session| {
        let answer = w.say_of(session, Message::Publish { addresses: addresses() }, socket("0.0.0.0:53"), vec![]);
        assert!(matches!(answer, Some(Message::Published { .. })), "{answer:?}");
    };
    publish(db);
    publish(other);
    let listener = |ip: &str| Fingerprint::listener(Transport::Udp, at(&format!("{ip}:53")), NETNS);
    let is_listed = |w: &World, machine, ip| w.listed_in_machines.contains_key(&(machine, 'l', listener(ip)));
    assert!(is_listed(&w, A, "10.0.0.2") && w.listed.contains_key(&('l', listener("10.0.0.2"))));
    for machine in [A, B, C] {
        let near = ["10.5.5.5", "127.0.0.1"].map(|ip| is_listed(&w, machine, ip));
        assert_eq!(near, [machine == B; 2], "{machine}: an address that is not listed is the machine's own");
    }
    assert!(is_listed(&w, B, "10.0.0.2"));
    w.feed(CoreEvent::Networks(networks(&[])));
    assert!(!is_listed(&w, A, "10.0.0.2") && !w.listed.contains_key(&('l', listener("10.0.0.2"))));
    assert!(is_listed(&w, B, "10.0.0.2"));
    w.feed(CoreEvent::Networks(Networks::new(Some(NETNS), [])));
    assert!(w.listed_in_machines.keys().all(|(_, table, _)| *table != 'l'), "no agent's namespace is known");
}

#[test]
fn receiver_is_hidden_from_machines_that_may_not_reach_it() {
    let mut w = world("[[connect]]\nfrom = 'a.*'\nto = 'b.*'\nservice = 'udp-53'\n");
    let db = w.join_as(B, "b.db", 7);
    let addresses = AddressList(vec!["10.0.0.2".parse().unwrap()]);
    w.say_of(db, Message::Publish { addresses }, socket("0.0.0.0:53"), vec![]);
    let sees = |machine| w.listed_in_machines.keys().any(|(of, table, _)| (*of, *table) == (machine, 'l'));
    assert!(sees(A) && !sees(C));
}

#[test]
fn flow_between_machines_needs_a_connect_rule() {
    for (rule, expected) in
        [("from = 'a.*'\nto = 'b.*'\nservice = 'udp-53'", true), ("from = 'a.*'\nto = 'c.*'", false)]
    {
        let mut w = world(&format!("[[connect]]\n{rule}\n"));
        let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(B, "b.db", 7));
        offered(&mut w, web, "0.0.0.0:5000", "10.0.0.2:53");
        match take(&mut w, db, "0.0.0.0:53", "10.0.0.1:5000", None) {
            Message::RoomIs { .. } => assert!(expected),
            other => assert!(!expected && code(other) == Refusal::Denied),
        }
    }
}

#[test]
fn host_program_without_administration_has_no_flow_to_machine() {
    let policy = "[[join]]\ndomain = '*'\nusers = ['*']\n[[connect]]\nfrom = '*'\nto = '*'\n";
    let mut w = world(policy);
    let (web, db) = (w.join_as(1, "web", 7), w.join_as(B, "b.db", 7));
    assert_eq!(refused(offer(&mut w, web, "0.0.0.0:5000", "10.0.0.2:53", None)), Refusal::Denied);
    offered(&mut w, db, "0.0.0.0:5000", "10.0.0.9:53");
    assert_eq!(refused(take(&mut w, web, "0.0.0.0:53", "10.0.0.2:5000", None)), Refusal::Denied);
}

#[test]
fn region_of_flow_between_machines_must_be_in_window() {
    let mut w = world(EVERYBODY);
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(B, "b.db", 7));
    assert_eq!(refused(offer(&mut w, web, "0.0.0.0:5000", "10.0.0.2:53", Some(4096))), Refusal::BadRegion);
    let (_, base) = offered(&mut w, web, "0.0.0.0:5000", "10.0.0.2:53");
    let again = offer(&mut w, web, "0.0.0.0:5001", "10.0.0.2:53", Some(base));
    assert_eq!(refused(again), Refusal::BadRegion, "the place is the first offer's");
    assert_eq!(refused(take(&mut w, db, "0.0.0.0:53", "10.0.0.1:5000", Some(base))), Refusal::BadRegion);
    assert_eq!(w.booked.len(), 1, "no place is left over");
    // Within the host it must not be in one.
    let [one, other] = [w.join("one", 8), w.join("other", 9)];
    assert_eq!(refused(offer(&mut w, one, "127.0.0.1:5000", "127.0.0.1:53", Some(base))), Refusal::BadRegion);
    offer(&mut w, one, "127.0.0.1:5000", "127.0.0.1:53", None);
    assert_eq!(refused(take(&mut w, other, "127.0.0.1:53", "127.0.0.1:5000", Some(base))), Refusal::BadRegion);
}

#[test]
fn places_of_ended_flow_are_kept_until_both_sides_close() {
    for lost in [Side::Connecting, Side::Accepting] {
        let mut w = world(EVERYBODY);
        let (flow, web, db) = flow(&mut w);
        w.feed(CoreEvent::FlowLost { flow, side: lost });
        let limit = if lost == Side::Connecting { WRITTEN } else { 0 };
        assert!(w.flows.is_empty() && w.shown_flows.is_empty() && w.watched.is_empty());
        assert_eq!(w.ended.get(&flow), Some(&limit));
        assert_eq!(w.booked.len(), 2, "a program may be in the middle of a datagram");
        w.say(web, Message::Closed { channel: flow }, vec![]);
        assert_eq!(w.booked.len(), 2, "the other may still read");
        w.say(db, Message::Closed { channel: flow }, vec![]);
        assert_eq!((w.booked.len(), w.core.status().channels), (0, 0));
    }
}

#[test]
fn flow_between_machines_ends_when_either_side_closes_or_goes() {
    let mut w = world(EVERYBODY);
    for by_sender in [true, false] {
        let (flow, web, db) = flow(&mut w);
        let (first, second) = if by_sender { (web, db) } else { (db, web) };
        w.say(first, Message::Closed { channel: flow }, vec![]);
        assert_eq!(w.ended.get(&flow), Some(&if by_sender { WRITTEN } else { 0 }));
        assert!(w.shown_flows.is_empty() && w.watched.is_empty());
        assert_eq!(w.booked.len(), 2);
        w.end(second);
        w.end(first);
        assert_eq!((w.booked.len(), w.core.status().channels), (0, 0));
    }
}

#[test]
fn places_of_program_that_was_cut_off_are_not_given_out_again() {
    let mut w = world(EVERYBODY);
    let (flow, web, db) = flow(&mut w);
    w.lose(web);
    assert_eq!(w.ended.get(&flow), Some(&WRITTEN));
    w.end(db);
    assert_eq!((w.booked.len(), w.core.status().channels), (2, 0), "it may still write there");
}

#[test]
fn flow_ends_when_its_machine_leaves_the_list() {
    for list in [&LIST[..1], &LIST[1..], &[("10.0.0.1", Origin::Machine(A)), ("10.0.0.2", Origin::Machine(C))], &[]] {
        let mut w = world(EVERYBODY);
        let (flow, ..) = flow(&mut w);
        w.feed(CoreEvent::Networks(networks(&LIST)));
        assert!(w.flows.contains(&flow), "the same list");
        w.feed(CoreEvent::Networks(networks(list)));
        assert_eq!((w.flows.len(), w.watched.len(), w.ended.get(&flow)), (0, 0, Some(&0)), "{list:?}");
    }
}

#[test]
fn offer_is_dropped_when_its_address_moves_to_another_machine() {
    let is_listed = |w: &World| {
        let in_machines = w.listed_in_machines.keys().any(|(_, table, _)| *table == 'o');
        in_machines || w.listed.keys().any(|(table, _)| *table == 'o')
    };
    for owner in [Origin::Host, Origin::Machine(C)] {
        let mut w = world(EVERYBODY);
        let web = w.join("web", 7);
        let db = if owner == Origin::Host { w.join("db", 8) } else { w.join_as(C, "c.db", 8) };
        offered(&mut w, web, "10.0.0.9:5000", "10.0.0.2:53");
        w.feed(CoreEvent::Networks(networks(&LIST)));
        assert!(is_listed(&w), "the same list");
        // The sender's address stays what it was.
        w.feed(CoreEvent::Networks(networks(&[("10.0.0.9", Origin::Host), ("10.0.0.2", owner)])));
        let answer = take(&mut w, db, "10.0.0.2:53", "10.0.0.9:5000", None);
        assert_eq!(code(answer), Refusal::NoSuchOffer, "its region may lie in another machine's window");
        assert!(!is_listed(&w));
    }
}

#[test]
fn destroyed_socket_of_host_ends_no_flow_of_machines() {
    let mut w = world(EVERYBODY);
    let (flow, ..) = flow(&mut w);
    let cookie = w.watched[&flow][0].cookie;
    w.feed(CoreEvent::SocketGone { cookie });
    assert!(w.flows.contains(&flow), "a socket of the machine has the same number");
}

#[test]
fn machine_that_migrates_gets_no_flow() {
    let mut w = world(EVERYBODY);
    let web = w.join_as(A, "a.web", 7);
    news(&mut w, MachineNews::Migrating { machine: B, leaves: true });
    assert_eq!(refused(offer(&mut w, web, "0.0.0.0:5000", "10.0.0.2:53", None)), Refusal::Machine);
}

#[test]
fn flows_of_one_machine_are_limited() {
    const MOST: u16 = 512;
    let mut w = world(EVERYBODY);
    let (web, db, own) = (w.join_as(A, "a.web", 7), w.join_as(B, "b.db", 7), w.join("own", 7));
    let sender = |n: u16| format!("0.0.0.0:{}", 5000 + n);
    for n in 0..MOST {
        offered(&mut w, web, &sender(n), "10.0.0.2:53");
        taken(&mut w, db, "0.0.0.0:53", &format!("10.0.0.1:{}", 5000 + n));
    }
    assert_eq!(refused(offer(&mut w, web, &sender(MOST), "10.0.0.2:53", None)), Refusal::OutOfResources);
    // The host's offer is not limited, and the receiver's machine has as many as it may.
    offered(&mut w, own, "10.0.0.9:5000", "10.0.0.2:53");
    assert_eq!(refused(take(&mut w, db, "0.0.0.0:53", "10.0.0.9:5000", None)), Refusal::OutOfResources);
    assert_eq!(w.flows.len(), usize::from(MOST));
}

/// A flow within `a`, with the sessions of its ends.
fn flow_within(w: &mut World) -> (u64, u64, u64) {
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(A, "a.db", 8));
    let Message::Offered { offer } = offer(w, web, "127.0.0.1:5000", "127.0.0.1:53", None) else { panic!() };
    match take(w, db, "0.0.0.0:53", "127.0.0.1:5000", None) {
        Message::DatagramsTaken { flow, region } if flow == offer && !region.is_in_window() => (flow, web, db),
        other => panic!("{other:?}"),
    }
}

#[test]
fn datagrams_within_a_machine_use_no_window() {
    // Sender, to where it sends, receiver, and the source that the receiver sees. Of these addresses the list has 10.0.0.1 only.
    for (sender, to, receiver, from) in [
        ("127.0.0.1:5000", "127.0.0.1:53", "127.0.0.1:53", "127.0.0.1:5000"),
        ("0.0.0.0:5000", "127.0.0.1:53", "0.0.0.0:53", "127.0.0.1:5000"),
        ("[::]:5000", "[::1]:53", "[::]:53", "[::1]:5000"),
        ("0.0.0.0:5000", "10.5.5.5:53", "10.5.5.5:53", "10.5.5.5:5000"),
        ("10.5.5.6:5000", "10.5.5.5:53", "10.5.5.5:53", "10.5.5.6:5000"),
        ("0.0.0.0:5000", "10.0.0.1:53", "0.0.0.0:53", "10.0.0.1:5000"),
    ] {
        let mut w = world(EVERYBODY);
        let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(A, "a.db", 8));
        let Message::Offered { offer } = offer(&mut w, web, sender, to, None) else { panic!("{sender} {to}") };
        let offers = w.listed_in_machines.keys().filter(|(_, table, _)| *table == 'o').map(|(of, ..)| *of);
        assert_eq!(offers.collect::<Vec<_>>(), [A], "the machine alone sees it");
        // Sockets with the same addresses, of which the host and another machine have such, too.
        for (name, other) in [("b.db", w.join_as(B, "b.db", 8)), ("db", w.join("db", 8))] {
            assert_eq!(code(take(&mut w, other, receiver, from, None)), Refusal::NoSuchOffer, "{name}");
        }
        let Message::DatagramsTaken { flow, region } = take(&mut w, db, receiver, from, None) else { panic!("{from}") };
        assert!(flow == offer && !region.is_in_window(), "{from}");
        assert_eq!(w.shown_flows, BTreeSet::from([(flow, Some(A))]));
        assert!(w.separate_flows.contains(&flow), "its proof is its agent's");
        assert_eq!(w.watched[&flow].map(|socket| socket.namespace.origin), [Origin::Machine(A); 2]);
        assert_eq!(w.booked.len(), 0);
        let Message::Receiver { region } = w.ask(web, Message::FetchReceiver { flow }) else { panic!() };
        assert!(!region.is_in_window() && region.ring_size == 0);
    }
}

#[test]
fn group_member_in_a_machine_has_flows_and_proves_none_of_host() {
    let mut w = world(EVERYBODY);
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(A, "a.db", 8));
    let grouped = SocketFacts { state: SocketState::Grouped, ..socket("127.0.0.1:53") };
    let publish = Message::Publish { addresses: AddressList::default() };
    let published = w.say_of(db, publish, grouped, vec![]);
    assert!(matches!(published, Some(Message::Published { .. })), "{published:?}");
    assert_eq!(w.members, [0; 0], "a socket of the host has the same number");
    offer(&mut w, web, "127.0.0.1:5000", "127.0.0.1:53", None);
    let (from_high, from_low, from_port) = halves(at("127.0.0.1:5000"));
    let take = Message::TakeDatagrams { from_high, from_low, from_port, region: region(0, None) };
    let with = vec![w.region(0)];
    let taken = w.say_of(db, take, grouped, with);
    let Some(Message::DatagramsTaken { flow, .. }) = taken else { panic!("{taken:?}") };
    let of_groups = w.watched[&flow].map(|socket| socket.question().in_group);
    assert_eq!(of_groups, [false, true], "the agent looks for the members");
}

#[test]
fn datagrams_of_containers_in_a_machine_stay_on_kernel() {
    let mut w = world(EVERYBODY);
    let (web, db, other) = (w.join_as(A, "a.web", 7), w.join_as(A, "a.db", 8), w.join_as(C, "c.web", 7));
    assert_eq!(code(offer(&mut w, other, "127.0.0.1:5000", "127.0.0.1:53", None)), Refusal::BadSocket, "unknown");
    let mut shown = |session, message, local, netns| {
        let with = vec![w.region(RING)];
        let socket = SocketFacts { netns, ..socket(local) };
        w.say_of(session, message, socket, with).expect("an answer")
    };
    let offer = || {
        let (to_high, to_low, to_port) = halves(at("127.0.0.1:53"));
        Message::OfferDatagrams { to_high, to_low, to_port, region: region(RING, None) }
    };
    let (from_high, from_low, from_port) = halves(at("127.0.0.1:5000"));
    let take = Message::TakeDatagrams { from_high, from_low, from_port, region: region(0, None) };
    assert_eq!(code(shown(web, offer(), "127.0.0.1:5000", NETNS + 1)), Refusal::BadSocket);
    assert!(matches!(shown(web, offer(), "127.0.0.1:5000", NETNS), Message::Offered { .. }));
    assert_eq!(code(shown(db, take, "127.0.0.1:53", NETNS + 1)), Refusal::BadSocket);
}

#[test]
fn flow_within_a_machine_needs_a_rule() {
    for (policy, expected) in [
        ("[sockets]\nsame_user = false\n", false),
        ("[sockets]\nsame_user = false\n[[connect]]\nfrom = 'a.web'\nto = 'a.db'\nservice = 'udp-53'\n", true),
        ("[sockets]\nsame_user = false\n[[connect]]\nfrom = 'a.web'\nto = 'a.db'\nservice = 'udp-54'\n", false),
        // All programs of a machine are of one user.
        ("", true),
    ] {
        let mut w = world(policy);
        let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(A, "a.db", 8));
        offer(&mut w, web, "127.0.0.1:5000", "127.0.0.1:53", None);
        match take(&mut w, db, "127.0.0.1:53", "127.0.0.1:5000", None) {
            Message::DatagramsTaken { .. } => assert!(expected, "{policy}"),
            other => assert!(!expected && code(other) == Refusal::Denied, "{policy}"),
        }
    }
}

#[test]
fn region_of_flow_within_a_machine_is_in_no_window() {
    let mut w = world(EVERYBODY);
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(A, "a.db", 8));
    let (_, base) = offered(&mut w, web, "0.0.0.0:5001", "10.0.0.2:53");
    let far = offer(&mut w, web, "127.0.0.1:5000", "127.0.0.1:53", Some(base));
    assert_eq!(code(far), Refusal::BadRegion);
    offer(&mut w, web, "127.0.0.1:5000", "127.0.0.1:53", None);
    assert_eq!(code(take(&mut w, db, "127.0.0.1:53", "127.0.0.1:5000", Some(base))), Refusal::BadRegion);
}

#[test]
fn flow_within_a_machine_ends_at_tail_that_agent_reports() {
    const TAIL: u64 = 4096;
    let written = |w: &mut World, machine, flow| w.core.flow_written(machine, flow, TAIL);
    for (reported, by_sender, limit) in [(true, true, TAIL), (false, true, 0), (true, false, 0)] {
        let mut w = world(EVERYBODY);
        let (flow, web, db) = flow_within(&mut w);
        if reported {
            written(&mut w, A, flow);
        }
        w.say(if by_sender { web } else { db }, Message::Closed { channel: flow }, vec![]);
        assert_eq!(w.ended.get(&flow), Some(&limit), "{reported} {by_sender}");
        assert!(w.flows.is_empty() && w.shown_flows.is_empty() && w.watched.is_empty());
        assert_eq!(w.core.status().channels, 0, "both sides, as on a host");
    }
    // A report is about a flow within its own machine, and of no flow that the broker can read itself.
    let mut w = world(EVERYBODY);
    let (flow, web, _) = flow_within(&mut w);
    written(&mut w, B, flow);
    written(&mut w, A, flow + 1);
    w.end(web);
    assert_eq!(w.ended.get(&flow), Some(&0));
    let mut w = world(EVERYBODY);
    let (flow, web, _) = self::flow(&mut w);
    written(&mut w, A, flow);
    w.end(web);
    assert_eq!(w.ended.get(&flow), Some(&WRITTEN));
}

#[test]
fn flow_within_a_machine_ends_with_its_socket_list_or_agent() {
    for lost in [Side::Connecting, Side::Accepting] {
        let mut w = world(EVERYBODY);
        let (flow, ..) = flow_within(&mut w);
        let cookie = w.watched[&flow][0].cookie;
        w.feed(CoreEvent::SocketGone { cookie });
        w.feed(CoreEvent::Networks(networks(&[])));
        assert!(w.flows.contains(&flow), "a socket of the host has the same number, and no list is needed");
        w.feed(CoreEvent::FlowLost { flow, side: lost });
        assert_eq!((w.ended.get(&flow), w.core.status().channels), (Some(&0), 0));
    }
    let mut w = world(EVERYBODY);
    let (flow, ..) = flow_within(&mut w);
    // Another agent has greeted.
    w.feed(CoreEvent::Networks(Networks::new(Some(NETNS), []).with_agents([(B, NETNS)])));
    assert_eq!((w.ended.get(&flow), w.core.status().channels), (Some(&0), 0));
}

#[test]
fn flows_and_offers_within_one_machine_are_limited() {
    const MOST: u16 = 512;
    let mut w = world(EVERYBODY);
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(A, "a.db", 8));
    let sender = |n: u16| format!("127.0.0.1:{}", 5000 + n);
    for n in 0..MOST {
        let answer = offer(&mut w, web, &sender(n), "127.0.0.1:53", None);
        assert!(matches!(answer, Message::Offered { .. }), "{n}: {answer:?}");
        // A machine's share in all offers is less than that.
        if n >= 200 {
            assert!(matches!(take(&mut w, db, "127.0.0.1:53", &sender(n), None), Message::DatagramsTaken { .. }));
        }
    }
    assert_eq!(refused(offer(&mut w, web, &sender(MOST), "127.0.0.1:53", None)), Refusal::OutOfResources);
    // An offer in place of an earlier one needs no further slot.
    for _ in 0..2 {
        assert!(matches!(offer(&mut w, web, &sender(0), "127.0.0.1:53", None), Message::Offered { .. }));
    }
    assert_eq!(refused(offer(&mut w, web, &sender(200), "127.0.0.1:53", None)), Refusal::OutOfResources, "a flow's");
    let other = w.join_as(B, "b.web", 7);
    assert!(matches!(offer(&mut w, other, &sender(0), "127.0.0.1:53", None), Message::Offered { .. }));
}

#[test]
fn flows_of_machines_leave_slots_to_the_host() {
    const MOST: usize = partywall_protocol::directory::FLOWS / 2;
    let policy = Policy::parse(EVERYBODY).unwrap();
    let many = 1 << 15;
    let mut w = World::sized(policy, 1, Capacity { sessions: 1000, regions: many, offers: many, entries: many });
    let machines: Vec<_> = (1..=9).map(|n| MachineId::new(n).unwrap()).collect();
    for machine in &machines {
        let (machine, name) = (*machine, Name::new(&format!("m{machine}")).unwrap());
        news(&mut w, MachineNews::Added { machine, name, monitor: "m".into(), port: "p".into() });
    }
    let agents = machines.iter().map(|machine| (*machine, NETNS));
    w.feed(CoreEvent::Networks(Networks::new(Some(NETNS), []).with_agents(agents)));
    // Offers are not taken here. A program has a quota of them, and a machine may have several programs.
    let mut has = Vec::new();
    for machine in &machines {
        let mut count = 0;
        'programs: for program in 0.. {
            let session = w.join_as(*machine, &format!("m{machine}.p{program}"), 7 + program);
            for port in 1..=100 {
                let sender = format!("127.0.0.1:{}", 1000 * (program + 1) + port);
                match offer_without_checks(&mut w, session, &sender) {
                    Message::Offered { .. } => count += 1,
                    other => {
                        assert_eq!(refused(other), Refusal::OutOfResources);
                        break 'programs;
                    }
                }
            }
        }
        has.push(count);
    }
    w.core.check_invariants();
    assert!(has.iter().all(|count| (32..=512).contains(count)) && has[..3] == [512; 3], "{has:?}");
    assert!(has.iter().sum::<usize>() <= MOST, "{has:?}");
    let own = w.join("own", 7);
    assert!(matches!(offer_without_checks(&mut w, own, "127.0.0.1:5000"), Message::Offered { .. }));
}

/// An offer within a host or a machine, after which not all accounts are checked.
fn offer_without_checks(w: &mut World, session: u64, sender: &str) -> Message {
    let (to_high, to_low, to_port) = halves(at("127.0.0.1:53"));
    let message = Message::OfferDatagrams { to_high, to_low, to_port, region: region(RING, None) };
    let (session, descriptors) = (SessionId(session), vec![w.region(RING)]);
    let socket = Some(Ok(socket(sender)));
    let actions = w.core.handle(NOW, CoreEvent::Message { session, request: 1, message, descriptors, socket });
    let answers = actions.into_iter().filter_map(|action| match action {
        Action::Send { message, .. } => Some(message),
        _ => None,
    });
    answers.last().expect("an answer")
}
