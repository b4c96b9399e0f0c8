//! The connection of a disk's user to its exporter: one session, and a connection of calls for each of its threads.

use super::passed::GroupData;
use super::server::LARGEST_HEAP;
use super::wire::{
    ExportOperation, FIELDS, RequestFields, WELCOME, Welcome, calls_service, errno_of, hello, parts_bytes,
};
use crate::VhostError;
use crate::disk::image::ALIGN;
use partywall::rpc::{Block, CallClient, CallError, HeapOptions, Method, Reply};
use partywall::{Domain, Stream};
use rustix::io::Errno;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The most data of one request. An exporter takes twice as much. With this limit, 4 MiB that are free in a window are enough for a connection: the
/// broker gives a quarter, and a heap's segments are powers of two.
pub(super) const MOST_DATA: usize = 512 << 10;
/// Bytes of the largest block: the data of a write and the fields of its request.
const LARGEST_BLOCK: usize = MOST_DATA + FIELDS;

/// Why a request has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExportFailure {
    /// The exporter has answered with this.
    Errno(Errno),
    /// One of the two heaps has no room now.
    NoMemory,
    /// The session has ended, or gives no answer in time.
    Ended,
    /// The machine's bytes are in no memory that this process sees. The exporter was not asked.
    Unseen,
}

/// One session.
#[derive(Debug)]
pub(super) struct ExportLink {
    /// The session ends with it.
    _stream: Stream,
    pub(super) welcome: Welcome,
}

impl ExportLink {
    /// Begins a session with `DOMAIN:SERVICE`.
    pub(super) fn connect(domain: &Domain, target: &str, longest: Duration) -> Result<Self, VhostError> {
        let mut stream = domain.connect(target)?;
        stream.set_read_timeout(Some(longest));
        let mut bytes = [0; WELCOME];
        let asked = stream.write_all(&hello()).and_then(|()| stream.read_exact(&mut bytes));
        asked.map_err(|e| VhostError::Refused(format!("{target} does not answer as an exporter of a disk: {e}")))?;
        let welcome = Welcome::read(&bytes)
            .ok_or_else(|| VhostError::Refused(format!("{target} answers, and is no exporter of a disk")))?;
        match welcome.refused() {
            None => Ok(Self { _stream: stream, welcome }),
            Some(Errno::BUSY) => Err(VhostError::Refused(format!(
                "another back end uses the disk {target}; a disk that can be written has one user"
            ))),
            Some(Errno::PROTONOSUPPORT) => Err(VhostError::Refused(format!(
                "{target} speaks another version of the protocol of disks: install the same release on both sides"
            ))),
            Some(e) => Err(VhostError::Refused(format!("{target} does not give its disk: {e}"))),
        }
    }
}

/// A thread's connection of calls.
#[derive(Debug)]
pub(super) struct ExportCalls {
    client: CallClient,
    session: u64,
    /// Which connection of this process it is.
    number: u64,
}

/// The data of a write, in a block of a connection's heap or, after the end of that connection, in memory of this process.
#[derive(Debug, Clone)]
pub(super) enum KeptData {
    InHeap {
        connection: u64,
        block: Arc<Block>,
    },
    Copied(Arc<[u8]>),
    /// In buffers of a group, wherever the connection is.
    InGroup(Arc<GroupData>),
}

impl KeptData {
    /// Takes data out of buffers of other processes.
    pub(super) fn copy_from_others(&mut self) {
        if let Self::InGroup(data) = self
            && let GroupData::Others(parts) = &**data
        {
            let mut bytes = vec![0; parts.iter().map(|part| usize::try_from(part.part().len).unwrap_or(0)).sum()];
            if data.copy_to(&mut bytes) {
                *self = Self::Copied(bytes.into());
            }
        }
    }

    /// Copies the data, which fills the room.
    pub(super) fn copy_to(&self, room: &mut [u8]) -> bool {
        let bytes: &[u8] = match self {
            Self::InHeap { block, .. } => block,
            Self::Copied(bytes) => bytes,
            Self::InGroup(data) => return data.copy_to(room),
        };
        let bytes = bytes.get(..room.len());
        bytes.inspect(|bytes| room.copy_from_slice(bytes)).is_some()
    }
}

impl ExportCalls {
    /// Makes a connection for requests without data.
    pub(super) fn connect(
        domain: &Domain,
        target: &str,
        session: u64,
        longest: Duration,
    ) -> Result<Self, ExportFailure> {
        Self::with_heap(domain, target, session, longest, LARGEST_HEAP)
    }

    /// Makes a connection that has all the memory of its heap. Heaps that grow later could take what the first block of another one needs, and
    /// its requests would wait until they fail.
    pub(super) fn connect_with_memory(
        domain: &Domain,
        target: &str,
        session: u64,
        longest: Duration,
    ) -> Result<Self, ExportFailure> {
        let mut size = LARGEST_HEAP;
        loop {
            let calls = Self::with_heap(domain, target, session, longest, size)?;
            let heap = calls.client.heap();
            drop(heap.allocate_aligned(LARGEST_BLOCK, ALIGN).map_err(|_| ExportFailure::NoMemory)?);
            // The window has less for it. Such a heap would grow when others have given back theirs.
            match heap.stats().bytes {
                bytes if bytes < size => size = bytes,
                _ => return Ok(calls),
            }
        }
    }

    fn with_heap(
        domain: &Domain,
        target: &str,
        session: u64,
        longest: Duration,
        size: u64,
    ) -> Result<Self, ExportFailure> {
        let heap = HeapOptions::default().first(size).max(size);
        let client = CallClient::builder().heap(heap).max_peer_heap(LARGEST_HEAP).timeout(longest);
        let client = client.connect(domain, &calls_service(target)).map_err(|e| {
            tracing::debug!(error = %e, "no connection for the requests of a disk");
            ExportFailure::Ended
        })?;
        static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
        Ok(Self { client, session, number: CONNECTIONS.fetch_add(1, Ordering::Relaxed) })
    }

    /// Executes a request without data.
    pub(super) fn request(
        &self,
        operation: ExportOperation,
        (offset, length): (u64, u64),
        durable: bool,
        mode: i32,
    ) -> Result<Reply, ExportFailure> {
        let fields = RequestFields { session: self.session, offset, length, durable, mode };
        self.client.call(Method::numbered(operation as u32), &fields.bytes()).map_err(failure_of)
    }

    /// Begins a write: a block with `length` bytes of data, which `fill` copies to it, and behind them the fields of the request.
    pub(super) fn block(
        &self,
        (offset, length): (u64, usize),
        durable: bool,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> Result<Block, ExportFailure> {
        let block = self.client.heap().allocate_aligned(length + FIELDS, ALIGN);
        let mut block = block.map_err(|_| ExportFailure::NoMemory)?;
        let (data, rest) = block.split_at_mut(length);
        if !fill(data) {
            return Err(ExportFailure::Unseen);
        }
        let fields = RequestFields { session: self.session, offset, length: length as u64, durable, mode: 0 };
        rest.copy_from_slice(&fields.bytes());
        Ok(block)
    }

    /// Executes the write that a block is of.
    pub(super) fn write(&self, block: &Block) -> Result<(), ExportFailure> {
        let method = Method::numbered(ExportOperation::Write as u32);
        self.client.call(method, block).map(drop).map_err(failure_of)
    }

    /// Executes a write of data that lies in a group.
    pub(super) fn write_from(&self, data: &GroupData, offset: u64, durable: bool) -> Result<(), ExportFailure> {
        let parts = data.parts();
        let length = parts.iter().map(|part| part.len).sum();
        let mut bytes = parts_bytes(&parts);
        bytes.extend(RequestFields { session: self.session, offset, length, durable, mode: 0 }.bytes());
        let method = Method::numbered(ExportOperation::WriteFrom as u32);
        self.client.call(method, &bytes).map(drop).map_err(failure_of)
    }

    /// The data of a block, to be kept.
    pub(super) fn keep(&self, block: &Arc<Block>) -> KeptData {
        KeptData::InHeap { connection: self.number, block: Arc::clone(block) }
    }

    /// Takes data out of this connection's heap, if it is there.
    pub(super) fn copy_out(&self, data: &mut KeptData) {
        if let KeptData::InHeap { connection, block } = data
            && *connection == self.number
        {
            *data = KeptData::Copied(Arc::from(&block[..]));
        }
    }

    /// Makes changes durable.
    pub(super) fn sync(&self) -> Result<(), ExportFailure> {
        self.request(ExportOperation::Sync, (0, 0), false, 0).map(drop)
    }
}

fn failure_of(error: CallError) -> ExportFailure {
    match error {
        CallError::Application { code, .. } => match errno_of(code) {
            Some(Errno::NOTCONN) => ExportFailure::Ended,
            Some(Errno::NOMEM) => ExportFailure::NoMemory,
            e => ExportFailure::Errno(e.unwrap_or(Errno::IO)),
        },
        // Another session may have an answer. Of all else the exporter has taken note.
        CallError::Closed { .. } | CallError::Dead { .. } | CallError::Corrupt(_) | CallError::TimedOut => {
            ExportFailure::Ended
        }
        // An exporter of an earlier release.
        CallError::UnknownMethod => ExportFailure::Errno(Errno::OPNOTSUPP),
        CallError::Connection(_) | CallError::Moved { .. } => ExportFailure::Ended,
        _ => ExportFailure::Errno(Errno::IO),
    }
}
