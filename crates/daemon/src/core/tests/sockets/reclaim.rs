//! Channels of sockets that come back after the broker has restarted.

use super::*;

/// A connection that some broker before this one knew.
const OLD: u64 = INSTANCE - 7;

pub(super) fn reclaim(w: &mut World, session: u64, side: Side, socket: SocketFacts) -> Message {
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
fn ends_of_old_connection_are_reclaimed_in_either_order() {
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
fn end_gone_before_other_reclaims_leaves_no_channel() {
    let (mut w, web, db) = world();
    assert_eq!(reclaim(&mut w, web, Side::Connecting, client()), Message::Done {});
    w.end(web);
    assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
    assert_eq!(reclaim(&mut w, db, Side::Accepting, server()), Message::Done {});
    assert_eq!(w.core.status().channels, 1);
}

#[test]
fn reclaim_with_socket_of_other_end_is_refused() {
    let (mut w, web, db) = world();
    assert_eq!(reclaim(&mut w, web, Side::Connecting, client()), Message::Done {});
    let elsewhere = |facts: SocketFacts| SocketFacts { netns: 2, cookie: 99, ..facts };
    for (side, socket) in [
        // The side that is there already; ends that do not match; more bytes received than sent; a namespace that any user can make.
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
fn impossible_channel_number_is_not_reclaimed() {
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
fn reclaimed_region_is_shown_to_its_user_and_administrators() {
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
