//! The connection of a disk's user to its exporter: one session, and a connection of calls for each of its threads.

use super::passed::GroupData;
use super::server::LARGEST_HEAP;
use super::silence::CallLimit;
use super::wire::{
    ExportOperation, FIELDS, RequestFields, WELCOME, Welcome, calls_service, errno_of, hello, parts_bytes,
    session_options,
};
use crate::VhostError;
use crate::disk::image::ALIGN;
use partywall::rpc::{Block, CallClient, CallError, HeapOptions, Method, Reply};
use partywall::{Domain, Stream};
use rustix::io::Errno;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The most data of one request. An exporter takes twice as much. With this limit, 4 MiB that are free in a window are enough for a connection: the
/// broker gives a quarter, and a heap's segments are powers of two.
pub(super) const MOST_DATA: usize = 512 << 10;
/// How often a call that waits looks whether its session has ended.
const LOOK: Duration = Duration::from_millis(100);
/// The data of one request on a connection that has little memory. A disk's blocks are not longer.
pub(super) const LEAST_DATA: usize = 64 << 10;
/// The least heap of a connection beside another one: it has room for the largest block.
const LEAST_FURTHER_HEAP: u64 = 1 << 20;

/// The memory that a connection must have in the window to the exporter.
///
/// The broker hands out at most a quarter of what is free there. A back end that took a quarter for each connection would leave nothing that the
/// back end of another disk of that machine can use. So a further connection has at least 1 MiB, which leaves 3 MiB, and all connections of a
/// disk have at most half of what is free without them. The only connection of a disk has what it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeapNeed {
    /// This disk has no other connection.
    Any,
    /// This disk has other connections, which hold this many bytes together.
    Further { held: u64 },
}

impl HeapNeed {
    /// The data of a request for which the heap must have room.
    fn data(self) -> usize {
        match self {
            Self::Any => LEAST_DATA,
            Self::Further { .. } => MOST_DATA,
        }
    }

    /// Bytes that a connection takes of the window if it can have `quarter`, the largest power of two in a quarter of what is free. `None` if the
    /// disk has its share.
    fn part(self, quarter: u64) -> Option<u64> {
        let held = match self {
            // A quarter that is as large as a heap can be leaves three of them to others.
            _ if quarter >= LARGEST_HEAP => return Some(quarter),
            Self::Any => return Some(quarter),
            Self::Further { held } => held,
        };
        // What is free without this disk's connections is at least `held + 4 * quarter`.
        let fits = |part: &u64| 2 * (held + part) <= held + 4 * quarter;
        let halves = std::iter::successors(Some(quarter), |part| Some(part / 2));
        halves.take_while(|part| *part >= LEAST_FURTHER_HEAP).find(fits)
    }
}

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
        let mut stream = domain.connect_with(target, &session_options())?;
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
    /// Bytes of its heap, if it got all of it at the beginning.
    memory: u64,
    limit: CallLimit,
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
        limit: &CallLimit,
    ) -> Result<Self, ExportFailure> {
        Self::with_heap(domain, target, session, limit, LARGEST_HEAP)
    }

    /// Makes a connection that has all the memory of its heap. Heaps that grow later could take what the first block of another one needs, and
    /// its requests would wait until they fail.
    pub(super) fn connect_with_memory(
        domain: &Domain,
        target: &str,
        session: u64,
        limit: &CallLimit,
        need: HeapNeed,
    ) -> Result<Self, ExportFailure> {
        let mut size = LARGEST_HEAP;
        let mut has_share = false;
        loop {
            let mut calls = Self::with_heap(domain, target, session, limit, size)?;
            let heap = calls.client.heap();
            drop(heap.allocate_aligned(need.data() + FIELDS, ALIGN).map_err(|_| ExportFailure::NoMemory)?);
            let got = heap.stats().bytes;
            // Within a machine there is no window, and a heap gets all that it asks for.
            let part = if has_share { got } else { need.part(got).ok_or(ExportFailure::NoMemory)? };
            if part >= size {
                calls.memory = got;
                return Ok(calls);
            }
            // The window has less for it. Such a heap would grow when others have given back theirs.
            (size, has_share) = (part, true);
        }
    }

    fn with_heap(
        domain: &Domain,
        target: &str,
        session: u64,
        limit: &CallLimit,
        size: u64,
    ) -> Result<Self, ExportFailure> {
        let heap = HeapOptions::default().first(size).max(size);
        let client = CallClient::builder().heap(heap).max_peer_heap(LARGEST_HEAP).timeout(limit.longest());
        let client = client.connect(domain, &calls_service(target)).map_err(|e| {
            tracing::debug!(error = %e, "no connection for the requests of a disk");
            ExportFailure::Ended
        })?;
        static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
        let number = CONNECTIONS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { client, session, number, memory: 0, limit: limit.clone() })
    }

    /// A connection with a heap of this size, as in a window that has no more.
    #[cfg(test)]
    pub(super) fn with_little_memory(domain: &Domain, target: &str, memory: u64) -> Result<Self, ExportFailure> {
        let limit = CallLimit::of(Duration::from_secs(60));
        Self::with_heap(domain, target, 1, &limit, memory).map(|calls| Self { memory, ..calls })
    }

    /// Bytes of its heap, if it got all of it at the beginning.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// The most data of a write. Its block, which is aligned, fits into the heap.
    pub(super) fn most_written(&self) -> usize {
        usize::try_from(self.memory / 2).unwrap_or(MOST_DATA).clamp(LEAST_DATA, MOST_DATA)
    }

    /// The next calls are for a request that waits since then.
    pub(super) fn begin(&self, since: Instant) {
        self.limit.begin(since);
    }

    /// Calls the exporter, and waits for its answer as long as the limit says.
    fn call(&self, operation: ExportOperation, arguments: &[u8]) -> Result<Reply, ExportFailure> {
        let began = Instant::now();
        let mut call = self.client.start(Method::numbered(operation as u32), arguments).map_err(failure_of)?;
        let answer = loop {
            match call.wait_for(LOOK) {
                Ok(Some(reply)) => break Ok(reply),
                Ok(None) if self.limit.gives_up(began) => return Err(ExportFailure::Ended),
                Ok(None) => {}
                Err(error) => break Err(failure_of(error)),
            }
        };
        if matches!(answer, Ok(_) | Err(ExportFailure::Errno(_))) {
            self.limit.heard();
        }
        answer
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
        self.call(operation, &fields.bytes())
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
        self.call(ExportOperation::Write, block).map(drop)
    }

    /// Executes a write of data that lies in a group.
    pub(super) fn write_from(&self, data: &GroupData, offset: u64, durable: bool) -> Result<(), ExportFailure> {
        let parts = data.parts();
        let length = parts.iter().map(|part| part.len).sum();
        let mut bytes = parts_bytes(&parts);
        bytes.extend(RequestFields { session: self.session, offset, length, durable, mode: 0 }.bytes());
        self.call(ExportOperation::WriteFrom, &bytes).map(drop)
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
            // A disk of this host repeats such a request at once. An exporter that gave no other answer would have it repeated without end, also
            // while the machine waits for the end of all requests.
            Some(Errno::INTR | Errno::AGAIN) => ExportFailure::Errno(Errno::IO),
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The heaps of a disk's connections in a window with so many free bytes, as the broker and [`HeapNeed`] divide it; and what stays free.
    fn divide(mut free: u64, connections: usize) -> (Vec<u64>, u64) {
        let mut heaps = Vec::new();
        for _ in 0..connections {
            let held = heaps.iter().sum();
            let need = if heaps.is_empty() { HeapNeed::Any } else { HeapNeed::Further { held } };
            let block = (need.data() + FIELDS + ALIGN).next_power_of_two() as u64;
            let quarter = (1 << (free / 4).ilog2()).min(LARGEST_HEAP);
            let Some(heap) = (quarter >= block).then(|| need.part(quarter)).flatten() else { break };
            assert!(heap <= quarter);
            free -= heap;
            heaps.push(heap);
        }
        (heaps, free)
    }

    #[test]
    fn disks_of_one_window_leave_memory_to_later_ones() {
        for window in [4 * MIB, 5 * MIB, 12 * MIB, 28 * MIB, 60 * MIB, 124 * MIB] {
            let mut free = window;
            for disk in 0..6 {
                let (heaps, left) = divide(free, 32);
                assert!(!heaps.is_empty(), "disk {disk} in {window} has no connection: {free} bytes are free");
                let held: u64 = heaps.iter().sum();
                let leaves_many = left >= 3 * LARGEST_HEAP;
                assert!(heaps.len() == 1 || leaves_many || 2 * held <= free, "disk {disk} takes {heaps:?} of {free}");
                free = left;
            }
        }
    }

    #[test]
    fn disk_alone_in_a_usual_window_has_whole_heaps() {
        assert_eq!(divide(60 * MIB, 4), (vec![LARGEST_HEAP; 4], 28 * MIB));
        assert_eq!(divide(28 * MIB, 4), (vec![4 * MIB, 4 * MIB, 4 * MIB, 2 * MIB], 14 * MIB));
        assert_eq!(divide(12 * MIB, 8), (vec![2 * MIB; 3], 6 * MIB));
    }

    #[test]
    fn errors_of_an_exporter_never_ask_for_a_repeat() {
        let failure = |e: Errno| failure_of(CallError::application(e.raw_os_error().unsigned_abs(), ""));
        for errno in [Errno::INTR, Errno::AGAIN] {
            assert_eq!(failure(errno), ExportFailure::Errno(Errno::IO), "{errno:?}");
        }
        assert_eq!(failure(Errno::NOSPC), ExportFailure::Errno(Errno::NOSPC));
        assert_eq!(failure(Errno::NOTCONN), ExportFailure::Ended);
    }

    #[test]
    #[cfg(not(miri))]
    fn request_of_an_earlier_exporters_session_is_refused() {
        use crate::disk::exported::{DiskExport, DiskExportOptions};

        let broker = partywall_daemon::Broker::embedded().unwrap();
        let join = |name| partywall::Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let (store, user) = (join("store"), join("user"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
        let longest = Duration::from_secs(60);
        let export = DiskExport::bind(options.clone(), &store, "data").unwrap();
        let earlier = ExportLink::connect(&user, "store:data", longest).unwrap();
        drop(export);
        let _export = DiskExport::bind(options, &store, "data").unwrap();
        let later = ExportLink::connect(&user, "store:data", longest).unwrap();
        let sync = |link: &ExportLink| {
            let limit = CallLimit::of(longest);
            ExportCalls::connect(&user, "store:data", link.welcome.session, &limit).and_then(|calls| calls.sync())
        };
        assert_eq!((sync(&earlier), sync(&later)), (Err(ExportFailure::Ended), Ok(())));
    }
}
