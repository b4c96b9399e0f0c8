#![expect(unsafe_code, reason = "a block device is asked to discard sectors by an ioctl")]
//! The thread that discards sectors of a block device. io_uring can do that only since Linux 6.12, and a discard may take long.

use crate::VhostError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::ioctl;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// `BLKDISCARD` of `linux/fs.h`.
const BLKDISCARD: ioctl::Opcode = ioctl::opcode::none(0x12, 119);

/// A range to discard.
#[derive(Debug)]
struct DiscardJob {
    range: [u64; 2],
    /// Gets the outcome: [`outcome`] reads it.
    event: Arc<OwnedFd>,
}

/// The thread, for as long as this lives.
#[derive(Debug)]
pub(super) struct DeviceDiscarder {
    jobs: Option<Sender<DiscardJob>>,
    thread: Option<JoinHandle<()>>,
}

impl DeviceDiscarder {
    /// Starts it. `device` is a duplicate of the descriptor that has the disk's lock: the lock is held until the last discard has ended.
    pub(super) fn start(device: OwnedFd) -> Result<Self, VhostError> {
        let (jobs, taken) = channel::<DiscardJob>();
        let run = move || {
            for DiscardJob { range, event } in taken {
                let errno = discard(&device, range).map_or_else(|e| e.raw_os_error().unsigned_abs(), |()| 0);
                let _ = rustix::io::write(&*event, &(u64::from(errno) + 1).to_ne_bytes());
            }
        };
        let thread = std::thread::Builder::new().name("pw-blk-discard".into()).spawn(run);
        let thread = thread.map_err(|source| VhostError::System { call: "start a thread", source })?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Begins a discard. Returns the event that becomes readable when it has ended; its value is for [`outcome`].
    pub(super) fn begin(&self, offset: u64, length: u64) -> Option<Arc<OwnedFd>> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).ok()?);
        let job = DiscardJob { range: [offset, length], event: Arc::clone(&event) };
        self.jobs.as_ref()?.send(job).ok()?;
        Some(event)
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

fn discard(device: &OwnedFd, range: [u64; 2]) -> Result<(), Errno> {
    // SAFETY: `BLKDISCARD` reads two 64-bit numbers, the range, from the address that it gets. It writes to no memory of this process.
    unsafe { ioctl::ioctl(device, ioctl::Setter::<BLKDISCARD, [u64; 2]>::new(range)) }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn discard_of_no_device_ends_with_its_error() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let discarder = DeviceDiscarder::start(file).unwrap();
        let event = discarder.begin(0, 4096).unwrap();
        let mut value = [0; 8];
        rustix::io::read(&*event, &mut value).unwrap();
        assert_eq!(outcome(u64::from_ne_bytes(value)), Err(Errno::NOTTY));
        assert_eq!((outcome(1), outcome(0), outcome(u64::MAX)), (Ok(0), Err(Errno::IO), Err(Errno::IO)));
    }
}
