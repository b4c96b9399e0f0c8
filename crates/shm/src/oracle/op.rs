//! The operations that a driver can be told to perform.

use super::take;

/// One step of one half. A step that the half's state does not allow is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The producing side gets to see its peer's half (protocol A1).
    Attach,
    /// Write this many bytes, or as many as there is room for; with messages, one message of that length if it fits.
    Write(u8),
    /// Read this many bytes, or as many as there are; with messages, one message.
    Read(u8),
    /// Look at the peer's head now.
    RefreshWriter,
    /// Look at the peer's tail now.
    RefreshReader,
    /// Change to a ring of this size, as an exponent, if a switch is allowed.
    Switch(u8),
    /// The writer stores its wish for this much room.
    ArmWriter(u8),
    /// The reader stores its wish for this many bytes.
    ArmReader(u8),
    /// The armed writer looks again and goes to sleep if it has to.
    SleepWriter,
    /// The armed reader looks again and goes to sleep if it has to.
    SleepReader,
    /// The sleeping writer is woken for no reason (protocol W5).
    WakeWriter,
    /// The sleeping reader is woken for no reason.
    WakeReader,
    /// The writer will write no more.
    Finish,
    /// The reader will read no more.
    Close,
    /// Like [`Self::Close`], and the reader reports whether bytes stay unread (protocol S5).
    CloseSocket,
    /// The writer's process ends without a word.
    KillWriter,
    /// The reader's process ends without a word.
    KillReader,
}

impl Op {
    /// Takes one operation off the front of `input`; `None` at its end. Every input means something.
    pub fn decode(input: &mut &[u8]) -> Option<Self> {
        let tag = take(input)?;
        // The upper bits of the tag are a small argument, so that short inputs do much; 15 says that it follows.
        let arg = |input: &mut &[u8]| match tag >> 4 {
            15 => take(input),
            small => Some(small),
        };
        Some(match tag & 15 {
            0 => Self::Attach,
            1 | 2 => Self::Write(arg(input)?),
            3 | 4 => Self::Read(arg(input)?),
            5 => Self::RefreshWriter,
            6 => Self::RefreshReader,
            7 => Self::Switch(arg(input)?),
            8 => Self::ArmWriter(arg(input)?),
            9 => Self::ArmReader(arg(input)?),
            10 => Self::SleepWriter,
            11 => Self::SleepReader,
            12 => Self::WakeWriter,
            13 => Self::WakeReader,
            // Endings are rare, or little would happen before them.
            14 => match tag >> 4 {
                0 => Self::Finish,
                1 => Self::Close,
                2 => Self::KillWriter,
                3 => Self::KillReader,
                4 => Self::CloseSocket,
                n => Self::Write(n),
            },
            _ => Self::Read(arg(input)?),
        })
    }
}
