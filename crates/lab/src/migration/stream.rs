//! A stream between two guests, followed from the host by what its receiver reports.

use super::traffic::{TrafficReport, TrafficSum};
use crate::{Guest, LabError, Running};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longer than any step of a stream takes, also in an emulated guest on a busy host.
const LIMIT: Duration = Duration::from_secs(120);
/// Between two looks at whether a stream has come further.
const LOOK: Duration = Duration::from_millis(200);
/// Connections are to meet by memory at once, and not after the first megabyte.
const RUN: &str = "partywall run --quiet --move after=4,bytes=1K";

/// By which way a connection carries its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamTransport {
    /// Through the network.
    Tcp,
    /// By rings in memory.
    Ring,
}

/// What has been seen of a stream. Times are from the begin of the recording.
#[derive(Debug, Clone, Default)]
pub struct StreamRecord {
    /// How many bytes had come at which time.
    pub bytes: Vec<(Duration, u64)>,
    /// From when to when nothing came.
    pub pauses: Vec<(Duration, Duration)>,
    /// From when on which transport carried it; TCP before the first.
    pub transports: Vec<(Duration, StreamTransport)>,
    /// What the receiver has got, once the stream has ended in order.
    pub received: Option<TrafficSum>,
}

#[derive(Debug, Default)]
struct FollowState {
    listens: bool,
    /// By the receiver's clock, in microseconds.
    bytes: Vec<(u64, u64)>,
    pauses: Vec<(u64, u64)>,
    transports: Vec<(Duration, StreamTransport)>,
    received: Option<TrafficSum>,
    /// From the receiver's clock to the host's, in microseconds: the least that was seen, for a report can only be late.
    offset: Option<u64>,
    /// What else was said, for the message of an error.
    said: String,
    ended: bool,
}

#[derive(Debug, Default)]
struct Followed {
    state: Mutex<FollowState>,
    changed: Condvar,
}

impl Followed {
    fn state(&self) -> MutexGuard<'_, FollowState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream that was begun. Its receiver ends with its guest.
#[derive(Debug)]
pub(super) struct MeasuredStream {
    name: String,
    how: StreamOptions,
    followed: Arc<Followed>,
    follower: Option<JoinHandle<()>>,
    sum: Option<TrafficSum>,
}

impl MeasuredStream {
    /// Starts a receiver in a guest.
    pub(super) fn receive(name: &str, to: &Arc<Guest>, how: StreamOptions, epoch: Instant) -> Result<Self, LabError> {
        let line = format!(
            "export PARTYWALL_PRELOAD_LOG=/proc/self/fd/2; exec {} partywall-lab-guest receive {}",
            how.run(),
            how.port
        );
        let followed = Arc::new(Followed::default());
        let follower = {
            let (followed, guest) = (Arc::clone(&followed), Arc::clone(to));
            let start = move || {
                if let Ok(mut running) = guest.start(&["sh", "-c", &line]) {
                    follow(&mut running, &followed, epoch);
                }
                followed.state().ended = true;
                followed.changed.notify_all();
            };
            std::thread::Builder::new()
                .name(format!("follow {name}"))
                .spawn(start)
                .map_err(|e| LabError::tool("a thread", e))?
        };
        Ok(Self { name: name.to_owned(), how, followed, follower: Some(follower), sum: None })
    }

    /// Starts the sender in another guest, and waits until something has come.
    pub(super) fn send(&self, from: &Guest, to: &Guest) -> Result<(), LabError> {
        self.wait("the receiver does not listen", |state| state.listens)?;
        let address = to.address().ok_or_else(|| self.failed("its receiver is on no network"))?;
        let StreamOptions { port, rate, .. } = self.how;
        let send = format!("partywall-lab-guest send {address}:{port} {rate} {}", self.stop_file().display());
        // Its log is for people who look into a failure.
        let (log, out) = (self.file("log"), self.file("out"));
        from.shell(&format!(
            "PARTYWALL_PRELOAD_LOG={} {} {send} > {} 2>&1 < /dev/null & true",
            log.display(),
            self.how.run(),
            out.display()
        ))?;
        self.wait("nothing comes", |state| state.bytes.last().is_some_and(|(_, total)| *total > 0))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Waits until the connection is carried by `transport`.
    pub(super) fn wait_transport(&self, transport: StreamTransport) -> Result<(), LabError> {
        let otherwise = match transport {
            StreamTransport::Tcp => "its rings are not unmapped",
            StreamTransport::Ring => "it has no ring",
        };
        self.wait(otherwise, |state| state.transports.last().map_or(StreamTransport::Tcp, |last| last.1) == transport)
    }

    /// Waits until this many more bytes have come.
    pub(super) fn wait_bytes(&self, more: u64) -> Result<(), LabError> {
        let total = |state: &FollowState| state.bytes.last().map_or(0, |last| last.1);
        let until = total(&self.followed.state()) + more;
        self.wait("it stands still", |state| total(state) >= until)
    }

    /// Ends it from its sending guest, and compares what was sent with what has come.
    pub(super) fn end(&mut self, from: &Guest) -> Result<(), LabError> {
        let (stop, out) = (self.stop_file(), self.file("out"));
        from.shell(&format!("touch {}", stop.display()))?;
        self.wait("it does not end", |state| state.received.is_some())?;
        let said = from.shell(&format!(
            "n=0; while ! grep -q '^end ' {0} && [ $n -lt 300 ]; do usleep 100000; n=$((n+1)); done; cat {0}",
            out.display()
        ))?;
        let sent =
            said.lines().find_map(TrafficSum::parse).ok_or_else(|| self.failed(&format!("its sender: {said}")))?;
        if self.followed.state().received.as_ref() != Some(&sent) {
            return Err(self.failed(&format!("{sent:?} was sent, and something else has come")));
        }
        self.sum = Some(sent);
        Ok(())
    }

    /// Whether it was ended, and what was sent has come.
    pub(super) fn sum(&self) -> Option<&TrafficSum> {
        self.sum.as_ref()
    }

    /// What has been seen of it so far.
    pub(super) fn record(&self) -> StreamRecord {
        let state = self.followed.state();
        let offset = state.offset.unwrap_or_default();
        let at = |micros: u64| Duration::from_micros(micros + offset);
        StreamRecord {
            bytes: state.bytes.iter().map(|(micros, total)| (at(*micros), *total)).collect(),
            pauses: state.pauses.iter().map(|(from, to)| (at(*from), at(*to))).collect(),
            transports: state.transports.clone(),
            received: state.received.clone(),
        }
    }

    /// Waits until its receiver has ended, as it does with its guest.
    pub(super) fn join(&mut self) {
        if let Some(follower) = self.follower.take() {
            let _ = follower.join();
        }
    }

    fn file(&self, ending: &str) -> PathBuf {
        Path::new("/tmp").join(format!("{}.{ending}", self.name))
    }

    fn stop_file(&self) -> PathBuf {
        self.file("stop")
    }

    fn wait(&self, otherwise: &str, holds: impl Fn(&FollowState) -> bool) -> Result<(), LabError> {
        let deadline = Instant::now() + LIMIT;
        let mut state = self.followed.state();
        while !holds(&state) {
            if state.ended || Instant::now() > deadline {
                drop(state);
                return Err(self.failed(otherwise));
            }
            state = self.followed.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// The same error with what the sender and the agent beside it have said.
    pub(super) fn explain(&self, error: LabError, from: &Guest) -> LabError {
        let LabError::Stream { name, what, mut said } = error else { return error };
        let (log, out) = (self.file("log"), self.file("out"));
        let line = format!("tail -n 20 {} {} /tmp/agent.log 2>&1; true", log.display(), out.display());
        said.push_str(&from.shell(&line).unwrap_or_else(|e| e.to_string()));
        LabError::Stream { name, what, said }
    }

    fn failed(&self, what: &str) -> LabError {
        let state = self.followed.state();
        let end = if state.ended { "; its receiver has ended" } else { "" };
        LabError::Stream { name: self.name.clone(), what: format!("{what}{end}"), said: state.said.clone() }
    }
}

/// How a stream is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamOptions {
    pub(super) port: u16,
    /// Bytes a second.
    pub(super) rate: u64,
    pub(super) by_partywall: bool,
}

impl StreamOptions {
    /// What its programs are run by.
    fn run(self) -> &'static str {
        if self.by_partywall { RUN } else { "" }
    }
}

/// Takes the receiver's reports until it ends.
fn follow(running: &mut Running<'_>, followed: &Followed, epoch: Instant) {
    let (mut out, mut err) = (0, 0);
    loop {
        let looked = running.look(LOOK);
        let now = epoch.elapsed();
        let mut state = followed.state();
        let so_far = running.so_far();
        for line in lines(&so_far.stdout, &mut out) {
            state.take_report(&line, now);
        }
        for line in lines(&so_far.stderr, &mut err) {
            state.take_log(line, now);
        }
        drop(state);
        followed.changed.notify_all();
        if !matches!(looked, Ok(None | Some(false))) {
            return;
        }
    }
}

/// The whole lines after `from`, which is moved behind them.
fn lines(bytes: &[u8], from: &mut usize) -> Vec<String> {
    let new = &bytes[*from..];
    let whole = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    *from += whole;
    String::from_utf8_lossy(&new[..whole]).lines().map(str::to_owned).collect()
}

impl FollowState {
    fn take_report(&mut self, line: &str, now: Duration) {
        match TrafficReport::parse(line) {
            Some(TrafficReport::Listening) => self.listens = true,
            Some(TrafficReport::Bytes { at, total }) => {
                self.bytes.push((at, total));
                let offset = u64::try_from(now.as_micros()).unwrap_or(u64::MAX).saturating_sub(at);
                self.offset = Some(self.offset.map_or(offset, |least| least.min(offset)));
            }
            Some(TrafficReport::Pause { from, to }) => self.pauses.push((from, to)),
            Some(TrafficReport::End(sum)) => self.received = Some(sum),
            None => self.take_log(line.to_owned(), now),
        }
    }

    /// A line of the library in the receiver, or of the receiver's complaint.
    fn take_log(&mut self, line: String, now: Duration) {
        if line.contains("has a ring") {
            self.transports.push((now, StreamTransport::Ring));
        } else if line.contains("the rings are unmapped") {
            self.transports.push((now, StreamTransport::Tcp));
        }
        self.said.push_str(&line);
        self.said.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_once_and_whole() {
        let mut from = 0;
        assert_eq!(lines(b"one\ntw", &mut from), ["one"]);
        assert!(lines(b"one\ntw", &mut from).is_empty());
        assert_eq!(lines(b"one\ntwo\nthree\n", &mut from), ["two", "three"]);
        assert_eq!(from, 14);
    }

    #[test]
    fn late_reports_do_not_move_the_clock() {
        let mut state = FollowState::default();
        let ms = Duration::from_millis;
        for (now, line) in [(1_050, "bytes 10000 1"), (1_025, "bytes 20000 2"), (1_500, "bytes 30000 3")] {
            state.take_report(line, ms(now));
        }
        assert_eq!(state.offset, Some(1_005_000));
        state.take_report("7 7 fd 5 has a ring: 65536 bytes out, 65536 in", ms(1_600));
        state.take_log("7 7 fd 5: the rings are unmapped; the connection goes on by TCP".into(), ms(1_700));
        let expected = [(ms(1_600), StreamTransport::Ring), (ms(1_700), StreamTransport::Tcp)];
        assert_eq!(state.transports, expected);
    }
}
