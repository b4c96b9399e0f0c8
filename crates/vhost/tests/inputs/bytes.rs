//! Bytes that are chosen by chance or by a fuzzer, taken from the front. Behind their end there are zeroes.

pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
