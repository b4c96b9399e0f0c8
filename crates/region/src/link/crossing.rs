//! A link to another machine as the process at its end has it (protocol I): rings may come and go by a shorter way than by the relays.

use super::{BELL, LISTEN, Packet, RING_AT, poll_until, timespec, try_packet};
use crate::event::LinkEvent;
use crate::packet;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::RecvFlags;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How late a ring is to be at the most whose interrupt was lost.
pub const LATE: Duration = Duration::from_secs(1);

/// Each of the first rings by the socket, up to this number, is followed by a look for a better way. Later, one ring in this number is.
const OFTEN: u32 = 64;

/// One end of such a link.
#[derive(Debug)]
pub struct Crossing {
    socket: OwnedFd,
    /// Readable when any of the others is; it is what a caller may have put into its `epoll` set before there were any.
    all: OwnedFd,
    /// Signalled by an interrupt, once there is such a thing.
    heard: OnceLock<OwnedFd>,
    /// Signalled every now and then from then on: an interrupt may get lost.
    timer: OwnedFd,
    /// To be signalled instead of ringing by the socket.
    target: OnceLock<OwnedFd>,
    late: Duration,
    /// Rings by the socket.
    rings: AtomicU32,
    /// The relay has reported that a machine is being migrated.
    moved: AtomicBool,
}

impl Crossing {
    pub(super) fn new(socket: OwnedFd, late: Duration) -> io::Result<Self> {
        let all = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let (heard, target, rings) = (OnceLock::new(), OnceLock::new(), AtomicU32::new(0));
        let this = Self { socket, all, heard, timer, target, late, rings, moved: AtomicBool::new(false) };
        this.include(this.socket.as_fd())?;
        this.include(this.timer.as_fd())?;
        Ok(this)
    }

    fn include(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.all, fd, EventData::new_u64(0), EventFlags::IN)?)
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    #[inline]
    pub(super) fn ring(&self) {
        match self.target.get() {
            // It does not block: its maker has seen to that. Full, it is signalled already.
            Some(event) => drop(rustix::io::write(event, &1u64.to_ne_bytes())),
            None => {
                let _ = packet::try_send(self.socket(), &BELL, &[]);
                self.look_ahead();
            }
        }
    }

    pub(super) fn has_moved(&self) -> bool {
        self.moved.load(Ordering::Relaxed)
    }

    /// A half that only rings and never waits would not hear what to ring. Anything else is left for a half that waits.
    fn look_ahead(&self) {
        let rings = self.rings.fetch_add(1, Ordering::Relaxed);
        if rings >= OFTEN && !rings.is_multiple_of(OFTEN) {
            return;
        }
        let mut first = [0; 2];
        while let Ok((_, 1)) = rustix::net::recv(&self.socket, &mut first, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            if [first[0]] != RING_AT && [first[0]] != LISTEN {
                return;
            }
            match try_packet(self.socket()) {
                Ok(Some(Packet::RingAt(event))) => drop(self.target.set(event)),
                // Signals that came before on that event are still pending, so no ring is lost.
                Ok(Some(Packet::Listen(event))) => self.listen(event),
                _ => return,
            }
        }
    }

    pub(super) fn try_next(&self) -> io::Result<Option<LinkEvent>> {
        self.next(Some(Instant::now()))
    }

    pub(super) fn wait(&self, deadline: Option<Instant>) -> io::Result<LinkEvent> {
        Ok(self.next(deadline)?.unwrap_or(LinkEvent::TimedOut))
    }

    /// The next event; `None` if there is none before the deadline.
    fn next(&self, deadline: Option<Instant>) -> io::Result<Option<LinkEvent>> {
        loop {
            // Before there is an event, the timer stands for it: it rests.
            let event = self.heard.get().unwrap_or(&self.timer);
            let mut fds = [&self.socket, event, &self.timer].map(|fd| PollFd::new(fd, PollFlags::IN));
            if !poll_until(&mut fds, deadline)? {
                return Ok(None);
            }
            let [from_socket, rung, late] = fds.map(|fd| !fd.revents().is_empty());
            // First, so that a peer that rings without end cannot keep its own hang-up from being heard.
            if from_socket {
                match try_packet(self.socket())? {
                    Some(Packet::Event(event)) => return Ok(Some(event)),
                    Some(Packet::RingAt(event)) => drop(self.target.set(event)),
                    // The hang-up follows, and is the event.
                    Some(Packet::Moved) => self.moved.store(true, Ordering::Relaxed),
                    // Something may have come by it before it was listened to.
                    Some(Packet::Listen(event)) => {
                        self.listen(event);
                        return Ok(Some(LinkEvent::Bell));
                    }
                    None => {}
                }
            }
            for (signalled, fd) in [(rung, event), (late, &self.timer)] {
                // Another thread of this process may have taken it.
                if signalled && rustix::io::read(fd, &mut [0; 8]).is_ok() {
                    return Ok(Some(LinkEvent::Bell));
                }
            }
        }
    }

    /// A second one is ignored: the relay has no reason to send it. It does not fail, because from now on rings come by the event: if the
    /// event cannot be in the set, a wait for several descriptors ends by the timer.
    fn listen(&self, event: OwnedFd) {
        if self.heard.set(event).is_ok()
            && let Some(event) = self.heard.get()
        {
            let late = timespec(self.late);
            let again = Itimerspec { it_interval: late, it_value: late };
            let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &again);
            let _ = self.include(event.as_fd());
        }
    }
}

impl AsFd for Crossing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::Link;
    use rustix::event::{EventfdFlags, eventfd};

    const HANG: Duration = Duration::from_secs(60);

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    fn signal(event: &OwnedFd) {
        rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
    }

    fn crossing() -> (Link, Link) {
        let (process, relay) = Link::pair().unwrap();
        (Link::crossing(process, LATE).unwrap(), Link::Socket(relay))
    }

    fn is_readable(fd: impl AsFd, limit: Duration) -> bool {
        poll_until(&mut [PollFd::new(&fd, PollFlags::IN)], Some(Instant::now() + limit)).unwrap()
    }

    fn next(link: &Link) -> LinkEvent {
        link.wait(Some(Instant::now() + HANG)).unwrap()
    }

    #[test]
    fn rings_arrive_by_event_and_socket_on_one_descriptor() {
        let (process, relay) = crossing();
        let before = process.as_fd().try_clone_to_owned().unwrap();
        assert!(!is_readable(&before, Duration::ZERO));
        let event = event();
        relay.listen_to(event.as_fd()).unwrap();
        // A signal that came before is not lost, and the waiting half looks again.
        signal(&event);
        assert!(is_readable(&before, HANG));
        assert!(matches!(next(&process), LinkEvent::Bell), "it listens now");
        assert!(is_readable(&before, HANG));
        assert!(matches!(next(&process), LinkEvent::Bell), "what came before");
        relay.ring();
        assert!(matches!(next(&process), LinkEvent::Bell), "the socket goes on");
        signal(&event);
        assert!(is_readable(&before, HANG), "a set that was made before");
        assert!(matches!(process.try_next().unwrap(), Some(LinkEvent::Bell)));
        assert!(process.try_next().unwrap().is_none(), "once");
    }

    #[test]
    fn lost_interrupt_is_found_by_next_look() {
        let (process, relay) = crossing();
        relay.listen_to(event().as_fd()).unwrap();
        assert!(matches!(next(&process), LinkEvent::Bell));
        assert!(matches!(next(&process), LinkEvent::Bell), "nobody has rung, but it looks again");
        assert!(is_readable(&process, HANG), "and so does who waits with others");
    }

    #[test]
    fn ring_at_uses_eventfd_instead_of_socket() {
        let (process, relay) = crossing();
        process.ring();
        assert!(matches!(relay.try_next().unwrap(), Some(LinkEvent::Bell)));
        let event = event();
        relay.ring_at(event.as_fd()).unwrap();
        relay.ring();
        assert!(matches!(next(&process), LinkEvent::Bell), "it has been told by now");
        process.ring();
        assert!(is_readable(&event, Duration::ZERO));
        assert!(relay.try_next().unwrap().is_none());
    }

    #[test]
    fn ringing_half_adopts_event_without_waiting() {
        let (process, relay) = crossing();
        let (heard, target) = (event(), event());
        relay.listen_to(heard.as_fd()).unwrap();
        relay.ring_at(target.as_fd()).unwrap();
        relay.ring();
        signal(&heard);
        process.ring();
        assert!(matches!(relay.try_next().unwrap(), Some(LinkEvent::Bell)), "not yet");
        process.ring();
        assert!(is_readable(&target, Duration::ZERO) && relay.try_next().unwrap().is_none());
        // The rings that were pending before are still delivered.
        for _ in 0..2 {
            assert!(matches!(process.try_next().unwrap(), Some(LinkEvent::Bell)));
        }
        assert!(process.try_next().unwrap().is_none());
    }

    #[test]
    fn move_is_known_with_hang_up_that_follows() {
        let (process, relay) = crossing();
        relay.ring();
        relay.say_moved();
        drop(relay);
        assert!(process.is_hung_up() && !process.has_moved(), "not taken from the link yet");
        assert!(matches!(next(&process), LinkEvent::Bell));
        assert!(matches!(next(&process), LinkEvent::HungUp), "the move is no event");
        assert!(process.has_moved());
        let (process, relay) = crossing();
        drop(relay);
        assert!(matches!(next(&process), LinkEvent::HungUp) && !process.has_moved(), "a death");
    }

    #[test]
    fn pending_event_does_not_hide_hang_up() {
        let (process, relay) = crossing();
        let event = event();
        relay.listen_to(event.as_fd()).unwrap();
        assert!(matches!(next(&process), LinkEvent::Bell));
        drop(relay);
        signal(&event);
        assert!(matches!(next(&process), LinkEvent::HungUp));
        assert!(process.is_hung_up());
    }
}
