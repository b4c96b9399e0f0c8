//! A minimal ring each way, as a C program would write it for itself: free-running cursors, each side's cached by the other, double
//! mapped data, spinning when empty or full. No wake-ups, no counters, no checks, no death. The ground truth for rates.

use std::{cell::Cell, hint::spin_loop, os::fd::OwnedFd, sync::atomic::Ordering};

use super::{
    CopyLink, SideDescriptors,
    memory::{RawRingMemory, create},
};
use crate::{
    error::{During, Result},
    mechanism::Tuning,
    task::{MeasuringSide, MeasuringTask},
};

/// Where the producer's and the consumer's cursor lie in the control page.
const TAIL: usize = 0;
const HEAD: usize = 128;
/// The most that is copied before the cursor moves, so that both sides copy at once.
const PIECE: usize = 64 << 10;

/// One ring each way.
pub(super) fn prepare(tuning: &Tuning) -> Result<[Vec<OwnedFd>; 2]> {
    let (forward, reverse) = (create(tuning.ring as usize)?, create(tuning.ring as usize)?);
    let again = |fd: &OwnedFd| fd.try_clone().during("duplicating shared memory");
    Ok([vec![again(&forward)?, again(&reverse)?], vec![forward, reverse]])
}

/// One direction, seen from one side.
#[derive(Debug)]
struct PlainDirection {
    memory: RawRingMemory,
    size: u64,
    /// This side's cursor.
    own: u64,
    /// The last value read of the other side's cursor.
    other: Cell<u64>,
}

impl PlainDirection {
    fn open(wires: &mut SideDescriptors, size: u64) -> Result<Self> {
        Ok(Self { memory: RawRingMemory::new(&wires.take()?, size as usize)?, size, own: 0, other: Cell::new(0) })
    }

    fn at(&self) -> usize {
        (self.own & (self.size - 1)) as usize
    }

    fn piece(&self) -> usize {
        PIECE.min(self.size as usize / 4)
    }

    /// Free bytes: at least one.
    fn space(&self) -> usize {
        while self.own - self.other.get() == self.size {
            self.other.set(self.memory.word(HEAD).load(Ordering::Acquire));
            if self.own - self.other.get() < self.size {
                break;
            }
            spin_loop();
        }
        (self.size - (self.own - self.other.get())) as usize
    }

    fn push(&mut self, mut rest: &[u8]) {
        while !rest.is_empty() {
            let n = rest.len().min(self.piece()).min(self.space());
            self.memory.write(self.at(), &rest[..n]);
            self.own += n as u64;
            self.memory.word(TAIL).store(self.own, Ordering::Release);
            rest = &rest[n..];
        }
    }

    fn pull(&mut self, buffer: &mut [u8]) -> usize {
        while self.other.get() == self.own {
            self.other.set(self.memory.word(TAIL).load(Ordering::Acquire));
            if self.other.get() != self.own {
                break;
            }
            spin_loop();
        }
        let n = buffer.len().min(self.piece()).min((self.other.get() - self.own) as usize);
        self.memory.read(self.at(), &mut buffer[..n]);
        self.own += n as u64;
        self.memory.word(HEAD).store(self.own, Ordering::Release);
        n
    }
}

/// Both directions.
#[derive(Debug)]
pub(super) struct PlainRing {
    out: PlainDirection,
    inward: PlainDirection,
}

impl PlainRing {
    pub(super) fn open(mut wires: SideDescriptors, task: &MeasuringTask) -> Result<Self> {
        let forward = PlainDirection::open(&mut wires, task.tuning.ring)?;
        let reverse = PlainDirection::open(&mut wires, task.tuning.ring)?;
        Ok(match task.side {
            MeasuringSide::Active => Self { out: forward, inward: reverse },
            MeasuringSide::Passive => Self { out: reverse, inward: forward },
        })
    }
}

impl CopyLink for PlainRing {
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.out.push(message);
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        Ok(self.inward.pull(buffer))
    }

    fn ring(&self) -> Option<u64> {
        Some(self.out.size)
    }
}
