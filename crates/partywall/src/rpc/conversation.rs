//! A server's connection to one client: the records of both directions, and calls back to the client while one of its calls is executed.
//!
//! ```text
//!   client                                 server
//!     call 7 ------------------------------> function begins
//!     executes, on the thread that waits <-- call back, with the id 7
//!     reply 7 -----------------------------> function goes on
//!            <------------------------------ reply 7
//! ```
//! A call has at most one call back under way, so the id of the call names it as well (protocol K8). While the function waits for the
//! reply, other calls of the client arrive. They are kept, and executed later in their order.

use super::WINDOW;
use super::calling_peer::CallingPeer;
use super::error::CallError;
use super::heap::Block;
use super::incoming::CallsBack;
use super::reply::ReceivedReply;
use super::reply_side::ReplySide;
use super::sender::prepare;
use super::slots::{ConnectionEnd, MOST_CALLS_BACK};
use super::view::PeerView;
use crate::domain::lock;
use crate::rx::StreamRx;
use crate::{Error, Result};
use partywall_shm::call::{CallRecord, RecordKind};
use partywall_shm::corrupt::Corrupt;
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::Instant;

type CallResult<T> = std::result::Result<T, CallError>;

/// Records of a client that are kept while it executes a call back (protocol K8.5).
pub(crate) const MOST_KEPT: usize = 1024;
const TOO_MANY_KEPT: &str = "the client sends other calls and does not answer a call back";

/// The records of one client, in both directions.
pub(crate) struct Conversation {
    pub(crate) rx: StreamRx,
    pub(crate) replies: ReplySide,
    /// Whether the client takes calls back.
    takes_calls: bool,
    /// Calls and notices that have arrived during a call back.
    kept: VecDeque<CallRecord>,
    /// Calls whose call back this side has given up, with the memory that the client may still read. The client answers each.
    given_up: HashMap<u32, Option<Block>>,
    /// The connection has ended during a call back; `None` in it: in order.
    ended: Option<Option<Error>>,
}

impl Conversation {
    pub(crate) fn new(rx: StreamRx, replies: ReplySide, takes_calls: bool) -> Self {
        Self { rx, replies, takes_calls, kept: VecDeque::new(), given_up: HashMap::new(), ended: None }
    }

    /// Takes the next record of the client; `false` at the end.
    #[inline]
    pub(crate) fn next_to(&mut self, record: &mut CallRecord) -> Result<bool> {
        if let Some(end) = self.ended.take() {
            return end.map_or(Ok(false), Err);
        }
        match self.kept.pop_front() {
            Some(kept) => {
                *record = kept;
                Ok(true)
            }
            None => self.rx.next_record_to(record),
        }
    }

    /// Whether the connection has ended during a call back.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Takes a record that is not a call.
    pub(crate) fn take(&mut self, client: &CallingPeer, record: &CallRecord) -> Result<()> {
        match record.kind {
            RecordKind::Reply => match self.given_up.remove(&record.id) {
                Some(_) => Ok(()),
                None => Err(Corrupt::BadRecord.into()),
            },
            _ => self.replies.take(client, record),
        }
    }

    /// Calls the client back during its call `id`.
    fn call_back(
        &mut self,
        client: &CallingPeer,
        (id, method): (u32, u32),
        arguments: &[u8],
        deadline: Option<Instant>,
    ) -> CallResult<PeerView> {
        if !self.takes_calls {
            return Err(refused("the client takes no calls back: give it methods (CallClientBuilder::method)"));
        }
        if let Some(end) = &self.ended {
            return Err(end_of(end.as_ref()).error());
        }
        if self.given_up.contains_key(&id) {
            return Err(refused("the client has not answered an earlier call back of this call yet"));
        }
        if self.kept.len() >= MOST_KEPT {
            return Err(refused(TOO_MANY_KEPT));
        }
        if self.given_up.len() >= WINDOW {
            return Err(refused("the client leaves too many calls back unanswered"));
        }
        let (bytes, copied) = prepare(&client.heap, arguments)?;
        let record = CallRecord { kind: RecordKind::Call, id, method, status: 0, bytes };
        // A client has room for it, or too many calls (protocol K4).
        let position = match self.replies.send(&record) {
            Ok(position) => position,
            Err(e) => return Err(self.end(e)),
        };
        let outcome = self.wait_for_reply(client, id, deadline);
        self.rx.waiter.timeout = None;
        match outcome {
            Ok(ReceivedReply { status, code, view, .. }) => status.error(code, &view).map_or(Ok(view), Err),
            Err(e) => {
                let has_ended = self.ended.is_some();
                if !has_ended {
                    self.given_up.insert(id, copied);
                }
                let seen = has_ended && self.replies.is_taken(position);
                Err(e.with_seen(seen))
            }
        }
    }

    fn wait_for_reply(
        &mut self,
        client: &CallingPeer,
        id: u32,
        deadline: Option<Instant>,
    ) -> CallResult<ReceivedReply> {
        loop {
            if self.kept.len() >= MOST_KEPT {
                return Err(refused(TOO_MANY_KEPT));
            }
            // Records that are always there let no wait time out. The limit above ends those.
            self.rx.waiter.timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let taken = match self.rx.next_record() {
                Ok(Some(record)) if record.kind == RecordKind::Reply && record.id == id => {
                    match ReceivedReply::judge(&record, &client.peer_heap) {
                        Ok(reply) => return Ok(reply),
                        Err(what) => Err(what.into()),
                    }
                }
                Ok(Some(record)) if matches!(record.kind, RecordKind::Call | RecordKind::Notice) => {
                    self.kept.push_back(record);
                    Ok(())
                }
                Ok(Some(record)) => self.take(client, &record),
                Ok(None) => {
                    self.ended = Some(None);
                    return Err(ConnectionEnd::Closed.error());
                }
                Err(Error::TimedOut) => return Err(CallError::TimedOut),
                Err(e) => Err(e),
            };
            if let Err(e) = taken {
                return Err(self.end(e));
            }
        }
    }

    fn end(&mut self, error: Error) -> CallError {
        let end = ConnectionEnd::from_error(&error);
        self.ended = Some(Some(error));
        end.error()
    }
}

fn end_of(error: Option<&Error>) -> ConnectionEnd {
    error.map_or(ConnectionEnd::Closed, ConnectionEnd::from_error)
}

fn refused(why: &str) -> CallError {
    CallError::Refused(why.into())
}

/// A call while its function runs on the thread that serves its client.
pub(crate) struct BackCaller<'a> {
    /// The conversation, and the calls back so far.
    state: Mutex<(&'a mut Conversation, u32)>,
    id: u32,
}

impl<'a> BackCaller<'a> {
    #[inline]
    pub(crate) fn new(conversation: &'a mut Conversation, id: u32) -> Self {
        Self { state: Mutex::new((conversation, 0)), id }
    }
}

impl CallsBack for BackCaller<'_> {
    fn call_back(
        &self,
        client: &CallingPeer,
        method: u32,
        arguments: &[u8],
        deadline: Option<Instant>,
    ) -> CallResult<PeerView> {
        let mut state = lock(&self.state);
        let (conversation, made) = &mut *state;
        if *made >= MOST_CALLS_BACK {
            return Err(refused("a call may call back 65,536 times"));
        }
        *made += 1;
        conversation.call_back(client, (self.id, method), arguments, deadline)
    }
}
