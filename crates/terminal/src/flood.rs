//! A limit on the lines that one place in a program may write into the log, so that a peer that causes them does not fill it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Lines of one place in one period.
const LINES: u32 = 200;
const PERIOD: Duration = Duration::from_secs(10);

/// Leaves out lines of a place in the program that has written [`LINES`] in a [`PERIOD`]. Lines for developers, less severe than `INFO`,
/// are not limited.
#[derive(Debug)]
pub(crate) struct FloodLimit<N> {
    places: Mutex<HashMap<Identifier, PlaceLines>>,
    /// Called with the place of the first line that is left out in a period.
    notice: N,
}

#[derive(Debug)]
struct PlaceLines {
    begun: Instant,
    lines: u32,
}

impl<N: Fn(&Metadata<'_>)> FloodLimit<N> {
    pub(crate) fn new(notice: N) -> Self {
        Self { places: Mutex::default(), notice }
    }

    fn allows(&self, place: &'static Metadata<'static>, now: Instant) -> bool {
        let lines = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            let written = places.entry(place.callsite()).or_insert(PlaceLines { begun: now, lines: 0 });
            if now.duration_since(written.begun) >= PERIOD {
                *written = PlaceLines { begun: now, lines: 0 };
            }
            written.lines = written.lines.saturating_add(1);
            written.lines
        };
        if lines == LINES + 1 {
            (self.notice)(place);
        }
        lines <= LINES
    }
}

impl<S: Subscriber, N: Fn(&Metadata<'_>) + 'static> Layer<S> for FloodLimit<N> {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        *event.metadata().level() > Level::INFO || self.allows(event.metadata(), Instant::now())
    }
}

#[cfg(test)]
mod tests {
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
        let limit = FloodLimit::new(move |_| {
            noticed.fetch_add(1, Ordering::Relaxed);
        });
        let subscriber = tracing_subscriber::registry().with(limit).with(Lines(Arc::clone(&lines)));
        tracing::subscriber::with_default(subscriber, write);
        (lines.load(Ordering::Relaxed), notices.load(Ordering::Relaxed))
    }

    #[test]
    fn place_that_floods_log_is_cut_off_with_one_notice() {
        let flood = written(|| {
            for host in 0..LINES * 3 {
                tracing::warn!(host, "a connection was refused");
            }
            tracing::warn!("another place");
        });
        assert_eq!(flood, (LINES + 1, 1));
    }

    #[test]
    fn lines_for_developers_are_not_limited() {
        assert_eq!(written(|| (0..LINES * 3).for_each(|n| tracing::debug!(n, "a detail"))), (LINES * 3, 0));
    }

    #[test]
    fn place_may_write_again_after_period() {
        let (limit, now) = (FloodLimit::new(|_| {}), Instant::now());
        let found = Arc::default();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(Place(Arc::clone(&found))), || {
            tracing::info!("a line");
        });
        let place = found.lock().unwrap().unwrap();
        let line = |at| limit.allows(place, at);
        assert!((0..LINES).all(|_| line(now)));
        assert!(!line(now));
        assert!(line(now + PERIOD));
    }
}
