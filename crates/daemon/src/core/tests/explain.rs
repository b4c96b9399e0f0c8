//! Questions about the policy: the users that may ask them, and whether the answer matches the outcome of a request (protocol C17).

use partywall_protocol::wire::{PolicyQuestion, User};

use super::*;

/// A container's root has the number of the host's.
const CONTAINER: Home = Home::Container { user: 1, pid: 2 };

const FILE: &str = "\
administrators = [0]
[[join]]
domain = 'web-*'
users = [1]
[[join]]
domain = 'db'
users = [2]
[[join]]
domain = 'open'
users = ['*']
[[connect]]
from = 'web-*'
to = 'db'
service = 'in'
";

/// A question about the asker itself.
fn own(question: PolicyQuestion, from: &str, to: &str, service: &str) -> Message {
    about(question, None, from, to, service)
}

/// A question about another user. The sockets of the other side are those of user 2.
fn about(question: PolicyQuestion, uid: Option<u32>, from: &str, to: &str, service: &str) -> Message {
    Message::TestPolicy {
        question,
        own: uid.is_none(),
        user: User::Host(uid.unwrap_or(0)),
        gid: uid.unwrap_or(0),
        to_own: uid.is_none(),
        to_user: User::Host(2),
        from: from.into(),
        to: to.into(),
        service: service.into(),
    }
}

/// Whether it would be allowed, by which line, and the words.
fn decision(answer: Message) -> (bool, u32, String) {
    match answer {
        Message::PolicyDecides { allowed, line, grounds, .. } => (allowed, line, grounds),
        other => panic!("{other:?}"),
    }
}

#[test]
fn administrator_gets_policy_decisions_about_others_with_line() {
    use PolicyQuestion::{Connect, Join, Sockets};
    let mut w = World::with_policy(FILE);
    let root = w.join_as(0, "root", 1);
    for (question, uid, from, to, service, expected) in [
        (Join, 1, "web-1", "", "", (true, 2)),
        (Join, 1, "db", "", "", (false, 0)),
        (Connect, 1, "web-1", "db", "in", (true, 11)),
        (Connect, 1, "web-1", "db", "out", (false, 0)),
        (Connect, 2, "web-1", "db", "in", (false, 0)),
        (Connect, 0, "web-1", "db", "in", (true, 1)),
        (Sockets, 1, "web-1", "db", "in", (true, 11)),
        (Sockets, 2, "db", "web-1", "tcp-1", (true, 0)),
        (Sockets, 1, "open", "db", "tcp-1", (false, 0)),
    ] {
        let (allowed, line, grounds) = decision(w.ask(root, about(question, Some(uid), from, to, service)));
        assert_eq!((allowed, line), expected, "{question} {uid} {from} {to}: {grounds}");
    }
}

#[test]
fn decision_about_own_request_matches_its_outcome() {
    let mut w = World::with_policy(FILE);
    let web = w.join_as(1, "web-1", 1);
    for (to, service) in [("db", "in"), ("db", "out"), ("web-1", "x"), ("open", "in")] {
        let question = own(PolicyQuestion::Connect, "web-1", to, service);
        let (allowed, ..) = decision(w.ask(web, question));
        let connect = Message::Connect {
            target: to.into(),
            service: service.into(),
            kind: Kind::Stream,
            directions: Directions::BOTH,
            region: RegionReference::with_ring(8192),
        };
        let region = w.region(8192);
        let refused = w.refused(web, connect, vec![region]);
        assert_eq!(refused != Refusal::Denied, allowed, "{to}:{service}: {refused}");
    }
}

#[test]
fn policy_question_about_others_requires_administrator() {
    let mut w = World::with_policy(FILE);
    let askers = [w.join_as(1, "web-1", 1), w.join_as((0, CONTAINER), "open", 2)];
    for (asker, uid) in askers.into_iter().zip([1, 0]) {
        for question in PolicyQuestion::ALL {
            // Users 0 and 1 have the number of one of the askers, which proves nothing: the same number may be another user elsewhere.
            for other in 0..3 {
                let asked = about(*question, Some(other), "open", "db", "in");
                assert_eq!(w.refused(asker, asked, vec![]), Refusal::Denied, "{uid} about {other}");
            }
            match question {
                PolicyQuestion::ConnectTo => drop(decision(w.ask(asker, own(*question, "open", "db@beta", "in")))),
                // Domains of other hosts are nobody's own.
                PolicyQuestion::ConnectFrom => {
                    assert_eq!(w.refused(asker, own(*question, "open@beta", "db", "in"), vec![]), Refusal::Denied);
                }
                _ => drop(decision(w.ask(asker, own(*question, "open", "db", "in")))),
            }
        }
        let mut socket_of_another = own(PolicyQuestion::Sockets, "open", "db", "in");
        if let Message::TestPolicy { to_own, .. } = &mut socket_of_another {
            *to_own = false;
        }
        assert_eq!(w.refused(asker, socket_of_another, vec![]), Refusal::Denied, "{uid}");
    }
}

#[test]
fn questions_about_other_hosts_are_answered_by_their_rules() {
    use PolicyQuestion::{Connect, ConnectFrom, ConnectTo};
    let rules = "[[connect]]
from = 'web-*'
to = 'db'
to_host = 'beta'
[[connect]]
from = 'far'
from_host = 'gamma'
to = 'db'
service = 'in'
[cluster]
host = 'alpha'
";
    let mut w = World::with_policy(&format!("{FILE}{rules}"));
    let root = w.join_as(0, "root", 1);
    for (question, uid, from, to, service, expected) in [
        (ConnectTo, 1, "web-1", "db@beta", "out", (true, 15)),
        (ConnectTo, 1, "web-1", "db@gamma", "in", (false, 0)),
        (ConnectTo, 2, "web-1", "db@beta", "in", (false, 0)),
        (ConnectTo, 0, "web-1", "db@gamma", "in", (true, 1)),
        (ConnectFrom, 0, "far@gamma", "db", "in", (true, 19)),
        (ConnectFrom, 0, "far@gamma", "db", "out", (false, 0)),
        (ConnectFrom, 0, "far@beta", "db", "in", (false, 0)),
        // A rule for this host is for no other, and the other way round.
        (ConnectFrom, 0, "web-1@beta", "db", "in", (false, 0)),
        (Connect, 1, "web-1", "db", "out", (false, 0)),
    ] {
        let (allowed, line, grounds) = decision(w.ask(root, about(question, Some(uid), from, to, service)));
        assert_eq!((allowed, line), expected, "{question} {uid} {from} {to}: {grounds}");
    }
    for (question, from, to) in [(ConnectTo, "web-1", "db"), (ConnectFrom, "far", "db"), (ConnectTo, "web-1", "db@")] {
        let asked = about(question, Some(0), from, to, "in");
        assert_eq!(w.refused(root, asked, vec![]), Refusal::NameInvalid, "{from} {to}");
    }
    let mut w = World::with_policy(FILE);
    let root = w.join_as(0, "root", 1);
    for (question, from, to) in [(ConnectTo, "web-1", "db@beta"), (ConnectFrom, "far@gamma", "db")] {
        let (allowed, _, grounds) = decision(w.ask(root, about(question, Some(1), from, to, "in")));
        assert!(!allowed && grounds.contains("[cluster]"), "{grounds}");
    }
}

#[test]
fn rules_for_domains_of_others_are_not_read_by_questions() {
    let mut w = World::with_policy(FILE);
    let user = w.join_as(2, "db", 1);
    for service in ["in", "out"] {
        let (allowed, line, grounds) = decision(w.ask(user, own(PolicyQuestion::Connect, "web-1", "db", service)));
        assert!(!allowed && line == 0 && grounds.contains("no [[join]] rule"), "{service}: {grounds}");
    }
}

#[test]
fn place_of_the_policy_file_is_not_sent_into_a_container() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.toml");
    std::fs::write(&path, FILE).unwrap();
    let mut w = World::with(Policy::read(&path).unwrap(), INSTANCE);
    for (home, known) in [(Home::Broker, true), (CONTAINER, false)] {
        let user = w.join_as((3, home), "open", 3);
        let Message::PolicyDecides { allowed, line, file, .. } = w.ask(user, own(PolicyQuestion::Join, "open", "", ""))
        else {
            panic!("not an answer")
        };
        assert!(allowed);
        let told = (line, file);
        assert_eq!(told, if known { (8, path.display().to_string()) } else { (0, String::new()) }, "{home:?}");
        w.end(user);
    }
}

#[test]
fn flood_of_questions_leaves_nothing_behind() {
    let mut w = World::with_policy(FILE);
    let user = w.join_as(3, "open", 1);
    let before = (w.core.status(), w.open_descriptors());
    for n in 0..2000 {
        let uid = (n % 2 == 0).then_some(n);
        let answer = w.say(user, about(PolicyQuestion::Connect, uid, "open", "db", "in"), vec![]);
        assert!(answer.is_some(), "{n}");
    }
    assert_eq!((w.core.status(), w.open_descriptors()), before);
    assert!(w.closed.is_empty());
}
