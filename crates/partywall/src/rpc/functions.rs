//! The functions of a client, which its server calls back.
//!
//! A call back is executed by the thread that waits for the call in which it is made, so a client needs no further thread for it.

use super::answer::CallAnswer;
use super::calling_peer::CallingPeer;
use super::error::CallError;
use super::methods::{MOST_FOLLOWS, Methods};
use super::sender::inline_text;
use super::status::CallStatus;
use crate::domain::lock;
use partywall_shm::call::{CallRecord, RecordKind};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

type CallResult<T> = std::result::Result<T, CallError>;

/// The functions of a client.
pub(crate) struct ClientFunctions {
    methods: Methods,
    pub(crate) server: Arc<CallingPeer>,
    /// Threads that execute a call back now.
    busy: Mutex<Vec<ThreadId>>,
}

impl ClientFunctions {
    pub(crate) fn new(methods: Methods, server: CallingPeer) -> Self {
        Self { methods, server: Arc::new(server), busy: Mutex::default() }
    }

    /// Executes a call back on this thread.
    pub(crate) fn execute(&self, record: &CallRecord) -> CallResult<CallAnswer> {
        let thread = std::thread::current().id();
        lock(&self.busy).push(thread);
        let result = self.methods.execute(record, &self.server, MOST_FOLLOWS, None);
        lock(&self.busy).retain(|busy| *busy != thread);
        result
    }

    /// Fails on a thread that executes a call back. The server executes no other call before that one is answered, so to wait for one would
    /// last for ever (protocol K8.6).
    pub(crate) fn check_thread(&self) -> CallResult<()> {
        let why = "a function that is called back cannot wait for a call of the same connection, because the server waits for the function";
        if lock(&self.busy).contains(&std::thread::current().id()) {
            return Err(CallError::Refused(why.into()));
        }
        Ok(())
    }
}

/// The reply to a call back that no thread executes, because the caller has given its call up.
pub(crate) fn refusal(id: u32) -> CallRecord {
    let bytes = inline_text("the caller has given up its call");
    CallRecord { kind: RecordKind::Reply, id, method: 0, status: CallStatus::Refused as u16, bytes }
}
