//! Carrying out what the relay's state machine decides.

use super::core::{LinkUse, RelayCore, RelayEffect};
use super::doorbells::{self, BellEvents, Doorbells, WaitingEvents};
use super::local::{LocalLink, RingingEvent};
use super::memory::WindowMemory;
use super::notices::NoticeSender;
use rustix::fd::{AsFd as _, OwnedFd};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// The objects that effects change.
#[derive(Debug)]
pub(super) struct Surroundings {
    pub(super) locals: BTreeMap<u32, LocalLink>,
    pub(super) doorbells: Doorbells,
    /// Events of bells, for the relay's owner.
    pub(super) bell_events: Arc<WaitingEvents>,
    pub(super) reports: NoticeSender,
    /// Bells that were delivered since this was last looked at.
    pub(super) rung: u64,
}

impl Surroundings {
    /// Carries out all that is to be done.
    pub(super) fn carry_out(&mut self, core: &mut RelayCore<Arc<WindowMemory>>) {
        while let Some(effect) = core.next_effect() {
            match effect {
                RelayEffect::Report(notice) => self.reports.report(notice),
                RelayEffect::Close(link) => {
                    self.bell_events.take(link);
                    self.locals.remove(&link).into_iter().for_each(LocalLink::close);
                }
                RelayEffect::Ring(link) => {
                    if let Some(local) = self.locals.get(&link) {
                        local.ring();
                        self.rung += 1;
                    }
                }
                RelayEffect::SayDropped(link) => {
                    self.locals.get(&link).into_iter().for_each(|local| local.link.say_dropped());
                }
                RelayEffect::SayMoved(link) => {
                    self.locals.get(&link).into_iter().for_each(|local| local.link.say_moved());
                }
                RelayEffect::Deliver(link) => self.deliver(link, core),
                doorbell => self.doorbell(doorbell, core),
            }
        }
    }

    /// Sends the memory that waits for a process, as far as there is room.
    pub(super) fn deliver(&self, link: u32, core: &mut RelayCore<Arc<WindowMemory>>) {
        while let (Some(delivery), Some(local)) = (core.next_delivery(link), self.locals.get(&link)) {
            if !local.deliver(delivery) {
                return core.not_delivered(link);
            }
            core.delivered(link);
        }
    }

    /// Leaves the events of a bell to the relay's owner, who gives them to the process. The relay keeps the one by which the process rings.
    fn hand_out(waiting: &WaitingEvents, link: u32, local: &mut LocalLink, heard: OwnedFd) -> io::Result<()> {
        let ringing = doorbells::event()?;
        if doorbells::take_signals(&ringing) != Err(Errno::AGAIN) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let event = ringing.try_clone()?;
        waiting.put(link, BellEvents { heard, ringing });
        local.ringing = Some(RingingEvent { event, is_bound: false });
        Ok(())
    }

    fn doorbell(&mut self, effect: RelayEffect, core: &mut RelayCore<Arc<WindowMemory>>) {
        match (effect, &mut self.doorbells) {
            (RelayEffect::TakeVector(link), Doorbells::Guest(device)) => {
                let Some((vector, event)) = device.take() else { return };
                let told = match self.locals.get_mut(&link) {
                    Some(local) if local.carries == LinkUse::Channel => local.link.listen_to(event.as_fd()),
                    Some(local) => Self::hand_out(&self.bell_events, link, local, event),
                    None => Err(io::ErrorKind::NotFound.into()),
                };
                match told {
                    Ok(()) => core.vector_taken(link, vector),
                    Err(_) => device.give_back(vector),
                }
            }
            (RelayEffect::GiveBackVector(vector), Doorbells::Guest(device)) => device.give_back(vector),
            (RelayEffect::RingPeer(peer), Doorbells::Guest(device)) => device.ring(peer),
            (RelayEffect::PassPeer { link, peer }, Doorbells::Guest(device)) => {
                let Some(local) = self.locals.get_mut(&link) else { return };
                if let Some(ringing) = &mut local.ringing {
                    ringing.is_bound = device.ring_upon(peer, ringing.event.as_fd());
                } else if let Ok(event) = doorbells::event()
                    && device.ring_upon(peer, event.as_fd())
                    && local.link.ring_at(event.as_fd()).is_err()
                {
                    device.forget(peer);
                }
            }
            (RelayEffect::ForgetPeer(peer), Doorbells::Guest(device)) => device.forget(peer),
            (RelayEffect::PassVector { link, vector }, Doorbells::Host(device)) => {
                if let (Some(event), Some(local)) = (device.event(vector), self.locals.get(&link)) {
                    // A link that is full of rings is rung by the port from then on.
                    let _ = local.link.ring_at(event.as_fd());
                    core.vector_passed(link, vector);
                }
            }
            (RelayEffect::KeepVector { link, vector }, Doorbells::Host(device)) => {
                if let (Some(event), Some(local)) = (device.event(vector), self.locals.get_mut(&link)) {
                    local.vector = Some(event);
                    core.vector_passed(link, vector);
                }
            }
            (RelayEffect::SignalVector(link), Doorbells::Host(_)) => {
                if let Some(event) = self.locals.get(&link).and_then(|local| local.vector.as_ref()) {
                    doorbells::signal(event);
                }
            }
            // There is no such device any more.
            _ => {}
        }
    }
}
