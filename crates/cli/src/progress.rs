//! The progress of a transfer, and its display.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::args::When;
use crate::human;

/// How often a display is brought up to date.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// One direction's count. Written by the thread that carries, read by the one that shows.
#[derive(Debug, Default)]
pub(crate) struct ByteMeter {
    bytes: AtomicU64,
    /// When the latest bytes passed, in nanoseconds after the meter's start.
    last: AtomicU64,
}

/// Both directions of one connection.
#[derive(Debug)]
pub(crate) struct Meter {
    started: Instant,
    pub(crate) sent: ByteMeter,
    pub(crate) received: ByteMeter,
}

impl Meter {
    pub(crate) fn start() -> Self {
        Self { started: Instant::now(), sent: ByteMeter::default(), received: ByteMeter::default() }
    }

    /// Notes that `n` bytes more have passed.
    pub(crate) fn add(&self, flow: &ByteMeter, n: usize) {
        flow.bytes.fetch_add(n as u64, Ordering::Relaxed);
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        flow.last.store(now, Ordering::Relaxed);
    }

    /// How long nothing has passed in either direction.
    pub(crate) fn idle(&self) -> Duration {
        let last = self.sent.last.load(Ordering::Relaxed).max(self.received.last.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(Duration::from_nanos(last))
    }
}

impl ByteMeter {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// From the connection's start to the latest bytes.
    fn seconds(&self) -> f64 {
        Duration::from_nanos(self.last.load(Ordering::Relaxed)).as_secs_f64()
    }
}

/// The totals of a connection, for `--report`.
#[derive(Debug, Serialize)]
pub(crate) struct TransferReport {
    sent: FlowReport,
    received: FlowReport,
}

#[derive(Debug, Serialize)]
struct FlowReport {
    bytes: u64,
    /// From the start of the connection to the last byte of this direction.
    seconds: f64,
}

impl TransferReport {
    pub(crate) fn of(meter: &Meter) -> Self {
        let flow = |f: &ByteMeter| FlowReport { bytes: f.bytes(), seconds: f.seconds() };
        Self { sent: flow(&meter.sent), received: flow(&meter.received) }
    }

    /// Writes one line of JSON to standard error.
    pub(crate) fn print(&self) {
        if let Ok(line) = serde_json::to_string(self) {
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }
}

/// Shows a [`Meter`] on standard error.
#[derive(Debug)]
pub(crate) enum Progress {
    /// No progress is shown.
    Off,
    /// A line that is redrawn. With `yields`, it disappears once the peer writes to the same terminal.
    Bar { bar: ProgressBar, yields: bool },
    /// A new line each second, for logs.
    Lines(Instant),
}

impl Progress {
    /// `expected`: bytes to be sent, where that is known. `typed`: whether the payload comes from a terminal; `printed`:
    /// whether it goes to one.
    pub(crate) fn start(when: When, expected: Option<u64>, typed: bool, printed: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        match when {
            When::Never => Self::Off,
            When::Auto if !terminal || (typed && printed) => Self::Off,
            _ if terminal => Self::Bar { bar: bar(expected), yields: printed },
            _ => Self::Lines(Instant::now()),
        }
    }

    /// Whether progress is shown.
    pub(crate) fn is_shown(&self) -> bool {
        !matches!(self, Self::Off)
    }

    /// Brings the display up to date.
    pub(crate) fn update(&mut self, meter: &Meter) {
        match self {
            Self::Off => {}
            Self::Bar { bar, yields: true } if meter.received.bytes() > 0 => {
                bar.finish_and_clear();
                *self = Self::Off;
            }
            Self::Bar { bar, .. } => {
                bar.set_position(match bar.length() {
                    Some(_) => meter.sent.bytes(),
                    None => meter.sent.bytes() + meter.received.bytes(),
                });
                bar.set_message(totals(meter));
            }
            Self::Lines(shown) if shown.elapsed() >= Duration::from_secs(1) => {
                *shown = Instant::now();
                let _ = writeln!(std::io::stderr(), "{}", totals(meter));
            }
            Self::Lines(_) => {}
        }
    }

    /// Leaves the totals standing.
    pub(crate) fn finish(&mut self, meter: &Meter) {
        if let Self::Bar { bar, .. } = self {
            bar.finish_and_clear();
        }
        if self.is_shown() {
            let _ = writeln!(
                std::io::stderr(),
                "{} in {}",
                totals(meter),
                human::seconds(meter.started.elapsed().as_secs_f64())
            );
        }
    }
}

fn bar(expected: Option<u64>) -> ProgressBar {
    let (bar, template) = match expected {
        Some(total) => (ProgressBar::new(total), "[{bar:30}] {percent}% {msg} {decimal_bytes_per_sec} eta {eta}"),
        None => (ProgressBar::no_length(), "{spinner} {msg} {decimal_bytes_per_sec} {elapsed}"),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    // The templates are constants; should one be wrong, the default style is shown.
    bar.with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// `sent 1.5 MiB, received 0 B`, without a direction that carried nothing.
fn totals(meter: &Meter) -> String {
    let (sent, received) = (meter.sent.bytes(), meter.received.bytes());
    match (sent, received) {
        (_, 0) => format!("sent {}", human::bytes(sent)),
        (0, _) => format!("received {}", human::bytes(received)),
        _ => format!("sent {}, received {}", human::bytes(sent), human::bytes(received)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meter_counts_sent_and_received_bytes_separately() {
        let meter = Meter::start();
        meter.add(&meter.sent, 10);
        meter.add(&meter.sent, 5);
        meter.add(&meter.received, 1);
        assert_eq!((meter.sent.bytes(), meter.received.bytes()), (15, 1));
        assert!(meter.idle() <= meter.started.elapsed());
        assert_eq!(totals(&meter), "sent 15 B, received 1 B");
    }

    #[test]
    fn progress_bar_is_cleared_before_peer_output() {
        let bar = bar(None);
        bar.set_draw_target(ProgressDrawTarget::hidden());
        let (mut progress, meter) = (Progress::Bar { bar, yields: true }, Meter::start());
        progress.update(&meter);
        assert!(progress.is_shown());
        meter.add(&meter.received, 1);
        progress.update(&meter);
        assert!(!progress.is_shown());
    }

    #[test]
    fn progress_templates_are_valid() {
        for expected in [None, Some(10)] {
            let bar = bar(expected);
            bar.set_draw_target(ProgressDrawTarget::hidden());
            Progress::Bar { bar, yields: false }.update(&Meter::start());
        }
        assert!(ProgressStyle::with_template("[{bar:30}] {percent}% {msg} {decimal_bytes_per_sec} eta {eta}").is_ok());
    }
}
