//! Counters of network switches (`partywall net`) and disks (`partywall blk`) for `partywall stat --total`. Their own programs read them.

mod ask;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub(crate) use ask::{CountedDeviceArgs, look};

/// Counters of one port since it was added. The directions are the port's: `sent` went into the switch.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct PortTotals {
    #[serde(skip_deserializing)]
    connected: bool,
    sent: u64,
    sent_bytes: u64,
    received: u64,
    received_bytes: u64,
    no_buffers: u64,
    unplugged: u64,
    spoofed: u64,
    flood_limited: u64,
    malformed: u64,
}

/// Counters of one disk since its back end started.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct DiskTotals {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    flushes: u64,
    ranges: u64,
    failed: u64,
    refused: u64,
    #[serde(default)]
    copied_read_bytes: u64,
    #[serde(default)]
    copied_written_bytes: u64,
}

/// All that could be asked.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct DeviceTotals {
    /// Ports by switch and name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) network: BTreeMap<String, BTreeMap<String, PortTotals>>,
    /// Disks by their sockets.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) disks: BTreeMap<String, DiskTotals>,
}

/// A family of metrics: name, type, help, and values by their labels.
pub(super) type Family = (&'static str, &'static str, &'static str, Vec<(String, u64)>);

impl DeviceTotals {
    /// A switch with ports that have carried nothing.
    #[cfg(test)]
    pub(crate) fn for_test(switch: &str, ports: &[&str]) -> Self {
        let none = r#"{"sent":0,"sent_bytes":0,"received":0,"received_bytes":0,"no_buffers":0,"unplugged":0,"spoofed":0,"flood_limited":0,"malformed":0}"#;
        let port = |name: &&str| Some(((*name).to_owned(), serde_json::from_str(none).ok()?));
        let network = [(switch.to_owned(), ports.iter().filter_map(port).collect())].into();
        Self { network, ..Self::default() }
    }

    /// Lines for people: a name and what is to be said of it.
    pub(crate) fn lines(&self) -> Vec<(String, String)> {
        let bytes = crate::human::bytes;
        let ports =
            self.network.iter().flat_map(|(switch, ports)| ports.iter().map(move |(port, of)| (switch, port, of)));
        let ports = ports.map(|(switch, port, of)| {
            let dropped = of.dropped().iter().map(|(_, count)| count).sum::<u64>();
            let state = if of.connected { "" } else { ", no driver" };
            let text = format!(
                "{} sent, {} received, {dropped} frames dropped{state}",
                bytes(of.sent_bytes),
                bytes(of.received_bytes)
            );
            (format!("net {switch}/{port}"), text)
        });
        let disks = self.disks.iter().map(|(socket, of)| {
            let errors = of.failed.saturating_add(of.refused);
            (
                format!("blk {socket}"),
                format!("{} read, {} written, {errors} errors", bytes(of.read_bytes), bytes(of.written_bytes)),
            )
        });
        ports.chain(disks).collect()
    }

    /// The metric families that have values.
    pub(super) fn families(&self) -> Vec<Family> {
        let ports: Vec<(String, &PortTotals)> = self
            .network
            .iter()
            .flat_map(|(switch, ports)| {
                ports
                    .iter()
                    .map(move |(port, of)| (format!("switch=\"{}\",port=\"{}\"", quoted(switch), quoted(port)), of))
            })
            .collect();
        let of_ports = |label: &str, values: fn(&PortTotals) -> Vec<(&'static str, u64)>| {
            let rows = ports.iter().flat_map(|(port, of)| {
                values(of).into_iter().map(move |(name, value)| match label {
                    "" => (format!("{{{port}}}"), value),
                    label => (format!("{{{port},{label}=\"{name}\"}}"), value),
                })
            });
            rows.collect::<Vec<_>>()
        };
        let of_disks = |label: &str, values: fn(&DiskTotals) -> Vec<(&'static str, u64)>| {
            let rows = self.disks.iter().flat_map(|(socket, of)| {
                values(of)
                    .into_iter()
                    .map(move |(name, value)| (format!("{{disk=\"{}\",{label}=\"{name}\"}}", quoted(socket)), value))
            });
            rows.collect::<Vec<_>>()
        };
        let families: [Family; 8] = [
            (
                "partywall_net_port_connected",
                "gauge",
                "Whether a driver uses the port",
                of_ports("", |of| vec![("", u64::from(of.connected))]),
            ),
            (
                "partywall_net_frames_total",
                "counter",
                "Frames by port and direction",
                of_ports("direction", |of| vec![("sent", of.sent), ("received", of.received)]),
            ),
            (
                "partywall_net_bytes_total",
                "counter",
                "Bytes of frames by port and direction",
                of_ports("direction", |of| vec![("sent", of.sent_bytes), ("received", of.received_bytes)]),
            ),
            (
                "partywall_net_dropped_total",
                "counter",
                "Frames that were dropped, by port and reason",
                of_ports("reason", |of| of.dropped().to_vec()),
            ),
            (
                "partywall_blk_requests_total",
                "counter",
                "Requests that were done, by disk and kind",
                of_disks("request", |of| {
                    vec![("read", of.reads), ("write", of.writes), ("flush", of.flushes), ("range", of.ranges)]
                }),
            ),
            (
                "partywall_blk_bytes_total",
                "counter",
                "Bytes by disk and kind of request",
                of_disks("request", |of| vec![("read", of.read_bytes), ("write", of.written_bytes)]),
            ),
            (
                "partywall_blk_copied_bytes_total",
                "counter",
                "Bytes that the disk's back end has copied, by disk and kind of request",
                of_disks("request", |of| vec![("read", of.copied_read_bytes), ("write", of.copied_written_bytes)]),
            ),
            (
                "partywall_blk_errors_total",
                "counter",
                "Requests that were not done, by disk and reason",
                of_disks("reason", |of| vec![("failed", of.failed), ("refused", of.refused)]),
            ),
        ];
        families.into_iter().filter(|(.., values)| !values.is_empty()).collect()
    }
}

impl PortTotals {
    /// Frames to the port that found no buffer or no driver, and frames from it that the switch refused.
    fn dropped(&self) -> [(&'static str, u64); 5] {
        [
            ("no-buffers", self.no_buffers),
            ("unplugged", self.unplugged),
            ("spoofed", self.spoofed),
            ("flood-limited", self.flood_limited),
            ("malformed", self.malformed),
        ]
    }
}

/// As the value of a label.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_become_lines_and_metrics_with_their_labels() {
        let port = r#"{"sent":1,"sent_bytes":2000,"received":3,"received_bytes":4,"no_buffers":5,"unplugged":0,"spoofed":6,"flood_limited":0,"malformed":0}"#;
        let disk = r#"{"reads":1,"read_bytes":4096,"writes":0,"written_bytes":0,"flushes":2,"ranges":0,"failed":3,"refused":4,"copied_read_bytes":5}"#;
        let mut totals = DeviceTotals::default();
        assert!(totals.families().is_empty() && totals.lines().is_empty());
        totals.network.entry("lan".into()).or_default().insert("a".into(), serde_json::from_str(port).unwrap());
        totals.disks.insert("/run/\"d".into(), serde_json::from_str(disk).unwrap());
        let lines: Vec<String> = totals.lines().into_iter().map(|(name, value)| format!("{name}: {value}")).collect();
        assert_eq!(
            lines,
            [
                "net lan/a: 1.95 KiB sent, 4 B received, 11 frames dropped, no driver",
                "blk /run/\"d: 4.00 KiB read, 0 B written, 7 errors"
            ]
        );
        let families = totals.families();
        let all: Vec<String> = families
            .iter()
            .flat_map(|(name, _, _, values)| {
                values.iter().map(move |(labels, value)| format!("{name}{labels} {value}"))
            })
            .collect();
        for line in [
            "partywall_net_port_connected{switch=\"lan\",port=\"a\"} 0",
            "partywall_net_bytes_total{switch=\"lan\",port=\"a\",direction=\"sent\"} 2000",
            "partywall_net_dropped_total{switch=\"lan\",port=\"a\",reason=\"spoofed\"} 6",
            "partywall_blk_requests_total{disk=\"/run/\\\"d\",request=\"flush\"} 2",
            "partywall_blk_copied_bytes_total{disk=\"/run/\\\"d\",request=\"read\"} 5",
            "partywall_blk_errors_total{disk=\"/run/\\\"d\",reason=\"failed\"} 3",
        ] {
            assert!(all.iter().any(|there| there == line), "{line}: {all:#?}");
        }
    }
}
