//! Room in our ring: how much to ask for at once, when to take a larger ring, and how to wait for a slower reader.

use std::time::Duration;

use partywall::{Error, Result, WriteHalf};

/// Largest piece read at once, and so the largest that the peer waits for.
const PIECE: u64 = 256 << 10;

/// Full pieces in a row after which the input counts as fast.
const FAST: u32 = 4;

/// Factor by which a ring grows.
const STEP: u64 = 8;

/// Largest ring that is taken unasked.
const LARGEST: u64 = 8 << 20;

/// Chooses sizes for one connection.
#[derive(Debug)]
pub(super) struct Room {
    grows: bool,
    full: u32,
}

impl Room {
    /// `grows`: whether the ring may be changed.
    pub(super) fn new(grows: bool) -> Self {
        Self { grows, full: 0 }
    }

    /// Bytes to ask for: half a ring at most, so that the peer reads one half while we fill the other.
    pub(super) fn piece(half: &WriteHalf) -> usize {
        // At most PIECE, which any usize holds.
        (half.ring_size() / 2).clamp(1, PIECE) as usize
    }

    /// Returns once `piece` bytes are free. If it has to wait, it waits for half the ring: a peer that is slower than we
    /// are would otherwise wake us for every piece.
    pub(super) fn make(half: &mut WriteHalf, piece: usize, longest: Option<Duration>) -> Result<()> {
        half.set_nonblocking(true);
        let free = half.reserve(piece).map(drop);
        half.set_nonblocking(false);
        half.set_timeout(longest);
        match free {
            // A ring is at most a GiB, which any usize holds.
            Err(Error::WouldBlock) => half.reserve(piece.max(half.ring_size() as usize / 2)).map(drop),
            other => other,
        }
    }

    /// Notes how much of a piece the input has filled, and takes a larger ring when it keeps filling them.
    pub(super) fn filled(&mut self, half: &mut WriteHalf, n: usize, piece: usize) -> Result<()> {
        self.full = if n == piece { self.full + 1 } else { 0 };
        if !self.grows || self.full < FAST || half.ring_size() >= LARGEST {
            return Ok(());
        }
        self.full = 0;
        let larger = half.ring_size().saturating_mul(STEP).min(LARGEST);
        match half.reserve(larger as usize).map(drop) {
            // The policy permits none, or there is no memory: the present one serves.
            Err(Error::TooLarge { .. } | Error::Memory(_)) => self.grows = false,
            // The peer has not accepted yet, or not caught up. Later, then.
            Err(Error::TimedOut) => {}
            other => return other,
        }
        Ok(())
    }
}
