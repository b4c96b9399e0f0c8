//! A process that reads the sessions of one user: it takes what comes, judges and closes descriptors, and passes on the rest.
//!
//! It may hang in any of that; the timer tells the broker, which then kills it. Nothing here logs (see [`super::process`]).

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use partywall_protocol::wire;
use partywall_region::inspect::{Inspector, Unhurried};
use partywall_region::packet;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};

use super::DEADLINE;
use super::report::{ReaderOrder, ReaderReport};
use super::urgency::ReaderUrgency;
use crate::server::judge::{Judged, has_ended, judge};

/// More packets than find room in a socket. One that another process still has may go on filling.
const MOST_FAREWELLS: usize = 1024;

/// The epoll data of the broker's socket; sessions have greater numbers.
const BROKER: u64 = 0;

/// Reads until the broker is gone. `may_be_urgent`: it may raise its priority. `number_record`: where the kernel's record of sequence numbers is
/// kept, if there is one.
pub(super) fn run(kept: Vec<OwnedFd>, may_be_urgent: bool, number_record: Option<PathBuf>) {
    if let Ok([broker, timer]) = <[OwnedFd; 2]>::try_from(kept)
        && let Ok(epoll) = epoll::create(epoll::CreateFlags::CLOEXEC)
    {
        let sessions = BTreeMap::new();
        let incoming = Box::new([0; wire::MAX_PACKET]);
        let inspector = Inspector::new().with_record_at(number_record);
        let urgency = ReaderUrgency::new(may_be_urgent);
        let mut this = ReaderProcess { broker, timer, epoll, sessions, inspector, incoming, urgency };
        this.urgency.look();
        let _ = this.serve();
        // Not dropped: to close a socket that lingers would wait for its peer. At the end of the process the kernel closes all without waiting.
        std::mem::forget(this);
    }
}

struct ReaderProcess {
    broker: OwnedFd,
    timer: OwnedFd,
    epoll: OwnedFd,
    sessions: BTreeMap<u64, OwnedFd>,
    inspector: Inspector,
    incoming: Box<[u8; wire::MAX_PACKET]>,
    urgency: ReaderUrgency,
}

impl ReaderProcess {
    /// Until the broker is gone.
    fn serve(&mut self) -> io::Result<()> {
        epoll::add(&self.epoll, &self.broker, EventData::new_u64(BROKER), EventFlags::IN)?;
        loop {
            self.turn(None)?;
        }
    }

    /// Waits for something and does it; whether there was anything.
    fn turn(&mut self, timeout: Option<&Timespec>) -> io::Result<bool> {
        let mut room = [MaybeUninit::uninit(); 64];
        let events = match epoll::wait(&self.epoll, &mut room, timeout) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(e) => return Err(e.into()),
        };
        self.urgency.look();
        for event in events.iter() {
            // The event is packed; its fields are copied out before use.
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                BROKER => self.obey()?,
                // One packet each, so that none holds up the others.
                session => self.read(session, flags)?,
            }
            self.urgency.look();
        }
        Ok(!events.is_empty())
    }

    /// Does what the broker has sent.
    fn obey(&mut self) -> io::Result<()> {
        loop {
            let mut bytes = [0; ReaderOrder::SIZE];
            let received = match packet::try_recv(self.broker.as_fd(), &mut bytes) {
                Ok(received) => received,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            };
            if received.len != bytes.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let fd = received.fds.into_iter().next();
            match (ReaderOrder::decode(&bytes), fd) {
                (Some(ReaderOrder::Serve(session)), Some(socket)) => {
                    let data = EventData::new_u64(session);
                    match epoll::add(&self.epoll, &socket, data, EventFlags::IN | EventFlags::RDHUP) {
                        Ok(()) => drop(self.sessions.insert(session, socket)),
                        Err(_) => self.report(&ReaderReport::Gone { session }, &[])?,
                    }
                }
                // There was no descriptor left for it.
                (Some(ReaderOrder::Serve(session)), None) => self.report(&ReaderReport::Gone { session }, &[])?,
                (Some(ReaderOrder::End(session)), copy) => {
                    let sockets = [self.sessions.remove(&session), copy];
                    self.guarded(|this| {
                        for socket in sockets.into_iter().flatten() {
                            this.drain(&socket);
                        }
                    })?;
                    self.report(&ReaderReport::Ended { session }, &[])?;
                }
                (Some(ReaderOrder::Sync(number)), _) => {
                    while self.turn(Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? {}
                    self.report(&ReaderReport::Synced { number }, &[])?;
                }
                (None, _) => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    /// Something happened on a session.
    fn read(&mut self, session: u64, flags: EventFlags) -> io::Result<()> {
        // The process is gone or has closed its end.
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            return self.lose(session);
        }
        let Some(socket) = self.sessions.get(&session).map(AsFd::as_fd) else { return Ok(()) };
        let (incoming, inspector) = (&mut self.incoming, &mut self.inspector);
        set_timer(&self.timer, true)?;
        let judged = match packet::try_recv(socket, &mut incoming[..]) {
            Ok(received) if received.len == 0 && received.fds.is_empty() && has_ended(socket) => None,
            Ok(received) => Some(judge(inspector, &incoming[..], received)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return set_timer(&self.timer, false);
            }
            Err(_) => None,
        };
        set_timer(&self.timer, false)?;
        match judged {
            Some(judged) => self.pass_on(session, judged),
            None => self.lose(session),
        }
    }

    fn pass_on(&self, session: u64, mut judged: Judged) -> io::Result<()> {
        let kept: Vec<OwnedFd> = judged.take_kept();
        let fds: Vec<BorrowedFd<'_>> = kept.iter().map(AsFd::as_fd).collect();
        let len = judged.len.min(wire::MAX_PACKET);
        let report = ReaderReport::Packet { session, judged, bytes: &self.incoming[..len] };
        self.report(&report, &fds)
    }

    fn lose(&mut self, session: u64) -> io::Result<()> {
        if let Some(socket) = self.sessions.get(&session) {
            // It stays open until the broker has closed its own copy.
            let _ = epoll::delete(&self.epoll, socket);
            self.pass_on_farewells(session)?;
            self.report(&ReaderReport::Gone { session }, &[])?;
        }
        Ok(())
    }

    /// Passes on what the process gave up before it closed its end (protocol C11.4). Its other packets cannot be answered.
    fn pass_on_farewells(&mut self, session: u64) -> io::Result<()> {
        let Some(socket) = self.sessions.remove(&session) else { return Ok(()) };
        let farewells = self.guarded(|this| this.drain(&socket))?;
        self.sessions.insert(session, socket);
        for bytes in &farewells {
            let (len, sorts, kept) = (bytes.len(), Vec::new(), Vec::new());
            let judged = Judged { len, truncated: false, came: 0, socket: None, sorts, kept };
            self.report(&ReaderReport::Packet { session, judged, bytes }, &[])?;
        }
        Ok(())
    }

    /// Tells the broker, and waits while it is behind: nothing is read until it has caught up.
    fn report(&self, report: &ReaderReport<'_>, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        match packet::send(self.broker.as_fd(), &report.encode(), fds) {
            Err(e)
                if !fds.is_empty()
                    && !matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
                // The kernel carries no more descriptors of this user: as if they had not come.
                packet::send(self.broker.as_fd(), &report.encode_without_descriptors(), &[])
            }
            other => other,
        }
    }

    /// Takes what a session has left unread out of its socket: the kernel would close descriptors in it as it finds them. Returns the packets
    /// that count in spite of that, which bring none.
    fn drain(&mut self, socket: &OwnedFd) -> Vec<Vec<u8>> {
        let (mut farewells, mut nothing) = (Vec::new(), 0);
        while let Ok(received) = packet::try_recv(socket.as_fd(), &mut self.incoming[..]) {
            let packet::ReceivedPacket { len, truncated, fds } = received;
            // The end, or a packet of no bytes, of which 300 do not find room in a socket.
            nothing += u32::from(len == 0 && fds.is_empty());
            if nothing > 300 {
                break;
            }
            let is_whole = fds.is_empty() && !truncated;
            drop(fds.into_iter().map(Unhurried).collect::<Vec<_>>());
            let bytes = self.incoming.get(..len).unwrap_or_default();
            if is_whole
                && farewells.len() < MOST_FAREWELLS
                && wire::decode(bytes).is_ok_and(|(_, message)| message.is_farewell())
            {
                farewells.push(bytes.to_vec());
            }
        }
        farewells
    }

    /// Does something that may hang; the timer tells the broker if it does.
    fn guarded<T>(&mut self, what: impl FnOnce(&mut Self) -> T) -> io::Result<T> {
        set_timer(&self.timer, true)?;
        let done = what(self);
        set_timer(&self.timer, false)?;
        Ok(done)
    }
}

fn set_timer(timer: &OwnedFd, on: bool) -> io::Result<()> {
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    let it_value = if on { Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 } } else { zero };
    timerfd_settime(timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: zero, it_value })?;
    Ok(())
}
