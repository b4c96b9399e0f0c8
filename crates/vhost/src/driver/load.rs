//! Frames between two ports at full speed, for the bench. Any vhost-user back end can be between the ports.
//!
//! One thread drives both ports. All descriptors are written once. Afterwards a frame costs its sender an entry of the queue and eight
//! bytes of the frame, and its receiver the same. The eight bytes are the frame's number, so a lost frame is seen. No more frames are in
//! flight than the receiver has buffers for.

use super::{DriverOptions, DriverRing, GuestDriver, HEADER, failed, mergeable_features};
use crate::VhostError;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use virtio_bindings::virtio_ring;
use vm_memory::{
    Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, MmapRegion, VolatileArrayRef, VolatileMemory,
    VolatileSlice,
};
use vmm_sys_util::epoll::Epoll;

/// Longer is a hang. Frames that have not arrived after a silence of this length are lost: a loaded machine may stop the back end for seconds.
const HANG: Duration = Duration::from_secs(20);
/// The time after which a frame that makes a driver known is sent again.
const AGAIN: Duration = Duration::from_millis(100);
/// Frames that one port sends or receives before the other port has its turn.
const BURST: usize = 32;
/// Turns between two readings of the clock.
const TURNS: u32 = 64;
/// Entries of each queue.
const ENTRIES: u16 = 1024;
/// A buffer for small frames. Buffers of an odd number of cache lines begin in different sets of a cache.
const SMALL_BUFFER: u32 = 2048 + 64;
/// A buffer for frames that do not fit into a small one, of about a page.
const LARGE_BUFFER: u32 = 4096 + 64;
/// The place of a frame's number in its first buffer.
const NUMBER: usize = HEADER + 20;
/// The shortest frame that has a number.
const SHORTEST: usize = NUMBER + 8 - HEADER;
/// The longest frame.
const LONGEST: usize = 65_535;
/// Frames that are compared byte by byte at the beginning of each stretch.
const COMPARED: u64 = 64;

/// The results of a stretch of frames.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrameRate {
    /// Frames that arrived.
    pub frames: u64,
    /// Frames that did not arrive.
    pub lost: u64,
    /// The time that the frames took, in seconds.
    pub seconds: f64,
}

impl FrameRate {
    /// Frames a second.
    pub fn per_second(&self) -> f64 {
        self.frames as f64 / self.seconds
    }
}

/// Round trips of a frame between two ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundTrips {
    /// Their number.
    pub count: usize,
    /// The time before each.
    pub pause: Duration,
    /// Both drivers sleep until the back end calls them. Otherwise they poll.
    pub asleep: bool,
}

/// Two drivers, from one of which frames of one length go to the other.
#[derive(Debug)]
pub struct FrameGenerator {
    sender: GuestDriver,
    receiver: GuestDriver,
    length: usize,
    next: u64,
}

impl FrameGenerator {
    /// Connects to two ports, and sends frames in both directions until a switch in between knows where both drivers are.
    pub fn connect(sender: &Path, receiver: &Path, length: usize) -> Result<Self, VhostError> {
        if !(SHORTEST..=LONGEST).contains(&length) {
            return Err(failed(format!("a frame of this load has {SHORTEST} to {LONGEST} bytes")));
        }
        let buffer = if length + HEADER > SMALL_BUFFER as usize { LARGE_BUFFER } else { SMALL_BUFFER };
        let features = mergeable_features() | 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
        let options = DriverOptions { features, size: ENTRIES, buffer, ..DriverOptions::default() };
        let connect = |path| GuestDriver::connect(path, options);
        let mut generator = Self { sender: connect(sender)?, receiver: connect(receiver)?, length, next: 0 };
        let mut pair = generator.pair()?;
        pair.sender.prepare()?;
        pair.receiver.prepare()?;
        introduce(&mut pair.receiver, &mut pair.sender, pair.next)?;
        introduce(&mut pair.sender, &mut pair.receiver, pair.next)?;
        Ok(generator)
    }

    /// Sends for this long, and counts the frames that arrive.
    pub fn stream(&mut self, measured: Duration) -> Result<FrameRate, VhostError> {
        self.pair()?.stream(measured)
    }

    /// Sends a frame there and back, one round trip after the other. Returns the nanoseconds of each.
    pub fn round_trips(&mut self, trips: RoundTrips) -> Result<Vec<u64>, VhostError> {
        self.pair()?.round_trips(trips)
    }

    fn pair(&mut self) -> Result<LoadPair<'_>, VhostError> {
        let Self { sender, receiver, length, next } = self;
        Ok(LoadPair {
            sender: LoadEnd::new(sender, *length, [1, 2])?,
            receiver: LoadEnd::new(receiver, *length, [2, 1])?,
            next,
        })
    }
}

/// Sends frames until one arrives. The first ones may come too early for the back end.
fn introduce(from: &mut LoadEnd<'_>, to: &mut LoadEnd<'_>, next: &mut u64) -> Result<(), VhostError> {
    let mut arrivals = Arrivals { compared: 0, ..Arrivals::from(*next) };
    let begin = Instant::now();
    while begin.elapsed() <= HANG {
        from.collect();
        from.send(next, 1)?;
        if to.wait(&mut arrivals, AGAIN, false)? {
            // Frames that were sent after it may arrive late, and must not arrive among those of a later stretch.
            while arrivals.next != *next && to.wait(&mut arrivals, HANG, false)? {}
            return Ok(());
        }
    }
    Err(failed("no frame passes from one port to the other"))
}

/// Sends one frame, and waits until it has arrived.
fn cross(from: &mut LoadEnd<'_>, to: &mut LoadEnd<'_>, next: &mut u64, asleep: bool) -> Result<(), VhostError> {
    let mut arrivals = Arrivals { compared: 0, ..Arrivals::from(*next) };
    from.collect();
    from.send(next, 1)?;
    if !to.wait(&mut arrivals, HANG, asleep)? {
        return Err(failed("a frame of a round trip is lost"));
    }
    if arrivals.lost == 0 { Ok(()) } else { Err(failed("a frame is lost, and a later one has arrived")) }
}

struct LoadPair<'d> {
    sender: LoadEnd<'d>,
    receiver: LoadEnd<'d>,
    /// The number of the next frame.
    next: &'d mut u64,
}

impl LoadPair<'_> {
    fn stream(&mut self, measured: Duration) -> Result<FrameRate, VhostError> {
        let most = u64::from(ENTRIES) / self.sender.pieces as u64;
        let mut arrivals = Arrivals::from(*self.next);
        let begin = Instant::now();
        let (mut last, mut frames_then, mut turns) = (begin, 0, 0_u32);
        let seconds = loop {
            self.receiver.receive(&mut arrivals, BURST)?;
            self.sender.collect();
            let room = most.saturating_sub(*self.next - arrivals.next);
            self.sender.send(self.next, usize::try_from(room).unwrap_or(BURST).min(BURST))?;
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(TURNS) {
                let now = Instant::now();
                // A stretch that is shorter than a frame takes ends with the first frame.
                if now - begin >= measured && (arrivals.frames > 0 || now - begin >= HANG) {
                    break (now - begin).as_secs_f64();
                }
                if arrivals.frames != frames_then {
                    (last, frames_then) = (now, arrivals.frames);
                } else if now - last >= HANG {
                    self.give_up(&mut arrivals)?;
                    last = now;
                }
            }
        };
        let frames = arrivals.frames;
        if frames == 0 {
            return Err(failed("no frame has arrived"));
        }
        last = Instant::now();
        while arrivals.next != *self.next {
            if self.receiver.receive(&mut arrivals, BURST)? > 0 {
                last = Instant::now();
            } else if last.elapsed() >= HANG {
                self.give_up(&mut arrivals)?;
                last = Instant::now();
            }
        }
        Ok(FrameRate { frames, lost: arrivals.lost, seconds })
    }

    /// Counts the frames that have not arrived as lost, unless some have arrived since the last look. This thread may have been stopped after it.
    fn give_up(&mut self, arrivals: &mut Arrivals) -> Result<(), VhostError> {
        if self.receiver.receive(arrivals, BURST)? == 0 {
            arrivals.give_up(*self.next);
        }
        Ok(())
    }

    fn round_trips(&mut self, trips: RoundTrips) -> Result<Vec<u64>, VhostError> {
        let mut times = Vec::with_capacity(trips.count);
        for _ in 0..trips.count {
            if !trips.pause.is_zero() {
                std::thread::sleep(trips.pause);
            }
            let begin = Instant::now();
            cross(&mut self.sender, &mut self.receiver, self.next, trips.asleep)?;
            cross(&mut self.receiver, &mut self.sender, self.next, trips.asleep)?;
            times.push(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        Ok(times)
    }
}

/// The frames of a stretch that have arrived.
struct Arrivals {
    /// The number that is expected next.
    next: u64,
    frames: u64,
    lost: u64,
    /// Frames before this one are compared byte by byte.
    compared: u64,
}

impl Arrivals {
    fn from(next: u64) -> Self {
        Self { next, frames: 0, lost: 0, compared: next + COMPARED }
    }

    fn note(&mut self, number: u64) -> Result<(), VhostError> {
        let missing = number.checked_sub(self.next);
        self.lost += missing.ok_or_else(|| failed("a frame arrives a second time, or behind a later one"))?;
        self.frames += 1;
        self.next = number + 1;
        Ok(())
    }

    /// What has not arrived before the frame `next` is lost.
    fn give_up(&mut self, next: u64) {
        self.lost += next - self.next;
        self.next = next;
    }
}

/// One driver, the parts of its queues located once.
struct LoadEnd<'d> {
    transmit: LoadQueue<'d>,
    receive: LoadQueue<'d>,
    memory: &'d GuestMemoryMmap,
    called: &'d Epoll,
    /// Buffers that a frame fills.
    pieces: u16,
    /// A frame to send behind its header, without a number.
    template: Vec<u8>,
    /// A frame of the other driver.
    expected: Vec<u8>,
}

impl<'d> LoadEnd<'d> {
    /// `stations` are the last bytes of its address and of the address of the other driver.
    fn new(driver: &'d mut GuestDriver, length: usize, stations: [u8; 2]) -> Result<Self, VhostError> {
        let GuestDriver { memory, called, receive, transmit, .. } = driver;
        let memory = &memory.map;
        let [own, other] = stations.map(|last| [2, 0, 0, 0, 0, last]);
        let body: Vec<u8> = (14..length).map(|at| (at % 251) as u8).collect();
        let frame = |to: [u8; 6], from: [u8; 6]| [&[0; HEADER][..], &to, &from, &[0x88, 0xb5], &body].concat();
        let (template, expected) = (frame(other, own), frame(own, other));
        let pieces = u16::try_from(template.len().div_ceil(transmit.buffer as usize)).map_err(failed)?;
        let (transmit, receive) = (LoadQueue::new(transmit, memory)?, LoadQueue::new(receive, memory)?);
        Ok(Self { transmit, receive, memory, called, pieces, template, expected })
    }

    /// Writes as many frames as the transmit queue holds, and their descriptors.
    fn prepare(&mut self) -> Result<(), VhostError> {
        let Self { transmit: LoadQueue { ring, .. }, memory, pieces, template, .. } = self;
        let heads: VecDeque<u16> = (0..ENTRIES / *pieces).map(|frame| frame * *pieces).collect();
        for head in &heads {
            for (id, part) in (*head..).zip(template.chunks(ring.buffer as usize)) {
                let is_last = id + 1 == head + *pieces;
                let (flags, next) = if is_last { (0, 0) } else { (virtio_ring::VRING_DESC_F_NEXT, id + 1) };
                let slice = memory.get_slice(ring.place(id), part.len()).map_err(failed)?;
                slice.copy_from(part);
                let length = u32::try_from(part.len()).map_err(failed)?;
                ring.describe(memory, id, ring.place(id).0, length, flags, next)?;
            }
        }
        ring.free = heads;
        Ok(())
    }

    /// Takes back the buffers of frames that were sent.
    fn collect(&mut self) {
        while let Some((head, _)) = self.transmit.next_used(0) {
            self.transmit.ring.free.push_back(head);
        }
    }

    /// Sends at most this many frames.
    fn send(&mut self, next: &mut u64, most: usize) -> Result<(), VhostError> {
        let queue = &mut self.transmit;
        let mut sent = false;
        for _ in 0..most {
            let Some(head) = queue.ring.free.pop_front() else { break };
            queue.number(head)?.store(*next);
            queue.offer(head);
            *next += 1;
            sent = true;
        }
        if sent { queue.publish(self.memory) } else { Ok(()) }
    }

    /// Takes at most this many frames that have come, and offers their buffers again. Returns how many it took.
    fn receive(&mut self, arrivals: &mut Arrivals, most: usize) -> Result<usize, VhostError> {
        let queue = &mut self.receive;
        let mut count = 0;
        while count < most {
            let Some((first, mut bytes)) = queue.next_used(self.pieces - 1) else { break };
            let number = queue.number(first)?.load();
            if number < arrivals.compared {
                queue.compare(first, &self.expected)?;
            }
            queue.offer(first);
            for _ in 1..self.pieces {
                let Some((id, more)) = queue.next_used(0) else { break };
                bytes += more;
                queue.offer(id);
            }
            if bytes as usize != self.template.len() {
                return Err(failed(format!("a frame has arrived with {bytes} bytes, its header included")));
            }
            arrivals.note(number)?;
            count += 1;
        }
        if count > 0 {
            queue.publish(self.memory)?;
        }
        Ok(count)
    }

    /// Waits for a frame. `false` if none has come by the limit.
    fn wait(&mut self, arrivals: &mut Arrivals, limit: Duration, asleep: bool) -> Result<bool, VhostError> {
        let begin = Instant::now();
        let (mut turn, mut is_over) = (0_u32, false);
        loop {
            if self.receive(arrivals, 1)? > 0 {
                return Ok(true);
            }
            // This thread may have been stopped before it read the clock, so the last look comes after that.
            if is_over {
                return Ok(false);
            }
            if asleep {
                self.receive.ring.sleep(self.memory, self.called, limit)?;
            }
            turn = turn.wrapping_add(1);
            is_over = (asleep || turn.is_multiple_of(TURNS)) && begin.elapsed() >= limit;
        }
    }
}

/// A queue of a driver.
struct LoadQueue<'d> {
    ring: &'d mut DriverRing,
    mask: u16,
    available: VolatileArrayRef<'d, u16>,
    offered: &'d AtomicU16,
    used: VolatileArrayRef<'d, u64>,
    completed: &'d AtomicU16,
    buffers: VolatileSlice<'d>,
    /// The completions at the last look.
    seen: u16,
}

impl<'d> LoadQueue<'d> {
    fn new(ring: &'d mut DriverRing, memory: &'d GuestMemoryMmap) -> Result<Self, VhostError> {
        let (available, used, entries) = (ring.available, ring.used, usize::from(ring.size));
        let (region, _) = memory.to_region_addr(available).ok_or_else(|| failed("a queue has no memory"))?;
        // The driver's memory is one region, which begins at 0.
        let region: &'d MmapRegion = region;
        let at = |part: GuestAddress, offset: u64| usize::try_from(part.raw_value() + offset).map_err(failed);
        Ok(Self {
            mask: ring.size - 1,
            available: region.get_array_ref(at(available, 4)?, entries).map_err(failed)?,
            offered: region.get_atomic_ref(at(available, 2)?).map_err(failed)?,
            used: region.get_array_ref(at(used, 4)?, entries).map_err(failed)?,
            completed: region.get_atomic_ref(at(used, 2)?).map_err(failed)?,
            buffers: region.get_slice(at(ring.buffers, 0)?, entries * ring.buffer as usize).map_err(failed)?,
            seen: ring.next_used,
            ring,
        })
    }

    /// The next completion, if at least this many follow it: its first descriptor and its bytes.
    fn next_used(&mut self, following: u16) -> Option<(u16, u32)> {
        let position = self.ring.next_used;
        if self.seen.wrapping_sub(position) <= following {
            self.seen = u16::from_le(self.completed.load(Ordering::Acquire));
            if self.seen.wrapping_sub(position) <= following {
                return None;
            }
        }
        let element = u64::from_le(self.used.load(usize::from(position & self.mask)));
        self.ring.next_used = position.wrapping_add(1);
        let [a, b, _, _, length @ ..] = element.to_le_bytes();
        Some((u16::from_le_bytes([a, b]) & self.mask, u32::from_le_bytes(length)))
    }

    /// Offers the chain that begins with `head`. [`Self::publish`] makes it visible.
    fn offer(&mut self, head: u16) {
        self.available.store(usize::from(self.ring.next_available & self.mask), head.to_le());
        self.ring.next_available = self.ring.next_available.wrapping_add(1);
    }

    /// Makes the offers visible, and rings if the back end wants it.
    fn publish(&mut self, memory: &GuestMemoryMmap) -> Result<(), VhostError> {
        self.offered.store(self.ring.next_available.to_le(), Ordering::Release);
        self.ring.ring_if_wanted(memory)
    }

    /// The number of the frame that begins in this buffer.
    fn number(&self, id: u16) -> Result<vm_memory::VolatileRef<'_, u64>, VhostError> {
        self.buffers.get_ref(usize::from(id) * self.ring.buffer as usize + NUMBER).map_err(failed)
    }

    /// Compares the frame that begins in this buffer and with this completion, which was taken last.
    fn compare(&self, first: u16, expected: &[u8]) -> Result<(), VhostError> {
        let buffer = self.ring.buffer as usize;
        let mut found = vec![0; expected.len()];
        let mut id = first;
        for (n, part) in found.chunks_mut(buffer).enumerate() {
            if n > 0 {
                let position = self.ring.next_used.wrapping_add(u16::try_from(n - 1).map_err(failed)?);
                let element = u64::from_le(self.used.load(usize::from(position & self.mask)));
                id = u16::try_from(element & u64::from(self.mask)).map_err(failed)?;
            }
            let slice = self.buffers.offset(usize::from(id) * buffer).map_err(failed)?;
            slice.copy_to(part);
        }
        let is_same = |range: std::ops::Range<usize>| found.get(range.clone()) == expected.get(range);
        let rest = NUMBER + 8..expected.len();
        // The header says how many buffers the frame fills.
        if found[..10] == expected[..10] && is_same(HEADER..NUMBER) && is_same(rest) {
            return Ok(());
        }
        Err(failed("a frame has arrived otherwise than it was sent"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_frame_is_lost_and_repeated_frame_is_an_error() {
        let mut arrivals = Arrivals::from(5);
        arrivals.note(5).unwrap();
        arrivals.note(8).unwrap();
        assert_eq!((arrivals.frames, arrivals.lost, arrivals.next), (2, 2, 9));
        assert!(arrivals.note(8).is_err() && arrivals.note(6).is_err());
        arrivals.give_up(12);
        assert_eq!((arrivals.frames, arrivals.lost, arrivals.next), (2, 5, 12));
    }
}
