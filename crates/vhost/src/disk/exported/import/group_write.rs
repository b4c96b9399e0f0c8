//! Writes of data that lies in a group (protocol E4).

use super::ImportCore;
use super::pieces::first;
use super::worker::StoreJob;
use crate::chain::BufferPiece;
use crate::disk::exported::changes::DiskChange;
use crate::disk::exported::link::{ExportCalls, ExportFailure, KeptData};
use crate::disk::exported::passed::{GroupData, PassedWindows};
use crate::disk::image::ALIGN;
use partywall::{Buffer, Error};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::warn;
use vm_memory::GuestMemoryBackend;

impl ImportCore {
    /// Writes data that lies in the group, or is copied into it (protocol E4). How many bytes, from the first one on; `None` if the data has to go
    /// another way.
    pub(super) fn write_from_group(
        &self,
        windows: &PassedWindows,
        (generation, calls): (u64, &ExportCalls),
        job: &StoreJob,
        (offset, durable): (u64, bool),
    ) -> Option<Result<usize, ExportFailure>> {
        if self.no_group.load(Ordering::Relaxed) == generation {
            return None;
        }
        let is_own = |piece: &BufferPiece| job.memory.get_slice(piece.address, piece.length).is_ok();
        let others = if job.pieces.iter().any(is_own) { None } else { windows.borrow_all(&job.pieces) };
        let total = job.pieces.iter().map(|piece| piece.length).sum();
        let (data, length) = match others {
            Some(parts) => (GroupData::Others(parts), total),
            None => {
                let mut buffer = self.group_buffer(windows, (generation, calls), total)?;
                let length = buffer.len();
                if !self.fill(&job.memory, &first(&job.pieces, length), &mut buffer) {
                    return Some(Err(ExportFailure::Unseen));
                }
                self.copied_written.fetch_add(length as u64, Ordering::Relaxed);
                (GroupData::Own(buffer), length)
            }
        };
        let is_own = matches!(data, GroupData::Own(_));
        let data = Arc::new(data);
        let kept = DiskChange::Write { offset, length, data: KeptData::InGroup(Arc::clone(&data)) };
        let written = self.change((generation, calls), kept, durable, || {
            calls.write_from(&data, offset, durable).inspect_err(|e| {
                if is_own {
                    let unanswered = (*e == ExportFailure::Ended).then_some(generation);
                    self.changes.hold(Arc::clone(&data), unanswered);
                }
            })
        });
        match written {
            Ok(()) if !is_own => {
                self.passed.fetch_add(length as u64, Ordering::Relaxed);
            }
            // The exporter does not take part in the group, or does not see this process's buffers.
            Err(ExportFailure::Errno(e)) if e == Errno::OPNOTSUPP || (e == Errno::STALE && is_own) => {
                self.no_group.store(generation, Ordering::Relaxed);
                return None;
            }
            // The exporter does not see the buffer, for example one of a back end that has ended.
            Err(ExportFailure::Errno(Errno::STALE)) => return None,
            _ => {}
        }
        Some(written.map(|()| length))
    }

    /// A buffer of the group for a write, or for its beginning. `None` if the group has none.
    fn group_buffer(
        &self,
        windows: &PassedWindows,
        (generation, calls): (u64, &ExportCalls),
        mut length: usize,
    ) -> Option<Buffer> {
        let unit = ALIGN.max(self.first.block as usize);
        let mut is_flushed = false;
        loop {
            match windows.group().alloc(length) {
                Ok(buffer) => return Some(buffer),
                // It may be full of changes that are kept until the next flush.
                Err(Error::Full(_)) if !is_flushed => {
                    self.changes.flush(calls, generation).ok()?;
                    is_flushed = true;
                }
                Err(Error::Full(_) | Error::TooLarge { .. }) if length / 2 >= unit => {
                    length = length / 2 / unit * unit;
                }
                Err(Error::Full(_)) => return None,
                Err(error) => {
                    warn!(%error, "the group has no buffers; what is written is copied another time");
                    self.no_group.store(generation, Ordering::Relaxed);
                    return None;
                }
            }
        }
    }
}
