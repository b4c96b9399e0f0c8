//! One line of what is shown, and all of them at one moment.

use serde::Serialize;

use crate::human;

/// Everything at one moment.
#[derive(Debug, Default, Serialize)]
pub(super) struct Look {
    pub(super) connections: Vec<Row>,
    /// How many connections the filter leaves out.
    #[serde(skip)]
    pub(super) left_out: usize,
    /// Why less is shown than there may be; empty if nothing is missing.
    pub(super) notes: Vec<String>,
}

/// One end of a connection, or a channel.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Row {
    /// `socket`, or the kind of a channel.
    pub(super) kind: String,
    pub(super) program: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fd: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) local: Option<String>,
    pub(super) peer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) channel: Option<u64>,
    /// Where the bytes go: `ring`, `tcp`, or the two with a slash, sent first.
    pub(super) way: String,
    /// Why it is not on the ring; empty if it is.
    pub(super) why: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sent: Option<Flow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) received: Option<Flow>,
    pub(super) switches: u64,
    pub(super) bells_rung: u64,
    pub(super) bells_saved: u64,
}

/// Bytes in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Flow {
    pub(super) tcp: u64,
    pub(super) ring: u64,
    /// Bytes per second since the last look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tcp_rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ring_rate: Option<f64>,
}

impl Flow {
    pub(super) fn of(tcp: u64, ring: u64) -> Self {
        Self { tcp, ring, tcp_rate: None, ring_rate: None }
    }

    pub(super) fn total(self) -> u64 {
        self.tcp.saturating_add(self.ring)
    }

    /// Both ways together; `None` at the first look.
    pub(super) fn rate(self) -> Option<f64> {
        Some(self.tcp_rate? + self.ring_rate?)
    }

    /// Fills in the rates, given what it was `seconds` ago. A count that went back belongs to another connection.
    pub(super) fn since(&mut self, before: Self, seconds: f64) {
        if seconds > 0.0 && before.tcp <= self.tcp && before.ring <= self.ring {
            self.tcp_rate = Some((self.tcp - before.tcp) as f64 / seconds);
            self.ring_rate = Some((self.ring - before.ring) as f64 / seconds);
        }
    }
}

/// What the columns are called; those that begin with `>` are aligned right.
pub(super) const HEADINGS: [&str; 14] = [
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
pub(super) const WIDE: u16 = 150;

/// The columns of a narrow terminal.
pub(super) const SHORT: [&str; 6] = ["PROGRAM", ">PID", "PEER", "WAY", ">TRAFFIC", "WHY"];

impl Row {
    /// Its cells, in the order of [`SHORT`]. Traffic is the rate in both directions, or, before there is one, the bytes so far.
    pub(super) fn short_cells(&self) -> [String; 6] {
        let flows = || [self.sent, self.received].into_iter().flatten();
        let traffic = if flows().any(|flow| flow.rate().is_some()) {
            human::rate(self.rate() as u64, 1.0)
        } else {
            human::bytes(flows().map(Flow::total).fold(0, u64::saturating_add))
        };
        let [program, pid, peer, way, .., why] = self.cells();
        [program, pid, peer, way, traffic, why]
    }

    /// What tells it from others, from one look to the next.
    pub(super) fn key(&self) -> (Option<u32>, Option<u64>, &str, Option<&str>, &str) {
        // A socket keeps its addresses while its channel comes and goes.
        let channel = if self.local.is_none() { self.channel } else { None };
        (self.pid, channel, &self.program, self.local.as_deref(), &self.peer)
    }

    /// Bytes per second in both directions.
    pub(super) fn rate(&self) -> f64 {
        [self.sent, self.received].into_iter().flatten().filter_map(Flow::rate).sum()
    }

    /// Its cells, in the order of [`HEADINGS`].
    pub(super) fn cells(&self) -> [String; 14] {
        let number = |n: Option<u32>| n.map_or_else(String::new, |n| n.to_string());
        let bytes = |flow: Option<Flow>| flow.map_or_else(|| "-".into(), |flow| human::bytes(flow.total()));
        let rate =
            |flow: Option<Flow>| flow.and_then(Flow::rate).map_or_else(String::new, |r| human::rate(r as u64, 1.0));
        let flows = || [self.sent, self.received].into_iter().flatten();
        let (ring, total) = flows().fold((0u64, 0u64), |(ring, total), flow| {
            (ring.saturating_add(flow.ring), total.saturating_add(flow.total()))
        });
        let share = match total {
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
            self.why.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_by_time() {
        let mut flow = Flow::of(1000, 5000);
        flow.since(Flow::of(500, 1000), 2.0);
        assert_eq!((flow.tcp_rate, flow.ring_rate, flow.rate()), (Some(250.0), Some(2000.0), Some(2250.0)));
        let mut other = Flow::of(10, 0);
        other.since(Flow::of(500, 0), 1.0);
        assert_eq!(other.rate(), None, "another connection at the same place");
        let mut instant = Flow::of(10, 0);
        instant.since(Flow::of(0, 0), 0.0);
        assert_eq!(instant.rate(), None);
    }

    #[test]
    fn the_share_of_the_ring_is_of_both_directions_and_never_rounded_up() {
        let row = Row { sent: Some(Flow::of(1, 999_999)), received: Some(Flow::of(0, 1)), ..Row::default() };
        assert_eq!(row.cells()[8], "99%");
        assert_eq!(Row::default().cells()[8], "");
        assert_eq!(Row { sent: Some(Flow::of(0, u64::MAX)), ..Row::default() }.cells()[8], "100%");
    }
}
