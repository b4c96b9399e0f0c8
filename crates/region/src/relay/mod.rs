//! Links between machines: many links carried over one serial port of a guest (protocol P1).
//!
//! ```text
//!   process --socket-- relay ==serial port== relay --socket-- relay ==serial port== relay --socket-- process
//!          guest A                                 host                                  guest B
//! ```
//!
//! A process has an ordinary link ([`crate::Link`]) wherever its peer is; here the other end of its socket is a relay.
//! Rings, hang-ups and the places of memory cross the port; the memory itself does not: each side has the window already
//! and hands out its own descriptor of it. A relay keeps its peer from what is not the peer's: it knows only the links and
//! windows that it was given, holds a bounded amount for each, and never waits for anyone.
//!
//! A ring can be lost on such a way (a broker may die). So a relay can watch the memory of a link: when its half sleeps
//! although there is something for it, it is rung, late instead of never.

mod command;
mod core;
mod doorbells;
mod effects;
mod judge;
mod latency;
mod local;
mod memory;
mod notices;
mod port;
mod pump;
mod watch;

use command::RelayCommand;
use partywall_protocol::port::MAX_PAYLOAD;
use partywall_protocol::window::WindowId;
use pump::{Pump, PumpShared};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

pub use self::core::LinkUse;
use doorbells::WaitingEvents;
pub use doorbells::{BellEvents, Doorbells, GuestDoorbells, HostDoorbells, VectorEvent};
pub use latency::{BellBuckets, BellDirection, RelayLatency};
pub use notices::Notices;
pub use port::{PORT, find_port, open_port};
pub use watch::DirectionWatch;

/// The bytes that a port has not taken yet.
#[derive(Debug, Default)]
struct RelayBacklog {
    /// In the relay's own buffer.
    buffered: AtomicUsize,
    /// Control messages that the relay has not looked at.
    queued: AtomicUsize,
    /// The relay has ended: waits for it end at once.
    over: AtomicBool,
}

impl RelayBacklog {
    fn bytes(&self) -> usize {
        if self.over.load(Ordering::Relaxed) {
            return 0;
        }
        self.buffered.load(Ordering::Relaxed).saturating_add(self.queued.load(Ordering::Relaxed))
    }
}

/// The end of the port that this relay has. The guest greets, the host answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortSide {
    /// In the guest.
    Guest,
    /// On the host, where a greeting means that the guest has started again, and its links are gone.
    Host,
}

/// The heartbeat by which a host detects (protocol P7) a lost guest: a guest that hangs, or whose agent has ended, does not close its
/// port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Between two questions.
    pub every: Duration,
    /// So long without any sign of life is too long.
    pub limit: Duration,
}

/// A report of a relay to its owner.
#[derive(Debug, PartialEq, Eq)]
pub enum Notice {
    /// The other side is there, or there again. All links have been hung up. Links and messages that the owner gives before it takes this notice
    /// are dropped: they are for the other side as it was before.
    Up,
    /// It has sent a control message.
    Control(Vec<u8>),
    /// It has hung up this link, or this end has.
    Closed(u32),
    /// In the guest: the other end of the port is not open any more, and its links have been hung up.
    Alone,
    /// It has shown no sign of life for longer than the heartbeat allows; its links have been hung up. It may come again. Links and messages that
    /// the owner gives before it takes this notice are dropped.
    Silent,
    /// The port is closed, or the other side broke the protocol: this relay has ended.
    Down {
        /// Why the relay has stopped.
        why: String,
    },
}

impl Notice {
    /// Whether all links ended before a relay reported this, and the relay goes on when its owner has taken it.
    fn ends_links(&self) -> bool {
        matches!(self, Self::Up | Self::Silent)
    }
}

/// A relay at work, on its own thread. Dropping it ends it and hangs up its links.
#[derive(Debug)]
pub struct Relay {
    commands: Sender<RelayCommand>,
    wake: Arc<OwnedFd>,
    waiting: Arc<RelayBacklog>,
    bell_events: Arc<WaitingEvents>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Starts one on a port: a socket of QEMU's, or the device in the guest.
    pub fn start(port: OwnedFd, side: PortSide) -> io::Result<(Self, Notices)> {
        Self::start_with(port, side, None)
    }

    /// Starts a relay with a heartbeat, on the host.
    pub fn start_with(port: OwnedFd, side: PortSide, heartbeat: Option<Heartbeat>) -> io::Result<(Self, Notices)> {
        Self::start_measured(port, side, heartbeat, Arc::default())
    }

    /// Starts a relay that counts in `latency` how long bells take. Several relays may share one.
    pub fn start_measured(
        port: OwnedFd,
        side: PortSide,
        heartbeat: Option<Heartbeat>,
        latency: Arc<RelayLatency>,
    ) -> io::Result<(Self, Notices)> {
        rustix::io::ioctl_fionbio(&port, true)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new);
        let (wake, bell) = (event()?, event()?);
        let waiting = Arc::new(RelayBacklog::default());
        let (commands, incoming) = channel();
        let (reports, notices) = notices::channel(bell, Arc::clone(&wake), commands.clone());
        let bell_events = Arc::new(WaitingEvents::default());
        let shared = PumpShared {
            wake: Arc::clone(&wake),
            waiting: Arc::clone(&waiting),
            bell_events: Arc::clone(&bell_events),
            latency,
        };
        let pump = Pump::new(port, (side, heartbeat), incoming, reports, shared);
        let thread = std::thread::Builder::new().name("partywall-relay".into()).spawn(move || pump.run())?;
        Ok((Self { commands, wake, waiting, bell_events, thread: Some(thread) }, notices))
    }

    /// Carries a link: `socket` is the end that its process does not have.
    pub fn link(&self, id: u32, socket: OwnedFd, watch: Option<DirectionWatch>) {
        self.tell(RelayCommand::Link { id, socket, watch });
    }

    /// Adds doorbells by which links are rung from now on, if the other side has some as well. Existing links lose the shortcuts that
    /// they had by an earlier device.
    pub fn doorbells(&self, doorbells: Doorbells) {
        self.tell(RelayCommand::Doorbells(doorbells));
    }

    /// Makes a window known, whose regions may be named on this port.
    pub fn window(&self, id: WindowId, memory: OwnedFd) {
        self.tell(RelayCommand::Window { id, memory });
    }

    /// Forgets a window.
    pub fn forget(&self, id: WindowId) {
        self.tell(RelayCommand::Forget { id });
    }

    /// Sends a control message. It fails if it is too long to be one.
    pub fn control(&self, message: &[u8]) -> io::Result<()> {
        if message.is_empty() || message.len() > MAX_PAYLOAD {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the length of a control message"));
        }
        self.waiting.queued.fetch_add(message.len(), Ordering::Relaxed);
        self.tell(RelayCommand::Control(message.to_vec()));
        Ok(())
    }

    /// Sends a control message with the links that it introduces, and their use. The message is sent before any frame of these links.
    ///
    /// # Errors
    /// It is too long to be a control message.
    pub fn control_with(&self, message: &[u8], links: Vec<(u32, OwnedFd)>, carries: LinkUse) -> io::Result<()> {
        if message.is_empty() || message.len() > MAX_PAYLOAD {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the length of a control message"));
        }
        self.waiting.queued.fetch_add(message.len(), Ordering::Relaxed);
        self.tell(RelayCommand::ControlWith { message: message.to_vec(), links, carries });
        Ok(())
    }

    /// In a guest: the events of a bell that was made with [`Self::control_with`], for its process (protocol I7). Once the other side has
    /// answered that message they are there, if there are any.
    pub fn take_bell_events(&self, link: u32) -> Option<BellEvents> {
        self.bell_events.take(link)
    }

    /// Bytes that the port has not taken yet. A sender of control messages without end looks at it (protocol P5).
    pub fn waiting(&self) -> usize {
        self.waiting.bytes()
    }

    /// The other side's number gets no link. Its notices are dropped.
    pub fn forget_link(&self, id: u32) {
        self.tell(RelayCommand::ForgetLink { id });
    }

    /// Hangs up a link.
    pub fn hang_up(&self, id: u32) {
        self.tell(RelayCommand::HangUp { id });
    }

    /// Hangs up all links. Others may follow.
    pub fn hang_up_all(&self) {
        self.tell(RelayCommand::HangUpAll);
    }

    /// The guest is to give up its windows, because it is to be migrated. From now on until the next greeting, the ends of its channels are
    /// reported to the processes at this side as moves (protocol G7.8).
    pub fn leave(&self) {
        self.tell(RelayCommand::Leave);
    }

    fn tell(&self, command: RelayCommand) {
        // A relay that has ended has said so by its last notice.
        let _ = self.commands.send(command);
        self.wake();
    }

    fn wake(&self) {
        // It fails only when the count is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.tell(RelayCommand::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
