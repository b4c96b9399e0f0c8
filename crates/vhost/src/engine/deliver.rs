//! The delivery of frames to a port.

use super::transmit::Handed;
use super::{Engine, EnginePort, PortEnd, Scratch};
use crate::card::CardFormat;
use crate::offload::NetHeader;
use crate::switch::PortNumber;
use crate::tap::TapDevice;
use crate::transfer::{Delivery, FrameBytes};
use std::ops::ControlFlow;
use vm_memory::GuestMemoryMmap;

impl Engine {
    /// Gives a frame to a port. If it `may_wait` and the port's driver has no buffers now, nothing is lost yet.
    pub(super) fn deliver(
        &mut self,
        now: u64,
        to: PortNumber,
        header: &NetHeader,
        frame: &FrameBytes<'_>,
        may_wait: bool,
    ) -> Handed {
        let Some(port) = self.ports.get_mut(&to) else { return Handed::Done };
        let EnginePort { counters, end, spec, .. } = port;
        let card = match end {
            PortEnd::Card(card) => card,
            PortEnd::Uplink { device, .. } => {
                let whole = header.suits(device.accepts());
                let (count, done) = send_up(device, &mut self.scratch, header, frame, whole);
                if !whole {
                    self.spent.bytes += frame.length;
                    self.spent.segments += usize::try_from(count).unwrap_or(0);
                }
                counters.received += count;
                if done {
                    counters.received_bytes += frame.length as u64;
                } else {
                    counters.no_buffers += 1;
                }
                return Handed::Done;
            }
        };
        let Some(queue) = card.receive_ring(frame.head) else {
            counters.unplugged += 1;
            return Handed::Done;
        };
        let Some(session) = &mut card.session else { return Handed::Done };
        let format = CardFormat::of(session.features());
        let (table, rings) = session.parts();
        let ring = &mut rings[queue];
        let memory: &GuestMemoryMmap = table.map();
        let receive = &mut self.scratch.receive;
        let mut put = |frame: &FrameBytes<'_>, header: &NetHeader| {
            let header = |count| (header.bytes(count), format.header);
            receive.deliver(ring, memory, format.mergeable, header, frame)
        };
        let mut count = 0;
        let mut delivered;
        if header.suits(format.accepts) {
            self.spent.bytes += frame.length;
            // Judged where it is, and not moved first: a move reads more than was written last, and so waits until the stores into the
            // receiver's memory are done.
            match put(frame, header) {
                Ok(Delivery::Done) => {
                    counters.received += 1;
                    counters.received_bytes += frame.length as u64;
                    card.stalled = false;
                    self.touch(to, queue);
                    return Handed::Done;
                }
                other => delivered = other,
            }
        } else {
            delivered = Ok(Delivery::Done);
            let mut flat = std::mem::take(&mut self.scratch.frame);
            flat.clear();
            if frame.append_to(&mut flat).is_ok() {
                header.translate(&mut flat, |piece| {
                    delivered = put(&FrameBytes::flat(piece), &NetHeader::default());
                    if !matches!(delivered, Ok(Delivery::Done)) {
                        return ControlFlow::Break(());
                    }
                    count += 1;
                    ControlFlow::Continue(())
                });
                self.spent.bytes += frame.length;
                self.spent.segments += usize::try_from(count).unwrap_or(0);
            }
            self.scratch.frame = flat;
        }
        match delivered {
            Ok(Delivery::Done) => {
                counters.received += count;
                counters.received_bytes += frame.length as u64;
                card.stalled = false;
            }
            // A frame in pieces, some of which have gone, is not begun again.
            Ok(Delivery::Full) if may_wait && !card.stalled && count == 0 && card.patience.wait(now) == 0 => {
                let seen = ring.known();
                self.touch(to, queue);
                return Handed::Full(to, queue, seen);
            }
            Ok(Delivery::Full | Delivery::TooLarge) => counters.no_buffers += 1,
            Err(e) => {
                counters.broken += 1;
                tracing::warn!(port = %spec.name, "{e}");
                ring.give_up();
                return Handed::Done;
            }
        }
        self.touch(to, queue);
        Handed::Done
    }

    fn touch(&mut self, to: PortNumber, queue: usize) {
        if !self.touched.contains(&(to, queue)) {
            self.touched.push((to, queue));
        }
    }

    /// Shows drivers what they got, and wakes them.
    pub(super) fn flush(&mut self) {
        for (to, queue) in self.touched.drain(..) {
            let Some(EnginePort { end: PortEnd::Card(card), .. }) = self.ports.get_mut(&to) else { continue };
            let Some(session) = &mut card.session else { continue };
            let (memory, rings) = session.parts();
            rings[queue].publish(memory.map());
            rings[queue].notify(memory.map());
        }
    }
}

/// Sends a frame to an uplink, or what the switch makes of it if it does not go `whole`. Returns how many frames went, and whether all did.
fn send_up(
    device: &TapDevice,
    scratch: &mut Scratch,
    header: &NetHeader,
    frame: &FrameBytes<'_>,
    whole: bool,
) -> (u64, bool) {
    let Scratch { frame: flat, uplink, .. } = scratch;
    let mut send = |header: &NetHeader, frame: &FrameBytes<'_>| {
        uplink.clear();
        uplink.extend_from_slice(&header.bytes(0));
        frame.append_to(uplink).is_ok() && device.send(uplink)
    };
    if whole {
        let done = send(header, frame);
        return (u64::from(done), done);
    }
    flat.clear();
    let (mut count, mut done) = (0, frame.append_to(flat).is_ok());
    if done {
        header.translate(flat, |piece| {
            done = send(&NetHeader::default(), &FrameBytes::flat(piece));
            count += u64::from(done);
            if done { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
    }
    (count, done)
}
