//! Groups: members, seats, and when their places are free again.

use super::*;
use partywall_protocol::wire::{GroupRow, What};
use partywall_shm::group::{CONTROL, SEATS, address};
use partywall_shm::layout::PAGE;

const A: MachineId = MachineId::MIN;
const B: MachineId = MachineId::new(2).unwrap();
const SIZE: u64 = 16 << 20;
const POLICY: &str = "administrators = [1000]\n\
    [[group]]\nname = \"first\"\ndomains = [\"x\"]\n\
    [[group]]\nname = \"pool\"\nmachines = [\"a\", \"b\"]\ndomains = [\"web\"]\n";

fn of(member: usize) -> Membership {
    Membership { group: 1, member }
}

fn news(w: &mut World, news: MachineNews<Fake>) {
    let actions = w.core.machine_news(NOW, news);
    w.perform(actions);
}

fn window(w: &mut World, member: usize, owner: Origin) {
    let (memory, reader) = (w.region(4096), w.other());
    news(w, MachineNews::GroupWindow { of: of(member), owner, memory, reader, size: SIZE, in_use: Vec::new() });
}

/// Two machines that see all windows of `pool`, whose third member is `web` on the host.
fn grouped() -> World {
    let mut w = World::with_policy(POLICY);
    let groups = Policy::parse(POLICY).unwrap().groups().to_vec();
    w.core.set_groups(&groups);
    window(&mut w, 2, Origin::Host);
    for (machine, name) in [(A, "a"), (B, "b")] {
        let name = Name::new(name).unwrap();
        news(&mut w, MachineNews::Added { machine, name, monitor: "m".into(), port: "p".into() });
        news(&mut w, MachineNews::Up { machine, up: true });
        window(&mut w, machine.get() as usize - 1, machine.into());
    }
    for machine in [A, B] {
        (0..3).for_each(|member| news(&mut w, MachineNews::GroupSeen { machine, of: of(member) }));
    }
    w
}

fn take_part(room: u64) -> Message {
    Message::JoinGroup { room, memory: false, group: "pool".into() }
}

/// A process that takes part: its session, the number of its seat, and where that begins.
fn seated(w: &mut World, origin: impl Into<Origin>, pid: u32) -> (u64, u64, u64) {
    let session = match origin.into() {
        Origin::Host => w.join_as(1000, "web", pid),
        Origin::Machine(machine) => w.join_as(machine, if machine == A { "a" } else { "b" }, pid),
    };
    match w.ask(session, take_part(1 << 20)) {
        Message::GroupJoined { key, base, size, members: 3, .. } => {
            assert_eq!(size, CONTROL + (1 << 20));
            (session, key, base)
        }
        other => panic!("{other:?}"),
    }
}

/// The notices to a session about other seats: the key, and whether it is alive.
fn told(w: &mut World, session: u64) -> Vec<(u64, bool)> {
    let mut all = Vec::new();
    w.sent.retain(|sent| match sent.message {
        Message::SeatIs { key, alive, .. } if sent.session == session => {
            all.push((key, alive));
            false
        }
        _ => true,
    });
    all
}

fn rows(w: &mut World, session: u64) -> Vec<GroupRow> {
    match w.ask(session, Message::List { what: What::Groups, after: 0 }) {
        Message::Groups { page } => page.rows,
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_members_join_group_and_see_other_seats() {
    let mut w = grouped();
    let (a, key_a, _) = seated(&mut w, A, 1);
    let (host, key_host, _) = seated(&mut w, Origin::Host, 2);
    let (b, key_b, _) = seated(&mut w, B, 1);
    assert_eq!(told(&mut w, a), [(key_host, true), (key_b, true)]);
    assert_eq!(told(&mut w, host), [(key_a, true), (key_b, true)]);
    assert_eq!(told(&mut w, b), [(key_a, true), (key_host, true)]);
    assert_eq!(w.refused(a, take_part(0), vec![]), Refusal::Protocol, "once for a session");

    // For processes of the host the domain counts, for those of a machine the machine: a domain with the name of a member machine is not
    // the member.
    let as_web = w.join_as(A, "web", 9);
    assert!(matches!(w.ask(as_web, take_part(0)), Message::GroupJoined { member: 0, .. }), "it is in machine a");
    for name in ["shop", "b.x"] {
        let stranger = w.join(name, 5);
        assert_eq!(w.refused(stranger, take_part(0), vec![]), Refusal::Denied);
        assert_eq!(w.refused(stranger, Message::GroupWindow { member: 0 }, vec![]), Refusal::Protocol);
    }
    let mut other_world = grouped();
    let namesake = other_world.join("a", 5);
    assert_eq!(
        other_world.refused(namesake, take_part(0), vec![]),
        Refusal::Denied,
        "a domain of the host called as a machine"
    );
    let none = Message::JoinGroup { room: 0, memory: false, group: "first".into() };
    let other = w.join_as(B, "b", 10);
    assert_eq!(w.refused(other, none, vec![]), Refusal::Denied);
}

#[test]
fn member_writes_its_own_window_and_reads_the_others() {
    let mut w = grouped();
    let (a, ..) = seated(&mut w, A, 1);
    for member in 0..3u8 {
        w.sent.clear();
        let session = SessionId(a);
        let event = CoreEvent::Message {
            session,
            request: 77,
            message: Message::GroupWindow { member },
            descriptors: vec![],
            socket: None,
        };
        w.feed(event);
        let Sent { message, with, .. } = &w.sent[0];
        let Message::GroupWindowIs { address: at, own, size: SIZE, life: 1, .. } = message else {
            panic!("{message:?}")
        };
        assert_eq!((*at, *own), (address(1, member.into()), member == 0));
        assert_eq!(matches!(with[0], Fake::Region(..)), member == 0, "writable to its owner alone");
    }
    assert_eq!(w.refused(a, Message::GroupWindow { member: 3 }, vec![]), Refusal::Protocol);
    // A machine cannot have a window that it does not see; its agent has started again.
    news(&mut w, MachineNews::Up { machine: A, up: true });
    assert_eq!(w.refused(a, Message::GroupWindow { member: 1 }, vec![]), Refusal::Machine);
    let again = w.join_as(A, "a", 2);
    assert_eq!(w.refused(again, take_part(0), vec![]), Refusal::Machine);
    // Only members and administrators know of a group.
    let administrator = w.join("boss", 3);
    assert_eq!(rows(&mut w, administrator).len(), 4);
    assert_eq!(rows(&mut w, a).iter().map(|row| row.group.as_str()).collect::<Vec<_>>(), ["pool"; 3]);
}

#[test]
fn place_is_reused_after_all_readers_release_it() {
    let mut w = grouped();
    let (a, key, base) = seated(&mut w, A, 1);
    let (b, ..) = seated(&mut w, B, 1);
    let (host, ..) = seated(&mut w, Origin::Host, 1);
    told(&mut w, b);
    w.end(a);
    assert_eq!(told(&mut w, b), [(key, false)]);
    let (next, other_key, other) = seated(&mut w, A, 2);
    assert!(other != base && other_key > key);
    assert_eq!(told(&mut w, next).len(), 2, "of the dead before its time it hears nothing");
    assert_eq!(w.say(b, Message::LetGo { key }, vec![]), None);
    // A release by a member that was not there does not count, nor a second one, nor one of a living seat.
    w.say(next, Message::LetGo { key }, vec![]);
    w.say(b, Message::LetGo { key }, vec![]);
    w.say(b, Message::LetGo { key: other_key }, vec![]);
    let (third, _, place) = seated(&mut w, A, 3);
    assert_ne!(place, base);
    w.end(host);
    w.say(b, Message::LetGo { key }, vec![]);
    w.end(third);
    let (_, _, place) = seated(&mut w, A, 4);
    assert_eq!(place, base, "the last who could read it has ended");
}

#[test]
fn room_and_seats_have_an_end() {
    let mut w = grouped();
    let session = w.join_as(A, "a", 1);
    for room in [SIZE, u64::MAX - 1, u64::MAX - CONTROL] {
        assert_eq!(w.refused(session, take_part(room), vec![]), Refusal::OutOfResources, "{room}");
    }
    let Message::GroupJoined { size, .. } = w.ask(session, take_part(u64::MAX)) else { panic!() };
    let quarter = (SIZE - 4096 - SEATS as u64 * CONTROL) / 4;
    assert_eq!(size, CONTROL + quarter.next_multiple_of(4096));
    let mut sessions = vec![session];
    for pid in 2..=SEATS as u32 {
        let session = w.join_as(A, "a", pid);
        assert!(matches!(w.ask(session, take_part(0)), Message::GroupJoined { .. }));
        sessions.push(session);
    }
    let more = w.join("web", 99);
    assert_eq!(w.refused(more, take_part(0), vec![]), Refusal::Quota);
    sessions.into_iter().for_each(|session| w.end(session));
    assert!(matches!(w.ask(more, take_part(0)), Message::GroupJoined { seat: 0, .. }));
    let administrator = w.join("boss", 3);
    assert_eq!(rows(&mut w, administrator)[1].free, SIZE - 4096, "nothing of it is taken");
}

#[test]
fn removed_machine_loses_window_and_gets_new_one_on_return() {
    let mut w = grouped();
    let (a, key, _) = seated(&mut w, A, 1);
    let (b, ..) = seated(&mut w, B, 1);
    let open = w.open_descriptors();
    told(&mut w, b);
    news(&mut w, MachineNews::Removed { machine: A });
    assert_eq!(told(&mut w, b), [(key, false)]);
    assert!(w.open_descriptors() < open);
    assert_eq!(w.refused(b, Message::GroupWindow { member: 0 }, vec![]), Refusal::Machine);
    w.end(a);
    let name = Name::new("a").unwrap();
    let machine = MachineId::new(7).unwrap();
    news(&mut w, MachineNews::Added { machine, name, monitor: "m".into(), port: "p".into() });
    window(&mut w, 0, machine.into());
    news(&mut w, MachineNews::GroupSeen { machine, of: of(0) });
    news(&mut w, MachineNews::GroupSeen { machine: B, of: of(0) });
    let again = w.join_as(machine, "a", 1);
    assert!(matches!(w.ask(again, take_part(0)), Message::GroupJoined { .. }));
    let Message::GroupWindowIs { life, .. } = w.ask(b, Message::GroupWindow { member: 0 }) else { panic!() };
    assert_eq!(life, 2);
    // The dead seat was in the earlier window: freeing it takes nothing from this one.
    w.say(b, Message::LetGo { key }, vec![]);
    w.end(again);
}

#[test]
fn host_members_alone_learn_where_a_machine_has_a_window() {
    let mut w = grouped();
    let (web, ..) = seated(&mut w, Origin::Host, 1);
    let (a, ..) = seated(&mut w, A, 1);
    let ask = |member: u8, machine: &str| Message::GroupPlace { member, machine: machine.into() };
    assert_eq!(w.refused(web, ask(2, "a"), vec![]), Refusal::Machine, "it is not plugged in yet");
    news(&mut w, MachineNews::GroupPlugged { machine: A, of: of(2), place: 0x1_0020_0000 });
    news(&mut w, MachineNews::GroupPlugged { machine: B, of: of(2), place: 0x2_0020_0000 });
    let is = |place| Message::GroupPlaceIs { life: 1, address: address(1, 2), size: SIZE, place, host: true };
    assert_eq!(w.ask(web, ask(2, "a")), is(0x1_0020_0000));
    assert_eq!(w.ask(web, ask(2, "b")), is(0x2_0020_0000));
    assert_eq!(w.refused(a, ask(2, "a"), vec![]), Refusal::Denied, "the asker is in a machine");
    assert_eq!(w.refused(web, ask(2, "c"), vec![]), Refusal::Denied, "no member");
    assert_eq!(w.refused(web, ask(3, "a"), vec![]), Refusal::Protocol, "no such member");
    let stranger = w.join_as(1000, "stranger", 9);
    assert_eq!(w.refused(stranger, ask(2, "a"), vec![]), Refusal::Protocol);
    // The agent greets again; then the machine's port closes, and the next hypervisor may have it elsewhere.
    news(&mut w, MachineNews::Up { machine: A, up: true });
    assert_eq!(w.ask(web, ask(2, "a")), is(0x1_0020_0000));
    news(&mut w, MachineNews::Up { machine: A, up: false });
    assert_eq!(w.refused(web, ask(2, "a"), vec![]), Refusal::Machine);
    news(&mut w, MachineNews::Removed { machine: B });
    assert_eq!(w.refused(web, ask(2, "b"), vec![]), Refusal::Machine);
}

/// A group of two domains of the host.
fn world_with_host_group() -> World {
    let policy = "administrators = [1000]\n[[group]]\nname = \"pool\"\ndomains = [\"web\", \"db\"]\n";
    let mut w = World::with_policy(policy);
    let groups = Policy::parse(policy).unwrap().groups().to_vec();
    w.core.set_groups(&groups);
    for member in 0..2 {
        news(&mut w, MachineNews::GroupRoom { of: Membership { group: 0, member }, size: SIZE });
    }
    w
}

const ROOM: u64 = 1 << 20;

/// A request with memory of a size.
fn bring(w: &mut World, session: u64, room: u64, memory: u64) -> Message {
    let message = Message::JoinGroup { room, memory: true, group: "pool".into() };
    let memory = w.region(memory - 4096);
    w.say(session, message, vec![memory]).unwrap()
}

#[test]
fn host_group_seat_requires_memory_of_announced_size() {
    let mut w = world_with_host_group();
    let web = w.join_as(1000, "web", 1);
    assert_eq!(w.refused(web, take_part(ROOM), vec![]), Refusal::Protocol, "no memory");
    assert_eq!(w.refused(web, take_part(SIZE + 1), vec![]), Refusal::OutOfResources);
    let before = w.open_descriptors();
    for (room, memory) in [(ROOM, ROOM + CONTROL + 4096), (ROOM, ROOM), (u64::MAX, ROOM + CONTROL)] {
        let refused = bring(&mut w, web, room, memory);
        assert!(matches!(refused, Message::Refused { code: Refusal::BadRegion, .. }), "{refused:?}");
    }
    let refused = bring(&mut w, web, SIZE, SIZE + CONTROL);
    assert!(matches!(refused, Message::Refused { code: Refusal::OutOfResources, .. }), "{refused:?}");
    w.sent.clear();
    assert_eq!(w.open_descriptors(), before, "what is refused is closed");
    let joined = bring(&mut w, web, ROOM, ROOM + CONTROL);
    assert!(matches!(joined, Message::GroupJoined { member: 0, members: 2, .. }), "{joined:?}");
    assert_eq!(w.refused(web, Message::GroupWindow { member: 1 }, vec![]), Refusal::Machine);
    // Where a machine is a member, a seat is a part of a window.
    let mut mixed = grouped();
    let host = mixed.join_as(1000, "web", 1);
    let refused = bring(&mut mixed, host, ROOM, ROOM + CONTROL);
    assert!(matches!(refused, Message::Refused { code: Refusal::Protocol, .. }), "{refused:?}");
}

#[test]
fn seat_memory_goes_to_members_and_is_kept_until_released() {
    let mut w = world_with_host_group();
    let empty = w.open_descriptors();
    let [web, db] = [("web", 1), ("db", 2)].map(|(name, pid)| w.join_as(1000, name, pid));
    let stranger = w.join("shop", 3);
    let Message::GroupJoined { key, .. } = bring(&mut w, web, ROOM, ROOM + CONTROL) else { panic!() };
    assert_eq!(w.refused(db, Message::FetchSeat { key }, vec![]), Refusal::Protocol, "it does not take part yet");
    w.sent.clear();
    let Message::GroupJoined { key: other, .. } = bring(&mut w, db, ROOM, ROOM + CONTROL) else { panic!() };
    assert_eq!(w.refused(stranger, Message::FetchSeat { key }, vec![]), Refusal::Protocol);
    assert_eq!(w.refused(db, Message::FetchSeat { key: 1 }, vec![]), Refusal::Protocol);
    w.end(web);
    let Message::SeatIs { alive: false, memory: true, .. } = w.ask(db, Message::FetchSeat { key }) else { panic!() };
    w.say(db, Message::LetGo { key }, vec![]);
    assert_eq!(w.refused(db, Message::FetchSeat { key }, vec![]), Refusal::Protocol);
    assert!(matches!(w.ask(db, Message::FetchSeat { key: other }), Message::SeatIs { alive: true, .. }));
    w.end(db);
    w.sent.clear();
    assert_eq!(w.open_descriptors(), empty);
}

#[test]
fn seats_stay_in_book_while_a_process_may_use_them() {
    let mut w = grouped();
    let (a, key, base) = seated(&mut w, A, 1);
    let web = w.join_as(1000, "web", 2);
    let Message::GroupJoined { base: other, .. } = w.ask(web, take_part(0)) else { panic!("it is a member") };
    let (first, second) = ((base, CONTROL + (1 << 20)), (other, CONTROL));
    assert_eq!(w.booked, BTreeSet::from([first, second]));
    w.end(a);
    assert_eq!(w.booked, BTreeSet::from([first, second]), "the other may still read it");
    w.say(web, Message::LetGo { key }, vec![]);
    assert_eq!(w.booked, BTreeSet::from([second]));
    w.end(web);
    assert_eq!(w.booked, BTreeSet::new());
}

#[test]
fn seats_of_previous_broker_are_not_reused() {
    let mut w = grouped();
    let (memory, reader, size) = (w.region(4096), w.other(), SIZE);
    let in_use = vec![(PAGE, CONTROL), (SIZE - PAGE, 1 << 40), (u64::MAX - 8191, 8192)];
    news(&mut w, MachineNews::GroupWindow { of: of(2), owner: Origin::Host, memory, reader, size, in_use });
    let (_, _, base) = seated(&mut w, Origin::Host, 2);
    assert_eq!(base, PAGE + CONTROL);
    let session = w.join_as(1000, "web", 3);
    let refused = w.say(session, take_part(SIZE), vec![]);
    assert!(
        matches!(&refused, Some(Message::Refused { reason, .. }) if reason.contains(&format!("{CONTROL} bytes are kept"))),
        "{refused:?}"
    );
    w.core.check_groups();
}
