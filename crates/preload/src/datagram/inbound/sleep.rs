//! The rings of a socket on which a thread sleeps (protocol U6).

use super::DatagramRx;
use super::ring::{Inbound, wait_until_idle};
use crate::datagram::DatagramSocket;
use partywall_shm::half::{Fenced, SecondLook};
use std::sync::atomic::Ordering;

impl DatagramSocket {
    /// Closes the rings before a sleep on the socket of this generation (protocol U6). Returns `false` if a datagram lies in one already.
    pub(in crate::datagram) fn fall_asleep(&self, generation: u32) -> bool {
        self.fall_asleep_unless(generation, DatagramRx::is_waiting)
    }

    /// Like [`Self::fall_asleep`], with another reason to stay awake.
    pub(in crate::datagram) fn fall_asleep_unless(
        &self,
        generation: u32,
        is_news: impl FnOnce(&mut DatagramRx) -> bool,
    ) -> bool {
        self.sleepers.enter(generation);
        let Some(mut rx) = self.rx.hold() else { return true };
        let was_open = rx.open;
        if was_open {
            rx.open(false);
        }
        let closed = Fenced::after(());
        if was_open {
            // A sender that was interrupted in the middle of a datagram is checked again after a nap.
            rx.in_use().iter().for_each(wait_until_idle);
        }
        // Before the look: what comes between the two is found after a nap.
        rx.was_unsettled = rx.in_use().iter_mut().any(Inbound::awaits_more);
        if let SecondLook::Found(()) = closed.look(|| is_news(&mut rx).then_some(())) {
            self.rise(generation, &mut rx, true);
            return false;
        }
        rx.sweep();
        // EDGE inbound: as in `DatagramSocket::longest_sleep`.
        self.inbound.store(rx.count(), Ordering::Release);
        true
    }

    /// Opens the rings again after a sleep on the socket of this generation.
    pub(in crate::datagram) fn wake_up(&self, generation: u32, open: bool) {
        if let Some(mut rx) = self.rx.hold() {
            self.rise(generation, &mut rx, open);
        } else {
            self.sleepers.leave(generation);
        }
    }

    fn rise(&self, generation: u32, rx: &mut DatagramRx, open: bool) {
        let last = self.sleepers.leave(generation);
        if last && open && !rx.open && rx.count > 0 && self.may_have_rings() {
            rx.open(true);
        }
    }
}
