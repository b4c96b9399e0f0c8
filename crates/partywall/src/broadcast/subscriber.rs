//! The reading side of a multicast: a subscriber.

use super::NUMBER;
use crate::connect;
use crate::message::{copy, next_len};
use crate::rx::StreamRx;
use crate::{Domain, Error, Options, Result};
use partywall_protocol::wire::{Directions, Kind};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::counters::Snapshot;
use partywall_shm::half;
use partywall_shm::record;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// How many messages in a row may be overwritten while one call copies them. An honest publisher sends a message and begins another during
/// each copy; a publisher that lies must not keep the call from returning.
const MOST_COPIES: u32 = 64;

/// Receives the messages of a publisher. For one thread at a time.
///
/// ```
/// use partywall::{Domain, Error, Options, Publisher, SlowReader, Subscriber};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut ticker = Publisher::bind(&web, "ticks", SlowReader::Hold, &Options::default())?;
/// let mut reader = Subscriber::connect("web:ticks")?;
/// while ticker.subscribers() == 0 {
///     ticker.admit()?;
/// }
/// ticker.send(b"tick")?;
/// let mut tick = Vec::new();
/// reader.recv(&mut tick)?;
/// assert_eq!(tick, b"tick");
///
/// drop(ticker);
/// assert!(matches!(reader.recv(&mut tick), Err(Error::Closed(_))));
/// assert_eq!(reader.counters().messages, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Subscriber {
    rx: StreamRx,
    lost: u64,
    /// The number after that of the last message, and the byte of the stream behind it, once there was one (protocol B4.4).
    after: Option<(u64, u64)>,
}

impl Subscriber {
    /// Subscribes from the [current](Domain::current) domain to `DOMAIN:SERVICE`.
    ///
    /// # Errors
    /// As [`Domain::connect`].
    pub fn connect(target: &str) -> Result<Self> {
        Self::connect_with(&Domain::current()?, target, &Options::default())
    }

    /// Subscribes from a domain, with options.
    ///
    /// # Errors
    /// As [`Domain::connect_with`].
    ///
    /// ```
    /// use partywall::{Domain, Error, Options, Publisher, SlowReader, Subscriber};
    /// use std::time::Duration;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _ticker = Publisher::bind(&web, "ticks", SlowReader::Hold, &Options::default())?;
    /// // Each tick is wanted at once, so this reader never spins for long, and does something else after a millisecond.
    /// let mut reader = Subscriber::connect_with(&web, "web:ticks", &Options::default().spin(Duration::ZERO))?;
    /// reader.set_timeout(Some(Duration::from_millis(1)));
    /// assert!(matches!(reader.recv(&mut Vec::new()), Err(Error::TimedOut)));
    ///
    /// reader.set_nonblocking(true);
    /// assert!(matches!(reader.recv(&mut Vec::new()), Err(Error::WouldBlock)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn connect_with(domain: &Domain, target: &str, options: &Options) -> Result<Self> {
        match connect::open(domain, target, Kind::Broadcast, Directions::REVERSE, options)? {
            (_, Some(rx)) => Ok(Self { rx: rx.for_broadcast(), lost: 0, after: None }),
            _ => Err(Error::BrokerConfused("a subscription without a reading half".into())),
        }
    }

    /// Receives one message into `buf`, replacing its content. If the publisher has overwritten the next message
    /// ([`SlowReader::Newest`](crate::SlowReader::Newest)), this is the newest one.
    ///
    /// # Errors
    /// [`Error::Lagged`] if the publisher has dropped this subscriber because it was too slow. With
    /// [`SlowReader::Newest`](crate::SlowReader::Newest), [`Error::Lagged`] means that the publisher overwrote each of 64 messages in a row while
    /// this call copied it; a later call may succeed. [`Error::Closed`] when the publisher has ended and all messages were read.
    /// [`Error::WouldBlock`], [`Error::TimedOut`], [`Error::Dead`], [`Error::Corrupt`].
    pub fn recv(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        self.wait()?;
        if self.rx.may_be_overrun() { self.copy_numbered(buf, false) } else { self.copy_next(buf) }
    }

    /// Receives the newest message into `buf`, replacing its content, and passes over the messages before it. Waits if there is none.
    ///
    /// # Errors
    /// As [`Subscriber::recv`].
    ///
    /// ```
    /// use partywall::{Domain, Options, Publisher, RingSize, SlowReader, Subscriber};
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let small = Options::default().ring(RingSize::Fixed(4096));
    /// let mut thermometer = Publisher::bind(&web, "celsius", SlowReader::Newest, &small)?;
    /// let mut reader = Subscriber::connect("web:celsius")?;
    /// while thermometer.subscribers() == 0 {
    ///     thermometer.admit()?;
    /// }
    /// let mut celsius = Vec::new();
    /// thermometer.send(b"20.0")?;
    /// reader.recv_newest(&mut celsius)?;
    /// assert_eq!(celsius, b"20.0");
    /// for sample in 1..=1000 {
    ///     thermometer.send(format!("20.{sample}").as_bytes())?; // Never waits.
    /// }
    /// reader.recv_newest(&mut celsius)?;
    /// assert_eq!(celsius, b"20.1000");
    /// assert_eq!(reader.lost(), 999);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn recv_newest(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        self.wait()?;
        if self.rx.may_be_overrun() {
            return self.copy_numbered(buf, true);
        }
        // Never more than what is there now, so that a fast publisher cannot keep this call from returning.
        let end = self.rx.head() + self.rx.available();
        self.copy_next(buf)?;
        while self.rx.head() < end {
            self.copy_next(buf)?;
            self.lost += 1;
        }
        Ok(())
    }

    /// Messages that this subscriber has not got, of those after the first message that it received: the publisher has overwritten them
    /// ([`SlowReader::Newest`](crate::SlowReader::Newest)), or [`Subscriber::recv_newest`] has passed over them.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Waits for a record, or for the end.
    fn wait(&mut self) -> Result<()> {
        self.rx.wait(record::HEADER).map(drop).map_err(|e| self.or_lagged(e))
    }

    /// What looks like nonsense was perhaps being overwritten.
    fn or_lagged(&self, e: Error) -> Error {
        match e {
            Error::Corrupt(_) | Error::Dead { .. }
                if !self.rx.may_be_overrun() && (self.rx.is_overwritten() || self.rx.is_dropped()) =>
            {
                Error::Lagged
            }
            e => e,
        }
    }

    /// The next message of a publisher that overruns this subscriber (protocol B4), or the newest one.
    fn copy_numbered(&mut self, buf: &mut Vec<u8>, newest: bool) -> Result<()> {
        let rx = &mut self.rx;
        let largest = half::Broadcaster::largest_of_two(rx.capacity());
        for _ in 0..MOST_COPIES {
            if newest {
                rx.skip_to_newest()?;
            }
            let available = rx.wait(record::HEADER)?;
            if available == 0 {
                return Err(Error::Closed("the peer has finished"));
            }
            // Only now: the wait may have continued further on.
            let from = rx.head();
            let mut start = [0; (record::HEADER + NUMBER) as usize];
            let copied = rx.span(0, start.len() as u64).map_or(0, |span| span.copy_to(&mut start));
            let (header, number) = start.split_at(record::HEADER as usize);
            let header = header.try_into().unwrap_or_default();
            let number = number.try_into().map_or(0, u64::from_le_bytes);
            let parsed = record::parse(header, available, record::longest(largest));
            let content = parsed.map(u64::from).ok().filter(|len| copied == start.len() && *len >= NUMBER);
            if let Some(len) = content {
                buf.resize((len - NUMBER) as usize, 0);
                if let Some(span) = rx.span(start.len() as u64, len - NUMBER) {
                    span.copy_to(buf);
                }
            }
            // Whatever was copied means nothing before this.
            if rx.is_overwritten() {
                buf.clear();
                rx.recover()?;
                continue;
            }
            let lost = match self.after {
                None => Some(0),
                Some((expected, behind)) => gap(number, expected, from.saturating_sub(behind)),
            };
            let (Some(len), Some(lost)) = (content, lost) else {
                buf.clear();
                return Err(rx.blame(Corrupt::BadRecord));
            };
            rx.release(record::footprint(len));
            self.lost = self.lost.saturating_add(lost);
            self.after = Some((number.saturating_add(1), rx.head()));
            return Ok(());
        }
        buf.clear();
        Err(Error::Lagged)
    }

    /// The next message of a publisher that waits for this subscriber or drops it.
    fn copy_next(&mut self, buf: &mut Vec<u8>) -> Result<()> {
        let len = next_len(&mut self.rx).map_err(|e| self.or_lagged(e))?;
        buf.resize(len, 0);
        copy(&self.rx, buf);
        if self.rx.is_overwritten() {
            buf.clear();
            return Err(Error::Lagged);
        }
        self.rx.release(record::footprint(len as u64));
        Ok(())
    }

    /// Whether [`Subscriber::recv`] returns [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, yes: bool) {
        self.rx.waiter.nonblocking = yes;
    }

    /// The longest that [`Subscriber::recv`] may wait; `None`: no limit.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.rx.waiter.timeout = longest;
    }

    /// The counters of received messages.
    pub fn counters(&self) -> Snapshot {
        self.rx.counters()
    }
}

/// How many messages lie between one with this number and the expected one, with this number of bytes between them. `None` if the publisher's numbers
/// do not fit its positions (protocol B4.4).
fn gap(number: u64, expected: u64, bytes: u64) -> Option<u64> {
    let lost = number.checked_sub(expected)?;
    let fits = lost <= bytes / record::footprint(NUMBER) && (lost == 0) == (bytes == 0);
    fits.then_some(lost)
}

/// As [`AsFd`].
impl AsRawFd for Subscriber {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Subscriber {
    /// Readable when there may be a message.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.rx.waiter.link.as_fd()
    }
}
