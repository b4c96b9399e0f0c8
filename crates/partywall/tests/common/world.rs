//! An embedded broker with two domains.

use super::eventually;
use partywall::{Domain, Options, Stream};
use partywall_daemon::Broker;

pub(crate) struct World {
    /// The domain that offers services.
    pub(crate) web: Domain,
    /// Connects to them.
    pub(crate) shop: Domain,
    pub(crate) broker: Broker,
}

impl World {
    pub(crate) fn new() -> Self {
        super::watch_all();
        let broker = Broker::embedded().unwrap();
        let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
        Self { web: join("web"), shop: join("shop"), broker }
    }

    /// The two ends of a connection that the broker has made.
    pub(crate) fn connection(&self, options: &Options) -> (Stream, Stream) {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let service = format!("s{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let mut listener = self.web.bind_with(&service, options).unwrap();
        let there = self.shop.connect_with(&format!("web:{service}"), options).unwrap();
        (there, listener.accept().unwrap().0)
    }

    /// Waits until the broker knows of no channel.
    pub(crate) fn assert_no_channel_is_left(&self) {
        eventually("the broker forgets every channel", || self.web.channels().unwrap().is_empty());
        eventually("the broker forgets every channel", || self.broker.status().channels == 0);
    }
}
