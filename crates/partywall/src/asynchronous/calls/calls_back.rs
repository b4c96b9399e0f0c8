//! Calls back of a server of tasks (protocol K8): those of all calls of one client.

use super::make_room;
use crate::domain::lock;
use crate::rpc::WINDOW;
use crate::rpc::calling_peer::CallingPeer;
use crate::rpc::error::CallError;
use crate::rpc::heap::Block;
use crate::rpc::incoming::CallsBackLater;
use crate::rpc::reply::ReceivedReply;
use crate::rpc::reply_side::ReplySide;
use crate::rpc::sender::prepare;
use crate::rpc::slots::{ConnectionEnd, MOST_CALLS_BACK};
use crate::rpc::view::PeerView;
use crate::{Error, Result};
use partywall_shm::call::{CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

type CallResult<T> = std::result::Result<T, CallError>;

/// The calls back to one client.
pub(super) struct ClientCallsBack {
    client: Arc<CallingPeer>,
    replies: Arc<Mutex<ReplySide>>,
    takes_calls: bool,
    state: Mutex<CallsBackState>,
}

#[derive(Default)]
struct CallsBackState {
    /// By the ids of their calls.
    under_way: HashMap<u32, UnderWay>,
    /// Those that a function waits for.
    awaited: usize,
    /// The client's task, to be woken when it is to receive.
    receiver: Option<Waker>,
    is_flooded: bool,
    /// The connection has failed.
    error: Option<Error>,
}

enum UnderWay {
    /// With the arguments, if they were copied to the heap.
    Awaited(Option<Waker>, Option<Block>),
    /// The answer, which its function has not taken yet.
    Over(ReceivedReply),
    /// The client has still to answer, and may read the arguments until then.
    GivenUp { _arguments: Option<Block> },
}

const GIVEN_UP: &str = "the function has returned, or the client sends other calls and does not answer a call back";

fn refused(why: &str) -> CallError {
    CallError::Refused(why.into())
}

impl ClientCallsBack {
    pub(super) fn new(client: Arc<CallingPeer>, replies: Arc<Mutex<ReplySide>>, takes_calls: bool) -> Arc<Self> {
        Arc::new(Self { client, replies, takes_calls, state: Mutex::default() })
    }

    /// Whether a function waits for an answer of the client. If none does, the task is woken when one begins to.
    ///
    /// None begins while the client has sent too many other records (protocol K8.5).
    pub(super) fn awaits_answer(&self, receiver: &Waker, is_flooded: bool) -> Result<bool> {
        let mut state = lock(&self.state);
        state.is_flooded = is_flooded;
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        state.receiver = Some(receiver.clone());
        Ok(state.awaited > 0)
    }

    /// Takes a *reply* of the client.
    pub(super) fn take(&self, record: &CallRecord) -> Result<()> {
        let mut state = lock(&self.state);
        match state.under_way.remove(&record.id) {
            Some(UnderWay::GivenUp { .. }) => Ok(()),
            Some(UnderWay::Awaited(waker, _)) => {
                state.awaited -= 1;
                let reply = ReceivedReply::judge(record, &self.client.peer_heap).map_err(Error::Corrupt)?;
                state.under_way.insert(record.id, UnderWay::Over(reply));
                drop(state);
                waker.into_iter().for_each(Waker::wake);
                Ok(())
            }
            Some(UnderWay::Over(_)) | None => Err(Corrupt::BadRecord.into()),
        }
    }

    /// Gives all calls back up, because the client sends too many other records meanwhile (protocol K8.5).
    pub(super) fn give_up_all(&self) {
        let mut state = lock(&self.state);
        let awaited = |(id, one): (&u32, &UnderWay)| matches!(one, UnderWay::Awaited(..)).then_some(*id);
        let ids: Vec<u32> = state.under_way.iter().filter_map(awaited).collect();
        let wakers: Vec<Waker> = ids.into_iter().filter_map(|id| state.give_up(id)).collect();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl CallsBackState {
    /// Gives up one that is awaited. Returns the waker of its function.
    fn give_up(&mut self, id: u32) -> Option<Waker> {
        let one = self.under_way.get_mut(&id)?;
        let UnderWay::Awaited(waker, arguments) = one else { return None };
        let (waker, _arguments) = (waker.take(), arguments.take());
        *one = UnderWay::GivenUp { _arguments };
        self.awaited -= 1;
        waker
    }

    /// Its function takes no answer any more, also one that has come. Returns the waker of the function.
    fn leave(&mut self, id: u32) -> Option<Waker> {
        let waker = self.give_up(id);
        if matches!(self.under_way.get(&id), Some(UnderWay::Over(_))) {
            self.under_way.remove(&id);
        }
        waker
    }
}

/// The calls back of one call.
pub(super) struct CallOfTask {
    all: Arc<ClientCallsBack>,
    id: u32,
    /// One after the other (protocol K8.7). The number of them so far.
    turn: tokio::sync::Mutex<u32>,
    /// The function has returned. Guarded by the lock of all calls back.
    is_over: AtomicBool,
}

/// Gives the call back up if its future is dropped.
struct Awaiting<'a>(&'a CallOfTask);

impl Drop for Awaiting<'_> {
    fn drop(&mut self) {
        let _waker = lock(&self.0.all.state).leave(self.0.id);
    }
}

/// Ends the calls back of a call when its function has returned, or is dropped.
pub(super) struct EndOfCall(pub(super) Arc<CallOfTask>);

impl Drop for EndOfCall {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl CallOfTask {
    pub(super) fn new(all: &Arc<ClientCallsBack>, id: u32) -> Arc<Self> {
        Arc::new(Self {
            all: Arc::clone(all),
            id,
            turn: tokio::sync::Mutex::default(),
            is_over: AtomicBool::new(false),
        })
    }

    /// The function has returned: it is answered next, and calls nothing back any more.
    fn end(&self) {
        let mut state = lock(&self.all.state);
        self.is_over.store(true, Ordering::Relaxed);
        let waker = state.leave(self.id);
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    fn begin(&self, method: u32, (bytes, copied): super::Prepared) -> CallResult<()> {
        let all = &self.all;
        let mut state = lock(&all.state);
        if self.is_over.load(Ordering::Relaxed) {
            return Err(refused("the function has returned, so its call cannot call back"));
        }
        if state.under_way.contains_key(&self.id) {
            return Err(refused("the client has not answered an earlier call back of this call yet"));
        }
        if state.is_flooded {
            return Err(refused(GIVEN_UP));
        }
        if state.under_way.len() >= WINDOW {
            return Err(refused("the client leaves too many calls back unanswered"));
        }
        let record = CallRecord { kind: RecordKind::Call, id: self.id, method, status: 0, bytes };
        // A client has room for it, or too many calls (protocol K4).
        if let Err(e) = lock(&all.replies).send(&record) {
            let error = ConnectionEnd::from_error(&e).error();
            state.error = Some(e);
            let receiver = state.receiver.take();
            drop(state);
            receiver.into_iter().for_each(Waker::wake);
            return Err(error);
        }
        state.under_way.insert(self.id, UnderWay::Awaited(None, copied));
        state.awaited += 1;
        let receiver = state.receiver.take();
        drop(state);
        receiver.into_iter().for_each(Waker::wake);
        Ok(())
    }

    async fn call_back(&self, method: u32, arguments: &[u8]) -> CallResult<PeerView> {
        let all = &self.all;
        if !all.takes_calls {
            return Err(refused("the client takes no calls back: give it methods (CallClientBuilder::method)"));
        }
        let mut made = self.turn.lock().await;
        if *made >= MOST_CALLS_BACK {
            return Err(refused("a call may call back 65,536 times"));
        }
        *made += 1;
        let heap = &all.client.heap;
        if !heap.holds(arguments) {
            make_room(heap, arguments.len()).await?;
        }
        self.begin(method, prepare(heap, arguments)?)?;
        let awaiting = Awaiting(self);
        let reply = poll_fn(|cx| {
            let mut state = lock(&all.state);
            match state.under_way.get_mut(&self.id) {
                Some(UnderWay::Awaited(waker, _)) => {
                    *waker = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                Some(UnderWay::Over(_)) => {}
                Some(UnderWay::GivenUp { .. }) | None => return Poll::Ready(Err(refused(GIVEN_UP))),
            }
            match state.under_way.remove(&self.id) {
                Some(UnderWay::Over(reply)) => Poll::Ready(Ok(reply)),
                _ => Poll::Ready(Err(refused(GIVEN_UP))),
            }
        });
        let ReceivedReply { status, code, view, .. } = reply.await?;
        drop(awaiting);
        status.error(code, &view).map_or(Ok(view), Err)
    }
}

impl CallsBackLater for CallOfTask {
    fn call_back<'a>(
        &'a self,
        method: u32,
        arguments: &'a [u8],
    ) -> Pin<Box<dyn Future<Output = CallResult<PeerView>> + Send + 'a>> {
        Box::pin(self.call_back(method, arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::further::Regions;
    use crate::rpc::view::PeerHeap;

    #[test]
    fn answer_that_its_function_left_is_forgotten() {
        let heap = PeerHeap::new(Regions::of(None), false);
        let reply = ReceivedReply::judge(&CallRecord::BLANK, &heap).unwrap();
        let mut state = CallsBackState::default();
        state.under_way.insert(1, UnderWay::Over(reply));
        state.under_way.insert(2, UnderWay::GivenUp { _arguments: None });
        for id in [1, 2, 3] {
            assert!(state.leave(id).is_none());
        }
        assert_eq!(state.under_way.keys().collect::<Vec<_>>(), [&2], "the client has still to answer this one");
    }
}
