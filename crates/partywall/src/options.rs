//! Options of connections and listeners.

use crate::{Error, Result};
use partywall_region::wait::DEFAULT_SPIN;
use partywall_shm::layout::{HUGE_PAGE, MAX_RING, MIN_RING};
use std::time::Duration;

/// Size of this side's ring in bytes. The ring holds the bytes that this side has written and the peer has not read yet.
///
/// ```
/// use partywall::{Options, RingSize, Stream};
///
/// let fixed = Options::default().ring(RingSize::Fixed(1 << 20));
/// let (mut stream, _peer) = Stream::pair(&fixed)?;
/// assert_eq!(stream.writer()?.ring_size(), 1 << 20);
///
/// assert_eq!(Options::default().ring, RingSize::DEFAULT);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingSize {
    /// Adapts to the traffic: grows while bytes flow fast, and shrinks when they are few.
    Adaptive {
        /// Smallest size.
        initial: u64,
        /// Largest size.
        max: u64,
    },
    /// Keeps this size, in bytes.
    Fixed(u64),
}

impl RingSize {
    /// 16 KiB, growing to 8 MiB: small enough for ten thousand quiet channels, large enough for the fastest stream.
    pub const DEFAULT: Self = Self::Adaptive { initial: 16 << 10, max: 8 << 20 };

    pub(crate) fn bounds(self) -> (u64, u64) {
        match self {
            Self::Adaptive { initial, max } => (initial, max),
            Self::Fixed(size) => (size, size),
        }
    }
}

/// Options of a connection or a listener. Each side chooses its own, and they need not match.
///
/// ```
/// use partywall::{Options, RingSize, Stream};
/// use std::time::Duration;
///
/// // A control connection: small, never spins, and takes no more than 1 MiB of rings from its peer.
/// let quiet = Options::default()
///     .ring(RingSize::Adaptive { initial: 4096, max: 1 << 16 })
///     .spin(Duration::ZERO)
///     .max_peer_ring(1 << 20);
/// let (mut stream, _peer) = Stream::pair(&quiet)?;
/// assert_eq!(stream.writer()?.ring_size(), 4096);
///
/// // A server that sleeps after nearly each request.
/// assert!(Options::default().sleeps_often(true).sleeps_often);
///
/// // A listener for logs.
/// let logs = Options::default().one_way(true).huge_pages(true).backlog(16);
/// assert!(logs.one_way && logs.huge_pages);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// Size of this side's ring. Sizes are rounded up to powers of two, from 4 KiB to 1 GiB. The broker's policy limits the largest size
    /// (`max_ring`).
    pub ring: RingSize,
    /// The longest time to spin before sleeping; zero sleeps at once. Up to that limit, the spin adapts to its success. The default is 100 µs. With
    /// the default, a connection to another machine spins for up to 1 ms.
    pub spin: Duration,
    /// Connecting: only this side writes, and no ring is allocated for the other direction.
    pub one_way: bool,
    /// Take the ring from huge pages, which the operator must have reserved. The ring is then at least 2 MiB.
    pub huge_pages: bool,
    /// Listening: the most connections that may wait for an accept, 1 to 128. A smaller or larger number is replaced by the nearer limit.
    pub backlog: u16,
    /// The most bytes of new rings, together, that the peer may send before this side begins to read them. If the peer sends more, reading fails with
    /// [`Error::Corrupt`]. The ring in use and the first ring of the connection stay mapped in addition. The default is 64 MiB.
    pub max_peer_ring: u64,
    /// The sides of the connection sleep often in relation to the messages that they send, as the gateway between hosts does. Each write and each read
    /// then has a memory fence, of about 10 ns. Otherwise they have none, and a side that goes to sleep interrupts every other processor that runs a
    /// program of Partywall, for some microseconds (`membarrier(2)`; protocol W4). `true` of either side counts for both. Between machines there is
    /// always a fence. The default is `false`.
    pub sleeps_often: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ring: RingSize::DEFAULT,
            spin: DEFAULT_SPIN,
            one_way: false,
            huge_pages: false,
            backlog: 128,
            max_peer_ring: 64 << 20,
            sleeps_often: false,
        }
    }
}

impl Options {
    /// Sets [`Options::ring`].
    #[must_use]
    pub fn ring(mut self, ring: RingSize) -> Self {
        self.ring = ring;
        self
    }

    /// Sets [`Options::spin`].
    #[must_use]
    pub fn spin(mut self, longest: Duration) -> Self {
        self.spin = longest;
        self
    }

    /// Sets [`Options::one_way`].
    #[must_use]
    pub fn one_way(mut self, yes: bool) -> Self {
        self.one_way = yes;
        self
    }

    /// Sets [`Options::huge_pages`].
    #[must_use]
    pub fn huge_pages(mut self, yes: bool) -> Self {
        self.huge_pages = yes;
        self
    }

    /// Sets [`Options::backlog`].
    #[must_use]
    pub fn backlog(mut self, connections: u16) -> Self {
        self.backlog = connections;
        self
    }

    /// Sets [`Options::max_peer_ring`].
    #[must_use]
    pub fn max_peer_ring(mut self, bytes: u64) -> Self {
        self.max_peer_ring = bytes;
        self
    }

    /// Sets [`Options::sleeps_often`].
    #[must_use]
    pub fn sleeps_often(mut self, yes: bool) -> Self {
        self.sleeps_often = yes;
        self
    }

    /// The ring's smallest and largest size, checked and rounded, within what the broker allows.
    pub(crate) fn ring_bounds(&self, limit: u64) -> Result<(u64, u64)> {
        let (min, max) = self.ring.bounds();
        if min > max || max > MAX_RING || min == 0 {
            return Err(Error::Invalid(format!(
                "ring of {min} to {max} bytes: sizes go from {MIN_RING} to {MAX_RING}"
            )));
        }
        let floor = if self.huge_pages { HUGE_PAGE } else { MIN_RING };
        let round = |size: u64| size.next_power_of_two().max(floor);
        let (min, max) = (round(min), round(max));
        if min > limit {
            let advice = "the broker's policy sets this limit (max_ring)";
            return Err(Error::TooLarge { asked: min, max: limit, advice });
        }
        // The largest power of two within the limit: growing is a wish, not a demand.
        let limit = if limit == 0 { 0 } else { 1 << limit.ilog2() };
        Ok((min, max.min(limit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_checked_and_limited() {
        let bounds = |ring, limit| Options::default().ring(ring).ring_bounds(limit).ok();
        assert_eq!(bounds(RingSize::Fixed(5000), MAX_RING), Some((8192, 8192)));
        assert_eq!(bounds(RingSize::Fixed(1), MAX_RING), Some((4096, 4096)));
        assert_eq!(bounds(RingSize::Fixed(0), MAX_RING), None);
        assert_eq!(bounds(RingSize::Fixed(MAX_RING + 1), MAX_RING), None);
        assert_eq!(bounds(RingSize::Fixed(1 << 20), 1 << 19), None);
        assert_eq!(bounds(RingSize::Adaptive { initial: 4096, max: 1 << 23 }, 3 << 19), Some((4096, 1 << 20)));
        assert_eq!(bounds(RingSize::Adaptive { initial: 8192, max: 4096 }, MAX_RING), None);
        let huge = Options::default().huge_pages(true).ring_bounds(MAX_RING).unwrap();
        assert_eq!(huge.0, HUGE_PAGE);
    }
}
