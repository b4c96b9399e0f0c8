//! Records of calls: one cache line each, with a stamp that hands it over (protocol K1).
//!
//! ```text
//!   | stamp u64 | id u32 | method u32 | kind u8 | flags u8 | status u16 | length u32 | 40 bytes |
//!   0           8        12           16        17         18           20           24         64
//! ```
//! A record lies in the ring of its channel, so cursors, wishes and states work as for any other bytes. The stamp is one more way to hand it
//! over: a reader that is awake looks at the record's own line and needs no other. A record at byte `n` of the stream has the stamp
//! `n + 1`, which no earlier content of that line had.
//!
//! ```text
//!   writer:  words ---> tail ---> stamp          reader, awake:   stamp ---> words
//!                                                reader, asleep:  tail  ---> words
//! ```
//! The tail comes before the stamp, so a reader that has seen the stamp never loads an older tail.
#![expect(unsafe_code, reason = "lays a line of atomic words over bytes of a ring")]

use crate::bytes::{OwnBytes, PeerBytes};
use crate::corrupt::Corrupt;
use crate::sync::{Access, AtomicU64, Load, Ordering, Own, Peer, load_acquire};

/// Bytes of a record.
pub const RECORD: u64 = 64;
/// Bytes that a record carries in itself.
pub const INLINE: usize = 40;
/// Words behind the stamp.
const WORDS: usize = 7;

/// The line of one record.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct CallLine<A: Access = Own> {
    stamp: A::U64,
    words: [A::U64; WORDS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<CallLine>() == RECORD as usize && align_of::<CallLine>() == RECORD as usize);

/// The stamp of the record at byte `position` of the stream.
const fn stamp_at(position: u64) -> u64 {
    position.wrapping_add(1)
}

impl CallLine {
    /// A line that has never been written.
    pub fn new() -> Self {
        Self { stamp: AtomicU64::new(0), words: core::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// The line that begins where these bytes do; `None` if they are too few, or do not begin on a line.
    #[inline]
    pub fn in_own(mut bytes: OwnBytes<'_>) -> Option<&Self> {
        let line = bytes.as_mut_ptr().cast::<Self>();
        if bytes.len() < size_of::<Self>() || !line.is_aligned() {
            return None;
        }
        // SAFETY: mapped writable for the lifetime of `bytes`, which was the only way to these bytes in this process and ends here; long
        // enough and aligned. Atomic words are valid with any content, and peers only load them.
        Some(unsafe { &*line })
    }

    /// Writes the record. The peer does not see it yet: the tail is to be stored next, and then the stamp.
    #[inline]
    pub fn write(&self, record: &CallRecord) {
        for (word, value) in self.words.iter().zip(record.encode()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Hands the record at byte `position` of the stream over to a reader that looks at this line.
    #[inline]
    pub fn stamp(&self, position: u64) {
        // EDGE stamp (protocol K2): releases the words, and the tail that was stored before; acquired in `CallLine::is_stamped`.
        self.stamp.store(stamp_at(position), Ordering::Release);
    }
}

impl Default for CallLine {
    fn default() -> Self {
        Self::new()
    }
}

impl CallLine<Peer> {
    /// The line that begins where these bytes do; `None` if they are too few, or do not begin on a line.
    #[inline]
    pub fn in_peer(bytes: PeerBytes<'_>) -> Option<&Self> {
        let line = bytes.as_ptr().cast::<Self>();
        if bytes.len() < size_of::<Self>() || !line.is_aligned() {
            return None;
        }
        // SAFETY: mapped readable for the lifetime of `bytes`, long enough and aligned. The words can only be loaded, each by one atomic
        // load, and are valid with any content.
        Some(unsafe { &*line })
    }
}

impl<A: Access> CallLine<A> {
    /// Whether the writer has handed over the record at byte `position` of the stream.
    #[inline]
    pub fn is_stamped(&self, position: u64) -> bool {
        // EDGE stamp (protocol K2): acquires the writer's release in `CallLine::stamp`.
        load_acquire(&self.stamp) == stamp_at(position)
    }

    /// A private copy of the record's words. Each word is loaded once.
    #[inline]
    pub fn snapshot(&self) -> CallWords {
        CallWords(core::array::from_fn(|i| self.words[i].load(Ordering::Relaxed)))
    }
}

/// The words of a record in private memory, not yet judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallWords([u64; WORDS]);

/// The purpose of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// The first record of each side.
    Hello = 1,
    /// A call that is answered.
    Call = 2,
    /// A call that is not answered.
    Notice = 3,
    /// The answer to a call.
    Reply = 4,
    /// The reader of a reply has finished with the memory that it referred to.
    Release = 5,
    /// The writer's heap has another segment.
    Segment = 6,
}

impl RecordKind {
    const ALL: [Self; 6] = [Self::Hello, Self::Call, Self::Notice, Self::Reply, Self::Release, Self::Segment];
}

/// Flag: the bytes are not in the record but in the writer's heap.
const BY_REFERENCE: u8 = 1;

/// Bytes that a record carries, on the boundary of a word: copies of them are then copies of words, which the processor forwards from a store
/// to the load that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct InlineBytes(pub [u8; INLINE]);

/// Where the bytes of a call or a reply are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallBytes {
    /// In the record: this many of them.
    Inline(InlineBytes, u64),
    /// In the writer's heap.
    Reference {
        /// The address at which the writer has them.
        address: u64,
        /// The number of bytes.
        len: u64,
    },
}

impl CallBytes {
    /// No bytes.
    pub const EMPTY: Self = Self::Inline(InlineBytes([0; INLINE]), 0);

    /// Bytes that fit into a record; `None` if they do not.
    #[inline]
    pub fn inline(bytes: &[u8]) -> Option<Self> {
        let mut all = [0; INLINE];
        all.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Self::Inline(InlineBytes(all), bytes.len() as u64))
    }
}

/// A record, judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallRecord {
    /// The purpose of the record.
    pub kind: RecordKind,
    /// The caller's number of the call.
    pub id: u32,
    /// The number of the method that is called. In a reply, the application's own error code.
    pub method: u32,
    /// How the call ended (in a reply).
    pub status: u16,
    /// The arguments, or the results.
    pub bytes: CallBytes,
}

impl CallRecord {
    /// A record for [`CallWords::judge_to`] to fill.
    pub const BLANK: Self = Self { kind: RecordKind::Hello, id: 0, method: 0, status: 0, bytes: CallBytes::EMPTY };

    #[inline]
    fn encode(&self) -> [u64; WORDS] {
        let (flags, len, payload) = match self.bytes {
            CallBytes::Inline(InlineBytes(bytes), len) => (0, len as u32, bytes),
            CallBytes::Reference { address, len } => {
                let mut bytes = [0; INLINE];
                bytes[..8].copy_from_slice(&address.to_le_bytes());
                bytes[8..16].copy_from_slice(&len.to_le_bytes());
                (BY_REFERENCE, 0, bytes)
            }
        };
        let mut words = [0; WORDS];
        words[0] = u64::from(self.id) | u64::from(self.method) << 32;
        words[1] =
            u64::from(self.kind as u8) | u64::from(flags) << 8 | u64::from(self.status) << 16 | u64::from(len) << 32;
        for (word, bytes) in words[2..].iter_mut().zip(payload.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }
}

impl CallWords {
    /// Judges the words (protocol K3). Whether an id, a method or an address makes sense is for those who know of calls and heaps.
    #[inline]
    pub fn record(self) -> Result<CallRecord, Corrupt> {
        let mut record = CallRecord::BLANK;
        self.judge_to(&mut record).map(|()| record)
    }

    /// The same, to a place where the record then stays: a copy of it would wait for these stores.
    #[inline]
    pub fn judge_to(self, record: &mut CallRecord) -> Result<(), Corrupt> {
        let [first, second, ..] = self.0;
        let kind = second as u8;
        record.kind = RecordKind::ALL.into_iter().find(|known| *known as u8 == kind).ok_or(Corrupt::BadRecord)?;
        let (flags, len) = ((second >> 8) as u8, (second >> 32) as u32);
        record.bytes = match flags {
            0 if len as usize <= INLINE => {
                let mut bytes = [0; INLINE];
                for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&self.0[2..]) {
                    *to = word.to_le_bytes();
                }
                CallBytes::Inline(InlineBytes(bytes), u64::from(len))
            }
            BY_REFERENCE if len == 0 => CallBytes::Reference { address: self.0[2], len: self.0[3] },
            _ => return Err(Corrupt::BadRecord),
        };
        (record.id, record.method, record.status) = (first as u32, (first >> 32) as u32, (second >> 16) as u16);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec;

    fn record(kind: RecordKind, bytes: CallBytes) -> CallRecord {
        CallRecord { kind, id: 0xdead_beef, method: 0x1234_5678, status: 0xabc, bytes }
    }

    #[test]
    fn record_survives_its_line() {
        let line = CallLine::new();
        for kind in RecordKind::ALL {
            for bytes in [
                CallBytes::EMPTY,
                CallBytes::inline(&[7; INLINE]).unwrap(),
                CallBytes::inline(b"abc").unwrap(),
                CallBytes::Reference { address: u64::MAX, len: 1 << 40 },
            ] {
                line.write(&record(kind, bytes));
                assert_eq!(line.snapshot().record(), Ok(record(kind, bytes)));
            }
        }
        assert!(CallBytes::inline(&[0; INLINE + 1]).is_none());
    }

    #[test]
    fn stamp_of_an_earlier_revolution_is_not_taken() {
        let line = CallLine::new();
        assert!(!line.is_stamped(0), "memory begins with zeros");
        line.stamp(0);
        assert!(line.is_stamped(0));
        assert!(!line.is_stamped(4096));
        line.stamp(4096);
        assert!(line.is_stamped(4096) && !line.is_stamped(0));
    }

    #[test]
    fn words_without_meaning_are_corrupt() {
        let good = record(RecordKind::Call, CallBytes::EMPTY).encode();
        let with = |second: u64| {
            let mut words = good;
            words[1] = second;
            CallWords(words).record()
        };
        for kind in [0, 7, 0x80, 0xff] {
            assert_eq!(with(kind), Err(Corrupt::BadRecord), "kind {kind}");
        }
        assert_eq!(with(2 | 41 << 32), Err(Corrupt::BadRecord), "longer than a record");
        assert_eq!(with(2 | 2 << 8), Err(Corrupt::BadRecord), "unknown flag");
        assert_eq!(with(2 | 1 << 8 | 1 << 32), Err(Corrupt::BadRecord), "by reference and inline");
        assert!(with(2 | 40 << 32).is_ok());
    }

    #[test]
    fn any_words_are_a_record_that_encodes_to_itself_or_corrupt() {
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            seed >> 11
        };
        let (mut sound, mut corrupt) = (0, 0);
        for _ in 0..20_000 {
            let mut words: [u64; WORDS] = core::array::from_fn(|_| random());
            // Most words of chance are corrupt: kind, flags and length are made small.
            words[1] &= 0x3f_0000_ffff_0307;
            match CallWords(words).record() {
                Ok(record) => {
                    let line = CallLine::new();
                    line.write(&record);
                    assert_eq!(line.snapshot().record(), Ok(record));
                    assert!(!matches!(record.bytes, CallBytes::Inline(_, len) if len > INLINE as u64));
                    sound += 1;
                }
                Err(_) => corrupt += 1,
            }
        }
        assert!(sound > 100 && corrupt > 1000, "{sound} sound, {corrupt} corrupt");
    }

    #[test]
    fn line_must_be_whole_and_aligned() {
        let mut memory = vec![0u64; 24];
        let start = memory.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(64);
        for (from, len, fits) in [(0, 64, true), (0, 63, false), (8, 64, false), (0, 100, true)] {
            // SAFETY: at most 64 + 8 + 100 bytes of a vector of 192, which nothing else uses meanwhile.
            let bytes = unsafe { PeerBytes::new(start.wrapping_add(skip + from), len) };
            assert_eq!(CallLine::in_peer(bytes).is_some(), fits, "{len} bytes from {from}");
            // SAFETY: as above.
            let bytes = unsafe { OwnBytes::new(start.wrapping_add(skip + from), len) };
            assert_eq!(CallLine::in_own(bytes).is_some(), fits, "{len} bytes from {from}");
        }
    }
}
