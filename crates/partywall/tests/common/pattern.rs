//! Bytes that say where in a stream they belong, and dice that fall the same way each time.

use std::io::{Read, Write};
use std::sync::OnceLock;

/// Not a multiple of any ring's size, so that bytes of another revolution are other bytes.
const PERIOD: usize = 65521;

/// A stream of bytes known in advance, of any length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pattern;

impl Pattern {
    fn table() -> &'static [u8] {
        static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
        TABLE.get_or_init(|| {
            let mut dice = Dice::new(77);
            (0..PERIOD).map(|_| dice.next() as u8).collect()
        })
    }

    /// Bytes from `at` on.
    pub(crate) fn fill(self, mut at: u64, mut buf: &mut [u8]) {
        while !buf.is_empty() {
            let piece = &Self::table()[(at % PERIOD as u64) as usize..];
            let n = piece.len().min(buf.len());
            buf[..n].copy_from_slice(&piece[..n]);
            buf = &mut buf[n..];
            at += n as u64;
        }
    }

    pub(crate) fn bytes(self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(at, &mut bytes);
        bytes
    }

    /// Fails if `buf` is not the bytes from `at` on.
    #[track_caller]
    pub(crate) fn check(self, mut at: u64, mut buf: &[u8]) {
        while !buf.is_empty() {
            let piece = &Self::table()[(at % PERIOD as u64) as usize..];
            let n = piece.len().min(buf.len());
            if buf[..n] != piece[..n] {
                let wrong = (0..n).find(|&i| buf[i] != piece[i]).unwrap_or(0);
                panic!("byte {} of the stream is not what was written", at + wrong as u64);
            }
            buf = &buf[n..];
            at += n as u64;
        }
    }

    /// Writes bytes `[0, total)` in pieces of the sizes that `size` gives.
    pub(crate) fn send(self, to: &mut impl Write, total: u64, mut size: impl FnMut() -> usize) {
        let mut at = 0;
        while at < total {
            let n = (size().max(1) as u64).min(total - at) as usize;
            to.write_all(&self.bytes(at, n)).unwrap();
            at += n as u64;
        }
    }

    /// Reads to the end in pieces of the sizes that `size` gives, checks, and returns how many bytes there were.
    pub(crate) fn receive(self, from: &mut impl Read, mut size: impl FnMut() -> usize) -> u64 {
        let (mut at, mut buf) = (0, Vec::new());
        loop {
            buf.resize(size().max(1), 0);
            let n = from.read(&mut buf).unwrap();
            if n == 0 {
                return at;
            }
            self.check(at, &buf[..n]);
            at += n as u64;
        }
    }
}

/// Numbers by chance (SplitMix64), the same for the same seed.
#[derive(Debug, Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 to `n - 1`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Sizes of all magnitudes up to `2^bits`, small ones as often as large ones.
    pub(crate) fn size(&mut self, bits: u32) -> usize {
        let magnitude = self.below(u64::from(bits) + 1);
        (self.below(1 << magnitude) + 1) as usize
    }
}
