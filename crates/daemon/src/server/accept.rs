//! New sessions: accepting them, knowing who they are, and turning them away when there are no descriptors left.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::socket::{UnixCredentials, getsockopt, sockopt::PeerCredentials};
use partywall_protocol::wire::{self, MachineId, Message, Refusal, User};
use partywall_region::packet;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::containers;
use super::home;
use super::judge::is_hung_up;
use super::shares::Stopwatch;
use super::{BURST, CONTAINERS, CoreEvent, LISTENER, ReadBy, Server, SessionId, SessionSocket, listeners};
use crate::credentials::{Account, Credentials, Home};
use crate::machines::MOST_SESSIONS;

/// Half of what one session may have in the kernel for it, which counts its own bookkeeping and doubles the number given.
const SEND_BUFFER: usize = 128 << 10;

/// Greater than any process id.
const NO_PROCESS: u32 = 1 << 31;

/// How long the listening socket is left alone when not even turning people away works.
const PAUSE: Duration = Duration::from_millis(100);

/// Connections taken out of the kernel's queue per turn whose clients are asked for.
pub(super) const ACCEPTED: usize = 64;

/// Connections of clients that have left already, taken out of the kernel's queue per turn beside the others: a client that connects behind
/// them waits in the same queue.
pub(super) const LEFT: usize = 256;

/// The time per turn for taking connections out of the kernel's queue; no session is read during it. Asking for a client takes some 50
/// microseconds, and closing a connection whose client has left some 10.
const ACCEPTING: Duration = Duration::from_millis(1);

/// How long sessions are begun per turn: a turn begins at least one.
const ADMITTING: Duration = Duration::from_millis(1);

/// Packets that a client that has left may have sent for its connection to be closed here.
const PARTING: usize = 2;

/// Sessions begun per turn, however many users want one.
const ADMITTED: usize = 16;

/// The most connections of all users that wait for their turn. Beyond that, connections of the user with the most are dropped.
pub(super) const MOST_ARRIVALS: usize = 1024;

/// A connection that was accepted and is no session yet.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) socket: OwnedFd,
    pub(super) peer: UnixCredentials,
    pub(super) home: Home,
    /// The path of its executable, where it may be read.
    pub(super) program: Option<String>,
}

impl Arrival {
    pub(super) fn account(&self) -> Account {
        Account::of(User::Host(self.peer.uid()), self.home)
    }
}

/// The broker's socket that a client connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    /// The socket of the host.
    Host,
    /// The socket that containers get.
    Containers,
}

impl Door {
    /// The epoll data of its listening socket.
    fn event(self) -> u64 {
        match self {
            Self::Host => LISTENER,
            Self::Containers => CONTAINERS,
        }
    }
}

/// The listening sockets.
pub(super) type Listeners<'a> = [(Door, Option<BorrowedFd<'a>>); 2];

/// Whether the listening sockets are being listened to, and a descriptor to spare for turning people away.
#[derive(Debug)]
pub(super) struct Gate {
    spare: Option<File>,
    closed_until: Option<Instant>,
}

impl Gate {
    pub(super) fn open(epoll: BorrowedFd<'_>, listeners: Listeners<'_>) -> io::Result<Self> {
        for (door, listener) in listeners.into_iter().filter_map(|(door, socket)| Some((door, socket?))) {
            epoll::add(epoll, listener, EventData::new_u64(door.event()), EventFlags::IN)?;
        }
        Ok(Self { spare: Some(spare()?), closed_until: None })
    }

    pub(super) fn reopens_in(&self) -> Option<Duration> {
        self.closed_until.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Listens again when it is time to.
    pub(super) fn reopen(&mut self, epoll: BorrowedFd<'_>, listeners: Listeners<'_>) {
        if self.closed_until.is_some_and(|at| at <= Instant::now()) {
            self.closed_until = None;
            set(epoll, listeners, EventFlags::IN);
        }
    }

    #[cfg(test)]
    pub(super) fn shut_for_test(&mut self, epoll: BorrowedFd<'_>, listeners: Listeners<'_>) {
        self.close(epoll, listeners);
    }

    /// Stops listening for a while, so that a queue that cannot be served does not keep the loop awake.
    fn close(&mut self, epoll: BorrowedFd<'_>, listeners: Listeners<'_>) {
        self.closed_until = Some(Instant::now() + PAUSE);
        set(epoll, listeners, EventFlags::empty());
    }
}

fn set(epoll: BorrowedFd<'_>, listeners: Listeners<'_>, flags: EventFlags) {
    for (door, listener) in listeners.into_iter().filter_map(|(door, socket)| Some((door, socket?))) {
        if let Err(error) = epoll::modify(epoll, listener, EventData::new_u64(door.event()), flags) {
            tracing::error!(%error, ?door, "cannot change whether a listening socket is watched");
        }
    }
}

fn spare() -> io::Result<File> {
    File::open("/dev/null")
}

impl Server {
    /// Takes connections out of the kernel's queue, which all users share, into the queues of their users.
    pub(super) fn accept(&mut self, door: Door) {
        let begun = Instant::now();
        let (mut asked, mut left) = (0, 0);
        while asked + left == 0 || (asked < ACCEPTED && left < LEFT && begun.elapsed() < ACCEPTING) {
            if self.readers.is_clogged() {
                self.gate.close(self.epoll.as_fd(), listeners(&self.socket, self.containers.as_ref()));
                return;
            }
            let Some(listener) = self.listener(door) else { return };
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) if is_hung_up(&socket) => {
                    left += 1;
                    self.close_left(socket);
                }
                Ok(socket) => {
                    asked += 1;
                    self.arrive(door, socket);
                }
                Err(Errno::AGAIN) => return,
                // It gave up while it queued.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => match self.turn_away(door) {
                    Turned::Away => {}
                    Turned::Nobody => return,
                    Turned::Stuck => {
                        self.gate.close(self.epoll.as_fd(), listeners(&self.socket, self.containers.as_ref()));
                        return;
                    }
                },
                Err(error) => {
                    tracing::error!(%error, "cannot accept sessions; trying again soon");
                    self.gate.close(self.epoll.as_fd(), listeners(&self.socket, self.containers.as_ref()));
                    return;
                }
            }
        }
    }

    fn listener(&self, door: Door) -> Option<BorrowedFd<'_>> {
        match door {
            Door::Host => Some(self.socket.as_fd()),
            Door::Containers => self.containers.as_ref().map(AsFd::as_fd),
        }
    }

    /// Closes a connection whose client has left, at the expense of its user (protocol C16). The client can send no more, so a connection
    /// that holds no descriptor now is closed without waiting.
    ///
    /// Where the client ran is not looked up: that takes longer than all the rest. It counts as a process that has ended does, with the
    /// programs of containers. Otherwise root of a container could use up the share of the host's root.
    fn close_left(&mut self, socket: OwnedFd) {
        let watch = Stopwatch::start();
        let peer = getsockopt(&socket, PeerCredentials);
        let account = peer.ok().map(|peer| Account::of(User::Host(peer.uid()), Home::Unknown));
        if closing_collects_nothing() && packet::is_harmless_to_close(socket.as_fd(), PARTING) {
            drop(socket);
        } else {
            self.readers.dispose(account, socket);
        }
        if let Some(account) = account {
            self.charge(account, watch.elapsed());
        }
    }

    fn arrive(&mut self, door: Door, socket: OwnedFd) {
        let watch = Stopwatch::start();
        let peer = match getsockopt(&socket, PeerCredentials) {
            Ok(peer) => peer,
            Err(error) => {
                if self.core.may_log(None) {
                    tracing::warn!(%error, "the kernel does not say whose a new session is");
                }
                return self.readers.dispose(None, socket);
            }
        };
        let (home, program) = home::peer(socket.as_fd(), peer.pid());
        let home = if door == Door::Containers { containers::home_of(home) } else { home };
        let arrival = Arrival { socket, peer, home, program };
        let account = arrival.account();
        if let Some(dropped) = self.arrivals.push(account, arrival) {
            let account = dropped.account();
            if self.core.may_log(account.user) {
                tracing::info!(%account, "a new session was hung up on: its user opens more than the broker can begin");
            }
            self.core.count_refused_session(Refusal::Quota);
            self.readers.dispose(Some(account), dropped.socket);
        }
        self.charge(account, watch.elapsed());
    }

    /// Begins sessions, of one user after the other.
    pub(super) fn admit_arrivals(&mut self) {
        let begun = Instant::now();
        for admitted in 0..ADMITTED.min(self.arrivals.users() * BURST) {
            if admitted > 0 && begun.elapsed() >= ADMITTING {
                return;
            }
            let (shares, readers) = (&self.shares, &self.readers);
            let may = |account: &Account| !shares.is_used_up(*account) && !readers.is_clogged_by(Some(*account));
            let Some((account, arrival)) = self.arrivals.next(may) else { return };
            let work = self.begin_work();
            self.admit(arrival);
            self.charge_work(account, work);
        }
    }

    /// Begins a session, which the process of its user reads. A client that is refused gets an answer, too.
    fn admit(&mut self, arrival: Arrival) {
        let account = arrival.account();
        let Arrival { socket, peer, home, program } = arrival;
        if is_hung_up(&socket) {
            return self.readers.dispose(Some(account), socket);
        }
        let session = self.next_session();
        let peer = credentials(peer, home, session);
        self.sessions.insert(session, SessionSocket { socket, read: ReadBy::Nobody(account) });
        self.feed(CoreEvent::Opened { session, peer, program });
        if !self.sessions.contains_key(&session) {
            return;
        }
        let reader = match self.readers.reader_of(peer.account()) {
            Ok(reader) => reader,
            Err(reason) => return self.refuse(session, Refusal::OutOfResources, reason),
        };
        self.hear_first(session);
        // If the first packet has ended the session, the reader was never given one.
        let Some(open) = self.sessions.get_mut(&session) else { return self.readers.end_if_idle(reader) };
        let given = rustix::net::sockopt::set_socket_send_buffer_size(&open.socket, SEND_BUFFER)
            .map_err(io::Error::from)
            .and_then(|()| self.readers.serve(reader, session.0, open.socket.as_fd()));
        match given {
            Ok(()) => open.read = ReadBy::Reader(reader),
            Err(e) => {
                let reason = format!("the system refuses what a session needs: {e}");
                self.refuse(session, Refusal::OutOfResources, reason);
                self.readers.end_if_idle(reader);
            }
        }
    }

    /// Refuses a session that the core knows, and ends it.
    pub(super) fn refuse(&mut self, session: SessionId, code: Refusal, reason: String) {
        self.core.count_refused_session(code);
        // If it has gone already, it need not be told.
        let _ = self.answer(session, 0, &Message::Refused { code, reason }, &[]);
        self.hang_up(session);
        self.feed(CoreEvent::Closed { session, by_program: false });
    }

    /// Begins a session of a program in a machine. It is read here, because nothing of a stranger's comes by its socket. A guest may end
    /// sessions and begin others faster than their ends have turns. So of a machine with too many the new one is hung up on (protocol C16.9).
    pub(super) fn admit_as(&mut self, socket: OwnedFd, machine: MachineId, pid: u32) -> io::Result<()> {
        if self.machine_turns.sessions(machine) >= 2 * MOST_SESSIONS {
            return Ok(());
        }
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER)?;
        let session = self.next_session();
        self.machine_turns.add(self.epoll.as_fd(), machine, session, &socket)?;
        self.sessions.insert(session, SessionSocket { socket, read: ReadBy::EventLoop(machine) });
        let peer = Credentials::in_machine(machine, pid);
        // The machine reports the programs that run in it.
        self.feed(CoreEvent::Opened { session, peer, program: None });
        Ok(())
    }

    fn next_session(&mut self) -> SessionId {
        let session = SessionId(self.next_session);
        self.next_session += 1;
        session
    }

    /// Out of descriptors: accepts one with the spare descriptor, tells it so, and hangs up.
    fn turn_away(&mut self, door: Door) -> Turned {
        if self.gate.spare.take().is_none() {
            self.gate.spare = spare().ok();
            return Turned::Stuck;
        }
        let Some(listener) = self.listener(door) else { return Turned::Nobody };
        let turned = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                self.core.count_refused_session(Refusal::OutOfResources);
                // The user is not asked for; all such sessions share one account.
                if self.core.may_log(None) {
                    tracing::warn!("out of descriptors: a new session was turned away");
                }
                let reason = "the broker is out of descriptors; try again later".to_owned();
                wire::encode(0, &Message::Refused { code: Refusal::OutOfResources, reason }, &mut self.outgoing);
                // If it has gone already, it need not be told.
                let _ = packet::try_send(socket.as_fd(), &self.outgoing, &[]);
                self.readers.dispose(None, socket);
                Turned::Away
            }
            // The kernel demands a descriptor before it checks whether a client waits.
            Err(Errno::AGAIN) => Turned::Nobody,
            Err(_) => Turned::Stuck,
        };
        self.gate.spare = spare().ok();
        turned
    }
}

/// Whether closing a UNIX socket leaves it to another thread of the kernel to collect unreachable sockets, of any user, which may linger: so it
/// is from Linux 6.10 on.
pub(super) fn closing_collects_nothing() -> bool {
    static NEW: OnceLock<bool> = OnceLock::new();
    *NEW.get_or_init(|| {
        let system = rustix::system::uname();
        let mut numbers = system.release().to_str().unwrap_or_default().split(['.', '-', '+']);
        let mut number = || numbers.next().and_then(|text| text.parse::<u32>().ok()).unwrap_or_default();
        (number(), number()) >= (6, 10)
    })
}

/// The result of an attempt to refuse a client.
enum Turned {
    Away,
    Nobody,
    Stuck,
}

/// The identity of the process at the other end (protocol C3).
///
/// The kernel gives pid 0 for a process in a pid namespace that is not below ours. Such processes cannot be told from each other:
/// each of their sessions counts as a separate process (protocol C11), with a number that no process has.
///
/// Not by rustix: its `UCred` cannot hold the pid 0.
fn credentials(peer: UnixCredentials, home: Home, session: SessionId) -> Credentials {
    Credentials::on_host(peer.uid(), peer.gid(), home, process_of(peer.pid(), session))
}

fn process_of(pid: libc::pid_t, session: SessionId) -> u32 {
    match u32::try_from(pid) {
        Ok(pid) if pid != 0 => pid,
        _ => NO_PROCESS | session.0 as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_without_pid_gets_number_of_its_session() {
        assert_eq!(process_of(7, SessionId(2)), 7);
        let (one, other) = (process_of(0, SessionId(2)), process_of(0, SessionId(3)));
        assert_ne!(one, other);
        assert!([one, other].iter().all(|pid| libc::pid_t::try_from(*pid).is_err()), "no process has such a number");
    }
}
