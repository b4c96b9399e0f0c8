//! Accepting connections for a service.

use crate::channel::{self, EndpointParts};
use crate::desk::Ticket;
use crate::domain::ChannelRegistration;
use crate::endpoint::Carrier;
use crate::keeper::HangUpWatch;
use crate::late_answer::LateAnswer;
use crate::memory;
use crate::rx::StreamRx;
use crate::session::{BrokerSession, PATIENCE, whole};
use crate::tx::StreamTx;
use crate::waiter::{RetryTimer, Waiter};
use crate::{Domain, Error, Options, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Kind, Located, Message, Refusal, RegionReference, Side};
use partywall_region::{Link, OwnRegion, PeerRegion, pmem};
use partywall_shm::corrupt::Corrupt;
use partywall_shm::half::{Broadcaster, WritingHalf};
use partywall_shm::layout::RegionKind;
use partywall_shm::wake::Fencing;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// An accepted connection: its writing half, its reading half, and the peer.
pub(crate) type Taken = (Option<StreamTx>, Option<StreamRx>, PeerInfo);

/// A bound service of any kind: what [`Listener`](crate::Listener), [`MessageListener`](crate::MessageListener) and
/// [`Publisher`](crate::Publisher) have in common.
#[derive(Debug)]
pub(crate) struct Acceptor {
    reception: Reception,
    session: BrokerSession,
    /// Says when a non-blocking listener is to look for the broker again. `None` while the broker is not known to be away.
    away: Option<RetryTimer>,
    pub(crate) nonblocking: bool,
    pub(crate) timeout: Option<Duration>,
}

/// What it takes to accept a connection, apart from the session by which it came.
#[derive(Debug, Clone)]
pub(crate) struct Reception {
    domain: Domain,
    service: String,
    kind: Kind,
    options: Options,
}

/// The longest that a publisher which takes in a subscriber waits for the broker.
const ANSWER: Duration = Duration::from_millis(2);

/// The pauses between two looks for a broker that is away: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// One subscriber, as its publisher sees it.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) region: PeerRegion,
    pub(crate) waiter: Waiter,
    pub(crate) fencing: Fencing,
    /// Follows how far it has read.
    pub(crate) half: WritingHalf,
    pub(crate) watch: HangUpWatch,
    /// The broker has not said yet that the subscriber has the ring; then it is rung, for it may sleep until it has.
    pub(crate) asked: Option<Ticket>,
    /// Rings it where the publisher makes no call after the broker's answer.
    late: Option<LateAnswer>,
    /// Tells the broker when the subscriber is gone.
    registration: ChannelRegistration,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(asked) = self.asked {
            self.registration.give_up(asked);
        }
    }
}

/// The memory that a publisher gives to its subscribers.
#[derive(Debug)]
pub(crate) struct PublisherOffer<'a> {
    pub(crate) ring: &'a OwnRegion,
    pub(crate) memory: BorrowedFd<'a>,
    /// Where a subscriber begins.
    pub(crate) half: &'a Broadcaster,
}

/// A connection that the broker has handed over, checked but not yet accepted.
#[derive(Debug)]
pub(crate) struct IncomingChannel {
    pub(crate) parts: EndpointParts,
    pub(crate) memory: OwnedFd,
    pub(crate) kind: Kind,
}

impl Acceptor {
    pub(crate) fn bind(domain: &Domain, service: &str, kind: Kind, options: &Options) -> Result<Self> {
        let session = bound_session(domain, service, kind, options)?;
        // Wrong sizes should be found here, and not by every connection.
        options.ring_bounds(domain.max_ring())?;
        let reception =
            Reception { domain: domain.clone(), service: service.to_owned(), kind, options: options.clone() };
        Ok(Self { reception, session, away: None, nonblocking: false, timeout: None })
    }

    /// Waits for a connection with valid memory and links. Invalid ones are dropped, and affect no other.
    pub(crate) fn accept(&mut self) -> Result<(Option<StreamTx>, Option<StreamRx>, PeerInfo)> {
        loop {
            let (message, fds) = self.next()?;
            match self.reception.take(message, fds) {
                Ok(Some(accepted)) => return Ok(accepted),
                Ok(None) => {}
                Err(Error::Corrupt(what)) => {
                    tracing::warn!(service = self.reception.service, %what, "a connection was refused: its peer broke the protocol");
                }
                // The visitor has gone, has lost the session by which it would hear of this side, or does not read that session.
                Err(Error::Refused { code: Refusal::NoSuchChannel | Refusal::BacklogFull, reason }) => {
                    tracing::debug!(
                        service = self.reception.service,
                        reason,
                        "a connection ended before it was accepted"
                    );
                }
                // Our fault or the machine's: this connection is lost, and the caller should know.
                Err(e) => return Err(e),
            }
        }
    }

    /// Takes in a subscriber of a broadcast: it gets the publisher's ring, and brings none. Does not wait.
    pub(crate) fn subscription(&mut self, offer: &PublisherOffer<'_>) -> Result<Subscription> {
        loop {
            let (message, fds) = self.next()?;
            let Message::Incoming { channel, domain, epoch, directions, region, ref name, .. } = message else {
                continue;
            };
            let (region, link) = match whole(&message, &fds).and_then(|()| check_subscriber(directions, region, fds)) {
                Ok(right) => right,
                Err(e) => {
                    tracing::warn!(service = self.reception.service, error = %e, "a subscriber was refused");
                    self.turn_down(channel);
                    continue;
                }
            };
            let geometry = offer.ring.geometry();
            let service = self.reception.service.clone();
            let info = PeerInfo {
                name: name.clone(),
                domain_id: domain,
                epoch,
                user: None,
                pid: None,
                at_home: false,
                service,
            };
            let (side, kind) = (Side::Accepting, self.reception.kind);
            let registration =
                self.reception.domain.register(channel, side, &info, kind, directions, geometry, None, None);
            let fencing = Fencing::agreed(offer.ring.flags(), region.flags());
            // Before the request: if the watch fails, there is no answer that nobody takes.
            let watch = HangUpWatch::link(link.life())?;
            let accepted =
                Message::Accepted { channel, start: offer.half.tail(), region: RegionReference::own_memory(geometry) };
            // A broker that is gone, or does not read, cannot pass the ring on: the subscriber has to come again.
            let asked = match self.reception.domain.ask(&accepted, &[offer.memory]) {
                Ok(asked) => asked,
                Err(e) => {
                    tracing::warn!(service = self.reception.service, error = %e, "a subscriber was not taken");
                    continue;
                }
            };
            let mut subscription = Subscription {
                region,
                waiter: Waiter::new(link, self.reception.options.spin),
                fencing,
                half: offer.half.follower(),
                watch,
                asked: Some(asked),
                late: None,
                registration,
            };
            // Most of the time the answer comes at once. If it does not, the keeper or a later call hears it: a publisher does not wait for the
            // broker.
            self.await_answer(&mut subscription, Instant::now() + ANSWER)?;
            if subscription.asked.is_some() {
                let link = subscription.waiter.link.second_handle().map_err(|e| Error::system("keep a link", e))?;
                subscription.late = LateAnswer::watch(&self.reception.domain, asked, link)?;
            }
            return Ok(subscription);
        }
    }

    /// Reports that a connection is not taken, so that its place in the backlog is free again (protocol C7.2). Does not wait: while the broker
    /// does not read the listener's session, the domain's session carries the report, now or later.
    fn turn_down(&self, channel: u64) {
        // The listener's session comes first: from it, the report is about the accepting side even if this process has both sides.
        if self.session.try_post(0, &Message::Closed { channel }, &[]).is_err() {
            self.reception.domain.close(channel);
        }
    }

    /// Waits until the broker has said whether a subscriber has the ring, at most until `limit`.
    pub(crate) fn await_answer(&self, subscription: &mut Subscription, limit: Instant) -> Result<()> {
        while self.is_answered(subscription)? && subscription.asked.is_some() && Instant::now() < limit {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Looks whether a subscriber has the ring, and rings it if it has it now. `false` if it does not get it.
    pub(crate) fn is_answered(&self, subscription: &mut Subscription) -> Result<bool> {
        let Some(asked) = subscription.asked else { return Ok(true) };
        match self.reception.domain.answer(asked) {
            None => Ok(true),
            Some(Ok(_)) => {
                subscription.asked = None;
                subscription.late = None;
                subscription.waiter.link.ring();
                Ok(true)
            }
            Some(Err(e)) => {
                tracing::warn!(service = self.reception.service, error = %e, "a subscriber was not taken");
                Ok(false)
            }
        }
    }

    /// The next connection, to be accepted later by [`Reception::take`].
    pub(crate) fn next_incoming(&mut self) -> Result<(Reception, Message, Vec<OwnedFd>)> {
        let (message, fds) = self.next()?;
        Ok((self.reception.clone(), message, fds))
    }

    /// The next message of the broker; binds again if it went and came (protocol C9).
    fn next(&mut self) -> Result<(Message, Vec<OwnedFd>)> {
        let mut pause = PAUSES.0;
        // A timeout beyond the range of `Instant` means no deadline.
        let deadline = self.timeout.and_then(|longest| Instant::now().checked_add(longest));
        loop {
            match self.receive(deadline) {
                Err(Error::System { .. }) => {}
                other => return other,
            }
            match bound_session(
                &self.reception.domain,
                &self.reception.service,
                self.reception.kind,
                &self.reception.options,
            ) {
                Ok(session) => {
                    self.session = session;
                    self.away = None;
                }
                // The old session of this very listener may not be cleared away yet, or the broker not back.
                Err(
                    Error::BrokerAbsent { .. }
                    | Error::System { .. }
                    | Error::Refused { code: Refusal::ServiceTaken, .. },
                ) => {
                    if self.nonblocking {
                        return Err(self.look_later());
                    }
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return Err(Error::TimedOut);
                    }
                    std::thread::sleep(left.map_or(pause, |left| pause.min(left)));
                    pause = (pause * 2).min(PAUSES.1);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Has the descriptor become readable at the end of a pause, because that of the session that has ended always is.
    fn look_later(&mut self) -> Error {
        let away = match self.away.take().map_or_else(|| RetryTimer::new(PAUSES.0, PAUSES.1), Ok) {
            Ok(away) => self.away.insert(away),
            Err(e) => return e,
        };
        away.begin_pause();
        Error::WouldBlock
    }

    /// The next message of the broker, until the deadline if there is one.
    fn receive(&self, deadline: Option<Instant>) -> Result<(Message, Vec<OwnedFd>)> {
        let Some(deadline) = deadline.filter(|_| !self.nonblocking) else {
            return if self.nonblocking { self.session.try_next() } else { self.session.next() };
        };
        loop {
            match self.session.try_next() {
                Err(Error::WouldBlock) => {}
                other => return other,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut);
            }
            let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.session, PollFlags::IN)], Some(&left)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::system("wait for a connection", e)),
            }
        }
    }
}

impl Reception {
    pub(crate) fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Accepts a connection: checks what came, makes this side's memory, and has the broker pass it on. `None` if the message is no connection.
    pub(crate) fn take(&self, message: Message, fds: Vec<OwnedFd>) -> Result<Option<Taken>> {
        let Message::Incoming { channel, .. } = message else { return Ok(None) };
        let checked = whole(&message, &fds).and_then(|()| self.check(message, fds)).and_then(|incoming| {
            let claim = (incoming.parts.base == 0).then(|| incoming.memory.try_clone()).transpose();
            Ok((incoming, claim.map_err(|e| Error::system("keep a region", e))?))
        });
        let (incoming, claim) = match checked {
            Ok(checked) => checked,
            Err(e) => {
                // Its place in the backlog is free again (protocol C7).
                self.domain.close(channel);
                return Err(e);
            }
        };
        let IncomingChannel { mut parts, memory, kind } = incoming;
        let info = parts.info.clone();
        let geometry = parts.region.geometry();
        for link in parts.links.iter().filter(|link| link.carries_memory()) {
            match link.attach_at(parts.base, 0, 0, geometry, memory.as_fd()) {
                Ok(()) => {}
                // It has finished, or gone: what it had written can still be read.
                Err(e) if matches!(e.kind(), std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset) => {}
                // A link that is full before its first use was filled by the peer.
                Err(_) => {
                    self.domain.close(channel);
                    return Err(Corrupt::BadPacket.into());
                }
            }
        }
        let accepted = Message::Accepted {
            channel,
            start: 0,
            region: RegionReference::new(Located::from_base(parts.base), geometry),
        };
        let registration =
            self.domain.register(channel, Side::Accepting, &info, kind, parts.directions, geometry, claim, None);
        self.tell_accepted(&accepted, &memory)?;
        parts.carrier = Carrier::Broker(registration);
        for link in &parts.links {
            // The peer has this side's memory by now, and looks for it when it is woken.
            link.ring();
        }
        let (tx, rx) = channel::assemble(parts, &self.options)?;
        Ok(Some((tx, rx, info)))
    }

    /// Has the broker pass this side's region on. After its restart the domain may join it a little later than this listener.
    fn tell_accepted(&self, accepted: &Message, memory: &OwnedFd) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.domain.request(accepted, &[memory.as_fd()]) {
                Err(Error::System { .. }) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                other => return other.map(drop),
            }
        }
    }

    /// Checks what came, and makes this side's memory.
    fn check(&self, message: Message, fds: Vec<OwnedFd>) -> Result<IncomingChannel> {
        let Message::Incoming { channel, domain, epoch, name, user, pid, at_home, kind, directions, region: reference } =
            message
        else {
            return Err(Error::BrokerConfused("no connection".into()));
        };
        let (located, geometry) = reference.check().map_err(|_| Corrupt::BadRegion)?;
        if geometry.ring_size() > self.options.max_peer_ring || kind != self.kind {
            return Err(Corrupt::BadRegion.into());
        }
        let mut fds = fds.into_iter();
        let memory = fds.next().ok_or_else(|| Error::BrokerConfused("a connection without memory".into()))?;
        let peer = pmem::attach(memory.as_fd(), located.base(), RegionKind::Endpoint, geometry)?;
        let links = if located == Located::OwnMemory {
            fds.map(Link::bells).collect::<std::result::Result<Vec<_>, _>>()?
        } else {
            fds.map(channel::crossing).collect::<Result<Vec<_>>>()?
        };
        let ring = self.options.ring_bounds(self.domain.max_ring())?;
        let epoch_here = self.domain.epoch();
        let (ring, region, base, memory) = if located == Located::OwnMemory {
            let (region, memory) = memory::endpoint(Side::Accepting, directions, &self.options, ring.0, epoch_here)?;
            (ring, region, 0, memory)
        } else {
            // The peer is on another machine, and so is this side's region in the window to it.
            let ring = memory::window_ring(ring);
            let place = self.domain.room(channel, &name, memory::region_size(Side::Accepting, directions, ring.0))?;
            let region = memory::endpoint_at(&place, Side::Accepting, directions, ring.0, epoch_here)?;
            (ring, region, place.base, place.memory)
        };
        let info = PeerInfo {
            name,
            domain_id: domain,
            epoch,
            user: Some(user),
            pid: Some(pid),
            at_home,
            service: self.service.clone(),
        };
        let parts = EndpointParts {
            side: Side::Accepting,
            directions,
            region,
            peer: Some(peer),
            links,
            info,
            id: channel,
            carrier: Carrier::None,
            ring,
            base,
        };
        Ok(IncomingChannel { parts, memory, kind })
    }
}

impl AsFd for Acceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.away.as_ref().map_or_else(|| self.session.as_fd(), AsFd::as_fd)
    }
}

fn bound_session(domain: &Domain, service: &str, kind: Kind, options: &Options) -> Result<BrokerSession> {
    let mut session = domain.session()?;
    session.request(&Message::Bind { service: service.to_owned(), kind, backlog: options.backlog }, &[])?;
    session.wait_for_ever()?;
    Ok(session)
}

fn check_subscriber(directions: Directions, region: RegionReference, fds: Vec<OwnedFd>) -> Result<(PeerRegion, Link)> {
    let geometry = region.check_own_memory().map_err(|_| Corrupt::BadRegion)?;
    if directions != Directions::REVERSE || geometry.ring_size() != 0 {
        return Err(Corrupt::BadRegion.into());
    }
    let mut fds = fds.into_iter();
    let (Some(region), Some(link)) = (fds.next(), fds.next()) else {
        return Err(Error::BrokerConfused("a connection without memory or link".into()));
    };
    let region = PeerRegion::attach(region.as_fd(), RegionKind::Endpoint, geometry)?;
    Ok((region, Link::bells(link)?))
}

#[cfg(test)]
mod tests;
