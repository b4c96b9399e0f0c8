//! What streams have carried by time, as lines of text, and how long they paused during a migration.

use super::{HopReport, StreamRecord, StreamReport, StreamTransport};
use std::time::Duration;

/// The length of a column.
const BIN: Duration = Duration::from_millis(100);
/// Columns in a line.
const WIDTH: usize = 60;
/// Columns before them.
const LABEL: usize = 10;
/// Shades from nothing at all to the most of any column.
const LEVELS: [char; 9] = ['_', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A stream's bytes and transport in each column.
#[derive(Debug, Clone)]
struct TimelineRow {
    name: String,
    by_partywall: bool,
    bytes: Vec<u64>,
    /// At the end of each column; `None` while there is no connection.
    transports: Vec<Option<StreamTransport>>,
}

/// Streams side by side, in columns of 100 ms from the begin of the recording.
#[derive(Debug, Clone)]
pub struct Timeline {
    rows: Vec<TimelineRow>,
}

impl Timeline {
    /// The streams until then.
    pub fn new(streams: &[StreamReport], until: Duration) -> Self {
        let columns = column(until) + 1;
        let rows = streams.iter().map(|stream| TimelineRow {
            name: stream.name.clone(),
            by_partywall: stream.by_partywall,
            bytes: stream.record.throughput(columns),
            transports: (0..columns).map(|column| stream.record.transport(column)).collect(),
        });
        Self { rows: rows.collect() }
    }

    /// The length of a column.
    pub fn column_length() -> Duration {
        BIN
    }

    /// The bytes of the column that has the most.
    pub fn most(&self) -> u64 {
        self.rows.iter().flat_map(|row| &row.bytes).copied().max().unwrap_or_default()
    }

    /// Lines for what happened between two times. Under the streams, the digit of each mark is in the column of its time.
    pub fn lines(&self, from: Duration, to: Duration, marks: &[(&str, Duration)]) -> Vec<String> {
        let (most, end) = (self.most().max(1), column(to) + 1);
        let mut lines = Vec::new();
        let mut first = column(from);
        while first < end {
            let last = end.min(first + WIDTH);
            lines.push(format!("{:LABEL$}from {:.1} s", "", first as f64 * BIN.as_secs_f64()));
            for row in &self.rows {
                let part = |column: usize| (row.bytes.get(column), row.transports.get(column).copied().flatten());
                if (first..last).all(|column| part(column).1.is_none()) {
                    continue;
                }
                let shade = |column: usize| match part(column) {
                    (Some(bytes), Some(_)) => level(*bytes, most),
                    _ => ' ',
                };
                lines.push(labelled(&row.name, (first..last).map(shade)));
                if row.by_partywall {
                    let letter = |column: usize| match part(column).1 {
                        Some(StreamTransport::Ring) => 'r',
                        Some(StreamTransport::Tcp) => 't',
                        None => ' ',
                    };
                    lines.push(labelled("", (first..last).map(letter)));
                }
            }
            lines.extend(mark_lines(first..last, marks));
            first = last;
        }
        lines
    }
}

impl StreamRecord {
    /// Bytes that came in each column.
    pub fn throughput(&self, columns: usize) -> Vec<u64> {
        let (mut bytes, mut had) = (vec![0; columns], 0);
        for (at, total) in &self.bytes {
            if let Some(bytes) = bytes.get_mut(column(*at)) {
                *bytes += total.saturating_sub(had);
            }
            had = *total;
        }
        bytes
    }

    /// What carried it at this time.
    pub fn transport_at(&self, at: Duration) -> StreamTransport {
        let before = self.transports.iter().rev().find(|change| change.0 <= at);
        before.map_or(StreamTransport::Tcp, |change| change.1)
    }

    fn transport(&self, at: usize) -> Option<StreamTransport> {
        let (begin, end) = (self.bytes.first()?.0, self.bytes.last()?.0);
        // A column belongs to what carried the stream at its end.
        let until = BIN * u32::try_from(at + 1).unwrap_or(u32::MAX);
        (column(begin) <= at && at <= column(end)).then(|| self.transport_at(until))
    }
}

/// How a stream fared during a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HopPauses {
    /// What carried it when the migration began.
    pub transport: StreamTransport,
    /// The longest time in which nothing came.
    pub longest: Duration,
    /// All times of at least [`PAUSE`](super::traffic::PAUSE) in which nothing came.
    pub total: Duration,
    /// The longest of them that ended before the guest was stopped.
    pub before_stop: Duration,
}

impl HopPauses {
    /// How a stream fared; `None` for one that was not there all the time.
    pub fn new(record: &StreamRecord, hop: &HopReport) -> Option<Self> {
        let (begin, end) = (record.bytes.first()?.0, record.bytes.last()?.0);
        if begin > hop.detach_begins || end < hop.attached {
            return None;
        }
        let during = || record.pauses.iter().filter(|(from, to)| *to > hop.detach_begins && *from < hop.end());
        let length = |(from, to): &(Duration, Duration)| to.saturating_sub(*from);
        Some(Self {
            transport: record.transport_at(hop.detach_begins),
            longest: during().map(length).max().unwrap_or_default(),
            total: during().map(length).sum(),
            before_stop: during().filter(|(_, to)| *to <= hop.stopped).map(length).max().unwrap_or_default(),
        })
    }
}

fn column(at: Duration) -> usize {
    usize::try_from(at.as_millis() / BIN.as_millis()).unwrap_or(usize::MAX)
}

fn level(bytes: u64, most: u64) -> char {
    // Whatever came is more than nothing.
    let level = (bytes * (LEVELS.len() as u64 - 1)).div_ceil(most);
    usize::try_from(level).ok().and_then(|level| LEVELS.get(level)).copied().unwrap_or('█')
}

fn labelled(label: &str, cells: impl Iterator<Item = char>) -> String {
    let cells: String = cells.collect();
    format!("{label:LABEL$}{cells}").trim_end().to_owned()
}

/// The digits of marks in these columns. Marks of one column are on separate lines.
fn mark_lines(columns: std::ops::Range<usize>, marks: &[(&str, Duration)]) -> Vec<String> {
    let mut lines: Vec<Vec<char>> = Vec::new();
    for (number, (_, at)) in marks.iter().enumerate() {
        let at = column(*at);
        if !columns.contains(&at) {
            continue;
        }
        let at = at - columns.start;
        let digit = u32::try_from(number + 1).ok().and_then(|n| char::from_digit(n, 36)).unwrap_or('*');
        let free = lines.iter().position(|line| line[at] == ' ').unwrap_or_else(|| {
            lines.push(vec![' '; columns.len()]);
            lines.len() - 1
        });
        lines[free][at] = digit;
    }
    lines.into_iter().map(|line| labelled("", line.into_iter())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// A stream of a byte each millisecond, with nothing from 400 ms to 600 ms, on a ring from 150 ms to 420 ms.
    fn stream() -> StreamReport {
        let mut record = StreamRecord::default();
        let steps = (0..=40).chain(60..=100);
        record.bytes = steps.enumerate().map(|(n, at)| (ms(at * 10), n as u64 * 10)).collect();
        record.pauses = vec![(ms(400), ms(600))];
        record.transports = vec![(ms(150), StreamTransport::Ring), (ms(420), StreamTransport::Tcp)];
        StreamReport { name: "s".into(), by_partywall: true, sum: None, record }
    }

    fn hop(from: u64, stopped: u64) -> HopReport {
        HopReport {
            direction: super::super::HopDirection::Away,
            detach_begins: ms(from),
            released: ms(from),
            migration_begins: ms(from),
            stopped: ms(stopped),
            runs: ms(stopped + 50),
            migration_ends: ms(stopped + 60),
            attached: ms(stopped + 100),
            on_ring: None,
            qemu_downtime: ms(50),
            memory_sent: 0,
            said: String::new(),
        }
    }

    #[test]
    fn lines_show_throughput_transport_and_marks() {
        let line = Timeline::new(&[stream()], ms(1_000));
        let marks = [("one", ms(310)), ("two", ms(420)), ("three", ms(430)), ("elsewhere", ms(5_000))];
        let lines = line.lines(ms(100), ms(900), &marks);
        let expected =
            ["          from 0.1 s", "s         ███▁_████", "          rrrtttttt", "            12", "             3"];
        assert_eq!(lines, expected, "{lines:#?}");
    }

    #[test]
    fn column_without_bytes_differs_from_one_with_few() {
        assert_eq!([level(0, 1_000), level(1, 1_000), level(1_000, 1_000)], ['_', '▁', '█']);
    }

    #[test]
    fn pause_counts_for_the_migration_that_it_falls_into() {
        let record = stream().record;
        let during = HopPauses::new(&record, &hop(300, 450)).unwrap();
        assert_eq!((during.longest, during.total, during.before_stop), (ms(200), ms(200), ms(0)));
        assert_eq!(during.transport, StreamTransport::Ring);
        let before_stop = HopPauses::new(&record, &hop(300, 700)).unwrap();
        assert_eq!(before_stop.before_stop, ms(200));
        let later = HopPauses::new(&record, &hop(650, 700)).unwrap();
        assert_eq!((later.longest, later.transport), (ms(0), StreamTransport::Tcp));
    }

    #[test]
    fn stream_that_ended_before_a_migration_has_no_pauses() {
        assert_eq!(HopPauses::new(&stream().record, &hop(1_100, 1_200)), None);
    }
}
