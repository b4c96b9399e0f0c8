//! A limit on the lines that one place in a program may write into the log, so that a peer that causes them does not fill it.
//!
//! ```text
//!   place in the program    200 lines in 10 s
//!     +- peer alpha          50 of them      the peer is the value of the line's first field of PEERS
//!     +- peer beta           50 of them
//! ```
//!
//! So one noisy peer does not hide what the place has to say of others.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Lines of one place in one period.
const LINES: u32 = 200;
/// The part of them that may be about one peer.
const PEER_LINES: u32 = LINES / 4;
const PERIOD: Duration = Duration::from_secs(10);

/// The fields that name the peer that a line is about.
const PEERS: [&str; 6] = ["host", "user", "machine", "domain", "port", ADDRESS];
/// The field with an address. A peer has a port for each connection, so only what comes before the port counts.
const ADDRESS: &str = "address";

/// Leaves out lines of a place in the program that has written [`LINES`] in a [`PERIOD`], or [`PEER_LINES`] about the same peer. Lines for
/// developers, less severe than `INFO`, are not limited.
#[derive(Debug)]
pub(crate) struct FloodLimit<N> {
    places: Mutex<HashMap<Identifier, PlaceLines>>,
    hash: RandomState,
    /// Called with the place and the peer of the first line that is left out in a period.
    notice: N,
}

#[derive(Debug)]
struct PlaceLines {
    begun: Instant,
    lines: u32,
    /// Lines by the hash of the peer. Each peer has written one of `lines`, which bounds their number.
    peers: HashMap<u64, u32>,
}

/// What becomes of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineFate {
    Written,
    /// The first one that is left out in this period.
    FirstLeftOut,
    LeftOut,
}

impl PlaceLines {
    fn begin(begun: Instant) -> Self {
        Self { begun, lines: 0, peers: HashMap::new() }
    }

    fn count(&mut self, peer: Option<u64>) -> LineFate {
        if let Some(peer) = peer
            && self.lines < LINES
        {
            let lines = self.peers.entry(peer).or_default();
            *lines = lines.saturating_add(1);
            if *lines > PEER_LINES {
                return if *lines == PEER_LINES + 1 { LineFate::FirstLeftOut } else { LineFate::LeftOut };
            }
        }
        self.lines = self.lines.saturating_add(1);
        match self.lines {
            ..=LINES => LineFate::Written,
            lines if lines == LINES + 1 => LineFate::FirstLeftOut,
            _ => LineFate::LeftOut,
        }
    }
}

impl<N: Fn(&Metadata<'_>, Option<&str>)> FloodLimit<N> {
    pub(crate) fn new(notice: N) -> Self {
        Self { places: Mutex::default(), hash: RandomState::new(), notice }
    }

    fn allows(&self, place: &'static Metadata<'static>, peer: Option<&str>, now: Instant) -> bool {
        let fate = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            let written = places.entry(place.callsite()).or_insert_with(|| PlaceLines::begin(now));
            if now.duration_since(written.begun) >= PERIOD {
                *written = PlaceLines::begin(now);
            }
            written.count(peer.map(|peer| self.hash.hash_one(peer)))
        };
        if fate == LineFate::FirstLeftOut {
            (self.notice)(place, peer);
        }
        fate == LineFate::Written
    }
}

impl<S: Subscriber, N: Fn(&Metadata<'_>, Option<&str>) + 'static> Layer<S> for FloodLimit<N> {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let mut peer = PeerOfLine(None);
        event.record(&mut peer);
        self.allows(event.metadata(), peer.0.as_deref(), Instant::now())
    }
}

/// The peer that a line is about.
#[derive(Debug)]
struct PeerOfLine(Option<String>);

impl PeerOfLine {
    fn take(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        if self.0.is_some() || !PEERS.contains(&field.name()) {
            return;
        }
        let mut text = String::new();
        // Writing to a string fails only if the value's own text does. What it has written until then counts.
        let _ = text.write_fmt(value);
        if field.name() == ADDRESS
            && let Some((ip, _)) = text.rsplit_once(':')
        {
            text.truncate(ip.len());
        }
        self.0 = Some(text);
    }
}

impl Visit for PeerOfLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.take(field, format_args!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// Counts the lines that come through.
    struct Lines(Arc<AtomicU32>);

    impl<S: Subscriber> Layer<S> for Lines {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Finds the place that writes a line.
    struct Place(Arc<Mutex<Option<&'static Metadata<'static>>>>);

    impl<S: Subscriber> Layer<S> for Place {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            *self.0.lock().unwrap() = Some(event.metadata());
        }
    }

    fn written(write: impl FnOnce()) -> (u32, u32) {
        let [lines, notices] = [(); 2].map(|()| Arc::<AtomicU32>::default());
        let noticed = Arc::clone(&notices);
        let limit = FloodLimit::new(move |_, _| {
            noticed.fetch_add(1, Ordering::Relaxed);
        });
        let subscriber = tracing_subscriber::registry().with(limit).with(Lines(Arc::clone(&lines)));
        tracing::subscriber::with_default(subscriber, write);
        (lines.load(Ordering::Relaxed), notices.load(Ordering::Relaxed))
    }

    #[test]
    fn place_that_floods_log_is_cut_off_with_one_notice() {
        let flood = written(|| {
            for number in 0..LINES * 3 {
                tracing::warn!(number, "a connection was refused");
            }
            tracing::warn!("another place");
        });
        assert_eq!(flood, (LINES + 1, 1));
    }

    #[test]
    fn noisy_peer_leaves_lines_to_other_peers() {
        let refused = |host: &str| tracing::warn!(host, "a connection was refused");
        let flood = written(|| {
            (0..LINES * 3).for_each(|_| refused("noisy"));
            refused("quiet");
        });
        assert_eq!(flood, (PEER_LINES + 1, 1));
        let many = written(|| (0..LINES * 3).for_each(|n| refused(&n.to_string())));
        assert_eq!(many, (LINES, 1), "all peers together");
    }

    #[test]
    fn connections_from_one_address_are_one_peer() {
        let refused = |address: SocketAddr| tracing::warn!(%address, "a connection was refused");
        let flood = written(|| {
            for ip in ["10.0.0.1", "::1"] {
                (0..1000).for_each(|port| refused(SocketAddr::new(ip.parse().unwrap(), port)));
            }
        });
        assert_eq!(flood, (PEER_LINES * 2, 2));
    }

    #[test]
    fn lines_for_developers_are_not_limited() {
        assert_eq!(written(|| (0..LINES * 3).for_each(|n| tracing::debug!(n, "a detail"))), (LINES * 3, 0));
    }

    #[test]
    fn place_may_write_again_after_period() {
        let (limit, now) = (FloodLimit::new(|_, _| {}), Instant::now());
        let found = Arc::default();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(Place(Arc::clone(&found))), || {
            tracing::info!("a line");
        });
        let place = found.lock().unwrap().unwrap();
        let line = |at| limit.allows(place, None, at);
        assert!((0..LINES).all(|_| line(now)));
        assert!(!line(now));
        assert!(line(now + PERIOD));
    }
}
