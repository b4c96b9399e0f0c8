//! Bytes that a sender has committed and that its reader leaves in the ring for a moment, because the sending program has said that more follows
//! (`MSG_MORE`, `TCP_CORK`; protocol T16).
//!
//! ```text
//!        head          held - 1       tail
//!  --------|##############|~~~~~~~~~~~~~|........|----> bytes of the stream
//!          |<- readable ->|<-held back->|<-free->|
//! ```
//!
//! The bytes are committed all the same. So nothing of them depends on a further call of the sender: they are in the ring when the sender
//! switches to TCP, closes, or dies, and the reader takes them after a while if the sender does nothing.
//!
//! I/O-free, as [`crate::producer`].

use crate::layout::{RxHalf, TxPath};
use crate::sync::{Access, Ordering};
use crate::wake::{Fencing, must_ring};

/// The sender's private state.
#[derive(Debug, Default)]
pub struct HeldBack {
    /// The first byte that is held back, if any is.
    from: Option<u64>,
}

impl HeldBack {
    /// A sender that holds nothing back.
    pub const fn new() -> Self {
        Self { from: None }
    }

    /// A sender that goes on where another left off, which has committed everything before `tail`. `None` if no sender says this: the first byte
    /// that is held back was kept in memory that others can write.
    #[inline]
    pub const fn resume(from: Option<u64>, tail: u64) -> Option<Self> {
        match from {
            Some(from) if from > tail => None,
            _ => Some(Self { from }),
        }
    }

    /// The first byte that is held back, if any is.
    #[inline]
    pub const fn from(&self) -> Option<u64> {
        self.from
    }

    /// Whether bytes are held back.
    #[inline]
    pub const fn is_holding(&self) -> bool {
        self.from.is_some()
    }

    /// The bytes before `tail` that are held back.
    pub const fn held(&self, tail: u64) -> u64 {
        match self.from {
            Some(from) => tail - from,
            None => 0,
        }
    }

    /// The bytes from `tail` on are held back, unless earlier ones are already. To be called before they are committed: a reader that sees them
    /// then sees this as well.
    pub fn hold(&mut self, own: &TxPath, tail: u64) {
        if self.from.is_none() {
            self.from = Some(tail);
            own.held.store(tail + 1, Ordering::Relaxed);
        }
    }

    /// Everything before `tail`, which is committed, may be read. Returns whether the reader must be rung (protocol T16.3).
    ///
    /// A reader that has found nothing because of the hold wishes for the first byte of it.
    #[inline]
    pub fn release<A: Access>(&mut self, own: &TxPath, peer: &RxHalf<A>, tail: u64, fencing: Fencing) -> bool {
        let Some(from) = self.from.take() else { return false };
        // EDGE held (with the reader's heavy fence): stored after the tail, and loaded after the reader has stored its wish and fenced.
        own.held.store(0, Ordering::Release);
        fencing.light();
        must_ring(&peer.control.data_wanted, from, tail)
    }
}

/// The cursor up to which a reader may read, if it has loaded `tail` and, after it, the peer's word `held`. Bytes before `passed` are no
/// longer held back.
///
/// A false word makes bytes visible early or late, but never more bytes: the result is at most `tail`.
#[inline]
pub fn visible(tail: u64, held: u64, passed: u64) -> u64 {
    match held.checked_sub(1) {
        Some(from) if from < tail => from.max(passed).min(tail),
        _ => tail,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::half::{ReaderView, ReadingHalf, WritingHalf};
    use crate::layout::TxHalf;

    struct Ends {
        tx: TxHalf,
        rx: RxHalf,
        path: TxPath,
        writer: WritingHalf,
        reader: ReadingHalf,
        holder: HeldBack,
    }

    impl Ends {
        fn new() -> Self {
            let (writer, reader) = (WritingHalf::new(64), ReadingHalf::new(64, 0));
            Self { tx: TxHalf::new(), rx: RxHalf::new(), path: TxPath::new(), writer, reader, holder: HeldBack::new() }
        }

        /// Returns whether to ring.
        fn write(&mut self, n: u64, more: bool) -> bool {
            if more {
                self.holder.hold(&self.path, self.writer.tail());
            }
            let ring = self.writer.commit(&self.tx, Some(&self.rx), n, Fencing::Symmetric);
            let tail = self.writer.tail();
            ring | (!more && self.holder.release(&self.path, &self.rx, tail, Fencing::Symmetric))
        }

        fn visible(&self, passed: u64) -> u64 {
            let tail = ReaderView { own: &self.rx, peer: &self.tx }.tail();
            visible(tail, self.path.held.load(Ordering::Relaxed), passed)
        }
    }

    #[test]
    fn held_bytes_show_together_with_those_that_follow() {
        let mut ends = Ends::new();
        ends.write(3, false);
        assert_eq!(ends.visible(0), 3);
        ends.write(4, true);
        ends.write(5, true);
        assert_eq!((ends.visible(0), ends.holder.held(ends.writer.tail())), (3, 9));
        assert_eq!(ends.visible(7), 7, "the reader has waited for those");
        ends.write(1, false);
        assert_eq!((ends.visible(0), ends.holder.is_holding()), (13, false));
        assert_eq!(ends.reader.refresh(&ends.tx), Ok(13), "they were in the ring all the time");
    }

    #[test]
    fn sleeper_is_rung_only_at_begin_and_end_of_hold() {
        let mut ends = Ends::new();
        let arm = |ends: &Ends| {
            let view = ReaderView { own: &ends.rx, peer: &ends.tx };
            view.is_armed(view.arm_from(ends.visible(0)))
        };
        assert!(arm(&ends));
        assert!(ends.write(4, true), "it limits its sleep from here on");
        assert!(!arm(&ends), "a sleeper that has seen held bytes sleeps for a moment only");
        assert!(!ends.write(4, true));
        assert!(ends.write(4, false));
        assert!(!ends.write(4, false), "nobody has asked again");
    }

    #[test]
    fn release_without_new_bytes_rings_a_sleeper() {
        let mut ends = Ends::new();
        ends.write(4, true);
        let view = ReaderView { own: &ends.rx, peer: &ends.tx };
        view.arm_from(visible(4, 1, 0));
        assert!(ends.holder.release(&ends.path, &ends.rx, 4, Fencing::Symmetric));
        assert!(!ends.holder.release(&ends.path, &ends.rx, 4, Fencing::Symmetric), "nothing is held");
    }

    #[test]
    fn lies_show_no_byte_that_is_not_there() {
        for held in [0, 1, 5, 9, 10, 11, u64::MAX] {
            for passed in [0, 5, 9, 20, u64::MAX] {
                assert!(visible(9, held, passed) <= 9, "{held} {passed}");
            }
        }
        assert_eq!(visible(9, u64::MAX, 0), 9);
    }
}
