//! The programs of peers that run, wherever they do, from their first order of a run on.

use std::collections::{BTreeMap, BTreeSet};

use super::order::parse_answer;
use crate::{error::Result, mechanism::Mechanism, report::cell::Key, task::Figures};

/// The programs that run. `P` is a pair of them, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct RunningPeers<P> {
    running: BTreeMap<Mechanism, P>,
    /// What was measured in this run.
    measured: BTreeSet<Key>,
    started: u32,
}

impl<P> Default for RunningPeers<P> {
    fn default() -> Self {
        Self { running: BTreeMap::new(), measured: BTreeSet::new(), started: 0 }
    }
}

impl<P> RunningPeers<P> {
    /// Executes one order by the programs of a peer, which `start` starts if they do not run; its number is another one for each start. The first
    /// measurement that comes again begins another run, for which all programs are started again.
    pub(crate) fn execute(
        &mut self,
        key: &Key,
        start: impl FnOnce(u32) -> Result<P>,
        ask: impl FnOnce(&mut P) -> Result<String>,
    ) -> Result<Figures> {
        if !self.measured.insert(key.clone()) {
            self.running.clear();
            self.measured = BTreeSet::from([key.clone()]);
        }
        let mut peer = match self.running.remove(&key.mechanism) {
            Some(peer) => peer,
            None => {
                self.started += 1;
                start(self.started)?
            }
        };
        // Programs without an answer are not asked again.
        let line = ask(&mut peer)?;
        self.running.insert(key.mechanism, peer);
        parse_answer(&line).into_figures()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::BenchError;

    /// The numbers of the programs that executed the orders of a run.
    fn run(peers: &mut RunningPeers<u32>, orders: &[(Mechanism, u64)], fails: (Mechanism, u64)) -> Vec<u32> {
        let mut numbers = Vec::new();
        for &(mechanism, message) in orders {
            let key = Key::new("rpc", mechanism).with("message", message);
            let _ = peers.execute(&key, Ok, |number| {
                numbers.push(*number);
                if (mechanism, message) == fails { Err(BenchError::Interrupted) } else { Ok(String::new()) }
            });
        }
        numbers
    }

    #[test]
    fn each_run_has_new_programs_though_its_first_order_failed() {
        let (ice, grpc) = (Mechanism::Ice, Mechanism::Grpc);
        let mut peers = RunningPeers::default();
        let first = run(&mut peers, &[(ice, 1), (ice, 2), (grpc, 1)], (ice, 1));
        assert_eq!(first, [1, 2, 3], "programs that failed are started again");
        // A measurement that has failed does not come again.
        let rest = [(ice, 2), (grpc, 1), (grpc, 2)];
        assert_eq!(run(&mut peers, &rest, (ice, 9)), [4, 5, 5]);
        assert_eq!(run(&mut peers, &rest, (ice, 9)), [6, 7, 7]);
    }
}
