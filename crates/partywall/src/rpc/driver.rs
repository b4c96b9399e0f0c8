//! The state that the threads of a client share: its ring of records, the replies, and the receiver.
//!
//! One lock guards everything. A thread with a call in flight holds the lock while it spins, so a client with one caller takes the lock
//! once for each call. It releases the lock as soon as another thread wants it. Before it sleeps, it takes the receiver out of the
//! state and releases the lock:
//!
//! ```text
//!               lock            spins, nobody wants the lock        unlock
//!   one caller  --|-- call ---------------------------- reply --------|--
//!
//!   others want the lock, or the spin was too short:
//!               --|-- call -- takes the receiver --|   sleeps   |-- puts it back, files the reply --|--
//! ```
//! A thread that finds no room in the ring releases the lock as well: it retries, and sleeps on the link between attempts.
//!
//! An [`ExclusiveClient`](super::ExclusiveClient) keeps the lock between calls as well. What its thread drops then needs the lock that this
//! very thread has. It is noted as a [`LateWish`].

use super::error::CallError;
use super::functions::{ClientFunctions, refusal};
use super::heap::{Block, Heap};
use super::reply::{ReceivedReply, ReleasesBlocks};
use super::sender::CallSender;
use super::slots::{CallStep, ConnectionEnd, Slots};
use super::view::PeerHeap;
use crate::domain::lock;
use crate::rx::StreamRx;
use crate::{Error, PeerInfo, Result};
use partywall_shm::call::{CallBytes, CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

type CallResult<T> = std::result::Result<T, CallError>;
pub(crate) type Held<'a> = MutexGuard<'a, ClientState>;

/// Looks for a record while the lock is held. More would not be noticed by a single caller, and less would have it release the lock.
const LOOKS: u32 = 64;
/// The longest sleep of a thread that waits for room before it makes another attempt.
const ROOM_NAP: Duration = Duration::from_millis(100);

pub(crate) struct ClientCore {
    state: Mutex<ClientState>,
    /// Threads that wait for the lock of the state.
    contenders: AtomicU32,
    /// Waited on by threads whose replies another thread receives.
    turn: Condvar,
    /// Waited on by threads that want room while another thread waits for it.
    room: Condvar,
    /// The link of the ring that is written: readable when an attempt to write is worth repeating.
    room_link: OwnedFd,
    pub(crate) heap: Heap,
    pub(crate) peer_heap: PeerHeap,
    pub(crate) timeout: Option<Duration>,
    pub(crate) peer: PeerInfo,
    /// What the server may call back; `None` if this client takes no calls.
    functions: Option<ClientFunctions>,
    /// The thread that keeps the lock between two calls ([`this_thread`]); 0 if none does.
    keeper: AtomicUsize,
    /// What the thread that keeps the lock has asked for without it. Only that thread stores and takes this.
    late: Mutex<Vec<LateWish>>,
    /// Whether `late` has anything.
    has_late: AtomicBool,
}

/// What a thread asks for while it keeps the lock itself.
enum LateWish {
    /// To give a block of the server's back.
    Release(u64),
    /// To give a call up.
    GiveUp(u32),
}

thread_local! {
    static HERE: u8 = const { 0 };
}

/// The error of a call by a thread that keeps the lock.
#[cold]
pub(crate) fn kept_here() -> CallError {
    CallError::Refused("this thread holds the client: make the call by its ExclusiveClient".into())
}

/// A number that no other thread has meanwhile, and not 0.
fn this_thread() -> usize {
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

pub(crate) struct ClientState {
    pub(crate) sender: CallSender,
    /// `None` while a thread receives without the lock.
    receiver: Option<Box<CallReceiver>>,
    pub(crate) slots: Slots,
    /// Threads that wait until another thread has received.
    waiters: usize,
    /// Threads that wait for room, with the one that sleeps on the link.
    queue: usize,
    is_room_awaited: bool,
}

impl fmt::Debug for ClientCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCore").field("peer", &self.peer.name).finish_non_exhaustive()
    }
}

/// The receiving half of the server's records.
#[derive(Debug)]
pub(crate) struct CallReceiver {
    rx: StreamRx,
    heap: PeerHeap,
    /// The last record.
    record: CallRecord,
}

/// A record of the server's, judged.
pub(crate) enum ServerRecord {
    Reply(u32, ReceivedReply),
    CallBack(CallRecord),
    /// It was about the server's heap, and is done.
    Memory,
}

pub(crate) type Received = Result<ServerRecord>;

impl CallReceiver {
    #[cfg(feature = "tokio")]
    pub(crate) fn new(rx: StreamRx, heap: PeerHeap) -> Self {
        Self { rx, heap, record: CallRecord::BLANK }
    }

    /// Receives one record if there is one; for a half that does not block.
    #[cfg(feature = "tokio")]
    pub(crate) fn receive_now(&mut self) -> Received {
        self.next()?;
        self.judge()
    }

    /// Ends the connection: the server broke the protocol.
    #[cfg(feature = "tokio")]
    pub(crate) fn blame(&mut self, what: Corrupt) {
        self.rx.blame(what);
    }

    /// Receives one record, and waits for it at most until the deadline.
    fn receive(&mut self, deadline: Option<Instant>) -> Result<()> {
        self.rx.waiter.timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        self.next()
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        match self.rx.next_record_to(&mut self.record)? {
            true => Ok(()),
            false => Err(Error::Closed("the server has closed the connection")),
        }
    }

    #[inline]
    fn judge(&self) -> Received {
        let record = &self.record;
        match (record.kind, &record.bytes) {
            (RecordKind::Reply, _) => Ok(ServerRecord::Reply(record.id, ReceivedReply::judge(record, &self.heap)?)),
            (RecordKind::Call, _) => Ok(ServerRecord::CallBack(*record)),
            (RecordKind::Segment, CallBytes::Reference { address, len }) => {
                self.heap.admit(record.id, *address, *len).map(|()| ServerRecord::Memory)
            }
            _ => Err(Corrupt::BadRecord.into()),
        }
    }
}

impl ClientCore {
    pub(crate) fn new(
        sender: CallSender,
        rx: StreamRx,
        room_link: OwnedFd,
        heap: Heap,
        peer_heap: PeerHeap,
        timeout: Option<Duration>,
        functions: Option<ClientFunctions>,
    ) -> Self {
        let peer = rx.endpoint().info().clone();
        let receiver = Some(Box::new(CallReceiver { rx, heap: peer_heap.clone(), record: CallRecord::BLANK }));
        let slots = Slots::default();
        let state = ClientState { sender, receiver, slots, waiters: 0, queue: 0, is_room_awaited: false };
        Self {
            state: Mutex::new(state),
            contenders: AtomicU32::new(0),
            turn: Condvar::new(),
            room: Condvar::new(),
            room_link,
            heap,
            peer_heap,
            timeout,
            peer,
            functions,
            keeper: AtomicUsize::new(0),
            late: Mutex::default(),
            has_late: AtomicBool::new(false),
        }
    }

    /// Takes the lock; `None` if this thread keeps it.
    #[inline]
    pub(crate) fn enter_unless_kept(&self) -> Option<Held<'_>> {
        match self.try_enter() {
            // A thread reads its own number only if it has stored it.
            None if self.keeper.load(Ordering::Relaxed) == this_thread() => None,
            None => Some(self.contend()),
            entered => entered,
        }
    }

    /// This thread keeps the lock from here on, until [`ClientCore::resume`].
    #[inline]
    pub(crate) fn keep(&self, _: &Held<'_>) {
        self.keeper.store(this_thread(), Ordering::Relaxed);
    }

    /// The thread that has kept the lock makes a call, which may release it.
    #[inline]
    pub(crate) fn resume<'a>(&self, mut state: Held<'a>) -> Held<'a> {
        self.keeper.store(0, Ordering::Relaxed);
        if self.has_late.load(Ordering::Relaxed) {
            self.fulfil(&mut state);
        }
        state
    }

    #[cold]
    fn fulfil(&self, state: &mut ClientState) {
        self.has_late.store(false, Ordering::Relaxed);
        for wish in std::mem::take(&mut *lock(&self.late)) {
            match wish {
                LateWish::Release(address) => state.release(address),
                LateWish::GiveUp(id) => state.give_up(id),
            }
        }
    }

    #[cold]
    fn postpone(&self, wish: LateWish) {
        lock(&self.late).push(wish);
        self.has_late.store(true, Ordering::Relaxed);
    }

    /// Takes the lock. A thread that spins with it in its hand releases it for this one.
    #[inline]
    pub(crate) fn enter(&self) -> Held<'_> {
        self.try_enter().unwrap_or_else(|| self.contend())
    }

    /// Takes the lock if no thread has it.
    #[inline]
    fn try_enter(&self) -> Option<Held<'_>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[cold]
    fn contend(&self) -> Held<'_> {
        self.contenders.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.contenders.fetch_sub(1, Ordering::Relaxed);
        state
    }

    pub(crate) fn deadline(&self, longest: Option<Duration>) -> Option<Instant> {
        longest.or(self.timeout).and_then(|longest| Instant::now().checked_add(longest))
    }

    /// Waits until `ready` finds something, receiving replies meanwhile, or letting another thread do so.
    #[inline]
    pub(crate) fn drive<'a, T>(
        &'a self,
        mut state: Held<'a>,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&mut Slots) -> Option<T>,
    ) -> (Held<'a>, CallResult<T>) {
        loop {
            if let Some(found) = ready(&mut state.slots) {
                self.pass_turn(&state);
                return (state, Ok(found));
            }
            if let Some(error) = state.slots.ended.as_ref().map(ConnectionEnd::error) {
                return (state, Err(error));
            }
            let Some(mut receiver) = state.receiver.take() else {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return (state, Err(CallError::TimedOut));
                }
                state = self.wait_for_turn(state, deadline);
                continue;
            };
            let received = if receiver.rx.spin_for_record(LOOKS, || self.contenders.load(Ordering::Relaxed) == 0) {
                receiver.receive(None)
            } else {
                drop(state);
                let received = receiver.receive(deadline);
                state = self.enter();
                received
            };
            match self.file(&mut state, &mut receiver, received) {
                true => state.receiver = Some(receiver),
                false => {
                    state.receiver = Some(receiver);
                    self.pass_turn(&state);
                    let found = ready(&mut state.slots).ok_or(CallError::TimedOut);
                    return (state, found);
                }
            }
        }
    }

    /// Files what was received. `false` if time is up.
    #[inline]
    fn file(&self, state: &mut ClientState, receiver: &mut CallReceiver, received: Result<()>) -> bool {
        let filed = match received.and_then(|()| receiver.judge()) {
            Ok(ServerRecord::Reply(id, outcome)) => state.slots.deliver(id, outcome).map_err(Error::Corrupt),
            Ok(ServerRecord::CallBack(record)) => self.file_call_back(state, record).map(|()| None),
            Ok(ServerRecord::Memory) => Ok(None),
            Err(e) => Err(e),
        };
        if !state.slots.refused.is_empty() {
            state.refuse();
        }
        match filed {
            Ok(None) => {}
            Ok(Some(unwanted)) => state.release(unwanted),
            Err(Error::TimedOut) => return false,
            Err(e) => {
                let end = ConnectionEnd::from_error(&e);
                if let ConnectionEnd::Corrupt(what) = end {
                    receiver.rx.blame(what);
                }
                state.slots.ended = Some(end);
            }
        }
        if state.waiters > 0 {
            // The reply may be another thread's.
            self.turn.notify_all();
        }
        true
    }

    #[cold]
    fn file_call_back(&self, state: &mut ClientState, record: CallRecord) -> Result<()> {
        // A server has at most one call back for each call, so one that has more does not wait for replies (protocol K8.1).
        if self.functions.is_none() || state.sender.owed_replies() >= super::WINDOW {
            return Err(Corrupt::BadRecord.into());
        }
        state.slots.call_back(record).map_err(Error::Corrupt)
    }

    /// Executes a call back without the lock, and replies.
    #[cold]
    fn execute<'a>(&'a self, state: Held<'a>, record: &CallRecord, deadline: Option<Instant>) -> Held<'a> {
        drop(state);
        // A record is filed only if there are functions.
        let executed = self.functions.as_ref().map(|own| own.server.reply(record.id, own.execute(record)));
        let mut state = self.enter();
        let Some((reply, lent)) = executed else { return state };
        state.slots.end_call_back(record.id, lent);
        let (mut state, sent) = self.send(state, &reply, deadline);
        if matches!(sent, Err(Error::TimedOut)) {
            state.sender.owe(reply, false);
        }
        state
    }

    /// Fails on a thread that executes a call back of this connection.
    #[inline]
    fn check_thread(&self) -> CallResult<()> {
        self.functions.as_ref().map_or(Ok(()), ClientFunctions::check_thread)
    }

    /// A thread that receives no more lets another one receive.
    #[inline]
    fn pass_turn(&self, state: &ClientState) {
        if state.waiters > 0 && state.receiver.is_some() {
            self.turn.notify_one();
        }
    }

    fn wait_for_turn<'a>(&self, mut state: Held<'a>, deadline: Option<Instant>) -> Held<'a> {
        state.waiters += 1;
        let mut state = wait_on(&self.turn, state, deadline);
        state.waiters -= 1;
        state
    }

    /// Begins a call: returns its id, and the byte of the stream where its record begins.
    #[inline]
    pub(crate) fn begin<'a>(
        &'a self,
        state: Held<'a>,
        deadline: Option<Instant>,
        method: u32,
        (bytes, arguments): (CallBytes, Option<Block>),
    ) -> (Held<'a>, CallResult<(u32, u64)>) {
        if let Err(e) = self.check_thread() {
            return (state, Err(e));
        }
        let (mut state, opened) = self.drive(state, deadline, |slots| {
            // A connection that has ended takes no call, though its answers can still be had.
            let may_begin = slots.unanswered < super::WINDOW && slots.ended.is_none();
            may_begin.then(|| slots.open())
        });
        let id = match opened {
            Ok(id) => id,
            Err(e) => return (state, Err(e)),
        };
        if arguments.is_some() {
            state.slots.keep(id, arguments);
        }
        let record = CallRecord { kind: RecordKind::Call, id, method, status: 0, bytes };
        let (mut state, sent) = self.send(state, &record, deadline);
        match sent {
            Ok(position) => (state, Ok((id, position))),
            Err(e) => {
                if let Some(address) = state.slots.withdraw(id) {
                    state.release(address);
                }
                (state, Err(e.into()))
            }
        }
    }

    /// Waits for the answer to a call whose record begins at this byte of the stream.
    #[inline]
    pub(crate) fn finish<'a>(
        &'a self,
        state: Held<'a>,
        deadline: Option<Instant>,
        id: u32,
        position: u64,
    ) -> (Held<'a>, CallResult<ReceivedReply>) {
        let mut state = state;
        loop {
            let step;
            (state, step) = match self.check_thread() {
                Ok(()) => self.drive(state, deadline, |slots| slots.take_step(id)),
                Err(e) => (state, Err(e)),
            };
            let record = match step {
                Ok(CallStep::Answered(reply)) => return (state, Ok(reply)),
                Ok(CallStep::CalledBack(record)) => record,
                Err(e) => {
                    let e = state.seen(e, position);
                    return (state, Err(e));
                }
            };
            state = self.execute(state, &record, deadline);
            // Calls back without end let no wait time out.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let answer = state.slots.take_answer(id).ok_or(CallError::TimedOut);
                return (state, answer);
            }
        }
    }

    /// [`ClientCore::finish`], and gives the call up if that fails.
    #[inline]
    pub(crate) fn finish_or_give_up<'a>(
        &'a self,
        state: Held<'a>,
        deadline: Option<Instant>,
        id: u32,
        position: u64,
    ) -> (Held<'a>, CallResult<ReceivedReply>) {
        let (mut state, outcome) = self.finish(state, deadline, id, position);
        if outcome.is_err() {
            state.give_up(id);
        }
        (state, outcome)
    }

    /// A whole call.
    #[inline]
    pub(crate) fn call<'a>(
        &'a self,
        state: Held<'a>,
        deadline: Option<Instant>,
        method: u32,
        prepared: (CallBytes, Option<Block>),
    ) -> (Held<'a>, CallResult<ReceivedReply>) {
        match self.begin(state, deadline, method, prepared) {
            (state, Ok((id, position))) => self.finish_or_give_up(state, deadline, id, position),
            (state, Err(e)) => (state, Err(e)),
        }
    }

    /// Sends a record. A thread that waits for room does so without the lock, and no longer than until its deadline.
    #[inline]
    pub(crate) fn send<'a>(
        &'a self,
        mut state: Held<'a>,
        record: &CallRecord,
        deadline: Option<Instant>,
    ) -> (Held<'a>, Result<u64>) {
        // Threads that have waited longer come first.
        if state.queue == 0 {
            match state.sender.send(record) {
                Err(Error::WouldBlock) => {}
                sent => return (state, sent),
            }
        }
        self.send_when_there_is_room(state, record, deadline)
    }

    #[cold]
    fn send_when_there_is_room<'a>(
        &'a self,
        mut state: Held<'a>,
        record: &CallRecord,
        deadline: Option<Instant>,
    ) -> (Held<'a>, Result<u64>) {
        let is_late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        state.queue += 1;
        while state.is_room_awaited && !is_late() {
            state = wait_on(&self.room, state, deadline);
        }
        let has_turn = !state.is_room_awaited;
        state.is_room_awaited = true;
        let sent = loop {
            if !has_turn {
                break Err(Error::TimedOut);
            }
            // The attempt has stored this side's wish for room, so the link's descriptor becomes readable.
            match state.sender.send(record) {
                Err(Error::WouldBlock) if is_late() => break Err(Error::TimedOut),
                Err(Error::WouldBlock) => {
                    drop(state);
                    self.sleep_for_room(deadline);
                    state = self.enter();
                }
                sent => break sent,
            }
        };
        state.queue -= 1;
        if has_turn {
            state.is_room_awaited = false;
            self.room.notify_one();
        }
        (state, sent)
    }

    fn sleep_for_room(&self, deadline: Option<Instant>) {
        let left = deadline.map_or(ROOM_NAP, |deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.min(ROOM_NAP);
        let longest = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        // Interrupted or not: an attempt follows.
        let _ = poll(&mut [PollFd::new(&self.room_link, PollFlags::IN)], Some(&longest));
    }

    /// The caller of a call does not wait for its answer any more.
    pub(crate) fn give_up(&self, id: u32) {
        match self.enter_unless_kept() {
            Some(mut state) => state.give_up(id),
            None => self.postpone(LateWish::GiveUp(id)),
        }
    }
}

impl ReleasesBlocks for ClientCore {
    fn release(&self, address: u64) {
        match self.enter_unless_kept() {
            Some(mut state) => state.release(address),
            None => self.postpone(LateWish::Release(address)),
        }
    }
}

impl ClientState {
    /// The caller of a call does not wait for its answer any more.
    pub(crate) fn give_up(&mut self, id: u32) {
        match self.slots.take_answer(id) {
            None => {
                self.slots.abandon(id);
                self.refuse();
            }
            Some(ReceivedReply { held: Some(address), .. }) => self.release(address),
            Some(_) => {}
        }
    }

    /// Gives a block of the server's back.
    fn release(&mut self, address: u64) {
        // An attempt of this thread would take the ring of the doorbell for which another thread sleeps.
        let may_send = self.queue == 0;
        self.sender.release(address, may_send);
    }

    /// Answers the calls back that no thread executes.
    #[cold]
    fn refuse(&mut self) {
        let may_send = self.queue == 0;
        while let Some(id) = self.slots.refused.pop() {
            self.sender.owe(refusal(id), may_send);
        }
    }

    /// Fills in whether the server had taken the call that begins at this byte of the stream.
    fn seen(&mut self, error: CallError, position: u64) -> CallError {
        let seen = self.sender.tx.is_taken(position);
        error.with_seen(seen)
    }
}

fn wait_on<'a>(condition: &Condvar, state: Held<'a>, deadline: Option<Instant>) -> Held<'a> {
    match deadline {
        None => condition.wait(state).unwrap_or_else(PoisonError::into_inner),
        Some(deadline) => {
            let left = deadline.saturating_duration_since(Instant::now());
            condition.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
        }
    }
}
