//! Connections whose addresses are translated on the way between two network namespaces, by masquerade for example (protocol T1.10, T5.8).
//!
//! The accepting side of such a connection cannot find the offer by its own two ends: it sees another connecting end than the offering side.
//! An offer to another namespace that is not taken at once is therefore also entered by its accepting end alone. All connections that
//! were accepted there may then ask for it, and the sequence numbers decide whose it is.

use partywall_protocol::directory::{DirectoryChange, Fingerprint};
use partywall_protocol::wire::Origin;

use super::facts::NumberedEnd;
use super::offer::Offer;
use super::{NamespaceId, SocketFacts};
use crate::core::id::ChannelId;
use crate::core::{Core, Descriptor};

impl<F: Descriptor> Core<F> {
    /// Whether [`CoreEvent::LookAtUntaken`](crate::core::CoreEvent::LookAtUntaken) means anything now.
    pub fn wants_look_at_untaken(&self) -> bool {
        !self.sockets.young.is_empty()
    }

    /// Enters the offers that were there at the last look, and are not taken yet, by their accepting end alone.
    pub(in crate::core) fn look_at_untaken(&mut self) {
        let newer = self.sockets.young.split_off(&self.sockets.looked_at);
        self.sockets.looked_at = self.next_channel;
        for id in std::mem::replace(&mut self.sockets.young, newer) {
            let Some(offer) = self.sockets.offers.get_mut(&id) else { continue };
            let on = offer.accepted_on;
            let Some(handshake) = offer.handshake_mut().filter(|handshake| handshake.far.is_some()) else { continue };
            handshake.is_shown_translated = true;
            let found = handshake.translated.iter().map(|f| DirectoryChange::Offer(*f)).collect();
            self.show_on(on, found);
        }
    }

    /// The offer was taken, or goes: no other connection need ask for it.
    pub(super) fn hide_translated(&mut self, id: ChannelId) {
        self.sockets.young.remove(&id);
        let Some(offer) = self.sockets.offers.get_mut(&id) else { return };
        let on = offer.accepted_on;
        let Some(handshake) = offer.handshake_mut() else { return };
        if !std::mem::take(&mut handshake.is_shown_translated) {
            return;
        }
        let gone = handshake.translated.iter().map(|f| DirectoryChange::NoOffer(*f)).collect();
        self.show_on(on, gone);
    }

    /// The offers whose accepting end and numbers are those of this accepting socket, and that fit: one, unless a machine lies.
    pub(super) fn translated_offers_of(
        &self,
        socket: &SocketFacts,
        fits: impl Fn(&Offer<F>) -> bool,
    ) -> Vec<ChannelId> {
        let all = NumberedEnd::from_accepting(socket).and_then(|end| self.sockets.translated.get(&end));
        let all = all.map_or(&[][..], Vec::as_slice);
        all.iter().copied().filter(|id| self.sockets.offers.get(id).is_some_and(&fits)).collect()
    }

    /// Counts a publication in a namespace. With the second namespace, addresses of connections may be translated.
    pub(super) fn namespace_gained(&mut self, namespace: NamespaceId) {
        let had = self.may_translate();
        *self.sockets.namespaces.entry(namespace).or_default() += 1;
        if !had && self.may_translate() {
            self.show_everywhere(&DirectoryChange::Address(Fingerprint::translators()));
        }
    }

    /// A publication in a namespace has gone.
    pub(super) fn namespace_lost(&mut self, namespace: NamespaceId) {
        let had = self.may_translate();
        if let Some(count) = self.sockets.namespaces.get_mut(&namespace) {
            *count -= 1;
            if *count == 0 {
                self.sockets.namespaces.remove(&namespace);
            }
        }
        if had && !self.may_translate() {
            self.show_everywhere(&DirectoryChange::NoAddress(Fingerprint::translators()));
        }
    }

    /// Whether programs under Partywall run in several network namespaces, here or in machines.
    pub(super) fn may_translate(&self) -> bool {
        self.sockets.namespaces.len() > 1
    }

    fn show_everywhere(&mut self, change: &DirectoryChange) {
        let machines = self.machines.with_directory();
        for to in machines.into_iter().map(Origin::Machine).chain([Origin::Host]) {
            self.show_on(to, vec![change.clone()]);
        }
    }
}
