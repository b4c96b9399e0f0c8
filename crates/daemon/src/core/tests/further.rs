//! Further regions of a channel (protocol F).

use partywall_protocol::wire::{RegionReference, Side};

use super::*;

pub(super) const KIND: u32 = 0x4845_4150;
pub(super) const SIZE: u64 = 8192;

/// A channel from web to db, accepted.
fn channel_in(w: &mut World) -> (u64, u64, u64) {
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    w.bind(db, "sql", 4);
    let channel = w.connect(web, "db", "sql");
    w.accept(db, channel);
    w.sent.clear();
    (web, db, channel)
}

pub(super) fn take(
    w: &mut World,
    session: u64,
    (channel, side): (u64, Side),
    count: u8,
    bytes: u64,
) -> Option<Message> {
    w.say(session, Message::TakeRegions { channel, side, kind: KIND, count, bytes }, vec![])
}

fn add(w: &mut World, session: u64, (channel, side): (u64, Side), number: u32) -> Option<Message> {
    add_of(w, session, (channel, side), number, KIND)
}

fn add_of(w: &mut World, session: u64, (channel, side): (u64, Side), number: u32, kind: u32) -> Option<Message> {
    let region = RegionReference::with_ring(SIZE);
    let memory = w.region(SIZE);
    w.say(session, Message::AddRegion { channel, side, number, kind, region }, vec![memory])
}

pub(super) fn drop_region(w: &mut World, session: u64, (channel, side): (u64, Side), own: bool, number: u32) {
    assert_eq!(w.say(session, Message::DropRegion { channel, side, own, number }, vec![]), None, "it has no answer");
}

pub(super) fn refusal(answer: Option<Message>) -> Option<Refusal> {
    match answer {
        Some(Message::Refused { code, .. }) => Some(code),
        _ => None,
    }
}

pub(super) fn counted(w: &World, name: &str) -> u64 {
    w.core.domains.values().find(|domain| domain.name.as_str() == name).map_or(0, |domain| domain.ring_bytes)
}

pub(super) const FROM: Side = Side::Connecting;
pub(super) const TO: Side = Side::Accepting;

#[test]
fn accepted_region_is_delivered_and_counts_for_both_sides() {
    let mut w = World::new();
    let (web, db, channel) = channel_in(&mut w);
    let (before_web, before_db) = (counted(&w, "web"), counted(&w, "db"));
    assert_eq!(take(&mut w, db, (channel, TO), 2, 1 << 20), Some(Message::Done {}));
    assert_eq!(add(&mut w, web, (channel, FROM), 1), Some(Message::Done {}));
    let added = w.sent.iter().find(|sent| matches!(sent.message, Message::RegionAdded { .. })).unwrap();
    let region = RegionReference::with_ring(SIZE);
    assert_eq!(added.message, Message::RegionAdded { channel, side: FROM, number: 1, kind: KIND, region });
    assert_eq!((added.session, added.request, added.with.len()), (db, 0, 1));
    assert_eq!((counted(&w, "web"), counted(&w, "db")), (before_web + SIZE, before_db + SIZE));
    // Each side's count ends when that side gives the region up.
    drop_region(&mut w, web, (channel, FROM), true, 1);
    assert_eq!((counted(&w, "web"), counted(&w, "db")), (before_web, before_db + SIZE));
    drop_region(&mut w, db, (channel, TO), false, 1);
    drop_region(&mut w, db, (channel, TO), false, 1);
    assert_eq!((counted(&w, "web"), counted(&w, "db")), (before_web, before_db));
}

#[test]
fn region_of_unaccepted_kind_is_refused_to_its_owner() {
    let mut w = World::new();
    let (web, db, channel) = channel_in(&mut w);
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 1)), Some(Refusal::KindMismatch));
    take(&mut w, db, (channel, TO), 2, 1 << 20);
    assert_eq!(refusal(add_of(&mut w, web, (channel, FROM), 1, KIND + 1)), Some(Refusal::KindMismatch));
    assert_eq!(refusal(add(&mut w, db, (channel, TO), 1)), Some(Refusal::KindMismatch), "web takes none");
    take(&mut w, db, (channel, TO), 0, 0);
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 1)), Some(Refusal::KindMismatch), "no more");
    assert!(!w.sent.iter().any(|sent| matches!(sent.message, Message::RegionAdded { .. })));
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 2, "the two endpoint regions");
}

#[test]
fn regions_beyond_any_limit_are_refused() {
    let mut w = World::new();
    let (web, db, channel) = channel_in(&mut w);
    take(&mut w, db, (channel, TO), 2, 1 << 20);
    for number in [3, 5] {
        assert_eq!(add(&mut w, web, (channel, FROM), number), Some(Message::Done {}));
    }
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 6)), Some(Refusal::Quota), "more than the peer takes");
    take(&mut w, db, (channel, TO), 9, 3 * SIZE - 1);
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 6)), Some(Refusal::Quota), "more bytes than the peer takes");
    take(&mut w, db, (channel, TO), 200, 1 << 20);
    for number in [5, 4] {
        assert_eq!(refusal(add(&mut w, web, (channel, FROM), number)), Some(Refusal::Protocol), "not a new number");
    }
    for number in 6..12 {
        assert_eq!(add(&mut w, web, (channel, FROM), number), Some(Message::Done {}));
    }
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 12)), Some(Refusal::Quota), "more than a side owns");
    drop_region(&mut w, web, (channel, FROM), true, 3);
    assert_eq!(add(&mut w, web, (channel, FROM), 12), Some(Message::Done {}));
    let kind = |kind| Message::TakeRegions { channel, side: TO, kind, count: 1, bytes: 1 };
    for n in 0..7 {
        assert_eq!(w.say(db, kind(n), vec![]), Some(Message::Done {}));
    }
    assert_eq!(refusal(w.say(db, kind(7), vec![])), Some(Refusal::Quota), "more kinds than a side takes");
}

#[test]
fn region_that_either_domain_cannot_pay_for_is_refused() {
    for (poor, ring, who) in [("web", 8192, "its owner"), ("db", 16384, "its reader")] {
        // Room for the ring of the endpoint, and for less than a region more.
        let text = format!(
            "[[join]]\ndomain='{poor}'\nusers=['*']\nquota={{ring_bytes={}}}\n[[join]]\ndomain='*'\nusers=['*']\n[[connect]]\nfrom='*'\nto='*'",
            ring + SIZE - 1
        );
        let mut w = World::with(Policy::parse(&text).unwrap(), INSTANCE);
        let (web, db, channel) = channel_in(&mut w);
        take(&mut w, db, (channel, TO), 2, 1 << 20);
        let answer = add(&mut w, web, (channel, FROM), 1);
        let Some(Message::Refused { code: Refusal::Quota, reason }) = answer else { panic!("{who}: {answer:?}") };
        assert!(reason.contains(poor), "{who} is named: {reason}");
    }
}

#[test]
fn undelivered_region_counts_for_neither_side() {
    let mut w = World::new();
    let (web, db, channel) = channel_in(&mut w);
    take(&mut w, db, (channel, TO), 1, 1 << 20);
    let before = (counted(&w, "web"), counted(&w, "db"));
    for delivery in [OfferDelivery::Full, OfferDelivery::Gone, OfferDelivery::Failed("no".into())] {
        w.delivery = delivery;
        assert!(refusal(add(&mut w, web, (channel, FROM), 1)).is_some());
        assert_eq!((counted(&w, "web"), counted(&w, "db")), before);
    }
    w.delivery = OfferDelivery::Done;
    assert_eq!(add(&mut w, web, (channel, FROM), 1), Some(Message::Done {}), "the number is still new");
}

#[test]
fn lying_memory_and_other_peoples_channels_are_refused() {
    let mut w = World::new();
    let (web, db, channel) = channel_in(&mut w);
    let thief = w.join("thief", 3);
    take(&mut w, db, (channel, TO), 4, 1 << 20);
    assert_eq!(refusal(take(&mut w, thief, (channel, TO), 4, 1 << 20)), Some(Refusal::NoSuchChannel));
    assert_eq!(refusal(add(&mut w, thief, (channel, FROM), 1)), Some(Refusal::NoSuchChannel));
    assert_eq!(refusal(add(&mut w, web, (channel, TO), 1)), Some(Refusal::NoSuchChannel), "the other side's");
    let of = |ring_size| Message::AddRegion {
        channel,
        side: FROM,
        number: 1,
        kind: KIND,
        region: RegionReference::with_ring(ring_size),
    };
    for (size, memory) in [(SIZE, w.region(SIZE * 2)), (SIZE, w.other()), (0, w.region(0)), (77, w.region(77))] {
        assert_eq!(refusal(w.say(web, of(size), vec![memory])), Some(Refusal::BadRegion));
    }
    let before = counted(&w, "web");
    add(&mut w, web, (channel, FROM), 1);
    drop_region(&mut w, thief, (channel, FROM), true, 1);
    assert_eq!(counted(&w, "web"), before + SIZE, "who does not have the side gives nothing up");
}

#[test]
fn regions_end_with_their_end_of_the_channel() {
    let mut w = World::new();
    let (web, db, channel) = channel_in(&mut w);
    take(&mut w, db, (channel, TO), 2, 1 << 20);
    let before = counted(&w, "db");
    add(&mut w, web, (channel, FROM), 1);
    w.say(web, Message::Closed { channel }, vec![]);
    assert_eq!((counted(&w, "web"), counted(&w, "db")), (0, before + SIZE), "db may still read it");
    w.say(db, Message::Closed { channel }, vec![]);
    assert_eq!(counted(&w, "db"), 0);
    drop_region(&mut w, db, (channel, TO), false, 1);
    w.sent.clear();
    assert_eq!(w.open_descriptors(), 0);
}

/// A channel from web to db that both report to a broker that did not make it.
fn reclaimed_channel_in(w: &mut World) -> (u64, u64, u64) {
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    for (session, side, peer) in [(web, FROM, "db"), (db, TO, "web")] {
        assert_eq!(reclaim::reclaim(w, session, reclaim::claim(side, peer)), Message::Done {});
    }
    w.sent.clear();
    (web, db, reclaim::OLD)
}

fn reclaim_region(
    w: &mut World,
    session: u64,
    (channel, side): (u64, Side),
    own: bool,
    number: u32,
) -> Option<Message> {
    w.say(session, Message::ReclaimRegion { channel, side, own, number, kind: KIND, bytes: SIZE }, vec![])
}

#[test]
fn reclaimed_region_counts_once_for_the_side_that_reports_it() {
    let mut w = World::new();
    let (web, db, channel) = reclaimed_channel_in(&mut w);
    let (before_web, before_db) = (counted(&w, "web"), counted(&w, "db"));
    for _ in 0..2 {
        assert_eq!(reclaim_region(&mut w, web, (channel, FROM), true, 5), Some(Message::Done {}));
        assert_eq!((counted(&w, "web"), counted(&w, "db")), (before_web + SIZE, before_db));
    }
    assert_eq!(reclaim_region(&mut w, db, (channel, TO), false, 5), Some(Message::Done {}));
    assert_eq!((counted(&w, "web"), counted(&w, "db")), (before_web + SIZE, before_db + SIZE));
    take(&mut w, db, (channel, TO), 2, 1 << 20);
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 5)), Some(Refusal::Protocol), "not a new number");
    assert_eq!(add(&mut w, web, (channel, FROM), 6), Some(Message::Done {}));
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 7)), Some(Refusal::Quota), "the reader has two");
    drop_region(&mut w, web, (channel, FROM), true, 5);
    drop_region(&mut w, db, (channel, TO), false, 5);
    assert_eq!((counted(&w, "web"), counted(&w, "db")), (before_web + SIZE, before_db + SIZE));
    w.say(web, Message::Closed { channel }, vec![]);
    w.say(db, Message::Closed { channel }, vec![]);
    assert_eq!((counted(&w, "web"), counted(&w, "db")), (0, 0));
}

#[test]
fn number_of_a_region_that_the_reader_still_has_is_refused() {
    let mut w = World::new();
    let (web, db, channel) = reclaimed_channel_in(&mut w);
    reclaim_region(&mut w, db, (channel, TO), false, 5);
    take(&mut w, db, (channel, TO), 2, 1 << 20);
    let before = counted(&w, "db");
    assert_eq!(refusal(add(&mut w, web, (channel, FROM), 5)), Some(Refusal::Quota), "no error of the owner's");
    assert_eq!(counted(&w, "db"), before);
    assert_eq!(add(&mut w, web, (channel, FROM), 6), Some(Message::Done {}), "the reader blocks no other number");
}

#[test]
fn region_of_peer_is_reported_only_on_reclaimed_channel() {
    let mut w = World::new();
    let (web, db, channel) = channel_in(&mut w);
    take(&mut w, db, (channel, TO), 2, 1 << 20);
    let before = counted(&w, "db");
    assert_eq!(refusal(reclaim_region(&mut w, db, (channel, TO), false, 5)), Some(Refusal::Protocol));
    assert_eq!(counted(&w, "db"), before);
    assert_eq!(add(&mut w, web, (channel, FROM), 5), Some(Message::Done {}), "the lie blocks no number");
    assert_eq!(reclaim_region(&mut w, db, (channel, TO), false, 5), Some(Message::Done {}), "it has this one");
    assert_eq!(counted(&w, "db"), before + SIZE, "and it counts once");
}

#[test]
fn reclaimed_regions_beyond_any_limit_are_refused() {
    let mut w = World::new();
    let (web, db, channel) = reclaimed_channel_in(&mut w);
    let thief = w.join("thief", 3);
    assert_eq!(refusal(reclaim_region(&mut w, thief, (channel, FROM), true, 1)), Some(Refusal::NoSuchChannel));
    assert_eq!(refusal(reclaim_region(&mut w, web, (channel, TO), true, 1)), Some(Refusal::NoSuchChannel));
    for bytes in [0, 77, u64::MAX] {
        let lie = Message::ReclaimRegion { channel, side: FROM, own: true, number: 1, kind: KIND, bytes };
        assert_eq!(refusal(w.say(web, lie, vec![])), Some(Refusal::BadRegion));
    }
    let before = counted(&w, "web");
    for number in 1..9 {
        assert_eq!(reclaim_region(&mut w, web, (channel, FROM), true, number), Some(Message::Done {}));
    }
    assert_eq!(refusal(reclaim_region(&mut w, web, (channel, FROM), true, 9)), Some(Refusal::Quota));
    assert_eq!(counted(&w, "web"), before + 8 * SIZE);
    for number in 0..2040 {
        assert_eq!(reclaim_region(&mut w, db, (channel, TO), false, number), Some(Message::Done {}));
    }
    assert_eq!(refusal(reclaim_region(&mut w, db, (channel, TO), false, 2040)), Some(Refusal::Quota));

    let text = format!(
        "[[join]]\ndomain='*'\nusers=['*']\nquota={{ring_bytes={}}}\n[[connect]]\nfrom='*'\nto='*'",
        8192 + SIZE - 1
    );
    let mut w = World::with(Policy::parse(&text).unwrap(), INSTANCE);
    let (web, _, channel) = reclaimed_channel_in(&mut w);
    assert_eq!(refusal(reclaim_region(&mut w, web, (channel, FROM), true, 1)), Some(Refusal::Quota), "its own quota");
}

#[test]
fn broadcast_and_socket_have_no_further_regions() {
    let mut w = World::new();
    let (_, db, channel) = channel_in(&mut w);
    for kind in [Kind::Broadcast, Kind::Socket] {
        w.core.channels.get_mut(&channel).unwrap().kind = kind;
        assert_eq!(refusal(take(&mut w, db, (channel, TO), 2, 1 << 20)), Some(Refusal::Protocol));
    }
    w.core.channels.get_mut(&channel).unwrap().kind = Kind::Message;
    assert_eq!(take(&mut w, db, (channel, TO), 2, 1 << 20), Some(Message::Done {}));
}

proptest::proptest! {
    /// The tables agree after each step, which `World` checks, and nothing counts at the end.
    #[test]
    fn any_regions_in_any_order_leave_no_count_behind(
        steps in proptest::collection::vec((0u8..12, 0usize..2, 0u32..14, 0u32..2, 0u8..4), 1..80),
    ) {
        let mut w = World::new();
        let (web, db, channel) = channel_in(&mut w);
        for (what, who, number, kind, count) in steps {
            let (session, side) = [(web, FROM), (db, TO)][who];
            let message = match what {
                0..3 => Message::TakeRegions { channel, side, kind, count, bytes: u64::from(count) * SIZE },
                3..8 => {
                    w.delivery = if number == 13 { OfferDelivery::Full } else { OfferDelivery::Done };
                    add_of(&mut w, session, (channel, side), number, kind);
                    continue;
                }
                8..11 => Message::DropRegion { channel, side, own: count % 2 == 0, number },
                _ if number == 0 => Message::Closed { channel },
                _ => continue,
            };
            w.say(session, message, vec![]);
        }
        for session in [web, db] {
            w.say(session, Message::Closed { channel }, vec![]);
        }
        proptest::prop_assert_eq!((counted(&w, "web"), counted(&w, "db")), (0, 0));
        w.sent.clear();
        proptest::prop_assert_eq!(w.open_descriptors(), 0);
    }
}
