//! The content of a stream, and the cheap check of it.
//!
//! Every message begins with its number; the rest is a pattern that depends on the place in the message. In every piece that arrives the
//! first message number and the last byte are checked, and the count of all bytes. This is enough to see a loss, a repetition, a shift or
//! a swap, and too cheap to affect the rates. Before the measurement begins, every byte is compared.

use std::time::{Duration, Instant};

use crate::error::{BenchError, Result};

/// Bytes of the message number.
const NUMBER: usize = 8;

/// Every byte is compared of this many: twice the largest ring.
const COMPARED: u64 = 16 << 20;
/// Slow mechanisms compare for no longer than this, which every warm-up lasts.
const COMPARING: Duration = Duration::from_millis(50);

/// The pattern byte at a place in a message.
fn pattern(place: usize) -> u8 {
    (place as u8).wrapping_mul(31) ^ (place >> 8) as u8
}

/// The sender's message.
#[derive(Debug)]
pub(super) struct Source {
    bytes: Vec<u8>,
    number: u64,
}

impl Source {
    /// For messages of `len` bytes.
    pub(super) fn new(len: usize) -> Self {
        Self { bytes: (0..len).map(pattern).collect(), number: 0 }
    }

    /// The next message.
    pub(super) fn next(&mut self) -> &[u8] {
        if let Some(head) = self.bytes.first_chunk_mut::<NUMBER>() {
            *head = self.number.to_ne_bytes();
        }
        self.number += 1;
        &self.bytes
    }
}

/// The receiver's account of what has arrived.
#[derive(Debug)]
pub(super) struct Ledger {
    message: usize,
    /// The place in the current message at which the next piece begins, and that message's number.
    place: usize,
    number: u64,
    /// A message to compare with, for as long as every byte is compared; since when, and how many bytes were.
    whole: Option<Vec<u8>>,
    since: Option<Instant>,
    compared: u64,
}

impl Ledger {
    /// For messages of `len` bytes.
    pub(super) fn new(len: usize) -> Self {
        Self { message: len, place: 0, number: 0, whole: None, since: None, compared: 0 }
    }

    /// Compares every byte of what arrives first.
    pub(super) fn thorough(mut self) -> Self {
        self.whole = Some((0..self.message).map(pattern).collect());
        self
    }

    /// Accounts for a piece, and checks it.
    pub(super) fn check(&mut self, piece: &[u8]) -> Result<()> {
        if self.whole.is_some() {
            self.compare(piece)?;
        }
        let (ahead, number) =
            if self.place == 0 { (0, self.number) } else { (self.message - self.place, self.number + 1) };
        if let Some(found) = piece.get(ahead..).and_then(|rest| rest.first_chunk::<NUMBER>())
            && self.message >= NUMBER
            && u64::from_ne_bytes(*found) != number
        {
            return Err(BenchError::Damaged(format!("message {number} arrived as {:#x}", u64::from_ne_bytes(*found))));
        }
        self.advance(piece.len());
        let last = if self.place == 0 { self.message - 1 } else { self.place - 1 };
        match piece.last() {
            Some(found) if last >= NUMBER && *found != pattern(last) => Err(BenchError::Damaged(format!(
                "byte {last} of a message arrived as {found:#04x} and was sent as {:#04x}",
                pattern(last)
            ))),
            _ => Ok(()),
        }
    }

    /// Compares all of a piece but the message numbers.
    #[cold]
    fn compare(&mut self, piece: &[u8]) -> Result<()> {
        let Some(whole) = self.whole.take() else { return Ok(()) };
        let (mut rest, mut place) = (piece, self.place);
        while !rest.is_empty() {
            let (part, after) = rest.split_at(rest.len().min(self.message - place));
            let skipped = NUMBER.saturating_sub(place).min(part.len());
            if part[skipped..] != whole[place + skipped..place + part.len()] {
                return Err(BenchError::Damaged("bytes within a message are not those that were sent".into()));
            }
            (rest, place) = (after, 0);
        }
        self.compared += piece.len() as u64;
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.compared < COMPARED && since.elapsed() < COMPARING {
            self.whole = Some(whole);
        }
        Ok(())
    }

    fn advance(&mut self, n: usize) {
        let place = self.place + n;
        // Pieces are mostly shorter than a message or few messages long; a division for each would show at 64 bytes.
        if place < self.message {
            self.place = place;
        } else if place == self.message {
            self.place = 0;
            self.number += 1;
        } else {
            self.number += (place / self.message) as u64;
            self.place = place % self.message;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(message: usize, count: usize) -> Vec<u8> {
        let mut source = Source::new(message);
        (0..count).flat_map(|_| source.next().to_vec()).collect()
    }

    fn check(message: usize, bytes: &[u8], piece: usize) -> Result<()> {
        let mut ledger = Ledger::new(message);
        bytes.chunks(piece).try_for_each(|piece| ledger.check(piece))
    }

    #[test]
    fn accepts_every_cut() {
        for message in [1, 7, 8, 64, 1000] {
            let bytes = stream(message, 20);
            for piece in [1, 3, 8, 63, 64, 65, 640, 20_000] {
                check(message, &bytes, piece).unwrap();
            }
        }
    }

    #[test]
    fn thorough_ledger_detects_single_wrong_byte() {
        for message in [7, 64, 1000] {
            let good = stream(message, 20);
            let check = |bytes: &[u8], piece| {
                let mut ledger = Ledger::new(message).thorough();
                bytes.chunks(piece).try_for_each(|piece| ledger.check(piece))
            };
            check(&good, 100).unwrap();
            let mut bad = good.clone();
            bad[message + message / 2 + 4] ^= 1;
            assert_eq!(check(&bad, 100).is_err(), message > 8, "messages of {message} bytes");
        }
    }

    #[test]
    fn sees_loss_repetition_and_shift() {
        let good = stream(64, 20);
        let lost = [&good[..64], &good[128..]].concat();
        let repeated = [&good[..128], &good[64..]].concat();
        let shifted = [&good[..100], &good[101..]].concat();
        for bad in [lost, repeated, shifted] {
            assert!(check(64, &bad, 64).is_err());
            assert!(check(64, &bad, 100).is_err());
        }
    }
}
