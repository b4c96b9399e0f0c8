//! The other end of a disk: a guest's driver and its front end, without a machine around them. For tests, fuzzers and the bench.
//!
//! Each queue has as many places as it has requests in flight; a place has a header, a status, and a buffer for data.

use crate::VhostError;
use crate::driver::{DriverMemory, DriverRing, failed};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

const NEXT: u32 = 1;
const WRITE: u32 = 2;
/// Bytes of a queue's parts.
const RING_SPACE: u64 = 0x1_0000;
/// Headers and statuses of all queues are here, and the buffers behind them.
const HEADERS: u64 = 0x40_0000;
const BUFFERS: u64 = 0x80_0000;
const CONFIG: u32 = 60;

/// How a driver is set up.
#[derive(Debug, Clone, Copy)]
pub struct DiskDriverOptions {
    /// Bits that it takes of those that are offered.
    pub features: u64,
    /// Queues.
    pub queues: u16,
    /// Requests that a queue may have in flight.
    pub depth: u16,
    /// Bytes of a request's buffer.
    pub buffer: u32,
    /// Whether it keeps the requests in flight for the next back end.
    pub keeps_inflight: bool,
}

impl Default for DiskDriverOptions {
    fn default() -> Self {
        Self { features: u64::MAX, queues: 1, depth: 32, buffer: 65_536, keeps_inflight: true }
    }
}

/// The in-flight memory that a front end keeps while a back end is away.
struct KeptInflight {
    told: VhostUserInflight,
    file: File,
}

/// A guest's driver of a disk, which outlives its back ends.
pub struct DiskDriver {
    frontend: Option<Frontend>,
    options: DiskDriverOptions,
    memory: DriverMemory,
    features: u64,
    inflight: Option<KeptInflight>,
    /// Its queues.
    pub rings: Vec<DriverRing>,
    called: Vec<Epoll>,
    /// The calls of all queues.
    called_any: Epoll,
    free: Vec<Vec<u16>>,
}

impl std::fmt::Debug for DiskDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskDriver").field("features", &self.features).finish_non_exhaustive()
    }
}

/// A request that is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskReply {
    /// The place of its request.
    pub place: u16,
    /// Its status.
    pub status: u8,
    /// Bytes that the back end says it has written.
    pub written: u32,
}

impl DiskDriver {
    /// Connects and starts all queues.
    pub fn connect(path: &Path, options: DiskDriverOptions) -> Result<Self, VhostError> {
        let size = BUFFERS + u64::from(options.queues) * u64::from(options.depth) * u64::from(options.buffer);
        let size = size.next_multiple_of(4096);
        let mut driver = Self {
            frontend: None,
            options,
            memory: DriverMemory::new(size, true)?,
            features: 0,
            inflight: None,
            rings: Vec::new(),
            called: Vec::new(),
            called_any: Epoll::new().map_err(failed)?,
            free: (0..options.queues).map(|_| (0..options.depth).rev().collect()).collect(),
        };
        driver.reconnect(path)?;
        Ok(driver)
    }

    /// Connects to another back end, with the queues as they are. As under QEMU, features that the guest has accepted stay.
    pub fn reconnect(&mut self, path: &Path) -> Result<(), VhostError> {
        self.frontend = None;
        let mut frontend = Frontend::connect(path, self.options.queues.into()).map_err(failed)?;
        let offered = frontend.get_features().map_err(failed)?;
        let new = self.rings.is_empty();
        if new {
            self.features = offered & self.options.features;
        }
        frontend.set_features(self.features).map_err(failed)?;
        let offered = frontend.get_protocol_features().map_err(failed)?;
        let wanted = VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let agreed = offered & wanted;
        frontend.set_protocol_features(agreed).map_err(failed)?;
        if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        frontend.set_owner().map_err(failed)?;
        frontend.set_mem_table(&[self.region()]).map_err(failed)?;
        // A chain has three descriptors.
        let entries = (3 * self.options.depth).next_power_of_two().max(4);
        let keeps = self.options.keeps_inflight && agreed.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD);
        if keeps && self.inflight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, self.options.queues, entries);
            let (told, file) = frontend.get_inflight_fd(&wanted).map_err(failed)?;
            self.inflight = Some(KeptInflight { told, file });
        }
        if let Some(kept) = &self.inflight {
            frontend.set_inflight_fd(&kept.told, kept.file.as_raw_fd()).map_err(failed)?;
        }
        for index in 0..usize::from(self.options.queues) {
            if new {
                self.rings.push(DriverRing::at(index, entries, index as u64 * RING_SPACE, self.features)?);
                self.called.push(self.rings[index].calls()?);
                let (call, event) = (self.rings[index].call().as_raw_fd(), EpollEvent::new(EventSet::IN, index as u64));
                self.called_any.ctl(ControlOperation::Add, call, event).map_err(failed)?;
            }
            let ring = &self.rings[index];
            frontend.set_vring_num(index, entries).map_err(failed)?;
            // As QEMU does after a back end has died: the completions that are visible.
            frontend.set_vring_base(index, ring.visible(&self.memory.map)?).map_err(failed)?;
            frontend.set_vring_addr(index, &ring.config()).map_err(failed)?;
            frontend.set_vring_kick(index, ring.kick()).map_err(failed)?;
            frontend.set_vring_call(index, ring.call()).map_err(failed)?;
            frontend.set_vring_enable(index, true).map_err(failed)?;
        }
        self.frontend = Some(frontend);
        Ok(())
    }

    /// Stops the only queue, and starts it empty for `depth` requests in flight, at most as many as at the beginning. As under QEMU, a driver that
    /// resets its device gets new memory for requests in flight.
    ///
    /// Returns the requests that were complete. The others are given up: the back end has not taken them.
    pub fn restart(&mut self, depth: u16) -> Result<Vec<DiskReply>, VhostError> {
        let [_] = self.rings[..] else { return Err(failed("only one queue restarts")) };
        if depth == 0 || depth > self.options.depth {
            return Err(failed("the places of a queue do not become more"));
        }
        let base = self.frontend()?.get_vring_base(0).map_err(failed)?;
        if base != u32::from(self.rings[0].visible(&self.memory.map)?) {
            return Err(failed(format!("the queue stops at {base}, and its completions do not")));
        }
        let mut replies = Vec::new();
        while let Some(reply) = self.reply(0)? {
            replies.push(reply);
        }
        let entries = (3 * depth).next_power_of_two().max(4);
        self.rings[0].reset(&self.memory.map, entries, self.features)?;
        self.free[0] = (0..depth).rev().collect();
        let frontend = self.frontend.as_mut().ok_or(VhostError::Closed)?;
        if self.inflight.is_some() {
            let (told, file) = frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, entries)).map_err(failed)?;
            frontend.set_inflight_fd(&told, file.as_raw_fd()).map_err(failed)?;
            self.inflight = Some(KeptInflight { told, file });
        }
        let ring = &self.rings[0];
        frontend.set_vring_num(0, entries).map_err(failed)?;
        frontend.set_vring_base(0, 0).map_err(failed)?;
        frontend.set_vring_addr(0, &ring.config()).map_err(failed)?;
        frontend.set_vring_kick(0, ring.kick()).map_err(failed)?;
        frontend.set_vring_call(0, ring.call()).map_err(failed)?;
        Ok(replies)
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
    pub fn frontend(&mut self) -> Result<&mut Frontend, VhostError> {
        self.frontend.as_mut().ok_or(VhostError::Closed)
    }

    /// The disk's configuration: `struct virtio_blk_config`.
    pub fn config(&mut self) -> Result<Vec<u8>, VhostError> {
        let empty = [0; CONFIG as usize];
        let flags = VhostUserConfigFlags::empty();
        let (_, config) = self.frontend()?.get_config(0, CONFIG, flags, &empty).map_err(failed)?;
        Ok(config)
    }

    /// The disk's sectors.
    pub fn sectors(&mut self) -> Result<u64, VhostError> {
        let config = self.config()?;
        Ok(config.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes)))
    }

    /// Copies of a queue's doorbells: what the driver rings, and what it is called by.
    pub fn doorbells(&self, queue: usize) -> Result<[EventFd; 2], VhostError> {
        let ring = self.rings.get(queue).ok_or_else(|| failed("no such queue"))?;
        Ok([ring.kick().try_clone().map_err(failed)?, ring.call().try_clone().map_err(failed)?])
    }

    /// The file of the memory for requests in flight, if the back end has given one.
    pub fn inflight(&self) -> Option<&File> {
        self.inflight.as_ref().map(|kept| &kept.file)
    }

    /// Where a place has its header. Its status is 16 bytes behind it.
    pub fn header(&self, queue: usize, place: u16) -> GuestAddress {
        GuestAddress(HEADERS + (queue as u64 * u64::from(self.options.depth) + u64::from(place)) * 32)
    }

    /// Where a place has its data.
    pub fn data(&self, queue: usize, place: u16) -> GuestAddress {
        let index = queue as u64 * u64::from(self.options.depth) + u64::from(place);
        GuestAddress(BUFFERS + index * u64::from(self.options.buffer))
    }

    /// A place for a request, if the queue has one.
    pub fn take_place(&mut self, queue: usize) -> Option<u16> {
        self.free[queue].pop()
    }

    /// Offers a request with `length` bytes of data, which are for reading if the request is a write. [`Self::kick`] rings.
    pub fn offer(
        &mut self,
        queue: usize,
        place: u16,
        kind: u32,
        sector: u64,
        length: u32,
        writes: bool,
    ) -> Result<(), VhostError> {
        let (header, data) = (self.header(queue, place), self.data(queue, place));
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory.map.write_slice(&bytes, header).map_err(failed)?;
        let status = GuestAddress(header.0 + 16);
        self.memory.map.write_obj(0xff_u8, status).map_err(failed)?;
        let (memory, ring) = (&self.memory.map, &mut self.rings[queue]);
        let first = 3 * place;
        ring.describe(memory, first, header.0, 16, NEXT, if length == 0 { first + 2 } else { first + 1 })?;
        if length > 0 {
            let direction = if writes { 0 } else { WRITE };
            ring.describe(memory, first + 1, data.0, length, NEXT | direction, first + 2)?;
        }
        ring.describe(memory, first + 2, status.0, 1, WRITE, 0)?;
        ring.offer(memory, first)
    }

    /// Rings the back end, if it wants that.
    pub fn kick(&mut self, queue: usize) -> Result<(), VhostError> {
        self.rings[queue].ring_if_wanted(&self.memory.map)
    }

    /// The next request that is complete. Its place is free from now on.
    pub fn reply(&mut self, queue: usize) -> Result<Option<DiskReply>, VhostError> {
        let Some((head, written)) = self.rings[queue].done(&self.memory.map)? else { return Ok(None) };
        let place = head / 3;
        let status = GuestAddress(self.header(queue, place).0 + 16);
        let status = self.memory.map.read_obj(status).map_err(failed)?;
        if !head.is_multiple_of(3) || place >= self.options.depth || self.free[queue].contains(&place) {
            return Err(failed(format!("the back end completes {head}, which is not in flight")));
        }
        self.free[queue].push(place);
        Ok(Some(DiskReply { place, status, written }))
    }

    /// Waits for the next request that is complete, looking without pause for `spin` first.
    pub fn wait(&mut self, queue: usize, spin: Duration, limit: Duration) -> Result<Option<DiskReply>, VhostError> {
        let start = Instant::now();
        loop {
            if let Some(reply) = self.reply(queue)? {
                return Ok(Some(reply));
            }
            let waited = start.elapsed();
            if waited >= limit {
                return Ok(None);
            }
            if waited >= spin {
                self.rings[queue].sleep(&self.memory.map, &self.called[queue], Duration::from_millis(10))?;
            }
        }
    }

    /// Waits for the next complete request of any queue, looking without pause for `spin` first. Returns it with its queue.
    pub fn wait_any(&mut self, spin: Duration, limit: Duration) -> Result<Option<(usize, DiskReply)>, VhostError> {
        let start = Instant::now();
        loop {
            for queue in 0..self.rings.len() {
                if let Some(reply) = self.reply(queue)? {
                    return Ok(Some((queue, reply)));
                }
            }
            let waited = start.elapsed();
            if waited >= limit {
                return Ok(None);
            }
            if waited >= spin {
                // A back end calls for those queues only that have asked for it.
                let mut is_there = false;
                for ring in &self.rings {
                    is_there |= ring.wish(&self.memory.map)?;
                }
                if !is_there {
                    let _ = self.called_any.wait(10, &mut [EpollEvent::default()]);
                }
                for ring in &self.rings {
                    let _ = ring.call().read();
                }
            }
        }
    }

    /// Does one request and waits for it: the status, and what was read.
    pub fn run(&mut self, kind: u32, sector: u64, data: &[u8], wanted: u32) -> Result<(u8, Vec<u8>), VhostError> {
        let place = self.take_place(0).ok_or_else(|| failed("all places are in flight"))?;
        let at = self.data(0, place);
        self.memory.map.write_slice(data, at).map_err(failed)?;
        let writes = !data.is_empty();
        let length = if writes { u32::try_from(data.len()).map_err(failed)? } else { wanted };
        self.offer(0, place, kind, sector, length, writes)?;
        self.kick(0)?;
        let reply = self.wait(0, Duration::ZERO, Duration::from_secs(60))?.ok_or_else(|| failed("no answer"))?;
        let mut read = vec![0; usize::try_from(wanted).map_err(failed)?];
        self.memory.map.read_slice(&mut read, at).map_err(failed)?;
        Ok((reply.status, read))
    }
}
