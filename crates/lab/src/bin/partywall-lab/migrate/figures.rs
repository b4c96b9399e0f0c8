//! What was measured, as a table and as JSON.

use partywall_lab::migration::{
    HopDirection, HopPauses, HopReport, MigrationStage, StreamReport, StreamTransport, Timeline,
};
use partywall_terminal::{Show, table};
use serde_json::{Value, json};
use std::time::Duration;

/// A migration, and the round that it belongs to.
#[derive(Debug)]
pub(super) struct MigrationRound {
    pub(super) round: u32,
    pub(super) hop: HopReport,
}

/// All of it.
#[derive(Debug)]
pub(super) struct MigrationFigures {
    environment: Value,
    rate: u64,
    pub(super) mobility: [String; 2],
    /// When a new connection had rings after a migration that failed.
    pub(super) failed_at: Option<Duration>,
    pub(super) rounds: Vec<MigrationRound>,
    streams: Vec<StreamReport>,
    length: Duration,
    /// The load of the host over a minute, at the begin and at the end.
    load: [String; 2],
}

impl MigrationFigures {
    pub(super) fn new(stage: &MigrationStage, rate: u64) -> Self {
        let environment = json!({
            "accel": stage.accel().to_string(),
            "kernel": stage.kernel(),
            "network": stage.network().kind().to_string(),
            "processors": std::thread::available_parallelism().map_or(0, usize::from),
        });
        Self {
            environment,
            rate,
            mobility: Default::default(),
            failed_at: None,
            rounds: Vec::new(),
            streams: Vec::new(),
            length: Duration::ZERO,
            load: [load(), String::new()],
        }
    }

    /// Takes what the streams were, which have ended.
    pub(super) fn finish(&mut self, stage: &MigrationStage) {
        self.streams = stage.streams();
        self.length = stage.elapsed();
        self.load[1] = load();
    }

    pub(super) fn print(&self, show: &Show) {
        show.say(&format!(
            "\nResults (each stream {} kB/s; load of the host {} before and {} after, {} processors)\n",
            self.rate / 1_000,
            self.load[0],
            self.load[1],
            self.environment["processors"]
        ));
        let mut pauses = table(&[
            "MIGRATION",
            "STREAM",
            "FROM",
            ">QEMU ms",
            ">PAUSE ms",
            ">BEYOND ms",
            ">SUM ms",
            ">BEYOND ms",
            ">RELEASE ms",
        ]);
        for MigrationRound { round, hop } in &self.rounds {
            for (stream, fared) in self.fared(hop) {
                pauses.add_row([
                    format!("{round} {}", hop.direction),
                    stream.name.clone(),
                    transport(fared.transport).to_owned(),
                    millis(hop.qemu_downtime),
                    millis(fared.longest),
                    millis(fared.longest.saturating_sub(hop.qemu_downtime)),
                    millis(fared.total),
                    millis(fared.total.saturating_sub(hop.qemu_downtime)),
                    millis(hop.released.saturating_sub(hop.detach_begins)),
                ]);
            }
        }
        show.say(&pauses.to_string());
        show.say(
            "\nQEMU: its own downtime. PAUSE: the longest time in which no byte came, SUM: all pauses of 30 ms and more; \
             BEYOND: what of it exceeds QEMU's downtime. FROM: what carried the stream before. RELEASE: from the request to release the \
             windows to QEMU's migration; the streams go on meanwhile.\n",
        );
        let mut sums = table(&["STREAM", ">BYTES", "SHA-256 OF BOTH ENDS", "RESETS"]);
        for stream in &self.streams {
            let (bytes, sha256) =
                stream.sum.as_ref().map_or(("-".to_owned(), "-"), |sum| (sum.bytes.to_string(), &sum.sha256));
            let short = sha256.get(..16).unwrap_or(sha256);
            sums.add_row([&stream.name, &bytes, &format!("{short}... same"), "none"]);
        }
        show.say(&sums.to_string());
    }

    fn fared<'a>(&'a self, hop: &'a HopReport) -> impl Iterator<Item = (&'a StreamReport, HopPauses)> {
        self.streams.iter().filter_map(|stream| Some((stream, HopPauses::new(&stream.record, hop)?)))
    }

    pub(super) fn to_json(&self) -> serde_json::Result<String> {
        let column = Timeline::column_length();
        let columns = usize::try_from(self.length.as_millis() / column.as_millis()).unwrap_or_default() + 1;
        let streams = self.streams.iter().map(|stream| {
            let change = |(at, to): &(Duration, StreamTransport)| json!({ "at_ms": ms(*at), "to": transport(*to) });
            let pause = |(from, to): &(Duration, Duration)| json!({ "from_ms": ms(*from), "to_ms": ms(*to) });
            json!({
                "name": stream.name,
                "partywall": stream.by_partywall,
                "bytes": stream.sum.as_ref().map(|sum| sum.bytes),
                "sha256_sent": stream.sum.as_ref().map(|sum| sum.sha256.clone()),
                "sha256_received": stream.record.received.as_ref().map(|sum| sum.sha256.clone()),
                "transports": stream.record.transports.iter().map(change).collect::<Value>(),
                "pauses": stream.record.pauses.iter().map(pause).collect::<Value>(),
                "bytes_by_column": stream.record.throughput(columns),
            })
        });
        let hops = self.rounds.iter().map(|MigrationRound { round, hop }| {
            let mark = |(name, at): &(&str, Duration)| json!({ "name": name, "at_ms": ms(*at) });
            let fared = self.fared(hop).map(|(stream, fared)| {
                json!({
                    "stream": stream.name,
                    "transport_before": transport(fared.transport),
                    "longest_pause_ms": ms(fared.longest),
                    "longest_pause_beyond_qemu_ms": ms(fared.longest.saturating_sub(hop.qemu_downtime)),
                    "all_pauses_ms": ms(fared.total),
                    "all_pauses_beyond_qemu_ms": ms(fared.total.saturating_sub(hop.qemu_downtime)),
                    "longest_pause_before_stop_ms": ms(fared.before_stop),
                })
            });
            json!({
                "round": round,
                "direction": hop.direction.to_string(),
                "has_neighbour": hop.direction == HopDirection::Back,
                "marks": hop.marks().iter().map(mark).collect::<Value>(),
                "qemu_downtime_ms": ms(hop.qemu_downtime),
                "memory_sent": hop.memory_sent,
                "streams": fared.collect::<Value>(),
            })
        });
        let all = json!({
            "environment": self.environment,
            "load": self.load,
            "rate": self.rate,
            "mobility": { "a": self.mobility[0], "b": self.mobility[1] },
            "on_ring_after_failure_ms": self.failed_at.map(ms),
            "column_ms": column.as_millis() as u64,
            "resets": 0,
            "migrations": hops.collect::<Value>(),
            "streams": streams.collect::<Value>(),
        });
        serde_json::to_string_pretty(&all)
    }
}

fn transport(transport: StreamTransport) -> &'static str {
    match transport {
        StreamTransport::Ring => "ring",
        StreamTransport::Tcp => "tcp",
    }
}

/// The load average of the host over a minute.
fn load() -> String {
    let all = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    all.split(' ').next().unwrap_or_default().to_owned()
}

fn millis(time: Duration) -> String {
    format!("{:.0}", ms(time))
}

/// Milliseconds, to a tenth.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}
