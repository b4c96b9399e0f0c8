//! What waits for the attendant, with a bound for each kind: neither a guest nor a client makes it grow.
//!
//! ```text
//!   requests and answers of agents   first, in order; at most MOST_REQUESTS requests
//!   machines whose agent has greeted once each, in turn
//! ```
//!
//! To serve a greeting takes as long as the machine's monitor likes, so requests do not wait behind greetings.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

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
}

impl AttendantTasks {
    /// Adds a task. A greeting of a machine of which one waits already is the same greeting.
    ///
    /// # Errors
    /// As many requests wait as may.
    pub(super) fn add(&self, task: Task) -> io::Result<()> {
        let mut waiting = self.lock();
        match task {
            Task::Up { machine } => drop(waiting.greeted.insert(machine)),
            Task::Order { .. } if waiting.requests >= MOST_REQUESTS => {
                return Err(io::Error::other(format!("{MOST_REQUESTS} requests wait already; try again later")));
            }
            task => {
                waiting.requests += usize::from(matches!(task, Task::Order { .. }));
                waiting.in_order.push_back(task);
            }
        }
        self.0.1.notify_one();
        Ok(())
    }

    /// The next task. Waits until there is one.
    pub(super) fn next(&self) -> Task {
        let mut waiting = self.lock();
        loop {
            match waiting.take() {
                Some(task) => return task,
                None => waiting = self.0.1.wait(waiting).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// How many tasks wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let waiting = self.lock();
        waiting.in_order.len() + waiting.greeted.len()
    }

    /// The next task, if there is one before this time has passed.
    #[cfg(test)]
    pub(super) fn next_within(&self, limit: std::time::Duration) -> Option<Task> {
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
    fn take(&mut self) -> Option<Task> {
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
