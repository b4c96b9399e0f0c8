//! Carrying out what the relay's state machine decides.

use super::core::{RelayCore, RelayEffect};
use super::doorbells::Doorbells;
use super::local::LocalLink;
use super::memory::WindowMemory;
use super::notices::NoticeSender;
use rustix::fd::AsFd as _;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The objects that effects change.
#[derive(Debug)]
pub(super) struct Surroundings {
    pub(super) locals: BTreeMap<u32, LocalLink>,
    pub(super) doorbells: Doorbells,
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
                RelayEffect::Close(link) => self.locals.remove(&link).into_iter().for_each(LocalLink::close),
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

    fn doorbell(&mut self, effect: RelayEffect, core: &mut RelayCore<Arc<WindowMemory>>) {
        match (effect, &mut self.doorbells) {
            (RelayEffect::TakeVector(link), Doorbells::Guest(device)) => {
                let Some((vector, event)) = device.take() else { return };
                match self.locals.get(&link).map(|local| local.link.listen_to(event.as_fd())) {
                    Some(Ok(())) => core.vector_taken(link, vector),
                    _ => device.give_back(vector),
                }
            }
            (RelayEffect::GiveBackVector(vector), Doorbells::Guest(device)) => device.give_back(vector),
            (RelayEffect::RingPeer(peer), Doorbells::Guest(device)) => device.ring(peer),
            (RelayEffect::PassPeer { link, peer }, Doorbells::Guest(device)) => {
                if let Some(event) = device.ringer(peer)
                    && self.locals.get(&link).is_none_or(|local| local.link.ring_at(event.as_fd()).is_err())
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
            // There is no such device any more.
            _ => {}
        }
    }
}
