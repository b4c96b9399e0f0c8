//! Cache lines that go back and forth: what the processor allows.

use std::{hint::spin_loop, os::fd::OwnedFd, sync::atomic::Ordering};

use super::{
    CopyLink, SideDescriptors,
    memory::{RawRingMemory, create},
};
use crate::{
    error::{During, Result},
    task::MeasuringSide,
};

/// Bytes of data: the two directions' lines.
const DATA: usize = 4096;
/// Bytes that one line carries.
const LINE: usize = 64;

/// One page of cursors and one of data, for both sides.
pub(super) fn prepare() -> Result<[Vec<OwnedFd>; 2]> {
    let memory = create(DATA)?;
    let again = memory.try_clone().during("duplicating shared memory")?;
    Ok([vec![memory], vec![again]])
}

/// One word, written by both sides in turn.
#[derive(Debug)]
pub(super) struct OneLine {
    memory: RawRingMemory,
    turn: u64,
}

impl OneLine {
    pub(super) fn open(mut wires: SideDescriptors) -> Result<Self> {
        Ok(Self { memory: RawRingMemory::new(&wires.take()?, DATA)?, turn: 0 })
    }
}

impl CopyLink for OneLine {
    fn send(&mut self, _message: &[u8]) -> Result<()> {
        self.turn += 1;
        self.memory.word(0).store(self.turn, Ordering::Release);
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.turn += 1;
        let word = self.memory.word(0);
        while word.load(Ordering::Acquire) != self.turn {
            spin_loop();
        }
        Ok(buffer.len())
    }
}

/// Each way a line of data and a line with the cursor, as in any ring; each line has one writer.
#[derive(Debug)]
pub(super) struct TwoLine {
    memory: RawRingMemory,
    /// Where the cursor and the data that this side writes are; the other side's are at the other place.
    own: usize,
    other: usize,
    sent: u64,
    received: u64,
}

impl TwoLine {
    pub(super) fn open(mut wires: SideDescriptors, side: MeasuringSide) -> Result<Self> {
        // Two lines apart, so that a prefetcher that fetches pairs of lines does not join what is separate.
        let (own, other) = match side {
            MeasuringSide::Active => (0, 2 * LINE),
            MeasuringSide::Passive => (2 * LINE, 0),
        };
        Ok(Self { memory: RawRingMemory::new(&wires.take()?, DATA)?, own, other, sent: 0, received: 0 })
    }
}

impl CopyLink for TwoLine {
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.memory.write(self.own, &message[..message.len().min(LINE)]);
        self.sent += 1;
        self.memory.word(self.own).store(self.sent, Ordering::Release);
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.received += 1;
        let cursor = self.memory.word(self.other);
        while cursor.load(Ordering::Acquire) != self.received {
            spin_loop();
        }
        let len = buffer.len().min(LINE);
        self.memory.read(self.other, &mut buffer[..len]);
        Ok(len)
    }
}
