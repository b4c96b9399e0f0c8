//! A disk that another domain exports, as the store of a back end. Threads execute its tasks by calls.
//!
//! [`store`] is what the thread of the back end sees, and [`worker`] a thread that takes tasks from it. A worker gets its connection from
//! [`connection`] and executes a task by [`request`], or by [`group_write`] if the data lies in a group.

mod connection;
mod group_write;
mod pieces;
mod request;
mod store;
mod worker;

use super::changes::ChangeLog;
use super::passed::PassedWindows;
use super::silence::ExporterSilence;
use super::wire::Welcome;
use connection::CurrentLink;
use partywall::{Domain, Group};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use worker::StoreJobs;

pub use store::ImportedDisk;

/// Between the beginnings of two attempts to reach an exporter that has gone, at least.
const PAUSE: Duration = Duration::from_millis(50);

/// Where a disk is imported from.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The domain that connects.
    pub domain: Domain,
    /// The exporter, as `DOMAIN:NAME`.
    pub target: String,
    /// Requests that the exporter executes at a time. Each has a thread and a connection. If this disk's share of the window to the exporter has
    /// memory for fewer connections, there are fewer. There is one in any case, for which requests are divided if need be.
    pub connections: usize,
    /// How long requests wait for an exporter that has gone or does not answer, before they fail.
    pub grace: Duration,
    /// A group that the exporter takes part in as well: what is written lies in buffers of it, and the exporter reads it there.
    pub group: Option<Group>,
    /// The machine that uses the disk, if it is a member of the group: what it writes from a back end's buffer of the group is named to the
    /// exporter, and not copied.
    pub machine: Option<String>,
}

/// What the threads share.
struct ImportCore {
    options: ImportOptions,
    delay: Duration,
    /// The disk as it was at first. An exporter that comes back must have the same, with at least the `capacity`.
    first: Welcome,
    /// The size that the machine knows.
    capacity: AtomicU64,
    jobs: Mutex<StoreJobs>,
    /// There is another job, or a session has ended.
    offered: Condvar,
    link: Mutex<CurrentLink>,
    silence: Arc<ExporterSilence>,
    /// Threads that have a connection.
    connected: AtomicUsize,
    /// Bytes of the heaps of these connections.
    held: AtomicU64,
    /// The data of a read for which the exporter's heap has had room. It is one for all connections: a thread whose connection ends for lack of
    /// room would else ask for too much again with its next one.
    most_read: AtomicUsize,
    /// Held by the thread that makes a connection: its share of a window depends on what the others hold.
    connecting: Mutex<()>,
    /// Becomes readable after `is_rung` is set.
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

impl std::fmt::Debug for ImportCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImportCore").field("target", &self.options.target).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
