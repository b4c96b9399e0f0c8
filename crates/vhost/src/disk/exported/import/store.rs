//! The disk as the thread of the back end sees it.

use super::connection::{CurrentLink, connect_within};
use super::pieces::front;
use super::worker::{Done, StoreJob};
use super::{ImportCore, ImportOptions, lock};
use crate::VhostError;
use crate::chain::BufferPiece;
use crate::disk::counters::CopiedBytes;
use crate::disk::exported::changes::ChangeLog;
use crate::disk::exported::link::{ExportCalls, MOST_DATA};
use crate::disk::exported::passed::PassedWindows;
use crate::disk::exported::silence::{CallLimit, ExporterSilence, HURRY};
use crate::disk::request::DiskGeometry;
use crate::disk::store::DiskStore;
use crate::disk::store_task::StoreTask;
use crate::disk::task::DiskTask;
use partywall::Domain;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};

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
        let synced = ExportCalls::connect(domain, target, link.welcome.session, &CallLimit::of(grace))
            .and_then(|calls| calls.sync());
        synced.map_err(|e| VhostError::Refused(format!("{target} does not make its disk durable: {e:?}")))
    }

    /// Begins a session with the exporter.
    pub(crate) fn connect(options: ImportOptions, read_only: bool, delay: Duration) -> Result<Self, VhostError> {
        let link = connect_within(&options.domain, &options.target, options.grace)?;
        let first = link.welcome;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(VhostError::system("make an eventfd"))?;
        let connections = options.connections.max(1);
        let silence = Arc::new(ExporterSilence::new(options.grace));
        let windows = options.group.clone().map(|group| PassedWindows::new(group, options.machine.clone()));
        let shared = Arc::new(ImportCore {
            options,
            delay,
            first,
            capacity: AtomicU64::new(first.capacity),
            jobs: Mutex::default(),
            offered: Condvar::new(),
            link: Mutex::new(CurrentLink { generation: 0, boot: first.boot, link: Some(link), tried: None }),
            silence,
            connected: AtomicUsize::new(0),
            held: AtomicU64::new(0),
            most_read: AtomicUsize::new(MOST_DATA),
            connecting: Mutex::default(),
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

#[cfg(test)]
impl ImportedDisk {
    /// What its threads share.
    pub(super) fn core(&self) -> Arc<ImportCore> {
        Arc::clone(&self.shared)
    }

    /// Rings as a thread does whose result the back end looks for between the thread's two steps.
    pub(crate) fn ring_around_look(&mut self) {
        self.shared.is_rung.store(true, Ordering::SeqCst);
        assert!(self.ended().is_none());
        rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes()).unwrap();
    }
}

impl Drop for ImportedDisk {
    fn drop(&mut self) {
        self.shared.silence.hurry(true);
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
        let (target, known) = (&self.shared.options.target, self.geometry.capacity);
        if capacity < known {
            return Err(VhostError::Refused(format!(
                "{target} has {capacity} bytes now, and the machine's disk has {known}; a disk does not become smaller"
            )));
        }
        if !capacity.is_multiple_of(self.block.into()) || i64::try_from(capacity).is_err() {
            let block = self.block;
            return Err(VhostError::Refused(format!(
                "the exporter of {target} says that it has {capacity} bytes; no disk with blocks of {block} bytes has that size"
            )));
        }
        // An exporter that comes back with the earlier size is not used from here on.
        self.shared.capacity.store(capacity, Ordering::Relaxed);
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
            offered: Instant::now(),
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
                // All further tasks hurry as well, until [`Self::all_ended`].
                self.shared.silence.hurry(true);
                self.done.recv().ok()
            }
            next => next.ok(),
        };
    }

    fn all_ended(&mut self) {
        self.shared.silence.hurry(false);
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

    /// A thread sets `is_rung` before it writes to `wake`. If [`Self::ended`] clears `is_rung` in between, the input comes afterwards, and no later
    /// look at `is_rung` takes it. A result that was sent before the input is found by the look that follows.
    fn heard(&mut self) {
        let _ = rustix::io::read(&self.shared.wake, &mut [0_u8; 8]);
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

    fn memory_changes(&mut self) {
        if let Some(windows) = &self.shared.windows {
            windows.forget();
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::disk::exported::{DiskExport, DiskExportOptions};

    /// A process takes part in a group once, so this is the only unit test with a group.
    #[test]
    fn windows_are_forgotten_when_memory_or_front_end_changes() {
        let folder = tempfile::tempdir().unwrap();
        let [policy, socket, path] = ["policy.toml", "broker.sock", "disk.raw"].map(|name| folder.path().join(name));
        std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['user']\nroom = '4M'\n").unwrap();
        let config = partywall_daemon::Config::new(socket).policy_file(policy);
        let broker = partywall_daemon::Broker::start(&config).unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
        let _export = DiskExport::bind(options, &store, "data").unwrap();
        let group = Some(partywall::Group::join(&user, "pool").unwrap());
        let (target, grace) = ("store:data".to_owned(), Duration::from_secs(60));
        let options =
            ImportOptions { domain: user, target, connections: 1, grace, group, machine: Some("a".to_owned()) };
        let mut disk = ImportedDisk::connect(options, false, Duration::ZERO).unwrap();
        let core = disk.core();
        let forgotten = || core.windows.as_ref().unwrap().forgotten();
        disk.memory_changes();
        assert_eq!(forgotten(), 1);
        disk.front_end_changes();
        assert_eq!(forgotten(), 2);
    }

    #[test]
    fn smaller_exported_disk_keeps_its_size_and_goes_on() {
        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(2 << 20).unwrap();
        let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
        let _export = DiskExport::bind(options, &store, "data").unwrap();
        let (target, grace) = ("store:data".to_owned(), Duration::from_secs(60));
        let options = ImportOptions { domain: user, target, connections: 1, grace, group: None, machine: None };
        let mut disk = ImportedDisk::connect(options, false, Duration::ZERO).unwrap();
        file.set_len(1 << 20).unwrap();
        let error = disk.refresh().unwrap_err().to_string();
        assert!(error.contains("1048576 bytes now") && error.contains("has 2097152;"), "{error}");
        assert_eq!(disk.geometry(true).capacity, 2 << 20);
        // The exporter has measured its file, and takes the machine's disk for the same in the next session.
        let core = disk.core();
        let renew = |_| core.renew(0, core.silence.span(Instant::now(), Instant::now()), Instant::now());
        assert!((0..100).any(renew), "the exporter gives no other session with this disk");
        file.set_len(3 << 20).unwrap();
        assert!(disk.refresh().unwrap());
        assert_eq!(disk.geometry(true).capacity, 3 << 20);
    }
}
