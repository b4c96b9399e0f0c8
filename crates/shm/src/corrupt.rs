//! The one error that means *the peer broke the protocol*.

use core::fmt;

/// A violation of the protocol by the peer. It is always the peer's fault, never this side's or the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Corrupt {
    /// A cursor was smaller than it had been (protocol R4).
    CursorWentBackwards,
    /// A cursor was further than the ring allows (protocol R1, R4).
    CursorOutOfRange,
    /// A half's state word had no meaning (protocol S4).
    UnknownState,
    /// A record was longer than what was committed, or than the channel allows (protocol D2).
    BadRecord,
    /// A ring switch that skips a generation or points outside the committed bytes (protocol A3, A4).
    BadSwitch,
    /// A region whose header does not say what was agreed (protocol M3).
    BadHeader,
    /// A region that is not sealed, not of the size told, or not wholly allocated (protocol M2).
    BadRegion,
    /// A packet on the link that is none of the known ones (protocol L2).
    BadPacket,
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CursorWentBackwards => "a ring cursor went backwards",
            Self::CursorOutOfRange => "a ring cursor is out of range",
            Self::UnknownState => "its state word is unknown",
            Self::BadRecord => "a message record is longer than what was committed or allowed",
            Self::BadSwitch => "it switched rings in a way the protocol forbids",
            Self::BadHeader => "its region header does not say what was agreed",
            Self::BadRegion => "its region is unsealed, of the wrong size, or not wholly allocated",
            Self::BadPacket => "it sent an unknown packet on the link",
        })
    }
}

impl core::error::Error for Corrupt {}
