//! Notices about links that this side does not know yet (protocol P6): the two ends may cross.

use std::collections::VecDeque;

/// The most notices that are kept: far more than there can be in transit.
const MOST: usize = 1024;

/// A notice that the other side sends once for a link. (Rings need not be kept: a half that begins to read looks at the memory first.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkNotice {
    /// Its other end has hung up.
    HungUp,
    /// From a host: it has hung up because a machine is being migrated.
    Moved,
    /// From a guest: this vector rings its process.
    RungBy { vector: u32 },
    /// From a host: the doorbell device rings its other end as this peer.
    RingAs { peer: u32 },
}

/// The notices that wait for their links, the oldest first.
///
/// A notice can also come too late: for a link that has ended on this side, or for a number that gets no link because the connection was
/// refused. Such numbers are remembered for a while, or their notices would fill the room of those that wait.
#[derive(Debug, Default)]
pub(super) struct EarlyNotices {
    waiting: VecDeque<(u32, LinkNotice)>,
    /// Numbers whose notices come too late, the oldest first.
    over: VecDeque<u32>,
}

impl EarlyNotices {
    /// Keeps a notice unless it is late, in place of the oldest if there are too many.
    pub(super) fn keep(&mut self, link: u32, notice: LinkNotice) {
        if self.over.contains(&link) {
            return;
        }
        if self.waiting.len() >= MOST {
            self.waiting.pop_front();
        }
        self.waiting.push_back((link, notice));
    }

    /// This number has a link from now on. Takes its notices out, in their order.
    pub(super) fn take(&mut self, link: u32) -> Vec<LinkNotice> {
        self.over.retain(|of| *of != link);
        let notices = self.waiting.iter().filter(|(of, _)| *of == link).map(|(_, notice)| *notice).collect();
        self.waiting.retain(|(of, _)| *of != link);
        notices
    }

    /// This number has no link any more, or gets none. Its notices are dropped, and later ones count as late.
    pub(super) fn forget(&mut self, link: u32) {
        self.waiting.retain(|(of, _)| *of != link);
        if self.over.len() >= MOST {
            self.over.pop_front();
        }
        self.over.push_back(link);
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.over.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_notices_beyond_the_most_replace_the_oldest() {
        let mut early = EarlyNotices::default();
        for link in 0..5000 {
            early.keep(link, LinkNotice::HungUp);
        }
        early.keep(4999, LinkNotice::RingAs { peer: 3 });
        assert_eq!(early.waiting.len(), MOST);
        assert_eq!(early.take(0), []);
        assert_eq!(early.take(4999), [LinkNotice::HungUp, LinkNotice::RingAs { peer: 3 }]);
        assert_eq!(early.take(4999), [], "a notice is kept once");
    }

    #[test]
    fn late_notices_are_not_kept() {
        let mut early = EarlyNotices::default();
        early.keep(0, LinkNotice::HungUp);
        for link in 1..5000 {
            early.keep(link, LinkNotice::RungBy { vector: 3 });
            early.forget(link);
            early.keep(link, LinkNotice::HungUp);
        }
        assert_eq!((early.waiting.len(), early.over.len()), (1, MOST));
        assert_eq!(early.take(4999), [], "nothing was kept");
        early.keep(4999, LinkNotice::HungUp);
        assert_eq!(early.take(4999), [LinkNotice::HungUp], "the number has a link again");
        assert_eq!(early.take(0), [LinkNotice::HungUp]);
    }
}
