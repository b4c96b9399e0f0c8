//! The bytes of one ring, on the heap, in place of a mapping.

use alloc::vec;
use alloc::vec::Vec;

/// A ring's bytes, addressed by position in the stream (protocol R1).
#[derive(Debug)]
pub struct RingMemory {
    bytes: Vec<u8>,
}

impl RingMemory {
    /// A ring of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        Self { bytes: vec![0; index(capacity)] }
    }

    /// Bytes it holds.
    pub fn capacity(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Stores `from` at position `at` of the stream. A span larger than the ring is outside what is mapped.
    pub fn write(&mut self, at: u64, from: &[u8]) {
        assert!(from.len() <= self.bytes.len(), "a span of {} in a ring of {}", from.len(), self.bytes.len());
        for (position, &b) in (at..).zip(from) {
            let slot = index(position % self.capacity());
            self.bytes[slot] = b;
        }
    }

    /// Loads `n` bytes from position `at` of the stream on.
    pub fn read(&self, at: u64, n: u64) -> Vec<u8> {
        assert!(n <= self.capacity(), "a span of {n} in a ring of {}", self.bytes.len());
        // Positions may be anything that fits a cursor, up to the last: count offsets, not positions.
        (0..n).map(|i| self.bytes[index(at.wrapping_add(i) % self.capacity())]).collect()
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("rings of tests are small")
}
