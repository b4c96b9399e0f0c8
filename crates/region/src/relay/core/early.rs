//! Notices about links that this side does not know yet (protocol P6): the two ends may cross.

use std::collections::VecDeque;

/// The most notices that are kept: far more than there can be in transit.
const MOST: usize = 1024;

/// What the other side says of a link once. (Rings need not be kept: a half that begins to read looks at the memory first.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkNotice {
    /// Its other end has hung up.
    HungUp,
    /// From a guest: this vector rings its process.
    RungBy { vector: u32 },
    /// From a host: the doorbell device rings its other end as this peer.
    RingAs { peer: u32 },
}

/// The notices that wait for their links, the oldest first.
#[derive(Debug, Default)]
pub(super) struct EarlyNotices(VecDeque<(u32, LinkNotice)>);

impl EarlyNotices {
    /// Keeps a notice, in place of the oldest if there are too many.
    pub(super) fn keep(&mut self, link: u32, notice: LinkNotice) {
        if self.0.len() >= MOST {
            self.0.pop_front();
        }
        self.0.push_back((link, notice));
    }

    /// Takes those of one link out, in their order.
    pub(super) fn take(&mut self, link: u32) -> Vec<LinkNotice> {
        let notices = self.0.iter().filter(|(of, _)| *of == link).map(|(_, notice)| *notice).collect();
        self.0.retain(|(of, _)| *of != link);
        notices
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
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
        assert_eq!(early.0.len(), MOST);
        assert_eq!(early.take(0), []);
        assert_eq!(early.take(4999), [LinkNotice::HungUp, LinkNotice::RingAs { peer: 3 }]);
        assert_eq!(early.take(4999), [], "a notice is kept once");
    }
}
