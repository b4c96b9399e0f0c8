//! A disk that another domain exports, as the store of a back end. Threads execute its tasks by calls.
#![expect(unsafe_code, reason = "copies from memory that the exporter can change, by its address")]

use super::changes::{ChangeLog, DiskChange};
use super::link::{ExportCalls, ExportFailure, ExportLink, KeptData, MOST_DATA};
use super::passed::{GroupData, PassedWindows};
use super::wire::{ExportOperation, Welcome};
use crate::VhostError;
use crate::chain::BufferPiece;
use crate::disk::counters::CopiedBytes;
use crate::disk::image::ALIGN;
use crate::disk::request::DiskGeometry;
use crate::disk::store::DiskStore;
use crate::disk::store_task::StoreTask;
use crate::disk::task::DiskTask;
use partywall::rpc::Reply;
use partywall::{Buffer, Domain, Error, Group};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

/// Between two attempts to reach an exporter that has gone.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a thread takes no tasks that had no memory for a connection.
const MEMORY_PAUSE: Duration = Duration::from_millis(500);
/// How long requests wait for an exporter that has gone, while the machine waits for the end of all requests.
const HURRY: Duration = Duration::from_secs(2);
/// Bytes that one request fills with zeroes, so that each is answered in time. The next request goes on.
const ZEROES: u64 = 64 << 20;
/// How long an exporter may take to begin a session.
const GREETING: Duration = Duration::from_secs(10);

/// Where a disk is imported from.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The domain that connects.
    pub domain: Domain,
    /// The exporter, as `DOMAIN:NAME`.
    pub target: String,
    /// Requests that the exporter executes at a time. Each has a thread and a connection. If the window to the exporter has memory for fewer
    /// connections, there are fewer.
    pub connections: usize,
    /// How long a request waits for an exporter that has gone or does not answer, before it fails.
    pub grace: Duration,
    /// A group that the exporter takes part in as well: what is written lies in buffers of it, and the exporter reads it there.
    pub group: Option<Group>,
    /// The machine that uses the disk, if it is a member of the group: what it writes from a back end's buffer of the group is named to the
    /// exporter, and not copied.
    pub machine: Option<String>,
}

/// The store of a disk that another domain exports.
#[derive(Debug)]
pub struct ImportedDisk {
    shared: Arc<ImportCore>,
    workers: Vec<JoinHandle<()>>,
    done: Receiver<Done>,
    /// One that was waited for, and is to be returned first.
    next: Option<Done>,
    busy: usize,
    geometry: DiskGeometry,
    block: u32,
}

type Done = (usize, Result<u32, Errno>);

/// A task for a thread.
struct StoreJob {
    id: usize,
    task: StoreTask,
    memory: Arc<GuestMemoryMmap>,
    pieces: Vec<BufferPiece>,
    /// Since when it waits for an exporter, or for memory.
    waits_since: Option<Instant>,
    /// Since when the broker's answer is awaited about where its data is.
    unseen_since: Option<Instant>,
}

/// Why a task has no result from a thread.
enum Unfinished {
    Failed(Errno),
    /// This thread has no connection, since the window has no memory for it. Others have.
    ForOthers,
}

/// Why a thread has no connection.
enum Unconnected {
    /// The session with this number gives none.
    Gone(u64),
    NoMemory,
}

/// What the threads share.
struct ImportCore {
    options: ImportOptions,
    delay: Duration,
    /// The disk as it was at first. An exporter that comes back must have the same.
    first: Welcome,
    jobs: Mutex<StoreJobs>,
    /// There is another job, or a session has ended.
    offered: Condvar,
    link: Mutex<CurrentLink>,
    /// The number of the first session that has not ended.
    first_open: AtomicU64,
    /// Threads that have a connection.
    connected: AtomicUsize,
    /// The machine waits for the end of all requests.
    hurries: AtomicBool,
    /// Readable while `is_rung`.
    wake: OwnedFd,
    is_rung: AtomicBool,
    copied_read: AtomicU64,
    copied_written: AtomicU64,
    passed: AtomicU64,
    /// The group that data lies in.
    windows: Option<PassedWindows>,
    /// The exporter of the session with this number takes no data from the group.
    no_group: AtomicU64,
    /// Requests that have failed, and how many had when the machine's last successful flush began. Between them the machine may have given the
    /// disk up, and nothing is kept in buffers of others (protocol E4.5).
    failures: AtomicU64,
    flushed_failures: AtomicU64,
    /// Changes that are not known to be durable.
    changes: ChangeLog,
}

#[derive(Default)]
struct StoreJobs {
    jobs: VecDeque<StoreJob>,
    is_over: bool,
}

/// The session, and how many there were before.
struct CurrentLink {
    generation: u64,
    link: Option<ExportLink>,
    boot: [u8; 16],
}

impl std::fmt::Debug for ImportCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImportCore").field("target", &self.options.target).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ImportedDisk {
    /// Makes all earlier changes of an exported disk durable. A back end does this before it joins a group: those behind the exporter then give back
    /// what they keep of an earlier back end's buffers, whose memory the new one needs.
    ///
    /// # Errors
    /// Those of a session with the exporter, and of its flush.
    ///
    /// ```
    /// use partywall_vhost::disk::exported::{DiskExport, DiskExportOptions, ImportedDisk};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let store = partywall::Domain::builder().name("store").broker(broker.path()).join()?;
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("disk.raw");
    /// # std::fs::File::create(&path)?.set_len(1 << 20)?;
    /// # let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
    /// # let _export = DiskExport::bind(options, &store, "data")?;
    /// ImportedDisk::sync(&store, "store:data", Duration::from_secs(10))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sync(domain: &Domain, target: &str, grace: Duration) -> Result<(), VhostError> {
        let link = connect_within(domain, target, grace)?;
        let synced = ExportCalls::connect(domain, target, link.welcome.session, grace).and_then(|calls| calls.sync());
        synced.map_err(|e| VhostError::Refused(format!("{target} does not make its disk durable: {e:?}")))
    }

    /// Begins a session with the exporter.
    pub(crate) fn connect(options: ImportOptions, read_only: bool, delay: Duration) -> Result<Self, VhostError> {
        let link = connect_within(&options.domain, &options.target, options.grace)?;
        let first = link.welcome;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(VhostError::system("make an eventfd"))?;
        let connections = options.connections.max(1);
        let windows = options.group.clone().map(|group| PassedWindows::new(group, options.machine.clone()));
        let shared = Arc::new(ImportCore {
            options,
            delay,
            first,
            jobs: Mutex::default(),
            offered: Condvar::new(),
            link: Mutex::new(CurrentLink { generation: 0, boot: first.boot, link: Some(link) }),
            first_open: AtomicU64::new(0),
            connected: AtomicUsize::new(0),
            hurries: AtomicBool::new(false),
            wake,
            is_rung: AtomicBool::new(false),
            copied_read: AtomicU64::new(0),
            copied_written: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            windows,
            no_group: AtomicU64::new(u64::MAX),
            failures: AtomicU64::new(0),
            flushed_failures: AtomicU64::new(0),
            changes: ChangeLog::default(),
        });
        let (sender, done) = channel();
        let read_only = read_only || first.read_only;
        let geometry = DiskGeometry { capacity: first.capacity, read_only, discards: first.discards && !read_only };
        let mut disk = Self { shared, workers: Vec::new(), done, next: None, busy: 0, geometry, block: first.block };
        for _ in 0..connections {
            let (shared, sender) = (Arc::clone(&disk.shared), sender.clone());
            let worker = std::thread::Builder::new().name("pw-blk-import".into()).spawn(move || shared.work(&sender));
            disk.workers.push(worker.map_err(|source| VhostError::System { call: "start a thread", source })?);
        }
        Ok(disk)
    }
}

/// The first session. The exporter may still be ending that of an earlier back end.
fn connect_within(domain: &Domain, target: &str, grace: Duration) -> Result<ExportLink, VhostError> {
    let until = Instant::now() + grace;
    loop {
        match ExportLink::connect(domain, target, GREETING) {
            Err(e) if Instant::now() >= until => return Err(e),
            Err(_) => std::thread::sleep(PAUSE),
            link => return link,
        }
    }
}

impl Drop for ImportedDisk {
    fn drop(&mut self) {
        self.shared.hurries.store(true, Ordering::Relaxed);
        lock(&self.shared.jobs).is_over = true;
        self.shared.offered.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl DiskStore for ImportedDisk {
    fn geometry(&self, discards: bool) -> DiskGeometry {
        DiskGeometry { discards: self.geometry.discards && discards, ..self.geometry }
    }

    fn block(&self) -> u32 {
        self.block
    }

    fn refresh(&mut self) -> Result<bool, VhostError> {
        let away = || VhostError::Refused(format!("the exporter of {} does not answer", self.shared.options.target));
        let capacity = self.shared.measure().ok_or_else(away)?;
        if capacity < self.geometry.capacity || !capacity.is_multiple_of(self.block.into()) {
            return Err(VhostError::Refused(format!("the exported disk has {capacity} bytes now, which are fewer")));
        }
        let before = std::mem::replace(&mut self.geometry.capacity, capacity);
        Ok(before != capacity)
    }

    fn grow(&mut self, _: u64) -> Result<(), VhostError> {
        Err(VhostError::Refused("make the disk larger where it is exported, and leave out the size here".into()))
    }

    fn takes(&self, _: &DiskTask) -> bool {
        true
    }

    fn by_copy(&mut self, _: &DiskTask, _: &GuestMemoryMmap) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }

    fn begin(
        &mut self,
        id: usize,
        task: StoreTask,
        memory: &Arc<GuestMemoryMmap>,
        pieces: &[BufferPiece],
        skip: usize,
    ) -> bool {
        let has_data = matches!(task, StoreTask::Read { .. } | StoreTask::Write { .. });
        let pieces = if has_data { front(pieces, skip, MOST_DATA) } else { Vec::new() };
        // What a machine only reads is in no memory table. It is looked for in the group.
        let may_be_elsewhere = self.shared.windows.is_some() && matches!(task, StoreTask::Write { .. });
        let is_inside = |piece: &BufferPiece| memory.get_slice(piece.address, piece.length).is_ok();
        if (has_data && pieces.is_empty()) || !(may_be_elsewhere || pieces.iter().all(is_inside)) {
            return false;
        }
        lock(&self.shared.jobs).jobs.push_back(StoreJob {
            id,
            task,
            memory: Arc::clone(memory),
            pieces,
            waits_since: None,
            unseen_since: None,
        });
        self.shared.offered.notify_one();
        self.busy += 1;
        true
    }

    fn submit(&mut self) {}

    fn busy(&self) -> usize {
        self.busy
    }

    fn wait(&mut self) {
        if self.next.is_some() || self.busy == 0 {
            return;
        }
        self.next = match self.done.recv_timeout(HURRY) {
            Err(RecvTimeoutError::Timeout) => {
                self.shared.hurries.store(true, Ordering::Relaxed);
                let next = self.done.recv().ok();
                self.shared.hurries.store(false, Ordering::Relaxed);
                next
            }
            next => next.ok(),
        };
    }

    fn ended(&mut self) -> Option<(usize, Result<u32, Errno>)> {
        let next = self.next.take().or_else(|| self.done.try_recv().ok()).or_else(|| {
            // What is sent after this is rung for.
            self.shared.is_rung.swap(false, Ordering::SeqCst).then(|| {
                let _ = rustix::io::read(&self.shared.wake, &mut [0_u8; 8]);
                self.done.try_recv().ok()
            })?
        })?;
        self.busy -= 1;
        Some(next)
    }

    fn descriptor(&self) -> Result<OwnedFd, VhostError> {
        let wake = self.shared.wake.try_clone();
        wake.map_err(|source| VhostError::System { call: "watch the answers of an exporter", source })
    }

    fn copied(&self) -> CopiedBytes {
        let [read, written] =
            [&self.shared.copied_read, &self.shared.copied_written].map(|n| n.load(Ordering::Relaxed));
        CopiedBytes { read, written, passed: self.shared.passed.load(Ordering::Relaxed) }
    }

    fn front_end_changes(&mut self) {
        if let Some(windows) = &self.shared.windows {
            windows.forget();
            self.shared.changes.copy_from_others();
        }
    }
}

/// The pieces behind the first `skip` bytes, of `most` bytes at most.
fn front(pieces: &[BufferPiece], mut skip: usize, mut most: usize) -> Vec<BufferPiece> {
    let mut front = Vec::new();
    for piece in pieces {
        let passed = skip.min(piece.length);
        skip -= passed;
        let length = (piece.length - passed).min(most);
        most -= length;
        if length > 0 {
            let address = vm_memory::GuestAddress(piece.address.0.wrapping_add(passed as u64));
            front.push(BufferPiece { address, length });
        }
    }
    front
}

/// A thread's connection, and the session that it is of.
type OwnCalls = Option<(u64, ExportCalls)>;

impl ImportCore {
    /// Executes tasks until the store is dropped.
    fn work(&self, done: &Sender<Done>) {
        let mut calls = None;
        while let Some(mut job) = self.next_job(&mut calls) {
            let result = match self.execute(&mut calls, &mut job) {
                Ok(result) => {
                    if self.failures.load(Ordering::SeqCst) > self.flushed_failures.load(Ordering::SeqCst) {
                        self.changes.copy_from_others();
                    }
                    Ok(result)
                }
                Err(Unfinished::Failed(e)) => {
                    self.failures.fetch_add(1, Ordering::SeqCst);
                    self.changes.copy_from_others();
                    Err(e)
                }
                Err(Unfinished::ForOthers) => {
                    lock(&self.jobs).jobs.push_front(job);
                    self.offered.notify_one();
                    std::thread::sleep(MEMORY_PAUSE);
                    continue;
                }
            };
            let id = job.id;
            // The guest's memory is not used any more when the task has ended.
            drop(job);
            if done.send((id, result)).is_err() {
                break;
            }
            if !self.is_rung.swap(true, Ordering::SeqCst) {
                let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
            }
        }
        self.disconnect(&mut calls);
    }

    /// Waits for the next task. A connection whose session ends meanwhile is dropped, since its memory is needed for the next session's.
    fn next_job(&self, own: &mut OwnCalls) -> Option<StoreJob> {
        let mut queue = lock(&self.jobs);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.is_over {
                return None;
            }
            if own.as_ref().is_some_and(|(of, _)| *of < self.first_open.load(Ordering::Relaxed)) {
                drop(queue);
                self.disconnect(own);
                queue = lock(&self.jobs);
            } else {
                queue = self.offered.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Executes a task, also if the exporter goes and comes back meanwhile. Fails when the grace is over (protocol E1.3). A session that gives no
    /// answer ends before that, so that nothing of it is executed later.
    fn execute(&self, own: &mut OwnCalls, job: &mut StoreJob) -> Result<u32, Unfinished> {
        if job.task == StoreTask::Delay {
            std::thread::sleep(self.delay);
            return Ok(0);
        }
        loop {
            let began = Instant::now();
            // The broker may learn of the machine's windows later than the machine, for example after its own restart.
            let is_final = self.windows.as_ref().is_none_or(|windows| windows.is_answered(job.unseen_since));
            let unconnected = match self.connected(own) {
                Ok((generation, calls)) => match self.attempt(generation, calls, job) {
                    Ok(result) => return Ok(result),
                    Err(ExportFailure::Unseen) => {
                        tracing::debug!(pieces = ?job.pieces, "what the machine writes is in none of its windows");
                        let since = *job.unseen_since.get_or_insert(began);
                        if is_final || since.elapsed() >= HURRY {
                            return Err(Unfinished::Failed(Errno::FAULT));
                        }
                        // What an earlier window has would keep a later one from its place.
                        self.changes.copy_from_others();
                        std::thread::sleep(PAUSE);
                        continue;
                    }
                    Err(ExportFailure::Errno(e)) => return Err(Unfinished::Failed(e)),
                    // What is kept in this connection's heap is copied out of it. So an exporter could make the copies grow without end.
                    Err(ExportFailure::NoMemory) if self.changes.flush(calls, generation).is_ok() => {
                        Unconnected::NoMemory
                    }
                    Err(ExportFailure::NoMemory | ExportFailure::Ended) => Unconnected::Gone(generation),
                },
                Err(unconnected) => unconnected,
            };
            // Others wait for the memory of this connection, too.
            self.disconnect(own);
            let since = *job.waits_since.get_or_insert_with(Instant::now);
            let errno = match unconnected {
                Unconnected::Gone(generation) => {
                    self.renew(generation, since);
                    Errno::IO
                }
                Unconnected::NoMemory if self.connected.load(Ordering::Relaxed) > 0 && !self.is_over(since) => {
                    return Err(Unfinished::ForOthers);
                }
                Unconnected::NoMemory => {
                    tracing::debug!(exporter = self.options.target, "the window has no memory for a connection");
                    std::thread::sleep(PAUSE);
                    Errno::NOMEM
                }
            };
            if self.is_over(since) {
                return Err(Unfinished::Failed(errno));
            }
        }
    }

    /// The disk's size now. `None` if the exporter does not tell.
    fn measure(&self) -> Option<u64> {
        let since = Instant::now();
        loop {
            let current = lock(&self.link);
            let (generation, session) = (current.generation, current.link.as_ref().map(|link| link.welcome.session));
            drop(current);
            let ImportOptions { domain, target, grace, .. } = &self.options;
            let measured = session.ok_or(ExportFailure::Ended).and_then(|session| {
                let calls = ExportCalls::connect(domain, target, session, *grace)?;
                calls.request(ExportOperation::Measure, (0, 0), false, 0)
            });
            match measured {
                Ok(reply) => return reply.array(0).map(u64::from_le_bytes).ok(),
                Err(ExportFailure::Ended) => self.renew(generation, since),
                Err(ExportFailure::Errno(_) | ExportFailure::NoMemory | ExportFailure::Unseen) => return None,
            }
            if self.is_over(since) {
                return None;
            }
        }
    }

    /// Drops this thread's connection.
    fn disconnect(&self, own: &mut OwnCalls) {
        if let Some((_, calls)) = own.take() {
            self.changes.copy_blocks_of(&calls);
            self.connected.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether a request that could not be executed since then fails.
    fn is_over(&self, since: Instant) -> bool {
        let grace = if self.hurries.load(Ordering::Relaxed) { HURRY } else { self.options.grace };
        since.elapsed() >= grace
    }

    /// This thread's connection of the present session.
    fn connected<'c>(&self, own: &'c mut OwnCalls) -> Result<(u64, &'c ExportCalls), Unconnected> {
        let current = lock(&self.link);
        let generation = current.generation;
        let gone = Unconnected::Gone(generation);
        let Some(session) = current.link.as_ref().map(|link| link.welcome.session) else { return Err(gone) };
        drop(current);
        if own.as_ref().is_none_or(|(of, _)| *of != generation) {
            self.disconnect(own);
            let ImportOptions { domain, target, grace, .. } = &self.options;
            let calls = ExportCalls::connect_with_memory(domain, target, session, *grace).map_err(|e| match e {
                ExportFailure::NoMemory => Unconnected::NoMemory,
                _ => Unconnected::Gone(generation),
            })?;
            *own = Some((generation, calls));
            self.connected.fetch_add(1, Ordering::Relaxed);
        }
        own.as_ref().map(|(_, calls)| (generation, calls)).ok_or(gone)
    }

    /// Makes another session in place of the one with this number, unless another thread has done so.
    fn renew(&self, generation: u64, since: Instant) {
        let mut current = lock(&self.link);
        if current.generation != generation {
            return;
        }
        let target = &self.options.target;
        if current.link.take().is_some() {
            warn!("{target}: the exporter has gone, or does not answer");
            self.first_open.store(generation + 1, Ordering::Relaxed);
            // Under the lock that is held from the look at the number to the sleep.
            let _jobs = lock(&self.jobs);
            self.offered.notify_all();
        }
        // The exporter has ended all requests of the sessions before (protocol E1.2).
        let Some(link) = self.link_again(current.boot, generation + 1) else {
            std::thread::sleep(PAUSE);
            return;
        };
        info!("{target}: the exporter is back, after {} ms", since.elapsed().as_millis());
        current.generation += 1;
        current.boot = link.welcome.boot;
        current.link = Some(link);
    }

    /// Another session. What the exporter may have lost since the last one is done again before any other request (protocol E3).
    fn link_again(&self, boot: [u8; 16], number: u64) -> Option<ExportLink> {
        let ImportOptions { domain, target, grace, .. } = &self.options;
        let link = ExportLink::connect(domain, target, GREETING).ok()?;
        if !self.is_same(&link.welcome) {
            warn!("{target}: the exporter is back with another disk, which is not used");
            return None;
        }
        if !self.changes.is_empty() {
            let calls = ExportCalls::connect_with_memory(domain, target, link.welcome.session, *grace).ok()?;
            if link.welcome.boot != boot {
                let repeated = self.changes.repeat(&calls).ok()?;
                info!("{target}: its machine has started again; {repeated} changes are repeated");
            }
            match self.changes.flush(&calls, number) {
                Err(ExportFailure::Errno(_)) if self.changes.has_no_changes() => {}
                flushed => flushed.ok()?,
            }
        }
        Some(link)
    }

    /// Whether this may be the disk of the first session: it is as large, and takes the same requests.
    fn is_same(&self, welcome: &Welcome) -> bool {
        let Welcome { capacity, block, read_only, .. } = self.first;
        welcome.capacity >= capacity && welcome.block == block && welcome.read_only == read_only
    }

    fn attempt(&self, generation: u64, calls: &ExportCalls, job: &StoreJob) -> Result<u32, ExportFailure> {
        let total: usize = job.pieces.iter().map(|piece| piece.length).sum();
        let done = u32::try_from(total).unwrap_or(u32::MAX);
        match job.task {
            StoreTask::Read { offset } => {
                let reply = calls.request(ExportOperation::Read, (offset, total as u64), false, 0)?;
                let is_whole = reply.len() == total && copy_reply(&reply, job);
                self.copied_read.fetch_add(total as u64, Ordering::Relaxed);
                if is_whole { Ok(done) } else { Err(ExportFailure::Errno(Errno::IO)) }
            }
            StoreTask::Write { offset, durable } => {
                if let Some(windows) = &self.windows
                    && let Some(written) = self.write_from_group(windows, (generation, calls), job, (offset, durable))
                {
                    return written.map(|length| u32::try_from(length).unwrap_or(u32::MAX));
                }
                let fill = |room: &mut [u8]| self.fill(&job.memory, &job.pieces, room);
                let block = match calls.block((offset, total), durable, fill) {
                    // The heap is full of changes that are kept until the next flush.
                    Err(ExportFailure::NoMemory) => {
                        self.changes.flush(calls, generation)?;
                        calls.block((offset, total), durable, fill)
                    }
                    block => block,
                };
                let data = Arc::new(block?);
                self.copied_written.fetch_add(total as u64, Ordering::Relaxed);
                let kept = DiskChange::Write { offset, length: total, data: calls.keep(&data) };
                self.change((generation, calls), kept, durable, || calls.write(&data))?;
                Ok(done)
            }
            StoreTask::Zero { offset, length, durable } => {
                let length = length.min(ZEROES);
                self.change((generation, calls), DiskChange::Zero { offset, length }, durable, || {
                    calls.request(ExportOperation::Zero, (offset, length), durable, 0).map(drop)
                })?;
                Ok(u32::try_from(length).unwrap_or(u32::MAX))
            }
            StoreTask::Allocate { offset, length, mode } => {
                self.change((generation, calls), DiskChange::Allocate { offset, length, mode }, false, || {
                    calls.request(ExportOperation::Allocate, (offset, length), false, mode).map(drop)
                })?;
                Ok(0)
            }
            StoreTask::Sync => {
                let failures = self.failures.load(Ordering::SeqCst);
                self.changes.flush(calls, generation)?;
                self.flushed_failures.fetch_max(failures, Ordering::SeqCst);
                Ok(0)
            }
            StoreTask::Delay => Ok(0),
        }
    }

    /// Copies the data of a write.
    fn fill(&self, memory: &GuestMemoryMmap, pieces: &[BufferPiece], mut room: &mut [u8]) -> bool {
        pieces.iter().all(|piece| {
            let (now, later) = std::mem::take(&mut room).split_at_mut(piece.length);
            room = later;
            memory.read_slice(now, piece.address).is_ok()
                || self.windows.as_ref().is_some_and(|windows| windows.copy(piece, now))
        })
    }

    /// Writes data that lies in the group, or is copied into it (protocol E4). How many bytes, from the first one on; `None` if the data has to go
    /// another way.
    fn write_from_group(
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
                if !self.fill(&job.memory, &front(&job.pieces, 0, length), &mut buffer) {
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

    /// Executes a change, and keeps it until a flush unless it is durable.
    fn change(
        &self,
        (generation, calls): (u64, &ExportCalls),
        change: DiskChange,
        durable: bool,
        execute: impl FnOnce() -> Result<(), ExportFailure>,
    ) -> Result<(), ExportFailure> {
        if !durable && self.changes.is_full() {
            self.changes.flush(calls, generation)?;
        }
        let number = (!durable).then(|| self.changes.begin(change));
        let executed = execute();
        if let Some(number) = number {
            self.changes.end(number, executed.is_ok());
        }
        executed
    }
}

/// Copies the bytes of a reply to the pieces of a job, which have as many.
fn copy_reply(reply: &Reply, job: &StoreJob) -> bool {
    // SAFETY: no code here reads the slice; only its address and length are taken. Its mapping lives as long as `reply`.
    let bytes = unsafe { reply.view().trusting() };
    let (address, len) = (bytes.as_ptr().cast_mut(), bytes.len());
    // SAFETY: `len` bytes are mapped at `address` as long as `reply`, which outlives the slice. The slice is only read, and volatile access copes with
    // an exporter that changes the bytes meanwhile.
    let from: VolatileSlice<'_> = unsafe { VolatileSlice::new(address, len) };
    let mut at = 0;
    job.pieces.iter().all(|piece| {
        let part = from.subslice(at, piece.length);
        let to = job.memory.get_slice(piece.address, piece.length);
        at += piece.length;
        match (part, to) {
            (Ok(part), Ok(to)) => {
                part.copy_to_volatile_slice(to);
                true
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

    fn piece(address: u64, length: usize) -> BufferPiece {
        BufferPiece { address: GuestAddress(address), length }
    }

    #[test]
    fn front_of_pieces_skips_and_ends_where_it_should() {
        let pieces = [piece(0, 10), piece(100, 20), piece(200, 30)];
        assert_eq!(front(&pieces, 0, 100), pieces);
        assert_eq!(front(&pieces, 10, 25), [piece(100, 20), piece(200, 5)]);
        assert_eq!(front(&pieces, 15, 5), [piece(105, 5)]);
        assert_eq!(front(&pieces, 60, 5), []);
    }
}
