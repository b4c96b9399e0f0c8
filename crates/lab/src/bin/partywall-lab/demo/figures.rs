//! The measurements, as tables.

use super::in_place::{GuestTreeTimes, MountTimes};
use indicatif::DecimalBytes;
use partywall_terminal::Show;

/// All of it.
#[derive(Debug)]
pub(super) struct DemoFigures {
    size: u64,
    route: String,
    emulated: bool,
    /// Seconds of each transfer.
    pub(super) ours: Vec<f64>,
    /// The figures for TCP.
    pub(super) tcp: Vec<f64>,
    /// Round trips in nanoseconds, p50 and p99.
    pub(super) awake: [f64; 2],
    /// Where both sides sleep.
    pub(super) asleep: [f64; 2],
    /// Round trips over TCP.
    pub(super) tcp_ping: [f64; 2],
    /// A tree that is read in place.
    pub(super) tree: Option<GuestTreeTimes>,
    /// A file that is read through a mount.
    pub(super) files: Option<MountTimes>,
    /// Requests a second of redis, under `partywall run` and by TCP.
    pub(super) redis: Option<[f64; 2]>,
}

impl DemoFigures {
    pub(super) fn new(size: u64, route: String, emulated: bool) -> Self {
        let none = [f64::NAN; 2];
        let (ours, tcp) = (Vec::new(), Vec::new());
        let (tree, files, redis) = (None, None, None);
        Self { size, route, emulated, ours, tcp, awake: none, asleep: none, tcp_ping: none, tree, files, redis }
    }

    pub(super) fn print(&self, show: &Show) {
        let rounds = self.ours.len();
        show.say(&format!("\nResults between two virtual machines (medians of {rounds} round(s))\n"));
        show.say(&self.to_text());
    }

    fn to_text(&self) -> String {
        let tcp = format!("TCP ({})", self.route);
        let (ours, theirs) = (median(&self.ours), median(&self.tcp));
        let rate = |size: u64, seconds: f64| format!("{}/s", DecimalBytes((size as f64 / seconds) as u64));
        let file_of = |size: u64, seconds: f64| [rate(size, seconds), format!("{seconds:.3}")];
        let file = |seconds: f64| file_of(self.size, seconds);
        let trip = |[p50, p99]: [f64; 2]| [micros(p50), micros(p99)];
        let mut text = table(
            ["file to file", "rate", "seconds"],
            &[("Partywall (pmem windows)", file(ours)), (&tcp, file(theirs))],
        );
        text.push_str(&format!("Partywall is {:.1} times as fast as TCP\n\n", theirs / ours));
        text.push_str(&table(
            ["round trip of 64 bytes", "p50", "p99"],
            &[
                ("Partywall, awake (--spin 50ms)", trip(self.awake)),
                ("Partywall, asleep (--spin 0)", trip(self.asleep)),
                (&tcp, trip(self.tcp_ping)),
            ],
        ));
        text.push_str(&format!("Partywall is {:.1} times as quick as TCP\n", self.tcp_ping[0] / self.awake[0]));
        if let Some(tree) = self.tree {
            // Nothing stands in the last column.
            let row = |time: String| [time, String::new()];
            text.push('\n');
            text.push_str(&table(
                [&format!("tree of {} nodes, built in a, read in b", tree.nodes), "time", ""],
                &[
                    ("Partywall: a call that reads all nodes in place", row(millis(tree.call))),
                    ("TCP: serialised, sent, rebuilt and read", row(millis(tree.tcp))),
                    ("Partywall: a call that looks up one key in place", row(micros(tree.find))),
                    ("Partywall: a call without arguments", row(micros(tree.null_call))),
                ],
            ));
            text.push_str(&format!("Partywall is {:.1} times as quick as TCP\n", tree.tcp / tree.call));
        }
        if let Some(MountTimes { size, ours, tcp: theirs }) = self.files {
            text.push('\n');
            text.push_str(&table(
                [&format!("file of {} MiB, read through a mount", size >> 20), "rate", "seconds"],
                &[("Partywall (by calls)", file_of(size, ours)), (&tcp, file_of(size, theirs))],
            ));
            text.push_str(&format!("Partywall is {:.1} times as fast as TCP\n", theirs / ours));
        }
        if let Some([ours, theirs]) = self.redis {
            let row = |rate: f64| [format!("{rate:.0}/s"), format!("{:.0} us", 1e6 / rate)];
            text.push('\n');
            text.push_str(&table(
                ["redis GET, one client, unmodified", "rate", "each"],
                &[("Partywall (partywall run)", row(ours)), (&tcp, row(theirs))],
            ));
            text.push_str(&format!("Partywall is {:.1} times as fast as TCP\n", ours / theirs));
        }
        if self.emulated {
            text.push_str("These machines are emulated, so take the ratios for their order of magnitude, and no figure as absolute.\n");
        }
        text
    }
}

fn micros(nanos: f64) -> String {
    let micros = nanos / 1e3;
    if micros < 99.5 { format!("{micros:.1} us") } else { format!("{micros:.0} us") }
}

fn millis(nanos: f64) -> String {
    format!("{:.1} ms", nanos / 1e6)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn table(head: [&str; 3], rows: &[(&str, [String; 2])]) -> String {
    let name = rows.iter().map(|(name, _)| name.len()).chain([head[0].len()]).max().unwrap_or(0);
    let mut text = format!("{:name$}  {:>12}  {:>10}\n", head[0], head[1], head[2]);
    for (label, [first, second]) in rows {
        text.push_str(&format!("{label:name$}  {first:>12}  {second:>10}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_show_medians_and_ratios() {
        let mut figures = DemoFigures::new(100_000_000, "a wire".into(), true);
        (figures.ours, figures.tcp) = (vec![0.5, 9.0, 0.1], vec![2.0, 1.0, 3.0]);
        (figures.awake, figures.asleep, figures.tcp_ping) = ([10e3, 20e3], [500e3, 600e3], [200e3, 300e3]);
        assert!(!figures.to_text().contains("redis"), "left out");
        figures.redis = Some([4000.0, 1000.0]);
        figures.tree = Some(GuestTreeTimes { nodes: 1000, call: 3e6, find: 500e3, null_call: 400e3, tcp: 9e6 });
        figures.files = Some(MountTimes { size: 100_000_000, ours: 4.0, tcp: 2.0 });
        let text = figures.to_text();
        for part in [
            "200.00 MB/s",
            "50.00 MB/s",
            "4.0 times as fast",
            "20.0 times as quick",
            "TCP (a wire)",
            "emulated",
            "10.0 us",
            "500 us",
            "250 us",
            "tree of 1000 nodes",
            "3.0 ms",
            "3.0 times as quick as TCP",
            "400 us",
            "25.00 MB/s",
            "0.5 times as fast",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
