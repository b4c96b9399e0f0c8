//! `partywall stat --total`: everything that this user may see, added up.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use serde::Serialize;

use super::devices::{CountedDeviceArgs, DeviceTotals};
use crate::connections::{ConnectionRow, Look};
use crate::exit::{CommandFailure, Context};
use crate::human;

/// The counts over all connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct TotalCounts {
    ring_bytes: u64,
    tcp_bytes: u64,
    switches: u64,
    doorbells_rung: u64,
    doorbells_saved: u64,
}

impl TotalCounts {
    fn of(row: &ConnectionRow) -> Self {
        // Each byte once: of a socket the other end has a row as well, if it can be seen. A channel's row has both directions.
        let is_end = row.local.is_some();
        let flows = [row.sent, row.received.filter(|_| !is_end)];
        let sum = |of: fn(crate::connections::DirectionCount) -> u64| {
            flows.into_iter().flatten().map(of).fold(0, u64::saturating_add)
        };
        Self {
            ring_bytes: sum(|flow| flow.ring),
            tcp_bytes: sum(|flow| flow.tcp),
            switches: row.switches,
            doorbells_rung: row.bells_rung,
            doorbells_saved: row.bells_saved,
        }
    }

    fn combined(self, other: Self, with: fn(u64, u64) -> u64) -> Self {
        Self {
            ring_bytes: with(self.ring_bytes, other.ring_bytes),
            tcp_bytes: with(self.tcp_bytes, other.tcp_bytes),
            switches: with(self.switches, other.switches),
            doorbells_rung: with(self.doorbells_rung, other.doorbells_rung),
            doorbells_saved: with(self.doorbells_saved, other.doorbells_saved),
        }
    }
}

/// The totals at one moment.
#[derive(Debug, Default, Serialize)]
pub(super) struct Totals {
    /// Ends of connections and channels, by kind and way.
    connections: BTreeMap<String, BTreeMap<String, u64>>,
    /// The connections that are not on the ring in both directions, by the code of the reason.
    reasons: BTreeMap<&'static str, u64>,
    /// The bytes that connections have carried since the command began, including the earlier bytes of those that were open at its first
    /// look.
    #[serde(flatten)]
    counts: TotalCounts,
    #[serde(flatten)]
    devices: DeviceTotals,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// Adds up from look to look: counts never fall, though connections end.
#[derive(Debug, Default)]
pub(super) struct Adder {
    counts: TotalCounts,
    before: HashMap<String, TotalCounts>,
}

impl Adder {
    pub(super) fn add(&mut self, look: &Look) -> Totals {
        let mut totals = Totals { notes: look.notes.clone(), ..Totals::default() };
        let mut now = HashMap::new();
        for row in &look.connections {
            *totals.connections.entry(row.kind.clone()).or_default().entry(row.way.clone()).or_default() += 1;
            if let Some(cause) = row.reason {
                *totals.reasons.entry(cause.code()).or_default() += 1;
            }
            let (key, counts) = (format!("{:?}", row.key()), TotalCounts::of(row));
            let before = self.before.get(&key).copied().unwrap_or_default();
            // A count that went back is of another connection with the same addresses.
            let is_same = before.combined(counts, |before, now| u64::from(before > now)) == TotalCounts::default();
            let gained = if is_same { counts.combined(before, u64::saturating_sub) } else { counts };
            self.counts = self.counts.combined(gained, u64::saturating_add);
            now.insert(key, counts);
        }
        self.before = now;
        totals.counts = self.counts;
        totals
    }
}

impl Totals {
    /// Adds what network switches and disks have counted.
    pub(super) fn add_devices(&mut self, devices: &CountedDeviceArgs) {
        self.devices = devices.look(&mut self.notes);
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(text, "{name:<12} {value}");
        };
        for (kind, ways) in &self.connections {
            let ways: Vec<String> = ways.iter().map(|(way, count)| format!("{count} {way}")).collect();
            line(kind, &ways.join(", "));
        }
        if self.connections.is_empty() {
            line("connections", "none");
        }
        let counts = self.counts;
        line(
            "bytes",
            &format!("{} by rings, {} by TCP", human::bytes(counts.ring_bytes), human::bytes(counts.tcp_bytes)),
        );
        line("doorbells", &format!("{} rung, {} saved", counts.doorbells_rung, counts.doorbells_saved));
        line("switches", &counts.switches.to_string());
        for (reason, count) in &self.reasons {
            line("on TCP", &format!("{count} {reason}"));
        }
        for (name, value) in self.devices.lines() {
            line(&name, &value);
        }
        for note in &self.notes {
            let _ = writeln!(text, "{note}");
        }
        text.trim_end().to_owned()
    }

    /// As Prometheus reads it (text format 0.0.4), for the text files of its node exporter. docs/metrics.md has the names.
    fn to_metrics(&self) -> String {
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, values: &[(String, u64)]| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        };
        let connections = self.connections.iter().flat_map(|(kind, ways)| {
            ways.iter().map(move |(way, count)| (format!("{{kind=\"{kind}\",way=\"{way}\"}}"), *count))
        });
        family(
            "partywall_connections",
            "gauge",
            "Ends of connections and channels by kind and way",
            &connections.collect::<Vec<_>>(),
        );
        let reasons = self.reasons.iter().map(|(reason, count)| (format!("{{reason=\"{reason}\"}}"), *count));
        let help = "Ends of connections that do not use the ring in both directions, by reason";
        family("partywall_connection_reasons", "gauge", help, &reasons.collect::<Vec<_>>());
        let TotalCounts { ring_bytes, tcp_bytes, switches, doorbells_rung, doorbells_saved } = self.counts;
        let ways = [("ring", ring_bytes), ("tcp", tcp_bytes)].map(|(way, bytes)| (format!("{{way=\"{way}\"}}"), bytes));
        family("partywall_bytes_total", "counter", "Bytes that programs have sent by way", &ways);
        let bells = [("rung", doorbells_rung), ("saved", doorbells_saved)]
            .map(|(result, count)| (format!("{{result=\"{result}\"}}"), count));
        family("partywall_doorbells_total", "counter", "Doorbells that were rung, and that were not needed", &bells);
        let switches = [(String::new(), switches)];
        family("partywall_switches_total", "counter", "Changes of a connection's way", &switches);
        for (name, kind, help, values) in self.devices.families() {
            family(name, kind, help, &values);
        }
        text
    }

    /// Puts the metrics into a file, at once: a reader finds the old ones or the new.
    pub(super) fn write_metrics(&self, path: &Path) -> Result<(), CommandFailure> {
        let name = || format!("cannot write {}", path.display());
        // A device or a link of that name would be gone afterwards.
        if path.symlink_metadata().is_ok_and(|there| !there.is_file()) {
            let message = format!("{}: it is no regular file", name());
            return Err(
                CommandFailure::general(message).hint("name a file, such as /var/lib/node_exporter/partywall.prom")
            );
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // All users may read it: the collector is another user.
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix(".partywall-").permissions(permissions);
        let mut file = builder.tempfile_in(folder).context(name())?;
        file.write_all(self.to_metrics().as_bytes()).context(name())?;
        file.persist(path).map_err(|failed| failed.error).context(name())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use partywall_shm::status::Reason;

    use super::*;
    use crate::connections::{Cause, DirectionCount};

    fn end(peer: &str, ring: u64, tcp: u64) -> ConnectionRow {
        ConnectionRow {
            kind: "socket".into(),
            program: "redis".into(),
            pid: Some(7),
            local: Some("10.0.0.1:1".into()),
            peer: peer.into(),
            way: if ring > 0 { "ring" } else { "tcp" }.into(),
            reason: (ring == 0).then_some(Cause::Library(Reason::TooShort)),
            sent: Some(DirectionCount::of(tcp, ring)),
            received: Some(DirectionCount::of(1 << 40, 1 << 40)),
            ..ConnectionRow::default()
        }
    }

    fn look(connections: Vec<ConnectionRow>) -> Look {
        Look { connections, left_out: 0, notes: Vec::new() }
    }

    #[test]
    fn ends_are_counted_by_way_and_reason_and_bytes_once() {
        let channel = ConnectionRow {
            kind: "stream".into(),
            way: "ring".into(),
            sent: Some(DirectionCount::of(0, 5)),
            received: Some(DirectionCount::of(0, 6)),
            ..ConnectionRow::default()
        };
        let totals = Adder::default().add(&look(vec![end("a", 100, 10), end("b", 0, 20), channel]));
        assert_eq!((totals.counts.ring_bytes, totals.counts.tcp_bytes), (111, 30));
        let text = totals.to_text();
        for words in ["socket       1 ring, 1 tcp", "stream       1 ring", "111 B by rings, 30 B by TCP", "1 too-short"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
        let metrics = totals.to_metrics();
        for line in [
            "partywall_connections{kind=\"socket\",way=\"ring\"} 1\n",
            "partywall_connection_reasons{reason=\"too-short\"} 1\n",
            "# TYPE partywall_bytes_total counter\n",
            "partywall_bytes_total{way=\"tcp\"} 30\n",
        ] {
            assert!(metrics.contains(line), "{line}: {metrics}");
        }
    }

    #[test]
    fn counts_never_fall_when_connections_end_or_are_replaced() {
        let mut adder = Adder::default();
        let mut ring = |rows: Vec<ConnectionRow>| adder.add(&look(rows)).counts.ring_bytes;
        assert_eq!(ring(vec![end("a", 100, 0), end("b", 50, 0)]), 150);
        assert_eq!(ring(vec![end("a", 130, 0)]), 180);
        assert_eq!(ring(vec![]), 180);
        assert_eq!(ring(vec![end("a", 7, 0)]), 187, "a new one at the same addresses");
        assert_eq!(ring(vec![end("a", 3, 0)]), 190);
    }

    #[test]
    fn metrics_file_is_replaced_at_once_and_readable() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("partywall.prom");
        for bytes in [1, 2] {
            Adder::default().add(&look(vec![end("a", bytes, 0)])).write_metrics(&path).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(&format!("way=\"ring\"}} {bytes}\n")), "{text}");
        }
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        std::fs::write(&target, "kept").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for other in [&link, &socket] {
            let refused = Totals::default().write_metrics(other).unwrap_err();
            assert!(refused.to_string().contains("no regular file"), "{refused}");
            assert!(!other.symlink_metadata().unwrap().is_file(), "{} is as before", other.display());
        }
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "kept");
        let missing = Totals::default().write_metrics(Path::new("/nonexistent/x.prom")).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent/x.prom"), "{missing}");
    }
}
