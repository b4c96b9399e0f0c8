//! Opens that were refused, so that the kernel looks the name up again and tries a second time.

use super::EntryPlace;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Refused opens that are recorded before old ones are dropped.
const MOST_REFUSED: usize = 1024;

/// An open that was refused because the kernel must look the name up again first.
#[derive(Debug, Clone)]
pub(super) struct RefusedOpen {
    pub(super) node: u64,
    at: Instant,
    /// The mount's clock at that time.
    pub(super) clock: u64,
    /// The name that was recorded for the node.
    pub(super) place: Option<EntryPlace>,
    /// How many such opens there are: the kernel gives the threads of other PID namespaces the number 0.
    count: u32,
}

/// The refused opens of all threads.
#[derive(Debug)]
pub(super) struct RefusedOpens {
    /// How long after a refused open the same thread may open the node without a check of its name.
    retry: Duration,
    /// By thread, and for the thread 0 by node as well.
    opens: HashMap<(u32, u64), RefusedOpen>,
}

fn key_of(thread: u32, node: u64) -> (u32, u64) {
    (thread, if thread == 0 { node } else { 0 })
}

impl RefusedOpens {
    pub(super) fn new(retry: Duration) -> Self {
        Self { retry, opens: HashMap::new() }
    }

    /// An open of this thread is refused.
    pub(super) fn add(&mut self, node: u64, thread: u32, clock: u64, place: Option<EntryPlace>) {
        let at = Instant::now();
        if self.opens.len() >= MOST_REFUSED {
            let retry = self.retry;
            self.opens.retain(|_, open| at.duration_since(open.at) < retry);
            let oldest = self.opens.iter().min_by_key(|(_, open)| open.at).map(|(key, _)| *key);
            if let Some(oldest) = oldest.filter(|_| self.opens.len() >= MOST_REFUSED) {
                self.opens.remove(&oldest);
            }
        }
        let key = key_of(thread, node);
        // Only the thread 0 may be several.
        let before = self.opens.get(&key).filter(|open| thread == 0 && at.duration_since(open.at) < self.retry);
        let count = before.map_or(1, |open| open.count.saturating_add(1));
        self.opens.insert(key, RefusedOpen { node, at, clock, place, count });
    }

    /// The open of this thread that was refused last, if that is not too long ago. `node` is what the thread opens now.
    pub(super) fn take(&mut self, node: u64, thread: u32) -> Option<RefusedOpen> {
        let key = key_of(thread, node);
        let mut open = self.opens.remove(&key)?;
        if open.count > 1 {
            open.count -= 1;
            self.opens.insert(key, open.clone());
        }
        (open.at.elapsed() < self.retry).then_some(open)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::NameCheck;
    use super::super::tree::tests::{entry, named, tree_with_file};
    use super::*;
    use crate::wire::ROOT;

    #[test]
    fn refused_opens_of_unknown_threads_are_counted_by_node() {
        let (mut tree, number, _) = tree_with_file();
        let other = tree.mention(1, ROOT, b"b", &entry(8, 41));
        for node in [number, number, other] {
            tree.refuse(node, 0);
        }
        assert_eq!(tree.check(number, 0), (NameCheck::Nothing, true));
        assert_eq!(tree.check(number, 0), (NameCheck::Nothing, true), "two have been refused");
        assert_eq!(tree.check(number, 0), named(b"a"));
        assert_eq!(tree.check(other, 0), (NameCheck::Nothing, true));
    }

    #[test]
    fn oldest_refused_open_is_dropped_for_another() {
        let mut opens = RefusedOpens::new(Duration::from_secs(3600));
        for thread in 1..=MOST_REFUSED as u32 + 1 {
            opens.add(40, thread, 0, None);
        }
        assert_eq!(opens.opens.len(), MOST_REFUSED);
        assert!(opens.take(40, 1).is_none() && opens.take(40, 2).is_some());
    }

    #[test]
    fn refused_open_expires_after_the_retry_time() {
        for (retry, is_found) in [(Duration::ZERO, false), (Duration::from_secs(3600), true)] {
            let mut opens = RefusedOpens::new(retry);
            opens.add(40, 1, 0, None);
            assert_eq!(opens.take(40, 1).is_some(), is_found);
        }
    }
}
