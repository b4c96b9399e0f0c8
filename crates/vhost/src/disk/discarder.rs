//! The thread that discards sectors of a block device. io_uring can do that only since Linux 6.12, and a discard may take long.
//!
//! One discard is under way at a time. The others wait in order, and need no descriptors.
#![expect(unsafe_code, reason = "a block device is asked to discard sectors by an ioctl")]

use crate::VhostError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::ioctl;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// `BLKDISCARD` of `linux/fs.h`.
const BLKDISCARD: ioctl::Opcode = ioctl::opcode::none(0x12, 119);

/// Sectors that a driver may discard by one request, which are 128 MiB. The end of a queue waits for all discards, and there are at most
/// [`MOST_TASKS`](super::store_task::MOST_TASKS): 128 GiB. Longer ones are done as well: a guest may have read the limit of an earlier
/// back end, and it delays only its own disk.
pub(super) const LONGEST_DISCARD: u32 = 1 << 18;

/// The value of an event for a discard that was not tried: an error without a number.
const NO_OUTCOME: u64 = 1 << 32;

/// The offset and the length of a discard.
type DiscardRange = [u64; 2];

/// The thread, for as long as this lives.
#[derive(Debug)]
pub(super) struct DeviceDiscarder {
    jobs: Option<Sender<DiscardRange>>,
    thread: Option<JoinHandle<()>>,
    /// Becomes readable at the end of a discard; [`outcome`] reads its value.
    event: Arc<OwnedFd>,
    /// The number of the task that is under way.
    current: Option<usize>,
    waiting: VecDeque<(usize, DiscardRange)>,
}

impl DeviceDiscarder {
    /// Starts it. `device` is a duplicate of the descriptor that has the disk's lock: the lock is held until the last discard has ended.
    pub(super) fn start(device: OwnedFd) -> Result<Self, VhostError> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(VhostError::system("make an eventfd"))?);
        let (jobs, taken) = channel();
        let ended = Arc::clone(&event);
        let run = move || {
            for range in taken {
                let errno = discard(&device, range).map_or_else(|e| e.raw_os_error().unsigned_abs(), |()| 0);
                let _ = rustix::io::write(&*ended, &(u64::from(errno) + 1).to_ne_bytes());
            }
        };
        let thread = std::thread::Builder::new().name("pw-blk-discard".into()).spawn(run);
        let thread = thread.map_err(|source| VhostError::System { call: "start a thread", source })?;
        let (current, waiting) = (None, VecDeque::new());
        Ok(Self { jobs: Some(jobs), thread: Some(thread), event, current, waiting })
    }

    /// Has a discard, for the task of this number, wait until [`Self::begin_next`] begins it.
    pub(super) fn add(&mut self, id: usize, offset: u64, length: u64) {
        self.waiting.push_back((id, [offset, length]));
    }

    /// Discards that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Begins a discard, if one waits and no other is under way. Returns its number, and the event that becomes readable at its end.
    pub(super) fn begin_next(&mut self) -> Option<(usize, Arc<OwnedFd>)> {
        let (id, range) = self.waiting.pop_front_if(|_| self.current.is_none())?;
        self.current = Some(id);
        if self.jobs.as_ref().is_none_or(|jobs| jobs.send(range).is_err()) {
            // The thread has ended.
            let _ = rustix::io::write(&*self.event, &NO_OUTCOME.to_ne_bytes());
        }
        Some((id, Arc::clone(&self.event)))
    }

    /// The task of this number has ended, which may be a discard.
    pub(super) fn ended(&mut self, id: usize) {
        self.current = self.current.filter(|current| *current != id);
    }
}

impl Drop for DeviceDiscarder {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The outcome of a discard, from the value of its event.
pub(super) fn outcome(value: u64) -> Result<u32, Errno> {
    match i32::try_from(value) {
        Ok(1) => Ok(0),
        Ok(errno @ 2..) => Err(Errno::from_raw_os_error(errno - 1)),
        _ => Err(Errno::IO),
    }
}

fn discard(device: &OwnedFd, range: DiscardRange) -> Result<(), Errno> {
    // SAFETY: `BLKDISCARD` reads two 64-bit numbers, the range, from the address that it gets. It writes to no memory of this process.
    unsafe { ioctl::ioctl(device, ioctl::Setter::<BLKDISCARD, [u64; 2]>::new(range)) }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn discards_of_no_device_fail_one_after_another() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let mut discarder = DeviceDiscarder::start(file).unwrap();
        for id in [7, 3, 5] {
            discarder.add(id, 0, 4096);
        }
        for (id, waiting) in [(7, 2), (3, 1), (5, 0)] {
            let (begun, event) = discarder.begin_next().unwrap();
            assert_eq!((begun, discarder.waiting()), (id, waiting));
            let mut value = [0; 8];
            rustix::io::read(&*event, &mut value).unwrap();
            assert_eq!(outcome(u64::from_ne_bytes(value)), Err(Errno::NOTTY));
            // Another task's end begins no discard.
            discarder.ended(99);
            assert!(discarder.begin_next().is_none());
            discarder.ended(id);
        }
        assert!(discarder.begin_next().is_none());
        assert_eq!((outcome(1), outcome(0), outcome(NO_OUTCOME)), (Ok(0), Err(Errno::IO), Err(Errno::IO)));
    }
}
