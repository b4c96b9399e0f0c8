//! The protocol of ping, over any transport.
//!
//! ```text
//! hello    "PWPING01"  size u32  flags u32       the responder sends it back as a sign that it understood
//! message  size bytes                            the responder sends each back
//!
//! with flag 1 (stamped), a message begins with three times, in nanoseconds of CLOCK_MONOTONIC:
//!          sent u64    arrived u64    answered u64
//! ```
//! Integers are little-endian.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

use crate::exit::{Code, CommandFailure};

const MAGIC: &[u8; 8] = b"PWPING01";
const STAMPED: u32 = 1;
/// Largest message that a responder makes room for.
const MAX_SIZE: u32 = 16 << 20;
/// Bytes that the times of a stamped message take.
pub(crate) const STAMPS: u32 = 24;
/// Longest latency that is recorded exactly.
const LONGEST: u64 = 60_000_000_000;

/// The measurement to make.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PingPlan {
    pub(crate) size: u32,
    pub(crate) count: u64,
    pub(crate) warm_up: u64,
    pub(crate) interval: Duration,
    pub(crate) stamped: bool,
}

/// Latencies in nanoseconds.
#[derive(Debug)]
pub(crate) struct PingResults {
    pub(crate) round_trip: Histogram<u64>,
    /// There, and back, when stamped.
    pub(crate) ways: Option<[Histogram<u64>; 2]>,
}

/// Sends messages one after the other and notes when each is back.
pub(crate) fn measure(peer: &mut (impl Read + Write), plan: &PingPlan) -> Result<PingResults, CommandFailure> {
    greet(peer, plan)?;
    let mut results = PingResults {
        round_trip: histogram()?,
        ways: if plan.stamped { Some([histogram()?, histogram()?]) } else { None },
    };
    let mut message = vec![0u8; plan.size as usize];
    let mut next = Instant::now();
    for n in 0..plan.warm_up.saturating_add(plan.count) {
        if !plan.interval.is_zero() {
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            next += plan.interval;
        }
        let sent = now();
        if plan.stamped {
            message[..8].copy_from_slice(&sent.to_le_bytes());
        } else if let Some(first) = message.first_mut() {
            // An answer to an earlier message would show.
            *first = n as u8;
        }
        peer.write_all(&message)?;
        peer.read_exact(&mut message).map_err(cut_short)?;
        let back = now();
        if n >= plan.warm_up {
            results.round_trip.saturating_record(back.saturating_sub(sent).max(1));
        }
        check(&message, plan, n, sent)?;
        if let (Some([there, back_again]), true) = (&mut results.ways, n >= plan.warm_up) {
            there.saturating_record(stamp(&message, 1).saturating_sub(sent).max(1));
            back_again.saturating_record(back.saturating_sub(stamp(&message, 2)).max(1));
        }
    }
    Ok(results)
}

fn greet(peer: &mut (impl Read + Write), plan: &PingPlan) -> Result<(), CommandFailure> {
    let flags = if plan.stamped { STAMPED } else { 0 };
    let hello = hello(plan.size, flags);
    peer.write_all(&hello)?;
    let mut answer = [0u8; 16];
    peer.read_exact(&mut answer).map_err(cut_short)?;
    if answer != hello {
        return Err(CommandFailure::new(Code::Corrupt, "the service answers, but is no `partywall ping -l`"));
    }
    Ok(())
}

fn check(message: &[u8], plan: &PingPlan, n: u64, sent: u64) -> Result<(), CommandFailure> {
    let right = if plan.stamped { stamp(message, 0) == sent } else { message.first() == Some(&(n as u8)) };
    if right { Ok(()) } else { Err(CommandFailure::new(Code::Corrupt, format!("message {n} came back changed"))) }
}

fn cut_short(error: io::Error) -> CommandFailure {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => CommandFailure::general("the peer closed before it had answered"),
        _ => error.into(),
    }
}

/// Answers until the other side is done.
pub(crate) fn respond(peer: &mut (impl Read + Write)) -> Result<(), CommandFailure> {
    let mut hello_read = [0u8; 16];
    peer.read_exact(&mut hello_read)?;
    let size = u32::from_le_bytes([hello_read[8], hello_read[9], hello_read[10], hello_read[11]]);
    let flags = u32::from_le_bytes([hello_read[12], hello_read[13], hello_read[14], hello_read[15]]);
    let stamped = flags == STAMPED;
    let shortest = if stamped { STAMPS } else { 1 };
    if &hello_read[..8] != MAGIC || flags > STAMPED || !(shortest..=MAX_SIZE).contains(&size) {
        return Err(CommandFailure::new(Code::Corrupt, "the visitor is no `partywall ping`"));
    }
    peer.write_all(&hello_read)?;
    let mut message = vec![0u8; size as usize];
    while read_message(peer, &mut message)? {
        if stamped {
            message[8..16].copy_from_slice(&now().to_le_bytes());
            message[16..24].copy_from_slice(&now().to_le_bytes());
        }
        peer.write_all(&message)?;
    }
    Ok(())
}

/// Reads a whole message; `false` if there is none any more.
fn read_message(peer: &mut impl Read, message: &mut [u8]) -> Result<bool, CommandFailure> {
    let first = loop {
        match peer.read(message) {
            Ok(n) => break n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    };
    if first == 0 {
        return Ok(false);
    }
    peer.read_exact(&mut message[first..])?;
    Ok(true)
}

fn hello(size: u32, flags: u32) -> [u8; 16] {
    let mut hello = [0u8; 16];
    hello[..8].copy_from_slice(MAGIC);
    hello[8..12].copy_from_slice(&size.to_le_bytes());
    hello[12..].copy_from_slice(&flags.to_le_bytes());
    hello
}

/// The `n`th time of a stamped message.
fn stamp(message: &[u8], n: usize) -> u64 {
    let mut bytes = [0u8; 8];
    bytes.copy_from_slice(&message[n * 8..n * 8 + 8]);
    u64::from_le_bytes(bytes)
}

fn histogram() -> Result<Histogram<u64>, CommandFailure> {
    Histogram::new_with_bounds(1, LONGEST, 3).map_err(|e| CommandFailure::general(e.to_string()))
}

/// Nanoseconds of the clock that all processes of a host share.
fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    // The monotonic clock is not negative.
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn plan(size: u32, stamped: bool) -> PingPlan {
        PingPlan { size, count: 50, warm_up: 5, interval: Duration::ZERO, stamped }
    }

    #[test]
    fn measures_every_message_but_the_warm_up() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let responder = thread::spawn(move || respond(&mut there));
        let results = measure(&mut here, &plan(1, false)).unwrap();
        drop(here);
        responder.join().unwrap().unwrap();
        assert_eq!(results.round_trip.len(), 50);
        assert!(results.ways.is_none());
    }

    #[test]
    fn one_way_times_sum_to_at_most_the_round_trip() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let responder = thread::spawn(move || respond(&mut there));
        let results = measure(&mut here, &plan(STAMPS, true)).unwrap();
        drop(here);
        responder.join().unwrap().unwrap();
        let [there, back] = results.ways.unwrap();
        assert_eq!((there.len(), back.len()), (50, 50));
        // Three significant figures are kept of each.
        assert!((there.min() + back.min()) as f64 <= results.round_trip.max() as f64 * 1.01);
    }

    #[test]
    fn wrong_ping_answer_is_an_error() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut hello = [0u8; 16];
            there.read_exact(&mut hello).unwrap();
            there.write_all(&hello).unwrap();
            let mut message = [0u8; 8];
            there.read_exact(&mut message).unwrap();
            there.write_all(&[99; 8]).unwrap();
        });
        assert_eq!(measure(&mut here, &plan(8, false)).unwrap_err().code, Code::Corrupt);
    }

    #[test]
    fn malformed_ping_request_is_refused() {
        for hello in [hello(u32::MAX, 0), hello(0, 0), hello(8, STAMPED), hello(64, 7), *b"GET / HTTP/1.1\r\n"] {
            let (mut here, mut there) = UnixStream::pair().unwrap();
            here.write_all(&hello).unwrap();
            assert_eq!(respond(&mut there).unwrap_err().code, Code::Corrupt);
        }
    }
}
