//! The states of the two halves of an endpoint (protocol S), and what they mean together.
//!
//! A channel has no separate state word: each direction is a producing half in one region and a consuming half in
//! the other, and each half has one word that only its owner writes. [`reader_end`] is what a reader may conclude from
//! its peer's, [`writer_end`] what a writer may. Death is not a state that anyone writes: it is a link that hung up
//! without one (protocol L4).
//!
//! ```text
//!   producing half:   Open --finish--> Finished         consuming half:   Open --close--> Closed
//!                      \--corruption--> Broken                            |\--corruption--> Broken
//!                                                                          \--bytes left unread--> Reset
//! ```

use crate::corrupt::Corrupt;
use crate::sync::{AtomicU32, Load, Ordering, load_acquire_u32};

/// The state of a producing half, as it publishes it (protocol S1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum TxState {
    /// More may follow.
    Open = 0,
    /// Nothing follows the tail: read up to it, then end of stream.
    Finished = 1,
    /// It saw its peer break the protocol, and ended.
    Broken = 2,
}

/// The state of a consuming half, as it publishes it (protocol S1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum RxState {
    /// The half reads.
    Open = 0,
    /// It will read no more.
    Closed = 1,
    /// It saw its peer break the protocol, and ended.
    Broken = 2,
    /// It will read no more, and bytes that its peer committed stay unread (protocol S5).
    Reset = 3,
}

impl TxState {
    /// Loads the peer's word once. Acquire: after *Finished*, the tail that is loaded next is the last.
    pub fn load(word: &impl Load<Value = u32>) -> Result<Self, Corrupt> {
        // EDGE writer-state (protocol S3): acquires from `TxState::store`; the last byte is there.
        match load_acquire_u32(word) {
            0 => Ok(Self::Open),
            1 => Ok(Self::Finished),
            2 => Ok(Self::Broken),
            _ => Err(Corrupt::UnknownState),
        }
    }

    /// Stores the state in this side's own word. A peer that sees it sees every byte committed before.
    pub fn store(self, word: &AtomicU32) {
        // EDGE writer-state (protocol S3): releases the tail; acquired in `TxState::load`.
        word.store(self as u32, Ordering::Release);
    }
}

impl RxState {
    /// Loads the peer's word once.
    pub fn load(word: &impl Load<Value = u32>) -> Result<Self, Corrupt> {
        // EDGE reader-state (protocol S4): acquires from `RxState::store`; the reader is done with the ring.
        match load_acquire_u32(word) {
            0 => Ok(Self::Open),
            1 => Ok(Self::Closed),
            2 => Ok(Self::Broken),
            3 => Ok(Self::Reset),
            _ => Err(Corrupt::UnknownState),
        }
    }

    /// Stores the state in this side's own word. A peer that sees *closed* finds that this side reads no byte of the ring any more.
    pub fn store(self, word: &AtomicU32) {
        // EDGE reader-state (protocol S4): releases our reads of the bytes; acquired in `RxState::load`.
        word.store(self as u32, Ordering::Release);
    }
}

/// How a direction ended, as the survivor sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// In order: the reader has everything, or the writer's peer wants no more.
    Orderly,
    /// The peer went without a word.
    Dead,
    /// The peer says that *we* broke the protocol.
    Accused,
}

/// The meaning of the link's hang-up for the reader, given the producing half's state.
pub fn reader_end(state: TxState) -> End {
    match state {
        TxState::Open => End::Dead,
        TxState::Finished => End::Orderly,
        TxState::Broken => End::Accused,
    }
}

/// The meaning of the link's hang-up for the writer, given the consuming half's state.
pub fn writer_end(state: RxState) -> End {
    match state {
        RxState::Open => End::Dead,
        // Unread bytes matter to sockets alone (protocol T10.5).
        RxState::Closed | RxState::Reset => End::Orderly,
        RxState::Broken => End::Accused,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip_and_nonsense_is_corrupt() {
        let w = AtomicU32::new(9);
        assert_eq!(TxState::load(&w), Err(Corrupt::UnknownState));
        assert_eq!(RxState::load(&w), Err(Corrupt::UnknownState));
        for s in [TxState::Open, TxState::Finished, TxState::Broken] {
            s.store(&w);
            assert_eq!(TxState::load(&w), Ok(s));
        }
        for s in [RxState::Open, RxState::Closed, RxState::Broken, RxState::Reset] {
            s.store(&w);
            assert_eq!(RxState::load(&w), Ok(s));
        }
    }

    #[test]
    fn only_an_open_half_that_hangs_up_is_dead() {
        assert_eq!(reader_end(TxState::Open), End::Dead);
        assert_eq!(reader_end(TxState::Finished), End::Orderly);
        assert_eq!(reader_end(TxState::Broken), End::Accused);
        assert_eq!(writer_end(RxState::Open), End::Dead);
        assert_eq!(writer_end(RxState::Closed), End::Orderly);
        assert_eq!(writer_end(RxState::Reset), End::Orderly);
        assert_eq!(writer_end(RxState::Broken), End::Accused);
    }
}
