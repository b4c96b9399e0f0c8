//! The checksum of payloads that are consumed in place.

/// A running sum of 8-byte words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WordSum(u64);

impl WordSum {
    /// Adds every whole word of `bytes`; spans are cut at word boundaries, so there are no others.
    #[cfg(any(test, feature = "iceoryx2"))]
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let (words, _) = bytes.as_chunks::<8>();
        self.0 = words.iter().fold(self.0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    }

    /// Adds `count` equal words.
    pub(crate) fn add_equal(&mut self, word: u64, count: u64) {
        self.0 = self.0.wrapping_add(word.wrapping_mul(count));
    }

    /// Adds what was summed up elsewhere.
    pub(crate) fn add_value(&mut self, sum: u64) {
        self.0 = self.0.wrapping_add(sum);
    }

    /// The sum as a number, for the way between processes.
    pub(crate) fn value(self) -> u64 {
        self.0
    }
}

/// Fills `bytes` with one word.
pub(crate) fn fill(bytes: &mut [u8], word: u64) {
    let (words, _) = bytes.as_chunks_mut::<8>();
    words.fill(word.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_sum_matches_fill_and_detects_damage() {
        let mut bytes = [0; 4096];
        fill(&mut bytes, 0xfedc_ba98_7654_3210);
        let (mut read, mut expected) = (WordSum::default(), WordSum::default());
        read.add(&bytes[..1000]);
        read.add(&bytes[1000..]);
        expected.add_equal(0xfedc_ba98_7654_3210, 512);
        assert_eq!(read, expected);
        bytes[77] ^= 1;
        let mut damaged = WordSum::default();
        damaged.add(&bytes);
        assert_ne!(damaged, expected);
    }
}
