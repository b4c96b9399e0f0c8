//! A driver that resets its card: it stops the queues, and starts them empty with another size and other features.

use super::{DriverRing, GuestDriver, RING_SPACE, failed};
use crate::VhostError;
use vhost::VhostBackend;
use virtio_bindings::virtio_ring;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The frames in the queues of a card that was stopped, each behind its header.
#[derive(Debug, Default)]
pub struct StoppedFrames {
    /// Those that had come.
    pub received: Vec<Vec<u8>>,
    /// Those that the switch has not taken.
    pub unsent: Vec<Vec<u8>>,
}

impl GuestDriver {
    /// Restarts both queues with `size` entries, at most as many as at the beginning, and with those of `features` that are offered.
    ///
    /// It fails if the switch stops with a chain that is neither completed nor left. A card with further pairs of queues cannot restart.
    pub fn restart(&mut self, size: u16, features: u64) -> Result<StoppedFrames, VhostError> {
        if !self.further.is_empty() || size > self.receive.room(&self.transmit) {
            return Err(failed("only one pair of queues restarts, and does not grow"));
        }
        for ring in [&self.receive, &self.transmit] {
            let base = self.frontend.get_vring_base(ring.index).map_err(failed)?;
            if base != u32::from(ring.visible(&self.memory.map)?) {
                return Err(failed(format!("the queue {} stops at {base}, and its completions do not", ring.index)));
            }
        }
        let mut stopped = StoppedFrames::default();
        while let Some(frame) = self.take()? {
            stopped.received.push(frame);
        }
        self.transmit.collect(&self.memory.map)?;
        stopped.unsent = self.transmit.offered_frames(&self.memory.map)?;
        self.features = self.frontend.get_features().map_err(failed)? & features;
        self.frontend.set_features(self.features).map_err(failed)?;
        for ring in [&mut self.receive, &mut self.transmit] {
            ring.reset(&self.memory.map, size, self.features)?;
            self.frontend.set_vring_num(ring.index, size).map_err(failed)?;
            self.frontend.set_vring_base(ring.index, 0).map_err(failed)?;
            self.frontend.set_vring_addr(ring.index, &ring.config()).map_err(failed)?;
            self.frontend.set_vring_kick(ring.index, &ring.kick).map_err(failed)?;
            self.frontend.set_vring_call(ring.index, &ring.call).map_err(failed)?;
        }
        while self.receive.offer_free(&self.memory.map)? {}
        self.receive.ring_kick()?;
        Ok(stopped)
    }
}

impl DriverRing {
    /// How many buffers there are between its own and those of the queue behind it.
    fn room(&self, behind: &Self) -> u16 {
        let room = (behind.buffers.0 - self.buffers.0) / u64::from(self.buffer.max(1));
        u16::try_from(room).unwrap_or(u16::MAX)
    }

    /// The bytes of the chains that are offered and not complete.
    fn offered_frames(&self, memory: &GuestMemoryMmap) -> Result<Vec<Vec<u8>>, VhostError> {
        let mut frames = Vec::new();
        for position in 0..self.next_available.wrapping_sub(self.next_used) {
            let slot = u64::from(self.next_used.wrapping_add(position) % self.size);
            let head: u16 = memory.read_obj(GuestAddress(self.available.0 + 4 + 2 * slot)).map_err(failed)?;
            let (mut id, mut frame) = (u16::from_le(head), Vec::new());
            loop {
                let mut bytes = [0; 16];
                let place = GuestAddress(self.descriptors.0 + 16 * u64::from(id));
                memory.read_slice(&mut bytes, place).map_err(failed)?;
                let [.., l0, l1, l2, l3, flags, _, n0, n1] = bytes;
                let start = frame.len();
                frame.resize(start + u32::from_le_bytes([l0, l1, l2, l3]) as usize, 0);
                memory.read_slice(&mut frame[start..], self.place(id)).map_err(failed)?;
                if u32::from(flags) & virtio_ring::VRING_DESC_F_NEXT == 0 {
                    break;
                }
                id = u16::from_le_bytes([n0, n1]);
            }
            frames.push(frame);
        }
        Ok(frames)
    }

    /// Makes it an empty queue of this size.
    pub(crate) fn reset(&mut self, memory: &GuestMemoryMmap, size: u16, features: u64) -> Result<(), VhostError> {
        memory.write_slice(&[0; RING_SPACE as usize], self.descriptors).map_err(failed)?;
        (self.size, self.next_available, self.rung, self.next_used) = (size, 0, 0, 0);
        // A queue of disk requests has no buffers, and its places are kept elsewhere.
        self.free = if self.buffer > 0 { (0..size).collect() } else { Default::default() };
        self.event_idx = features & (1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX) != 0;
        Ok(())
    }
}
