//! What the calls of a connection share with the task that drives it, and the functions that its server calls back.
//!
//! One lock guards the ring of records and the replies, and nobody keeps it while waiting. Each call that is polled takes what has arrived,
//! also for other calls, and wakes those. The connection's task does the same whenever the descriptor becomes readable.

use super::functions::TaskMethods;
use super::{copied_len, make_room};
use crate::domain::lock;
use crate::rpc::WINDOW;
use crate::rpc::calling_peer::CallingPeer;
use crate::rpc::driver::{CallReceiver, ServerRecord};
use crate::rpc::error::CallError;
use crate::rpc::functions::refusal;
use crate::rpc::heap::Heap;
use crate::rpc::methods::MOST_FOLLOWS;
use crate::rpc::reply::ReceivedReply;
use crate::rpc::sender::CallSender;
use crate::rpc::slots::{CallStep, ConnectionEnd, Slots};
use crate::rpc::view::PeerHeap;
use crate::{Error, Result};
use partywall_shm::call::CallRecord;
use partywall_shm::corrupt::Corrupt;
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Poll, Waker};
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

/// What calls share with the connection's task.
pub(super) struct SharedCalls {
    pub(super) state: Mutex<CallsState>,
    /// A permit for each call that may be begun.
    pub(super) window: Semaphore,
    /// Told when there may be room in the ring.
    pub(super) room: Notify,
    pub(super) heap: Heap,
    pub(super) peer_heap: PeerHeap,
    /// `None` if the server may not call back.
    pub(super) functions: Option<TaskFunctions>,
}

/// The functions of a client, each of which a task executes when the server calls it back.
pub(super) struct TaskFunctions {
    pub(super) methods: TaskMethods,
    pub(super) server: Arc<CallingPeer>,
    pub(super) runtime: Handle,
    /// Aborted with the client.
    pub(super) running: Mutex<JoinSet<()>>,
    /// The connection, for those tasks.
    pub(super) shared: Weak<SharedCalls>,
}

tokio::task_local! {
    /// The connection whose server waits for the function that this task executes.
    static CALLED_BACK: Weak<SharedCalls>;
}

impl TaskFunctions {
    /// Begins to execute a call back.
    pub(super) fn spawn(&self, record: CallRecord) {
        let (methods, server, shared) = (self.methods.clone(), Arc::clone(&self.server), self.shared.clone());
        let executing = CALLED_BACK.scope(self.shared.clone(), async move {
            let result = methods.execute(&record, &server, MOST_FOLLOWS, None).await;
            // An answer that finds no memory says so.
            let _ = make_room(&server.heap, copied_len(&result)).await;
            let (reply, mut lent) = server.reply(record.id, result);
            let Some(shared) = shared.upgrade() else { return };
            // A connection that has ended takes no reply.
            let _ = when_there_is_room(&shared, |state| {
                let sent = state.sender.send(&reply);
                if !matches!(sent, Err(Error::WouldBlock)) {
                    state.called_back -= 1;
                    state.slots.end_call_back(record.id, lent.take());
                }
                sent
            })
            .await;
        });
        let mut running = lock(&self.running);
        while running.try_join_next().is_some() {}
        running.spawn_on(executing, &self.runtime);
    }
}

/// Fails in a function that is called back: the server executes no other call before it is answered (protocol K8.6).
pub(super) fn check_task(shared: &Arc<SharedCalls>) -> std::result::Result<(), CallError> {
    let is_same = |other: &Weak<SharedCalls>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(shared));
    if CALLED_BACK.try_with(is_same).unwrap_or(false) {
        let why = "a function that is called back cannot wait for a call of the same connection, because the server waits for the function";
        return Err(CallError::Refused(why.into()));
    }
    Ok(())
}

/// What the lock of a connection guards.
pub(super) struct CallsState {
    pub(super) sender: CallSender,
    pub(super) receiver: CallReceiver,
    pub(super) slots: Slots,
    /// Calls that are to be woken by their replies.
    pub(super) wakers: HashMap<u32, Waker>,
    /// Calls back that this side has not answered.
    pub(super) called_back: usize,
    /// Those of them whose replies are here. They are woken without the lock, since what that does is not known.
    pub(super) woken: Vec<Waker>,
}

impl SharedCalls {
    /// Takes everything that has arrived. `true` once nothing more will come.
    ///
    /// It ends: the server may answer the calls that are under way, and no other begins meanwhile.
    pub(super) fn receive(&self, state: &mut CallsState) -> bool {
        while state.slots.ended.is_none() {
            let filed = match state.receiver.receive_now() {
                Ok(ServerRecord::Reply(id, outcome)) => self.file(state, id, outcome),
                Ok(ServerRecord::CallBack(record)) => self.file_call_back(state, record),
                Ok(ServerRecord::Memory) => Ok(()),
                Err(Error::WouldBlock) => return false,
                Err(e) => Err(e),
            };
            if let Err(e) = filed {
                let end = ConnectionEnd::from_error(&e);
                if let ConnectionEnd::Corrupt(what) = end {
                    state.receiver.blame(what);
                }
                self.end(state, end);
            }
        }
        true
    }

    fn file(&self, state: &mut CallsState, id: u32, outcome: ReceivedReply) -> Result<()> {
        let unwanted = state.slots.deliver(id, outcome).map_err(Error::Corrupt)?;
        self.window.add_permits(1);
        if let Some(address) = unwanted {
            state.sender.release(address, true);
        }
        state.woken.extend(state.wakers.remove(&id));
        Ok(())
    }

    /// Begins a call back, or refuses one whose caller has given its call up.
    fn file_call_back(&self, state: &mut CallsState, record: CallRecord) -> Result<()> {
        let functions = self.functions.as_ref().ok_or(Corrupt::BadRecord)?;
        // A server has no more calls back unanswered (protocol K8.4).
        if state.sender.owed_replies() >= WINDOW || state.called_back >= WINDOW {
            return Err(Corrupt::BadRecord.into());
        }
        state.slots.call_back(record)?;
        while let Some(id) = state.slots.refused.pop() {
            state.sender.owe(refusal(id), true);
        }
        if let Some(CallStep::CalledBack(record)) = state.slots.take_step(record.id) {
            state.called_back += 1;
            functions.spawn(record);
        }
        Ok(())
    }

    /// Nothing more will come: everyone who waits is woken.
    fn end(&self, state: &mut CallsState, end: ConnectionEnd) {
        state.slots.ended.get_or_insert(end);
        state.woken.extend(state.wakers.drain().map(|(_, waker)| waker));
        self.window.close();
        self.room.notify_waiters();
    }

    /// The same with the lock taken here. The calls whose replies have arrived are woken.
    fn receive_and_wake(&self) -> bool {
        let mut state = lock(&self.state);
        let has_ended = self.receive(&mut state);
        wake(state);
        has_ended
    }

    /// Why the connection has ended.
    pub(super) fn error_of_end(&self) -> CallError {
        lock(&self.state).slots.ended.as_ref().unwrap_or(&ConnectionEnd::Failed).error()
    }
}

/// Releases the lock and wakes the calls that have their replies.
pub(super) fn wake(mut state: MutexGuard<'_, CallsState>) {
    let woken = std::mem::take(&mut state.woken);
    drop(state);
    woken.into_iter().for_each(Waker::wake);
}

/// Ends the connection's calls when its task ends, for whatever reason.
struct TaskEnd(Weak<SharedCalls>);

impl Drop for TaskEnd {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            let mut state = lock(&shared.state);
            shared.end(&mut state, ConnectionEnd::Failed);
            wake(state);
        }
    }
}

/// The task of a connection: receives whenever there is something, and tells those who wait for room.
pub(super) async fn drive(shared: Weak<SharedCalls>, arrivals: AsyncFd<OwnedFd>, room: AsyncFd<OwnedFd>) {
    let end = TaskEnd(shared);
    let mut watches_room = true;
    loop {
        // The client is kept no longer than this, so that dropping it closes the connection.
        match end.0.upgrade() {
            Some(shared) if !shared.receive_and_wake() => {}
            _ => return,
        }
        let has_failed = poll_fn(|cx| {
            while watches_room && let Poll::Ready(ready) = room.poll_read_ready(cx) {
                // A link that has hung up stays ready. Attempts to send then fail at once.
                watches_room = match ready {
                    Ok(mut guard) => {
                        let has_hung_up = guard.ready().is_read_closed();
                        guard.clear_ready();
                        !has_hung_up
                    }
                    Err(_) => false,
                };
                if let Some(shared) = end.0.upgrade() {
                    shared.room.notify_waiters();
                }
            }
            arrivals.poll_read_ready(cx).map(|ready| ready.map(|mut guard| guard.clear_ready()).is_err())
        });
        if has_failed.await {
            return;
        }
    }
}

/// Makes attempts to send until one finds room.
pub(super) async fn when_there_is_room<T>(
    shared: &SharedCalls,
    mut attempt: impl FnMut(&mut CallsState) -> Result<T>,
) -> std::result::Result<T, CallError> {
    loop {
        // Told from here on: an attempt that fails has asked the server to say when there is room.
        let mut room = pin!(shared.room.notified());
        room.as_mut().enable();
        {
            let mut state = lock(&shared.state);
            if let Some(end) = &state.slots.ended {
                return Err(end.error());
            }
            match attempt(&mut state) {
                Err(Error::WouldBlock) => {}
                done => {
                    // This attempt may have taken the ring of the doorbell that another one waits for.
                    shared.room.notify_waiters();
                    return done.map_err(CallError::from);
                }
            }
        }
        room.await;
    }
}
