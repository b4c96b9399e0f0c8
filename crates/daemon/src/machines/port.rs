//! One machine's serial port: sessions of its programs, links of its channels, and the windows that it gets.
//!
//! The program at the other end may be hostile. Its statements apply to this machine only. Sessions, links and waiting bytes are bounded.
//! Malformed input ends its session, or the port.

mod held;
mod open;
mod sent;

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use open::MOST_SESSIONS;
use open::Open;
use partywall_protocol::window::WindowId;
use partywall_protocol::wire::{MachineId, Name, Origin};
use partywall_region::relay::{Heartbeat, Notices, PortSide, Relay};
use partywall_vm::ivshmem::Switchboard;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Task;
use super::tasks::AttendantTasks;
use crate::control::{Errand, ErrandCount, PortQuestions, ServerControl};
use crate::core::{MachineNews, Membership};

/// Between two attempts to reach a port, and two looks at one that is full.
const AGAIN: Duration = Duration::from_millis(300);

/// Between two lines of the log about connections that have ended.
const LOG_AGAIN: Duration = Duration::from_secs(60);

/// A window that a guest gets.
#[derive(Debug)]
pub(super) struct Announcement {
    pub(super) id: WindowId,
    /// The guest writes it.
    pub(super) own: bool,
    pub(super) part: Part,
    /// The name of the other side.
    pub(super) other: String,
    /// To be read through.
    pub(super) memory: OwnedFd,
}

/// The list of windows that a guest gets.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) windows: Vec<Announcement>,
    pub(super) doorbell: Option<Switchboard>,
}

/// The purpose of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Channels between two machines: the writer and the reader.
    Between(Origin, Origin),
    /// The buffers of a member of a group.
    Group(Membership),
}

/// A message for a port's thread to send to its guest. However often it is said, only the latest counts.
#[derive(Debug, Default)]
struct PortOrders {
    announce: Option<Announced>,
    /// To give up its windows, after that. The answer is a [`Task::Released`].
    release: bool,
    /// The port is to end.
    stop: bool,
}

/// What a port's thread shares with the attendant.
#[derive(Debug, Default)]
struct PortShared {
    orders: Mutex<PortOrders>,
    /// An agent has greeted, and has not ended or fallen silent since.
    has_greeted: AtomicBool,
}

impl PortShared {
    fn order(&self, change: impl FnOnce(&mut PortOrders)) {
        // Each change of it is whole.
        change(&mut self.orders.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The orders, which are none any more then, and whether some were left. A list of windows is left while the guest takes nothing, unless
    /// the guest is to give them up: a newer list replaces it.
    fn take(&self, is_full: bool) -> (PortOrders, bool) {
        let (mut taken, mut left) = (PortOrders::default(), false);
        self.order(|orders| {
            if orders.stop || orders.release || !is_full {
                std::mem::swap(orders, &mut taken);
                orders.stop = taken.stop;
            }
            left = orders.announce.is_some();
        });
        (taken, left)
    }
}

/// A port at work, on its own thread.
#[derive(Debug)]
pub(super) struct Port {
    shared: Arc<PortShared>,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    pub(super) fn start(
        machine: MachineId,
        name: &Name,
        socket: &str,
        silence: Duration,
        control: ServerControl,
        tasks: AttendantTasks,
    ) -> io::Result<Self> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let shared = Arc::<PortShared>::default();
        let questions = PortQuestions::new(Arc::clone(&bell));
        control.errand(Errand::Port(machine, questions.clone()));
        let attend = Attend {
            machine,
            name: name.to_string(),
            socket: socket.to_owned(),
            beat: Heartbeat { every: silence / 4, limit: silence },
            control,
            tasks,
            errands: ErrandCount::new(machine),
            said: Cell::new(None),
            log: LogLimit::default(),
            shared: Arc::clone(&shared),
            questions,
            bell: Arc::clone(&bell),
            nothing: std::fs::File::open("/dev/null")?.into(),
        };
        let thread = std::thread::Builder::new().name("machine-port".to_owned()).spawn(move || attend.run())?;
        Ok(Self { shared, bell, thread: Some(thread) })
    }

    /// Tells the guest what it has.
    pub(super) fn announce(&self, announced: Announced) {
        self.order(|orders| orders.announce = Some(announced));
    }

    /// Has the guest give up its windows.
    pub(super) fn release(&self) {
        self.order(|orders| orders.release = true);
    }

    /// Whether an agent is there that has greeted.
    pub(super) fn has_greeted(&self) -> bool {
        self.shared.has_greeted.load(Ordering::Relaxed)
    }

    fn order(&self, change: impl FnOnce(&mut PortOrders)) {
        self.shared.order(change);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.order(|orders| orders.stop = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state of a port's thread, whether or not a program is at the other end.
#[derive(Debug)]
struct Attend {
    machine: MachineId,
    name: String,
    socket: String,
    beat: Heartbeat,
    control: ServerControl,
    tasks: AttendantTasks,
    /// Its errands that the event loop has not done, or that are beyond the machine's share.
    errands: ErrandCount,
    /// What the event loop was told last, if that still says all about this machine.
    said: Cell<Option<bool>>,
    /// For lines about connections that have ended.
    log: LogLimit,
    shared: Arc<PortShared>,
    /// Questions about sockets of the machine (protocol U14).
    questions: PortQuestions,
    bell: Arc<OwnedFd>,
    /// A stand-in for a descriptor that stays in the guest.
    nothing: OwnedFd,
}

/// A limit to lines of the log, so that a guest which ends each connection at once does not fill it.
#[derive(Debug, Default)]
struct LogLimit {
    last: Cell<Option<Instant>>,
}

impl LogLimit {
    /// Whether a line may be logged now.
    fn may(&self, now: Instant) -> bool {
        let may = self.last.get().is_none_or(|last| now.duration_since(last) >= LOG_AGAIN);
        if may {
            self.last.set(Some(now));
        }
        may
    }
}

/// The port is to end.
struct Stop;

impl Attend {
    fn run(self) {
        loop {
            if let Ok(port) = connect_at_once(&self.socket)
                && let Ok((relay, notices)) = self.start_relay(port)
            {
                let mut open = Open::new(&self, relay);
                let ended = open.serve(&notices);
                drop(open);
                self.say_up(false);
                if let Err(Stop) = ended {
                    return;
                }
            }
            // A guest that is not there gets its windows when it is.
            let _ = wait(&[PollFd::new(&*self.bell, PollFlags::IN)], Some(AGAIN));
            // First, since orders ring it after they are given.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
            let (orders, _) = self.shared.take(false);
            if orders.release {
                self.released(Some("its agent is not connected".to_owned()));
            }
            if orders.stop {
                return;
            }
        }
    }

    fn start_relay(&self, port: UnixStream) -> io::Result<(Relay, Notices)> {
        let latency = Arc::clone(self.control.relay_latency());
        Relay::start_measured(port.into(), PortSide::Host, Some(self.beat), latency)
    }

    fn released(&self, failure: Option<String>) {
        self.task(Task::Released { machine: self.machine, failure });
    }

    fn task(&self, task: Task) {
        // Only administrators' requests can be too many.
        let _ = self.tasks.add(task);
    }

    fn errand(&self, errand: Errand) {
        self.said.set(None);
        self.control.errand_of(&self.errands, errand);
    }

    /// The agent says how far a program of the machine has written the ring of a flow within the machine.
    fn written(&self, flow: u64, tail: u64) {
        self.control.ring_reports().put(self.machine, flow, tail);
    }

    /// Says that there is an agent that sees no window yet, or none. An agent that greets without end is said once.
    fn say_up(&self, up: bool) {
        if !up {
            self.shared.has_greeted.store(false, Ordering::Relaxed);
        }
        if self.said.get() != Some(up) {
            self.errand(Errand::News(MachineNews::Up { machine: self.machine, up }));
            self.said.set(Some(up));
        }
    }
}

/// Connects to a port. Fails where others wait for it already: QEMU accepts one connection, and its queue is short, so a connection that
/// waited for room might wait without end.
fn connect_at_once(path: &str) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Waits for any of these, and says which have something.
fn wait(fds: &[PollFd<'_>], limit: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut fds = fds.to_vec();
    let limit = limit.map(|l| Timespec { tv_sec: l.as_secs() as i64, tv_nsec: l.subsec_nanos().into() });
    match poll(&mut fds, limit.as_ref()) {
        Ok(_) => Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod held_tests;
#[cfg(test)]
mod release_tests;
#[cfg(test)]
mod tests;
