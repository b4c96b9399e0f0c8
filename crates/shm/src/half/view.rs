//! A view of a half for threads that do not hold it: they ask whether something is ready while another thread reads or writes.
//!
//! Both cursors of a direction lie in memory, each stored by its half alone. A view loads each once, trusts neither, and clamps its
//! results to the size of the ring. A false value of the peer makes a look return early or late, like a spurious wake-up, and the half
//! that then reads or writes detects it.

use super::wish::arm_shared;
use crate::layout::{RxHalf, TxHalf};
use crate::state::{RxState, TxState};
use crate::sync::{Access, Ordering, fence, load_acquire};

/// A reading half, and the writing half of its peer.
#[derive(Debug)]
pub struct ReaderView<'a, A: Access> {
    /// The half that reads.
    pub own: &'a RxHalf,
    /// Its peer's half, which writes.
    pub peer: &'a TxHalf<A>,
}

impl<A: Access> ReaderView<'_, A> {
    /// Bytes that wait in a ring of `size` bytes to be read.
    #[inline]
    pub fn unread(&self, size: u64) -> u64 {
        let head = self.own.cursor.head.load(Ordering::Relaxed);
        self.tail().wrapping_sub(head).min(size)
    }

    /// Where the peer has come to. Moves whenever something new can be read.
    #[inline]
    pub fn tail(&self) -> u64 {
        // EDGE tail (protocol R2): as in `Consumer::refresh`.
        load_acquire(&self.peer.cursor.tail)
    }

    /// Whether the peer says that it goes on writing. `false` also if it says what it may not: the half that reads judges that.
    #[inline]
    pub fn is_written(&self) -> bool {
        TxState::load(&self.peer.control.state) == Ok(TxState::Open)
    }

    /// Whether the peer has committed bytes that this side has not read.
    #[inline]
    pub fn has_unread(&self) -> bool {
        self.tail() != self.own.cursor.head.load(Ordering::Relaxed)
    }

    /// Closes the reading half and returns its final state: *Reset* if bytes of the peer stay unread (protocol S5), and *Closed*
    /// otherwise. The caller holds the half, so its head is final.
    ///
    /// A peer that commits bytes, fences, and then still finds this half open has committed them before the second look here, so they
    /// are not lost without *Reset*.
    pub fn close(&self) -> RxState {
        let word = &self.own.control.state;
        if !self.has_unread() {
            RxState::Closed.store(word);
            fence(Ordering::SeqCst);
            if !self.has_unread() {
                return RxState::Closed;
            }
        }
        RxState::Reset.store(word);
        RxState::Reset
    }

    /// Asks to be rung for any byte beyond those that are there, as one of several sleepers. Returns the wish that stands, for
    /// [`ReaderView::is_armed`]. To be followed by [`super::Fenced::after`] and another look.
    #[inline]
    pub fn arm(&self) -> u64 {
        self.arm_from(self.tail())
    }

    /// Like [`Self::arm`], for any byte from the cursor `from` on. If that is before the tail, bytes are held back ([`crate::held`]): the
    /// writer rings when
    /// it releases them, and until then [`ReaderView::is_armed`] is `false`.
    #[inline]
    pub fn arm_from(&self, from: u64) -> u64 {
        arm_shared(&self.own.control.data_wanted, from)
    }

    /// After the fence and a look that found too little: whether the peer rings for the next byte. If not, it had written before it could see
    /// the wish, and what it wrote was not enough, or another thread has read it. The sleeper then arms and looks once more.
    #[inline]
    pub fn is_armed(&self, wish: u64) -> bool {
        self.tail() <= wish
    }
}

/// A writing half, and the reading half of its peer.
#[derive(Debug)]
pub struct WriterView<'a, A: Access> {
    /// The half that writes.
    pub own: &'a TxHalf,
    /// Its peer's half, which reads.
    pub peer: &'a RxHalf<A>,
}

impl<A: Access> WriterView<'_, A> {
    /// Bytes that wait in a ring of `size` bytes for the peer to read them.
    #[inline]
    pub fn unread(&self, size: u64) -> u64 {
        // EDGE head (protocol R3): as in `Producer::refresh`. Loaded first: it makes the tail visible up to which it was read, which another
        // thread may have stored.
        let head = load_acquire(&self.peer.cursor.head);
        self.own.cursor.tail.load(Ordering::Relaxed).wrapping_sub(head).min(size)
    }

    /// Whether the peer says that it goes on reading. `false` also if it says what it may not: the half that writes judges that.
    #[inline]
    pub fn is_read(&self) -> bool {
        RxState::load(&self.peer.control.state) == Ok(RxState::Open)
    }

    /// Asks to be rung once `room` bytes of a ring of `size` are free, as one of several sleepers. To be followed by
    /// [`super::Fenced::after`] and another look.
    #[inline]
    pub fn arm(&self, size: u64, room: u64) -> Awaited {
        let tail = self.own.cursor.tail.load(Ordering::Relaxed);
        // EDGE head (protocol R3): as in `Producer::refresh`.
        if tail.wrapping_sub(load_acquire(&self.peer.cursor.head)) <= size - room {
            return Awaited::There { tail };
        }
        // Saturating: of a socket that lived through a `fork`, the tail is memory that another process can write.
        Awaited::Wish(arm_shared(&self.own.control.space_wanted, tail.saturating_add(room).saturating_sub(size + 1)))
    }

    /// After the fence and a look that found no news: whether nothing has come between that the sleeper would miss. If something has, another
    /// thread has made use of it. The sleeper then arms and looks once more.
    #[inline]
    pub fn is_armed(&self, awaited: Awaited) -> bool {
        // EDGE head (protocol R3): as in `Producer::refresh`.
        let head = load_acquire(&self.peer.cursor.head);
        let now = self.own.cursor.tail.load(Ordering::Relaxed);
        match awaited {
            // The look has seen that event too. A thread that uses up the room after this look, and is refused more, stores its own wish.
            Awaited::There { tail } => tail == now,
            // A head beyond the tail is a lie, and none that is worth staying awake for.
            Awaited::Wish(wish) => head <= wish || head > now,
        }
    }
}

/// The event that a sleeper for room waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// No event: the room was there when it armed, at this tail.
    There {
        /// The cursor of the half that writes.
        tail: u64,
    },
    /// The peer's head to pass this.
    Wish(u64),
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::half::{ReadingHalf, WritingHalf};
    use crate::wake::{AWAKE, Fencing};

    #[test]
    fn views_show_state_of_both_halves() {
        let (tx, rx) = (TxHalf::new(), RxHalf::new());
        let (mut writer, mut reader) = (WritingHalf::new(8), ReadingHalf::new(8, 0));
        let (from, to) = (ReaderView { own: &rx, peer: &tx }, WriterView { own: &tx, peer: &rx });
        writer.commit(&tx, Some(&rx), 5, Fencing::Symmetric);
        assert_eq!((from.unread(8), to.unread(8), from.tail()), (5, 5, 5));
        assert_eq!(reader.refresh(&tx), Ok(5));
        reader.release(&rx, &tx, 2, Fencing::Symmetric);
        assert_eq!((from.unread(8), to.unread(8), from.tail()), (3, 3, 5));
        assert!(from.is_written() && to.is_read());
        writer.finish(&tx);
        reader.close(&rx);
        assert!(!from.is_written() && !to.is_read());
    }

    #[test]
    fn reader_that_closes_with_bytes_unread_says_reset() {
        for (read, said) in [(5, RxState::Closed), (4, RxState::Reset), (0, RxState::Reset)] {
            let (tx, rx) = (TxHalf::new(), RxHalf::new());
            let (mut writer, mut reader) = (WritingHalf::new(8), ReadingHalf::new(8, 0));
            writer.commit(&tx, Some(&rx), 5, Fencing::Symmetric);
            assert_eq!(reader.refresh(&tx), Ok(5));
            reader.release(&rx, &tx, read, Fencing::Symmetric);
            let view = ReaderView { own: &rx, peer: &tx };
            assert_eq!((view.has_unread(), view.close()), (read < 5, said), "after {read} bytes");
            assert_eq!(RxState::load(&rx.control.state), Ok(said), "after {read} bytes");
        }
    }

    #[test]
    fn armed_view_is_rung_when_its_bytes_or_room_arrive() {
        let (tx, rx) = (TxHalf::new(), RxHalf::new());
        let (mut writer, mut reader) = (WritingHalf::new(8), ReadingHalf::new(8, 0));
        let (from, to) = (ReaderView { own: &rx, peer: &tx }, WriterView { own: &tx, peer: &rx });
        assert!(!writer.commit(&tx, Some(&rx), 3, Fencing::Symmetric), "nobody sleeps");
        assert_eq!(from.arm(), 3, "what is there already is not waited for");
        assert!(writer.commit(&tx, Some(&rx), 5, Fencing::Symmetric));
        assert_eq!(to.arm(8, 2), Awaited::Wish(1));
        assert_eq!(reader.refresh(&tx), Ok(8));
        assert!(reader.release(&rx, &tx, 2, Fencing::Symmetric), "two bytes are free");
    }

    #[test]
    fn wish_that_came_too_late_is_not_armed() {
        let (tx, rx) = (TxHalf::new(), RxHalf::new());
        let (mut writer, mut reader) = (WritingHalf::new(8), ReadingHalf::new(8, 0));
        let (from, to) = (ReaderView { own: &rx, peer: &tx }, WriterView { own: &tx, peer: &rx });
        let wish = from.arm();
        assert!(from.is_armed(wish));
        writer.commit(&tx, Some(&rx), 8, Fencing::Symmetric);
        assert!(!from.is_armed(wish), "it was passed");
        let awaited = to.arm(8, 2);
        assert!(to.is_armed(awaited));
        assert_eq!(reader.refresh(&tx), Ok(8));
        reader.release(&rx, &tx, 2, Fencing::Symmetric);
        assert!(!to.is_armed(awaited), "it was passed");
        let awaited = to.arm(8, 2);
        assert_eq!(awaited, Awaited::There { tail: 8 });
        assert!(to.is_armed(awaited));
        assert_eq!(writer.refresh(&rx), Ok(2));
        writer.commit(&tx, Some(&rx), 2, Fencing::Symmetric);
        assert!(!to.is_armed(awaited), "it was used");
        let awaited = to.arm(8, 2);
        rx.cursor.head.store(11, Ordering::Relaxed);
        assert!(to.is_armed(awaited), "a lie");
    }

    #[test]
    fn lies_show_no_more_than_a_ring_holds() {
        let (tx, rx) = (TxHalf::new(), RxHalf::new());
        tx.cursor.tail.store(u64::MAX, Ordering::Relaxed);
        rx.cursor.head.store(u64::MAX - 1, Ordering::Relaxed);
        let (from, to) = (ReaderView { own: &RxHalf::new(), peer: &tx }, WriterView { own: &TxHalf::new(), peer: &rx });
        assert_eq!((from.unread(8), to.unread(8)), (8, 2));
        rx.cursor.head.store(1, Ordering::Relaxed);
        assert_eq!(to.unread(8), 8);
        assert_eq!(from.arm(), AWAKE, "a tail that no stream reaches");
        tx.control.state.store(9, Ordering::Relaxed);
        rx.control.state.store(9, Ordering::Relaxed);
        assert!(!from.is_written() && !to.is_read());
    }
}
