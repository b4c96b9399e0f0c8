//! Room in our ring: how much to ask for at once, and how to wait for a reader that is slower.

use std::time::Duration;

use partywall::{Error, Result, WriteHalf};

/// Largest piece read at once, and so the largest that the peer waits for.
const PIECE: u64 = 256 << 10;

/// Bytes to ask for: half a ring at most, so that the peer reads one half while we fill the other.
pub(super) fn piece(half: &WriteHalf) -> usize {
    // At most PIECE, which any usize holds.
    (half.ring_size() / 2).clamp(1, PIECE) as usize
}

/// Returns once `piece` bytes are free. If it has to wait, it waits for half the ring: a peer that is slower than we are
/// would otherwise wake us for every piece.
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
