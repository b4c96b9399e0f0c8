//! Work of several users in one queue each: whose turn it is, and which piece is dropped when there is too much.
//!
//! ```text
//!   user A   [ ][ ][ ][ ][ ][ ]    A B C A B A A A: one piece of each user in turn
//!   user B   [ ][ ]
//!   user C   [ ]
//! ```
//!
//! A user who brings more pieces makes only that user's queue longer. No piece of another user waits for more than one piece of
//! each user. When all queues together hold as many pieces as they may, the newest piece of the longest queue is dropped.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// One queue for each user, served in turn.
#[derive(Debug)]
pub(super) struct Turns<U, P> {
    queues: HashMap<U, VecDeque<P>>,
    /// The users that have a queue, in the order of their turns.
    order: VecDeque<U>,
    held: usize,
    most: usize,
}

impl<U: Copy + Eq + Hash, P> Turns<U, P> {
    /// Queues that hold at most `most` pieces together.
    pub(super) fn new(most: usize) -> Self {
        Self { queues: HashMap::new(), order: VecDeque::new(), held: 0, most: most.max(1) }
    }

    /// Users that have pieces here.
    pub(super) fn users(&self) -> usize {
        self.order.len()
    }

    /// Adds a piece to its user's queue. If there are too many pieces, returns the one that is dropped: the newest of a user whose
    /// queue stays at least as long as this user's, or else this one.
    pub(super) fn push(&mut self, user: U, piece: P) -> Option<P> {
        let mut dropped = None;
        if self.held == self.most {
            let own = self.queues.get(&user).map_or(0, VecDeque::len);
            match self.longest().filter(|(_, length)| *length > own + 1) {
                Some((longest, _)) => dropped = self.queues.get_mut(&longest).and_then(VecDeque::pop_back),
                None => return Some(piece),
            }
        } else {
            self.held += 1;
        }
        let order = &mut self.order;
        let queue = self.queues.entry(user).or_insert_with(|| {
            order.push_back(user);
            VecDeque::new()
        });
        queue.push_back(piece);
        dropped
    }

    /// The user with the longest queue, and its length.
    fn longest(&self) -> Option<(U, usize)> {
        self.queues.iter().map(|(user, queue)| (*user, queue.len())).max_by_key(|(_, length)| *length)
    }

    /// Whether any user for whom `may` is true has pieces here.
    pub(super) fn has_any(&self, may: impl Fn(&U) -> bool) -> bool {
        self.order.iter().any(may)
    }

    /// The oldest piece of the user whose turn it is, with that user. Only users for whom `may` is true have turns. The next turn is
    /// another user's, if
    /// another user has pieces.
    pub(super) fn next(&mut self, may: impl Fn(&U) -> bool) -> Option<(U, P)> {
        let at = self.order.iter().position(may)?;
        let user = self.order.remove(at)?;
        let queue = self.queues.get_mut(&user)?;
        let piece = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&user);
        } else {
            self.order.push_back(user);
        }
        self.held -= usize::from(piece.is_some());
        piece.map(|piece| (user, piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pieces that say whose they are.
    fn fill(turns: &mut Turns<u32, (u32, u32)>, user: u32, count: u32) -> Vec<(u32, u32)> {
        (0..count).filter_map(|number| turns.push(user, (user, number))).collect()
    }

    fn drain(turns: &mut Turns<u32, (u32, u32)>) -> Vec<(u32, u32)> {
        std::iter::from_fn(|| turns.next(|_| true))
            .map(|(user, piece)| {
                assert_eq!(user, piece.0);
                piece
            })
            .collect()
    }

    #[test]
    fn piece_behind_thousand_of_another_user_is_served_second() {
        let mut turns = Turns::new(4096);
        assert!(fill(&mut turns, 1, 1000).is_empty());
        assert!(fill(&mut turns, 2, 1).is_empty());
        let served = drain(&mut turns);
        assert_eq!(served[1], (2, 0));
        assert_eq!(served.len(), 1001);
        assert!(!turns.has_any(|_| true));
    }

    #[test]
    fn user_that_refills_queue_gets_every_second_turn_of_two() {
        let mut turns = Turns::new(100);
        fill(&mut turns, 1, 100);
        fill(&mut turns, 2, 40);
        let mut hostile = 0;
        for _ in 0..80 {
            fill(&mut turns, 1, 100);
            hostile += u32::from(turns.next(|_| true).unwrap().0 == 1);
        }
        assert_eq!(hostile, 40);
        assert!(turns.has_any(|_| true), "all others are the hostile user's");
    }

    #[test]
    fn skipped_user_keeps_its_place_in_queue() {
        let mut turns = Turns::new(10);
        fill(&mut turns, 1, 2);
        fill(&mut turns, 2, 1);
        assert_eq!(turns.next(|user| *user != 1), Some((2, (2, 0))));
        assert!(!turns.has_any(|user| *user != 1));
        assert_eq!(turns.next(|user| *user != 1), None);
        assert_eq!(drain(&mut turns), [(1, 0), (1, 1)]);
    }

    #[test]
    fn full_queues_drop_newest_entry_of_longest_queue() {
        let mut turns = Turns::new(10);
        assert_eq!(fill(&mut turns, 1, 12), [(1, 10), (1, 11)], "of one user, the newest is dropped");
        assert_eq!(
            fill(&mut turns, 2, 3),
            [(1, 9), (1, 8), (1, 7)],
            "room is made at the expense of the longest queue"
        );
        assert_eq!(drain(&mut turns)[..4], [(1, 0), (2, 0), (1, 1), (2, 1)]);
    }

    proptest! {
        #[test]
        fn every_piece_is_served_or_dropped_once_and_in_order(
            steps in proptest::collection::vec(proptest::option::weighted(0.7, 0u32..4), 0..300),
            most in 1usize..20,
        ) {
            let mut turns = Turns::new(most);
            let (mut served, mut dropped, mut brought) = (Vec::new(), Vec::new(), 0);
            for step in steps {
                match step {
                    Some(user) => {
                        dropped.extend(turns.push(user, (user, brought)));
                        brought += 1;
                    }
                    None => served.extend(turns.next(|_| true).map(|(_, piece)| piece)),
                }
                prop_assert!(turns.held <= most);
                prop_assert_eq!(turns.held, turns.queues.values().map(VecDeque::len).sum::<usize>());
                prop_assert_eq!(turns.users(), turns.queues.len());
            }
            served.extend(drain(&mut turns));
            for user in 0..4 {
                let own: Vec<_> = served.iter().filter(|piece| piece.0 == user).collect();
                prop_assert!(own.is_sorted());
            }
            let mut all: Vec<u32> = served.iter().chain(&dropped).map(|piece| piece.1).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..brought).collect::<Vec<_>>());
        }
    }
}
