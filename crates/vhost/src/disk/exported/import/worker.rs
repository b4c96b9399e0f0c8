//! A thread that executes tasks, and the tasks that wait for one.

use super::connection::{OwnCalls, Unconnected};
use super::{ImportCore, PAUSE, lock};
use crate::chain::BufferPiece;
use crate::disk::exported::link::ExportFailure;
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
    /// Since when it waits for an exporter, or for memory.
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
    fn next_job(&self, own: &mut OwnCalls) -> Option<StoreJob> {
        let mut queue = lock(&self.jobs);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.is_over {
                return None;
            }
            if own.as_ref().is_some_and(|own| own.is_before(self.first_open.load(Ordering::Relaxed))) {
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
                        if is_final || since.elapsed() >= UNSEEN {
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
            let (pause, errno) = match unconnected {
                Unconnected::Gone(generation) => {
                    self.renew(generation, since);
                    (Duration::ZERO, Errno::IO)
                }
                Unconnected::NoMemory => (MEMORY_PAUSE, Errno::NOMEM),
                Unconnected::Busy => (CONNECTION_PAUSE, Errno::IO),
            };
            if !pause.is_zero() && !self.is_over(since) {
                if self.connected.load(Ordering::Relaxed) > 0 {
                    return Err(Unfinished::ForOthers(pause));
                }
                if errno == Errno::NOMEM {
                    tracing::debug!(exporter = self.options.target, "the window has no memory for a connection");
                }
                std::thread::sleep(pause.min(PAUSE));
            }
            if self.is_over(since) {
                return Err(Unfinished::Failed(errno));
            }
        }
    }
}
