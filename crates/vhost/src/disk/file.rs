//! A disk whose bytes are in a file or block device of this host.

use super::DiskOptions;
use super::counters::CopiedBytes;
use super::discarder::{DeviceDiscarder, LONGEST_DISCARD};
use super::flusher::DiskFlusher;
use super::image::DiskImage;
use super::request::{DiskGeometry, DiskOperation, MOST_RANGE};
use super::store::DiskStore;
use super::store_task::StoreTask;
use super::task::DiskTask;
use super::uring::TaskQueue;
use crate::VhostError;
use crate::chain::BufferPiece;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tracing::warn;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The file, and the tasks for it that the kernel has.
#[derive(Debug)]
pub(crate) struct FileDisk {
    image: DiskImage,
    queue: TaskQueue,
    /// For a block device. It is dropped after the queue, which waits for its discards.
    discarder: Option<DeviceDiscarder>,
    flusher: DiskFlusher,
    copied: CopiedBytes,
}

impl FileDisk {
    /// Opens it, and waits until no other back end has it.
    pub(crate) fn open(options: &DiskOptions) -> Result<Self, VhostError> {
        let image = DiskImage::open(options)?;
        let queue = TaskQueue::new(image.fd(), options.faults.delay)?;
        let discarder = match image.geometry(options.discard).discards && image.is_device() {
            true => {
                let device = image.fd().try_clone_to_owned();
                let device = device.map_err(|source| VhostError::System { call: "keep the disk", source })?;
                Some(DeviceDiscarder::start(device)?)
            }
            false => None,
        };
        let flusher = DiskFlusher::default();
        Ok(Self { image, queue, discarder, flusher, copied: CopiedBytes::default() })
    }

    /// Begins a discard of a block device and a flush, if they wait and no other is under way.
    fn begin_waiting(&mut self) {
        self.begin_discard();
        if let Some(id) = self.flusher.begin_next() {
            let begun = self.queue.begin_sync(id);
            debug_assert!(begun, "a flush has the number of another task");
        }
    }

    /// Begins a discard of a block device, if one waits and no other is under way.
    fn begin_discard(&mut self) {
        if let Some((id, event)) = self.discarder.as_mut().and_then(DeviceDiscarder::begin_next) {
            let begun = self.queue.begin_event(id, event);
            debug_assert!(begun, "a discard has the number of another task");
        }
    }
}

impl DiskStore for FileDisk {
    fn geometry(&self, discards: bool) -> DiskGeometry {
        self.image.geometry(discards)
    }

    fn block(&self) -> u32 {
        self.image.block()
    }

    fn longest_discard(&self) -> u32 {
        if self.discarder.is_some() { LONGEST_DISCARD } else { MOST_RANGE }
    }

    fn refresh(&mut self) -> Result<bool, VhostError> {
        self.image.refresh()
    }

    fn grow(&mut self, size: u64) -> Result<(), VhostError> {
        self.image.grow(size)
    }

    fn takes(&self, task: &DiskTask) -> bool {
        let image = &self.image;
        match task.request.operation {
            DiskOperation::Read | DiskOperation::Write => {
                let fits = |piece: &BufferPiece| image.is_aligned(piece.address.0 as usize, piece.length, 0);
                image.is_aligned(0, 0, task.request.offset) && task.pieces.iter().all(fits)
            }
            DiskOperation::WriteZeroes { .. } => image.is_aligned(0, 0, task.request.offset | task.request.length),
            DiskOperation::Discard | DiskOperation::Flush | DiskOperation::Identify => true,
        }
    }

    /// A write that goes through the page cache is not: the kernel reports a lost page to one of the calls that ask for it, so of two such writes
    /// one could take the other's error.
    fn writes_durably(&self) -> bool {
        self.image.is_direct()
    }

    fn by_copy(&mut self, task: &DiskTask, memory: &GuestMemoryMmap) -> Result<(), Errno> {
        const STEP: usize = 1 << 20;
        let mut offset = task.request.offset;
        match task.request.operation {
            DiskOperation::WriteZeroes { .. } => self.image.write_zeroes(offset, task.request.length)?,
            operation => {
                let mut bytes = vec![0; STEP];
                for piece in &task.pieces {
                    let mut at = 0;
                    while at < piece.length {
                        let part = &mut bytes[..STEP.min(piece.length - at)];
                        let address = GuestAddress(piece.address.0 + at as u64);
                        if operation == DiskOperation::Read {
                            self.image.read_at(offset, part)?;
                            memory.write_slice(part, address).map_err(|_| Errno::FAULT)?;
                            self.copied.read += part.len() as u64;
                        } else {
                            memory.read_slice(part, address).map_err(|_| Errno::FAULT)?;
                            self.copied.written += part.len() as u64;
                            self.image.write_at(offset, part)?;
                        }
                        (at, offset) = (at + part.len(), offset + part.len() as u64);
                    }
                }
            }
        }
        let durable = task.writethrough && task.request.operation != DiskOperation::Read;
        if durable { self.flusher.flush_alone(|| self.image.sync()) } else { Ok(()) }
    }

    fn begin(
        &mut self,
        id: usize,
        task: StoreTask,
        memory: &Arc<GuestMemoryMmap>,
        pieces: &[BufferPiece],
        skip: usize,
    ) -> bool {
        // [`Self::submit`] begins discards of a device, and flushes.
        match (task, &mut self.discarder) {
            (StoreTask::Sync, _) => self.flusher.add(id),
            (StoreTask::Discard { offset, length }, Some(discarder)) => {
                discarder.add(id, offset, length);
                true
            }
            (task, _) => self.queue.begin(id, task, memory, pieces, skip),
        }
    }

    fn submit(&mut self) {
        self.begin_waiting();
        self.queue.submit();
    }

    fn busy(&self) -> usize {
        self.queue.busy() + self.flusher.waiting() + self.discarder.as_ref().map_or(0, DeviceDiscarder::waiting)
    }

    fn wait(&mut self) {
        if !self.flusher.has_ended() {
            self.begin_waiting();
            self.queue.wait();
        }
    }

    fn ended(&mut self) -> Option<(usize, Result<u32, Errno>)> {
        if let Some(ended) = self.flusher.next_ended() {
            return Some(ended);
        }
        let (id, result) = self.queue.ended()?;
        if let Some(discarder) = &mut self.discarder {
            discarder.ended(id);
        }
        if self.flusher.end(id, result) {
            let path = self.image.path().display();
            warn!(
                "{path}: a flush has failed; the kernel may have given up data, so all further flushes fail until the disk's back end is started again"
            );
        }
        Some((id, result))
    }

    fn descriptor(&self) -> Result<OwnedFd, VhostError> {
        self.queue.descriptor().map_err(|source| VhostError::System { call: "watch io_uring", source })
    }

    fn copied(&self) -> CopiedBytes {
        self.copied
    }
}
