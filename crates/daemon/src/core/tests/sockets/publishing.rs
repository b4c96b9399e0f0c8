//! The addresses that a session may publish, and the time for which they stay listed.

use super::*;

#[test]
fn listener_is_listed_by_kernel_and_wildcard_by_client() {
    let (mut w, ..) = world();
    let here = ["10.0.0.1", "fd00::1"];
    for (local, only_v6, yes, no) in [
        ("10.0.0.1:80", false, &["10.0.0.1:80"][..], &["127.0.0.1:80", "10.0.0.1:81", "[fd00::1]:80"][..]),
        ("127.0.0.1:80", false, &["127.0.0.1:80"], &["10.0.0.1:80", "[::1]:80"]),
        ("0.0.0.0:80", false, &["10.0.0.1:80", "127.0.0.1:80"], &["[fd00::1]:80", "[::1]:80"]),
        ("[::]:80", false, &["10.0.0.1:80", "127.0.0.1:80", "[fd00::1]:80", "[::1]:80"], &["10.0.0.9:80"]),
        ("[::]:80", true, &["[fd00::1]:80", "[::1]:80"], &["10.0.0.1:80", "127.0.0.1:80"]),
        ("192.0.2.1:80", false, &["192.0.2.1:80"], &["10.0.0.1:80"]),
    ] {
        let web = w.join("web", 3);
        let key = published(&mut w, web, SocketFacts { only_v6, ..listening(local) }, &here);
        for there in yes {
            assert!(listens(&w, there), "{local} at {there}");
        }
        for there in no {
            assert!(!listens(&w, there), "{local} not at {there}");
        }
        assert!(runs_at(&w, "10.0.0.1") && runs_at(&w, "fd00::1") && runs_at(&w, "127.0.0.1"));
        assert_eq!(w.ask(web, Message::Withdraw { key }), Message::Done {});
        assert!(w.listed.keys().all(|(table, _)| *table == 'a'), "{local}: {:?}", w.listed);
        w.end(web);
        assert!(w.listed.is_empty(), "{local}: {:?}", w.listed);
    }
}

#[test]
fn program_stays_at_its_addresses_after_its_last_listener() {
    let (mut w, web, _) = world();
    let keys = ["10.0.0.1:80", "10.0.0.1:81"].map(|at| published(&mut w, web, listening(at), &["10.0.0.2"]));
    for (left, key) in [(2, keys[0]), (1, keys[1])] {
        assert_eq!(w.core.sessions[&SessionId(web)].publications.len(), left);
        assert_eq!(w.ask(web, Message::Withdraw { key }), Message::Done {});
        assert_eq!(w.refused(web, Message::Withdraw { key }, vec![]), Refusal::NoSuchService, "it has gone");
    }
    assert!(!listens(&w, "10.0.0.1:80") && !listens(&w, "10.0.0.1:81"));
    assert!(runs_at(&w, "10.0.0.1") && runs_at(&w, "10.0.0.2"));
    // What is kept, once for each session and namespace, does not grow.
    for _ in 0..3 {
        let key = published(&mut w, web, listening("10.0.0.1:80"), &[]);
        assert_eq!(w.ask(web, Message::Withdraw { key }), Message::Done {});
        assert_eq!(w.core.sessions[&SessionId(web)].publications.len(), 1);
    }
    w.end(web);
    assert!(w.listed.is_empty());
    // A UDP socket, which is in the same namespace, ends later than the listener.
    let web = w.join("web", 3);
    let tcp = published(&mut w, web, listening("10.0.0.1:80"), &[]);
    let udp = SocketFacts { transport: Transport::Udp, state: SocketState::Other, ..listening("10.0.0.1:53") };
    let udp = published(&mut w, web, udp, &[]);
    for key in [tcp, udp] {
        assert_eq!(w.ask(web, Message::Withdraw { key }), Message::Done {});
        assert!(runs_at(&w, "10.0.0.1"));
    }
    w.end(web);
    assert!(w.listed.is_empty());
}

#[test]
fn unconnected_socket_lists_only_its_address() {
    let (mut w, web, _) = world();
    let quiet = SocketFacts { state: SocketState::Other, remote: None, ..socket("0.0.0.0:0", "0.0.0.0:0") };
    published(&mut w, web, quiet, &["10.0.0.2"]);
    assert!(runs_at(&w, "10.0.0.2") && w.listed.keys().all(|(table, _)| *table == 'a'));
}

#[test]
fn shared_listing_lasts_until_last_publisher_ends() {
    let (mut w, web, db) = world();
    published(&mut w, web, listening("10.0.0.1:80"), &[]);
    let key = published(&mut w, db, listening("10.0.0.1:80"), &[]);
    assert_eq!(w.refused(web, Message::Withdraw { key }, vec![]), Refusal::NoSuchService, "another session's");
    w.end(web);
    assert!(listens(&w, "10.0.0.1:80"));
    w.end(db);
    assert!(w.listed.is_empty());
}

#[test]
fn publications_have_a_quota_and_a_bound() {
    let policy = "administrators = [1000]\n[quota]\nlisteners = 10";
    let mut w = World::with_policy(policy);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    // One listener and three addresses each.
    let first = published(&mut w, web, listening("10.0.0.1:80"), &[]);
    published(&mut w, web, listening("10.0.0.1:81"), &[]);
    assert_eq!(code(publish(&mut w, web, listening("10.0.0.1:82"), &[])), Refusal::Quota);
    published(&mut w, db, listening("10.0.0.1:82"), &[]);
    assert_eq!(w.ask(web, Message::Withdraw { key: first }), Message::Done {});
    published(&mut w, web, listening("10.0.0.1:82"), &[]);

    let capacity = Capacity { sessions: 9, regions: 9, offers: 9, entries: 10 };
    let mut w = World::sized(Policy::for_user(1000), INSTANCE, capacity);
    let (web, db) = (w.join("web", 1), w.join("db", 2));
    published(&mut w, web, listening("10.0.0.1:80"), &[]);
    published(&mut w, db, listening("10.0.0.1:80"), &[]);
    assert_eq!(code(publish(&mut w, db, listening("10.0.0.1:80"), &[])), Refusal::OutOfResources);
}
