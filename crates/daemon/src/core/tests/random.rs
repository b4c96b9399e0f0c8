//! Any events in any order: no panic, no contradiction in the tables, and no descriptor left at the end.

use partywall_protocol::wire::{self, PolicyQuestion, RegionReference, Side, What};
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Open { uid: u32, pid: u32 },
    Say { session: u64, message: Message, with: Vec<u8> },
    Socket { session: u64, message: Message, socket: Box<SocketFacts>, with: Vec<u8> },
    Tick,
    LookAtUntaken,
    End { session: u64 },
    Deliver(u8),
    Policy(u8),
}

const POLICIES: [&str; 4] = [
    "administrators = [0]\n[[join]]\ndomain='?'\nusers=[1]\n[[connect]]\nfrom='*'\nto='*'\n[quota]\nchannels=5",
    "administrators = [1]\nsessions_per_user = 3\n[quota]\nsessions = 2\nservices = 1\nring_bytes = 20000\n[[forward]]\naddresses = ['10.0.0.2:2']\nto = '10.0.0.1:1'",
    "administrators = [0, 1]",
    "administrators = [0, 1]\n[cluster]\nhost='alpha'\ngateway='a'\n[[forward]]\naddresses = ['10.0.0.3:3', '10.0.0.2:2']\nto = '10.0.0.1:1'",
];

fn name() -> impl Strategy<Value = String> {
    proptest::sample::select(vec!["a", "b", "c", "", "no good"]).prop_map(str::to_owned)
}

/// Few enough channels that most numbers mean one.
fn channel() -> impl Strategy<Value = u64> {
    prop_oneof![INSTANCE + 1..INSTANCE + 6, INSTANCE - 2..INSTANCE, Just(u64::MAX)]
}

/// Requests of the gateway (protocol H).
fn cluster_message() -> impl Strategy<Value = Message> {
    let holder = || proptest::sample::select(vec!["", "", "beta", "no good"]).prop_map(str::to_owned);
    prop_oneof![
        3 => (0u64..9).prop_map(|after| Message::FollowNames { after }),
        2 => (name(), channel(), holder()).prop_map(|(domain, claim, holder)| Message::NameClaimed { domain, claim, holder }),
        1 => channel().prop_map(|channel| Message::Route { channel }),
        2 => (channel(), holder()).prop_map(|(channel, host)| Message::RouteTo { channel, host }),
        1 => channel().prop_map(|channel| {
            Message::RefuseRoute { channel, code: Refusal::NoSuchService, reason: "none".into() }
        }),
        1 => (name(), name(), name()).prop_map(|(from, target, service)| Message::ConnectFor {
            client: format!("{from}@beta"),
            target,
            service,
            kind: Kind::Stream,
            directions: Directions::BOTH,
            region: RegionReference::with_ring(8192),
        }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let kind = || proptest::sample::select(vec![Kind::Stream, Kind::Stream, Kind::Broadcast]);
    let directions = || proptest::sample::select(vec![Directions::BOTH, Directions::BOTH, Directions::REVERSE]);
    let ring = || proptest::sample::select(vec![8192u64, 8192, 0, 16384, 77]);
    prop_oneof![
        3 => name().prop_map(|name| Message::Join { version: wire::VERSION, name }),
        1 => Just(Message::Bind { service: "cluster".into(), kind: Kind::Stream, backlog: 2 }),
        4 => cluster_message(),
        2 => (name(), kind(), 0u16..4).prop_map(|(service, kind, backlog)| Message::Bind { service, kind, backlog }),
        6 => (name(), name(), kind(), directions(), ring()).prop_map(|(target, service, kind, directions, ring_size)| {
            Message::Connect { target, service, kind, directions, region: RegionReference::with_ring(ring_size) }
        }),
        4 => (channel(), ring()).prop_map(|(channel, ring_size)| {
            Message::Accepted { channel, start: 0, region: RegionReference::with_ring(ring_size) }
        }),
        3 => channel().prop_map(|channel| Message::Closed { channel }),
        4 => (channel(), proptest::sample::select(Side::ALL), ring()).prop_map(|(channel, side, ring_size)| Message::Grow {
            channel, side, generation: 1, region: RegionReference::with_ring(ring_size),
        }),
        4 => (channel(), proptest::sample::select(Side::ALL), 0u32..2, 0u8..3).prop_map(|(channel, side, kind, count)| {
            Message::TakeRegions { channel, side, kind, count, bytes: 12_288 }
        }),
        6 => (channel(), proptest::sample::select(Side::ALL), 0u32..9, 0u32..2, ring()).prop_map(
            |(channel, side, number, kind, ring_size)| Message::AddRegion {
                channel, side, number, kind, region: RegionReference::with_ring(ring_size),
            }
        ),
        3 => (channel(), proptest::sample::select(Side::ALL), any::<bool>(), 0u32..9, 0u32..2, ring()).prop_map(
            |(channel, side, own, number, kind, bytes)| Message::ReclaimRegion { channel, side, own, number, kind, bytes }
        ),
        3 => (channel(), proptest::sample::select(Side::ALL), any::<bool>(), 0u32..9)
            .prop_map(|(channel, side, own, number)| Message::DropRegion { channel, side, own, number }),
        3 => (channel(), proptest::sample::select(Side::ALL), name(), name(), ring()).prop_map(
            |(channel, side, peer, service, ring_size)| Message::Reclaim {
                channel, side, peer, service, kind: Kind::Stream, directions: Directions::BOTH, region: RegionReference::with_ring(ring_size),
            }
        ),
        1 => (proptest::sample::select(What::ALL), channel()).prop_map(|(what, after)| Message::List { what, after }),
        1 => channel().prop_map(|channel| Message::Inspect { channel }),
        1 => Just(Message::Ping {}),
        1 => channel().prop_map(|offer| Message::Cancel { offer }),
        1 => (0..3u64, 0..2u64).prop_map(|(socket, carrier)| {
            Message::Passed { socket, carrier, side: Side::Accepting, rings: 1 }
        }),
        1 => (0..3u64, 0..2u64).prop_map(|(socket, carrier)| Message::TakePassed { socket, carrier }),
        1 => (0u64..5).prop_map(|key| Message::Withdraw { key }),
        1 => Just(Message::Directory {}),
        1 => Just(Message::GetMoveRules {}),
        1 => (proptest::sample::select(PolicyQuestion::ALL), any::<bool>(), name(), name(), name()).prop_map(
            |(question, own, from, to, service)| Message::TestPolicy {
                question, own, user: User::Host(0), gid: 0, to_own: own, to_user: User::Host(1), from, to, service,
            }
        ),
        1 => proptest::sample::select(vec!["now", "never@port=1", "nonsense"]).prop_map(|text| Message::SetMoveRules {
            reset: text == "now", clauses: partywall_protocol::wire::Text(text.into()), ring_size: 0, spin_us: 1,
        }),
        1 => Just(Message::Done {}),
        1 => (0..50u64).prop_map(|after| Message::FollowEvents { after }),
    ]
}

/// Few enough sockets that most of them are another's other end, in two namespaces. Where numbers are read, they are those of a connecting
/// side or of its other end.
fn socket() -> impl Strategy<Value = SocketFacts> {
    let state = proptest::sample::select(
        vec![SocketState::Established; 9]
            .into_iter()
            .chain([SocketState::Other, SocketState::Listening])
            .collect::<Vec<_>>(),
    );
    let end = || proptest::sample::select(vec!["10.0.0.1:1", "10.0.0.2:2", "127.0.0.1:3"]);
    (state, end(), end(), 1u64..3, any::<bool>(), 0u64..3).prop_map(|(state, local, remote, netns, trusted, twin)| {
        let (local, remote): (std::net::SocketAddr, std::net::SocketAddr) =
            (local.parse().unwrap(), remote.parse().unwrap());
        let cookie = u64::from(local.port()) << 8 | u64::from(remote.port()) << 4 | netns << 2 | twin;
        let base = facts(Transport::Tcp, local, Some(remote));
        let remote = base.remote.filter(|_| state != SocketState::Listening);
        let numbers = (twin > 0).then_some(Numbers { sent_from: 1, received_from: twin as u32 });
        let identity = Identity { numbers, ..base.identity };
        SocketFacts { state, remote, cookie, netns, trusted, received: twin, sent: 2, identity, ..base }
    })
}

fn socket_message() -> impl Strategy<Value = Message> {
    let ring = || proptest::sample::select(vec![8192u64, 8192, 8192, 0, 77]);
    prop_oneof![
        4 => ring().prop_map(|ring_size| Message::Offer { region: RegionReference::with_ring(ring_size) }),
        4 => ring().prop_map(|ring_size| Message::Take { region: RegionReference::with_ring(ring_size) }),
        4 => channel().prop_map(|offer| Message::Confirm { offer }),
        4 => channel().prop_map(|offer| Message::Finish { offer }),
        1 => Just(Message::Publish { addresses: partywall_protocol::wire::AddressList(vec!["10.0.0.1".parse().unwrap()]) }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let session = || 1u64..10;
    // Mostly what a message needs, so that the states behind the first check are reached too.
    let with = || prop_oneof![4 => Just(vec![]), 1 => proptest::collection::vec(0u8..3, 0..5)];
    prop_oneof![
        3 => (0u32..3, 1u32..4).prop_map(|(uid, pid)| Step::Open { uid, pid }),
        16 => (session(), message(), with()).prop_map(|(session, message, with)| Step::Say { session, message, with }),
        12 => (session(), socket_message(), socket(), with()).prop_map(|(session, message, socket, with)| {
            Step::Socket { session, message, socket: Box::new(socket), with }
        }),
        1 => Just(Step::Tick),
        1 => Just(Step::LookAtUntaken),
        1 => session().prop_map(|session| Step::End { session }),
        1 => (0u8..8).prop_map(Step::Deliver),
        1 => (0u8..4).prop_map(Step::Policy),
    ]
}

fn descriptors(w: &World, message: &Message, with: &[u8]) -> Vec<Fake> {
    if !with.is_empty() {
        return with.iter().map(|kind| [w.region(8192), w.link(), w.other()][usize::from(*kind)].clone()).collect();
    }
    let ring = match message {
        Message::Connect { region, .. }
        | Message::ConnectFor { region, .. }
        | Message::Accepted { region, .. }
        | Message::Grow { region, .. }
        | Message::AddRegion { region, .. }
        | Message::Reclaim { region, .. }
        | Message::Offer { region, .. }
        | Message::Take { region, .. } => region.ring_size,
        _ => 0,
    };
    let due = message.fd_count() - usize::from(message.brings_socket());
    (0..due).map(|i| if i == 0 { w.region(ring) } else { w.link() }).collect()
}

proptest! {
    #[test]
    fn any_events_in_any_order(steps in proptest::collection::vec(step(), 1..120)) {
        let capacity = Capacity { sessions: 6, regions: 5, offers: 3, entries: 20 };
        let mut w = World::sized(Policy::parse(POLICIES[3]).unwrap(), INSTANCE, capacity);
        for step in steps {
            match step {
                Step::Open { uid, pid } => { w.open(uid, pid); }
                Step::Say { session, message, with } => {
                    let with = descriptors(&w, &message, &with);
                    w.say(session, message, with);
                }
                Step::Socket { session, message, socket, with } => {
                    let with = descriptors(&w, &message, &with);
                    w.say_of(session, message, *socket, with);
                }
                Step::Tick => w.feed(CoreEvent::Tick),
                Step::LookAtUntaken => w.feed(CoreEvent::LookAtUntaken),
                Step::End { session } => w.end(session),
                Step::Deliver(how) => w.delivery = match how {
                    0 => OfferDelivery::Full,
                    1 => OfferDelivery::Gone,
                    2 => OfferDelivery::Failed("no".into()),
                    _ => OfferDelivery::Done,
                },
                Step::Policy(which) => {
                    let policy = Policy::parse(POLICIES[usize::from(which)]).unwrap();
                    let actions = w.core.set_policy(NOW, Arc::new(policy));
                    w.perform(actions);
                }
            }
            w.sent.clear();
        }
        for session in 1..=200 {
            w.end(session);
        }
        prop_assert_eq!(w.core.status(), CoreStatus::default());
        prop_assert_eq!(w.open_descriptors(), 0);
        prop_assert!(w.listed.is_empty(), "{:?}", w.listed);
    }
}
