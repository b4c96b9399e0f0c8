//! The report on each end, for people and for programs.

use std::fmt::Write as _;

use serde::Serialize;

use crate::connections::{Cause, ConnectionRow, DirectionCount, Look};
use crate::human;

/// The answer for every end that was found.
#[derive(Debug, Serialize)]
pub(super) struct WhyAnswer<'a> {
    connections: Vec<WhyEnd<'a>>,
    notes: &'a [String],
}

/// One end.
#[derive(Debug, Serialize)]
struct WhyEnd<'a> {
    #[serde(flatten)]
    row: &'a ConnectionRow,
    /// The required change; absent if it is on the ring.
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<&'static str>,
}

impl<'a> WhyAnswer<'a> {
    pub(super) fn of(look: &'a Look) -> Self {
        let end = |row: &'a ConnectionRow| WhyEnd { row, change: row.reason.map(Cause::remedy) };
        Self { connections: look.connections.iter().map(end).collect(), notes: &look.notes }
    }

    pub(super) fn to_text(&self) -> String {
        let mut parts: Vec<String> = self.connections.iter().map(WhyEnd::to_text).collect();
        if !self.notes.is_empty() {
            parts.push(self.notes.join("\n"));
        }
        parts.join("\n\n")
    }
}

impl WhyEnd<'_> {
    fn to_text(&self) -> String {
        let row = self.row;
        let mut text = row.program.clone();
        if let Some(pid) = row.pid {
            let _ = write!(text, " (process {pid}");
            if let Some(fd) = row.fd {
                let _ = write!(text, ", descriptor {fd}");
            }
            text.push(')');
        }
        let arrow = row
            .local
            .as_ref()
            .map_or_else(|| format!(" -> {}", row.peer), |local| format!("  {local} -> {}", row.peer));
        text.push_str(&arrow);
        if let Some(channel) = row.channel {
            let _ = write!(text, "  channel {channel}");
        }
        let (sends, receives) = row.way.split_once('/').unwrap_or((&row.way, &row.way));
        let mut line = |name: &str, value: &str| {
            let _ = write!(text, "\n  {name:<10} {value}");
        };
        let is_uncounted = row.ring_is_uncounted;
        line("sends", &direction(sends, row.sent, is_uncounted));
        line("receives", &direction(receives, row.received, is_uncounted));
        if let (Some(cause), Some(change)) = (row.reason, self.change) {
            line("reason", &format!("{}: {}", cause.code(), row.why));
            line("change", change);
        }
        if row.switches + row.bells_rung + row.bells_saved > 0 {
            let (switches, rung, saved) = (row.switches, row.bells_rung, row.bells_saved);
            line(
                "counts",
                &format!("{switches} switches of the sending transport, {rung} doorbells rung, {saved} saved"),
            );
        }
        for (at, one) in row.moves.iter().enumerate() {
            line(if at == 0 { "moves" } else { "" }, &format!("{}  {}", one.at, one.words()));
        }
        text
    }
}

fn direction(way: &str, flow: Option<DirectionCount>, is_uncounted: bool) -> String {
    let way = if way == "ring" { "by the ring" } else { "by TCP" };
    match flow {
        Some(flow) if is_uncounted => {
            format!("{way}; so far {} by TCP, bytes by the present ring are not counted", human::bytes(flow.tcp))
        }
        Some(flow) => {
            format!("{way}; so far {} by the ring, {} by TCP", human::bytes(flow.ring), human::bytes(flow.tcp))
        }
        None => way.into(),
    }
}

#[cfg(test)]
mod tests {
    use partywall_shm::status::Reason;

    use super::*;

    #[test]
    fn each_direction_reason_and_change_are_shown() {
        let cause = Cause::Library(Reason::TooShort);
        let row = ConnectionRow {
            program: "redis".into(),
            pid: Some(4),
            fd: Some(7),
            local: Some("127.0.0.1:1".into()),
            peer: "127.0.0.1:2".into(),
            way: "ring/tcp".into(),
            reason: Some(cause),
            why: cause.words().into(),
            sent: Some(DirectionCount::of(5, 2048)),
            switches: 3,
            ..ConnectionRow::default()
        };
        let look = Look { connections: vec![row], left_out: 0, notes: vec!["no broker".into()] };
        let text = WhyAnswer::of(&look).to_text();
        let expected = "redis (process 4, descriptor 7)  127.0.0.1:1 -> 127.0.0.1:2\n  sends      by the ring; so far 2.00 KiB by the ring, 5 B by TCP\n";
        assert!(text.starts_with(expected), "{text}");
        for words in [
            "  receives   by TCP\n",
            "too-short: it has not",
            "  change     nothing: it moves",
            "3 switches",
            "\n\nno broker",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let unseen = ConnectionRow { ring_is_uncounted: true, ..look.connections[0].clone() };
        let text = WhyAnswer::of(&Look { connections: vec![unseen], ..Look::default() }).to_text();
        assert!(text.contains("by the ring; so far 5 B by TCP, bytes by the present ring are not counted"), "{text}");
        let json = serde_json::to_value(WhyAnswer::of(&look)).unwrap();
        assert_eq!(json["connections"][0]["reason"], "too-short");
        assert_eq!(json["connections"][0]["change"], cause.remedy());
    }
}
