//! The loop of a relay: it polls, reads and writes, reports to the state machine what came, and has its effects carried out.

use super::command::RelayCommand;
use super::core::{DoorbellSide, LinkUse, MemoryDelivery, RelayCore};
use super::doorbells::{self, Doorbells, WaitingEvents};
use super::effects::Surroundings;
use super::judge::{self, JudgedPacket, Judges};
use super::latency::{BellDirection, RelayLatency};
use super::local::LocalLink;
use super::memory::WindowMemory;
use super::notices::NoticeSender;
use super::{DirectionWatch, Heartbeat, Notice, PortSide, RelayBacklog};
use crate::LinkEvent;
use crate::link::Packet;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// Packets taken from one link before the others get their turn.
const BURST: usize = 64;
/// Bytes read at once from the port.
const PIECE: usize = 16 << 10;
/// The pause between two looks at watched memory, and at a port without a client.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

#[derive(Debug)]
pub(super) struct Pump {
    port: OwnedFd,
    wake: Arc<OwnedFd>,
    commands: Receiver<RelayCommand>,
    /// Bytes for the port and of commands, for those outside.
    waiting: Arc<RelayBacklog>,
    /// The buffer for one read from the port.
    piece: Box<[u8]>,
    core: RelayCore<Arc<WindowMemory>>,
    surroundings: Surroundings,
    judges: Judges,
    /// How many packets were given to judges.
    judgements: u64,
    latency: Arc<RelayLatency>,
    /// When this turn began.
    woken: Instant,
    /// Bells that the port has not taken, and when the first of them was found.
    for_port: Option<(Instant, u64)>,
}

/// What the loop and the relay's owner both have.
pub(super) struct PumpShared {
    pub(super) wake: Arc<OwnedFd>,
    pub(super) waiting: Arc<RelayBacklog>,
    pub(super) bell_events: Arc<WaitingEvents>,
    pub(super) latency: Arc<RelayLatency>,
}

/// Why the loop ends.
enum RelayEnd {
    Told,
    Down(String),
}

impl Pump {
    pub(super) fn new(
        port: OwnedFd,
        (side, heartbeat): (PortSide, Option<Heartbeat>),
        commands: Receiver<RelayCommand>,
        reports: NoticeSender,
        shared: PumpShared,
    ) -> Self {
        let PumpShared { wake, waiting, bell_events, latency } = shared;
        let (locals, doorbells) = (BTreeMap::new(), Doorbells::None);
        Self {
            port,
            judges: Judges::new(Arc::clone(&wake)),
            judgements: 0,
            wake,
            commands,
            waiting,
            piece: vec![0; PIECE].into(),
            core: RelayCore::new(side, heartbeat, random, Instant::now()),
            surroundings: Surroundings { locals, doorbells, bell_events, reports, rung: 0 },
            latency,
            woken: Instant::now(),
            for_port: None,
        }
    }

    pub(super) fn run(mut self) {
        let end = loop {
            if let Err(end) = self.turn() {
                break end;
            }
        };
        // Links hang up before the end is reported, so that its receiver finds them so. The other side hears as far as the port
        // takes it at once.
        self.core.end();
        self.carry_out();
        let _ = self.write_port();
        self.waiting.over.store(true, Ordering::Relaxed);
        if let RelayEnd::Down(why) = end {
            self.surroundings.reports.report(Notice::Down { why });
        }
    }

    fn carry_out(&mut self) {
        self.surroundings.carry_out(&mut self.core);
        let rung = std::mem::take(&mut self.surroundings.rung);
        if rung > 0 {
            self.latency.observe(BellDirection::FromPort, self.woken.elapsed(), rung);
        }
    }

    fn turn(&mut self) -> Result<(), RelayEnd> {
        let ready = self.poll().map_err(|e| RelayEnd::Down(e.to_string()))?;
        self.woken = Instant::now();
        if ready.commands {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        // Commands come first, so a link exists before any frame for it is decoded.
        self.take_commands()?;
        self.take_judged();
        if ready.port {
            self.read_port()?;
        }
        // One packet of each link, which is mostly all there is, is sent before the next look: a process sleeps until it comes.
        let mut more = ready.links;
        // These links found no judge before, and there may be one now. `poll` has waited in between.
        for (id, local) in &mut self.surroundings.locals {
            if std::mem::take(&mut local.waits_for_judge) {
                more.push(*id);
            }
        }
        for id in ready.rung {
            self.take_signal(id);
        }
        more.retain(|id| self.read_link(*id, 1));
        self.write_port()?;
        for id in more {
            self.read_link(id, BURST);
        }
        self.look_after_processes();
        self.core.close_finished();
        self.core.beat(Instant::now());
        self.carry_out();
        self.write_port()
    }

    /// Sends what there is room for now, and rings whose ring was lost.
    fn look_after_processes(&mut self) {
        for (id, local) in &self.surroundings.locals {
            self.surroundings.deliver(*id, &mut self.core);
            if local.watch.as_ref().is_some_and(DirectionWatch::oversleeps) {
                local.link.ring();
            }
        }
    }

    /// How long nothing need happen.
    fn patience(&self) -> Option<Timespec> {
        let looks_again = |local: &LocalLink| local.watch.is_some() || local.waits_for_judge;
        if self.core.is_alone() || self.surroundings.locals.values().any(looks_again) {
            return Some(TICK);
        }
        let left = self.core.patience(Instant::now())?;
        // A millisecond more, so as not to wake just before the time.
        Timespec::try_from(left + Duration::from_millis(1)).ok()
    }

    fn poll<'a>(&'a self) -> rustix::io::Result<PolledReady> {
        let may_read = self.core.may_read_links();
        let port = (!self.core.is_alone()).then(|| {
            let queued = self.waiting.queued.load(Ordering::Relaxed);
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, self.core.may_read_port(queued, self.surroundings.reports.backlog()));
            flags.set(PollFlags::OUT, !self.core.output().is_empty());
            flags
        });
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        fds.extend(port.map(|flags| PollFd::new(&self.port, flags)));
        let first = fds.len();
        let mut ids = Vec::new();
        for (id, local) in self.surroundings.locals.iter().filter(|(_, local)| !local.rests()) {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, may_read);
            flags.set(PollFlags::OUT, self.core.is_waiting_for_room(*id));
            if !flags.is_empty() {
                fds.push(PollFd::from_borrowed_fd(local.link.as_fd(), flags));
                ids.push(*id);
            }
        }
        let unbound = |(id, local): (&u32, &'a LocalLink)| Some((*id, local.unbound()?));
        let (ringers, events): (Vec<u32>, Vec<&OwnedFd>) =
            self.surroundings.locals.iter().filter(|_| may_read).filter_map(unbound).unzip();
        fds.extend(events.into_iter().map(|event| PollFd::new(event, PollFlags::IN)));
        match rustix::event::poll(&mut fds, self.patience().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        let news = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        let (of_links, of_events) = fds[first..].split_at(ids.len());
        let links = ids.iter().zip(of_links).filter(|(_, fd)| may_read && fd.revents().intersects(news));
        let rung = ringers.iter().zip(of_events).filter(|(_, fd)| fd.revents().intersects(news));
        Ok(PolledReady {
            commands: !fds[0].revents().is_empty(),
            // A port that was closed is read to its end, whatever waits.
            port: port.is_none() || fds[1].revents().intersects(news),
            links: links.map(|(id, _)| *id).collect(),
            rung: rung.map(|(id, _)| *id).collect(),
        })
    }

    fn take_commands(&mut self) -> Result<(), RelayEnd> {
        loop {
            match self.commands.try_recv() {
                Ok(RelayCommand::End) | Err(TryRecvError::Disconnected) => return Err(RelayEnd::Told),
                Err(TryRecvError::Empty) => return Ok(()),
                Ok(command) => self.take_command(command),
            }
            self.carry_out();
        }
    }

    fn take_command(&mut self, command: RelayCommand) {
        match command {
            RelayCommand::OwnerHeard => self.core.owner_heard(),
            RelayCommand::Doorbells(doorbells) => {
                self.core.doorbells(match &doorbells {
                    Doorbells::None => DoorbellSide::None,
                    Doorbells::Guest(_) => DoorbellSide::Guest,
                    Doorbells::Host(_) => DoorbellSide::Host,
                });
                self.surroundings.doorbells = doorbells;
                self.surroundings.locals.values_mut().for_each(LocalLink::forget_device);
            }
            RelayCommand::Window { id, memory } => {
                if let Some(memory) = WindowMemory::new(memory) {
                    self.core.window(id, Arc::new(memory));
                }
            }
            RelayCommand::Forget { id } => self.core.forget_window(id),
            // The caller ends the loop.
            RelayCommand::End => {}
            // All others are for the other side, which has begun again, and whose links have ended.
            late if self.core.is_owner_late() => self.drop_command(late),
            RelayCommand::Link { id, socket, watch } => self.link(id, socket, watch, LinkUse::Channel),
            RelayCommand::Control(message) => self.control(message),
            RelayCommand::ControlWith { message, links, carries } => {
                self.control(message);
                links.into_iter().for_each(|(id, socket)| self.link(id, socket, None, carries));
            }
            RelayCommand::ForgetLink { id } => self.core.forget_link(id),
            RelayCommand::HangUp { id } => self.core.hang_up(id),
            RelayCommand::HangUpAll => self.core.end(),
            RelayCommand::Leave => self.core.leave(),
        }
    }

    /// A command that is not carried out. The processes of its links find them hung up.
    fn drop_command(&mut self, command: RelayCommand) {
        let close = |socket| LocalLink::new(socket, None, LinkUse::Channel).close();
        match command {
            RelayCommand::Link { socket, .. } => close(socket),
            RelayCommand::Control(message) => self.unqueue(&message),
            RelayCommand::ControlWith { message, links, .. } => {
                self.unqueue(&message);
                links.into_iter().for_each(|(_, socket)| close(socket));
            }
            _ => {}
        }
    }

    /// The relay has taken a control message.
    fn unqueue(&self, message: &[u8]) {
        self.waiting.queued.fetch_sub(message.len(), Ordering::Relaxed);
    }

    fn control(&mut self, message: Vec<u8>) {
        self.unqueue(&message);
        self.core.control(message);
    }

    fn link(&mut self, id: u32, socket: OwnedFd, watch: Option<DirectionWatch>, carries: LinkUse) {
        let before = self.surroundings.locals.insert(id, LocalLink::new(socket, watch, carries));
        before.into_iter().for_each(LocalLink::close);
        self.core.link(id, carries);
    }

    /// Reads once: what one guest says must not keep others, or its own processes, from being heard.
    fn read_port(&mut self) -> Result<(), RelayEnd> {
        match rustix::io::read(&self.port, &mut self.piece[..]) {
            Ok(0) if self.core.port_ended() => {}
            Ok(0) => return Err(RelayEnd::Down("the port was closed".into())),
            Ok(n) => {
                self.core.received(&self.piece[..n]);
                // Commands that were given before these bytes were sent are executed before the bytes are decoded.
                self.take_commands()?;
                self.core.heard(Instant::now());
                while self.core.next_item(Instant::now()).map_err(|e| RelayEnd::Down(e.to_string()))? {
                    self.carry_out();
                }
            }
            Err(Errno::AGAIN) => self.core.accompanied(),
            Err(Errno::INTR) => {}
            Err(e) => return Err(RelayEnd::Down(e.to_string())),
        }
        self.carry_out();
        Ok(())
    }

    /// Takes at most `most` from a link; `true` if there may be more.
    fn read_link(&mut self, id: u32, most: usize) -> bool {
        let mut rung = false;
        let more = (0..most).all(|_| self.read_packet(id, &mut rung));
        // One is as good as many, if it comes after the last of them: a half that heard an earlier one may be asleep again.
        if rung {
            self.ring(id);
        }
        more
    }

    /// The process of a link has rung.
    fn ring(&mut self, id: u32) {
        let before = self.core.output().len();
        self.core.ring(id);
        // A ring by a doorbell device does not go through the port.
        if self.core.output().len() > before {
            self.for_port.get_or_insert((self.woken, 0)).1 += 1;
        }
        self.carry_out();
    }

    /// The process of a bell has signalled its event. All of its signals are one ring.
    fn take_signal(&mut self, id: u32) {
        let event = self.surroundings.locals.get(&id).and_then(LocalLink::unbound);
        if event.is_some_and(|event| doorbells::take_signals(event).is_ok()) {
            self.ring(id);
        }
    }

    /// Takes one packet from a link; `false` if there is none.
    fn read_packet(&mut self, id: u32, rung: &mut bool) -> bool {
        let Some(local) = self.surroundings.locals.get_mut(&id).filter(|_| self.core.may_read_links()) else {
            return false;
        };
        if local.rests() {
            return false;
        }
        if judge::has_descriptors(&local.link) {
            self.judgements += 1;
            if self.judges.judge(self.judgements, &local.link) {
                local.judged_as = Some(self.judgements);
            } else {
                local.waits_for_judge = true;
            }
            return false;
        }
        match local.next() {
            None => return false,
            Some(Packet::Event(LinkEvent::Bell)) => *rung = true,
            Some(Packet::Event(LinkEvent::Dropped)) => self.core.dropped(id),
            Some(Packet::Moved) => self.core.moved(id),
            // All others have descriptors, or are nonsense.
            Some(_) => self.core.hang_up(id),
        }
        self.carry_out();
        true
    }

    /// Goes on with links of which a packet has been judged.
    fn take_judged(&mut self) {
        while let Some((number, packet)) = self.judges.next() {
            // The link may have ended in the meantime.
            let found = self.surroundings.locals.iter_mut().find(|(_, local)| local.judged_as == Some(number));
            let Some((&id, local)) = found else { continue };
            local.judged_as = None;
            match packet {
                JudgedPacket::Memory(MemoryDelivery { base, start, generation, geometry, memory }) => {
                    let memory = self.core.windows().find(|(_, known)| known.is(memory)).map(|(window, _)| window);
                    self.core.attach(id, MemoryDelivery { base, start, generation, geometry, memory });
                }
                JudgedPacket::RingAt(event) => self.introduce(id, event),
                JudgedPacket::Nothing => {}
                JudgedPacket::End => self.core.hang_up(id),
            }
            self.carry_out();
        }
    }

    /// On the host: this event rings the other end of a link, and the guest is to signal it itself if it can (protocol I4).
    fn introduce(&mut self, id: u32, event: OwnedFd) {
        if !self.core.wants_event(id) {
            return;
        }
        let introduced = match &mut self.surroundings.doorbells {
            Doorbells::Host(device) => event.try_clone().ok().and_then(|event| device.introduce(event)),
            _ => None,
        };
        self.core.introduced(id, introduced);
        if let (None, Some(local)) = (introduced, self.surroundings.locals.get_mut(&id)) {
            local.event = Some(event);
        }
    }

    fn write_port(&mut self) -> Result<(), RelayEnd> {
        while !self.core.output().is_empty() {
            match rustix::io::write(&self.port, self.core.output()) {
                Ok(n) => self.core.written(n),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(RelayEnd::Down("the port was closed".into())),
                Err(e) => return Err(RelayEnd::Down(e.to_string())),
            }
        }
        if self.core.output().is_empty()
            && let Some((found, bells)) = self.for_port.take()
        {
            self.latency.observe(BellDirection::ToPort, found.elapsed(), bells);
        }
        self.waiting.buffered.store(self.core.waiting(), Ordering::Relaxed);
        Ok(())
    }
}

/// The sources that are ready.
struct PolledReady {
    commands: bool,
    port: bool,
    links: Vec<u32>,
    /// Links whose process has signalled an event.
    rung: Vec<u32>,
}

fn random() -> u64 {
    let mut random = [0; 8];
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(random)
}
