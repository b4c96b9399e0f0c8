//! Clients in containers: what their user ids are good for (protocol C3.1).

use std::net::SocketAddr;

use partywall_protocol::directory::Transport;
use partywall_protocol::wire::What;
use partywall_shm::address::wide;

use super::*;

const ROOT: u32 = 0;
/// A container without a user namespace: its root has the number of the host's.
const CONTAINER: Home = Home::Container { user: 1, pid: 2 };
const OTHER_CONTAINER: Home = Home::Container { user: 1, pid: 3 };
/// All users may join, and there is no rule for connections.
const OPEN: &str = "administrators = [0]\n[[join]]\ndomain = '*'\nusers = ['*']\n";

fn machines_are_shown(w: &mut World, session: u64) -> bool {
    matches!(w.ask(session, Message::List { what: What::Machines, after: 0 }), Message::Machines { .. })
}

#[test]
fn container_root_is_administrator_only_if_policy_allows() {
    let opted_in = format!("administrators_in_containers = [0]\n{OPEN}");
    for (policy, home, well) in [
        (OPEN, Home::Broker, true),
        (OPEN, CONTAINER, false),
        (OPEN, Home::Unknown, false),
        (&*opted_in, CONTAINER, true),
    ] {
        let mut w = World::with_policy(policy);
        let session = w.join_as((ROOT, home), "a", 1);
        assert_eq!(machines_are_shown(&mut w, session), well, "{home:?}");
    }
    // The user of the broker is not one either, without a policy file.
    let policy = Policy::for_user(1000);
    for user in [ROOT, 1000] {
        assert!(policy.is_administrator((user, Home::Broker).with(1)));
        assert!(!policy.is_administrator((user, CONTAINER).with(1)));
        assert!(!policy.may_join_something((user, Home::Unknown).with(1)));
    }
}

#[test]
fn sessions_of_a_container_leave_those_of_the_host_their_number() {
    let mut w = World::with_policy(&format!("sessions_per_user = 2\n{OPEN}"));
    for home in [CONTAINER, OTHER_CONTAINER] {
        w.open((ROOT, home), 2);
    }
    assert!(w.closed.is_empty());
    w.open((ROOT, OTHER_CONTAINER), 3);
    assert_eq!(w.closed.len(), 1, "containers count together: who can make namespaces is not many users by that");
    w.open((ROOT, Home::Broker), 1);
    assert_eq!(w.closed.len(), 1);
}

#[test]
fn name_belongs_to_the_place_of_its_first_session() {
    let mut w = World::with_policy(OPEN);
    w.join_as((ROOT, Home::Broker), "db", 1);
    let second = w.open((ROOT, CONTAINER), 2);
    assert_eq!(w.refused(second, join("db"), vec![]), Refusal::NameTaken);
    // Two sessions of one container, or of a process whose place the broker cannot tell, may be one domain.
    for (home, name) in [(CONTAINER, "web"), (Home::Unknown, "cache")] {
        w.join_as((ROOT, home), name, 3);
        w.join_as((ROOT, home), name, 3);
    }
}

#[test]
fn channels_outside_container_are_not_shown_inside() {
    let rules = format!("{OPEN}[[connect]]\nfrom = '*'\nto = '*'\n");
    let mut w = World::with_policy(&rules);
    let host = [w.join_as((ROOT, Home::Broker), "web", 1), w.join_as((ROOT, Home::Broker), "db", 2)];
    let inside = [w.join_as((ROOT, CONTAINER), "c-web", 3), w.join_as((ROOT, CONTAINER), "c-db", 4)];
    let mut channels = Vec::new();
    for ([from, to], name) in [(host, "db"), (inside, "c-db")] {
        w.bind(to, "s", 4);
        let channel = w.connect(from, name, "s");
        w.accept(to, channel);
        channels.push(channel);
    }
    let spy = w.join_as((ROOT, OTHER_CONTAINER), "spy", 5);
    let mut sees = |session, channel| {
        let answer = w.ask(session, Message::Inspect { channel });
        matches!(answer, Message::Regions { .. })
    };
    assert!(sees(host[0], channels[0]) && sees(inside[0], channels[1]) && sees(inside[1], channels[1]));
    assert!(!sees(inside[0], channels[0]) && !sees(spy, channels[0]) && !sees(spy, channels[1]));
    let Message::Channels { page } = w.ask(spy, Message::List { what: What::Channels, after: 0 }) else { panic!() };
    assert!(page.rows.is_empty());
}

#[test]
fn one_number_in_two_places_is_not_one_user() {
    for (sender, receiver, well) in [
        (Home::Broker, Home::Broker, true),
        (CONTAINER, CONTAINER, true),
        (CONTAINER, Home::Broker, false),
        (Home::Broker, CONTAINER, false),
        (CONTAINER, OTHER_CONTAINER, false),
        (Home::Unknown, Home::Unknown, false),
    ] {
        // There is no rule for connections: `same_user` alone lets datagrams go by a ring. There are no administrators.
        let mut w = World::with_policy("administrators = []\n[[join]]\ndomain = '*'\nusers = ['*']\n");
        let from = w.join_as((1, sender), "web", 1);
        let to = w.join_as((1, receiver), "db", 2);
        let [near, far] = ["127.0.0.1:5000", "127.0.0.1:53"].map(|at| at.parse::<SocketAddr>().unwrap());
        let halves = |at: SocketAddr| ((wide(at.ip()) >> 64) as u64, wide(at.ip()) as u64, at.port());
        let ((to_high, to_low, to_port), (from_high, from_low, from_port)) = (halves(far), halves(near));
        let offer = Message::OfferDatagrams { to_high, to_low, to_port, region: RegionReference::with_ring(8192) };
        let with = vec![w.region(8192)];
        let offered = w.say_of(from, offer, socket(near), with).expect("an answer");
        assert!(matches!(offered, Message::Offered { .. }), "{offered:?}");
        let with = vec![w.region(0)];
        let take = Message::TakeDatagrams { from_high, from_low, from_port, region: RegionReference::with_ring(0) };
        let taken = w.say_of(to, take, socket(far), with).expect("an answer");
        assert_eq!(matches!(taken, Message::DatagramsTaken { .. }), well, "{sender:?} to {receiver:?}: {taken:?}");
    }
}

fn socket(local: SocketAddr) -> SocketFacts {
    SocketFacts { cookie: u64::from(local.port()), ..facts(Transport::Udp, local, None) }
}
