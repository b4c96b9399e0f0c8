//! Following the broker's events (protocol C18).

use crate::session::{BrokerSession, unexpected};
use crate::{Domain, Error, Result};
use partywall_protocol::wire::{EventRow, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// The events of a broker from one moment on: joins, connections, refusals and ends.
///
/// Administrators get the events of all users, and other users those of the programs that they run. The broker keeps 1,024 events for a feed. A program
/// that waits too rarely loses the oldest, and [`EventBatch::lost`] counts them. A feed ends with the broker: follow again to continue.
///
/// ```
/// use partywall::{Domain, EventKind};
/// use std::time::Duration;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut feed = web.follow_events()?;
/// let visitor = Domain::builder().name("visitor").broker(broker.path()).join()?;
/// assert!(visitor.connect("web:nothing").is_err());
///
/// let mut events = Vec::new();
/// while events.len() < 2 {
///     events.extend(feed.wait(Duration::from_secs(5))?.events);
/// }
/// assert_eq!((events[0].kind, events[0].from.as_str()), (EventKind::Joined, "visitor"));
/// assert_eq!((events[1].kind, events[1].to.as_str()), (EventKind::ConnectRefused, "web"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct EventFeed {
    session: BrokerSession,
    /// The last event that has come.
    last: u64,
    lost: u64,
    /// The request that waits for an answer.
    asked: Option<u32>,
}

/// Some events, in the order in which they happened.
///
/// ```
/// use partywall::{Domain, EventBatch};
/// use std::time::Duration;
///
/// fn report(batch: &EventBatch) {
///     for event in &batch.events {
///         println!("{} {} {}", event.kind, event.from, event.grounds);
///     }
///     if batch.lost > 0 {
///         println!("{} events were lost", batch.lost);
///     }
/// }
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut feed = web.follow_events()?;
/// report(&feed.wait(Duration::ZERO)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The number of events that the broker dropped before these, because this program did not receive them in time.
    pub lost: u64,
    /// The events; empty if the time limit passed first.
    pub events: Vec<EventRow>,
}

impl Domain {
    /// Follows the events of the broker from now on, by another session of this domain. Blocks until the broker has answered.
    ///
    /// # Errors
    /// [`Error::Refused`] if too many sessions follow; [`Error::System`] if the broker is gone.
    pub fn follow_events(&self) -> Result<EventFeed> {
        let mut session = self.session()?;
        match session.request(&Message::FollowEvents { after: 0 }, &[])? {
            (Message::Events { .. }, _) => Ok(EventFeed { session, last: 0, lost: 0, asked: None }),
            (other, _) => Err(unexpected(&other)),
        }
    }
}

impl EventFeed {
    /// Waits for events, at most `timeout`. If there is none, the batch is empty.
    ///
    /// # Errors
    /// [`Error::System`] if the broker is gone; [`Error::Refused`] if it has ended the session.
    pub fn wait(&mut self, timeout: Duration) -> Result<EventBatch> {
        // Without a deadline the wait has no limit: the time is beyond the range of the clock.
        let deadline = Instant::now().checked_add(timeout);
        let request = match self.asked {
            Some(request) => request,
            None => *self.asked.insert(self.session.ask(&Message::FollowEvents { after: self.last })?),
        };
        loop {
            match self.session.try_receive_any() {
                Ok((answered, Message::Events { lost, page }, _)) if answered == request => {
                    self.asked = None;
                    self.last = page.rows.last().map_or(self.last, |row| row.number);
                    let before = std::mem::replace(&mut self.lost, lost);
                    return Ok(EventBatch { lost: lost.saturating_sub(before), events: page.rows });
                }
                Ok((_, Message::Refused { code, reason }, _)) => return Err(Error::Refused { code, reason }),
                Ok(_) => {}
                Err(Error::WouldBlock) => {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left == Some(Duration::ZERO) {
                        return Ok(EventBatch::default());
                    }
                    let left = left.and_then(|left| Timespec::try_from(left).ok());
                    match poll(&mut [PollFd::new(&self.session, PollFlags::IN)], left.as_ref()) {
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(e) => return Err(Error::system("wait for events", e)),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Readable when the batch that [`EventFeed::wait`] has requested may have arrived. Only `wait` requests a batch. So call `wait` once before polling,
/// and again after each batch, for instance with a timeout of zero.
impl AsFd for EventFeed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.session.as_fd()
    }
}
