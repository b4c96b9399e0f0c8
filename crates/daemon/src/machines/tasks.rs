//! What waits for the attendant, with a bound for each kind: neither a guest nor a client makes it grow.
//!
//! ```text
//!   requests and answers of agents   first, in order; at most MOST_REQUESTS requests
//!   machines whose agent has greeted once each, in turn
//!   tasks to try again              after a pause, which is then one of the above
//! ```
//!
//! To serve a greeting takes as long as the machine's monitor likes, so requests do not wait behind greetings.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use partywall_protocol::wire::MachineId;

use super::Task;

/// Requests of administrators that wait at once. Each has a client that waits for its answer.
pub(super) const MOST_REQUESTS: usize = 256;

/// The tasks of one attendant. A copy is the same queue.
#[derive(Debug, Clone, Default)]
pub(super) struct AttendantTasks(Arc<(Mutex<WaitingTasks>, Condvar)>);

#[derive(Debug, Default)]
struct WaitingTasks {
    in_order: VecDeque<Task>,
    requests: usize,
    greeted: BTreeSet<MachineId>,
    /// The machine whose greeting was served last.
    latest: Option<MachineId>,
    /// Tasks that failed and are tried again at these times: at most one for each machine and for each entry of the operator's file.
    later: Vec<(Instant, Task)>,
}

impl AttendantTasks {
    /// Adds a task. A greeting of a machine of which one waits already is the same greeting.
    ///
    /// # Errors
    /// As many requests wait as may.
    pub(super) fn add(&self, task: Task) -> io::Result<()> {
        let mut waiting = self.lock();
        if matches!(task, Task::Order { .. }) && waiting.requests >= MOST_REQUESTS {
            return Err(io::Error::other(format!("{MOST_REQUESTS} requests wait already; try again later")));
        }
        waiting.put(task);
        self.0.1.notify_one();
        Ok(())
    }

    /// Adds a task after a pause. One such greeting of a machine is enough.
    pub(super) fn add_later(&self, task: Task, pause: Duration) {
        let mut waiting = self.lock();
        if let Task::Up { machine } = task
            && waiting.later.iter().any(|(_, one)| matches!(one, Task::Up { machine: other } if *other == machine))
        {
            return;
        }
        waiting.later.push((Instant::now() + pause, task));
        self.0.1.notify_one();
    }

    /// The next task. Waits until there is one.
    pub(super) fn next(&self) -> Task {
        let mut waiting = self.lock();
        loop {
            if let Some(task) = waiting.take() {
                return task;
            }
            let due = waiting.later.iter().map(|(at, _)| *at).min();
            waiting = match due.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(pause) => self.0.1.wait_timeout(waiting, pause).unwrap_or_else(PoisonError::into_inner).0,
                None => self.0.1.wait(waiting).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// How many tasks wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let waiting = self.lock();
        waiting.in_order.len() + waiting.greeted.len()
    }

    /// The tasks that wait for their pause to end, which they do not do any longer.
    #[cfg(test)]
    pub(super) fn take_later(&self) -> Vec<Task> {
        std::mem::take(&mut self.lock().later).into_iter().map(|(_, task)| task).collect()
    }

    /// The next task, if there is one before this time has passed.
    #[cfg(test)]
    pub(super) fn next_within(&self, limit: Duration) -> Option<Task> {
        let nothing = |waiting: &mut WaitingTasks| waiting.in_order.is_empty() && waiting.greeted.is_empty();
        let waited = self.0.1.wait_timeout_while(self.lock(), limit, nothing);
        waited.unwrap_or_else(PoisonError::into_inner).0.take()
    }

    fn lock(&self) -> MutexGuard<'_, WaitingTasks> {
        // Each change of it is whole.
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitingTasks {
    fn put(&mut self, task: Task) {
        match task {
            Task::Up { machine } => drop(self.greeted.insert(machine)),
            task => {
                self.requests += usize::from(matches!(task, Task::Order { .. }));
                self.in_order.push_back(task);
            }
        }
    }

    fn take(&mut self) -> Option<Task> {
        if !self.later.is_empty() {
            let now = Instant::now();
            let due: Vec<_> = self.later.extract_if(.., |(at, _)| *at <= now).collect();
            due.into_iter().for_each(|(_, task)| self.put(task));
        }
        if let Some(task) = self.in_order.pop_front() {
            self.requests -= usize::from(matches!(task, Task::Order { .. }));
            return Some(task);
        }
        let after = self.greeted.iter().find(|machine| Some(**machine) > self.latest);
        let machine = after.or(self.greeted.first()).copied()?;
        self.greeted.remove(&machine);
        self.latest = Some(machine);
        Some(Task::Up { machine })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Order, SessionId};
    use partywall_protocol::wire::Name;

    fn remove(request: u32) -> Task {
        let order = Order::Remove { name: Name::new("a").unwrap() };
        Task::Order { session: SessionId(7), request, order }
    }

    fn greeted(tasks: &AttendantTasks, machine: u32) {
        tasks.add(Task::Up { machine: MachineId::new(machine).unwrap() }).unwrap();
    }

    fn next_greeted(tasks: &AttendantTasks) -> u32 {
        match tasks.next() {
            Task::Up { machine } => machine.get(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn greetings_of_machines_are_served_in_turn_after_requests() {
        let tasks = AttendantTasks::default();
        greeted(&tasks, 1);
        greeted(&tasks, 2);
        greeted(&tasks, 1);
        tasks.add(remove(1)).unwrap();
        assert_eq!(tasks.len(), 3, "a machine has one greeting");
        assert!(matches!(tasks.next(), Task::Order { .. }));
        assert_eq!(next_greeted(&tasks), 1);
        // Greeting again does not put a machine before the others.
        greeted(&tasks, 1);
        assert_eq!([next_greeted(&tasks), next_greeted(&tasks)], [2, 1]);
        assert_eq!(tasks.len(), 0);
    }

    #[test]
    fn task_after_pause_is_served_once_pause_has_ended() {
        let tasks = AttendantTasks::default();
        let machine = MachineId::MIN;
        for pause in [Duration::from_millis(20), Duration::from_secs(3600)] {
            tasks.add_later(Task::Up { machine }, pause);
        }
        // Nothing else wakes the thread.
        assert_eq!(next_greeted(&tasks), 1);
        assert!(tasks.take_later().is_empty(), "a machine has one such greeting");
        tasks.add_later(Task::Remembered, Duration::from_secs(3600));
        tasks.add(remove(1)).unwrap();
        assert!(matches!(tasks.next(), Task::Order { .. }), "another task does not wait for the pause");
    }

    #[test]
    fn request_beyond_most_is_refused_until_one_is_served() {
        let tasks = AttendantTasks::default();
        for request in 0..MOST_REQUESTS {
            tasks.add(remove(request as u32)).unwrap();
        }
        assert!(tasks.add(remove(0)).is_err());
        // What agents and the broker itself say is not among them.
        tasks.add(Task::Remembered).unwrap();
        assert!(matches!(tasks.next(), Task::Order { request: 0, .. }));
        tasks.add(remove(0)).unwrap();
        assert!(tasks.add(remove(0)).is_err());
    }
}
