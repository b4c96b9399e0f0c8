//! A paced TCP stream with a checksum, as an ordinary program sends and receives it. `partywall-lab-guest` runs both ends in guests.

use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Between two pieces of a stream.
const PACE: Duration = Duration::from_millis(10);
/// Between two reports of the receiver.
const REPORT: Duration = Duration::from_millis(20);
/// The receiver reports a pause from this length on.
pub const PAUSE: Duration = Duration::from_millis(30);
/// The largest piece of a stream.
const PIECE: u64 = 1 << 20;

/// A line of the receiver's report. Times are microseconds since its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrafficReport {
    /// It takes connections.
    Listening,
    /// Bytes that had come by then.
    Bytes {
        /// When.
        at: u64,
        /// All bytes so far.
        total: u64,
    },
    /// Nothing came in between.
    Pause {
        /// When the last bytes before it came.
        from: u64,
        /// When the first bytes after it came.
        to: u64,
    },
    /// The sender has closed the connection in order.
    End(TrafficSum),
}

/// What has been sent or received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficSum {
    /// How many bytes.
    pub bytes: u64,
    /// Their SHA-256, in hexadecimal digits.
    pub sha256: String,
}

impl TrafficReport {
    /// Reads a line; `None` if it is something else.
    pub fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["listening"] => Some(Self::Listening),
            ["bytes", at, total] => Some(Self::Bytes { at: at.parse().ok()?, total: total.parse().ok()? }),
            ["pause", from, to] => Some(Self::Pause { from: from.parse().ok()?, to: to.parse().ok()? }),
            ["end", ..] => TrafficSum::parse(line).map(Self::End),
            _ => None,
        }
    }
}

impl TrafficSum {
    /// Reads the last line of a sender or receiver; `None` if it is something else.
    pub fn parse(line: &str) -> Option<Self> {
        let (bytes, sha256) = line.strip_prefix("end ")?.split_once(' ')?;
        Some(Self { bytes: bytes.parse().ok()?, sha256: sha256.to_owned() })
    }

    fn of(bytes: u64, hash: Sha256) -> Self {
        Self { bytes, sha256: hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect() }
    }

    fn say(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "end {} {}", self.bytes, self.sha256)
    }
}

/// Sends about `rate` bytes a second to `to`, as long as the file `stop` is absent. Reports the sum when the receiver has closed the
/// connection as well.
///
/// # Errors
/// The connection cannot be made, or breaks.
pub fn send(to: &str, rate: u64, stop: &Path, out: &mut impl Write) -> io::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    let mut piece = vec![0; usize::try_from((rate / 100).clamp(8, PIECE)).unwrap_or(8)];
    let (mut hash, mut bytes, mut random) = (Sha256::new(), 0, 0x9e37_79b9_7f4a_7c15);
    while !stop.exists() {
        fill(&mut piece, &mut random);
        stream.write_all(&piece)?;
        hash.update(&piece);
        bytes += piece.len() as u64;
        // Time that was lost is not made up for, so that a pause is seen as one.
        thread::sleep(PACE);
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let rest = stream.read(&mut [0])?;
    if rest != 0 {
        return Err(io::Error::other("the receiver has sent something"));
    }
    TrafficSum::of(bytes, hash).say(out)
}

/// Receives one stream at `port`, and reports each step in the lines of [`TrafficReport`].
///
/// # Errors
/// The port is taken, or the connection breaks.
pub fn receive(port: u16, out: &mut impl Write) -> io::Result<()> {
    receive_from(&TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?, out)
}

fn receive_from(listener: &TcpListener, out: &mut impl Write) -> io::Result<()> {
    let start = Instant::now();
    let micros = |at: Instant| at.duration_since(start).as_micros();
    writeln!(out, "listening")?;
    let (mut stream, _) = listener.accept()?;
    let (mut hash, mut bytes, mut piece) = (Sha256::new(), 0u64, vec![0; 64 << 10]);
    let (mut last, mut reported) = (Instant::now(), Instant::now());
    writeln!(out, "bytes {} 0", micros(last))?;
    loop {
        let n = stream.read(&mut piece)?;
        let now = Instant::now();
        if n == 0 {
            break;
        }
        if now.duration_since(last) >= PAUSE {
            // What came before it is not to be counted after it.
            writeln!(out, "bytes {} {bytes}", micros(last))?;
            writeln!(out, "pause {} {}", micros(last), micros(now))?;
        }
        hash.update(&piece[..n]);
        bytes += n as u64;
        if now.duration_since(reported) >= REPORT {
            writeln!(out, "bytes {} {bytes}", micros(now))?;
            reported = now;
        }
        last = now;
    }
    writeln!(out, "bytes {} {bytes}", micros(last))?;
    TrafficSum::of(bytes, hash).say(out)
}

/// Bytes that nowhere repeat, so that the sum of a stream with a piece twice or in the wrong place differs (xorshift64).
fn fill(piece: &mut [u8], random: &mut u64) {
    for word in piece.chunks_mut(8) {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        word.copy_from_slice(&random.to_le_bytes()[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_report_the_same_sum() {
        let folder = tempfile::tempdir().unwrap();
        let stop = folder.path().join("stop");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        thread::scope(|s| {
            s.spawn(|| send(&to, 1 << 20, &stop, &mut sent).unwrap());
            s.spawn(|| receive_from(&listener, &mut received).unwrap());
            thread::sleep(4 * PACE);
            std::fs::write(&stop, "").unwrap();
        });
        let sent = TrafficSum::parse(std::str::from_utf8(&sent).unwrap().trim_end()).unwrap();
        let lines = String::from_utf8(received).unwrap();
        let reports: Vec<_> = lines.lines().map(|line| TrafficReport::parse(line).unwrap()).collect();
        assert_eq!(reports[0], TrafficReport::Listening);
        assert_eq!(reports.last(), Some(&TrafficReport::End(sent.clone())));
        assert!(sent.bytes > 0 && sent.sha256.len() == 64, "{sent:?}");
        let before_the_end = &reports[reports.len() - 2];
        assert!(matches!(before_the_end, TrafficReport::Bytes { total, .. } if *total == sent.bytes), "{lines}");
    }

    #[test]
    fn line_of_something_else_is_no_report() {
        for line in ["", "bytes 1", "bytes x 1", "pause 1 -2", "end 5", "listening now"] {
            assert_eq!(TrafficReport::parse(line), None, "{line}");
        }
        let pause = TrafficReport::Pause { from: 5, to: 50_000 };
        assert_eq!(TrafficReport::parse("pause 5 50000"), Some(pause));
    }
}
