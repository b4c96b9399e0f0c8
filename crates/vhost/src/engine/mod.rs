//! The loop that serves all ports of a switch, in one thread.
//!
//! The loop looks at all transmit queues, for a while also without a doorbell, and sleeps when that finds nothing. An idle switch uses
//! no processor time. A frame for a receiver without buffers waits for a bounded time; then it is lost, and so are the next ones at
//! once, until that receiver takes frames again.

mod apply;
mod deliver;
mod transmit;

use crate::card::{self, Card, LISTENER, SOCKET, TAP, TOKEN_BITS};
use crate::config::{ListedPort, SwitchConfig};
use crate::control::{ControlRequest, EngineHandle, PortReport, SwitchReport};
use crate::handle::{Answer, Asked, RequestHandle};
use crate::offload::{LONG, LONGEST};
use crate::poller::{UNLIMITED, WatchSet, Watched};
use crate::port::PortSpec;
use crate::session::FrontendSession;
use crate::spin::{AdaptiveSpin, nanoseconds};
use crate::switch::{PortNumber, SourceGuard, Switch, SwitchOptions, TokenBucket};
use crate::tap::TapDevice;
use crate::transfer::ReceiveScratch;
use crate::{PortCounters, VhostError};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The time between two looks at old addresses, and at listeners that had to wait.
const TICK: u64 = 1_000_000_000;
/// Passes over the queues between two readings of the clock, while frames come.
const PASSES: u32 = 16;
/// Passes that find nothing between two readings of the clock. A reading takes as long as some passes, and frames wait for it.
const IDLE_PASSES: u32 = 4;
/// Frames, and pages of them, between two readings of the clock in the turns of ports.
const UNCLOCKED: usize = 64;
const PAGE: usize = 4096;
/// The time between two looks at everything but the queues, while the loop does not sleep.
const LOOK: u64 = 10_000;
/// The token of the control requests. Ports begin with 1.
const CONTROL: u64 = 0;

/// How a switch is run.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Folder of its sockets.
    pub folder: PathBuf,
    /// The options of the switch, which decides where frames go.
    pub switch: SwitchOptions,
    /// How long a frame waits for a receiver without buffers.
    pub hold: Duration,
    /// How long the loop looks at queues without finding anything before it sleeps, at most.
    pub spin: Duration,
}

impl EngineOptions {
    /// The usual ones, with sockets in `folder`.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            switch: SwitchOptions::default(),
            hold: Duration::from_millis(20),
            spin: Duration::from_micros(50),
        }
    }
}

#[derive(Debug)]
enum PortEnd {
    Card(Box<Card>),
    Uplink { device: TapDevice, waiting: Option<WaitingUplink>, buffer: Box<[u8]> },
}

/// An uplink from which nothing is read for a while.
#[derive(Debug, Clone, Copy)]
struct WaitingUplink {
    /// The length of the frame in its buffer that was read, and not handed over.
    frame: Option<usize>,
    parked: card::Parked,
}

#[derive(Debug)]
struct EnginePort {
    number: PortNumber,
    spec: PortSpec,
    counters: PortCounters,
    rate: Option<TokenBucket>,
    end: PortEnd,
}

impl EnginePort {
    /// Whether its turn could move a frame.
    fn may_send(&self) -> bool {
        match &self.end {
            PortEnd::Card(card) => card.has_offers(),
            PortEnd::Uplink { .. } => true,
        }
    }

    /// Serves what its front end asks for, and notices that the front end has gone.
    fn talk(&mut self) {
        let PortEnd::Card(card) = &mut self.end else { return };
        let Some(Err(e)) = card.session.as_mut().map(FrontendSession::serve) else { return };
        match e {
            VhostError::Closed => info!(port = %self.spec.name, "{e}"),
            e => {
                self.counters.broken += 1;
                warn!(port = %self.spec.name, "{e}");
            }
        }
        card.session = None;
        card.parked = Default::default();
    }
}

/// A switch and its ports.
#[derive(Debug)]
pub struct Engine {
    options: EngineOptions,
    /// The options that it was started with. They hold where the file says nothing.
    usual: EngineOptions,
    /// The file in force.
    config: Option<SwitchConfig>,
    start: Instant,
    poller: WatchSet,
    switch: Switch,
    ports: BTreeMap<PortNumber, EnginePort>,
    /// The numbers of all ports, in order.
    turns: Vec<PortNumber>,
    last_number: u32,
    requests: Receiver<Asked<ControlRequest>>,
    wake: Watched<Arc<OwnedFd>>,
    stopping: bool,
    scratch: Scratch,
    spent: SpentWork,
    /// The time, as it was read last.
    clock: u64,
    /// Frames and pages that were passed on since then.
    unclocked: usize,
    /// Receive queues that got frames in this turn.
    touched: Vec<(PortNumber, usize)>,
}

/// The cost of one frame.
#[derive(Debug, Clone, Copy, Default)]
struct SpentWork {
    /// Bytes of it, for each receiver.
    bytes: usize,
    /// Frames that were made of it.
    segments: usize,
}

#[derive(Debug, Default)]
struct Scratch {
    receive: ReceiveScratch,
    batch: transmit::TakenBatch,
    frame: Vec<u8>,
    /// A frame for an uplink, behind its header.
    uplink: Vec<u8>,
}

impl Engine {
    /// A switch without ports, and what it is asked by.
    pub fn new(options: EngineOptions) -> Result<(Self, EngineHandle), VhostError> {
        let poller = WatchSet::new()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags).map_err(VhostError::system("make an eventfd"))?);
        let (sender, requests) = channel();
        let handle = RequestHandle::new(sender, Arc::clone(&wake));
        let engine = Self {
            start: Instant::now(),
            switch: Switch::new(options.switch.clone()),
            ports: BTreeMap::new(),
            turns: Vec::new(),
            last_number: 0,
            requests,
            wake: poller.watch(wake, CONTROL)?,
            stopping: false,
            scratch: Scratch::default(),
            spent: SpentWork::default(),
            clock: 0,
            unclocked: 0,
            touched: Vec::new(),
            poller,
            usual: options.clone(),
            options,
            config: None,
        };
        Ok((engine, handle))
    }

    /// Serves until a request stops it.
    pub fn run(mut self) -> Result<(), VhostError> {
        let (mut events, mut tokens) = (Vec::with_capacity(64), Vec::new());
        let mut spin = AdaptiveSpin::new(self.options.spin);
        let (mut last_expiry, mut last_look, mut pass, mut idle) = (0, 0, 0_u32, 0_u32);
        while !self.stopping {
            let worked = self.serve();
            pass = pass.wrapping_add(1);
            idle = if worked { 0 } else { idle.wrapping_add(1) };
            if !pass.is_multiple_of(PASSES) && (worked || !idle.is_multiple_of(IDLE_PASSES)) {
                continue;
            }
            let mut now = self.read_clock();
            if worked {
                spin.worked(now);
            }
            let spinning = spin.goes_on(now);
            let mut sleep = 0;
            if !worked && !spinning {
                sleep = if self.arm() { 0 } else { self.next_deadline(now) };
            }
            if sleep > 0 || now.saturating_sub(last_look) >= LOOK {
                last_look = now;
                self.poller.wait(sleep, &mut events, &mut tokens)?;
            }
            if sleep > 0 {
                let awake = self.read_clock();
                spin.slept(now, awake, !tokens.is_empty());
                now = awake;
            }
            // A switch that has slept for long forgets old addresses before it does anything else.
            if now.saturating_sub(last_expiry) > TICK {
                last_expiry = now;
                self.switch.expire(now);
                for port in self.ports.values_mut() {
                    if let PortEnd::Card(card) = &mut port.end {
                        card.resume();
                    }
                }
            }
            for token in std::mem::take(&mut tokens) {
                self.handle(token);
            }
            events.clear();
        }
        for port in std::mem::take(&mut self.ports).into_values() {
            if let PortEnd::Uplink { device, .. } = port.end {
                device.release();
            }
        }
        Ok(())
    }

    fn now(&self) -> u64 {
        nanoseconds(self.start.elapsed())
    }

    fn read_clock(&mut self) -> u64 {
        (self.clock, self.unclocked) = (self.now(), 0);
        self.clock
    }

    /// The time of a turn. To read the clock takes a third of the time of a frame, and turns of a few frames are frequent.
    fn turn_time(&mut self) -> u64 {
        if self.unclocked >= UNCLOCKED { self.read_clock() } else { self.clock }
    }

    /// Notes the work of a turn.
    fn note_turn(&mut self, frames: usize, bytes: usize) {
        self.unclocked += frames + bytes / PAGE;
    }

    /// Gives each port a turn; whether any frame moved.
    fn serve(&mut self) -> bool {
        let mut worked = false;
        // No port comes or goes meanwhile.
        for at in 0..self.turns.len() {
            let Some(number) = self.turns.get(at).copied() else { break };
            if !self.ports.get(&number).is_some_and(EnginePort::may_send) {
                continue;
            }
            let Some(mut port) = self.ports.remove(&number) else { continue };
            worked |= self.transmit(&mut port);
            self.ports.insert(number, port);
            self.flush();
        }
        worked
    }

    fn handle(&mut self, token: u64) {
        if token == CONTROL {
            let _ = rustix::io::read(&**self.wake.get(), &mut [0_u8; 8]);
            while let Ok((request, answer)) = self.requests.try_recv() {
                let _ = answer.send(self.control(request));
            }
            return;
        }
        let number = PortNumber(u32::try_from(token >> TOKEN_BITS).unwrap_or(0));
        let Some(port) = self.ports.get_mut(&number) else { return };
        match token & ((1 << TOKEN_BITS) - 1) {
            LISTENER => {
                // The front end may have gone already, which is to be noticed before the next one is sent away.
                port.talk();
                let PortEnd::Card(card) = &mut port.end else { return };
                match card.accept(&self.poller, number) {
                    Ok(true) => info!(port = %port.spec.name, "a front end has connected"),
                    Ok(false) => {}
                    Err(e) => warn!(port = %port.spec.name, "{e}"),
                }
            }
            SOCKET => port.talk(),
            ring => {
                let PortEnd::Card(card) = &port.end else { return };
                let ring = usize::try_from(ring).unwrap_or(usize::MAX);
                if let Some(ring) = card.session.as_ref().and_then(|session| session.rings().get(ring)) {
                    ring.clear_kick();
                }
            }
        }
    }

    /// Asks all drivers to ring. `true` if one has offered something since the last look.
    fn arm(&mut self) -> bool {
        let mut found = false;
        let mut awaited = Vec::new();
        for port in self.ports.values_mut() {
            let card = match &mut port.end {
                PortEnd::Card(card) => card,
                PortEnd::Uplink { device, waiting, .. } => {
                    // The frames in its queue would end each sleep at once.
                    if let Some(waiting) = waiting {
                        device.pause();
                        awaited.extend(waiting.parked.on);
                    }
                    continue;
                }
            };
            let parked = card.parked;
            let Some(session) = &mut card.session else { continue };
            let (memory, rings) = session.parts();
            for (pair, parked) in parked.iter().enumerate() {
                let ring = &mut rings[2 * pair + 1];
                match parked {
                    Some(parked) => awaited.extend(parked.on),
                    None if ring.runs() => found |= ring.arm(memory.map()),
                    None => {}
                }
            }
        }
        for (number, ring, seen) in awaited {
            let Some(EnginePort { end: PortEnd::Card(card), .. }) = self.ports.get_mut(&number) else { continue };
            let Some(session) = &mut card.session else { continue };
            let (memory, rings) = session.parts();
            if rings[ring].runs() {
                found |= rings[ring].arm_behind(memory.map(), seen);
            }
        }
        found
    }

    /// Until the first of those that wait gives up. An idle switch has no deadline, and is woken only by an event.
    fn next_deadline(&self, now: u64) -> u64 {
        let ends = self.ports.values().flat_map(|port| match &port.end {
            PortEnd::Card(card) => card.parked.iter().flatten().map(|parked| parked.until).min(),
            PortEnd::Uplink { waiting, .. } => waiting.map(|waiting| waiting.parked.until),
        });
        let paused = self.ports.values().any(|port| match &port.end {
            PortEnd::Card(card) => card.is_paused(),
            PortEnd::Uplink { device, waiting, .. } => waiting.is_none() && device.is_paused(),
        });
        let longest = if paused { TICK } else { UNLIMITED };
        ends.min().map_or(longest, |end| end.saturating_sub(now).clamp(1, TICK))
    }

    fn control(&mut self, request: ControlRequest) -> Answer {
        match request {
            ControlRequest::Add { port } => {
                self.config.as_ref().map_or(Ok(()), |config| config.permits(&port))?;
                self.add(port).map(|path| serde_json::json!(path))
            }
            ControlRequest::Remove { name } => {
                let number = self.find(&name).ok_or_else(|| VhostError::Refused(format!("there is no port {name}")))?;
                if let Some((config, listed)) = self.listed(&name) {
                    let place = config.place(listed);
                    return Err(VhostError::Refused(format!(
                        "{place}, lists the port {name}: remove it from the file and reload"
                    )));
                }
                self.remove_port(number);
                Ok(serde_json::Value::Null)
            }
            ControlRequest::Apply { config } => self.apply(*config).map(|report| serde_json::json!(report)),
            ControlRequest::Reload => Err(VhostError::Refused("this switch has no file".into())),
            ControlRequest::Show => {
                let ports = self.ports.values().map(|port| self.report(port)).collect();
                let file = self.config.as_ref().map(|config| config.path.clone());
                serde_json::to_value(SwitchReport { ports, file }).map_err(|e| VhostError::Refused(e.to_string()))
            }
            ControlRequest::Table => {
                serde_json::to_value(self.switch.addresses(self.now())).map_err(|e| VhostError::Refused(e.to_string()))
            }
            ControlRequest::Stop => {
                self.stopping = true;
                Ok(serde_json::Value::Null)
            }
        }
    }

    fn find(&self, name: &str) -> Option<PortNumber> {
        self.ports.values().find(|port| port.spec.name == name).map(|port| port.number)
    }

    fn add(&mut self, spec: PortSpec) -> Result<PathBuf, VhostError> {
        spec.check()?;
        if self.find(&spec.name).is_some() {
            return Err(VhostError::Refused(format!("there is a port {} already", spec.name)));
        }
        for port in self.ports.values() {
            let mac = port.spec.mac.iter().find(|mac| spec.mac.contains(mac)).map(ToString::to_string);
            let ip = port.spec.ip.iter().find(|ip| spec.ip.contains(ip)).map(ToString::to_string);
            if let Some(address) = mac.or(ip) {
                return Err(VhostError::Refused(format!("{address} is fixed to the port {} already", port.spec.name)));
            }
        }
        let number = self.new_number();
        let (path, end) = self.open(number, &spec)?;
        self.insert(number, spec, end);
        Ok(path)
    }

    fn new_number(&mut self) -> PortNumber {
        self.last_number += 1;
        PortNumber(self.last_number)
    }

    /// The socket or the device of a new port.
    fn open(&self, number: PortNumber, spec: &PortSpec) -> Result<(PathBuf, PortEnd), VhostError> {
        if spec.tap {
            let device = TapDevice::open(&spec.name, &self.options.folder, &self.poller, card::token(number, TAP))?;
            let buffer = vec![0; LONG + LONGEST].into_boxed_slice();
            return Ok((PathBuf::from(&spec.name), PortEnd::Uplink { device, waiting: None, buffer }));
        }
        let path = spec.socket(&self.options.folder);
        let hold = nanoseconds(self.options.hold);
        let card = Card::listen(&path, spec.owner, &self.poller, number, hold)?;
        Ok((path, PortEnd::Card(Box::new(card))))
    }

    fn insert(&mut self, number: PortNumber, spec: PortSpec, end: PortEnd) {
        let now = self.now();
        self.switch.add(number, SourceGuard::new(spec.mac.clone(), spec.ip.clone()), now);
        let rate = spec.rate.map(|rate| rate_bucket(rate, now));
        info!(port = %spec.name, "the port was added");
        self.ports.insert(number, EnginePort { number, spec, counters: PortCounters::default(), rate, end });
        self.turns.push(number);
    }

    /// Removes a port; its name.
    fn remove_port(&mut self, number: PortNumber) -> Option<String> {
        let EnginePort { spec, end, .. } = self.ports.remove(&number)?;
        if let PortEnd::Uplink { device, .. } = end {
            device.remove();
        }
        self.turns.retain(|turn| *turn != number);
        self.switch.remove(number);
        info!(port = %spec.name, "the port was removed");
        Some(spec.name)
    }

    /// The entry of the file in force for a port.
    fn listed(&self, name: &str) -> Option<(&SwitchConfig, &ListedPort)> {
        let config = self.config.as_ref()?;
        Some((config, config.find(name)?))
    }

    fn report(&self, port: &EnginePort) -> PortReport {
        let connected = match &port.end {
            PortEnd::Card(card) => card.session.as_ref().is_some_and(|s| s.rings().iter().any(|ring| ring.runs())),
            PortEnd::Uplink { device, .. } => device.exists(),
        };
        let occupied = match &port.end {
            PortEnd::Card(card) => card.session.is_some(),
            PortEnd::Uplink { .. } => true,
        };
        let path = match &port.end {
            PortEnd::Card(card) => card.path().to_owned(),
            PortEnd::Uplink { .. } => PathBuf::from(&port.spec.name),
        };
        let listed = self.listed(&port.spec.name).map(|(config, listed)| config.place(listed));
        let (number, counters) = (port.number.0, port.counters);
        PortReport { number, port: port.spec.clone(), path, listed, connected, occupied, counters }
    }
}

/// The limit of a rate, in bytes a second.
fn rate_bucket(rate: u64, now: u64) -> TokenBucket {
    TokenBucket::new(rate, (rate / 20).max(LONGEST as u64), now)
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::driver::{DriverOptions, GuestDriver};
    use std::os::unix::net::UnixStream;

    #[test]
    fn front_end_that_reconnects_is_taken_in_any_order_of_events() {
        let folder = tempfile::tempdir().unwrap();
        let (mut engine, _handle) = Engine::new(EngineOptions::new(folder.path())).unwrap();
        let path = engine.add(PortSpec::new("a")).unwrap();
        let number = engine.find("a").unwrap();
        let [listener, socket] = [LISTENER, SOCKET].map(|part| card::token(number, part));
        for order in [[listener, socket], [socket, listener]] {
            let earlier = UnixStream::connect(&path).unwrap();
            engine.handle(listener);
            drop(earlier);
            let later = UnixStream::connect(&path).unwrap();
            for token in order {
                engine.handle(token);
            }
            let PortEnd::Card(card) = &engine.ports[&number].end else { panic!("the port has a card") };
            assert!(card.session.is_some(), "the front end is sent away");
            drop(later);
            engine.handle(socket);
        }
    }

    /// Runs a driver's part that waits for answers of the switch.
    fn with_driver<T: Send>(engine: &mut Engine, part: impl FnOnce() -> T + Send) -> T {
        let (mut events, mut tokens) = (Vec::with_capacity(8), Vec::new());
        std::thread::scope(|scope| {
            let part = scope.spawn(part);
            while !part.is_finished() {
                engine.serve();
                engine.poller.wait(1_000_000, &mut events, &mut tokens).unwrap();
                tokens.iter().for_each(|token| engine.handle(*token));
            }
            part.join().unwrap()
        })
    }

    #[test]
    fn receiver_with_too_few_buffers_is_asked_to_ring() {
        let folder = tempfile::tempdir().unwrap();
        let options = EngineOptions { hold: Duration::from_secs(3600), ..EngineOptions::new(folder.path()) };
        let (mut engine, _handle) = Engine::new(options).unwrap();
        let paths = ["a", "b"].map(|name| engine.add(PortSpec::new(name)).unwrap());
        let number = engine.find("b").unwrap();
        let options = DriverOptions { size: 8, ..DriverOptions::default() };
        let connect = || paths.map(|path| GuestDriver::connect(&path, options).unwrap());
        let [mut sender, mut receiver] = with_driver(&mut engine, connect);
        let frame = |to: u8, from: u8, body| {
            [&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5], &vec![0; body][..]].concat()
        };
        let send = |engine: &mut Engine, driver: &mut GuestDriver, frame: &[u8]| {
            assert!(driver.send(frame).unwrap());
            while engine.serve() {}
        };
        send(&mut engine, &mut receiver, &frame(1, 2, 46));
        // All buffers but one are filled. The next frame needs two.
        (0..7).for_each(|_| send(&mut engine, &mut sender, &frame(2, 1, 46)));
        let memory = receiver.memory().clone();
        receiver.receive.ring_if_wanted(&memory).unwrap();
        send(&mut engine, &mut sender, &frame(2, 1, 3000));
        let (mut events, mut tokens) = (Vec::with_capacity(8), Vec::new());
        engine.poller.wait(0, &mut events, &mut tokens).unwrap();
        tokens.iter().for_each(|token| engine.handle(*token));
        let received = |engine: &Engine| engine.ports[&number].counters.received;
        assert!(!engine.serve() && !engine.arm(), "the loop does not sleep");
        assert_eq!(received(&engine), 7);
        // The driver takes a frame, and offers its buffer again.
        assert!(receiver.take().unwrap().is_some());
        receiver.receive.ring_if_wanted(&memory).unwrap();
        engine.poller.wait(0, &mut events, &mut tokens).unwrap();
        assert_eq!(tokens, [card::token(number, 0)], "the driver does not ring");
        assert!(engine.serve());
        assert_eq!(received(&engine), 8);
    }
}
