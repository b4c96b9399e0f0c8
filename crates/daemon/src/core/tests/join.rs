//! Sessions, domains, services.

use super::*;

fn joined(message: &Message) -> (u32, u64) {
    match message {
        Message::Joined { domain, epoch, instance: INSTANCE, .. } => (*domain, *epoch),
        other => panic!("not joined: {other:?}"),
    }
}

#[test]
fn domain_ends_with_last_session_and_returns_with_new_epoch() {
    let mut w = World::new();
    let (a, b) = (w.open(1000, 1), w.open(1000, 2));
    let first = joined(&w.ask(a, join("web")));
    let second = joined(&w.ask(b, join("web")));
    assert_eq!(first, second);
    w.end(a);
    assert_eq!(w.core.status().domains, 1);
    w.end(b);
    assert_eq!(w.core.status(), CoreStatus::default());
    let c = w.open(1000, 3);
    let again = joined(&w.ask(c, join("web")));
    assert!(again.1 > first.1);
}

#[test]
fn session_ends_unless_first_message_is_join() {
    for message in [Message::Ping {}, bind("s", 1), Message::Inspect { channel: 1 }, Message::Closed { channel: 1 }] {
        let mut w = World::new();
        let s = w.open(1000, 1);
        assert_eq!(w.refused(s, message, vec![]), Refusal::Protocol);
        assert_eq!(w.closed, [s]);
        assert_eq!(w.core.status(), CoreStatus::default());
    }
}

#[test]
fn refused_join_ends_session() {
    for (uid, message, code) in [
        (1000, Message::Join { version: wire::VERSION + 1, name: "a".into() }, Refusal::Version),
        (1000, join(""), Refusal::NameInvalid),
        (1000, join("a/b"), Refusal::NameInvalid),
        (1000, join(&"a".repeat(65)), Refusal::NameInvalid),
        (0, join("taken"), Refusal::NameTaken),
    ] {
        let mut w = World::new();
        w.join("taken", 9);
        let s = w.open(uid, 1);
        assert_eq!(w.refused(s, message, vec![]), code);
        assert_eq!(w.closed, [s]);
        assert_eq!(w.core.status().sessions, 1);
    }
}

#[test]
fn second_join_is_refused_and_session_continues() {
    let mut w = World::new();
    let s = w.join("a", 1);
    assert_eq!(w.refused(s, join("b"), vec![]), Refusal::Protocol);
    assert_eq!(w.ask(s, Message::Ping {}), Message::Done {});
}

#[test]
fn user_without_allowed_name_is_disconnected_on_connect() {
    let mut w = World::new();
    let s = w.open(1001, 1);
    assert!(matches!(w.sent[0].message, Message::Refused { code: Refusal::Denied, .. }));
    assert_eq!((w.sent[0].session, w.closed.as_slice()), (s, &[s][..]));
    assert_eq!(w.core.status(), CoreStatus::default());
}

#[test]
fn join_with_name_outside_policy_is_denied() {
    let mut w = World::with_policy("[[join]]\ndomain='web-*'\nusers=[7]");
    w.join_as(7, "web-1", 1);
    let s = w.open(7, 2);
    assert_eq!(w.refused(s, join("db"), vec![]), Refusal::Denied);
}

#[test]
fn sessions_are_bounded_by_machine_user_and_domain() {
    let refusal = |w: &World| match &w.sent.last().unwrap().message {
        Message::Refused { code, .. } => *code,
        other => panic!("{other:?}"),
    };
    let mut w =
        World::sized(Policy::for_user(1000), INSTANCE, Capacity { sessions: 2, regions: 9, offers: 9, entries: 9 });
    for _ in 0..3 {
        w.open(1000, 1);
    }
    assert_eq!((refusal(&w), w.closed.len()), (Refusal::OutOfResources, 1));

    let mut w = World::with_policy("sessions_per_user = 2\nadministrators = [1, 2]");
    for _ in 0..3 {
        w.open(1, 1);
    }
    assert_eq!((refusal(&w), w.closed.len()), (Refusal::Quota, 1));
    w.open(2, 1);
    w.end(1);
    w.open(1, 1);
    assert_eq!(w.closed.len(), 1);

    let mut w = World::with_policy("administrators = [1]\n[quota]\nsessions = 1");
    w.join_as(1, "a", 1);
    let s = w.open(1, 1);
    assert_eq!(w.refused(s, join("a"), vec![]), Refusal::Quota);
    w.join_as(1, "b", 1);

    let mut w = World::with_policy("administrators = [1]\n[quota]\nsessions = 0");
    let s = w.open(1, 1);
    assert_eq!(w.refused(s, join("a"), vec![]), Refusal::Quota);
    assert_eq!(w.core.status(), CoreStatus::default());
}

#[test]
fn services_are_named_once_and_bounded() {
    let mut w = World::with_policy("administrators = [1000]\n[quota]\nservices = 2");
    let (a, b) = (w.join("a", 1), w.join("a", 2));
    let other = w.join("b", 3);
    w.bind(a, "s", 1);
    assert_eq!(w.refused(b, bind("s", 1), vec![]), Refusal::ServiceTaken);
    assert_eq!(w.refused(b, bind("no spaces", 1), vec![]), Refusal::NameInvalid);
    w.bind(other, "s", 1);
    w.bind(b, "t", 1);
    assert_eq!(w.refused(b, bind("u", 1), vec![]), Refusal::Quota);
    w.end(a);
    w.bind(b, "s", 1);
    assert_eq!(w.core.status().services, 3);
}

#[test]
fn broker_messages_and_stray_descriptors_are_refused() {
    let mut w = World::new();
    let s = w.join("a", 1);
    assert_eq!(w.refused(s, Message::Done {}, vec![]), Refusal::Protocol);
    assert_eq!(
        w.refused(s, Message::Connected { channel: 1, domain: 1, epoch: 1, links: 0 }, vec![]),
        Refusal::Protocol
    );
    let stray = vec![w.other()];
    assert_eq!(w.refused(s, Message::Ping {}, stray), Refusal::Protocol);
    let stray = vec![w.region(0), w.region(0)];
    assert_eq!(w.refused(s, Message::Regions { connecting: true, accepting: true }, stray), Refusal::Protocol);
    assert_eq!(w.open_descriptors(), 0);
    assert_eq!(w.ask(s, Message::Ping {}), Message::Done {});
}

#[test]
fn malformed_packet_ends_session_only_if_fatal_or_unjoined() {
    let mut w = World::new();
    let (s, t, unjoined) = (w.join("a", 1), w.join("a", 2), w.open(1000, 3));
    for (session, fatal) in [(s, false), (t, true), (unjoined, false)] {
        let (session, reason) = (SessionId(session), "bad".to_owned());
        w.feed(CoreEvent::Malformed { session, request: 5, code: Refusal::Protocol, reason, fatal });
    }
    assert_eq!(w.sent.len(), 3);
    assert_eq!(w.closed, [t, unjoined]);
    assert_eq!(w.ask(s, Message::Ping {}), Message::Done {});
}

#[test]
fn new_policy_ends_denied_sessions_and_sets_quotas() {
    let mut w = World::with_policy("[[join]]\ndomain='*'\nusers=[1,2]");
    let (one, two) = (w.join_as(1, "a", 1), w.join_as(2, "b", 2));
    w.bind(one, "s", 1);
    let new = "[[join]]\ndomain='b'\nusers=[2]\nquota={services=0}";
    let actions = w.core.set_policy(NOW, Arc::new(Policy::parse(new).unwrap()));
    w.core.check_invariants();
    assert!(matches!(&actions[..], [
        Action::Directory(DirectoryChange::Policy { .. }),
        Action::Send { session, message: Message::Refused { code: Refusal::Denied, .. }, .. },
        Action::Close { session: closed }
    ] if session.0 == one && closed.0 == one));
    assert_eq!(w.refused(two, bind("s", 1), vec![]), Refusal::Quota);
    assert_eq!(w.core.status(), CoreStatus { sessions: 1, domains: 1, services: 0, channels: 0 });
}
