//! Local multicast: one write, many readers (protocol B).

mod subscriber;

pub use subscriber::Subscriber;

use crate::listener::{Acceptor, PublisherOffer, Subscription};
use crate::waiter::{WaitScene, WaitStep, WaitTurn};
use crate::{Domain, Error, Options, Result};
use partywall_protocol::wire::Kind;
use partywall_region::wait::publish_core;
use partywall_region::{LinkEvent, OwnRegion, RegionOptions};
use partywall_shm::counters::{Snapshot, add};
use partywall_shm::half::{self, Effect, Idle, Need};
use partywall_shm::layout::{TxHalf, flags};
use partywall_shm::record;
use partywall_shm::state::TxState;
use partywall_shm::wake::Fencing;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The treatment of subscribers that are slower than the publisher.
///
/// ```
/// use partywall::{Domain, Error, Options, Publisher, RingSize, SlowReader, Subscriber};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let small = Options::default().ring(RingSize::Fixed(4096));
/// let mut ticker = Publisher::bind(&web, "ticks", SlowReader::Drop, &small)?;
/// let mut reader = Subscriber::connect("web:ticks")?;
/// while ticker.subscribers() == 0 {
///     ticker.admit()?;
/// }
/// while ticker.dropped() == 0 {
///     ticker.send(b"faster than anybody reads")?;
/// }
/// let mut tick = Vec::new();
/// let end = loop {
///     if let Err(end) = reader.recv(&mut tick) {
///         break end;
///     }
/// };
/// assert!(matches!(end, Error::Lagged));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlowReader {
    /// The publisher waits for the subscriber. One subscriber can delay all others.
    Hold,
    /// The publisher drops a subscriber that is a whole ring behind. The subscriber gets [`Error::Lagged`].
    Drop,
    /// The publisher overwrites what a subscriber has not read, without waiting. The subscriber continues at the newest message, and
    /// [`Subscriber::lost`] counts the messages in between. A message has at most half of the ring.
    Newest,
}

/// How often the publisher looks for new subscribers while it sends.
const ADMIT_EVERY: Duration = Duration::from_millis(1);
/// A publisher that waits for a subscriber looks that often whether the broker has given it the ring.
const NAP: Duration = Duration::from_millis(1);
/// The longest that a publisher which ends waits for the broker.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Bytes of the number at the start of each record of a publisher that overruns its subscribers (protocol B4.4).
const NUMBER: u64 = 8;

/// Sends messages to every subscriber with one write.
///
/// A subscriber gets the messages sent after it was admitted. [`Publisher::send`] admits subscribers at most every
/// millisecond, and [`Publisher::admit`] at once. A publisher is for one thread at a time. Dropping it blocks for at most a second, if the
/// broker has not yet passed the ring on to a subscriber that was just admitted.
///
/// ```
/// use partywall::{Domain, Options, Publisher, SlowReader, Subscriber};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut ticker = Publisher::bind(&web, "ticks", SlowReader::Hold, &Options::default())?;
/// let mut readers = [Subscriber::connect("web:ticks")?, Subscriber::connect("web:ticks")?];
/// while ticker.subscribers() < readers.len() {
///     ticker.admit()?;
/// }
/// ticker.send(b"tick")?;
/// for reader in &mut readers {
///     let mut tick = Vec::new();
///     reader.recv(&mut tick)?;
///     assert_eq!(tick, b"tick");
/// }
/// assert_eq!(ticker.counters().messages, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Publisher {
    acceptor: Acceptor,
    ring: OwnRegion,
    memory: OwnedFd,
    slow: SlowReader,
    half: half::Broadcaster,
    subscribers: Vec<Subscription>,
    admitted: Instant,
    nonblocking: bool,
    timeout: Option<Duration>,
    dropped: u64,
    /// The number of the next message (protocol B4.4).
    number: u64,
}

impl Publisher {
    /// Binds a service to publish on. The ring's size is fixed: the largest of `options.ring`.
    ///
    /// # Errors
    /// As [`Domain::bind_with`], and [`Error::Memory`].
    pub fn bind(domain: &Domain, service: &str, slow: SlowReader, options: &Options) -> Result<Self> {
        let mut acceptor = Acceptor::bind(domain, service, Kind::Broadcast, options)?;
        acceptor.nonblocking = true;
        let (_, ring_size) = options.ring_bounds(domain.max_ring())?;
        let region = RegionOptions {
            flags: flags::BROADCAST | if slow == SlowReader::Newest { flags::OVERRUNS } else { 0 },
            huge_pages: options.huge_pages,
            symmetric: options.sleeps_often,
            epoch: domain.epoch(),
            ..RegionOptions::endpoint(ring_size)
        };
        let (ring, memory) = OwnRegion::create(&region)?;
        Ok(Self {
            acceptor,
            ring,
            memory,
            slow,
            half: half::Broadcaster::new(ring_size),
            subscribers: Vec::new(),
            admitted: Instant::now(),
            nonblocking: false,
            timeout: None,
            dropped: 0,
            number: 0,
        })
    }

    /// The longest message that can be sent, in bytes. With [`SlowReader::Newest`] it is about half of the ring, so that the newest message stays
    /// whole while the next one is written.
    pub fn max_message(&self) -> usize {
        (record::longest(self.largest()) - self.prefix()) as usize
    }

    /// Bytes of the largest record.
    fn largest(&self) -> u64 {
        match self.slow {
            SlowReader::Newest => half::Broadcaster::largest_of_two(self.half.capacity()),
            SlowReader::Hold | SlowReader::Drop => self.half.capacity(),
        }
    }

    /// Bytes of a record between its header and the message.
    fn prefix(&self) -> u64 {
        if self.slow == SlowReader::Newest { NUMBER } else { 0 }
    }

    /// Subscribers at present.
    pub fn subscribers(&self) -> usize {
        self.subscribers.len()
    }

    /// Subscribers that were dropped for being slow.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The counters of sent messages.
    pub fn counters(&self) -> Snapshot {
        self.ring.page().tx.counters.snapshot()
    }

    /// With [`SlowReader::Hold`]: whether [`Publisher::send`] returns [`Error::WouldBlock`] instead of waiting.
    ///
    /// ```
    /// use partywall::{Domain, Error, Options, Publisher, RingSize, SlowReader, Subscriber};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let small = Options::default().ring(RingSize::Fixed(4096));
    /// let mut ticker = Publisher::bind(&web, "ticks", SlowReader::Hold, &small)?;
    /// let _slow = Subscriber::connect("web:ticks")?;
    /// while ticker.subscribers() == 0 {
    ///     ticker.admit()?;
    /// }
    /// let longest = vec![0; ticker.max_message()];
    /// ticker.send(&longest)?;
    /// ticker.set_nonblocking(true);
    /// assert!(matches!(ticker.send(&longest), Err(Error::WouldBlock)));
    ///
    /// ticker.set_nonblocking(false);
    /// ticker.set_timeout(Some(Duration::from_millis(1)));
    /// assert!(matches!(ticker.send(&longest), Err(Error::TimedOut)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.nonblocking = yes;
    }

    /// With [`SlowReader::Hold`]: the longest that [`Publisher::send`] may wait; `None`: no limit.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.timeout = longest;
    }

    /// Admits waiting subscribers, and drops those that have ended. Does not block.
    ///
    /// # Errors
    /// [`Error::Memory`] or [`Error::System`] if this side cannot map the region of a subscriber: that subscriber is lost.
    pub fn admit(&mut self) -> Result<()> {
        self.admitted = Instant::now();
        let acceptor = &self.acceptor;
        self.subscribers.retain_mut(|s| !s.watch.has_hung_up() && acceptor.is_answered(s).unwrap_or(false));
        let offer = PublisherOffer { ring: &self.ring, memory: self.memory.as_fd(), half: &self.half };
        loop {
            match self.acceptor.subscription(&offer) {
                Ok(subscription) => self.subscribers.push(subscription),
                Err(Error::WouldBlock) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }

    /// Sends one message to all subscribers. If there is none, the message is lost. A new subscriber that cannot be admitted does not
    /// make this fail: [`Publisher::admit`] reports the reason.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; with [`SlowReader::Hold`] also [`Error::WouldBlock`] and [`Error::TimedOut`].
    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        if self.admitted.elapsed() >= ADMIT_EVERY
            && let Err(error) = self.admit()
        {
            // The present subscribers get the message all the same.
            tracing::debug!(%error, "a subscriber was not admitted");
        }
        let prefix = self.prefix();
        let content = message.len() as u64 + prefix;
        let footprint = record::footprint(content);
        let (Ok(len), true) = (u32::try_from(content), footprint <= self.largest()) else {
            let max = self.max_message() as u64;
            let advice = "ask for a larger ring (Options::ring), or split it";
            return Err(Error::TooLarge { asked: message.len() as u64, max, advice });
        };
        self.make_room(footprint)?;
        self.half.announce(&self.ring.page().tx, footprint);
        let mut span = self.ring.span(self.half.tail(), footprint);
        span.copy_from(0, &record::header(len));
        span.copy_from(record::HEADER as usize, &self.number.to_le_bytes()[..prefix as usize]);
        span.copy_from((record::HEADER + prefix) as usize, message);
        self.number += 1;
        self.commit(footprint);
        Ok(())
    }

    fn commit(&mut self, n: u64) {
        let own = &self.ring.page().tx;
        let symmetric = self.subscribers.iter().any(|s| s.fencing == Fencing::Symmetric);
        self.half.commit(own, n, if symmetric { Fencing::Symmetric } else { Fencing::Asymmetric });
        let overruns = self.slow == SlowReader::Newest;
        for s in &mut self.subscribers {
            let reader = &s.region.page().rx;
            let rings = if overruns { self.half.must_ring(reader, n) } else { s.half.follow(reader, n) };
            if rings {
                publish_core(&own.control.cpu);
                s.waiter.link.ring();
                add(&own.counters.bells_rung, 1);
            } else {
                add(&own.counters.bells_saved, 1);
            }
        }
        add(&own.counters.messages, 1);
    }

    /// Makes sure that no remaining subscriber still needs the `n` bytes that are overwritten next.
    fn make_room(&mut self, n: u64) -> Result<()> {
        if self.slow == SlowReader::Newest {
            // Nobody counts. Subscribers that have left are let go when others are admitted.
            let acceptor = &self.acceptor;
            self.subscribers.retain_mut(|s| acceptor.is_answered(s).unwrap_or(false));
            return Ok(());
        }
        let mut turn = None;
        loop {
            let (own, acceptor) = (&self.ring.page().tx, &self.acceptor);
            // Subscribers that have left or that broke the protocol are dropped; an honest subscriber sees no difference.
            self.subscribers.retain_mut(|s| s.is_there(own, n) && acceptor.is_answered(s).unwrap_or(false));
            let behind = self.subscribers.iter().position(|s| s.half.free() < n);
            let (Some(slowest), SlowReader::Hold) = (behind, self.slow) else {
                let before = self.subscribers.len();
                self.subscribers.retain(|s| {
                    let keeps_up = s.half.free() >= n;
                    if !keeps_up {
                        s.waiter.link.say_dropped();
                    }
                    keeps_up
                });
                self.dropped += (before - self.subscribers.len()) as u64;
                return Ok(());
            };
            let subscriber = &mut self.subscribers[slowest];
            (subscriber.waiter.nonblocking, subscriber.waiter.timeout) = (self.nonblocking, self.timeout);
            let turn = turn.get_or_insert_with(|| subscriber.waiter.begin());
            match subscriber.wait_for(own, n, turn) {
                Ok(true) => {}
                Ok(false) => drop(self.subscribers.remove(slowest)),
                Err(e) => return Err(e),
            }
        }
    }
}

impl Subscription {
    /// Whether it may be waited for, or has room for `n` bytes: it has not ended, nor broken the protocol.
    fn is_there(&mut self, own: &TxHalf, n: u64) -> bool {
        let reader = &self.region.page().rx;
        self.half.free() >= n
            || !matches!(
                self.half.next(own, Some(reader), self.watch.has_hung_up(), Need::Room(n), Idle::Spin),
                Effect::Ended(_)
            )
    }

    /// Waits until it has room for `n` bytes, or its link says something. `false`: it has left, or broken the protocol.
    fn wait_for(&mut self, own: &TxHalf, n: u64, turn: &mut WaitTurn) -> Result<bool> {
        let Self { region, waiter, fencing, half, watch, asked, .. } = self;
        let reader = &region.page().rx;
        let scene = WaitScene {
            core: &own.control.cpu,
            counters: &own.counters,
            peer_core: Some(&reader.control.cpu),
            elsewhere: false,
            fencing: *fencing,
            // A subscriber that does not have the ring yet says nothing, and is rung only once the broker has answered.
            nap: asked.map(|_| NAP),
            watch,
        };
        let hung_up = watch.has_hung_up();
        let step = waiter.step(turn, scene, |idle| half.next(own, Some(reader), hung_up, Need::Room(n), idle));
        // The word is that of all followers: none leaves its wish in it.
        half.awake(own);
        match step? {
            WaitStep::Ready | WaitStep::Event(LinkEvent::Bell | LinkEvent::TimedOut) => Ok(true),
            WaitStep::Ended(_) | WaitStep::Event(LinkEvent::HungUp | LinkEvent::Corrupt(_)) => Ok(false),
            // A reader has nothing to send.
            WaitStep::Event(LinkEvent::Attach { .. } | LinkEvent::Dropped) => Ok(false),
        }
    }
}

impl AsFd for Publisher {
    /// Readable when there are subscribers to admit.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.acceptor.as_fd()
    }
}

impl Drop for Publisher {
    /// Waits for the broker, for a second at most, where it has not passed the ring on to a subscriber yet. Such a subscriber would see
    /// the end of the link before the ring, and lose the messages in it.
    fn drop(&mut self) {
        TxState::Finished.store(&self.ring.page().tx.control.state);
        let limit = Instant::now() + LAST_ANSWER;
        for subscriber in &mut self.subscribers {
            // Refused, it gets nothing.
            let _ = self.acceptor.await_answer(subscriber, limit);
        }
    }
}
