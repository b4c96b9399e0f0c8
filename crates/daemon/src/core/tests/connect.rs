//! Channels from `Connect` to their end.

use super::*;

fn listening() -> (World, u64, u64) {
    let mut w = World::new();
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    w.bind(db, "sql", 4);
    (w, web, db)
}

#[test]
fn listener_gets_region_and_links_of_connecting_side() {
    let (mut w, web, db) = listening();
    let channel = w.connect(web, "db", "sql");
    assert!(channel > INSTANCE);
    let incoming = w.sent.pop().unwrap();
    assert_eq!((incoming.session, incoming.request, incoming.with.len()), (db, 0, 3));
    assert!(matches!(&incoming.with[0], Fake::Region(size, _) if *size == 4096 + 8192));
    match incoming.message {
        Message::Incoming {
            channel: c,
            name,
            user: User::Host(1000),
            pid: 1,
            at_home: true,
            kind: Kind::Stream,
            directions,
            region: RegionReference { ring_size: 8192, .. },
            ..
        } => {
            assert_eq!((c, name.as_str(), directions), (channel, "web", Directions::BOTH));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn broker_keeps_only_regions_until_their_side_closes() {
    let (mut w, web, db) = listening();
    let channel = w.connect(web, "db", "sql");
    assert_eq!(
        w.open_descriptors(),
        4,
        "three for the listener, and a copy of the region; the answer's two are closed"
    );
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 1);
    w.accept(db, channel);
    assert_eq!(w.open_descriptors(), 2);
    w.say(web, Message::Closed { channel }, vec![]);
    assert_eq!(w.open_descriptors(), 1);
    assert_eq!(w.core.status().channels, 1);
    w.say(db, Message::Closed { channel }, vec![]);
    assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
    // The channel is closed already; a second `Closed` is not an error.
    assert_eq!(w.say(db, Message::Closed { channel }, vec![]), None);
}

#[test]
fn refused_connect_changes_nothing() {
    let (mut w, web, _) = listening();
    let message = |offset, size, kind, directions| Message::Connect {
        target: "db".into(),
        service: "sql".into(),
        kind,
        directions,
        region: RegionReference { ring_offset: offset, ..RegionReference::with_ring(size) },
    };
    let both = Directions::BOTH;
    let (r, l, o) = (w.region(8192), w.link(), w.other());
    let one = vec![r.clone()];
    for (message, with, code) in [
        (connect("nobody", "sql", 8192), one.clone(), Refusal::NoSuchDomain),
        (connect("db", "mail", 8192), one.clone(), Refusal::NoSuchService),
        (connect("d b", "sql", 8192), one.clone(), Refusal::NameInvalid),
        (connect("db", "", 8192), one.clone(), Refusal::NameInvalid),
        (message(4096, 8192, Kind::Message, both), one.clone(), Refusal::KindMismatch),
        (message(4096, 8192, Kind::Broadcast, both), one.clone(), Refusal::Protocol),
        (message(0, 8192, Kind::Stream, both), one.clone(), Refusal::BadRegion),
        (message(4096, 5000, Kind::Stream, both), one.clone(), Refusal::BadRegion),
        (message(4096, u64::MAX, Kind::Stream, both), one.clone(), Refusal::BadRegion),
        (message(4096, 16384, Kind::Stream, both), one.clone(), Refusal::BadRegion),
        (connect("db", "sql", 8192), vec![l.clone()], Refusal::BadRegion),
        (connect("db", "sql", 8192), vec![o.clone()], Refusal::BadRegion),
        (connect("db", "sql", 8192), vec![r.clone(), l.clone(), l.clone()], Refusal::Protocol),
        (connect("db", "sql", 8192), vec![], Refusal::Protocol),
    ] {
        assert_eq!(w.refused(web, message.clone(), with), code, "{message:?}");
        assert!(w.sent.is_empty());
        assert_eq!(w.core.status().channels, 0);
    }
    drop((r, l, o, one));
    assert_eq!(w.open_descriptors(), 0);
}

#[test]
fn policy_is_asked_before_existence() {
    let mut w = World::with_policy("[[join]]\ndomain='*'\nusers=[7]\n[[connect]]\nfrom='a'\nto='b'\nservice='s'");
    let (a, b) = (w.join_as(7, "a", 1), w.join_as(7, "b", 2));
    w.bind(b, "s", 9);
    w.bind(a, "s", 9);
    w.connect(a, "b", "s");
    let three = vec![w.region(8192)];
    assert_eq!(w.refused(a, connect("b", "t", 8192), three), Refusal::Denied);
    let three = vec![w.region(8192)];
    assert_eq!(w.refused(a, connect("ghost", "s", 8192), three), Refusal::Denied);
    let three = vec![w.region(8192)];
    assert_eq!(w.refused(b, connect("a", "s", 8192), three), Refusal::Denied);
    w.connect(a, "a", "s");
}

#[test]
fn full_backlog_accepts_offers_as_it_drains() {
    let (mut w, web, db) = listening();
    let channels: Vec<_> = (0..4).map(|_| w.connect(web, "db", "sql")).collect();
    let full = |w: &mut World| {
        let three = vec![w.region(8192)];
        w.refused(web, connect("db", "sql", 8192), three)
    };
    assert_eq!(full(&mut w), Refusal::BacklogFull);
    w.accept(db, channels[0]);
    w.connect(web, "db", "sql");
    assert_eq!(full(&mut w), Refusal::BacklogFull);
    w.say(db, Message::Closed { channel: channels[1] }, vec![]);
    w.connect(web, "db", "sql");
    // The connecting side going away leaves the offer in the listener's socket.
    w.say(web, Message::Closed { channel: channels[2] }, vec![]);
    assert_eq!(full(&mut w), Refusal::BacklogFull);
    w.end(web);
    let web = w.join("web", 1);
    let three = vec![w.region(8192)];
    assert_eq!(w.refused(web, connect("db", "sql", 8192), three), Refusal::BacklogFull);
}

#[test]
fn listener_frees_backlog_place_of_same_process() {
    let mut w = World::with_policy("administrators=[1000]");
    let (a, listener) = (w.join("a", 1), w.join("a", 1));
    w.bind(listener, "s", 1);
    let channel = w.connect(a, "a", "s");
    w.say(listener, Message::Closed { channel }, vec![]);
    w.connect(a, "a", "s");
}

#[test]
fn session_offers_are_limited_over_all_services() {
    let (mut w, web, db) = listening();
    w.bind(db, "t", u16::MAX);
    w.bind(db, "u", u16::MAX);
    for i in 0..super::super::service::MAX_WAITING {
        w.connect(web, "db", if i % 2 == 0 { "t" } else { "u" });
    }
    for service in ["t", "u", "sql"] {
        let three = vec![w.region(8192)];
        assert_eq!(w.refused(web, connect("db", service, 8192), three), Refusal::BacklogFull);
    }
}

#[test]
fn backlog_of_zero_admits_one_offer() {
    let (mut w, web, db) = listening();
    w.bind(db, "t", 0);
    w.connect(web, "db", "t");
    let three = vec![w.region(8192)];
    assert_eq!(w.refused(web, connect("db", "t", 8192), three), Refusal::BacklogFull);
}

#[test]
fn undeliverable_offer_is_refused_and_forgotten() {
    for (delivery, code) in [
        (OfferDelivery::Full, Refusal::BacklogFull),
        (OfferDelivery::Gone, Refusal::NoSuchService),
        (OfferDelivery::Failed("too many references".into()), Refusal::OutOfResources),
    ] {
        let (mut w, web, db) = listening();
        w.delivery = delivery;
        let three = vec![w.region(8192)];
        assert_eq!(w.refused(web, connect("db", "sql", 8192), three), code);
        assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
        assert_eq!(w.ask(db, Message::Ping {}), Message::Done {}, "the listener is not to blame");
    }
}

/// The listener can read the bytes that the peer had written, and must not fail because of one visitor.
#[test]
fn connection_whose_peer_ends_while_it_is_accepted_is_accepted() {
    let (mut w, web, db) = listening();
    let channel = w.connect(web, "db", "sql");
    w.sent.clear();
    w.delivery = OfferDelivery::Gone;
    w.accept(db, channel);
    w.end(web);
    assert_eq!(w.core.status().channels, 1, "the accepting side holds its end");
    w.end(db);
    assert_eq!((w.open_descriptors(), w.core.status().channels), (0, 0));
}

#[test]
fn channels_and_ring_bytes_have_quotas() {
    let policy = "administrators=[1000]\n[quota]\nchannels=2\nring_bytes=20000\nmax_ring=16384";
    let mut w = World::with_policy(policy);
    let (a, b, c) = (w.join("a", 1), w.join("b", 2), w.join("c", 3));
    w.bind(b, "s", 9);
    let three = vec![w.region(32768)];
    assert_eq!(w.refused(a, connect("b", "s", 32768), three), Refusal::Quota);
    let first = w.connect(a, "b", "s");
    let three = vec![w.region(16384)];
    assert_eq!(w.refused(a, connect("b", "s", 16384), three), Refusal::Quota, "ring bytes");
    w.connect(a, "b", "s");
    let three = vec![w.region(4096)];
    assert_eq!(w.refused(a, connect("b", "s", 4096), three), Refusal::Quota, "channels");
    let three = vec![w.region(4096)];
    assert_eq!(w.refused(c, connect("b", "s", 4096), three), Refusal::Quota, "the acceptor's channels");
    w.say(a, Message::Closed { channel: first }, vec![]);
    w.say(b, Message::Closed { channel: first }, vec![]);
    w.connect(a, "b", "s");
}

#[test]
fn channel_to_itself_takes_two_quota_ends_and_closes_each() {
    let mut w = World::with_policy("administrators=[1000]\n[quota]\nchannels=3");
    let a = w.join("a", 1);
    w.bind(a, "s", 9);
    let channel = w.connect(a, "a", "s");
    let three = vec![w.region(8192)];
    assert_eq!(w.refused(a, connect("a", "s", 8192), three), Refusal::Quota);
    w.accept(a, channel);
    w.say(a, Message::Closed { channel }, vec![]);
    assert_eq!(w.core.status().channels, 1);
    w.say(a, Message::Closed { channel }, vec![]);
    assert_eq!(w.core.status().channels, 0);
}

#[test]
fn ended_session_frees_only_its_own_ends() {
    let (mut w, web, db) = listening();
    let open = w.connect(web, "db", "sql");
    w.accept(db, open);
    let waiting = w.connect(web, "db", "sql");
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 3);
    w.end(db);
    assert_eq!(w.core.status(), CoreStatus { sessions: 1, domains: 1, services: 0, channels: 2 });
    assert_eq!(w.open_descriptors(), 2, "the connecting side's");
    w.end(web);
    assert_eq!((w.core.status(), w.open_descriptors()), (CoreStatus::default(), 0));
    assert!(waiting > open);
}

#[test]
fn channel_outlives_its_session_within_same_process() {
    let (mut w, web, db) = listening();
    let also_db = w.join("db", 2);
    let (accepted, waiting) = (w.connect(web, "db", "sql"), w.connect(web, "db", "sql"));
    // The listening session has it in its socket; another session of the process may answer.
    w.accept(also_db, accepted);
    w.end(db);
    assert_eq!(w.core.status().services, 0);
    let _ = waiting;
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 3, "two of the connecting side, one of the accepting");
    w.end(also_db);
    assert_eq!(w.open_descriptors(), 2);
}

#[test]
fn channel_ends_with_its_process_though_domain_lives() {
    let (mut w, web, _) = listening();
    let _other_process = w.join("web", 99);
    w.connect(web, "db", "sql");
    w.sent.clear();
    w.end(web);
    assert_eq!(w.open_descriptors(), 0);
}

#[test]
fn offer_is_accepted_once_and_only_by_its_listener() {
    let (mut w, web, db) = listening();
    let channel = w.connect(web, "db", "sql");
    w.sent.clear();
    let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(16384) };
    let thief = w.join("db", 3);
    for session in [web, thief] {
        let region = vec![w.region(16384)];
        assert_eq!(w.refused(session, accepted.clone(), region), Refusal::NoSuchChannel);
    }
    w.accept(db, channel);
    let region = vec![w.region(16384)];
    assert_eq!(w.refused(db, accepted, region), Refusal::Protocol);
    let other = w.join("other", 4);
    assert_eq!(w.refused(other, Message::Closed { channel }, vec![]), Refusal::NoSuchChannel);
    assert_eq!(w.open_descriptors(), 2);
}

#[test]
fn acceptor_with_false_region_gets_channel_without_region() {
    let (mut w, web, db) = listening();
    let one = w.connect(web, "db", "sql");
    let two = w.connect(web, "db", "sql");
    w.sent.clear();
    let lie = vec![w.link()];
    let accepted =
        |channel, ring_size| Message::Accepted { channel, start: 0, region: RegionReference::with_ring(ring_size) };
    assert_eq!(w.refused(db, accepted(one, 16384), lie), Refusal::BadRegion);
    let lie = vec![w.region(8192)];
    assert_eq!(w.refused(db, accepted(two, 9999), lie), Refusal::BadRegion);
    assert_eq!(w.open_descriptors(), 2, "the connecting side's two");
    assert_eq!(w.core.services.values().map(|s| (s.waiting, s.accepted)).next(), Some((0, 2)));
}

#[test]
fn without_descriptors_to_spare_channels_work_and_are_not_kept() {
    let mut w =
        World::sized(Policy::for_user(1000), INSTANCE, Capacity { sessions: 9, regions: 1, offers: 9, entries: 9 });
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    w.bind(db, "sql", 4);
    let one = w.connect(web, "db", "sql");
    let two = w.connect(web, "db", "sql");
    w.accept(db, two);
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 1);
    assert_eq!(w.ask(web, Message::Inspect { channel: two }), Message::Regions { connecting: false, accepting: false });
    assert_eq!(w.ask(web, Message::Inspect { channel: one }), Message::Regions { connecting: true, accepting: false });
}
