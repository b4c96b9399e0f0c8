//! Changes that the exporter has done and that may not be durable. They are repeated if the exporter's machine starts again (protocol E3).

use super::link::{ExportCalls, ExportFailure, KeptData};
use super::passed::GroupData;
use super::wire::{ExportOperation, LARGEST_ZEROES};
use crate::disk::store_task::HOLE;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Changes that are kept at most. At about so many the next one waits for a flush, since a machine that writes need not flush.
const MOST_CHANGES: usize = 4096;
/// The most bytes that are kept in memory of this process, or named in buffers of others and copied to it when a request fails.
const MOST_BYTES: usize = 64 << 20;

/// One change of the disk.
#[derive(Debug, Clone)]
pub(super) enum DiskChange {
    /// The block has `length` bytes of data, and then the fields of the request.
    Write {
        offset: u64,
        length: usize,
        data: KeptData,
    },
    Zero {
        offset: u64,
        length: u64,
    },
    /// Fills with zeroes, by a hole or in another way.
    Allocate {
        offset: u64,
        length: u64,
        mode: i32,
    },
    /// Gives sectors up, whose content is of no interest then.
    Discard {
        offset: u64,
        length: u64,
    },
}

impl DiskChange {
    /// Bytes that count for [`MOST_BYTES`]. Own buffers and heaps have other limits.
    fn bytes(&self) -> usize {
        match self {
            Self::Write { length, data: KeptData::Copied(_), .. } => *length,
            Self::Write { length, data: KeptData::InGroup(data), .. } if matches!(**data, GroupData::Others(_)) => {
                *length
            }
            _ => 0,
        }
    }

    /// Executes it by a connection.
    fn repeat(&self, calls: &ExportCalls) -> Result<(), ExportFailure> {
        match self {
            Self::Write { offset, length, data } => {
                if let KeptData::InGroup(data) = data {
                    match calls.write_from(data, *offset, false) {
                        Err(ExportFailure::Errno(_)) => {}
                        done => return done,
                    }
                }
                if *length <= calls.most_written() {
                    let copy = calls.block((*offset, *length), false, |room| data.copy_to(room))?;
                    return calls.write(&copy);
                }
                // It comes from a connection that had more memory.
                let mut bytes = vec![0; *length];
                if !data.copy_to(&mut bytes) {
                    return Err(ExportFailure::Unseen);
                }
                let mut offset = *offset;
                for part in bytes.chunks(calls.most_written()) {
                    let copy = calls.block((offset, part.len()), false, |room| {
                        room.copy_from_slice(part);
                        true
                    })?;
                    calls.write(&copy)?;
                    offset += part.len() as u64;
                }
                Ok(())
            }
            Self::Zero { offset, length } => zero(calls, *offset, *length),
            Self::Allocate { offset, length, mode } => {
                let allocate = calls.request(ExportOperation::Allocate, (*offset, *length), false, *mode);
                match allocate {
                    // This exporter has another kernel or file system.
                    Err(ExportFailure::Errno(Errno::OPNOTSUPP)) => zero(calls, *offset, *length),
                    done => done.map(drop),
                }
            }
            Self::Discard { offset, length } => {
                calls.request(ExportOperation::Allocate, (*offset, *length), false, HOLE).map(drop)
            }
        }
    }
}

/// Fills a range with zeroes, in parts that are each answered in time.
fn zero(calls: &ExportCalls, offset: u64, length: u64) -> Result<(), ExportFailure> {
    let mut done = 0;
    while done < length {
        let part = (length - done).min(LARGEST_ZEROES);
        calls.request(ExportOperation::Zero, (offset + done, part), false, 0)?;
        done += part;
    }
    Ok(())
}

/// A change that is kept, and what the exporters have said of it.
#[derive(Debug, Clone)]
struct KeptChange {
    change: DiskChange,
    state: ChangeState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeState {
    /// The exporter has not answered, or the answer was not noted yet.
    Unanswered,
    /// The same, and a later exporter could not repeat the change. If the answer is that it was done, it is lost.
    Unrepeated(Errno),
    /// The exporter has executed it.
    Answered,
}

/// All such changes, in the order in which they were begun.
#[derive(Debug, Default)]
pub(super) struct ChangeLog(Mutex<Changes>);

#[derive(Debug, Default)]
struct Changes {
    next: u64,
    all: BTreeMap<u64, KeptChange>,
    /// The sum of [`DiskChange::bytes`].
    bytes: usize,
    /// Own buffers of writes that failed, with the number of the session that has not answered them, if none has. A back end behind the exporter
    /// may have written a part of them, and repeat it (protocol E4.2).
    held: BTreeMap<u64, (Arc<GroupData>, Option<u64>)>,
    /// A change that was answered is lost.
    has_lost: bool,
    /// Requests under way that make changes durable.
    settling: usize,
    /// One of them has failed, or had no answer, since all changes were repeated and flushed. Its exporter's kernel may have given data up, and
    /// counts it as written: a later exporter of the same boot would not know.
    is_doubtful: bool,
}

impl Changes {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn remove(&mut self, number: u64) {
        if let Some(kept) = self.all.remove(&number) {
            self.bytes = self.bytes.saturating_sub(kept.change.bytes());
        }
    }

    /// A change that was answered is not in the exporter's disk.
    fn lose(&mut self, number: u64, error: Errno) {
        tracing::warn!(%error, "a change that the exporter has lost cannot be repeated; all further flushes fail");
        self.remove(number);
        self.has_lost = true;
    }

    /// Notes the outcome of a repeat. The answer to the change itself may have been noted meanwhile, or a flush that the session before has answered.
    /// After such a flush the change is lost as well: earlier changes of the same sectors may have been repeated over it.
    fn repeated(&mut self, number: u64, before: &KeptChange, outcome: Result<(), Errno>) {
        let is_discard = matches!(before.change, DiskChange::Discard { .. });
        let kept = self.all.get_mut(&number);
        let now = kept.as_ref().map_or(before.state, |kept| kept.state);
        match (outcome, now, kept) {
            (Err(_), ChangeState::Answered, _) if is_discard => self.remove(number),
            (Err(error), ChangeState::Answered, _) => self.lose(number, error),
            (Err(error), _, Some(kept)) if !is_discard => kept.state = ChangeState::Unrepeated(error),
            (Ok(()), ChangeState::Unrepeated(_), Some(kept)) => kept.state = ChangeState::Unanswered,
            _ => {}
        }
    }

    fn copy(&mut self, copy: impl Fn(&mut KeptData)) {
        for kept in self.all.values_mut() {
            if let DiskChange::Write { data, .. } = &mut kept.change {
                copy(data);
            }
        }
        self.bytes = self.all.values().map(|kept| kept.change.bytes()).sum();
    }
}

impl ChangeLog {
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change begins. From now on a restart of the exporter's machine repeats it.
    pub(super) fn begin(&self, change: DiskChange) -> u64 {
        let mut changes = self.changes();
        let number = changes.number();
        changes.bytes += change.bytes();
        changes.all.insert(number, KeptChange { change, state: ChangeState::Unanswered });
        number
    }

    /// A change is done, or was not. If it is done and a later exporter could not repeat it, it is lost (protocol E3.1).
    pub(super) fn end(&self, number: u64, is_done: bool) {
        let mut changes = self.changes();
        match changes.all.get_mut(&number) {
            Some(KeptChange { state: ChangeState::Unrepeated(error), .. }) if is_done => {
                let error = *error;
                changes.lose(number, error);
            }
            Some(kept) if is_done => kept.state = ChangeState::Answered,
            _ => changes.remove(number),
        }
    }

    /// Copies the data that lies in a connection's heap, so that the heap gives its place in the window back when the connection ends.
    pub(super) fn copy_blocks_of(&self, calls: &ExportCalls) {
        self.changes().copy(|data| calls.copy_out(data));
    }

    /// Copies the data that lies in buffers of others. Their owners keep it until a flush, which comes this way no more if the machine gives the
    /// disk up, for example as a part of a RAID.
    pub(super) fn copy_from_others(&self) {
        self.changes().copy(KeptData::copy_from_others);
    }

    /// Keeps data of a write that failed until a flush that begins later. If the session with this number has not answered the write, its exporter
    /// may read the data until there is another session (protocol E4.3).
    pub(super) fn hold(&self, data: Arc<GroupData>, unanswered: Option<u64>) {
        let mut changes = self.changes();
        let number = changes.number();
        changes.held.insert(number, (data, unanswered));
    }

    /// Whether nothing waits for a flush.
    pub(super) fn is_empty(&self) -> bool {
        let changes = self.changes();
        changes.all.is_empty() && changes.held.is_empty()
    }

    /// Whether a flush is due before another change.
    pub(super) fn is_full(&self) -> bool {
        let changes = self.changes();
        changes.all.len() + changes.held.len() >= MOST_CHANGES || changes.bytes >= MOST_BYTES
    }

    /// Makes the changes durable that have been answered, in the session with this number.
    pub(super) fn flush(&self, calls: &ExportCalls, session: u64) -> Result<(), ExportFailure> {
        let settled = self.settled(session);
        self.settle(|| calls.sync())?;
        self.flushed(&settled);
        Ok(())
    }

    /// Executes a request that makes changes durable. That it began is noted first: another thread may see the session's end before its failure.
    pub(super) fn settle(&self, request: impl FnOnce() -> Result<(), ExportFailure>) -> Result<(), ExportFailure> {
        self.changes().settling += 1;
        let settled = request();
        let mut changes = self.changes();
        changes.settling -= 1;
        changes.is_doubtful |= settled.is_err();
        settled
    }

    /// Whether an exporter may have lost changes without a restart of its machine, so that the next session repeats them (protocol E3.2).
    pub(super) fn is_doubtful(&self) -> bool {
        let changes = self.changes();
        changes.is_doubtful || changes.settling > 0
    }

    /// All changes were repeated, and the flush after that has succeeded.
    pub(super) fn is_settled(&self) {
        self.changes().is_doubtful = false;
    }

    /// What a flush that begins now ends: changes that have been answered, and data that no exporter reads any more.
    fn settled(&self, session: u64) -> Vec<u64> {
        let changes = self.changes();
        let answered =
            changes.all.iter().filter(|(_, kept)| kept.state == ChangeState::Answered).map(|(number, _)| *number);
        let held =
            changes.held.iter().filter(|(_, (_, of))| of.is_none_or(|of| of < session)).map(|(number, _)| *number);
        answered.chain(held).collect()
    }

    /// These changes are durable.
    fn flushed(&self, numbers: &[u64]) {
        let mut changes = self.changes();
        for number in numbers {
            changes.remove(*number);
            changes.held.remove(number);
        }
    }

    /// Whether a change is lost, so that no later flush may succeed (protocol E3.1).
    pub(super) fn has_lost(&self) -> bool {
        self.changes().has_lost
    }

    /// Repeats all changes by a connection to an exporter that may have lost them. A change that fails is lost, and all others are repeated. Nothing is
    /// lost with a discard.
    ///
    /// A change without an answer is repeated as well. The thread that waits for the answer then repeats it again, which changes nothing: a driver
    /// does not write a sector twice at a time, or does not care for the order. The thread also reports its failure. If that thread already has the
    /// answer and has not noted it, it does not repeat the change, so a failure here is kept for [`Self::end`].
    pub(super) fn repeat(&self, calls: &ExportCalls) -> Result<usize, ExportFailure> {
        let all: Vec<(u64, KeptChange)> =
            self.changes().all.iter().map(|(number, kept)| (*number, kept.clone())).collect();
        for (number, kept) in &all {
            let outcome = match kept.change.repeat(calls) {
                Ok(()) => Ok(()),
                Err(ExportFailure::Errno(error)) => Err(error),
                Err(failure) => return Err(failure),
            };
            self.changes().repeated(*number, kept, outcome);
        }
        Ok(all.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn others() -> Arc<GroupData> {
        Arc::new(GroupData::Others(Vec::new()))
    }

    #[test]
    fn data_without_an_answer_is_held_until_a_later_session() {
        let log = ChangeLog::default();
        log.hold(others(), None);
        log.hold(others(), Some(3));
        assert_eq!(log.settled(3), [1], "the exporter of this session may still read the other");
        log.flushed(&[1]);
        assert!(!log.is_empty());
        let settled = log.settled(4);
        assert_eq!(settled, [2]);
        log.hold(others(), None);
        log.flushed(&settled);
        assert!(!log.is_empty(), "this write failed after the flush began");
        log.flushed(&log.settled(4));
        assert!(log.is_empty());
    }

    #[test]
    fn durable_request_under_way_or_failed_leaves_doubt() {
        let log = ChangeLog::default();
        let settle = |result| {
            log.settle(|| {
                assert!(log.is_doubtful(), "its session may end now");
                result
            })
        };
        assert_eq!((settle(Ok(())), log.is_doubtful()), (Ok(()), false));
        let failed = Err(ExportFailure::Ended);
        assert_eq!((settle(failed), log.is_doubtful()), (failed, true));
        assert_eq!((settle(Ok(())), log.is_doubtful()), (Ok(()), true), "it proves nothing of what was lost");
        log.is_settled();
        assert!(!log.is_doubtful());
    }

    #[test]
    fn log_of_many_changes_or_bytes_is_full() {
        let log = ChangeLog::default();
        for _ in 0..MOST_CHANGES {
            assert!(!log.is_full());
            let number = log.begin(DiskChange::Zero { offset: 0, length: 512 });
            log.end(number, true);
        }
        assert!(log.is_full());
        log.flushed(&log.settled(0));
        assert!(!log.is_full());
        let write = |data| DiskChange::Write { offset: 0, length: MOST_BYTES / 2, data };
        let number = log.begin(write(KeptData::InGroup(others())));
        log.begin(write(KeptData::Copied(Arc::from([]))));
        assert!(log.is_full());
        log.end(number, false);
        assert!(!log.is_full());
    }

    #[test]
    #[cfg(not(miri))]
    fn change_is_repeated_in_parts_by_a_small_connection() {
        use partywall::rpc::{CallServer, Method};

        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        let disk = Arc::new(Mutex::new(vec![0; 600 << 10]));
        let written = Arc::clone(&disk);
        let write = Method::numbered(ExportOperation::Write as u32);
        let server = CallServer::builder().numbered(write, move |call| {
            let args = call.args().to_vec();
            let (data, fields) = args.split_at(args.len() - super::super::wire::FIELDS);
            let at = u64::from_le_bytes(*fields[8..].first_chunk().unwrap()) as usize;
            written.lock().unwrap()[at..at + data.len()].copy_from_slice(data);
            Ok(().into())
        });
        let _server = server.bind(&store, "data.calls").unwrap();
        let calls = ExportCalls::with_little_memory(&user, "store:data", 128 << 10).unwrap();
        assert_eq!(calls.most_written(), 64 << 10);
        let bytes: Arc<[u8]> = (0..500_u32 << 10).map(|n| (n / 512 + n) as u8).collect();
        let log = ChangeLog::default();
        let data = KeptData::Copied(Arc::clone(&bytes));
        log.begin(DiskChange::Write { offset: 4096, length: bytes.len(), data });
        assert_eq!(log.repeat(&calls), Ok(1));
        let disk = disk.lock().unwrap();
        assert!(disk[4096..][..bytes.len()] == *bytes && disk[..4096] == [0; 4096]);
    }

    #[test]
    #[cfg(not(miri))]
    fn repeated_hole_that_cannot_be_made_is_zeroes_or_nothing() {
        use partywall::rpc::{CallAnswer, CallError, CallServer, Method};

        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        let (sender, zeroed) = std::sync::mpsc::channel();
        let refuse = |_: &partywall::rpc::IncomingCall<'_>| -> Result<CallAnswer, CallError> {
            Err(CallError::application(Errno::OPNOTSUPP.raw_os_error().unsigned_abs(), ""))
        };
        let server = CallServer::builder()
            .numbered(Method::numbered(ExportOperation::Allocate as u32), refuse)
            .numbered(Method::numbered(ExportOperation::Zero as u32), move |call| {
                let fields: [u8; super::super::wire::FIELDS] = call.args().array(0)?;
                let number = |at: usize| u64::from_le_bytes(*fields[at..].first_chunk().unwrap());
                sender.send((number(8), number(16))).unwrap();
                Ok(().into())
            });
        let _server = server.bind(&store, "data.calls").unwrap();
        let calls = ExportCalls::with_little_memory(&user, "store:data", 128 << 10).unwrap();
        let log = ChangeLog::default();
        let (offset, length) = (4096, LARGEST_ZEROES + 512);
        for change in [DiskChange::Discard { offset, length }, DiskChange::Allocate { offset, length, mode: HOLE }] {
            log.end(log.begin(change), true);
        }
        assert_eq!((log.repeat(&calls), log.has_lost()), (Ok(2), false));
        let zeroed: Vec<(u64, u64)> = zeroed.try_iter().collect();
        assert_eq!(zeroed, [(4096, LARGEST_ZEROES), (4096 + LARGEST_ZEROES, 512)]);
        assert_eq!(log.repeat(&calls), Ok(1), "the discard is kept");
    }

    #[test]
    #[cfg(not(miri))]
    fn answer_noted_after_its_failed_repeat_is_a_loss() {
        use partywall::rpc::{CallAnswer, CallError, CallServer, Method};

        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        let refusals = Arc::new(std::sync::atomic::AtomicU32::new(u32::MAX));
        let left = Arc::clone(&refusals);
        let zero = move |_: &partywall::rpc::IncomingCall<'_>| -> Result<CallAnswer, CallError> {
            let refuses = |left: u32| left.checked_sub(1);
            let order = std::sync::atomic::Ordering::SeqCst;
            match left.fetch_update(order, order, refuses) {
                Ok(_) => Err(CallError::application(Errno::NOSPC.raw_os_error().unsigned_abs(), "")),
                Err(_) => Ok(().into()),
            }
        };
        let server = CallServer::builder().numbered(Method::numbered(ExportOperation::Zero as u32), zero);
        let _server = server.bind(&store, "data.calls").unwrap();
        let calls = ExportCalls::with_little_memory(&user, "store:data", 128 << 10).unwrap();
        let change = || DiskChange::Zero { offset: 0, length: 512 };

        let log = ChangeLog::default();
        let [failed, unanswered] = [change(), change()].map(|change| log.begin(change));
        assert_eq!(log.repeat(&calls), Ok(2));
        log.end(failed, false);
        assert!(!log.has_lost(), "the machine gets an error, or the change is done again");
        log.end(unanswered, true);
        assert!(log.has_lost() && log.is_empty(), "the machine counts it as done");

        let log = ChangeLog::default();
        let number = log.begin(change());
        assert_eq!(log.repeat(&calls), Ok(1));
        refusals.store(0, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(log.repeat(&calls), Ok(1));
        log.end(number, true);
        assert!(!log.has_lost() && !log.is_empty(), "the next session has repeated it");
    }

    #[test]
    fn answer_or_flush_during_a_failing_repeat_is_a_loss() {
        let fail = |log: &ChangeLog, change: DiskChange, meanwhile: &dyn Fn(u64)| {
            let number = log.begin(change);
            let before = log.changes().all[&number].clone();
            meanwhile(number);
            log.changes().repeated(number, &before, Err(Errno::NOSPC));
            log.end(number, true);
        };
        let log = ChangeLog::default();
        fail(&log, DiskChange::Zero { offset: 0, length: 512 }, &|number| log.end(number, true));
        assert!(log.has_lost() && log.is_empty());
        let log = ChangeLog::default();
        fail(&log, DiskChange::Discard { offset: 0, length: 512 }, &|_| {});
        assert!(!log.has_lost(), "nothing is lost with a discard");
        let log = ChangeLog::default();
        fail(&log, DiskChange::Zero { offset: 0, length: 512 }, &|number| log.end(number, false));
        assert!(!log.has_lost() && log.is_empty(), "the exporter has refused it");

        let log = ChangeLog::default();
        let number = log.begin(DiskChange::Zero { offset: 0, length: 512 });
        log.end(number, true);
        let before = log.changes().all[&number].clone();
        log.flushed(&[number]);
        log.changes().repeated(number, &before, Err(Errno::NOSPC));
        assert!(log.has_lost(), "an earlier change may have been repeated over it");
    }

    #[test]
    fn data_in_buffers_of_others_is_copied_out() {
        let log = ChangeLog::default();
        let data = others();
        log.begin(DiskChange::Write { offset: 0, length: 0, data: KeptData::InGroup(Arc::clone(&data)) });
        assert_eq!(Arc::strong_count(&data), 2);
        log.copy_from_others();
        assert_eq!(Arc::strong_count(&data), 1);
        assert!(!log.is_empty());
    }
}
