//! What a channel looked like at one moment, for people and for programs.

use partywall::{ChannelRow, Directions, Snapshot, StatPage};
use serde::Serialize;

use crate::commands::list::{arrow, in_words, since};
use crate::human;
use crate::table::table;

/// All channels at one moment.
#[derive(Debug, Default, Serialize)]
pub(super) struct Stats {
    pub(super) channels: Vec<ChannelView>,
    /// How many there are besides that are not for us to see.
    pub(super) hidden: usize,
}

/// One channel.
#[derive(Debug, Serialize)]
pub(super) struct ChannelView {
    channel: u64,
    from: String,
    to: String,
    service: String,
    kind: String,
    #[serde(serialize_with = "in_words")]
    directions: Directions,
    since_s: u64,
    /// The connecting side first; the other once it has accepted.
    sides: Vec<SideView>,
}

/// One side of it: what it has written, what it has read.
#[derive(Debug, Serialize)]
struct SideView {
    domain: String,
    connecting: bool,
    initial_ring_size: u64,
    written: Counts,
    read: Counts,
    /// Bytes of its own that the other side has not read yet.
    queued: u64,
    /// Bytes per second that it has written since the last look.
    #[serde(skip_serializing_if = "Option::is_none")]
    write_rate: Option<f64>,
}

#[derive(Debug, Default, Serialize)]
struct Counts {
    bytes: u64,
    calls: u64,
    bells_rung: u64,
    bells_saved: u64,
    sleeps: u64,
    spins: u64,
    stalls: u64,
    switches: u64,
}

impl From<Snapshot> for Counts {
    fn from(s: Snapshot) -> Self {
        Self {
            bytes: s.bytes,
            calls: s.messages,
            bells_rung: s.bells_rung,
            bells_saved: s.bells_saved,
            sleeps: s.sleeps,
            spins: s.spins,
            stalls: s.stalls,
            switches: s.switches,
        }
    }
}

impl ChannelView {
    /// `before`: seconds since the last look, and what each side had written then.
    pub(super) fn of(row: &ChannelRow, pages: &[StatPage], before: Option<(f64, &[u64])>) -> Self {
        let cursors: Vec<(u64, u64)> = pages.iter().map(StatPage::cursors).collect();
        let sides = pages.iter().enumerate().map(|(n, page)| {
            let written = Counts::from(page.written());
            let other_head = cursors.get(1 - n.min(1)).map_or(0, |&(_, head)| head);
            let write_rate = before.and_then(|(seconds, bytes)| {
                let gone = written.bytes.saturating_sub(*bytes.get(n)?);
                (seconds > 0.0).then(|| gone as f64 / seconds)
            });
            SideView {
                domain: if page.is_connecting() { row.from_name.clone() } else { row.to_name.clone() },
                connecting: page.is_connecting(),
                initial_ring_size: page.initial_ring_size(),
                // The two cursors are not read in the same instant: the reader may be seen ahead.
                queued: cursors[n].0.saturating_sub(other_head),
                read: page.read().into(),
                written,
                write_rate,
            }
        });
        Self {
            channel: row.channel,
            from: row.from_name.clone(),
            to: row.to_name.clone(),
            service: row.service.clone(),
            kind: row.kind.to_string(),
            directions: row.directions,
            since_s: row.since_s,
            sides: sides.collect(),
        }
    }

    /// What each side has written.
    pub(super) fn bytes_written(&self) -> Vec<u64> {
        self.sides.iter().map(|side| side.written.bytes).collect()
    }

    fn title(&self) -> String {
        let waiting = if self.sides.len() < 2 { ", not accepted yet" } else { "" };
        format!(
            "channel {}: {} {} {}:{} ({}), for {}{waiting}",
            self.channel,
            self.from,
            arrow(self.directions),
            self.to,
            self.service,
            self.kind,
            since(self.since_s)
        )
    }

    fn rows(&self) -> String {
        let headings = [
            "",
            ">BYTES",
            ">RATE",
            ">CALLS",
            ">BELLS",
            ">SAVED",
            ">SLEEPS",
            ">SPINS",
            ">STALLS",
            ">QUEUED",
            ">RING",
            ">SWITCHES",
        ];
        let mut rows = table(&headings);
        for side in &self.sides {
            let writes = if side.connecting { Directions::FORWARD } else { Directions::REVERSE };
            let reads = if side.connecting { Directions::REVERSE } else { Directions::FORWARD };
            if self.directions.contains(writes) {
                let rate = side.write_rate.map_or_else(String::new, |rate| human::rate(rate as u64, 1.0));
                let ring = human::bytes(side.initial_ring_size);
                rows.add_row(half(&side.domain, "writes", &side.written, rate, human::bytes(side.queued), ring));
            }
            if self.directions.contains(reads) {
                rows.add_row(half(&side.domain, "reads", &side.read, String::new(), String::new(), String::new()));
            }
        }
        rows.to_string()
    }
}

fn half(domain: &str, does: &str, counts: &Counts, rate: String, queued: String, ring: String) -> Vec<String> {
    let number = |n: u64| n.to_string();
    vec![
        format!("{domain} {does}"),
        human::bytes(counts.bytes),
        rate,
        number(counts.calls),
        number(counts.bells_rung),
        number(counts.bells_saved),
        number(counts.sleeps),
        number(counts.spins),
        number(counts.stalls),
        queued,
        ring,
        number(counts.switches),
    ]
}

impl Stats {
    pub(super) fn to_text(&self) -> String {
        let mut parts: Vec<String> = self.channels.iter().map(|c| format!("{}\n{}", c.title(), c.rows())).collect();
        if parts.is_empty() && self.hidden == 0 {
            parts.push("no channel is open".into());
        }
        if self.hidden > 0 {
            parts.push(format!("{} channel(s) of other users are not shown", self.hidden));
        }
        parts.join("\n\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(connecting: bool) -> SideView {
        SideView {
            domain: if connecting { "shop" } else { "web" }.into(),
            connecting,
            initial_ring_size: 16384,
            written: Counts { bytes: 4096, calls: 3, ..Counts::default() },
            read: Counts::default(),
            queued: 1024,
            write_rate: Some(2e9),
        }
    }

    fn view(directions: Directions) -> ChannelView {
        ChannelView {
            channel: 7,
            from: "shop".into(),
            to: "web".into(),
            service: "echo".into(),
            kind: "stream".into(),
            directions,
            since_s: 0,
            sides: vec![side(true), side(false)],
        }
    }

    #[test]
    fn a_one_way_channel_shows_only_the_halves_it_has() {
        let text = Stats { channels: vec![view(Directions::FORWARD)], hidden: 0 }.to_text();
        assert!(text.contains("shop writes") && text.contains("web reads"), "{text}");
        assert!(!text.contains("web writes") && !text.contains("shop reads"), "{text}");
        assert!(text.contains("4.00 KiB") && text.contains("2.00 GB/s") && text.contains("1.00 KiB"), "{text}");
    }

    #[test]
    fn what_cannot_be_seen_is_said() {
        assert_eq!(Stats::default().to_text(), "no channel is open");
        assert!(Stats { channels: vec![], hidden: 2 }.to_text().contains("2 channel(s)"));
    }
}
