//! A relay as a state machine without I/O: frames, packets and commands in, effects and bytes for the port out.
//!
//! ```text
//!   commands ------------------+
//!   bytes from the port -----+ |    +-----------+   RelayEffect: rings, deliveries, hang-ups, notices, doorbells
//!   packets of processes ----+-+--->| RelayCore |-------------------------------------------------------->
//!   time --------------------+ |    +-----------+   bytes for the port
//!   outcomes of effects -------+
//! ```
//!
//! Memory is opaque: the loop uses descriptors, tests use numbers. Everything that the other side or a process can make grow has a bound
//! here: early notices, memory that waits for a process, and bytes that wait for the port (protocol P5).

mod early;
mod effect;
mod link;
mod process;
mod pulse;
#[cfg(test)]
mod tests;

use super::{Heartbeat, Notice, PortSide};
use early::{EarlyNotices, LinkNotice};
use link::{LinkState, Shortcut};
use partywall_protocol::port::{Decoder, Frame, Item, PortError, greeting};
use partywall_protocol::window::WindowId;
use pulse::{HeartbeatStep, Pulse};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

pub(super) use effect::RelayEffect;
pub use link::LinkUse;
pub(super) use link::MemoryDelivery;

/// With this many bytes waiting for the port, processes have to wait too (protocol P5).
const HIGH: usize = 64 << 10;
/// With this many notices not taken, a host's relay does not read its port (protocol P5).
pub(super) const MOST_NOTICES: usize = 1024;
/// This many rings of a link go both by the device and by the port: the device may be told of the peer a moment after this relay.
const BOTH_WAYS: u64 = 2;

/// The side that has a doorbell device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DoorbellSide {
    None,
    Guest,
    Host,
}

/// The state of a relay. `M` is the memory of a window.
#[derive(Debug)]
pub(super) struct RelayCore<M> {
    side: PortSide,
    /// Makes random numbers, for greetings.
    random: fn() -> u64,
    decoder: Decoder,
    /// Bytes that the port has not taken yet.
    out: Vec<u8>,
    links: BTreeMap<u32, LinkState<M>>,
    early: EarlyNotices,
    windows: BTreeMap<WindowId, M>,
    doorbells: DoorbellSide,
    /// The number of this side's latest greeting; in the guest.
    number: u64,
    /// Whether that greeting still waits for its answer.
    awaiting: bool,
    /// It may have crossed a greeting of a host that will answer it.
    may_have_crossed: bool,
    /// On the host, if it has a heartbeat.
    pulse: Option<Pulse>,
    /// In the guest: no program has the other end of the port open.
    alone: bool,
    /// The guest gives up its windows to be migrated: its channels end as moved, until the next greeting (protocol G7.8).
    leaving: bool,
    /// Ends of all links of which the relay's owner has not heard. What it commands until then is meant for the other side as it was before.
    unheard: u32,
    effects: VecDeque<RelayEffect>,
}

impl<M: Clone> RelayCore<M> {
    /// A relay that has just greeted.
    pub(super) fn new(side: PortSide, heartbeat: Option<Heartbeat>, random: fn() -> u64, now: Instant) -> Self {
        let mut this = Self {
            side,
            random,
            decoder: Decoder::default(),
            out: Vec::new(),
            links: BTreeMap::new(),
            early: EarlyNotices::default(),
            windows: BTreeMap::new(),
            doorbells: DoorbellSide::None,
            number: 0,
            awaiting: false,
            may_have_crossed: false,
            pulse: heartbeat.map(|beat| Pulse::new(beat, now)),
            alone: false,
            leaving: false,
            unheard: 0,
            effects: VecDeque::new(),
        };
        this.greet();
        this
    }

    /// The next effect to carry out.
    pub(super) fn next_effect(&mut self) -> Option<RelayEffect> {
        self.effects.pop_front()
    }

    fn report(&mut self, notice: Notice) {
        self.effects.push_back(RelayEffect::Report(notice));
    }

    fn send(&mut self, frame: &Frame) {
        frame.encode(&mut self.out);
    }

    /// The relay ends: its links do, on both sides.
    pub(super) fn end(&mut self) {
        for link in self.forget_links() {
            self.send(&Frame::HungUp { link });
        }
    }
}

/// Bounds and the port's output.
impl<M> RelayCore<M> {
    /// Bytes for the port: none while its other end is not open.
    pub(super) fn output(&self) -> &[u8] {
        if self.alone { &[] } else { &self.out }
    }

    /// The port has taken this many of them.
    pub(super) fn written(&mut self, bytes: usize) {
        self.out.drain(..bytes.min(self.out.len()));
    }

    /// The number of bytes that wait for the port, also while its other end is not open.
    pub(super) fn waiting(&self) -> usize {
        self.out.len()
    }

    pub(super) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Whether packets of processes may be taken.
    pub(super) fn may_read_links(&self) -> bool {
        self.out.len() < HIGH
    }

    /// Whether the port may be read while this many bytes of commands and this many notices wait. A host does not read from a guest that
    /// does not read its answers, or that sends more than is taken in: what a guest says may have to be answered. A guest always
    /// reads, or both might wait for each other.
    pub(super) fn may_read_port(&self, queued: usize, notices: usize) -> bool {
        let behind = self.out.len().saturating_add(queued) >= HIGH || notices >= MOST_NOTICES;
        self.side == PortSide::Guest || !behind
    }

    /// How long nothing need happen, as far as the heartbeat goes.
    pub(super) fn patience(&self, now: Instant) -> Option<Duration> {
        self.pulse.as_ref()?.patience(now)
    }
}

/// Commands of the relay's owner.
impl<M: Clone> RelayCore<M> {
    /// Carries a link from now on.
    pub(super) fn link(&mut self, link: u32, carries: LinkUse) {
        self.links.insert(link, LinkState::new(carries));
        if self.doorbells == DoorbellSide::Guest {
            self.effects.push_back(RelayEffect::TakeVector(link));
        }
        for notice in self.early.take(link) {
            self.link_notice(link, notice);
        }
    }

    /// A number that the other side has given gets no link: the connection was refused.
    pub(super) fn forget_link(&mut self, link: u32) {
        if !self.links.contains_key(&link) {
            self.early.forget(link);
        }
    }

    /// Ends a link towards both sides.
    pub(super) fn hang_up(&mut self, link: u32) {
        let moved = self.links.get(&link).is_some_and(|state| state.moved && state.carries == LinkUse::Channel);
        if self.remove(link) {
            let frame =
                if moved && self.side == PortSide::Host { Frame::Moved { link } } else { Frame::HungUp { link } };
            self.send(&frame);
            self.report(Notice::Closed(link));
        }
    }

    /// The guest gives up its windows to be migrated.
    pub(super) fn leave(&mut self) {
        self.leaving = true;
    }

    /// The relay's owner has taken a notice that says that all links have ended ([`Notice::ends_links`]).
    pub(super) fn owner_heard(&mut self) {
        self.unheard = self.unheard.saturating_sub(1);
    }

    /// Whether commands about links, and messages, are for the other side as it was before: the relay's owner has not heard yet that it has begun
    /// again, or the other side has not answered this side's greeting, behind which it would take them for new.
    pub(super) fn is_owner_late(&self) -> bool {
        self.unheard > 0 || self.awaiting || self.alone
    }

    pub(super) fn control(&mut self, message: Vec<u8>) {
        self.send(&Frame::Control { message });
    }

    /// The doorbell device is replaced or removed. Vectors and peers of the old device are invalid, so all links lose their shortcuts.
    pub(super) fn doorbells(&mut self, side: DoorbellSide) {
        self.doorbells = side;
        self.links.values_mut().for_each(|state| state.shortcut = Shortcut::default());
    }

    /// The other side may name this window.
    pub(super) fn window(&mut self, id: WindowId, memory: M) {
        self.windows.insert(id, memory);
    }

    pub(super) fn forget_window(&mut self, id: WindowId) {
        self.windows.remove(&id);
    }

    pub(super) fn windows(&self) -> impl Iterator<Item = (WindowId, &M)> {
        self.windows.iter().map(|(id, memory)| (*id, memory))
    }
}

/// Input from the port, and output to it.
impl<M: Clone> RelayCore<M> {
    /// Bytes have come from the port. Commands that were given before them are to be reported before [`Self::heard`].
    pub(super) fn received(&mut self, bytes: &[u8]) {
        self.accompanied();
        self.decoder.push(bytes);
    }

    /// The other side has shown a sign of life.
    pub(super) fn heard(&mut self, now: Instant) {
        // It goes on where it was held up, so it has to begin again.
        if self.pulse.as_mut().is_some_and(|pulse| pulse.heard(now)) {
            self.send_greeting(0);
        }
    }

    /// Handles the next thing that the other side has said; `false` if there is none. Its effects come before the next.
    pub(super) fn next_item(&mut self, now: Instant) -> Result<bool, PortError> {
        match self.decoder.take() {
            Ok(Some(Item::Greeting(number))) => self.greeted(number, now),
            Ok(Some(Item::Frame(frame))) => self.frame(frame),
            Ok(None) => return Ok(false),
            Err(error) => {
                if matches!(error, PortError::Version(_)) && self.side == PortSide::Host {
                    // The guest cannot know the host's version otherwise.
                    self.send_greeting(0);
                }
                return Err(error);
            }
        }
        Ok(true)
    }

    /// The port has ended. In a guest this means that no program has the host's end open, and one may open it again later. On the host it
    /// is final, and this returns `false`.
    pub(super) fn port_ended(&mut self) -> bool {
        if self.side == PortSide::Host {
            return false;
        }
        if !std::mem::replace(&mut self.alone, true) {
            self.end_links();
            self.out.clear();
            self.report(Notice::Alone);
        }
        true
    }

    /// The other side knows no link any more. Frames that said so may have been discarded with all that came before a greeting.
    fn end_links(&mut self) {
        self.forget_links();
        self.early.clear();
    }

    /// A program has the other end of the port open, perhaps another program than before.
    pub(super) fn accompanied(&mut self) {
        if std::mem::replace(&mut self.alone, false) {
            self.greet();
        }
    }

    fn greet(&mut self) {
        if self.side == PortSide::Guest {
            self.end_links();
            // Another than any before, which may still be answered; and not 0.
            self.number = (self.random)().max(1);
            (self.awaiting, self.may_have_crossed) = (true, true);
        }
        self.send_greeting(self.number);
    }

    fn send_greeting(&mut self, number: u64) {
        // Unsent bytes were for the program that had the port before.
        self.out.clear();
        self.out.extend_from_slice(&greeting(number));
    }

    fn greeted(&mut self, number: u64, now: Instant) {
        match self.side {
            PortSide::Guest if number == self.number && self.awaiting => self.awaiting = false,
            // An answer to something that was taken back.
            PortSide::Guest if number != 0 => return,
            // A broker that has just started greets once, and will answer the greeting that crosses its own.
            PortSide::Guest if self.awaiting && std::mem::take(&mut self.may_have_crossed) => return,
            // A broker that cannot know whether it has been greeted. If another was, that one has ended before it could answer.
            PortSide::Guest => {
                self.greet();
                self.may_have_crossed = false;
                return;
            }
            PortSide::Host => {
                self.send_greeting(number);
                if let Some(pulse) = &mut self.pulse {
                    pulse.greeted(now);
                }
            }
        }
        self.end_links();
        self.leaving = false;
        self.report_end(Notice::Up);
    }

    /// Reports that the other side has begun again, or counts as gone.
    fn report_end(&mut self, notice: Notice) {
        self.unheard = self.unheard.saturating_add(1);
        self.report(notice);
    }

    fn frame(&mut self, frame: Frame) {
        // Links that a silent guest began would not end if it hung once more: its silence counts only once it has greeted.
        if self.pulse.as_ref().is_some_and(Pulse::is_to_greet) {
            return;
        }
        match frame {
            Frame::Control { message } => self.report(Notice::Control(message)),
            // A side that does not take the answers is not sent more of them.
            Frame::Ping {} if self.out.len() < HIGH => self.send(&Frame::Pong {}),
            // The other side was heard, which is all.
            Frame::Ping {} | Frame::Pong {} => {}
            Frame::Bell { link } => self.effect_on(link, RelayEffect::Ring(link)),
            Frame::Dropped { link } => self.effect_on(link, RelayEffect::SayDropped(link)),
            Frame::HungUp { link } => self.link_notice(link, LinkNotice::HungUp),
            Frame::Moved { link } => self.link_notice(link, LinkNotice::Moved),
            Frame::RungBy { link, vector } => self.link_notice(link, LinkNotice::RungBy { vector }),
            Frame::RingAs { link, peer } => self.link_notice(link, LinkNotice::RingAs { peer }),
            Frame::Attach { link, generation, geometry, start, base, window } => {
                match (self.links.get_mut(&link), self.windows.get(&window)) {
                    (None, _) => {}
                    // A bell takes no memory, and no descriptor of any kind.
                    (Some(state), _) if state.carries != LinkUse::Channel => self.hang_up(link),
                    // Memory that is not the other side's to give: this link is over.
                    (Some(_), None) => self.hang_up(link),
                    (Some(state), Some(memory)) => {
                        let memory = memory.clone();
                        state.pending.push_back(MemoryDelivery { base, start, generation, geometry, memory });
                        self.effects.push_back(RelayEffect::Deliver(link));
                    }
                }
            }
        }
    }

    /// Does something to a link, unless it is not, or no longer, there: the two ends may cross.
    fn effect_on(&mut self, link: u32, effect: RelayEffect) {
        if self.links.contains_key(&link) {
            self.effects.push_back(effect);
        }
    }

    fn link_notice(&mut self, link: u32, notice: LinkNotice) {
        let Some(state) = self.links.get_mut(&link) else { return self.early.keep(link, notice) };
        match (notice, self.doorbells) {
            (LinkNotice::HungUp, _) => state.ending = true,
            // Not for a guest to say: the host's relay knows which guest is being migrated.
            (LinkNotice::Moved, _) => (state.ending, state.moved) = (true, self.side == PortSide::Guest),
            (LinkNotice::RungBy { vector }, DoorbellSide::Host) if state.shortcut.vector.is_none() => {
                self.effects.push_back(match state.carries.passes_events() {
                    true => RelayEffect::PassVector { link, vector },
                    false => RelayEffect::KeepVector { link, vector },
                });
            }
            (LinkNotice::RingAs { peer }, DoorbellSide::Guest) => state.shortcut.peer = Some(peer),
            _ => {}
        }
    }

    /// Looks at the time.
    pub(super) fn beat(&mut self, now: Instant) {
        match self.pulse.as_mut().map_or(HeartbeatStep::Quiet, |pulse| pulse.beat(now)) {
            HeartbeatStep::Quiet => {}
            // A port that takes nothing is not filled with questions.
            HeartbeatStep::Ping if self.out.len() >= HIGH => {}
            HeartbeatStep::Ping => self.send(&Frame::Ping {}),
            HeartbeatStep::Silent => {
                // If the guest was only held up, it finds this when it goes on.
                self.end();
                self.report_end(Notice::Silent);
            }
        }
    }
}
