//! One end of a connection, or a channel, as it is shown.

use serde::Serialize;

use super::cause::Cause;
use super::history::ConnectionMove;
use crate::human;

/// One end of a connection, or a channel.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct ConnectionRow {
    /// `socket`, or the kind of a channel.
    pub(crate) kind: String,
    pub(crate) program: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fd: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) local: Option<String>,
    pub(crate) peer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) channel: Option<u64>,
    /// Where the bytes go: `ring`, `tcp`, or the two with a slash, sent first.
    pub(crate) way: String,
    /// The stable code of why it is not on the ring; absent if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<Cause>,
    /// The cause as a sentence; empty if the connection is on the ring.
    pub(crate) why: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sent: Option<DirectionCount>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) received: Option<DirectionCount>,
    /// The memory of its present ring cannot be seen, so the counts leave out what that ring has carried.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) ring_is_uncounted: bool,
    pub(crate) switches: u64,
    pub(crate) bells_rung: u64,
    pub(crate) bells_saved: u64,
    /// The last moves of its directions between TCP and the ring, the oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) moves: Vec<ConnectionMove>,
}

/// Bytes in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct DirectionCount {
    pub(crate) tcp: u64,
    pub(crate) ring: u64,
    /// Bytes per second since the last look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tcp_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ring_rate: Option<f64>,
}

impl DirectionCount {
    pub(crate) fn of(tcp: u64, ring: u64) -> Self {
        Self { tcp, ring, tcp_rate: None, ring_rate: None }
    }

    pub(crate) fn total(self) -> u64 {
        self.tcp.saturating_add(self.ring)
    }

    /// Both ways together; `None` at the first look.
    pub(crate) fn rate(self) -> Option<f64> {
        Some(self.tcp_rate? + self.ring_rate?)
    }

    /// Fills in the rates, given what it was `seconds` ago. A count that went back belongs to another connection.
    pub(crate) fn since(&mut self, before: Self, seconds: f64) {
        if seconds > 0.0 && before.tcp <= self.tcp && before.ring <= self.ring {
            self.tcp_rate = Some((self.tcp - before.tcp) as f64 / seconds);
            self.ring_rate = Some((self.ring - before.ring) as f64 / seconds);
        }
    }
}

/// The headings of the columns. A heading that begins with `>` is aligned right.
pub(crate) const HEADINGS: [&str; 14] = [
    "PROGRAM",
    ">PID",
    "PEER",
    "WAY",
    ">SENT",
    ">RATE",
    ">RECEIVED",
    ">RATE",
    ">RING",
    ">SWITCHES",
    ">RUNG",
    ">SAVED",
    "KIND",
    "WHY",
];

/// Columns of a terminal from which on all of [`HEADINGS`] are shown.
pub(crate) const WIDE: u16 = 150;

/// The columns of a narrow terminal.
pub(crate) const SHORT: [&str; 6] = ["PROGRAM", ">PID", "PEER", "WAY", ">TRAFFIC", "WHY"];

impl ConnectionRow {
    /// Sets the cause why it is not on the ring, if there is one.
    pub(super) fn because(&mut self, cause: Option<Cause>) {
        self.reason = cause;
        self.why = cause.map_or("", Cause::words).into();
    }

    /// Records that the policy refuses the program's user, and by which rule, if it does.
    pub(super) fn is_refused(&mut self, refusal: Option<&str>) {
        if let Some(refusal) = refusal {
            self.reason = Some(Cause::JoinRefused);
            self.why = refusal.into();
        }
    }

    /// The reason as it is shown: code and sentence.
    pub(crate) fn reason_text(&self) -> String {
        self.reason.map_or_else(String::new, |cause| format!("{}: {}", cause.code(), self.why))
    }

    /// Its cells, in the order of [`SHORT`]. Traffic is the rate in both directions, or, before there is one, the bytes so far.
    pub(crate) fn short_cells(&self) -> [String; 6] {
        let flows = || [self.sent, self.received].into_iter().flatten();
        let traffic = if flows().any(|flow| flow.rate().is_some()) {
            human::rate(self.rate() as u64, 1.0)
        } else {
            human::bytes(flows().map(DirectionCount::total).fold(0, u64::saturating_add))
        };
        let [program, pid, peer, way, .., why] = self.cells();
        [program, pid, peer, way, traffic, why]
    }

    /// The identity of a row, from one look to the next.
    pub(crate) fn key(&self) -> (Option<u32>, Option<u64>, &str, Option<&str>, &str) {
        // A socket keeps its addresses while its channel comes and goes.
        let channel = if self.local.is_none() { self.channel } else { None };
        (self.pid, channel, &self.program, self.local.as_deref(), &self.peer)
    }

    /// The known counts of its directions.
    pub(crate) fn flows(&self) -> impl Iterator<Item = DirectionCount> + use<> {
        [self.sent, self.received].into_iter().flatten()
    }

    /// Bytes per second in both directions.
    pub(crate) fn rate(&self) -> f64 {
        [self.sent, self.received].into_iter().flatten().filter_map(DirectionCount::rate).sum()
    }

    /// Its cells, in the order of [`HEADINGS`].
    pub(crate) fn cells(&self) -> [String; 14] {
        let number = |n: Option<u32>| n.map_or_else(String::new, |n| n.to_string());
        let bytes = |flow: Option<DirectionCount>| flow.map_or_else(|| "-".into(), |flow| human::bytes(flow.total()));
        let rate = |flow: Option<DirectionCount>| {
            flow.and_then(DirectionCount::rate).map_or_else(String::new, |r| human::rate(r as u64, 1.0))
        };
        let flows = || [self.sent, self.received].into_iter().flatten();
        let (ring, total) = flows().fold((0u64, 0u64), |(ring, total), flow| {
            (ring.saturating_add(flow.ring), total.saturating_add(flow.total()))
        });
        let share = match total {
            _ if self.ring_is_uncounted => "?".into(),
            0 => String::new(),
            // Rounded down: 100% says that nothing went by TCP.
            _ => format!("{}%", u128::from(ring) * 100 / u128::from(total)),
        };
        [
            self.program.clone(),
            number(self.pid),
            self.peer.clone(),
            self.way.clone(),
            bytes(self.sent),
            rate(self.sent),
            bytes(self.received),
            rate(self.received),
            share,
            self.switches.to_string(),
            self.bells_rung.to_string(),
            self.bells_saved.to_string(),
            self.kind.clone(),
            self.reason_text(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_by_time() {
        let mut flow = DirectionCount::of(1000, 5000);
        flow.since(DirectionCount::of(500, 1000), 2.0);
        assert_eq!((flow.tcp_rate, flow.ring_rate, flow.rate()), (Some(250.0), Some(2000.0), Some(2250.0)));
        let mut other = DirectionCount::of(10, 0);
        other.since(DirectionCount::of(500, 0), 1.0);
        assert_eq!(other.rate(), None, "another connection at the same place");
        let mut instant = DirectionCount::of(10, 0);
        instant.since(DirectionCount::of(0, 0), 0.0);
        assert_eq!(instant.rate(), None);
    }

    #[test]
    fn ring_share_counts_both_directions_and_rounds_down() {
        let row = ConnectionRow {
            sent: Some(DirectionCount::of(1, 999_999)),
            received: Some(DirectionCount::of(0, 1)),
            ..ConnectionRow::default()
        };
        assert_eq!(row.cells()[8], "99%");
        assert_eq!(ConnectionRow::default().cells()[8], "");
        assert_eq!(ConnectionRow { ring_is_uncounted: true, ..row }.cells()[8], "?");
        assert_eq!(
            ConnectionRow { sent: Some(DirectionCount::of(0, u64::MAX)), ..ConnectionRow::default() }.cells()[8],
            "100%"
        );
    }
}
