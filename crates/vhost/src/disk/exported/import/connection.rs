//! The session with the exporter, and the connections of the threads in it. Another session is begun when one ends.

use super::{ImportCore, ImportOptions, PAUSE, lock};
use crate::VhostError;
use crate::disk::exported::link::{ExportCalls, ExportFailure, ExportLink, HeapNeed, MOST_DATA};
use crate::disk::exported::silence::{CallLimit, WaitSpan};
use crate::disk::exported::wire::{ExportOperation, Welcome};
use partywall::Domain;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long an exporter may take to begin a session.
const GREETING: Duration = Duration::from_secs(10);
/// How old a connection with little memory is when a larger one is tried. There may be more memory by then.
const SMALL_AGE: Duration = Duration::from_secs(5);

/// The session, and how many there were before.
pub(super) struct CurrentLink {
    pub(super) generation: u64,
    pub(super) link: Option<ExportLink>,
    pub(super) boot: [u8; 16],
    /// When the last attempt to begin a session began. If a session has ended because the grace was over, it is the time of its end.
    pub(super) tried: Option<Instant>,
}

/// A thread's connection.
#[derive(Debug)]
pub(super) struct OwnConnection {
    /// The number of its session.
    generation: u64,
    calls: ExportCalls,
    since: Instant,
}

impl OwnConnection {
    /// The number of its session.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether requests have been divided for a while since a window has little memory.
    fn is_outgrown(&self, most_read: usize) -> bool {
        (self.calls.most_written() < MOST_DATA || most_read < MOST_DATA) && self.since.elapsed() >= SMALL_AGE
    }
}

/// A connection that no thread has adopted yet. No other thread makes one until it is adopted or dropped: its memory is not counted before that.
struct MadeConnection<'c> {
    calls: ExportCalls,
    _alone: MutexGuard<'c, ()>,
}

/// A thread's connection, if it has one.
pub(super) type OwnCalls = Option<OwnConnection>;

/// Why a thread has no connection.
pub(super) enum Unconnected {
    /// The session with this number gives none.
    Gone(u64),
    /// The window has no memory for it, or the exporter gives this disk no further one.
    NoMemory,
    /// Another thread of this disk makes a connection, and this one's share depends on that.
    Busy,
}

/// The first session. The exporter may still be ending that of an earlier back end.
pub(super) fn connect_within(domain: &Domain, target: &str, grace: Duration) -> Result<ExportLink, VhostError> {
    let until = Instant::now() + grace;
    let mut waits = false;
    loop {
        match ExportLink::connect(domain, target, GREETING) {
            Err(e) if Instant::now() >= until => return Err(e),
            Err(error) => {
                if !std::mem::replace(&mut waits, true) {
                    tracing::info!(%error, "waiting for {target} (up to {} s)", grace.as_secs());
                }
                std::thread::sleep(PAUSE);
            }
            link => return link,
        }
    }
}

impl ImportCore {
    /// This thread's connection of the present session.
    pub(super) fn connected<'c>(&self, own: &'c mut OwnCalls) -> Result<(u64, &'c ExportCalls), Unconnected> {
        let current = lock(&self.link);
        let generation = current.generation;
        let gone = Unconnected::Gone(generation);
        let Some(session) = current.link.as_ref().map(|link| link.welcome.session) else { return Err(gone) };
        drop(current);
        if own.as_ref().is_some_and(|own| own.generation != generation) {
            self.disconnect(own);
        }
        let most_read = self.most_read.load(Ordering::Relaxed);
        if own.as_ref().is_none_or(|own| own.is_outgrown(most_read)) {
            let made = self.connect((generation, session), own.as_ref());
            if own.is_some() {
                // The exporter may have more room for its answers by now.
                self.most_read.store(MOST_DATA, Ordering::Relaxed);
            }
            match own.as_mut() {
                // What it has is used until there is more.
                Some(small) => match made {
                    Ok(made) if made.calls.memory() > small.calls.memory() => {
                        self.disconnect(own);
                        self.adopt(made, generation, own);
                    }
                    _ => small.since = Instant::now(),
                },
                None => {
                    let made = made.map_err(|failure| failure.unwrap_or(Unconnected::Gone(generation)))?;
                    self.adopt(made, generation, own);
                }
            }
        }
        own.as_ref().map(|own| (generation, &own.calls)).ok_or(gone)
    }

    /// A connection beside those of other threads, and beside the thread's own, if it has one. `Err(None)`: the session gives none.
    fn connect(
        &self,
        (generation, session): (u64, u64),
        own: Option<&OwnConnection>,
    ) -> Result<MadeConnection<'_>, Option<Unconnected>> {
        let alone = match self.connecting.try_lock() {
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(alone)) => PoisonError::into_inner(alone),
            Err(TryLockError::WouldBlock) => return Err(Some(Unconnected::Busy)),
        };
        let others = self.connected.load(Ordering::Relaxed) - usize::from(own.is_some());
        let held = self.held.load(Ordering::Relaxed) - own.map_or(0, |own| own.calls.memory());
        let need = if others == 0 { HeapNeed::Any } else { HeapNeed::Further { held } };
        let ImportOptions { domain, target, .. } = &self.options;
        let limit = CallLimit::in_session(&self.silence, generation, Instant::now());
        ExportCalls::connect_with_memory(domain, target, session, &limit, need)
            .map(|calls| MadeConnection { calls, _alone: alone })
            // An exporter has a limit of connections. The others of this disk show whether the session goes on.
            .map_err(|e| (e == ExportFailure::NoMemory || others > 0).then_some(Unconnected::NoMemory))
    }

    /// From here on it is the connection of the thread.
    fn adopt(&self, MadeConnection { calls, _alone }: MadeConnection<'_>, generation: u64, own: &mut OwnCalls) {
        self.held.fetch_add(calls.memory(), Ordering::Relaxed);
        self.connected.fetch_add(1, Ordering::Relaxed);
        *own = Some(OwnConnection { generation, calls, since: Instant::now() });
    }

    /// Makes another session in place of the one with this number, unless another thread has done so. Returns whether there is one.
    ///
    /// The caller waits for an answer for this time, and has found at `noticed` that there is no session, or that it gives none.
    pub(super) fn renew(&self, generation: u64, waits: WaitSpan, noticed: Instant) -> bool {
        let mut current = lock(&self.link);
        if current.generation != generation {
            return current.link.is_some();
        }
        let target = &self.options.target;
        let is_over = waits.is_over();
        if current.link.take().is_some() {
            warn!("{target}: the exporter has gone, or does not answer");
            self.silence.end_session(generation, noticed);
            if is_over {
                // The session had the last attempt of all requests that wait.
                current.tried = Some(Instant::now());
            }
            // Under the lock that is held from the look at the number to the sleep.
            let _jobs = lock(&self.jobs);
            self.offered.notify_all();
        }
        // An attempt that another thread has begun after this one noticed counts for both. Once the grace is over, each attempt since the task began
        // to wait counts: tasks that wait for a thread fail one after the other without further attempts.
        let earliest = if is_over { waits.since } else { noticed };
        if current.tried.is_some_and(|began| began >= earliest) {
            return false;
        }
        // An exporter that ends each session at once would else keep this process and the broker busy.
        let pause = current.tried.map_or(Duration::ZERO, |began| PAUSE.saturating_sub(began.elapsed()));
        std::thread::sleep(pause);
        current.tried = Some(Instant::now());
        // The exporter has ended all requests of the sessions before (protocol E1.2).
        let Some(link) = self.link_again(current.boot, generation + 1, waits.since) else { return false };
        info!("{target}: the exporter is back, after {} ms", waits.since.elapsed().as_millis());
        current.generation += 1;
        self.most_read.store(MOST_DATA, Ordering::Relaxed);
        current.boot = link.welcome.boot;
        current.link = Some(link);
        true
    }

    /// Another session. What the exporter may have lost since the last one is done again before any other request (protocol E3).
    fn link_again(&self, boot: [u8; 16], number: u64, since: Instant) -> Option<ExportLink> {
        let ImportOptions { domain, target, .. } = &self.options;
        let link = ExportLink::connect(domain, target, GREETING).ok()?;
        if !self.is_same(&link.welcome) {
            warn!("{target}: the exporter is back with another disk, which is not used");
            return None;
        }
        if !self.changes.is_empty() {
            let session = link.welcome.session;
            let limit = CallLimit::in_session(&self.silence, number, since);
            let calls = ExportCalls::connect_with_memory(domain, target, session, &limit, HeapNeed::Any).ok()?;
            let may_have_lost = link.welcome.boot != boot || self.changes.is_doubtful();
            if may_have_lost {
                let repeated = self.changes.repeat(&calls).ok()?;
                info!("{target}: it may have lost what was not flushed; {repeated} changes are repeated");
            }
            match self.changes.flush(&calls, number) {
                // The machine's own flushes fail as well. Other requests go on, since what is kept has a limit.
                Err(ExportFailure::Errno(e)) => {
                    warn!("{target}: the exporter does not make its disk durable: {e}");
                    std::thread::sleep(PAUSE);
                }
                flushed => {
                    flushed.ok()?;
                    if may_have_lost {
                        self.changes.is_settled();
                    }
                }
            }
        }
        Some(link)
    }

    /// Whether this may be the disk of the first session: it is as large as the machine knows, and takes the same requests.
    fn is_same(&self, welcome: &Welcome) -> bool {
        let Welcome { block, read_only, .. } = self.first;
        welcome.capacity >= self.capacity.load(Ordering::Relaxed)
            && welcome.block == block
            && welcome.read_only == read_only
    }

    /// The disk's size now. `None` if the exporter does not tell.
    pub(super) fn measure(&self) -> Option<u64> {
        let since = Instant::now();
        loop {
            let current = lock(&self.link);
            let (generation, session) = (current.generation, current.link.as_ref().map(|link| link.welcome.session));
            drop(current);
            let ImportOptions { domain, target, .. } = &self.options;
            let measured = session.ok_or(ExportFailure::Ended).and_then(|session| {
                let limit = CallLimit::in_session(&self.silence, generation, since);
                let calls = ExportCalls::connect(domain, target, session, &limit)?;
                calls.request(ExportOperation::Measure, (0, 0), false, 0)
            });
            match measured {
                Ok(reply) => return reply.array(0).map(u64::from_le_bytes).ok(),
                Err(ExportFailure::Ended) => {
                    self.renew(generation, self.silence.span(since, since), Instant::now());
                }
                Err(ExportFailure::Errno(_) | ExportFailure::NoMemory | ExportFailure::Unseen) => return None,
            }
            if self.silence.span(since, since).is_over() {
                return None;
            }
        }
    }

    /// Drops this thread's connection.
    pub(super) fn disconnect(&self, own: &mut OwnCalls) {
        if let Some(OwnConnection { calls, .. }) = own.take() {
            self.changes.copy_blocks_of(&calls);
            self.held.fetch_sub(calls.memory(), Ordering::Relaxed);
            self.connected.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::disk::exported::changes::DiskChange;
    use crate::disk::exported::{DiskExport, DiskExportOptions, ImportedDisk};

    #[test]
    fn second_connection_waits_until_the_first_is_counted() {
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
        let disk = ImportedDisk::connect(options, false, Duration::ZERO).unwrap();
        let core = disk.core();
        let session = lock(&core.link).link.as_ref().unwrap().welcome.session;
        let Ok(first) = core.connect((0, session), None) else { panic!("no connection is made") };
        let memory = first.calls.memory();
        assert!(matches!(core.connect((0, session), None), Err(Some(Unconnected::Busy))), "it counts no other one");
        let mut own = None;
        core.adopt(first, 0, &mut own);
        assert_eq!((core.connected.load(Ordering::Relaxed), core.held.load(Ordering::Relaxed)), (1, memory));
        assert!(core.connect((0, session), None).is_ok());
        core.disconnect(&mut own);
    }

    #[test]
    fn answers_to_other_calls_end_the_silence() {
        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
        let _export = DiskExport::bind(options, &store, "data").unwrap();
        let (target, grace) = ("store:data".to_owned(), Duration::from_secs(3600));
        let options = ImportOptions { domain: user, target, connections: 1, grace, group: None, machine: None };
        let disk = ImportedDisk::connect(options, false, Duration::ZERO).unwrap();
        let core = disk.core();
        let (offered, own) = (Instant::now(), Instant::now() + grace);
        let _request = core.silence.wait();
        let silent_since = || core.silence.span(own, offered).since;
        let began = silent_since();
        assert_eq!(core.measure(), Some(1 << 20));
        let measured = silent_since();
        assert!(measured > began, "the exporter has told the size");
        // The next session begins with a flush.
        let change = core.changes.begin(DiskChange::Zero { offset: 0, length: 512 });
        core.changes.end(change, true);
        while !core.renew(0, core.silence.span(own, offered), Instant::now()) {}
        assert!(silent_since() > measured, "the exporter has flushed its disk");
    }
}
