//! The pairs of sockets whose datagrams may go by a ring.

use std::net::SocketAddr;

use partywall_protocol::directory::{Fingerprint, Transport};
use partywall_protocol::wire::AddressList;
use partywall_shm::address::wide;

use super::*;

pub(super) fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A socket for datagrams in namespace 1; its cookie is made of its address.
pub(super) fn socket(local: &str) -> SocketFacts {
    let local = at(local);
    let cookie = wide(local.ip()) as u64 ^ u64::from(local.port()) << 32;
    SocketFacts { cookie, ..facts(Transport::Udp, local, None) }
}

pub(super) fn halves(at: SocketAddr) -> (u64, u64, u16) {
    let bits = wide(at.ip());
    ((bits >> 64) as u64, bits as u64, at.port())
}

pub(super) fn offer(w: &mut World, session: u64, socket: SocketFacts, to: &str) -> Message {
    let with = vec![w.region(8192)];
    let (to_high, to_low, to_port) = halves(at(to));
    let message = Message::OfferDatagrams { to_high, to_low, to_port, region: RegionReference::with_ring(8192) };
    w.say_of(session, message, socket, with).expect("an answer")
}

pub(super) fn take(w: &mut World, session: u64, socket: SocketFacts, from: &str) -> Message {
    let with = vec![w.region(0)];
    let (from_high, from_low, from_port) = halves(at(from));
    w.say_of(
        session,
        Message::TakeDatagrams { from_high, from_low, from_port, region: RegionReference::with_ring(0) },
        socket,
        with,
    )
    .expect("an answer")
}

pub(super) fn code(message: Message) -> Refusal {
    match message {
        Message::Refused { code, .. } => code,
        other => panic!("not refused: {other:?}"),
    }
}

fn world() -> (World, u64, u64) {
    let mut w = World::new();
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    (w, web, db)
}

#[test]
fn datagram_socket_is_listed_as_udp() {
    let (mut w, web, _) = world();
    w.say_of(web, Message::Publish { addresses: AddressList::default() }, socket("127.0.0.1:53"), vec![]);
    let listed = |transport| w.listed.contains_key(&('l', Fingerprint::listener(transport, at("127.0.0.1:53"), 1)));
    assert!(listed(Transport::Udp) && !listed(Transport::Tcp));
}

#[test]
fn datagram_ring_binds_one_source_to_receiving_socket() {
    // Sender, to where it sends, receiver, and the address that the receiver sees the datagrams come from.
    for (sender, to, receiver, from, well) in [
        ("127.0.0.1:5000", "127.0.0.1:53", "127.0.0.1:53", "127.0.0.1:5000", true),
        ("0.0.0.0:5000", "127.0.0.1:53", "0.0.0.0:53", "127.0.0.1:5000", true),
        ("0.0.0.0:5000", "127.0.0.9:53", "127.0.0.9:53", "127.0.0.1:5000", true),
        ("0.0.0.0:5000", "10.0.0.1:53", "10.0.0.1:53", "10.0.0.1:5000", true),
        ("10.0.0.7:5000", "10.0.0.1:53", "10.0.0.1:53", "10.0.0.7:5000", true),
        ("[::]:5000", "[::1]:53", "[::]:53", "[::1]:5000", true),
        ("[::]:5000", "127.0.0.1:53", "[::]:53", "127.0.0.1:5000", true),
        // Another source than the sender's own.
        ("127.0.0.1:5000", "127.0.0.1:53", "127.0.0.1:53", "127.0.0.1:5001", false),
        ("127.0.0.1:5000", "127.0.0.1:53", "127.0.0.1:53", "10.0.0.1:5000", false),
        ("0.0.0.0:5000", "10.0.0.1:53", "10.0.0.1:53", "127.0.0.1:5000", false),
        // Another socket than the one that receives there.
        ("127.0.0.1:5000", "127.0.0.1:53", "127.0.0.1:54", "127.0.0.1:5000", false),
        ("127.0.0.1:5000", "127.0.0.1:53", "127.0.0.2:53", "127.0.0.1:5000", false),
        // Only the kernel knows whether a wildcard receives datagrams sent there.
        ("0.0.0.0:5000", "8.8.8.8:53", "0.0.0.0:53", "8.8.8.8:5000", false),
        ("127.0.0.1:5000", "[::1]:53", "0.0.0.0:53", "127.0.0.1:5000", false),
    ] {
        let (mut w, web, db) = world();
        let Message::Offered { offer } = offer(&mut w, web, socket(sender), to) else { panic!("{sender} {to}") };
        let answer = take(&mut w, db, socket(receiver), from);
        match answer {
            Message::DatagramsTaken { flow, region: RegionReference { ring_size: 8192, .. } } if well => {
                assert_eq!(flow, offer)
            }
            Message::Refused { code: Refusal::NoSuchOffer, .. } if !well => {}
            other => panic!("{sender} to {to}, {receiver} from {from}: {other:?}"),
        }
    }
}

#[test]
fn datagram_rings_require_same_namespace_and_matching_peer() {
    let (mut w, web, db) = world();
    offer(&mut w, web, socket("127.0.0.1:5000"), "127.0.0.1:53");
    let receiver = socket("127.0.0.1:53");
    let elsewhere = SocketFacts { netns: 2, ..receiver };
    assert_eq!(code(take(&mut w, db, elsewhere, "127.0.0.1:5000")), Refusal::BadSocket);
    let connected = |to: &str| SocketFacts { remote: Some(at(to)), ..receiver };
    assert_eq!(code(take(&mut w, db, connected("127.0.0.1:9"), "127.0.0.1:5000")), Refusal::NoSuchOffer);
    let taken = take(&mut w, db, connected("127.0.0.1:5000"), "127.0.0.1:5000");
    assert!(matches!(taken, Message::DatagramsTaken { .. }), "{taken:?}");
}

#[test]
fn bound_multicast_and_tcp_sockets_get_no_datagram_ring() {
    let (mut w, web, db) = world();
    let one = socket("127.0.0.1:5000");
    // The event loop calls a socket that is bound to a device, or to an address that is not its own, other.
    let bound = SocketFacts { state: SocketState::Other, ..one };
    assert_eq!(code(offer(&mut w, web, bound, "127.0.0.1:53")), Refusal::BadSocket);
    let tcp = SocketFacts { transport: Transport::Tcp, ..one };
    assert_eq!(code(offer(&mut w, web, tcp, "127.0.0.1:53")), Refusal::BadSocket);
    for to in ["224.0.0.1:53", "0.0.0.0:53", "127.0.0.1:0", "[ff02::1]:53"] {
        assert_eq!(code(offer(&mut w, web, one, to)), Refusal::BadSocket, "{to}");
    }
    offer(&mut w, web, one, "127.0.0.1:53");
    let grouped = SocketFacts { state: SocketState::Other, ..socket("127.0.0.1:53") };
    assert_eq!(code(take(&mut w, db, grouped, "127.0.0.1:5000")), Refusal::BadSocket);
    // And a socket for datagrams is none for a connection.
    let with = vec![w.region(8192)];
    let connection = SocketFacts { remote: Some(at("127.0.0.1:53")), ..one };
    let message = Message::Offer { region: RegionReference::with_ring(8192) };
    assert_eq!(code(w.say_of(web, message, connection, with).unwrap()), Refusal::BadSocket);
}

#[test]
fn datagram_offer_is_replaced_cancelled_and_counted() {
    let (mut w, web, db) = world();
    let before = w.open_descriptors();
    let one = socket("127.0.0.1:5000");
    let Message::Offered { offer: first } = offer(&mut w, web, one, "127.0.0.1:53") else { panic!() };
    let Message::Offered { offer: second } = offer(&mut w, web, one, "127.0.0.1:53") else { panic!() };
    assert_eq!(w.refused(web, Message::Cancel { offer: first }, vec![]), Refusal::NoSuchOffer);
    // To another place at the same time.
    assert!(matches!(offer(&mut w, web, one, "127.0.0.1:54"), Message::Offered { .. }));
    assert_eq!(w.ask(web, Message::Cancel { offer: second }), Message::Done {});
    assert_eq!(code(take(&mut w, db, socket("127.0.0.1:53"), "127.0.0.1:5000")), Refusal::NoSuchOffer);
    assert!(matches!(take(&mut w, db, socket("127.0.0.1:54"), "127.0.0.1:5000"), Message::DatagramsTaken { .. }));
    w.end(web);
    w.end(db);
    assert!(w.listed.keys().all(|(table, _)| *table != 'o'));
    assert_eq!(w.open_descriptors(), before);
}

#[test]
fn flow_is_forgotten_when_either_end_goes() {
    for sender_goes in [true, false] {
        for dies in [true, false] {
            let (mut w, web, db) = world();
            offer(&mut w, web, socket("127.0.0.1:5000"), "127.0.0.1:53");
            let Message::DatagramsTaken { flow: channel, .. } =
                take(&mut w, db, socket("127.0.0.1:53"), "127.0.0.1:5000")
            else {
                panic!("not taken")
            };
            w.sent.clear();
            let (goes, stays) = if sender_goes { (web, db) } else { (db, web) };
            if dies {
                w.end(goes);
            } else {
                w.say(goes, Message::Closed { channel }, vec![]);
            }
            assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
            // The other side notices it later, and closes its end.
            assert_eq!(w.say(stays, Message::Closed { channel }, vec![]), None);
        }
    }
}

/// A flow between two sockets, and its number.
fn flow(w: &mut World, web: u64, db: u64) -> u64 {
    offer(w, web, socket("127.0.0.1:5000"), "127.0.0.1:53");
    match take(w, db, socket("127.0.0.1:53"), "127.0.0.1:5000") {
        Message::DatagramsTaken { flow, .. } => flow,
        other => panic!("not taken: {other:?}"),
    }
}

#[test]
fn flow_is_live_while_both_sockets_are_watched() {
    let (mut w, web, db) = world();
    let flow = flow(&mut w, web, db);
    assert!(w.flows.contains(&flow));
    let [sender, receiver] = w.watched[&flow];
    assert_eq!((sender.cookie, sender.to), (socket("127.0.0.1:5000").cookie, at("127.0.0.1:5000")));
    assert_eq!((receiver.cookie, receiver.to), (socket("127.0.0.1:53").cookie, at("127.0.0.1:53")));
    assert_eq!((sender.from, receiver.from), (receiver.to, sender.to));
}

#[test]
fn flow_ends_when_either_socket_is_gone() {
    // The bytes that a sender has written are its own. Bytes that a receiver has not read belong to the next owner of its port.
    for (gone, limit) in [("127.0.0.1:5000", WRITTEN), ("127.0.0.1:53", 0)] {
        let (mut w, web, db) = world();
        let flow = flow(&mut w, web, db);
        w.feed(CoreEvent::SocketGone { cookie: 12345 });
        assert!(w.flows.contains(&flow), "another socket");
        w.feed(CoreEvent::SocketGone { cookie: socket(gone).cookie });
        assert_eq!((w.flows.len(), w.watched.len(), w.ended.get(&flow)), (0, 0, Some(&limit)), "{gone}");
        assert_eq!(w.core.status().channels, 0);
    }
}

#[test]
fn flow_whose_socket_went_before_it_was_taken_never_lives() {
    let (mut w, web, db) = world();
    w.gone.insert(socket("127.0.0.1:5000").cookie);
    let flow = flow(&mut w, web, db);
    assert!(w.flows.is_empty() && w.ended.contains_key(&flow));
    assert_eq!(w.refused(web, Message::FetchReceiver { flow }, vec![]), Refusal::NoSuchChannel);
}

#[test]
fn sender_alone_fetches_the_region_of_its_receiver_once() {
    let (mut w, web, db) = world();
    let flow = flow(&mut w, web, db);
    for session in [db, w.join("other", 3)] {
        assert_eq!(w.refused(session, Message::FetchReceiver { flow }, vec![]), Refusal::NoSuchChannel);
    }
    assert_eq!(
        w.ask(web, Message::FetchReceiver { flow }),
        Message::Receiver { region: RegionReference::with_ring(0) }
    );
    assert_eq!(w.refused(web, Message::FetchReceiver { flow }, vec![]), Refusal::NoSuchChannel);
}

#[test]
fn flow_that_both_ends_have_left_is_watched_no_longer() {
    let (mut w, web, db) = world();
    let flow = flow(&mut w, web, db);
    w.say(web, Message::Closed { channel: flow }, vec![]);
    assert_eq!((w.watched.len(), w.ended.get(&flow)), (0, Some(&WRITTEN)));
}

#[test]
fn same_user_exception_can_be_disabled_for_datagrams() {
    for (same_user, well) in [(true, true), (false, false)] {
        let policy = format!("[[join]]\ndomain = '*'\nusers = [1]\n[sockets]\nsame_user = {same_user}");
        let mut w = World::with_policy(&policy);
        let (web, db) = (w.join_as(1, "web", 1), w.join_as(1, "db", 2));
        let (sender, receiver) = (socket("127.0.0.1:5000"), socket("127.0.0.1:53"));
        assert!(matches!(offer(&mut w, web, sender, "127.0.0.1:53"), Message::Offered { .. }));
        let taken = take(&mut w, db, receiver, "127.0.0.1:5000");
        assert_eq!(matches!(taken, Message::DatagramsTaken { .. }), well, "{taken:?}");
        assert!(well || code(taken) == Refusal::Denied);
    }
}

#[test]
fn domain_with_room_for_one_end_has_no_flow_to_itself() {
    for (channels, taken) in [(1, false), (2, true)] {
        let mut w = World::with_policy(&format!("administrators = [1000]\n[quota]\nchannels = {channels}"));
        let web = w.join("web", 1);
        offer(&mut w, web, socket("127.0.0.1:5000"), "127.0.0.1:53");
        match take(&mut w, web, socket("127.0.0.1:53"), "127.0.0.1:5000") {
            Message::DatagramsTaken { .. } if taken => {}
            Message::Refused { code: Refusal::Quota, .. } if !taken => {}
            other => panic!("with room for {channels}: {other:?}"),
        }
    }
}

#[test]
fn published_group_member_is_listed_until_withdrawn() {
    let (mut w, web, db) = world();
    let grouped = SocketFacts { state: SocketState::Grouped, ..socket("127.0.0.1:53") };
    let publish = |w: &mut World, session, socket| {
        w.say_of(session, Message::Publish { addresses: AddressList::default() }, socket, vec![])
    };
    let Some(Message::Published { key, .. }) = publish(&mut w, web, grouped) else { panic!("refused") };
    publish(&mut w, db, SocketFacts { cookie: 9, ..grouped });
    publish(&mut w, db, socket("127.0.0.1:54"));
    assert_eq!(w.members, [grouped.cookie, 9]);
    assert!(w.listed.contains_key(&('l', Fingerprint::listener(Transport::Udp, at("127.0.0.1:53"), 1))));
    w.say(web, Message::Withdraw { key }, vec![]);
    assert_eq!(w.members, [9]);
    w.lose(db);
    assert_eq!(w.members, [0; 0]);
}

#[test]
fn connected_group_member_is_watched_as_one_of_a_group() {
    for remote in [None, Some(at("127.0.0.1:5000"))] {
        let (mut w, web, db) = world();
        offer(&mut w, web, socket("127.0.0.1:5000"), "127.0.0.1:53");
        let receiver = SocketFacts { state: SocketState::Grouped, remote, ..socket("127.0.0.1:53") };
        let Message::DatagramsTaken { flow, .. } = take(&mut w, db, receiver, "127.0.0.1:5000") else {
            panic!("refused")
        };
        assert_eq!(w.watched[&flow].map(|socket| socket.is_chosen), [false, true], "it may be unconnected later");
    }
}
