//! Virtual machines: names, rights, places in windows.

use super::*;
use partywall_protocol::wire::{PluggedAs, RegionReference, What, Within};
use partywall_shm::layout::HUGE_PAGE;

pub(super) const A: MachineId = MachineId::MIN;
pub(super) const B: MachineId = MachineId::new(2).unwrap();
/// From the header to the end.
const SIZE: u64 = 4 << 20;

/// Two machines that see the windows between them and to the host, in the world of user 1000.
pub(super) fn attached() -> World {
    let mut w = World::new();
    attach(&mut w);
    w
}

/// Attaches them.
pub(super) fn attach(w: &mut World) {
    for (machine, name) in [(A, "a"), (B, "b")] {
        let name = Name::new(name).unwrap();
        w.core.machine_news(NOW, MachineNews::Added { machine, name, monitor: "m".into(), port: "p".into() });
        w.core.machine_news(NOW, MachineNews::Up { machine, up: true });
    }
    let [host, a, b] = [Origin::Host, A.into(), B.into()];
    for (owner, peer) in [(a, b), (b, a), (a, host), (host, a)] {
        let (memory, reader) = (w.other(), w.other());
        w.core.machine_news(NOW, MachineNews::Window { owner, peer, memory, reader, size: SIZE, allocated: SIZE });
        for machine in [owner, peer].into_iter().filter_map(Origin::machine) {
            w.core.machine_news(NOW, MachineNews::Seen { machine, owner, peer });
        }
    }
}

pub(super) fn room(channel: u64, peer: &str, size: u64) -> Message {
    Message::Room { channel, size, peer: peer.into() }
}

pub(super) fn in_window(base: u64, ring_size: u64) -> RegionReference {
    RegionReference { within: Within::Window, base, ..RegionReference::with_ring(ring_size) }
}

pub(super) fn at(base: u64, ring_size: u64) -> Message {
    let Message::Connect { target, service, kind, directions, .. } = connect("b", "files", ring_size) else { panic!() };
    Message::Connect { target, service, kind, directions, region: in_window(base, ring_size) }
}

pub(super) fn place(w: &mut World, session: u64, channel: u64, peer: &str) -> u64 {
    match w.say(session, room(channel, peer, 4096 + 8192), vec![]) {
        Some(Message::RoomIs { base, .. }) => base,
        other => panic!("{other:?}"),
    }
}

/// A program in `b` that listens, and one in `a`.
pub(super) fn meeting(w: &mut World) -> (u64, u64) {
    let listener = w.join_as(B, "b", 7);
    w.bind(listener, "files", 8);
    (w.join_as(A, "a", 7), listener)
}

#[test]
fn guest_domain_gets_machine_prefix_unless_policy_names_it() {
    let mut w = attached();
    for (asked, got) in [("a", "a"), ("a.x", "a.x"), ("b", "a.b"), ("root", "a.root"), ("ab", "a.ab")] {
        let session = w.open(A, 1);
        let Message::Joined { name, .. } = w.ask(session, join(asked)) else { panic!() };
        assert_eq!(name, got);
    }
    let session = w.open(A, 1);
    assert_eq!(w.refused(session, join(&"x".repeat(64)), vec![]), Refusal::NameInvalid);
    // A machine that was never attached.
    w.open(MachineId::new(9).unwrap(), 1);
    assert!(matches!(w.sent.pop().unwrap().message, Message::Refused { code: Refusal::Denied, .. }));
    // The policy can give it another name.
    let mut w = World::with_policy("administrators = [1000]\n[[join]]\ndomain = \"web\"\nmachines = [\"a\"]\n");
    w.core.machine_news(
        NOW,
        MachineNews::Added { machine: A, name: Name::new("a").unwrap(), monitor: String::new(), port: String::new() },
    );
    let session = w.open(A, 1);
    assert!(matches!(w.ask(session, join("web")), Message::Joined { name, .. } if name == "web"));
}

#[test]
fn machine_has_no_rights_of_host_users() {
    let text = "administrators = [\"*\"]\n[[join]]\ndomain = \"db\"\nusers = [\"*\"]\ngroups = [\"*\"]\n";
    let policy = Policy::parse(text).unwrap();
    let guest = Credentials::in_machine(A, 1);
    assert!(!policy.is_administrator(guest));
    assert!(!policy.may_join_something(guest) && policy.may_join(guest, &Name::new("db").unwrap()).is_none());

    let mut w = attached();
    let (guest, _) = meeting(&mut w);
    let list = Message::List { what: What::Machines, after: 0 };
    assert_eq!(w.refused(guest, list, vec![]), Refusal::Denied);
    let add =
        Message::AddMachine { room: 0, migratable: false, name: "c".into(), monitor: "m".into(), port: "p".into() };
    assert_eq!(w.refused(guest, add, vec![]), Refusal::Denied);
    assert_eq!(w.refused(guest, Message::Directory {}, vec![]), Refusal::Machine);
    // On the host, it is for administrators to have channels to machines.
    let mut w = World::with_policy("[[join]]\ndomain = \"*\"\nusers = [1000]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n");
    let name = Name::new("b").unwrap();
    w.core.machine_news(NOW, MachineNews::Added { machine: B, name, monitor: String::new(), port: String::new() });
    let listener = w.join_as(B, "b", 7);
    w.bind(listener, "files", 8);
    let host = w.join("h", 1);
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(host, connect("b", "files", 8192), with), Refusal::Denied);
}

/// The user number that stood for the first machine while machines were told by user numbers. With a user namespace a process of the
/// host can really have it.
const HIGH: u32 = 0xfff0_0001;

#[test]
fn host_user_with_high_uid_is_refused_by_default() {
    let mut w = attached();
    w.open(HIGH, 1);
    assert!(matches!(w.sent.pop().unwrap().message, Message::Refused { code: Refusal::Denied, .. }));
}

#[test]
fn host_user_with_high_uid_is_a_plain_user() {
    let mut w = World::with_policy(&format!(
        "administrators = [1000]\nsessions_per_user = 1\n[[join]]\ndomain = \"web\"\nusers = [{HIGH}]\n"
    ));
    let name = Name::new("a").unwrap();
    w.core.machine_news(NOW, MachineNews::Added { machine: A, name, monitor: String::new(), port: String::new() });
    // The machine's session is not in the account of the user.
    w.join_as(A, "a", 1);
    let host = w.join_as(HIGH, "web", 1);
    let Message::Domains { page } = w.ask(host, Message::List { what: What::Domains, after: 0 }) else { panic!() };
    let rows: Vec<_> = page.rows.iter().map(|row| (row.name.as_str(), row.user)).collect();
    assert_eq!(rows, [("web", User::Host(HIGH))], "what is the machine's is nothing to the user");
    w.end(host);
    let host = w.open(HIGH, 2);
    assert_eq!(w.refused(host, join("a"), vec![]), Refusal::Denied);
}

#[test]
fn rule_for_high_uid_admits_no_machine() {
    let text = format!(
        "administrators = [{HIGH}]\n[[join]]\ndomain = \"db\"\nusers = [{HIGH}]\ngroups = [{HIGH}]\n[[connect]]\nfrom = \"db\"\nto = \"*\"\n"
    );
    let policy = Policy::parse(&text).unwrap();
    let (machine, db) = (Credentials::in_machine(A, 1), Name::new("db").unwrap());
    assert!(policy.is_administrator(HIGH.with(1)) && policy.may_join(HIGH.with(1), &db).is_some());
    assert!(!policy.is_administrator(machine) && policy.may_join(machine, &db).is_none());
    assert!(!policy.may_join_something(machine));
    assert!(!policy.may_connect(machine, &Name::new("a").unwrap(), &db, &db));
}

#[test]
fn machine_list_shows_how_windows_are_plugged_once_known() {
    let mut w = attached();
    let root = w.join("root", 1);
    let plugged = |w: &mut World| {
        let Message::Machines { page } = w.ask(root, Message::List { what: What::Machines, after: 0 }) else {
            panic!()
        };
        page.rows.iter().map(|row| row.plugged_as).collect::<Vec<_>>()
    };
    assert_eq!(plugged(&mut w), [PluggedAs::Unknown; 2]);
    w.core.machine_news(NOW, MachineNews::Plugged { machine: A, plugged_as: PluggedAs::Memory });
    w.core.machine_news(NOW, MachineNews::Plugged { machine: B, plugged_as: PluggedAs::Device });
    // A machine that was detached meanwhile.
    w.core.machine_news(NOW, MachineNews::Plugged { machine: MachineId::MAX, plugged_as: PluggedAs::Device });
    assert_eq!(plugged(&mut w), [PluggedAs::Memory, PluggedAs::Device]);
}

#[test]
fn channel_place_is_freed_after_both_ends_close() {
    let mut w = attached();
    let (caller, listener) = meeting(&mut w);
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(caller, connect("b", "files", 8192), with), Refusal::Elsewhere);
    let base = place(&mut w, caller, 0, "b");
    let with = vec![w.region(8192)];
    let Some(Message::Connected { channel, .. }) = w.say(caller, at(base, 8192), with) else { panic!() };
    let incoming = w.sent.iter().rposition(|s| s.session == listener).unwrap();
    assert!(matches!(w.sent[incoming].with[0], Fake::Other(_)), "the broker's own descriptor of the window");
    let back = place(&mut w, listener, channel, "a");
    assert_eq!(w.refused(listener, room(channel, "a", 4096), vec![]), Refusal::Quota, "one for a channel");
    let accepted = Message::Accepted { channel, start: 0, region: in_window(back, 8192) };
    let with = vec![w.other()];
    assert_eq!(w.say(listener, accepted, with), Some(Message::Done {}));
    // The caller dies; the listener still reads what it had written.
    w.end(caller);
    let again = w.join_as(A, "a", 8);
    assert_ne!(place(&mut w, again, 0, "b"), base);
    w.say(listener, Message::Closed { channel }, vec![]);
    assert_eq!(place(&mut w, again, 0, "b"), base, "free again");
}

#[test]
fn links_to_machine_are_made_by_broker_and_each_end_given_once() {
    let mut w = attached();
    let host = w.join("h", 1);
    let listener = w.join_as(A, "a", 7);
    w.bind(listener, "files", 8);
    let base = place(&mut w, host, 0, "a");
    let to_a = || {
        let Message::Connect { target: _, service, kind, directions, region } = at(base, 8192) else { panic!() };
        Message::Connect { target: "a".into(), service, kind, directions, region }
    };
    // An end that the client has made could be kept by it.
    let with = vec![w.region(8192), w.link(), w.link()];
    assert_eq!(w.refused(host, to_a(), with), Refusal::Protocol);
    w.sent.clear();
    let before = w.open_descriptors();
    let with = vec![w.region(8192)];
    let Some(Message::Connected { links: 2, .. }) = w.say(host, to_a(), with) else { panic!() };
    let given = |session| {
        let with = w.sent.iter().filter(|sent| sent.session == session).flat_map(|sent| &sent.with);
        with.filter(|fd| matches!(fd, Fake::Link(_))).count()
    };
    // The answer was taken out of `sent`, and its ends with it: the broker has none of them.
    assert_eq!(given(listener), 2);
    w.sent.clear();
    assert_eq!(w.open_descriptors(), before, "the broker keeps none");
}

#[test]
fn broadcast_across_machines_is_refused_with_alternative() {
    let mut w = attached();
    let (_, publisher) = meeting(&mut w);
    let bind = Message::Bind { service: "news".into(), kind: Kind::Broadcast, backlog: 4 };
    assert_eq!(w.ask(publisher, bind), Message::Done {});
    let subscribe = || Message::Connect {
        target: "b".into(),
        service: "news".into(),
        kind: Kind::Broadcast,
        directions: Directions::REVERSE,
        region: RegionReference::with_ring(0),
    };
    let host = w.join("h", 1);
    for elsewhere in [w.join_as(A, "a", 9), host] {
        let with = vec![w.region(0)];
        let Some(Message::Refused { code: Refusal::Machine, reason }) = w.say(elsewhere, subscribe(), with) else {
            panic!("not refused")
        };
        assert!(reason.contains("b:news is a broadcast on another machine") && reason.contains("messages"), "{reason}");
    }
    let near = w.join_as(B, "b.x", 9);
    let with = vec![w.other()];
    assert!(matches!(w.say(near, subscribe(), with), Some(Message::Connected { .. })));
}

#[test]
fn ring_growth_is_limited_to_share_of_free_memory() {
    let mut w = attached();
    let (caller, listener) = meeting(&mut w);
    let base = place(&mut w, caller, 0, "b");
    let with = vec![w.region(8192)];
    let Some(Message::Connected { channel, .. }) = w.say(caller, at(base, 8192), with) else { panic!() };
    assert_eq!(w.refused(caller, room(channel, "b", 4096), vec![]), Refusal::NoSuchChannel, "nobody has accepted");
    let back = place(&mut w, listener, channel, "a");
    let accepted = Message::Accepted { channel, start: 0, region: in_window(back, 8192) };
    let with = vec![w.other()];
    assert_eq!(w.say(listener, accepted, with), Some(Message::Done {}));
    // Each end for its own ring, and no one else.
    let grown = place(&mut w, caller, channel, "b");
    assert_ne!(grown, base);
    let back = place(&mut w, listener, channel, "a");
    let other = w.join_as(A, "a", 8);
    assert_eq!(w.refused(other, room(channel, "b", 4096), vec![]), Refusal::NoSuchChannel);
    // Most of what is free stays free.
    assert_eq!(w.refused(caller, room(channel, "b", SIZE / 4), vec![]), Refusal::OutOfResources);
    assert!(matches!(w.say(caller, room(channel, "b", SIZE / 16), vec![]), Some(Message::RoomIs { .. })));
    place(&mut w, caller, channel, "b");
    assert_eq!(w.refused(caller, room(channel, "b", 4096), vec![]), Refusal::Quota, "four for an end");
    // All of it comes back with the channel.
    w.say(caller, Message::Closed { channel }, vec![]);
    w.say(listener, Message::Closed { channel }, vec![]);
    assert_eq!(place(&mut w, caller, 0, "b"), base);
    assert_eq!(place(&mut w, caller, 0, "b"), grown);
    let with = vec![w.region(8192)];
    let Some(Message::Connected { channel, .. }) = w.say(caller, at(base, 8192), with) else { panic!() };
    assert_eq!(place(&mut w, listener, channel, "a") + 3 * 4096, back);
}

#[test]
fn failed_connection_leaves_no_place_taken() {
    let mut w = attached();
    let (caller, listener) = meeting(&mut w);
    let first = place(&mut w, caller, 0, "b");
    w.delivery = OfferDelivery::Full;
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(caller, at(first, 8192), with), Refusal::BacklogFull);
    w.delivery = OfferDelivery::Done;
    assert_eq!(place(&mut w, caller, 0, "b"), first);
    w.end(listener);
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(caller, at(first, 8192), with), Refusal::NoSuchDomain);
    let listener = w.join_as(B, "b", 7);
    assert_eq!(place(&mut w, caller, 0, "b"), first);
    // A process that ends without having connected.
    w.end(caller);
    let caller = w.join_as(A, "a", 9);
    assert_eq!(place(&mut w, caller, 0, "b"), first);
    w.end(listener);
}

#[test]
fn ungranted_place_is_refused() {
    let mut w = attached();
    let (caller, listener) = meeting(&mut w);
    let base = place(&mut w, caller, 0, "b");
    let other = w.join_as(A, "a", 8);
    for (session, message) in [
        (other, at(base, 8192)),
        (caller, at(base, 65536)),
        (caller, at(base + 4096, 8192)),
        (caller, at(base + (1 << 40), 8192)),
    ] {
        let with = vec![w.region(8192)];
        assert_eq!(w.refused(session, message, with), Refusal::BadRegion);
    }
    // Within a machine, and on the host, a region is in a memfd.
    let near = w.join_as(B, "b", 8);
    assert_eq!(w.refused(near, room(0, "b", 4096), vec![]), Refusal::Protocol);
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(near, at(base, 8192), with), Refusal::BadRegion);
    // Another's channel gives no place.
    let with = vec![w.region(8192)];
    let base = place(&mut w, caller, 0, "b");
    let Some(Message::Connected { channel, .. }) = w.say(caller, at(base, 8192), with) else { panic!() };
    assert_eq!(w.refused(near, room(channel, "a", 4096), vec![]), Refusal::NoSuchChannel);
    assert_eq!(w.refused(caller, room(channel, "b", 4096), vec![]), Refusal::NoSuchChannel);
    // More than there is.
    assert_eq!(w.refused(caller, room(0, "b", SIZE), vec![]), Refusal::OutOfResources);
    assert_eq!(w.refused(caller, room(0, "nobody", 4096), vec![]), Refusal::NoSuchDomain);
    w.end(listener);
}

/// The broker charges the region to the domain's quota, and not the place.
#[test]
fn region_smaller_than_its_place_is_refused() {
    let mut w = attached();
    let (caller, listener) = meeting(&mut w);
    let Some(Message::RoomIs { base, .. }) = w.say(caller, room(0, "b", 1 << 20), vec![]) else { panic!() };
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(caller, at(base, 8192), with), Refusal::BadRegion);
    assert!(w.booked.is_empty(), "the place of a refused region is free");
    let base = place(&mut w, caller, 0, "b");
    let with = vec![w.region(8192)];
    let Some(Message::Connected { channel, .. }) = w.say(caller, at(base, 8192), with) else { panic!() };
    let Some(Message::RoomIs { base, .. }) = w.say(listener, room(channel, "a", 1 << 20), vec![]) else { panic!() };
    let accepted = Message::Accepted { channel, start: 0, region: in_window(base, 8192) };
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(listener, accepted, with), Refusal::BadRegion);
}

#[test]
fn window_not_seen_by_machine_is_not_used() {
    let mut w = attached();
    let (caller, _) = meeting(&mut w);
    w.core.machine_news(NOW, MachineNews::Up { machine: B, up: true });
    assert_eq!(w.refused(caller, room(0, "b", 4096), vec![]), Refusal::Machine);
    w.core.machine_news(NOW, MachineNews::Seen { machine: B, owner: A.into(), peer: B.into() });
    place(&mut w, caller, 0, "b");
    w.core.machine_news(NOW, MachineNews::Removed { machine: B });
    assert_eq!(w.refused(caller, room(0, "b", 4096), vec![]), Refusal::Machine);
}

#[test]
fn places_stay_in_book_until_sessions_end() {
    let mut w = attached();
    let (caller, listener) = meeting(&mut w);
    let base = place(&mut w, caller, 0, "b");
    assert_eq!(w.booked, BTreeSet::from([(base, 4096 + 8192)]));
    let with = w.region(8192);
    let channel = match w.say(caller, at(base, 8192), vec![with]) {
        Some(Message::Connected { channel, .. }) => channel,
        other => panic!("{other:?}"),
    };
    let back = place(&mut w, listener, channel, "a");
    assert_eq!(w.booked, BTreeSet::from([(base, 4096 + 8192), (back, 4096 + 8192)]));
    w.end(listener);
    w.end(caller);
    assert_eq!(w.booked, BTreeSet::new());
}

#[test]
fn places_used_under_previous_broker_are_not_given_out() {
    let mut w = attached();
    let (caller, _) = meeting(&mut w);
    let first = place(&mut w, caller, 0, "b");
    w.end(caller);
    // The same window with the next broker. A program of the earlier broker may still use the first place and some memory further on.
    let (memory, reader, allocated) = (w.other(), w.other(), SIZE);
    let (owner, peer) = (A.into(), B.into());
    tell(&mut w, MachineNews::Window { owner, peer, memory, reader, size: SIZE, allocated });
    let places = vec![(first, 4096), (first + 8192, 4096), (SIZE - 4096, 1 << 40), (u64::MAX - 8191, 8192)];
    tell(&mut w, MachineNews::InUse { owner, peer, places });
    for machine in [A, B] {
        tell(&mut w, MachineNews::Seen { machine, owner, peer });
    }
    let caller = w.join_as(A, "a", 8);
    assert_eq!(place(&mut w, caller, 0, "b"), first + 12288);
    let abandoned = w.say(caller, room(0, "b", SIZE), vec![]);
    assert!(
        matches!(&abandoned, Some(Message::Refused { reason, .. }) if reason.contains("8192 bytes are kept")),
        "{abandoned:?}"
    );
}

/// A window from `a` to `b` that is seen, with memory for its first places.
fn begun(w: &mut World) {
    let (memory, reader) = (w.other(), w.other());
    let window = MachineNews::Window {
        owner: A.into(),
        peer: B.into(),
        memory,
        reader,
        size: SIZE,
        allocated: HUGE_PAGE + (64 << 10),
    };
    for news in [
        window,
        MachineNews::Seen { machine: A, owner: A.into(), peer: B.into() },
        MachineNews::Seen { machine: B, owner: A.into(), peer: B.into() },
    ] {
        tell(w, news);
    }
}

fn tell(w: &mut World, news: MachineNews<Fake>) {
    let actions = w.core.machine_news(NOW, news);
    w.perform(actions);
}

fn allocated(w: &mut World, to: u64) {
    tell(w, MachineNews::Allocated { owner: A.into(), peer: B.into(), to });
}

/// The messages to a session since the last call.
fn heard(w: &mut World, session: u64) -> Vec<Message> {
    let (theirs, rest) = std::mem::take(&mut w.sent).into_iter().partition(|s| s.session == session);
    w.sent = rest;
    theirs.into_iter().map(|sent: Sent| sent.message).collect()
}

#[test]
fn room_request_waits_until_its_memory_is_allocated() {
    let mut w = attached();
    let (caller, _) = meeting(&mut w);
    let other = w.join_as(A, "a", 8);
    begun(&mut w);
    assert!(place(&mut w, caller, 0, "b") < HUGE_PAGE + (64 << 10));
    heard(&mut w, caller);
    // More than there is memory for, and more than there ever will be.
    assert_eq!(w.say(caller, room(0, "b", 1 << 20), vec![]), None);
    assert_eq!(w.say(other, room(0, "b", 512 << 10), vec![]), None);
    assert_eq!(w.refused(caller, room(0, "b", SIZE), vec![]), Refusal::OutOfResources);
    place(&mut w, caller, 0, "b");
    allocated(&mut w, HUGE_PAGE + (256 << 10));
    assert!(heard(&mut w, caller).is_empty() && heard(&mut w, other).is_empty());
    // Each is served as soon as there is memory for it.
    allocated(&mut w, HUGE_PAGE + (700 << 10));
    let [Message::RoomIs { base: second, .. }] = heard(&mut w, other)[..] else { panic!() };
    allocated(&mut w, SIZE);
    let [Message::RoomIs { base: first, .. }] = heard(&mut w, caller)[..] else { panic!() };
    assert!(second + (512 << 10) <= HUGE_PAGE + (700 << 10) && first >= second + (512 << 10));
    allocated(&mut w, SIZE);
    assert!(heard(&mut w, caller).is_empty() && heard(&mut w, other).is_empty(), "once each");
    // All of the memory is there, so the request does not wait.
    assert_eq!(w.refused(caller, room(0, "b", 1 << 20), vec![]), Refusal::OutOfResources);
    // A notice about a window that is gone.
    let (owner, peer) = (MachineId::MAX.into(), B.into());
    tell(&mut w, MachineNews::Allocated { owner, peer, to: SIZE });
    tell(&mut w, MachineNews::Shortage { owner, peer, why: String::new() });
}

#[test]
fn growing_ring_gets_share_of_unallocated_memory() {
    let mut w = attached();
    let (caller, listener) = meeting(&mut w);
    begun(&mut w);
    let base = place(&mut w, caller, 0, "b");
    let with = vec![w.region(8192)];
    let Some(Message::Connected { channel, .. }) = w.say(caller, at(base, 8192), with) else { panic!() };
    let back = place(&mut w, listener, channel, "a");
    let accepted = Message::Accepted { channel, start: 0, region: in_window(back, 8192) };
    let with = vec![w.other()];
    assert_eq!(w.say(listener, accepted, with), Some(Message::Done {}));
    heard(&mut w, caller);
    assert_eq!(w.say(caller, room(channel, "b", 256 << 10), vec![]), None);
    assert_eq!(w.refused(caller, room(channel, "b", 1 << 20), vec![]), Refusal::OutOfResources);
    allocated(&mut w, SIZE);
    assert!(matches!(heard(&mut w, caller)[..], [Message::RoomIs { .. }]));
}

#[test]
fn memory_shortage_refuses_waiting_request_with_reason() {
    let mut w = attached();
    let (caller, _) = meeting(&mut w);
    begun(&mut w);
    heard(&mut w, caller);
    assert_eq!(w.say(caller, room(0, "b", 1 << 20), vec![]), None);
    tell(&mut w, MachineNews::Shortage { owner: A.into(), peer: B.into(), why: "all is taken".into() });
    let heard_of = heard(&mut w, caller);
    let [Message::Refused { code: Refusal::OutOfResources, reason }] = &heard_of[..] else { panic!("{heard_of:?}") };
    assert!(reason.contains("only") && reason.contains("all is taken"), "{reason}");
    // The existing memory stays in use. Requests no longer wait for the rest, which may come all the same.
    place(&mut w, caller, 0, "b");
    assert_eq!(w.refused(caller, room(0, "b", 1 << 20), vec![]), Refusal::OutOfResources);
    allocated(&mut w, SIZE - 4096);
    assert!(matches!(w.say(caller, room(0, "b", 1 << 20), vec![]), Some(Message::RoomIs { .. })));
}

#[test]
fn memory_wait_ends_with_session_or_window_and_is_bounded() {
    let mut w = attached();
    let (caller, _) = meeting(&mut w);
    begun(&mut w);
    let gone = w.join_as(A, "a", 8);
    assert_eq!(w.say(gone, room(0, "b", 1 << 20), vec![]), None);
    w.end(gone);
    assert!(w.core.machines.waiting.is_empty(), "a request of a session that has ended");
    for _ in 0..64 {
        assert_eq!(w.say(caller, room(0, "b", 1 << 20), vec![]), None);
    }
    assert_eq!(w.refused(caller, room(0, "b", 1 << 20), vec![]), Refusal::Quota);
    heard(&mut w, caller);
    tell(&mut w, MachineNews::Removed { machine: B });
    let answers = heard(&mut w, caller);
    assert!(answers.iter().all(|m| matches!(m, Message::Refused { code: Refusal::Machine, .. })));
    assert_eq!((answers.len(), heard(&mut w, gone).len()), (64, 0));
}

#[test]
fn room_request_that_waited_long_is_refused_and_takes_no_place() {
    let mut w = attached();
    let (caller, _) = meeting(&mut w);
    begun(&mut w);
    heard(&mut w, caller);
    assert!(!w.core.wants_ticks());
    assert_eq!(w.say(caller, room(0, "b", 1 << 20), vec![]), None);
    assert!(w.core.wants_ticks());
    // Looking at it again does not begin the wait again.
    let actions = w.core.handle(77 + 7, CoreEvent::Tick);
    w.perform(actions);
    allocated(&mut w, HUGE_PAGE + (256 << 10));
    assert!(heard(&mut w, caller).is_empty());
    let actions = w.core.handle(77 + 8, CoreEvent::Tick);
    w.perform(actions);
    let answers = heard(&mut w, caller);
    assert!(matches!(answers[..], [Message::Refused { code: Refusal::OutOfResources, .. }]), "{answers:?}");
    assert!(!w.core.wants_ticks());
    allocated(&mut w, SIZE);
    assert!(heard(&mut w, caller).is_empty());
    let window = &w.core.machines.windows[&(A.into(), B.into())];
    assert!(window.places.is_empty(), "a place that nobody waits for");
}

#[test]
fn room_request_gets_place_that_became_free_before_its_limit() {
    let mut w = attached();
    let (caller, _) = meeting(&mut w);
    let other = w.join_as(A, "a", 8);
    begun(&mut w);
    allocated(&mut w, HUGE_PAGE + (700 << 10));
    assert!(matches!(w.say(other, room(0, "b", 512 << 10), vec![]), Some(Message::RoomIs { .. })));
    heard(&mut w, caller);
    assert_eq!(w.say(caller, room(0, "b", 512 << 10), vec![]), None);
    w.end(other);
    let actions = w.core.handle(77 + 8, CoreEvent::Tick);
    w.perform(actions);
    let answers = heard(&mut w, caller);
    assert!(matches!(answers[..], [Message::RoomIs { .. }]), "{answers:?}");
    assert!(!w.core.wants_ticks());
}

#[test]
fn connection_within_machine_passes_opaque_descriptors() {
    let mut w = attached();
    let (_, listener) = meeting(&mut w);
    let caller = w.join_as(B, "x", 9);
    // Stand-ins for memory and links.
    let with = vec![w.other()];
    assert!(matches!(w.say(caller, connect("b", "files", 8192), with), Some(Message::Connected { .. })));
    // Its own domains are found without the machine's name.
    w.bind(caller, "near", 4);
    let with = vec![w.other()];
    assert!(matches!(w.say(listener, connect("x", "near", 8192), with), Some(Message::Connected { .. })));
    let order = Message::RemoveMachine { name: "a".into() };
    let administrator = w.join("h", 1);
    assert_eq!(w.say(administrator, order, vec![]), None, "answered when it is done");
    assert_eq!(w.orders, [Order::Remove { name: Name::new("a").unwrap() }]);
    let Message::Machines { page } = w.ask(administrator, Message::List { what: What::Machines, after: 0 }) else {
        panic!()
    };
    let seen: Vec<_> = page.rows.iter().map(|row| (row.name.as_str(), row.windows, row.ready)).collect();
    assert_eq!(seen, [("a", 4, 4), ("b", 2, 2)]);
}
