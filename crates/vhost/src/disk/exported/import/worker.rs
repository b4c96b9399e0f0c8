//! A thread that executes tasks, and the tasks that wait for one.

use super::connection::{OwnCalls, Unconnected};
use super::{ImportCore, PAUSE, lock};
use crate::chain::BufferPiece;
use crate::disk::exported::link::ExportFailure;
use crate::disk::exported::silence::UnansweredRequest;
use crate::disk::store_task::StoreTask;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use vm_memory::GuestMemoryMmap;

/// How long a thread takes no tasks that had no memory for a connection.
const MEMORY_PAUSE: Duration = Duration::from_millis(500);
/// How long a thread waits for another one that makes a connection.
const CONNECTION_PAUSE: Duration = Duration::from_millis(2);
/// How long a request waits for the broker's answer about where its data is.
const UNSEEN: Duration = Duration::from_secs(2);

/// The number of a task that has ended, and its result.
pub(super) type Done = (usize, Result<u32, Errno>);

/// A task for a thread.
pub(super) struct StoreJob {
    pub(super) id: usize,
    pub(super) task: StoreTask,
    pub(super) memory: Arc<GuestMemoryMmap>,
    pub(super) pieces: Vec<BufferPiece>,
    /// When the back end has queued it.
    pub(super) offered: Instant,
    /// Since when a thread has waited with it for an exporter, or for memory.
    pub(super) waits_since: Option<Instant>,
    /// Since when the broker's answer is awaited about where its data is.
    pub(super) unseen_since: Option<Instant>,
}

#[derive(Default)]
pub(super) struct StoreJobs {
    pub(super) jobs: VecDeque<StoreJob>,
    pub(super) is_over: bool,
}

/// Why a task has no result from a thread.
enum Unfinished {
    Failed(Errno),
    /// This thread has no connection, since the window has no memory for it, or another thread makes one. Others have one. This thread takes no
    /// task for so long.
    ForOthers(Duration),
}

impl ImportCore {
    /// Executes tasks until the store is dropped.
    pub(super) fn work(&self, done: &Sender<Done>) {
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
                Err(Unfinished::ForOthers(pause)) => {
                    lock(&self.jobs).jobs.push_front(job);
                    self.offered.notify_one();
                    std::thread::sleep(pause);
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
    ///
    /// While other threads have connections, a thread takes no task before it has one as well. On a busy host an attempt to make one takes long, and
    /// a task that threads without memory took again and again would come to the end of its time.
    fn next_job(&self, own: &mut OwnCalls) -> Option<StoreJob> {
        let mut queue = lock(&self.jobs);
        // Without a session, it is a task that begins the next one.
        let mut is_gone = false;
        loop {
            let is_for_others = own.is_none() && !is_gone && self.connected.load(Ordering::Relaxed) > 0;
            if !queue.jobs.is_empty() && is_for_others {
                drop(queue);
                // This thread was woken for the task.
                self.offered.notify_one();
                match self.connected(own) {
                    Ok(_) => {}
                    Err(Unconnected::NoMemory) => std::thread::sleep(MEMORY_PAUSE),
                    Err(Unconnected::Busy) => std::thread::sleep(CONNECTION_PAUSE),
                    Err(Unconnected::Gone(_)) => is_gone = true,
                }
                queue = lock(&self.jobs);
                continue;
            }
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.is_over {
                return None;
            }
            if own.as_ref().is_some_and(|own| self.silence.has_ended(own.generation())) {
                drop(queue);
                self.disconnect(own);
                queue = lock(&self.jobs);
            } else {
                queue = self.offered.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Executes a task, also if the exporter goes and comes back meanwhile. Fails when the grace is over (protocol E1.3, E1.6). A session that gives no
    /// answer ends before that, so that nothing of it is executed later. A session that begins when the grace is over has one attempt.
    fn execute(&self, own: &mut OwnCalls, job: &mut StoreJob) -> Result<u32, Unfinished> {
        if job.task == StoreTask::Delay {
            std::thread::sleep(self.delay);
            return Ok(0);
        }
        let mut waiting = None;
        let mut is_last = false;
        loop {
            let began = Instant::now();
            // The broker may learn of the machine's windows later than the machine, for example after its own restart.
            let is_final = self.windows.as_ref().is_none_or(|windows| windows.is_answered(job.unseen_since));
            let unconnected = match self.connected(own) {
                Ok((generation, calls)) => {
                    waiting.get_or_insert_with(|| self.silence.wait());
                    calls.begin(self.silence.span(job.waits_since.unwrap_or(began), job.offered).since);
                    match self.attempt(generation, calls, job) {
                        Ok(result) => {
                            waiting.into_iter().for_each(UnansweredRequest::answered);
                            return Ok(result);
                        }
                        Err(ExportFailure::Unseen) => {
                            tracing::debug!(pieces = ?job.pieces, "what the machine writes is in none of its windows");
                            let since = *job.unseen_since.get_or_insert(began);
                            if is_final || since.elapsed() >= UNSEEN {
                                return Err(Unfinished::Failed(Errno::FAULT));
                            }
                            // What an earlier window has would keep a later one from its place.
                            self.changes.copy_from_others();
                            std::thread::sleep(PAUSE);
                            continue;
                        }
                        Err(ExportFailure::Errno(e)) => {
                            waiting.into_iter().for_each(UnansweredRequest::answered);
                            return Err(Unfinished::Failed(e));
                        }
                        // What is kept in this connection's heap is copied out of it. So an exporter could make the copies grow without end.
                        Err(ExportFailure::NoMemory) if self.changes.flush(calls, generation).is_ok() => {
                            Unconnected::NoMemory
                        }
                        Err(ExportFailure::NoMemory | ExportFailure::Ended) => Unconnected::Gone(generation),
                    }
                }
                Err(unconnected) => unconnected,
            };
            // Others wait for the memory of this connection, too.
            self.disconnect(own);
            let noticed = Instant::now();
            waiting.get_or_insert_with(|| self.silence.wait());
            let first = *job.waits_since.get_or_insert(noticed);
            let waits = || self.silence.span(first, job.offered);
            let (pause, errno) = match unconnected {
                Unconnected::Gone(generation) => {
                    // One attempt is enough of an exporter that begins sessions and answers no request, once the grace is over.
                    if self.renew(generation, waits(), noticed) && !is_last {
                        is_last = waits().is_over();
                        continue;
                    }
                    (Duration::ZERO, Errno::IO)
                }
                Unconnected::NoMemory => (MEMORY_PAUSE, Errno::NOMEM),
                // The connection may be one of a session that has begun when the grace was over.
                Unconnected::Busy if waits().is_over() => {
                    is_last = true;
                    std::thread::sleep(CONNECTION_PAUSE);
                    continue;
                }
                Unconnected::Busy => (CONNECTION_PAUSE, Errno::IO),
            };
            if !pause.is_zero() && !waits().is_over() {
                if self.connected.load(Ordering::Relaxed) > 0 {
                    return Err(Unfinished::ForOthers(pause));
                }
                if errno == Errno::NOMEM {
                    tracing::debug!(exporter = self.options.target, "the window has no memory for a connection");
                }
                std::thread::sleep(pause.min(PAUSE));
            }
            if waits().is_over() {
                return Err(Unfinished::Failed(errno));
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::disk::exported::{DiskExport, DiskExportOptions, ImportOptions, ImportedDisk};
    use crate::disk::store::DiskStore as _;
    use vm_memory::GuestAddress;

    #[test]
    fn thread_without_connection_leaves_tasks_to_others() {
        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
        let _export = DiskExport::bind(options, &store, "data").unwrap();
        let (target, grace) = ("store:data".to_owned(), Duration::from_secs(60));
        let options = ImportOptions { domain: user, target, connections: 1, grace, group: None, machine: None };
        let mut disk = ImportedDisk::connect(options, false, Duration::from_millis(300)).unwrap();
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap());
        let pieces = [BufferPiece { address: GuestAddress(0), length: 4096 }];
        let mut begin = |id, task| assert!(disk.begin(id, task, &memory, &pieces, 0));
        begin(1, StoreTask::Read { offset: 0 });
        let end = |disk: &mut ImportedDisk| loop {
            disk.wait();
            if let Some(ended) = disk.ended() {
                return ended;
            }
        };
        assert_eq!(end(&mut disk), (1, Ok(4096)));
        let core = disk.core();
        // No other thread gets a connection, and the one that has one is busy for a while.
        let alone = lock(&core.connecting);
        let taken = std::thread::scope(|scope| {
            let other = scope.spawn(|| core.next_job(&mut None).map(|job| job.id));
            assert!(disk.begin(2, StoreTask::Delay, &memory, &pieces, 0));
            assert!(disk.begin(3, StoreTask::Read { offset: 0 }, &memory, &pieces, 0));
            let mut ended = Vec::new();
            while ended.len() < 2 {
                assert!(!other.is_finished(), "it took a task");
                match disk.ended() {
                    Some(one) => ended.push(one),
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            lock(&core.jobs).is_over = true;
            core.offered.notify_all();
            assert_eq!(ended, [(2, Ok(0)), (3, Ok(4096))]);
            other.join().unwrap()
        });
        drop(alone);
        assert_eq!(taken, None);
    }

    const READS: usize = 8;

    /// The only connection of a disk has these reads to do when its exporter has gone. Returns the disk, with what must outlive it.
    fn reads_without_exporter(grace: Duration) -> (ImportedDisk, partywall_daemon::Broker) {
        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, domain) = (join("store"), join("user"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
        let export = DiskExport::bind(options, &store, "data").unwrap();
        let target = "store:data".to_owned();
        let options = ImportOptions { domain, target, connections: 1, grace, group: None, machine: None };
        let mut disk = ImportedDisk::connect(options, false, Duration::ZERO).unwrap();
        drop(export);
        let core = disk.core();
        // No thread notices that the exporter has gone before all reads are there.
        let link = lock(&core.link);
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap());
        let pieces = [BufferPiece { address: GuestAddress(0), length: 4096 }];
        (0..READS).for_each(|id| assert!(disk.begin(id, StoreTask::Read { offset: 0 }, &memory, &pieces, 0)));
        drop(link);
        (disk, broker)
    }

    /// Waits until all reads have failed, and asserts that no session was tried for those behind the first one.
    fn fail_together(disk: &mut ImportedDisk) {
        let core = disk.core();
        let mut attempts = Vec::new();
        while disk.busy() > 0 {
            match disk.ended() {
                Some((_, result)) => {
                    assert_eq!(result, Err(Errno::IO));
                    attempts.push(lock(&core.link).tried);
                }
                None => disk.wait(),
            }
        }
        assert!(attempts[0].is_some());
        assert_eq!(attempts, [attempts[0]; READS], "a read that waited for its thread waits for the exporter again");
    }

    #[test]
    fn tasks_without_thread_fail_within_the_same_grace() {
        let (mut disk, _broker) = reads_without_exporter(Duration::from_secs(1));
        fail_together(&mut disk);
    }

    #[test]
    fn hurry_holds_until_all_tasks_have_ended() {
        let (mut disk, _broker) = reads_without_exporter(Duration::from_secs(3600));
        fail_together(&mut disk);
        let core = disk.core();
        assert!(core.silence.hurries());
        disk.all_ended();
        assert!(!core.silence.hurries());
    }
}
