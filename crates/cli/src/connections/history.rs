//! The last moves of connections between TCP and the ring, as the library in each program has noted them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use partywall_shm::status::{LineSnapshot, MOVES, PathMove};
use serde::Serialize;

use super::Scope;
use super::cause::Cause;
use super::processes::{self, ConnectedSocket};

/// One direction of a connection has moved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ConnectionMove {
    /// When, in UTC.
    pub(crate) at: String,
    /// `sends` or `receives`.
    pub(crate) direction: &'static str,
    /// `ring` or `tcp`.
    pub(crate) way: &'static str,
    /// The stable code of why it is not on the ring; absent if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<Cause>,
    #[serde(skip)]
    at_ms: u64,
}

impl ConnectionMove {
    fn of(direction: &'static str, seen: PathMove) -> Self {
        Self {
            at: time(seen.at_ms),
            direction,
            way: if seen.to_ring { "ring" } else { "tcp" },
            reason: (!seen.to_ring).then(|| Cause::library_or(seen.reason, Cause::Unknown)),
            at_ms: seen.at_ms,
        }
    }

    /// As a sentence.
    pub(crate) fn words(&self) -> String {
        let way = if self.way == "ring" { "by the ring" } else { "by TCP" };
        let cause = self.reason.map_or_else(String::new, |cause| format!(" ({}: {})", cause.code(), cause.words()));
        format!("{} {way}{cause}", self.direction)
    }
}

/// A time that a program has recorded. An impossible time is shown as the last possible one.
fn time(at_ms: u64) -> String {
    const LAST: u64 = 253_402_300_799_999;
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(at_ms.min(LAST))).to_string()
}

/// The moves of both directions, the oldest first.
pub(super) fn moves_of(seen: &LineSnapshot) -> Vec<ConnectionMove> {
    let sends = seen.tx.moves().map(|one| ConnectionMove::of("sends", one));
    let receives = seen.rx.moves().map(|one| ConnectionMove::of("receives", one));
    let mut all: Vec<ConnectionMove> = sends.chain(receives).collect();
    all.sort_by_key(|one| one.at_ms);
    all
}

/// A move, and whose connection it was.
#[derive(Debug, Clone)]
pub(crate) struct ObservedMove {
    pub(crate) program: String,
    pub(crate) pid: u32,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) channel: u64,
    pub(crate) moved: ConnectionMove,
}

type MoveKey = (u32, u32, SocketAddr, SocketAddr);

/// Looks again and again for moves that have happened since.
#[derive(Debug)]
pub(crate) struct MoveWatch {
    /// Moves of each direction that are known.
    known: HashMap<MoveKey, [u64; 2]>,
    since_ms: u64,
}

impl MoveWatch {
    /// Knows of everything that has happened before.
    pub(crate) fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut this = Self { known: HashMap::new(), since_ms: u64::try_from(now.as_millis()).unwrap_or(0) };
        this.look();
        this
    }

    /// The moves since the last look, the oldest first, and how many are known by number only.
    pub(crate) fn look(&mut self) -> (Vec<ObservedMove>, u64) {
        self.compare(&processes::sockets(Scope::Preloaded).0)
    }

    fn compare(&mut self, sockets: &[ConnectedSocket]) -> (Vec<ObservedMove>, u64) {
        let (mut observed, mut lost) = (Vec::new(), 0);
        let mut now = HashMap::new();
        for socket in sockets {
            let Some(seen) = &socket.seen else { continue };
            let key = (socket.pid, seen.index, socket.local, socket.remote);
            let counts = [seen.tx.moved, seen.rx.moved];
            let before = self.known.get(&key).copied();
            for (at, (direction, half)) in [("sends", &seen.tx), ("receives", &seen.rx)].into_iter().enumerate() {
                // A count that went back is of another connection with the same addresses.
                let from = before.map(|before| before[at]).filter(|from| *from <= half.moved);
                if let Some(from) = from {
                    lost += half.moved.saturating_sub(from).saturating_sub(MOVES as u64);
                }
                let is_new = |one: &PathMove| from.map_or(one.at_ms >= self.since_ms, |from| one.number >= from);
                observed.extend(half.moves().filter(is_new).map(|one| ObservedMove {
                    program: socket.program.clone(),
                    pid: socket.pid,
                    local: socket.local,
                    remote: socket.remote,
                    channel: seen.identity.channel,
                    moved: ConnectionMove::of(direction, one),
                }));
            }
            now.insert(key, counts);
        }
        self.known = now;
        observed.sort_by_key(|one| one.moved.at_ms);
        (observed, lost)
    }
}

#[cfg(test)]
mod tests {
    use partywall_shm::status::{LINE, LineIdentity, LineState, Reason, Role, StatusLine, read_all};

    use super::*;

    /// The reader's view of a line that a program writes.
    fn seen(write: impl Fn(&StatusLine)) -> LineSnapshot {
        let line = StatusLine::default();
        let address = "10.0.0.1:1".parse().unwrap();
        let (state, reason, role) = (LineState::Up, Reason::None, Role::Connecting);
        line.begin(&LineIdentity { state, reason, role, pid: 7, fd: 3, local: address, remote: address, channel: 9 });
        write(&line);
        let copy: Vec<u8> = [0; LINE].into_iter().chain(line.words().flat_map(u64::to_le_bytes)).collect();
        read_all(&copy, &copy)[0]
    }

    fn socket(seen: LineSnapshot) -> ConnectedSocket {
        let (local, remote) = (seen.identity.local, seen.identity.remote);
        let (program, loaded, joined) = ("redis".into(), true, true);
        ConnectedSocket {
            program,
            pid: 7,
            fd: 3,
            local,
            remote,
            seen: Some(seen),
            loaded,
            unreadable: false,
            joined,
            refusal: None,
        }
    }

    #[test]
    fn moves_are_shown_in_order_with_direction_and_reason() {
        let seen = seen(|line| {
            line.tx.note_move(true, Reason::None, 1000);
            line.tx.note_move(false, Reason::Told, 3000);
            line.rx.note_move(true, Reason::None, 2000);
        });
        let words: Vec<String> = moves_of(&seen).iter().map(ConnectionMove::words).collect();
        assert_eq!(words[..2], ["sends by the ring", "receives by the ring"]);
        assert!(words[2].starts_with("sends by TCP (told: "), "{words:?}");
        assert_eq!(moves_of(&seen)[2].at, "1970-01-01T00:00:03.000Z");
        assert!(time(u64::MAX).starts_with("9999-"), "a program may say anything");
    }

    #[test]
    fn watch_reports_each_move_once_and_counts_those_that_it_missed() {
        let mut watch = MoveWatch { known: HashMap::new(), since_ms: 5000 };
        let with = |moves: u64| {
            socket(seen(|line| (0..moves).for_each(|n| line.tx.note_move(n % 2 == 0, Reason::Told, 4000 + 600 * n))))
        };
        let (observed, lost) = watch.compare(&[with(3)]);
        assert_eq!((observed.len(), lost), (1, 0), "of a new connection, those since the beginning");
        assert!(watch.compare(&[with(3)]).0.is_empty());
        assert_eq!(watch.compare(&[with(5)]).0.len(), 2);
        let (observed, lost) = watch.compare(&[with(5 + MOVES as u64 + 4)]);
        assert_eq!((observed.len(), lost), (MOVES, 4));
        assert_eq!((observed[0].pid, observed[0].channel), (7, 9));
    }
}
