//! The other end: a guest's driver and its front end, without a machine around them. For tests, fuzzers and the bench.
//!
//! It speaks vhost-user by rust-vmm's front end, and keeps its queues in its own memory. [`GuestDriver::memory`] and
//! [`DriverRing`] show all parts of a queue, so that a test can write what no driver would.

pub mod load;
pub mod restart;

use crate::VhostError;
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::{virtio_config, virtio_net, virtio_ring};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Where the guest's memory is for the front end.
const USER: u64 = 0x7000_0000_0000;
/// A queue's parts are in this much memory.
const RING_SPACE: u64 = 0x10000;
/// Behind the queues are the buffers.
const BUFFERS: u64 = 0x100_000;
/// The header in front of each frame.
pub const HEADER: usize = 12;

/// How a driver is set up.
#[derive(Debug, Clone, Copy)]
pub struct DriverOptions {
    /// Bits that it takes of those that are offered.
    pub features: u64,
    /// Entries of each queue.
    pub size: u16,
    /// Bytes of each buffer.
    pub buffer: u32,
    /// Whether the memory is sealed, as it must be.
    pub sealed: bool,
    /// It enables its queues before it sets features, as QEMU 7.2 does.
    pub enables_first: bool,
    /// Pairs of queues.
    pub pairs: usize,
}

impl Default for DriverOptions {
    fn default() -> Self {
        Self { features: u64::MAX, size: 256, buffer: 2048, sealed: true, enables_first: true, pairs: 1 }
    }
}

/// A queue from the driver's side.
#[derive(Debug)]
pub struct DriverRing {
    /// Its number.
    pub index: usize,
    /// Its entries.
    pub size: u16,
    /// Where its descriptors are.
    pub descriptors: GuestAddress,
    /// Where what it offers is.
    pub available: GuestAddress,
    /// Where what is done is.
    pub used: GuestAddress,
    /// Where its buffers are, one after the other.
    pub buffers: GuestAddress,
    buffer: u32,
    kick: EventFd,
    call: EventFd,
    next_available: u16,
    /// The offered index when it last rang.
    rung: u16,
    next_used: u16,
    free: VecDeque<u16>,
    event_idx: bool,
}

/// A guest's driver.
pub struct GuestDriver {
    frontend: Frontend,
    memory: DriverMemory,
    features: u64,
    called: Epoll,
    /// The receive queue.
    pub receive: DriverRing,
    /// The transmit queue.
    pub transmit: DriverRing,
    /// The queues of further pairs: for each, the receive queue and the transmit queue.
    pub further: Vec<[DriverRing; 2]>,
}

impl std::fmt::Debug for GuestDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestDriver").field("features", &self.features).finish_non_exhaustive()
    }
}

pub(crate) fn failed(e: impl std::fmt::Display) -> VhostError {
    VhostError::Protocol(e.to_string())
}

impl GuestDriver {
    /// Connects to a port and starts both queues, all receive buffers offered.
    pub fn connect(path: &Path, options: DriverOptions) -> Result<Self, VhostError> {
        let frontend = Frontend::connect(path, 8).map_err(failed)?;
        let space = u64::from(options.size) * u64::from(options.buffer);
        let queues = 2 * options.pairs.max(1);
        if queues as u64 * RING_SPACE > BUFFERS {
            return Err(failed("the memory has no room for these queues"));
        }
        let size = (BUFFERS + queues as u64 * space).next_multiple_of(4096);
        let memory = DriverMemory::new(size, options.sealed)?;
        let features = frontend.get_features().map_err(failed)? & options.features;
        let ring = |index: usize| DriverRing::new(index, &options, features, space);
        let (receive, transmit) = (ring(0)?, ring(1)?);
        let further = (2..queues).step_by(2).map(|index| Ok([ring(index)?, ring(index + 1)?]));
        let further = further.collect::<Result<Vec<_>, VhostError>>()?;
        let called = receive.calls()?;
        let mut driver = Self { called, frontend, memory, features, receive, transmit, further };
        driver.start(options.enables_first)?;
        for receive in std::iter::once(&mut driver.receive).chain(driver.further.iter_mut().map(|[receive, _]| receive))
        {
            while receive.offer_free(&driver.memory.map)? {}
            receive.ring_kick()?;
        }
        Ok(driver)
    }

    fn start(&mut self, enables_first: bool) -> Result<(), VhostError> {
        let queues = 2 + 2 * self.further.len();
        let frontend = &mut self.frontend;
        let wanted = VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::MQ;
        frontend.get_protocol_features().map_err(failed)?;
        frontend.set_protocol_features(wanted).map_err(failed)?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_owner().map_err(failed)?;
        let enable = |frontend: &mut Frontend| -> Result<(), VhostError> {
            (0..queues).try_for_each(|index| frontend.set_vring_enable(index, true).map_err(failed))
        };
        // rust-vmm's front end checks the order itself, by the features that it was last given.
        frontend.set_features(self.features).map_err(failed)?;
        if enables_first {
            enable(frontend)?;
        }
        self.frontend.set_mem_table(&[self.region()]).map_err(failed)?;
        for ring in [&self.receive, &self.transmit].into_iter().chain(self.further.iter().flatten()) {
            self.frontend.set_vring_num(ring.index, ring.size).map_err(failed)?;
            self.frontend.set_vring_base(ring.index, 0).map_err(failed)?;
            self.frontend.set_vring_addr(ring.index, &ring.config()).map_err(failed)?;
            self.frontend.set_vring_kick(ring.index, &ring.kick).map_err(failed)?;
            self.frontend.set_vring_call(ring.index, &ring.call).map_err(failed)?;
        }
        if !enables_first {
            enable(&mut self.frontend)?;
        }
        Ok(())
    }

    /// The whole memory as the front end describes it.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        self.memory.region()
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory.map
    }

    /// The negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The front end, to send it what is not foreseen here.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// Sends a frame without offloads; `false` if the queue is full.
    pub fn send(&mut self, frame: &[u8]) -> Result<bool, VhostError> {
        self.send_with(&[0; HEADER], frame)
    }

    /// Sends a frame behind this header, in as many buffers as it fills.
    pub fn send_with(&mut self, header: &[u8; HEADER], frame: &[u8]) -> Result<bool, VhostError> {
        let sent = self.post(header, frame)?;
        if sent {
            self.transmit.ring_kick()?;
        }
        Ok(sent)
    }

    /// As [`Self::send_with`], and does not ring.
    pub fn post(&mut self, header: &[u8; HEADER], frame: &[u8]) -> Result<bool, VhostError> {
        self.transmit.collect(&self.memory.map)?;
        self.transmit.put(&self.memory.map, &[header, frame])
    }

    /// The next frame that has come, with its header.
    pub fn take(&mut self) -> Result<Option<Vec<u8>>, VhostError> {
        let mut frame = Vec::new();
        Ok(self.take_into(&mut frame)?.then_some(frame))
    }

    /// As [`Self::take`], into a buffer that is used again.
    pub fn take_into(&mut self, frame: &mut Vec<u8>) -> Result<bool, VhostError> {
        self.receive.take_into(&self.memory.map, frame)
    }

    /// Sends a frame without offloads on this pair of queues; `false` if the queue is full.
    pub fn send_on(&mut self, pair: usize, frame: &[u8]) -> Result<bool, VhostError> {
        let transmit = match pair.checked_sub(1) {
            None => &mut self.transmit,
            Some(further) => &mut self.further.get_mut(further).ok_or_else(|| failed("no such pair"))?[1],
        };
        transmit.collect(&self.memory.map)?;
        let sent = transmit.put(&self.memory.map, &[&[0; HEADER], frame])?;
        if sent {
            transmit.ring_kick()?;
        }
        Ok(sent)
    }

    /// The next frame that has come on this pair of queues, with its header.
    pub fn take_on(&mut self, pair: usize) -> Result<Option<Vec<u8>>, VhostError> {
        let receive = match pair.checked_sub(1) {
            None => &mut self.receive,
            Some(further) => &mut self.further.get_mut(further).ok_or_else(|| failed("no such pair"))?[0],
        };
        let mut frame = Vec::new();
        let taken = receive.take_into(&self.memory.map, &mut frame)?;
        if taken {
            receive.ring_kick()?;
        }
        Ok(taken.then_some(frame))
    }

    /// Waits for a frame; `None` if none has come by the deadline.
    pub fn wait(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, VhostError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(frame) = self.take()? {
                self.receive.ring_kick()?;
                return Ok(Some(frame));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::yield_now();
        }
    }

    /// Waits until the switch has completed what was sent; whether it has.
    pub fn drain(&mut self, limit: Duration) -> Result<bool, VhostError> {
        let deadline = Instant::now() + limit;
        while self.transmit.free.len() < usize::from(self.transmit.size) {
            self.transmit.collect(&self.memory.map)?;
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::yield_now();
        }
        Ok(true)
    }

    /// Tells the switch, if it asked for it, that there are receive buffers again.
    pub fn ring_receive(&mut self) -> Result<(), VhostError> {
        self.receive.ring_kick()
    }

    /// Tells the switch, if it asked for it, that there is something to send.
    pub fn ring_transmit(&mut self) -> Result<(), VhostError> {
        self.transmit.ring_kick()
    }

    /// Sleeps until the switch calls for received frames, at most this long.
    pub fn sleep(&mut self, limit: Duration) -> Result<(), VhostError> {
        if self.receive.wish(&self.memory.map)? {
            return Ok(());
        }
        let limit = i32::try_from(limit.as_millis()).map_err(failed)?;
        let _ = self.called.wait(limit, &mut [EpollEvent::default()]);
        let _ = self.receive.call.read();
        Ok(())
    }
}

impl DriverRing {
    fn new(index: usize, options: &DriverOptions, features: u64, space: u64) -> Result<Self, VhostError> {
        let base = index as u64 * RING_SPACE;
        let event = || EventFd::new(EFD_NONBLOCK).map_err(failed);
        Ok(Self {
            index,
            size: options.size,
            descriptors: GuestAddress(base),
            available: GuestAddress(base + 0x5000),
            used: GuestAddress(base + 0x6000),
            buffers: GuestAddress(BUFFERS + index as u64 * space),
            buffer: options.buffer,
            kick: event()?,
            call: event()?,
            next_available: 0,
            rung: 0,
            next_used: 0,
            free: (0..options.size).collect(),
            event_idx: features & (1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX) != 0,
        })
    }

    /// A queue whose parts begin at `base`, without own buffers.
    pub(crate) fn at(index: usize, size: u16, base: u64, features: u64) -> Result<Self, VhostError> {
        let options = DriverOptions { size, buffer: 0, ..DriverOptions::default() };
        let ring = Self::new(index, &options, features, 0)?;
        let place = |offset| GuestAddress(base + offset);
        Ok(Self { descriptors: place(0), available: place(0x5000), used: place(0x6000), free: VecDeque::new(), ..ring })
    }

    pub(crate) fn kick(&self) -> &EventFd {
        &self.kick
    }

    pub(crate) fn call(&self) -> &EventFd {
        &self.call
    }

    /// The index behind the completions that are visible.
    pub(crate) fn visible(&self, memory: &GuestMemoryMmap) -> Result<u16, VhostError> {
        let index: u16 = memory.load(GuestAddress(self.used.0 + 2), Ordering::Acquire).map_err(failed)?;
        Ok(u16::from_le(index))
    }

    /// Rings unless the back end looks at the queue anyway.
    pub(crate) fn ring_if_wanted(&mut self, memory: &GuestMemoryMmap) -> Result<(), VhostError> {
        // The offered buffers are visible before the wish is read.
        fence(Ordering::SeqCst);
        let load = |at: u64| -> Result<u16, VhostError> {
            let value: u16 = memory.load(GuestAddress(self.used.0 + at), Ordering::Relaxed).map_err(failed)?;
            Ok(u16::from_le(value))
        };
        let wanted = if self.event_idx {
            let event = load(4 + 8 * u64::from(self.size))?;
            let offered = self.next_available.wrapping_sub(self.rung);
            self.next_available.wrapping_sub(event).wrapping_sub(1) < offered
        } else {
            load(0)? & 1 == 0
        };
        self.rung = self.next_available;
        if wanted { self.ring_always() } else { Ok(()) }
    }

    /// Sleeps until the back end calls, at most this long. `called` is from [`Self::calls`].
    pub(crate) fn sleep(&self, memory: &GuestMemoryMmap, called: &Epoll, limit: Duration) -> Result<(), VhostError> {
        if self.wish(memory)? {
            return Ok(());
        }
        let limit = i32::try_from(limit.as_millis()).map_err(failed)?;
        let _ = called.wait(limit, &mut [EpollEvent::default()]);
        let _ = self.call.read();
        Ok(())
    }

    /// The descriptors that have input when the back end calls.
    pub(crate) fn calls(&self) -> Result<Epoll, VhostError> {
        let called = Epoll::new().map_err(failed)?;
        let event = EpollEvent::new(EventSet::IN, 0);
        called.ctl(ControlOperation::Add, self.call.as_raw_fd(), event).map_err(failed)?;
        Ok(called)
    }

    /// As the front end describes it.
    pub fn config(&self) -> VringConfigData {
        VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: 0,
            desc_table_addr: USER + self.descriptors.0,
            used_ring_addr: USER + self.used.0,
            avail_ring_addr: USER + self.available.0,
            log_addr: None,
        }
    }

    /// The buffer of a descriptor.
    pub fn place(&self, id: u16) -> GuestAddress {
        GuestAddress(self.buffers.0 + u64::from(id) * u64::from(self.buffer))
    }

    /// Writes a descriptor.
    pub fn describe(
        &self,
        memory: &GuestMemoryMmap,
        id: u16,
        address: u64,
        length: u32,
        flags: u32,
        next: u16,
    ) -> Result<(), VhostError> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&u16::try_from(flags).unwrap_or(0).to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        memory.write_slice(&bytes, GuestAddress(self.descriptors.0 + 16 * u64::from(id))).map_err(failed)
    }

    /// Offers the chain that begins with `head`.
    pub fn offer(&mut self, memory: &GuestMemoryMmap, head: u16) -> Result<(), VhostError> {
        let slot = u64::from(self.next_available % self.size);
        memory.write_obj(head.to_le(), GuestAddress(self.available.0 + 4 + 2 * slot)).map_err(failed)?;
        self.next_available = self.next_available.wrapping_add(1);
        let index = GuestAddress(self.available.0 + 2);
        memory.store(self.next_available.to_le(), index, Ordering::Release).map_err(failed)
    }

    /// Rings, whatever the switch wishes.
    pub fn ring_always(&self) -> Result<(), VhostError> {
        self.kick.write(1).map_err(failed)
    }

    fn ring_kick(&mut self) -> Result<(), VhostError> {
        self.ring_always()
    }

    fn offer_free(&mut self, memory: &GuestMemoryMmap) -> Result<bool, VhostError> {
        let Some(id) = self.free.pop_front() else { return Ok(false) };
        self.describe(memory, id, self.place(id).0, self.buffer, virtio_ring::VRING_DESC_F_WRITE, 0)?;
        self.offer(memory, id)?;
        Ok(true)
    }

    /// The next frame that has come, with its header.
    fn take_into(&mut self, memory: &GuestMemoryMmap, frame: &mut Vec<u8>) -> Result<bool, VhostError> {
        frame.clear();
        let Some((mut id, mut length)) = self.done(memory)? else { return Ok(false) };
        let mut left = 1;
        loop {
            let start = frame.len();
            let length_here = usize::try_from(length).map_err(failed)?.min(self.buffer as usize);
            frame.resize(start + length_here, 0);
            memory.read_slice(&mut frame[start..], self.place(id)).map_err(failed)?;
            if start == 0 {
                left = frame.get(10..12).map_or(1, |n| u16::from_le_bytes([n[0], n[1]])).max(1);
            }
            self.free.push_back(id);
            self.offer_free(memory)?;
            left -= 1;
            if left == 0 {
                return Ok(true);
            }
            let more = self.done(memory)?;
            (id, length) = more.ok_or_else(|| failed("buffers of one frame are not visible together"))?;
        }
    }

    fn put(&mut self, memory: &GuestMemoryMmap, parts: &[&[u8]]) -> Result<bool, VhostError> {
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let count = total.div_ceil(self.buffer as usize).max(1);
        if self.free.len() < count {
            return Ok(false);
        }
        let ids: Vec<u16> = self.free.drain(..count).collect();
        let mut at = 0;
        for part in parts {
            let mut part = *part;
            while !part.is_empty() {
                let (id, offset) = (ids[at / self.buffer as usize], at % self.buffer as usize);
                let (now, later) = part.split_at(part.len().min(self.buffer as usize - offset));
                memory.write_slice(now, GuestAddress(self.place(id).0 + offset as u64)).map_err(failed)?;
                (at, part) = (at + now.len(), later);
            }
        }
        for (n, id) in ids.iter().enumerate() {
            let length = (total - n * self.buffer as usize).min(self.buffer as usize);
            let (flags, next) = ids.get(n + 1).map_or((0, 0), |next| (virtio_ring::VRING_DESC_F_NEXT, *next));
            self.describe(memory, *id, self.place(*id).0, u32::try_from(length).map_err(failed)?, flags, next)?;
        }
        self.offer(memory, ids[0])?;
        Ok(true)
    }

    /// The next chain that is done, and its bytes.
    pub(crate) fn done(&mut self, memory: &GuestMemoryMmap) -> Result<Option<(u16, u32)>, VhostError> {
        let index: u16 = memory.load(GuestAddress(self.used.0 + 2), Ordering::Acquire).map_err(failed)?;
        if u16::from_le(index) == self.next_used {
            return Ok(None);
        }
        let slot = u64::from(self.next_used % self.size);
        let mut bytes = [0; 8];
        memory.read_slice(&mut bytes, GuestAddress(self.used.0 + 4 + 8 * slot)).map_err(failed)?;
        self.next_used = self.next_used.wrapping_add(1);
        let [a, b, _, _, c, d, e, f] = bytes;
        Ok(Some((u16::from_le_bytes([a, b]), u32::from_le_bytes([c, d, e, f]))))
    }

    /// Takes back all buffers that were sent, following their chains.
    fn collect(&mut self, memory: &GuestMemoryMmap) -> Result<(), VhostError> {
        while let Some((mut id, _)) = self.done(memory)? {
            loop {
                self.free.push_back(id);
                let mut bytes = [0; 4];
                let place = GuestAddress(self.descriptors.0 + 16 * u64::from(id) + 12);
                memory.read_slice(&mut bytes, place).map_err(failed)?;
                if bytes[0] & 1 == 0 {
                    break;
                }
                id = u16::from_le_bytes([bytes[2], bytes[3]]);
            }
        }
        Ok(())
    }

    /// Wishes to be called for the next completion; `true` if it is there already.
    pub(crate) fn wish(&self, memory: &GuestMemoryMmap) -> Result<bool, VhostError> {
        if self.event_idx {
            let place = GuestAddress(self.available.0 + 4 + 2 * u64::from(self.size));
            memory.store(self.next_used.to_le(), place, Ordering::Relaxed).map_err(failed)?;
        }
        fence(Ordering::SeqCst);
        let index: u16 = memory.load(GuestAddress(self.used.0 + 2), Ordering::Acquire).map_err(failed)?;
        Ok(u16::from_le(index) != self.next_used)
    }
}

/// The bits of a driver that has no offloads and no merged buffers.
pub fn plain_features() -> u64 {
    1 << virtio_config::VIRTIO_F_VERSION_1 | vhost::vhost_user::VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
}

/// [`plain_features`], and buffers that are merged.
pub fn mergeable_features() -> u64 {
    plain_features() | 1 << virtio_net::VIRTIO_NET_F_MRG_RXBUF
}

/// The bits of a driver that takes datagrams that are still to be cut, of IPv4 and of IPv6.
pub fn datagram_features() -> [u64; 2] {
    [virtio_net::VIRTIO_NET_F_GUEST_USO4, virtio_net::VIRTIO_NET_F_GUEST_USO6].map(|bit| 1 << bit)
}

/// A guest's memory, in one region.
pub(crate) struct DriverMemory {
    pub(crate) map: GuestMemoryMmap,
    file: File,
    size: u64,
}

impl DriverMemory {
    pub(crate) fn new(size: u64, sealed: bool) -> Result<Self, VhostError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("guest", flags).map_err(VhostError::system("make memory"))?;
        rustix::fs::ftruncate(&file, size).map_err(VhostError::system("size memory"))?;
        if sealed {
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)
                .map_err(VhostError::system("seal memory"))?;
        }
        let file = File::from(file);
        let length = usize::try_from(size).map_err(failed)?;
        let copy = file.try_clone().map_err(failed)?;
        let region = MmapRegion::from_file(FileOffset::new(copy, 0), length).map_err(failed)?;
        let region = GuestRegionMmap::new(region, GuestAddress(0)).ok_or_else(|| failed("no region"))?;
        let map = GuestMemoryMmap::from_regions(vec![region]).map_err(failed)?;
        Ok(Self { map, file, size })
    }

    /// The whole of it as the front end describes it.
    pub(crate) fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: self.size,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }
}
