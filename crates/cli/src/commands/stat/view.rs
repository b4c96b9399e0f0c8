//! The state of a channel at one moment, for people and for programs.

use partywall::{ChannelRow, Directions, Snapshot, SocketPaths, StatPage};
use partywall_terminal::table;
use serde::Serialize;

use crate::commands::list::{ChannelLine, arrow, since};
use crate::connections::Cause;
use crate::human;

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
    #[serde(flatten)]
    listed: ChannelLine,
    /// The connecting side first; the other once it has accepted.
    sides: Vec<SideView>,
}

/// One side of it: what it has written, what it has read.
#[derive(Debug, Serialize)]
struct SideView {
    domain: String,
    connecting: bool,
    ring_size: u64,
    written: Counts,
    read: Counts,
    /// Bytes that this side has written and the other has not read yet.
    queued: u64,
    /// Bytes per second that it has written since the last look.
    #[serde(skip_serializing_if = "Option::is_none")]
    write_rate: Option<f64>,
    /// The route of the bytes, if this is a side of a socket connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    ways: Option<RingDirections>,
}

/// A connection of an unmodified program is on the ring or on TCP, each direction by itself.
#[derive(Debug, Serialize)]
struct RingDirections {
    sends: &'static str,
    receives: &'static str,
    /// How often the way of what it sends has changed.
    changes: u32,
    wants_tcp: bool,
    /// Why not both directions use the ring.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Cause>,
}

impl From<SocketPaths> for RingDirections {
    fn from(paths: SocketPaths) -> Self {
        let words = |on_ring: bool| if on_ring { "ring" } else { "tcp" };
        Self {
            sends: words(paths.sends_on_ring),
            receives: words(paths.receives_on_ring),
            changes: paths.switches,
            wants_tcp: paths.wants_tcp,
            reason: Cause::from_paths(paths),
        }
    }
}

impl RingDirections {
    /// `sends on the ring since change 3, receives on TCP`.
    fn to_text(&self) -> String {
        let on = |way: &str| if way == "ring" { "on the ring" } else { "on TCP" };
        let since = match self.changes {
            0 => String::new(),
            n => format!(" since change {n}"),
        };
        let wish = if self.wants_tcp { ", asks for TCP" } else { "" };
        let reason = self.reason.map_or_else(String::new, |cause| format!(" ({})", cause.code()));
        format!("sends {}{since}, receives {}{wish}{reason}", on(self.sends), on(self.receives))
    }
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
            // Where the other side cannot be seen, its read position is unknown.
            let unseen = if row.accepted { cursors[n].0 } else { 0 };
            let other_head = cursors.get(1 - n.min(1)).map_or(unseen, |&(_, head)| head);
            let write_rate = before.and_then(|(seconds, bytes)| {
                let gone = written.bytes.saturating_sub(*bytes.get(n)?);
                (seconds > 0.0).then(|| gone as f64 / seconds)
            });
            SideView {
                domain: if page.is_connecting() { row.from_name.clone() } else { row.to_name.clone() },
                connecting: page.is_connecting(),
                ring_size: page.ring_size(),
                // The two cursors are not read in the same instant: the reader may be seen ahead.
                queued: cursors[n].0.saturating_sub(other_head),
                read: page.read().into(),
                written,
                write_rate,
                ways: page.paths().map(RingDirections::from),
            }
        });
        Self { sides: sides.collect(), listed: row.clone().into() }
    }

    /// The bytes that each side has written.
    pub(super) fn bytes_written(&self) -> Vec<u64> {
        self.sides.iter().map(|side| side.written.bytes).collect()
    }

    fn title(&self) -> String {
        let ChannelLine { channel, from, to, service, kind, directions, accepted, since_s } = &self.listed;
        let (arrow, since) = (arrow(*directions), since(*since_s));
        let sees = |connecting| self.sides.iter().any(|side| side.connecting == connecting);
        let remark = match (accepted, sees(true), sees(false)) {
            (false, ..) => ", not accepted yet".to_owned(),
            (true, true, true) => String::new(),
            // In a virtual machine, or another user's.
            (true, false, false) => ", whose counters cannot be seen from here".to_owned(),
            (true, true, false) => format!(", where the counters of {to} cannot be seen from here"),
            (true, false, true) => format!(", where the counters of {from} cannot be seen from here"),
        };
        format!("channel {channel}: {from} {arrow} {to}:{service} ({kind}), for {since}{remark}")
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
            if self.listed.directions.contains(writes) {
                let rate = side.write_rate.map_or_else(String::new, |rate| human::rate(rate as u64, 1.0));
                let ring = human::bytes(side.ring_size);
                rows.add_row(half(&side.domain, "writes", &side.written, rate, human::bytes(side.queued), ring));
            }
            if self.listed.directions.contains(reads) {
                rows.add_row(half(&side.domain, "reads", &side.read, String::new(), String::new(), String::new()));
            }
        }
        let ways =
            self.sides.iter().filter_map(|side| Some(format!("\n{} {}", side.domain, side.ways.as_ref()?.to_text())));
        ways.fold(rows.to_string(), |text, line| text + &line)
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
            ring_size: 16384,
            written: Counts { bytes: 4096, calls: 3, ..Counts::default() },
            read: Counts::default(),
            queued: 1024,
            write_rate: Some(2e9),
            ways: None,
        }
    }

    fn view(directions: Directions) -> ChannelView {
        let listed = ChannelLine {
            channel: 7,
            from: "shop".into(),
            to: "web".into(),
            service: "echo".into(),
            kind: "stream".into(),
            directions,
            accepted: true,
            since_s: 0,
        };
        ChannelView { listed, sides: vec![side(true), side(false)] }
    }

    #[test]
    fn one_way_channel_shows_only_existing_halves() {
        let text = Stats { channels: vec![view(Directions::FORWARD)], hidden: 0 }.to_text();
        assert!(text.contains("shop writes") && text.contains("web reads"), "{text}");
        assert!(!text.contains("web writes") && !text.contains("shop reads"), "{text}");
        assert!(text.contains("4.00 KiB") && text.contains("2.00 GB/s") && text.contains("1.00 KiB"), "{text}");
    }

    #[test]
    fn socket_row_shows_bytes_by_transport() {
        let mut socket = view(Directions::BOTH);
        assert!(!socket.rows().contains("on the ring"), "a channel is always on its ring, and does not say so");
        let paths = SocketPaths { sends_on_ring: true, receives_on_ring: false, switches: 3, wants_tcp: true };
        socket.sides[0].ways = Some(paths.into());
        let text = socket.rows();
        assert!(text.contains("shop sends on the ring since change 3, receives on TCP, asks for TCP"), "{text}");
    }

    #[test]
    fn channel_with_unseen_side_is_not_called_unaccepted() {
        let title = |accepted, sides: &[bool]| {
            let mut view = view(Directions::BOTH);
            view.listed.accepted = accepted;
            view.sides.retain(|side| sides.contains(&side.connecting));
            view.title()
        };
        assert!(title(false, &[true]).ends_with("not accepted yet"));
        assert!(!title(true, &[true, false]).contains("seen"));
        for (sides, words) in [
            (&[][..], "whose counters cannot be seen from here"),
            (&[true], "the counters of web cannot be seen"),
            (&[false], "the counters of shop cannot be seen"),
        ] {
            let title = title(true, sides);
            assert!(title.contains(words) && !title.contains("accepted"), "{title}");
        }
    }

    #[test]
    fn invisible_channels_are_counted() {
        assert_eq!(Stats::default().to_text(), "no channel is open");
        assert!(Stats { channels: vec![], hidden: 2 }.to_text().contains("2 channel(s)"));
    }
}
