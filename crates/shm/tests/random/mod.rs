//! A pseudo-random generator for tests, with the same sequence in each run.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::ops::RangeInclusive;

/// Numbers by chance (xorshift). The seed is not 0.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        std::iter::repeat_with(|| (self.next() >> 32) as u8).take(length).collect()
    }
}

/// Inputs of a driver that takes bytes, as a fuzz target does: `count` of them, each of a length in `lengths`. Another seed gives others.
pub(crate) fn inputs(seed: u64, count: u64, lengths: RangeInclusive<usize>) -> impl Iterator<Item = Vec<u8>> {
    let mut random = Random(0x2545_F491_4F6C_DD1D ^ seed);
    let (shortest, longest) = lengths.into_inner();
    let more = longest.saturating_sub(shortest) as u64;
    (0..count).map(move |_| {
        let length = if more > 0 { shortest + random.below(more + 1) as usize } else { shortest };
        random.bytes(length)
    })
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut bytes = vec![0; length];
    // In words: without an optimiser, a step for each byte takes seconds for large files.
    for word in bytes.chunks_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]);
    }
    bytes
}
