//! One attempt to execute a task by a connection.

use super::ImportCore;
use super::pieces::{copy_reply, first};
use super::worker::StoreJob;
use crate::chain::BufferPiece;
use crate::disk::exported::changes::DiskChange;
use crate::disk::exported::link::{ExportCalls, ExportFailure, LEAST_DATA};
use crate::disk::exported::wire::{ExportOperation, LARGEST_ZEROES};
use crate::disk::store_task::{HOLE, StoreTask};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestMemoryMmap};

/// Bytes as a task's result.
fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

impl ImportCore {
    /// Executes a task, or a part of it, and returns the number of its bytes that are done.
    pub(super) fn attempt(&self, generation: u64, calls: &ExportCalls, job: &StoreJob) -> Result<u32, ExportFailure> {
        let total: usize = job.pieces.iter().map(|piece| piece.length).sum();
        match job.task {
            StoreTask::Read { offset } => {
                let mut length = total.min(self.most_read.load(Ordering::Relaxed));
                let reply = loop {
                    match calls.request(ExportOperation::Read, (offset, length as u64), false, 0) {
                        // The exporter's heap has no room in its window. The only connection of the disk goes on with less.
                        Err(ExportFailure::NoMemory) if self.connected.load(Ordering::Relaxed) <= 1 => {
                            length = self.read_less(length).ok_or(ExportFailure::NoMemory)?;
                        }
                        reply => break reply?,
                    }
                };
                let is_whole = reply.len() == length && copy_reply(&reply, &first(&job.pieces, length), &job.memory);
                self.copied_read.fetch_add(length as u64, Ordering::Relaxed);
                if is_whole { Ok(count(length)) } else { Err(ExportFailure::Errno(Errno::IO)) }
            }
            StoreTask::Write { offset, durable } => {
                if let Some(windows) = &self.windows
                    && let Some(written) = self.write_from_group(windows, (generation, calls), job, (offset, durable))
                {
                    return written.map(count);
                }
                let length = total.min(calls.most_written());
                let pieces = first(&job.pieces, length);
                let fill = |room: &mut [u8]| self.fill(&job.memory, &pieces, room);
                let block = match calls.block((offset, length), durable, fill) {
                    // The heap is full of changes that are kept until the next flush.
                    Err(ExportFailure::NoMemory) => {
                        self.changes.flush(calls, generation)?;
                        calls.block((offset, length), durable, fill)
                    }
                    block => block,
                };
                let data = Arc::new(block?);
                self.copied_written.fetch_add(length as u64, Ordering::Relaxed);
                let kept = DiskChange::Write { offset, length, data: calls.keep(&data) };
                self.change((generation, calls), kept, durable, || calls.write(&data))?;
                Ok(count(length))
            }
            StoreTask::Zero { offset, length, durable } => {
                // The next request goes on.
                let length = length.min(LARGEST_ZEROES);
                self.change((generation, calls), DiskChange::Zero { offset, length }, durable, || {
                    calls.request(ExportOperation::Zero, (offset, length), durable, 0).map(drop)
                })?;
                Ok(u32::try_from(length).unwrap_or(u32::MAX))
            }
            StoreTask::Allocate { offset, length, mode } => {
                let change = DiskChange::Allocate { offset, length, mode };
                self.allocate((generation, calls), change, (offset, length), mode)
            }
            // The exporter gives sectors up by holes.
            StoreTask::Discard { offset, length } => {
                self.allocate((generation, calls), DiskChange::Discard { offset, length }, (offset, length), HOLE)
            }
            StoreTask::Sync => {
                let failures = self.failures.load(Ordering::SeqCst);
                self.changes.flush(calls, generation)?;
                if self.changes.has_lost() {
                    return Err(ExportFailure::Errno(Errno::IO));
                }
                self.flushed_failures.fetch_max(failures, Ordering::SeqCst);
                Ok(0)
            }
            StoreTask::Delay => Ok(0),
        }
    }

    /// The exporter's heap had no room for a read of this length. Returns the length to try next, or `None` if the exporter has no room for the
    /// least one.
    fn read_less(&self, length: usize) -> Option<usize> {
        let less = (length > LEAST_DATA).then(|| (length.next_power_of_two() / 2).max(LEAST_DATA))?;
        self.most_read.store(less, Ordering::Relaxed);
        Some(less)
    }

    /// Copies the data of a write.
    pub(super) fn fill(&self, memory: &GuestMemoryMmap, pieces: &[BufferPiece], mut room: &mut [u8]) -> bool {
        pieces.iter().all(|piece| {
            let (now, later) = std::mem::take(&mut room).split_at_mut(piece.length);
            room = later;
            memory.read_slice(now, piece.address).is_ok()
                || self.windows.as_ref().is_some_and(|windows| windows.copy(piece, now))
        })
    }

    fn allocate(
        &self,
        (generation, calls): (u64, &ExportCalls),
        change: DiskChange,
        range: (u64, u64),
        mode: i32,
    ) -> Result<u32, ExportFailure> {
        self.change((generation, calls), change, false, || {
            calls.request(ExportOperation::Allocate, range, false, mode).map(drop)
        })?;
        Ok(0)
    }

    /// Executes a change, and keeps it until a flush. A durable one is not kept where nothing else is: if earlier ones are repeated, it is repeated
    /// after them.
    pub(super) fn change(
        &self,
        (generation, calls): (u64, &ExportCalls),
        change: DiskChange,
        durable: bool,
        execute: impl FnOnce() -> Result<(), ExportFailure>,
    ) -> Result<(), ExportFailure> {
        if self.changes.is_full() {
            self.changes.flush(calls, generation)?;
        }
        let number = (!durable || !self.changes.is_empty()).then(|| self.changes.begin(change));
        let executed = if durable { self.changes.settle(execute) } else { execute() };
        if let Some(number) = number {
            self.changes.end(number, executed.is_ok());
        }
        executed
    }
}
