//! The visibility of domains, services and channels.

use partywall_protocol::wire::What;

use super::*;

const POLICY: &str = "
administrators = [9]
[[join]]
domain = '*'
users = [1, 2, 3]
[[connect]]
from = 'web'
to = 'db'
service = 'sql'
";

/// web (user 1) connected to db (user 2), which also has a secret service; lonely (user 3) has no connections.
fn world() -> (World, [u64; 4], u64) {
    let mut w = World::with_policy(POLICY);
    let sessions = [w.join_as(1, "web", 1), w.join_as(2, "db", 2), w.join_as(3, "lonely", 3), w.join_as(9, "admin", 4)];
    w.bind(sessions[1], "sql", 4);
    w.bind(sessions[1], "secret", 4);
    let channel = w.connect(sessions[0], "db", "sql");
    w.accept(sessions[1], channel);
    w.sent.clear();
    (w, sessions, channel)
}

fn names(answer: Message) -> Vec<String> {
    match answer {
        Message::Domains { page } => page.rows.into_iter().map(|r| r.name).collect(),
        Message::Services { page } => page.rows.into_iter().map(|r| format!("{}:{}", r.domain_name, r.name)).collect(),
        Message::Channels { page } => {
            page.rows.into_iter().map(|r| format!("{}-{}:{}", r.from_name, r.to_name, r.service)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn domain_lists_only_reachable_domains_and_their_channels() {
    let (mut w, [web, db, lonely, admin], _) = world();
    for (session, domains, services, channels) in [
        (web, &["web", "db"][..], &["db:sql"][..], &["web-db:sql"][..]),
        (db, &["web", "db"], &["db:sql", "db:secret"], &["web-db:sql"]),
        (lonely, &["lonely"], &[], &[]),
        (admin, &["web", "db", "lonely", "admin"], &["db:sql", "db:secret"], &["web-db:sql"]),
    ] {
        let mut list = |what| names(w.ask(session, Message::List { what, after: 0 }));
        assert_eq!(list(What::Domains), domains);
        assert_eq!(list(What::Services), services);
        assert_eq!(list(What::Channels), channels);
    }
}

#[test]
fn listed_rows_match_domain_and_channel_state() {
    let (mut w, [web, ..], channel) = world();
    let Message::Domains { page } = w.ask(web, Message::List { what: What::Domains, after: 0 }) else { panic!() };
    let web_row = &page.rows[0];
    assert_eq!((web_row.sessions, web_row.channels, web_row.user, web_row.pid), (1, 1, User::Host(1), 1));
    let Message::Channels { page } = w.ask(web, Message::List { what: What::Channels, after: 0 }) else { panic!() };
    let row = &page.rows[0];
    assert_eq!((row.channel, row.from, row.to, row.since_s), (channel, web_row.id, web_row.id + 1, 77));
    assert!(row.accepted);
    let waiting = w.connect(web, "db", "sql");
    let Message::Channels { page } = w.ask(web, Message::List { what: What::Channels, after: channel }) else {
        panic!()
    };
    assert_eq!((page.rows[0].channel, page.rows[0].accepted), (waiting, false));
}

#[test]
fn inspection_is_limited_to_channel_users_and_administrators() {
    let (mut w, [web, db, lonely, admin], channel) = world();
    for session in [web, db, admin] {
        assert_eq!(
            w.ask(session, Message::Inspect { channel }),
            Message::Regions { connecting: true, accepting: true }
        );
    }
    assert_eq!(w.refused(lonely, Message::Inspect { channel }, vec![]), Refusal::NoSuchChannel);
    assert_eq!(w.refused(web, Message::Inspect { channel: 1 }, vec![]), Refusal::NoSuchChannel);
}

#[test]
fn inspect_returns_region_of_connecting_side_first() {
    let (mut w, [web, ..], channel) = world();
    w.feed(CoreEvent::Message {
        session: SessionId(web),
        request: 99,
        message: Message::Inspect { channel },
        descriptors: vec![],
        socket: None,
    });
    let sizes: Vec<_> = w.sent[0].with.iter().map(|f| if let Fake::Region(size, _) = f { *size } else { 0 }).collect();
    assert_eq!(sizes, [4096 + 8192, 4096 + 16384]);
}

#[test]
fn long_lists_come_in_pages_and_lose_nothing() {
    let mut w = World::new();
    let session = w.join("a", 1);
    for i in 0..300 {
        w.bind(session, &format!("{}{i:03}", "s".repeat(50)), 1);
    }
    let (mut after, mut seen, mut pages) = (0, 0, 0);
    loop {
        let answer = w.ask(session, Message::List { what: What::Services, after });
        let mut packet = Vec::new();
        partywall_protocol::wire::encode(1, &answer, &mut packet);
        let Ok((_, Message::Services { page })) = partywall_protocol::wire::decode(&packet) else { panic!() };
        pages += 1;
        for row in &page.rows {
            assert!(row.name.ends_with(&format!("{seen:03}")));
            seen += 1;
        }
        if !page.more {
            break;
        }
        after = page.rows.last().unwrap().key;
    }
    assert!(seen == 300 && pages > 5, "{seen} in {pages}");
    for (what, after) in [(What::Services, u64::MAX), (What::Domains, u64::MAX), (What::Channels, 1 << 63)] {
        assert!(names(w.ask(session, Message::List { what, after })).is_empty());
    }
}
