//! The loop of a relay: what comes from the port goes to sockets, what comes from sockets goes to the port.

use super::doorbells::{Doorbells, VectorEvent};
use super::local::{Delivery, Local, Shortcut};
use super::{Heartbeat, MOST_NOTICES, Notice, Side, Waiting, Watch};
use crate::Event;
use crate::link::Packet;
use partywall_protocol::port::{Decoder, Frame, Item, RegionPlace, greeting};
use partywall_protocol::window::WindowId;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// With so much waiting for the port, processes have to wait too (protocol P5).
const HIGH: usize = 64 << 10;
/// Things said of links before these were known, of which no more are remembered: far more than there can be on the way.
const EARLY: usize = 1024;
/// So many rings of a link go both ways: its device may hear of the peer a moment after this relay.
const BOTH_WAYS: u64 = 2;
/// Packets taken from one link before the others get their turn.
const BURST: usize = 64;
/// Bytes read at once from the port.
const PIECE: usize = 16 << 10;
/// Between two looks at watched memory, and at a port that nobody is connected to.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The commands that a relay takes.
#[derive(Debug)]
pub(super) enum Command {
    Link { id: u32, socket: OwnedFd, watch: Option<Watch> },
    Doorbells(Doorbells),
    Window { id: WindowId, memory: OwnedFd },
    Forget { id: WindowId },
    Control(Vec<u8>),
    ControlWith { message: Vec<u8>, links: Vec<(u32, OwnedFd)> },
    HangUp { id: u32 },
    End,
}

/// How a relay tells its owner, who may sleep.
#[derive(Debug)]
pub(super) struct Teller {
    say: Sender<Notice>,
    bell: Arc<OwnedFd>,
    backlog: Arc<AtomicUsize>,
}

impl Teller {
    pub(super) fn new(say: Sender<Notice>, bell: Arc<OwnedFd>, backlog: Arc<AtomicUsize>) -> Self {
        Self { say, bell, backlog }
    }

    fn tell(&self, notice: Notice) {
        // Counted first, so that the count is never less than nothing.
        self.backlog.fetch_add(1, Ordering::AcqRel);
        // Who runs the relay need not listen.
        let _ = self.say.send(notice);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// A window's descriptor, and what it is recognised by.
#[derive(Debug)]
struct Known {
    memory: OwnedFd,
    file: File,
}

/// Device, inode, and device number of a device file.
type File = (u64, u64, u64);

#[derive(Debug)]
pub(super) struct Pump {
    port: OwnedFd,
    side: Side,
    wake: Arc<OwnedFd>,
    commands: Receiver<Command>,
    say: Teller,
    /// Bytes of `out` and of commands, for those outside.
    waiting: Arc<Waiting>,
    decoder: Decoder,
    /// What is read at once from the port.
    piece: Box<[u8]>,
    out: Vec<u8>,
    links: BTreeMap<u32, Local>,
    /// What the other side has said of links before this side knew of them, as far as it must not be missed; the latest first.
    early: VecDeque<Early>,
    windows: BTreeMap<WindowId, Known>,
    doorbells: Doorbells,
    /// The number of this side's latest greeting; in the guest.
    number: u64,
    /// It has not been answered.
    awaiting: bool,
    /// When the other side is asked next, and when it was heard last; on the host.
    pulse: Option<Pulse>,
    /// In the guest: nobody is at the other end of the port.
    alone: bool,
}

#[derive(Debug)]
struct Pulse {
    beat: Heartbeat,
    heard: Instant,
    next: Instant,
    /// When the time was last looked at.
    looked: Instant,
    /// Silence has been told, and nobody expects anything else.
    told: bool,
    /// It was, of a guest that had greeted: it does not know that its links are gone.
    fell_silent: bool,
}

impl Pulse {
    fn new(beat: Heartbeat) -> Self {
        let now = Instant::now();
        // Nobody has greeted yet, whose silence could be told.
        Self { beat, heard: now, next: now, looked: now, told: true, fell_silent: false }
    }
}

/// Said of a link that is not known yet.
#[derive(Debug, Clone, Copy)]
struct Early {
    link: u32,
    said: Said,
}

/// What is said of a link once.
#[derive(Debug, Clone, Copy)]
enum Said {
    HungUp,
    RungBy { vector: u32 },
    RingAs { peer: u32 },
}

/// Why the loop ends.
enum End {
    Told,
    Down(String),
}

impl Pump {
    pub(super) fn new(
        port: OwnedFd,
        side: Side,
        heartbeat: Option<Heartbeat>,
        wake: Arc<OwnedFd>,
        commands: Receiver<Command>,
        say: Teller,
        waiting: Arc<Waiting>,
    ) -> Self {
        Self {
            port,
            side,
            wake,
            commands,
            say,
            waiting,
            early: VecDeque::new(),
            decoder: Decoder::default(),
            piece: vec![0; PIECE].into(),
            out: Vec::new(),
            links: BTreeMap::new(),
            windows: BTreeMap::new(),
            doorbells: Doorbells::None,
            number: 0,
            awaiting: false,
            pulse: heartbeat.map(Pulse::new),
            alone: false,
        }
    }

    pub(super) fn run(mut self) {
        self.greet();
        let end = loop {
            if let Err(end) = self.turn() {
                break end;
            }
        };
        // Links hang up before anyone hears of it, so that the hearer finds them so. The other side hears as far as the port
        // takes it at once.
        for id in self.forget_links() {
            Frame::HungUp(id).encode(&mut self.out);
        }
        let _ = self.write_port();
        self.waiting.over.store(true, Ordering::Relaxed);
        if let End::Down(why) = end {
            self.tell(Notice::Down { why });
        }
    }

    fn turn(&mut self) -> Result<(), End> {
        let ready = self.poll().map_err(|e| End::Down(e.to_string()))?;
        if ready.told {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        // What is reported first is known first: a link is there before anything on it is looked at.
        self.obey()?;
        if ready.port {
            self.read_port()?;
        }
        // One thing of each, which is mostly all there is, is in transit before more is looked for: somebody sleeps until it comes.
        let mut more = ready.links;
        more.retain(|id| self.read_link(*id, 1));
        self.write_port()?;
        for id in more {
            self.read_link(id, BURST);
        }
        for local in self.links.values_mut() {
            local.flush();
            if local.watch.as_ref().is_some_and(Watch::oversleeps) {
                local.link.ring();
            }
        }
        let over: Vec<u32> = self.links.iter().filter(|(_, local)| local.is_over()).map(|(id, _)| *id).collect();
        for id in over {
            self.remove(id);
            self.tell(Notice::Closed(id));
        }
        self.beat();
        self.write_port()
    }

    fn beat(&mut self) {
        let now = Instant::now();
        let Some(pulse) = self.pulse.as_mut().filter(|pulse| !pulse.told) else { return };
        // While this side did not run, it neither asked nor heard: what it was held up for is not the other side's silence.
        let since = now - std::mem::replace(&mut pulse.looked, now);
        if since > pulse.beat.every * 2 {
            pulse.heard = (pulse.heard + since).min(now);
        }
        if now >= pulse.heard + pulse.beat.limit {
            pulse.told = true;
            pulse.fell_silent = true;
            // If it was only held up, it finds this when it goes on.
            for id in self.forget_links() {
                Frame::HungUp(id).encode(&mut self.out);
            }
            self.tell(Notice::Silent);
        } else if now >= pulse.next {
            pulse.next = now + pulse.beat.every;
            Frame::Ping.encode(&mut self.out);
        }
    }

    /// How long nothing need happen.
    fn patience(&self) -> Option<Timespec> {
        if self.alone || self.links.values().any(|local| local.watch.is_some()) {
            return Some(TICK);
        }
        let pulse = self.pulse.as_ref().filter(|pulse| !pulse.told)?;
        let left = pulse.next.min(pulse.heard + pulse.beat.limit).saturating_duration_since(Instant::now());
        // A millisecond more, so as not to wake just before the time.
        Timespec::try_from(left + Duration::from_millis(1)).ok()
    }

    fn poll(&self) -> rustix::io::Result<Ready> {
        let full = self.out.len() >= HIGH;
        let port = (!self.alone).then(|| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, self.may_read_port());
            flags.set(PollFlags::OUT, !self.out.is_empty());
            flags
        });
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        fds.extend(port.map(|flags| PollFd::new(&self.port, flags)));
        let first = fds.len();
        let mut ids = Vec::new();
        for (id, local) in &self.links {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, !full);
            flags.set(PollFlags::OUT, local.is_waiting_for_room());
            if !flags.is_empty() {
                fds.push(PollFd::from_borrowed_fd(local.link.as_fd(), flags));
                ids.push(*id);
            }
        }
        match rustix::event::poll(&mut fds, self.patience().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        let news = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        let links = ids.iter().zip(&fds[first..]).filter(|(_, fd)| !full && fd.revents().intersects(news));
        Ok(Ready {
            told: !fds[0].revents().is_empty(),
            // A port that was closed is read to its end, whatever waits.
            port: port.is_none() || fds[1].revents().intersects(news),
            links: links.map(|(id, _)| *id).collect(),
        })
    }

    /// A host does not listen to a guest that does not read its answers, or that says more than is taken in: what a guest says may
    /// have to be answered. A guest always listens, or both might wait for each other.
    fn may_read_port(&self) -> bool {
        let behind = self.waiting.bytes() >= HIGH || self.say.backlog.load(Ordering::Acquire) >= MOST_NOTICES;
        self.side == Side::Guest || !behind
    }

    fn obey(&mut self) -> Result<(), End> {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Link { id, socket, watch }) => self.link(id, socket, watch),
                Ok(Command::ControlWith { message, links }) => {
                    self.waiting.queued.fetch_sub(message.len(), Ordering::Relaxed);
                    Frame::Control(message).encode(&mut self.out);
                    links.into_iter().for_each(|(id, socket)| self.link(id, socket, None));
                }
                Ok(Command::Doorbells(doorbells)) => {
                    self.doorbells = doorbells;
                    // What they had of the old ones means something else now, or nothing.
                    self.links.values_mut().for_each(|local| local.shortcut = Shortcut::default());
                }
                Ok(Command::Window { id, memory }) => {
                    if let Some(file) = file_of(&memory) {
                        self.windows.insert(id, Known { memory, file });
                    }
                }
                Ok(Command::Forget { id }) => drop(self.windows.remove(&id)),
                Ok(Command::Control(message)) => {
                    self.waiting.queued.fetch_sub(message.len(), Ordering::Relaxed);
                    Frame::Control(message).encode(&mut self.out);
                }
                Ok(Command::HangUp { id }) => self.close(id),
                Err(TryRecvError::Empty) => return Ok(()),
                Ok(Command::End) | Err(TryRecvError::Disconnected) => return Err(End::Told),
            }
        }
    }

    fn link(&mut self, id: u32, socket: OwnedFd, watch: Option<Watch>) {
        self.links.insert(id, Local::new(socket, watch));
        self.be_rung(id);
        // Rings that came before it was known are not needed: who begins to read looks at the memory first.
        let said: Vec<Said> =
            self.early.iter().rev().filter(|early| early.link == id).map(|early| early.said).collect();
        self.early.retain(|early| early.link != id);
        said.into_iter().for_each(|said| self.said_of(id, said));
    }

    /// The other side says this of a link.
    fn said_of(&mut self, id: u32, said: Said) {
        let Some(local) = self.links.get_mut(&id) else {
            self.early.truncate(EARLY - 1);
            return self.early.push_front(Early { link: id, said });
        };
        match (said, &self.doorbells) {
            (Said::HungUp, _) => local.end(),
            (Said::RungBy { vector }, Doorbells::Host(doorbells)) if local.shortcut.vector.is_none() => {
                if let Some(event) = doorbells.event(vector) {
                    local.shortcut.vector = Some(vector);
                    // A link that is full of rings is rung by the port from then on.
                    let _ = local.link.ring_at(event.as_fd());
                }
            }
            (Said::RingAs { peer }, Doorbells::Guest(_)) => local.shortcut.peer = Some(peer),
            _ => {}
        }
    }

    /// In a guest: a vector for a new link, of which its process hears, and the host (protocol I3).
    fn be_rung(&mut self, id: u32) {
        let (Doorbells::Guest(doorbells), Some(local)) = (&mut self.doorbells, self.links.get_mut(&id)) else { return };
        let Some((vector, event)) = doorbells.take() else { return };
        if local.link.listen_to(event.as_fd()).is_err() {
            return doorbells.give_back(vector);
        }
        local.shortcut.vector = Some(vector);
        Frame::RungBy { link: id, vector }.encode(&mut self.out);
    }

    fn remove(&mut self, id: u32) -> bool {
        let Some(local) = self.links.remove(&id) else { return false };
        self.give_back(&local.shortcut);
        true
    }

    /// All links are over; which there were.
    fn forget_links(&mut self) -> Vec<u32> {
        let links = std::mem::take(&mut self.links);
        links.values().for_each(|local| self.give_back(&local.shortcut));
        links.into_keys().collect()
    }

    fn give_back(&mut self, shortcut: &Shortcut) {
        match &mut self.doorbells {
            // A vector that was told of goes to another link some day, and then the event is announced again.
            Doorbells::None | Doorbells::Host(_) => {}
            Doorbells::Guest(doorbells) => {
                shortcut.vector.into_iter().for_each(|vector| doorbells.give_back(vector));
                shortcut.peer.into_iter().for_each(|peer| doorbells.forget(peer));
            }
        }
    }

    /// Rings the other end for this side's process: without the port if there is a way.
    fn ring(&mut self, id: u32) {
        let Some(local) = self.links.get_mut(&id) else { return };
        if let (Doorbells::Guest(doorbells), Some(peer)) = (&mut self.doorbells, local.shortcut.peer) {
            doorbells.ring(peer);
            local.shortcut.rings += 1;
            // From then on its process rings without this relay.
            if local.shortcut.rings == BOTH_WAYS
                && let Some(event) = doorbells.ringer(peer)
                && local.link.ring_at(event.as_fd()).is_err()
            {
                doorbells.forget(peer);
            }
            if local.shortcut.rings > BOTH_WAYS {
                return;
            }
        }
        Frame::Bell(id).encode(&mut self.out);
    }

    /// On the host: the other end of a link is rung by this event, by the guest itself if it can (protocol I4). Once for each link:
    /// the numbers that a guest's device has for others come to an end.
    fn ring_at(&mut self, id: u32, event: OwnedFd) {
        let Some(local) = self.links.get_mut(&id) else { return };
        let shortcut = &mut local.shortcut;
        if self.side == Side::Guest
            || shortcut.peer.is_some()
            || shortcut.event.is_some()
            || !VectorEvent::is_one(&event)
        {
            return;
        }
        let introduced = match &mut self.doorbells {
            Doorbells::Host(doorbells) => event.try_clone().ok().and_then(|event| doorbells.introduce(event)),
            _ => None,
        };
        match introduced {
            Some(peer) => {
                shortcut.peer = Some(peer);
                Frame::RingAs { link: id, peer }.encode(&mut self.out);
            }
            None => shortcut.event = Some(event),
        }
    }

    /// Reads once: what one guest says must not keep others, or its own processes, from being heard.
    fn read_port(&mut self) -> Result<(), End> {
        match rustix::io::read(&self.port, &mut self.piece[..]) {
            Ok(0) if self.side == Side::Guest => {
                if !std::mem::replace(&mut self.alone, true) {
                    self.forget_links();
                    self.early.clear();
                    self.out.clear();
                    self.tell(Notice::Alone);
                }
                return Ok(());
            }
            Ok(0) => return Err(End::Down("the port was closed".into())),
            Ok(n) => {
                self.accompanied();
                self.decoder.push(&self.piece[..n]);
                // What was told before these bytes were sent is known before they are looked at.
                self.obey()?;
            }
            Err(Errno::AGAIN) if self.alone => {
                self.accompanied();
                return Ok(());
            }
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(e) => return Err(End::Down(e.to_string())),
        }
        if let Some(pulse) = &mut self.pulse {
            pulse.heard = Instant::now();
            // It goes on where it was held up: it has to begin again.
            if std::mem::replace(&mut pulse.fell_silent, false) {
                self.say_greeting(0);
            }
        }
        loop {
            match self.decoder.take() {
                Ok(Some(Item::Greeting(number))) => self.greeted(number),
                Ok(Some(Item::Frame(frame))) => self.heard(frame),
                Ok(None) => return Ok(()),
                Err(e) => return Err(End::Down(e.to_string())),
            }
        }
    }

    /// Somebody is there again, perhaps someone new.
    fn accompanied(&mut self) {
        if std::mem::replace(&mut self.alone, false) {
            self.greet();
        }
    }

    fn greet(&mut self) {
        if self.side == Side::Guest {
            // Another than any before, which may still be answered; and not 0.
            let mut random = [0; 8];
            let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
            self.number = u64::from_le_bytes(random).max(1);
            self.awaiting = true;
        }
        self.say_greeting(self.number);
    }

    fn say_greeting(&mut self, number: u64) {
        // What was not sent yet was for the program that was there before.
        self.out.clear();
        self.out.extend_from_slice(&greeting(number));
    }

    fn greeted(&mut self, number: u64) {
        match self.side {
            Side::Guest if number == self.number && self.awaiting => {
                self.awaiting = false;
                self.early.clear();
            }
            // A new broker, that cannot know whether it has been greeted.
            Side::Guest if number == 0 && !self.awaiting => return self.greet(),
            // It will answer, or this is an answer to something that was taken back.
            Side::Guest => return,
            Side::Host => {
                self.forget_links();
                self.early.clear();
                self.say_greeting(number);
                if let Some(pulse) = &mut self.pulse {
                    (pulse.told, pulse.looked) = (false, Instant::now());
                }
            }
        }
        self.tell(Notice::Up);
    }

    fn heard(&mut self, frame: Frame) {
        match frame {
            Frame::Control(message) => self.tell(Notice::Control(message)),
            // A side that does not take the answers is not asked to be answered more.
            Frame::Ping if self.out.len() < HIGH => Frame::Pong.encode(&mut self.out),
            // It was heard, which is all.
            Frame::Ping | Frame::Pong => {}
            // A link that is not, or no longer, there: the two ends may cross.
            Frame::Bell(id) => {
                if let Some(local) = self.links.get(&id) {
                    match &local.shortcut.event {
                        Some(event) => drop(rustix::io::write(event, &1u64.to_ne_bytes())),
                        None => local.link.ring(),
                    }
                }
            }
            Frame::Dropped(id) => {
                if let Some(local) = self.links.get(&id) {
                    local.link.say_dropped();
                }
            }
            Frame::HungUp(id) => self.said_of(id, Said::HungUp),
            Frame::RungBy { link, vector } => self.said_of(link, Said::RungBy { vector }),
            Frame::RingAs { link, peer } => self.said_of(link, Said::RingAs { peer }),
            Frame::Attach { link, generation, start, place } => {
                let memory = self.windows.get(&place.window).and_then(|w| w.memory.try_clone().ok());
                let RegionPlace { base, geometry, .. } = place;
                let delivered = match (self.links.get_mut(&link), memory) {
                    (None, _) => true,
                    (Some(_), None) => false,
                    (Some(local), Some(memory)) => {
                        local.deliver(Delivery { base, start, generation, geometry, memory })
                    }
                };
                // Memory that is not the other side's to give, or too much of it: this link is over.
                if !delivered {
                    self.close(link);
                }
            }
        }
    }

    /// Takes at most `most` from a link; `true` if there may be more.
    fn read_link(&mut self, id: u32, most: usize) -> bool {
        let mut rung = false;
        let more = (0..most).all(|_| self.read_packet(id, &mut rung));
        // One is as good as many, if it comes after the last of them: who heard an earlier one may be asleep again.
        if rung {
            self.ring(id);
        }
        more
    }

    /// Takes one packet from a link; `false` if there is none.
    fn read_packet(&mut self, id: u32, rung: &mut bool) -> bool {
        let Some(local) = self.links.get(&id).filter(|_| self.out.len() < HIGH) else { return false };
        match local.next() {
            None => return false,
            Some(Packet::RingAt(event)) => self.ring_at(id, event),
            Some(Packet::Event(Event::Bell)) => *rung = true,
            Some(Packet::Event(Event::Dropped)) => Frame::Dropped(id).encode(&mut self.out),
            Some(Packet::Event(Event::Attach { generation, geometry, start, base, memory })) => {
                let file = file_of(&memory);
                let window = self.windows.iter().find(|(_, known)| Some(known.file) == file).map(|(id, _)| *id);
                match window {
                    Some(window) if base != 0 => {
                        let place = RegionPlace { window, base, geometry };
                        Frame::Attach { link: id, generation, start, place }.encode(&mut self.out);
                    }
                    // Memory that the other side cannot have.
                    _ => self.close(id),
                }
            }
            // What to listen to is not for a process to say.
            Some(Packet::Listen(_) | Packet::Event(Event::HungUp | Event::TimedOut | Event::Corrupt(_))) => {
                self.close(id);
            }
        }
        true
    }

    /// Ends a link towards both sides.
    fn close(&mut self, id: u32) {
        if self.remove(id) {
            Frame::HungUp(id).encode(&mut self.out);
            self.tell(Notice::Closed(id));
        }
    }

    fn write_port(&mut self) -> Result<(), End> {
        while !self.out.is_empty() && !self.alone {
            match rustix::io::write(&self.port, &self.out) {
                Ok(n) => drop(self.out.drain(..n)),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(End::Down("the port was closed".into())),
                Err(e) => return Err(End::Down(e.to_string())),
            }
        }
        self.waiting.buffered.store(self.out.len(), Ordering::Relaxed);
        Ok(())
    }

    fn tell(&self, notice: Notice) {
        self.say.tell(notice);
    }
}

/// What is to be looked at.
struct Ready {
    /// Commands have come.
    told: bool,
    port: bool,
    links: Vec<u32>,
}

fn file_of(fd: &OwnedFd) -> Option<File> {
    let stat = rustix::fs::fstat(fd.as_fd()).ok()?;
    Some((stat.st_dev, stat.st_ino, stat.st_rdev))
}
