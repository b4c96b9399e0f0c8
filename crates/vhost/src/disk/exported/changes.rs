//! Changes that the exporter has done and that may not be durable. They are repeated if the exporter's machine starts again (protocol E3).

use super::link::{ExportCalls, ExportFailure, KeptData};
use super::wire::ExportOperation;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    Allocate {
        offset: u64,
        length: u64,
        mode: i32,
    },
}

impl DiskChange {
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
                let copy = calls.block((*offset, *length), false, |room| data.copy_to(room))?;
                calls.write(&copy)
            }
            Self::Zero { offset, length } => {
                calls.request(ExportOperation::Zero, (*offset, *length), false, 0).map(drop)
            }
            Self::Allocate { offset, length, mode } => {
                calls.request(ExportOperation::Allocate, (*offset, *length), false, *mode).map(drop)
            }
        }
    }
}

/// All such changes, in the order in which they were begun.
#[derive(Debug, Default)]
pub(super) struct ChangeLog(Mutex<Changes>);

#[derive(Debug, Default)]
struct Changes {
    next: u64,
    /// With whether the exporter has answered.
    all: BTreeMap<u64, (DiskChange, bool)>,
}

impl ChangeLog {
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change begins. From now on a restart of the exporter's machine repeats it.
    pub(super) fn begin(&self, change: DiskChange) -> u64 {
        let mut changes = self.changes();
        changes.next += 1;
        let number = changes.next;
        changes.all.insert(number, (change, false));
        number
    }

    /// A change is done, or was not.
    pub(super) fn end(&self, number: u64, is_done: bool) {
        let mut changes = self.changes();
        match changes.all.get_mut(&number) {
            Some((_, answered)) if is_done => *answered = true,
            _ => drop(changes.all.remove(&number)),
        }
    }

    /// Copies the data that lies in a connection's heap, so that the heap gives its place in the window back when the connection ends.
    pub(super) fn copy_blocks_of(&self, calls: &ExportCalls) {
        for (change, _) in self.changes().all.values_mut() {
            if let DiskChange::Write { data, .. } = change {
                calls.copy_out(data);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.changes().all.is_empty()
    }

    /// Makes the changes durable that have been answered.
    pub(super) fn flush(&self, calls: &ExportCalls) -> Result<(), ExportFailure> {
        let answered = self.answered();
        calls.sync()?;
        self.flushed(&answered);
        Ok(())
    }

    /// The changes that a flush which begins now makes durable.
    fn answered(&self) -> Vec<u64> {
        self.changes().all.iter().filter(|(_, (_, answered))| *answered).map(|(number, _)| *number).collect()
    }

    /// These changes are durable.
    fn flushed(&self, numbers: &[u64]) {
        let mut changes = self.changes();
        for number in numbers {
            changes.all.remove(number);
        }
    }

    /// Repeats all changes by a connection to an exporter that may have lost them.
    ///
    /// A change without an answer is repeated as well. The thread that waits for the answer then repeats it again, which changes nothing: a driver
    /// does not write a sector twice at a time, or does not care for the order.
    pub(super) fn repeat(&self, calls: &ExportCalls) -> Result<usize, ExportFailure> {
        let all: Vec<DiskChange> = self.changes().all.values().map(|(change, _)| change.clone()).collect();
        for change in &all {
            change.repeat(calls)?;
        }
        Ok(all.len())
    }
}
