//! Events: who sees which, that queues are bounded, and that followers are answered when there is something (protocol C18).

use partywall_protocol::wire::{EventKind, EventRow, User};

use super::super::events::KEPT;
use super::super::happened::{Happened, Party};
use super::*;

const FILE: &str = "\
administrators = [0]
[[join]]
domain = '*'
users = [1, 2, 3]
[[connect]]
from = 'web'
to = 'db'
service = 'in'
";

/// Begins to follow.
fn follow(w: &mut World, session: u64) {
    let answer = w.ask(session, Message::FollowEvents { after: 0 });
    assert!(matches!(answer, Message::Events { lost: 0, page } if page.rows.is_empty()));
}

/// The events after an event, if there are any. Otherwise the request waits.
fn events(w: &mut World, session: u64, after: u64) -> Option<(u64, Vec<EventRow>)> {
    match w.say(session, Message::FollowEvents { after }, Vec::new()) {
        Some(Message::Events { lost, page }) => Some((lost, page.rows)),
        None => None,
        other => panic!("{other:?}"),
    }
}

fn kinds(rows: &[EventRow]) -> Vec<EventKind> {
    rows.iter().map(|row| row.kind).collect()
}

/// A refused connection of `web` to a service that no rule allows.
fn be_denied(w: &mut World, web: u64) {
    let with = vec![w.region(8192)];
    assert_eq!(w.refused(web, connect("db", "out", 8192), with), Refusal::Denied);
}

#[test]
fn administrator_sees_both_sides_and_the_clause_that_decides() {
    let mut w = World::with_policy(FILE);
    let root = w.join_as(0, "root", 1);
    follow(&mut w, root);
    let db = w.join_as(2, "db", 20);
    w.bind(db, "in", 5);
    let web = w.join_as(1, "web", 10);
    let channel = w.connect(web, "db", "in");
    be_denied(&mut w, web);
    w.end(web);
    w.end(db);
    let (lost, rows) = events(&mut w, root, 0).unwrap();
    assert_eq!(lost, 0);
    use EventKind::{ConnectRefused, Connected, Ended, Joined, Left};
    assert_eq!(kinds(&rows), [Joined, Joined, Connected, ConnectRefused, Left, Ended, Left]);
    let (made, denied) = (&rows[2], &rows[3]);
    assert_eq!((made.channel, made.user, made.pid, made.line), (channel, User::Host(1), 10, 5));
    assert_eq!((made.from.as_str(), made.to.as_str(), made.service.as_str()), ("web", "db", "in"));
    assert!(made.grounds.contains("[[connect]] rule 1"), "{made:?}");
    assert_eq!((denied.code, denied.line, denied.channel), (Refusal::Denied.number(), 0, 0));
    assert_eq!((denied.to.as_str(), denied.service.as_str()), ("db", "out"));
    assert!(denied.grounds.contains("no [[connect]] rule"), "{denied:?}");
    let last = rows.last().unwrap().number;
    assert!(events(&mut w, root, last).is_none(), "the next request waits");
}

#[test]
fn user_sees_own_events_and_peers_that_were_let_in() {
    let mut w = World::with_policy(FILE);
    let (web, db) = (w.join_as(1, "web", 10), w.join_as(2, "db", 20));
    let stranger = w.join_as(3, "stranger", 30);
    w.bind(db, "in", 5);
    for session in [web, db, stranger] {
        follow(&mut w, session);
    }
    be_denied(&mut w, web);
    let made = w.connect(web, "db", "in");
    let (_, of_web) = events(&mut w, web, 0).unwrap();
    assert_eq!(kinds(&of_web), [EventKind::ConnectRefused, EventKind::Connected]);
    let (_, of_db) = events(&mut w, db, 0).unwrap();
    assert_eq!(kinds(&of_db), [EventKind::Connected], "who was refused is no business of the other side");
    assert_eq!(of_db[0].channel, made);
    assert!(events(&mut w, stranger, 0).is_none());
}

#[test]
fn container_sees_its_domain_and_no_user_of_the_host() {
    let mut w = World::with_policy(FILE);
    let container = Home::Container { user: 7, pid: 8 };
    let inside = w.join_as((1, container), "inside", 40);
    follow(&mut w, inside);
    let web = w.join_as(1, "web", 10);
    be_denied(&mut w, web);
    assert!(events(&mut w, inside, 0).is_none(), "the same number is another user there");
    let again = w.join_as((1, container), "inside", 40);
    let rows: Vec<EventRow> = w
        .sent
        .drain(..)
        .filter_map(|sent| match sent.message {
            Message::Events { page, .. } => Some(page.rows),
            _ => None,
        })
        .flatten()
        .collect();
    assert_eq!(kinds(&rows), [EventKind::Joined], "the waiting request is answered at once");
    let with = vec![w.region(8192)];
    w.refused(again, connect("db", "out", 8192), with);
    let (_, rows) = events(&mut w, inside, rows[0].number).unwrap();
    assert_eq!((rows[0].kind, rows[0].line), (EventKind::ConnectRefused, 0));
}

fn left(w: &mut World, user: u32) {
    w.core.note_of(EventKind::Left, Party { user: User::Host(user), domain: 0 }, Happened::default());
}

#[test]
fn user_with_many_events_displaces_only_its_own() {
    let mut w = World::with_policy(FILE);
    let root = w.join_as(0, "root", 1);
    follow(&mut w, root);
    left(&mut w, 7);
    for _ in 0..10 * KEPT {
        left(&mut w, 8);
    }
    left(&mut w, 9);
    let (mut users, mut after, mut lost) = (Vec::new(), 0, 0);
    while let Some((so_far, rows)) = events(&mut w, root, after).filter(|(_, rows)| !rows.is_empty()) {
        users.extend(rows.iter().map(|row| row.user));
        (after, lost) = (rows.last().unwrap().number, so_far);
        if users.last() == Some(&User::Host(9)) {
            break;
        }
    }
    assert_eq!((users[0], users.last()), (User::Host(7), Some(&User::Host(9))));
    assert_eq!(lost as usize + users.len(), 10 * KEPT + 2);
}

#[test]
fn slow_follower_gets_count_of_lost_events() {
    let mut w = World::with_policy(FILE);
    let root = w.join_as(0, "root", 1);
    follow(&mut w, root);
    for number in 0..KEPT + 7 {
        left(&mut w, number as u32 % 10);
    }
    let (lost, rows) = events(&mut w, root, 0).unwrap();
    assert_eq!((lost, rows[0].number), (7, 8));
    // The next request acknowledges the received events, and the others follow.
    let (lost, next) = events(&mut w, root, rows.last().unwrap().number).unwrap();
    assert_eq!((lost, next[0].number), (7, rows.last().unwrap().number + 1));
}

#[test]
fn flood_of_denied_events_displaces_no_other_followers_events() {
    let mut w = World::with_policy(FILE);
    let (web, db) = (w.join_as(1, "web", 10), w.join_as(2, "db", 20));
    follow(&mut w, db);
    let with = vec![w.region(8192)];
    w.refused(db, connect("web", "x", 8192), with);
    for _ in 0..3 * KEPT {
        be_denied(&mut w, web);
    }
    let (lost, rows) = events(&mut w, db, 0).unwrap();
    assert_eq!((lost, kinds(&rows)), (0, vec![EventKind::ConnectRefused]));
}

#[test]
fn followers_are_limited_and_administrators_are_not_shut_out() {
    let mut w = World::with_policy("administrators = [0]\n[[join]]\ndomain = '*'\nusers = ['*']\n");
    let mut following = Vec::new();
    for user in 1..=8 {
        for pid in 0..4 {
            let session = w.join_as(user, &format!("d{user}"), pid + 1);
            follow(&mut w, session);
            following.push(session);
        }
    }
    let fifth = w.join_as(1, "d1", 9);
    assert_eq!(w.refused(fifth, Message::FollowEvents { after: 0 }, Vec::new()), Refusal::Quota);
    let other = w.join_as(9, "d9", 9);
    assert_eq!(w.refused(other, Message::FollowEvents { after: 0 }, Vec::new()), Refusal::Quota);
    let root = w.join_as(0, "root", 1);
    follow(&mut w, root);
    w.end(following[0]);
    follow(&mut w, other);
    assert_eq!(w.say(other, Message::FollowEvents { after: 0 }, Vec::new()), None);
    assert_eq!(w.refused(other, Message::FollowEvents { after: 0 }, Vec::new()), Refusal::Protocol);
}

#[test]
fn machines_and_policies_are_for_administrators() {
    let mut w = World::with_policy(FILE);
    let (root, web) = (w.join_as(0, "root", 1), w.join_as(1, "web", 10));
    follow(&mut w, root);
    follow(&mut w, web);
    let machine = MachineId::new(4).unwrap();
    let name = Name::new("vm").unwrap();
    let news = [
        MachineNews::Added { machine, name, monitor: "m".into(), port: "p".into() },
        MachineNews::Up { machine, up: true },
        MachineNews::Up { machine, up: true },
        MachineNews::Up { machine, up: false },
        MachineNews::Removed { machine },
    ];
    for news in news {
        let actions = w.core.machine_news(NOW + 3600, news);
        w.perform(actions);
    }
    let actions = w.core.set_policy(NOW + 7200, Arc::new(Policy::parse(FILE).unwrap()));
    w.perform(actions);
    let (_, rows) = events(&mut w, root, 0).unwrap();
    use EventKind::{MachineAttached, MachineDetached, MachineDown, MachineUp, PolicyChanged};
    assert_eq!(kinds(&rows), [MachineAttached, MachineUp, MachineDown, MachineDetached, PolicyChanged]);
    assert!(rows[..4].iter().all(|row| row.from == "vm" && row.user == User::Machine(machine)), "{rows:?}");
    let times: Vec<u64> = rows.iter().map(|row| row.at_s - NOW).collect();
    assert_eq!(times, [3600, 3600, 3600, 3600, 7200], "the time of an earlier event");
    assert!(events(&mut w, web, 0).is_none());
}

#[test]
fn refused_session_and_join_are_events() {
    let mut w = World::with_policy("administrators = [0]\n[[join]]\ndomain = 'web'\nusers = [1]\n");
    let root = w.join_as(0, "root", 1);
    follow(&mut w, root);
    w.open(5, 50);
    let one = w.open(1, 10);
    assert_eq!(w.refused(one, join("db"), Vec::new()), Refusal::Denied);
    let (_, rows) = events(&mut w, root, 0).unwrap();
    assert_eq!(kinds(&rows), [EventKind::JoinRefused, EventKind::JoinRefused]);
    assert_eq!((rows[0].user, rows[1].user, rows[1].from.as_str()), (User::Host(5), User::Host(1), "db"));
    assert!(rows[1].grounds.contains("no [[join]] rule"), "{rows:?}");
}
