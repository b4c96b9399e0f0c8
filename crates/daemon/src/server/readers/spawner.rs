//! The process that forks all others. It is forked before the broker serves clients, and executes the broker's orders to fork and to
//! kill.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use partywall_region::packet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};

use super::{DEADLINE, disposer, process, reader};
use crate::credentials::Account;

/// The job of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Job {
    /// Reads the sessions of a user. Brings its end of a socket pair and its timer.
    Read = 1,
    /// Holds descriptors until it is killed. Brings its end of a socket pair.
    Dispose = 2,
    /// As [`Job::Read`], and may raise its priority (protocol C16.1).
    ReadUrgently = 3,
    /// Closes descriptors when they come. Brings its end of a socket pair.
    Close = 4,
}

/// Not a job: the end of a child.
const KILL: u8 = 0;

/// The broker's side.
#[derive(Debug)]
pub(super) struct Spawner {
    socket: OwnedFd,
    pid: Pid,
    /// Orders that its socket did not take yet.
    backlog: VecDeque<SpawnerOrder>,
}

/// An order to fork or to kill.
#[derive(Debug)]
struct SpawnerOrder {
    bytes: [u8; 5],
    with: Vec<OwnedFd>,
    /// The user whose reader it is about; `None` for a disposer.
    about: Option<Account>,
}

impl Spawner {
    /// `number_record`: where readers find the kernel's record of sequence numbers.
    pub(super) fn start(number_record: Option<PathBuf>) -> io::Result<Self> {
        let (socket, theirs) = packet::pair()?;
        let pid = process::fork("partywall-spawn\0", &[theirs.as_fd()], |kept| {
            if let Ok([broker]) = <[OwnedFd; 1]>::try_from(kept) {
                Children { broker, number_record, running: BTreeMap::new() }.run();
            }
        })?;
        Ok(Self { socket, pid, backlog: VecDeque::new() })
    }

    /// Has a child made. Packets for the child wait in its socket until it runs.
    pub(super) fn spawn(&mut self, child: u32, job: Job, about: Option<Account>, with: Vec<OwnedFd>) {
        self.tell(job as u8, child, about, with);
    }

    /// Has a child killed, if it has not ended.
    pub(super) fn kill(&mut self, child: u32, about: Option<Account>) {
        self.tell(KILL, child, about, Vec::new());
    }

    /// How many orders about a user's readers wait, or about disposers.
    pub(super) fn waiting(&self, about: Option<Account>) -> usize {
        self.backlog.iter().filter(|order| order.about == about).count()
    }

    fn tell(&mut self, what: u8, child: u32, about: Option<Account>, with: Vec<OwnedFd>) {
        let mut bytes = [what; 5];
        bytes[1..].copy_from_slice(&child.to_le_bytes());
        self.backlog.push_back(SpawnerOrder { bytes, with, about });
        self.flush();
    }

    /// As if the process took no orders. Returns what takes them again.
    #[cfg(test)]
    pub(super) fn block(&mut self) -> BlockedSpawner {
        let (full, other) = packet::pair().unwrap();
        while packet::try_send(full.as_fd(), &[KILL; 5], &[]).is_ok() {}
        BlockedSpawner { socket: std::mem::replace(&mut self.socket, full), _other: other }
    }

    #[cfg(test)]
    pub(super) fn unblock(&mut self, blocked: BlockedSpawner) {
        self.socket = blocked.socket;
    }

    /// Sends what waits, as far as there is room; whether nothing is left.
    pub(super) fn flush(&mut self) -> bool {
        while let Some(SpawnerOrder { bytes, with, .. }) = self.backlog.front() {
            let fds: Vec<BorrowedFd<'_>> = with.iter().map(AsFd::as_fd).collect();
            match packet::try_send(self.socket.as_fd(), bytes, &fds) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
                _ => drop(self.backlog.pop_front()),
            }
        }
        true
    }
}

/// The socket of a spawner that takes no orders.
#[cfg(test)]
#[derive(Debug)]
pub(in crate::server) struct BlockedSpawner {
    socket: OwnedFd,
    _other: OwnedFd,
}

impl AsFd for Spawner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Spawner {
    fn drop(&mut self) {
        // The spawner ends when it has lost its peer and its children have ended, or have had the time for it.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        while matches!(waitpid(Some(self.pid), WaitOptions::empty()), Err(rustix::io::Errno::INTR)) {}
    }
}

/// The process's own side.
struct Children {
    broker: OwnedFd,
    number_record: Option<PathBuf>,
    running: BTreeMap<u32, Child>,
}

/// A process that runs.
struct Child {
    pid: Pid,
    pidfd: OwnedFd,
    /// It reads sessions.
    reads: bool,
}

impl Children {
    fn run(mut self) {
        while self.turn().is_some() {}
        self.kill(|child| !child.reads);
        self.await_ends();
        self.kill(|_| true);
        // The killed ones are not waited for: one may hang in what it was killed for.
    }

    fn kill(&self, which: impl Fn(&Child) -> bool) {
        for child in self.running.values().filter(|child| which(child)) {
            let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
        }
    }

    /// Waits for the readers to end by themselves, for as long as a reader may take for a packet. A reader that is killed while it reads a connection
    /// leaves the connection in repair mode (protocol T3.5).
    fn await_ends(&self) {
        let end = Instant::now() + DEADLINE;
        for child in self.running.values().filter(|child| child.reads) {
            let left = end.saturating_duration_since(Instant::now());
            let _ = poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], Timespec::try_from(left).ok().as_ref());
        }
    }

    /// `None` when the broker is gone.
    fn turn(&mut self) -> Option<()> {
        let numbers: Vec<u32> = self.running.keys().copied().collect();
        let mut fds = vec![PollFd::new(&self.broker, PollFlags::IN)];
        fds.extend(self.running.values().map(|child| PollFd::new(&child.pidfd, PollFlags::IN)));
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => return Some(()),
            other => other.ok()?,
        };
        let told = !fds[0].revents().is_empty();
        let ended: Vec<u32> =
            numbers.iter().zip(&fds[1..]).filter(|(_, fd)| !fd.revents().is_empty()).map(|(n, _)| *n).collect();
        for number in ended {
            if let Some(child) = self.running.remove(&number) {
                let _ = waitpid(Some(child.pid), WaitOptions::NOHANG);
            }
        }
        if told { self.obey() } else { Some(()) }
    }

    fn obey(&mut self) -> Option<()> {
        let mut bytes = [0; 5];
        let received = packet::recv(self.broker.as_fd(), &mut bytes).ok()?;
        if received.len != bytes.len() {
            return None;
        }
        let [what, number @ ..] = bytes;
        let number = u32::from_le_bytes(number);
        match (what, &received.fds[..]) {
            (KILL, _) => {
                if let Some(child) = self.running.get(&number) {
                    let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
                }
            }
            (what, [broker, timer]) if what == Job::Read as u8 => {
                self.fork_reader(number, &[broker.as_fd(), timer.as_fd()], false);
            }
            (what, [broker, timer]) if what == Job::ReadUrgently as u8 => {
                self.fork_reader(number, &[broker.as_fd(), timer.as_fd()], true);
            }
            (what, [broker]) if what == Job::Dispose as u8 => {
                self.fork(number, ("partywall-drop\0", false), &[broker.as_fd()], disposer::dispose);
            }
            (what, [broker]) if what == Job::Close as u8 => {
                self.fork(number, ("partywall-hang\0", false), &[broker.as_fd()], disposer::close_at_once);
            }
            _ => {}
        }
        Some(())
    }

    fn fork_reader(&mut self, number: u32, keep: &[BorrowedFd<'_>], may_be_urgent: bool) {
        let number_record = self.number_record.clone();
        self.fork(number, ("partywall-read\0", true), keep, move |kept| {
            reader::run(kept, may_be_urgent, number_record);
        });
    }

    /// Should it fail, the child's end of its socket closes with the request, and the broker sees it as dead.
    fn fork(
        &mut self,
        number: u32,
        (name, reads): (&'static str, bool),
        keep: &[BorrowedFd<'_>],
        body: impl FnOnce(Vec<OwnedFd>),
    ) {
        if let Ok(pid) = process::fork(name, keep, body) {
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(pidfd) => drop(self.running.insert(number, Child { pid, pidfd, reads })),
                // A process that could not be killed later is of no use.
                Err(_) => drop(rustix::process::kill_process(pid, Signal::KILL)),
            }
        }
    }
}
