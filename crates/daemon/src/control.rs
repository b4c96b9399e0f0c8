//! The mailbox of a running server: what other threads ask of it (a stop, a new policy, an errand for virtual machines), and its status.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::EventfdFlags;

use partywall_protocol::agent::Say;
use partywall_protocol::wire::{MachineId, Message};
use partywall_region::relay::RelayLatency;

use crate::core::{CoreReport, CoreStatus, MachineNews, SessionId};
use crate::policy::Policy;

/// A handle on a running [`Server`](crate::Server), for any thread.
#[derive(Debug, Clone)]
pub struct ServerControl(Arc<ControlInner>);

#[derive(Debug)]
struct ControlInner {
    bell: OwnedFd,
    wishes: Mutex<Wishes>,
    status: Mutex<CoreStatus>,
    reports: Mutex<Reports>,
    reported: Condvar,
    relay_latency: Arc<RelayLatency>,
    ring_reports: RingReports,
}

/// The report that a thread waits for, where the server leaves it.
#[derive(Debug, Default)]
struct Reports {
    made: Option<CoreReport>,
    ended: bool,
}

/// The requests of other threads to the server.
#[derive(Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) stop: bool,
    pub(crate) policy: Option<Policy>,
    /// A thread waits in [`ServerControl::report`].
    pub(crate) report: bool,
    /// Each with its place in the count of its machine's port, if a port has brought it.
    pub(crate) errands: Vec<(Errand, Option<ErrandPlace>)>,
}

/// How many errands of a machine's port the server has not done, or has done beyond the machine's share of its time. A port hears its guest no
/// more when there are many.
#[derive(Debug, Clone)]
pub(crate) struct ErrandCount {
    machine: MachineId,
    waiting: Arc<AtomicUsize>,
}

impl ErrandCount {
    pub(crate) fn new(machine: MachineId) -> Self {
        Self { machine, waiting: Arc::default() }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// One errand in the count of a machine's port, until this is dropped.
#[derive(Debug)]
pub(crate) struct ErrandPlace(ErrandCount);

impl ErrandPlace {
    fn take(count: &ErrandCount) -> Self {
        count.waiting.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }

    pub(crate) fn machine(&self) -> MachineId {
        self.0.machine
    }
}

impl Drop for ErrandPlace {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// By which the event loop asks the agent of a machine about sockets (protocol U14). A copy is the same questions, and one of them is the thread's
/// that serves the machine's port.
#[derive(Debug, Clone)]
pub(crate) struct PortQuestions {
    questions: Arc<Mutex<Vec<Say>>>,
    bell: Arc<OwnedFd>,
}

impl PortQuestions {
    /// No questions yet. The bell is an eventfd, for which the thread waits.
    pub(crate) fn new(bell: Arc<OwnedFd>) -> Self {
        Self { questions: Arc::default(), bell }
    }

    /// Asks these questions, in place of earlier ones that were not taken yet.
    pub(crate) fn ask(&self, questions: Vec<Say>) {
        *lock(&self.questions) = questions;
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// The questions, each of them once.
    pub(crate) fn take(&self) -> Vec<Say> {
        std::mem::take(&mut *lock(&self.questions))
    }

    pub(crate) fn is_any(&self) -> bool {
        !lock(&self.questions).is_empty()
    }
}

/// How far programs of machines have written the rings of flows within their machines, as their agents say (protocol U15.6 to U15.10).
///
/// The thread of a machine's port puts a report here before it passes on what the agent says next. The server takes all reports before it
/// handles anything. So a report counts before each message that can end its flow, however many packets wait elsewhere.
#[derive(Debug, Default)]
pub(crate) struct RingReports {
    are_any: AtomicBool,
    tails: Mutex<BTreeMap<MachineId, BTreeMap<u64, u64>>>,
}

/// Reports of one machine that wait, at most. An agent that sends more loses its oldest.
const MOST_REPORTS: usize = 1024;

impl RingReports {
    pub(crate) fn put(&self, machine: MachineId, flow: u64, tail: u64) {
        let mut tails = lock(&self.tails);
        let of_machine = tails.entry(machine).or_default();
        of_machine.insert(flow, tail);
        if of_machine.len() > MOST_REPORTS {
            // The numbers of flows rise.
            of_machine.pop_first();
        }
        // Under the lock, so that a report which is taken is not announced later.
        self.are_any.store(true, Ordering::Release);
    }

    /// All of them, with the machine, the flow and the byte up to which the ring was written.
    pub(crate) fn take(&self) -> Vec<(MachineId, u64, u64)> {
        if !self.are_any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut tails = lock(&self.tails);
        self.are_any.store(false, Ordering::Relaxed);
        let all = std::mem::take(&mut *tails).into_iter();
        all.flat_map(|(machine, tails)| tails.into_iter().map(move |(flow, tail)| (machine, flow, tail))).collect()
    }
}

/// A request to the server from the thread that attends to virtual machines.
#[derive(Debug)]
pub(crate) enum Errand {
    /// A session of a program in a machine: the broker's end of its socket, the machine, and the number of the process there.
    Admit(OwnedFd, MachineId, u32),
    /// A machine has changed its state.
    News(MachineNews<OwnedFd>),
    /// The answer to an order.
    Answer(SessionId, u32, Message),
    /// The port of a machine is there: by this its agent is asked about sockets.
    Port(MachineId, PortQuestions),
    /// The answer of a machine's agent to such a question (protocol U14).
    Receivers {
        /// The machine.
        machine: MachineId,
        /// The number of the question.
        number: u32,
        /// The number of the agent's network namespace; 0 if its kernel does not find sockets.
        netns: u64,
        /// When the agent began to ask its kernel, by the clock of its machine.
        at: u64,
        /// The cookies of the sockets, in the order of the questions.
        receivers: Vec<u64>,
    },
}

impl ServerControl {
    pub(crate) fn new() -> std::io::Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (wishes, status) = (Mutex::default(), Mutex::default());
        Ok(Self(Arc::new(ControlInner {
            bell,
            wishes,
            status,
            reports: Mutex::default(),
            reported: Condvar::new(),
            relay_latency: Arc::default(),
            ring_reports: RingReports::default(),
        })))
    }

    /// Ends [`Server::run`](crate::Server::run) soon.
    pub fn stop(&self) {
        lock(&self.0.wishes).stop = true;
        self.ring();
    }

    /// Puts another policy in force soon. Sessions that it would not let join are ended; open channels go on.
    pub fn set_policy(&self, policy: Policy) {
        lock(&self.0.wishes).policy = Some(policy);
        self.ring();
    }

    /// Has the server do this soon; errands are done in order.
    pub(crate) fn errand(&self, errand: Errand) {
        lock(&self.0.wishes).errands.push((errand, None));
        self.ring();
    }

    /// The same for a machine's port, at the expense of the machine. It counts until the server drops its place.
    pub(crate) fn errand_of(&self, count: &ErrandCount, errand: Errand) {
        let place = ErrandPlace::take(count);
        lock(&self.0.wishes).errands.push((errand, Some(place)));
        self.ring();
    }

    /// How much there was of everything after the latest event.
    pub fn status(&self) -> CoreStatus {
        *lock(&self.0.status)
    }

    pub(crate) fn set_status(&self, status: CoreStatus) {
        *lock(&self.0.status) = status;
    }

    /// A report of the present state and of the work done, requested from the server now. `None` if the server does not answer in time,
    /// or has ended. One thread asks.
    pub(crate) fn report(&self, patience: Duration) -> Option<CoreReport> {
        // A report that came too late for the last request is stale.
        lock(&self.0.reports).made = None;
        lock(&self.0.wishes).report = true;
        self.ring();
        let waits = |reports: &mut Reports| reports.made.is_none() && !reports.ended;
        let waited = self.0.reported.wait_timeout_while(lock(&self.0.reports), patience, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.made.take()
    }

    pub(crate) fn set_report(&self, report: CoreReport) {
        lock(&self.0.reports).made = Some(report);
        self.0.reported.notify_one();
    }

    /// There will be no more reports: every wait for one fails.
    pub(crate) fn end_reports(&self) {
        lock(&self.0.reports).ended = true;
        self.0.reported.notify_one();
    }

    /// Where relays of virtual machines count how long bells take.
    pub(crate) fn relay_latency(&self) -> &Arc<RelayLatency> {
        &self.0.relay_latency
    }

    /// Where the threads of ports leave what agents say of rings.
    pub(crate) fn ring_reports(&self) -> &RingReports {
        &self.0.ring_reports
    }

    pub(crate) fn take_wishes(&self) -> Wishes {
        // Emptied before the wishes are taken: a wish that comes later rings again.
        let _ = rustix::io::read(&self.0.bell, &mut [0u8; 8]);
        std::mem::take(&mut *lock(&self.0.wishes))
    }

    /// The errands alone, as if they were done.
    #[cfg(test)]
    pub(crate) fn take_errands(&self) -> Vec<Errand> {
        self.take_wishes().errands.into_iter().map(|(errand, _)| errand).collect()
    }

    fn ring(&self) {
        // Fails only if 2^64 - 2 rings wait, which wake the server as well as one more would.
        let _ = rustix::io::write(&self.0.bell, &1u64.to_ne_bytes());
    }
}

impl AsFd for ServerControl {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.bell.as_fd()
    }
}

/// Each value is stored whole, so one that a panicking thread left behind is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latest_report_of_each_ring_is_taken_once() {
        let (a, b) = (MachineId::MIN, MachineId::new(2).unwrap());
        let reports = RingReports::default();
        assert_eq!(reports.take(), []);
        for (machine, flow, tail) in [(b, 1, 10), (a, 2, 20), (a, 1, 30), (a, 2, 40)] {
            reports.put(machine, flow, tail);
        }
        assert_eq!(reports.take(), [(a, 1, 30), (a, 2, 40), (b, 1, 10)]);
        assert_eq!(reports.take(), []);
    }

    #[test]
    fn agent_with_many_reports_loses_its_oldest() {
        let (a, b) = (MachineId::MIN, MachineId::new(2).unwrap());
        let reports = RingReports::default();
        reports.put(b, 1, 1);
        (0..=MOST_REPORTS as u64).for_each(|flow| reports.put(a, flow, flow));
        let taken = reports.take();
        assert_eq!((taken.len(), taken[0]), (MOST_REPORTS + 1, (a, 1, 1)));
        assert!(taken.contains(&(b, 1, 1)), "another machine's stays");
    }
}
