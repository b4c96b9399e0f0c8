//! Whether a UDP socket in a `SO_REUSEPORT` group receives what the kernel says that it does (protocol U11.12). The broker looks at the groups of
//! its host, and an agent at those of its machine.
//!
//! The kernel chooses one member of a group for each datagram, by a hash of both ends, and answers questions about receivers by the same hash. But a
//! member can make the kernel choose by a program, which holds for the whole group and which the kernel does not report. The library withdraws a
//! socket for which its program has asked for that (U11.13). So the kernel's answer counts only while each member that is found is published.
//!
//! ```text
//!   published sockets -----> GroupMembers --+
//!                                           +--> GroupLook: does this answer count?
//!   PROBES random questions -> the kernel --+
//! ```

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use partywall_protocol::socket::ReceiverQuestion;

use super::receivers::FoundReceiver;

/// Questions by which the members of a group are found in one look. Of two members, one stays unfound in one look of 2^64.
const PROBES: u16 = 64;
/// Questions that are asked at a time.
const AT_A_TIME: usize = 8;
/// Groups that have flows, at most (protocol U11.15): their questions must not crowd out the looks at all other flows.
pub const GROUPS: usize = 64;
/// At most this fraction of the time of a thread goes into looking: one part in ten.
pub const SHARE: u32 = 10;

/// The sockets of groups that are published, and how often each is.
#[derive(Debug, Default)]
pub struct GroupMembers(HashMap<u64, u32>);

impl GroupMembers {
    /// A socket with this number was published, or is published no more. Each publication counts.
    pub fn count(&mut self, cookie: u64, is_published: bool) {
        let count = self.0.entry(cookie).or_default();
        *count = if is_published { count.saturating_add(1) } else { count.saturating_sub(1) };
        if *count == 0 {
            self.0.remove(&cookie);
        }
    }

    /// Whether no socket of a group is published.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// One look at the groups of some sockets. Each group, which its caller names by a `K`, is probed once, and at most [`GROUPS`] are.
#[derive(Debug)]
pub struct GroupLook<'a, K> {
    members: &'a GroupMembers,
    known: HashMap<K, bool>,
    /// The time that one group may take, and the time that all groups may.
    limits: [Duration; 2],
    spent: Duration,
}

impl<'a, K: Hash + Eq> GroupLook<'a, K> {
    /// A look by what is published now.
    pub fn new(members: &'a GroupMembers) -> Self {
        Self { members, known: HashMap::new(), limits: [Duration::MAX; 2], spent: Duration::ZERO }
    }

    /// A look that takes one group, and all groups together, hardly longer than these times. The kernel compares a question with each socket of the
    /// port, of which a user can make tens of thousands. A group that takes longer does not count, and neither do those for which no time is left.
    #[must_use]
    pub fn within(self, group: Duration, all: Duration) -> Self {
        Self { limits: [group, all], ..self }
    }

    /// Whether the socket that the kernel has found for a question is the one that receives. A socket outside of a group is. In a group, a socket
    /// that is connected comes before the other members, and any other one counts only while all members are published. `ask` asks the kernel.
    pub fn counts(
        &mut self,
        (group, question): (K, ReceiverQuestion),
        found: FoundReceiver,
        ask: impl FnMut(&[ReceiverQuestion]) -> Vec<Option<FoundReceiver>>,
    ) -> bool {
        if !question.in_group || found.is_connected {
            return true;
        }
        // A server has one socket for many clients.
        if let Some(known) = self.known.get(&group) {
            return *known;
        }
        let [of_group, of_all] = self.limits;
        let begun = Instant::now();
        let limit = of_group.min(of_all.saturating_sub(self.spent));
        let counts = self.known.len() < GROUPS && self.knows_all(question, ask, || begun.elapsed() < limit);
        self.spent += begun.elapsed();
        self.known.insert(group, counts);
        counts
    }

    /// Whether all members of a group, as far as one look finds them, are published. The kernel chooses one for each port that a datagram could
    /// be from; which one for which port is its secret.
    fn knows_all(
        &self,
        question: ReceiverQuestion,
        mut ask: impl FnMut(&[ReceiverQuestion]) -> Vec<Option<FoundReceiver>>,
        has_time: impl Fn() -> bool,
    ) -> bool {
        let random = RandomState::new();
        // Ports from 1 on.
        let port = |at: u16| (random.hash_one(at) as u16).max(1);
        let from = |at| SocketAddr::new(question.from.ip(), port(at));
        let probes: Vec<_> = (0..PROBES).map(|at| ReceiverQuestion { from: from(at), ..question }).collect();
        probes.chunks(AT_A_TIME).all(|some| {
            let found = if has_time() { ask(some) } else { Vec::new() };
            found.len() == some.len()
                && found.iter().all(|found| found.is_some_and(|it| self.members.0.contains_key(&it.cookie)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: &str = "127.0.0.1:53";

    fn question(in_group: bool) -> ReceiverQuestion {
        ReceiverQuestion { from: "127.0.0.1:5000".parse().unwrap(), to: TO.parse().unwrap(), in_group }
    }

    fn found(cookie: u64) -> FoundReceiver {
        FoundReceiver { cookie, is_connected: false }
    }

    /// Has a kernel choose between two members by the parity of the source port, and count the probes.
    fn choose(probes: &[ReceiverQuestion], count: &mut usize) -> Vec<Option<FoundReceiver>> {
        *count += probes.len();
        assert!(probes.iter().all(|probe| probe.to == question(true).to && probe.from.port() != 0));
        probes.iter().map(|probe| Some(found(1 + u64::from(probe.from.port() % 2)))).collect()
    }

    #[test]
    fn answer_counts_while_all_members_are_published() {
        let (mut members, mut probes) = (GroupMembers::default(), 0);
        let mut counts = |members: &GroupMembers, question, found| {
            GroupLook::new(members).counts((0, question), found, |asked| choose(asked, &mut probes))
        };
        members.count(1, true);
        assert!(!counts(&members, question(true), found(1)), "the other is not published");
        for (question, found) in
            [(question(true), FoundReceiver { is_connected: true, ..found(1) }), (question(false), found(1))]
        {
            let counts = GroupLook::new(&members).counts((0, question), found, |_| panic!("nothing to be asked"));
            assert!(counts, "{question:?}");
        }
        members.count(2, true);
        members.count(2, true);
        assert!(counts(&members, question(true), found(1)));
        members.count(2, false);
        assert!(counts(&members, question(true), found(1)), "published once still");
        members.count(2, false);
        assert!(!counts(&members, question(true), found(1)));
        members.count(2, false);
        members.count(1, false);
        assert!(members.is_empty(), "withdrawn more often than published");
        assert!(
            (2 * usize::from(PROBES)..4 * usize::from(PROBES)).contains(&probes),
            "{probes}: it stops at a stranger"
        );
    }

    #[test]
    fn group_without_an_answer_to_each_probe_does_not_count() {
        let mut members = GroupMembers::default();
        members.count(1, true);
        let answers = |len| vec![Some(found(1)); len];
        let holed = [answers(usize::from(PROBES) - 1), vec![None]].concat();
        for (answers, expected) in
            [(answers(PROBES.into()), true), (answers(3), false), (vec![], false), (holed, false)]
        {
            let mut rest = answers.clone();
            let ask = |asked: &[ReceiverQuestion]| rest.drain(..asked.len().min(rest.len())).collect();
            let counts = GroupLook::new(&members).counts((0, question(true)), found(1), ask);
            assert_eq!(counts, expected, "{answers:?}");
        }
    }

    #[test]
    fn group_that_takes_too_long_does_not_count() {
        let (mut members, mut probes) = (GroupMembers::default(), 0);
        members.count(1, true);
        members.count(2, true);
        let mut slowly = |look: &mut GroupLook<'_, i32>, group| {
            look.counts((group, question(true)), found(1), |asked| {
                std::thread::sleep(Duration::from_millis(5));
                choose(asked, &mut probes)
            })
        };
        let [short, long] = [Duration::from_millis(5), Duration::from_secs(60)];
        assert!(!slowly(&mut GroupLook::new(&members).within(short, long), 0), "one group");
        let mut look = GroupLook::new(&members).within(long, short);
        assert!(!slowly(&mut look, 0) && !slowly(&mut look, 1), "all groups");
        assert!(slowly(&mut GroupLook::new(&members).within(long, long), 0));
        assert_eq!(probes, 2 * AT_A_TIME + usize::from(PROBES), "nothing is asked without time");
    }

    #[test]
    fn groups_are_probed_once_each_up_to_the_limit() {
        let (mut members, mut probes) = (GroupMembers::default(), 0);
        members.count(1, true);
        members.count(2, true);
        let mut look = GroupLook::new(&members);
        let mut counted = 0;
        for group in 0..GROUPS + 2 {
            for _ in 0..2 {
                counted +=
                    usize::from(look.counts((group, question(true)), found(1), |asked| choose(asked, &mut probes)));
            }
        }
        assert_eq!((counted, probes), (2 * GROUPS, GROUPS * usize::from(PROBES)));
    }
}
