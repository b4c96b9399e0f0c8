//! Channels that are older than the broker.

use partywall_protocol::wire::Side;

use super::*;

/// A channel that some broker before this one gave out.
pub(super) const OLD: u64 = INSTANCE - 7;

pub(super) fn claim(side: Side, peer: &str) -> Message {
    Message::Reclaim {
        channel: OLD,
        side,
        peer: peer.to_owned(),
        service: "sql".to_owned(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region: RegionReference::with_ring(8192),
    }
}

pub(super) fn reclaim(w: &mut World, session: u64, message: Message) -> Message {
    let region = vec![w.region(8192)];
    w.say(session, message, region).unwrap()
}

fn contradicts(w: &mut World, session: u64, message: Message) {
    let region = vec![w.region(8192)];
    assert_eq!(w.refused(session, message, region), Refusal::SelfContradiction);
}

#[test]
fn reclaim_works_in_either_order_of_sides() {
    for order in [[0, 1], [1, 0]] {
        let mut w = World::new();
        let sessions = [w.join("web", 1), w.join("db", 2)];
        let claims = [claim(Side::Connecting, "db"), claim(Side::Accepting, "web")];
        for i in order {
            assert_eq!(reclaim(&mut w, sessions[i], claims[i].clone()), Message::Done {});
        }
        assert_eq!(w.core.status().channels, 1);
        assert_eq!(
            w.ask(sessions[0], Message::Inspect { channel: OLD }),
            Message::Regions { connecting: true, accepting: true }
        );
        w.sent.clear();
        assert_eq!(w.open_descriptors(), 2);
        w.end(sessions[0]);
        w.say(sessions[1], Message::Closed { channel: OLD }, vec![]);
        assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
    }
}

#[test]
fn half_reclaimed_channel_ends_with_its_session() {
    let mut w = World::new();
    let web = w.join("web", 1);
    assert_eq!(reclaim(&mut w, web, claim(Side::Connecting, "db")), Message::Done {});
    assert_eq!(w.core.status().channels, 1);
    w.end(web);
    assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
}

#[test]
fn contradicting_reclaim_is_refused_and_first_claim_stands() {
    let mut w = World::new();
    let (web, db, third) = (w.join("web", 1), w.join("db", 2), w.join("third", 3));
    assert_eq!(reclaim(&mut w, web, claim(Side::Connecting, "db")), Message::Done {});

    contradicts(&mut w, third, claim(Side::Accepting, "web"));
    contradicts(&mut w, third, claim(Side::Connecting, "db"));
    contradicts(&mut w, web, claim(Side::Connecting, "db"));
    contradicts(&mut w, db, claim(Side::Accepting, "third"));
    contradicts(&mut w, db, claim(Side::Connecting, "web"));
    for change in [
        |m: &mut Message| {
            if let Message::Reclaim { kind, .. } = m {
                *kind = Kind::Message
            }
        },
        |m: &mut Message| {
            if let Message::Reclaim { directions, .. } = m {
                *directions = Directions::FORWARD
            }
        },
        |m: &mut Message| {
            if let Message::Reclaim { service, .. } = m {
                "other".clone_into(service)
            }
        },
    ] {
        let mut message = claim(Side::Accepting, "web");
        change(&mut message);
        contradicts(&mut w, db, message);
    }
    assert_eq!(w.open_descriptors(), 1);
    assert_eq!(reclaim(&mut w, db, claim(Side::Accepting, "web")), Message::Done {});
    assert_eq!(w.open_descriptors(), 2);
}

#[test]
fn reclaim_of_unissued_number_is_refused() {
    let mut w = World::new();
    let web = w.join("web", 1);
    let mut message = claim(Side::Connecting, "db");
    if let Message::Reclaim { channel, .. } = &mut message {
        *channel = INSTANCE + 1;
    }
    let region = vec![w.region(8192)];
    assert_eq!(w.refused(web, message, region), Refusal::NoSuchChannel);
    let db = w.join("db", 2);
    w.bind(db, "sql", 1);
    assert_eq!(w.connect(web, "db", "sql"), INSTANCE + 1);
}

#[test]
fn client_reclaims_its_end_after_losing_only_its_session() {
    let mut w = World::new();
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    w.bind(db, "sql", 1);
    let number = w.connect(web, "db", "sql");
    w.accept(db, number);
    w.end(web);
    let web = w.join("web", 1);
    let mut message = claim(Side::Connecting, "db");
    if let Message::Reclaim { channel, .. } = &mut message {
        *channel = number;
    }
    assert_eq!(reclaim(&mut w, web, message.clone()), Message::Done {});
    contradicts(&mut w, web, message);
}

#[test]
fn another_user_cannot_take_over_an_end() {
    let mut w = World::with_policy("administrators=[1,2]");
    let (web, db) = (w.join_as(1, "web", 1), w.join_as(1, "db", 2));
    reclaim(&mut w, web, claim(Side::Connecting, "db"));
    reclaim(&mut w, db, claim(Side::Accepting, "web"));
    w.end(web);
    let impostor = w.join_as(2, "web", 3);
    contradicts(&mut w, impostor, claim(Side::Connecting, "db"));
}

#[test]
fn policy_quota_and_descriptors_are_checked_as_for_connect() {
    let mut w = World::with_policy(
        "[[join]]\ndomain='*'\nusers=[7]\nquota={channels=1,max_ring=8192}\n[[connect]]\nfrom='web'\nto='db'\nservice='sql'",
    );
    let (web, db) = (w.join_as(7, "web", 1), w.join_as(7, "db", 2));
    let region = vec![w.region(8192)];
    assert_eq!(w.refused(db, claim(Side::Connecting, "web"), region), Refusal::Denied);
    let lie = vec![w.link()];
    assert_eq!(w.refused(web, claim(Side::Connecting, "db"), lie), Refusal::BadRegion);
    assert_eq!(w.refused(web, claim(Side::Connecting, "db"), vec![]), Refusal::Protocol);
    let region = vec![w.region(8192)];
    assert_eq!(w.refused(web, claim(Side::Connecting, "d b"), region), Refusal::NameInvalid);
    let mut big = claim(Side::Connecting, "db");
    if let Message::Reclaim { region, .. } = &mut big {
        region.ring_size = 16384;
    }
    let region = vec![w.region(16384)];
    assert_eq!(w.refused(web, big, region), Refusal::Quota);
    assert_eq!(reclaim(&mut w, web, claim(Side::Connecting, "db")), Message::Done {});
    assert_eq!(reclaim(&mut w, db, claim(Side::Accepting, "web")), Message::Done {});
    let mut second = claim(Side::Connecting, "db");
    if let Message::Reclaim { channel, .. } = &mut second {
        *channel = OLD + 1;
    }
    let region = vec![w.region(8192)];
    assert_eq!(w.refused(web, second, region), Refusal::Quota);
    assert_eq!(w.open_descriptors(), 2);
}
