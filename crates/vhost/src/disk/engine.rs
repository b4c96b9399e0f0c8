//! The loop that serves one disk, in one thread.
//!
//! The loop looks at the queues and at the store for a while before it sleeps; how long adapts to what that finds. An idle disk uses no
//! processor time.

use super::control::{DiskControl, DiskHandle, DiskReport, DiskUse};
use super::exported::{ImportOptions, ImportedDisk};
use super::file::FileDisk;
use super::image::SERIAL;
use super::request::{self, DiskOperation, DiskRequest, DiskStatus, MOST_RANGE, SECTOR};
use super::store::DiskStore;
use super::store_task::MOST_TASKS;
use super::task::{AfterTask, DiskTask, TaskStep};
use super::{DiskCounters, DiskOptions};
use crate::VhostError;
use crate::chain::{BufferPiece, ChainBuffers};
use crate::handle::{Asked, RequestHandle};
use crate::listener::FrontendListener;
use crate::message::Request;
use crate::poller::{WatchSet, Watched};
use crate::ring::VirtioRing;
use crate::session::{DeviceModel, FrontendSession};
use crate::spin::{AdaptiveSpin, nanoseconds};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserMemoryRegion, VhostUserProtocolFeatures as Protocol, VhostUserSingleMemoryRegion,
    VhostUserVirtioFeatures,
};
use virtio_bindings::{virtio_blk, virtio_config, virtio_ring};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// How long the loop sleeps at most.
const TICK: u64 = 1_000_000_000;
/// How long a disk without a machine may be about to have one: a QEMU whose back end has ended connects again after a second.
const RETURN: Duration = Duration::from_secs(3);
/// Passes over the queues between two looks at all else.
const PASSES: u32 = 16;
/// Requests that one queue is given before the others have their turn.
const TURN: usize = 64;
/// Pieces of one request's data, as the driver sees it. QEMU's queues have 128 entries.
const SEGMENTS: u32 = 126;
// Tokens: the queues come first.
const CONTROL: u64 = 0x100;
const LISTENER: u64 = 0x101;
const SOCKET: u64 = 0x102;
const STORE: u64 = 0x103;

/// A disk.
#[derive(Debug)]
pub struct DiskEngine {
    /// Dropped before the store, whose lock or session keeps the next back end from the path.
    listener: FrontendListener,
    options: DiskOptions,
    store: Box<dyn DiskStore>,
    tasks: Vec<Option<DiskTask>>,
    free: Vec<usize>,
    buffers: ChainBuffers,
    spare: Vec<Vec<BufferPiece>>,
    poller: WatchSet,
    session: Option<FrontendSession>,
    requests: Receiver<Asked<DiskControl>>,
    wake: Watched<Arc<OwnedFd>>,
    _ended: Watched<OwnedFd>,
    counters: DiskCounters,
    start: Instant,
    /// When the last front end has gone, or the next one was expected.
    unused_since: Instant,
    stopping: bool,
}

impl DiskEngine {
    /// Opens a disk and listens for a front end at `socket`.
    pub fn new(options: DiskOptions, socket: &Path, owner: Option<u32>) -> Result<(Self, DiskHandle), VhostError> {
        let store = FileDisk::open(&options)?;
        Self::on(Box::new(store), options, socket, owner)
    }

    /// Takes a disk that another domain exports, and listens for a front end at `socket`. The path in `options` is only shown.
    pub fn import(
        options: DiskOptions,
        from: ImportOptions,
        socket: &Path,
        owner: Option<u32>,
    ) -> Result<(Self, DiskHandle), VhostError> {
        options.check()?;
        let store = ImportedDisk::connect(from, options.read_only, options.faults.delay)?;
        Self::on(Box::new(store), options, socket, owner)
    }

    fn on(
        store: Box<dyn DiskStore>,
        options: DiskOptions,
        socket: &Path,
        owner: Option<u32>,
    ) -> Result<(Self, DiskHandle), VhostError> {
        let poller = WatchSet::new()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags).map_err(VhostError::system("make an eventfd"))?);
        let (sender, requests) = channel();
        let handle = RequestHandle::new(sender, Arc::clone(&wake));
        let ended = store.descriptor()?;
        let engine = Self {
            listener: FrontendListener::new(socket, owner, &poller, LISTENER)?,
            wake: poller.watch(wake, CONTROL)?,
            _ended: poller.watch(ended, STORE)?,
            tasks: std::iter::repeat_with(|| None).take(MOST_TASKS).collect(),
            free: (0..MOST_TASKS).rev().collect(),
            buffers: ChainBuffers::of_disk(),
            spare: Vec::new(),
            session: None,
            counters: DiskCounters::default(),
            start: Instant::now(),
            unused_since: Instant::now(),
            stopping: false,
            options,
            store,
            poller,
            requests,
        };
        Ok((engine, handle))
    }

    /// Serves until a request stops it.
    pub fn run(mut self) -> Result<(), VhostError> {
        let (mut events, mut tokens) = (Vec::with_capacity(64), Vec::new());
        let mut spin = AdaptiveSpin::new(self.options.spin);
        let (mut last_look, mut pass) = (0, 0_u32);
        while !self.stopping {
            let worked = self.serve();
            pass = pass.wrapping_add(1);
            if worked && !pass.is_multiple_of(PASSES) {
                continue;
            }
            let now = nanoseconds(self.start.elapsed());
            if worked {
                spin.worked(now);
            }
            let spinning = spin.goes_on(now);
            let sleep = if worked || spinning || self.arm() { 0 } else { TICK };
            if worked || sleep > 0 || pass.is_multiple_of(PASSES) {
                self.poller.wait(sleep, &mut events, &mut tokens)?;
            }
            if sleep > 0 {
                spin.slept(now, nanoseconds(self.start.elapsed()), !tokens.is_empty());
            }
            for token in std::mem::take(&mut tokens) {
                self.handle(token);
            }
            events.clear();
            if now.saturating_sub(last_look) > TICK {
                last_look = now;
                self.listener.resume();
            }
        }
        self.drain();
        Ok(())
    }

    /// Takes requests, and completes those that are done; whether there was any.
    fn serve(&mut self) -> bool {
        let taken = self.take_requests();
        self.store.submit();
        let done = self.complete();
        self.publish();
        taken || done
    }

    fn take_requests(&mut self) -> bool {
        let Some(session) = &mut self.session else { return false };
        let features = session.features();
        let writethrough = self.options.writethrough || features & (1 << virtio_blk::VIRTIO_BLK_F_FLUSH) == 0;
        let (table, rings) = session.parts();
        let memory = Arc::clone(table.map());
        let geometry = self.store.geometry(self.options.discard);
        let mut taken = false;
        for index in 0..rings.len() {
            for turn in 0..TURN {
                let Some(session) = &mut self.session else { return taken };
                let (_, rings) = session.parts();
                let ring = &mut rings[index];
                if !ring.runs() || self.free.is_empty() {
                    break;
                }
                let recovered = ring.unfinished() > 0;
                let head = match ring.next_head(&memory) {
                    Ok(Some(head)) => head,
                    Ok(None) => break,
                    Err(e) => {
                        self.counters.broken += 1;
                        warn!("{}: {e}", self.options.path.display());
                        ring.give_up();
                        break;
                    }
                };
                taken = true;
                if turn == 0 {
                    ring.disarm(&memory);
                }
                self.counters.recovered += u64::from(recovered);
                let parsed = ring
                    .buffers(&memory, head, &mut self.buffers)
                    .and_then(|()| request::parse(&memory, &mut self.buffers, &geometry));
                let parsed = match parsed {
                    Ok(parsed) => parsed,
                    Err(e) => {
                        self.counters.broken += 1;
                        warn!("{}: {e}", self.options.path.display());
                        ring.give_up();
                        break;
                    }
                };
                let mut pieces = self.spare.pop().unwrap_or_default();
                let request = match parsed.request {
                    Ok(request) => {
                        let write = request.operation == DiskOperation::Write;
                        let data = if write { &mut self.buffers.readable } else { &mut self.buffers.writable };
                        std::mem::swap(&mut pieces, data);
                        request
                    }
                    Err(_) => DiskRequest { operation: DiskOperation::Flush, offset: 0, length: 0 },
                };
                let step = if self.options.faults.delay.is_zero() { TaskStep::Main } else { TaskStep::Delay };
                let status = parsed.status;
                let is_durable_by_itself = self.store.writes_durably();
                let (ring, done) = (index, 0);
                let task =
                    DiskTask { ring, head, status, request, pieces, done, writethrough, is_durable_by_itself, step };
                match parsed.request {
                    Ok(_) => self.begin(task, &memory),
                    Err(status) => {
                        self.counters.refused += 1;
                        self.answer(task, status, &memory);
                    }
                }
            }
        }
        taken
    }

    /// Begins a request, or does it at once where the store is not needed.
    fn begin(&mut self, mut task: DiskTask, memory: &Arc<GuestMemoryMmap>) {
        if self.options.faults.fails(&task.request) {
            self.counters.failed += 1;
            return self.answer(task, DiskStatus::Failed, memory);
        }
        if task.request.operation == DiskOperation::Identify {
            let status = self.identify(&task, memory);
            return self.answer(task, status, memory);
        }
        if task.request.operation == DiskOperation::Flush && self.store.geometry(false).read_only {
            return self.answer(task, DiskStatus::Done, memory);
        }
        if task.request.operation == DiskOperation::Discard {
            // The sectors around whole blocks keep their content, as a discard allows.
            let Some(blocks) = task.request.whole_blocks(self.store.block()) else {
                return self.answer(task, DiskStatus::Done, memory);
            };
            task.request = blocks;
        }
        if !self.store.takes(&task) {
            // Neighbours in a block are read and written with it, so nothing else may be under way.
            self.finish_tasks();
            let status = match self.store.by_copy(&task, memory) {
                Ok(()) => DiskStatus::Done,
                Err(_) => {
                    self.counters.failed += 1;
                    DiskStatus::Failed
                }
            };
            task.done = task.request.length;
            return self.answer(task, status, memory);
        }
        let Some(id) = self.free.pop() else {
            // The caller has seen that one is free.
            return self.answer(task, DiskStatus::Failed, memory);
        };
        self.tasks[id] = Some(task);
        self.go_on(id, memory);
    }

    fn go_on(&mut self, id: usize, memory: &Arc<GuestMemoryMmap>) {
        let Some(task) = self.tasks.get(id).and_then(Option::as_ref) else { return };
        let skip = usize::try_from(task.done).unwrap_or(usize::MAX);
        if !self.store.begin(id, task.next(), memory, &task.pieces, skip) {
            self.end(id, DiskStatus::Failed, memory);
        }
    }

    /// Takes the results of tasks; whether there were any.
    fn complete(&mut self) -> bool {
        let mut worked = false;
        while let Some((id, result)) = self.store.ended() {
            worked = true;
            let Some(task) = self.tasks.get_mut(id).and_then(Option::as_mut) else { continue };
            let after = task.after(result);
            let Some(session) = &mut self.session else {
                // The front end has gone. It still notes the request as in flight, and brings it back.
                self.release(id);
                continue;
            };
            let memory = Arc::clone(session.parts().0.map());
            match after {
                AfterTask::Continue => self.go_on(id, &memory),
                AfterTask::Answer(status) => self.end(id, status, &memory),
            }
        }
        worked
    }

    fn release(&mut self, id: usize) -> Option<DiskTask> {
        let task = self.tasks.get_mut(id)?.take()?;
        self.free.push(id);
        Some(task)
    }

    fn end(&mut self, id: usize, status: DiskStatus, memory: &GuestMemoryMmap) {
        if let Some(task) = self.release(id) {
            if status != DiskStatus::Done {
                self.counters.failed += 1;
            }
            self.answer(task, status, memory);
        }
    }

    /// Writes the status of a request and completes it. [`Self::publish`] makes that visible.
    fn answer(&mut self, task: DiskTask, status: DiskStatus, memory: &GuestMemoryMmap) {
        let DiskTask { ring, head, request, mut pieces, status: place, .. } = task;
        let mut written = 1;
        if status == DiskStatus::Done {
            let counters = &mut self.counters;
            match request.operation {
                DiskOperation::Read => {
                    counters.reads += 1;
                    counters.read_bytes += request.length;
                    written += usize::try_from(request.length).unwrap_or(0);
                }
                DiskOperation::Write => {
                    counters.writes += 1;
                    counters.written_bytes += request.length;
                }
                DiskOperation::Flush => counters.flushes += 1,
                DiskOperation::Discard | DiskOperation::WriteZeroes { .. } => counters.ranges += 1,
                DiskOperation::Identify => written += SERIAL,
            }
        }
        pieces.clear();
        self.spare.push(pieces);
        let Some(session) = &mut self.session else { return };
        let ring = &mut session.parts().1[ring];
        let done = memory.write_obj(status.byte(), place).is_ok() && ring.complete(memory, head, written).is_ok();
        if !done {
            self.counters.broken += 1;
            ring.give_up();
        }
    }

    fn publish(&mut self) {
        let Some(session) = &mut self.session else { return };
        let (table, rings) = session.parts();
        for ring in rings.iter_mut().filter(|ring| ring.runs()) {
            ring.publish(table.map());
            ring.notify(table.map());
        }
    }

    fn identify(&self, task: &DiskTask, memory: &GuestMemoryMmap) -> DiskStatus {
        let mut serial = [0; SERIAL];
        for (to, from) in serial.iter_mut().zip(self.options.serial.bytes()) {
            *to = from;
        }
        put(&task.pieces, &serial, memory)
    }

    /// Waits until no task is under way.
    fn finish_tasks(&mut self) {
        self.store.submit();
        while self.store.busy() > 0 {
            if !self.complete() {
                self.store.wait();
            }
        }
        self.store.all_ended();
    }

    /// Does what an earlier back end took and did not complete.
    fn finish_unfinished(&mut self) {
        let is_left = |ring: &VirtioRing| ring.runs() && ring.unfinished() > 0;
        while self.session.as_ref().is_some_and(|session| session.rings().iter().any(is_left)) {
            self.take_requests();
            self.store.submit();
            // This makes room for the next ones.
            self.finish_tasks();
        }
    }

    /// Finishes tasks, and publishes completions to the driver.
    fn drain(&mut self) {
        self.finish_tasks();
        self.publish();
    }

    /// Asks the driver to ring. `true` if it has offered something since the last look.
    fn arm(&mut self) -> bool {
        let full = self.free.is_empty();
        let Some(session) = &mut self.session else { return false };
        let (table, rings) = session.parts();
        let mut found = false;
        for ring in rings.iter_mut().filter(|ring| ring.runs()) {
            // If all tasks are under way, the end of one wakes the loop.
            found |= !full && (ring.arm(table.map()) || ring.has_work(table.map()));
        }
        found
    }

    fn handle(&mut self, token: u64) {
        match token {
            CONTROL => {
                let _ = rustix::io::read(&**self.wake.get(), &mut [0_u8; 8]);
                while let Ok((request, answer)) = self.requests.try_recv() {
                    let _ = answer.send(self.control(request));
                }
            }
            LISTENER => {
                if self.session.is_some() {
                    // The front end may have gone already, which is to be noticed before the next one is sent away.
                    self.handle(SOCKET);
                }
                let is_closed = self.session.is_some() || self.stopping;
                let Some(socket) = self.listener.accept(is_closed) else { return };
                let reaper = self.listener.reaper();
                match FrontendSession::new(self.model(), socket, &self.poller, 0, SOCKET, reaper) {
                    Ok(mut session) => {
                        self.store.front_end_changes();
                        session.set_config(self.config());
                        self.session = Some(session);
                        info!("{}: a front end has connected", self.options.path.display());
                    }
                    Err(e) => warn!("{}: {e}", self.options.path.display()),
                }
            }
            SOCKET => {
                if let Err(e) = self.talk() {
                    let path = self.options.path.display();
                    match e {
                        VhostError::Closed => info!("{path}: {e}"),
                        e => {
                            self.counters.broken += 1;
                            warn!("{path}: {e}");
                        }
                    }
                    // Tasks in flight still use the memory, and could overtake the requests of the next front end.
                    self.session = None;
                    self.unused_since = Instant::now();
                    self.finish_tasks();
                }
            }
            STORE => self.store.heard(),
            ring => {
                let ring = usize::try_from(ring).unwrap_or(usize::MAX);
                if let Some(ring) = self.session.as_ref().and_then(|session| session.rings().get(ring)) {
                    ring.clear_kick();
                }
            }
        }
    }

    fn talk(&mut self) -> Result<(), VhostError> {
        for _ in 0..TURN {
            let Some(session) = &mut self.session else { break };
            let Some(request) = session.take()? else { break };
            if self.needs_drain(&request) {
                // Requests end in the queue and the memory in which they began, also those that an earlier back end took.
                self.finish_unfinished();
                self.drain();
            }
            if may_move_memory(request.code) {
                self.store.memory_changes();
            }
            let Some(session) = &mut self.session else { break };
            session.serve_request(request)?;
        }
        Ok(())
    }

    /// Whether the machine's requests must end before this one of the front end is served: it changes a queue, or removes memory that is in use.
    fn needs_drain(&self, request: &Request) -> bool {
        match request.code {
            FrontendReq::GET_VRING_BASE
            | FrontendReq::RESET_OWNER
            | FrontendReq::SET_VRING_KICK
            | FrontendReq::SET_VRING_ADDR
            | FrontendReq::SET_VRING_ENABLE => true,
            FrontendReq::SET_MEM_TABLE => !self.is_left_by(request),
            FrontendReq::REM_MEM_REG => {
                request.body::<VhostUserSingleMemoryRegion>().is_ok_and(|region| self.uses(&region))
            }
            _ => false,
        }
    }

    /// Whether a queue lies in this region, or the data or the status of a request under way. The region need not be in the memory table: data may
    /// lie in a window that the machine only reads, and another window may take its addresses.
    fn uses(&self, region: &VhostUserMemoryRegion) -> bool {
        let (start, end) = (region.guest_phys_addr, region.guest_phys_addr.saturating_add(region.memory_size));
        let is_inside =
            |address: GuestAddress, length: usize| address.0 < end && address.0.saturating_add(length as u64) > start;
        let holds = |task: &DiskTask| {
            is_inside(task.status, 1) || task.pieces.iter().any(|piece| is_inside(piece.address, piece.length))
        };
        // The requests that an earlier back end took are not read yet, and may lie anywhere.
        let reaches = |ring: &VirtioRing| ring.unfinished() > 0 || ring.lies_in(start, end);
        self.tasks.iter().flatten().any(holds)
            || self.session.as_ref().is_some_and(|session| session.rings().iter().any(reaches))
    }

    /// Whether a memory table leaves the queues, and the data and the status of each request under way, where they are. Data in a window that the
    /// machine only reads is in no table that is known here, so another window may come to its place.
    fn is_left_by(&self, table: &Request) -> bool {
        let Some(session) = &self.session else { return false };
        let kept = session.kept_by(table);
        let stays = |(start, length): (u64, u64)| {
            kept.iter().any(|range| range.start <= start && start.saturating_add(length) <= range.end)
        };
        let is_left = |task: &DiskTask| {
            stays((task.status.0, 1)) && task.pieces.iter().all(|piece| stays((piece.address.0, piece.length as u64)))
        };
        // The requests that an earlier back end took are not read yet, and may lie anywhere.
        let is_ring_left = |ring: &VirtioRing| ring.unfinished() == 0 && ring.parts().into_iter().all(stays);
        self.tasks.iter().flatten().all(is_left)
            && session.rings().iter().filter(|ring| ring.started()).all(is_ring_left)
    }

    fn control(&mut self, request: DiskControl) -> Result<serde_json::Value, VhostError> {
        match request {
            DiskControl::Show => {
                let counters = self.counters.with_copies(self.store.copied());
                let report = DiskReport {
                    path: self.options.path.clone(),
                    capacity: self.store.geometry(false).capacity,
                    read_only: self.options.read_only,
                    connected: self.session.as_ref().is_some_and(|s| s.rings().iter().any(|ring| ring.runs())),
                    occupied: self.session.is_some(),
                    recovers: self.session.as_ref().is_some_and(FrontendSession::survives),
                    under_way: self.store.busy() as u64,
                    counters,
                    copies: counters.copies(),
                };
                serde_json::to_value(report).map_err(|e| VhostError::Refused(e.to_string()))
            }
            DiskControl::Resize { size } => {
                if let Some(size) = size {
                    self.store.grow(size)?;
                }
                if self.store.refresh()? {
                    let config = self.config();
                    if let Some(session) = &mut self.session {
                        session.set_config(config);
                    }
                }
                Ok(serde_json::json!(self.store.geometry(false).capacity))
            }
            DiskControl::Stop => {
                self.stopping = true;
                Ok(serde_json::Value::Null)
            }
            DiskControl::Expect => {
                self.unused_since = Instant::now();
                Ok(serde_json::Value::Null)
            }
            DiskControl::StopIfUnused => Ok(serde_json::json!(self.stop_if_unused())),
        }
    }

    /// Ends, if no front end is connected or waits to be taken, and none was for a while. From then on no front end is taken.
    fn stop_if_unused(&mut self) -> DiskUse {
        self.handle(LISTENER);
        if self.session.is_some() {
            return DiskUse::Used;
        }
        if self.unused_since.elapsed() < RETURN {
            return DiskUse::Recent;
        }
        self.stopping = true;
        DiskUse::Ended
    }

    /// The features that the disk offers to a guest.
    fn model(&self) -> DeviceModel {
        let mut bits = vec![
            virtio_blk::VIRTIO_BLK_F_SEG_MAX,
            virtio_blk::VIRTIO_BLK_F_BLK_SIZE,
            virtio_ring::VIRTIO_RING_F_INDIRECT_DESC,
            virtio_ring::VIRTIO_RING_F_EVENT_IDX,
            virtio_config::VIRTIO_F_VERSION_1,
        ];
        let geometry = self.store.geometry(self.options.discard);
        let optional = [
            (!self.options.writethrough, virtio_blk::VIRTIO_BLK_F_FLUSH),
            (geometry.read_only, virtio_blk::VIRTIO_BLK_F_RO),
            (geometry.discards, virtio_blk::VIRTIO_BLK_F_DISCARD),
            (!geometry.read_only, virtio_blk::VIRTIO_BLK_F_WRITE_ZEROES),
            (self.options.queues > 1, virtio_blk::VIRTIO_BLK_F_MQ),
        ];
        bits.extend(optional.into_iter().filter_map(|(offered, bit)| offered.then_some(bit)));
        let features = bits.iter().fold(VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), |all, bit| all | 1 << bit);
        // Whether discards are offered depends on the file or device, so an earlier back end may have offered them to the guest. QEMU
        // then sets the bit in each later connection, and the guest's discards are answered as unsupported.
        let discard = if geometry.read_only { 0 } else { 1 << virtio_blk::VIRTIO_BLK_F_DISCARD };
        let protocol = Protocol::MQ
            | Protocol::REPLY_ACK
            | Protocol::CONFIG
            | Protocol::INFLIGHT_SHMFD
            | Protocol::BACKEND_REQ
            | Protocol::CONFIGURE_MEM_SLOTS;
        let rings = usize::from(self.options.queues);
        DeviceModel { features, accepted: features | discard, protocol, rings, announced: self.options.queues.into() }
    }

    /// The configuration that a driver reads: `struct virtio_blk_config`.
    fn config(&self) -> Vec<u8> {
        let geometry = self.store.geometry(self.options.discard);
        let block = self.store.block();
        let align = (block / SECTOR as u32).max(1);
        let mut config = vec![0; 60];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(geometry.capacity / SECTOR).to_le_bytes());
        put(12, &SEGMENTS.to_le_bytes());
        put(20, &block.to_le_bytes());
        put(32, &[u8::from(!self.options.writethrough)]);
        put(34, &self.options.queues.to_le_bytes());
        // Discards: the largest range, how many ranges, and where they begin. Zeroes: the same, without the last.
        put(36, &self.store.longest_discard().to_le_bytes());
        put(40, &1_u32.to_le_bytes());
        put(44, &align.to_le_bytes());
        put(48, &MOST_RANGE.to_le_bytes());
        put(52, &1_u32.to_le_bytes());
        put(56, &[1]);
        config
    }
}

/// Whether other memory may be at the machine's addresses after this request. Once the queues of a machine stop, it may start again.
fn may_move_memory(code: FrontendReq) -> bool {
    matches!(
        code,
        FrontendReq::SET_MEM_TABLE
            | FrontendReq::ADD_MEM_REG
            | FrontendReq::REM_MEM_REG
            | FrontendReq::GET_VRING_BASE
            | FrontendReq::RESET_OWNER
    )
}

/// Copies bytes to the front of the pieces.
fn put(pieces: &[BufferPiece], mut bytes: &[u8], memory: &GuestMemoryMmap) -> DiskStatus {
    for piece in pieces {
        let (now, later) = bytes.split_at(piece.length.min(bytes.len()));
        if memory.write_slice(now, GuestAddress(piece.address.0)).is_err() {
            return DiskStatus::Failed;
        }
        bytes = later;
    }
    DiskStatus::Done
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
