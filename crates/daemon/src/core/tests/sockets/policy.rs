//! The policy's decisions about rings of sockets.

use partywall_protocol::wire::{PolicyQuestion, User};

use super::*;

#[test]
fn socket_rings_follow_connect_rules_and_same_user_exception() {
    let policy = "
[[join]]
domain = '*'
users = [1, 2]
[[connect]]
from = 'web'
to = 'db'
service = 'tcp-80'
";
    let mut w = World::with_policy(policy);
    let (web, db) = (w.join_as(1, "web", 1), w.join_as(2, "db", 2));
    offered(&mut w, web, client());
    met(&mut w, (web, client()), (db, server()));
    let (other, its) = (socket("10.0.0.2:5001", "10.0.0.1:81"), socket("10.0.0.1:81", "10.0.0.2:5001"));
    offered(&mut w, web, SocketFacts { acknowledged: 0, received: 0, ..other });
    assert_eq!(code(take(&mut w, db, its)), Refusal::Denied);
    // Between two domains of one user no rule is needed, since a separate rule says so.
    let again = w.join_as(1, "shop", 3);
    let (near, its) = (socket("10.0.0.2:5003", "10.0.0.1:99"), socket("10.0.0.1:99", "10.0.0.2:5003"));
    let [near, its] = [near, its].map(|end| SocketFacts { acknowledged: 0, received: 0, ..end });
    offered(&mut w, web, near);
    met(&mut w, (web, near), (again, its));
    // The other way round nothing is allowed at all.
    let (back, its) = (socket("10.0.0.1:5002", "10.0.0.2:80"), socket("10.0.0.2:80", "10.0.0.1:5002"));
    offered(&mut w, db, SocketFacts { acknowledged: 0, received: 0, ..back });
    assert_eq!(code(take(&mut w, web, its)), Refusal::Denied);
}

#[test]
fn sockets_of_one_user_need_rule_if_same_user_is_off() {
    let policy = "[[join]]\ndomain = '*'\nusers = [1]\n[sockets]\nsame_user = false";
    let mut w = World::with_policy(policy);
    let (web, db) = (w.join_as(1, "web", 1), w.join_as(1, "db", 2));
    offered(&mut w, web, client());
    assert_eq!(code(take(&mut w, db, server())), Refusal::Denied);
    assert!(!is_offered(&w));
}

#[test]
fn policy_that_changes_during_a_handshake_holds() {
    let policy = "[[join]]\ndomain = '*'\nusers = [1, 2]\n";
    let mut w = World::with_policy(&format!("{policy}[[connect]]\nfrom = 'web'\nto = 'db'"));
    let (web, db) = (w.join_as(1, "web", 1), w.join_as(2, "db", 2));
    let id = offered(&mut w, web, client());
    take(&mut w, db, server());
    confirm(&mut w, web, id, client());
    let actions = w.core.set_policy(NOW, Arc::new(Policy::parse(policy).unwrap()));
    w.perform(actions);
    assert_eq!(code(finish(&mut w, db, id, server())), Refusal::Denied);
}

fn set(clauses: &str) -> Message {
    Message::SetMoveRules { reset: false, clauses: Text(clauses.into()), ring_size: 0, spin_us: u32::MAX }
}

#[test]
fn administrator_sets_move_rules_and_reset_restores_file() {
    let policy = "
administrators = [1000]
[[join]]
domain = '*'
users = [1]
[sockets]
move = 'after=3'
ring_size = 65536
spin_us = 7
rules = ['never@port=22']
";
    let mut w = World::with_policy(policy);
    let (root, user) = (w.join("root", 1), w.join_as(1, "user", 2));
    let is = |live, clauses: &str, ring_size, spin_us| Message::MoveRulesAre {
        live,
        clauses: Text(clauses.into()),
        ring_size,
        spin_us,
    };
    let from_file = is(false, "after=3 never@port=22", 65536, 7);
    assert_eq!(w.ask(user, Message::GetMoveRules {}), from_file);
    assert_eq!(w.refused(user, set("never"), vec![]), Refusal::Denied);
    assert_eq!(w.ask(root, set("now never@program=a* ")), is(true, "after=3 now never@program=a*", 65536, 7));
    let sizes = Message::SetMoveRules { reset: false, clauses: Text("never".into()), ring_size: 4096, spin_us: 0 };
    assert_eq!(w.ask(root, sizes), is(true, "after=3 never", 4096, 0));
    let (terms, clauses) = w.terms.clone().unwrap();
    assert_eq!((terms.ring_size, terms.spin_us, clauses), (4096, 0, vec![Clause::parse("never").unwrap()]));
    for bad in ["soon", "never@port=0", "now@program=a/b"] {
        assert_eq!(w.refused(root, set(bad), vec![]), Refusal::Protocol, "{bad}");
    }
    let odd = Message::SetMoveRules { reset: false, clauses: Text(String::new()), ring_size: 5000, spin_us: 0 };
    assert_eq!(w.refused(root, odd, vec![]), Refusal::Protocol);
    assert_eq!(w.ask(user, Message::GetMoveRules {}), is(true, "after=3 never", 4096, 0), "a refusal changes nothing");
    let reset = Message::SetMoveRules { reset: true, clauses: Text(String::new()), ring_size: 0, spin_us: 0 };
    assert_eq!(w.ask(root, reset), from_file);
    // A policy file that is loaded again is what holds.
    w.ask(root, set("never"));
    let actions = w.core.set_policy(NOW, Arc::new(Policy::parse(policy).unwrap()));
    w.perform(actions);
    assert_eq!(w.ask(user, Message::GetMoveRules {}), from_file);
    assert_eq!(w.terms.clone().unwrap().0.spin_us, 7);
}

const PROGRAMS: &str = "administrators = [1]\n[programs]\nallow = ['nginx', '/usr/bin/db']\n";

/// The broker's answer to a program that asks about itself.
fn asked(w: &mut World, session: u64, word: &str) -> bool {
    let question = Message::TestPolicy {
        question: PolicyQuestion::Program,
        own: true,
        user: User::Host(0),
        gid: u32::MAX,
        to_own: true,
        to_user: User::Host(0),
        from: String::new(),
        to: word.into(),
        service: String::new(),
    };
    match w.ask(session, question) {
        Message::PolicyDecides { allowed, .. } => allowed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn program_that_is_not_listed_neither_offers_nor_takes() {
    let mut w = World::with_policy(PROGRAMS);
    w.program = Some("/usr/bin/curl".into());
    let curl = w.join_as(1, "curl", 1);
    w.program = Some("/usr/sbin/nginx".into());
    let nginx = w.join_as(1, "nginx", 2);
    w.program = Some("/usr/bin/db".into());
    let db = w.join_as(1, "db", 3);
    let offer = |w: &mut World, session| {
        let with = vec![w.region(8192)];
        w.say_of(session, Message::Offer { region: RegionReference::with_ring(8192) }, client(), with).unwrap()
    };
    assert_eq!(code(offer(&mut w, curl)), Refusal::Denied);
    offered(&mut w, nginx, client());
    assert_eq!(code(take(&mut w, curl, server())), Refusal::Denied);
    assert!(is_offered(&w), "another program may take it");
    met(&mut w, (nginx, client()), (db, server()));
}

#[test]
fn program_known_to_broker_overrides_program_in_request() {
    let mut w = World::with_policy(PROGRAMS);
    w.program = Some("/usr/bin/curl".into());
    let known = w.join_as(1, "curl", 1);
    assert!(!asked(&mut w, known, "/usr/sbin/nginx"));
    w.program = None;
    let unknown = w.join_as(1, "other", 2);
    assert!(asked(&mut w, unknown, "/usr/sbin/nginx") && !asked(&mut w, unknown, "/usr/bin/curl"));
}

#[test]
fn directory_flag_for_program_lists_follows_policy() {
    let mut w = World::with_policy("administrators = [1]");
    let directory = w.other();
    let actions = w.core.set_directory(directory);
    w.perform(actions);
    let listed = |w: &World| w.terms.as_ref().unwrap().0.lists_programs;
    assert!(!listed(&w));
    let session = w.join_as(1, "curl", 1);
    assert!(asked(&mut w, session, "/usr/bin/curl"));
    for (policy, is_listed) in [(PROGRAMS, true), ("administrators = [1]", false)] {
        let actions = w.core.set_policy(NOW, Arc::new(Policy::parse(policy).unwrap()));
        w.perform(actions);
        assert_eq!((listed(&w), asked(&mut w, session, "/usr/bin/curl")), (is_listed, !is_listed));
    }
}
