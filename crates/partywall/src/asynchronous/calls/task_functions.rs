//! The functions of a client that its server calls back. Each call back is a task.

use super::functions::TaskMethods;
use super::shared_calls::{SharedCalls, when_there_is_room};
use super::{copied_len, make_room};
use crate::Error;
use crate::domain::lock;
use crate::rpc::calling_peer::CallingPeer;
use crate::rpc::error::CallError;
use crate::rpc::methods::MOST_FOLLOWS;
use partywall_shm::call::CallRecord;
use std::sync::{Arc, Mutex, Weak};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

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
pub(super) fn check_task(shared: &Arc<SharedCalls>) -> Result<(), CallError> {
    let is_same = |other: &Weak<SharedCalls>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(shared));
    if CALLED_BACK.try_with(is_same).unwrap_or(false) {
        let why = "a function that is called back cannot wait for a call of the same connection, because the server waits for the function";
        return Err(CallError::Refused(why.into()));
    }
    Ok(())
}
