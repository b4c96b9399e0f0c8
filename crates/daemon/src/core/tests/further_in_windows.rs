//! Further regions of a channel that has an end in a virtual machine (protocol F1.3).

use partywall_protocol::wire::RegionReference;

use super::further::*;
use super::machines::{B, at, attached, in_window, meeting, place, room};
use super::*;

/// Bytes of the control page and a further region.
const WHOLE: u64 = 4096 + SIZE;

/// A channel from a program in `a` to one in `b`, which takes two regions. Returns the sessions, the channel, and where the region of the
/// connecting side lies.
fn channel_between(w: &mut World) -> (u64, u64, u64, u64) {
    let (caller, listener) = meeting(w);
    let base = place(w, caller, 0, "b");
    let with = vec![w.other()];
    let Some(Message::Connected { channel, .. }) = w.say(caller, at(base, 8192), with) else { panic!() };
    let back = place(w, listener, channel, "a");
    let accepted = Message::Accepted { channel, start: 0, region: in_window(back, 8192) };
    let with = vec![w.other()];
    assert_eq!(w.say(listener, accepted, with), Some(Message::Done {}));
    assert_eq!(take(w, listener, (channel, TO), 2, 1 << 20), Some(Message::Done {}));
    w.sent.clear();
    (caller, listener, channel, base)
}

fn further_room(w: &mut World, session: u64, channel: u64, peer: &str) -> u64 {
    match w.say(session, room(channel, peer, WHOLE), vec![]) {
        Some(Message::RoomIs { base, .. }) => base,
        other => panic!("{other:?}"),
    }
}

fn add_at(w: &mut World, session: u64, channel: u64, (number, kind): (u32, u32), base: u64) -> Option<Message> {
    let with = vec![w.other()];
    let region = in_window(base, SIZE);
    w.say(session, Message::AddRegion { channel, side: FROM, number, kind, region }, with)
}

#[test]
fn window_region_is_freed_after_both_machines_drop_it() {
    let mut w = attached();
    let (caller, listener, channel, _) = channel_between(&mut w);
    let before = (counted(&w, "a"), counted(&w, "b"));
    let base = further_room(&mut w, caller, channel, "b");
    assert_eq!(add_at(&mut w, caller, channel, (1, KIND), base), Some(Message::Done {}));
    let added = w.sent.iter().find(|sent| matches!(sent.message, Message::RegionAdded { .. })).unwrap();
    let region = in_window(base, SIZE);
    assert_eq!(added.message, Message::RegionAdded { channel, side: FROM, number: 1, kind: KIND, region });
    assert_eq!(added.session, listener);
    assert!(matches!(added.with[..], [Fake::Other(_)]), "the broker's own descriptor of the window");
    assert_eq!((counted(&w, "a"), counted(&w, "b")), (before.0 + SIZE, before.1 + SIZE));
    for (session, side, own) in [(caller, FROM, true), (listener, TO, false)] {
        let next = further_room(&mut w, caller, channel, "b");
        assert_ne!(next, base, "one side has it still");
        drop_region(&mut w, session, (channel, side), own, 1);
    }
    assert_eq!((counted(&w, "a"), counted(&w, "b")), before);
    assert_eq!(further_room(&mut w, caller, channel, "b"), base, "free again");
}

#[test]
fn refused_region_frees_its_place_and_used_place_is_rejected() {
    let mut w = attached();
    let (caller, _, channel, endpoint) = channel_between(&mut w);
    for number in 1..20 {
        let base = further_room(&mut w, caller, channel, "b");
        assert_eq!(refusal(add_at(&mut w, caller, channel, (number, KIND + 1), base)), Some(Refusal::KindMismatch));
    }
    let base = further_room(&mut w, caller, channel, "b");
    assert_eq!(refusal(add_at(&mut w, caller, channel, (20, KIND), endpoint)), Some(Refusal::BadRegion));
    assert_eq!(add_at(&mut w, caller, channel, (20, KIND), base), Some(Message::Done {}));
    assert_eq!(refusal(add_at(&mut w, caller, channel, (21, KIND), base)), Some(Refusal::BadRegion), "there already");
    assert_eq!(refusal(add_at(&mut w, caller, channel, (21, KIND), base + 4096)), Some(Refusal::BadRegion));
    // Neither refusal has freed the place of the endpoint or of the region.
    let next = further_room(&mut w, caller, channel, "b");
    assert!(next != endpoint && next != base);
}

#[test]
fn undelivered_window_region_leaves_no_place_taken() {
    let mut w = attached();
    let (caller, _, channel, _) = channel_between(&mut w);
    let base = further_room(&mut w, caller, channel, "b");
    w.delivery = OfferDelivery::Full;
    assert_eq!(refusal(add_at(&mut w, caller, channel, (1, KIND), base)), Some(Refusal::BacklogFull));
    w.delivery = OfferDelivery::Done;
    assert_eq!(further_room(&mut w, caller, channel, "b"), base);
}

#[test]
fn memfd_region_is_accepted_only_within_same_machine() {
    let mut w = attached();
    let (caller, _, channel, _) = channel_between(&mut w);
    let region = RegionReference::with_ring(SIZE);
    let add = |channel, side| Message::AddRegion { channel, side, number: 1, kind: KIND, region };
    let with = vec![w.region(SIZE)];
    assert_eq!(refusal(w.say(caller, add(channel, FROM), with)), Some(Refusal::Elsewhere));

    // Two programs of one machine: the memory stays there, and something else stands for it here.
    let near = w.join_as(B, "b", 9);
    let with = vec![w.other()];
    let Some(Message::Connected { channel, .. }) = w.say(near, connect("b", "files", 8192), with) else { panic!() };
    let listener = w.sent.iter().rfind(|sent| matches!(sent.message, Message::Incoming { .. })).unwrap().session;
    w.accept(listener, channel);
    assert_eq!(take(&mut w, listener, (channel, TO), 1, SIZE), Some(Message::Done {}));
    let base = in_window(8192, SIZE);
    let with = vec![w.other()];
    let in_window = Message::AddRegion { channel, side: FROM, number: 1, kind: KIND, region: base };
    assert_eq!(refusal(w.say(near, in_window, with)), Some(Refusal::BadRegion));
    let with = vec![w.other()];
    assert_eq!(w.say(near, add(channel, FROM), with), Some(Message::Done {}));
    assert!(w.sent.iter().any(|sent| matches!(sent.message, Message::RegionAdded { .. })));
}

#[test]
fn places_of_further_regions_end_with_their_channel() {
    let mut w = attached();
    let (caller, listener, channel, _) = channel_between(&mut w);
    let base = further_room(&mut w, caller, channel, "b");
    assert_eq!(add_at(&mut w, caller, channel, (1, KIND), base), Some(Message::Done {}));
    w.end(caller);
    w.end(listener);
    let (caller, _, channel, _) = channel_between(&mut w);
    assert_eq!(further_room(&mut w, caller, channel, "b"), base);
}
