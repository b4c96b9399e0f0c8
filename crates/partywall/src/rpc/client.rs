//! Calling.

use super::error::{CallError, CallStatus};
use super::heap::{Block, HEAP_KIND, Heap, HeapOptions, MOST_SEGMENTS};
use super::method::Method;
use super::sender::{CallSender, check_hello, prepare};
use super::view::{PeerHeap, PeerView};
use super::{WINDOW, channel_options};
use crate::connect;
use crate::domain::lock;
use crate::further::Regions;
use crate::rx::StreamRx;
use crate::{Domain, Error, Options, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Kind};
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest that a client waits for the server to accept it.
const ACCEPTANCE: Duration = Duration::from_secs(10);

type CallResult<T> = std::result::Result<T, CallError>;

/// How a client connects.
///
/// ```
/// use partywall::rpc::{CallClient, HeapOptions, CallServer};
/// use std::time::Duration;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
/// let client = CallClient::builder()
///     .timeout(Duration::from_secs(5))
///     .heap(HeapOptions::default().first(1 << 20))
///     .max_peer_heap(1 << 20)
///     .connect(&web, "web:math")?;
/// client.call("null", &[])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CallClientBuilder {
    options: Options,
    heap: HeapOptions,
    max_peer_heap: u64,
    same_address: bool,
    timeout: Option<Duration>,
}

impl Default for CallClientBuilder {
    fn default() -> Self {
        Self {
            options: Options::default(),
            heap: HeapOptions::default(),
            max_peer_heap: 256 << 20,
            same_address: false,
            timeout: None,
        }
    }
}

impl CallClientBuilder {
    /// Options of the channel: how long to spin, for instance. The size of the ring is fixed.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// How this side's heap is made.
    #[must_use]
    pub fn heap(mut self, heap: HeapOptions) -> Self {
        self.heap = heap;
        self
    }

    /// The most bytes of heap that the server may have on this connection.
    #[must_use]
    pub fn max_peer_heap(mut self, bytes: u64) -> Self {
        self.max_peer_heap = bytes;
        self
    }

    /// Whether a server's heap that cannot be mapped at the server's address ends the connection. Otherwise it is mapped elsewhere, and
    /// [`PeerView::offset`] has the difference.
    #[must_use]
    pub fn same_address(mut self, required: bool) -> Self {
        self.same_address = required;
        self
    }

    /// The longest that a call may take. There is no limit unless this is called.
    #[must_use]
    pub fn timeout(mut self, longest: Duration) -> Self {
        self.timeout = Some(longest);
        self
    }

    /// Connects a domain to `DOMAIN:SERVICE`, and waits until the server has accepted, at most ten seconds.
    ///
    /// # Errors
    /// As [`Domain::connect`]; [`Error::TimedOut`] if the server does not accept; [`Error::Corrupt`] if the service is not one of calls.
    pub fn connect(&self, domain: &Domain, target: &str) -> Result<CallClient> {
        let options = channel_options(&self.options);
        let (tx, rx) = connect::open(domain, target, Kind::Message, Directions::BOTH, &options)?;
        let (Some(tx), Some(mut rx)) = (tx, rx) else {
            return Err(Error::BrokerConfused("a one-way connection for calls".into()));
        };
        let regions = Regions::of(Some(rx.endpoint()));
        take_heap(&regions, self.max_peer_heap)?;
        let heap = Heap::new(regions.clone(), self.heap.clone());
        let mut sender = CallSender::new(tx, heap.clone());
        sender.hello()?;
        rx.waiter.timeout = Some(ACCEPTANCE);
        match rx.next_record()? {
            Some(record) => check_hello(&record)?,
            None => return Err(Error::Closed("the server has closed the connection")),
        }
        let peer_heap = PeerHeap::new(regions, self.same_address);
        Ok(CallClient {
            core: Arc::new(ClientCore {
                peer: rx.endpoint().info().clone(),
                sender: Mutex::new(sender),
                receiver: Mutex::new(CallReceiver { rx, heap: peer_heap.clone() }),
                slots: Mutex::default(),
                turn: Condvar::new(),
                heap,
                peer_heap,
                timeout: self.timeout,
            }),
        })
    }
}

/// Takes the peer's heap. A heap is for a peer on the same machine: between machines, calls carry their bytes in the record alone.
pub(super) fn take_heap(regions: &Regions, bytes: u64) -> Result<()> {
    if regions.is_between_machines()? {
        return Ok(());
    }
    regions.take(HEAP_KIND, MOST_SEGMENTS as u8, bytes)
}

/// A connection to a server. Threads may use it, and clones of it, at the same time.
///
/// Dropping the last clone closes the connection, once all replies are dropped.
///
/// ```
/// use partywall::rpc::{CallClient, CallServer};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("echo", |call| Ok(call.args().to_vec().into())).bind(&web, "math")?;
/// let client = CallClient::connect("web:math")?;
/// // Several calls under way, answered in order.
/// let first = client.start("echo", b"one")?;
/// let second = client.start("echo", b"two")?;
/// assert_eq!(second.wait()?.to_vec(), b"two");
/// assert_eq!(first.wait()?.to_vec(), b"one");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CallClient {
    core: Arc<ClientCore>,
}

struct ClientCore {
    sender: Mutex<CallSender>,
    receiver: Mutex<CallReceiver>,
    slots: Mutex<Slots>,
    /// Waited on by threads whose replies another thread receives.
    turn: Condvar,
    heap: Heap,
    peer_heap: PeerHeap,
    timeout: Option<Duration>,
    peer: PeerInfo,
}

impl fmt::Debug for ClientCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCore").field("peer", &self.peer.name).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct CallReceiver {
    rx: StreamRx,
    heap: PeerHeap,
}

/// The calls of a connection.
#[derive(Default)]
struct Slots {
    slots: Vec<CallSlot>,
    free: Vec<u32>,
    /// Calls that the server has not answered.
    unanswered: usize,
    /// A thread is receiving, for itself and for the others.
    is_received: bool,
    waiters: usize,
    ended: Option<ConnectionEnd>,
}

struct CallSlot {
    generation: u32,
    state: SlotState,
    /// The arguments, if they were copied to the heap for this call.
    arguments: Option<Block>,
}

enum SlotState {
    Free,
    Waiting,
    /// The caller has given up. The slot is free once the server has answered.
    Abandoned,
    Answered(ReceivedReply),
}

/// A reply that has been received.
struct ReceivedReply {
    status: CallStatus,
    code: u32,
    view: PeerView,
    /// The peer's block that is to be released.
    held: Option<u64>,
}

/// Why nothing more will be received.
#[derive(Debug, Clone, Copy)]
enum ConnectionEnd {
    Closed,
    Dead,
    Corrupt(Corrupt),
    Failed,
}

impl ConnectionEnd {
    fn error(self) -> CallError {
        match self {
            Self::Closed => CallError::Closed { seen: false },
            Self::Dead => CallError::Dead { seen: false },
            Self::Corrupt(what) => CallError::Corrupt(what),
            Self::Failed => {
                CallError::Connection(Error::Closed("an earlier error of the system has ended the connection"))
            }
        }
    }
}

/// Bits of a call's id that are the index of its slot; the others are the slot's generation.
const INDEX_BITS: u32 = 20;

impl Slots {
    fn open(&mut self, arguments: Option<Block>) -> u32 {
        self.unanswered += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(CallSlot { generation: 0, state: SlotState::Free, arguments: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        (slot.state, slot.arguments) = (SlotState::Waiting, arguments);
        index | slot.generation << INDEX_BITS
    }

    fn slot(&mut self, id: u32) -> Option<&mut CallSlot> {
        let slot = self.slots.get_mut((id & ((1 << INDEX_BITS) - 1)) as usize)?;
        (slot.generation == id >> INDEX_BITS).then_some(slot)
    }

    fn close(&mut self, id: u32) {
        let index = id & ((1 << INDEX_BITS) - 1);
        if let Some(slot) = self.slot(id) {
            slot.generation = (slot.generation + 1) & (u32::MAX >> INDEX_BITS);
            (slot.state, slot.arguments) = (SlotState::Free, None);
            self.free.push(index);
        }
    }

    /// Files a reply. Returns the peer's block if nobody waits for it any more; fails if the server answers what was not asked.
    fn deliver(&mut self, id: u32, outcome: ReceivedReply) -> std::result::Result<Option<u64>, Corrupt> {
        let slot = self.slot(id).ok_or(Corrupt::BadRecord)?;
        match slot.state {
            SlotState::Waiting => {
                slot.state = SlotState::Answered(outcome);
                slot.arguments = None;
                self.unanswered -= 1;
                Ok(None)
            }
            SlotState::Abandoned => {
                self.unanswered -= 1;
                self.close(id);
                Ok(outcome.held)
            }
            SlotState::Free | SlotState::Answered(_) => Err(Corrupt::BadRecord),
        }
    }

    fn take_answer(&mut self, id: u32) -> Option<ReceivedReply> {
        let slot = self.slot(id)?;
        if !matches!(slot.state, SlotState::Answered(_)) {
            return None;
        }
        let SlotState::Answered(outcome) = std::mem::replace(&mut slot.state, SlotState::Free) else { return None };
        self.close(id);
        Some(outcome)
    }

    /// A call could not be sent. Returns the peer's block if the server has answered all the same: a server that lies answers first.
    fn withdraw(&mut self, id: u32) -> Option<u64> {
        let (is_waiting, held) = match &self.slot(id)?.state {
            SlotState::Answered(outcome) => (false, outcome.held),
            state => (matches!(state, SlotState::Waiting), None),
        };
        self.unanswered -= usize::from(is_waiting);
        self.close(id);
        held
    }

    /// The caller of an unanswered call has gone.
    fn abandon(&mut self, id: u32) {
        let has_ended = self.ended.is_some();
        match self.slot(id) {
            Some(slot) if matches!(slot.state, SlotState::Waiting) && !has_ended => slot.state = SlotState::Abandoned,
            _ => self.close(id),
        }
    }
}

impl ClientCore {
    /// Waits until `ready` finds something, receiving replies meanwhile, or letting another thread do so.
    fn drive<T>(&self, deadline: Option<Instant>, mut ready: impl FnMut(&mut Slots) -> Option<T>) -> CallResult<T> {
        let mut slots = lock(&self.slots);
        loop {
            if let Some(found) = ready(&mut slots) {
                self.pass_turn(&slots);
                return Ok(found);
            }
            if let Some(end) = slots.ended {
                return Err(end.error());
            }
            if slots.is_received {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Err(CallError::TimedOut);
                }
                slots = self.wait_for_turn(slots, deadline);
                continue;
            }
            slots.is_received = true;
            drop(slots);
            let received = self.receive(deadline);
            slots = lock(&self.slots);
            slots.is_received = false;
            let filed = match received {
                Ok(Some((id, outcome))) => slots.deliver(id, outcome).map_err(Error::Corrupt),
                Ok(None) => Ok(None),
                Err(e) => Err(e),
            };
            match filed {
                Ok(None) => {}
                Ok(Some(unwanted)) => {
                    drop(slots);
                    lock(&self.sender).release(unwanted);
                    slots = lock(&self.slots);
                }
                Err(Error::TimedOut) => {
                    self.pass_turn(&slots);
                    return ready(&mut slots).ok_or(CallError::TimedOut);
                }
                Err(e) => self.end(&mut slots, &e),
            }
            if slots.waiters > 0 {
                // The reply may be another thread's.
                self.turn.notify_all();
            }
        }
    }

    /// A thread that receives no more lets another one receive.
    fn pass_turn(&self, slots: &Slots) {
        if slots.waiters > 0 && !slots.is_received {
            self.turn.notify_one();
        }
    }

    fn wait_for_turn<'a>(&self, mut slots: MutexGuard<'a, Slots>, deadline: Option<Instant>) -> MutexGuard<'a, Slots> {
        slots.waiters += 1;
        let mut slots = match deadline {
            None => self.turn.wait(slots).unwrap_or_else(PoisonError::into_inner),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.turn.wait_timeout(slots, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        slots.waiters -= 1;
        slots
    }

    fn end(&self, slots: &mut Slots, error: &Error) {
        let end = match error {
            Error::Closed(_) => ConnectionEnd::Closed,
            Error::Dead { .. } => ConnectionEnd::Dead,
            Error::Corrupt(what) => ConnectionEnd::Corrupt(*what),
            _ => ConnectionEnd::Failed,
        };
        slots.ended = Some(end);
        if let ConnectionEnd::Corrupt(what) = end {
            lock(&self.receiver).rx.blame(what);
        }
    }

    /// Receives one record. `None`: it was about memory, not a reply.
    fn receive(&self, deadline: Option<Instant>) -> Result<Option<(u32, ReceivedReply)>> {
        let mut receiver = lock(&self.receiver);
        let CallReceiver { rx, heap } = &mut *receiver;
        rx.waiter.timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let record = rx.next_record()?.ok_or(Error::Closed("the server has closed the connection"))?;
        match (record.kind, record.bytes) {
            (RecordKind::Reply, bytes) => {
                let status = CallStatus::from_wire(record.status).filter(|status| status.admits(record.method));
                let status = status.ok_or(Corrupt::BadRecord)?;
                let view = PeerView::from_record(bytes, heap).ok_or(Corrupt::BadRecord)?;
                let held = match bytes {
                    CallBytes::Inline(..) => None,
                    CallBytes::Reference { address, .. } => Some(address),
                };
                Ok(Some((record.id, ReceivedReply { status, code: record.method, view, held })))
            }
            (RecordKind::Segment, CallBytes::Reference { address, len }) => {
                heap.admit(record.id, address, len).map(|()| None)
            }
            _ => Err(Corrupt::BadRecord.into()),
        }
    }

    /// Fills in whether the server had taken the call that begins at this byte of the stream.
    fn seen(&self, error: CallError, position: u64) -> CallError {
        match error {
            CallError::Dead { .. } => CallError::Dead { seen: lock(&self.sender).tx.is_taken(position) },
            CallError::Closed { .. } => CallError::Closed { seen: lock(&self.sender).tx.is_taken(position) },
            other => other,
        }
    }

    fn deadline(&self, longest: Option<Duration>) -> Option<Instant> {
        longest.or(self.timeout).and_then(|longest| Instant::now().checked_add(longest))
    }

    fn send(&self, record: &CallRecord, deadline: Option<Instant>) -> Result<u64> {
        let mut sender = lock(&self.sender);
        sender.tx.core.waiter.timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        sender.send(record)
    }
}

impl CallClient {
    /// Connects from the [current](Domain::current) domain to `DOMAIN:SERVICE`.
    ///
    /// # Errors
    /// As [`CallClientBuilder::connect`].
    pub fn connect(target: &str) -> Result<Self> {
        CallClientBuilder::default().connect(&Domain::current()?, target)
    }

    /// A client that is to be unlike others.
    pub fn builder() -> CallClientBuilder {
        CallClientBuilder::default()
    }

    /// The heap of this side. Arguments that lie in it are passed without a copy.
    pub fn heap(&self) -> &Heap {
        &self.core.heap
    }

    /// Who serves.
    pub fn peer(&self) -> &PeerInfo {
        &self.core.peer
    }

    /// Calls a method and waits for its result. Up to 40 bytes travel with the call; more are passed by reference if they are in a block of
    /// this connection's heap, and copied there otherwise.
    ///
    /// # Errors
    /// [`CallError`] names every outcome. Between machines, bytes by reference fail with [`CallError::Connection`].
    pub fn call(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Reply> {
        self.start(method, arguments)?.wait()
    }

    /// The same with a separate limit: the longest that this call may take.
    ///
    /// ```
    /// use partywall::rpc::{CallError, CallClient, CallServer};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("sleep", |_| {
    /// #     std::thread::sleep(Duration::from_millis(50));
    /// #     Ok(().into())
    /// # }).bind(&web, "math")?;
    /// let client = CallClient::connect("web:math")?;
    /// let result = client.call_within(Duration::from_millis(1), "sleep", &[]);
    /// assert!(matches!(result, Err(CallError::TimedOut)));
    /// client.call("sleep", &[])?; // The late result of the first call is dropped.
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn call_within(&self, longest: Duration, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Reply> {
        self.begin(self.core.deadline(Some(longest)), method.into(), arguments)?.wait()
    }

    /// Begins a call and does not wait for its result. At most 512 calls of a connection are unanswered at a time; to begin another waits for
    /// an answer.
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn start(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<Ongoing> {
        self.begin(self.core.deadline(None), method.into(), arguments)
    }

    fn begin(&self, deadline: Option<Instant>, method: Method, arguments: &[u8]) -> CallResult<Ongoing> {
        let core = &self.core;
        let (bytes, kept) = prepare(&core.heap, arguments)?;
        let mut kept = Some(kept);
        let id = core.drive(deadline, |slots| {
            // A connection that has ended takes no call, though its answers can still be had.
            (slots.unanswered < WINDOW && slots.ended.is_none()).then(|| slots.open(kept.take().flatten()))
        })?;
        let record = CallRecord { kind: RecordKind::Call, id, method: method.number(), status: 0, bytes };
        match core.send(&record, deadline) {
            Ok(position) => Ok(Ongoing { core: Arc::clone(core), id, position, deadline, is_over: false }),
            Err(e) => {
                let held = lock(&core.slots).withdraw(id);
                if let Some(address) = held {
                    lock(&core.sender).release(address);
                }
                Err(e.into())
            }
        }
    }

    /// Calls a method whose result is not wanted. Returns once the call is in transit; nobody reports whether it went well.
    ///
    /// ```
    /// use partywall::rpc::{CallClient, CallServer};
    /// use std::sync::mpsc::channel;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// let (sender, lines) = channel();
    /// let _server = CallServer::builder().method("log", move |call| {
    ///     let _ = sender.send(call.args().to_vec());
    ///     Ok(().into())
    /// }).bind(&web, "log")?;
    /// CallClient::connect("web:log")?.notify("log", b"a line")?;
    /// assert_eq!(lines.recv()?, b"a line");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`CallClient::call`]; [`CallError::OutOfMemory`] for more than 40 bytes that are not in the heap, because nothing would tell when a copy
    /// of them may be freed.
    pub fn notify(&self, method: impl Into<Method>, arguments: &[u8]) -> CallResult<()> {
        let (bytes, copied) = prepare(&self.core.heap, arguments)?;
        if copied.is_some() {
            return Err(CallError::OutOfMemory(
                "more than 40 bytes of a notice: put them into a block of the heap".into(),
            ));
        }
        let record = CallRecord { kind: RecordKind::Notice, id: 0, method: method.into().number(), status: 0, bytes };
        self.core.send(&record, self.core.deadline(None))?;
        Ok(())
    }

    /// `len` bytes at an address of the server's, which an earlier reply contained. The server must keep them until then.
    ///
    /// # Errors
    /// [`CallError::BadPointer`] unless all of them are in the server's heap.
    pub fn follow(&self, address: u64, len: u64) -> CallResult<PeerView> {
        self.core.peer_heap.view(address, len).ok_or(CallError::BadPointer)
    }
}

/// A call under way. Dropping it gives the call up: the server still executes it, and its result is dropped.
///
/// ```
/// # use partywall::rpc::{CallClient, CallServer};
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().method("null", |_| Ok(().into())).bind(&web, "math")?;
/// # let client = CallClient::connect("web:math")?;
/// let calls = (0..1000).map(|_| client.start("null", &[])).collect::<Result<Vec<_>, _>>()?;
/// for call in calls {
///     assert!(call.wait()?.is_empty());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Ongoing {
    core: Arc<ClientCore>,
    id: u32,
    position: u64,
    deadline: Option<Instant>,
    is_over: bool,
}

impl Ongoing {
    /// Waits for the result.
    ///
    /// # Errors
    /// As [`CallClient::call`].
    pub fn wait(mut self) -> CallResult<Reply> {
        let outcome = self.core.drive(self.deadline, |slots| slots.take_answer(self.id));
        let outcome = outcome.map_err(|e| self.core.seen(e, self.position))?;
        self.is_over = true;
        let ReceivedReply { status, code, view, held } = outcome;
        let reply = Reply { view, held: held.map(|address| (Arc::clone(&self.core), address)) };
        match status.error(code, &reply) {
            None => Ok(reply),
            Some(error) => Err(error),
        }
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut slots = lock(&self.core.slots);
        let answered = slots.take_answer(self.id);
        if answered.is_none() {
            slots.abandon(self.id);
        }
        drop(slots);
        if let Some(address) = answered.and_then(|outcome| outcome.held) {
            lock(&self.core.sender).release(address);
        }
    }
}

/// The result of a call. The server keeps its memory until this is dropped.
#[derive(Debug)]
pub struct Reply {
    view: PeerView,
    held: Option<(Arc<ClientCore>, u64)>,
}

impl Reply {
    /// The bytes of the result. They are the server's to change once this reply is dropped.
    pub fn view(&self) -> &PeerView {
        &self.view
    }
}

impl Deref for Reply {
    type Target = PeerView;

    fn deref(&self) -> &PeerView {
        &self.view
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some((core, address)) = self.held.take() {
            lock(&core.sender).release(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(held: Option<u64>) -> ReceivedReply {
        let heap = PeerHeap::new(Regions::of(None), false);
        let view = PeerView::from_record(CallBytes::EMPTY, &heap).unwrap();
        ReceivedReply { status: CallStatus::Done, code: 0, view, held }
    }

    #[test]
    fn call_that_is_answered_before_it_is_sent_is_counted_once() {
        let mut slots = Slots::default();
        let id = slots.open(None);
        assert_eq!(slots.deliver(id, reply(Some(64))), Ok(None));
        assert_eq!((slots.withdraw(id), slots.unanswered), (Some(64), 0));
        let id = slots.open(None);
        assert_eq!((slots.withdraw(id), slots.unanswered), (None, 0));
        assert!(slots.deliver(id, reply(None)).is_err(), "it is not under way");
    }
}
