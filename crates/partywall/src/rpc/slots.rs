//! The calls of a connection that are in flight, and the replies that no caller has taken yet.

use super::error::CallError;
use super::heap::Block;
use super::reply::ReceivedReply;
use crate::Error;
use partywall_shm::call::CallRecord;
use partywall_shm::corrupt::Corrupt;

/// The calls of a connection.
#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<CallSlot>,
    free: Vec<u32>,
    /// Calls that the server has not answered.
    pub(crate) unanswered: usize,
    /// Why nothing more will be received, once that is so.
    pub(crate) ended: Option<ConnectionEnd>,
    /// Calls whose call back no thread executes. Each is to be refused.
    pub(crate) refused: Vec<u32>,
}

struct CallSlot {
    generation: u32,
    state: SlotState,
    /// The arguments, if they were copied to the heap for this call.
    arguments: Option<Block>,
    /// `None` until the server calls back during this call.
    back: Option<Box<BackState>>,
}

/// The calls back during one call (protocol K8).
#[derive(Default)]
struct BackState {
    /// One that the caller has not taken yet.
    pending: Option<CallRecord>,
    /// The caller executes one.
    is_running: bool,
    /// All of them so far.
    count: u32,
    /// Results that the server reads in place until it has answered the call.
    lent: Vec<Block>,
}

/// The next event of a call for its caller.
pub(crate) enum CallStep {
    Answered(ReceivedReply),
    CalledBack(CallRecord),
}

enum SlotState {
    Free,
    Waiting,
    /// The caller has given up. The slot is free once the server has answered.
    Abandoned,
    Answered(ReceivedReply),
}

/// Why nothing more will be received.
#[derive(Debug, Clone)]
pub(crate) enum ConnectionEnd {
    Closed,
    Dead,
    /// As in [`Error::Moved`].
    Moved {
        target: Option<String>,
    },
    Corrupt(Corrupt),
    Failed,
}

impl ConnectionEnd {
    pub(crate) fn from_error(error: &Error) -> Self {
        match error {
            Error::Closed(_) => Self::Closed,
            Error::Dead { .. } => Self::Dead,
            Error::Moved { target } => Self::Moved { target: target.clone() },
            Error::Corrupt(what) => Self::Corrupt(*what),
            _ => Self::Failed,
        }
    }

    pub(crate) fn error(&self) -> CallError {
        match self {
            Self::Closed => CallError::Closed { seen: false },
            Self::Dead => CallError::Dead { seen: false },
            Self::Moved { target } => CallError::Moved { seen: false, target: target.clone() },
            Self::Corrupt(what) => CallError::Corrupt(*what),
            Self::Failed => {
                CallError::Connection(Error::Closed("an earlier error of the system has ended the connection"))
            }
        }
    }
}

/// Calls back during one call (protocol K8.2).
pub(crate) const MOST_CALLS_BACK: u32 = 1 << 16;
/// Bits of a call's id that are the index of its slot; the others are the slot's generation.
const INDEX_BITS: u32 = 20;

impl Slots {
    #[inline]
    pub(crate) fn open(&mut self) -> u32 {
        self.unanswered += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(CallSlot { generation: 0, state: SlotState::Free, arguments: None, back: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.state = SlotState::Waiting;
        index | slot.generation << INDEX_BITS
    }

    /// Keeps the arguments of a call until it is answered.
    pub(crate) fn keep(&mut self, id: u32, arguments: Option<Block>) {
        if let Some(slot) = self.slot(id) {
            slot.arguments = arguments;
        }
    }

    #[inline]
    fn slot(&mut self, id: u32) -> Option<&mut CallSlot> {
        let slot = self.slots.get_mut((id & ((1 << INDEX_BITS) - 1)) as usize)?;
        (slot.generation == id >> INDEX_BITS).then_some(slot)
    }

    #[inline]
    fn close(&mut self, id: u32) {
        let index = id & ((1 << INDEX_BITS) - 1);
        if let Some(slot) = self.slot(id) {
            if slot.back.as_ref().is_some_and(|back| back.is_running) {
                // The id is taken until the call back is answered.
                (slot.state, slot.arguments) = (SlotState::Free, None);
                return;
            }
            slot.generation = (slot.generation + 1) & (u32::MAX >> INDEX_BITS);
            (slot.state, slot.arguments, slot.back) = (SlotState::Free, None, None);
            self.free.push(index);
        }
    }

    /// Files a reply. Returns the peer's block if no thread waits for it any more; fails if the server answers what was not asked.
    #[inline]
    pub(crate) fn deliver(&mut self, id: u32, outcome: ReceivedReply) -> Result<Option<u64>, Corrupt> {
        let slot = self.slot(id).ok_or(Corrupt::BadRecord)?;
        match slot.state {
            SlotState::Waiting => {
                slot.state = SlotState::Answered(outcome);
                slot.arguments = None;
                let is_late = slot.back.as_mut().is_some_and(|back| back.pending.take().is_some());
                self.unanswered -= 1;
                if is_late {
                    // The server has not waited for it.
                    self.refused.push(id);
                }
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

    /// Files a call back. It waits for the thread that waits for its call.
    pub(crate) fn call_back(&mut self, record: CallRecord) -> Result<(), Corrupt> {
        let slot = self.slot(record.id).ok_or(Corrupt::BadRecord)?;
        let is_waiting = match slot.state {
            SlotState::Waiting => true,
            SlotState::Abandoned => false,
            SlotState::Free | SlotState::Answered(_) => return Err(Corrupt::BadRecord),
        };
        let back = slot.back.get_or_insert_default();
        if back.pending.is_some() || back.is_running || back.count >= MOST_CALLS_BACK {
            return Err(Corrupt::BadRecord);
        }
        back.count += 1;
        if is_waiting {
            back.pending = Some(record);
        } else {
            self.refused.push(record.id);
        }
        Ok(())
    }

    /// The caller has executed a call back, whose result may be in a block.
    pub(crate) fn end_call_back(&mut self, id: u32, lent: Option<Block>) {
        let Some(slot) = self.slot(id) else { return };
        let Some(back) = slot.back.as_mut() else { return };
        back.is_running = false;
        back.lent.extend(lent);
        // A client of tasks may have given its call up meanwhile.
        if matches!(slot.state, SlotState::Free) {
            self.close(id);
        }
    }

    /// The answer to a call, or a call back that its caller is to execute.
    #[inline]
    pub(crate) fn take_step(&mut self, id: u32) -> Option<CallStep> {
        let slot = self.slot(id)?;
        if let SlotState::Waiting = slot.state {
            let back = slot.back.as_mut()?;
            let record = back.pending.take()?;
            back.is_running = true;
            return Some(CallStep::CalledBack(record));
        }
        self.take_answer(id).map(CallStep::Answered)
    }

    #[inline]
    pub(crate) fn take_answer(&mut self, id: u32) -> Option<ReceivedReply> {
        let slot = self.slot(id)?;
        if !matches!(slot.state, SlotState::Answered(_)) {
            return None;
        }
        let SlotState::Answered(outcome) = std::mem::replace(&mut slot.state, SlotState::Free) else { return None };
        self.close(id);
        Some(outcome)
    }

    /// A call could not be sent. Returns the peer's block if the server has answered all the same: a server that lies answers first.
    pub(crate) fn withdraw(&mut self, id: u32) -> Option<u64> {
        let (is_waiting, held) = match &self.slot(id)?.state {
            SlotState::Answered(outcome) => (false, outcome.held),
            state => (matches!(state, SlotState::Waiting), None),
        };
        self.unanswered -= usize::from(is_waiting);
        self.close(id);
        held
    }

    /// The caller of an unanswered call has gone.
    pub(crate) fn abandon(&mut self, id: u32) {
        let has_ended = self.ended.is_some();
        match self.slot(id) {
            Some(slot) if matches!(slot.state, SlotState::Waiting) && !has_ended => {
                slot.state = SlotState::Abandoned;
                if slot.back.as_mut().is_some_and(|back| back.pending.take().is_some()) {
                    self.refused.push(id);
                }
            }
            _ => self.close(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::status::CallStatus;
    use super::super::view::{PeerHeap, PeerView};
    use super::*;
    use crate::further::Regions;
    use partywall_shm::call::{CallBytes, RecordKind};

    fn reply(held: Option<u64>) -> ReceivedReply {
        let heap = PeerHeap::new(Regions::of(None), false);
        let view = PeerView::from_record(&CallBytes::EMPTY, &heap).unwrap();
        ReceivedReply { status: CallStatus::Done, code: 0, view, held }
    }

    #[test]
    fn call_that_is_answered_before_it_is_sent_is_counted_once() {
        let mut slots = Slots::default();
        let id = slots.open();
        assert_eq!(slots.deliver(id, reply(Some(64))), Ok(None));
        assert_eq!((slots.withdraw(id), slots.unanswered), (Some(64), 0));
        let id = slots.open();
        assert_eq!((slots.withdraw(id), slots.unanswered), (None, 0));
        assert!(slots.deliver(id, reply(None)).is_err(), "it is not under way");
    }

    #[test]
    fn calls_back_of_a_call_are_limited_and_come_one_by_one() {
        let mut slots = Slots::default();
        let id = slots.open();
        let record = CallRecord { kind: RecordKind::Call, id, method: 7, status: 0, bytes: CallBytes::EMPTY };
        for _ in 0..MOST_CALLS_BACK {
            assert_eq!(slots.call_back(record), Ok(()));
            assert!(slots.call_back(record).is_err(), "one is pending");
            assert!(matches!(slots.take_step(id), Some(CallStep::CalledBack(taken)) if taken == record));
            assert!(slots.take_step(id).is_none());
            assert!(slots.call_back(record).is_err(), "one is running");
            slots.end_call_back(id, None);
        }
        assert!(slots.call_back(record).is_err());
        let given_up = slots.open();
        slots.abandon(given_up);
        for _ in 0..MOST_CALLS_BACK {
            assert_eq!(slots.call_back(CallRecord { id: given_up, ..record }), Ok(()));
            assert_eq!(slots.refused.pop(), Some(given_up));
        }
        assert!(slots.call_back(CallRecord { id: given_up, ..record }).is_err());
    }

    #[test]
    fn pending_call_back_is_refused_with_the_end_of_its_call() {
        let mut slots = Slots::default();
        let record = |id| CallRecord { kind: RecordKind::Call, id, method: 7, status: 0, bytes: CallBytes::EMPTY };
        let (answered, given_up) = (slots.open(), slots.open());
        slots.call_back(record(answered)).unwrap();
        slots.call_back(record(given_up)).unwrap();
        slots.deliver(answered, reply(None)).unwrap();
        slots.abandon(given_up);
        assert_eq!(slots.refused, [answered, given_up]);
        assert!(matches!(slots.take_step(answered), Some(CallStep::Answered(_))));
        assert!(slots.call_back(record(answered)).is_err(), "it is over");
    }

    #[test]
    fn id_of_a_call_is_taken_while_its_call_back_runs() {
        let mut slots = Slots::default();
        let id = slots.open();
        let record = CallRecord { kind: RecordKind::Call, id, method: 7, status: 0, bytes: CallBytes::EMPTY };
        slots.call_back(record).unwrap();
        assert!(matches!(slots.take_step(id), Some(CallStep::CalledBack(_))));
        slots.deliver(id, reply(None)).unwrap();
        assert!(slots.take_answer(id).is_some());
        const INDEX: u32 = (1 << INDEX_BITS) - 1;
        let other = slots.open();
        assert_ne!(other & INDEX, id & INDEX);
        assert!(slots.deliver(id, reply(None)).is_err(), "it was answered");
        slots.end_call_back(id, None);
        assert_eq!(slots.open() & INDEX, id & INDEX);
    }
}
