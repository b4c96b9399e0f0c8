//! Puts together what processes say of their sockets and what the broker says of channels.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Instant;

use partywall::{ChannelRow, Kind, PolicyUser};
use partywall_shm::status::{LineSnapshot, LineState, Reason, Role};

use serde::Serialize;

use super::cause::Cause;
use super::channels::{Channels, SideCounters};
use super::history::moves_of;
use super::processes::{self, ConnectedSocket};
use super::row::{ConnectionRow, DirectionCount};
use crate::args::Global;
use crate::exit::{Code, CommandFailure};

/// How the broker calls the service of a flow of datagrams (protocol U4), before the port.
const DATAGRAMS: &str = "udp-";
/// The same for a TCP connection (protocol T).
const CONNECTION: &str = "tcp-";

/// Most processes that a note names one by one.
const FEW: usize = 5;

/// Everything at one moment.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Look {
    pub(crate) connections: Vec<ConnectionRow>,
    /// How many connections the filter leaves out.
    #[serde(skip)]
    pub(crate) left_out: usize,
    /// Why less is shown than there may be; empty if nothing is missing.
    pub(crate) notes: Vec<String>,
}

/// The connections to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The sockets of programs that were started under `partywall run`.
    Preloaded,
    /// The sockets of all programs.
    All,
}

/// Looks again and again, and remembers what it saw last.
#[derive(Debug)]
pub(crate) struct Gatherer<'a> {
    global: &'a Global,
    channels: Channels,
    before: HashMap<Key, (Option<DirectionCount>, Option<DirectionCount>)>,
    looked: Option<Instant>,
}

type Key = (Option<u32>, Option<u64>, String, Option<String>, String);

impl<'a> Gatherer<'a> {
    pub(crate) fn new(global: &'a Global) -> Self {
        Self { global, channels: Channels::default(), before: HashMap::new(), looked: None }
    }

    /// Everything as it is now, with rates since the last look.
    pub(crate) fn look(&mut self, scope: Scope) -> Look {
        let mut notes = Vec::new();
        let failure = self.channels.update(self.global).err();
        notes.extend(failure.as_ref().map(not_asked));
        let reachability = Reachability { broker: failure.is_none_or(|failure| failure.code == Code::Refused) };
        let (mut sockets, hidden) = processes::sockets(scope);
        self.ask_why(&mut sockets);
        notes.extend(not_inspected(&hidden));
        let seconds = self.looked.replace(Instant::now()).map(|then| then.elapsed().as_secs_f64());
        let mut connections = rows(&sockets, &self.channels, reachability);
        let is_of_no_process = |row: &ConnectionRow| row.pid.is_none() && row.kind == Kind::Socket.to_string();
        // Its program may have ended since the broker listed the channel.
        if connections.iter().any(is_of_no_process) && self.channels.drop_closed().is_ok() {
            connections = rows(&sockets, &self.channels, reachability);
        }
        self.rate(&mut connections, seconds);
        notes.extend(uncounted(&connections));
        Look { connections, left_out: 0, notes }
    }

    /// Asks the broker about programs that have no session with it.
    fn ask_why(&self, sockets: &mut [ConnectedSocket]) {
        let mut known = HashMap::new();
        let unsure = sockets.iter().any(ConnectedSocket::may_lack_session);
        let sessions = if unsure { self.channels.sessions() } else { HashMap::new() };
        let lacks_session = |socket: &&mut ConnectedSocket| {
            socket.lacks_broker() || (socket.may_lack_session() && !sessions.contains_key(&socket.pid))
        };
        for socket in sockets.iter_mut().filter(lacks_session) {
            let asked = known.entry(socket.pid).or_insert_with(|| {
                let (user, names) = processes::joins_as(socket, &sessions)?;
                let mut grounds = None;
                for name in &names {
                    let decision = self.channels.may_join(user, name)?;
                    if decision.allowed {
                        return None;
                    }
                    grounds.get_or_insert(decision.grounds);
                }
                Some(refusal(user, &names, &grounds?))
            });
            socket.refusal.clone_from(asked);
        }
    }

    fn rate(&mut self, rows: &mut [ConnectionRow], seconds: Option<f64>) {
        let mut now = HashMap::new();
        for row in rows {
            let (pid, channel, program, local, peer) = row.key();
            let key = (pid, channel, program.to_owned(), local.map(str::to_owned), peer.to_owned());
            let before = self.before.get(&key);
            now.insert(key, (row.sent, row.received));
            if let (Some(seconds), Some((sent, received))) = (seconds, before) {
                for (flow, before) in [(&mut row.sent, sent), (&mut row.received, received)] {
                    if let (Some(flow), Some(before)) = (flow, before) {
                        flow.since(*before, seconds);
                    }
                }
            }
        }
        self.before = now;
    }
}

/// The note on a broker that does not answer, or that refuses this user.
fn not_asked(failure: &CommandFailure) -> String {
    let text = failure.to_string();
    match failure.code {
        // With the rule that would allow it.
        Code::Refused => format!("channels and counts of rings are not shown: {text}"),
        _ => format!("{}; without a broker, connections stay where they are", text.lines().next().unwrap_or_default()),
    }
}

/// The note on processes that the kernel does not let this user inspect: the few by number, or how many there are.
fn not_inspected(processes: &[i32]) -> Option<String> {
    let numbers: Vec<_> = processes.iter().map(i32::to_string).collect();
    let subject = match processes {
        [] => return None,
        [one] => format!("process {one}"),
        few if few.len() <= FEW => format!("processes {}", numbers.join(", ")),
        many => format!("{} processes", many.len()),
    };
    Some(format!("{subject} cannot be inspected (permission denied), so connections there are not shown"))
}

/// The note on rings whose memory the broker does not hand out (protocol G5.4, C10).
fn uncounted(rows: &[ConnectionRow]) -> Option<String> {
    match rows.iter().filter(|row| row.ring_is_uncounted).count() {
        0 => None,
        count => Some(format!(
            "bytes and doorbells of {count} ring(s) are not counted: an end is in a virtual machine, or the ring is not for us to see"
        )),
    }
}

fn refusal(user: PolicyUser, names: &[String], grounds: &str) -> String {
    let user = match user {
        PolicyUser::Host { uid, .. } => format!("user {uid}"),
        PolicyUser::Own => "its user".into(),
    };
    match names {
        [name] => format!("the broker's policy does not let {user} join as {name} ({grounds})"),
        // Its name is not known, and none that it can have is admitted.
        _ => format!("the broker's policy does not let {user} join ({grounds})"),
    }
}

/// Whether a program here can join a broker.
#[derive(Debug, Clone, Copy)]
struct Reachability {
    /// A broker answers us.
    broker: bool,
}

impl Reachability {
    /// Why the library in a program has not joined a broker.
    fn not_joined(self) -> Cause {
        if self.broker { Cause::NotJoined } else { Cause::Library(Reason::BrokerAbsent) }
    }
}

fn rows(sockets: &[ConnectedSocket], channels: &Channels, reachability: Reachability) -> Vec<ConnectionRow> {
    let ends: HashSet<(SocketAddr, SocketAddr)> =
        sockets.iter().filter(|s| s.loaded).map(|s| (canonical(s.local), canonical(s.remote))).collect();
    let peer_is_there = |s: &ConnectedSocket| ends.contains(&(canonical(s.remote), canonical(s.local)));
    let mut all: Vec<ConnectionRow> =
        sockets.iter().map(|socket| socket_row(socket, peer_is_there(socket), channels, reachability)).collect();
    let shown: HashSet<u64> = all.iter().filter_map(|row| row.channel).collect();
    all.extend(
        channels.rows().iter().filter(|row| !shown.contains(&row.channel)).map(|row| channel_row(row, channels)),
    );
    all
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// `peer_is_there`: the other end belongs to such a program too, as far as we see.
fn socket_row(
    socket: &ConnectedSocket,
    peer_is_there: bool,
    channels: &Channels,
    reachability: Reachability,
) -> ConnectionRow {
    let mut row = ConnectionRow {
        kind: "socket".into(),
        program: socket.program.clone(),
        pid: Some(socket.pid),
        fd: Some(socket.fd),
        local: Some(socket.local.to_string()),
        peer: socket.remote.to_string(),
        way: "tcp".into(),
        ..ConnectionRow::default()
    };
    let Some(seen) = &socket.seen else {
        if socket.unreadable {
            // Its bytes may well go by a ring.
            row.way = "unknown".into();
            row.because(Some(Cause::OtherLibrary));
            return row;
        }
        let cause = match (socket.loaded, socket.joined) {
            (false, _) => Cause::NoLibrary,
            (true, false) => reachability.not_joined(),
            (true, true) => Cause::Library(Reason::NoPeer),
        };
        row.because(Some(cause));
        row.is_refused(socket.refusal.as_deref());
        return row;
    };
    let identity = &seen.identity;
    let has_ring = matches!(identity.state, LineState::Up | LineState::Down);
    let channel = Some(identity.channel).filter(|channel| *channel != 0 && has_ring);
    let side = channel.and_then(|channel| channels.side(channel, identity.role == Role::Connecting));
    row.channel = channel;
    row.ring_is_uncounted = channel.is_some() && side.is_none();
    let (sent, received) = (side.map_or(0, |side| side.written.bytes), side.map_or(0, |side| side.read.bytes));
    row.sent = Some(DirectionCount::of(seen.tx.tcp, seen.tx.ring_before.saturating_add(sent)));
    row.received = Some(DirectionCount::of(seen.rx.tcp, seen.rx.ring_before.saturating_add(received)));
    count(&mut row, seen, side);
    row.moves = moves_of(seen);
    let (way, cause) = way(seen, side);
    row.way = way;
    row.because(cause);
    // The side that accepts does not count up to anything: it waits for the other, which may never have heard of us.
    let left_out = identity.reason == Reason::ProgramNotListed;
    if identity.state == LineState::Counting && identity.role == Role::Accepting && !peer_is_there && !left_out {
        row.because(Some(Cause::PeerSilent));
    }
    // Last: where the policy does not let this side join, the other may do what it likes.
    row.is_refused(socket.refusal.as_deref());
    row
}

fn count(row: &mut ConnectionRow, seen: &LineSnapshot, side: Option<SideCounters>) {
    let halves = side.map(|side| [side.written, side.read]).into_iter().flatten();
    let (rung, saved) = halves.fold((0u64, 0u64), |(rung, saved), half| {
        (rung.saturating_add(half.bells_rung), saved.saturating_add(half.bells_saved))
    });
    let before = |of: fn(&partywall_shm::status::DirectionSeen) -> u64| of(&seen.tx).saturating_add(of(&seen.rx));
    row.bells_rung = before(|way| way.rung_before).saturating_add(rung);
    row.bells_saved = before(|way| way.saved_before).saturating_add(saved);
    let switches = side.and_then(|side| side.paths).map_or(0, |paths| paths.switches);
    row.switches = seen.tx.switches_before.saturating_add(switches.into());
}

/// Where the bytes go, and why not through the ring.
fn way(seen: &LineSnapshot, side: Option<SideCounters>) -> (String, Option<Cause>) {
    let words = |ring: bool| if ring { "ring" } else { "tcp" };
    let why = |otherwise: Cause| Some(Cause::library_or(seen.identity.reason, otherwise));
    match (seen.identity.state, side.and_then(|side| side.paths)) {
        (LineState::Up | LineState::Down, Some(paths)) => {
            let (sends, receives) = (paths.sends_on_ring, paths.receives_on_ring);
            let way =
                if sends == receives { words(sends).into() } else { format!("{}/{}", words(sends), words(receives)) };
            (way, Cause::from_paths(paths).and_then(why))
        }
        (LineState::Up, None) => ("ring".into(), None),
        (LineState::Counting, _) => ("tcp".into(), why(Cause::Library(Reason::TooShort))),
        (LineState::Offered, _) => ("tcp".into(), why(Cause::Library(Reason::NotTaken))),
        (LineState::Down, _) => ("tcp".into(), why(Cause::Library(Reason::Told))),
        (LineState::Tcp | LineState::Free, _) => ("tcp".into(), why(Cause::Unknown)),
    }
}

/// A channel that no process that we see speaks of: one line for both ends, seen from the connecting one.
fn channel_row(channel: &ChannelRow, channels: &Channels) -> ConnectionRow {
    let [from, to] = [true, false].map(|connecting| channels.side(channel.channel, connecting));
    let written = |side: Option<SideCounters>| side.map(|side| DirectionCount::of(0, side.written.bytes));
    let halves = || [from, to].into_iter().flatten().flat_map(|side| [side.written, side.read]);
    let sum = |of: fn(partywall::Snapshot) -> u64| halves().map(of).fold(0, u64::saturating_add);
    let is_socket = channel.kind == Kind::Socket;
    // The direction from one UDP socket to another. Datagrams outside of its ring are not counted.
    let datagrams_to = channel.service.strip_prefix(DATAGRAMS).filter(|_| is_socket);
    let port = datagrams_to.or_else(|| channel.service.strip_prefix(CONNECTION).filter(|_| is_socket));
    let peer = format!("{}:{}", channel.to_name, port.unwrap_or(&channel.service));
    let paths = [from, to].map(|side| side.and_then(|side| side.paths));
    let words = |ring: bool| if ring { "ring" } else { "tcp" };
    let way = match paths {
        [Some(a), Some(b)] if is_socket && a.sends_on_ring != b.sends_on_ring => {
            format!("{}/{}", words(a.sends_on_ring), words(b.sends_on_ring))
        }
        _ if datagrams_to.is_some() => "ring".into(),
        [Some(a), _] if is_socket => words(a.sends_on_ring).into(),
        _ => "ring".into(),
    };
    let mut row = ConnectionRow {
        kind: if datagrams_to.is_some() { "udp".into() } else { channel.kind.to_string() },
        program: channel.from_name.clone(),
        peer,
        channel: Some(channel.channel),
        way,
        sent: written(from),
        received: written(to),
        ring_is_uncounted: from.is_none() && to.is_none(),
        switches: paths.into_iter().flatten().map(|paths| u64::from(paths.switches)).sum(),
        bells_rung: sum(|half| half.bells_rung),
        bells_saved: sum(|half| half.bells_saved),
        ..ConnectionRow::default()
    };
    row.because((!channel.accepted).then_some(Cause::NotAccepted));
    row
}

#[cfg(test)]
mod tests {
    use partywall_shm::status::{DirectionSeen, LineIdentity};

    use super::*;

    fn socket(state: LineState, reason: Reason) -> ConnectedSocket {
        let (local, remote) = ("10.0.0.1:5000".parse().unwrap(), "10.0.0.2:6379".parse().unwrap());
        let identity = LineIdentity { state, reason, role: Role::Connecting, pid: 7, fd: 3, local, remote, channel: 9 };
        let tx = DirectionSeen {
            tcp: 100,
            ring_before: 50,
            rung_before: 2,
            saved_before: 3,
            switches_before: 4,
            ..DirectionSeen::default()
        };
        let seen =
            Some(LineSnapshot { index: 0, identity, tx, rx: DirectionSeen { tcp: 7, ..DirectionSeen::default() } });
        ConnectedSocket {
            program: "redis-benchmark".into(),
            pid: 7,
            fd: 3,
            local,
            remote,
            seen,
            loaded: true,
            unreadable: false,
            joined: true,
            refusal: None,
        }
    }

    const REACHABLE: Reachability = Reachability { broker: true };

    #[test]
    fn few_processes_that_cannot_be_inspected_are_named() {
        assert_eq!(not_inspected(&[]), None);
        assert!(not_inspected(&[1]).unwrap().starts_with("process 1 cannot be inspected (permission denied)"));
        assert!(not_inspected(&[1, 20]).unwrap().starts_with("processes 1, 20 cannot"));
        assert!(not_inspected(&[7; 6]).unwrap().starts_with("6 processes cannot"));
    }

    #[test]
    fn every_state_has_a_reason() {
        for (state, reason, words) in [
            (LineState::Counting, Reason::None, "not carried enough"),
            (LineState::Offered, Reason::None, "not taken up"),
            (LineState::Tcp, Reason::RawCalls, "raw system calls"),
            (LineState::Down, Reason::None, "told to go back"),
            (LineState::Down, Reason::PeerOnTcp, "peer stays on TCP"),
        ] {
            let row = socket_row(&socket(state, reason), true, &Channels::default(), REACHABLE);
            assert!(row.way == "tcp" && row.why.contains(words), "{row:?}");
            let channel = (state == LineState::Down).then_some(9);
            assert_eq!((row.channel, row.switches, row.bells_rung, row.bells_saved), (channel, 4, 2, 3));
            assert_eq!((row.sent, row.received), (Some(DirectionCount::of(100, 50)), Some(DirectionCount::of(7, 0))));
        }
        let mut waiting = socket(LineState::Counting, Reason::TooShort);
        assert!(
            socket_row(&waiting, false, &Channels::default(), REACHABLE).why.contains("not carried enough"),
            "it connected"
        );
        waiting.seen.as_mut().unwrap().identity.role = Role::Accepting;
        assert!(socket_row(&waiting, true, &Channels::default(), REACHABLE).why.contains("not carried enough"));
        assert!(socket_row(&waiting, false, &Channels::default(), REACHABLE).why.contains("offers no ring"));
        let silent = ConnectedSocket { seen: None, ..socket(LineState::Tcp, Reason::None) };
        assert!(socket_row(&silent, true, &Channels::default(), REACHABLE).why.contains("not under Partywall"));
        let older = ConnectedSocket { unreadable: true, ..silent.clone() };
        let row = socket_row(&older, true, &Channels::default(), REACHABLE);
        assert!(row.way == "unknown" && row.why.contains("another version"), "{row:?}");
        let alone = ConnectedSocket { joined: false, ..silent.clone() };
        for (reachability, words) in
            [(Reachability { broker: false }, "no broker answers"), (REACHABLE, "has not joined the broker")]
        {
            let why = socket_row(&alone, true, &Channels::default(), reachability).why;
            assert!(why.contains(words), "{why}");
        }
        let refusal =
            refusal(PolicyUser::Host { uid: 33, gid: None }, &["nginx-7".into()], "default: no [[join]] rule");
        for refused in [&alone, &socket(LineState::Counting, Reason::BrokerAbsent)] {
            assert!(refused.lacks_broker());
            let refused = ConnectedSocket { refusal: Some(refusal.clone()), ..refused.clone() };
            let why = socket_row(&refused, true, &Channels::default(), REACHABLE).why;
            assert!(why.contains("does not let user 33 join as nginx-7 (default: no [[join]] rule)"), "{why}");
        }
        let counting = socket(LineState::Counting, Reason::TooShort);
        assert!(!counting.lacks_broker() && counting.may_lack_session());
        assert!(!socket(LineState::Up, Reason::None).may_lack_session(), "it has a ring, so it has a session");
        let absent = ConnectedSocket { loaded: false, ..silent };
        assert!(socket_row(&absent, true, &Channels::default(), REACHABLE).why.contains("partywall doctor"));
    }

    #[test]
    fn datagrams_and_connections_are_distinguished() {
        let flow = |service: &str, kind| ChannelRow {
            channel: 3,
            from: 1,
            to: 2,
            kind,
            directions: partywall::Directions::BOTH,
            accepted: true,
            since_s: 0,
            from_name: "resolver".into(),
            to_name: "named".into(),
            service: service.into(),
        };
        let row = channel_row(&flow("udp-53", Kind::Socket), &Channels::default());
        assert_eq!((row.kind.as_str(), row.peer.as_str(), row.way.as_str()), ("udp", "named:53", "ring"));
        let row = channel_row(&flow("tcp-53", Kind::Socket), &Channels::default());
        assert_eq!((row.kind.as_str(), row.peer.as_str()), ("socket", "named:53"));
        let row = channel_row(&flow("udp-53", Kind::Stream), &Channels::default());
        assert_eq!((row.kind.as_str(), row.peer.as_str()), ("stream", "named:udp-53"));
    }

    #[test]
    fn rings_without_counters_are_noted_as_not_counted() {
        let up = socket_row(&socket(LineState::Up, Reason::None), true, &Channels::default(), REACHABLE);
        let tcp = socket_row(&socket(LineState::Tcp, Reason::RawCalls), true, &Channels::default(), REACHABLE);
        assert!(up.ring_is_uncounted && !tcp.ring_is_uncounted);
        assert!(uncounted(&[up.clone(), tcp.clone(), up]).unwrap().starts_with("bytes and doorbells of 2 ring(s)"));
        assert_eq!(uncounted(&[tcp]), None);
    }

    #[test]
    fn connection_keeps_its_rate_when_it_moves() {
        let global = Global { broker: Some("/nonexistent".into()), domain: None, verbose: 0 };
        let mut gatherer = Gatherer::new(&global);
        let mut first = [socket_row(&socket(LineState::Counting, Reason::None), true, &Channels::default(), REACHABLE)];
        gatherer.rate(&mut first, None);
        let mut moved = first.clone();
        moved[0].channel = Some(9);
        moved[0].sent = Some(DirectionCount::of(100, 1050));
        gatherer.rate(&mut moved, Some(0.5));
        assert_eq!(moved[0].sent.unwrap().ring_rate, Some(2000.0));
        assert_eq!(moved[0].rate(), 2000.0);
    }
}
