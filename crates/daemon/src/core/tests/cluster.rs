//! Names that wait for the cluster, and connections that go to other hosts (protocol H).

use partywall_protocol::wire::{NameNews, NameRow};

use super::*;

const POLICY: &str = "\
[cluster]
host = 'alpha'
users = [44]
[[join]]
domain = '*'
users = '*'
";

const RULES: &str = "
[[connect]]
from = 'web'
to = 'db'
to_host = 'beta'
service = 'sql'
[[connect]]
from = 'web'
from_host = 'beta'
to = 'mail'
";

/// A broker with a gateway (user 44), which follows names by its second session.
struct Hosts {
    w: World,
    gateway: u64,
    feed: u64,
    last: u64,
}

impl Hosts {
    fn new() -> Self {
        Self::with("", RULES)
    }

    /// With further settings of the cluster, and these rules.
    fn with(cluster: &str, rules: &str) -> Self {
        let policy = POLICY.replace("'*'\nusers = '*'", "'*'\nusers = ['*']");
        let mut w = World::with_policy(&(policy.replace("users = [44]", &format!("users = [44]\n{cluster}")) + rules));
        let gateway = w.join_as(44, "gateway", 9);
        w.bind(gateway, "cluster", 4);
        let feed = w.join_as(44, "gateway", 9);
        let mut hosts = Self { w, gateway, feed, last: 0 };
        assert_eq!(hosts.news(), [], "nothing but the gateway itself is there");
        hosts
    }

    /// Asks for changes, and returns those that are answered at once.
    fn news(&mut self) -> Vec<NameRow> {
        let after = self.last;
        match self.w.say(self.feed, Message::FollowNames { after }, vec![]) {
            Some(Message::Names { host, page }) => {
                assert_eq!(host, "alpha");
                self.take(page.rows)
            }
            None => Vec::new(),
            other => panic!("{other:?}"),
        }
    }

    /// Changes by which an earlier question was answered since.
    fn later(&mut self) -> Vec<(NameNews, String)> {
        let at = self.w.sent.iter().position(|sent| matches!(sent.message, Message::Names { .. }));
        let Some(at) = at else { return Vec::new() };
        let Message::Names { page, .. } = self.w.sent.remove(at).message else { unreachable!() };
        spelled(&self.take(page.rows))
    }

    fn take(&mut self, rows: Vec<NameRow>) -> Vec<NameRow> {
        self.last = rows.last().map_or(self.last, |row| row.key);
        rows
    }

    /// Waits for the next changes: what came meanwhile, or what is answered at once.
    fn changes(&mut self) -> Vec<(NameNews, String)> {
        let later = self.later();
        if !later.is_empty() {
            return later;
        }
        let rows = self.news();
        spelled(&rows)
    }

    /// The gateway answers the claim of a name that waits.
    fn claimed(&mut self, domain: &str, holder: &str) {
        let claim = self.w.core.number_of_claim(domain).unwrap();
        self.answered(domain, claim, holder);
    }

    /// The gateway answers a claim, which may not wait any more.
    fn answered(&mut self, domain: &str, claim: u64, holder: &str) {
        let message = Message::NameClaimed { domain: domain.into(), claim, holder: holder.into() };
        assert_eq!(self.w.ask(self.gateway, message), Message::Done {});
    }

    /// The only change that the gateway hears, which is a claim: its name and number.
    fn claim(&mut self) -> (String, u64) {
        let at = self.w.sent.iter().position(|sent| matches!(sent.message, Message::Names { .. }));
        let rows = match at.map(|at| self.w.sent.remove(at).message) {
            Some(Message::Names { page, .. }) => self.take(page.rows),
            _ => self.news(),
        };
        let [NameRow { news: NameNews::Claim, claim, domain, .. }] = &rows[..] else { panic!("{rows:?}") };
        (domain.clone(), *claim)
    }

    /// A session that asks to join and waits. Its request has the number that is returned second.
    fn ask_to_join(&mut self, uid: u32, name: &str, pid: u32) -> u64 {
        let session = self.w.open(uid, pid);
        assert_eq!(self.w.say(session, join(name), vec![]), None, "the join waits");
        session
    }

    /// A domain that the cluster has let this host have.
    fn join(&mut self, uid: u32, name: &str, pid: u32) -> u64 {
        let session = self.ask_to_join(uid, name, pid);
        self.claimed(name, "");
        assert!(matches!(self.answer(session), Some(Message::Joined { .. })));
        session
    }

    /// The only message that a session was sent.
    fn answer(&mut self, session: u64) -> Option<Message> {
        let at = self.w.sent.iter().position(|sent| sent.session == session)?;
        let message = self.w.sent.remove(at).message;
        assert!(!self.w.sent.iter().any(|sent| sent.session == session), "two answers");
        Some(message)
    }

    /// Asks to connect, which waits, and returns the channel that the gateway was offered.
    fn ask_to_connect(&mut self, session: u64, target: &str, service: &str) -> u64 {
        let with = vec![self.w.region(8192)];
        assert_eq!(self.w.say(session, connect(target, service, 8192), with), None, "the gateway has not answered");
        match self.w.sent.pop().unwrap() {
            Sent { session, message: Message::Incoming { channel, name, .. }, with, .. } => {
                assert_eq!((session, name.as_str(), with.len()), (self.gateway, "web", 3));
                channel
            }
            other => panic!("{other:?}"),
        }
    }

    fn route_to(&mut self, channel: u64, host: &str) -> Message {
        self.w.ask(self.gateway, Message::RouteTo { channel, host: host.into() })
    }
}

fn spelled(rows: &[NameRow]) -> Vec<(NameNews, String)> {
    let name = |row: &NameRow| match row.service.as_str() {
        "" => row.domain.clone(),
        service => format!("{}:{service}", row.domain),
    };
    rows.iter().map(|row| (row.news, name(row))).collect()
}

fn is_refused(answer: Option<Message>, code: Refusal) -> bool {
    matches!(answer, Some(Message::Refused { code: of, .. }) if of == code)
}

#[test]
fn new_name_waits_until_cluster_decides() {
    let mut h = Hosts::new();
    let session = h.ask_to_join(5, "db", 1);
    assert_eq!(h.changes(), [(NameNews::Claim, "db".into())]);
    h.claimed("db", "");
    assert!(matches!(h.answer(session), Some(Message::Joined { .. })));
    assert_eq!(h.changes(), [(NameNews::Present, "db".into())]);
    // A further session of the domain needs no decision.
    h.w.join_as(5, "db", 1);
}

#[test]
fn name_of_another_host_is_refused_as_taken() {
    let mut h = Hosts::new();
    let session = h.ask_to_join(5, "db", 1);
    h.claimed("db", "beta");
    assert!(is_refused(h.answer(session), Refusal::NameTaken));
    assert!(h.w.closed.contains(&session));
}

#[test]
fn name_without_decision_is_used_after_some_seconds() {
    let mut h = Hosts::new();
    let session = h.ask_to_join(5, "db", 1);
    assert!(h.w.core.wants_ticks());
    for (after, answered) in [(3, false), (4, true)] {
        let actions = h.w.core.handle(77 + after, CoreEvent::Tick);
        h.w.perform(actions);
        assert_eq!(h.answer(session).is_some(), answered, "after {after} seconds");
    }
    assert!(!h.w.core.wants_ticks());
}

#[test]
fn names_do_not_wait_for_absent_gateway() {
    let mut h = Hosts::new();
    let session = h.ask_to_join(5, "db", 1);
    h.w.end(h.feed);
    assert!(matches!(h.answer(session), Some(Message::Joined { .. })));
    h.w.join_as(5, "web", 2);
    // A gateway that comes later hears of both.
    h.feed = h.w.join_as(44, "gateway", 9);
    h.last = 0;
    let mut names: Vec<_> = spelled(&h.news()).into_iter().map(|(_, name)| name).collect();
    names.sort();
    assert_eq!(names, ["db", "web"]);
}

#[test]
fn gateway_of_new_policy_follows_names() {
    let mut h = Hosts::new();
    let waiting = h.ask_to_join(5, "db", 1);
    h.claim();
    assert_eq!(h.news(), []);
    let policy = POLICY.replace("'*'\nusers = '*'", "'*'\nusers = ['*']").replace("[44]", "[44]\ngateway = 'gw2'");
    let actions = h.w.core.set_policy(NOW, Arc::new(Policy::parse(&policy).unwrap()));
    h.w.perform(actions);
    assert!(is_refused(h.answer(h.feed), Refusal::Denied));
    assert!(matches!(h.answer(waiting), Some(Message::Joined { .. })));
    h.feed = h.w.join_as(44, "gw2", 9);
    h.last = 0;
    assert!(!h.news().is_empty(), "the new gateway gets an answer");
}

#[test]
fn claim_ends_with_the_session_that_waits() {
    let mut h = Hosts::new();
    let session = h.ask_to_join(5, "db", 1);
    let (_, claim) = h.claim();
    h.w.end(session);
    assert_eq!(h.changes(), [(NameNews::Gone, "db".into())]);
    h.answered("db", claim, "");
    assert_eq!(h.w.core.status().domains, 1, "the gateway's own");
}

#[test]
fn answer_to_withdrawn_claim_decides_no_later_claim() {
    for (late, seen) in [("", true), ("beta", true), ("", false), ("beta", false)] {
        let mut h = Hosts::new();
        let first = h.ask_to_join(5, "db", 1);
        let (_, withdrawn) = h.claim();
        h.w.end(first);
        if seen {
            assert_eq!(h.changes(), [(NameNews::Gone, "db".into())]);
        }
        let second = h.ask_to_join(6, "db", 2);
        let (name, claim) = h.claim();
        assert_eq!(name, "db");
        h.answered("db", withdrawn, late);
        assert_eq!((h.answer(second), h.w.core.status().domains), (None, 1), "the second claim waits");
        h.answered("db", claim, "gamma");
        assert!(is_refused(h.answer(second), Refusal::NameTaken));
        // Nor does an answer that is repeated.
        let third = h.ask_to_join(5, "db", 3);
        h.answered("db", claim, "");
        assert_eq!(h.answer(third), None);
    }
}

#[test]
fn answer_with_number_of_another_claim_changes_nothing() {
    let mut h = Hosts::new();
    let db = h.ask_to_join(5, "db", 1);
    let (_, of_db) = h.claim();
    let web = h.ask_to_join(5, "web", 2);
    let (_, of_web) = h.claim();
    for (domain, claim) in [("db", of_web), ("web", of_db), ("db", 0), ("db", u64::MAX), ("mail", of_db)] {
        h.answered(domain, claim, "");
        assert_eq!((h.answer(db), h.answer(web), h.w.core.status().domains), (None, None, 1), "{domain} {claim}");
    }
    // A further session that waits for the name has the same claim.
    let more = h.ask_to_join(5, "db", 1);
    assert_eq!(h.claim(), ("db".to_owned(), of_db));
    h.answered("db", of_db, "");
    let joined = |answer| matches!(answer, Some(Message::Joined { .. }));
    assert!(joined(h.answer(db)) && joined(h.answer(more)));
    let rows = h.news();
    assert!(rows.iter().all(|row| (row.news, row.claim) == (NameNews::Present, 0)), "{rows:?}");
}

#[test]
fn claims_are_numbered_from_the_brokers_instance() {
    let mut h = Hosts::new();
    // The next broker's instance is greater, so a gateway's late answer to a claim of this broker is none to a claim of the next.
    for (at, name) in ["db", "web", "db"].into_iter().enumerate() {
        let session = h.ask_to_join(5, name, 1);
        assert_eq!(h.claim(), (name.to_owned(), INSTANCE + 1 + at as u64));
        h.w.end(session);
        assert_eq!(h.changes(), [(NameNews::Gone, name.to_owned())]);
    }
}

#[test]
fn second_join_of_a_waiting_session_is_refused() {
    let mut h = Hosts::new();
    let session = h.ask_to_join(5, "db", 1);
    let (_, claim) = h.claim();
    assert_eq!(h.w.refused(session, join("other"), vec![]), Refusal::Protocol);
    h.answered("db", claim, "");
    assert_eq!(h.answer(session), None);
}

#[test]
fn default_name_is_claimed_by_its_first_service() {
    let mut h = Hosts::new();
    let session = h.w.join_as(5, "nginx-42", 42);
    assert_eq!(h.changes(), []);
    assert_eq!(h.w.say(session, bind("web", 4), vec![]), None, "the name waits");
    assert_eq!(h.changes(), [(NameNews::Claim, "nginx-42".into())]);
    h.claimed("nginx-42", "beta");
    assert!(is_refused(h.answer(session), Refusal::NameTaken));
    assert_eq!(h.w.say(session, bind("web", 4), vec![]), None);
    h.claimed("nginx-42", "");
    assert_eq!(h.answer(session), Some(Message::Done {}));
    let mut changes = h.changes();
    changes.sort_by(|a, b| a.1.cmp(&b.1));
    assert_eq!(changes, [(NameNews::Present, "nginx-42".into()), (NameNews::Present, "nginx-42:web".into())]);
    // Further services do not wait.
    h.w.bind(session, "more", 4);
}

#[test]
fn services_are_reported_as_they_come_and_go() {
    let mut h = Hosts::new();
    let db = h.join(5, "db", 1);
    assert_eq!(h.changes(), [(NameNews::Present, "db".into())]);
    h.w.bind(db, "sql", 4);
    assert_eq!(h.changes(), [(NameNews::Present, "db:sql".into())]);
    h.w.end(db);
    let mut changes = h.changes();
    // The first of both answered the question.
    changes.extend(h.changes());
    assert_eq!(changes, [(NameNews::Gone, "db:sql".into()), (NameNews::Gone, "db".into())]);
}

#[test]
fn name_that_came_and_went_unseen_takes_no_row() {
    let mut h = Hosts::new();
    let db = h.join(5, "db", 1);
    assert!(!h.changes().is_empty());
    // The gateway does not ask now.
    for round in 0..100 {
        let session = h.ask_to_join(5, &format!("name{round}"), 100 + round);
        h.w.end(session);
    }
    h.w.bind(db, "sql", 4);
    assert_eq!(h.changes(), [(NameNews::Present, "db:sql".into())]);
}

#[test]
fn connect_to_absent_domain_is_answered_when_gateway_accepts() {
    let mut h = Hosts::new();
    let web = h.join(5, "web", 1);
    let channel = h.ask_to_connect(web, "db", "sql");
    let wanted = Message::RouteIs { domain: "db".into(), service: "sql".into() };
    assert_eq!(h.w.ask(h.gateway, Message::Route { channel }), wanted);
    let with = vec![h.w.region(16384)];
    let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(16384) };
    assert_eq!(h.w.refused(h.gateway, accepted, with), Refusal::Protocol, "the policy has not seen the host");
    assert_eq!(h.route_to(channel, "beta"), Message::Done {});
    assert_eq!(h.answer(web), None);
    let with = vec![h.w.region(16384)];
    let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(16384) };
    assert_eq!(h.w.say(h.gateway, accepted, with), Some(Message::Done {}));
    let to_web: Vec<_> = h.w.sent.drain(..).filter(|sent| sent.session == web).map(|sent| sent.message).collect();
    assert!(matches!(to_web[..], [Message::Connected { links: 2, .. }, Message::Attached { .. }]), "{to_web:?}");
}

#[test]
fn connect_to_host_that_policy_forbids_is_denied() {
    let mut h = Hosts::new();
    let web = h.join(5, "web", 1);
    let channel = h.ask_to_connect(web, "db", "sql");
    assert!(is_refused(Some(h.route_to(channel, "gamma")), Refusal::Denied));
    assert!(is_refused(h.answer(web), Refusal::Denied));
    assert_eq!((h.w.core.status().channels, h.w.open_descriptors()), (0, 0));
}

#[test]
fn connect_without_rule_for_other_hosts_does_not_reach_gateway() {
    let mut h = Hosts::new();
    let mail = h.join(5, "mail", 1);
    let with = vec![h.w.region(8192)];
    // The same answer as for a domain that is nowhere.
    assert_eq!(h.w.refused(mail, connect("db", "sql", 8192), with), Refusal::Denied);
}

#[test]
fn gateways_refusal_reaches_the_client() {
    let mut h = Hosts::new();
    let web = h.join(5, "web", 1);
    let channel = h.ask_to_connect(web, "db", "sql");
    let refusal = Message::RefuseRoute { channel, code: Refusal::NoSuchService, reason: "no sql there".into() };
    assert_eq!(h.w.ask(h.gateway, refusal.clone()), Message::Done {});
    assert!(is_refused(h.answer(web), Refusal::NoSuchService));
    assert_eq!(h.w.refused(h.gateway, refusal, vec![]), Refusal::NoSuchChannel);
    assert_eq!(h.w.open_descriptors(), 0);
}

#[test]
fn waiting_connect_ends_with_gateway_or_client_or_time() {
    type End = fn(&mut Hosts, u64, u64);
    let ends: [(End, bool); 4] = [
        (|h, _, _| h.w.end(h.gateway), true),
        (|h, _, channel| assert_eq!(h.w.say(h.gateway, Message::Closed { channel }, vec![]), None), true),
        (
            |h, _, _| {
                let actions = h.w.core.handle(77 + 8, CoreEvent::Tick);
                h.w.perform(actions);
            },
            true,
        ),
        (|h, web, _| h.w.end(web), false),
    ];
    for (end, answered) in ends {
        let mut h = Hosts::new();
        let web = h.join(5, "web", 1);
        let channel = h.ask_to_connect(web, "db", "sql");
        end(&mut h, web, channel);
        assert_eq!(is_refused(h.answer(web), Refusal::OutOfResources), answered);
        assert_eq!((h.w.core.status().channels, h.w.open_descriptors()), (0, 0));
    }
}

#[test]
fn messages_of_gateway_are_refused_to_others() {
    let mut h = Hosts::new();
    let web = h.join(5, "web", 1);
    let channel = h.ask_to_connect(web, "db", "sql");
    let region = RegionReference::with_ring(8192);
    let connect_for = Message::ConnectFor {
        client: "web@beta".into(),
        target: "mail".into(),
        service: "in".into(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region,
    };
    for message in [
        Message::FollowNames { after: 0 },
        Message::NameClaimed { domain: "db".into(), claim: 1, holder: String::new() },
        Message::Route { channel },
        Message::RouteTo { channel, host: "beta".into() },
        Message::RefuseRoute { channel, code: Refusal::Denied, reason: "no".into() },
        connect_for,
    ] {
        let with = if message.fd_count() == 1 { vec![h.w.region(8192)] } else { vec![] };
        let name = message.name();
        assert_eq!(h.w.refused(web, message, with), Refusal::Denied, "{name}");
    }
    // Nor may another user be the gateway.
    h.w.end(h.gateway);
    h.w.end(h.feed);
    let other = h.w.join_as(5, "gateway", 3);
    assert_eq!(h.w.refused(other, Message::FollowNames { after: 0 }, vec![]), Refusal::Denied);
}

#[test]
fn remote_client_is_judged_by_its_host_and_name() {
    let mut h = Hosts::new();
    let mail = h.join(5, "mail", 1);
    h.w.bind(mail, "in", 4);
    let region = RegionReference::with_ring(8192);
    let (kind, directions) = (Kind::Stream, Directions::BOTH);
    let asked = |from: &str, host: &str, target: &str, service: &str| {
        let (client, target, service) = (format!("{from}@{host}"), target.into(), service.into());
        Message::ConnectFor { client, target, service, kind, directions, region }
    };
    for (message, code) in [
        (asked("web", "gamma", "mail", "in"), Refusal::Denied),
        (asked("mail", "beta", "mail", "in"), Refusal::Denied),
        (asked("web", "beta", "mail", "out"), Refusal::NoSuchService),
        (asked("web", "be ta", "mail", "in"), Refusal::NameInvalid),
    ] {
        let with = vec![h.w.region(8192)];
        assert_eq!(h.w.refused(h.gateway, message, with), code);
    }
    let with = vec![h.w.region(8192)];
    let answer = h.w.say(h.gateway, asked("web", "beta", "mail", "in"), with);
    assert!(matches!(answer, Some(Message::Connected { links: 2, .. })), "{answer:?}");
    match h.w.sent.pop().unwrap() {
        Sent { session, message: Message::Incoming { name, at_home, user, .. }, .. } => {
            assert_eq!((session, name.as_str(), at_home, user), (mail, "web@beta", false, User::Host(44)));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn host_that_fills_its_share_of_a_backlog_leaves_the_rest() {
    let rules = "[[connect]]\nfrom = '*'\nfrom_host = '*'\nto = 'mail'\n";
    let mut w = World::with_policy(&(POLICY.replace("'*'\nusers = '*'", "'*'\nusers = ['*']") + rules));
    let gateway = w.join_as(44, "gateway", 9);
    let mail = w.join_as(5, "mail", 1);
    w.bind(mail, "in", 5);
    w.bind(mail, "out", 1);
    let asked = |host: &str, service: &str| Message::ConnectFor {
        client: format!("web@{host}"),
        target: "mail".into(),
        service: service.into(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region: RegionReference::with_ring(8192),
    };
    let mut channels = Vec::new();
    for _ in 0..3 {
        let with = vec![w.region(8192)];
        let answer = w.say(gateway, asked("beta", "in"), with);
        let Some(Message::Connected { channel, .. }) = answer else { panic!("{answer:?}") };
        channels.push(channel);
    }
    let with = vec![w.region(8192)];
    let Some(Message::Refused { code: Refusal::BacklogFull, reason }) = w.say(gateway, asked("beta", "in"), with)
    else {
        panic!("beta has more than half of the backlog");
    };
    assert!(reason.contains("3 connections of the host beta wait for mail:in"), "{reason}");
    // Other services and other hosts have their own places, and an accepted connection gives its place back.
    for (host, service) in [("beta", "out"), ("gamma", "in")] {
        let with = vec![w.region(8192)];
        assert!(matches!(w.say(gateway, asked(host, service), with), Some(Message::Connected { .. })), "{host}");
    }
    assert_eq!(w.say(mail, Message::Closed { channel: channels[0] }, vec![]), None);
    let with = vec![w.region(8192)];
    assert!(matches!(w.say(gateway, asked("beta", "in"), with), Some(Message::Connected { .. })));
}

/// What the domains of machine `a` may do: connect to `db` on beta, and be connected to from there.
const MACHINE_RULES: &str = "
[[connect]]
from = 'a'
to = 'db'
to_host = 'beta'
[[connect]]
from = 'web'
from_host = 'beta'
to = 'a'
";

/// A host with machines whose gateway may or may not have channels to them, and a program in `a`.
fn with_guest(takes_part: bool) -> (Hosts, u64) {
    let mut h = Hosts::with(&format!("machines = {takes_part}"), MACHINE_RULES);
    machines::attach(&mut h.w);
    let guest = h.w.open(machines::A, 7);
    assert_eq!(h.w.say(guest, join("a"), vec![]), None, "the name waits");
    h.claimed("a", "");
    assert!(matches!(h.answer(guest), Some(Message::Joined { .. })));
    (h, guest)
}

fn to_db(region: RegionReference) -> Message {
    let Message::Connect { target, service, kind, directions, .. } = connect("db", "sql", 8192) else { panic!() };
    Message::Connect { target, service, kind, directions, region }
}

fn for_web_of_beta(region: RegionReference) -> Message {
    Message::ConnectFor {
        client: "web@beta".into(),
        target: "a".into(),
        service: "files".into(),
        kind: Kind::Stream,
        directions: Directions::BOTH,
        region,
    }
}

#[test]
fn guest_reaches_other_host_by_regions_in_windows() {
    let (mut h, guest) = with_guest(true);
    let own = RegionReference::with_ring(8192);
    let with = vec![h.w.region(8192)];
    assert_eq!(h.w.refused(guest, to_db(own), with), Refusal::Elsewhere);
    let base = machines::place(&mut h.w, guest, 0, "db");
    let in_window = machines::in_window;
    let with = vec![h.w.region(8192)];
    assert_eq!(h.w.refused(guest, to_db(in_window(base + 4096, 8192)), with), Refusal::BadRegion, "not its place");
    let with = vec![h.w.region(8192)];
    assert_eq!(h.w.say(guest, to_db(in_window(base, 8192)), with), None, "the gateway has not answered");
    let Some(Sent { session, message: Message::Incoming { channel, name, .. }, with, .. }) = h.w.sent.pop() else {
        panic!()
    };
    assert_eq!((session, name.as_str(), with.len()), (h.gateway, "a", 3));
    assert_eq!(h.route_to(channel, "beta"), Message::Done {});

    let with = vec![h.w.region(8192)];
    let accepted = |region| Message::Accepted { channel, start: 0, region };
    let back = machines::place(&mut h.w, h.gateway, channel, "a");
    assert_eq!(h.w.say(h.gateway, accepted(in_window(back, 8192)), with), Some(Message::Done {}));
    assert!(matches!(h.answer(guest), Some(Message::Connected { links: 2, .. })));
}

#[test]
fn gateway_reaches_guest_for_other_host_by_region_in_window() {
    let (mut h, guest) = with_guest(true);
    h.w.bind(guest, "files", 8);
    let with = vec![h.w.region(8192)];
    let own = RegionReference::with_ring(8192);
    assert_eq!(h.w.refused(h.gateway, for_web_of_beta(own), with), Refusal::Elsewhere);
    let base = machines::place(&mut h.w, h.gateway, 0, "a");
    let with = vec![h.w.region(8192)];
    let answer = h.w.say(h.gateway, for_web_of_beta(machines::in_window(base, 8192)), with);
    assert!(matches!(answer, Some(Message::Connected { links: 2, .. })), "{answer:?}");
    let Some(Sent { session, message: Message::Incoming { channel, name, at_home, .. }, .. }) = h.w.sent.pop() else {
        panic!()
    };
    assert_eq!((session, name.as_str(), at_home), (guest, "web@beta", false));
    let back = machines::place(&mut h.w, guest, channel, &name);
    let accepted = Message::Accepted { channel, start: 0, region: machines::in_window(back, 8192) };
    let with = vec![h.w.other()];
    assert_eq!(h.w.say(guest, accepted, with), Some(Message::Done {}));
}

#[test]
fn gateway_without_right_has_no_memory_of_machines() {
    let (mut h, guest) = with_guest(false);
    h.w.bind(guest, "files", 8);
    let own = RegionReference::with_ring(8192);
    let with = vec![h.w.region(8192)];
    assert_eq!(h.w.refused(guest, to_db(own), with), Refusal::Denied, "as without a gateway");
    assert_eq!(h.w.refused(guest, machines::room(0, "db", 12288), vec![]), Refusal::NoSuchDomain);
    let with = vec![h.w.region(8192)];
    let Some(Message::Refused { code, reason }) = h.w.say(h.gateway, for_web_of_beta(own), with) else { panic!() };
    assert!(code == Refusal::Denied && reason.contains("`machines = true`"), "{reason}");
    assert_eq!(h.w.refused(h.gateway, machines::room(0, "a", 12288), vec![]), Refusal::Denied);
    // Other domains of the gateway's user have no such right, with it.
    let (mut h, _) = with_guest(true);
    let other = h.w.join_as(44, "gateway-2", 9);
    assert_eq!(h.w.refused(other, machines::room(0, "a", 12288), vec![]), Refusal::Denied);
}

#[test]
fn guest_that_no_rule_lets_elsewhere_gets_no_place_for_it() {
    let (mut h, guest) = with_guest(true);
    assert_eq!(h.w.refused(guest, machines::room(0, "mail", 12288), vec![]), Refusal::NoSuchDomain);
    h.w.end(h.gateway);
    assert_eq!(
        h.w.refused(guest, machines::room(0, "db", 12288), vec![]),
        Refusal::NoSuchDomain,
        "there is no gateway"
    );
}

/// A connection of a guest that the gateway is about to accept: its channel, and the gateway's place.
fn about_to_be_accepted(h: &mut Hosts, guest: u64) -> (u64, u64) {
    let base = machines::place(&mut h.w, guest, 0, "db");
    let with = vec![h.w.region(8192)];
    assert_eq!(h.w.say(guest, to_db(machines::in_window(base, 8192)), with), None);
    let Some(Sent { message: Message::Incoming { channel, .. }, .. }) = h.w.sent.pop() else { panic!() };
    assert_eq!(h.route_to(channel, "beta"), Message::Done {});
    (channel, machines::place(&mut h.w, h.gateway, channel, "a"))
}

#[test]
fn place_of_accepting_gateway_is_kept_until_it_closes() {
    type End = fn(&mut Hosts, u64);
    let ends: [End; 2] = [
        |h, guest| h.w.end(guest),
        |h, _| {
            let actions = h.w.core.handle(77 + 8, CoreEvent::Tick);
            h.w.perform(actions);
        },
    ];
    for end in ends {
        let (mut h, guest) = with_guest(true);
        // Another domain in the machine, so that the gateway can ask for places there.
        let other = h.w.open(machines::A, 8);
        assert_eq!(h.w.say(other, join("a.other"), vec![]), None);
        h.claimed("a.other", "");
        assert!(matches!(h.answer(other), Some(Message::Joined { .. })));
        let (channel, back) = about_to_be_accepted(&mut h, guest);
        end(&mut h, guest);
        h.w.sent.clear();
        assert_ne!(machines::place(&mut h.w, h.gateway, 0, "a.other"), back, "the gateway may write there");
        assert_eq!(h.w.say(h.gateway, Message::Closed { channel }, vec![]), None);
        assert_eq!(machines::place(&mut h.w, h.gateway, 0, "a.other"), back, "free again");
    }
}

#[test]
fn refused_connections_for_other_hosts_keep_no_place() {
    let (mut h, _guest) = with_guest(true);
    let first = machines::place(&mut h.w, h.gateway, 0, "a");
    for _ in 0..100 {
        let with = vec![h.w.region(8192)];
        let message = for_web_of_beta(machines::in_window(first, 8192));
        assert_eq!(h.w.refused(h.gateway, message, with), Refusal::NoSuchService);
        assert_eq!(machines::place(&mut h.w, h.gateway, 0, "a"), first);
    }
}
