//! The requests that a back end has taken and not completed, in memory that outlives it.
//!
//! The front end keeps the memory while the back end runs, dies and is started again. The layout is that of split queues in the
//! vhost-user specification, for each queue:
//!
//! ```text
//!   0        8        10        12               14        16
//!   | features | version | entries | last_batch_head | used_idx | entry 0 | entry 1 | ...
//!
//!   entry:  0         1        6      8
//!           | inflight | unused | next | counter |
//! ```
//!
//! A completion takes three steps: its entries are linked to `last_batch_head`, the used index of the queue moves, and the entries are
//! cleared. A back end that dies between the second and third step leaves entries that are complete; the distance between the two used
//! indices gives their number, and the links identify them.
//!
//! The front end can write this memory at any time. Each value is loaded once and checked, and can name no more than heads of chains.

use crate::VhostError;
use crate::closing::ReceivedFd;
use crate::memory::check_file;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

const HEAD: usize = 16;
const ENTRY: usize = 16;
const ALIGN: usize = 64;
const VERSION: u16 = 1;
// Places in a queue's head.
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_BATCH_AT: usize = 12;
const USED_AT: usize = 14;
// Places in an entry.
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

/// Bytes of one queue's part.
fn stride(entries: u16) -> usize {
    (HEAD + ENTRY * usize::from(entries)).next_multiple_of(ALIGN)
}

/// The memory of all queues.
#[derive(Debug, Clone)]
pub(crate) struct InflightRegion {
    memory: Arc<MmapRegion>,
    queues: usize,
    entries: u16,
}

impl InflightRegion {
    /// Makes memory for `queues` queues of `entries` entries. Returns the description for the front end, and the file.
    pub(crate) fn create(queues: u16, entries: u16) -> Result<(VhostUserInflight, OwnedFd), VhostError> {
        let size = (stride(entries) * usize::from(queues)) as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("partywall-inflight", flags)
            .map_err(VhostError::system("make memory for requests in flight"))?;
        rustix::fs::ftruncate(&file, size).map_err(VhostError::system("size memory for requests in flight"))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(VhostError::system("seal memory for requests in flight"))?;
        Ok((VhostUserInflight::new(size, 0, queues, entries), file))
    }

    /// Maps memory that the front end hands over.
    pub(crate) fn map(told: VhostUserInflight, file: ReceivedFd) -> Result<Self, VhostError> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = told;
        let needed = stride(queue_size) * usize::from(num_queues);
        if usize::try_from(mmap_size).map_or(true, |size| size < needed) || num_queues == 0 || queue_size == 0 {
            return Err(VhostError::Protocol("its memory for requests in flight is too small for its queues".into()));
        }
        let file = check_file(file, mmap_offset, needed as u64)?;
        if !file.writable {
            return Err(VhostError::Protocol("its memory for requests in flight is read-only".into()));
        }
        Ok(Self { memory: Arc::new(file.map(mmap_offset, needed)?), queues: num_queues.into(), entries: queue_size })
    }

    /// The part of one queue, which has `entries` entries.
    pub(crate) fn queue(&self, index: usize, entries: u16) -> Result<InflightQueue, VhostError> {
        if index >= self.queues || entries > self.entries {
            return Err(VhostError::Protocol("a queue does not fit its memory for requests in flight".into()));
        }
        let base = index * stride(self.entries);
        Ok(InflightQueue { memory: Arc::clone(&self.memory), base, entries, room: self.entries, counter: 0 })
    }
}

/// One queue's part.
#[derive(Debug)]
pub(crate) struct InflightQueue {
    memory: Arc<MmapRegion>,
    base: usize,
    /// Entries of the queue.
    entries: u16,
    /// Entries that there is room for.
    room: u16,
    counter: u64,
}

impl InflightQueue {
    // The offsets are inside the mapping by construction, so the accesses below cannot fail; a failed one reads as 0.
    fn load16(&self, at: usize) -> u16 {
        self.memory.as_volatile_slice().load(self.base + at, Ordering::Acquire).unwrap_or(0)
    }

    fn store16(&self, at: usize, value: u16) {
        // Released: a process that maps the memory after this one has died sees the stores in their order.
        let _ = self.memory.as_volatile_slice().store(value, self.base + at, Ordering::Release);
    }

    fn entry(head: u16) -> usize {
        HEAD + ENTRY * usize::from(head)
    }

    fn taken(&self, head: u16) -> bool {
        self.memory.as_volatile_slice().load(self.base + Self::entry(head), Ordering::Acquire).unwrap_or(0_u8) == 1
    }

    fn set_taken(&self, head: u16, taken: bool) {
        let _ =
            self.memory.as_volatile_slice().store(u8::from(taken), self.base + Self::entry(head), Ordering::Release);
    }

    /// Notes that the chain is taken. The caller has checked that `head` is one of the queue's.
    pub(crate) fn begin(&mut self, head: u16) {
        let at = self.base + Self::entry(head) + COUNTER_AT;
        let _ = self.memory.as_volatile_slice().store(self.counter, at, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        self.set_taken(head, true);
    }

    /// First step of a completion: before the used index moves.
    pub(crate) fn link(&self, head: u16) {
        self.store16(Self::entry(head) + NEXT_AT, self.load16(LAST_BATCH_AT));
        self.store16(LAST_BATCH_AT, head);
    }

    /// Last step of the completions that were linked: after the used index has moved to `used`.
    pub(crate) fn clear(&self, heads: &[u16], used: u16) {
        heads.iter().for_each(|head| self.set_taken(*head, false));
        self.store16(USED_AT, used);
    }

    /// The heads that an earlier back end took and did not complete, in the order in which it took them. `None` if the memory is new.
    pub(crate) fn recover(&mut self, used: u16) -> Result<Option<Vec<u16>>, VhostError> {
        let version = self.load16(VERSION_AT);
        if version == 0 {
            self.store16(ENTRIES_AT, self.room);
            self.store16(USED_AT, used);
            self.store16(VERSION_AT, VERSION);
            return Ok(None);
        }
        if version != VERSION || self.load16(ENTRIES_AT) < self.entries {
            return Err(VhostError::Protocol("its memory for requests in flight is of another version or size".into()));
        }
        let published = used.wrapping_sub(self.load16(USED_AT));
        let mut head = self.load16(LAST_BATCH_AT);
        for _ in 0..published.min(self.entries) {
            if head >= self.entries {
                return Err(VhostError::Protocol("its memory for requests in flight names no request".into()));
            }
            self.set_taken(head, false);
            head = self.load16(Self::entry(head) + NEXT_AT);
        }
        self.store16(USED_AT, used);
        let counter = |head: u16| -> u64 {
            let at = self.base + Self::entry(head) + COUNTER_AT;
            self.memory.as_volatile_slice().load(at, Ordering::Acquire).unwrap_or(0)
        };
        let mut heads: Vec<(u64, u16)> =
            (0..self.entries).filter(|head| self.taken(*head)).map(|head| (counter(head), head)).collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(Some(heads.into_iter().map(|(_, head)| head).collect()))
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    fn region(entries: u16) -> InflightRegion {
        let (told, file) = InflightRegion::create(2, entries).unwrap();
        InflightRegion::map(told, received(file)).unwrap()
    }

    fn received(file: OwnedFd) -> ReceivedFd {
        ReceivedFd::new(file, &crate::closing::Reaper::default())
    }

    #[test]
    fn requests_in_flight_are_recovered_in_order() {
        let region = region(8);
        let mut queue = region.queue(1, 8).unwrap();
        assert_eq!(queue.recover(5).unwrap(), None);
        for head in [3, 7, 0, 2] {
            queue.begin(head);
        }
        queue.link(7);
        queue.clear(&[7], 6);
        assert_eq!(region.queue(1, 8).unwrap().recover(6).unwrap(), Some(vec![3, 0, 2]));
        // Counters go on behind those that were there.
        let mut next = region.queue(1, 8).unwrap();
        next.recover(6).unwrap();
        next.begin(1);
        assert_eq!(region.queue(1, 8).unwrap().recover(6).unwrap(), Some(vec![3, 0, 2, 1]));
        assert_eq!(region.queue(0, 8).unwrap().recover(0).unwrap(), None, "the other queue");
    }

    #[test]
    fn death_at_each_step_of_a_completion_loses_and_repeats_nothing() {
        // A batch of two, after another batch that is complete.
        for steps in 0..=6 {
            let region = region(8);
            let mut queue = region.queue(0, 8).unwrap();
            queue.recover(0).unwrap();
            [4, 5, 6, 1].into_iter().for_each(|head| queue.begin(head));
            queue.link(4);
            queue.clear(&[4], 1);
            let mut used = 1;
            for step in 0..steps {
                match step {
                    0 => queue.link(6),
                    1 => queue.link(5),
                    2 => used = 3,
                    3 => queue.set_taken(6, false),
                    4 => queue.set_taken(5, false),
                    _ => queue.store16(USED_AT, 3),
                }
            }
            let expected = if used == 1 { vec![5, 6, 1] } else { vec![1] };
            assert_eq!(region.queue(0, 8).unwrap().recover(used).unwrap(), Some(expected), "after {steps} steps");
        }
    }

    #[test]
    fn hostile_in_flight_memory_names_only_heads_of_the_queue() {
        let region = region(4);
        let mut queue = region.queue(0, 4).unwrap();
        queue.recover(0).unwrap();
        for at in 0..stride(4) {
            region.memory.as_volatile_slice().store(0xff_u8, at, Ordering::Relaxed).unwrap();
        }
        assert!(region.queue(0, 4).unwrap().recover(9).is_err());
        queue.store16(VERSION_AT, VERSION);
        assert!(region.queue(0, 4).unwrap().recover(9).is_err(), "a head outside of the queue");
        queue.store16(LAST_BATCH_AT, 2);
        queue.store16(InflightQueue::entry(2) + NEXT_AT, 2);
        // Links that loop end with the queue's size.
        let heads = region.queue(0, 4).unwrap().recover(9).unwrap().unwrap();
        assert!(heads.iter().all(|head| *head < 4));
    }

    #[test]
    fn in_flight_memory_that_can_shrink_is_refused() {
        let (told, _) = InflightRegion::create(1, 4).unwrap();
        let file = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, told.mmap_size).unwrap();
        assert!(InflightRegion::map(told, received(file)).is_err());
        for (size, offset, queues, entries) in
            [(64, 0, 1, 1024), (1 << 40, 0, 1, 4), (128, 1 << 30, 1, 4), (128, 1, 1, 4)]
        {
            let (_, file) = InflightRegion::create(1, 4).unwrap();
            let told = VhostUserInflight::new(size, offset, queues, entries);
            let fits = size == 1 << 40;
            assert_eq!(InflightRegion::map(told, received(file)).is_ok(), fits, "{size} {offset} {queues} {entries}");
        }
    }
}
