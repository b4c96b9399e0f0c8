//! What the gateway counts: streams, their bytes, and refusals.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use partywall::Refusal;
use partywall::cluster::Name;

/// The side that has asked for a stream, or that sends bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StreamDirection {
    /// From another host to this one.
    In,
    /// From this host to another.
    Out,
}

impl StreamDirection {
    /// The value of a label.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
        }
    }
}

/// The counters of a gateway.
#[derive(Debug, Default)]
pub(crate) struct GatewayCounters {
    streams: Mutex<BTreeMap<(Name, StreamDirection), u64>>,
    refusals: Mutex<BTreeMap<(StreamDirection, u16), u64>>,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

/// A stream that is open. It counts until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenStream {
    counters: Arc<GatewayCounters>,
    key: (Name, StreamDirection),
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GatewayCounters {
    /// Counts a stream that was opened from or to another host.
    pub(crate) fn opened(self: &Arc<Self>, host: &Name, direction: StreamDirection) -> OpenStream {
        let key = (host.clone(), direction);
        *guard(&self.streams).entry(key.clone()).or_default() += 1;
        OpenStream { counters: Arc::clone(self), key }
    }

    /// Counts bytes of streams that were carried.
    pub(crate) fn carried(&self, direction: StreamDirection, bytes: usize) {
        let counter = match direction {
            StreamDirection::In => &self.bytes_in,
            StreamDirection::Out => &self.bytes_out,
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a request from or to another host that was refused.
    pub(crate) fn refused(&self, direction: StreamDirection, code: Refusal) {
        *guard(&self.refusals).entry((direction, code.number())).or_default() += 1;
    }

    /// Open streams, by host and direction.
    pub(crate) fn streams(&self) -> Vec<((Name, StreamDirection), u64)> {
        guard(&self.streams).iter().map(|(key, count)| (key.clone(), *count)).collect()
    }

    /// Refusals, by direction and code.
    pub(crate) fn refusals(&self) -> Vec<(StreamDirection, Refusal, u64)> {
        let known = |((direction, code), count): (&(StreamDirection, u16), &u64)| {
            Some((*direction, Refusal::from_number(*code)?, *count))
        };
        guard(&self.refusals).iter().filter_map(known).collect()
    }

    /// Bytes of streams, by direction.
    pub(crate) fn bytes(&self) -> [(StreamDirection, u64); 2] {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [(StreamDirection::In, value(&self.bytes_in)), (StreamDirection::Out, value(&self.bytes_out))]
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut streams = guard(&self.counters.streams);
        if let Some(count) = streams.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                streams.remove(&self.key);
            }
        }
    }
}
