//! Connections of unmodified programs in virtual machines: what is visible where, whose connection is whose, and places in windows.

use std::net::SocketAddr;

use partywall_protocol::directory::Transport;
use partywall_protocol::wire::{AddressList, RegionReference, Within};

use super::*;
use crate::core::pair_window::Holder;
use partywall_shm::layout::PAGE;

pub(super) const A: MachineId = MachineId::MIN;
pub(super) const B: MachineId = MachineId::new(2).unwrap();
pub(super) const C: MachineId = MachineId::new(3).unwrap();
/// From the header to the end: room for a directory and some places.
const SIZE: u64 = 32 << 20;
const RING: u64 = 8192;
const CLIENT: &str = "10.0.0.1:5000";
const SERVER: &str = "10.0.0.2:80";

/// Three machines that see all windows, in a world where the policy says `text`.
pub(super) fn attached(text: &str) -> World {
    let mut w = World::with_policy(text);
    let machines = [(A, "a"), (B, "b"), (C, "c")];
    for (machine, name) in machines {
        let name = Name::new(name).unwrap();
        news(&mut w, MachineNews::Added { machine, name, monitor: "m".into(), port: "p".into() });
        news(&mut w, MachineNews::Up { machine, up: true });
    }
    let places: Vec<Origin> = machines.iter().map(|(machine, _)| (*machine).into()).chain([Origin::Host]).collect();
    for owner in &places {
        for peer in places.iter().filter(|peer| *peer != owner) {
            let (owner, peer) = (*owner, *peer);
            let (memory, reader) = (w.other(), w.other());
            news(&mut w, MachineNews::Window { owner, peer, memory, reader, size: SIZE, allocated: SIZE });
            for machine in [owner, peer].into_iter().filter_map(Origin::machine) {
                news(&mut w, MachineNews::Seen { machine, owner, peer });
            }
        }
    }
    w
}

pub(super) const EVERYBODY: &str = "administrators = [1000]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n";

pub(super) fn news(w: &mut World, news: MachineNews<Fake>) {
    let actions = w.core.machine_news(NOW, news);
    w.perform(actions);
}

/// A connection's socket, as its machine's agent describes it. All agents number sockets and namespaces alike.
fn socket(local: &str, remote: &str, numbers: Option<(u32, u32)>) -> SocketFacts {
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let numbers = numbers.map(|(sent_from, received_from)| Numbers { sent_from, received_from });
    let base = facts(Transport::Tcp, at(local), Some(at(remote)));
    SocketFacts { cookie: 5, identity: Identity { numbers, ..Identity::default() }, ..base }
}

fn client() -> SocketFacts {
    socket(CLIENT, SERVER, Some((100, 700)))
}

fn server() -> SocketFacts {
    socket(SERVER, CLIENT, Some((700, 101)))
}

fn listening(at: &str) -> SocketFacts {
    SocketFacts { remote: None, state: SocketState::Listening, ..socket(at, "0.0.0.0:0", None) }
}

fn publish(w: &mut World, session: u64, socket: SocketFacts) {
    let answer = w.say_of(session, Message::Publish { addresses: AddressList(vec![]) }, socket, vec![]);
    assert!(matches!(answer, Some(Message::Published { .. })), "{answer:?}");
}

fn near() -> RegionReference {
    RegionReference::with_ring(RING)
}

pub(super) fn far(base: u64) -> RegionReference {
    RegionReference { within: Within::Window, base, ..near() }
}

fn offer(w: &mut World, session: u64, socket: SocketFacts, region: RegionReference) -> Message {
    let with = vec![w.region(RING)];
    w.say_of(session, Message::Offer { region }, socket, with).expect("an answer")
}

fn take(w: &mut World, session: u64, socket: SocketFacts, region: RegionReference) -> Message {
    let with = vec![w.region(RING)];
    w.say_of(session, Message::Take { region }, socket, with).expect("an answer")
}

pub(super) fn room(answer: Message) -> u64 {
    match answer {
        Message::RoomIs { base, .. } => base,
        other => panic!("no room: {other:?}"),
    }
}

fn handshake(answer: Message) -> u64 {
    match answer {
        Message::Bell { offer, .. } => offer,
        other => panic!("no handshake: {other:?}"),
    }
}

/// The number of a handshake with another machine, and its place in the window.
fn placed(answer: Message) -> (u64, u64) {
    match answer {
        Message::Bell { offer, region, .. } if region == far(region.base) => (offer, region.base),
        other => panic!("no place: {other:?}"),
    }
}

pub(super) fn refused(answer: Message) -> Refusal {
    match answer {
        Message::Refused { code, reason } => {
            assert!(!reason.is_empty());
            code
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// The offer of a connection from a program in `a`, whose region is in the window to `b`.
fn offered(w: &mut World, web: u64) -> u64 {
    placed(offer(w, web, client(), near())).0
}

fn cancel(w: &mut World, session: u64, offer: u64) -> Message {
    w.say(session, Message::Cancel { offer }, vec![]).expect("an answer")
}

/// A program in `a`, and one in `b` that listens.
fn meeting(w: &mut World) -> (u64, u64) {
    let db = w.join_as(B, "b.db", 7);
    publish(w, db, listening(SERVER));
    (w.join_as(A, "a.web", 7), db)
}

#[test]
fn sockets_in_two_machines_meet_in_their_windows() {
    let mut w = attached(EVERYBODY);
    let (web, db) = meeting(&mut w);
    let id = offered(&mut w, web);
    assert!(w.listed_in_machines.keys().any(|(machine, table, _)| (*machine, *table) == (B, 'o')));
    assert!(w.listed_in_machines.keys().all(|(machine, table, _)| *table != 'o' || *machine == B), "b alone is asked");

    let (taken, base) = placed(take(&mut w, db, server(), near()));
    assert_eq!(taken, id);
    let confirmed = w.say_of(web, Message::Confirm { offer: id }, client(), vec![]).unwrap();
    let Message::PeerIs { region, user, program, .. } = confirmed else { panic!("{confirmed:?}") };
    assert_eq!((region, user), (far(base), User::Machine(B)));
    assert_ne!(program, 0, "a program of another machine has a number, too");
    let finished = w.say_of(db, Message::Finish { offer: id }, server(), vec![]).unwrap();
    let Message::PeerIs { region, user, .. } = finished else { panic!("{finished:?}") };
    assert!(region.is_in_window() && user == User::Machine(A));
    assert_eq!(w.core.status().channels, 1);

    // Both ends gone, the places are free for the next.
    assert!(w.say(web, Message::Closed { channel: id }, vec![]).is_none());
    assert!(w.say(db, Message::Closed { channel: id }, vec![]).is_none());
    let (id, first) = placed(offer(&mut w, web, client(), near()));
    assert_eq!(cancel(&mut w, web, id), Message::Done {});
    let (again, second) = placed(offer(&mut w, web, client(), near()));
    assert_eq!(second, first, "an offer that is taken back leaves no place");
    assert_eq!(placed(take(&mut w, db, server(), near())), (again, base));
    w.end(web);
    assert!(again > id);
    assert_eq!(refused(take(&mut w, db, server(), near())), Refusal::NoSuchOffer);
}

#[test]
fn sockets_meet_after_the_listener_was_closed() {
    let mut w = attached(EVERYBODY);
    let (web, db) = (w.join_as(A, "a.web", 7), w.join_as(B, "b.db", 7));
    // A program that was executed with the connection publishes the addresses at which it runs.
    publish(&mut w, db, server());
    let id = offered(&mut w, web);
    assert_eq!(placed(take(&mut w, db, server(), near())).0, id);
}

#[test]
fn places_of_ended_handshake_stay_until_both_sides_give_up() {
    let mut w = attached(EVERYBODY);
    let (web, db) = meeting(&mut w);
    for ended_by in ["cancel", "ticks", "refusal", "twin"] {
        let (id, offering) = placed(offer(&mut w, web, client(), near()));
        let (_, accepting) = placed(take(&mut w, db, server(), near()));
        match ended_by {
            "cancel" => assert_eq!(cancel(&mut w, db, id), Message::Done {}),
            "ticks" => (0..40).for_each(|_| w.feed(CoreEvent::Tick)),
            "refusal" => {
                let other = socket(CLIENT, SERVER, Some((100, 701)));
                refused(w.say_of(web, Message::Confirm { offer: id }, other, vec![]).unwrap());
            }
            // The socket is a new one, with the ends of one that has gone.
            _ => {
                let twin = SocketFacts { cookie: 6, ..socket(CLIENT, SERVER, Some((900, 700))) };
                let (next, place) = placed(offer(&mut w, web, twin, near()));
                assert_ne!(place, offering, "{ended_by}");
                assert_eq!(cancel(&mut w, web, next), Message::Done {});
            }
        }
        // Each side may still make its region, or read the other's.
        let (next, place) = placed(offer(&mut w, web, client(), near()));
        assert_ne!(place, offering, "{ended_by}");
        let (_, other) = placed(take(&mut w, db, server(), near()));
        assert_ne!(other, accepting, "{ended_by}");
        for session in [web, db] {
            cancel(&mut w, session, id);
            cancel(&mut w, session, next);
        }
        assert_eq!(refused(cancel(&mut w, web, id)), Refusal::NoSuchOffer, "{ended_by}: it has given up");
        let places = w.core.machines.windows.values().map(|window| window.places.len());
        assert_eq!(places.sum::<usize>(), 0, "{ended_by}");
    }
}

#[test]
fn number_of_ended_handshake_is_not_reclaimed() {
    let mut w = attached(EVERYBODY);
    let (web, db) = meeting(&mut w);
    let (id, _) = placed(offer(&mut w, web, client(), near()));
    placed(take(&mut w, db, server(), near()));
    assert_eq!(cancel(&mut w, db, id), Message::Done {});
    // As a channel that nobody has, it would give the places away.
    let other = w.join_as(C, "c.other", 7);
    for session in [db, other] {
        let region = w.region(RING);
        let (kind, side) = (Kind::Stream, Side::Accepting);
        let reclaim = Message::Reclaim {
            channel: id,
            side,
            kind,
            directions: Directions::BOTH,
            service: "s".into(),
            peer: "a.web".into(),
            region: near(),
        };
        assert_eq!(w.refused(session, reclaim, vec![region]), Refusal::NoSuchChannel);
    }
    assert_eq!(w.core.machines.ended.len(), 1);
}

#[test]
fn handshakes_that_are_not_given_up_count_as_ends() {
    let mut w = attached(&format!("{EVERYBODY}[quota]\nchannels = 5\n"));
    let (web, db) = meeting(&mut w);
    let offers: Vec<u64> = (0..5)
        .map(|_| {
            let (offer, _) = placed(offer(&mut w, web, client(), near()));
            // The accepting side takes and leaves, and the connecting side does not look.
            assert_eq!(placed(take(&mut w, db, server(), near())).0, offer);
            assert_eq!(cancel(&mut w, db, offer), Message::Done {});
            offer
        })
        .collect();
    assert_eq!(refused(offer(&mut w, web, client(), near())), Refusal::Quota);
    // A channel's end is given up by the same message, which has no answer.
    assert!(w.say(web, Message::Closed { channel: offers[2] }, vec![]).is_none());
    offered(&mut w, web);
    w.end(web);
    assert!(w.core.machines.ended.is_empty());
    // The places of a window that has gone count no more.
    let web = w.join_as(A, "a.web", 8);
    let (id, _) = placed(offer(&mut w, web, client(), near()));
    placed(take(&mut w, db, server(), near()));
    assert_eq!(cancel(&mut w, web, id), Message::Done {});
    assert_eq!(w.core.machines.ended.len(), 1);
    news(&mut w, MachineNews::Removed { machine: A });
    assert!(w.core.machines.ended.is_empty());
}

#[test]
fn places_of_possibly_living_program_are_not_reused() {
    for lost in [true, false] {
        let mut w = attached(EVERYBODY);
        let (web, db) = meeting(&mut w);
        let id = offered(&mut w, web);
        let (_, base) = placed(take(&mut w, db, server(), near()));
        assert!(matches!(
            w.say_of(web, Message::Confirm { offer: id }, client(), vec![]),
            Some(Message::PeerIs { .. })
        ));
        assert!(matches!(w.say_of(db, Message::Finish { offer: id }, server(), vec![]), Some(Message::PeerIs { .. })));
        // The agent of the server's machine ends, and with it the session; the client closes.
        if lost {
            w.lose(db);
        } else {
            w.end(db);
        }
        assert!(w.say(web, Message::Closed { channel: id }, vec![]).is_none());
        assert_eq!(w.core.status().channels, 0);
        let db = w.join_as(B, "b.db", 8);
        publish(&mut w, db, listening(SERVER));
        offered(&mut w, web);
        let (_, next) = placed(take(&mut w, db, server(), near()));
        assert_eq!(next != base, lost, "a process may still write to that place");
    }
}

#[test]
fn place_of_handshake_of_possibly_living_program_is_not_reused() {
    for lost in [true, false] {
        let mut w = attached(EVERYBODY);
        let (web, db) = meeting(&mut w);
        let (_, offering) = placed(offer(&mut w, web, client(), near()));
        if lost {
            w.lose(web);
        } else {
            w.end(web);
        }
        let web = w.join_as(A, "a.web", 8);
        let (_, next) = placed(offer(&mut w, web, client(), near()));
        assert_eq!(next != offering, lost);
        w.end(db);
    }
}

#[test]
fn sockets_without_crossing_numbers_are_not_one_connection() {
    let mut w = attached(EVERYBODY);
    let (web, db) = meeting(&mut w);
    offered(&mut w, web);
    for numbers in [None, Some((700, 100)), Some((701, 101))] {
        let answer = take(&mut w, db, socket(SERVER, CLIENT, numbers), near());
        assert!(matches!(refused(answer), Refusal::NoSuchOffer | Refusal::Ambiguous));
    }
    // A third machine that says that it has the accepting end.
    let liar = w.join_as(C, "c.liar", 7);
    for numbers in [None, Some((700, 102))] {
        let answer = take(&mut w, liar, socket(SERVER, CLIENT, numbers), near());
        assert!(matches!(refused(answer), Refusal::NoSuchOffer | Refusal::Ambiguous));
    }
    placed(take(&mut w, db, server(), near()));
}

#[test]
fn translated_connection_between_machines_meets_by_numbers() {
    let mut w = attached(EVERYBODY);
    let (web, db) = meeting(&mut w);
    let id = offered(&mut w, web);
    (0..2).for_each(|_| w.feed(CoreEvent::LookAtUntaken));
    let shown = Fingerprint::translated(
        SERVER.parse().unwrap(),
        w.core.sockets.key_of(NamespaceId { origin: B.into(), cookie: server().netns }),
    );
    let where_shown = |w: &World| w.listed_in_machines.keys().filter(|key| key.2 == shown).map(|key| key.0).collect();
    let machines: Vec<MachineId> = where_shown(&w);
    assert_eq!(machines, [B]);
    let translators = |of: MachineId| w.listed_in_machines.contains_key(&(of, 'a', Fingerprint::translators()));
    assert!(!translators(B), "programs of one machine alone have published anything");

    let seen = socket(SERVER, "10.0.9.9:7000", Some((700, 101)));
    // The offer is for another machine, whatever a third one says.
    let liar = w.join_as(C, "c.liar", 7);
    assert_eq!(refused(take(&mut w, liar, seen, near())), Refusal::NoSuchOffer);
    assert_eq!(placed(take(&mut w, db, seen, near())).0, id);
    assert!(matches!(w.say_of(web, Message::Confirm { offer: id }, client(), vec![]), Some(Message::PeerIs { .. })));
    assert!(matches!(w.say_of(db, Message::Finish { offer: id }, seen, vec![]), Some(Message::PeerIs { .. })));
    assert_eq!((w.core.status().channels, where_shown(&w).len()), (1, 0));
}

#[test]
fn machines_learn_that_programs_run_elsewhere() {
    let mut w = attached(EVERYBODY);
    let says = |w: &World, of: MachineId| w.listed_in_machines.contains_key(&(of, 'a', Fingerprint::translators()));
    let db = w.join_as(B, "b.db", 7);
    publish(&mut w, db, listening(SERVER));
    let web = w.join_as(A, "a.web", 7);
    publish(&mut w, web, listening("10.0.0.1:80"));
    assert!([A, B, C].into_iter().all(|machine| says(&w, machine)));
    // A machine whose directory begins later learns it, too.
    const D: MachineId = MachineId::new(4).unwrap();
    let name = Name::new("d").unwrap();
    news(&mut w, MachineNews::Added { machine: D, name, monitor: "m".into(), port: "p".into() });
    news(&mut w, MachineNews::Up { machine: D, up: true });
    let (owner, peer, memory, reader) = (Origin::Host, D.into(), w.other(), w.other());
    news(&mut w, MachineNews::Window { owner, peer, memory, reader, size: SIZE, allocated: SIZE });
    assert!(says(&w, D));
    w.end(web);
    assert!(![A, B, C, D].into_iter().any(|machine| says(&w, machine)));
}

#[test]
fn connection_with_unreadable_numbers_stays_in_its_machine() {
    let mut w = attached(EVERYBODY);
    let (web, _) = meeting(&mut w);
    handshake(offer(&mut w, web, socket(CLIENT, SERVER, None), near()));
    assert!(w.listed_in_machines.keys().any(|(machine, table, _)| (*machine, *table) == (A, 'o')));
}

#[test]
fn place_of_clients_own_choice_is_refused() {
    let mut w = attached(EVERYBODY);
    let (web, db) = meeting(&mut w);
    // A place that was not given out, and one that another process has.
    assert_eq!(refused(offer(&mut w, web, client(), far(4 << 20))), Refusal::BadRegion);
    let other = w.join_as(A, "a.web", 8);
    let (id, base) = placed(offer(&mut w, other, client(), near()));
    assert_eq!(refused(offer(&mut w, web, client(), far(base))), Refusal::BadRegion);
    assert_eq!(refused(take(&mut w, db, server(), far(base))), Refusal::BadRegion);
    assert_eq!(cancel(&mut w, other, id), Message::Done {});
    let shop = w.join_as(B, "b.shop", 9);
    let local = socket("10.0.0.2:6000", SERVER, Some((1, 2)));
    assert_eq!(refused(offer(&mut w, shop, local, far(base))), Refusal::BadRegion);
    let id = handshake(offer(&mut w, shop, local, near()));
    let end = socket(SERVER, "10.0.0.2:6000", Some((2, 2)));
    assert_eq!(
        handshake(take(&mut w, db, SocketFacts { cookie: 9, ..end }, near())),
        id,
        "the memory stays in the machine"
    );
}

#[test]
fn host_program_needs_rights_to_meet_machine_by_memory() {
    let mut w = attached(
        "administrators = [1000]\n[[join]]\ndomain = \"*\"\nusers = [\"*\"]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n",
    );
    meeting(&mut w);
    let user = w.join_as(1001, "user", 3);
    assert_eq!(refused(offer(&mut w, user, client(), near())), Refusal::Denied);
    let root = w.join_as(1000, "root", 4);
    placed(offer(&mut w, root, client(), near()));
}

#[test]
fn loopback_listener_is_visible_in_its_own_machine_alone() {
    let mut w = attached(EVERYBODY);
    let db = w.join_as(B, "b.db", 7);
    let before = w.listed.len();
    publish(&mut w, db, listening("127.0.0.1:80"));
    let listeners =
        |w: &World| w.listed_in_machines.keys().filter(|(_, table, _)| *table == 'l').map(|k| k.0).collect::<Vec<_>>();
    assert_eq!(listeners(&w), [B]);
    assert_eq!(w.listed.len(), before, "nor on the host");
    // A program of another machine that connects to its own loopback offers there.
    let web = w.join_as(A, "a.web", 7);
    handshake(offer(&mut w, web, socket("127.0.0.1:5000", "127.0.0.1:80", Some((1, 2))), near()));
    assert_eq!(
        refused(take(&mut w, db, socket("127.0.0.1:80", "127.0.0.1:5000", Some((2, 2))), near())),
        Refusal::NoSuchOffer
    );
}

#[test]
fn machine_sees_only_listeners_that_its_policy_lets_it_reach() {
    let rule = "administrators = [1000]\n[[connect]]\nfrom = \"a.*\"\nto = \"b.db\"\nservice = \"tcp-80\"\n";
    let mut w = attached(rule);
    let db = w.join_as(B, "b.db", 7);
    publish(&mut w, db, listening("10.0.0.2:80"));
    publish(&mut w, db, listening("10.0.0.2:81"));
    let seen = |w: &World, machine: MachineId| {
        w.listed_in_machines.keys().filter(|(of, table, _)| (*of, *table) == (machine, 'l')).count()
    };
    assert_eq!((seen(&w, A), seen(&w, B), seen(&w, C)), (1, 2, 0));
    // A change of the policy is visible at once, and a later withdrawal leaves nothing.
    let actions =
        w.core.set_policy(NOW, Arc::new(Policy::parse(&rule.replace("a.*", "c.*").replace("tcp-80", "*")).unwrap()));
    w.perform(actions);
    assert_eq!((seen(&w, A), seen(&w, B), seen(&w, C)), (0, 2, 2));
    w.end(db);
    assert!(w.listed_in_machines.is_empty(), "{:?}", w.listed_in_machines);
}

#[test]
fn false_listener_does_not_keep_offers_from_real_one() {
    let mut w = attached(EVERYBODY);
    let (web, db) = meeting(&mut w);
    let liar = w.join_as(C, "c.liar", 7);
    publish(&mut w, liar, listening(SERVER));
    // Offers that are not taken are made again, and go to each in turn.
    let taken = (0..4).any(|_| {
        let id = offered(&mut w, web);
        let met = matches!(take(&mut w, db, server(), near()), Message::Bell { .. });
        if !met {
            w.ask(web, Message::Cancel { offer: id });
        }
        met
    });
    assert!(taken);
}

#[test]
fn one_machine_is_limited_to_quarter_of_offers() {
    let mut w = attached(EVERYBODY);
    let all = w.core.capacity.offers;
    let offered = (0..all).take_while(|n| {
        let port = 1000 + u32::try_from(*n).unwrap();
        // A name for each few: quotas are a domain's.
        let session = w.join_as(A, &format!("a.n{}", n / 8), port);
        let facts = SocketFacts { cookie: u64::from(port), ..socket(&format!("10.0.0.1:{port}"), SERVER, None) };
        matches!(offer(&mut w, session, facts, near()), Message::Bell { .. })
    });
    assert_eq!(offered.count(), all / 4);
    let b = w.join_as(B, "b.x", 1);
    handshake(offer(&mut w, b, socket("10.0.0.2:9", "10.0.0.9:9", None), near()));
}

#[test]
fn later_connections_of_window_get_smaller_rings() {
    let mut w = attached(EVERYBODY);
    w.core.capacity.offers = 4000;
    meeting(&mut w);
    let whole = SIZE / 64;
    let sizes: Vec<u64> = (0..1000)
        .map_while(|n| {
            // A name for each few: quotas are a domain's.
            let session = w.join_as(A, &format!("a.n{}", n / 8), 1000 + n);
            let local = format!("10.0.0.1:{}", 1000 + n);
            let facts = || SocketFacts { cookie: (1000 + n).into(), ..socket(&local, SERVER, Some((n, 101))) };
            match offer(&mut w, session, facts(), RegionReference::with_ring(whole)) {
                Message::Bell { region, .. } => {
                    assert!(region.is_in_window());
                    Some(region.ring_size)
                }
                answer => {
                    assert_eq!(refused(answer), Refusal::OutOfResources);
                    None
                }
            }
        })
        .collect();
    assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes.iter().all(|size| size.is_power_of_two()), "{sizes:?}");
    assert_eq!((sizes[0], sizes[sizes.len() - 1]), (whole, 16 << 10));
    // As many as have room are of the smallest size, and 64 would have had the size that they asked for.
    assert!(sizes.len() > 128, "{sizes:?}");
}

/// Fills the window from `a` to `b` with small places, and frees every other one. Returns their size.
fn fragment(w: &mut World) -> u64 {
    let small = PAGE + (16 << 10);
    let window = w.core.machines.windows.get_mut(&(A.into(), B.into())).unwrap();
    let places: Vec<u64> =
        std::iter::from_fn(|| window.place(small, Holder::Abandoned)).map(|(base, _)| base).collect();
    for base in places.iter().step_by(2) {
        window.free_one(*base);
    }
    small
}

#[test]
fn connection_gets_largest_ring_that_fits_between_others() {
    let mut w = attached(EVERYBODY);
    let (web, _) = meeting(&mut w);
    let small = fragment(&mut w);
    let answer = offer(&mut w, web, client(), RegionReference::with_ring(256 << 10));
    assert!(matches!(answer, Message::Bell { region, .. } if region.ring_size == small - PAGE), "{answer:?}");
}

#[test]
fn connection_waits_for_coming_memory_with_ring_of_full_size() {
    let mut w = attached(EVERYBODY);
    let (web, _) = meeting(&mut w);
    fragment(&mut w);
    // Half of the window has memory.
    w.core.machines.windows.get_mut(&(A.into(), B.into())).unwrap().size *= 2;
    let ask = |w: &mut World| offer(w, web, client(), RegionReference::with_ring(256 << 10));
    assert_eq!(refused(ask(&mut w)), Refusal::OutOfResources);
    w.core.machines.windows.get_mut(&(A.into(), B.into())).unwrap().extend(SIZE + (1 << 20));
    let answer = ask(&mut w);
    assert!(matches!(answer, Message::Bell { region, .. } if region.ring_size == 256 << 10), "{answer:?}");
}

#[test]
fn directory_of_machine_is_in_its_window_once_that_is_seen() {
    let mut w = attached(EVERYBODY);
    let web = w.join_as(A, "a.web", 7);
    let answer = w.ask(web, Message::Directory {});
    assert!(matches!(answer, Message::DirectoryIs { base, .. } if base > 0), "{answer:?}");
    news(&mut w, MachineNews::Up { machine: A, up: true });
    assert_eq!(w.refused(web, Message::Directory {}, vec![]), Refusal::Machine);
    news(&mut w, MachineNews::Removed { machine: A });
    assert!(w.listed_in_machines.keys().all(|(machine, ..)| *machine != A));
}
